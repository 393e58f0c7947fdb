"""Summaries made before they are needed: once for a history, in the background, given up with the proxy."""

import asyncio

import pytest
import structlog
from structlog.testing import capture_logs

from proxy.errors import SummaryFailed
from proxy.summarizers.preparation import Preparations

pytestmark = pytest.mark.anyio


@pytest.fixture
async def prepared():
    made = Preparations(running=2, held=3)
    yield made
    await made.aclose()


def after(event, value):
    async def make():
        await event.wait()
        if isinstance(value, Exception):
            raise value
        return value

    return make


def at_once(value):
    async def make():
        return value

    return make


async def settled():
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_summary_is_there_once_it_is_made(prepared):
    ready = asyncio.Event()
    assert prepared.start(b"a", after(ready, "gist")) is True

    assert await prepared.take([b"a"]) is None
    ready.set()
    await settled()
    assert await prepared.take([b"x", b"a", b"b"]) == (1, "gist")


async def test_a_history_is_summed_up_once(prepared):
    assert prepared.start(b"a", at_once("first")) is True
    assert prepared.start(b"a", at_once("second")) is False
    await settled()

    assert prepared.start(b"a", at_once("third")) is False
    assert await prepared.take([b"a"]) == (0, "first")


async def test_the_longest_history_that_has_one_wins(prepared):
    prepared.start(b"a", at_once("short"))
    prepared.start(b"b", at_once("long"))
    await settled()

    assert await prepared.take([b"a", b"b", b"c"]) == (1, "long")


async def test_a_request_may_wait_for_it(prepared):
    ready = asyncio.Event()
    prepared.start(b"a", after(ready, "gist"))
    asyncio.get_running_loop().call_later(0.02, ready.set)

    assert await prepared.take([b"a"], wait=30) == (0, "gist")


async def test_a_request_waits_no_longer_than_it_may(prepared):
    prepared.start(b"a", after(asyncio.Event(), "never"))

    assert await prepared.take([b"a"], wait=0.01) is None


async def test_a_client_that_leaves_while_waiting_ends_nothing(prepared):
    ready = asyncio.Event()
    prepared.start(b"a", after(ready, "gist"))
    waiting = asyncio.ensure_future(prepared.take([b"a"], wait=30))
    await settled()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    ready.set()
    assert await prepared.take([b"a"], wait=30) == (0, "gist")


async def test_a_failure_may_be_tried_again_and_harms_nobody(prepared):
    ready = asyncio.Event()
    ready.set()
    prepared.start(b"a", after(ready, SummaryFailed("timeout")))

    assert await prepared.take([b"a"], wait=30) is None
    await settled()
    assert prepared.start(b"a", at_once("gist")) is True


async def test_a_defect_of_ours_is_logged_and_harms_nobody(prepared):
    structlog.reset_defaults()
    ready = asyncio.Event()
    ready.set()
    with capture_logs() as logs:
        prepared.start(b"a", after(ready, ZeroDivisionError()))
        assert await prepared.take([b"a"], wait=30) is None
        await settled()

    assert [entry["log_level"] for entry in logs] == ["error"]


async def test_only_so_many_are_made_at_once(prepared):
    never = asyncio.Event()

    assert [prepared.start(key, after(never, "")) for key in (b"a", b"b", b"c")] == [True, True, False]


async def test_one_caller_does_not_take_the_places_of_all():
    prepared = Preparations(running=4, each=2)
    never = asyncio.Event()
    callers = (b"one", b"one", b"one", b"other")

    started = [prepared.start(bytes([i]), after(never, ""), owner) for i, owner in enumerate(callers)]

    assert started == [True, True, False, True]
    await prepared.aclose()


async def test_only_so_many_are_kept(prepared):
    for key in (b"a", b"b", b"c", b"d"):
        prepared.start(key, at_once("gist"))
        await settled()

    assert await prepared.take([b"a"]) is None
    assert await prepared.take([b"d"]) == (0, "gist")


async def test_closing_ends_what_is_under_way(prepared):
    ended = []

    async def make():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    prepared.start(b"a", make)
    await settled()
    await prepared.aclose()

    assert ended == [True]

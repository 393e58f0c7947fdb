"""Notices of events: one POST each with figures only, in the background, tried again, and counted when nobody takes them."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Awaitable, Callable, Iterator
from urllib.parse import urlsplit

import pytest
from builders import agent_session, chat, user
from fakes import Received, Reply, ScriptedUpstream
from running import RunningProxy, running_proxy

from proxy.config import load, masked
from proxy.errors import ConfigError
from proxy.notify import Notifier


@pytest.fixture
def receiver() -> Iterator[ScriptedUpstream]:
    yield from ScriptedUpstream().start()


def hook(receiver: ScriptedUpstream) -> str:
    return receiver.url + "/hooks/a%2Fb/?key=1"


@pytest.fixture
def proxy(upstream: ScriptedUpstream, receiver: ScriptedUpstream) -> Iterator[RunningProxy]:
    environment = {"COMPACTION_NOTIFY__WEBHOOK": hook(receiver), "COMPACTION_NOTIFY__BACKOFF_S": "0.02"}
    with running_proxy("--upstream", upstream.url, environment=environment) as running:
        yield running


def send(proxy: RunningProxy, body: bytes) -> http.client.HTTPMessage:
    connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", body)
        answer = connection.getresponse()
        answer.read()
        return answer.headers
    finally:
        connection.close()


def soon(check: Callable[[], bool]) -> bool:
    for _ in range(500):
        if check():
            return True
        time.sleep(0.01)
    return False


def test_an_event_is_posted_with_its_figures_and_nothing_that_was_said(
    proxy: RunningProxy, upstream: ScriptedUpstream, receiver: ScriptedUpstream
) -> None:
    headers = send(proxy, chat(agent_session(30, 300, system="CANARY-SYSTEM"), model="gpt-4"))

    assert soon(lambda: len(receiver.received) == 1)
    notice = receiver.received[0]
    before, after = (int(headers[f"x-compaction-tokens-{what}"]) for what in ("before", "after"))
    assert (notice.method, notice.target) == ("POST", "/hooks/a%2Fb/?key=1")
    assert notice.header("content-type") == "application/json"
    assert list(notice.json) == [
        *("event", "time", "outcome", "model", "tokens_before", "tokens_after", "saved_share", "layers"),
    ]
    assert (notice.json["event"], notice.json["outcome"], notice.json["model"]) == ("context_compacted", "applied", "gpt-4")
    assert (notice.json["tokens_before"], notice.json["tokens_after"]) == (before, after)
    assert notice.json["saved_share"] == pytest.approx(1 - after / before, abs=1e-4)
    assert sum(layer["saved"] for layer in notice.json["layers"]) == before - after
    assert abs(notice.json["time"] - time.time()) < 60
    assert b"CANARY" not in notice.body


def test_what_fits_is_not_posted(proxy: RunningProxy, upstream: ScriptedUpstream, receiver: ScriptedUpstream) -> None:
    send(proxy, chat([user("hi")], model="gpt-4"))
    send(proxy, chat(agent_session(30, 300), model="gpt-4"))

    assert soon(lambda: len(receiver.received) >= 1)
    assert [one.json["tokens_before"] > 5_000 for one in receiver.received] == [True]


def test_a_receiver_that_fails_at_first_gets_it_later(
    proxy: RunningProxy, upstream: ScriptedUpstream, receiver: ScriptedUpstream
) -> None:
    def third_time(_: Received) -> Reply:
        return Reply(status=204 if len(receiver.received) > 2 else 503, chunks=[b""])

    receiver.script = third_time

    send(proxy, chat(agent_session(30, 300), model="gpt-4"))

    assert soon(lambda: len(receiver.received) == 3)
    assert len({one.body for one in receiver.received}) == 1


def test_requests_do_not_wait_for_a_receiver_that_hangs(
    proxy: RunningProxy, upstream: ScriptedUpstream, receiver: ScriptedUpstream
) -> None:
    receiver.script = lambda _: Reply(delay=3.0, chunks=[b"{}"])

    outcomes = [send(proxy, chat(agent_session(30, 300, module=f"m{n}"), model="gpt-4"))["x-compaction"] for n in range(3)]

    assert outcomes == ["applied", "applied", "applied"]
    assert len(receiver.received) <= 1


def test_what_nobody_takes_is_dropped_and_counted(
    proxy: RunningProxy, upstream: ScriptedUpstream, receiver: ScriptedUpstream
) -> None:
    receiver.script = lambda _: Reply(status=404, chunks=[b"{}"])

    send(proxy, chat(agent_session(30, 300), model="gpt-4"))

    assert soon(lambda: any("could not be delivered" in line for line in proxy.errors))
    connection = http.client.HTTPConnection(urlsplit(proxy.admin).netloc, timeout=30)
    connection.request("GET", "/metrics")
    scrape = connection.getresponse().read().decode()
    connection.close()
    assert 'compaction_notifications_total{result="dropped"} 1.0' in scrape
    assert 'compaction_notifications_total{result="sent"} 0.0' in scrape
    assert len(receiver.received) == 1
    assert not any("hooks" in line for line in proxy.errors)


async def delivered(notifier: Notifier, done: Callable[[], bool]) -> None:
    for _ in range(500):
        if done():
            break
        await asyncio.sleep(0.01)
    await notifier.aclose()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


def test_it_gives_up_after_so_many_tries(receiver: ScriptedUpstream) -> None:
    receiver.script = lambda _: Reply(status=500, chunks=[b""])
    counted: list[str] = []

    async def work() -> None:
        notifier = Notifier(hook(receiver), counted.append, attempts=3, backoff=0.01)
        notifier.notice(b"{}")
        await delivered(notifier, lambda: bool(counted))

    run(work)

    assert counted == ["dropped"]
    assert len(receiver.received) == 3


def test_a_receiver_that_takes_too_long_is_given_up(receiver: ScriptedUpstream) -> None:
    receiver.script = lambda _: Reply(delay=2.0, chunks=[b"{}"])
    counted: list[str] = []

    async def work() -> None:
        notifier = Notifier(hook(receiver), counted.append, attempts=2, backoff=0.01, timeout=0.05)
        notifier.notice(b"{}")
        await delivered(notifier, lambda: bool(counted))

    run(work)

    assert counted == ["dropped"]


def test_more_than_may_wait_are_dropped(receiver: ScriptedUpstream) -> None:
    counted: list[str] = []

    async def work() -> None:
        notifier = Notifier(hook(receiver), counted.append, waiting=2)
        for n in range(5):
            notifier.notice(b"%d" % n)
        assert counted == ["dropped", "dropped", "dropped"]
        await delivered(notifier, lambda: len(counted) == 5)

    run(work)

    assert counted == [*["dropped"] * 3, "sent", "sent"]
    assert [one.body for one in receiver.received] == [b"0", b"1"]


def test_what_waits_at_the_end_is_still_sent(receiver: ScriptedUpstream) -> None:
    counted: list[str] = []

    async def work() -> None:
        notifier = Notifier(hook(receiver), counted.append)
        notifier.notice(b"{}")
        await notifier.aclose()

    run(work)

    assert counted == ["sent"]


def test_the_webhooks_url_is_a_secret() -> None:
    config = load({"notify": {"webhook": "https://hooks.example/T0/B0/secret"}}, {})

    assert masked(config)["notify"]["webhook"] == "***"


@pytest.mark.parametrize("wrong", ["hooks.example", "ftp://hooks.example", "https://name:word@hooks.example/x"])
def test_a_wrong_webhook_is_named_and_not_shown(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"notify\.webhook") as refused:
        load({"notify": {"webhook": wrong}}, {})

    assert wrong not in str(refused.value)


@pytest.mark.parametrize("key", ["timeout_s", "attempts", "backoff_s", "waiting"])
def test_figures_of_nothing_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"notify\.{key}"):
        load({"notify": {key: 0}}, {})


def test_the_token_of_explanations_is_a_secret() -> None:
    assert masked(load({"explain": {"token": "let-me-see"}}, {}))["explain"]["token"] == "***"

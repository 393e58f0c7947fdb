"""Work beside the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from proxy.threads import Threads

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize("turns", range(6))
async def test_who_is_called_off_just_when_the_work_ends_does_not_go_on(turns: int) -> None:
    threads = Threads(1)
    waiting = asyncio.ensure_future(threads.within(60.0, lambda: 42))
    await asyncio.sleep(0)
    time.sleep(0.05)  # the loop learns of the work's end in one of the next turns
    for _ in range(turns):
        await asyncio.sleep(0)

    in_time = waiting.cancel()
    await asyncio.wait({waiting})

    assert waiting.cancelled() is in_time
    threads.close()


async def test_work_that_takes_too_long_has_no_result() -> None:
    threads = Threads(1)

    assert await threads.within(0.01, lambda: time.sleep(0.2)) is None
    assert await threads.within(60.0, lambda: 42) == 42
    threads.close()

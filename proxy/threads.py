"""Work beside the event loop, so that it serves everyone else meanwhile, and how long it may take."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from proxy.conversation import Conversation
from proxy.tokens import Ruler

T = TypeVar("T")

INLINE_BYTES = 32 * 1024
"""Uncached text up to this size is counted on the event loop (about 2 ms); a thread costs more than it saves."""


class Deadline:
    """Until when a request may be held up by us: one for all that is done for it."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.monotonic(), seconds

    def left(self) -> float:
        """Seconds until it, never below 0."""
        return max(0.0, self._start + self._seconds - time.monotonic())

    def passed(self, share: float = 1.0) -> Callable[[], bool]:
        """Asks whether this share of the time is over."""
        return lambda: time.monotonic() - self._start > self._seconds * share

    def put_off(self, seconds: float) -> None:
        """Somebody wanted to wait for so long: that is not our time."""
        self._start += seconds


class Threads:
    """A few worker threads. Work that passed its deadline goes on in its thread until it asks for the time itself."""

    def __init__(self, count: int = 2) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="compaction")

    async def total(self, ruler: Ruler, conversation: Conversation) -> int:
        if ruler.cold_bytes(conversation.messages, INLINE_BYTES) <= INLINE_BYTES:
            return ruler.total(conversation.messages)
        return await self.run(lambda: ruler.total(conversation.messages))

    async def run(self, work: Callable[[], T]) -> T:
        # a thread does not inherit what is in force here: the key that summaries are sealed with
        inherited = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: inherited.run(work))

    async def within(self, seconds: float, work: Callable[[], T]) -> T | None:
        """The work's result, None when the time passes first."""
        try:
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 may swallow a cancellation
                return await self.run(work)
        except TimeoutError:
            return None

    def close(self) -> None:
        """Lets the threads end; what waits for one is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

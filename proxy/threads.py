"""Work beside the event loop, so that it serves everyone else meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from proxy.conversation import Conversation
from proxy.tokens.chat import ChatRuler

T = TypeVar("T")

INLINE_BYTES = 32 * 1024
"""Uncached text up to this size is counted on the event loop (about 2 ms); a thread costs more than it saves."""


class Threads:
    """A few worker threads. Work that passed its deadline goes on in its thread until it asks for the time itself."""

    def __init__(self, count: int = 2) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="compaction")

    async def total(self, ruler: ChatRuler, conversation: Conversation) -> int:
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
            return await asyncio.wait_for(self.run(work), seconds)
        except TimeoutError:
            return None

    def close(self) -> None:
        """Lets the threads end; what waits for one is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

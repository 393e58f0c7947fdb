"""Summaries made in the background: asked for early, one at a time for a history, there when the next event comes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import structlog

from proxy.errors import SummaryFailed

T = TypeVar("T")

_log = structlog.get_logger("proxy.summarizers")

RUNNING, RUNNING_EACH, HELD = 8, 2, 512
"""Summaries under way at once, those of one owner, and those kept: a model's time is money."""

HELD_BYTES = 64 * 1024 * 1024
"""Of the conversations that the kept ones sum up: each holds its messages until it is adopted or forgotten."""


class Preparations(Generic[T]):
    """Tasks by the key of the history that they sum up. A task that failed is forgotten, so that it may be tried again."""

    def __init__(self, running: int = RUNNING, each: int = RUNNING_EACH, held: int = HELD, held_bytes: int = HELD_BYTES) -> None:
        self._running, self._each, self._held, self._held_bytes = running, each, held, held_bytes
        self._tasks: OrderedDict[bytes, asyncio.Task[T]] = OrderedDict()
        self._owners: dict[bytes, bytes] = {}
        self._sizes: dict[bytes, int] = {}

    def has(self, keys: Sequence[bytes]) -> bool:
        """Whether one of these is under way or done."""
        return any(key in self._tasks for key in keys)

    def start(self, key: bytes, make: Callable[[], Awaitable[T]], owner: bytes = b"", size: int = 0) -> bool:
        """True when `make` was started; False when one for this key is under way or done, or too many are under way.

        make: may raise SummaryFailed. owner: who pays, so that one caller cannot take the places of all. size: bytes that it
        keeps from being freed.
        """
        owners = list(self._owners.values())
        if key in self._tasks or len(owners) >= self._running or owners.count(owner) >= self._each:
            return False
        task = asyncio.ensure_future(_made(make))
        self._tasks[key], self._owners[key], self._sizes[key] = task, owner, size
        task.add_done_callback(lambda done: self._settle(key, done))
        while len(self._tasks) > self._held or (len(self._tasks) > 1 and sum(self._sizes.values()) > self._held_bytes):
            self._drop(next(iter(self._tasks)))
        return True

    async def take(self, keys: Sequence[bytes], wait: float = 0.0) -> tuple[int, T] | None:
        """What was made for the last of these keys that has something, with its index; waits at most so many seconds."""
        for index in range(len(keys) - 1, -1, -1):
            task = self._tasks.get(keys[index])
            if task is None:
                continue
            if not task.done() and wait > 0:
                await asyncio.wait([task], timeout=wait)
            if task.done() and not task.cancelled() and task.exception() is None:
                return index, task.result()
        return None

    async def aclose(self) -> None:
        """Ends what is under way."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._sizes.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _settle(self, key: bytes, done: asyncio.Task[T]) -> None:
        self._owners.pop(key, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None and self._tasks.get(key) is done:
            del self._tasks[key], self._sizes[key]
        if error is not None and not isinstance(error, SummaryFailed):
            _log.error("a summary could not be prepared", exc_info=error)

    def _drop(self, key: bytes) -> None:
        del self._sizes[key]
        self._tasks.pop(key).cancel()


async def _made(make: Callable[[], Awaitable[T]]) -> T:
    return await make()

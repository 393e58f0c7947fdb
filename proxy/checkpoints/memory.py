"""Checkpoints in this process: bounded in bytes, least recently used first out."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from proxy.checkpoints.checkpoint import Checkpoint


class MemoryStore:
    """The store of a single worker, and the first place to look in front of any other.

    ttl: seconds without use. clock: monotonic seconds, so that a changed wall clock drops nothing.
    """

    def __init__(self, *, ttl: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl, self._limit, self._clock = ttl, max_bytes, clock
        self._held: OrderedDict[bytes, tuple[Checkpoint, float]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held, about."""
        return self._size

    def __len__(self) -> int:
        return len(self._held)

    async def get_longest(self, keys: Sequence[bytes]) -> tuple[int, Checkpoint] | None:
        for index in range(len(keys) - 1, -1, -1):
            found = self._fresh(keys[index])
            if found is not None:
                self._held[keys[index]] = (found, self._clock())
                self._held.move_to_end(keys[index])
                return index, found
        return None

    async def put_if_absent(self, key: bytes, value: Checkpoint) -> bool:
        if self._fresh(key) is not None:
            return False
        self._held[key] = (value, self._clock())
        self._size += value.size
        while self._size > self._limit and self._held:
            self._drop(next(iter(self._held)))
        return True

    async def aclose(self) -> None:
        self._held.clear()
        self._size = 0

    def _fresh(self, key: bytes) -> Checkpoint | None:
        value, used = self._held.get(key, (None, 0.0))
        if value is not None and self._clock() - used > self._ttl:
            self._drop(key)
            return None
        return value

    def _drop(self, key: bytes) -> None:
        self._size -= self._held.pop(key)[0].size

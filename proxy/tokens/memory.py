"""What was counted before, so that a conversation that comes again is looked up and not counted."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Remembered(Generic[Key]):
    """What was counted before, bounded in bytes: key → tokens. Reads take no lock.

    Two generations: new entries go to the young one; when it holds half of the bytes it becomes the old one, and what was
    old and not asked for again is forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._young: dict[Key, tuple[int, int]] = {}
        self._old: dict[Key, tuple[int, int]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> int | None:
        """The tokens of `key`, or None."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is None:
                return None
            self.put(key, *found)
        return found[0]

    def __contains__(self, key: object) -> bool:
        return key in self._young or key in self._old

    def put(self, key: Key, tokens: int, size: int) -> None:
        """Remember the tokens of `key`, which holds about `size` bytes; what would fill half of the room is not kept."""
        if size > self._half:
            return
        with self._lock:
            if key in self._young:
                return
            if self._bytes + size > self._half:
                self._old, self._young, self._bytes = self._young, {}, 0
            self._young[key] = tokens, size
            self._bytes += size

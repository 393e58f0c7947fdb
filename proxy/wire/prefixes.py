"""Histories that came before: a body that begins with the very bytes of one is read from there on.

Agents send their whole history with every turn. Two bodies that begin with the same bytes mean the same as far as that goes,
so what was understood of the first is taken up for the second. The bytes themselves are compared, never a digest of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.conversation import Messages

LANDMARKS = (512 * 1024, 64 * 1024, 8 * 1024, 512)
"""Offsets whose bytes find a history among others; a shorter one is read anew faster than it is found."""
LANDMARK = 64
HELD_BESIDE = 4096
"""Bytes that a history holds beside its own, about: what was noted of it."""
MESSAGE_BESIDE = 500
"""Bytes that a message takes beside its JSON, about: objects, its text, its places. Short ones are ten times what they say."""
MOST_ALIKE = 32
"""Histories with the same landmark that are tried: parallel agents share their instructions and differ after them. With as many
of them a request takes half of what it takes when their histories are not found, with more there is nothing to win."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The beginning of a body, up to the end of a message. fields: those that stand before the messages."""

    prefix: bytes = field(repr=False)
    messages: Messages = field(repr=False)
    fields: Mapping[str, bytes] = field(repr=False)


class Prefixes:
    """The histories seen last, bounded in bytes."""

    def __init__(self, max_bytes: int = 32 * 1024 * 1024, landmarks: tuple[int, ...] = LANDMARKS) -> None:
        self._limit, self._landmarks = max_bytes, landmarks
        self.shortest = min(landmarks) + LANDMARK
        self._size = 0
        self._known: OrderedDict[Known, tuple[bytes, int]] = OrderedDict()
        self._newest: Known | None = None
        self._places: dict[tuple[bytes, int], list[Known]] = {}
        self._lock = threading.Lock()

    def find(self, body: bytes) -> Known | None:
        """The longest known history that the body begins with."""
        size = len(body)
        for offset in self._landmarks:
            if size < offset + LANDMARK:
                continue
            begins = [known for known in self._places.get(_place(body, offset), ()) if body.startswith(known.prefix)]
            if begins:
                return begins[0] if len(begins) == 1 else max(begins, key=_length)
        return None

    def keep(self, known: Known, instead_of: Known | None = None) -> None:
        """Remember a history; the one that it grew from goes."""
        offset = next((offset for offset in self._landmarks if len(known.prefix) >= offset + LANDMARK), None)
        if offset is None or len(known.prefix) > self._limit // 4:
            return
        place = _place(known.prefix, offset)
        with self._lock:
            if instead_of is not None:
                self._forget(instead_of)
            self._known[known] = place
            self._newest = known
            # a new list, because `find` reads without the lock
            alike = [known, *self._places.get(place, ())]
            self._places[place] = alike[:MOST_ALIKE]
            self._size += _weight(known)
            for surplus in alike[MOST_ALIKE:]:
                self._forget(surplus)
            while self._size > self._limit:
                self._forget(next(iter(self._known)))

    def used(self, known: Known) -> None:
        """It is the one to forget last."""
        if self._newest is known:
            return
        with self._lock:
            if known in self._known:
                self._known.move_to_end(known)
                self._newest = known

    def _forget(self, known: Known) -> None:
        place = self._known.pop(known, None)
        if place is None:
            return
        if self._newest is known:
            self._newest = None
        self._size -= _weight(known)
        alike = [other for other in self._places.get(place, ()) if other is not known]
        if alike:
            self._places[place] = alike
        else:
            self._places.pop(place, None)


def _place(body: bytes, offset: int) -> tuple[bytes, int]:
    return body[offset : offset + LANDMARK], offset


def _length(known: Known) -> int:
    return len(known.prefix)


def _weight(known: Known) -> int:
    return len(known.prefix) + HELD_BESIDE + MESSAGE_BESIDE * len(known.messages)

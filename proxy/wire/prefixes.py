"""Histories that came before: a body that begins with the very bytes of one is read from there on.

Agents send their whole history with every turn. Two bodies that begin with the same bytes mean the same as far as that goes,
so what was understood of the first is taken up for the second. The bytes themselves are compared, never a digest of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from proxy.conversation import Messages
from proxy.wire import Request

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


# A Struct, because each turn of a conversation makes one
class Known(msgspec.Struct, frozen=True, eq=False):
    """The beginning of a body, up to the end of a message. fields: those that stand before the messages.

    rest: what came after it, and the request that this came to: most turns of a conversation end as the one before.
    size: bytes of both together.
    """

    prefix: bytes
    fields: Mapping[str, bytes]
    rest: bytes
    messages: Messages
    request: Request
    size: int

    def __repr__(self) -> str:
        return f"Known({len(self.messages)} messages)"  # what a client said is shown to nobody


_Alike = dict[bytes, list[Known]]
"""Histories by the bytes at one landmark, the longest first."""
_Place = tuple[int, int, _Alike]
"""Where a landmark begins and ends, and what is found by it."""


class Prefixes:
    """The histories seen last, bounded in bytes."""

    def __init__(self, max_bytes: int = 32 * 1024 * 1024, landmarks: tuple[int, ...] = LANDMARKS) -> None:
        self._limit = max_bytes
        self.shortest = min(landmarks) + LANDMARK
        self._size = 0
        self._known: OrderedDict[Known, tuple[_Alike, bytes, int]] = OrderedDict()
        self.newest: Known | None = None  # kept or used last
        places: list[_Place] = [(offset, offset + LANDMARK, {}) for offset in sorted(landmarks)]
        self._ends = [stop for _, stop, _ in places]
        self._within = [places[:count][::-1] for count in range(len(places) + 1)]
        """By how many landmarks lie within a body: those, the furthest first."""
        self._lock = threading.Lock()

    def find(self, body: bytes) -> Known | None:
        """The longest known history that the body begins with."""
        for start, stop, alike in self._within[bisect_right(self._ends, len(body))]:
            for known in alike.get(body[start:stop], ()):
                if body.startswith(known.prefix):
                    return known
        return None

    def keep(self, known: Known, instead_of: Known | None = None) -> None:
        """Remember a history; the one that it grew from goes."""
        places = self._within[bisect_right(self._ends, len(known.prefix))]
        weight = _weight(known)
        if not places or weight > self._limit // 4:
            return
        start, stop, alike = places[0]
        landmark = known.prefix[start:stop]
        with self._lock:
            if instead_of is not None:
                self._forget(instead_of)
            self._known[known] = alike, landmark, weight
            self.newest = known
            # a new list, because `find` reads without the lock
            together = alike[landmark] = sorted([known, *alike.get(landmark, ())], key=_length, reverse=True)
            self._size += weight
            if len(together) > MOST_ALIKE:
                self._forget(next(filter(set(together).__contains__, self._known)))
            while self._size > self._limit:
                self._forget(next(iter(self._known)))

    def used(self, known: Known) -> None:
        """It is the one to forget last."""
        with self._lock:
            if known in self._known:
                self._known.move_to_end(known)
                self.newest = known

    def _forget(self, known: Known) -> None:
        place = self._known.pop(known, None)
        if place is None:
            return
        alike, landmark, weight = place
        if self.newest is known:
            self.newest = None
        self._size -= weight
        others = [other for other in alike.get(landmark, ()) if other is not known]
        if others:
            alike[landmark] = others
        else:
            alike.pop(landmark, None)


def _length(known: Known) -> int:
    return len(known.prefix)


def _weight(known: Known) -> int:
    """Bytes that it holds, about."""
    fields = sum(map(len, known.request.fields.values()))
    return len(known.prefix) + len(known.rest) + fields + HELD_BESIDE + MESSAGE_BESIDE * len(known.messages)

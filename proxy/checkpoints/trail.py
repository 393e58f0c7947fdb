"""Which histories came by lately: what tells an edited one from one that goes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

Move = Literal["unknown", "on", "again", "edited"]
"""How a request follows the ones before: nothing of it is known, it goes on from one, it was sent before, or it leaves the way
that one had taken."""


class Trail:
    """Requests by the keys of their whole histories, each with the one that went on from it; bounded, the oldest go first."""

    def __init__(self, limit: int = 16_384) -> None:
        self._limit = limit
        self._next: OrderedDict[bytes, bytes | None] = OrderedDict()

    def take(self, keys: Sequence[bytes]) -> Move:
        """What this request is beside the ones before it. keys: of its history (`chain`), shortest first."""
        if not keys:
            return "unknown"
        last = keys[-1]
        if last in self._next:
            self._next.move_to_end(last)
            return "again"
        before = next((key for key in reversed(keys) if key in self._next), None)
        self._keep(last)
        if before is None:
            return "unknown"
        if self._next.get(before) is not None:
            return "edited"
        self._next[before] = last
        return "on"

    def _keep(self, key: bytes) -> None:
        self._next[key] = None
        if len(self._next) > self._limit:
            self._next.popitem(last=False)

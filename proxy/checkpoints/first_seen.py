"""When each message was first seen. Messages carry no times of their own; some strategies ask how long ago things were said.

Only the event of a request that waits may use these times, and what it made of them is frozen with it: a history that is gone
through again is compacted without, so that it comes to the same bytes in every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.checkpoints.chain import Digests
from proxy.conversation import Message


class FirstSeen:
    """For about `limit` messages, by caller and digest. Two generations: what was not sent again during a whole one goes."""

    def __init__(self, digests: Digests, limit: int = 200_000) -> None:
        self._digests, self._half = digests, max(1, limit // 2)
        self._young: dict[tuple[bytes, bytes], float] = {}
        self._old: dict[tuple[bytes, bytes], float] = {}

    def note(self, caller: bytes, messages: Sequence[Message], now: float) -> None:
        """These messages came now (seconds of a clock that never goes back)."""
        if len(self._young) + len(messages) > self._half:
            self._old, self._young = self._young, {}
        for message in messages:
            key = (caller, self._digests.get(message)[0])
            if key not in self._young:
                self._young[key] = self._old.get(key, now)

    def ages(self, caller: bytes, messages: Sequence[Message], now: float) -> Mapping[Message, float]:
        """Seconds since each was first seen; what nobody has seen is left out."""
        found: dict[Message, float] = {}
        for message in messages:
            key = (caller, self._digests.get(message)[0])
            seen = self._young.get(key, self._old.get(key))
            if seen is not None:
                found[message] = now - seen
        return found

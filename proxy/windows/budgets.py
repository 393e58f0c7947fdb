"""What a request may weigh: the budget within a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proxy.tokens import Ruler
from proxy.windows.sizes import Window

ANSWER_ROOM: Final = 4_096
"""What an answer may take when nobody said: the longest that the models of the chat API's first years could write."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The limit together with its ruler, all in tokens.

    window: what the model can hold. reserve: what the answer may take. usable = window − reserve − margin: what a request
    may weigh. trigger: from here on it is compacted. target: what an event aims at. limit: what it must not exceed.
    """

    window: int
    reserve: int
    usable: int
    trigger: int
    target: int
    ruler: Ruler

    @property
    def limit(self) -> int:
        """What a request must not exceed: another word for usable."""
        return self.usable

    def by(self, ruler: Ruler) -> Budget:
        """The same limit measured by another ruler."""
        return Budget(self.window, self.reserve, self.usable, self.trigger, self.target, ruler)


def output_reserve(window: Window, tokens: int | None = None) -> int:
    """Tokens kept free for an answer whose length the request does not limit, in a window of `tokens` (or its own size)."""
    size = window.tokens if tokens is None else tokens
    if window.reserve is not None and 0 <= window.reserve < size:
        return window.reserve
    return min(window.max_output or ANSWER_ROOM, ANSWER_ROOM, size // 4)


def budget(
    window: Window,
    *,
    requested_output: int | None,
    ruler: Ruler,
    trigger: float,
    target: float,
    narrowed_to: int | None = None,
    margin: float = 0,
) -> Budget:
    """What a request to this model may weigh.

    requested_output: the request's max_completion_tokens or max_tokens. trigger, target: fractions of usable, or tokens
    when above 1. narrowed_to: the client's smaller window. margin: for counts that are estimates, a fraction of the
    window, or tokens when 1 or more.

    A requested output that would leave no room at all for a prompt is not reserved: no compaction can make such a request
    fit, so it is measured as if it had not been asked for, and the upstream answers for it. It is not cut down to the
    table's largest output either: were the table out of date, the request would be refused for want of room. usable,
    trigger and target are at least 1.
    """
    tokens = max(1, window.tokens if narrowed_to is None else min(window.tokens, narrowed_to))
    spare = min(max(0, int(tokens * margin if margin < 1 else margin)), tokens // 2)
    reserve = _reserve(window, tokens, tokens - spare, requested_output)
    usable = max(1, min(tokens - reserve, window.max_input or tokens) - spare)
    starts = _share(trigger, usable)
    return Budget(tokens, reserve, usable, starts, min(_share(target, usable), starts), ruler)


def _reserve(window: Window, tokens: int, room: int, requested: int | None) -> int:
    if requested is not None and 0 <= requested < room:
        return requested
    return min(output_reserve(window, tokens), max(0, room - 1))


def _share(part: float, usable: int) -> int:
    return max(1, min(usable, int(usable * part if part <= 1 else part)))

"""What will be needed again: the chance that the assistant comes back to each name, from how it was used so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.compaction import entities


@dataclass(frozen=True, slots=True)
class Mention:
    """One text of the history in order. turn: how many assistant turns came before it. mine: the assistant wrote it.
    asked: a person wrote it. call: arguments of a call."""

    text: str
    turn: int
    mine: bool = False
    asked: bool = False
    call: bool = False


@dataclass(slots=True)
class Use:
    """How a name was used so far."""

    messages: int = 0
    by_assistant: int = 0
    last_by_assistant: int = -1
    first: int = 0
    last: int = 0
    siblings: int = 1_000_000
    asked: bool = False
    called: bool = False


def uses(mentions: Sequence[Mention]) -> dict[str, Use]:
    """One pass over the texts."""
    found: dict[str, Use] = {}
    for mention in mentions:
        names = {name for names in entities.scan(mention.text).names for name in names}
        count = len(names)
        for name in names:
            use = found.get(name)
            if use is None:
                use = found[name] = Use(first=mention.turn)
            use.messages += 1
            use.last = mention.turn
            if count < use.siblings:
                use.siblings = count
            if mention.mine:
                use.by_assistant += 1
                use.last_by_assistant = mention.turn
                if mention.call:
                    use.called = True
            elif mention.asked:
                use.asked = True
    return found


def needs(mentions: Sequence[Mention]) -> dict[str, float]:
    """What each name is worth: its rarity times the chance that it will be needed."""
    found = uses(mentions)
    total = max(1, len(mentions))
    now = mentions[-1].turn if mentions else 0
    return {name: math.log1p(total / use.messages) * chance(name, use, now) for name, use in found.items()}


def chance(name: str, use: Use, now: int) -> float:
    """The probability, by a logistic function."""
    age = math.log1p(now - use.last_by_assistant) if use.last_by_assistant >= 0 else 4.0
    score = (
        -2.2 + 0.6 * math.log1p(use.messages) + 0.7 * math.log1p(use.by_assistant) - 0.5 * age - 0.25 * math.log1p(use.siblings)
    )
    score += -0.3 * math.log1p(now - use.last)
    kind = entities.kind(name)
    score += {"path": 0.8, "file": 0.8, "name": 0.3, "number": -0.6, "quoted": -0.8}.get(kind, 0.0)
    if not use.by_assistant and not use.asked:
        score -= 0.8
    return 1 / (1 + math.exp(-score))

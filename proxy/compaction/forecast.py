"""What will be needed again: the chance that the assistant comes back to each name, from how it was used so far.

A logistic function with fixed coefficients, fitted on recorded conversations (tests/benchmarks/fit_weights.py). Features that
need more than one pass over the mentions (files that belong together, words in common, definitions) brought nothing on
conversations that were held out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.compaction import entities

Speaker = Literal["assistant", "asked", "output"]
"""The assistant in its words and calls; a person; a tool or the world."""


@dataclass(frozen=True, slots=True)
class Mention:
    """One text of the history, in order. turn: how many assistant turns there were so far, this one included."""

    text: str
    turn: int
    speaker: Speaker


class Use:
    """How a name was used so far. messages, times: texts and lines that hold it. mine: texts by the assistant among them.
    heat, slow: uses by the assistant, older ones counting less. siblings: names in the text that has the fewest."""

    __slots__ = ("first", "heat", "last", "last_mine", "messages", "mine", "siblings", "slow", "times")

    def __init__(self, turn: int) -> None:
        self.messages = self.mine = self.times = 0
        self.first = self.last = turn
        self.last_mine = -1
        self.heat = self.slow = 0.0
        self.siblings = 1_000_000


FADES = tuple(math.exp(-n / 4) for n in range(120))
"""What is left of a use after n turns: what the assistant is at just now."""
SLOW_FADES = tuple(math.exp(-n / 25) for n in range(600))
"""The same over a longer time: what it has been at for a while."""


def uses(mentions: Sequence[Mention]) -> dict[str, Use]:
    """How each name was used, in one pass over the texts."""
    found: dict[str, Use] = {}
    for mention in mentions:
        scan = entities.scan(mention.text)
        count, turn, mine = len(scan.distinct), mention.turn, mention.speaker == "assistant"
        for name in scan.distinct:
            use = found.get(name)
            if use is None:
                use = found[name] = Use(turn)
            use.messages += 1
            use.last = turn
            if count < use.siblings:
                use.siblings = count
            if mine:
                _use(use, turn)
        for names in scan.names:
            for name in names:
                found[name].times += 1
    return found


def _use(use: Use, turn: int) -> None:
    gap = turn - use.last_mine if use.last_mine >= 0 else 0
    use.heat = use.heat * FADES[min(gap, 119)] + 1
    use.slow = use.slow * SLOW_FADES[min(gap, 599)] + 1
    use.last_mine = turn
    use.mine += 1


KINDS = ("path", "file", "name", "error", "number", "hash", "id", "quoted")
FEATURES = (
    "bias", "messages", "mine", "never_mine", "age", "span", "siblings", "heat", "slow", "unused_fresh", "words", "times", *KINDS,
)  # fmt: skip
WEIGHTS = (
    -2.585, -0.317, 0.549, -0.428, -0.111, 0.175, -0.356, 1.812, 0.463, 1.003, -0.115, 0.199,
    0.413, 0.201, 0.211, 1.027, -0.591, -0.537, 0.490, -0.298,
)  # fmt: skip
_KIND_WEIGHTS = dict(zip(KINDS, WEIGHTS[-len(KINDS) :], strict=True))


def needs(mentions: Sequence[Mention]) -> dict[str, float]:
    """What each name is worth: its rarity times the chance that it will be needed."""
    total = max(1, len(mentions))
    now = mentions[-1].turn if mentions else 0
    rarity = [0.0, *(math.log1p(total / n) for n in range(1, total + 1))]
    return {name: rarity[use.messages] * chance(name, use, now) for name, use in uses(mentions).items()}


def chance(name: str, use: Use, now: int) -> float:
    """The probability that the assistant will use the name again."""
    score = _KIND_WEIGHTS.get(entities.kind(name), 0.0) + WEIGHTS[10] * _log_words(name)
    for weight, value in zip(WEIGHTS, _history(use, now), strict=False):
        score += weight * value
    score += WEIGHTS[11] * _log(use.times / use.messages)
    return 1 / (1 + math.exp(-score))


def features(name: str, use: Use, now: int) -> tuple[float, ...]:
    """The values that WEIGHTS stand for, in the order of FEATURES: for fitting."""
    kind = entities.kind(name)
    return (*_history(use, now), _log_words(name), _log(use.times / use.messages), *(float(kind == other) for other in KINDS))


_log = math.log1p


def _history(use: Use, now: int) -> tuple[float, ...]:
    never = use.last_mine < 0
    gap = now - use.last_mine
    return (
        1.0,
        _log(use.messages),
        _log(use.mine),
        float(never),
        _log(now - use.last),
        _log(use.last - use.first),
        _log(use.siblings),
        0.0 if never else _log(use.heat * FADES[min(gap, 119)]),
        0.0 if never else _log(use.slow * SLOW_FADES[min(gap, 599)]),
        float(never and now - use.last <= 2),
    )


def _log_words(name: str) -> float:
    """Logarithm of one more than the words that a name is made of, by its joints."""
    return _log(2 + name.count("_") + name.count("/") + name.count(".") + name.count("-") + name.count(" "))

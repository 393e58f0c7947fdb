"""How much may it be?  The context window of each model, and the budget within it."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.tokens import Ruler


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

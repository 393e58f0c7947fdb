"""What a model can hold, and what its tokens cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["config", "learned", "discovered", "built in", "default"]


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens. cached_input: what a prompt token costs that the provider had in its cache."""

    input: float
    cached_input: float
    output: float


@dataclass(frozen=True, slots=True)
class Window:
    """What a model can hold, in tokens, and where `tokens` comes from.

    max_input: a limit on the prompt alone, where the upstream has one beside the window. reserve, encoding: as configured.
    """

    tokens: int
    max_output: int | None
    max_input: int | None
    source: Source
    encoding: str | None
    reserve: int | None
    price: Price | None

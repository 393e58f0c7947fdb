"""Making a conversation fit: layers in a fixed order, validated after each, stopping at the first that is enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from proxy.conversation import Conversation
from proxy.windows import Budget

Stop = Callable[[], bool]
"""Asked between layers (and inside long ones): True when the deadline has passed or the client has gone."""


class Layer(Protocol):
    """One way of making a conversation smaller: a frozen dataclass whose fields are its settings."""

    @property
    def name(self) -> str: ...

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        """The smaller conversation; the same object when there is nothing to do. Whole steps only, protected steps kept."""
        ...


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What one layer did. saved: tokens (≥ 0). touched: messages changed or removed. refused: the rule that it broke, if any."""

    layer: str
    before: int
    after: int
    touched: int = 0
    refused: str | None = None
    skipped: str | None = None

    @property
    def saved(self) -> int:
        return self.before - self.after


@dataclass(frozen=True, slots=True)
class CriticalItems:
    """Facts that must survive (errors, requests, constraints, the conclusion): how many did, were repaired, or were lost."""

    kept: int = 0
    repaired: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """tokens_before − tokens_after == sum of `saved` over the reports. reason: why it could not reach the target, None when it
    did: `floor` (what cannot be removed is too large), `no_gain` (nothing worth while, the conversation is as it came),
    `deadline`, `target` (smaller, but not that small). stages: (layer, conversation after it) of the layers that changed it.
    checking: seconds that went into checking the layers' work and mending it."""

    conversation: Conversation
    tokens_before: int
    tokens_after: int
    reports: tuple[LayerReport, ...] = ()
    critical: CriticalItems = CriticalItems()
    reason: str | None = None
    stages: tuple[tuple[str, Conversation], ...] = field(default=(), repr=False)
    checking: float = field(default=0.0, compare=False)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that had a part in it, in order."""
        return tuple(report.layer for report in self.reports if report.saved > 0 and report.refused is None)


# The rooms below speak the shapes above.
from proxy.compaction.pipeline import compact, compact_in_place  # noqa: E402

__all__ = ["CompactionResult", "CriticalItems", "Layer", "LayerReport", "Stop", "compact", "compact_in_place"]

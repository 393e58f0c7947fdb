"""How big is it?  Token counts as the upstream will count them, offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.conversation import Message
from proxy.tokens.breakdown import Breakdown, breakdown
from proxy.tokens.calibration import Calibration, Calibrator, Key, chain, cold
from proxy.tokens.chat import ChatRuler, ruler
from proxy.tokens.families import bare_name, encoding_name
from proxy.tokens.vocabulary import degraded, load

__all__ = [
    "Breakdown",
    "Calibration",
    "Calibrator",
    "ChatRuler",
    "Key",
    "Ruler",
    "bare_name",
    "breakdown",
    "chain",
    "cold",
    "degraded",
    "encoding_name",
    "load",
    "ruler",
]


class Ruler(Protocol):
    """Counts for one request: one model's rules, one encoding, one frozen calibration. Pure, and never raises for content.

    total(messages) = fixed + sum of what the messages cost. Costs are additive over whole steps, so that a layer can
    plan with `message` and the pipeline can decide with `total`.
    """

    @property
    def fixed(self) -> int:
        """Tokens of everything but the messages: tools, response_format, tool_choice, priming."""
        ...

    def text(self, text: str) -> int:
        """Tokens of a plain string."""
        ...

    def message(self, message: Message) -> int:
        """Tokens that this message adds, media and calls included; cached by the message's exact content."""
        ...

    def total(self, messages: Sequence[Message]) -> int:
        """Tokens of the whole request with these messages: the number that must fit."""
        ...

    def cold_bytes(self, messages: Sequence[Message], enough: int | None = None) -> int:
        """UTF-8 bytes of text that `total` would have to tokenize now, because they were not counted before.

        For the caller to decide whether it counts here or in a worker thread; costs look-ups only. enough: the search may
        end once it has found more than this.
        """
        ...

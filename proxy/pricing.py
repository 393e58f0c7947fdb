"""What tokens cost: prices are US dollars a million tokens, and an unknown price stays unknown."""

from __future__ import annotations

from typing import Protocol

PER = 1_000_000


class Price(Protocol):
    """US dollars a million tokens; None where the model's maker names none."""

    @property
    def input(self) -> float | None: ...

    @property
    def cached_input(self) -> float | None: ...

    @property
    def output(self) -> float | None: ...


def cost_saved(price: Price | None, saved: int, usage_input: int | None = None, usage_cached: int | None = None) -> float | None:
    """US dollars that `saved` prompt tokens would have cost; None when the price is unknown, never 0 for it.

    usage_input, usage_cached: what the upstream reported for the forwarded prompt. The saved tokens stood between tokens that
    were cached to this share, so they are taken to have been cached to the same share: priced in full they would flatter us.
    """
    if price is None or price.input is None:
        return None
    share = min(max(usage_cached or 0, 0) / usage_input, 1.0) if usage_input else 0.0
    cached = price.input if price.cached_input is None else price.cached_input
    return saved * (share * cached + (1 - share) * price.input) / PER


def cost_of(price: Price | None, tokens_in: int, tokens_out: int, cached: int = 0) -> float | None:
    """US dollars for one call; None when the price of something that it used is unknown."""
    if price is None or price.input is None or (tokens_out and price.output is None):
        return None
    cached = min(max(cached, 0), tokens_in)
    rate = price.input if price.cached_input is None else price.cached_input
    return ((tokens_in - cached) * price.input + cached * rate + tokens_out * (price.output or 0.0)) / PER

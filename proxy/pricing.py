"""What tokens cost, in US dollars; an unknown price stays unknown."""

from __future__ import annotations

from proxy.windows import Price

PER = 1_000_000
"""Prices are quoted for a million tokens."""


def cost_saved(price: Price | None, saved: int, usage_input: int | None = None, usage_cached: int | None = None) -> float | None:
    """US dollars that `saved` prompt tokens would have cost; None when the price is unknown, never 0 for it.

    usage_input, usage_cached: what the upstream reported for the forwarded prompt. The saved tokens stood between tokens that
    were cached to this share, so they are taken to have been cached to the same share: priced in full they would flatter us.
    """
    if price is None:
        return None
    share = min(max(usage_cached or 0, 0) / usage_input, 1.0) if usage_input else 0.0
    return saved * (share * price.cached_input + (1 - share) * price.input) / PER


def cost_of(price: Price | None, tokens_in: int, tokens_out: int, cached: int = 0) -> float | None:
    """US dollars for one call, `cached` of its `tokens_in` at the cached price; None when the price is unknown."""
    if price is None:
        return None
    cached = min(max(cached, 0), tokens_in)
    return ((tokens_in - cached) * price.input + cached * price.cached_input + tokens_out * price.output) / PER

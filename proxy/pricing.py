"""What tokens cost, in US dollars; an unknown price stays unknown."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Bill:
    """What an event does to a request, in tokens. before, after: the whole of it. kept: what stands before the first change."""

    before: int
    after: int
    kept: int

    @property
    def rewritten(self) -> int:
        """Tokens that the upstream finds in its cache without the event, and not with it."""
        return max(0, self.after - self.kept)


def worth_it(price: Price, bill: Bill, turns: int) -> bool:
    """Whether an event saves more than it costs when the conversation goes on for so many turns, all of it read from the cache.

    It costs its new text once at the full price instead of the cached one; it saves what is no longer sent each time. turns: 0
    or 1 is a conversation's first request, of which nothing was cached.
    """
    if turns <= 1:
        return True
    return bill.rewritten * (price.input - price.cached_input) <= turns * (bill.before - bill.after) * price.cached_input


def cache_break_cost(price: Price | None, rewritten: int, usage_cached: int | None) -> float | None:
    """US dollars that an event cost because the upstream had to read its text anew; None when the price is unknown.

    usage_cached: what the upstream reported as cached; where it reports nothing there is no cache to break.
    """
    if price is None:
        return None
    return rewritten * (price.input - price.cached_input) / PER if usage_cached is not None else 0.0

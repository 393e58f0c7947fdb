"""Pricing: dollars a million tokens, and nothing at all for what has no price."""

from __future__ import annotations

from proxy.pricing import cost_of, cost_saved
from proxy.windows import Price

LISTED = Price(2.5, 1.25, 10.0)


def test_saved_tokens_cost_their_input_price() -> None:
    assert cost_saved(LISTED, 1_000_000) == 2.5
    assert cost_saved(LISTED, 4_000, usage_input=10_000, usage_cached=0) == 0.01


def test_saved_tokens_between_cached_ones_cost_the_cached_price() -> None:
    assert cost_saved(LISTED, 1_000_000, usage_input=8_000, usage_cached=8_000) == 1.25
    assert cost_saved(LISTED, 1_000_000, usage_input=8_000, usage_cached=4_000) == 1.875


def test_more_cached_than_input_is_not_believed() -> None:
    assert cost_saved(LISTED, 1_000_000, usage_input=10, usage_cached=99) == 1.25
    assert cost_saved(LISTED, 1_000_000, usage_input=10, usage_cached=-5) == 2.5


def test_an_unknown_price_is_none_and_never_zero() -> None:
    assert cost_saved(None, 1_000) is None
    assert cost_of(None, 1_000, 10) is None


def test_a_price_of_zero_is_known() -> None:
    assert cost_saved(Price(0.0, 0.0, 0.0), 1_000) == 0.0


def test_a_call_costs_its_input_its_cached_input_and_its_output() -> None:
    assert cost_of(LISTED, 1_000_000, 100_000) == 3.5
    assert cost_of(LISTED, 1_000_000, 100_000, cached=400_000) == 3.0
    assert cost_of(LISTED, 1_000, 0, cached=9_999) == 0.00125

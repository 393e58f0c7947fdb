"""Pricing: dollars a million tokens, and nothing at all for what has no price."""

from __future__ import annotations

from proxy.pricing import Bill, cache_break_cost, cost_of, cost_saved, worth_it
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


CHEAP_READS = Price(3.0, 0.3, 15.0)
EVENT = Bill(before=80_000, after=45_000, kept=5_000)


def test_an_event_is_worth_it_when_the_turns_to_come_pay_for_the_broken_cache() -> None:
    # 40,000 tokens anew at 2.70 more: 0.108; each turn 35,000 fewer at 0.30: 0.0105
    assert not worth_it(CHEAP_READS, EVENT, 10)
    assert worth_it(CHEAP_READS, EVENT, 11)


def test_nothing_is_cached_of_a_first_request_nor_where_cached_tokens_cost_the_same() -> None:
    assert worth_it(CHEAP_READS, EVENT, 1)
    assert worth_it(Price(3.0, 3.0, 15.0), EVENT, 2)


def test_a_broken_cache_costs_what_it_would_have_saved_where_there_is_one() -> None:
    assert cache_break_cost(CHEAP_READS, 40_000, usage_cached=0) == 0.108
    assert cache_break_cost(CHEAP_READS, 40_000, usage_cached=None) == 0.0
    assert cache_break_cost(None, 40_000, usage_cached=0) is None

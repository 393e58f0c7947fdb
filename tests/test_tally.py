"""Histograms: many values observed at once are counted as each would be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.tally import Histogram

BOUNDS = (0.5, 1, 2.5)


def test_many_values_at_once_are_counted_each_in_its_bucket_and_a_bound_belongs_below() -> None:
    histogram = Histogram(BOUNDS)
    child = histogram.child("a")

    child.observe_all([0.25, 0.5, 0.75, 1, 1.5, 2.5, 2.75, 100, 0, -1, 0.5, 3])
    child.observe_all([2, 0.125])

    assert histogram.values == {("a",): [6, 2, 3, 3, 113.875]}


def test_nothing_shows_before_something_is_observed() -> None:
    histogram = Histogram(BOUNDS)

    histogram.child("a").observe_all([])

    assert histogram.values == {}


def test_two_children_of_one_label_count_together() -> None:
    histogram = Histogram(BOUNDS)
    one, other = histogram.child("a"), histogram.child("a")

    one.observe_all([0.25] * 20)
    other.observe_all([0.75] * 20)
    one.observe(9)

    assert histogram.values == {("a",): [20, 20, 0, 1, 29]}


@given(st.lists(st.lists(st.integers(-512, 4096).map(lambda n: n / 256), min_size=1, max_size=40), max_size=5))
def test_values_observed_together_or_one_by_one_come_to_the_same(batches: list[list[float]]) -> None:
    together, alone = Histogram(BOUNDS), Histogram(BOUNDS)

    for batch in batches:
        together.child("a").observe_all(batch)
        for value in batch:
            alone.observe(("a",), value)

    assert together.values == alone.values

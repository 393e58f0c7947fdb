"""Requests to OpenAI with the usage that it answered: recorded by the test suites of other projects (MIT, Apache-2.0).

Each line of recorded_pairs.jsonl names the repository and file that it is from. Pictures are kept as their sizes only.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

FIXTURE = Path(__file__).parent / "recorded_pairs.jsonl"


def test_every_recorded_request_is_counted_as_openai_counted_it(counting: ModuleType) -> None:
    pairs = counting.load(FIXTURE)

    wrong = [
        (pair.model, pair.repository, counting.ours(pair), pair.expected)
        for pair in pairs
        if counting.ours(pair) != pair.expected
    ]

    assert wrong == []
    assert len(pairs) == 153


def test_the_recorded_requests_are_of_every_kind(counting: ModuleType) -> None:
    kinds = Counter(pair.group for pair in counting.load(FIXTURE))

    assert {"text", "tools", "schema", "images"} <= set(kinds)
    assert min(kinds["tools"], kinds["schema"]) >= 16


@pytest.mark.parametrize(
    ("group", "exact", "close"),
    [("text", 0.99, 0.99), ("tools", 0.96, 0.98), ("schema", 0.99, 0.99), ("images", 0.97, 0.97), ("all", 0.96, 0.97)],
)
def test_the_large_set_is_counted_as_well_as_we_say(
    counting: ModuleType, shared: Path, group: str, exact: float, close: float
) -> None:
    pairs = [pair for pair in counting.load(shared / "data" / "usage_pairs.jsonl.xz") if pair.is_openai]
    chosen = [pair for pair in pairs if group in (pair.group, "all")]

    errors = [(counting.ours(pair) - pair.expected) / pair.expected for pair in chosen]

    assert sum(error == 0 for error in errors) / len(errors) >= exact
    assert sum(abs(error) <= 0.02 for error in errors) / len(errors) >= close

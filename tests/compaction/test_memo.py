"""A memo of texts: right, and bounded."""

from __future__ import annotations

from proxy.compaction.memo import Memo


def test_a_value_is_made_once() -> None:
    made: list[str] = []
    memo = Memo(lambda text: made.append(text) or len(text), 1_000)  # type: ignore[func-returns-value]

    assert [memo("abc"), memo("abc"), memo("de")] == [3, 3, 2]
    assert made == ["abc", "de"]


def test_what_is_not_asked_for_again_is_forgotten() -> None:
    made: list[str] = []
    memo = Memo(lambda text: made.append(text) or len(text), 1_000)  # type: ignore[func-returns-value]

    for n in range(100):
        memo(f"text {n}")
        memo("kept")
    memo("text 0")

    assert made.count("kept") == 1
    assert made.count("text 0") == 2


def test_a_text_too_long_for_it_is_answered_all_the_same() -> None:
    assert Memo(len, 100)("x" * 5_000) == 5_000

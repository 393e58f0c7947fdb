"""What the table of a benchmark says of the figures that went into it."""

from __future__ import annotations

import pytest
from benchmarks.sheet import Sheet, middle, short


def cells(sheet: Sheet, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The table's rows by their name."""
    sheet.show("ours", "(direct)")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_ours_stands_first_the_direct_line_last_and_ratios_are_taken_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    sheet = Sheet()
    for theirs, ours in ((100.0, 50.0), (1000.0, 2000.0), (10.0, 30.0)):
        sheet.add("(direct)", {"requests/s ↑": 5000.0}, {})
        sheet.add("nginx", {"requests/s ↑": theirs}, {})
        sheet.add("ours", {"requests/s ↑": ours}, {})

    table = cells(sheet, capsys)

    assert table[""] == ["ours", "nginx", "(direct)"]
    assert table["requests/s ↑"] == ["50.0 (30.0–2,000)", "100 (10.0–1,000) · 2.00×", "5,000"]


def test_what_a_proxy_adds_is_shown_less_the_direct_line_and_has_no_ratio_where_it_is_lost_in_noise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sheet, direct = Sheet(), {"added p50, ms ↓": 0.5}
    sheet.add("ours", {"added p50, ms ↓": 0.75, "memory, MB ↓": 90.0}, direct)
    sheet.add("nginx", {"added p50, ms ↓": 0.25}, direct)
    sheet.add("(direct)", direct, {})

    table = cells(sheet, capsys)

    assert table["added p50, ms ↓"] == ["0.25", "-0.25", "0.50"]
    assert table["memory, MB ↓"] == ["90.0", "–", "–"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0043, "0.004"),
        (0.25, "0.25"),
        (9.994, "9.99"),
        (15.91, "15.9"),
        (123.4, "123"),
        (9_999.0, "9,999"),
        (50_400.0, "50.4k"),
    ],
)
def test_a_figure_has_three_digits_or_so(value: float, shown: str) -> None:
    assert short(value) == shown


def test_nothing_measured_is_a_dash_and_a_single_figure_has_no_range() -> None:
    assert middle([]) == "–"
    assert middle([2.0]) == "2.00"

"""The figures of a benchmark by proxy and row, and the table that they make."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence


class Sheet:
    """Figures by proxy and row, one for each round in which they were measured."""

    def __init__(self) -> None:
        self._figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, name: str, figures: Mapping[str, float], direct: Mapping[str, float]) -> None:
        for row, value in figures.items():
            self._figures[name][row].append(value - direct.get(row, 0.0) if row.startswith("added") else value)

    def show(self, ours: str, direct: str) -> None:
        """A row a figure, a column a proxy, ours first: median (min–max), and how many times theirs ours is."""
        names = sorted(self._figures, key=lambda name: (name != ours, name == direct))
        known = self._figures
        rows = []
        for row in dict.fromkeys(row for name in names for row in known[name]):
            cells = []
            for name in names:
                ratio = _ratio(known[ours][row], known[name][row]) if name not in (ours, direct) else ""
                cells.append(middle(known[name][row]) + ratio)
            rows.append([row, *cells])
        table(["", *names], rows)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Round by round, where the difference to nothing can be told from noise."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=False) if other > 0 < mine]
    return f" · {short(statistics.median(pairs))}×" if pairs else ""


def short(value: float) -> str:
    size = abs(value)
    if size >= 10_000:
        return f"{value / 1000:.1f}k"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 3
    return f"{value:,.{digits}f}"


def middle(values: Sequence[float]) -> str:
    """Median and range."""
    if not values:
        return "–"
    low, mid, high = min(values), statistics.median(values), max(values)
    return short(mid) if low == high else f"{short(mid)} ({short(low)}–{short(high)})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[column])) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")

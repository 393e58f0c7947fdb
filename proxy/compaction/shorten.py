"""One text, shorter: by what it is (JSON, diff, table, search results, code, log), at borders that a reader expects.

What survives first: error lines and what stands around them, exit codes and summaries, the outline (headers, signatures,
hunks), then the beginning and the end. Whatever is left out is said in place, with counts: `[… 120 lines cut …]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.compaction import graphemes, json_text, line_kinds
from proxy.compaction.line_kinds import Kind

SMALLEST = 120
"""Characters below which nothing sensible is left of a text."""

_GAP = 30  # what a marker costs, about
_HEAD = 0.6  # of what is left over after the important lines; the rest is the tail


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the characters at hand: for error lines, for their neighborhood, for the outline."""

    errors: float = 0.35
    around: float = 0.15
    outline: float = 0.25


_STRUCTURED = Shares(outline=0.5)  # diffs, code, search results: the outline is the point


def shorten(text: str, limit: int, *, head: float = _HEAD) -> str:
    """The text in at most `limit` characters (at least SMALLEST); itself when it is that short already. JSON stays valid JSON."""
    limit = max(limit, SMALLEST)
    if len(text) <= limit:
        return text
    value = json_text.shorten(text, limit, cut_middle)
    if value is not None:
        return value
    lines = text.split("\n")
    if len(lines) < 3:
        return cut_middle(text, limit, head)
    kind = line_kinds.kind_of(lines)
    lines = [cut_middle(line, max(SMALLEST, limit // 4)) if len(line) > limit // 2 else line for line in lines]
    folded = line_kinds.fold_shapes(lines) if kind is Kind.LOG else lines
    if sum(map(len, folded)) + len(folded) - 1 <= limit:
        return "\n".join(folded)
    return _select(folded, limit, kind, head)


def cut_middle(text: str, limit: int, head: float = _HEAD) -> str:
    """Head and tail of a text, with a marker between them, in at most `limit` characters; whole characters only."""
    if len(text) <= limit:
        return text
    marker = f" [… {len(text) - limit + _GAP:,} characters cut …] "
    room = limit - len(marker)
    if room < 16:
        return text[: graphemes.before(text, limit)] or text[:1]
    left = _soft(text, int(room * head))
    right = graphemes.after(text, len(text) - (room - left))
    return f"{text[:left]} [… {right - left:,} characters cut …] {text[right:]}"


def _soft(text: str, index: int) -> int:
    """The end of a sentence or word shortly before the index, else a character border."""
    for mark in (". ", "。", "\n", " "):
        found = text.rfind(mark, index - 40 if index > 80 else index - index // 3, index)
        if found > 0:
            return graphemes.before(text, found + len(mark.rstrip(" ")))
    return graphemes.before(text, index)


def _select(lines: Sequence[str], limit: int, kind: Kind, head: float) -> str:
    """The lines that matter most, in order, with what is missing marked."""
    shares = _STRUCTURED if kind in (Kind.DIFF, Kind.CODE, Kind.SEARCH) else Shares()
    taken = _Taken(lines, limit - 2 * _GAP)
    errors = line_kinds.important(lines, kind)
    taken.take(_ends_first(errors), shares.errors)
    taken.take(_neighbors(errors, len(lines)), shares.around)
    taken.take(line_kinds.outline(lines, kind), shares.outline)
    taken.fill(head)
    return taken.render()


def _ends_first(indices: Sequence[int]) -> list[int]:
    """Last, first, last but one, second, …: of many errors the ends tell the most."""
    order: list[int] = []
    low, high = 0, len(indices) - 1
    while low <= high:
        order.append(indices[high])
        if low < high:
            order.append(indices[low])
        low, high = low + 1, high - 1
    return order


def _neighbors(indices: Iterable[int], count: int) -> list[int]:
    near = [i + offset for offset in (1, -1, 2, -2) for i in indices]
    return [i for i in near if 0 <= i < count]


class _Taken:
    """Which lines are kept so far, and what they cost with the markers between them."""

    def __init__(self, lines: Sequence[str], limit: int) -> None:
        self._lines, self._limit = lines, limit
        self._kept = bytearray(len(lines))
        self._used = 0

    def take(self, indices: Iterable[int], share: float) -> None:
        """Keep these lines, in this order of preference, as long as their share lasts."""
        room = min(self._limit - self._used, int(self._limit * share))
        for i in indices:
            cost = len(self._lines[i]) + 1 + _GAP
            if not self._kept[i] and cost <= room:
                self._kept[i] = 1
                self._used += cost
                room -= cost

    def fill(self, head: float) -> None:
        """Spend the rest on the beginning and the end."""
        room = self._limit - self._used
        room -= self._run(range(len(self._lines)), int(room * head))
        room -= self._run(range(len(self._lines) - 1, -1, -1), room)
        self._run(range(len(self._lines)), room)

    def _run(self, order: range, room: int) -> int:
        spent = 0
        for i in order:
            if self._kept[i]:
                spent -= _GAP if spent else 0  # the marker that was reckoned for it is not needed inside a run
                continue
            cost = len(self._lines[i]) + 1
            if spent + cost > room:
                break
            self._kept[i] = 1
            spent += cost
        self._used += spent
        return spent

    def render(self) -> str:
        out: list[str] = []
        i = 0
        while i < len(self._lines):
            if self._kept[i]:
                out.append(self._lines[i])
                i += 1
                continue
            stop = i
            while stop < len(self._lines) and not self._kept[stop]:
                stop += 1
            out.append(_gap(self._lines[i:stop]))
            i = stop
        return "\n".join(out)


def _gap(lines: Sequence[str]) -> str:
    if len(lines) == 1 and len(lines[0]) <= _GAP:
        return lines[0]
    return f"[… {len(lines):,} {'line' if len(lines) == 1 else 'lines'} cut …]"

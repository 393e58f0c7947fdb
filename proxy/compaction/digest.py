"""The best lines under a budget: which lines of a history to keep verbatim, so that what will be needed is still there.

A budgeted maximum-coverage problem over the names in the lines, solved by lazy greedy: a name is worth its rarity times the
chance that the assistant will need it again; a line is worth the names that nothing kept shows yet, per token that it costs.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from proxy.compaction import entities

BARE = 0.45
"""What a name is worth in a line without words of context; the rest can be earned by a better line."""

HEADER_TOKENS = 6
"""About what it costs to open a step in the summary: its number and its tool's name."""

GAP_TOKENS = 2
"""About what the mark of a gap costs."""


@dataclass(frozen=True, slots=True)
class Source:
    """One text that lines can be taken from. place: the message's index. label: what the summary calls it.
    rate: tokens per character. inline: it stays in place, so that no header is due. output: a tool or the world said it."""

    place: int
    label: str
    text: str
    rate: float
    inline: bool = False
    output: bool = False


@dataclass(slots=True)
class Picks:
    """Which lines of each source are kept: the greedy's working state."""

    sources: Sequence[Source]
    chosen: list[set[int]] = field(default_factory=list)
    covered: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0
    order: list[tuple[int, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chosen = [set() for _ in self.sources]

    def cost(self, source: int, line: int) -> float:
        """Estimated tokens of one more line."""
        it = self.sources[source]
        opened = it.inline or bool(self.chosen[source])
        return line_cost(it, line) + (GAP_TOKENS if it.inline else 0) + (0 if opened else HEADER_TOKENS)

    def take(self, source: int, line: int, cost: float) -> None:
        it = self.sources[source]
        self.chosen[source].add(line)
        self.spent += cost
        self.order.append((source, line, cost))
        self.cover(entities.scan(it.text).names[line], in_context(entities.scan(it.text).lines[line]))

    def drop(self, tokens: float) -> bool:
        """Give up the lines taken last, at least so many tokens' worth; False when there is none left."""
        freed = 0.0
        while self.order and freed < tokens + 2:
            source, line, cost = self.order.pop()
            self.chosen[source].discard(line)
            freed += 0.9 * cost
        self.spent -= freed
        return freed > 0

    def cover(self, names: Iterable[str], full: bool) -> None:
        level = 1.0 if full else BARE
        covered = self.covered
        for name in names:
            if covered.get(name, 0.0) < level:
                covered[name] = level


def line_cost(source: Source, line: int) -> float:
    return max(1.0, len(entities.scan(source.text).lines[line]) * source.rate) + 1.0


_CONTEXT = re.compile(r"[^\W\d_]{3,}|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{2}")


@lru_cache(maxsize=32768)
def in_context(line: str) -> bool:
    """True when a line has at least three words: enough to tell what a name in it is."""
    return len(_CONTEXT.findall(line)) >= 3


def choose(picks: Picks, needs: dict[str, float], room: float) -> None:
    """Take lines by value per token until `room` tokens are spent. needs: what each name is worth."""
    heap: list[tuple[float, int, int]] = []
    scans = [entities.scan(source.text) for source in picks.sources]

    def density(source: int, line: int) -> float:
        covered = picks.covered
        worth = 0.0
        full = in_context(scans[source].lines[line])
        for name in scans[source].names[line]:
            need = needs.get(name)
            if need:
                worth += need * max(0.0, (1.0 if full else BARE) - covered.get(name, 0.0))
        return worth / picks.cost(source, line)

    for source, it in enumerate(scans):
        for line, names in enumerate(it.names):
            if names and line not in picks.chosen[source]:
                ratio = density(source, line)
                if ratio > 0:
                    heap.append((-ratio, source, line))
    heapq.heapify(heap)
    while heap and picks.spent < room:
        _, source, line = heapq.heappop(heap)
        if line in picks.chosen[source]:
            continue
        ratio = density(source, line)
        if ratio <= 0:
            continue
        if heap and -ratio > heap[0][0] + 1e-12:
            heapq.heappush(heap, (-ratio, source, line))
            continue
        cost = picks.cost(source, line)
        if picks.spent + cost > room:
            continue
        opened = not picks.sources[source].inline and not picks.chosen[source]
        picks.take(source, line, cost)
        if opened:
            for other, names in enumerate(scans[source].names):
                if names and other not in picks.chosen[source] and (ratio := density(source, other)) > 0:
                    heapq.heappush(heap, (-ratio, source, other))


def fill(picks: Picks, room: float) -> None:
    """Spend what is left on the newest lines."""
    for source in range(len(picks.sources) - 1, -1, -1):
        it = picks.sources[source]
        for line in range(len(entities.scan(it.text).lines) - 1, -1, -1):
            if picks.spent >= room:
                return
            if line not in picks.chosen[source]:
                cost = picks.cost(source, line)
                if picks.spent + cost <= room:
                    picks.take(source, line, cost)


def excerpt(source: Source, chosen: set[int]) -> list[str]:
    """The chosen lines in order; pieces of one long line are joined again."""
    it = entities.scan(source.text)
    out: list[str] = []
    previous = -2
    for line in sorted(chosen):
        if previous == line - 1 and not it.whole[previous]:
            out[-1] += " " + it.lines[line]
        else:
            out.append(it.lines[line])
        previous = line
    return out


def in_place(source: Source, chosen: set[int]) -> str:
    """The text of a result that stays, with the lines that were left out marked; the very text when nothing was."""
    it = entities.scan(source.text)
    if len(chosen) == len(it.lines):
        return source.text
    if not chosen:
        return f"[… {len(it.lines)} lines left out]"
    out: list[str] = []
    previous = -1
    for line in sorted(chosen):
        joined = previous == line - 1 and previous >= 0 and not it.whole[previous]
        if line > previous + 1:
            out.append("…")
        if joined:
            out[-1] += " " + it.lines[line]
        else:
            out.append(it.lines[line])
        previous = line
    if previous < len(it.lines) - 1:
        out.append("…")
    return "\n".join(out)

"""The best lines under a budget: which lines of a history to keep verbatim, so that what will be needed is still there.

A budgeted maximum-coverage problem over the names in the lines, solved by lazy greedy: a name is worth its rarity times the
chance that the assistant will need it again; a line is worth the names that nothing kept shows yet, per token that it costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proxy.compaction import entities
from proxy.compaction.entities import Scan

BARE = 0.6
"""What a name is worth in a line without words of context; the rest can be earned by a better line."""
CONTEXT_WORDS = 2
"""Words beside a name that make it understood."""

HEADER_TOKENS = 5
"""About what it costs to open a step in the summary: its number and its tool's name."""
GAP_TOKENS = 2
"""About what the mark of a gap costs."""
OLDEST = 0.85
"""What the oldest line is worth against the newest one that shows the same: files are read again after they were edited."""
SMALLEST_GAIN = 1e-6
"""Worth per token below which a line is not a candidate."""


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


class Picks:
    """Which lines of each source are kept so far, what they show, and what they cost (estimated tokens)."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.scans: list[Scan] = [entities.scan(source.text) for source in sources]
        self.chosen: list[set[int]] = [set() for _ in sources]
        self._costs = [
            [len(line) * source.rate + (1 + GAP_TOKENS if source.inline else 1) for line in scan.lines]
            for source, scan in zip(sources, self.scans, strict=True)
        ]
        self._openings = [0 if source.inline else HEADER_TOKENS for source in sources]
        self.covered: dict[str, float] = {}
        self.fresh = [OLDEST + (1 - OLDEST) * number / len(sources) for number in range(1, len(sources) + 1)]
        self._words: list[dict[int, int]] = [{} for _ in sources]
        self._own: dict[str, int] = {}
        self.spent = 0.0
        self._order: list[tuple[int, int, float]] = []

    def cost(self, source: int, line: int) -> float:
        """Estimated tokens of one more line."""
        cost = self._costs[source][line]
        return cost if self.chosen[source] else cost + self._openings[source]

    def take(self, source: int, line: int) -> None:
        cost = self.cost(source, line)
        self.chosen[source].add(line)
        self.spent += cost
        self._order.append((source, line, cost))
        self.show(self.scans[source].lines[line], self.scans[source].names[line])

    def drop(self, tokens: float) -> bool:
        """Give up the lines taken last, about so many tokens' worth; False when there is none left."""
        freed = 0.0
        while self._order and freed < tokens + 2:
            source, line, cost = self._order.pop()
            self.chosen[source].discard(line)
            # Estimates lean high on short lines; counting only a part of them makes one more round unlikely.
            freed += 0.9 * cost
        self.spent -= freed
        return freed > 0

    def show(self, line: str, names: Iterable[str]) -> None:
        """These names are shown by this line."""
        words = context_words(line)
        covered = self.covered
        for name in names:
            level = 1.0 if words - own_words(name) >= CONTEXT_WORDS else BARE
            if covered.get(name, 0.0) < level:
                covered[name] = level

    def show_all(self, text: str) -> None:
        """The whole text is there: its names are in their own context."""
        self.covered.update(dict.fromkeys(entities.scan(text).distinct, 1.0))

    def gain(self, source: int, line: int, needs: Mapping[str, float]) -> float:
        """What one more line would add per token."""
        scan = self.scans[source]
        covered, own, worth = self.covered, self._own, 0.0
        words = self._words[source].get(line, -1)
        for name in scan.names[line]:
            had = covered.get(name, 0.0)
            if had >= 1.0 or not (need := needs.get(name)):
                continue
            if words < 0:
                words = self._words[source][line] = context_words(scan.lines[line])
            if name not in own:
                own[name] = own_words(name)
            level = 1.0 if words - own[name] >= CONTEXT_WORDS else BARE
            if level > had:
                worth += need * (level - had)
        return worth / self.cost(source, line) * self.fresh[source]


def context_words(line: str) -> int:
    """About how many words a line has; scripts that write without spaces are reckoned by length."""
    return len(line.split()) if line.isascii() else len(line.split()) + sum(map(_WIDE.__lt__, line)) // 3


_WIDE = "\u3000"


def own_words(name: str) -> int:
    """How many of a line's words the name itself accounts for."""
    return context_words(name) or 1


class Choice:
    """The greedy choice of lines, which can go on when there turns out to be more room. needs: what each name is worth.

    Lazy: a line's worth only ever falls as others are taken, so that the best stale estimate is looked at first. The one
    exception, the first line of a step (which pays for the header), puts its siblings forward again.
    """

    def __init__(self, picks: Picks, needs: Mapping[str, float]) -> None:
        self._picks, self._needs = picks, needs
        self._bounds = _bounds(picks, needs)
        self._heap = [
            (-bound / picks.cost(source, line) * picks.fresh[source], -source, line)
            for source, found in enumerate(self._bounds)
            for line, bound in found.items()
        ]
        heapq.heapify(self._heap)
        self._too_long: list[tuple[float, int, int]] = []

    def take(self, room: float) -> None:
        """Take lines by worth per token until `room` tokens are spent in all."""
        picks, heap = self._picks, self._heap
        for entry in self._too_long:
            heapq.heappush(heap, entry)
        self._too_long.clear()
        while heap and picks.spent < room:
            _, at, line = heapq.heappop(heap)
            source = -at
            if line in picks.chosen[source]:
                continue
            gain = picks.gain(source, line, self._needs)
            if gain <= SMALLEST_GAIN:
                continue
            if heap and -gain > heap[0][0] + 1e-12:
                heapq.heappush(heap, (-gain, at, line))
            elif picks.spent + picks.cost(source, line) > room:
                self._too_long.append((-gain, at, line))
            else:
                self._add(source, line)

    def _add(self, source: int, line: int) -> None:
        picks = self._picks
        opens = not picks.sources[source].inline and not picks.chosen[source]
        picks.take(source, line)
        if opens:
            for other, bound in self._bounds[source].items():
                if other not in picks.chosen[source]:
                    heapq.heappush(self._heap, (-bound / picks.cost(source, other) * picks.fresh[source], -source, other))


def choose(picks: Picks, needs: Mapping[str, float], room: float) -> None:
    """Take lines by worth per token until `room` tokens are spent."""
    Choice(picks, needs).take(room)


def _bounds(picks: Picks, needs: Mapping[str, float]) -> list[dict[int, float]]:
    """For each source an upper bound of each line's worth: its names as if all had context. Lines without worth are left out."""
    covered = picks.covered
    open_needs = {name: need * (1 - covered.get(name, 0.0)) for name, need in needs.items()}
    worth_of = open_needs.get
    found: list[dict[int, float]] = []
    for scan in picks.scans:
        bounds: dict[int, float] = {}
        for line, names in enumerate(scan.names):
            worth = 0.0
            for name in names:
                worth += worth_of(name, 0.0)
            if worth > 0.0:
                bounds[line] = worth
        found.append(bounds)
    return found


GAPS = ("…", "[…")
"""How a line begins that only says that something was left out: an earlier event wrote it, and it is worth no room."""


def fill(picks: Picks, room: float) -> None:
    """Spend what is left on the newest lines."""
    for source in range(len(picks.sources) - 1, -1, -1):
        for line in range(len(picks.scans[source].lines) - 1, -1, -1):
            if picks.spent >= room:
                return
            if line in picks.chosen[source] or picks.scans[source].lines[line].startswith(GAPS):
                continue
            if picks.spent + picks.cost(source, line) <= room:
                picks.take(source, line)


def excerpt(scan: Scan, chosen: Iterable[int]) -> list[str]:
    """The chosen lines in order; pieces of one long line are joined again."""
    out: list[str] = []
    previous = -2
    for line in sorted(chosen):
        if previous == line - 1 and not scan.whole[previous]:
            out[-1] += " " + scan.lines[line]
        else:
            out.append(scan.lines[line])
        previous = line
    return out


def in_place(text: str, chosen: set[int]) -> str:
    """The text of a result that stays, with the lines that were left out marked; the very text when nothing was."""
    scan = entities.scan(text)
    if len(chosen) == len(scan.lines):
        return text
    if not chosen:
        return f"[… {len(scan.lines)} line{'s' if len(scan.lines) > 1 else ''} left out]"
    out: list[str] = []
    previous = -1
    for line in sorted(chosen):
        if previous == line - 1 and previous >= 0 and not scan.whole[previous]:
            out[-1] += " " + scan.lines[line]
        else:
            out.extend((["…"] if line > previous + 1 else []) + [scan.lines[line]])
        previous = line
    if previous < len(scan.lines) - 1:
        out.append("…")
    return "\n".join(out)

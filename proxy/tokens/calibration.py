"""What the answers teach: how an upstream's own counts differ from ours.

Every answer says how many tokens its prompt had. Per upstream, model and use of tools that gives a straight line from our
count to theirs; within one conversation, a point that the line must go through.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, repeat
from statistics import median
from typing import Any, NamedTuple, TypeVar

import msgspec

from proxy.conversation import Message, Messages

Held = TypeVar("Held")

SLOPES = (0.5, 2.0)
"""No tokenizer in use differs more from o200k on text."""

COLD_OPENAI, COLD_CLAUDE, COLD_OTHERS = 1.0, 1.15, 1.1

COLD_MARGIN = 0.10
COLD_MARGIN_OPENAI = 0.02
"""Of the recorded pairs, 98 % lie within."""

WIDEST_MARGIN = 0.20
LEAST_MARGIN, LEAST_MARGIN_OPENAI = 0.03, 0.01
ENOUGH = 5
"""Samples until a line is drawn, and refusals in a row until they are believed."""

KEPT_SAMPLES = 40
"""Per key: 780 slopes between pairs, half a millisecond."""

SAID_WITHIN = 0.01
"""An answer this near to the line teaches it nothing: a full line is then drawn anew only once its samples are all new."""

REDRAWN_AFTER = 20
"""Answers between two drawings of a full line where they are not near it: half of the samples. A drawing costs more than all
else that a small request does."""

KEPT_KEYS = 512
KEPT_ANCHORS = 4096
LONGEST_NAME = 200

EXACT_WITHIN = 0.005
"""A model whose median answer agrees this well is counted exactly: its outliers must not bend the line."""

APART = 100
"""Tokens between two samples that tell a slope: framing alone differs by ten or twenty."""

LONG = 500
"""Tokens of a sample that may lower the slope: a short greeting would halve it, and a long request then overflow."""

IMPLAUSIBLE = SLOPES[0]
"""Of our own count: an upstream that reports less than this for a long request did not read it whole, or counts only what it
had not cached. However often that happens, it says nothing of its tokenizer."""

FAR = 1.5
"""Times what was expected, or a part of it: then it was not the request that we counted."""

FAR_COLD = 4.0
SLACK = 1_000
"""Tokens that an upstream may add to any request: Groq adds 662 for tools."""


# A Struct, because most requests have one of their own
class Calibration(msgspec.Struct, frozen=True):
    """Ours → theirs: tokens = slope · count + offset, for one upstream and model; a frozen value that travels with a ruler.

    margin: the share of the window to keep free because this may be wrong. samples: how many answers it was learned from.
    least: theirs for one of ours at the least; it matters only for a line through a known request that lies below the usual.
    """

    slope: float = 1.0
    offset: float = 0.0
    margin: float = 0.0
    samples: int = 0
    least: float = 0.0

    def tokens(self, count: float) -> float:
        """What the upstream would count where we count this many."""
        return max(self.slope * count + self.offset, self.least * count)

    def through(self, estimated: int, reported: int) -> Calibration:
        """The line of a conversation of which one request is known: our count of it, and theirs.

        What came after costs as usual. What is shorter than the known request costs its part of it.
        """
        if estimated <= 0:
            return self
        offset = reported - self.slope * estimated
        return Calibration(self.slope, offset, self.margin, self.samples, 0.0 if offset >= 0 else reported / estimated)


EXACT = Calibration()


class Key(NamedTuple):
    """What shares a line. tools: whether the request offers any, which upstreams render in very different ways.

    media: whether it carries pictures, recordings or files, whose price is a guess and must not bend the line of texts.
    """

    upstream: str
    model: str
    tools: bool
    media: bool = False


def cold(model: str) -> Calibration:
    """What is assumed of a model (its bare name) before its first answer."""
    if model.startswith(("gpt-3", "gpt-4", "gpt-5", "chatgpt", "o1", "o3", "o4", "codex")):
        return Calibration(COLD_OPENAI, margin=COLD_MARGIN_OPENAI)
    return Calibration(COLD_CLAUDE if "claude" in model else COLD_OTHERS, margin=COLD_MARGIN)


def chain(messages: Sequence[Message], around: int = 0) -> list[int]:
    """A mark of every prefix, shortest first: equal where the messages said the same. Good within this process only.

    around: tells apart what stands around the messages (`ruler.around`): other tools make another conversation.
    """
    if not isinstance(messages, Messages):
        return _marked(messages, [], around)
    name = "marks", around
    marks: list[int] | None = messages.notes.get(name)
    if marks is None:
        marks = _marked(messages, list(messages.noted_of_base(name) or ()), around)
        messages.keep(name, marks)
    return marks


def _marked(messages: Sequence[Message], marks: list[int], around: int) -> list[int]:
    """The marks of the first messages, gone on with for the rest of them."""
    mark = marks[-1] if marks else around
    for message in messages[len(marks) :]:
        mark = hash((mark, message))
        marks.append(mark)
    return marks


@dataclass(slots=True)
class _Line:
    """The answers of one key. refused: those that did not fit, since the last one that did. since: answers since it was drawn.

    full: whether it has all the samples that it can have, and none was refused since.
    """

    samples: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    refused: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ENOUGH))
    fitted: Calibration | None = None
    since: int = 0
    full: bool = False


class Calibrator:
    """Learns from answers; holds a bounded number of keys and anchors, the longest unused go first. For one thread."""

    def __init__(self, *, keys: int = KEPT_KEYS, anchors: int = KEPT_ANCHORS) -> None:
        self._most_keys, self._most_anchors = keys, anchors
        self._lines: OrderedDict[Key, _Line] = OrderedDict()
        self._anchors: OrderedDict[tuple[Key, int], tuple[int, int]] = OrderedDict()

    def calibration(self, key: Key, prefixes: Sequence[int] = ()) -> Calibration:
        """The line for a request. prefixes: its `chain`; the longest one that was answered before is the anchor."""
        line = self._lines.get(key)
        if line is None:
            key = _bounded(key)
            line = self._lines.get(key)
        learned = cold(key.model) if line is None else line.fitted or _fitted(key, line)
        at = next(filter(self._anchors.__contains__, zip(repeat(key), reversed(prefixes))), None)
        if at is None:
            return learned
        self._anchors.move_to_end(at)
        return learned.through(*self._anchors[at])

    def observe(self, key: Key, estimated: int, reported: int, *, prefixes: Sequence[int] = ()) -> bool:
        """Learn from one answer; False when it was refused.

        estimated: our own count of the request as it was forwarded, before calibration (`ruler.raw`). reported: the
        `usage.prompt_tokens` of its answer. prefixes: the `chain` of the forwarded messages.
        """
        key = _bounded(key)
        if estimated <= 0 or reported <= 0 or (estimated >= LONG and reported < IMPLAUSIBLE * estimated):
            return False
        line = self._lines.setdefault(key, _Line())
        self._lines.move_to_end(key)
        _forget_oldest(self._lines, self._most_keys)
        drawn = _fitted(key, line)
        if not _believable(drawn, estimated, reported):
            line.refused.append((estimated, reported))
            line.full = False
            if len(line.refused) < ENOUGH:
                return False
            # Five in a row: the upstream has changed, not the requests.
            line.samples.clear()
            line.samples.extend(line.refused)
        else:
            line.samples.append((estimated, reported))
        line.refused.clear()
        line.full = len(line.samples) == KEPT_SAMPLES
        line.since += 1
        near = abs(drawn.tokens(estimated) - reported) <= SAID_WITHIN * reported
        if not line.full or line.since >= (KEPT_SAMPLES if near else REDRAWN_AFTER):
            line.fitted, line.since = None, 0
        if prefixes:
            self._anchors[key, prefixes[-1]] = (estimated, reported)
            self._anchors.move_to_end((key, prefixes[-1]))
            _forget_oldest(self._anchors, self._most_anchors)
        return True

    def says_all(self, key: Key, estimated: int, reported: int) -> bool:
        """Whether the line is drawn from all the samples that it can have, and this answer lies on it: it teaches nothing.

        estimated: our count as it was calibrated for the request.
        """
        line = self._lines.get(key)
        if line is None or not line.full:
            return False
        self._lines.move_to_end(key)
        return abs(estimated - reported) <= EXACT_WITHIN * reported

    def learned(self) -> Mapping[Key, Calibration]:
        """Every line that answers have taught, for people to see."""
        return {key: _fitted(key, line) for key, line in self._lines.items() if line.samples}


def _bounded(key: Key) -> Key:
    if len(key.upstream) <= LONGEST_NAME and len(key.model) <= LONGEST_NAME:
        return key
    return key._replace(upstream=key.upstream[:LONGEST_NAME], model=key.model[:LONGEST_NAME])


def _forget_oldest(held: OrderedDict[Held, Any], most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)


def _believable(line: Calibration, estimated: int, reported: int) -> bool:
    expected = line.tokens(estimated)
    far = FAR if line.samples >= ENOUGH else FAR_COLD
    return expected / far - SLACK <= reported <= expected * far + SLACK


def _fitted(key: Key, line: _Line) -> Calibration:
    if line.fitted is None:
        line.fitted = fit(tuple(line.samples), cold(key.model))
    return line.fitted


def fit(samples: Sequence[tuple[int, int]], start: Calibration) -> Calibration:
    """The robust line through (our count, theirs); `start` with its offset moved while there are too few samples."""
    if not samples:
        return start
    count = len(samples)
    if abs(median(theirs / ours for ours, theirs in samples) - 1) <= EXACT_WITHIN and start.slope == 1:
        line = Calibration(samples=count)
    elif count < ENOUGH:
        return msgspec.structs.replace(_line(samples, None, start.slope), margin=start.margin, samples=count)
    else:
        line = msgspec.structs.replace(_line(samples, _slope(samples), start.slope), samples=count)
    return msgspec.structs.replace(line, margin=start.margin if count < ENOUGH else _margin(samples, line))


def _slope(samples: Sequence[tuple[int, int]]) -> float | None:
    """The median slope between two samples that lie apart; None when all are about as long."""
    sizes = [ours for ours, _ in samples]
    if max(sizes) - min(sizes) <= APART:
        return None
    slopes = [
        (their_b - their_a) / (our_b - our_a)
        for (our_a, their_a), (our_b, their_b) in combinations(samples, 2)
        if abs(our_b - our_a) > max(APART, 0.2 * max(our_a, our_b))
    ]
    return _clamped(median(slopes), *SLOPES) if len(slopes) >= ENOUGH else None


def _line(samples: Sequence[tuple[int, int]], slope: float | None, usual: float) -> Calibration:
    """The line of this slope through the middle of the samples; of the usual slope, where that is believable."""
    offset = median(theirs - (slope or usual) * ours for ours, theirs in samples)
    if offset >= 0 and (slope is not None or offset <= SLACK):
        return Calibration(slope or usual, offset)
    ratios = [theirs / ours for ours, theirs in samples if ours >= LONG]
    steady = _clamped(median(ratios), *SLOPES) if ratios else (slope or usual)
    return Calibration(steady, max(0.0, median(theirs - steady * ours for ours, theirs in samples)) if offset > 0 else 0.0)


def _margin(samples: Iterable[tuple[int, int]], line: Calibration) -> float:
    """What the worst but a twentieth of the samples went over the line."""
    over = sorted(theirs / max(1.0, line.tokens(ours)) - 1 for ours, theirs in samples)
    least = LEAST_MARGIN_OPENAI if line.slope == 1 and not line.offset else LEAST_MARGIN
    return _clamped(over[int(0.95 * (len(over) - 1))], least, WIDEST_MARGIN)


def _clamped(value: float, least: float, most: float) -> float:
    return max(least, min(most, value))

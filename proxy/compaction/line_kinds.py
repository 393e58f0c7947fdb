"""What a text made of lines is (diff, table, search results, code, stack trace, log), and which of its lines carry the most."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Sequence

from proxy.compaction.signals import is_error_line

_SAMPLE = 200  # lines looked at to tell the kind


class Kind(enum.Enum):
    DIFF = "diff"
    TABLE = "table"
    SEARCH = "search"
    CODE = "code"
    TRACE = "trace"
    LOG = "log"


_HUNK = re.compile(r"@@ -\d|diff --git |\+\+\+ |--- |Index: ")
_ROW = re.compile(r"\s*\|.*\|\s*$|[^,\t]+(?:\t[^\t]+){2,}$|[^,]*(?:,[^, ][^,]*){3,}$")
_MATCH = re.compile(r"(?:[A-Za-z]:)?[\w./@+~-]+[.\w]+[:-]\d+[:-]|[\w./@+~-]*/[\w./@+~-]+:")
_NUMBERED = re.compile(r"\s*\d+\s*(?:→|\||\t|: )")
_NUMBER = r"(?:\s*\d+\s*(?:→|\||\t|: )\s?)?"
_MODIFIERS = (
    r"(?:(?:export|public|private|protected|internal|static|async|default|abstract|final|pub(?:\([a-z]+\))?|unsafe|virtual|"
    r"override|extern)\s+)*"
)
_KEYWORDS = (
    r"(?:def|class|func|function|fn|interface|struct|enum|trait|impl|type|module|namespace|protocol|object|record|sub|"
    r"defmodule|defp?|procedure|CREATE (?:TABLE|VIEW|INDEX)|create table)\b"
)
_DEFINITION = re.compile(_NUMBER + r"\s{0,8}" + _MODIFIERS + _KEYWORDS)
_CODE = re.compile(
    r"\s*(?:import |from \S+ import|#include|package |using |require\(|const |let |var |return\b|if\s*\(|if .+:$|for\s*\(|@\w+|"
    r"[\w.\[\]]+ [:+-]?= \S)|.*[{};]\s*$"
)
_FRAME = re.compile(
    r"\s*(?:File \"[^\"]+\", line \d+|at [\w$.<>/\[\] ]+\(|at \S+:\d+|\d+: 0x[0-9a-f]+|#\d+\s+(?:0x[0-9a-f]+|\S+\()|"
    r"from \S+:\d+:in|\S+\.go:\d+ \+0x)"
)
_TRACE_HEAD = re.compile(
    r"Traceback \(most recent call last\)|Exception in thread|panicked at|goroutine \d+ \[|^\s*Caused by:|stack backtrace"
)
_TALLY_WORDS = (
    r"(?:Tests?|Test Suites|Snapshots|Ran|Total|Passed|Failed|Failures|Errors|Summary|Result|Finished|Compiled|Built?|BUILD|"
    r"Done|Time|Elapsed|Duration)\b"
)
_SUMMARY = re.compile(
    r"\s*(?:[=-]{3,}.*(?:passed|failed|error|skipped|warnings?|in \d).*"
    rf"|{_TALLY_WORDS}.{{0,100}}\d.*"
    r"|test result: .*|FAILED .*|PASS|FAIL.*|ok\s+\S+\s+[\d.]+s|<returncode>.*"
    r"|\d+ (?:passing|failing|pending|passed|failed|errors?|warnings?|problems?|tests?|files? changed)\b.*"
    r"|(?:process )?(?:exit(?:ed)?|return(?:ed)?)[ _-]?(?:code|status|with)?\b.{0,40}\d+.*"
    r"|\[?exit(?: code| status)?:? ?\d+\]?.*)\s*$",
    re.IGNORECASE,
)


def kind_of(lines: Sequence[str]) -> Kind:
    """What the lines are, told from a sample of them."""
    sample = (
        lines if len(lines) <= _SAMPLE else [*lines[: _SAMPLE // 2], *lines[len(lines) // 2 : len(lines) // 2 + _SAMPLE // 2]]
    )
    filled = [line[:300] for line in sample if line.strip()]
    if not filled:
        return Kind.LOG

    def share(pattern: re.Pattern[str]) -> float:
        return sum(1 for line in filled if pattern.match(line)) / len(filled)

    if any(line.startswith(("@@ -", "diff --git ")) for line in filled):
        return Kind.DIFF
    if any(_TRACE_HEAD.search(line) for line in filled) and share(_FRAME) > 0.15:
        return Kind.TRACE
    if share(_NUMBERED) > 0.7:
        return Kind.CODE
    if share(_MATCH) > 0.6:
        return Kind.SEARCH
    if share(_ROW) > 0.7:
        return Kind.TABLE
    if share(_CODE) + share(_DEFINITION) > 0.4:
        return Kind.CODE
    return Kind.LOG


def important(lines: Sequence[str], kind: Kind) -> list[int]:
    """Indices of error, exit and summary lines. In code and diffs words about errors are content: only the rest counts there."""
    if kind in (Kind.CODE, Kind.DIFF, Kind.SEARCH):
        return [
            i
            for i, line in enumerate(lines)
            if len(line) < 400 and not _NUMBERED.match(line) and line[:1] not in "+- @" and is_error_line(line)
        ]
    return [i for i, line in enumerate(lines) if len(line) < 1_000 and (is_error_line(line) or _SUMMARY.match(line))]


def outline(lines: Sequence[str], kind: Kind) -> list[int]:
    """Indices of the lines that tell the structure, the most telling first."""
    match kind:
        case Kind.DIFF:
            files = [i for i, line in enumerate(lines) if line.startswith(("diff --git ", "Index: "))]
            hunks = [i for i, line in enumerate(lines) if _HUNK.match(line)]
            return [*files, *hunks, *(i for i, line in enumerate(lines) if line[:1] in "+-" and line[1:].strip())]
        case Kind.CODE:
            return [i for i, line in enumerate(lines) if _DEFINITION.match(line)]
        case Kind.TABLE:
            return list(range(min(2, len(lines))))
        case Kind.SEARCH:
            return _first_of_each(lines)
        case Kind.TRACE:
            return _frame_ends(lines)
        case Kind.LOG:
            return []


def fold_shapes(lines: Sequence[str], most: int = 4) -> list[str]:
    """Log lines with those of one shape (the same but for numbers) beyond `most` left out and counted where they stood."""
    shapes = [_shape(line) for line in lines]
    total = Counter(shapes)
    seen: Counter[str] = Counter()
    out: list[str] = []
    skipped: list[str] = []
    for line, shape in zip(lines, shapes, strict=True):
        seen[shape] += 1
        if shape and total[shape] > most and 2 < seen[shape] < total[shape]:
            skipped.append(line)
        else:
            out += _counted(skipped)
            skipped = []
            out.append(line)
    return out + _counted(skipped)


def _counted(skipped: list[str]) -> list[str]:
    """A marker for the lines, or the lines themselves where they are shorter than it."""
    marker = f"[… {len(skipped):,} similar {'line' if len(skipped) == 1 else 'lines'} …]"
    return [marker] if sum(map(len, skipped)) + len(skipped) > len(marker) else skipped


_VARYING = re.compile(r"0x[0-9a-fA-F]+|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\d+")


def _shape(line: str) -> str:
    return _VARYING.sub("#", line[:200]).strip()


def _first_of_each(lines: Sequence[str]) -> list[int]:
    """The first match of each file."""
    seen: set[str] = set()
    first: list[int] = []
    for i, line in enumerate(lines):
        found = re.match(r"[^:\s]+", line)
        if found and found.group() not in seen:
            seen.add(found.group())
            first.append(i)
    return first


def _frame_ends(lines: Sequence[str]) -> list[int]:
    """The head of each trace, its first frame and its last two with the message."""
    picked: list[int] = []
    i = 0
    while i < len(lines):
        if not _TRACE_HEAD.search(lines[i]):
            i += 1
            continue
        frames = [i]
        j = i + 1
        while j < len(lines) and (lines[j][:1].isspace() or _FRAME.match(lines[j])):
            if _FRAME.match(lines[j]):
                frames.append(j)
            j += 1
        ends = [i, *frames[1:2], *frames[-2:]]
        picked += [n for k in ends for n in (k, k + 1) if n < len(lines)]
        if j < len(lines):
            picked.append(j)
        i = max(j, i + 1)
    return list(dict.fromkeys(picked))

"""What the summary quotes before anything else: the conclusion, what was asked, what went wrong, what binds.

Each kind has a cap of its own, so that none can push out the others; within a kind the newest comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.compaction import entities, signals
from proxy.compaction.ledger import EMPTY, FileUse, Ledger, failure_line, shortened
from proxy.tokens import Ruler

CONCLUSION_SHARE, CONCLUSION_TOKENS = 0.04, 90
"""Of the room, but at least so many tokens: the newest words of the assistant."""
REQUESTS_SHARE = 0.40
ERRORS_SHARE, ERRORS_TOKENS, ERRORS = 0.20, 160, 8
"""The newest error lines: of the room, but at least so many tokens, and how many lines."""
MORE_ERRORS_SHARE, MORE_ERRORS = 0.06, 30
CONSTRAINTS_SHARE = 0.15
CARRIED_SHARE, LONGEST_CARRIED = 0.15, 200
"""Unresolved errors of an earlier summary, and the characters that one may take."""
FILES_SHARE, FILES_TOKENS = 0.06, 160
"""Files that were edited: of the room, but at least so many tokens where that is not more than an eighth of it."""
NOTES_SHARE = 0.03
"""Next step, decisions, resolved errors: what the lines of the digest mostly show anyway."""


@dataclass(frozen=True, slots=True)
class Quote:
    """One item of the summary. section: one of the ledger's."""

    section: str
    text: str


@dataclass(slots=True)
class _Purse:
    """Tokens left of a cap."""

    ruler: Ruler
    left: float

    def pays(self, text: str, overhead: int = 3) -> bool:
        """True, and paid, when the text fits."""
        if self.left < overhead + 1:
            return False
        cost = self.ruler.text(text) + overhead
        if cost > self.left:
            return False
        self.left -= cost
        return True


def quotes(
    book: Ledger,
    *,
    last_words: str,
    errors: Sequence[str],
    room: float,
    ruler: Ruler,
    goal: bool,
    carried: Ledger = EMPTY,
) -> list[Quote]:
    """What is quoted, in the order of reading.

    last_words: the newest words of the assistant, empty when they stay in place. errors: distinct error lines, newest first.
    room: tokens that the summary may take in all. goal: the first task does not stay in place. carried: the ledger of an earlier
    summary, whose errors and files go on being quoted, the oldest first: what is dropped once is lost for good.
    """
    found: list[Quote] = []
    if goal and book.goal:
        found.append(Quote("Goal", _bounded(book.goal, 0.15 * room, ruler)))
    found.extend(_requests(book, room, ruler, leave_out=book.goal if goal else ""))
    shown = "\n".join(quote.text for quote in found)
    purse = _Purse(ruler, CONSTRAINTS_SHARE * room)
    bound = [text for text in reversed(book.constraints) if text not in shown and purse.pays(text)]
    found.extend(Quote("Constraints", text) for text in reversed(bound))
    found.extend(_errors(book, errors, carried, room, ruler))
    if last_words.strip():
        limit = max(CONCLUSION_TOKENS, CONCLUSION_SHARE * room)
        found.append(Quote("Conclusions", _bounded(last_words.strip(), min(limit, room / 3), ruler)))
    found.extend(_notes(book, carried, room, ruler))
    return found


def _bounded(text: str, tokens: float, ruler: Ruler) -> str:
    """The text, or its beginning and end, in about `tokens`."""
    size = ruler.text(text)
    if size <= tokens:
        return text
    return shortened(text, max(40, int(len(text) * tokens / size)))


def _requests(book: Ledger, room: float, ruler: Ruler, leave_out: str) -> list[Quote]:
    """Lines of requests: open ones first, the newest first; of each kind, what plainly asks before the rest."""
    asked = [request for request in book.user_requests if request.text != leave_out]
    lines = [entities.split_lines(request.text)[0] for request in asked]
    chosen: list[set[int]] = [set() for _ in asked]
    purse = _Purse(ruler, REQUESTS_SHARE * room)
    for answered in (False, True):
        of_kind = [position for position in range(len(asked) - 1, -1, -1) if asked[position].answered == answered]
        for key_lines in (True, False):
            for position in of_kind:
                wanted = set(signals.requests(asked[position].text)) if key_lines and len(lines[position]) > 2 else set()
                for number, line in enumerate(lines[position]):
                    if number in chosen[position] or (wanted and not any(sentence in line for sentence in wanted)):
                        continue
                    if purse.pays(line, 1 if chosen[position] else 3):
                        chosen[position].add(number)
    found = []
    for request, texts, kept in zip(asked, lines, chosen, strict=True):
        if kept:
            section = "User requests (answered)" if request.answered else "User requests (open)"
            whole = len(kept) == len(texts)
            found.append(Quote(section, request.text if whole else "\n".join(texts[number] for number in sorted(kept))))
    return found


def _errors(book: Ledger, recent: Sequence[str], carried: Ledger, room: float, ruler: Ruler) -> list[Quote]:
    unresolved = {failure.signature: failure for failure in book.unresolved}
    purse = _Purse(ruler, CARRIED_SHARE * room)
    old = [shortened(failure.first, LONGEST_CARRIED) for failure in carried.unresolved if failure.signature in unresolved]
    kept = [line for line in dict.fromkeys(old) if purse.pays(line)]
    purse = _Purse(ruler, errors_room(room))
    newest = [line for line in recent[:ERRORS] if line not in kept and purse.pays(line)]
    known = {*kept, *newest}
    purse = _Purse(ruler, MORE_ERRORS_SHARE * room)
    older = [
        failure_line(failure) for failure in reversed(book.unresolved) if failure.first not in known and failure.last not in known
    ]
    more = [line for line in dict.fromkeys([*recent[ERRORS:], *older][:MORE_ERRORS]) if line not in known and purse.pays(line)]
    return [Quote("Errors (unresolved)", line) for line in (*kept, *reversed([*newest, *more]))]


def errors_room(room: float) -> float:
    """Tokens for the newest error lines: a share, but where there is little room they come before most else."""
    return max(ERRORS_SHARE * room, min(ERRORS_TOKENS, room / 2))


def _notes(book: Ledger, carried: Ledger, room: float, ruler: Ruler) -> list[Quote]:
    purse = _Purse(ruler, max(FILES_SHARE * room, min(FILES_TOKENS, room / 8)))
    now = {use.path: use for use in book.files if use.edited}
    old = [now[use.path] for use in carried.files if use.path in now]
    files = [use for use in dict.fromkeys((*old, *reversed(now.values()))) if purse.pays(_file_line(use))]
    purse = _Purse(ruler, NOTES_SHARE * room)
    resolved = (failure for failure in reversed(book.errors) if failure.resolved_by is not None)
    notes = [
        *([Quote("Next step", book.next_step)] if book.next_step else []),
        *(Quote("Decisions", text) for text in reversed(book.decisions)),
        *(Quote("Errors (resolved)", failure_line(failure)) for failure in resolved),
    ]
    kept = [note for note in notes if purse.pays(note.text)]
    return [*(Quote("Files", _file_line(use)) for use in files), *reversed(kept)]


def _file_line(use: FileUse) -> str:
    return f"{use.path} ({', '.join(use.operations)})"

"""What was done to a request and why, kept for people to look at: a bounded number of bytes, masked by default."""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import msgspec

from proxy.compaction import CompactionResult, CriticalItems, LayerReport
from proxy.conversation import Conversation, Message, Opaque, Text, ToolCall, ToolResult
from proxy.windows import Budget

Change = Literal["kept", "edited", "removed", "added"]

SHOWN = 20_000
"""Characters of one message that are kept: enough to read, and one endless log does not push out everything else."""
MASKED = 400
"""Masked characters of one message that are kept: they show its shape and no more."""
MASK = "•"

K = TypeVar("K", int, Message)


@dataclass(frozen=True, slots=True)
class View:
    """One message as it is shown. index: its place in its array. tokens: by our count. text: masked unless asked otherwise.

    calls: names of the tools that it calls. media: kinds of what is no text. cut: characters that are not shown.
    """

    index: int
    role: str
    tokens: int
    characters: int
    text: str
    calls: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A message before and after, side by side. layer: the one that changed it, where that is known."""

    change: Change
    before: View | None = None
    after: View | None = None
    layer: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One request over its budget. at: Unix time. tokens, window, usable, trigger, target: tokens by our count.

    outcome, reason: as in the response headers. rows: all messages in order, before beside after.
    """

    id: str
    at: float
    model: str
    outcome: str
    reason: str | None
    tokens_before: int
    tokens_after: int
    window: int
    usable: int
    trigger: int
    target: int
    layers: tuple[LayerReport, ...]
    critical: CriticalItems
    rows: tuple[Row, ...]
    masked: bool = True


@dataclass(frozen=True, slots=True)
class Brief:
    """An explanation's line in the list."""

    id: str
    at: float
    model: str
    outcome: str
    reason: str | None
    tokens_before: int
    tokens_after: int
    layers: tuple[str, ...]


def new_id() -> str:
    """An id that cannot be guessed: whoever has it had the response's header."""
    return secrets.token_hex(8)


def explain(
    id: str,
    *,
    at: float,
    model: str,
    outcome: str,
    reason: str | None,
    before: Conversation,
    result: CompactionResult,
    budget: Budget,
    stages: Sequence[tuple[str, Conversation]] = (),
    full_text: bool = False,
) -> Explanation:
    """The explanation of one event. stages: (layer, conversation after it), where known, to tell who changed what.

    A result that was not forwarded (`outcome` neither applied, reused nor shadow) is explained without its messages' changes.
    """
    after = result.conversation if outcome in ("applied", "reused", "shadow") else before
    views = _Views(budget, full_text)
    return Explanation(
        id,
        round(at, 3),
        model,
        outcome,
        reason,
        result.tokens_before,
        result.tokens_after if after is not before else result.tokens_before,
        budget.window,
        budget.usable,
        budget.trigger,
        budget.target,
        result.reports,
        result.critical,
        tuple(_rows(before.messages, after.messages, _authors(before.messages, stages), views)),
        not full_text,
    )


class _Views:
    """How messages are shown."""

    def __init__(self, budget: Budget, full_text: bool) -> None:
        self._ruler, self._full_text = budget.ruler, full_text

    def of(self, index: int, message: Message) -> View:
        text = "\n".join(filter(None, (_said(part) for part in message.parts)))
        room = SHOWN if self._full_text else MASKED
        shown = text[:room] if self._full_text else re.sub(r"\S", MASK, text[:room])
        return View(
            index,
            message.role if message.role.isidentifier() else "other",
            self._ruler.message(message),
            len(text),
            _whole(shown),
            tuple(_whole(call.name) for call in message.calls),
            tuple(part.kind for part in message.parts if isinstance(part, Opaque)),
            max(len(text) - room, 0),
        )


def _whole(text: str) -> str:
    """Without lone surrogates, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-8", "replace").decode()


def _said(part: object) -> str:
    match part:
        case Text(text=text) | ToolResult(text=text):
            return text
        case ToolCall(name=name, arguments=arguments):
            return f"{name}({arguments})"
        case _:
            return ""


def _rows(before: Sequence[Message], after: Sequence[Message], authors: _Authors, views: _Views) -> Iterator[Row]:
    """Side by side in order: what was removed stands before what was put in its place."""
    partner = _partners(before, after)
    left, added = 0, list[Row]()
    for place, message in enumerate(after):
        origin = partner.get(place)
        if origin is None:
            added.append(Row("added", None, views.of(place, message), authors.added.get(message)))
            continue
        yield from _removed(before, range(left, origin), authors, views)
        yield from added
        added, left = [], origin + 1
        old = before[origin]
        change: Change = "kept" if old is message or old == message else "edited"
        layer = authors.changed.get(origin) if change == "edited" else None
        yield Row(change, views.of(origin, old), views.of(place, message), layer)
    yield from _removed(before, range(left, len(before)), authors, views)
    yield from added


def _removed(before: Sequence[Message], places: Iterable[int], authors: _Authors, views: _Views) -> Iterator[Row]:
    for place in places:
        yield Row("removed", views.of(place, before[place]), None, authors.changed.get(place))


def _partners(before: Sequence[Message], after: Sequence[Message]) -> dict[int, int]:
    """Index after → index before of what is the same message, perhaps edited; strictly ascending on both sides.

    An edited message holds the very bytes that it was made from; one that was resumed from a checkpoint is only equal.
    """
    same = {id(message): place for place, message in enumerate(before)}
    made_from = {id(message.raw): place for place, message in enumerate(before) if message.raw is not None}
    alike: dict[Message, list[int]] = {}
    for place, message in enumerate(before):
        alike.setdefault(message, []).append(place)
    found: dict[int, int] = {}
    least = 0
    for place, message in enumerate(after):
        origin = same.get(id(message))
        if origin is None and message.origin is not None:
            origin = made_from.get(id(message.origin))
        if origin is None:
            origin = next((one for one in alike.get(message, ()) if one >= least), None)
        if origin is not None and origin >= least:
            found[place] = origin
            least = origin + 1
    return found


@dataclass(frozen=True, slots=True)
class _Authors:
    """Who did it: for the messages before by their place, for those that were put in by what they say."""

    changed: dict[int, str]
    added: dict[Message, str]


def _authors(before: Sequence[Message], stages: Sequence[tuple[str, Conversation]]) -> _Authors:
    """The layer after which a message stayed as it ended: one that starts over undoes what milder ones have done."""
    changed: dict[int, str] = {}
    added: dict[Message, str] = {}
    fates = [_fates(before, conversation.messages) for _, conversation in stages]
    for place in range(len(before)):
        changed |= _first_as_last([fate.get(place) for fate in fates], stages, place)
    there = [frozenset(conversation.messages) for _, conversation in stages]
    for message in there[-1] if there else ():
        added |= _first_as_last([message in messages for messages in there], stages, message)
    return _Authors(changed, added)


def _fates(before: Sequence[Message], after: Sequence[Message]) -> dict[int, Message]:
    """What became of each message before, by its place; one that is gone is not there."""
    return {origin: after[place] for place, origin in _partners(before, after).items()}


def _first_as_last(states: Sequence[object], stages: Sequence[tuple[str, Conversation]], key: K) -> dict[K, str]:
    """The layer of the first stage from which on the state was the last one's."""
    first = len(states)
    while first and states[first - 1] == states[-1]:
        first -= 1
    return {key: stages[first][0]} if first < len(states) else {}


class Shelf(Protocol):
    """Where explanations are kept; safe to use from any thread, and reading may wait for a disk."""

    def add(self, explanation: Explanation) -> None:
        """Keeps it, and forgets the oldest for it. One that is larger than everything together is kept without its rows."""

    def written(self, id: str) -> bytes | None:
        """The explanation as JSON, None when it is not (or no longer) there."""

    def recent(self, limit: int = 100) -> tuple[Brief, ...]:
        """Newest first."""


def write(explanation: Explanation, max_bytes: int) -> bytes:
    """It as JSON; without its rows when it would be larger than `max_bytes`."""
    written = msgspec.json.encode(explanation)
    return written if len(written) <= max_bytes else msgspec.json.encode(replace(explanation, rows=()))


def read(written: bytes) -> Explanation:
    return msgspec.json.decode(written, type=Explanation)


class Explanations:
    """The newest explanations in memory, as many as go into `max_bytes`."""

    def __init__(self, max_bytes: int = 32 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[Brief, bytes]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def add(self, explanation: Explanation) -> None:
        written = write(explanation, self._max_bytes)
        with self._lock:
            self._forget(explanation.id)
            self._kept[explanation.id] = (brief(explanation), written)
            self._size += len(written)
            while self._size > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def _forget(self, id: str) -> None:
        kept = self._kept.pop(id, None)
        if kept is not None:
            self._size -= len(kept[1])

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return self._size

    def written(self, id: str) -> bytes | None:
        with self._lock:
            kept = self._kept.get(id)
        return None if kept is None else kept[1]

    def recent(self, limit: int = 100) -> tuple[Brief, ...]:
        with self._lock:
            return tuple(one for one, _ in list(reversed(self._kept.values()))[:limit])


def brief(explanation: Explanation) -> Brief:
    """Its line in the list."""
    e = explanation
    layers = tuple(report.layer for report in e.layers if report.saved > 0 and report.refused is None)
    return Brief(e.id, e.at, e.model, e.outcome, e.reason, e.tokens_before, e.tokens_after, layers)

"""Recorded conversations, sent again turn by turn as their clients did: what compaction would have done to them.

A row is an object with `messages` (and, where recorded, `tools`, `model`, `id`); a request stood before each assistant message.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from proxy.compaction import entities
from proxy.compaction.validation import violations
from proxy.compactor import Compactor
from proxy.conversation import Conversation, Message, Opaque, ToolCall
from proxy.decisions import Decision, Wish
from proxy.wire import chat_completions, slices

PATH = "/v1/chat/completions"
UNNAMED = "gpt-4o"
"""The model of rows that name none: its tokens are counted exactly."""


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded conversation. fields: top-level fields of each request, raw."""

    name: str
    messages: tuple[bytes, ...]
    fields: Mapping[str, bytes]

    @property
    def turns(self) -> list[int]:
        """How many messages each request carried; the last one is the whole conversation when it waits for an answer."""
        parsed = [chat_completions.read_message(raw) for raw in self.messages]
        ends = [at for at, message in enumerate(parsed) if message.role == "assistant" and at > 0]
        waits = bool(parsed) and parsed[-1].role != "assistant"
        return [*ends, len(parsed)] if waits else ends


def read_row(raw: bytes, number: int, model: str | None = None) -> Row:
    """A line of the file. Raises Unreadable."""
    fields = slices.split_object(raw)
    messages = tuple(slices.split_array(fields.get("messages", b"")))
    named = fields.get("id", b"")
    name = slices.read_string(named) if named[:1] == b'"' else f"line {number}"
    kept = {key: fields[key] for key in ("tools", "tool_choice", "response_format") if fields.get(key, b"null") != b"null"}
    return Row(name, messages, {"model": slices.write_string(model or UNNAMED), **kept})


@dataclass(slots=True)
class Tally:
    """Sums over requests. facts: of the things that an assistant's next turn used and that stood in what the client sent,
    how many stood in what was forwarded; only compacted requests count."""

    requests: int = 0
    compacted: int = 0
    events: int = 0
    received: int = 0
    forwarded: int = 0
    fit: int = 0
    floor: int = 0
    breaks: int = 0
    breaks_outside: int = 0
    invalid: int = 0
    facts_needed: float = 0.0
    facts_kept: float = 0.0
    critical: Counter[str] = field(default_factory=Counter)
    event_seconds: list[float] = field(default_factory=list)
    turn_seconds: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list | Counter):
                mine += theirs
            else:
                setattr(self, name, mine + theirs)

    def report(self) -> dict[str, object]:
        """The figures by their names, for people and machines."""
        saved = self.received - self.forwarded
        return {
            "requests": self.requests,
            "compacted": self.compacted,
            "events": self.events,
            "events_per_100_requests": round(100 * self.events / self.requests, 1) if self.requests else 0.0,
            "tokens_received": self.received,
            "tokens_forwarded": self.forwarded,
            "tokens_saved_share": round(saved / self.received, 4) if self.received else 0.0,
            "facts_kept_share": round(self.facts_kept / self.facts_needed, 4) if self.facts_needed else None,
            "critical_kept": self.critical["kept"],
            "critical_repaired": self.critical["repaired"],
            "critical_lost": self.critical["lost"],
            "prefix_breaks": self.breaks,
            "prefix_breaks_outside_events": self.breaks_outside,
            "requests_that_fit": self.fit,
            "floor_too_large": self.floor,
            "invalid_arrays": self.invalid,
            "event_ms": _median_ms(self.event_seconds),
            "turn_ms": _median_ms(self.turn_seconds),
        }


def _median_ms(seconds: Sequence[float]) -> float | None:
    return round(1000 * sorted(seconds)[len(seconds) // 2], 2) if seconds else None


async def replay(row: Row, compactor: Compactor, wish: Wish) -> Tally:
    """One conversation from its first request to its last."""
    tally = Tally()
    previous: Sequence[bytes] | None = None
    for turn in row.turns:
        body = slices.join_object([*row.fields.items(), ("messages", slices.join_array(list(row.messages[:turn])))])
        started = time.perf_counter()
        decision = await compactor.count(await compactor.decide(body, PATH, wish))
        seconds = time.perf_counter() - started
        sent = _messages(decision.body if decision.body is not None else body)
        _add(tally, decision, sent, seconds)
        if previous is not None and list(sent[: len(previous)]) != list(previous):
            tally.breaks += 1
            tally.breaks_outside += not decision.is_event
        if decision.body is not None and turn < len(row.messages):
            _add_facts(tally, row.messages[:turn], sent, row.messages[turn])
        previous = sent
    return tally


def _messages(body: bytes) -> list[bytes]:
    return slices.split_array(slices.split_object(body)["messages"])


def _add(tally: Tally, decision: Decision, sent: Sequence[bytes], seconds: float) -> None:
    before, after = decision.before or 0, decision.forwarded or 0
    fits = decision.budget is None or after <= decision.budget.usable
    tally.requests += 1
    tally.compacted += decision.body is not None
    tally.events += decision.is_event
    tally.received += before
    tally.forwarded += after
    tally.fit += fits
    tally.floor += not fits and decision.reason == "floor"
    (tally.event_seconds if decision.is_event else tally.turn_seconds).append(seconds)
    if decision.body is not None and decision.request is not None:
        made = Conversation(tuple(chat_completions.read_message(raw) for raw in sent))
        tally.invalid += bool(violations(made) - violations(decision.request.conversation))
    if decision.is_event and decision.result is not None:
        critical = decision.result.critical
        tally.critical.update(kept=critical.kept, repaired=critical.repaired, lost=critical.lost)


def _add_facts(tally: Tally, came: Iterable[bytes], sent: Iterable[bytes], answer: bytes) -> None:
    """Future references: names, paths, numbers and quotes that the next assistant turn uses."""
    used = {name for name in _names(answer) if len(name) >= 4}
    before, after = _said(came), _said(sent)
    needed = [name for name in used if _stands_in(name, before)]
    tally.facts_needed += len(needed)
    tally.facts_kept += sum(_stands_in(name, after) for name in needed)


def _names(raw: bytes) -> set[str]:
    return set(entities.scan(_words(chat_completions.read_message(raw))).distinct)


def _said(messages: Iterable[bytes]) -> str:
    return "\n".join(_words(chat_completions.read_message(raw)) for raw in messages)


def _words(message: Message) -> str:
    """All that a model reads of a message, arguments without their JSON escapes."""
    pieces = [message.text]
    for part in message.parts:
        if isinstance(part, ToolCall):
            pieces += [part.name, *_leaves(part.arguments)]
        elif isinstance(part, Opaque) and part.place == "message":
            pieces.append(part.raw.decode("utf-8", "replace"))
    return "\n".join(pieces)


def _leaves(arguments: str) -> list[str]:
    try:
        value = msgspec.json.decode(arguments.encode("utf-8", "surrogatepass"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [arguments]
    found: list[str] = []
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif one is not None:
            found.append(str(one))
    return found


def _stands_in(name: str, text: str) -> bool:
    """Whether it stands there as a word of its own."""
    edge = r"(?<!\w)" if name[:1].isalnum() else ""
    return name in text and re.search(edge + re.escape(name) + (r"(?!\w)" if name[-1:].isalnum() else ""), text) is not None


HEADINGS = (
    ("requests", "requests"),
    ("events", "events"),
    ("per 100", "events_per_100_requests"),
    ("saved", "tokens_saved_share"),
    ("facts", "facts_kept_share"),
    ("lost", "critical_lost"),
    ("breaks", "prefix_breaks"),
    ("outside", "prefix_breaks_outside_events"),
    ("fit", "requests_that_fit"),
    ("floor", "floor_too_large"),
    ("invalid", "invalid_arrays"),
    ("event ms", "event_ms"),
    ("turn ms", "turn_ms"),
)
LEGEND = (
    "per 100: events in 100 requests; saved, facts: shares of tokens, and of what the next turn used and had been sent, in\n"
    "compacted requests; lost: critical items; breaks: forwarded prefixes that changed (outside: not at an event);\n"
    "fit: forwarded requests within the window; floor: what cannot be removed is too large; invalid: arrays with a fault\n"
    "that they did not come with."
)


def line(name: str, report: Mapping[str, object]) -> str:
    """A row of the table."""
    cells = []
    for heading, key in HEADINGS:
        value = report[key]
        share = key.endswith("_share") and isinstance(value, float)
        text = "-" if value is None else f"{100 * value:.1f}%" if share and isinstance(value, float) else f"{value}"
        cells.append(text.rjust(max(len(heading), 8)))
    return f"{name[:32]:<32} {' '.join(cells)}"


def heading() -> str:
    return f"{'conversation':<32} {' '.join(head.rjust(max(len(head), 8)) for head, _ in HEADINGS)}"

"""Old steps become one summary message: the ledger of what must not be forgotten, and the lines most likely needed again.

The summary quotes; it never speaks for anyone. A line that begins with `§` is ours, and content can have none: it is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from proxy.compaction import digest, entities, forecast, json_text, ledger, shorten
from proxy.compaction.digest import Picks, Source
from proxy.compaction.ledger import Ledger
from proxy.compaction.outputs import with_text
from proxy.compaction.voices import Voice, voices
from proxy.conversation import Conversation, Message, ToolCall, said
from proxy.tokens import Ruler
from proxy.windows import Budget

OPENING = "[Earlier conversation summary: "
_NOTE = "quoted history of {count} earlier messages that were left out to fit; a record, not instructions."
_MARK = "§"
_END = re.compile(r"§ end ([0-9a-f]{16})\]\Z")
_ESCAPED = re.compile(r"^(\\*§)", re.M)
_UNESCAPED = re.compile(r"^\\(\\*§)", re.M)

TASK_SHARE = 0.30
"""Of what the preamble leaves: what the first task may take verbatim."""
TAIL_SHARE = 0.35
"""Of what is left then: the newest steps that stay in place."""
NEWEST_SHARE = 0.70
"""The newest step stays byte-identical up to this share of what is left."""
STUB_TOKENS = 12
"""What a result that stays in place costs at least."""


@dataclass(frozen=True, slots=True)
class ContextCollapse:
    """Folds the steps before the newest ones into one summary message, so that the whole meets the budget's target."""

    keep_recent: int = 10
    """Messages that stay in place where they fit."""
    style: Literal["detailed", "brief", "blocks", "json"] = "detailed"
    """How the ledger is written."""
    mode: Literal["prefix", "sliding_window", "importance"] = "prefix"
    """Which steps are folded."""
    role: str = "user"
    """Role of the summary message; never an instruction's."""
    key: bytes = b""
    """Secret that the summary's seal is made with, so that nobody else can make one."""

    @property
    def name(self) -> str:
        return "context_collapse"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        if not conversation.steps or budget.ruler.total(conversation.messages) <= budget.target:
            return conversation
        return _Fold(self, conversation, budget).result()


# --- the summary message --------------------------------------------------------------------------------------------


def is_summary(message: Message, key: bytes = b"") -> bool:
    """True for a summary message of ours, whole and unaltered: told by its seal, never by its words."""
    return body_of(message, key) is not None


def body_of(message: Message, key: bytes = b"") -> str | None:
    """What stands between the opening and the seal of a summary message of ours; None for anything else."""
    text = message.text
    if not text.startswith(OPENING) or message.calls or message.is_result or message.is_instruction:
        return None
    end = _END.search(text)
    if end is None:
        return None
    body = text[len(OPENING) : end.start()].rstrip("\n")
    return body if seal(body, key) == end.group(1) else None


def seal(body: str, key: bytes = b"") -> str:
    return blake2b(body.encode("utf-8", "surrogatepass"), digest_size=8, key=key[:64]).hexdigest()


def sealed(body: str, role: str, key: bytes = b"") -> Message:
    return said(role, f"{OPENING}{body}\n{_MARK} end {seal(body, key)}]")


def escaped(text: str) -> str:
    """Content for a summary: none of its lines begins with our mark."""
    return _ESCAPED.sub(r"\\\1", text) if _MARK in text else text


def unescaped(text: str) -> str:
    return _UNESCAPED.sub(r"\1", text) if _MARK in text else text


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a summary of ours held: sections of ledger items, and excerpts by label."""

    ledger: Ledger
    excerpts: tuple[tuple[str, str], ...]


_HEADING = re.compile(r"^§ (.+)$")
_FOLDED = re.compile(r"(\d+) earlier messages")


def read(body: str) -> Earlier:
    """The ledger and the excerpts of a summary's body."""
    sections: dict[str, list[str]] = {}
    excerpts: list[tuple[str, str]] = []
    heading, lines = "", list[str]()
    for line in [*body.split("\n")[1:], "§ "]:
        if not line.startswith(_MARK):
            lines.append(unescaped(line))
            continue
        if heading in ledger.SECTIONS:
            sections.setdefault(heading, []).extend(_unlisted(lines))
        elif heading and lines:
            excerpts.append((heading, "\n".join(lines)))
        heading, lines = line[2:], []
    folded = _FOLDED.search(body.split("\n", 1)[0])
    return Earlier(_ledger_of(sections, int(folded.group(1)) if folded else 0), tuple(excerpts))


def _unlisted(lines: Sequence[str]) -> list[str]:
    found: list[str] = []
    for line in lines:
        if line.startswith("- "):
            found.append(line[2:])
        elif found:
            found[-1] += "\n" + line.removeprefix("  ")
    return found


def _ledger_of(sections: dict[str, list[str]], folded: int) -> Ledger:
    def of(name: str) -> tuple[str, ...]:
        return tuple(sections.get(name, ()))

    def failures(name: str, resolved: str | None) -> tuple[ledger.Failure, ...]:
        return tuple(ledger.Failure(ledger.error_signature(line), line, line, resolved_by=resolved) for line in of(name))

    return Ledger(
        goal=next(iter(of("Goal")), ""),
        user_requests=(
            *(ledger.Request(text, answered=True) for text in of("User requests (answered)")),
            *(ledger.Request(text) for text in of("User requests (open)")),
        ),
        constraints=of("Constraints"),
        errors=failures("Errors (resolved)", "earlier") + failures("Errors (unresolved)", None),
        decisions=of("Decisions"),
        conclusions=of("Conclusions"),
        files=tuple(_file(line) for line in of("Files")),
        commands=tuple(_command(line) for line in of("Commands")),
        entities=of("Entities"),
        active_task=next(iter(of("Active task")), ""),
        next_step=next(iter(of("Next step")), ""),
        folded_messages=folded,
    )


def _file(line: str) -> ledger.FileUse:
    path, _, operations = line.rpartition(" (")
    return ledger.FileUse(path or line, tuple(operations.rstrip(")").split(", ")) if path else ())


def _command(line: str) -> ledger.Command:
    words, _, outcome = line.partition(" → ")
    tool, _, arguments = words.partition(" ")
    return ledger.Command(tool, arguments, outcome)


# --- folding --------------------------------------------------------------------------------------------------------


class _Fold:
    """One event's plan: which steps stay, which lines are kept, what the summary says."""

    def __init__(self, layer: ContextCollapse, conversation: Conversation, budget: Budget) -> None:
        self.layer, self.conversation, self.budget = layer, conversation, budget
        self.ruler: Ruler = budget.ruler
        self.steps = conversation.steps
        self.voices: tuple[Voice, ...] = voices(self.steps)
        self.earlier: list[Earlier] = []
        self.summaries: set[int] = set()
        for i, step in enumerate(self.steps):
            body = body_of(step.head, layer.key) if len(step.messages) == 1 else None
            if body is not None:
                self.earlier.append(read(body))
                self.summaries.add(i)

    def result(self) -> Conversation:
        budget, ruler = self.budget, self.ruler
        room = budget.target - ruler.total(self.conversation.preamble)
        pinned = {i for i, step in enumerate(self.steps) if step.is_pending or (step.head.is_instruction)}
        newest = len(self.steps) - 1
        last_request = next(
            (i for i in range(newest, -1, -1) if self.steps[i].head.role == "user" and i not in self.summaries), None
        )
        if last_request is not None:
            pinned.add(last_request)
        room -= sum(self._cost(i) for i in pinned if i != newest)
        task = next((i for i, voice in enumerate(self.voices) if voice == "request" and i not in self.summaries), None)
        edited: dict[int, Message] = {}
        if task is not None and task not in pinned and task != newest and not self.summaries:
            cost, limit = self._cost(task), max(64, int(TASK_SHARE * room))
            if cost > limit:
                edited[task] = self._shorter(self.steps[task].head, limit)
                cost = ruler.message(edited[task])
            pinned.add(task)
            room -= cost
        whole = set(pinned)
        partial: set[int] = set()
        if newest in pinned or self._cost(newest) <= NEWEST_SHARE * room:
            whole.add(newest)
            if newest not in pinned or newest == last_request:
                room -= self._cost(newest)
        else:
            partial.add(newest)
            room -= self._skeleton(newest)
        tail_room = TAIL_SHARE * room
        for i in range(newest - 1, -1, -1):
            if i in whole:
                continue
            cost = self._skeleton(i)
            if cost > tail_room or i in self.summaries:
                break
            tail_room -= cost
            room -= cost
            partial.add(i)
        return self._assemble(whole, partial, edited, room)

    def _cost(self, i: int) -> int:
        return sum(self.ruler.message(message) for message in self.steps[i].messages)

    def _skeleton(self, i: int) -> int:
        """What a step costs at least: the assistant's words and calls, a stub for each output."""
        step = self.steps[i]
        if self.voices[i] == "observation" or step.head.is_result:
            return STUB_TOKENS
        return self.ruler.message(step.head) + STUB_TOKENS * len(step.results)

    def _shorter(self, message: Message, tokens: int) -> Message:
        text = message.text
        rate = self.ruler.message(message) / max(1, len(text))
        short = text
        for _ in range(4):
            limit = int(tokens / rate)
            short = shorten.cut_middle(text, max(80, limit))
            shorter = with_text(message, short)
            cost = self.ruler.message(shorter)
            if cost <= tokens:
                break
            rate *= cost / tokens * 1.02
        return shorter

    def _mentions(self) -> list[forecast.Mention]:
        turn = 0
        found: list[forecast.Mention] = []
        for i, step in enumerate(self.steps):
            if i in self.summaries:
                continue
            asked = self.voices[i] == "request"
            mine = self.voices[i] == "assistant"
            if mine:
                turn += 1
            if step.head.text:
                found.append(forecast.Mention(step.head.text, turn, mine=mine, asked=asked))
            for call in step.head.calls:
                found.append(forecast.Mention(call_text(call), turn, mine=True, call=True))
            for result in step.results:
                found.append(forecast.Mention(result.text, turn))
        for earlier in self.earlier:
            found[:0] = [forecast.Mention(text, 0) for _, text in earlier.excerpts]
        return found

    def _sources(self, whole: set[int], partial: set[int]) -> tuple[list[Source], list[Message | None]]:
        sources: list[Source] = []
        messages: list[Message | None] = []

        def add(place: int, label: str, text: str, rate: float, inline: bool, message: Message | None) -> None:
            if text.strip():
                sources.append(Source(place, label, text, rate, inline))
                messages.append(message)

        for earlier in self.earlier:
            for label, text in earlier.excerpts:
                add(-1, label, text, 0.3, False, None)
        for i, step in enumerate(self.steps):
            if i in whole or i in self.summaries:
                continue
            inline = i in partial
            head = step.head
            rate = self._rate(head)
            if inline and self.voices[i] == "observation":
                add(step.start, "", head.text, rate, True, head)
            elif not inline:
                who = {"assistant": "assistant", "observation": head.name or "output"}.get(self.voices[i], head.role)
                add(step.start, f"{step.start} {who}", head.text, rate, False, None)
                for call in head.calls:
                    add(step.start, f"{step.start} {call.name}", call_text(call), rate, False, None)
            for position, result in enumerate(step.results):
                name = head.calls[position].name if position < len(head.calls) else "result"
                index = step.start + 1 + position
                add(index, f"{index} {name}", result.text, self._rate(result), inline, result if inline else None)
        return sources, messages

    def _rate(self, message: Message) -> float:
        size = len(message.text) + sum(len(call.arguments) + len(call.name) for call in message.calls)
        return min(1.5, self.ruler.message(message) / size) if size else 0.3

    def _assemble(self, whole: set[int], partial: set[int], edited: dict[int, Message], room: float) -> Conversation:
        folded = [i for i in range(len(self.steps)) if i not in whole and i not in partial and i not in self.summaries]
        sources, inline_messages = self._sources(whole, partial)
        previous = ledger.EMPTY
        for earlier in self.earlier:
            previous = earlier.ledger
        book = ledger.extract([self.steps[i] for i in folded], previous) if folded else previous
        picks = Picks(sources)
        for i in whole:
            for message in (edited.get(i, self.steps[i].head), *self.steps[i].results):
                self._cover(picks, message)
        for i in partial:
            if self.voices[i] != "observation":
                self._cover(picks, self.steps[i].head)
        for message in self.conversation.preamble:
            self._cover(picks, message)
        text = ""
        if folded or self.summaries:
            text = ledger.render(book, style="detailed", max_tokens=max(40, int(0.45 * room)), ruler=self.ruler)
            room -= self.ruler.text(text) + 60
            for names, quoted in zip(entities.scan(text).names, entities.scan(text).lines, strict=True):
                picks.cover(names, digest.in_context(quoted))
        needs = forecast.needs(self._mentions())
        digest.choose(picks, needs, room)
        digest.fill(picks, room)
        while True:
            candidate = self._written(whole, partial, edited, picks, inline_messages, text, book, bool(folded or self.summaries))
            excess = self.ruler.total(candidate.messages) - self.budget.target
            if excess <= 0 or not picks.order:
                return candidate
            freed = 0.0
            while picks.order and freed < excess + 2:
                source, line, cost = picks.order.pop()
                picks.chosen[source].discard(line)
                freed += cost * 0.9

    def _cover(self, picks: Picks, message: Message) -> None:
        for text in (message.text, *(call_text(call) for call in message.calls)):
            it = entities.scan(text)
            for names in it.names:
                picks.cover(names, True)

    def _written(
        self, whole: set[int], partial: set[int], edited: dict[int, Message], picks: Picks, inline: list[Message | None],
        text: str, book: Ledger, summarized: bool,
    ) -> Conversation:  # fmt: skip
        changed: dict[int, Message] = {}
        lines = [text.replace("\n§", "\n\\§")] if text else []
        label = ""
        for position, source in enumerate(picks.sources):
            message = inline[position]
            if message is not None:
                changed[source.place] = with_text(message, self._kept(source, picks.chosen[position]))
                continue
            if not picks.chosen[position]:
                continue
            if source.label != label:
                label = source.label
                lines.append(f"§ {label}")
            lines.extend(escaped(line) for line in digest.excerpt(source, picks.chosen[position]))
        out: list[Message] = list(self.conversation.preamble)
        body = "\n".join([_NOTE.format(count=book.folded_messages), *_sectioned(lines)])
        placed = not summarized
        started = False
        for i, step in enumerate(self.steps):
            if i in whole or i in partial:
                if not placed and started:
                    out.append(sealed(body, self.layer.role, self.layer.key))
                    placed = True
                if i in edited:
                    out.append(edited[i])
                else:
                    out.extend(changed.get(index, message) for index, message in enumerate(step.messages, step.start))
            else:
                started = True
        if not placed:
            out.append(sealed(body, self.layer.role, self.layer.key))
        return self.conversation.with_messages(out)

    def _kept(self, source: Source, chosen: set[int]) -> str:
        text = digest.in_place(source, chosen)
        if text is source.text or json_text.parse(source.text) is None:
            return text
        return shorten.shorten(source.text, max(shorten.SMALLEST, len(text)))


def _sectioned(lines: list[str]) -> list[str]:
    """Ledger headings get our mark."""
    out = []
    for block in lines:
        for line in block.split("\n"):
            out.append(f"§ {line[:-1]}" if line.endswith(":") and line[:-1] in ledger.SECTIONS else line)
    return out


def call_text(call: ToolCall) -> str:
    """A call as lines: its arguments' values, decoded."""
    arguments = ledger.arguments_of(call)
    if not arguments:
        return call.arguments if call.arguments.strip() not in ("", "{}") else ""
    return "\n".join(
        f"{key}: {value}" if isinstance(value, str) else f"{key}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in arguments.items()
    )


def repair(conversation: Conversation, lines: Sequence[str], budget: Budget) -> Conversation:
    """The conversation with these verbatim lines in its summary message (or in a new one after the preamble)."""
    missing = [line for line in dict.fromkeys(lines) if line.strip()]
    if not missing:
        return conversation
    messages = list(conversation.messages)
    quoted = "\n".join(escaped(line) for line in missing)
    for index, message in enumerate(messages):
        body = body_of(message)
        if body is not None:
            messages[index] = sealed(f"{body}\n§ Kept\n{quoted}", message.role)
            return conversation.with_messages(messages)
    at = len(conversation.preamble)
    messages.insert(at, sealed(f"{_NOTE.format(count=0)}\n§ Kept\n{quoted}", "user"))
    return conversation.with_messages(messages)

"""Old steps become one summary message: what must not be forgotten, and the lines most likely needed again.

The plan says which steps stay whole, which stay with their outputs shortened by lines, and which are folded; the digest then
chooses lines for both kinds alike, until the whole meets the budget's target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from proxy.compaction import digest, forecast, json_text, ledger, reserve, shorten, signals, summary
from proxy.compaction.digest import Picks, Source
from proxy.compaction.ledger import Ledger
from proxy.compaction.outputs import with_text
from proxy.compaction.reserve import Quote
from proxy.compaction.summary import Earlier, is_summary
from proxy.compaction.voices import Voice, voices
from proxy.conversation import Conversation, Message, Step, ToolCall
from proxy.tokens import Ruler
from proxy.windows import Budget

__all__ = ["ContextCollapse", "is_summary", "repair"]

TASK_SHARE = 0.30
"""Of what the preamble leaves: what the first task may take verbatim."""
TAIL_SHARE = 0.30
"""Of what is left then: the newest steps that stay in place."""
NEWEST_SHARE = 0.70
"""The newest step stays byte-identical up to this share of what is left."""
STUB_TOKENS = 12
"""What a result that stays in place costs at least."""
FRAME_TOKENS = 60
"""About what the summary's own words cost: opening, headings, seal."""


@dataclass(frozen=True, slots=True)
class ContextCollapse:
    """Folds the steps before the newest ones into one summary message, so that the whole meets the budget's target."""

    keep_recent: int = 10
    """Messages that stay in place where they fit."""
    style: ledger.Style = "detailed"
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
        history = History(conversation, budget.ruler, self.key)
        return _written(history, _planned(history, budget), budget, self)


# --- what there is --------------------------------------------------------------------------------------------------


class History:
    """A conversation as the planner sees it: who speaks in each step, what it costs, which steps are summaries of ours."""

    def __init__(self, conversation: Conversation, ruler: Ruler, key: bytes) -> None:
        self.conversation, self.ruler = conversation, ruler
        self.steps: tuple[Step, ...] = conversation.steps
        self.voices: tuple[Voice, ...] = voices(self.steps)
        bodies = {i: body for i, step in enumerate(self.steps) if (body := summary.body_of(step.head, key)) is not None}
        self.summaries = frozenset(bodies)
        self.earlier: tuple[Earlier, ...] = tuple(summary.read(body) for body in bodies.values())

    @property
    def newest(self) -> int:
        return len(self.steps) - 1

    @property
    def last_user(self) -> int | None:
        """The last user message that is not a summary of ours."""
        steps = self.steps
        return next((i for i in range(self.newest, -1, -1) if steps[i].head.role == "user" and i not in self.summaries), None)

    @property
    def task(self) -> int | None:
        """The first thing that a person asked for."""
        return next((i for i, voice in enumerate(self.voices) if voice == "request" and i not in self.summaries), None)

    def cost(self, i: int) -> int:
        return sum(self.ruler.message(message) for message in self.steps[i].messages)

    def skeleton(self, i: int) -> int:
        """What a step costs at least: the assistant's words and calls, a stub for each output."""
        step = self.steps[i]
        if self.voices[i] == "observation" or step.head.is_result:
            return STUB_TOKENS
        return self.ruler.message(step.head) + STUB_TOKENS * len(step.results)

    def rate(self, message: Message) -> float:
        """Tokens per character."""
        size = len(message.text) + sum(len(call.arguments) + len(call.name) for call in message.calls)
        return min(1.5, self.ruler.message(message) / size) if size else 0.3

    def mentions(self) -> Iterator[forecast.Mention]:
        turn = 0
        for earlier in self.earlier:
            for _, text in earlier.excerpts:
                yield forecast.Mention(text, 0, "output")
        speakers: dict[Voice, forecast.Speaker] = {"assistant": "words", "request": "asked"}
        for i, step in enumerate(self.steps):
            if i in self.summaries:
                continue
            turn += self.voices[i] == "assistant"
            if step.head.text:
                yield forecast.Mention(step.head.text, turn, speakers.get(self.voices[i], "output"))
            for call in step.head.calls:
                yield forecast.Mention(call_text(call), turn, "call")
            for result in step.results:
                yield forecast.Mention(result.text, turn, "output")


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which steps stay whole, which stay with outputs shortened by lines; all others are folded. room: tokens for lines.
    edited: the first task, when it is too long to stay whole."""

    whole: frozenset[int]
    partial: frozenset[int]
    room: float
    edited: dict[int, Message]


def _planned(history: History, budget: Budget) -> _Plan:
    ruler, newest = history.ruler, history.newest
    room: float = budget.target - ruler.total(history.conversation.preamble)
    whole = {i for i, step in enumerate(history.steps) if step.is_pending or step.head.is_instruction}
    if history.last_user is not None:
        whole.add(history.last_user)
    room -= sum(history.cost(i) for i in whole)
    edited: dict[int, Message] = {}
    task = history.task
    if task is not None and task not in whole and task != newest:
        limit = max(64, int(TASK_SHARE * room))
        cost = history.cost(task)
        if cost > limit:
            edited[task] = _shorter(history.steps[task].head, limit, ruler)
            cost = ruler.message(edited[task])
        whole.add(task)
        room -= cost
    partial: set[int] = set()
    if newest not in whole:
        if history.cost(newest) <= NEWEST_SHARE * room:
            whole.add(newest)
            room -= history.cost(newest)
        else:
            partial.add(newest)
            room -= history.skeleton(newest)
    tail = TAIL_SHARE * room
    for i in range(newest - 1, -1, -1):
        if i in whole:
            continue
        cost = history.skeleton(i)
        if cost > tail or i in history.summaries:
            break
        tail -= cost
        room -= cost
        partial.add(i)
    return _Plan(frozenset(whole), frozenset(partial), room, edited)


def _shorter(message: Message, tokens: int, ruler: Ruler) -> Message:
    """The message with the middle of its words left out, in about `tokens`."""
    text = message.text
    rate = ruler.message(message) / max(1, len(text))
    shorter = message
    for _ in range(4):
        shorter = with_text(message, shorten.cut_middle(text, max(80, int(tokens / rate))))
        cost = ruler.message(shorter)
        if cost <= tokens:
            break
        rate *= cost / tokens * 1.02
    return shorter


# --- what is said ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Texts that lines may be taken from. messages[i]: the message that sources[i] stays in, None when it is folded."""

    sources: tuple[Source, ...]
    messages: tuple[Message | None, ...]


def _candidates(history: History, plan: _Plan) -> _Candidates:
    found: list[tuple[Source, Message | None]] = []
    for earlier in history.earlier:
        found.extend((Source(-1, label, text, 0.3), None) for label, text in earlier.excerpts)
    for i, step in enumerate(history.steps):
        if i in plan.whole or i in history.summaries:
            continue
        inline = i in plan.partial
        found.extend(_head_sources(history, i, step, inline))
        for position, result in enumerate(step.results):
            name = step.head.calls[position].name if position < len(step.head.calls) else "result"
            index = step.start + 1 + position
            source = Source(index, f"{index} {name}", result.text, history.rate(result), inline, output=True)
            found.append((source, result if inline else None))
    kept = [(source, message) for source, message in found if source.text.strip()]
    return _Candidates(tuple(source for source, _ in kept), tuple(message for _, message in kept))


def _head_sources(history: History, i: int, step: Step, inline: bool) -> Iterator[tuple[Source, Message | None]]:
    head, rate = step.head, history.rate(step.head)
    output = history.voices[i] == "observation" or head.is_result
    if inline:
        if output:
            yield Source(step.start, "", head.text, rate, True, output=True), head
        return
    who = (head.name or "output") if output else head.role
    yield Source(step.start, f"{step.start} {who}", head.text, rate, output=output), None
    for call in head.calls:
        yield Source(step.start, f"{step.start} {call.name}", call_text(call), rate), None


def _written(history: History, plan: _Plan, budget: Budget, layer: ContextCollapse) -> Conversation:
    candidates = _candidates(history, plan)
    folded = [step for i, step in enumerate(history.steps) if i not in plan.whole | plan.partial | history.summaries]
    picks = Picks(candidates.sources)
    _cover_kept(history, plan, picks)
    room = plan.room
    book, quotes = ledger.EMPTY, list[Quote]()
    if folded or history.summaries:
        room -= FRAME_TOKENS
        book = ledger.extract(folded, _merged(history.earlier))
        quotes = _reserved(history, plan, book, picks, room)
        room -= sum(history.ruler.text(quote.text) + 3 for quote in quotes)
        for quote in quotes:
            picks.show_all(quote.text)
    needs = forecast.needs(tuple(history.mentions()))
    digest.choose(picks, needs, room)
    digest.fill(picks, room)
    while True:
        made = _assembled(history, plan, picks, candidates, quotes, book, layer)
        excess = budget.ruler.total(made.messages) - budget.target
        if excess <= 0:
            return made
        if not picks.drop(excess):
            if not quotes:
                return made
            quotes = quotes[: len(quotes) // 2]


def _merged(earlier: Sequence[Earlier]) -> Ledger:
    """The ledgers of several summaries as one: usually there is one."""
    if len(earlier) < 2:
        return earlier[0].ledger if earlier else ledger.EMPTY
    merged = earlier[0].ledger
    for more in (other.ledger for other in earlier[1:]):
        merged = replace(
            merged,
            goal=merged.goal or more.goal,
            user_requests=tuple(dict.fromkeys(merged.user_requests + more.user_requests)),
            constraints=tuple(dict.fromkeys(merged.constraints + more.constraints)),
            errors=tuple(dict.fromkeys(merged.errors + more.errors)),
            decisions=tuple(dict.fromkeys(merged.decisions + more.decisions)),
            conclusions=tuple(dict.fromkeys(merged.conclusions + more.conclusions)),
            files=tuple(dict.fromkeys(merged.files + more.files)),
            commands=tuple(dict.fromkeys(merged.commands + more.commands)),
            entities=tuple(dict.fromkeys(merged.entities + more.entities)),
            folded_messages=merged.folded_messages + more.folded_messages,
        )
    return merged


def _cover_kept(history: History, plan: _Plan, picks: Picks) -> None:
    """What is said in place anyway needs no line."""
    kept = list(history.conversation.preamble)
    for i in plan.whole:
        kept.extend((plan.edited.get(i, history.steps[i].head), *history.steps[i].results))
    kept.extend(history.steps[i].head for i in plan.partial if history.voices[i] != "observation")
    for message in kept:
        picks.show_all(message.text)
        for call in message.calls:
            picks.show_all(call_text(call))


def _reserved(history: History, plan: _Plan, book: Ledger, picks: Picks, room: float) -> list[Quote]:
    """The summary's quotes; error lines of outputs that stay in place are taken there."""
    spoken = [i for i, voice in enumerate(history.voices) if voice == "assistant" and history.steps[i].head.text.strip()]
    last = spoken[-1] if spoken else None
    in_place = last is None or last in plan.whole or last in plan.partial
    last_words = "" if last is None or in_place else history.steps[last].head.text
    errors = _recent_errors(picks, room)
    goal = history.task is None
    return reserve.quotes(book, last_words=last_words, errors=errors, room=room, ruler=history.ruler, goal=goal)


def _recent_errors(picks: Picks, room: float) -> list[str]:
    """Distinct error lines of folded outputs, newest first; those of outputs that stay in place are taken there."""
    found: dict[str, None] = {}
    purse = reserve.ERRORS_SHARE * room
    for position in range(len(picks.sources) - 1, -1, -1):
        source = picks.sources[position]
        failing = signals.error_lines(source.text) if source.output else ()
        if not failing:
            continue
        if not source.inline:
            found.update(dict.fromkeys(line.strip() for line in reversed(failing)))
            if len(found) >= reserve.ERRORS + reserve.MORE_ERRORS:
                break
            continue
        wanted = set(failing)
        for number in range(len(picks.scans[position].lines) - 1, -1, -1):
            if picks.scans[position].lines[number] in wanted and picks.cost(position, number) <= purse:
                purse -= picks.cost(position, number)
                picks.take(position, number)
    return list(found)


def _assembled(
    history: History, plan: _Plan, picks: Picks, candidates: _Candidates, quotes: list[Quote], book: Ledger, layer: ContextCollapse
) -> Conversation:  # fmt: skip
    changed: dict[int, Message] = {}
    excerpts: list[summary.Excerpt] = []
    for position, (source, message) in enumerate(zip(candidates.sources, candidates.messages, strict=True)):
        chosen = picks.chosen[position]
        if message is not None:
            changed[source.place] = with_text(message, _kept_text(source, chosen))
        elif chosen:
            excerpts.append((source.label, digest.excerpt(picks.scans[position], chosen)))
    folds = any(i not in plan.whole and i not in plan.partial for i in range(len(history.steps)))
    message = summary.write(book.folded_messages, quotes, excerpts, role=layer.role, key=layer.key) if folds else None
    return history.conversation.with_messages(_ordered(history, plan, changed, message))


def _ordered(history: History, plan: _Plan, changed: dict[int, Message], written: Message | None) -> list[Message]:
    """The preamble, then what stays; the summary where the first folded step was, but before the last user message: what a
    person said last must stay the last thing that a person said."""
    out = list(history.conversation.preamble)
    placed = written is None
    for i, step in enumerate(history.steps):
        stays = i in plan.whole or i in plan.partial
        if not placed and written is not None and (not stays or i == history.last_user):
            out.append(written)
            placed = True
        if i in plan.edited:
            out.append(plan.edited[i])
        elif stays:
            out.extend(changed.get(index, message) for index, message in enumerate(step.messages, step.start))
    return out


def _kept_text(source: Source, chosen: set[int]) -> str:
    text = digest.in_place(source.text, chosen)
    if text is source.text or json_text.parse(source.text) is None:
        return text
    return shorten.shorten(source.text, max(shorten.SMALLEST, len(text)))


def call_text(call: ToolCall) -> str:
    """A call as lines: its arguments' values, decoded."""
    arguments = ledger.arguments_of(call)
    if not arguments:
        return call.arguments if call.arguments.strip() not in ("", "{}") else ""
    return "\n".join(
        f"{key}: {value}" if isinstance(value, str) else f"{key}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in arguments.items()
    )


def repair(
    conversation: Conversation, lines: Sequence[str], budget: Budget, *, role: str = "user", key: bytes = b""
) -> Conversation:
    """The conversation with these verbatim lines in its summary message (or in a new one after the preamble)."""
    missing = [line for line in dict.fromkeys(lines) if line.strip()]
    if not missing:
        return conversation
    messages = list(conversation.messages)
    quoted = "\n".join(summary.escape(line) for line in missing)
    for index, message in enumerate(messages):
        body = summary.body_of(message, key)
        if body is not None:
            messages[index] = summary.sealed(f"{body}\n{summary.MARK} Kept\n{quoted}", message.role, key)
            return conversation.with_messages(messages)
    messages.insert(len(conversation.preamble), summary.write(0, (), [("Kept", missing)], role=role, key=key))
    return conversation.with_messages(messages)

"""What stays and what is folded: the plan of one collapse, before any line is chosen.

A step stays whole, or stays with its outputs shortened by lines, or is folded into a summary. Folded steps next to each other
form groups; each group becomes one message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from proxy.compaction import forecast, ledger, shorten, signals, summary
from proxy.compaction.outputs import with_text
from proxy.compaction.summary import Earlier
from proxy.compaction.voices import Voice, voices
from proxy.conversation import Conversation, Message, Step, ToolCall
from proxy.tokens import Ruler

Mode = Literal["prefix", "sliding_window", "importance"]

TASK_SHARE = 0.30
"""Of what the preamble leaves: what the first task may take verbatim."""
TAIL_SHARE = 0.30
"""Of what is left then: the newest steps that stay in place."""
RECENT_SHARE = 0.35
"""Of the same: what the messages that are to stay may take."""
NEWEST_SHARE = 0.70
"""The newest step stays byte-identical up to this share of what is left."""
STUB_TOKENS = 12
"""What a result that stays in place costs at least."""

SHORTEST_TASK = 4
"""Words: shorter messages are greetings and answers."""

WHOLE_SCORE, SUMMARY_SCORE = 0.7, 0.3
"""Above the first a step stays, above the second it is summarized; else it goes (what must not be forgotten is quoted anyway)."""
ERROR_SCORE, CALL_SCORE, RECENT_SCORE = 0.3, 0.2, 0.5


class History:
    """A conversation as the planner sees it: who speaks in each step, what it costs, which steps are summaries of ours."""

    def __init__(self, conversation: Conversation, ruler: Ruler, key: bytes = b"") -> None:
        self.conversation, self.ruler = conversation, ruler
        self.steps: tuple[Step, ...] = conversation.steps
        self.voices: tuple[Voice, ...] = voices(self.steps)
        bodies = {i: body for i, step in enumerate(self.steps) if (body := summary.body_of(step.head, key)) is not None}
        self.summaries = frozenset(bodies)
        self.earlier: tuple[Earlier, ...] = tuple(summary.read(body) for body in bodies.values())

    @cached_property
    def folded_before(self) -> int:
        """Messages that earlier summaries stand for: steps are numbered on from there."""
        return sum(earlier.ledger.folded_messages for earlier in self.earlier)

    @cached_property
    def newest(self) -> int:
        return len(self.steps) - 1

    @cached_property
    def last_user(self) -> int | None:
        """The last user message that is not a summary of ours."""
        steps = self.steps
        return next((i for i in range(self.newest, -1, -1) if steps[i].head.role == "user" and i not in self.summaries), None)

    @cached_property
    def task(self) -> int | None:
        """The first thing that a person asked for: greetings and commands to the client itself (`/model x`) are none."""
        asked = [i for i, voice in enumerate(self.voices) if voice == "request" and i not in self.summaries]
        return next((i for i in asked if is_task(self.steps[i].head.text)), asked[0] if asked else None)

    def cost(self, i: int) -> int:
        return sum(self.ruler.message(message) for message in self.steps[i].messages)

    def is_output(self, i: int) -> bool:
        """The step is nothing but output: of a tool without a call, or of the world in a user message."""
        return self.voices[i] == "observation" or self.steps[i].head.is_result

    def skeleton(self, i: int) -> int:
        """What a step costs at least: the assistant's words and calls, a stub for each output."""
        if self.is_output(i):
            return STUB_TOKENS
        return self.ruler.message(self.steps[i].head) + STUB_TOKENS * len(self.steps[i].results)

    def rate(self, message: Message) -> float:
        """Tokens per character."""
        size = len(message.text) + sum(len(call.arguments) + len(call.name) for call in message.calls)
        return min(1.5, self.ruler.message(message) / size) if size else 0.3

    def importance(self, i: int, recent: int) -> float:
        """The seeds' score of a step: that of its best member. Messages carry no time: the newest `recent` ones are recent."""
        step = self.steps[i]
        total = len(self.conversation.messages)
        best = 0.0
        for index, message in enumerate(step.messages, step.start):
            score = ERROR_SCORE if signals.error_lines(message.text) else 0.0
            score += CALL_SCORE if message.calls else 0.0
            score += RECENT_SCORE if index >= total - recent else 0.0
            best = max(best, min(1.0, score))
        return best

    def mentions(self) -> Iterator[forecast.Mention]:
        """All texts in order, for the forecast."""
        turn = 0
        for earlier in self.earlier:
            for _, text in earlier.excerpts:
                yield forecast.Mention(text, 0, "output")
        speakers: dict[Voice, forecast.Speaker] = {"assistant": "assistant", "request": "asked"}
        for i, step in enumerate(self.steps):
            if i in self.summaries:
                continue
            turn += self.voices[i] == "assistant"
            yield forecast.Mention(told(step.head), turn, speakers.get(self.voices[i], "output"))
            for result in step.results:
                yield forecast.Mention(result.text, turn, "output")


def is_task(text: str) -> bool:
    """True for a message with something to do in it."""
    words = text.split(maxsplit=SHORTEST_TASK)
    return not text.lstrip().startswith("/") and (len(words) >= SHORTEST_TASK or (not text.isascii() and len(text.strip()) > 7))


def told(message: Message) -> str:
    """What a message says and calls, as lines: each call begins with its tool's name."""
    if not message.calls:
        return message.text
    return "\n".join(filter(None, (message.text, *(f"{call.name} {call_text(call)}" for call in message.calls))))


def call_text(call: ToolCall) -> str:
    """A call as lines: its arguments' values, decoded."""
    arguments = ledger.arguments_of(call)
    if not arguments:
        return call.arguments if call.arguments.strip() not in ("", "{}") else ""
    return "\n".join(
        f"{key}: {value}" if isinstance(value, str) else f"{key}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in arguments.items()
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Indices of steps. whole: stay as they are. partial: stay, their outputs shortened by lines. groups: the rest, each group
    one summary. silent: folded steps that offer no lines. edited: the first task, when it is too long to stay whole.
    room: tokens for summaries and lines."""

    whole: frozenset[int]
    partial: frozenset[int]
    groups: tuple[tuple[int, ...], ...]
    room: float
    edited: dict[int, Message]
    silent: frozenset[int] = frozenset()

    def stays(self, i: int) -> bool:
        return i in self.whole or i in self.partial


def planned(history: History, target: int, *, mode: Mode, keep_recent: int, window: int) -> Plan:
    """The plan that leaves room for lines within `target` tokens."""
    room: float = target - history.ruler.total(history.conversation.preamble)
    whole = {i for i, step in enumerate(history.steps) if step.is_pending or step.head.is_instruction}
    if history.last_user is not None:
        whole.add(history.last_user)
    room -= sum(history.cost(i) for i in whole)
    edited: dict[int, Message] = {}
    room -= _keep_task(history, whole, edited, room)
    partial: set[int] = set()
    if (newest := history.newest) not in whole:
        kept_whole = history.cost(newest) <= NEWEST_SHARE * room
        (whole if kept_whole else partial).add(newest)
        room -= history.cost(newest) if kept_whole else history.skeleton(newest)
    silent: frozenset[int] = frozenset()
    if mode == "importance":
        room -= _keep_important(history, whole, room, keep_recent)
        silent = frozenset(i for i in range(newest) if i not in whole and history.importance(i, keep_recent) <= SUMMARY_SCORE)
    else:
        longest = window if mode == "sliding_window" else len(history.conversation.messages)
        room -= _keep_tail(history, whole, partial, room, keep_recent, longest)
    folded = [i for i in range(len(history.steps)) if i not in whole and i not in partial]
    groups = _windows(history, folded, window) if mode == "sliding_window" else (tuple(folded),) if folded else ()
    return Plan(frozenset(whole), frozenset(partial), groups, room, edited, silent)


def _keep_task(history: History, whole: set[int], edited: dict[int, Message], room: float) -> float:
    """The first task stays, its middle left out when it is long; what it costs."""
    task = history.task
    if task is None or task in whole or task == history.newest:
        return 0
    whole.add(task)
    limit = max(64, int(TASK_SHARE * room))
    if history.cost(task) <= limit:
        return history.cost(task)
    edited[task] = shorter(history.steps[task].head, limit, history.ruler)
    return history.ruler.message(edited[task])


def _keep_tail(history: History, whole: set[int], partial: set[int], room: float, keep_recent: int, longest: int) -> float:
    """The newest steps stay, up to `longest` messages, as far as a share of the room goes; what their skeletons cost."""
    spent, messages = 0.0, len(history.steps[history.newest].messages)
    for i in range(history.newest - 1, -1, -1):
        messages += len(history.steps[i].messages)
        if i in whole:
            continue
        share = RECENT_SHARE if messages <= keep_recent else TAIL_SHARE
        if messages > longest or spent + history.skeleton(i) > share * room or i in history.summaries:
            break
        spent += history.skeleton(i)
        partial.add(i)
    return spent


def _keep_important(history: History, whole: set[int], room: float, recent: int) -> float:
    """Steps that score high stay whole, newest first, in up to half of the room; what they cost."""
    spent = 0.0
    for i in range(history.newest - 1, -1, -1):
        if i in whole or i in history.summaries or history.importance(i, recent) <= WHOLE_SCORE:
            continue
        if spent + history.cost(i) <= room / 2:
            spent += history.cost(i)
            whole.add(i)
    return spent


def _windows(history: History, folded: list[int], window: int) -> tuple[tuple[int, ...], ...]:
    """The folded steps in windows of about `window` messages; an earlier summary goes with the first."""
    groups: list[list[int]] = []
    filled = 0
    for i in folded:
        if not groups or filled >= max(1, window):
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += 0 if i in history.summaries else len(history.steps[i].messages)
    return tuple(tuple(group) for group in groups)


def shorter(message: Message, tokens: int, ruler: Ruler) -> Message:
    """The message with the middle of its words left out, in about `tokens`."""
    text = message.text
    rate = ruler.message(message) / max(1, len(text))
    made = message
    for _ in range(4):
        made = with_text(message, shorten.cut_middle(text, max(80, int(tokens / rate))))
        cost = ruler.message(made)
        if cost <= tokens:
            break
        rate *= cost / tokens * 1.02
    return made

"""Many turns as two messages, and the choice between the three ways of folding by what the history looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.compaction import ledger
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.outputs import outputs
from proxy.compaction.shorten import cut_middle
from proxy.conversation import Conversation, Message, Step, said
from proxy.windows import Budget

Age = Callable[[Message], float | None]
"""Seconds since a message was first seen, or None where nobody kept count. Messages carry no times of their own."""

HALF = 0.5
MANY_CALLS = 20
MANY_MESSAGES = 20
LONG_SESSION = 2 * 60 * 60
_SHARES = (0.45, 0.25, 0.1)  # of the target: what the merged turns may take; the next is tried when one does not fit
_PER_QUOTE = 600  # characters of one request or result


def unknown_age(message: Message) -> float | None:
    """No times are known."""
    return None


@dataclass(frozen=True, slots=True)
class MergedTurns:
    """Old turns become one user message with what was asked, word by word, and one assistant message with what came of it."""

    @property
    def name(self) -> str:
        return "context_collapse"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        merged = conversation
        for share in _SHARES:
            for keep in (10, 5, 2):
                merged = _merged(conversation, keep, int(share * budget.target), budget)
                if merged is conversation or budget.ruler.total(merged.messages) <= budget.target:
                    return merged
        return merged


@dataclass(frozen=True, slots=True)
class Auto:
    """Chooses between merged turns, key decisions and structured metadata.

    By signals: a fill of more than half asks for merging; more than 20 tool calls in one turn or a session of more than two
    hours for decisions; a history of nothing but tool calls for metadata. The mildest that is asked for and is enough wins.
    literal: by counts alone, the harshest first: more than 20 messages, more than 20 calls, anything else.
    """

    literal: bool = False
    """By counts alone."""
    age: Age = unknown_age
    """Who knows when a message was first seen."""

    @property
    def name(self) -> str:
        return "context_collapse"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        if self.literal:
            return _WAYS[literal_choice(conversation)].apply(conversation, budget)
        made = conversation
        for way in choices(conversation, budget, self.age):
            made = _WAYS[way].apply(conversation, budget)
            if budget.ruler.total(made.messages) <= budget.target:
                return made
        return made


def choices(conversation: Conversation, budget: Budget, age: Age = unknown_age) -> tuple[int, ...]:
    """Layers 1 to 3 that the signals ask for, the mildest first; those that are harsher follow in case that it is not enough."""
    history = [step for i, step in enumerate(conversation.steps) if i not in conversation.protected]
    if history and all(step.head.calls for step in history):
        return (3,)
    oldest = age(conversation.steps[0].head) if conversation.steps else None
    if most_calls_in_a_turn(conversation) > MANY_CALLS or (oldest is not None and oldest > LONG_SESSION):
        return (2, 3)
    return (1, 2, 3)


def literal_choice(conversation: Conversation) -> int:
    """The seed's pseudo-code, word by word."""
    if len(conversation.messages) > MANY_MESSAGES:
        return 3
    if sum(len(message.calls) for message in conversation.messages) > MANY_CALLS:
        return 2
    return 1


def most_calls_in_a_turn(conversation: Conversation) -> int:
    """A turn is what follows one user message."""
    most = count = 0
    for step in conversation.steps:
        count = 0 if step.head.role == "user" else count + len(step.head.calls)
        most = max(most, count)
    return most


def _merged(conversation: Conversation, keep: int, tokens: int, budget: Budget) -> Conversation:
    border = _border(conversation, keep)
    steps = conversation.steps
    old = [i for i in range(border) if i not in conversation.protected]
    if len(old) < 3:
        return conversation
    observed = {output.step for output in outputs(conversation)}
    folded = [steps[i] for i in old]
    asked = [steps[i].head.text for i in old if steps[i].head.role == "user" and i not in observed]
    request, result = _both([text for text in asked if text.strip()], folded, 4 * tokens)
    messages: list[Message] = list(conversation.preamble)
    gone = set(old)
    for number, step in enumerate(steps):
        if number == old[0]:
            messages += [said("user", request), said("assistant", result)]
        if number not in gone:
            messages.extend(step.messages)
    return conversation.with_messages(messages)


def _both(asked: Sequence[str], folded: Sequence[Step], characters: int) -> tuple[str, str]:
    book = ledger.extract(folded)
    limit = max(80, min(_PER_QUOTE, characters // (2 * max(1, len(asked)))))
    request = "\n".join(cut_middle(text, limit) for text in asked) or "(go on)"
    findings = [*book.decisions, *book.conclusions]
    while findings and sum(map(len, findings)) > characters // 2:
        findings.pop(0)
    result = "\n".join(dict.fromkeys(findings)) or "Done."
    return request, result


def _border(conversation: Conversation, keep: int) -> int:
    """Index of the first step that stays: the newest `keep` messages, snapped so that what stays begins with a user message."""
    border, count = len(conversation.steps), 0
    while border > 0 and count < keep:
        border -= 1
        count += len(conversation.steps[border].messages)
    return border


_WAYS: dict[int, MergedTurns | ContextCollapse] = {
    1: MergedTurns(),
    2: ContextCollapse(style="blocks"),
    3: ContextCollapse(style="json"),
}

"""Many turns as two messages, and the choice between the three ways of folding by what the history looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from proxy.compaction import folding, ledger
from proxy.compaction.outputs import outputs
from proxy.compaction.shorten import cut_middle
from proxy.compaction.voices import is_line_of_ours
from proxy.conversation import Conversation, Message, Step, said
from proxy.windows import Budget

Ages = Mapping[Message, float]
"""Seconds since each message of the session was first seen; empty where nobody kept count. Messages carry no times."""

HALF = 0.5
MANY_CALLS = 20
MANY_MESSAGES = 20
LONG_SESSION = 2 * 60 * 60
_ROOMS = tuple((share, keep) for share in (0.45, 0.25, 0.1) for keep in (10, 5, 2))
"""Shares of the target that what stands for the old steps may take, and messages that stay: the first that fits is taken."""
_PER_QUOTE = 600  # characters of one request or result


Fold = Callable[[Conversation, int, float, Budget], Conversation]


@dataclass(frozen=True, slots=True)
class MergedTurns:
    """Layer 1: old turns become one user message with what was asked, word by word, and one assistant message with what came
    of it."""

    @property
    def name(self) -> str:
        return "context_collapse"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        return _mildest(conversation, budget, _merged)


@dataclass(frozen=True, slots=True)
class Digested:
    """Layers 2 and 3: old steps become key decisions in three blocks, or one JSON object of metadata."""

    style: Literal["blocks", "json"]
    """blocks: project status, key files, in progress. json: `compressed_history`."""

    @property
    def name(self) -> str:
        return "context_collapse"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        def folded(conversation: Conversation, keep: int, share: float, budget: Budget) -> Conversation:
            return _digested(conversation, keep, share, budget, self.style)

        return _mildest(conversation, budget, folded)


@dataclass(frozen=True, slots=True)
class Auto:
    """Chooses between merged turns, key decisions and structured metadata.

    By signals: a fill of more than half asks for merging; more than 20 tool calls in one turn or a session of more than two
    hours for decisions; a history of nothing but tool calls for metadata. The mildest that is asked for and is enough wins.
    literal: by counts alone, the harshest first: more than 20 messages, more than 20 calls, anything else.
    """

    literal: bool = False
    """By counts alone."""
    ages: Ages = field(default_factory=dict, hash=False)
    """How long ago messages were first seen, also those that earlier events have folded."""

    @property
    def name(self) -> str:
        return "context_collapse"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        if self.literal:
            return _WAYS[literal_choice(conversation)].apply(conversation, budget)
        made = conversation
        for way in choices(conversation, budget, self.ages):
            made = _WAYS[way].apply(conversation, budget)
            if budget.ruler.total(made.messages) <= budget.target:
                return made
        return made


def choices(conversation: Conversation, budget: Budget, ages: Ages = MappingProxyType({})) -> tuple[int, ...]:
    """Layers 1 to 3 that the signals ask for, the mildest first; those that are harsher follow in case that it is not enough."""
    history = [step for i, step in enumerate(conversation.steps) if i not in conversation.protected]
    if history and all(step.head.calls for step in history):
        return (3,)
    if most_calls_in_a_turn(conversation) > MANY_CALLS or max(ages.values(), default=0.0) > LONG_SESSION:
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


def _mildest(conversation: Conversation, budget: Budget, fold: Fold) -> Conversation:
    """The fold that keeps the most of what meets the target, else the harshest."""
    made = conversation
    if budget.ruler.total(conversation.messages) <= budget.target:
        return conversation
    for share, keep in _ROOMS:
        made = fold(conversation, keep, share, budget)
        if made is not conversation and budget.ruler.total(made.messages) <= budget.target:
            return made
    return made


def _merged(conversation: Conversation, keep: int, share: float, budget: Budget) -> Conversation:
    old = folding.old_steps(conversation, keep)
    if len(old) < 3:
        return conversation
    observed = {id(output.message) for output in outputs(conversation)}
    gone = set(old)
    place = folding.place_of(conversation, old)
    following = next((step.head for i, step in enumerate(conversation.steps) if i >= place and i not in gone), None)

    def write(steps: Sequence[Step]) -> list[Message]:
        heads = [step.head for step in steps if id(step.head) not in observed and not is_line_of_ours(step.head)]
        asked = [head.text for head in heads if head.role == "user"]
        request, result = _both([text for text in asked if text.strip()], steps, int(4 * share * budget.target))
        if following is not None and following.role == "assistant":
            return [said("user", f"{request}\n\n{result}")]
        return [said("user", request), said("assistant", result)]

    return folding.fold(conversation, old, write)


def _both(asked: Sequence[str], steps: Sequence[Step], characters: int) -> tuple[str, str]:
    book, _ = folding.book_of(steps)
    limit = max(80, min(_PER_QUOTE, characters // (2 * max(1, len(asked)))))
    request = "\n".join(cut_middle(text, limit) for text in asked) or "(go on)"
    findings = [*book.decisions, *book.conclusions]
    while findings and sum(map(len, findings)) > characters // 2:
        findings.pop(0)
    edited = cut_middle(", ".join(use.path for use in book.files if use.edited), max(80, characters // 4))
    results = [*dict.fromkeys(findings), *([f"Edited: {edited}"] if edited else [])]
    return request, "\n".join(results) or "Done."


def _digested(conversation: Conversation, keep: int, share: float, budget: Budget, style: ledger.Style) -> Conversation:
    old = folding.old_steps_but_the_task(conversation, keep, budget)
    if len(old) < 2:
        return conversation

    def write(steps: Sequence[Step]) -> list[Message]:
        book, raw = folding.book_of(steps)
        lead = ledger.render(book, style=style, max_tokens=max(40, int(share * budget.target / 2)), ruler=budget.ruler)
        return [folding.summarized(book, raw, budget, share / 2, lead)]

    return folding.fold(conversation, old, write)


_WAYS: dict[int, MergedTurns | Digested] = {1: MergedTurns(), 2: Digested("blocks"), 3: Digested("json")}

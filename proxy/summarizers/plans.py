"""What a summary is to replace, and putting it there: decided here, without asking anybody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from proxy.compaction.summary import is_summary
from proxy.conversation import Conversation, Message, Opaque, Step
from proxy.summarizers.kimi import preserve_from
from proxy.tokens import Ruler


@dataclass(frozen=True, slots=True)
class Plan:
    """A stretch of whole steps of a conversation. start, stop: indices of its messages.

    folded: those of them that the summary replaces. tokens: what these weigh. after: messages that follow the stretch, which
    tells where in the client's own history it ends.
    """

    start: int
    stop: int
    folded: tuple[Message, ...]
    tokens: int
    after: int


def plan(
    conversation: Conversation, ruler: Ruler, *, keep_tokens: int, least: int = 2_048, pin: int = 2_000, key: bytes = b""
) -> Plan | None:
    """Everything but the newest steps that fit into keep_tokens; None when that weighs less than `least`.

    pin: the first task stays in its place up to this size. key: seals our summaries, which are folded like anything else.
    """
    steps = conversation.steps
    kept, at = 0, len(steps) - 1
    while at > 0 and kept + ruler.total(steps[at - 1].messages) - ruler.fixed <= keep_tokens:
        at -= 1
        kept += ruler.total(steps[at].messages) - ruler.fixed
    return _planned(conversation, ruler, _legal(steps, at), least, pin, key)


def plan_kimi(
    conversation: Conversation, ruler: Ruler, *, max_preserved: int = 2, least: int = 0, key: bytes = b""
) -> Plan | None:
    """Everything before the last user and assistant messages, as `SimpleCompaction` cuts; None when there is nothing."""
    history = conversation.messages[len(conversation.preamble) :]
    index = preserve_from(history, max_preserved) + len(conversation.preamble)
    at = next((i for i, step in enumerate(conversation.steps) if step.start >= index), 0)
    return _planned(conversation, ruler, _legal(conversation.steps, at), least, 0, key)


def adopt(conversation: Conversation, made: Plan, summary: Message, *, key: bytes = b"") -> Conversation | None:
    """The conversation with the summary in place of what it sums up; None when that is no longer what stands there.

    The summary stands where the first folded message stood, but before the last user message: what a person said last stays
    the last thing that a person said.
    """
    stretch = conversation.messages[made.start : made.stop]
    folded = _found(stretch, made.folded)
    if folded is None:
        return None
    person = _last_person(conversation, key)
    last_user = conversation.steps[person].start if person is not None else len(conversation.messages)
    place = min(made.start + min(folded, default=0), last_user)
    out: list[Message] = []
    for index, message in enumerate(conversation.messages):
        if index == place:
            out.append(summary)
        if index - made.start not in folded:
            out.append(message)
    return conversation.with_messages(out)


def _found(stretch: Sequence[Message], folded: Sequence[Message]) -> frozenset[int] | None:
    """Where the folded messages stand in the stretch, in their order; what stands between them was kept, and still is. None when
    one of them is not there."""
    places: list[int] = []
    for index, message in enumerate(stretch):
        if len(places) < len(folded) and message == folded[len(places)]:
            places.append(index)
    return frozenset(places) if len(places) == len(folded) else None


def missing_names(
    summary: str, folded: Sequence[Message], arrived: Sequence[Message], names: Callable[[str], Iterable[str]]
) -> tuple[str, ...]:
    """Names that newer messages refer to, that the folded ones hold and the summary lacks: to be put beside it.

    names: those of a text, as `entities.scan(text).distinct`.
    """
    old = "\n".join(_text(message) for message in folded)
    wanted = dict.fromkeys(name for message in arrived for name in sorted(names(_text(message))))
    return tuple(name for name in wanted if name in old and name not in summary)


def _text(message: Message) -> str:
    return "\n".join((message.text, *(f"{call.name} {call.arguments}" for call in message.calls)))


def _planned(conversation: Conversation, ruler: Ruler, at: int, least: int, pin: int, key: bytes) -> Plan | None:
    """The plan that folds the steps before `at`."""
    if at <= 0:
        return None
    steps = conversation.steps
    task = steps[0].head
    stays = task.role == "user" and not is_summary(task, key) and ruler.total(steps[0].messages) - ruler.fixed <= pin
    first = 1 if stays else 0
    if first >= at:
        return None
    start, stop = steps[first].start, steps[at - 1].stop
    folded = _foldable(conversation, start, stop, key)
    tokens = ruler.total(folded) - ruler.fixed if folded else 0
    if not folded or tokens < max(1, least):
        return None
    return Plan(start, stop, folded, tokens, len(conversation.messages) - stop)


def _foldable(conversation: Conversation, start: int, stop: int, key: bytes) -> tuple[Message, ...]:
    """The messages of whole steps between two indices, without what the last person said and later instructions."""
    person = _last_person(conversation, key)
    return tuple(
        message
        for i, step in enumerate(conversation.steps)
        if start <= step.start and step.stop <= stop and i != person and not step.is_pending and not step.head.is_instruction
        for message in step.messages
    )


def _last_person(conversation: Conversation, key: bytes) -> int | None:
    """Index in the steps of the last user message that is not a summary of ours."""
    steps = conversation.steps
    spoken = (i for i in range(len(steps) - 1, -1, -1) if steps[i].head.role == "user")
    return next((i for i in spoken if not is_summary(steps[i].head, key)), None)


def _legal(steps: Sequence[Step], at: int) -> int:
    """The cut moved back to where no call is pending and no tool loop with reasoning is taken apart."""
    while 0 < at < len(steps) and (steps[at - 1].is_pending or steps[at].head.is_result or _in_loop(steps, at)):
        at -= 1
    return at


def _in_loop(steps: Sequence[Step], at: int) -> bool:
    """Whether the step before the cut thought aloud for a loop of tool calls that goes on after it."""
    before, after = steps[at - 1], steps[at]
    return bool(before.results) and after.head.role == "assistant" and _thinks(before.head)


def _thinks(message: Message) -> bool:
    return any(isinstance(part, Opaque) and part.kind == "reasoning" for part in message.parts)

"""Old steps out, one message in: which steps are old, what is said in their place, and in which role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from proxy.compaction import ledger, reserve, signals, summary
from proxy.compaction.ledger import Ledger
from proxy.compaction.voices import AFTER, BEFORE, DONE, is_line_of_ours, speaker
from proxy.conversation import Conversation, Message, Step, said
from proxy.windows import Budget

Write = Callable[[Sequence[Step]], Sequence[Message]]
"""The steps that go → the messages that stand for them."""


def fold(conversation: Conversation, old: Sequence[int], write: Write) -> Conversation:
    """The conversation with the steps at these indices (in order) replaced by what `write` makes of them: where the first of them
    was, but before the last user message, which must stay the last thing that a person said."""
    steps, gone, place = conversation.steps, set(old), place_of(conversation, old)
    messages = list(conversation.preamble)
    for number, step in enumerate(steps):
        if number == place:
            messages.extend(write([steps[i] for i in old]))
        if number not in gone:
            messages.extend(step.messages)
    return conversation.with_messages(messages)


def place_of(conversation: Conversation, old: Sequence[int]) -> int:
    """Index in `steps` of where the messages that stand for the old ones go."""
    asked = last_asked(conversation)
    return old[0] if asked is None else min(old[0], asked)


def last_asked(conversation: Conversation) -> int | None:
    """Index in `steps` of the last user message that is no summary of ours."""
    numbers = range(len(conversation.steps) - 1, -1, -1)
    heads = ((i, conversation.steps[i].head) for i in numbers)
    return next((i for i, head in heads if head.role == "user" and not summary.is_summary(head)), None)


TASK_SHARE = 0.15
"""Of the target: up to here the first task stays in its place, word by word; of a longer one the summary quotes both ends."""


def old_steps_but_the_task(conversation: Conversation, keep: int, budget: Budget) -> list[int]:
    """`old_steps` without what was asked first."""
    task = conversation.first_user
    old = old_steps(conversation, keep)
    if task is None or task not in old or summary.is_summary(conversation.steps[task].head):
        return old
    fits = budget.ruler.message(conversation.steps[task].head) <= TASK_SHARE * budget.target
    return [i for i in old if i != task] if fits else old


def old_steps(conversation: Conversation, keep: int) -> list[int]:
    """Indices of the steps that are older than the newest `keep` messages, snapped to whole steps, and not protected."""
    border, count = len(conversation.steps), 0
    while border > 0 and count < keep:
        border -= 1
        count += len(conversation.steps[border].messages)
    asked = last_asked(conversation)
    return [i for i in range(border) if i not in conversation.protected and i != asked]


def book_of(steps: Sequence[Step]) -> tuple[Ledger, list[Step]]:
    """The ledger of the steps, with what earlier summaries of ours among them hold; and the steps that are none."""
    previous, raw = ledger.EMPTY, []
    for step in steps:
        body = summary.body_of(step.head) if len(step.messages) == 1 else None
        if body is None:
            raw.append(step)
        else:
            previous = summary.read(body).ledger
    return ledger.extract(raw, previous), raw


def error_lines(steps: Sequence[Step]) -> list[str]:
    """The error lines of the steps' results, in order."""
    texts = (message.text for step in steps for message in step.messages if message.is_result)
    return [line.strip() for text in texts for line in signals.error_lines(text)]


def summarized(
    book: Ledger, raw: Sequence[Step], budget: Budget, share: float, lead: str, *, errors: bool = True, requests: bool = True
) -> Message:
    """One message on the steps: `lead`, then quotes of what must not be forgotten in up to `share` of the target."""
    heads = [step.head for step in raw if not is_line_of_ours(step.head)]
    spoken = [head.text for head in heads if head.role == "assistant" and head.text.strip()]
    newest = list(dict.fromkeys(reversed(error_lines(raw))))[: reserve.ERRORS]
    quotes = reserve.quotes(
        replace(book, user_requests=book.user_requests if requests else (), errors=book.errors if errors else ()),
        last_words=spoken[-1] if spoken else "",
        errors=newest if errors else (),
        room=share * budget.target,
        ruler=budget.ruler,
        goal=True,
    )
    return summary.write(book.folded_messages, quotes, (), lead=lead)


def in_turns(conversation: Conversation) -> Conversation:
    """The conversation with its summaries in roles that let user and assistant take turns.

    Calls and results do not count. Between two user messages a summary speaks as the assistant; where one message more or
    less would break the turns, a line of ours stands on its other side.
    """
    messages = list(conversation.messages)
    for message in [message for message in messages if summary.is_summary(message)]:
        at, before = _place(messages, message)
        after = next((role for role in map(speaker, messages[at + 1 :]) if role), None)
        messages[at : at + 1] = _turned(message, before, after)
    return conversation.with_messages(messages)


def moved_to_gaps(conversation: Conversation) -> Conversation:
    """The conversation with its summaries where the answer stood that they fold: between the next two user messages that are
    neighbors, as `in_turns` wants them.

    Only for one that took turns as it came. Of one that came with such neighbors nobody's answer is folded between them, and
    what a client says after the first would come to stand on the wrong side of the summary.
    """
    messages = list(conversation.messages)
    for message in [message for message in messages if summary.is_summary(message)]:
        at, before = _place(messages, message)
        if before != "user" and (gap := _gap(messages, at + 1)) is not None:
            messages[at:gap] = [*messages[at + 1 : gap], message]
    return conversation.with_messages(messages)


def gaps_closed(conversation: Conversation) -> Conversation:
    """The conversation with a line of ours wherever user or assistant would speak twice in a row, calls and results left out of
    account: for one that took turns before some of it was folded."""
    messages: list[Message] = []
    last: str | None = None
    for message in conversation.messages:
        role = speaker(message)
        if role is not None:
            if role == last:
                messages.append(said("assistant", DONE) if role == "user" else said("user", AFTER))
            elif last is None and role == "assistant":
                messages.append(said("user", BEFORE))
            last = role
        messages.append(message)
    return conversation.with_messages(messages)


def _gap(messages: Sequence[Message], start: int) -> int | None:
    """Index of the first user message after `start` that speaks right after another one from `start` on, summaries left out."""
    last: str | None = None
    for i in range(start, len(messages)):
        role = None if summary.is_summary(messages[i]) else speaker(messages[i])
        if role == "user" == last:
            return i
        last = role or last
    return None


def _place(messages: Sequence[Message], message: Message) -> tuple[int, str | None]:
    """Index of this very message, and who speaks before it."""
    at = next(i for i, other in enumerate(messages) if other is message)
    return at, next((role for role in map(speaker, reversed(messages[:at])) if role), None)


def _turned(message: Message, before: str | None, after: str | None) -> list[Message]:
    if before == "user":
        mine = _by("assistant", message)
        return [mine] if after != "assistant" else [mine, said("user", AFTER)]
    if after != "user":
        return [_by("user", message)]
    return [said("user", BEFORE), _by("assistant", message)]


def _by(role: str, message: Message) -> Message:
    """The message in this role; what it came as holds the other."""
    return message if message.role == role else replace(message, role=role, raw=None, origin=None)

"""From a plan to a question, and from an accepted summary to the message that stands for what was folded.

The message is one of our own kind, sealed: beside the model's words it holds the ledger's quotes, so that the next event, by a
model or without one, goes on from both.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction import ledger, reserve, summary
from proxy.compaction.ledger import Ledger, failure_line
from proxy.conversation import Conversation, Message
from proxy.summarizers import Headers, SummaryRequest, facts
from proxy.summarizers.plans import Plan
from proxy.tokens import Ruler

LABEL = "Summary by a model"
"""The heading over the model's words, by which the next question finds them."""

QUOTED_SHARE = 0.1
"""Of what is folded: how much of it the ledger may quote beside the model's words."""


def request_of(
    conversation: Conversation,
    made: Plan,
    ruler: Ruler,
    *,
    model: str = "",
    headers: Headers = (),
    window: int | None = None,
    key: bytes = b"",
) -> SummaryRequest:
    """The question for a plan. model, headers: of the request. window: of the model that is asked, in tokens. key: seals our
    summaries; one with another seal is plain text."""
    earlier, book = _known(conversation, made, key, with_task=True)
    bodies = [message for message in made.folded if not summary.is_summary(message, key)]
    return SummaryRequest(tuple(bodies), made.tokens, ruler.text, model, earlier, facts(book), headers, window)


def message_of(
    text: str,
    conversation: Conversation,
    made: Plan,
    ruler: Ruler,
    *,
    names: Sequence[str] = (),
    role: str = "user",
    key: bytes = b"",
) -> Message:
    """The message that holds a model's summary. names: what newer messages refer to and the text lacks (`missing_names`)."""
    _, book = _known(conversation, made, key, with_task=False)
    errors = [failure_line(failure) for failure in reversed(book.unresolved)]
    room = QUOTED_SHARE * made.tokens
    quotes = reserve.quotes(book, last_words="", errors=errors, room=room, ruler=ruler, goal=not _task_stays(conversation, made))
    said = [quote for quote in quotes if quote.text not in text]
    said.extend(reserve.Quote("Entities", name) for name in names)
    return summary.write(book.folded_messages, said, [(LABEL, text.split("\n"))], role=role, key=key)


def _known(conversation: Conversation, made: Plan, key: bytes, *, with_task: bool) -> tuple[str, Ledger]:
    """The words of the summary before, and the ledger of everything that is folded now or was before.

    with_task: also of a first task that stays in its place: a model must know what all this was for.
    """
    words, before = "", ledger.EMPTY
    for message in made.folded:
        body = summary.body_of(message, key)
        if body is not None:
            earlier = summary.read(body)
            before = earlier.ledger
            words = "\n".join(text for _, text in earlier.excerpts) or ledger_words(body)
    wanted = {id(message) for message in made.folded}
    if with_task and _task_stays(conversation, made):
        wanted.update(id(step.head) for step in conversation.steps[:1])
    steps = [step for step in conversation.steps if id(step.head) in wanted and not summary.is_summary(step.head, key)]
    return words, ledger.extract(steps, before)


def ledger_words(body: str) -> str:
    """A summary without any words of a model: its quotes, as they stand."""
    return body.split("\n", 1)[-1]


def _task_stays(conversation: Conversation, made: Plan) -> bool:
    """Whether the first task is still in its place, and need not be quoted."""
    first = conversation.first_user
    return first is not None and conversation.steps[first].start < made.start

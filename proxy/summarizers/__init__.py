"""Who writes a summary with a model: what is asked for, what comes back, and who can carry the question to a model.

A summary is never trusted: it is checked before anybody uses it, and without one the deterministic layers do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.compaction.ledger import Ledger, failure_line
from proxy.conversation import Message

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a summary took, as its model reported them."""

    input: int = 0
    output: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.input + other.input, self.output + other.output)


class Completer(Protocol):
    """A server that completes chats: `upstream.Upstream` is one."""

    async def complete(self, body: bytes, headers: Headers, *, timeout: float) -> tuple[int, bytes]:  # noqa: ASYNC109
        """Status and body of one completion that is not streamed. timeout: seconds. Raises UpstreamError."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What code has read in the history, word by word: a summary is held against it and repaired from it.

    goal: the first task. constraints: standing instructions. errors: unresolved ones. files: paths that were worked on.
    """

    goal: str = ""
    requests: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def facts(ledger: Ledger) -> Facts:
    """The facts of a ledger."""
    return Facts(
        goal=ledger.goal,
        requests=tuple(request.text for request in ledger.open_requests),
        constraints=ledger.constraints,
        errors=tuple(failure_line(failure) for failure in ledger.unresolved),
        files=tuple(use.path for use in ledger.files if use.edited),
    )


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """What is to be summed up.

    folded: the messages that the summary will replace, oldest first. tokens: what they weigh. previous: the last summary's
    words, if there was one. model: the model of the conversation, asked unless the summarizer has its own. headers: the
    client's credentials, used only towards the origin that they came for. count: tokens of a text. window: tokens that the
    asked model can hold, where that is known.
    """

    folded: tuple[Message, ...]
    tokens: int
    count: Callable[[str], int]
    model: str = ""
    previous: str = ""
    facts: Facts = Facts()
    headers: Headers = ()
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """text: accepted, and repaired where it lacked something. repaired: how many things were put in or taken out."""

    text: str
    model: str
    usage: Usage
    repaired: int = 0


class Summarizer(Protocol):
    """One way of asking a model for a summary."""

    async def summarize(self, request: SummaryRequest) -> Summary:
        """An accepted summary. Raises SummaryFailed, whose outcome is one of `OUTCOMES`."""
        ...


OUTCOMES = (
    *("ok", "timeout", "unreachable", "http_429", "http_4xx", "http_5xx", "not_json", "no_answer", "tool_call", "cut_off"),
    *("filtered", "unfinished", "empty", "reasoning_only", "refused", "error_text", "no_headings", "too_long", "wrong_language"),
    *("injected", "unfounded", "breaker", "too_large"),
)
"""Everything that can come of a summary, for a metric's label."""


class Observe(Protocol):
    """Told of every summary: `metrics.Metrics.observe_summary` is one."""

    def __call__(self, model: str, outcome: str, *, seconds: float, tokens_in: int, tokens_out: int) -> None: ...


def ignore(model: str, outcome: str, *, seconds: float, tokens_in: int, tokens_out: int) -> None:
    """An `Observe` that nobody listens to."""

"""Old messages rewritten by a model into one, the newest kept: the way of Kimi's agent, as a strategy on its own.

`SimpleCompaction` is also for use without the proxy: it knows messages and asks an `LLM`; who reaches the provider, tries
again or gives up is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import structlog

from proxy.conversation import Message, Opaque, Part, Text
from proxy.summarizers import Headers, Summary, SummaryRequest, Usage
from proxy.summarizers.answers import without_thinking
from proxy.summarizers.call import Caller
from proxy.summarizers.language import spoken
from proxy.summarizers.prompts import Prompt, prompt
from proxy.summarizers.sections import Way, summed_up
from proxy.summarizers.transcript import heading, parts_of
from proxy.wire import slices
from proxy.wire.chat_completions import write_message

COUNTED = frozenset({"user", "assistant"})
"""Roles that count as recent messages; tool and system messages go with the side that they stand on."""

MARKER = "<system>Earlier messages were condensed to save room. What follows is their summary, not a new request.</system>"
"""What stands before a summary that speaks in the user's role."""

WAY = Way("kimi", ("goal", "constraints", "done", "open", "notes"))

_log = structlog.get_logger("proxy.summarizers")


@dataclass(frozen=True, slots=True)
class StepResult:
    """One answer of a model. usage: None when the provider does not say."""

    message: Message
    usage: Usage | None = None


@runtime_checkable
class LLM(Protocol):
    """A model that can be asked once, without tools."""

    async def step(self, *, system_prompt: str, history: Sequence[Message]) -> StepResult:
        """The answer to this history. Raises SummaryFailed when the provider fails."""
        ...


@runtime_checkable
class Compaction(Protocol):
    """A way of making a history shorter; all that its callers know of it."""

    async def compact(self, messages: Sequence[Message], llm: LLM) -> Sequence[Message]:
        """The history as it came, or a shorter one. Raises what the provider raised: SummaryFailed."""
        ...


class PrepareResult(NamedTuple):
    """compact_message: what to ask the model, None when there is nothing to condense. to_preserve: what stays as it is."""

    compact_message: Message | None
    to_preserve: Sequence[Message]


class NoopCompaction:
    """Leaves every history alone."""

    async def compact(self, messages: Sequence[Message], llm: LLM) -> Sequence[Message]:
        return messages


class SimpleCompaction:
    """The older part condensed by a model, the newest user and assistant messages kept.

    max_preserved_messages: how many of those; 0 or less leaves every history alone. role: in which the summary speaks.
    language: of the instruction; None follows the users.
    """

    def __init__(self, max_preserved_messages: int = 2, *, role: str = "user", language: str | None = None) -> None:
        self.max_preserved_messages = max_preserved_messages
        self.role, self.language = role, language

    def prepare(self, messages: Sequence[Message]) -> PrepareResult:
        """What to ask, and what to keep. Pure."""
        at = preserve_from(messages, self.max_preserved_messages)
        if at == 0:
            return PrepareResult(None, messages)
        to_compact = messages[:at]
        parts = condensing(to_compact, self._prompt(messages), media=True)
        return PrepareResult(Message("user", tuple(parts)), messages[at:])

    async def compact(self, messages: Sequence[Message], llm: LLM) -> Sequence[Message]:
        prepared = self.prepare(messages)
        if prepared.compact_message is None:
            return prepared.to_preserve
        system = self._prompt(messages).system
        result = await llm.step(system_prompt=system, history=[prepared.compact_message])
        if result.usage is not None:
            _log.debug("history condensed", tokens_in=result.usage.input, tokens_out=result.usage.output)
        return [summary_message(result.message, self.role), *prepared.to_preserve]

    def _prompt(self, messages: Sequence[Message]) -> Prompt:
        return prompt("kimi", self.language or spoken(messages))


def prepare(messages: Sequence[Message], max_preserved_messages: int = 2) -> PrepareResult:
    """`SimpleCompaction.prepare` without an object."""
    return SimpleCompaction(max_preserved_messages).prepare(messages)


def preserve_from(messages: Sequence[Message], max_preserved: int) -> int:
    """Index of the first message to keep, counting user and assistant messages from the end; 0 when there is nothing to fold."""
    if max_preserved <= 0:
        return 0
    counted = 0
    for at in range(len(messages) - 1, -1, -1):
        counted += messages[at].role in COUNTED
        if counted == max_preserved:
            return at
    return 0


def condensing(messages: Sequence[Message], asked: Prompt, *, media: bool) -> list[Part]:
    """The parts of the one message that a model is asked with: each message under its heading, the instruction last."""
    parts: list[Part] = []
    for number, message in enumerate(messages, 1):
        parts.append(Text(("\n\n" if parts else "") + heading(number, message)))
        parts.extend(parts_of(message, media=media))
    parts.append(Text("\n\n" + asked.instruction))
    return parts


def summary_message(answer: Message, role: str = "user") -> Message:
    """The message that stands for what was condensed: the marker, then the model's words without its thinking."""
    shown = (part for part in answer.parts if not (isinstance(part, Opaque) and part.kind == "reasoning"))
    words = (Text(without_thinking(part.text)) if isinstance(part, Text) else part for part in shown)
    return Message(role, (Text(MARKER), *(part for part in words if not isinstance(part, Text) or part.text)))


class ChatModel:
    """An `LLM` behind a `Caller`: what reaches the provider for `SimpleCompaction`. model: who is asked."""

    def __init__(self, caller: Caller, model: str, *, headers: Headers = ()) -> None:
        self._caller, self._model, self._headers = caller, model, headers

    async def step(self, *, system_prompt: str, history: Sequence[Message]) -> StepResult:
        parts = [part for message in history for part in message.parts]
        content = content_json(parts)
        cap = self._caller.settings.max_output
        model = self._caller.model(self._model)
        answer = await self._caller.ask(system_prompt, content, model=model, cap=cap, headers=self._headers)
        self._caller.tell(model, "ok", answer)
        return StepResult(Message("assistant", (Text(answer.text),)), answer.usage)


class KimiSummarizer:
    """Condenses what a plan folds, checked before it is used; what the strategy keeps is `preserve_from`'s decision."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def summarize(self, request: SummaryRequest) -> Summary:
        """The accepted summary. Raises SummaryFailed."""
        return await summed_up(self._caller, WAY, request)


def content_json(parts: Sequence[Part]) -> bytes:
    """A user message's content: a string where all of it is text, else a list of parts."""
    if all(isinstance(part, Text) for part in parts):
        return slices.write_string("".join(part.text for part in parts if isinstance(part, Text)))
    return slices.split_object(write_message(Message("user", tuple(parts))))["content"]

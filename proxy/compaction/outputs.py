"""Which messages are what a tool said, and what was called to get it.

Tool results are the messages with role `tool` or `function`. Text agents have none: their calls stand in the assistant's
words, and what came back stands in *user* messages (observations). Both are treated alike from here on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.compaction.voices import voices
from proxy.conversation import Conversation, Message, Part, Step, Text, ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class Output:
    """index: in `conversation.messages`. step: in `conversation.steps`. protected: it stands in a step that may not be folded."""

    index: int
    step: int
    message: Message
    call: ToolCall | None
    protected: bool

    @property
    def text(self) -> str:
        return self.message.text

    @property
    def tool(self) -> str:
        """The tool's name, or `output` where nobody says it."""
        if self.call is not None and self.call.name:
            return self.call.name
        part = self.message.parts[0] if self.message.parts else None
        return (part.name if isinstance(part, ToolResult) else None) or "output"


def outputs(conversation: Conversation) -> tuple[Output, ...]:
    """Every tool result and every observation, in order."""
    observed = frozenset(i for i, voice in enumerate(voices(conversation.steps)) if voice == "observation")
    return tuple(_outputs(conversation, observed, conversation.protected))


def with_text(message: Message, text: str) -> Message:
    """The message with these words instead of its own; media and whatever else it holds stays."""
    kept: list[Part] = []
    placed = False
    for part in message.parts:
        if isinstance(part, ToolResult):
            kept.append(ToolResult(part.call_id, text, part.name))
            placed = True
        elif isinstance(part, Text):
            if not placed:
                kept.append(Text(text))
                placed = True
        else:
            kept.append(part)
    return message.with_parts(kept)


def call_of(step: Step, position: int) -> ToolCall | None:
    """The call that the step's result at this position answers: by id, else by position."""
    calls = step.head.calls
    result = step.results[position].parts[0] if step.results[position].parts else None
    wanted = result.call_id if isinstance(result, ToolResult) else None
    for call in calls:
        if wanted is not None and call.id == wanted:
            return call
    return calls[position] if position < len(calls) else None


def _outputs(conversation: Conversation, observed: frozenset[int], protected: frozenset[int]) -> Iterator[Output]:
    for number, step in enumerate(conversation.steps):
        if number in observed or step.head.is_result:
            yield Output(step.start, number, step.head, None, number in protected)
        for position, message in enumerate(step.results):
            yield Output(step.start + 1 + position, number, message, call_of(step, position), number in protected)

"""Which messages are what a tool said, and what was called to get it.

Tool results are the messages with role `tool` or `function`. Text agents have none: their calls stand in the assistant's
words, and what came back stands in *user* messages (observations). Both are treated alike from here on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from proxy.compaction.voices import voices
from proxy.conversation import Conversation, Message, Part, Step, Text, ToolCall, ToolResult

_INTERFACE = re.compile(r"\b(?:command[ -]line|terminal|shell|bash|special interface|sandbox|jupyter|repl)\b", re.IGNORECASE)
_ACTION = re.compile(r"```|<(?:execute|function|tool|invoke|bash|cmd|run)\w*\b", re.IGNORECASE)
_BEGINNING = re.compile(
    r"\s*(?:<(?:returncode|output|stdout|stderr|observation|tool_response|execution|result)\w*>|observation:|execution result\b|"
    r"\[file: |exit ?code\b|command (?:output|executed|timed out)\b)",
    re.IGNORECASE,
)
_END = re.compile(
    r"\n(?:\(current directory: [^\n]*\)\s*\n\S{0,20}[$#>]|(?:<returncode>|\[?exit code:? |\[command finished)[^\n]*)\s*\Z",
    re.IGNORECASE,
)


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
    """Every tool result and every observation, in order. Worked out once for a conversation: every layer asks."""
    notes: dict[str, tuple[Output, ...]] = vars(conversation)  # where its own cached properties are kept, too
    if "_outputs" not in notes:
        observed = frozenset(i for i, voice in enumerate(voices(conversation.steps)) if voice == "observation")
        notes["_outputs"] = tuple(_outputs(conversation, observed, conversation.protected))
    return notes["_outputs"]


def newest_is_observation(conversation: Conversation) -> bool:
    """The newest message is what a tool said, in a user message: nobody has asked for anything in it."""
    said = outputs(conversation)
    if said and said[-1].message is conversation.messages[-1] and not said[-1].message.is_result:
        return True
    return _is_first_observation(conversation)


def _is_first_observation(conversation: Conversation) -> bool:
    """The same of a text agent that has only begun, which `voices` cannot tell yet.

    It takes all of: instructions that speak of a shell; each of the assistant's turns an action; the message right after one;
    and the frame that harnesses put around what a command printed. A person's message is never taken for one.
    """
    if len(conversation.steps) < 3 or conversation.messages[-1].role != "user":
        return False
    heads = [step.head for step in conversation.steps]
    if any(head.calls or head.is_result or head.name is not None for head in heads) or heads[-2].role != "assistant":
        return False
    text = conversation.messages[-1].text
    return (
        all(_ACTION.search(head.text) for head in heads if head.role == "assistant")
        and (_BEGINNING.match(text) is not None or _END.search(text[-600:]) is not None)
        and any(_INTERFACE.search(message.text) for message in conversation.preamble)
    )


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

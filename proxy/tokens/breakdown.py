"""Where the tokens of a request are: by message and part, for people who ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.conversation import Message, Opaque, Part, Text, ToolCall, ToolResult
from proxy.tokens.chat import ChatRuler, ruler


@dataclass(frozen=True, slots=True)
class PartShare:
    """kind: text, call, result, or what the part calls itself. tokens: of its own words, without what frames the message."""

    kind: str
    tokens: int


@dataclass(frozen=True, slots=True)
class MessageShare:
    """One message; `tokens` includes its framing, so the parts' sum is less."""

    role: str
    tokens: int
    parts: tuple[PartShare, ...]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """tokens = tools + other + the messages' tokens. other: priming, response_format, tool_choice."""

    model: str
    encoding: str
    tokens: int
    tools: int
    other: int
    messages: tuple[MessageShare, ...]


def breakdown(model: str, fields: Mapping[str, bytes], messages: Sequence[Message], *, encoding: str | None = None) -> Breakdown:
    """The uncalibrated count of a request, taken apart. Arguments as for `ruler`."""
    rule = ruler(model, fields, encoding=encoding)
    shares = zip(messages, rule.shares(messages), strict=True)
    return Breakdown(
        model=model,
        encoding=rule.encoding,
        tokens=rule.raw(messages),
        tools=rule.tools,
        other=rule.raw(()) - rule.tools,
        messages=tuple(MessageShare(message.role, tokens, _parts(rule, message)) for message, tokens in shares),
    )


def _parts(rule: ChatRuler, message: Message) -> tuple[PartShare, ...]:
    return tuple(PartShare(_kind(part), rule.part(part)) for part in message.parts)


def _kind(part: Part) -> str:
    match part:
        case Text():
            return "text"
        case ToolCall():
            return "call"
        case ToolResult():
            return "result"
        case Opaque(kind=kind):
            return kind

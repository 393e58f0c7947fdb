"""Old tool results as one line each that still says what was there; long old arguments as shorter JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.compaction import graphemes, json_text
from proxy.compaction.line_kinds import important, kind_of
from proxy.compaction.outputs import Output, outputs, with_text
from proxy.compaction.shorten import cut_middle
from proxy.conversation import Conversation, Message, ToolCall
from proxy.tokens import Ruler
from proxy.windows import Budget

_WORD = re.compile(r"[\w./-]*[\w/][./_][\w./-]*\w|[A-Z]\w*[a-z][A-Z]\w+|\b[0-9a-f]{7,40}\b")
_LINE = 160  # characters of a quoted line
_ARGUMENTS = 120  # characters of the arguments in a stub


@dataclass(frozen=True, slots=True)
class Microcompact:
    """Replaces results older than the newest `keep_recent` by stubs, oldest first, until the target is met."""

    keep_recent: int = 10
    """Results that stay whole."""
    min_tokens: int = 200
    """Smaller results and arguments stay as they are."""
    key_lines: int = 3
    """Lines that a stub quotes: errors, then those that name what later turns speak of."""

    @property
    def name(self) -> str:
        return "microcompact"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        ruler = budget.ruler
        excess = ruler.total(conversation.messages) - budget.target
        messages = list(conversation.messages)
        said = outputs(conversation)
        old = said[: len(said) - self.keep_recent] if self.keep_recent else said
        later = _later_words(conversation)
        for output in old:
            if excess <= 0:
                return conversation.with_messages(messages)
            size = ruler.message(output.message)
            if output.protected or size < self.min_tokens:
                continue
            shorter = with_text(output.message, stub(output, later, self.key_lines))
            saved = size - ruler.message(shorter)
            if saved > 0:
                messages[output.index] = shorter
                excess -= saved
        border = old[-1].index if old else 0
        for step in conversation.steps:
            if excess <= 0 or step.start > border:
                break
            if step.head.calls and step.stop < len(messages) and not step.is_pending:
                shorter = with_short_arguments(step.head, self.min_tokens, ruler)
                excess -= ruler.message(step.head) - ruler.message(shorter)
                messages[step.start] = shorter
        return conversation.with_messages(messages)


def stub(output: Output, later: frozenset[str], key_lines: int = 3) -> str:
    """One line on what the tool said, and the lines of it that matter most."""
    text = output.text
    lines = text.split("\n")
    arguments = f"({digest_of(output.call.arguments)})" if output.call is not None else ""
    header = f"[{_name(output.tool)}{arguments}: {len(text):,} characters, {len(lines):,} lines, cut]"
    quotes = _key_lines(lines, later, key_lines)
    first = next((line.strip() for line in lines if line.strip()), "")
    if first and all(first[:40] not in quote for quote in quotes):
        quotes = [first, *quotes]
    return "\n".join([header, *(cut_middle(quote, _LINE) for quote in quotes)])


def digest_of(arguments: str) -> str:
    """A call's arguments on one line, bounded."""
    value = json_text.parse(arguments)
    if isinstance(value, dict) and len(value) <= 6:
        shown = ", ".join(f"{key}={_one_line(item)}" for key, item in value.items())
    else:
        shown = _one_line(arguments)
    return cut_middle(shown, _ARGUMENTS)


def with_short_arguments(message: Message, min_tokens: int, ruler: Ruler) -> Message:
    """The message with arguments of more than `min_tokens` shortened: the same keys, long values cut. What is no object stays."""
    parts = []
    for part in message.parts:
        if isinstance(part, ToolCall) and len(part.arguments) > 2 * min_tokens and ruler.text(part.arguments) > min_tokens:
            part = short_call(part, 2 * min_tokens)
        parts.append(part)
    return message.with_parts(parts)


def short_call(call: ToolCall, limit: int) -> ToolCall:
    """The call with its arguments in about `limit` characters, still an object with its keys; itself when that cannot be."""
    value = json_text.parse(call.arguments)
    if not isinstance(value, dict):
        return call
    shorter = json_text.shorten(call.arguments, limit, cut_middle)
    if shorter is None or len(shorter) >= len(call.arguments):
        return call
    return ToolCall(call.id, call.name, shorter, call.raw)


def _key_lines(lines: Sequence[str], later: frozenset[str], most: int) -> list[str]:
    errors = important(lines, kind_of(lines))
    chosen = dict.fromkeys(errors[-most:])
    if len(chosen) < most:
        for i, line in enumerate(lines):
            if i not in chosen and len(line) < 400 and any(word in later for word in _WORD.findall(line)):
                chosen[i] = None
                if len(chosen) >= most:
                    break
    return [lines[i].strip() for i in sorted(chosen) if lines[i].strip()]


def _later_words(conversation: Conversation) -> frozenset[str]:
    """Names that the assistant's newest turns speak of."""
    words: set[str] = set()
    for step in conversation.steps[-12:]:
        if step.head.role == "assistant":
            words.update(_WORD.findall(step.head.text[:4_000]))
            for call in step.head.calls:
                words.update(_WORD.findall(call.arguments[:1_000]))
    return frozenset(words)


def _one_line(value: object) -> str:
    text = value if isinstance(value, str) else json_text.dump(value)
    return cut_middle(
        re.sub(r"\s+", " ", text[: 4 * _ARGUMENTS]).strip(), _ARGUMENTS // 2 if len(text) > _ARGUMENTS // 2 else _ARGUMENTS
    )


def _name(tool: str) -> str:
    cleaned = re.sub(r"[^\w.:-]", "", tool)
    return cleaned[: graphemes.before(cleaned, 64)] or "output"

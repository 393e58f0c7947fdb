"""The last layers before the emergency: assistant text without its redundancy, then nothing but the newest steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.compaction import folding
from proxy.compaction.outputs import outputs, with_text
from proxy.compaction.shorten import shorten
from proxy.conversation import Conversation, Message, Step, Text
from proxy.windows import Budget

LEDGER_SHARE = 0.25
"""Of the target: what the ledger of an aggressive summary may take. There is nothing else left of the history."""

Level = Literal["standard", "aggressive"]


@dataclass(frozen=True, slots=True)
class AutoCompact:
    """standard: assistant text loses what it says twice, tool output is cut to a fixed length; user messages stay as they are.
    aggressive: the newest messages stay, and one message says what was before: tools, errors, and what must not be forgotten."""

    level: Level = "standard"
    """How far it goes."""
    tool_characters: int = 10_000
    """standard: characters that a tool's output may keep."""
    keep_recent: int = 5
    """aggressive: messages that stay, snapped to whole steps."""
    preserve_errors: bool = True
    """aggressive: quote the errors."""
    preserve_user_requests: bool = True
    """aggressive: quote what the user asked for."""

    @property
    def name(self) -> str:
        return "auto_compact"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        if self.level == "aggressive":
            return folded(
                conversation, self.keep_recent, budget, errors=self.preserve_errors, requests=self.preserve_user_requests
            )
        return _without_redundancy(_with_short_results(conversation, self.tool_characters))


def folded(conversation: Conversation, keep: int, budget: Budget, *, errors: bool = True, requests: bool = True) -> Conversation:
    """All but the newest `keep` messages and what is protected as one user message: what was used, and the ledger."""
    old = folding.old_steps_but_the_task(conversation, keep, budget)
    if len(old) < 2:
        return conversation

    def write(steps: Sequence[Step]) -> list[Message]:
        book, raw = folding.book_of(steps)
        lead = f"[Conversation history: {brief(raw, len(folding.error_lines(raw)))}]"
        return [folding.summarized(book, raw, budget, LEDGER_SHARE, lead, errors=errors, requests=requests)]

    return folding.fold(conversation, old, write)


def brief(steps: Sequence[Step], errors: int) -> str:
    """`Used tools: a, b. Encountered N errors.`"""
    tools = list(dict.fromkeys(call.name for step in steps for call in step.head.calls if call.name))
    used = f"Used tools: {', '.join(tools)}. " if tools else "Used no tools. "
    return used + (f"Encountered {errors:,} {'error' if errors == 1 else 'errors'}." if errors else "No errors.")


_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")


def _with_short_results(conversation: Conversation, characters: int) -> Conversation:
    messages = list(conversation.messages)
    for output in outputs(conversation):
        if not output.protected and output.message.is_result and len(output.text) > characters:
            messages[output.index] = with_text(output.message, shorten(output.text, characters))
    return conversation.with_messages(messages)


def _without_redundancy(conversation: Conversation) -> Conversation:
    messages = list(conversation.messages)
    seen: set[str] = set()
    for number, step in enumerate(conversation.steps):
        if step.head.role == "assistant" and number not in conversation.protected:
            messages[step.start] = _less_redundant(step.head, seen)
    return conversation.with_messages(messages)


def _less_redundant(message: Message, seen: set[str]) -> Message:
    """Without sentences and lines that an earlier part of the conversation's assistant text has said; never empty."""
    parts = [Text(_unrepeated(part.text, seen)) if isinstance(part, Text) else part for part in message.parts]
    same = all(
        not isinstance(new, Text) or not isinstance(old, Text) or new.text == old.text
        for new, old in zip(parts, message.parts, strict=True)
    )
    if same or any(isinstance(part, Text) and not part.text.strip() for part in parts):
        return message
    return message.with_parts(
        old if isinstance(old, Text) and isinstance(new, Text) and new.text == old.text else new
        for new, old in zip(parts, message.parts, strict=True)
    )


def _unrepeated(text: str, seen: set[str]) -> str:
    out: list[str] = []
    in_code = False
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if in_code or len(line) < 24:
            if line or not out or out[-1]:
                out.append(line)
            continue
        kept = [sentence for sentence in _SENTENCE.split(line) if _first_time(sentence, seen)]
        if kept:
            out.append(" ".join(kept))
    return "\n".join(out)


def _first_time(sentence: str, seen: set[str]) -> bool:
    key = " ".join(sentence.lower().split())
    if len(key) < 24:
        return True
    if key in seen:
        return False
    seen.add(key)
    return True

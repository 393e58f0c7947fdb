"""The last layers before the emergency: assistant text without its redundancy, then nothing but the newest steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.compaction import collapse, ledger
from proxy.compaction.outputs import outputs, with_text
from proxy.compaction.shorten import shorten
from proxy.compaction.signals import is_error_line
from proxy.conversation import Conversation, Message, Step, Text
from proxy.tokens import Ruler
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

    @property
    def name(self) -> str:
        return "auto_compact"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        if self.level == "aggressive":
            return folded(conversation, self.keep_recent, budget)
        return _without_redundancy(_with_short_results(conversation, self.tool_characters))


def folded(conversation: Conversation, keep: int, budget: Budget, share: float = LEDGER_SHARE) -> Conversation:
    """All but the newest `keep` messages and what is protected as one user message, whose ledger may take `share` of the target."""
    old = _old_steps(conversation, keep)
    if len(old) < 2:
        return conversation
    steps = conversation.steps
    gone = set(old)
    messages = list(conversation.preamble)
    for number, step in enumerate(steps):
        if number == old[0]:
            messages.append(_summary([steps[i] for i in old], int(budget.target * share), budget.ruler))
        if number not in gone:
            messages.extend(step.messages)
    return conversation.with_messages(messages)


def _summary(steps: Sequence[Step], tokens: int, ruler: Ruler) -> Message:
    """What the steps came to, in the form that the collapse reads again at the next event."""
    previous, raw = ledger.EMPTY, []
    for step in steps:
        body = collapse.body_of(step.head) if len(step.messages) == 1 else None
        if body is None:
            raw.append(step)
        else:
            previous = collapse.read(body).ledger
    book = ledger.extract(raw, previous)
    opening = f"[Conversation history: {brief(raw)}] {book.folded_messages} earlier messages; a record, not instructions."
    text = ledger.render(book, style="detailed", max_tokens=max(40, tokens), ruler=ruler)
    lines = (f"§ {line[:-1]}" if line.endswith(":") and line[:-1] in ledger.SECTIONS else line for line in text.split("\n"))
    return collapse.sealed("\n".join([opening, *lines]), "user")


def brief(steps: Sequence[Step]) -> str:
    """`Used tools: a, b. Encountered N errors.`"""
    tools = list(dict.fromkeys(call.name for step in steps for call in step.head.calls if call.name))
    errors = sum(1 for step in steps for message in step.results for line in message.text.split("\n") if is_error_line(line))
    used = f"Used tools: {', '.join(tools)}. " if tools else "Used no tools. "
    return used + (f"Encountered {errors:,} {'error' if errors == 1 else 'errors'}." if errors else "No errors.")


def _old_steps(conversation: Conversation, keep: int) -> list[int]:
    """Indices of the steps to fold: all that are older than the newest `keep` messages and not protected."""
    border, count = len(conversation.steps), 0
    while border > 0 and count < keep:
        border -= 1
        count += len(conversation.steps[border].messages)
    return [i for i in range(border) if i not in conversation.protected]


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

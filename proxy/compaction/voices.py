"""Who speaks: what in a history is a person's request, what is a tool's or another agent's output in a user message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from proxy.conversation import Message, Step

Voice = Literal["request", "observation", "notice", "assistant", "instruction", "results"]
"""request: a person asks. observation: output of the world, in a user message. notice: what a client's machinery put in."""

BEFORE, AFTER = "(The earlier conversation follows, shortened.)", "(Go on.)"
"""What stands on the other side of a summary in the assistant's role, where a template wants user and assistant to take turns."""
DONE = "(Done.)"
"""What the assistant says between two user messages whose answer is folded."""

_NOTICE_TAG = re.compile(r"\s*<([\w:-]*(?:reminder|command|notification|caveat|stdout|stderr|hook|environment)[\w:-]*)[ >]", re.I)
_TAG = re.compile(r"\s*<([\w:-]+)(?:\s[^<>]*)?>")
_INTERRUPTED = re.compile(r"\s*\[(?:request|tool use|operation)? ?interrupted\b", re.I)
_COMMAND = re.compile(
    r"```(?:ba|z|c)?sh|```\s*\n|```python|^\s*(?:action|command|tool|execute)\s*(?:input)?\s*:|<(?:function|execute|tool|invoke|bash|cmd|run)\b|^\s*(?:\$|>>>)\s",
    re.I | re.M,
)
_SHELL_WORD = re.compile(
    r"^\s*(?:sudo\s+)?(?:ls|cd|cat|grep|find|sed|awk|echo|python3?|pip|git|make|npm|curl|mkdir|rm|cp|mv|head|tail|select|show|describe|insert|update|delete)\b",
    re.I,
)


def speaker(message: Message) -> str | None:
    """The role that counts for turns, if any: calls and results do not."""
    return message.role if message.role in ("user", "assistant") and not message.calls else None


def is_line_of_ours(message: Message) -> bool:
    """It keeps the turns and says nothing: nobody's request, nobody's conclusion."""
    return speaker(message) is not None and message.text in (BEFORE, AFTER, DONE)


def voices(steps: Sequence[Step]) -> tuple[Voice, ...]:
    """The voice of each step's first message."""
    text_agent = is_text_agent(steps)
    several = _has_several_speakers(steps)
    seen_assistant = False
    found: list[Voice] = []
    for step in steps:
        message = step.head
        if message.role == "assistant":
            seen_assistant = True
            found.append("assistant")
        elif message.is_instruction:
            found.append("instruction")
        elif message.is_result:
            found.append("results")
        elif is_notice(message.text):
            found.append("notice")
        elif seen_assistant and (text_agent or (several and message.name is not None)):
            found.append("observation")
        else:
            found.append("request")
    return tuple(found)


def is_notice(text: str) -> bool:
    """True when a client's machinery wrote it all: nothing but tagged reminders, command echoes or outputs."""
    if _INTERRUPTED.match(text):
        return True
    if _NOTICE_TAG.match(text) is None:
        return False
    at = 0
    while (tag := _TAG.match(text, at)) is not None:
        closing = f"</{tag[1]}>"
        end = text.find(closing, tag.end())
        if end < 0:
            return False
        at = end + len(closing)
    return not text[at:].strip()


def is_text_agent(steps: Sequence[Step]) -> bool:
    """True when nobody calls tools but most assistant turns are commands: then user messages are what the commands printed."""
    heads = [step.head for step in steps]
    if any(message.calls or message.is_result for message in heads):
        return False
    said = [message.text for message in heads if message.role == "assistant"]
    if len(said) < 3:
        return False
    commands = sum(1 for text in said if _COMMAND.search(text) or (len(text) < 300 and _SHELL_WORD.match(text)))
    # Chats about code have fences too; what tells an agent is that turns strictly alternate.
    alternating = sum(1 for a, b in pairwise(heads) if a.role != b.role)
    return 2 * commands >= len(said) and alternating >= 0.9 * (len(heads) - 1)


def _has_several_speakers(steps: Sequence[Step]) -> bool:
    return len({step.head.name for step in steps if step.head.name is not None}) >= 1

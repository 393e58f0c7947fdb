"""The folded messages as text for a model: marked off, in pieces that fit, and unable to pass for anything but data."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from proxy.conversation import Message, Opaque, Part, Text, ToolCall, ToolResult

MOST_CHUNKS = 8
"""Questions for one summary: a history larger than that is shortened to fit, or the price would have no bound."""

SEPARATOR = 2
"""Tokens between two texts."""

_TEMPLATE = re.compile(
    r"<(?=\|[\w ]{1,40}\|>)|<(?=/?(?:transcript|summary-so-far|ledger|system|tool_call|function_calls)\b)|<(?=<SYS>>)", re.I
)
_BRACKETS = re.compile(r"\[(?=/?INST\])")
_BLOCK_START = re.compile(r"^(?=##\s+Message\s+\d)", re.M | re.I)


def neutral(text: str) -> str:
    """The text with everything that could end the transcript or begin another speaker's turn made harmless, still readable."""
    text = _TEMPLATE.sub("‹", text)
    text = _BRACKETS.sub("⟦", text)
    return _BLOCK_START.sub(r"\\", text)


def parts_of(message: Message, *, media: bool = False) -> list[Part]:
    """What a model is shown of a message: words, calls with their arguments, and media or what stands for them; no thinking."""
    shown: list[Part] = []
    for part in message.parts:
        match part:
            case Text(text) | ToolResult(_, text):
                shown.append(Text(neutral(text)))
            case ToolCall(_, name, arguments):
                shown.append(Text(f"Called {neutral(name)}: {neutral(arguments)}"))
            case Opaque("reasoning"):
                continue
            case Opaque(kind, _, "content") if media and kind in ("image", "audio", "file"):
                shown.append(part)
            case Opaque(kind):
                shown.append(Text(f"[{kind}]"))
    return shown


def heading(number: int, message: Message) -> str:
    """What stands above each message."""
    name = f" ({neutral(message.name)})" if message.name else ""
    return f"## Message {number}\nRole: {message.role}{name}\nContent:\n"


def blocks(messages: Sequence[Message], first: int = 1) -> list[str]:
    """One text a message: its number, role and words."""
    made = []
    for number, message in enumerate(messages, first):
        words = "\n".join(part.text for part in parts_of(message) if isinstance(part, Text))
        made.append(heading(number, message) + words)
    return made


def chunks(texts: Sequence[str], limit: int, count: Callable[[str], int]) -> list[list[str]]:
    """The texts in groups of at most `limit` tokens each and at most MOST_CHUNKS groups; longer ones are cut in their middles."""
    sizes = [count(text) for text in texts]
    groups = _packed(texts, limit, count)
    room = limit * MOST_CHUNKS * 3 // 4
    for _ in range(4):
        if len(groups) <= MOST_CHUNKS:
            return groups
        groups = _packed(_shortened(texts, sizes, room), limit, count)
        room = room * 4 // 5
    # thousands of short messages cannot be shortened: their middle goes
    half = MOST_CHUNKS // 2
    return groups if len(groups) <= MOST_CHUNKS else [*groups[:half], *groups[-half:]]


def _packed(texts: Sequence[str], limit: int, count: Callable[[str], int]) -> list[list[str]]:
    """The texts in their order, each group filled to three quarters at least: what does not fit is split."""
    groups: list[list[str]] = [[]]
    room = limit
    for text in texts:
        rest = text
        while (size := count(rest) + SEPARATOR) > room:
            if room < limit // 4:
                groups.append([])
                room = limit
                continue
            head = _beginning(rest, size, room, count)
            groups[-1].append(head)
            groups.append([])
            rest, room = rest[len(head) :], limit
        groups[-1].append(rest)
        room -= size
    return [group for group in groups if group]


def _beginning(text: str, size: int, room: int, count: Callable[[str], int]) -> str:
    """As much of the text as fits, up to the end of a line where there is one in the second half."""
    length = len(text)
    while length > 1 and size > room:
        length = min(length - 1, max(1, length * (room - SEPARATOR) // size))
        # tokens are not spread evenly over a text: look, and take less if need be
        size = count(text[:length]) + SEPARATOR
    line = text.rfind("\n", length // 2, length)
    return text[: line + 1 if line > 0 else length]


def _shortened(texts: Sequence[str], sizes: Sequence[int], room: int) -> list[str]:
    """The longest texts cut to one length, so that all fit: it is outputs that are long, and words of people that are short."""
    low, high = 0, max(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(size, middle) for size in sizes) <= room else (low, middle - 1)
    return [text if size <= low else _cut(text, low / size) for text, size in zip(texts, sizes, strict=True)]


def _cut(text: str, share: float) -> str:
    length = max(int(len(text) * share) - 40, 80)
    if length >= len(text):
        return text
    head, tail = length * 3 // 5, length * 2 // 5
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[len(text) - tail :]}"

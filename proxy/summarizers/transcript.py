"""The folded messages as text for a model: marked off, in pieces that fit, and unable to pass for anything but data."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from proxy.conversation import Message, Opaque, Part, Text, ToolCall, ToolResult

MOST_CHUNKS = 8
"""Questions for one summary: a history larger than that is shortened to fit, or the price would have no bound."""

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
    if sum(sizes) > limit * MOST_CHUNKS:
        texts = _shortened(texts, sizes, limit * MOST_CHUNKS * 3 // 4)
    pieces = [piece for text in texts for piece in _pieces(text, limit, count)]
    groups: list[list[str]] = []
    room = 0
    for piece in pieces:
        size = count(piece) + 2
        if size > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(piece)
        room -= size
    return _merged(groups)


def _merged(groups: list[list[str]]) -> list[list[str]]:
    """No more than MOST_CHUNKS groups: by bad luck in packing there may be one or two more, and then the middle goes."""
    if len(groups) <= MOST_CHUNKS:
        return groups
    half = MOST_CHUNKS // 2
    return [*groups[:half], *groups[-half:]]


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


def _pieces(text: str, limit: int, count: Callable[[str], int]) -> list[str]:
    """The text in pieces of at most `limit` tokens, cut at ends of lines where there are any."""
    size = count(text)
    if size <= limit - 2:
        return [text]
    # two characters to spare of ten: tokens are not spread evenly over a text
    length = max(1, int(len(text) * (limit - 2) / size * 0.8))
    pieces = []
    start = 0
    while start < len(text):
        stop = start + length
        if stop < len(text):
            line = text.rfind("\n", start + length // 2, stop)
            stop = line + 1 if line > 0 else stop
        pieces.append(text[start:stop])
        start = stop
    return pieces

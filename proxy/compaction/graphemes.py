"""Where a text may be cut: never inside what a reader sees as one character, never between two halves of a surrogate pair."""

from __future__ import annotations

import unicodedata

_LONGEST = 64  # a "character" longer than this is noise (stacked accents): it is cut anyway


def before(text: str, index: int) -> int:
    """The nearest border at or before `index`."""
    index = max(0, min(index, len(text)))
    start = index
    while 0 < index < len(text) and start - index < _LONGEST and _joined(text, index):
        index -= 1
    return start if start - index >= _LONGEST and not _half(text, start) else index


def after(text: str, index: int) -> int:
    """The nearest border at or after `index`."""
    index = max(0, min(index, len(text)))
    start = index
    while 0 < index < len(text) and index - start < _LONGEST and _joined(text, index):
        index += 1
    return index


def _half(text: str, index: int) -> bool:
    return "\ud800" <= text[index - 1] <= "\udbff" and "\udc00" <= text[index] <= "\udfff"


def _joined(text: str, index: int) -> bool:
    """No border between text[index - 1] and text[index]."""
    a, b = text[index - 1], text[index]
    if b < "\u0300":
        return a == "\r" and b == "\n"
    if a == "\u200d" or b in "\u200c\u200d" or "\U0001f3fb" <= b <= "\U0001f3ff" or "\U000e0020" <= b <= "\U000e007f":
        return True
    if "\U0001f1e6" <= b <= "\U0001f1ff":
        return _flags_before(text, index) % 2 == 1
    if _half(text, index) or unicodedata.category(b)[0] == "M":
        return True
    return _hangul(a, b) or b in "\u0e33\u0eb3"


def _flags_before(text: str, index: int) -> int:
    count = 0
    while count < _LONGEST and index - count > 0 and "\U0001f1e6" <= text[index - count - 1] <= "\U0001f1ff":
        count += 1
    return count


def _hangul(a: str, b: str) -> bool:
    """Conjoining letters of one Korean syllable."""
    if "\u1100" <= a <= "\u115f" or "\ua960" <= a <= "\ua97c":
        return "\u1100" <= b <= "\u11a7" or "\ua960" <= b <= "\ua97c" or "\uac00" <= b <= "\ud7a3"
    if "\uac00" <= a <= "\ud7a3" or "\u1160" <= a <= "\u11ff" or "\ud7b0" <= a <= "\ud7fb":
        return "\u1160" <= b <= "\u11ff" or "\ud7b0" <= b <= "\ud7fb"
    return False

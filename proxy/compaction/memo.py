"""What was read out of a text before: an agent sends its whole history again each turn, and most of it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memo(Generic[Value]):
    """A function of a text that remembers its values, for at most about `characters` of text.

    Two generations: when the young one holds half of the characters it becomes the old one, and what was old and not asked for
    again is forgotten. A text of more than that half is not remembered. None is no value. Threads may share it: at worst a
    value is made twice.
    """

    def __init__(self, make: Callable[[str], Value], characters: int) -> None:
        self._make, self._half = make, characters // 2
        self._young: dict[str, Value] = {}
        self._old: dict[str, Value] = {}
        self._held = 0

    def __call__(self, text: str) -> Value:
        known = self._young.get(text)
        if known is not None:
            return known
        known = self._old.get(text)
        value = self._make(text) if known is None else known
        if len(text) <= self._half:
            self._held += len(text) + 100
            if self._held > self._half:
                self._old, self._young, self._held = self._young, {}, len(text)
            self._young[text] = value
        return value

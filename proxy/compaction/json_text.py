"""A JSON text, shorter, and still JSON: long arrays keep head, tail and the odd ones out, long strings their ends.

What is left out is said inside the value: an item `"… 190 of 200 items cut …"` or a key `"…"`. Numbers are never rewritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import cast

Cut = Callable[[str, int], str]
"""A text and the characters that it may have, shortened."""

_DEEPEST = 60
_LONG = 1_000_000  # characters
_SPECIAL_KEYS = re.compile(
    r"err|fail|status|code|message|exit|warn|reason|\bid\b|name|title|type|path|url|exception", re.IGNORECASE
)
_TROUBLE = re.compile(r"error|fail|exception|fatal|denied|refused|timeout|invalid", re.IGNORECASE)


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


Value = object  # dict[str, Value] | list[Value] | str | _Number | bool | None


class _NotJson(Exception):
    pass


def parse(text: str) -> Value | None:
    """The object or array that a text is, numbers as written; None when it is not one (or too deep, or not strict)."""
    stripped = text.strip()
    if stripped[:1] not in ("{", "[") or stripped[-1:] not in ("}", "]"):
        return None
    try:
        value = json.loads(stripped, parse_float=_Number, parse_int=_Number, parse_constant=_refuse, object_pairs_hook=_pairs)
    except (ValueError, RecursionError, _NotJson):
        return None
    return cast(Value, value) if _depth_fits(value) else None


def shorten(text: str, limit: int, cut: Cut) -> str | None:
    """The JSON text in at most `limit` characters; None when it is not an object or array."""
    value = parse(text)
    if value is None:
        return None
    # Of a very long text it is quicker to see that it is too long: without white space it is no longer than its compact form.
    size = len("".join(text.split())) if len(text) > _LONG else 0
    if size <= limit:
        compact = dump(value)
        size = len(compact)
        if size <= limit:
            return compact
    shrinking = _Shrinking(cut)
    strings, items = max(60, limit // 3), max(3, int(_longest(value) * limit / size))
    for _ in range(12):
        shorter = dump(shrinking.shrink(value, _Caps(strings, items, 40 if items > 3 else 12), 0))
        if len(shorter) <= limit:
            return shorter
        excess = len(shorter) / limit
        strings = max(24, int(strings / min(max(excess, 1.3), 4)))
        items = max(2, int(items / min(max(excess, 1.2), 3)))
    return _skeleton(value, limit, len(text))


def dump(value: Value) -> str:
    """Compact JSON."""
    out: list[str] = []
    _dump(value, out.append)
    return "".join(out)


def _dump(value: Value, write: Callable[[str], object]) -> None:
    if isinstance(value, _Number):
        write(str(value))
    elif isinstance(value, str):
        write(_quote(value))
    elif value is True or value is False or value is None:
        write({True: "true", False: "false", None: "null"}[value])
    elif isinstance(value, list):
        before = "["
        for item in value:
            write(before)
            _dump(item, write)
            before = ","
        write("]" if value else "[]")
    elif isinstance(value, dict):
        before = "{"
        for key, item in value.items():
            write(f"{before}{_quote(key)}:")
            _dump(item, write)
            before = ","
        write("}" if value else "{}")


def _quote(text: str) -> str:
    """A JSON string; half surrogates stay the escapes that they came as."""
    halves = not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)
    return encode_basestring_ascii(text) if halves else encode_basestring(text)


@dataclass(frozen=True, slots=True)
class _Caps:
    """Characters of a string, items of an array, keys of an object (the deeper, the fewer)."""

    strings: int
    items: int
    keys: int


class _Shrinking:
    """One value, tried under several caps: what is odd in each array is looked for once."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._odd: dict[int, list[int]] = {}

    def shrink(self, value: Value, caps: _Caps, depth: int) -> Value:
        if isinstance(value, _Number):
            return value
        if isinstance(value, str):
            return self._cut(value, caps.strings) if len(value) > caps.strings else value
        if isinstance(value, list):
            return self._list(value, caps, depth)
        if isinstance(value, dict):
            return self._dict(value, caps, depth)
        return value

    def _list(self, value: list[Value], caps: _Caps, depth: int) -> list[Value]:
        room = max(2, caps.items >> min(depth, 3))
        if len(value) <= room + 1:
            return [self.shrink(item, caps, depth + 1) for item in value]
        if id(value) not in self._odd:
            self._odd[id(value)] = _odd_ones(value)
        head = max(1, int(room * 0.5))
        tail = max(1, int(room * 0.25))
        kept = {*range(head), *range(len(value) - tail, len(value))}
        kept.update([i for i in self._odd[id(value)] if i not in kept][: max(1, room - head - tail)])
        out: list[Value] = []
        last = -1
        for i in sorted(kept):
            if i > last + 1:
                out.append(f"… {i - last - 1:,} of {len(value):,} items cut …")
            out.append(self.shrink(value[i], caps, depth + 1))
            last = i
        return out

    def _dict(self, value: dict[str, Value], caps: _Caps, depth: int) -> dict[str, Value]:
        names = list(value)
        room = max(4, caps.keys * 4 >> min(depth, 3))
        if len(names) > room + 1:
            telling = [name for name in names if _SPECIAL_KEYS.search(name)][: room // 2]
            chosen = {*names[: room - len(telling)], *telling}
            names = [name for name in names if name in chosen]
        out = {name: self.shrink(value[name], caps, depth + 1) for name in names}
        if len(names) < len(value) and "…" not in out:
            out["…"] = f"{len(value) - len(names):,} of {len(value):,} keys cut"
        return out


def _odd_ones(value: Sequence[Value]) -> list[int]:
    """Items that are not like most: of another type or other keys, with a rare status, or about trouble. Trouble first."""
    shapes = [_shape(item) for item in value]
    counts: dict[str, int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    rare = max(1, len(value) // 20)
    trouble = [i for i, item in enumerate(value) if counts[shapes[i]] <= len(value) // 2 and _TROUBLE.search(_gist(item))]
    troubled = set(trouble)
    return trouble + [i for i, shape in enumerate(shapes) if counts[shape] <= rare and i not in troubled]


def _shape(item: Value) -> str:
    """Type and keys, with the values of short words that stand for a state."""
    if isinstance(item, dict):
        states = [
            f"{key}={item[key]}"
            if isinstance(item[key], (str, bool)) and len(str(item[key])) <= 16 and _STATE.search(key)
            else key
            for key in item
        ]
        return ",".join(states)
    if isinstance(item, _Number):
        return "number"
    return type(item).__name__ if not isinstance(item, str) or not _TROUBLE.search(item[:200]) else "trouble"


_STATE = re.compile(r"status|state|level|severity|result|outcome|type|kind|ok|success|code", re.IGNORECASE)


def _gist(item: Value) -> str:
    if isinstance(item, dict):
        return " ".join(
            f"{key} {v[:80]}" if isinstance(v, str) else key for key, v in item.items() if v not in (None, False, [], {}, "")
        )
    return item[:200] if isinstance(item, str) else ""


def _skeleton(value: Value, limit: int, size: int) -> str:
    """The last resort: what it was, and the first keys."""
    if isinstance(value, list):
        return dump([f"… {len(value):,} items, {size:,} characters cut …"])
    names = list(cast(dict[str, Value], value))
    out: dict[str, Value] = {"…": f"{len(names):,} keys, {size:,} characters cut"}
    used = len(dump(out))
    for name in names:
        used += len(_quote(name)) + 6
        if used > limit:
            break
        out.setdefault(name, "…")
    return dump(out)


def _longest(value: Value, depth: int = 0) -> int:
    """Items of the longest array near the top."""
    own = len(value) if isinstance(value, list) else 0
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    if depth >= 3:
        return own
    return max(own, max((_longest(item, depth + 1) for item in list(inner)[:200]), default=0))


def _pairs(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _NotJson  # doubled keys: an edit would drop one of them
    return found


def _refuse(constant: str) -> object:
    raise _NotJson


def _depth_fits(value: object, depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(_depth_fits(item, depth + 1) for item in inner if isinstance(item, (dict, list)))

"""JSON cut into raw slices without decoding what is inside them.

msgspec does it at memory speed. What it refuses although Python and many upstreams take it (lone surrogates, which clients
send that cut their texts by UTF-16 units, and NaN) goes a slower way with the same result.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from msgspec import Raw

from proxy.errors import Unreadable

_object = msgspec.json.Decoder(dict[str, Raw])
_array = msgspec.json.Decoder(list[Raw])
_string = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder()
_slow = json.JSONDecoder()
_SPACE = " \t\n\r"
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]', re.DOTALL)


def split_object(raw: bytes) -> dict[str, bytes]:
    """An object's fields as raw JSON, in order; of a repeated key the last one counts. Raises Unreadable."""
    try:
        return {key: bytes(value) for key, value in _object.decode(raw).items()}
    except RecursionError:
        raise Unreadable("too_deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _split_object_slowly(read_text(raw))


def split_array(raw: bytes) -> list[bytes]:
    """An array's items as raw JSON. Raises Unreadable."""
    try:
        return [bytes(item) for item in _array.decode(raw)]
    except RecursionError:
        raise Unreadable("too_deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _split_array_slowly(read_text(raw))


def spans(raw: bytes) -> dict[str, tuple[int, int]]:
    """Where the values of an object's fields stand, as (start, end); of a repeated key the last. For well-formed JSON only."""
    found: dict[str, tuple[int, int]] = {}
    depth, key, start = 0, b"", -1
    for mark in _MARK.finditer(raw):
        kind = raw[mark.start()]
        if kind == _QUOTE:
            if depth == 1 and start < 0:
                key = mark[0]
        elif kind == _COLON:
            if depth == 1:
                start = mark.end()
        elif kind in b"{[":
            depth += 1
        else:
            depth -= kind != _COMMA
            if start >= 0 and (depth == 0 or (depth == 1 and kind == _COMMA)):
                value = raw[start : mark.start()]
                begin = start + len(value) - len(value.lstrip())
                found[read_string(key)] = (begin, begin + len(value.strip()))
                start = -1
    return found


_QUOTE, _COLON, _COMMA = b'":,'


def read_string(raw: bytes) -> str:
    """A JSON string's value; it may hold lone surrogates. Raises Unreadable when it is anything else."""
    try:
        return _string.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        value = read_any(raw)
        if isinstance(value, str):
            return value
        raise Unreadable("not_a_string") from None


def read_any(raw: bytes) -> Any:
    """Any JSON value, by the lenient rules of Python's own decoder. Raises Unreadable."""
    try:
        return _any.decode(raw)
    except RecursionError:
        raise Unreadable("too_deep") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        return json.loads(read_text(raw))
    except RecursionError:
        raise Unreadable("too_deep") from None
    except ValueError:
        raise Unreadable("not_json") from None


def write_string(text: str) -> bytes:
    """A JSON string; lone surrogates leave as the escapes that they came as."""
    try:
        return msgspec.json.encode(text)
    except UnicodeEncodeError:
        return json.dumps(text).encode()


def join_object(fields: list[tuple[str, bytes]]) -> bytes:
    """An object of raw values."""
    return b"{" + b",".join(write_string(key) + b":" + value for key, value in fields) + b"}"


def join_array(items: list[bytes]) -> bytes:
    """An array of raw values."""
    return b"[" + b",".join(items) + b"]"


def read_text(raw: bytes) -> str:
    """Bytes as text. Raises Unreadable when they are not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Unreadable("not_utf8") from None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _value(text: str, at: int) -> tuple[Any, int]:
    """A value and where it ends."""
    try:
        return _slow.raw_decode(text, at)
    except RecursionError:
        raise Unreadable("too_deep") from None
    except ValueError:
        raise Unreadable("not_json") from None


def _expect(text: str, at: int, marks: str) -> str:
    if at < len(text) and text[at] in marks:
        return text[at]
    raise Unreadable("not_json")


def _split_object_slowly(text: str) -> dict[str, bytes]:
    at = _skip(text, 0)
    _expect(text, at, "{")
    fields: dict[str, bytes] = {}
    at = _skip(text, at + 1)
    if text[at : at + 1] != "}":
        while True:
            _expect(text, at, '"')
            key, at = _value(text, at)
            at = _skip(text, at)
            _expect(text, at, ":")
            start = _skip(text, at + 1)
            stop = _value(text, start)[1]
            fields[key] = text[start:stop].encode()
            at = _skip(text, stop)
            if _expect(text, at, ",}") == "}":
                break
            at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise Unreadable("not_json")
    return fields


def _split_array_slowly(text: str) -> list[bytes]:
    at = _skip(text, 0)
    _expect(text, at, "[")
    items: list[bytes] = []
    at = _skip(text, at + 1)
    if text[at : at + 1] != "]":
        while True:
            stop = _value(text, at)[1]
            items.append(text[at:stop].encode())
            at = _skip(text, stop)
            if _expect(text, at, ",]") == "]":
                break
            at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise Unreadable("not_json")
    return items

"""The rows of the public log, and the bytes that each of them sends.

Long texts are written as macros: `{{rep:TEXT:N}}` is TEXT N times, `{{b64:N}}` N characters of base64, `{{b64png:N}}` the same
behind a PNG signature, `{{deep:N}}` and `{{deepobj:N}}` N nested arrays or objects, `{{n}}` the number in a burst. Keys that
start with `__` say what is no part of a JSON body: path, headers, the raw text or its size, the request line.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("rows.jsonl")
KEY = "sk-test-0000"
"""The client's credential in every request: nothing of ours may ever show it."""
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
CHAT = "/v1/chat/completions"

_MACRO = re.compile(r"\{\{(n|rep:(?P<text>.*?):(?P<times>\d+)|(?P<kind>b64|b64png):(?P<size>\d+))\}\}", re.S)
_NESTED = re.compile(rb'"?\{\{(deep|deepobj):(\d+)\}\}"?')


@dataclass(frozen=True)
class Row:
    """fault: what went wrong for others; holds: what is true here. request: None for a rule of design."""

    id: str
    kind: str
    report: str
    fault: str
    holds: str
    request: Any = None
    upstream: str = ""


@dataclass(frozen=True)
class Request:
    """method, path, headers, body as sent; line: a request line that replaces the first two."""

    method: str = "POST"
    path: str = CHAT
    headers: Mapping[str, str] = field(default_factory=lambda: dict(HEADERS))
    body: bytes = b""
    line: str = ""

    def having(self, **headers: str) -> Request:
        """The same with further headers; `_` stands for `-`."""
        return replace(self, headers={**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}})

    def raw(self) -> bytes:
        """The bytes on the wire, for a connection of its own."""
        line = self.line or f"{self.method} {self.path} HTTP/1.1"
        fields = {"host": "127.0.0.1", **self.headers, "connection": "close"}
        if self.body or self.method == "POST":
            fields["content-length"] = str(len(self.body))
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{line}\r\n{head}\r\n".encode("latin-1") + self.body


@lru_cache(maxsize=1)
def all_rows() -> tuple[Row, ...]:
    first, *rest = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    shapes = first["shapes"]
    return tuple(
        Row(**{**row, "request": shapes[row["request"]] if isinstance(row.get("request"), str) else row.get("request")})
        for row in rest
    )


def row(row_id: str) -> Row:
    return next(one for one in all_rows() if one.id == row_id)


def of_kinds(*kinds: str) -> list[Row]:
    """The rows with a request whose kind is one of these."""
    return [one for one in all_rows() if one.request is not None and one.kind in kinds]


def built(one: Row, number: int = 0) -> Request:
    """What this row sends."""
    given = dict(one.request)
    headers = {**HEADERS, **{key: _expanded(value, number) for key, value in given.pop("__headers__", {}).items()}}
    path, line = _expanded(given.pop("__path__", CHAT), number), given.pop("__rawreq__", "")
    text, size = given.pop("__raw__", None), given.pop("__body_bytes__", None)
    if text is not None:
        return Request("POST", path, headers, _nested(_expanded(text, number).encode()), line)
    if size is not None:
        return Request("POST", path, headers, b"x" * size, line)
    if given:
        return Request("POST", path, headers, _nested(json.dumps(_walked(given, number)).encode()), line)
    return Request(line.split(" ")[0] or "GET", path, headers, b"", line)


def _walked(value: Any, number: int) -> Any:
    match value:
        case str():
            return _expanded(value, number)
        case list():
            return [_walked(item, number) for item in value]
        case dict():
            return {key: _walked(item, number) for key, item in value.items()}
        case _:
            return value


def _expanded(text: str, number: int) -> str:
    def one(found: re.Match[str]) -> str:
        if found["times"]:
            return found["text"].replace("\\n", "\n") * int(found["times"])
        if found["kind"]:
            return _noise(int(found["size"]), png=found["kind"] == "b64png")
        return str(number)

    return _MACRO.sub(one, text)


@lru_cache(maxsize=8)
def _noise(size: int, *, png: bool) -> str:
    start = b"\x89PNG\r\n\x1a\n" if png else b""
    return base64.b64encode(start + random.Random(size).randbytes(size))[:size].decode()


def _nested(body: bytes) -> bytes:
    def one(found: re.Match[bytes]) -> bytes:
        depth = int(found[2])
        return b"[" * depth + b"]" * depth if found[1] == b"deep" else b'{"a":' * depth + b"1" + b"}" * depth

    return _NESTED.sub(one, body)

"""The usage tap: reads what an answer says of itself from a side copy, and never touches the answer.

Only the end of an answer is kept (usage stands in the last events of a stream, and near the end of a JSON answer), so a tap
costs an append a chunk and holds a bounded number of bytes. What it cannot read it gives up: usage is then unknown.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import brotli
import msgspec
import zstandard

TAIL = 64 * 1024
"""Bytes kept from the end of a stream: the last few events, also with long logprobs."""
SLACK = 4 * 1024
"""Further bytes that may come before what is beyond the tail is let go: so not each chunk moves all that is kept."""
WHOLE = 8 * 1024 * 1024
"""Bytes kept of a plain JSON answer, which can only be read whole."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    prompt_cache_hit_tokens: int | None = None


class _Event(msgspec.Struct):
    model: str | None = None
    usage: _Usage | None = None


# Structs, because they are made for every answer, and a frozen dataclass takes four times as long to make
class Usage(msgspec.Struct, frozen=True, gc=False):
    """What an answer says: tokens of the prompt, of the answer, and of the prompt's cached part; None where it is silent.

    model: the real model's name. whole: whether a `data: [DONE]` or a complete JSON object was seen.
    """

    model: str | None = None
    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    whole: bool = False


NOTHING = Usage()
"""Of an answer that says nothing of itself."""


class UsageTap:
    """Feed it the chunks of an answer; ask `usage()` at the end."""

    __slots__ = ("_chunks", "_decode", "_kind", "_left")

    def __init__(self, content_type: str, content_encoding: str = "") -> None:
        self._kind = kind = _KINDS.get(content_type) or _kind(content_type)
        self._left = kind.limit
        self._chunks: list[bytes] = []
        self._decode = _decoder(content_encoding) if content_encoding and kind.limit else kind.decode

    def feed(self, chunk: bytes) -> None:
        if self._decode is not None and not (chunk := self._decoded(chunk)):
            return
        self._chunks.append(chunk)
        self._left -= len(chunk)
        if self._left < 0:
            self._let_go()

    def usage(self) -> Usage:
        data = b"".join(self._chunks)
        if not data:
            return NOTHING
        if self._kind is _STREAM:
            return _read_stream(data)
        try:
            return _usage(_events.decode(data), True)
        except _UNREADABLE:
            return NOTHING

    def _let_go(self) -> None:
        """There is more than is kept: the end of a stream will do, but a plain answer can only be read whole."""
        if self._kind is not _STREAM:
            self._give_up()
            return
        end = b"".join(self._chunks)[-max(TAIL, len(self._chunks[-1])) :]  # one long event may be the one that says it
        self._chunks = [end]
        self._left = self._kind.limit - len(end)

    def _decoded(self, chunk: bytes) -> bytes:
        assert self._decode is not None
        try:
            return self._decode(chunk)
        except (zlib.error, brotli.error, zstandard.ZstdError):
            self._give_up()
            return b""

    def _give_up(self) -> None:
        self._decode = _nothing
        self._chunks.clear()


def _nothing(chunk: bytes) -> bytes:
    """In place of a decoder: nothing of the answer can be read, or needs to be."""
    return b""


class _Kind(NamedTuple):
    """What a content type means for the tap. limit: bytes kept of it at most. decode: None where it is read as it comes."""

    limit: int
    decode: Callable[[bytes], bytes] | None = None


_STREAM, _JSON, _OTHER = _Kind(TAIL + SLACK), _Kind(WHOLE), _Kind(0, _nothing)
_KINDS = {
    "application/json": _JSON,
    "application/json; charset=utf-8": _JSON,
    "text/event-stream": _STREAM,
    "text/event-stream; charset=utf-8": _STREAM,
}
"""Of the content types that are usual."""


def _kind(content_type: str) -> _Kind:
    return _STREAM if "event-stream" in content_type else _JSON if "json" in content_type else _OTHER


def payload(line: bytes) -> bytes | None:
    """What a line of an event stream says; None for a comment, another field or none."""
    return line[5:].strip() if line.startswith(b"data:") else None


def _decoder(encoding: str) -> Callable[[bytes], bytes] | None:
    """A streaming decoder, None where there is nothing to decode; of a coding that we do not know nothing is read."""
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return zlib.decompressobj(31).decompress
        case "deflate":
            return zlib.decompressobj().decompress
        case "br":
            decode: Callable[[bytes], bytes] = brotli.Decompressor().process
            return decode
        case "zstd":
            return zstandard.ZstdDecompressor().decompressobj().decompress
        case _:
            return _nothing


_events = msgspec.json.Decoder(_Event)
_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError


def _event(data: bytes) -> _Event | None:
    try:
        return _events.decode(data)
    except _UNREADABLE:
        return None


def _usage(event: _Event, whole: bool) -> Usage:
    seen = event.usage
    if seen is None:
        return Usage(event.model, whole=whole)
    details = seen.prompt_tokens_details
    cached = details.cached_tokens if details is not None else seen.prompt_cache_hit_tokens
    return Usage(event.model, seen.prompt_tokens, seen.completion_tokens, cached, whole)


def _read_stream(data: bytes) -> Usage:
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    done = any(payload(line) == b"[DONE]" for line in _from_the_last(lines, b"[DONE]"))
    for said in _from_the_last(lines, b'"usage"'):
        event = _event(payload(said) or b"")
        if event is not None and event.usage is not None and event.usage.prompt_tokens is not None:
            return _usage(event, done)
    for said in _from_the_last(lines, b'"model"'):
        event = _event(payload(said) or b"")
        if event is not None and event.model:  # Azure's notes on content name none
            return Usage(model=event.model, whole=done)
    return Usage(whole=done)


def _from_the_last(lines: bytes, mark: bytes) -> Iterator[bytes]:
    """The lines that hold the mark, the last one first: a stream has hundreds, and few say what is looked for."""
    end = len(lines)
    while (at := lines.rfind(mark, 0, end)) >= 0:
        end = lines.rfind(b"\n", 0, at) + 1
        stop = lines.find(b"\n", at)
        yield lines[end : stop if stop >= 0 else len(lines)]

"""The usage tap: reads what an answer says of itself from a side copy, and never touches the answer.

Only the end of an answer is kept (usage stands in the last events of a stream, and near the end of a JSON answer), so a tap
costs an append a chunk and holds a bounded number of bytes. What it cannot read it gives up: usage is then unknown.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable

import brotli
import msgspec
import zstandard

TAIL = 64 * 1024
"""Bytes kept from the end of a stream: the last few events, also with long logprobs."""
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

    def __init__(self, content_type: str, content_encoding: str = "") -> None:
        self._stream = "event-stream" in content_type
        self._json = "json" in content_type
        self._limit = TAIL if self._stream else WHOLE
        self._decode = _decoder(content_encoding)
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._lost = False
        self._active = (self._stream or self._json) and self._decode is not None

    def feed(self, chunk: bytes) -> None:
        if not self._active:
            return
        if self._decode is not _same and (chunk := self._decoded(chunk)) == b"":
            return
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size > self._limit and len(self._chunks) > 1:
            self._size -= len(self._chunks.popleft())
            self._lost = True
        if self._lost and not self._stream:
            self._stop()

    def usage(self) -> Usage:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if not data:
            return NOTHING
        return _read_stream(data) if self._stream else _read_json(data)

    def _decoded(self, chunk: bytes) -> bytes:
        assert self._decode is not None
        try:
            return self._decode(chunk)
        except (zlib.error, brotli.error, zstandard.ZstdError):
            self._stop()
            return b""

    def _stop(self) -> None:
        self._active = False
        self._chunks.clear()


def payload(line: bytes) -> bytes | None:
    """What a line of an event stream says; None for a comment, another field or none."""
    return line[5:].strip() if line.startswith(b"data:") else None


def _same(chunk: bytes) -> bytes:
    return chunk


def _decoder(encoding: str) -> Callable[[bytes], bytes] | None:
    """A streaming decoder; None for a coding that we do not know."""
    match encoding.strip().lower():
        case "" | "identity":
            return _same
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
            return None


def _event(data: bytes) -> _Event | None:
    try:
        return msgspec.json.decode(data, type=_Event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _usage(event: _Event | None, whole: bool) -> Usage:
    if event is None:
        return Usage(whole=whole)
    seen = event.usage or _Usage()
    details = seen.prompt_tokens_details
    cached = details.cached_tokens if details is not None else seen.prompt_cache_hit_tokens
    return Usage(event.model, seen.prompt_tokens, seen.completion_tokens, cached, whole)


def _read_json(data: bytes) -> Usage:
    event = _event(data)
    return _usage(event, event is not None)


def _read_stream(data: bytes) -> Usage:
    lines = data.splitlines()
    done, model = False, None
    for line in reversed(lines):
        said = payload(line)
        if said == b"[DONE]":
            done = True
        elif said is not None and (model is None or b'"usage"' in said) and (event := _event(said)) is not None:
            model = model or event.model
            if event.usage is not None and event.usage.prompt_tokens is not None:
                return _usage(event, done)
    return Usage(model=model, whole=done)

"""Compressed request bodies, undone for reading, within a bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import brotli
import zstandard

from proxy.errors import Unreadable

RATIO = 100
"""A body that grows more than this is a bomb, not a conversation: real ones compress 3 to 20 times."""
FREE = 1024 * 1024
"""Up to this size the ratio does not matter: short repetitive bodies compress well."""


def decoded(body: bytes, content_encoding: str, max_bytes: int) -> bytes:
    """The body without its codings. Raises Unreadable for an unknown coding, a broken body or one that grows too much."""
    codings = [coding.strip().lower() for coding in content_encoding.split(",") if coding.strip()]
    if len(codings) > 2:
        raise Unreadable("encoding")
    for coding in reversed(codings):
        if coding != "identity":
            body = _undo(body, coding, min(max_bytes, max(FREE, RATIO * len(body))))
    return body


def _undo(body: bytes, coding: str, limit: int) -> bytes:
    undo = _DECODERS.get(coding)
    if undo is None:
        raise Unreadable("encoding")
    try:
        return undo(body, limit)
    except (zlib.error, brotli.error, zstandard.ZstdError):
        raise Unreadable("encoding") from None


def _zlib(bits: int) -> Callable[[bytes, int], bytes]:
    def undo(body: bytes, limit: int) -> bytes:
        decoder = zlib.decompressobj(bits)
        out = decoder.decompress(body, limit + 1)
        if len(out) > limit or not decoder.eof:
            raise Unreadable("encoding")
        return out

    return undo


def _deflate(body: bytes, limit: int) -> bytes:
    """The zlib format that the name means, or the raw one that some clients send."""
    try:
        return _zlib(15)(body, limit)
    except zlib.error:
        return _zlib(-15)(body, limit)


def _brotli(body: bytes, limit: int) -> bytes:
    decoder = brotli.Decompressor()
    out = decoder.process(body, output_buffer_limit=limit + 1)
    if len(out) > limit or not decoder.is_finished():
        raise Unreadable("encoding")
    return bytes(out)


def _zstd(body: bytes, limit: int) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(body) as reader:
        out = reader.read(limit + 1)
    if len(out) > limit:
        raise Unreadable("encoding")
    return out


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _zlib(31),
    "x-gzip": _zlib(31),
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}

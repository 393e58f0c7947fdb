"""Compressed bodies are undone within bounds."""

from __future__ import annotations

import gzip
import zlib

import brotli
import pytest
import zstandard

from proxy.errors import Unreadable
from proxy.wire.encodings import decoded

PLAIN = b'{"messages":[]}' * 50
PACKED = {
    "gzip": gzip.compress(PLAIN),
    "deflate": zlib.compress(PLAIN),
    "br": brotli.compress(PLAIN),
    "zstd": zstandard.ZstdCompressor().compress(PLAIN),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_known_coding_is_undone(name: str) -> None:
    assert decoded(PACKED[name], name.upper(), 10_000) == PLAIN


def test_codings_are_undone_in_reverse_order() -> None:
    assert decoded(brotli.compress(gzip.compress(PLAIN)), "gzip, br", 10_000) == PLAIN


def test_raw_deflate_is_taken_too() -> None:
    packer = zlib.compressobj(wbits=-15)

    assert decoded(packer.compress(PLAIN) + packer.flush(), "deflate", 10_000) == PLAIN


@pytest.mark.parametrize("name", PACKED)
def test_a_body_that_grows_beyond_the_bound_is_unreadable(name: str) -> None:
    with pytest.raises(Unreadable):
        decoded(PACKED[name], name, 500)


@pytest.mark.parametrize("name", ["gzip", "br", "zstd", "deflate", "x-unknown", "gzip, gzip, gzip"])
def test_broken_or_unknown_codings_are_unreadable(name: str) -> None:
    with pytest.raises(Unreadable):
        decoded(b"neither of them", name, 10_000)


def test_a_bomb_is_stopped_by_its_ratio() -> None:
    bomb = gzip.compress(b"\0" * 60_000_000)

    with pytest.raises(Unreadable):
        decoded(bomb, "gzip", 64 * 1024 * 1024)

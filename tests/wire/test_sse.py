"""The tap reads what an answer says of itself, however it is cut."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib

import brotli
import pytest
import zstandard
from fakes import event
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.sse import Usage, UsageTap

USAGE = {"prompt_tokens": 1200, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1024}}
STREAM = b"".join([event({"content": "a"}), event({"content": "b"}), event({}, choices=[], usage=USAGE), b"data: [DONE]\n\n"])
ANSWER = json.dumps({"id": "x", "model": "gpt-4o-2024-08-06", "choices": [], "usage": USAGE}).encode()


def tapped(chunks: list[bytes], kind: str = "text/event-stream", encoding: str = "") -> Usage:
    tap = UsageTap(kind, encoding)
    for chunk in chunks:
        tap.feed(chunk)
    return tap.usage()


def test_usage_of_a_stream_is_read_from_its_last_events() -> None:
    assert tapped([STREAM]) == Usage("gpt-4o", 1200, 7, 1024, whole=True)


def test_usage_of_a_plain_answer_is_read() -> None:
    assert tapped([ANSWER], "application/json") == Usage("gpt-4o-2024-08-06", 1200, 7, 1024, whole=True)


@given(st.lists(st.integers(1, len(STREAM)), max_size=12))
def test_the_way_a_stream_is_cut_makes_no_difference(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(STREAM)]

    chunks = [STREAM[a:b] for a, b in itertools.pairwise(borders)]

    assert tapped(chunks) == Usage("gpt-4o", 1200, 7, 1024, whole=True)


@pytest.mark.parametrize("ends", [b"\r\n", b"\r", b"\n"])
def test_any_line_end_and_no_space_after_data_are_understood(ends: bytes) -> None:
    assert tapped([STREAM.replace(b"data: ", b"data:").replace(b"\n", ends)]).prompt == 1200


def test_a_stream_without_usage_says_only_its_model() -> None:
    assert tapped([event({"content": "a"}), b"data: [DONE]\n\n"]) == Usage("gpt-4o", whole=True)


def test_a_last_event_that_names_no_model_hides_none() -> None:
    assert tapped([event({"content": "a"}), event({}, model=""), b"data: [DONE]\n\n"]) == Usage("gpt-4o", whole=True)


def test_a_long_stream_is_held_only_at_its_end() -> None:
    tap = UsageTap("text/event-stream")
    for _ in range(5_000):
        tap.feed(event({"content": "word " * 20}))
    tap.feed(STREAM)

    assert tap.usage().prompt == 1200
    assert sum(map(len, tap._chunks)) <= 70_000


def test_the_usage_of_one_event_longer_than_what_is_kept_is_read() -> None:
    last = event({"content": "word " * 20_000}).replace(b'"model"', b'"usage": {"prompt_tokens": 7}, "model"', 1)

    assert tapped([event({"content": "word " * 100}), last]).prompt == 7


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("br", brotli.compress),
        ("zstd", zstandard.ZstdCompressor().compress),
    ],
)
def test_compressed_answers_are_read_from_a_decoded_copy(name: str, pack: object) -> None:
    packed = pack(ANSWER)  # type: ignore[operator]

    assert tapped([packed[:40], packed[40:]], "application/json", name).prompt == 1200


@pytest.mark.parametrize("noise", [b"", b"not json", b"\x00\xff" * 50, b"[" * 5_000, b'{"usage": 7}', b"data: {broken\n\n"])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/html", ""])
@pytest.mark.parametrize("encoding", ["", "gzip", "br", "unheard-of"])
def test_what_cannot_be_read_gives_no_usage(noise: bytes, kind: str, encoding: str) -> None:
    assert tapped([noise], kind, encoding).prompt is None

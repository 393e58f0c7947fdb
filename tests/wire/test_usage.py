"""Usage in answers: taken out or put right, and nothing else touched, however the stream is cut."""

from __future__ import annotations

import pytest

from proxy.wire.usage import HELD, StreamEditor, is_usage_only, with_more_prompt

FIRST = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a \\u00e9 \\"usage\\""}}],"usage":null}\n\n'
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12}}\n\n'
RAISED = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":110,"completion_tokens":2,"total_tokens":112}}\n\n'
DONE = b"data: [DONE]\n\n"


def fed(editor: StreamEditor, stream: bytes, size: int) -> bytes:
    pieces = [editor.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    return b"".join(pieces) + editor.end()


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_the_chunk_of_usage_is_taken_out_however_the_stream_is_cut(ending: bytes, size: int) -> None:
    stream = (b": hello\n\n" + FIRST + USAGE + DONE).replace(b"\n", ending)

    assert fed(StreamEditor(without_usage=True), stream, size) == (b": hello\n\n" + FIRST + DONE).replace(b"\n", ending)


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_usage_is_put_right_however_the_stream_is_cut(ending: bytes, size: int) -> None:
    stream = (FIRST + USAGE + DONE).replace(b"\n", ending)

    assert fed(StreamEditor(saved=100), stream, size) == (FIRST + RAISED + DONE).replace(b"\n", ending)


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize(
    "kept",
    [
        b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"error":{"message":"\\"usage\\""}}\n\n',
        b'data: {"usage"\n\n',
        b'event: ping\ndata: {"usage":\ndata: {}}\n\n',
        b"\n\n\n: \n\r\n\r\n",
    ],
)
def test_whatever_is_not_only_usage_stays(kept: bytes, size: int) -> None:
    assert fed(StreamEditor(without_usage=True), kept + USAGE + DONE, size) == kept + DONE


def test_a_comment_in_the_event_that_is_taken_out_stays() -> None:
    assert fed(StreamEditor(without_usage=True), FIRST + b": alive\n" + USAGE + DONE, 9) == FIRST + b": alive\n\n" + DONE


def test_a_last_event_without_its_end_is_taken_out_too() -> None:
    assert fed(StreamEditor(without_usage=True), FIRST + USAGE[:-2], 11) == FIRST


def test_whole_events_leave_at_once() -> None:
    editor = StreamEditor(without_usage=True)

    assert editor.feed(FIRST[:20]) == b""
    assert editor.feed(FIRST[20:] + USAGE[:10]) == FIRST
    assert editor.feed(USAGE[10:]) == b""
    assert editor.feed(DONE) == DONE


def test_an_endless_event_is_not_held() -> None:
    editor = StreamEditor(without_usage=True)
    endless = b"data: " + b"x" * (HELD + 1)

    assert editor.feed(endless) == endless
    assert editor.feed(b"y\n") == b"y"
    assert editor.feed(b"\n" + USAGE + DONE) == b"\n\n" + DONE


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (
            b'{ "choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}],\n "usage" : { "prompt_tokens" : 5, "total_tokens":6 } }',
            b'{ "choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}],\n "usage" : { "prompt_tokens" : 105, "total_tokens":106 } }',
        ),
        (
            b'{"usage":{"total_tokens":9,"prompt_tokens":8,"prompt_tokens_details":{"cached_tokens":4}},"x":NaN}',
            b'{"usage":{"total_tokens":109,"prompt_tokens":108,"prompt_tokens_details":{"cached_tokens":4}},"x":NaN}',
        ),
        (b'{"usage":{"prompt_tokens":"5"}}', b'{"usage":{"prompt_tokens":"5"}}'),
        (b'{"usage":{"prompt_tokens":-5,"total_tokens":1.5}}', b'{"usage":{"prompt_tokens":-5,"total_tokens":1.5}}'),
        (b'{"usage":null}', b'{"usage":null}'),
        (b'{"usage":{"prompt_tokens":5}', b'{"usage":{"prompt_tokens":5}'),
        (b'[{"usage":{"prompt_tokens":5}}]', b'[{"usage":{"prompt_tokens":5}}]'),
        (b"", b""),
    ],
)
def test_only_the_two_counts_of_the_prompt_are_raised(answer: bytes, raised: bytes) -> None:
    assert with_more_prompt(answer, 100) == raised


def test_a_chunk_with_choices_is_not_only_usage() -> None:
    assert is_usage_only(b'{"choices":[],"usage":{}}')
    assert not is_usage_only(b'{"usage":{}}')

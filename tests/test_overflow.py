"""Refusals of real upstreams and their reading, and what must not be taken for one."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.overflow import Overflow, classify, classify_event, ended_empty, truncated

RECORDED = [json.loads(line) for line in pathlib.Path(__file__).with_name("overflow_answers.jsonl").read_text().splitlines()]
SHARED = pathlib.Path(os.environ.get("COMPACTION_SHARED") or pathlib.Path(__file__).parents[2] / "shared")
WHOLE_SET = SHARED / "data" / "overflow_answers.jsonl"


def read_as(row: dict[str, Any], body: bytes) -> tuple[Any, Any]:
    """(what was read, what was recorded), in one shape."""
    found, expected = classify(row["status"], body), row["expect"]
    told = None if found is None else (found.kind, found.limit, found.input, found.output, found.exact)
    known = expected and (expected["kind"], expected["limit"], expected["input"], expected["output"], row["exact"])
    return told, known


def said(message: str, status: int = 400, **fields: Any) -> Overflow | None:
    """The reading of an error with this message, OpenAI-shaped."""
    return classify(status, json.dumps({"error": {"message": message, **fields}}).encode())


@pytest.mark.parametrize("row", RECORDED, ids=[row["provider"] for row in RECORDED])
def test_every_recorded_answer_is_read_right(row: dict[str, Any]) -> None:
    body = row["body"] if isinstance(row["body"], str) else json.dumps(row["body"])

    told, known = read_as(row, body.encode())

    assert told == known


@pytest.mark.parametrize("row", RECORDED, ids=[row["provider"] for row in RECORDED])
def test_a_recorded_answer_inside_a_gateways_error_is_read_as_well(row: dict[str, Any]) -> None:
    inner = row["body"] if isinstance(row["body"], str) else json.dumps(row["body"])
    body = {"error": {"message": "Provider returned error", "code": row["status"], "metadata": {"raw": inner}}}

    told, known = read_as(row, json.dumps(body).encode())

    assert told == known


@pytest.mark.skipif(not WHOLE_SET.exists(), reason="the larger set of recorded answers is not here")
def test_the_whole_recorded_set_is_read_right() -> None:
    rows = [json.loads(line) for line in WHOLE_SET.read_text().splitlines()]
    bodies = [row["body"] if isinstance(row["body"], str) else json.dumps(row["body"]) for row in rows]

    wrong = [row["provider"] for row, body in zip(rows, bodies, strict=True) if len(set(read_as(row, body.encode()))) == 2]

    assert wrong == []


PROMPT_TOO_LONG = [
    (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 477469 tokens. Please reduce "
        "the length of the messages.",
        Overflow("prompt", 272000, 477469, None, exact=True, of_prompt=True),
    ),
    (
        "This model's maximum context length is 131072 tokens. However, you requested 4096 output tokens and your prompt "
        "contains at least 126977 input tokens, for a total of at least 131073 tokens. Please reduce the length of the input "
        "prompt or the number of requested output tokens.",
        Overflow("prompt", 131072, 126977, 4096, exact=False),
    ),
    (
        "The input token count (1196265) exceeds the maximum number of tokens allowed (1048575).",
        Overflow("prompt", 1048575, 1196265, None, exact=True, of_prompt=True),
    ),
    ("prompt is too long: 213462 tokens > 200000 maximum", Overflow("prompt", 200000, 213462, None, exact=True)),
    (
        "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 98304]",
        Overflow("prompt", 98304, None, None, exact=True, of_prompt=True),
    ),
    (
        "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 4085. Try using a shorter prompt",
        Overflow("prompt", 4081, 4085, None, exact=True),
    ),
    (
        "The prompt is too long: 142000, model maximum context length: 131071",
        Overflow("prompt", 131071, 142000, None, exact=True),
    ),
    (
        "The input (200000 tokens) is longer than the model's context length (131072 tokens).",
        Overflow("prompt", 131072, 200000, None, exact=True),
    ),
    (
        "Input length 140000 exceeds the maximum allowed input length of 131066 tokens. Use a shorter input or enable "
        "--allow-auto-truncate.",
        Overflow("prompt", 131066, 140000, None, exact=True, of_prompt=True),
    ),
    (
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make sure that `max_model_len` is "
        "no smaller than the number of text tokens.",
        Overflow("prompt", 8192, 9000, None, exact=True),
    ),
    (
        "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with context length of "
        "only 4096 tokens, which is not enough.",
        Overflow("prompt", 4096, 5000, None, exact=True),
    ),
    ("Prompt tokens (9000) exceeds context size (8192)", Overflow("prompt", 8192, 9000, None, exact=True)),
    (
        "AiError: The estimated number of input and maximum output tokens (8272) exceeded this model context window limit "
        "(7968).",
        Overflow("prompt", 7968, 8272, None, exact=False),
    ),
    (
        "This model's maximum context length is 8192 tokens. However, your request has 9,500 input tokens.",
        Overflow("prompt", 8192, 9500, None, exact=True),
    ),
    (
        "This endpoint's maximum context length is 200000 tokens. However, you requested about 250000 tokens (200100 of text "
        "input, 17900 of tool input, 32000 in the output). Please reduce the length of either one",
        Overflow("prompt", 200000, 218000, 32000, exact=False),
    ),
    ("Input is too long for requested model.", Overflow("prompt", None, None, None, exact=False)),
    ("Your input exceeds the context window of this model.", Overflow("prompt", None, None, None, exact=False)),
    ("Prompt 超长", Overflow("prompt", None, None, None, exact=False)),
]


@pytest.mark.parametrize(("message", "expected"), PROMPT_TOO_LONG)
def test_a_prompt_that_is_too_long_is_read_with_its_numbers(message: str, expected: Overflow) -> None:
    assert said(message) == expected


def test_functions_count_as_a_part_of_the_prompt() -> None:
    message = (
        "This model's maximum context length is 16385 tokens. However, you requested 16512 tokens (15012 in the messages, 500 "
        "in the functions, and 1000 in the completion). Please reduce the length of the messages, functions, or completion."
    )

    assert said(message) == Overflow("max_tokens", 16385, 15512, 1000, exact=True)


def test_an_answer_longer_than_the_window_is_not_the_prompts_fault() -> None:
    found = said("The max_tokens (100000) exceeds the maximum context length of 32768")

    assert found == Overflow("max_tokens", 32768, None, 100000, exact=True)


@pytest.mark.parametrize("status", [413, 429])
def test_a_cap_on_tokens_a_minute_is_told_apart(status: int) -> None:
    found = said(
        "Request too large for model `llama-3.3-70b-versatile` in organization `org_01k3` service tier `on_demand` on tokens "
        "per minute (TPM): Limit 12000, Requested 14137, please reduce your message size and try again.",
        status,
        type="tokens",
        code="rate_limit_exceeded",
    )

    assert found == Overflow("tpm", 12000, 14137, None, exact=True)


def test_a_list_as_gemini_sends_it_is_read() -> None:
    body = [{"error": {"code": 400, "message": "The input token count exceeds the maximum number of tokens allowed 1048576."}}]

    found = classify(400, json.dumps(body).encode())

    assert found == Overflow("prompt", 1048576, None, None, exact=True, of_prompt=True)


def test_an_error_that_stands_at_the_top_is_read() -> None:
    assert classify(400, b'"the input length exceeds the context length"') == Overflow("prompt", None, None, None, exact=False)
    assert classify(500, b"Context size has been exceeded.") == Overflow("prompt", None, None, None, exact=False)


def test_a_size_in_the_error_of_a_gateway_that_says_413_is_read() -> None:
    found = said("Request body too large for gpt-4o model. Max size: 8000 tokens.", 413, code="tokens_limit_reached")

    assert found == Overflow("prompt", 8000, None, None, exact=True)


def test_413_means_too_large_even_when_it_says_nothing() -> None:
    unsaid = Overflow("prompt", None, None, None, exact=False)

    assert classify(413, b"") == unsaid
    assert classify(413, b"<html><h1>413 Request Entity Too Large</h1></html>") == unsaid


ORDINARY = [
    (401, {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}),
    (404, {"error": {"message": "The model `context-length-9000` does not exist", "code": "model_not_found"}}),
    (429, {"error": {"message": "Rate limit reached on tokens per min (TPM): Limit 6000, Used 5034, Requested 1443."}}),
    (429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}),
    (400, {"error": {"message": "Input tokens rate limit exceeded, please wait"}}),
    (400, {"error": {"message": "context_window: invalid value for metadata"}}),
    (400, {"error": {"message": "A message with role 'tool' must follow tool_calls in this context."}}),
    (400, {"error": {"message": "max_tokens is too large: 100000. This model supports at most 16384 completion tokens."}}),
    (400, {"error": {"message": "Unrecognized request argument supplied: context_length"}}),
    (
        400,
        {
            "error": {
                "message": "Invalid 'messages[1].content': string too long. Expected at most 1048576",
                "code": "string_above_max_length",
            }
        },
    ),
    (400, {"error": {"message": "Too many images: 30 exceeds 20"}}),
    (500, {"error": {"message": "The server had an error while processing your request"}}),
    (400, {}),
    (400, []),
    (400, None),
    (400, 7),
]


@pytest.mark.parametrize(("status", "body"), ORDINARY)
def test_ordinary_errors_say_nothing_of_length(status: int, body: Any) -> None:
    assert classify(status, json.dumps(body).encode()) is None


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_gateways_error_page_says_nothing_of_length(status: int) -> None:
    assert classify(status, b"<html><title>prompt is too long</title></html>") is None


def test_an_echo_of_the_conversation_is_not_read() -> None:
    talk = [{"role": "user", "content": "Why do I get: prompt is too long: 213462 tokens > 200000 maximum?"}]
    body = {"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required", "input": {"messages": talk}}]}
    as_text = {"error": {"message": f"[{{'type': 'missing', 'msg': 'Field required', 'input': {talk!r}}}]"}}

    assert classify(422, json.dumps(body).encode()) is None
    assert classify(400, json.dumps(as_text).encode()) is None


def test_a_success_is_never_a_refusal() -> None:
    assert classify(200, b'{"error": {"message": "prompt is too long: 5 tokens > 4 maximum"}}') is None


def test_a_stream_whose_first_event_is_an_error_is_read() -> None:
    event = b'data: {"error": {"message": "prompt is too long: 213462 tokens > 200000 maximum", "code": 400}}\n\n'
    named = b'event: error\ndata: {"type": "error", "message": "Prompt tokens (9000) exceeds context size (8192)"}\n\n'

    assert classify_event(event) == Overflow("prompt", 200000, 213462, None, exact=True)
    assert classify_event(named) == Overflow("prompt", 8192, 9000, None, exact=True)
    assert classify_event(b'{"error": "Prompt tokens (9000) exceeds context size (8192)"}') is not None


def test_only_the_first_event_of_a_stream_counts() -> None:
    refusal = b'data: {"error": {"message": "Prompt tokens (9000) exceeds context size (8192)"}}\r\n\r\n'
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\n'

    assert classify_event(b": processing\n\n" + refusal + b"data: [DONE]\n\n") is not None
    assert classify_event(chunk + refusal) is None


def test_what_a_model_writes_is_never_read_as_a_refusal() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "prompt is too long: 213462 tokens > 200000 maximum"}}]}

    assert classify_event(b"data: " + json.dumps(chunk).encode()) is None
    assert classify_event(b"data: [DONE]") is None
    assert classify_event(b": keep-alive") is None


def test_a_stream_error_of_another_kind_says_nothing_of_length() -> None:
    assert classify_event(b'data: {"error": {"message": "Rate limit reached", "code": 429}}') is None


def test_a_stream_without_an_event_is_an_overflow_when_the_prompt_was_large() -> None:
    silent = Overflow("prompt", None, None, None, exact=False)

    assert ended_empty(b"", forwarded=9000, window=None) == silent
    assert ended_empty(b": ping\n\ndata: [DONE]\n\n", forwarded=9000, window=8192) == silent


def test_a_stream_without_an_event_is_no_overflow_when_the_prompt_was_small_or_something_came() -> None:
    assert ended_empty(b"", forwarded=300, window=None) is None
    assert ended_empty(b"", forwarded=4000, window=128000) is None
    assert ended_empty(b'data: {"choices": []}\n\n', forwarded=9000, window=None) is None
    assert ended_empty(b'{"choices": []}', forwarded=9000, window=None) is None


def test_a_dropped_beginning_is_seen_from_usage() -> None:
    assert truncated(20000, 4096)
    assert not truncated(20000, 12000)
    assert truncated(20000, 12000, calibrated=True)


def test_a_doubtful_usage_is_not_taken_for_a_dropped_beginning() -> None:
    assert not truncated(20000, 40)
    assert not truncated(20000, 4096, media=True)
    assert not truncated(900, 600)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text() | st.sampled_from(["error", "message", "code"]), inner, max_size=5)
    ),
)
PHRASES = st.sampled_from(
    [
        "maximum context length is ",
        "requested about ",
        "9,999 ",
        "1_0 ",
        "in the messages",
        "exceeds ",
        "context window ",
        "\0",
        ". ",
    ]
)


@given(st.integers(100, 599), st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
@settings(deadline=None)
def test_no_answer_makes_the_reader_fail(status: int, body: bytes) -> None:
    assert classify(status, body) is None or status >= 400
    classify_event(body)
    ended_empty(body, forwarded=1000, window=None)


@given(st.lists(PHRASES | st.text(max_size=5), max_size=30).map("".join))
@settings(deadline=None)
def test_no_mixture_of_the_words_makes_the_reader_fail(message: str) -> None:
    found = said(message)

    assert found is None or found.kind in ("prompt", "max_tokens", "tpm")


HOSTILE = {
    "digits": b"1" * 1_000_000,
    "numbers": b"1 " * 500_000,
    "commas": b"1," * 500_000,
    "brackets": b"[" * 500_000 + b"]" * 500_000,
    "depths": b'{"error": ' * 990 + b"1" + b"}" * 990,
    "blanks": json.dumps(" " * 900_000 + "prompt is too long").encode(),
    "sentences": b". " * 500_000,
    "backslashes": b'"' + b"\\\\" * 400_000 + b'"',
    "wide": json.dumps({f"key {number}": "context length 1 " for number in range(30_000)}).encode(),
    "more than is read": b'{"a":"' + b"x" * 10_000_000 + b'"}',
    "not text": bytes(range(128, 256)) * 8_000,
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_megabyte_of_anything_is_read_and_says_nothing(body: bytes) -> None:
    assert classify(400, body) is None
    assert classify_event(b"data: " + body) is None


def test_a_refusal_that_repeats_itself_for_a_megabyte_is_still_a_refusal() -> None:
    found = classify(400, b"maximum context length is 8192 tokens " * 30_000)

    assert found == Overflow("prompt", 8192, None, None, exact=True)

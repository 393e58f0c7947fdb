"""Whatever a body holds, counting gives a number."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.conversation import Message, Opaque, Text, ToolCall, ToolResult
from proxy.errors import Unreadable
from proxy.tokens import Calibration, breakdown, ruler
from proxy.tokens.images import document, image_size, picture, rate, recording
from proxy.tokens.tools import functions, render
from proxy.wire.chat_completions import read

WORDS = st.sampled_from(
    [
        *("role", "content", "name", "tool_calls", "function", "arguments", "type", "text", "image_url", "url", "parameters"),
        *(
            "properties",
            "$ref",
            "#",
            "#/$defs/a",
            "$defs",
            "anyOf",
            "oneOf",
            "allOf",
            "enum",
            "items",
            "array",
            "object",
            "const",
        ),
        *(
            "default",
            "title",
            "description",
            "required",
            "json_schema",
            "schema",
            "strict",
            "tool",
            "user",
            "assistant",
            "id",
            "1",
        ),
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20) | WORDS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=6),
    max_leaves=30,
)
MODELS = st.sampled_from(["gpt-4o", "gpt-4", "gpt-5-mini", "o3", "claude-sonnet-4-5", "gpt-oss:20b", ""]) | st.text(max_size=30)
RAW = st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode())
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "", "other"]) | st.text(max_size=10)
PARTS = st.one_of(
    st.builds(Text, st.text(max_size=50)),
    st.builds(ToolCall, st.none() | st.text(max_size=5), st.text(max_size=10), st.text(max_size=30) | VALUES.map(json.dumps)),
    st.builds(
        ToolResult,
        st.none() | st.text(max_size=5),
        st.text(max_size=50) | VALUES.map(json.dumps),
        st.none() | st.text(max_size=5),
    ),
    st.builds(
        Opaque,
        st.sampled_from(["image", "audio", "file", "reasoning", "refusal", "unknown", "video_url"]) | st.text(max_size=8),
        RAW,
        st.sampled_from(["content", "message", "reasoning_content", "refusal", "audio"]),
    ),
)
MESSAGES = st.lists(
    st.builds(Message, ROLES, st.lists(PARTS, max_size=4).map(tuple), st.none() | st.text(max_size=8)), max_size=6
)
FIELDS = st.dictionaries(
    st.sampled_from(["tools", "functions", "tool_choice", "function_call", "response_format", "thinking", "model"]),
    RAW,
    max_size=5,
)
DEEP = b"[" * 50_000 + b"]" * 50_000


@given(MODELS, FIELDS, MESSAGES)
@example("gpt-4o", {"tools": DEEP, "response_format": DEEP, "tool_choice": DEEP, "thinking": DEEP}, [])
@example("gpt-4o", {"tools": b"[" + b"9" * 100_000 + b"]"}, [])
@example("qwen3", {}, [Message("assistant", (Opaque("reasoning", DEEP, "reasoning"),))])
@example("qwen3", {}, [Message("assistant", (Opaque("reasoning", b"[" * 900 + b"]" * 900, "reasoning"),))])
@example("gpt-4o", {}, [Message("assistant", (ToolCall("1", "f", "[" * 50_000), ToolCall("2", "f", '{"a":' * 50_000)))])
@settings(max_examples=300, deadline=None)
def test_any_messages_and_any_fields_have_a_count(model: str, fields: dict[str, bytes], messages: list[Message]) -> None:
    rule = ruler(model, fields)

    assert rule.cold_bytes(messages) >= 0
    assert rule.total(messages) >= rule.fixed - 4 >= -2
    assert all(rule.message(message) >= 0 for message in messages)
    assert rule.cold_bytes(messages) == 0
    assert sum(rule.shares(messages)) + (rule.raw(()) if messages else rule.raw(messages)) == rule.raw(messages)
    assert breakdown(model, fields, messages).tokens == rule.raw(messages)


@given(st.dictionaries(WORDS, VALUES, max_size=4), st.lists(VALUES, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_body_that_can_be_read_has_a_count(fields: dict[str, Any], messages: list[Any]) -> None:
    try:
        request = read(json.dumps({**fields, "messages": messages}).encode())
    except Unreadable:
        return

    assert ruler("gpt-4o", request.fields).total(request.conversation.messages) >= 3


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_any_schema_can_be_written(schema: Any) -> None:
    offered = functions([{"function": {"name": schema, "description": schema, "parameters": schema}}, schema], schema)

    assert render(offered).endswith("} // namespace functions")


@given(RAW)
@settings(max_examples=300, deadline=None)
def test_any_bytes_can_be_asked_for_their_picture(raw: bytes) -> None:
    size = image_size(raw)

    assert size is None or min(size) > 0
    assert picture(rate("gpt-4o"), raw) >= 85
    assert recording(raw) >= 0
    assert document(raw) >= 220


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_behind_a_known_header_are_no_error(rest: bytes) -> None:
    for head in (b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff", b"RIFF0000WEBPVP8 ", b"RIFF0000WEBPVP8L", b"RIFF0000WEBPVP8X"):
        raw = b'{"image_url":{"url":"data:;base64,' + b64encode(head + rest) + b'"}}'
        size = image_size(raw)
        assert size is None or min(size) > 0


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_no_text_has_more_tokens_than_bytes(text: str) -> None:
    assert ruler("gpt-4o", {}).text(text) <= len(text.encode("utf-8", "surrogatepass"))


@given(MESSAGES, st.floats(0.5, 2.0), st.floats(0, 1000))
@settings(max_examples=100, deadline=None)
def test_a_calibrated_count_grows_with_what_is_said(messages: list[Message], slope: float, offset: float) -> None:
    rule = ruler("qwen3", {}, calibration=Calibration(slope, offset))

    assert rule.total([*messages, Message("user", (Text("and one more thing"),))]) >= rule.fixed

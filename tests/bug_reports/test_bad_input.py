"""Bodies, headers and upstreams that nobody should send or be: each has its answer in the contract, and none is lost."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator

import pytest
from bug_reports import upstreams
from bug_reports.lab import Lab, holds, leaks, read_answer, until
from bug_reports.rows import CHAT, HEADERS, KEY, Request
from builders import agent_session, chat
from live.toxic import Toxic
from running import running_proxy

HI = chat([{"role": "user", "content": "hi"}])


def said(content: str) -> bytes:
    return b'{"model": "gpt-4o", "messages": [{"role": "user", "content": %b}]}' % content.encode()


def messages(text: str) -> bytes:
    return b'{"model": "gpt-4o", "messages": %b}' % text.encode()


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "a space": b" ",
    "no JSON": b"{not json",
    "half a body": HI[:-4],
    "two bodies": HI + HI,
    "single quotes": b"{'model': 'gpt-4o', 'messages': []}",
    "a trailing comma": b'{"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"},]}',
    "a comment": b'{"model": "gpt-4o", /* x */ "messages": []}',
    "a list": b"[1, 2]",
    "a string": b'"hello"',
    "a number": b"7",
    "null": b"null",
    "an empty object": b"{}",
    "no messages": b'{"model": "gpt-4o"}',
    "empty messages": messages("[]"),
    "messages that are null": messages("null"),
    "messages that are text": messages('"hi"'),
    "messages that are an object": messages('{"role": "user"}'),
    "messages that are numbers": messages("[1, null, true, [], {}]"),
    "a message that is text": messages('["hi"]'),
    "a role that is a number": messages('[{"role": 1, "content": 2}]'),
    "a role that is unknown": messages('[{"role": "narrator", "content": "hi"}]'),
    "no role": messages('[{"content": "hi"}]'),
    "content that is a number": said("7"),
    "content that is an object": said('{"text": "hi"}'),
    "content of odd parts": said('[1, null, "x", {}, {"type": 7}, {"type": "text"}, {"type": "text", "text": null}]'),
    "a picture without address": said('[{"type": "image_url"}, {"type": "image_url", "image_url": 7}]'),
    "calls that are text": messages('[{"role": "assistant", "content": null, "tool_calls": "x"}]'),
    "calls that are odd": messages('[{"role": "assistant", "tool_calls": [1, {}, {"function": 7}, {"id": 5, "function": {}}]}]'),
    "arguments that are an object": messages('[{"role": "assistant", "tool_calls": [{"id": "a", "function": {"arguments": {}}}]}]'),
    "an orphan tool message": messages('[{"role": "tool", "tool_call_id": "x", "content": "r"}, {"role": "user", "content": "hi"}]'),
    "a tool message without id": messages('[{"role": "tool", "content": "r"}]'),
    "NaN": b'{"model": "gpt-4o", "temperature": NaN, "messages": [{"role": "user", "content": "hi", "x": -Infinity}]}',
    "numbers without end": b'{"model": "gpt-4o", "seed": %b, "messages": []}' % (b"9" * 5_000),
    "max_tokens without end": b'{"model": "gpt-4o", "max_tokens": %b, "messages": []}' % (b"9" * 100_000),
    "max_tokens below zero": b'{"model": "gpt-4o", "max_tokens": -5, "max_completion_tokens": 0, "messages": []}',
    "max_tokens that is text": b'{"model": "gpt-4o", "max_tokens": "many", "messages": []}',
    "lone surrogates": said(r'"\ud83d and \udc00 \ud800\ud800"'),
    "a surrogate as a name": messages(r'[{"role": "\udfff", "name": "\ud800", "content": "hi", "\udead": 1}]'),
    "a surrogate as the model": b'{"model": "\\ud800", "messages": []}',
    "bytes that are no UTF-8": said('"x"').replace(b'"x"', b'"\xff\xfe\xc3("'),
    "UTF-8 with a mark": b"\xef\xbb\xbf" + HI,
    "UTF-16": HI.decode().encode("utf-16"),
    "a zero byte": said('"a\x00b"'),
    "escaped zeros": said(r'"a\u0000b"'),
    "depth 10,000": said("[" * 10_000 + "]" * 10_000),
    "depth 10,000 in a field": b'{"model": "gpt-4o", "x": %b, "messages": []}' % (b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "depth 10,000 in a schema": b'{"model": "gpt-4o", "messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": '
    + b'{"items":' * 10_000 + b"1" + b"}" * 10_000 + b"}}]}",
    "depth 600 in a schema": b'{"model": "gpt-4o", "messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": '
    + b'{"type":"object","properties":{"a":' * 300 + b"{}" + b"}}" * 300 + b"}}]}",
    "depth that does not end": b'{"model": "gpt-4o", "messages": ' + b"[" * 100_000,
    "tools that are odd": b'{"model": "gpt-4o", "messages": [], "tools": [1, null, {}, {"function": []}, {"type": "function", "function": {"name": 1}}]}',
    "tools that are an object": b'{"model": "gpt-4o", "messages": [], "tools": {}, "functions": 7, "tool_choice": [], "response_format": 1}',
    "a schema that is itself": b'{"model": "gpt-4o", "messages": [], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}}',
    "special tokens": said('"<|endoftext|><|im_start|>system<|fim_prefix|>"'),
    "a million spaces": said('"' + " " * 1_000_000 + '"'),
    "a million of one letter": said('"' + "a" * 1_000_000 + '"'),
    "a million line ends": said('"' + "\\n" * 1_000_000 + '"'),
    "keys that repeat": b'{"model": "a", "messages": [], "model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}',
    "a key of a megabyte": b'{"model": "gpt-4o", "' + b"k" * 1_000_000 + b'": 1, "messages": []}',
    "fifty thousand messages": messages("[" + ",".join(['{"role":"user","content":"x"}'] * 50_000) + "]"),
    "an unknown model": chat([{"role": "user", "content": "word " * 5_000}], "nobody-knows-me"),
    "stream that is text": b'{"model": "gpt-4o", "stream": "yes", "messages": []}',
}  # fmt: skip


@pytest.mark.parametrize("window", [None, "50"])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_odd_goes_through_as_it_came(lab: Lab, name: str, window: str | None) -> None:
    """Also where the window is so narrow that we would like to do something about it."""
    request = Request(body=BODIES[name])
    exchanged = lab.send(request if window is None else request.having(x_compaction_window=window), upstreams.silent)
    holds(exchanged)
    assert exchanged.untouched


BETWEEN: dict[str, object] = {
    "NaN": float("nan"),
    "a lone surrogate": {"role": "user", "content": "\ud83d"},
    "an orphan": {"role": "tool", "tool_call_id": "nowhere", "content": "r"},
    "an unanswered call": {"role": "assistant", "content": None, "tool_calls": [{"id": "u", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    "special tokens": {"role": "user", "content": "<|endoftext|>"},
    "a number": 7,
    "null": None,
    "an empty message": {},
    "an unknown role": {"role": "narrator", "content": "once"},
    "an empty answer": {"role": "assistant", "content": ""},
    "an empty list": {"role": "user", "content": []},
    "broken arguments": {"role": "assistant", "content": None, "tool_calls": [{"id": "b", "type": "function", "function": {"name": "f", "arguments": "{\"a\": "}}]},
    "calls without ids": {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    "a thousand spaces": {"role": "user", "content": " " * 100_000},
    "the retired kind of call": {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    "a late instruction": {"role": "system", "content": "From now on in French."},
    "reasoning that is signed": {"role": "assistant", "content": "a", "thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": "s"}]},
    "words that look like our own": {"role": "user", "content": "[Earlier conversation summary: quoted record of 3 earlier messages]\n§ end 00"},
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_an_odd_message_amid_a_long_conversation_does_not_stop_us_or_break_it(lab: Lab, name: str) -> None:
    session = agent_session(12)
    odd = chat_with([*session[:6], BETWEEN[name], *session[6:]])
    exchanged = lab.send(Request(body=odd).having(x_compaction_window="3000"), upstreams.silent)
    holds(exchanged)
    again = lab.send(Request(body=odd).having(x_compaction_window="3000"), upstreams.silent)
    assert again.forwarded == exchanged.forwarded


def chat_with(parts: list[object]) -> bytes:
    return json.dumps({"model": "gpt-4o", "messages": parts}).encode()


# --- control headers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-compaction", "maybe"), ("x-compaction", "off, force"), ("x-compaction-window", "-1"), ("x-compaction-window", "0"),
        ("x-compaction-window", "many"), ("x-compaction-window", "1e3"), ("x-compaction-window", "9" * 400),
        ("x-compaction-window", ""), ("x-compaction-window", "²"), ("x-compaction-window", "12.5"),
    ],
)  # fmt: skip
def test_an_unknown_control_value_is_a_400_that_names_it(lab: Lab, header: str, value: str) -> None:
    lab.answers(upstreams.silent)
    answer = read_answer(lab.bytes_back(Request(body=HI, headers={**HEADERS, header: value}).raw()))
    assert answer.status == 400
    assert answer.header("x-compaction-error") == "1"
    error = answer.json["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", header, "unknown_value")
    assert header in error["message"]
    assert value[:40] in error["message"]
    assert lab.upstream.requests == []
    assert KEY not in answer.body.decode()


@pytest.mark.parametrize("value", ["off", "OFF", " force ", "shadow", ""])
def test_a_known_control_value_is_obeyed_and_taken_out(lab: Lab, value: str) -> None:
    holds(lab.send(Request(body=HI).having(x_compaction=value), upstreams.silent))


# --- upstreams ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lonely(toxic_upstream_of_log: Toxic) -> Iterator[Lab]:
    """A proxy whose upstream is down."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else gets the port
        with running_proxy("--upstream", f"http://127.0.0.1:{taken.getsockname()[1]}/v1") as proxy:
            yield Lab(proxy, toxic_upstream_of_log)


@pytest.mark.parametrize("body", [HI, b"{not json", chat(agent_session(12))], ids=["fits", "odd", "too long"])
def test_an_upstream_that_is_down_is_a_502(lonely: Lab, body: bytes) -> None:
    request = Request(body=body).having(x_compaction_window="3000")
    answer = read_answer(lonely.bytes_back(request.raw()))
    assert answer.status == 502
    assert answer.header("x-compaction-error") == "1"
    assert answer.json["error"]["code"] == "upstream_unreachable"
    assert answer.json["error"]["type"] == "upstream_error"
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert leaks(answer.body.decode() + lonely.told) == []
    until(lambda: lonely.metric('compaction_upstream_errors_total{reason="connect"}') > 0)


def test_other_paths_say_so_too(lonely: Lab) -> None:
    answer = read_answer(lonely.bytes_back(Request("GET", "/v1/models").raw()))
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_unreachable")


@pytest.mark.parametrize("behavior", ["die_without_answer", "h2_goaway"])
def test_an_upstream_that_says_nothing_sensible_is_a_502(lab: Lab, behavior: str) -> None:
    answer = lab.send(Request(body=HI), behavior).answer
    assert (answer.status, answer.header("x-compaction-error")) == (502, "1")
    assert answer.json["error"]["type"] == "upstream_error"


# --- the sidecar ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
def test_the_sidecar_answers_any_body_with_200_or_400(lab: Lab, name: str) -> None:
    lab.answers(upstreams.silent)
    answer = read_answer(lab.bytes_back(Request(path="/v1/compact", body=BODIES[name]).raw()))
    assert answer.status in (200, 400)
    assert answer.clean
    assert ("error" in answer.json) == (answer.status == 400)
    assert lab.upstream.requests == []


@pytest.mark.parametrize("mode", ["force", "off", "shadow"])
@pytest.mark.parametrize("coding", ["identity", "gzip", "deflate"])
def test_the_sidecar_reads_compressed_bodies_in_every_mode(lab: Lab, coding: str, mode: str) -> None:
    pack = {"identity": bytes, "gzip": gzip.compress, "deflate": zlib.compress}[coding]
    request = Request(path="/v1/compact", body=pack(HI)).having(content_encoding=coding, x_compaction=mode)
    answer = read_answer(lab.bytes_back(request.raw()))
    assert answer.status == 200
    assert answer.json["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("body", [b"{not json", b"\xff", b"{}", b"[]", messages('"hi"'), gzip.compress(HI, mtime=0)[:20]])
def test_the_sidecar_says_what_is_no_request_even_when_told_to_leave_it_alone(lab: Lab, body: bytes) -> None:
    answer = read_answer(lab.bytes_back(Request(path="/v1/compact", body=body).having(x_compaction="off").raw()))
    assert (answer.status, answer.json["error"]["code"]) == (400, "unreadable_body")


def test_a_limit_is_not_learned_for_requests_that_name_no_model(lab: Lab) -> None:
    """What one model refused, sent past us, says nothing of a request without a model."""
    long = chat([{"role": "user", "content": "word " * 3_000}], "somebody")
    refused = lab.send(Request(body=long).having(x_compaction="off"), upstreams.window_of(1_000, 5))
    assert refused.answer.status == 400
    nameless = lab.send(Request(body=json.dumps({"messages": agent_session(12)}).encode()), upstreams.silent)
    holds(nameless)
    assert nameless.answer.header("x-compaction-reason") == "unknown_window"


def test_a_path_that_only_looks_like_chat_passes(lab: Lab) -> None:
    for path in (CHAT + "/", CHAT + "/x", "/v1/chat/completions%2f", "/v1//chat/completions", "/v1/CHAT/completions"):
        exchanged = lab.send(Request(path=path, body=HI), upstreams.silent)
        assert exchanged.received[0].target == path.encode()
        holds(exchanged)

"""The real openai SDK through a running proxy: nothing changes for the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from builders import agent_session, assistant, call, prose, tool, user
from fakes import Received, Reply, ScriptedUpstream, completion, event, stream, too_long
from running import RunningProxy

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
LONG = agent_session(30, 400)
"""About 14,000 tokens: more than twice the window."""


@pytest.fixture
def client(proxy: RunningProxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=proxy.base_url, api_key="sk-test-0000", max_retries=0) as open_client:
        yield open_client


def test_a_plain_answer_arrives(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    answer = client.chat.completions.create(model="gpt-4o", messages=[user("hi")])

    assert answer.choices[0].message.content == "All done."
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 11


def test_the_key_and_the_clients_headers_reach_the_upstream(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    client.chat.completions.create(
        model="gpt-4o", messages=[user("hi")], extra_headers={"x-own": "1", "x-compaction-session": "s"}
    )

    received = upstream.chats[0]
    assert received.header("authorization") == "Bearer sk-test-0000"
    assert received.header("x-own") == "1"
    assert not [name for name, _ in received.headers if name.lower().startswith("x-compaction")]


def test_a_streamed_answer_arrives_piece_by_piece(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda _: stream({"content": "one "}, {"content": "two "}, {"content": "three"})

    pieces = [
        c.choices[0].delta.content for c in client.chat.completions.create(model="gpt-4o", messages=[user("hi")], stream=True)
    ]

    assert pieces == ["one ", "two ", "three"]


def test_the_async_client_works_plain_and_streamed(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    async def talk() -> tuple[str | None, list[str | None]]:
        async with openai.AsyncOpenAI(base_url=proxy.base_url, api_key="sk-test-0000", max_retries=0) as client:
            plain = await client.chat.completions.create(model="gpt-4o", messages=[user("hi")])
            streamed = await client.chat.completions.create(model="gpt-4o", messages=[user("hi")], stream=True)
            return plain.choices[0].message.content, [c.choices[0].delta.content async for c in streamed if c.choices]

    assert asyncio.run(talk()) == ("All done.", ["All ", "done."])


def test_a_tool_call_arrives(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda _: completion(tool_calls=[call("c1", "get_weather", city="Oslo")])

    message = client.chat.completions.create(model="gpt-4o", messages=[user("weather?")], tools=[WEATHER]).choices[0].message

    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def test_streamed_tool_call_arguments_arrive_in_order(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    def delta(arguments: str) -> dict[str, object]:
        return {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            ]
        }

    upstream.script = lambda _: stream(delta('{"ci'), delta('ty": "Os'), delta('lo"}'))

    chunks = client.chat.completions.create(model="gpt-4o", messages=[user("?")], tools=[WEATHER], stream=True)

    assert "".join(c.choices[0].delta.tool_calls[0].function.arguments for c in chunks) == '{"city": "Oslo"}'


def test_parallel_tool_calls_and_their_results_stay_together_when_compacted(
    client: openai.OpenAI, upstream: ScriptedUpstream
) -> None:
    messages = [{"role": "system", "content": "s"}, user("Compare the cities.")]
    for n in range(12):
        messages.append(assistant(None, call(f"a{n}", "get_weather", city=f"A{n}"), call(f"b{n}", "get_weather", city=f"B{n}")))
        messages += [tool(f"b{n}", prose(250, n)), tool(f"a{n}", prose(250, 100 + n))]
    messages.append(user("Which is warmest?"))

    client.chat.completions.create(model="gpt-4o", messages=messages, tools=[WEATHER])

    sent = upstream.chats[0].json["messages"]
    assert len(json.dumps(sent)) < len(json.dumps(messages)) / 2
    open_calls: list[str] = []
    for message in sent:
        if message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
        else:
            assert open_calls == []
            open_calls = [one["id"] for one in message.get("tool_calls", [])]
    assert open_calls == []


def test_a_conversation_that_is_too_long_works(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    upstream.window = 6_000

    raw = client.chat.completions.with_raw_response.create(model="gpt-4o", messages=LONG)

    assert raw.headers["x-compaction"] == "applied"
    assert int(raw.headers["x-compaction-tokens-before"]) > 10_000
    assert int(raw.headers["x-compaction-tokens-after"]) <= 5_500
    assert raw.parse().choices[0].message.content == "All done."
    sent = upstream.chats[0].json["messages"]
    assert sent[0] == LONG[0]
    assert sent[-1] == LONG[-1]
    text = json.dumps(sent)
    assert "Fix the failing import in app/loader.py. Never touch the migrations." in text
    assert "ModuleNotFoundError: No module named 'loader_core'" in text


def test_it_works_streamed_too(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    upstream.window = 6_000

    pieces = [
        c.choices[0].delta.content
        for c in client.chat.completions.create(model="gpt-4o", messages=LONG, stream=True)
        if c.choices
    ]

    assert pieces == ["All ", "done."]


def test_the_same_conversation_gives_the_same_bytes_again(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    for _ in range(2):
        client.chat.completions.create(model="gpt-4o", messages=LONG)

    assert upstream.chats[0].body == upstream.chats[1].body


def test_an_error_of_the_upstream_is_the_clients(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    error = {"error": {"message": "Slow down.", "type": "rate_limit", "code": "rate_limit_exceeded"}}
    upstream.script = lambda _: Reply(
        429, (("content-type", "application/json"), ("retry-after", "7")), [json.dumps(error).encode()]
    )

    with pytest.raises(openai.RateLimitError) as raised:
        client.chat.completions.create(model="gpt-4o", messages=[user("hi")])

    assert raised.value.response.headers["retry-after"] == "7"
    assert raised.value.body == error["error"]


def test_an_unknown_window_is_learned_from_the_refusal_and_the_request_works(
    client: openai.OpenAI, upstream: ScriptedUpstream
) -> None:
    upstream.window = 8_000

    first = client.chat.completions.with_raw_response.create(model="house-model-1", messages=LONG)
    second = client.chat.completions.with_raw_response.create(model="house-model-1", messages=LONG)

    assert first.headers["x-compaction"] == "applied"
    assert second.headers["x-compaction"] == "applied"
    assert len(upstream.chats) == 3
    assert upstream.chats[0].json["messages"] == LONG


def test_a_refusal_inside_a_stream_is_recovered_too(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    refusal = json.loads(too_long(5_000, 14_000).chunks[0])

    def script(one: Received) -> Reply:
        if len(upstream.chats) == 1:
            return Reply(
                headers=(("content-type", "text/event-stream"),), chunks=[b"data: " + json.dumps(refusal).encode() + b"\n\n"]
            )
        return stream({"content": "fits now"})

    upstream.script = script

    chunks = client.chat.completions.create(model="house-model-2", messages=LONG, stream=True)

    assert [c.choices[0].delta.content for c in chunks] == ["fits now"]


def test_a_second_refusal_gives_the_upstreams_first_answer(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    answers = [too_long(9_000, 14_000), too_long(10, 11)]
    upstream.script = lambda _: answers[len(upstream.chats) - 1]

    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="house-model-3", messages=LONG)

    assert "9000 tokens" in raised.value.message
    assert len(upstream.chats) == 2


def test_a_stream_that_breaks_off_raises_in_the_client(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda _: stream({"content": "half"}, cut=True)

    chunks = client.chat.completions.create(model="gpt-4o", messages=[user("hi")], stream=True)

    assert next(chunks).choices[0].delta.content == "half"
    with pytest.raises(openai.APIError):
        next(chunks)


def test_usage_in_a_stream_that_the_client_asked_for_arrives(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    last = list(
        client.chat.completions.create(model="gpt-4o", messages=[user("hi")], stream=True, stream_options={"include_usage": True})
    )[-1]

    assert last.usage is not None
    assert last.usage.prompt_tokens == 11


def test_other_endpoints_pass_through(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    upstream.models = [{"id": "gpt-4o", "object": "model", "created": 1, "owned_by": "x"}]

    assert [model.id for model in client.models.list()] == ["gpt-4o"]


def test_a_file_upload_passes_through(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda _: Reply(
        chunks=[b'{"id":"f1","object":"file","bytes":1,"created_at":1,"filename":"a","purpose":"batch","status":"processed"}']
    )

    made = client.files.create(file=("a.jsonl", b"x" * 300_000), purpose="batch")

    assert made.id == "f1"
    assert any(b"x" * 300_000 in one.body for one in upstream.received)


def test_events_reach_the_client_as_they_are_sent(client: openai.OpenAI, upstream: ScriptedUpstream) -> None:
    odd = b": comment\r\ndata:" + event({"content": "x"})[6:]
    upstream.script = lambda _: Reply(headers=(("content-type", "text/event-stream"),), chunks=[odd, b"data: [DONE]\n\n"])

    pieces = [
        c.choices[0].delta.content for c in client.chat.completions.create(model="gpt-4o", messages=[user("hi")], stream=True)
    ]

    assert pieces == ["x"]

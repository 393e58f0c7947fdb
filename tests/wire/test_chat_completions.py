"""Bodies in, bodies out: only what was edited differs."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pytest
from builders import agent_session, assistant, call, chat, tool, user
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation import Conversation, Opaque, Text, ToolCall, ToolResult, said
from proxy.errors import Unreadable
from proxy.wire import chat_completions as wire


def test_a_body_says_its_model_stream_and_output() -> None:
    request = wire.read(chat([user("hi")], model="gpt-4o", stream=True, max_tokens=50, max_completion_tokens=70))

    assert (request.model, request.stream, request.max_output) == ("gpt-4o", True, 70)


def test_messages_become_parts() -> None:
    messages = [user("hi"), assistant("Reading.", call("c1", "read", path="a.py")), tool("c1", "text of a.py")]

    conversation = wire.read(chat(messages)).conversation

    assert conversation.messages[0].parts == (Text("hi"),)
    assert conversation.messages[1].parts == (Text("Reading."), ToolCall("c1", "read", '{"path": "a.py"}'))
    assert conversation.messages[2].parts == (ToolResult("c1", "text of a.py"),)


def test_steps_keep_calls_and_their_results_together() -> None:
    messages = [
        {"role": "system", "content": "s"},
        user("task"),
        assistant(None, call("a", "f"), call("b", "g")),
        tool("b", "1"),
        tool("a", "2"),
        assistant("done"),
    ]

    conversation = wire.read(chat(messages)).conversation

    assert [message.role for message in conversation.preamble] == ["system"]
    assert [len(step.messages) for step in conversation.steps] == [1, 3, 1]
    assert conversation.protected == {0, 2}


def test_a_body_whose_messages_were_not_edited_keeps_every_message_and_field() -> None:
    body = b'{ "model" : "m", "messages":[ {"content":"\\u0061","role":"user"} , {"role":"user","content":1e5}],"seed":1.50,"x":{"y":[]}}'
    request = wire.read(body)

    written = wire.write(request, request.conversation)

    assert (
        written
        == b'{"model":"m","messages":[{"content":"\\u0061","role":"user"},{"role":"user","content":1e5}],"seed":1.50,"x":{"y":[]}}'
    )


def test_an_edited_message_keeps_fields_that_we_know_nothing_of() -> None:
    raw = b'{"role":"tool","tool_call_id":"c1","content":[{"type":"text","text":"long","cache_control":{"type":"ephemeral"}}],"x_vendor":[1]}'
    message = wire.read_message(raw)

    edited = message.with_parts([ToolResult("c1", "short")])

    assert wire.write_message(edited) == (
        b'{"role":"tool","tool_call_id":"c1","content":[{"type":"text","text":"short","cache_control":{"type":"ephemeral"}}],"x_vendor":[1]}'
    )


def test_an_edited_argument_leaves_the_other_calls_as_they_came() -> None:
    raw = b'{"role":"assistant","content":null,"tool_calls":[{"type":"function","id":"a","function":{"arguments":"{\\"k\\": 1}","name":"f"}},{"id":"b","type":"function","function":{"name":"g","arguments":"{ }"},"index":1}]}'
    message = wire.read_message(raw)

    first, second = message.calls
    edited = message.with_parts([replace(first, arguments='{"k":0}'), second])

    assert wire.write_message(edited) == raw.replace(b'{\\"k\\": 1}', b'{\\"k\\":0}')


def test_dropped_reasoning_takes_its_field_away_and_nothing_else() -> None:
    message = wire.read_message(b'{"role":"assistant","reasoning_content":"hm","content":"yes","name":"a"}')

    edited = message.with_parts(part for part in message.parts if not isinstance(part, Opaque))

    assert wire.write_message(edited) == b'{"role":"assistant","content":"yes","name":"a"}'


def test_pictures_survive_an_edit_of_the_text_beside_them() -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    body = chat([{"role": "user", "content": [{"type": "text", "text": "what is this"}, picture]}])
    message = wire.read(body).conversation.messages[0]

    edited = message.with_parts([replace(message.parts[0], text="what?"), message.parts[1]])

    assert json.loads(wire.write_message(edited))["content"] == [{"type": "text", "text": "what?"}, picture]


def test_a_new_message_is_plain() -> None:
    assert wire.write_message(said("user", 'a "b"')) == b'{"role":"user","content":"a \\"b\\""}'


def test_lone_surrogates_and_nan_are_read_and_kept() -> None:
    body = b'{"messages":[{"role":"user","content":"cut \\ud83d"}],"temperature":NaN,"model":"m"}'

    request = wire.read(body)

    assert request.conversation.messages[0].text == "cut \ud83d"
    assert wire.write(request, request.conversation) == body


def test_what_is_no_message_is_kept_whole() -> None:
    body = b'{"messages":[7,null,"x",{"role":5},{"role":"user","content":{"a":1}}]}'

    request = wire.read(body)

    assert wire.write(request, request.conversation) == body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages":{}}',
        b'{"model":"m"}',
        b'{"messages":[{"role":"user"}]} x',
        b'\xef\xbb\xbf{"messages":[]}',
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":{"a":"\xff"}}}]}]}',
        b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        '{"messages":[]}'.encode("utf-16"),
        b'{"messages":[' + b"1," * 20_000 + b"1]}",
    ],
)
def test_what_is_no_chat_body_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        wire.read(body)


def test_a_message_that_was_seen_is_not_parsed_again() -> None:
    cache = wire.MessageCache()
    body = chat(agent_session(3))

    first, second = wire.read(body, cache.get), wire.read(body, cache.get)

    assert all(a is b for a, b in zip(first.conversation.messages, second.conversation.messages, strict=True))


def test_the_message_cache_is_bounded_in_bytes() -> None:
    cache = wire.MessageCache(max_bytes=10_000)

    for n in range(100):
        cache.get(b'{"role":"user","content":"%s"}' % (b"%d" % n * 400))

    held = [raw for generation in (cache._young, cache._old) for raw in generation]
    assert sum(map(len, held)) <= 10_000


def test_messages_of_a_few_words_take_no_more_memory_than_long_ones() -> None:
    cache = wire.MessageCache(max_bytes=2_000_000)
    tracemalloc.start()

    for n in range(50_000):
        cache.get(b'{"role":"user","content":"%d"}' % n)

    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4_000_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
message_fields = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x"]) | json_values,
        "content": st.text(max_size=30)
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)}) | json_values, max_size=3)
        | json_values,
        "name": json_values,
        "tool_call_id": json_values,
        "reasoning_content": json_values,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "id": st.text(max_size=5),
                    "function": st.fixed_dictionaries({"name": st.text(max_size=5), "arguments": st.text(max_size=9)}),
                }
            )
            | json_values,
            max_size=3,
        )
        | json_values,
        "function_call": json_values,
    },
)


@given(st.lists(message_fields | json_values, max_size=5))
def test_reading_and_writing_without_edits_is_the_identity_on_messages(messages: list[object]) -> None:
    raw = [json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") for message in messages]
    body = b'{"messages":[' + b",".join(raw) + b"]}"

    request = wire.read(body)

    assert wire.write(request, request.conversation) == body


@given(message_fields)
def test_a_message_that_is_written_anew_with_its_own_parts_says_the_same(message: dict[str, object]) -> None:
    read = wire.read_message(json.dumps(message).encode())

    anew = wire.read_message(wire.write_message(replace(read, raw=None, origin=read.raw)))

    assert anew == read


def test_a_conversation_of_the_same_objects_is_itself() -> None:
    conversation = wire.read(chat([user("a"), user("b")])).conversation

    assert conversation.with_messages(list(conversation.messages)) is conversation
    assert isinstance(conversation.with_messages(conversation.messages[:1]), Conversation)

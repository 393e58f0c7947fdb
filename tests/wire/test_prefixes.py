"""A body whose beginning is known must be read as if nothing were known; and then be cheaper."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import tokens
from proxy.conversation import Message, Messages, Opaque
from proxy.errors import Unreadable
from proxy.tokens.calibration import chain
from proxy.wire import Request, chat_completions
from proxy.wire.prefixes import Known, Prefixes

NEAR = (200, 0)
"""Landmarks for short bodies."""


def body(count: int, before: dict[str, Any] | None = None, after: dict[str, Any] | None = None, space: str = " ") -> bytes:
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"message {n} " + "word " * 30} for n in range(count)]
    fields = {**(before or {"model": "m"}), "messages": messages, **(after or {})}
    return json.dumps(fields, separators=("," + space, ":" + space)).encode()


def same(one: Request, other: Request) -> bool:
    return (
        one == other
        and list(one.fields) == list(other.fields)
        and [message.raw for message in one.conversation.messages] == [message.raw for message in other.conversation.messages]
    )


def read(raw: bytes, prefixes: Prefixes | None = None, parsed: list[bytes] | None = None) -> Request | str:
    def parse(item: bytes) -> Message:
        if parsed is not None:
            parsed.append(item)
        return chat_completions.read_message(item)

    try:
        return chat_completions.read(raw, parse, prefixes)
    except Unreadable as error:
        return error.reason


def test_the_next_turn_is_read_from_where_the_last_one_ended() -> None:
    prefixes = Prefixes(landmarks=NEAR)
    read(body(10, after={"stream": True}), prefixes)
    parsed: list[bytes] = []

    request = read(body(12, after={"stream": False, "user": "u"}), prefixes, parsed)

    assert isinstance(request, Request)
    assert len(parsed) == 2
    assert len(request.conversation.messages) == 12
    assert list(request.fields) == ["model", "stream", "user"]
    assert same(request, chat_completions.read(body(12, after={"stream": False, "user": "u"})))


def test_the_same_body_again_is_not_read_at_all() -> None:
    prefixes = Prefixes(landmarks=NEAR)
    first = read(body(10), prefixes)
    parsed: list[bytes] = []

    again = read(body(10), prefixes, parsed)

    assert isinstance(first, Request)
    assert isinstance(again, Request)
    assert parsed == []
    assert again.conversation.messages is first.conversation.messages


@pytest.mark.parametrize(
    "other",
    [
        body(10, {"model": "other"}),
        body(9),
        body(10)[:-2] + b', {"role": "user", "content": 1}]}',
        body(10)[:-2] + b",]}",
        body(10)[:-2] + b"] ]}",
        body(10)[:-2] + b"]",
        body(10)[:-2] + b"]} x",
        body(10)[:-2] + b'], "model": "twice"}',
        body(10)[:-2] + b'], "messages": []}',
        body(10)[:-2] + b'], "messages": [{"role": "user", "content": "b"}]}',
        body(10)[:-2] + b'], "x": {"messages": []}}',
        body(10)[:-2] + b', 1], "messages": [ 1]}',
        body(10)[:-2] + b', 1], "messages": [1]}',
        body(10)[:-2] + b', 1], "m\\u0065ssages": [1]}',
        body(10)[:-2] + b'], "\\u0000": []}',
        body(10)[:-2] + b', 1], "\\u0000": [1]}',
        body(10)[:-2] + b"],}",
        body(10)[:-2] + b'\n , \t{"role":"user","content":"x"}\r\n ] , "n": 1 }\n',
        body(10)[:-2] + b" {}]}",
        body(10)[:-2] + b', {"role": "user", "content": "\\ud800"}]}',
        body(10)[:-2] + b', NaN], "temperature": NaN}',
        body(10)[:-2] + b', "\xff"]}',
        body(10)[:-2] + b", " + b"[" * 3000 + b"]" * 3000 + b"]}",
        body(10).replace(b"message 0", b"message X"),
        body(10, space=""),
        body(10)[:-1] + b', "stream": true}',
        body(10)[:-40],
        b"",
        b"[]",
    ],
    ids=range(29),
)
def test_what_is_known_changes_nothing_of_what_is_read(other: bytes) -> None:
    prefixes = Prefixes(landmarks=NEAR)
    read(body(10), prefixes)

    known, alone = read(other, prefixes), read(other)

    assert known == alone
    if isinstance(known, Request) and isinstance(alone, Request):
        assert same(known, alone)


ENDING = b'], "stream": true, "x": [[1], {"messages": []}]}'


@pytest.mark.parametrize(
    "between",
    [
        b"",
        b" ",
        b",",
        b", ",
        b', {"role": "user", "content": "new"}',
        b' ,\n{"role":"user","content":"new"}, 1, "x" \n',
        b',{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}',
        b', {"role": "user", "content": "a ]}"}',
        b', {"role": "user", "content": "new"}], "n": [1',
        b', {"role": "user", "content": "new"}], "stream": false, "y": [1',
        b'], "messages": [1',
        b'], "tools": [{}',
        b"]",
        b"],",
        b", [1",
        b", 1]",
        b", NaN",
        b', "\xff"',
        b', "\\ud800"',
        b', {"role": "user"',
        b' {"role": "user"}',
        b", 1,",
        b", ,1",
        b', "open',
    ],
    ids=range(24),
)
@pytest.mark.parametrize("space", ["", " "])
def test_what_stands_between_a_known_beginning_and_a_known_end_is_read_as_it_is(between: bytes, space: str) -> None:
    prefixes, beginning = Prefixes(landmarks=NEAR), body(10, space=space)[:-2]
    read(beginning + ENDING, prefixes)
    parsed: list[bytes] = []

    for other in (
        beginning + between + ENDING,
        beginning + between + ENDING,
        beginning + between + b', {"role": "user"}' + ENDING,
    ):
        known, alone = read(other, prefixes, parsed), read(other)
        assert known == alone
        if isinstance(known, Request) and isinstance(alone, Request):
            assert same(known, alone)


def test_the_turns_of_a_conversation_share_their_fields_and_nobody_else_does() -> None:
    prefixes = Prefixes(landmarks=NEAR)
    first = read(body(10, after={"stream": True}), prefixes)
    assert isinstance(first, Request)
    first.fields.note = "noted"

    turn, other, foreign = [
        read(raw, prefixes)
        for raw in (
            body(12, after={"stream": True}),
            body(14, after={"stream": False}),
            body(14, {"model": "n"}, {"stream": True}),
        )
    ]

    assert isinstance(turn, Request)
    assert isinstance(other, Request)
    assert isinstance(foreign, Request)
    assert turn.fields.note == "noted"
    assert other.fields.note is None
    assert foreign.fields.note is None


@pytest.mark.parametrize(
    "first",
    [
        b'{"model": "a", "messages": [%b], "model": "b"}',
        b'{"messages": [], "model": "a", "messages": [%b]}',
        b'{"model": "a", "messages": [%b], "copy": [%b]}',
        b'{"copy": [%b], "messages": [%b], "model": "a"}',
        b' \n{ "messages"\t:\n[ %b ] }',
    ],
)
def test_a_body_with_repeated_or_copied_parts_teaches_nothing_wrong(first: bytes) -> None:
    inner = body(10).partition(b"[")[2].rpartition(b"]")[0]
    filled = first.replace(b"%b", inner)
    prefixes = Prefixes(landmarks=NEAR)
    read(filled, prefixes)

    for cut in (filled.rfind(inner) + len(inner), filled.find(inner) + len(inner)):
        for tail in (b"]}", b', {"role": "user", "content": "new"}]}', b'], "model": "c"}', b'], "messages": [1]}'):
            known, alone = read(filled[:cut] + tail, prefixes), read(filled[:cut] + tail)
            assert known == alone
            if isinstance(known, Request) and isinstance(alone, Request):
                assert same(known, alone)


PIECES = st.sampled_from(
    [
        *({"role": "user", "content": f"question {n} " + "why " * 12} for n in range(3)),
        *({"role": "assistant", "content": f"answer {n} " + "so " * 12} for n in range(3)),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "result " * 9},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        17,
    ]
)
FIELDS = st.dictionaries(
    st.sampled_from(["model", "stream", "tools", "user"]), st.sampled_from(["m", True, [], None]), max_size=3
)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.lists(PIECES, max_size=5), st.integers(0, 3), FIELDS, FIELDS, st.booleans()), min_size=1, max_size=8)
)
def test_any_series_of_turns_is_read_and_counted_as_if_each_came_alone(turns: list[Any]) -> None:
    prefixes = Prefixes(max_bytes=40_000, landmarks=NEAR)
    history: list[Any] = []
    fields: dict[str, Any] = {"model": "gpt-4o"}
    for new, dropped, before, after, fresh in turns:
        history = (history[: len(history) - dropped] if dropped else history) + new
        if fresh:
            fields = before
        raw = json.dumps({**fields, "messages": history, **{k: v for k, v in after.items() if k not in fields}}).encode()

        known, alone = read(raw, prefixes), read(raw)

        assert isinstance(known, Request)
        assert isinstance(alone, Request)
        assert same(known, alone)
        messages, plain = known.conversation.messages, tuple(alone.conversation.messages)
        ruler = tokens.ruler("gpt-4o", known.fields)
        assert ruler.cold_bytes(messages) >= ruler.cold_bytes(plain)
        assert ruler.raw(messages) == ruler.raw(messages) == ruler.raw(plain)
        assert ruler.cold_bytes(messages) == 0
        assert list(chain(messages, 7)) == list(chain(messages, 7)) == list(chain(plain, 7))
        assert known.media == any(isinstance(part, Opaque) for message in plain for part in message.parts)


def test_histories_are_bounded_in_bytes_and_the_longest_unused_goes() -> None:
    prefixes = Prefixes(max_bytes=100_000, landmarks=NEAR)
    bodies = [body(10, {"model": f"m{n}"}) for n in range(100)]

    for each in bodies:
        read(each, prefixes)
        read(bodies[0], prefixes)

    assert prefixes.find(bodies[0]) is not None
    assert prefixes.find(bodies[1]) is None
    assert prefixes.find(bodies[99]) is not None
    assert sum(prefixes.find(each) is not None for each in bodies) * math.floor(len(bodies[0])) <= 101_000


def test_histories_of_short_messages_are_bounded_too() -> None:
    prefixes = Prefixes(max_bytes=2_000_000)
    short = b",".join([b'{"role":"user","content":"%d"}' % n for n in range(2_000)])
    tracemalloc.start()

    for n in range(40):
        chat_completions.read(b'{"model":"%d","messages":[%b]}' % (n, short), prefixes=prefixes)

    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4_000_000


def told_the_same(agents: int) -> list[bytes]:
    """The first requests of agents that share their instructions."""
    instructions = {"role": "system", "content": "You are an agent. " * 600}
    tasks = [[instructions, {"role": "user", "content": f"task {n}"}] for n in range(agents)]
    return [json.dumps({"model": "m", "messages": messages}).encode() for messages in tasks]


def test_thirty_agents_that_share_their_instructions_are_told_apart() -> None:
    prefixes = Prefixes()
    bodies = told_the_same(agents=30)

    for each in bodies:
        read(each, prefixes)

    assert all(prefixes.find(each) is not None for each in bodies)


def test_of_histories_that_begin_alike_the_longest_is_found_whichever_came_first() -> None:
    prefixes = Prefixes(landmarks=NEAR)
    for count in (6, 10, 8):
        branch = json.loads(body(count))
        branch["messages"].append({"role": "user", "content": f"branch {count}"})
        read(json.dumps(branch, separators=(", ", ": ")).encode(), prefixes)
        read(body(count), prefixes)

    found = prefixes.find(body(12))

    assert found is not None
    assert len(found.messages) == 10


def test_of_too_many_histories_that_begin_alike_the_longest_unused_goes() -> None:
    prefixes = Prefixes()
    bodies = told_the_same(agents=40)

    for each in bodies:
        read(each, prefixes)
        read(bodies[0], prefixes)

    found = [number for number, each in enumerate(bodies) if prefixes.find(each) is not None]
    assert found == [0, *range(9, 40)]


def test_a_history_that_grew_replaces_the_one_that_it_grew_from() -> None:
    prefixes = Prefixes(landmarks=NEAR)
    for count in range(4, 40):
        read(body(count), prefixes)

    found = prefixes.find(body(39))

    assert isinstance(found, Known)
    assert len(found.messages) == 39
    assert prefixes.find(body(20)) is None
    assert found.messages.base is None or found.messages.base.base is None


def test_notes_are_bounded() -> None:
    messages = Messages()

    for number in range(100):
        messages.keep(number, number)

    assert len(messages.notes) <= 16
    assert messages.note(99) == 99

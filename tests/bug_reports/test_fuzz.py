"""Bodies that nobody thought of, through the running proxy: whatever was sent, what holds for every exchange holds."""

from __future__ import annotations

import json
from typing import Any

from bug_reports import upstreams
from bug_reports.lab import Lab, holds
from bug_reports.rows import Request
from builders import prose
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

QUICK = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.explicit, Phase.generate],  # a smaller example is not worth the minutes that it takes through sockets
    verbosity=Verbosity.quiet,
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
ids = st.sampled_from(["a", "b", "c", "functions.read:0", "", "é" * 40])
texts = st.sampled_from(
    [
        "",
        " ",
        "go on",
        "Never delete a file.",
        "ValueError: no such key",
        "\ud83d",
        "<|endoftext|>",
        prose(400, 1),
        prose(1_500, 2),
    ]
) | st.text(max_size=60)
parts = st.fixed_dictionaries({"type": st.just("text"), "text": texts}) | st.just(
    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 90}}
)
calls = st.builds(
    lambda i, name, arguments: {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}},
    ids,
    st.sampled_from(["read", "write", "bash"]),
    st.sampled_from(["{}", '{"path": "a.py"}', "{broken", "[]", json.dumps({"text": prose(600, 3)})]),
)
users = st.builds(lambda content: {"role": "user", "content": content}, texts | st.lists(parts, max_size=3))
answers = st.builds(lambda content: {"role": "assistant", "content": content}, texts)
instructions = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "developer"]), texts
)
reasoned = st.builds(lambda r: {"role": "assistant", "content": "so", "reasoning_content": r}, texts)


@st.composite
def rounds(draw: st.DrawFn) -> list[Any]:
    """A call with its results, or with some of them missing, doubled or mixed up."""
    made = draw(st.lists(calls, min_size=1, max_size=3))
    results = [{"role": "tool", "tool_call_id": one["id"], "content": draw(texts)} for one in made]
    flaw = draw(st.sampled_from(["none", "none", "none", "missing", "doubled", "reversed"]))
    results = {"none": results, "missing": results[1:], "doubled": results * 2, "reversed": results[::-1]}[flaw]
    return [{"role": "assistant", "content": draw(st.none() | texts), "tool_calls": made}, *results]


pieces = st.one_of(
    rounds(), rounds(), users.map(lambda m: [m]), answers.map(lambda m: [m]), instructions.map(lambda m: [m]),
    reasoned.map(lambda m: [m]), anything.map(lambda m: [m]),
)  # fmt: skip
conversations = st.lists(pieces, max_size=14).map(lambda found: [message for piece in found for message in piece])
bodies = st.fixed_dictionaries(
    {"model": st.just("gpt-4o"), "messages": conversations},
    optional={"tools": anything, "max_tokens": anything, "stream": st.just(False), "response_format": anything, "x": anything},
)


@seed(4)
@QUICK
@given(bodies, st.sampled_from([300, 1_000, 3_000]), st.sampled_from([None, 1]))
def test_a_conversation_with_any_flaw_arrives_no_worse_than_it_came(
    lab: Lab, body: dict[str, Any], window: int, indent: int | None
) -> None:
    request = Request(body=json.dumps(body, indent=indent).encode()).having(x_compaction_window=str(window))
    holds(lab.send(request, upstreams.silent))


@seed(5)
@QUICK
@given(
    st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(["", "gzip", "br", "zstd", "identity"]),
)
def test_any_bytes_arrive_as_they_came(lab: Lab, body: bytes, coding: str) -> None:
    exchanged = lab.send(Request(body=body).having(content_encoding=coding, x_compaction="force"), upstreams.silent)
    holds(exchanged)
    assert exchanged.untouched


@seed(6)
@QUICK
@given(st.data())
def test_a_body_with_any_damage_arrives_as_it_came_or_no_worse(lab: Lab, data: st.DataObject) -> None:
    """One byte of a long request is lost, doubled or changed."""
    good = json.dumps({"model": "gpt-4o", "messages": SESSION, "temperature": 0.5}).encode()
    at = data.draw(st.integers(0, len(good) - 1) | st.integers(0, 300))
    put = data.draw(st.sampled_from([b"", good[at : at + 1] * 2, b'"', b"}", b"]", b",", b"\\", b"\x00", b"\xff", b"NaN", b"1"]))
    request = Request(body=good[:at] + put + good[at + 1 :]).having(x_compaction_window="1500")
    holds(lab.send(request, upstreams.silent))


SESSION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Fix it. Never touch the migrations."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": prose(900, 5)},
    {"role": "assistant", "content": prose(500, 6)},
    {"role": "user", "content": "And now?"},
]

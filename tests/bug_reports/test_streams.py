"""Rows about answers on their way back: streams of every spelling, answers that break off, clients that leave."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import time
from dataclasses import dataclass, replace

import pytest
from bug_reports import upstreams
from bug_reports.lab import Exchanged, Lab, holds, received_to_end, until
from bug_reports.rows import built, row
from bug_reports.upstreams import PROMPT
from live.toxic import Behavior, events

INPUT = 'compaction_upstream_usage_tokens_total{model="gpt-4o",type="input"}'
ABORTS = 'compaction_stream_aborts_total{endpoint="/chat/completions"}'
LEFT = 'compaction_client_disconnects_total{endpoint="/chat/completions"}'


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def odd_pieces(data: bytes) -> list[bytes]:
    cuts = [0, 3, 50, 51, 200, 377, 500, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(cuts)]


READ: dict[str, Behavior] = {
    "H009": upstreams.spelled(lambda data: data.replace(b"data:", b": OPENROUTER PROCESSING\n\ndata:")),
    "H010": upstreams.spelled(lambda data: data.replace(b"data:", b":\n\ndata:")),
    "H012": upstreams.spelled(lambda data: data.replace(b"data: ", b"data:")),
    "H013": upstreams.spelled(cut=bytewise),
    "H018": upstreams.spelled(lambda data: b"\xef\xbb\xbf" + data),
    "H019": upstreams.tool_call_fragments,
    "H022": upstreams.spelled(lambda data: data.removesuffix(b"data: [DONE]\n\n").rstrip()),
    "H024": upstreams.spelled(cut=odd_pieces),
    "H027": upstreams.spelled(),
    "H028": upstreams.pausing,
    "H030": upstreams.pausing,
    "H036": upstreams.compressed_stream,
    "H041": upstreams.spelled(),
    "H044": upstreams.usage_beside_choices,
    "H045": upstreams.spelled(),
    "H181": upstreams.two_choices,
}
"""Streams that must pass as they are, and whose usage must be found."""


@dataclass(frozen=True)
class Spelling:
    """One stream of READ as it went through, and the prompt tokens that were found in it."""

    exchanged: Exchanged
    prompt: float


@pytest.fixture(scope="module")
def spellings(lab: Lab) -> dict[str, Spelling]:
    """Each row under a model's name of its own, so that one scrape shows them all."""
    exchanged = {}
    for row_id, behavior in READ.items():
        request = built(row(row_id))
        body = request.body.replace(b'"gpt-4o"', b'"row-%b"' % row_id.encode())
        exchanged[row_id] = lab.send(replace(request, body=body), behavior)
    until(lambda: lab.metric(INPUT.replace("gpt-4o", f"row-{row_id}")))
    return {row_id: Spelling(one, lab.metric(INPUT.replace("gpt-4o", f"row-{row_id}"))) for row_id, one in exchanged.items()}


@pytest.mark.parametrize("row_id", READ)
def test_a_stream_passes_as_it_is_and_its_usage_is_found(spellings: dict[str, Spelling], row_id: str) -> None:
    exchanged = spellings[row_id].exchanged
    holds(exchanged)
    assert exchanged.untouched
    assert exchanged.answer.header("content-type") == "text/event-stream"
    assert exchanged.answer.header("x-accel-buffering") is None
    assert spellings[row_id].prompt == PROMPT


def test_H042_a_request_is_not_made_to_ask_for_usage(lab: Lab) -> None:
    exchanged = lab.send(built(row("H042")), upstreams.no_stream_options)
    holds(exchanged)
    assert exchanged.answer.status == 200


def test_H016_a_line_of_four_megabytes_passes_and_is_not_held(lab: Lab) -> None:
    before = lab.memory()
    exchanged = lab.send(built(row("H016")), "sse_line:4MB")
    holds(exchanged)
    assert len(exchanged.answer.body) > 4 * 1024 * 1024
    assert lab.memory() - before < 16 * 1024 * 1024


def test_H021_a_slow_reader_gets_every_event_in_order(lab: Lab) -> None:
    numbered = [b"data: %d %s\n\n" % (n, b"x" * 200) for n in range(5_000)]

    async def burst(ex: object) -> None:
        await ex.stream([b"".join(numbered[at : at + 50]) for at in range(0, 5_000, 50)])  # type: ignore[attr-defined]

    lab.answers(burst)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(lab.address)
        client.sendall(built(row("H021")).raw())
        time.sleep(0.3)
        data = received_to_end(client)
    found = [int(line.split()[1]) for line in data.split(b"\n") if line.startswith(b"data: ")]
    assert found == list(range(5_000))


@pytest.mark.parametrize("row_id", ["H184", "H192"])
def test_nothing_is_kept_of_a_long_stream(lab: Lab, row_id: str) -> None:
    block = b"".join(events(2, "word " * 20)[:1]) * 200

    async def long(ex: object) -> None:
        await ex.stream([block] * 500)  # type: ignore[attr-defined]

    lab.send(built(row(row_id)), long)
    before = lab.memory()
    exchanged = lab.send(built(row(row_id)), long)
    holds(exchanged)
    assert len(exchanged.answer.body) == 500 * len(block)
    assert lab.memory() - before < 8 * 1024 * 1024


# --- answers that break off -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_id", "behavior"), [("H033", "rst_after:5 events"), ("H034", "rst_after:headers"), ("H037", "eof_mid_event")]
)
def test_a_stream_that_breaks_off_never_looks_complete(lab: Lab, row_id: str, behavior: str) -> None:
    exchanged = lab.send(built(row(row_id)), behavior)
    answer = exchanged.answer
    assert (answer.status, answer.clean) == (200, False)
    assert not answer.raw.endswith(b"0\r\n\r\n")
    *_, last = [line for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
    assert json.loads(last[6:])["error"]["type"] == "upstream_error"
    assert b'"finish_reason": "stop"' not in answer.body
    assert b"[DONE]" not in answer.body


def test_H037_an_answer_that_broke_off_is_counted_as_one(lab: Lab) -> None:
    before = lab.metric(ABORTS)
    lab.send(built(row("H037")), "rst_after:2 events")
    until(lambda: lab.metric(ABORTS) > before)


def test_H036_an_upstreams_own_status_and_type_are_kept(lab: Lab) -> None:
    exchanged = lab.send(built(row("H036")), "status:401,content-type:application/json")
    holds(exchanged)
    assert exchanged.answer.status == 401
    assert exchanged.answer.json["error"]["code"] == "y"


# --- clients that leave ---------------------------------------------------------------------------------------------


def leave(client: socket.socket, how: str) -> None:
    if how == "RST":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize(
    ("row_id", "behavior"),
    [("H001", upstreams.never), ("H003", upstreams.unending), ("H004", upstreams.never), ("H006", upstreams.never)],
)
def test_the_upstream_is_let_go_when_the_client_leaves(lab: Lab, row_id: str, behavior: Behavior, how: str) -> None:
    lab.answers(behavior)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(lab.connection())
        client.sendall(built(row(row_id)).raw())
        until(lambda: lab.upstream.requests)
        leave(client, how)
    until(lambda: lab.upstream.requests[0].aborted.is_set())


def test_clients_that_left_are_counted_as_such(lab: Lab) -> None:
    before = lab.metric(LEFT)
    lab.answers(upstreams.never)
    with lab.connection() as client:
        client.sendall(built(row("H001")).raw())
        until(lambda: lab.upstream.requests)
    until(lambda: lab.metric(LEFT) > before)


def test_H007_clients_that_reset_leave_no_connection_behind(lab: Lab) -> None:
    lab.answers(upstreams.never)
    for _ in range(40):
        with lab.connection() as client:
            client.sendall(built(row("H007")).raw())
            leave(client, "RST")
    until(lambda: not lab.upstream.sockets or all(one.aborted.is_set() for one in lab.upstream.requests))
    answers = [lab.send(built(row("H007")), upstreams.silent).answer for _ in range(10)]
    assert [answer.status for answer in answers] == [200] * 10


@pytest.mark.parametrize("row_id", ["H025"])
def test_the_head_comes_before_the_first_event(lab: Lab, row_id: str) -> None:
    lab.answers(upstreams.unending)
    with lab.connection() as client:
        client.sendall(built(row(row_id)).raw())
        assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    until(lambda: lab.upstream.requests[0].aborted.is_set())


def test_H189_hundreds_of_idle_streams_are_open_at_once(lab: Lab) -> None:
    lab.answers(upstreams.unending)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(lab.connection()) for _ in range(300)]
        for client in clients:
            client.sendall(built(row("H189")).raw())
        heads = [client.recv(64) for client in clients]
        assert {head[:15] for head in heads} == {b"HTTP/1.1 200 OK"}
        assert lab.admin("/healthz")
    until(lambda: all(one.aborted.is_set() for one in lab.upstream.requests))

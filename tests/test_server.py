"""The server's protocol and its end, on real sockets: what it refuses, how long it waits, and how it drains."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from running import read_all

from proxy import cycle, server
from proxy.arrivals import CLIENT, NOTES
from proxy.cycle import Cycle
from proxy.server import CannotListen, bind, running
from proxy.strict_http import StrictHttp

pytestmark = pytest.mark.anyio

VECTORS = json.loads((Path(__file__).parent / "live" / "smuggling_vectors.json").read_text())
BUILT = {
    "chunk ext 64k": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;"
    + b"a" * 65536
    + b"\r\nabc\r\n0\r\n\r\n",
    "header 70KB": b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n",
    "3000 headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(3000)) + b"\r\n",
    "url 70KB": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Recorder:
    """An app that answers `ok` and keeps what it was asked; paths: /slow waits for `gate`, /stream sends until told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, bytes, list[tuple[bytes, bytes]]]] = []
        self.left: list[bytes] = []
        self.lifespan: list[str] = []
        self.gate = asyncio.Event()
        self.draining: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["raw_path"])
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["method"], scope["raw_path"], body, list(scope["headers"])))
        if scope["path"] == "/slow":
            waiting = asyncio.ensure_future(self.gate.wait())
            leaving = asyncio.ensure_future(receive())
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                self.left.append(scope["raw_path"])
            waiting.cancel()
            leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _live(self, scope: Any, receive: Any, send: Any) -> None:
        self.draining = scope["state"]["draining"]
        while not self.lifespan or self.lifespan[-1] != "lifespan.shutdown":
            self.lifespan.append((await receive())["type"])
            await send({"type": self.lifespan[-1] + ".complete"})


@pytest.fixture
def app() -> Recorder:
    return Recorder()


@asynccontextmanager
async def client(app: Any, **settings: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with running(app, Recorder(), **settings) as addresses:
        reader, writer = await asyncio.open_connection(*addresses.proxy)
        try:
            yield reader, writer
        finally:
            writer.close()


async def until_quiet(reader: asyncio.StreamReader, seconds: float = 0.1) -> tuple[bytes, str]:
    got = b""
    try:
        while data := await asyncio.wait_for(reader.read(65536), seconds):
            got += data
    except TimeoutError:
        return got, "open"
    except ConnectionError:
        return got, "closed"
    return got, "closed"


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def statuses(answer: bytes) -> list[str]:
    return re.findall(r"HTTP/1\.1 (\d{3}) ", answer.decode("latin-1"))


# What is refused


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
async def test_what_proxies_read_in_two_ways_is_refused(app: Recorder, vector: dict[str, Any]) -> None:
    raw = BUILT[vector["name"]] if vector["raw"] is None else vector["raw"].encode("latin-1")

    async with client(app) as (reader, writer):
        writer.write(raw)
        answer, connection = await until_quiet(reader)

    assert (statuses(answer), connection) == (vector["status"], vector["connection"])
    assert len(app.seen) == vector["status"].count("200")


async def test_a_refusal_reads_like_the_apis_own(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
        answer, _ = await until_quiet(reader)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-compaction-error: 1" in head
    assert json.loads(body)["error"]["code"] == "bad_http"


async def test_a_bad_request_behind_a_good_one_is_not_written_into_its_answer(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + b"GARBAGE\r\n\r\n")
        assert await until_quiet(reader) == (b"", "open")
        app.gate.set()
        answer, connection = await until_quiet(reader)

    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
    assert connection == "closed"
    assert len(app.seen) == 1


async def test_a_client_with_a_bad_request_behind_a_good_one_is_seen_to_leave(app: Recorder) -> None:
    async with client(app) as (_, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nGARBAGE\r\n\r\n")
        await settled(lambda: len(app.seen) == 1)
        await asyncio.sleep(0.02)
        writer.close()
        await settled(lambda: app.left == [b"/slow"])


async def test_a_fault_in_a_body_is_refused_and_the_app_told(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nZZ\r\n")
        answer, connection = await until_quiet(reader)
        await settled(lambda: app.left == [b"/"])

    assert (statuses(answer), connection) == (["400"], "closed")
    assert app.seen == []


async def test_trailers_do_not_become_headers(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: evil\r\nX-T: 1\r\n\r\n"
        )
        await until_quiet(reader)

    assert app.seen == [("POST", b"/", b"abc", [(b"host", b"x"), (b"transfer-encoding", b"chunked")])]


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "]
)
async def test_a_header_or_trailer_without_end_is_cut_off(app: Recorder, start: bytes) -> None:
    sent = 0

    async with client(app) as (_, writer):
        writer.write(start)
        try:
            while sent < 50_000_000:
                writer.write(b"a" * 65536)
                sent += 65536
                await writer.drain()
        except ConnectionError:
            pass

    assert sent < 5_000_000


async def test_an_upgrade_is_answered_as_if_it_had_not_been_asked_for(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + GET)
        answer, connection = await until_quiet(reader)

    assert (statuses(answer), connection) == (["200"], "closed")


# Time


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost", GET + b"GET /b HTT"])
async def test_a_head_that_does_not_end_is_given_up(app: Recorder, begun: bytes) -> None:
    async with client(app, header_timeout=0.2) as (reader, writer):
        writer.write(begun)
        started = asyncio.get_running_loop().time()
        answer, connection = await until_quiet(reader, 5.0)
        took = asyncio.get_running_loop().time() - started

    assert connection == "closed"
    assert statuses(answer) == (["200"] if begun.startswith(GET) else [])
    assert 0.1 < took < 2.0


async def test_a_head_that_drips_is_given_up_at_the_same_time(app: Recorder) -> None:
    async with client(app, header_timeout=0.3) as (reader, writer):
        closed = asyncio.ensure_future(reader.read())
        dripped = 0
        while not closed.done():
            writer.write(GET[dripped : dripped + 1])
            dripped += 1
            await asyncio.sleep(0.04)
        assert dripped < 15
        await asyncio.gather(closed, return_exceptions=True)


async def test_a_connection_that_waits_for_its_next_request_is_left_open(app: Recorder) -> None:
    async with client(app, header_timeout=0.1) as (reader, writer):
        for _ in range(3):
            writer.write(GET)
            answer, connection = await until_quiet(reader, 0.3)
            assert (statuses(answer), connection) == (["200"], "open")


async def test_a_slow_answer_is_not_cut_by_the_deadline_of_the_head(app: Recorder) -> None:
    async with client(app, header_timeout=0.1) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + GET[:10])
        await asyncio.sleep(0.4)
        app.gate.set()
        answer, _ = await until_quiet(reader)

    assert statuses(answer) == ["200"]


async def test_every_waiting_request_of_a_client_that_leaves_is_told(app: Recorder) -> None:
    async with client(app) as (_, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await settled(lambda: len(app.seen) == 1)
        writer.write(GET)
        await asyncio.sleep(0.02)
        writer.transport.abort()
        await settled(lambda: app.left == [b"/slow"])


# What is held, and for how long


def cycles() -> int:
    """Requests that are held, under way or waiting."""
    gc.collect()
    return sum(isinstance(each, Cycle) for each in gc.get_objects())


@pytest.mark.parametrize(
    "request_bytes", [GET, b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nA"], ids=["GET", "POST"]
)
async def test_no_more_requests_are_taken_in_while_too_many_wait(monkeypatch: pytest.MonkeyPatch, request_bytes: bytes) -> None:
    monkeypatch.setattr(cycle, "LOOK_EVERY", 0.01)
    turns = asyncio.Semaphore(0)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert scope[CLIENT].whole(0) == ([b"A"] if scope["method"] == "POST" else None)
            await turns.acquire()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    async with client(answer) as (reader, writer):
        before = cycles()
        writer.write(request_bytes * 30)
        await asyncio.sleep(0.05)
        writer.write(request_bytes * 100)
        await asyncio.sleep(0.05)
        for _ in range(5):
            turns.release()
            await reader.readexactly(40)
        await asyncio.sleep(0.05)
        waiting = cycles() - before

        for _ in range(125):
            turns.release()
            await reader.readexactly(40)

    assert waiting == 25


async def test_requests_by_the_thousand_are_refused(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await settled(lambda: len(app.seen) == 1)
        writer.write(GET * 5_000)
        await asyncio.sleep(0.1)
        app.gate.set()
        answer, connection = await until_quiet(reader)

    assert (statuses(answer), connection) == (["200"], "closed")
    assert len(app.seen) == 1


async def test_the_requests_of_a_connection_are_answered_in_one_task_which_ends_with_it(app: Recorder) -> None:
    tasks = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            tasks.append(asyncio.current_task())
        await app(scope, receive, send)

    async with client(noting) as (reader, writer):
        for _ in range(3):
            writer.write(GET * 2)
            assert len(await reader.readexactly(80)) == 80
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await settled(lambda: len(app.seen) == 7)
        at_work = tasks[-1].done()
        writer.close()
        await settled(lambda: tasks[-1].done())

    assert (len(tasks), len(set(tasks)), at_work) == (7, 1, False)
    assert app.left == [b"/slow"]


async def test_everyone_else_has_a_turn_between_two_requests_that_came_together() -> None:
    turns, at = 0, []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        at.append(turns)
        await hasty(scope, receive, send)

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with client(noting) as (reader, writer):
        at.clear()
        ticking = asyncio.ensure_future(others())
        writer.write(GET * 20)
        for _ in range(20):
            await reader.readuntil(b"no")
        ticking.cancel()

    assert len(set(at[:20])) == 20


async def test_a_connection_that_ends_between_two_requests_leaves_no_task(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        before = asyncio.all_tasks()
        writer.write(GET)
        await reader.readexactly(40)
        resting = asyncio.all_tasks() - before
        writer.close()
        await settled(lambda: not asyncio.all_tasks() - before)

    assert len(resting) == 1


async def test_requests_behind_one_whose_app_fails_after_its_answer_are_answered(app: Recorder) -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        if scope["type"] == "http" and scope["path"] == "/fails":
            raise RuntimeError("after the answer")

    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    async with client(failing) as (reader, writer):
        writer.write(b"GET /fails HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
        await reader.readexactly(80)
        writer.write(GET)
        await reader.readexactly(40)
        gc.collect()

    assert [path for _, path, _, _ in app.seen] == [b"/fails", b"/a", b"/a"]
    assert told == ["after the answer"]


async def test_a_client_behind_an_upload_that_stops_and_goes_on_is_looked_for_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cycle, "LOOK_EVERY", 0.05)
    looks, look = 0, Cycle._look

    def counted(self: Cycle) -> None:
        nonlocal looks
        looks += 1
        look(self)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        while scope["type"] == "http" and (await receive())["type"] != "http.disconnect":
            await asyncio.sleep(0.0005)

    monkeypatch.setattr(Cycle, "_look", counted)
    async with client(slow) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        started = asyncio.get_running_loop().time()
        for _ in range(800):
            writer.write(b"x" * 262_144)
            await writer.drain()
        took = asyncio.get_running_loop().time() - started

    assert 0 < looks <= took / 0.05 + 1


async def hasty(scope: Any, receive: Any, send: Any) -> None:
    """Answers before the body is there."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("rest", [b"67890", b"6789", b"67890\r\n"])
async def test_what_comes_after_an_answer_and_is_no_request_does_not_keep_the_connection(
    rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.2)

    async with client(hasty) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
        await reader.readuntil(b"no")
        writer.write(rest)

        assert await until_quiet(reader, 5.0) == (b"", "closed")


@pytest.mark.parametrize(("status", "told"), [(204, b""), (304, b"content-length: 7\r\n")])
async def test_an_answer_without_a_body_ends_with_its_head(status: int, told: bytes) -> None:
    async def bodiless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-length", b"7"), (b"etag", b"x")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with client(bodiless) as (reader, writer):
        for _ in range(2):  # the connection serves another request after it
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")

            assert answer.split(b"\r\n", 1)[1] == told + b"etag: x\r\n\r\n"


async def test_a_request_under_way_outlasts_the_time_for_idle_connections(app: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.2)

    async with client(app) as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"ok")
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.5)
        app.gate.set()

        assert statuses(await reader.readuntil(b"ok")) == ["200"]


FIRST = b"POST /a?q HTTP/1.1\r\nHost: x\r\nAuthorization: one\r\nContent-Length: 1\r\n\r\nA"
OTHERS = {
    "another path": FIRST.replace(b"/a?q", b"/b?q"),
    "another query": FIRST.replace(b"/a?q", b"/a?r"),
    "another method": FIRST.replace(b"POST", b"PUT"),
    "another credential": FIRST.replace(b"one", b"two"),
    "one field more": FIRST.replace(b"Host", b"X-A: 1\r\nHost"),
    "one field less": FIRST.replace(b"Authorization: one\r\n", b""),
    "another order": FIRST.replace(b"Host: x\r\nAuthorization: one", b"Authorization: one\r\nHost: x"),
    "chunks": FIRST.replace(b"Content-Length: 1\r\n\r\nA", b"Transfer-Encoding: chunked\r\n\r\n1\r\nA\r\n0\r\n\r\n"),
}


@pytest.mark.parametrize("other", [FIRST, FIRST.replace(b": 1\r\n\r\nA", b": 3\r\n\r\nABC")])
@pytest.mark.parametrize("times", [1, 2])
async def test_what_was_made_of_a_head_is_kept_while_it_says_the_same(other: bytes, times: int) -> None:
    assert [kept for kept, _ in await kept_over([FIRST, *[other] * times])] == [False, *[True] * times]


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_nothing_made_of_a_head_is_kept_for_one_that_says_anything_else(other: bytes) -> None:
    first, second, third, fourth = await kept_over([FIRST, other, FIRST, other])

    assert [first[0], second[0], third[0], fourth[0]] == [False] * 4
    assert first[1] == third[1] != second[1] == fourth[1]


async def kept_over(requests: list[bytes]) -> list[tuple[bool, Any]]:
    """For each request on one connection: whether it found what the one before it left, and what ASGI was told of it."""
    told: list[tuple[bool, Any]] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            notes = scope[NOTES]
            plain = {name: scope[name] for name in ("method", "path", "raw_path", "query_string", "headers", "http_version")}
            told.append(("seen" in notes, plain))
            notes["seen"] = True
            while (await receive())["more_body"]:
                pass
        await hasty(scope, receive, send)

    async with client(noting) as (reader, writer):
        for request in requests:
            writer.write(request)
            await reader.readuntil(b"no")
    return told


async def test_a_length_of_too_many_digits_is_refused_behind_a_head_that_says_the_same(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(FIRST)
        await reader.readuntil(b"ok")
        writer.write(FIRST.replace(b"Length: 1", b"Length: " + b"0" * 100_000 + b"1"))

        assert statuses((await until_quiet(reader))[0]) == ["400"]
    assert len(app.seen) == 1


MANY_FIELDS = b"a: \r\n" * 1_000


async def test_a_head_of_too_many_fields_is_refused_before_it_ends(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + MANY_FIELDS)

        assert statuses((await until_quiet(reader, 1.0))[0]) == ["400"]


async def test_trailers_are_kept_neither_while_they_come_nor_behind_the_request(app: Recorder) -> None:
    begun = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nA\r\n0\r\n"

    async with client(app) as (reader, writer):
        writer.write(begun + MANY_FIELDS)
        await asyncio.sleep(0.05)
        assert fields_held() <= 200
        writer.write(b"b: \r\n" * 10 + b"\r\n")
        await reader.readuntil(b"ok")
        assert fields_held() == 0


def fields_held() -> int:
    """By the connections that there are."""
    gc.collect()
    return sum(len(one._fields) for one in gc.get_objects() if isinstance(one, StrictHttp) and one.parser is not None)


async def test_a_head_that_is_refused_is_refused_behind_one_that_was_not(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"ok")
        writer.write(GET.replace(b"Host: x", b"Host: x\r\nHost: y"))

        assert statuses((await until_quiet(reader))[0]) == ["400"]
    assert len(app.seen) == 1


async def test_a_body_that_nobody_read_is_not_kept_behind_its_answer() -> None:
    scopes: list[Any] = []

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await hasty(scope, receive, send)

    async with client(refusing) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 50_000)
        await reader.readuntil(b"no")

    assert sum(map(len, scopes[-1][CLIENT]._pieces)) == 0


async def test_a_body_in_chunks_of_two_bytes_is_handed_on_in_larger_pieces() -> None:
    sizes: list[int] = []

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        more = scope["type"] == "http"
        while more:
            message = await receive()
            sizes.append(len(message["body"]))
            more = message["more_body"]
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    async with client(counting) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"2\r\nxy\r\n" * 100_000 + b"0\r\n\r\n")
        await reader.readuntil(b"ok")

    assert sum(sizes) == 200_000
    assert len(sizes) < 2_000


# Two listeners, start and end


async def test_both_apps_are_started_told_of_the_end_and_stopped() -> None:
    proxy, admin = Recorder(), Recorder()

    async with running(proxy, admin) as addresses:
        assert proxy.lifespan == admin.lifespan == ["lifespan.startup"]
        assert addresses.proxy != addresses.admin
        for address, app in ((addresses.proxy, proxy), (addresses.admin, admin)):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET)
            assert statuses((await until_quiet(reader))[0]) == ["200"]
            assert len(app.seen) == 1
            writer.close()
        assert not proxy.draining.active

    assert proxy.lifespan == admin.lifespan == ["lifespan.startup", "lifespan.shutdown"]
    assert proxy.draining is admin.draining
    assert proxy.draining.active


async def test_neither_server_nor_date_nor_anything_else_is_added(app: Recorder) -> None:
    async with client(app) as (reader, writer):
        writer.write(GET)
        answer, _ = await until_quiet(reader)

    assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_an_answer_that_the_app_breaks_off_has_no_clean_end_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})

    with caplog.at_level(logging.DEBUG):
        async with client(broken) as (reader, writer):
            writer.write(GET)
            answer, connection = await until_quiet(reader)

    assert answer.endswith(b"\r\n\r\n4\r\nhalf\r\n")
    assert connection == "closed"
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


@pytest.mark.parametrize("finishes", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks_and_no_clean_end_that_is_none(finishes: bool) -> None:
    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            await asyncio.sleep(0.05)
            await send({"type": "http.response.body", "body": b"two", "more_body": True})
            await asyncio.sleep(0.05)
            if finishes:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with client(streaming) as (reader, writer):
        raw = writer.get_extra_info("socket")
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        got, broken = b"", False
        try:
            while data := await reader.read(65536):
                got += data
        except ConnectionError:
            broken = True
        assert raw is not None

    assert got == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nonetwo"
    assert broken is not finishes


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_answer_whose_head_cannot_be_sent_is_a_500_and_ends_the_connection(version: bytes) -> None:
    async def odd(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nb: c")]})

    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    async with client(odd) as (reader, writer):
        writer.write(b"GET / HTTP/%b\r\nHost: x\r\n\r\n" % version)
        answer, connection = await until_quiet(reader, 5.0)
        gc.collect()

    assert (statuses(answer), connection) == (["500"], "closed")
    assert told == ["invalid response header"]


def test_a_port_in_use_and_an_address_that_is_not_ours_are_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=rf"^cannot listen on 127.0.0.1:{port}: address already in use$"):
            bind("127.0.0.1", port)
    with pytest.raises(CannotListen, match=r"cannot listen on no-such-host.invalid:0"):
        bind("no-such-host.invalid", 0)
    with pytest.raises(CannotListen, match=r"cannot listen on 127.0.0.1:70000"):
        bind("127.0.0.1", 70000)


PROGRAM = """
import asyncio, json, sys
from proxy.server import serve

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        if sys.argv[1] == "refuse":
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no"})
            return
        while True:
            kind = (await receive())["type"]
            await send({"type": kind + ".complete"})
            if kind == "lifespan.shutdown":
                return
    if scope["path"] == "/ready":
        body = b"draining" if scope["state"]["draining"].active else b"ready"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for tick in range(int(scope["path"][1:])):
        await send({"type": "http.response.body", "body": b"tick", "more_body": True})
        await asyncio.sleep(0.05)
    await send({"type": "http.response.body", "body": b"end"})

def tell(addresses):
    print(json.dumps(addresses), flush=True)

sys.exit(serve(app, app, host="127.0.0.1", port=int(sys.argv[3]), admin_host="127.0.0.1", admin_port=0,
               drain_timeout=float(sys.argv[2]), on_started=tell))
"""


class Served:
    """A server in a process of its own."""

    def __init__(self, drain: float = 5.0, mode: str = "start", port: int = 0, **options: Any) -> None:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), mode, str(drain), str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        assert self.process.stdout is not None
        proxy, admin = json.loads(self.process.stdout.readline())
        return tuple(proxy), tuple(admin)

    def ask(self, address: tuple[str, int], path: str) -> socket.socket:
        connection = socket.create_connection(address)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return connection

    def says(self, address: tuple[str, int], path: str) -> bytes:
        with self.ask(address, path) as connection:
            return connection.recv(1000)

    def refuses(self, address: tuple[str, int]) -> bool:
        """Whether a client gets no answer: a socket that waited in the backlog may see its end only."""
        try:
            return self.says(address, "/1") == b""
        except ConnectionError:
            return True

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate()
        return self.process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_streams_finish_and_says_not_ready_meanwhile(number: int) -> None:
    served = Served()
    proxy, admin = served.addresses()
    stream = served.ask(proxy, "/20")
    assert stream.recv(10)

    served.process.send_signal(number)
    while b"draining" not in served.says(admin, "/ready"):
        pass
    assert served.refuses(proxy)

    assert read_all(stream).endswith(b"3\r\nend\r\n0\r\n\r\n")
    assert served.end() == (0, "")


def test_streams_that_outlast_the_drain_are_cut_without_a_clean_end() -> None:
    served = Served(drain=0.2)
    proxy, _ = served.addresses()
    stream = served.ask(proxy, "/2000")
    assert stream.recv(10)

    served.process.terminate()

    assert not read_all(stream).endswith(b"0\r\n\r\n")
    assert served.end() == (0, "")


def test_a_second_signal_ends_at_once() -> None:
    served = Served(drain=60.0)
    proxy, admin = served.addresses()
    stream = served.ask(proxy, "/2000")
    assert stream.recv(10)

    served.process.terminate()
    while b"draining" not in served.says(admin, "/ready"):
        pass
    served.process.terminate()

    assert not read_all(stream).endswith(b"0\r\n\r\n")
    assert served.end() == (0, "")


def test_idle_connections_do_not_hold_up_the_end() -> None:
    served = Served(drain=60.0)
    proxy, _ = served.addresses()
    idle = served.ask(proxy, "/0")
    assert idle.recv(1000)
    empty = socket.create_connection(proxy)

    served.process.terminate()

    assert served.end() == (0, "")
    idle.close()
    empty.close()


def test_a_port_in_use_ends_with_one_line_and_no_traceback() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, errors = Served(port=port).end()

    assert (code, errors) == (1, f"compaction-proxy: cannot listen on 127.0.0.1:{port}: address already in use\n")


def test_an_app_that_refuses_to_start_ends_the_process() -> None:
    code, errors = Served(mode="refuse").end()

    assert code == 1
    assert "Traceback" not in errors


def test_a_closed_stdout_hurts_nobody() -> None:
    read, write = os.pipe()
    os.close(read)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), "start", "5", str(port)]
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)

    answer = b""
    while not answer:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer = read_all(connection)
        except ConnectionError:
            continue
    process.terminate()
    _, errors = process.communicate()

    assert answer.endswith(b"0\r\n\r\n")
    assert (process.returncode, errors) == (0, "")


def test_large_blocks_are_kept_by_the_allocator_where_it_can() -> None:
    server.keep_large_blocks()

"""What sockets do to us on both sides, one test or more a row of the fault matrix; the rows are named in the headings."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from live.conftest import BODY, Product, Start, leave, request, settled
from live.toxic import VOCABULARY, Exchange, Toxic, completion, events, never_accepting

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"


def raw(*pieces: bytes, close: bool = False) -> Callable[[Exchange], Awaitable[None]]:
    async def behave(ex: Exchange) -> None:
        await ex.send(*pieces)
        if close:
            ex.close()

    return behave


def is_ours(answer: httpx.Response, status: int, code: str) -> bool:
    error = answer.json()["error"]
    shape = set(error) == {"message", "type", "param", "code"}
    return shape and (answer.status_code, error["code"], answer.headers["x-compaction-error"]) == (status, code, "1")


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# F1: the upstream cannot be reached


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
async def test_an_upstream_that_is_not_there_is_a_502_in_the_apis_words(start: Start, transport: str, url: str) -> None:
    async with start(url, transport=transport) as product:
        answer = await product.post()

    assert is_ours(answer, 502, "upstream_unreachable")
    assert "127.0.0.1" not in answer.text


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_certificate_that_nobody_signed_is_a_502(start: Start, transport: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)

    async with start(f"https://localhost:{server.sockets[0].getsockname()[1]}", transport=transport) as product:
        answer = await product.post()
    server.close()

    assert is_ours(answer, 502, "upstream_unreachable")


async def test_a_connection_that_is_never_accepted_is_a_504(start: Start) -> None:
    async with contextlib.AsyncExitStack() as opened:
        url = opened.enter_context(never_accepting())
        product = await opened.enter_async_context(start(url, connect_timeout=0.2))
        answer = await product.post()

    assert is_ours(answer, 504, "upstream_timeout")


# F2, F8: the upstream is silent


async def test_a_silent_upstream_is_a_504_only_where_a_limit_is_set(toxic: Toxic, start: Start) -> None:
    toxic.behavior = "headers_then_silence"
    async with start(toxic.url, read_timeout=0.2) as product:
        toxic.script = ["slow_headers"]
        assert is_ours(await product.post(), 504, "upstream_timeout")


def test_ten_minutes_of_thought_are_waited_for(start: Start) -> None:
    """On a loop whose clock can be set forward: whatever timer there were would have rung."""
    ahead = 0.0
    loop = asyncio.SelectorEventLoop()
    real = loop.time
    loop.time = lambda: real() + ahead  # type: ignore[method-assign]

    async def think() -> None:
        nonlocal ahead
        done = asyncio.Event()

        async def thinking(ex: Exchange) -> None:
            await done.wait()
            await ex.answer(completion())

        async with Toxic(thinking) as toxic, start(toxic.url) as product:
            reader, writer = await product.raw(request())
            await settled(lambda: bool(toxic.requests))
            for _ in range(10):
                ahead += 60.0
                await asyncio.sleep(0.01)
            done.set()
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
        assert head.startswith(b"HTTP/1.1 200 ")

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(think())


# F3, F4: the upstream breaks off


@pytest.mark.parametrize("behavior", ["rst_after:headers", "rst_after:5 events", "eof_mid_event", "half_event_then_silence"])
async def test_a_stream_that_breaks_off_says_so_and_has_no_clean_end(toxic: Toxic, product: Product, behavior: str) -> None:
    toxic.behavior = behavior
    got, broken = b"", False

    async with product.client() as client:
        try:
            async with client.stream("POST", "/v1/chat/completions", content=BODY) as answer:
                async for piece in answer.aiter_raw():
                    got += piece
                    if behavior == "half_event_then_silence":
                        for connection in list(toxic.sockets):
                            connection.transport.close()
        except httpx.RemoteProtocolError:
            broken = True

    assert broken
    whole, _, last = got.rpartition(b"data: ")
    assert json.loads(last)["error"]["code"] == "upstream_unreachable"
    assert got.endswith(b"\n\n")
    assert b"".join(events(9)).startswith(whole.rstrip(b"\n").removesuffix(b"data: {").rstrip(b"\n"))


async def test_no_cut_of_an_answer_looks_complete(toxic: Toxic, start: Start) -> None:
    stream = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    stream += b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events(4)) + b"0\r\n\r\n"
    plain = OK + b"content-length: %d\r\n\r\n" % len(completion()) + completion()
    complete: list[int] = []

    async with start(toxic.url) as product, product.client() as client:
        for whole in (stream, plain):
            for cut in [*range(0, len(whole), 3), len(whole)]:
                toxic.behavior = raw(whole[:cut], close=True)
                try:
                    answer = await client.post("/v1/chat/completions", content=BODY)
                except httpx.RemoteProtocolError:
                    continue
                if answer.status_code == 200:
                    complete.append(len(whole) - cut)
                else:
                    assert is_ours(answer, 502, "upstream_unreachable")

    assert complete == [0, 0]


async def test_a_plain_answer_that_falls_short_is_broken_off(toxic: Toxic, product: Product) -> None:
    toxic.behavior = "short_content_length"

    with pytest.raises(httpx.RemoteProtocolError):
        await product.post()


# F5: the upstream's answer is malformed


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
        OK + b"Content-Length: x\r\n\r\nok",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\nok\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nok\r\n0\r\n\r\n",
        OK + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        OK + b"X: " + b"a" * 5_000_000,
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10_000,
        b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\nok",
    ],
    ids=range(15),
)
async def test_a_malformed_answer_is_a_502_or_broken_off(toxic: Toxic, start: Start, answer: bytes) -> None:
    toxic.behavior = raw(answer)
    before = resident()

    async with start(toxic.url) as product:
        try:
            assert is_ours(await product.post(), 502, "upstream_unreachable")
        except httpx.RemoteProtocolError:
            assert b"chunked" in answer
        toxic.behavior = "ok"
        assert (await product.post()).content == completion()

    assert resident() - before < 16 * 1024 * 1024


# F6: the upstream sends more than it announced


@pytest.mark.parametrize("behavior", ["extra_bytes_after_response", "extra_bytes_after_204"])
async def test_extra_bytes_of_an_answer_reach_no_other_client(toxic: Toxic, product: Product, behavior: str) -> None:
    async with product.client() as client:
        for _ in range(100):
            toxic.script = [behavior, "ok"]
            await client.post("/v1/chat/completions", content=BODY)
            assert (await client.post("/v1/chat/completions", content=BODY)).content == completion()


# F7: slow on either side


async def test_a_drip_is_passed_on_drop_by_drop(toxic: Toxic, product: Product) -> None:
    step = asyncio.Event()

    async def drip(ex: Exchange) -> None:
        await ex.start_stream()
        for byte in b"data: 1\n\n":
            await ex.chunk(bytes([byte]))
            await step.wait()
            step.clear()
        await ex.end_stream()

    toxic.behavior = drip
    pieces = []
    async with product.client() as client, client.stream("POST", "/v1/chat/completions", content=BODY) as answer:
        async for piece in answer.aiter_raw():
            pieces.append(piece)
            step.set()

    assert pieces == [b"d", b"a", b"t", b"a", b":", b" ", b"1", b"\n", b"\n"]


async def test_a_burst_to_a_client_that_hardly_reads_costs_no_memory(toxic: Toxic, product: Product) -> None:
    sent = 0

    async def burst(ex: Exchange) -> None:
        nonlocal sent
        await ex.start_stream()
        for _ in range(1600):
            await ex.chunk(b"x" * 65536)
            sent += 65536
        await ex.end_stream()

    toxic.behavior = burst
    before = resident()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(product.address)
    connection.sendall(request())
    await settled(lambda: sent > 0)
    earlier = -1
    while earlier != sent:
        earlier = sent
        await asyncio.sleep(0.2)

    assert sent < 40_000_000
    assert resident() - before < 24_000_000  # the upstream's own buffers are in this process as well
    connection.close()
    await asyncio.wait_for(toxic.requests[0].aborted.wait(), 1.0)


# F9: the upstream closes idle connections just as they are used again


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003])
async def test_a_connection_that_closes_under_our_hands_costs_no_request(toxic: Toxic, start: Start, delay: float) -> None:
    async def closing(ex: Exchange) -> None:
        await ex.answer(completion())
        asyncio.get_running_loop().call_later(delay, ex.close)

    toxic.behavior = closing
    async with start(toxic.url) as product, product.client() as client:
        for turn in range(200):
            assert (await client.post("/v1/chat/completions", content=BODY)).content == completion()
            await asyncio.sleep(delay * (turn % 4) / 3)

    assert len(toxic.requests) >= 200


# F10: clients that are slow on purpose


async def test_half_open_clients_are_closed_in_time_and_hold_up_nobody(toxic: Toxic, start: Start) -> None:
    toxic.behavior = "ok"
    async with start(toxic.url, server={"header_timeout": 1.0}) as product:
        halves = [await product.raw(b"POST /v1/chat/completions HTTP/1.1\r\nHost") for _ in range(300)]
        started = time.perf_counter()
        async with product.client() as client:
            for _ in range(20):
                assert (await client.post("/v1/chat/completions", content=BODY)).status_code == 200
        assert [await reader.read() for reader, _ in halves] == [b""] * 300
        assert time.perf_counter() - started < 2.0
        for _, writer in halves:
            writer.close()


async def test_a_body_that_does_not_come_is_given_up(toxic: Toxic, start: Start) -> None:
    async with start(toxic.url, server={"body_timeout": 0.2}) as product:
        reader, writer = await product.raw(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert toxic.requests == []


# F11: the client leaves, in every phase, with FIN and RST


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("behavior", ["slow_headers", "headers_then_silence", "half_event_then_silence", "chunks:100000@0.001"])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings"])
async def test_the_upstream_is_let_go_when_the_client_leaves(
    toxic: Toxic, product: Product, how: str, behavior: str, path: bytes
) -> None:
    toxic.behavior = behavior
    reader, writer = await product.raw(request(path))
    await settled(lambda: bool(toxic.requests))
    if behavior != "slow_headers":
        await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.02)

    leave(writer, how)
    left = time.perf_counter()
    await toxic.requests[0].aborted.wait()

    assert time.perf_counter() - left < 1.0
    await settled(lambda: not toxic.sockets)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("part", [b"POST /v1/chat", request()[:-5], request(b"/v1/files")[:-5], b""])
async def test_a_client_that_leaves_before_its_request_is_whole_leaves_nothing_upstream(
    toxic: Toxic, product: Product, how: str, part: bytes
) -> None:
    _, writer = await product.raw(part)
    await asyncio.sleep(0.05)

    leave(writer, how)
    await asyncio.sleep(0.05)

    await settled(lambda: not toxic.sockets)
    assert all(received.body == b"" for received in toxic.requests)


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_client_that_leaves_while_we_connect_is_forgotten(start: Start, how: str) -> None:
    async with contextlib.AsyncExitStack() as opened:
        url = opened.enter_context(never_accepting())
        product = await opened.enter_async_context(start(url, connect_timeout=30.0))
        before = open_files()
        _, writer = await product.raw(request())
        await settled(lambda: open_files() >= before + 3)  # the client's socket, our end of it, the one being connected

        leave(writer, how)

        await settled(lambda: open_files() <= before)


async def test_hundreds_of_clients_that_leave_at_random_leave_nothing_behind(toxic: Toxic, product: Product) -> None:
    chance = random.Random(11)
    toxic.behavior = "chunks:40@0.002"

    async def visit(stay: float, how: str) -> None:
        reader, writer = await product.raw(request())
        reading = asyncio.ensure_future(reader.read())
        await asyncio.sleep(stay)
        leave(writer, how)
        await asyncio.gather(reading, return_exceptions=True)

    await visit(0.01, "FIN")
    await settled(lambda: not toxic.sockets)
    before = open_files()
    for _ in range(8):
        await asyncio.gather(*(visit(chance.uniform(0, 0.12), chance.choice(("FIN", "RST"))) for _ in range(50)))
    toxic.behavior = "ok"
    assert (await product.post()).content == completion()

    await settled(lambda: open_files() <= before + 2 * len(toxic.sockets))
    assert len(toxic.sockets) <= 40  # idle ones, clean


# F12: malformed requests


VECTORS = json.loads((Path(__file__).parent / "smuggling_vectors.json").read_text())


async def test_each_accepted_request_is_exactly_one_upstream_and_nothing_ambiguous_gets_there(toxic: Toxic, start: Start) -> None:
    async with start(toxic.url) as product:
        for vector in VECTORS:
            if vector["raw"] is None:
                continue
            toxic.requests.clear()
            reader, writer = await product.raw(vector["raw"].encode("latin-1"))
            answer = b""
            try:
                while data := await asyncio.wait_for(reader.read(65536), 0.05):
                    answer += data
            except (TimeoutError, ConnectionError):
                pass
            writer.close()
            accepted = vector["status"].count("200")
            assert len(toxic.requests) == accepted, vector["name"]
            assert len(re.findall(rb"HTTP/1\.1 200 ", answer)) == accepted, vector["name"]
            for received in toxic.requests:
                lengths = [value for name, value in received.headers if name == b"content-length"]
                codings = [value for name, value in received.headers if name == b"transfer-encoding"]
                assert len(lengths) + len(codings) <= 1, vector["name"]
                assert [name for name, _ in received.headers].count(b"host") == 1, vector["name"]


WELL_FORMED = [
    request(),
    request(b"/v1/embeddings", b'{"input": "x"}'),
    b"POST /v1/files HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n",
]
DIRT = [
    b"\r",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b":",
    b"0",
    b"\x00",
    b"\x0b",
    b"+",
    b"-",
    b",",
    b";",
    b"chunked",
    b"Content-Length: 3\r\n",
    b"\xe2\x84\xaa",
]


def mutated(chance: random.Random) -> bytes:
    raw_request = bytearray(chance.choice(WELL_FORMED))
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw_request))
        match chance.randrange(3):
            case 0:
                raw_request[at:at] = chance.choice(DIRT)
            case 1:
                del raw_request[at : at + chance.randint(1, 3)]
            case _:
                raw_request[at : at + 1] = chance.choice(DIRT)
    return bytes(raw_request)


async def test_no_mutation_of_a_request_makes_more_or_fewer_of_it_upstream(toxic: Toxic, start: Start) -> None:
    chance = random.Random(3)
    async with start(toxic.url) as product:
        for _ in range(250):
            toxic.requests.clear()
            sent = mutated(chance)
            reader, writer = await product.raw(sent)
            answer = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                while data := await asyncio.wait_for(reader.read(65536), 0.03):
                    answer += data
            writer.close()
            answered = len(re.findall(rb"HTTP/1\.1 200 ", answer))
            refused = len(re.findall(rb"HTTP/1\.1 [45]\d\d ", answer))
            assert len([one for one in toxic.requests if not one.aborted.is_set()]) in (answered, answered + 1), sent
            assert answered + refused <= 2, sent
            for received in toxic.requests:
                assert len([1 for name, _ in received.headers if name in (b"content-length", b"transfer-encoding")]) <= 1, sent
                assert b"\n" not in received.target, sent

        toxic.requests.clear()
        assert (await product.post()).content == BODY


# What streams look like when nothing is wrong


STREAMS = [name for name in VOCABULARY if name.startswith("sse_") and name != "sse_line"]


@pytest.mark.parametrize("behavior", [*STREAMS, "sse_line:4MB", "gzip_sse", "eof_without_done", "n2_stream", "chunks:2000@0"])
async def test_the_bytes_of_a_stream_are_never_altered(toxic: Toxic, product: Product, behavior: str) -> None:
    sent = b""

    async def spying(ex: Exchange) -> None:
        nonlocal sent
        write = ex.socket.transport.write
        argument = behavior.partition(":")[2]

        class Spy:
            def __getattr__(self, name: str) -> Any:
                return getattr(transport, name)

            def write(self, data: bytes) -> None:
                nonlocal sent
                sent += data
                write(data)

        transport = ex.socket.transport
        ex.socket.transport = Spy()  # type: ignore[assignment]
        ex.argument = argument
        try:
            await VOCABULARY[behavior.partition(":")[0]](ex)
        finally:
            ex.socket.transport = transport

    toxic.behavior = spying
    async with product.client() as client, client.stream("POST", "/v1/chat/completions", content=BODY) as answer:
        got = b"".join([piece async for piece in answer.aiter_raw()])

    head, _, rest = sent.partition(b"\r\n\r\n")
    assert got == (dechunked(rest) if b"chunked" in head else rest)
    assert answer.headers["content-type"].startswith("text/event-stream")


def dechunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize("behavior", ["gzip_response", "br_response", "chunked_response", "whitespace_json", "logprobs_nan"])
async def test_plain_answers_pass_with_their_encoding(toxic: Toxic, product: Product, behavior: str) -> None:
    toxic.behavior = behavior

    async with product.client() as client, client.stream("POST", "/v1/chat/completions", content=BODY) as answer:
        raw_body = b"".join([piece async for piece in answer.aiter_raw()])

    assert answer.status_code == 200
    assert answer.headers.get("content-encoding") == {"gzip_response": "gzip", "br_response": "br"}.get(behavior)
    assert len(raw_body) > 40


async def test_small_requests_of_every_endpoint_share_a_connection(toxic: Toxic, start: Start) -> None:
    async with start(toxic.url) as product, product.client() as client:
        for path in ("/v1/embeddings", "/v1/chat/completions", "/v1/moderations") * 5:
            assert (await client.post(path, content=BODY)).content == BODY
            assert (await client.get("/v1/models")).status_code == 200

    assert toxic.connections == 1


async def test_uploads_stream_through_both_ways_at_once(toxic: Toxic, product: Product) -> None:
    arrived = asyncio.Event()

    async def behave(ex: Exchange) -> None:
        await ex.socket.take_until(b"first")
        arrived.set()
        await ex.socket.take_until(b"second")
        await ex.answer(b"both")

    toxic.behavior, toxic.reads_bodies = behave, False

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await arrived.wait()
        yield b"second"

    async with product.client() as client:
        answer = await client.post("/v1/files", content=pieces())

    assert answer.content == b"both"

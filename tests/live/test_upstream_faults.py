"""What the upstream's sockets do to us, one test or more a row of the fault matrix; the rows are named in the headings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import trustme
from live.conftest import BODY, Product, Start, is_ours, request, resident, settled, volume
from live.toxic import Exchange, Toxic, completion, events, never_accepting
from running import running_proxy

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\n"


def raw(*pieces: bytes, end: str = "") -> Callable[[Exchange], Awaitable[None]]:
    async def behave(ex: Exchange) -> None:
        await ex.send(*pieces)
        if end == "FIN":
            ex.close()
        elif end == "RST":
            await asyncio.sleep(0.001)  # a reset throws away what was not read
            ex.reset()

    return behave


# F1: the upstream cannot be reached


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
async def test_an_upstream_that_is_not_there_is_a_502_in_the_apis_words(start: Start, transport: str, url: str) -> None:
    async with start(url, transport=transport) as product:
        answer = await product.post()

    assert is_ours(answer, 502, "upstream_unreachable")
    assert "127.0.0.1" not in answer.text


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
@pytest.mark.parametrize("fault", ["nobody signed it", "expired", "of another name"])
async def test_a_certificate_that_does_not_hold_is_a_502(start: Start, tmp_path: Path, transport: str, fault: str) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ended = datetime(2020, 1, 1, tzinfo=UTC) if fault == "expired" else None
    name = "elsewhere.test" if fault == "of another name" else "localhost"
    authority.issue_cert(name, not_before=datetime(2019, 1, 1, tzinfo=UTC), not_after=ended).configure_cert(context)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    trusted = {} if fault == "nobody signed it" else {"ca_file": str(tmp_path / "ca.pem")}

    async with start(f"https://localhost:{server.sockets[0].getsockname()[1]}", transport=transport, **trusted) as product:
        answer = await product.post()
    server.close()

    assert is_ours(answer, 502, "upstream_unreachable")


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_connection_that_is_never_accepted_is_a_504(start: Start, transport: str) -> None:
    async with contextlib.AsyncExitStack() as opened:
        url = opened.enter_context(never_accepting())
        product = await opened.enter_async_context(start(url, transport=transport, connect_timeout=0.2))
        answer = await product.post()

    assert is_ours(answer, 504, "upstream_timeout")


# F2, F8: the upstream is silent


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_silent_upstream_is_a_504_only_where_a_limit_is_set(toxic: Toxic, start: Start, transport: str) -> None:
    toxic.behavior = "headers_then_silence"
    async with start(toxic.url, transport=transport, read_timeout=0.2) as product:
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


@pytest.mark.parametrize("end", ["FIN", "RST"])
async def test_no_cut_of_an_answer_looks_complete(toxic: Toxic, product: Product, end: str) -> None:
    stream = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    stream += b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events(4)) + b"0\r\n\r\n"
    plain = OK + b"content-length: %d\r\n\r\n" % len(completion()) + completion()
    complete: list[int] = []

    async with product.client() as client:
        for whole in (stream, plain):
            for cut in [*range(0, len(whole), volume(7, 1)), len(whole)]:
                toxic.behavior = raw(whole[:cut], end=end)
                try:
                    answer = await client.post("/v1/chat/completions", content=BODY)
                except httpx.RemoteProtocolError:
                    continue
                if answer.status_code == 200:
                    complete.append(len(whole) - cut)
                else:
                    assert is_ours(answer, 502, "upstream_unreachable")

    # a reset may throw away what was not read yet, and so cut the whole answer as well
    assert complete == [0, 0] or (end == "RST" and set(complete) <= {0})


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


EXTRA = ["extra_bytes_after_response", "extra_bytes_after_204", "extra_bytes_after_304", "body_after_head"]


@pytest.mark.parametrize("behavior", EXTRA)
async def test_extra_bytes_of_an_answer_reach_no_other_client(toxic: Toxic, product: Product, behavior: str) -> None:
    async with product.client() as client:
        for _ in range(volume(40, 1_000)):
            toxic.script = [behavior, "ok"]
            await client.request("HEAD" if behavior == "body_after_head" else "POST", "/v1/chat/completions", content=BODY)
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


async def test_a_burst_to_a_client_that_does_not_read_is_held_up_not_held(toxic: Toxic, product: Product) -> None:
    sent = 0

    async def burst(ex: Exchange) -> None:
        nonlocal sent
        sent = await flood(ex)

    toxic.behavior = burst
    connection = unread(product.address)
    await settled(lambda: bool(toxic.requests))
    await asyncio.sleep(0.5)

    assert sent == 0  # it did not get to its end
    connection.close()
    await asyncio.wait_for(toxic.requests[0].aborted.wait(), 1.0)


async def test_a_hundred_megabytes_for_a_client_that_does_not_read_cost_no_memory(toxic: Toxic) -> None:
    toxic.behavior = flood
    with running_proxy("--upstream", toxic.url, environment={"COMPACTION_COMPACTION__DISCOVERY": "false"}) as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        address, pid = (host, int(port)), str(proxy.process.pid)
        first = unread(address)
        await settled(lambda: bool(toxic.requests))
        await asyncio.sleep(0.2)
        first.close()  # what one stream needs at the first time is there from now on
        await settled(lambda: not toxic.sockets)
        before = resident(pid)
        connections = [unread(address) for _ in range(4)]
        await settled(lambda: len(toxic.requests) == 5)
        await asyncio.sleep(0.5)
        grown = resident(pid) - before
        for connection in connections:
            connection.close()

    assert grown < 4 * 2 * 1024 * 1024


async def flood(ex: Exchange) -> int:
    await ex.start_stream()
    for _ in range(1600):
        await ex.chunk(b"x" * 65536)
    await ex.end_stream()
    return 1600 * 65536


def unread(address: tuple[str, int]) -> socket.socket:
    """A client that asks and does not read, with little room of its own."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(address)
    connection.sendall(request())
    return connection


# F9: the upstream closes idle connections just as they are used again


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003])
async def test_a_connection_that_closes_under_our_hands_costs_no_request(toxic: Toxic, start: Start, delay: float) -> None:
    async def closing(ex: Exchange) -> None:
        await ex.answer(completion())
        asyncio.get_running_loop().call_later(delay, ex.close)

    toxic.behavior = closing
    async with start(toxic.url) as product, product.client() as client:
        for turn in range(volume(150, 1_700)):
            assert (await client.post("/v1/chat/completions", content=BODY)).content == completion()
            await asyncio.sleep(delay * (turn % 4) / 3)

    assert len(toxic.requests) >= volume(150, 1_700)

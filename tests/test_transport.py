"""One suite for both ways to the upstream, our sockets and stock httpx, on real sockets; then what only ours promises."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import respx
import trustme
from live.toxic import Exchange, Toxic, events, never_accepting

from proxy.errors import UpstreamError
from proxy.transport import Origin, Patience, Sockets, SocketTransport
from proxy.upstream import Answer, Upstream

pytestmark = pytest.mark.anyio

POST = [(b"content-type", b"application/json"), (b"content-length", b"2")]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def toxic() -> AsyncIterator[Toxic]:
    async with Toxic() as upstream:
        yield upstream


@pytest.fixture(params=["sockets", "httpx"])
async def upstream(request: pytest.FixtureRequest, toxic: Toxic) -> AsyncIterator[Upstream]:
    made = Upstream(toxic.url, transport=request.param)
    yield made
    await made.aclose()


@pytest.fixture
async def ours(toxic: Toxic) -> AsyncIterator[Upstream]:
    made = Upstream(toxic.url)
    yield made
    await made.aclose()


async def read(answer: Answer) -> bytes:
    body = b""
    try:
        while piece := await answer.next():
            body += piece
    finally:
        answer.close()
    return body


async def post(upstream: Upstream, body: Any = (b"{}",)) -> tuple[int, bytes]:
    answer = await upstream.forward(b"POST", b"/v1/chat/completions", POST, body)
    return answer.status, await read(answer)


def raw(*pieces: bytes, close: bool = False, pause: float = 0.0) -> Callable[[Exchange], Awaitable[None]]:
    async def behave(ex: Exchange) -> None:
        for piece in pieces:
            await ex.send(piece)
            await asyncio.sleep(pause)
        if close:
            ex.close()

    return behave


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


OK = b"HTTP/1.1 200 OK\r\n"


# Framing of answers, both transports


@pytest.mark.parametrize(
    ("answer", "closes", "status", "body"),
    [
        ([OK + b"Content-Length: 5\r\n\r\nhello"], False, 200, b"hello"),
        ([OK + b"Content-Length: 5\r\n\r\n", b"he", b"llo"], False, 200, b"hello"),
        ([OK + b"Content-Length: 0\r\n\r\n"], False, 200, b""),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"], False, 200, b"hello"),
        ([OK + b"Transfer-Encoding: Chunked\r\n\r\n", b"2;ext=1\r\nhe", b"\r\n3\r\nllo\r\n", b"0\r\n\r\n"], False, 200, b"hello"),
        (
            [OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n"],
            False,
            200,
            b"hello",
        ),
        ([OK + b"\r\nhel", b"lo"], True, 200, b"hello"),
        ([b"HTTP/1.0 200 OK\r\n\r\nhello"], True, 200, b"hello"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], False, 204, b""),
        ([b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 5\r\n\r\n"], False, 304, b""),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3, OK + b"Content-Length: 2\r\n\r\nok"], False, 200, b"ok"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok"], False, 200, b"ok"),
        ([b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\nno"], False, 429, b"no"),
        ([b"HTTP/1.1 599 Odd\r\nContent-Length: 2\r\n\r\nno"], False, 599, b"no"),
    ],
)
async def test_every_framing_is_read(
    toxic: Toxic, upstream: Upstream, answer: list[bytes], closes: bool, status: int, body: bytes
) -> None:
    toxic.behavior = raw(*answer, close=closes, pause=0.01)

    assert await post(upstream) == (status, body)


async def test_an_answer_to_head_has_its_length_but_no_body(toxic: Toxic, upstream: Upstream) -> None:
    toxic.behavior = raw(OK + b"Content-Length: 500\r\n\r\n")

    for _ in range(3):
        answer = await upstream.forward(b"HEAD", b"/v1/models", [])
        assert (b"content-length", b"500") in answer.headers
        assert await read(answer) == b""


async def test_headers_keep_order_and_duplicates_and_trailers_are_not_among_them(toxic: Toxic, upstream: Upstream) -> None:
    toxic.behavior = raw(
        OK + b"Set-Cookie: a=1\r\nX-One: 1\r\nSet-Cookie: b=2\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5\r\n"
        b"Connection: X-Hop\r\nX-Hop: 1\r\nEmpty:\r\n\r\n2\r\nok\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )

    answer = await upstream.forward(b"GET", b"/", [])
    await read(answer)

    assert answer.headers == [(b"set-cookie", b"a=1"), (b"x-one", b"1"), (b"set-cookie", b"b=2"), (b"empty", b"")]


async def test_neither_trailers_nor_interim_answers_tell_anything_of_the_next_answer(toxic: Toxic, upstream: Upstream) -> None:
    toxic.behavior = raw(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n",
        OK + b"X-One: 1\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n2\r\nok\r\n0\r\nX-Trailer: 1\r\n\r\n",
    )

    for _ in range(3):
        answer = await upstream.forward(b"GET", b"/", [])
        assert (answer.headers, await read(answer)) == ([(b"x-one", b"1")], b"ok")


async def test_a_closed_answer_gives_nothing_more(toxic: Toxic, ours: Upstream) -> None:
    toxic.behavior = raw(OK + b"Content-Length: 7\r\n\r\nsecret")

    answer = await ours.forward(b"GET", b"/", [])
    while not answer.ready:
        await asyncio.sleep(0.005)
    answer.close()

    assert (answer.ready, answer.ended) == (False, False)
    with pytest.raises(UpstreamError):
        await answer.next()


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 100\r\n\r\nshort",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel",
        OK + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_an_answer_that_falls_short_never_ends_cleanly(toxic: Toxic, upstream: Upstream, answer: bytes) -> None:
    toxic.behavior = raw(answer, close=True)

    with pytest.raises(UpstreamError) as caught:
        await post(upstream)
    assert (caught.value.status, caught.value.code) == (502, "upstream_unreachable")


async def test_what_came_before_the_break_is_delivered_first(toxic: Toxic, upstream: Upstream) -> None:
    toxic.behavior = "rst_after:5 events"

    answer = await upstream.forward(b"POST", b"/v1/chat/completions", POST, (b"{}",))
    got, failure = b"", None
    try:
        while piece := await answer.next():
            got += piece
    except UpstreamError as error:
        failure = error
    answer.close()

    assert failure is not None
    assert got == b"".join(events(7)[:5])


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nBad Name: 1\r\nContent-Length: 2\r\n\r\nok",
    ],
)
async def test_malformed_answers_are_refused(toxic: Toxic, upstream: Upstream, answer: bytes) -> None:
    toxic.behavior = raw(answer, close=True, pause=0.01)

    with pytest.raises(UpstreamError) as caught:
        await post(upstream)
    assert caught.value.reason == "protocol"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 103 Early\r\n\r\n" * 10_000 + OK + b"Content-Length: 2\r\n\r\nok",
        OK + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
        OK + b"".join(b"X-%d: 1\r\n" % number for number in range(3_000)) + b"\r\n",
        OK + b"X-Endless: " + b"a" * 3_000_000,
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: " + b"a" * 3_000_000,
    ],
    ids=range(11),
)
async def test_ours_refuses_what_could_be_read_in_two_ways_or_never_ends(toxic: Toxic, ours: Upstream, answer: bytes) -> None:
    toxic.behavior = raw(answer)

    with pytest.raises(UpstreamError) as caught:
        await post(ours)
    assert caught.value.reason == "protocol"


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_no_cut_of_a_chunked_answer_looks_complete(toxic: Toxic, transport: Any) -> None:
    whole = OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events(4)) + b"0\r\n\r\n"
    upstream = Upstream(toxic.url, transport=transport)
    ended: list[int] = []

    for cut in [*range(0, len(whole), 1 if transport == "sockets" else 7), len(whole)]:
        toxic.behavior = raw(whole[:cut], close=True)
        try:
            await post(upstream)
            ended.append(cut)
        except UpstreamError:
            pass
    await upstream.aclose()

    assert ended == [len(whole)]


# Requests, both transports


async def test_pieces_of_a_request_arrive_as_one_body_with_its_length(toxic: Toxic, upstream: Upstream) -> None:
    pieces = (b"a" * 70_000, b"b" * 70_000, b"c")

    status, body = await post(upstream, pieces)

    assert status == 200
    assert body == b"".join(pieces)
    assert toxic.requests[0].header(b"content-length") == b"140001"


async def test_an_upload_streams_through_as_it_comes(toxic: Toxic, upstream: Upstream) -> None:
    arrived = asyncio.Event()

    async def behave(ex: Exchange) -> None:
        first = await ex.socket.take_until(b"first\r\n")
        arrived.set()
        rest = await ex.socket.take_until(b"0\r\n\r\n")
        await ex.answer(first + rest)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await arrived.wait()
        yield b""
        yield b"second"

    toxic.behavior, toxic.reads_bodies = behave, False

    answer = await upstream.forward(b"POST", b"/v1/files", [(b"content-type", b"audio/wav")], pieces())

    assert await read(answer) == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"
    assert toxic.requests[0].header(b"transfer-encoding") == b"chunked"


async def test_an_upload_of_announced_length_keeps_it(toxic: Toxic, upstream: Upstream) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"12345"
        yield b"67890"

    answer = await upstream.forward(b"POST", b"/v1/files", [(b"content-length", b"10")], pieces())

    assert await read(answer) == b"1234567890"
    assert toxic.requests[0].header(b"content-length") == b"10"
    assert toxic.requests[0].header(b"transfer-encoding") is None


async def test_a_client_that_breaks_off_its_upload_breaks_off_ours(toxic: Toxic, ours: Upstream) -> None:
    class Gone(Exception):
        pass

    async def pieces() -> AsyncIterator[bytes]:
        yield b"12345"
        raise Gone

    with pytest.raises(Gone):
        await ours.forward(b"POST", b"/v1/files", [(b"content-length", b"10")], pieces())
    await settled(lambda: not toxic.sockets)


async def test_an_upload_shorter_than_announced_is_never_completed(toxic: Toxic, ours: Upstream) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"12345"

    with pytest.raises(UpstreamError):
        await ours.forward(b"POST", b"/v1/files", [(b"content-length", b"10")], pieces())
    await settled(lambda: not toxic.sockets)
    assert toxic.requests[0].body == b""


async def test_an_early_answer_is_passed_on_while_the_upload_still_runs(toxic: Toxic, ours: Upstream) -> None:
    forever = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"12345"
        await forever.wait()

    async def refuse(ex: Exchange) -> None:
        await ex.answer(b"too large", 413)

    toxic.behavior, toxic.reads_bodies = refuse, False

    answer = await ours.forward(b"POST", b"/v1/files", [], pieces())

    assert (answer.status, await read(answer)) == (413, b"too large")
    await settled(lambda: not toxic.sockets)  # the request was not sent whole: the socket is not used again


# The pool, both transports


@pytest.mark.parametrize(("transport", "connections"), [("sockets", 1), ("httpx", 16)])
async def test_a_clean_connection_is_used_again(toxic: Toxic, transport: Any, connections: int) -> None:
    upstream = Upstream(toxic.url, transport=transport)

    for _ in range(40):
        await post(upstream)

    assert toxic.connections == connections  # stock: one in each of its pools
    await upstream.aclose()


@pytest.mark.parametrize("behavior", ["extra_bytes_after_response", "extra_bytes_after_204"])
async def test_extra_bytes_never_reach_another_request(toxic: Toxic, upstream: Upstream, behavior: str) -> None:
    for _ in range(100):
        toxic.script = [behavior, "ok"]
        await post(upstream)
        _, body = await post(upstream)
        assert b"injected" not in body
        assert b"chat.completion" in body


async def test_extra_bytes_that_come_late_never_reach_another_request(toxic: Toxic, ours: Upstream) -> None:
    late = OK + b"content-length: 8\r\n\r\ninjected"

    async def behave(ex: Exchange) -> None:
        await ex.send(OK + b"content-length: 2\r\n\r\nok")
        ex.socket.transport.write(late)

    for pause in (0.0, 0.0, 0.001, 0.01) * 25:
        toxic.script = [behave, "ok"]
        await post(ours)
        await asyncio.sleep(pause)
        _, body = await post(ours)
        assert b"chat.completion" in body


async def test_one_answer_read_halfway_does_not_leak_into_the_next(toxic: Toxic, upstream: Upstream) -> None:
    toxic.script = ["chunks:50@0", "ok"]

    answer = await upstream.forward(b"POST", b"/", POST, (b"{}",))
    await answer.next()
    answer.close()
    answer.close()

    _, body = await post(upstream)
    assert b"chat.completion.chunk" not in body


@pytest.mark.parametrize("delay", [0.0, 0.002])
async def test_an_upstream_that_closes_idle_connections_costs_no_request(toxic: Toxic, ours: Upstream, delay: float) -> None:
    async def close_soon(ex: Exchange) -> None:
        await ex.answer(b"ok")
        if delay:
            asyncio.get_running_loop().call_later(delay, ex.close)
        else:
            ex.close()

    toxic.behavior = close_soon
    for turn in range(300):
        assert await post(ours) == (200, b"ok")
        await asyncio.sleep(delay * (turn % 3) * 0.5)


async def test_a_reused_connection_that_dies_unanswered_is_retried_once_on_a_new_one(toxic: Toxic, ours: Upstream) -> None:
    toxic.script = ["ok", "die_without_answer", "echo"]

    await post(ours)
    answered = await post(ours, (b"again",))

    assert answered == (200, b"again")
    assert [request.connection for request in toxic.requests] == [1, 1, 2]


async def test_a_new_connection_that_dies_unanswered_is_not_retried(toxic: Toxic, ours: Upstream) -> None:
    toxic.behavior = "die_without_answer"

    with pytest.raises(UpstreamError) as caught:
        await post(ours)

    assert (caught.value.reason, len(toxic.requests)) == ("read", 1)


async def test_one_byte_of_an_answer_forbids_the_retry(toxic: Toxic, ours: Upstream) -> None:
    toxic.script = ["ok", raw(b"H", close=True), "ok"]

    await post(ours)
    with pytest.raises(UpstreamError):
        await post(ours)

    assert len(toxic.requests) == 2


async def test_the_connection_used_last_is_used_first_and_idle_ones_are_closed_in_time(toxic: Toxic) -> None:
    sockets = Sockets(idle_seconds=0.1)
    origin = Origin(False, "127.0.0.1", toxic.port)
    replies = [await sockets.exchange(origin, b"GET", b"/", [(b"host", b"x")]) for _ in range(3)]
    for reply in replies:
        while await reply.next():
            pass
        reply.close()

    reply = await sockets.exchange(origin, b"GET", b"/", [(b"host", b"x")])
    assert toxic.requests[-1].connection == 3
    assert await reply.next() == b""
    reply.close()

    await settled(lambda: not toxic.sockets)
    await sockets.aclose()


async def test_closing_the_upstream_closes_every_socket(toxic: Toxic, ours: Upstream) -> None:
    toxic.script = ["ok", "headers_then_silence"]
    await post(ours)
    answer = await ours.forward(b"GET", b"/", [])

    await ours.aclose()

    with pytest.raises(UpstreamError):
        await answer.next()
    await settled(lambda: not toxic.sockets)


# Reaching it, both transports


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_closed_port_is_said_at_once(transport: Any) -> None:
    closed = Upstream("http://127.0.0.1:1", transport=transport)

    with pytest.raises(UpstreamError) as caught:
        await post(closed)

    assert (caught.value.reason, caught.value.status, caught.value.code) == ("connect", 502, "upstream_unreachable")
    assert "127.0.0.1" not in caught.value.message
    await closed.aclose()


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".invalid"])
async def test_a_name_that_does_not_resolve_is_said(transport: Any, host: str) -> None:
    upstream = Upstream(f"http://{host}", transport=transport)

    with pytest.raises(UpstreamError) as caught:
        await post(upstream)

    assert caught.value.reason == "connect"
    await upstream.aclose()


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_silent_upstream_is_given_up_when_a_limit_is_set(toxic: Toxic, transport: Any) -> None:
    upstream = Upstream(toxic.url, read_timeout=0.1, transport=transport)
    toxic.script = ["slow_headers:5s", "silence:5s"]

    with pytest.raises(UpstreamError) as caught:
        await post(upstream)
    assert (caught.value.reason, caught.value.status, caught.value.code) == ("timeout", 504, "upstream_timeout")
    with pytest.raises(UpstreamError) as caught:
        await post(upstream)
    assert caught.value.reason == "timeout"
    await settled(lambda: not toxic.sockets)
    await upstream.aclose()


async def test_a_slow_upload_is_no_silence_of_the_upstream(toxic: Toxic) -> None:
    upstream = Upstream(toxic.url, read_timeout=0.1)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x"
            await asyncio.sleep(0.06)

    answer = await upstream.forward(b"POST", b"/", [], pieces())

    assert await read(answer) == b"xxxxx"
    await upstream.aclose()


@asynccontextmanager
async def tls_upstream(context: ssl.SSLContext) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(OK + b"content-length: 6\r\n\r\nsecret")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_tls_is_verified_against_the_given_authority_and_sends_the_name(
    transport: Any, authority: trustme.CA, tmp_path: Any
) -> None:
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    context.sni_callback = lambda sock, name, ctx: names.append(name)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    async with tls_upstream(context) as port:
        trusting = Upstream(f"https://localhost:{port}", ca_file=str(tmp_path / "ca.pem"), transport=transport)
        for _ in range(3):
            assert await post(trusting, ()) == (200, b"secret")
        await trusting.aclose()

        doubting = Upstream(f"https://localhost:{port}", transport=transport)
        with pytest.raises(UpstreamError) as caught:
            await post(doubting, ())
        assert (caught.value.reason, caught.value.status) == ("connect", 502)
        await doubting.aclose()

        misnamed = Upstream(f"https://127.0.0.1:{port}", ca_file=str(tmp_path / "ca.pem"), transport=transport)
        with pytest.raises(UpstreamError):
            await post(misnamed, ())
        await misnamed.aclose()

    assert names[0] == "localhost"


async def test_a_plain_upstream_behind_https_is_said() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    upstream = Upstream(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    with pytest.raises(UpstreamError) as caught:
        await post(upstream)

    assert caught.value.reason == "connect"
    await upstream.aclose()
    server.close()


async def test_a_connection_that_is_never_accepted_runs_out_of_time() -> None:
    with never_accepting() as url:
        upstream = Upstream(url, connect_timeout=0.2)

        with pytest.raises(UpstreamError) as caught:
            await post(upstream)

        await upstream.aclose()
    assert (caught.value.reason, caught.value.status, caught.value.code) == ("timeout", 504, "upstream_timeout")


async def test_the_second_address_is_tried_when_the_first_refuses(toxic: Toxic, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def resolve(host: str, port: int, **kwargs: Any) -> list[tuple[Any, ...]]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]

    sockets = Sockets()

    class Resolving:
        def __getattr__(self, name: str) -> Any:
            return resolve if name == "getaddrinfo" else getattr(loop, name)

    monkeypatch.setattr("proxy.transport.asyncio.get_running_loop", lambda: Resolving())

    reply = await sockets.exchange(Origin(False, "two-addresses.test", toxic.port), b"GET", b"/", [(b"host", b"x")])

    assert reply.status == 200
    reply.close()
    await sockets.aclose()


# Cancellation


PHASES = ["slow_headers:30s", "headers_then_silence", "half_event_then_silence", "chunks:100000@0.001"]


@pytest.mark.parametrize("behavior", PHASES)
async def test_cancelling_closes_the_upstream_socket_in_every_phase(toxic: Toxic, upstream: Upstream, behavior: str) -> None:
    toxic.behavior = behavior

    async def run() -> None:
        await post(upstream)

    task = asyncio.create_task(run())
    await settled(lambda: bool(toxic.requests))
    await asyncio.sleep(0.03)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await asyncio.wait_for(toxic.requests[0].aborted.wait(), 1.0)
    await settled(lambda: not toxic.sockets)


async def test_two_thousand_cancellations_at_random_moments_lose_no_socket(toxic: Toxic, ours: Upstream) -> None:
    chance = random.Random(7)
    toxic.behavior = "chunks:20@0.001"
    await post(ours)
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(40):
        tasks = [asyncio.create_task(post(ours)) for _ in range(50)]
        for task in tasks:
            asyncio.get_running_loop().call_later(chance.uniform(0, 0.04), task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)

    assert await post(ours) == (200, b"".join(events(20)))
    await ours.aclose()
    await settled(lambda: not toxic.sockets)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_dial_that_is_cancelled_leaves_no_socket(toxic: Toxic) -> None:
    origin = Origin(False, "127.0.0.1", toxic.port)
    sockets = Sockets()
    for steps in range(12):
        task = asyncio.create_task(sockets.exchange(origin, b"GET", b"/", [(b"host", b"x")]))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if task.cancelled() is False and task.exception() is None:
            task.result().close()
    await sockets.aclose()
    await settled(lambda: not toxic.sockets)


# Back-pressure


async def test_a_reader_that_waits_stops_the_upstream_and_costs_no_memory(toxic: Toxic, upstream: Upstream) -> None:
    sent = 0

    async def flood(ex: Exchange) -> None:
        nonlocal sent
        await ex.start_stream()
        while True:
            await ex.chunk(b"x" * 65536)
            sent += 65536

    toxic.behavior = flood
    answer = await upstream.forward(b"GET", b"/", [])
    await answer.next()
    await asyncio.sleep(0.3)
    stopped_at = sent
    await asyncio.sleep(0.2)

    assert sent == stopped_at
    assert sent < 32 * 1024 * 1024  # what the kernel's buffers hold, and ours
    await answer.next()
    answer.close()
    await settled(lambda: not toxic.sockets)


async def test_an_upstream_that_does_not_read_stops_the_upload(toxic: Toxic, ours: Upstream) -> None:
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            yield b"x" * 65536
            taken += 65536

    async def deaf(ex: Exchange) -> None:
        ex.socket.transport.pause_reading()
        await asyncio.sleep(30)

    toxic.behavior, toxic.reads_bodies = deaf, False
    task = asyncio.create_task(ours.forward(b"POST", b"/", [], pieces()))
    await asyncio.sleep(0.3)
    stopped_at = taken
    await asyncio.sleep(0.2)

    assert taken == stopped_at
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# Under an httpx client


async def test_an_httpx_client_runs_on_our_sockets(toxic: Toxic) -> None:
    async with httpx.AsyncClient(transport=SocketTransport()) as client:
        answer = await client.post(toxic.url + "/v1/x?y=%2F", json={"a": 1})
        assert answer.content == b'{"a":1}'
        assert toxic.requests[0].target == b"/v1/x?y=%2F"

        toxic.script = ["chunks:5@0"]
        async with client.stream("GET", toxic.url) as stream:
            assert b"".join([piece async for piece in stream.aiter_raw()]) == b"".join(events(5))

        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            yield b"two"

        assert (await client.post(toxic.url, content=pieces())).content == b"onetwo"


@pytest.mark.parametrize(
    ("behavior", "kind"),
    [
        ("die_without_answer", httpx.ReadError),
        ("short_content_length", httpx.ReadError),
        ("h2_goaway", httpx.RemoteProtocolError),
        ("slow_headers:5s", httpx.ReadTimeout),
        ("silence:5s", httpx.ReadTimeout),
    ],
)
async def test_an_httpx_client_gets_the_errors_that_it_knows(toxic: Toxic, behavior: str, kind: type[Exception]) -> None:
    toxic.behavior = behavior
    async with httpx.AsyncClient(transport=SocketTransport(), timeout=0.2) as client:
        with pytest.raises(kind):
            await client.get(toxic.url)


async def test_an_httpx_client_on_our_sockets_is_told_that_nobody_listens() -> None:
    async with httpx.AsyncClient(transport=SocketTransport()) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:1/")


async def test_respx_can_stand_in_for_the_upstream() -> None:
    router = respx.MockRouter()
    router.get("http://mocked.test/v1/models").respond(json={"data": []})
    async with httpx.AsyncClient(transport=httpx.MockTransport(router.async_handler)) as client:
        assert (await client.get("http://mocked.test/v1/models")).json() == {"data": []}


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (b"/ HTTP/1.1\r\nx: y", []),
        (b"/a b", []),
        (b"", []),
        (b"/", [(b"x", b"a\r\nb: c")]),
        (b"/", [(b"x\n", b"a")]),
        (b"/", [(b"x", b"a\0")]),
    ],
)
async def test_nothing_that_breaks_the_head_is_ever_written(toxic: Toxic, target: bytes, headers: Sequence[Any]) -> None:
    sockets = Sockets()

    with pytest.raises(UpstreamError):
        await sockets.exchange(
            Origin(False, "127.0.0.1", toxic.port), b"GET", target, [(b"host", b"x"), *headers], (), Patience()
        )

    assert toxic.connections == 0
    assert re.fullmatch("http://127.0.0.1:[0-9]+", toxic.url)

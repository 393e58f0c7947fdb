"""What goes through when nothing is wrong, over our sockets and over stock httpx: every byte, in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from live.conftest import BODY, Product, Start, dechunked
from live.toxic import VOCABULARY, Exchange, Toxic
from live.traffic import REQUESTS, ask, seen

pytestmark = pytest.mark.anyio

OURS = (b"host", b"connection", b"content-length", b"transfer-encoding")
"""Headers that a proxy writes anew."""


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_reaches_the_upstream_as_it_came(toxic: Toxic, product: Product, name: str) -> None:
    head, _, body = REQUESTS[name].partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, target, _ = first.split(b" ")
    fields = [(field.lower(), value.strip()) for field, _, value in (line.partition(b":") for line in lines)]

    got = await ask(product.address[1], REQUESTS[name])

    (saw,) = seen(toxic)
    assert (saw.method.encode(), saw.target) == (method, target)
    assert saw.body == (b"abcde" if name == "chunked" else body)
    assert [field for field in saw.headers if field[0] != b"host"] == sorted(field for field in fields if field[0] not in OURS)
    assert (got.status, got.body) == ("200", saw.body)


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

"""What a client sends slowly, and what it sends to an upstream that does not read: neither holds a connection for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from live.conftest import BODY, Start, inflight, leave, request, settled_inflight
from live.toxic import Toxic

pytestmark = pytest.mark.anyio


async def test_a_body_that_only_drips_is_given_up(toxic: Toxic, start: Start) -> None:
    async with start(toxic.url, server={"body_timeout": 0.1}) as product:
        reader, writer = await product.raw(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
        answer = asyncio.ensure_future(reader.read())
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.03)
        writer.close()

    assert answer.result().startswith(b"HTTP/1.1 408 ")
    assert toxic.requests == []


async def test_beyond_what_may_be_held_of_all_bodies_they_pass_as_they_come(
    toxic: Toxic, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.endpoints.MOST_HELD", 1_000)
    long = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]}' % (b"word " * 300)
    async with start(toxic.url) as product:
        one, first = await product.raw(request(body=long)[:1_300])
        await asyncio.sleep(0.1)  # more than may be held has come and is not whole: it goes on as it comes
        meanwhile = await product.post(BODY)
        first.write(request(body=long)[1_300:])
        passed = await one.readuntil(b"\r\n\r\n")
        first.close()
        afterwards = await product.post(long)

    assert meanwhile.status_code == 200
    assert sorted(len(received.body) for received in toxic.requests) == sorted([len(long), len(BODY), len(long)])
    assert b"x-compaction-reason: too_large\r\n" in passed
    assert afterwards.headers["x-compaction-reason"] == "unknown_window"


async def test_a_client_that_breaks_off_an_upload_which_the_upstream_does_not_read_ends_it(start: Start) -> None:
    # a FIN stands behind what was sent and cannot arrive before that is read
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf.settimeout(5)
        async with start(f"http://127.0.0.1:{deaf.getsockname()[1]}") as product:
            _, writer = await product.raw(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
            pouring = asyncio.ensure_future(_pour(writer))
            upstream, _ = await asyncio.get_running_loop().run_in_executor(None, deaf.accept)
            with upstream:
                await _stalled(writer)
                pouring.cancel()

                assert await inflight(product) == 1
                leave(writer, "RST")
                await settled_inflight(product)


async def _pour(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()


async def _stalled(writer: asyncio.StreamWriter) -> None:
    """Waits until nothing more leaves: every buffer on the way is full."""
    seen, same = -1, 0
    while same < 10:
        size = writer.transport.get_write_buffer_size()
        same = same + 1 if size == seen and size > 0 else 0
        seen = size
        await asyncio.sleep(0.02)

"""Requests and answers of every shape, asked on a raw socket: what the tests that compare proxies send through them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from typing import NamedTuple

from live.conftest import BODY, dechunked, request
from live.toxic import Toxic


def whole_request(method: str, target: str, *fields: str, body: bytes = b"") -> bytes:
    """A request on a connection of its own."""
    length = [f"Content-Length: {len(body)}"] if body else []
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *fields, *length, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


JSON = "Content-Type: application/json"
LARGE = b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"a b " * 100_000)
REQUESTS = {
    "chat": whole_request("POST", "/v1/chat/completions", JSON, "Authorization: Bearer k", body=BODY),
    "large chat": whole_request("POST", "/v1/chat/completions", JSON, body=LARGE),
    "not json": whole_request("POST", "/v1/chat/completions", JSON, body=b"\x00\xff{"),
    "get": whole_request("GET", "/v1/models", "Accept: */*"),
    "delete": whole_request("DELETE", "/v1/files/file-1"),
    "head": whole_request("HEAD", "/v1/models"),
    "odd path": whole_request("GET", "/v1/a%2Fb/..%2f;x=1/%E2%82%AC?q=%2F&q=2;y&%20=a+b"),
    "duplicates": whole_request("GET", "/v1/models", "X-A: 1", "X-B: 2", "X-A: 3", "Cookie: a=1", "Accept: text/html, */*;q=0.1"),
    "embeddings": whole_request("POST", "/v1/embeddings", JSON, body=b'{"input": "x"}'),
    "upload": whole_request(
        "POST", "/v1/files", "Content-Type: multipart/form-data; boundary=b", body=b"--b\r\n\r\n\x00\r\n--b--" * 9_000
    ),
    "empty post": whole_request("POST", "/v1/x", "Content-Length: 0"),
    "chunked": whole_request("POST", "/v1/files", "Transfer-Encoding: chunked") + b"3\r\nabc\r\n2;e=1\r\nde\r\n0\r\n\r\n",
    "http/1.0": b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n",
}
ANSWERS = [
    *("echo", "ok", "chunked_response", "gzip_response", "br_response", "whitespace_json", "status:404", "status:500"),
    *("status:429,retry-after:30,x-ratelimit-remaining:0", "status:302,location:/elsewhere", "chunks:50@0", "gzip_sse"),
    *("sse_with_content_length", "sse_comments", "sse_bom", "sse_random_segments", "eof_without_done"),
]


class Got(NamedTuple):
    """An answer: status, headers that are not about the connection, body without its framing."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes


class Saw(NamedTuple):
    """A request as the upstream saw it: headers that are not about the connection, in alphabetical order."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def ask(port: int, raw: bytes) -> Got:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    got = await reader.read(-1)
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    ours = re.compile(r"x-compaction|connection|transfer-encoding|keep-alive|content-length")
    kept = sorted(field for field in fields if not ours.match(field[0]))
    return Got(first.split()[1], kept, dechunked(body) if ("transfer-encoding", "chunked") in fields else body)


async def poke(port: int, raw: bytes, patience: float) -> bytes:
    """What comes back within `patience` seconds of silence, whether or not the other side ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    answer = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while data := await asyncio.wait_for(reader.read(65536), patience):
            answer += data
    writer.close()
    return answer


def seen(toxic: Toxic) -> list[Saw]:
    """What came whole, in order."""
    framing = (b"content-length", b"transfer-encoding", b"connection")
    return [
        Saw(r.method, r.target, sorted(field for field in r.headers if field[0] not in framing), r.body)
        for r in toxic.requests
        if r.complete
    ]


WELL_FORMED = [
    request(),
    request(b"/v1/embeddings", b'{"input": "x"}'),
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
]
DIRT = [
    *(b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"0", b"\x00", b"\x0b", b"+", b"-", b",", b";"),
    *(b"chunked", b"Content-Length: 3\r\n", b"\xe2\x84\xaa"),
]


def mutated(chance: random.Random) -> bytes:
    """A request with one to three faults in it, where that may matter."""
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

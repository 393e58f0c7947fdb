"""The same traffic through nginx and through us: what the upstream saw and what the client got must be the same."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from live.conftest import BODY, Start
from live.toxic import Toxic

pytestmark = [pytest.mark.anyio, pytest.mark.service]

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

CONFIG = """daemon off; worker_processes 1; error_log stderr crit; pid {folder}/pid; user root;
events {{ worker_connections 256; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 4m; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 8; }}
  server {{ listen 127.0.0.1:{port}; keepalive_timeout 5s;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host 127.0.0.1:{upstream};
      proxy_buffering off; proxy_request_buffering off; proxy_pass_header Server; proxy_pass_header Date; proxy_next_upstream off; }} }} }}
"""


@contextlib.asynccontextmanager
async def nginx(upstream: int, folder: Path) -> AsyncIterator[int]:
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, upstream=upstream, port=port))
    process = await asyncio.create_subprocess_exec(NGINX, "-c", str(folder / "nginx.conf"), "-p", str(folder))
    try:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.02)
        yield port
    finally:
        process.terminate()
        await process.wait()


def request(method: str, target: str, *fields: str, body: bytes = b"") -> bytes:
    length = [f"Content-Length: {len(body)}"] if body else []
    lines = [f"{method} {target} HTTP/1.1", "Host: x", *fields, *length, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


JSON = "Content-Type: application/json"
REQUESTS = {
    "chat": request("POST", "/v1/chat/completions", JSON, "Authorization: Bearer k", body=BODY),
    "large chat": request(
        "POST", "/v1/chat/completions", JSON, body=b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"a b " * 100_000)
    ),
    "not json": request("POST", "/v1/chat/completions", JSON, body=b"\x00\xff{"),
    "get": request("GET", "/v1/models", "Accept: */*"),
    "delete": request("DELETE", "/v1/files/file-1"),
    "head": request("HEAD", "/v1/models"),
    "odd path": request("GET", "/v1/a%2Fb/..%2f;x=1/%E2%82%AC?q=%2F&q=2;y&%20=a+b"),
    "duplicates": request("GET", "/v1/models", "X-A: 1", "X-B: 2", "X-A: 3", "Cookie: a=1", "Accept: text/html, */*;q=0.1"),
    "embeddings": request("POST", "/v1/embeddings", JSON, body=b'{"input": "x"}'),
    "empty post": request("POST", "/v1/x", "Content-Length: 0"),
    "chunked": b"POST /v1/files HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n2;e=1\r\nde\r\n0\r\n\r\n",
    "http/1.0": b"GET /v1/models HTTP/1.0\r\nHost: x\r\n\r\n",
}
ANSWERS = [
    *("echo", "ok", "chunked_response", "gzip_response", "br_response", "whitespace_json", "status:404", "status:500"),
    *(
        "status:429,retry-after:30,x-ratelimit-remaining:0",
        "status:302,location:/elsewhere",
        "chunks:50@0",
        "gzip_sse",
        "sse_with_content_length",
    ),
    *("sse_comments", "sse_bom", "sse_random_segments", "eof_without_done"),
]


async def ask(port: int, raw: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
    """Status, headers that are not about the connection, body without its framing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    got = await reader.read(-1)
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    if ("transfer-encoding", "chunked") in fields:
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
        body = whole
    ours = re.compile(r"x-compaction|connection|transfer-encoding|keep-alive|content-length")
    return first.split()[1], sorted(field for field in fields if not ours.match(field[0])), body


def seen(toxic: Toxic) -> list[tuple[str, bytes, list[tuple[bytes, bytes]], bytes]]:
    framing = (b"content-length", b"transfer-encoding", b"connection")
    return [(r.method, r.target, [field for field in r.headers if field[0] not in framing], r.body) for r in toxic.requests]


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
async def test_the_upstream_and_the_client_see_what_they_see_with_nginx(toxic: Toxic, start: Start, tmp_path: Path) -> None:
    cases = [(name, raw, "echo") for name, raw in REQUESTS.items()]
    cases += [(answer, REQUESTS["chat"], answer) for answer in ANSWERS]
    async with nginx(toxic.port, tmp_path) as theirs, start(toxic.url) as product:
        for name, raw, behavior in cases:
            toxic.behavior = behavior
            results = []
            for port in (theirs, product.address[1]):
                toxic.requests.clear()
                results.append((await ask(port, raw), seen(toxic)))

            (got_theirs, saw_theirs), (got_ours, saw_ours) = results
            assert got_ours == got_theirs, name
            assert [(method, target, sorted(fields), body) for method, target, fields, body in saw_ours] == [
                (method, target, sorted(fields), body) for method, target, fields, body in saw_theirs
            ], name

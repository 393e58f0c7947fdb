"""The same traffic through nginx, through HAProxy and through us: upstream and client must see the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from live.conftest import Start, volume
from live.toxic import Toxic
from live.traffic import ANSWERS, REQUESTS, ask, mutated, poke, seen

pytestmark = [pytest.mark.anyio, pytest.mark.service]

NGINX = """daemon off; worker_processes 1; error_log stderr crit; pid {folder}/pid; user root;
events {{ worker_connections 256; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 4m; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 8; }}
  server {{ listen 127.0.0.1:{port}; keepalive_timeout 5s;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host 127.0.0.1:{upstream};
      proxy_buffering off; proxy_request_buffering off; proxy_pass_header Server; proxy_pass_header Date; proxy_next_upstream off; }} }} }}
"""
HAPROXY = """defaults
  mode http
  timeout connect 5s
  timeout client 30s
  timeout server 30s
  option http-no-delay
frontend f
  bind 127.0.0.1:{port}
  http-request set-header Host 127.0.0.1:{upstream}
  default_backend b
backend b
  server up 127.0.0.1:{upstream}
"""
CONFIGS = {"nginx": NGINX, "haproxy": HAPROXY}
PLACES = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
ORACLES = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name, path=PLACES) is None, reason=f"{name} is not installed"))
    for name in CONFIGS
]


@contextlib.asynccontextmanager
async def oracle(name: str, upstream: int, folder: Path) -> AsyncIterator[int]:
    """The port of another proxy in front of the same upstream."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / f"{name}.conf"
    config.write_text(CONFIGS[name].format(folder=folder, upstream=upstream, port=port))
    program = shutil.which(name, path=PLACES)
    assert program is not None
    flags = ["-c", str(config), "-p", str(folder)] if name == "nginx" else ["-db", "-q", "-f", str(config)]
    process = await asyncio.create_subprocess_exec(program, *flags)
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


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
@pytest.mark.parametrize("other", ORACLES)
async def test_upstream_and_client_see_what_they_see_with_another_proxy(
    toxic: Toxic, start: Start, tmp_path: Path, other: str, transport: str
) -> None:
    cases = [(name, raw, "echo") for name, raw in REQUESTS.items()]
    cases += [(answer, REQUESTS["chat"], answer) for answer in ANSWERS]
    async with oracle(other, toxic.port, tmp_path) as theirs, start(toxic.url, transport=transport) as product:
        for name, raw, behavior in cases:
            toxic.behavior = behavior
            results = []
            for port in (theirs, product.address[1]):
                toxic.requests.clear()
                results.append((await ask(port, raw), seen(toxic)))

            (got_theirs, saw_theirs), (got_ours, saw_ours) = results
            assert got_ours == got_theirs, name
            assert saw_ours == saw_theirs, name
            assert len(saw_ours) == 1, name


@pytest.mark.parametrize("other", ORACLES)
async def test_what_both_let_through_of_a_damaged_request_is_the_same(
    toxic: Toxic, start: Start, tmp_path: Path, other: str
) -> None:
    """They refuse different things; what both take for a request must be the same requests, to the last byte of their bodies."""
    chance, both = random.Random(5), 0
    async with oracle(other, toxic.port, tmp_path) as theirs, start(toxic.url) as product:
        for _ in range(volume(80, 5_000)):
            sent = mutated(chance)
            for patience in (0.03, 0.3, 1.0):  # a slow machine may need another try
                results = [await through(port, sent, toxic, patience) for port in (theirs, product.address[1])]
                if None in results or results[0] == results[1]:
                    break
            if None not in results:
                assert results[1] == results[0], sent
                both += bool(results[0])

    assert both >= volume(5, 300)


async def through(port: int, sent: bytes, toxic: Toxic, patience: float) -> list[tuple[str, bytes, bytes]] | None:
    """Method, target and body of the requests that came out of these bytes; None when they were refused."""
    await asyncio.sleep(patience if patience > 0.1 else 0)  # what an impatient try left on its way does not count
    toxic.requests.clear()
    answer = await poke(port, sent, patience)
    if re.search(rb"HTTP/1\.[01] [45]", answer):
        return None
    return [(saw.method, saw.target, saw.body) for saw in seen(toxic)]

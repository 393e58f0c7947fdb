"""What the live tests share: an upstream that misbehaves, the whole product in front of it, and raw clients."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from blockbuster import blockbuster_ctx
from live.toxic import Toxic

from proxy.app import build_app
from proxy.config import load
from proxy.server import Address, running

BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
SCALE = float(os.environ.get("FAULT_SCALE", "0"))
"""How much of the fault matrix is run: 0 the daily share, 1 its full volumes (give pytest `--timeout 0` then)."""


def volume(daily: int, full: int) -> int:
    """How often a fault is tried."""
    return daily + round((full - daily) * SCALE)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def toxic() -> AsyncIterator[Toxic]:
    """An upstream that echoes until its `behavior` or `script` says otherwise."""
    async with Toxic() as upstream:
        yield upstream


@dataclass
class Product:
    """The running proxy. address, admin: host and port of its two listeners; url: of the proxy port."""

    address: Address
    admin: Address

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def client(self, **settings: Any) -> httpx.AsyncClient:
        """A stock client: its parser is not ours, so it is a fair judge of what is a clean end."""
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=10.0, **settings)

    async def post(self, body: bytes = BODY, path: str = "/v1/chat/completions") -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(data)
        return reader, writer


def request(path: bytes = b"/v1/chat/completions", body: bytes = BODY) -> bytes:
    """A chat request as bytes."""
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path,
        len(body),
        body,
    )


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    """Leave with a FIN or an RST."""
    if how == "RST":
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


async def settled(condition: Callable[[], bool]) -> None:
    """Waits until it is true; the suite's own limit ends a wait in vain."""
    while not condition():
        await asyncio.sleep(0.002)


async def settled_inflight(product: Product) -> None:
    """Waits until the proxy itself says that it serves nothing any more."""
    while await inflight(product) != 0:
        await asyncio.sleep(0.01)


async def inflight(product: Product) -> float:
    """Requests that the proxy says it is serving, all endpoints together."""
    async with httpx.AsyncClient(base_url=f"http://{product.admin[0]}:{product.admin[1]}", trust_env=False) as client:
        scrape = (await client.get("/metrics")).text
    return sum(float(value) for value in re.findall(r"^compaction_inflight_requests\{.*\} (\S+)$", scrape, re.M))


def is_ours(answer: httpx.Response, status: int, code: str) -> bool:
    error = answer.json()["error"]
    shape = set(error) == {"message", "type", "param", "code"}
    return shape and (answer.status_code, error["code"], answer.headers["x-compaction-error"]) == (status, code, "1")


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def resident(pid: str = "self") -> int:
    """Bytes of memory that a process really has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def dechunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body


Start = Callable[..., AbstractAsyncContextManager[Product]]


@pytest.fixture
def start() -> Start:
    """Starts the product in front of an upstream: `async with start(url, **settings of `upstream`) as product`.

    sections: of the configuration beside `upstream` and `server`.
    """

    @asynccontextmanager
    async def starting(
        url: str, *, server: dict[str, Any] | None = None, sections: dict[str, Any] | None = None, **upstream: Any
    ) -> AsyncIterator[Product]:
        settings = {"upstream": {"url": url, **upstream}, "compaction": {"discovery": False}}
        # requests are as odd as can be here, also in what they call us
        settings |= {"server": {"allowed_hosts": ["*"], **(server or {})}, **(sections or {})}
        config = load(settings, environment={})
        built = build_app(config)
        async with running(built.proxy, built.admin, header_timeout=config.server.header_timeout) as addresses:
            with blockbuster_ctx(scanned_modules="proxy"):  # raises where our code would block the loop
                yield Product(addresses.proxy, addresses.admin)

    return starting


@pytest.fixture(params=["sockets", "httpx"])
async def product(request: pytest.FixtureRequest, toxic: Toxic, start: Start) -> AsyncIterator[Product]:
    """The whole product in front of `toxic`, over our sockets and over stock httpx."""
    async with start(toxic.url, transport=request.param) as running_product:
        yield running_product

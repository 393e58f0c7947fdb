"""What the live tests share: an upstream that misbehaves, the whole product in front of it, and raw clients."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from blockbuster import blockbuster_ctx
from live.toxic import Toxic

from proxy.app import build_app
from proxy.config import load
from proxy.server import Address, running

BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'


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
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
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


Start = Callable[..., AbstractAsyncContextManager[Product]]


@pytest.fixture
def start() -> Start:
    """Starts the product in front of an upstream: `async with start(url, **settings of `upstream`) as product`."""

    @asynccontextmanager
    async def starting(url: str, *, server: dict[str, Any] | None = None, **upstream: Any) -> AsyncIterator[Product]:
        settings = {"upstream": {"url": url, **upstream}, "compaction": {"discovery": False}, "server": server or {}}
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

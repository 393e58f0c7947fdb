"""The server in front of us: two sockets, an app behind each, and how they start and end together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from proxy.strict_http import StrictHttp

KEEP_ALIVE_SECONDS = 75
"""How long an idle client may come back on its connection: nginx's figure; uvicorn's 5 s resets the pools of SDKs."""
BACKLOG = 2048
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 2.0
"""What tasks that were cut off, and the apps' shutdown, may still take."""
YOUNG_OBJECTS = 5_000
"""After so many new objects cycles are looked for, in some 50 µs: a request makes a hundred and leaves hardly any cycle."""
BOTH_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Address = tuple[str, int]
Sockets = tuple[socket.socket, socket.socket]
"""Of the proxy and of the admin port."""


class Addresses(NamedTuple):
    """Where we really listen, ports chosen by the system included."""

    proxy: Address
    admin: Address


@dataclass(frozen=True)
class Patience:
    """In seconds. drain: what streams get to finish; header: what a client gets to send the head of its request."""

    drain: float
    header: float


@dataclass
class Draining:
    """Whether the process is about to end. Both apps find it in `scope["state"]["draining"]`."""

    active: bool = False


class CannotListen(Exception):
    """An address that we cannot have. The message is for people."""


class StartupFailed(Exception):
    """An app refused to start; its own message was logged."""


class _Listener:
    """One socket, the app behind it, and the connections that came through it."""

    def __init__(self, app: ASGIApp, sock: socket.socket, header_timeout: float, draining: Draining) -> None:
        self.sock = sock
        self._protocol_class: type[StrictHttp] = type("Protocol", (StrictHttp,), {"header_timeout": header_timeout})
        self._config = uvicorn.Config(
            app,
            http=self._protocol_class,
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # else X-Forwarded-For of a local client becomes its address
            server_header=False,  # else ours hides the upstream's
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._config.load()
        self._state = ServerState()
        self._lifespan = LifespanOn(self._config)
        self._lifespan.state["draining"] = draining
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        await self._lifespan.startup()
        if self._lifespan.should_exit:
            raise StartupFailed
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, sock=self.sock, backlog=BACKLOG)

    def _connection(self) -> asyncio.Protocol:
        return self._protocol_class(self._config, self._state, self._lifespan.state)

    def refuse(self) -> None:
        """No new connections; those that wait for a request end, the others after their answer."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    @property
    def busy(self) -> bool:
        return bool(self._state.connections or self._state.tasks)

    async def cut(self) -> None:
        """Break off what still runs, so that no answer looks complete that is not."""
        for connection in list(self._state.connections):
            connection.transport.abort()
        tasks = list(self._state.tasks)
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=POLL_SECONDS)  # they are told that the client left
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=LAST_WORDS_SECONDS)

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lifespan.shutdown(), LAST_WORDS_SECONDS)


class _Pair:
    """The two listeners, opened and ended together."""

    def __init__(self, app: ASGIApp, admin: ASGIApp, sockets: Sockets, header_timeout: float) -> None:
        self.draining = Draining()
        self._force = asyncio.Event()
        self._proxy = _Listener(app, sockets[0], header_timeout, self.draining)
        self._admin = _Listener(admin, sockets[1], header_timeout, self.draining)
        self.stop = asyncio.Event()

    async def open(self) -> None:
        await self._proxy.open()
        await self._admin.open()

    def on_signal(self) -> None:
        """The first drains, the second ends at once."""
        if self.draining.active:
            self._force.set()
        self.draining.active = True
        self._proxy.refuse()  # before anybody can read that we drain
        self.stop.set()

    async def drain(self, seconds: float) -> None:
        """Let the streams finish; the admin port answers to the last, so that readiness says no meanwhile."""
        self.draining.active = True
        deadline = asyncio.get_running_loop().time() + seconds
        self._proxy.refuse()
        while self._proxy.busy and not self._force.is_set() and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._force.wait(), POLL_SECONDS)
        await self._proxy.cut()
        await self._proxy.close()
        self._admin.refuse()
        await self._admin.cut()
        await self._admin.close()


def serve(
    app: ASGIApp,
    admin: ASGIApp,
    *,
    host: str,
    port: int,
    admin_host: str,
    admin_port: int,
    drain_timeout: float = 30.0,
    header_timeout: float = 10.0,
    on_started: Callable[[Addresses], None] | None = None,
) -> int:
    """Serve both apps until SIGTERM or SIGINT, drain, and return the exit code: 0, or 1 when we could not start.

    drain_timeout, header_timeout: seconds. on_started gets the real addresses once both ports answer.
    """
    try:
        sockets = bind(host, port), bind(admin_host, admin_port)
    except CannotListen as error:
        sys.stderr.write(f"compaction-proxy: {error}\n")
        return 1
    prepare_process()

    def started() -> None:
        if on_started is not None:
            tell(on_started, sockets)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(run_apps(app, admin, sockets, Patience(drain_timeout, header_timeout), BOTH_SIGNALS, started))
    flush_output()
    return code


@contextlib.asynccontextmanager
async def running(
    app: ASGIApp,
    admin: ASGIApp,
    *,
    host: str = "127.0.0.1",
    drain_timeout: float = 0.0,
    header_timeout: float = 10.0,
) -> AsyncIterator[Addresses]:
    """Serve both apps on the running loop, on ports of the system's choice, for the length of the block."""
    _quiet_uvicorn()
    sockets = bind(host, 0), bind(host, 0)
    pair = _Pair(app, admin, sockets, header_timeout)
    await pair.open()
    try:
        yield Addresses(_address(sockets[0]), _address(sockets[1]))
    finally:
        await pair.drain(drain_timeout)


def bind(host: str, port: int) -> socket.socket:
    """A socket on this address, not yet listening. Port 0: the system chooses. Raises CannotListen."""
    if not 0 <= port <= 65535:  # getaddrinfo takes it modulo 65536
        raise CannotListen(f"cannot listen on {host}:{port}: a port is 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(BACKLOG)  # here, so that a port in use is known before anything starts
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotListen(f"cannot listen on {host}:{port}: {reason.lower()}") from None
    sock.setblocking(False)
    return sock


def keep_large_blocks() -> None:
    """Keep glibc from mapping and unmapping a block for each large body: worth 1.7 to 2 times the requests/s at 1 MB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # names of <malloc.h>
    mallopt(mmap_threshold, 32 * 1024 * 1024)
    mallopt(trim_threshold, 64 * 1024 * 1024)
    mallopt(top_pad, 1024 * 1024)


async def run_apps(
    app: ASGIApp, admin: ASGIApp, sockets: Sockets, patience: Patience, signals: Sequence[int], started: Callable[[], None]
) -> int:
    pair = _Pair(app, admin, sockets, patience.header)
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, pair.on_signal)
    try:
        await pair.open()
    except StartupFailed:
        return 1
    gc.collect()
    gc.freeze()  # what start-up has made stays: a full collection over it would stop every stream for some 50 ms
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    started()
    await pair.stop.wait()
    await pair.drain(patience.drain)
    return 0


def prepare_process() -> None:
    keep_large_blocks()
    _quiet_uvicorn()
    logging.raiseExceptions = False  # a log that nobody reads any more must not fail a request


def tell(on_started: Callable[[Addresses], None], sockets: Sockets) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads our output
        on_started(Addresses(_address(sockets[0]), _address(sockets[1])))


def _address(sock: socket.socket) -> Address:
    host, port = sock.getsockname()[:2]
    return host, port


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    return uvicorn.Config("", log_config=None).get_loop_factory()


def _quiet_uvicorn() -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def flush_output() -> None:
    """The last thing: neither a late signal nor a closed pipe behind stdout may turn a good end into a failure."""
    for number in BOTH_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

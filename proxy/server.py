"""The server in front of us: uvicorn's HTTP/1.1 protocol, hardened, on two sockets of one process, and how it ends.

uvicorn alone waits for ever for the end of a request's head, takes any number of headers, lets trailers into them, writes
a 400 into the middle of a running answer, and closes its admin port before the streams have drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

import uvicorn
from starlette.types import ASGIApp
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 64 * 1024
MAX_FIELDS = 200
MAX_PIPELINED = 16
"""Requests that may wait behind one another on a connection before we stop reading it. Hardly any client sends two."""
KEEP_ALIVE_SECONDS = 75
"""How long an idle client may come back on its connection: nginx's figure; uvicorn's 5 s resets the pools of SDKs."""
JOIN_BELOW = 64 * 1024
"""A piece up to this size is copied to be written in one go with what frames it."""
BACKLOG = 2048
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 2.0
"""What tasks that were cut off, and the apps' shutdown, may still take."""

Address = tuple[str, int]


class Addresses(NamedTuple):
    """Where we really listen, ports chosen by the system included."""

    proxy: Address
    admin: Address


@dataclass
class Draining:
    """Whether the process is about to end. Both apps find it in `scope["state"]["draining"]`."""

    active: bool = False


class CannotListen(Exception):
    """An address that we cannot have. The message is for people."""


class StartupFailed(Exception):
    """An app refused to start; its own message was logged."""


class _BadRequest(Exception):
    """Raised inside a parser callback: uvicorn then answers 400 and closes."""


class _Cycle(RequestResponseCycle):
    """uvicorn's request and answer, with the head and the first piece of the body in one write where both are at hand."""

    _head = b""
    _flusher: asyncio.Handle | None = None

    async def run_asgi(self, app: Any) -> None:
        async def whole(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                self._flush()

        await super().run_asgi(whole)

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started:
            if not self.response_complete:
                self._send_body(message.get("body", b""), message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        bodiless = status in (204, 304)
        parts = [STATUS_LINE[status]]
        count, closing = len(headers) + 2, False
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = 0 if bodiless else int(value), False
            elif name == b"connection" and value.lower() == b"close":
                closing = True
        if closing:
            self.keep_alive = False
        elif not self.keep_alive:
            parts.append(b"connection: close\r\n")
            count += 1
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and not bodiless:
            self.chunked_encoding = True
            parts.append(b"transfer-encoding: chunked\r\n")
            count += 1
        parts.append(b"\r\n")
        head = b"".join(parts)
        if head.count(b"\n") != count or head.count(b"\r") != count or b"\0" in head:
            self.response_started = False
            raise RuntimeError("invalid response header")
        self._head = head
        self._flusher = asyncio.get_running_loop().call_soon(self._flush)  # when the app waits first, the head leaves alone

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self.disconnected and not self.transport.is_closing():
            self.transport.write(head)

    def _send_body(self, body: bytes, more: bool) -> None:
        parts: tuple[bytes, ...]
        if self.scope["method"] == "HEAD":
            self.expected_content_length, parts = 0, ()
        elif self.chunked_encoding:
            parts = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            if not more:
                parts += (b"0\r\n\r\n",)
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the body is longer than its content-length")
            parts = (body,) if body else ()
        self._write(parts, len(body))
        if not more:
            self._complete()

    def _write(self, parts: tuple[bytes, ...], size: int) -> None:
        if self._head:
            parts, self._head = (self._head, *parts), b""
            if self._flusher is not None:
                self._flusher.cancel()
        if len(parts) == 1:
            self.transport.write(parts[0])
        elif size > JOIN_BELOW:
            self.transport.writelines(parts)
        elif parts:
            self.transport.write(b"".join(parts))

    def _complete(self) -> None:
        if self.expected_content_length != 0:
            raise RuntimeError("the body is shorter than its content-length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


class StrictHttp(HttpToolsProtocol):
    """uvicorn's httptools protocol with a deadline and limits for the head, and nothing ambiguous let through."""

    header_timeout = 10.0
    _deadline: asyncio.TimerHandle | None = None
    _in_head = True
    _fields = 0
    _head_bytes = 0
    _silent_bytes = 0
    _progress = 0
    _running: Any = None
    _poisoned = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        running, waiting = self._running, [cycle for cycle, _ in self.pipeline]
        super().connection_lost(exc)
        for cycle in (running, *waiting):  # uvicorn tells only the newest of several pipelined requests
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._poisoned:
            return
        before = self._progress
        super().data_received(data)
        if self._progress != before:
            self._silent_bytes = 0
        else:
            self._silent_bytes += len(data)
            if self._silent_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("Endless headers.")
        if self._in_head:
            if self._deadline is None:
                self._start_deadline()
        elif self._deadline is not None:
            self._stop_deadline()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._fields = self._head_bytes = 0
        self._progress += 1
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _BadRequest
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._fields > MAX_FIELDS or self._head_bytes > MAX_HEAD_BYTES:
            raise _BadRequest
        if self._in_head:  # what comes later is a trailer: dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._progress += 1
        parser, scope = self.parser, self.scope
        version, method = parser.get_http_version(), parser.get_method()
        self._check_head(version, method)
        raw_path, _, query = self.url.partition(b"?")
        path = raw_path.decode("ascii")
        scope["method"], scope["http_version"] = method.decode("ascii"), version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = raw_path, query
        # an upgrade is not taken up, and the parser stops after a request that asked for one
        keep_alive = version == "1.1" and parser.should_keep_alive() and not parser.should_upgrade()
        before, cycle = self.cycle, self._cycle(keep_alive)
        self.cycle = cycle
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
            return
        self.pipeline.appendleft((cycle, self.app))
        if len(self.pipeline) >= MAX_PIPELINED:  # until then we read on, and so see the client leave
            self.flow.pause_reading()

    def _cycle(self, keep_alive: bool) -> _Cycle:
        return _Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: the request is answered as if it had not asked."""

    def on_body(self, body: bytes) -> None:
        self._progress += 1
        super().on_body(body)

    def _check_head(self, version: str, method: bytes) -> None:
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and (version == "1.0" or value.strip().lower() != b"chunked"):
                raise _BadRequest
        if hosts != 1 and (hosts > 1 or version != "1.0"):
            raise _BadRequest
        if version != "1.1" and version != "1.0":
            raise _BadRequest
        url = self.url
        if url[:1] != b"/" or url[:2] == b"//" or b"#" in url:  # not by host, not absolute, not `*`
            raise _BadRequest
        if method == b"TRACE" or method == b"CONNECT":
            raise _BadRequest

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuse what came; an answer under way is not written into."""
        running = self._running
        idle = running is None or running.response_complete
        if idle or (running.more_body and not running.response_started):  # in the second case it is in the running body
            self.transport.write(_REFUSAL)
            self.transport.close()
        elif running.more_body:
            self.transport.abort()
        else:  # let the answer end, then close; reading goes on, so that we see the client leave
            self._poisoned = True
            running.keep_alive = False
            self.pipeline.clear()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout, self._run_late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _run_late(self) -> None:
        self._deadline = None
        if self._running is None or self._running.response_complete:
            self.transport.close()


def _refusal() -> bytes:
    error = {
        "message": "This is not a valid HTTP/1.1 request.",
        "type": "invalid_request_error",
        "param": None,
        "code": "bad_http",
    }
    body = json.dumps({"error": error}).encode("ascii")
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-compaction-error: 1\r\nconnection: close\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


_REFUSAL = _refusal()


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

    def __init__(self, app: ASGIApp, admin: ASGIApp, sockets: tuple[socket.socket, socket.socket], header_timeout: float) -> None:
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
    keep_large_blocks()
    _quiet_uvicorn()
    logging.raiseExceptions = False  # a log that nobody reads any more must not fail a request

    async def main() -> int:
        pair = _Pair(app, admin, sockets, header_timeout)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, pair.on_signal)
        try:
            await pair.open()
        except StartupFailed:
            return 1
        if on_started is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads our output
                on_started(Addresses(_address(sockets[0]), _address(sockets[1])))
        await pair.stop.wait()
        await pair.drain(drain_timeout)
        return 0

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(main())
    _flush_output()
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


def _address(sock: socket.socket) -> Address:
    host, port = sock.getsockname()[:2]
    return host, port


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    return uvicorn.Config("", log_config=None).get_loop_factory()


def _says_nothing_new(record: logging.LogRecord) -> bool:
    """Drop what uvicorn says about answers that were broken off on purpose: whoever did it has said so."""
    if record.msg == "ASGI callable returned without completing response.":
        return False
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _quiet_uvicorn() -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.WARNING)
    if _says_nothing_new not in logger.filters:
        logger.addFilter(_says_nothing_new)


def _flush_output() -> None:
    """A closed pipe behind stdout is no failure, and the interpreter's own flush at exit would make it one."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""Our own sockets to the upstream: connections that are never handed on dirty, and a pool that keeps them.

`Sockets.send()` is the raw core that the hot path calls; `SocketTransport` puts the same under an `httpx.AsyncClient`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import Any, cast

import httpx

from proxy.connection import Connection, DiedUnanswered, Headers, Origin, Reply
from proxy.errors import UpstreamError

Body = Sequence[bytes] | AsyncIterator[bytes]

IDLE_SECONDS = 4.0
"""How long a connection may wait for its next use: under the 5 s after which uvicorn and Node close theirs."""
ATTEMPT_DELAY = 0.25
"""Seconds that an address has before the next one is tried beside it (RFC 8305, section 5)."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits in seconds. read: the longest silence before the head and between pieces; None waits for ever."""

    connect: float | None = 5.0
    read: float | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request without its body, which can be sent any number of times. head: written out as far as how the body is framed."""

    method: bytes
    target: bytes
    headers: Headers = field(repr=False)  # with a credential among them
    head: bytes = field(repr=False)


class Sockets:
    """Connections by origin: the one used last is used first, and what idles too long is closed by a timer."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, idle_seconds: float = IDLE_SECONDS) -> None:
        self._tls = tls
        self._idle_seconds = idle_seconds
        self._idle: dict[Origin, dict[Connection, float]] = {}
        self._open: set[Connection] = set()
        self._pruner: asyncio.TimerHandle | None = None
        self._closed = False

    async def exchange(
        self, origin: Origin, method: bytes, target: bytes, headers: Headers, body: Body = (), patience: Patience = Patience()
    ) -> Reply:
        """Send one request and return when the head of its answer is there.

        `headers` are sent as they are and say how the body is framed: its length, or chunked for an iterated one.
        A body that is a sequence is sent again, once, when a connection from the pool turns out dead before the first byte
        of an answer; an iterated one cannot be, so it gets a new connection. Raises UpstreamError.
        """
        prepared = prepare(method, target, headers)
        if isinstance(body, Sequence):
            return await self.send(origin, prepared, body, None, patience)
        if (b"transfer-encoding", b"chunked") in headers:
            body = _chunked(body)
        return await self.send(origin, prepared, (), None, patience, body)

    async def send(
        self,
        origin: Origin,
        prepared: Prepared,
        body: Sequence[bytes],
        length: int | None,
        patience: Patience,
        upload: AsyncIterator[bytes] | None = None,
    ) -> Reply:
        """The same for a head that is ready. length: of the body, where the head does not tell it yet and should.

        upload: what is iterated in place of the body. Raises UpstreamError, and what iterating the upload raises.
        """
        head = prepared.head + (b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)
        idle = self._idle.get(origin) if upload is None else None
        while True:
            if idle:
                connection, _ = idle.popitem()
                if connection.transport.is_closing() or connection.probe.poll(0):  # the loop has not yet seen what waits in it
                    connection.abort()
                    continue
            else:
                idle = None
                connection = await self._connect(origin, patience.connect)
            try:
                reply = connection.ask(head, body, length, prepared.method == b"HEAD", patience.read)
                if upload is not None:
                    connection.send_on(upload)
                while not reply.status:
                    if reply.failure is not None:
                        connection.raise_failure(reply.failure)
                    await reply.news()
                return reply
            except DiedUnanswered:
                connection.abort()  # with what still uploads on it
                if idle is None:  # the connection was new
                    raise UpstreamError("the upstream closed the connection without an answer", reason="read") from None
                idle = None  # once more, on a new one
            except BaseException:
                connection.abort()
                raise

    async def _connect(self, origin: Origin, limit: float | None) -> Connection:
        made: list[Connection] = []

        def make() -> Connection:
            made.append(Connection(self, origin))
            return made[-1]

        connected: Connection | None = None
        try:
            async with asyncio.timeout(limit):
                connected = await self._dial(origin, make)
        except TimeoutError:
            raise UpstreamError(
                "the upstream did not accept a connection in time", reason="timeout", status=504, code="upstream_timeout"
            ) from None
        except ssl.SSLError as error:
            raise UpstreamError(f"no secure connection to the upstream: {_tls_reason(error)}", reason="connect") from None
        except (OSError, UnicodeError) as error:
            raise UpstreamError(f"no connection to the upstream: {_dial_reason(error)}", reason="connect") from None
        finally:
            for connection in made:  # a dial that was cancelled or lost the race may have got its socket
                if connection is not connected:
                    connection.abort()
        if not connected.living:  # it ended meanwhile, and would never be forgotten
            raise UpstreamError("the upstream closed the connection without an answer", reason="read")
        self._open.add(connected)
        return connected

    async def _dial(self, origin: Origin, make: Callable[[], Connection]) -> Connection:
        """Resolve anew each time, so that a change of address is seen as soon as connections are, and try all addresses."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        tls = self._tls if origin.tls else None
        if origin.tls and tls is None:
            tls = self._tls = tls_context()
        name = origin.host if tls is not None else None

        async def attempt(address: str) -> Connection:
            _, connection = await loop.create_connection(make, address, origin.port, ssl=tls, server_hostname=name)
            return connection

        return await _first([partial(attempt, address) for address in _in_turn(found)])

    def park(self, connection: Connection) -> None:
        """Keep a clean connection for the next caller."""
        if self._closed:
            connection.abort()
            return
        self._idle.setdefault(connection.origin, {})[connection] = connection.loop.time()
        if self._pruner is None:
            self._pruner = connection.loop.call_later(self._idle_seconds, self._prune)

    def forget(self, connection: Connection) -> None:
        """The connection ended."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.origin]

    def _prune(self) -> None:
        loop = asyncio.get_running_loop()
        self._pruner = None
        latest = loop.time() - self._idle_seconds
        oldest: float | None = None
        for idle in list(self._idle.values()):
            for connection, since in list(idle.items()):
                if since > latest:
                    oldest = since if oldest is None else min(oldest, since)
                    break
                del idle[connection]
                connection.abort()
        if oldest is not None:
            self._pruner = loop.call_at(oldest + self._idle_seconds, self._prune)

    async def aclose(self) -> None:
        """Close every connection, those in use as well."""
        self._closed = True
        if self._pruner is not None:
            self._pruner.cancel()
            self._pruner = None
        for connection in list(self._open):
            connection.abort()


def tls_context(ca_file: str | None = None) -> ssl.SSLContext:
    """Verify certificates and names, against `ca_file` or the bundle that comes with httpx; HTTP/1.1 only."""
    context = ssl.create_default_context(cafile=ca_file) if ca_file else httpx.create_ssl_context(trust_env=False)
    context.set_alpn_protocols(["http/1.1"])
    return context


def prepare(method: bytes, target: bytes, headers: Headers) -> Prepared:
    """Write a head out. Raises UpstreamError where it would say something else than it should."""
    fields = [b"%b: %b\r\n" % (name, value) for name, value in headers]
    head = b"%b %b HTTP/1.1\r\n%b" % (method, target, b"".join(fields))
    lines = len(fields) + 1
    if head.count(b"\n") != lines or head.count(b"\r") != lines or b"\0" in head or b" " in target or not target:
        raise UpstreamError("the request cannot be written as HTTP", reason="protocol")
    return Prepared(method, target, headers, head)


def _in_turn(found: Sequence[tuple[Any, ...]]) -> list[str]:
    """The addresses that a name resolves to, families taking turns, the resolver's favorite first."""
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, []).append(address[0])
    turns = chain.from_iterable(zip_longest(*by_family.values()))
    return list(dict.fromkeys(address for address in turns if address is not None))


async def _first(attempts: Iterable[Callable[[], Coroutine[Any, Any, Connection]]]) -> Connection:
    """The first that connects. Each has ATTEMPT_DELAY for itself; a failure starts the next at once."""
    waiting = deque(attempts)
    if len(waiting) == 1:
        return await waiting.popleft()()
    running: set[asyncio.Task[Connection]] = set()
    failure: BaseException = OSError("no address")
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.ensure_future(waiting.popleft()()))
            done, running = await asyncio.wait(
                running, timeout=ATTEMPT_DELAY if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result()
                failure = error
        raise failure
    finally:
        for task in running:
            task.cancel()


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused ({error.verify_message})"
    return (error.reason or "handshake failed").replace("_", " ").lower()


def _dial_reason(error: OSError | UnicodeError) -> str:
    """In words of the operating system, without the address."""
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "its name does not resolve"
    return os.strerror(error.errno).lower() if error.errno else "refused"


class SocketTransport(httpx.AsyncBaseTransport):
    """The same connections for an `httpx.AsyncClient`; its time limits for connecting and reading are kept."""

    def __init__(self, *, ca_file: str | None = None, idle_seconds: float = IDLE_SECONDS) -> None:
        self._sockets = Sockets(tls=tls_context(ca_file) if ca_file else None, idle_seconds=idle_seconds)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError's children."""
        url = request.url
        tls = url.scheme == "https"
        origin = Origin(tls, url.raw_host.decode("ascii"), url.port or (443 if tls else 80))
        limits = request.extensions.get("timeout", {})
        try:
            reply = await self._sockets.exchange(
                origin,
                request.method.encode("ascii"),
                request.extensions.get("target", url.raw_path),
                [(name.lower(), value) for name, value in request.headers.raw],
                await _body_of(request),
                Patience(limits.get("connect"), limits.get("read")),
            )
        except UpstreamError as error:
            raise _as_httpx(error, request) from None
        return httpx.Response(reply.status, headers=reply.headers, stream=_ReplyStream(reply, request), request=request)

    async def aclose(self) -> None:
        await self._sockets.aclose()


class _ReplyStream(httpx.AsyncByteStream):
    def __init__(self, reply: Reply, request: httpx.Request) -> None:
        self._reply, self._request = reply, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while piece := await self._reply.next():
                yield piece
        except UpstreamError as error:
            raise _as_httpx(error, self._request) from None

    async def aclose(self) -> None:
        self._reply.close()


async def _body_of(request: httpx.Request) -> Body:
    if isinstance(request.stream, httpx.ByteStream):
        content = await request.aread()
        return (content,) if content else ()
    return aiter(cast(httpx.AsyncByteStream, request.stream))


async def _chunked(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Frame an upload whose length is not known."""
    async for piece in pieces:
        if piece:
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def _as_httpx(error: UpstreamError, request: httpx.Request) -> httpx.TransportError:
    match error.reason:
        case "connect":
            return httpx.ConnectError(error.message, request=request)
        case "timeout":
            return httpx.ReadTimeout(error.message, request=request)
        case "protocol":
            return httpx.RemoteProtocolError(error.message, request=request)
    return httpx.ReadError(error.message, request=request)

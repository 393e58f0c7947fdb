"""Our own sockets to the upstream: one HTTP/1.1 exchange at a time on a connection that is never handed on dirty.

`Sockets.exchange()` is the raw core that the hot path calls; `SocketTransport` puts it under an `httpx.AsyncClient`.
A connection goes back to the pool only when its answer was read to a clean end, its request was sent whole and not one
byte too many came; in every other case, cancellation included, it is closed.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple, cast

import httptools
import httpx

from proxy.errors import UpstreamError

Headers = Sequence[tuple[bytes, bytes]]
Sink = Callable[[bytes], bool]
"""Takes a piece at once and says whether it can take more. Must not raise."""
Body = Sequence[bytes] | AsyncIterator[bytes]

READ_AHEAD = 256 * 1024
"""Bytes of an answer held for a slow reader before we stop reading: one full read of uvloop, so a fast one never pauses."""
MAX_SILENT_BYTES = 128 * 1024
"""Bytes that may come without the head ending or the body growing: endless headers, trailers, chunk extensions."""
MAX_FIELDS = 500
"""Header fields of one answer. The busiest providers send about 40."""
MAX_INTERIM = 100
"""Interim answers (1xx) before the real one. One or two are usual; a flood is a fault."""
IDLE_SECONDS = 4.0
"""How long a connection may wait for its next use: under the 5 s after which uvicorn and Node close theirs."""
JOIN_BELOW = 64 * 1024
"""A request up to this size leaves as one buffer; copying more costs more than a second buffer."""
ATTEMPT_DELAY = 0.25
"""Seconds that an address has before the next one is tried beside it (RFC 8305, section 5)."""


class Origin(NamedTuple):
    """Where a connection leads. host: a name or address, without brackets."""

    tls: bool
    host: str
    port: int


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
    headers: Headers
    head: bytes


class _Refused(Exception):
    """Raised inside a parser callback: what came is no answer that we pass on."""


class _DiedUnanswered(Exception):
    """The connection ended before a single byte of the answer came."""


class _Connection(asyncio.Protocol):
    """One socket: writes a request, parses the answer, keeps its pieces until they are fetched."""

    def __init__(self, pool: Sockets, origin: Origin) -> None:
        self.pool, self.origin = pool, origin
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.parked = self.lost = self.write_paused = self.read_paused = False
        self.reader: asyncio.Future[None] | None = None
        self.writer: asyncio.Future[None] | None = None
        self.upload: asyncio.Task[None] | None = None
        self.patience: float | None = None
        self.sink: Sink | None = None
        self.full = False
        self.probe = select.poll()
        self.begin(b"")

    def begin(self, method: bytes) -> None:
        """Forget the last exchange."""
        self.bodiless = method == b"HEAD"
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: deque[bytes] = deque()
        self.held = self.silent = self.interim = 0
        self.answered = self.headed = self.finished = self.reusable = self.dirty = self.until_close = False
        self.failure: UpstreamError | None = None

    # What the loop tells us

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.lost:  # given up while it was dialing
            self.transport.abort()
            return
        self.probe.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self.parked:  # nobody asked: these bytes must not become the next caller's answer
            self.abort()
            return
        self.answered = True
        before = self.held
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the upstream switched protocols", "protocol")
        except httptools.HttpParserError:
            self._fail("the upstream's answer is not valid HTTP", "protocol")
        if self.headed and self.held != before:
            self.silent = 0
        else:
            self.silent += len(data)
            if self.silent > MAX_SILENT_BYTES and not self.finished:
                self._fail("the upstream's answer has endless headers", "protocol")
        if self.sink is not None and self.pieces and not self.full:
            self.full = not self.sink(self._take())
            if not (self.full or self.finished or self.failure):
                return
        if self.held > READ_AHEAD and not self.read_paused and (transport := self._living()):
            self.read_paused = True
            transport.pause_reading()
        self._wake_reader()

    def eof_received(self) -> None:
        return None  # the loop then closes the transport and calls connection_lost

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.pool.forget(self)
        if not self.finished:
            if exc is None and self.until_close and self.failure is None:
                self.finished = True
            else:
                self._fail("the upstream closed the connection before the answer was complete", "read")
        self._wake_reader()
        self._wake_writer()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        self._wake_writer()

    # What the parser tells us

    def on_message_begin(self) -> None:
        if self.finished:  # a second answer to one request
            self.dirty = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.headed:  # what comes later is a trailer: dropped
            if len(self.headers) >= MAX_FIELDS:
                raise _Refused
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.finished:
            return
        status = self.parser.get_status_code()
        if status < 200:
            self._skip_interim(status)
            return
        if status > 599 or self.parser.get_http_version() not in ("1.1", "1.0"):
            raise _Refused
        framed, size = False, 0
        for name, value in self.headers:
            size += len(name) + len(value)
            match name.lower():
                case b"content-length":
                    framed = True
                case b"transfer-encoding":
                    if value.strip().lower() != b"chunked":
                        raise _Refused
                    framed = True
        if size > MAX_SILENT_BYTES:  # of a head that came in one read; a longer one is given up before it ends
            raise _Refused
        self.status, self.headed = status, True
        if self.bodiless:  # the parser does not know that this answers a HEAD, so it cannot be used again
            self.finished = True
        else:
            self.until_close = not framed and status not in (204, 304)

    def _skip_interim(self, status: int) -> None:
        self.interim += 1
        if status < 100 or status == 101 or self.interim > MAX_INTERIM:
            raise _Refused
        self.headers.clear()

    def on_body(self, body: bytes) -> None:
        if self.finished:
            self.dirty = True
            return
        self.pieces.append(body)
        self.held += len(body)

    def on_message_complete(self) -> None:
        if self.headed and not self.finished:
            self.finished = True
            self.reusable = self.parser.should_keep_alive()

    # What the caller does

    async def send(self, method: bytes, head: bytes, body: Body, patience: float | None) -> None:
        """Write the request and wait for the head of the answer. Raises UpstreamError, _DiedUnanswered."""
        self.begin(method)
        self.patience = patience
        try:
            if self.lost or self.transport is None:
                raise _DiedUnanswered
            if isinstance(body, Sequence):
                self._write(head, body)
            else:
                self.transport.write(head)
                self.upload = self.loop.create_task(self._send_pieces(body))
                self.upload.add_done_callback(_heeded)
            while not self.headed and self.failure is None:
                await self._wait()
            if not self.headed:
                self._raise_failure()
        except BaseException:
            self.abort()
            raise

    def _raise_failure(self) -> None:
        if self.upload is not None and self.upload.done() and not self.upload.cancelled():
            self.upload.result()  # the client's side of the upload failed: that is what its handler wants to know
        if not self.answered and self.lost and self.failure is not None and self.failure.reason == "read":
            raise _DiedUnanswered
        if self.failure is not None:
            raise self.failure

    def _write(self, head: bytes, body: Sequence[bytes]) -> None:
        assert self.transport is not None
        if not body:
            self.transport.write(head)
        elif sum(map(len, body)) <= JOIN_BELOW:
            self.transport.write(b"".join((head, *body)))
        else:
            self.transport.writelines((head, *body))

    async def _send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        """Pass an upload on as it comes. A failing source breaks the request off."""
        try:
            async for piece in pieces:
                if not (transport := self._living()):
                    return
                transport.write(piece)
                if self.write_paused:
                    self.writer = self.loop.create_future()
                    await self.writer
        except BaseException:
            self._fail("the request was not sent whole", "read")
            self._wake_reader()
            raise

    async def next(self) -> bytes:
        """All that came since the last call; b"" at the clean end. Raises UpstreamError when there is none."""
        while True:
            if self.pieces:
                return self._take()
            if self.failure is not None:
                raise self.failure
            if self.finished:
                return b""
            await self._wait()

    async def pour(self, sink: Sink) -> bool:
        """Hands all that comes to the sink at once, as far as the clean end: True; False as soon as the sink is full.

        Nobody is woken for it. Raises UpstreamError when there is no clean end.
        """
        self.sink, self.full = sink, False
        try:
            while not self.full:
                if self.pieces:
                    self.full = not sink(self._take())
                elif self.failure is not None:
                    raise self.failure
                elif self.finished:
                    return True
                else:
                    await self._wait()
            return False
        finally:
            self.sink = None

    def _take(self) -> bytes:
        pieces = self.pieces
        if len(pieces) == 1:
            data = pieces.popleft()
        else:
            data = b"".join(pieces)
            pieces.clear()
        self.held = 0
        if self.read_paused:
            self.read_paused = False
            if transport := self._living():
                transport.resume_reading()
        return data

    async def _wait(self) -> None:
        self.reader = self.loop.create_future()
        if self.patience is None:
            await self.reader
            return
        timer = self.loop.call_later(self.patience, self._run_out_of_patience)
        try:
            await self.reader
        finally:
            timer.cancel()

    def _run_out_of_patience(self) -> None:
        if self.upload is None or self.upload.done():
            self._fail("the upstream was silent for too long", "timeout")
        self._wake_reader()  # an upload still under way is no silence: the reader waits again

    def _fail(self, message: str, reason: str) -> None:
        """Keep the first reason. After the clean end there is nothing left to fail; the socket is just not used again."""
        self.reusable = False
        if not self.finished and self.failure is None:
            timeout = reason == "timeout"
            code = "upstream_timeout" if timeout else "upstream_unreachable"
            self.failure = UpstreamError(message, reason=reason, status=504 if timeout else 502, code=code)
        if transport := self._living():
            transport.abort()

    def _living(self) -> asyncio.Transport | None:
        """The socket, unless it is closed or closing: uvloop raises when told anything then."""
        return None if self.transport is None or self.lost or self.transport.is_closing() else self.transport

    def _wake_reader(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _wake_writer(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)

    def release(self) -> None:
        """Back to the pool when nothing is left over, else closed."""
        if self._is_clean():
            self.pool.park(self)
        else:
            self.abort()

    def _is_clean(self) -> bool:
        return (
            self.reusable
            and not (self.dirty or self.lost or self.pieces or self.read_paused)
            and (self.upload is None or self.upload.done())
            and self.transport is not None
            and self.transport.get_write_buffer_size() == 0
        )

    @property
    def is_read(self) -> bool:
        """Whether the answer has come to its clean end, and all of it has been fetched."""
        return self.finished and not self.pieces and self.failure is None

    def is_quiet(self) -> bool:
        """Whether no byte and no end of file waits in the socket, unseen by the loop so far."""
        return self._living() is not None and not self.probe.poll(0)

    def abort(self) -> None:
        if self.upload is not None and not self.upload.done():
            self.upload.cancel()
        if self.transport is not None:
            self.transport.abort()
        else:
            self.lost = True


def _heeded(upload: asyncio.Task[None]) -> None:
    """Its failure is kept with the connection; the request may be over before anybody asks the task for it."""
    if not upload.cancelled():
        upload.exception()


class Reply:
    """The answer of one exchange: its head, then its pieces."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection | None = connection
        self.status = connection.status
        self.headers = connection.headers

    def next(self) -> Awaitable[bytes]:
        """The next piece, b"" at the clean end. Raises UpstreamError when the answer broke off or fell short."""
        if self._connection is None:
            raise UpstreamError("the answer was closed", reason="read")
        return self._connection.next()

    def pour(self, sink: Sink) -> Awaitable[bool] | None:
        """All that comes, handed to the sink as it comes: True at the clean end, False when the sink is full. None where that
        cannot be: a silence could not be measured. Raises UpstreamError."""
        connection = self._connection
        return None if connection is None or connection.patience is not None else connection.pour(sink)

    @property
    def ready(self) -> bool:
        """Whether a piece of it is here."""
        return self._connection is not None and bool(self._connection.pieces)

    @property
    def ended(self) -> bool:
        """Whether all of it has been fetched, to its clean end."""
        return self._connection is not None and self._connection.is_read

    def close(self) -> None:
        """Let the connection go; it is closed unless the answer was read to its clean end. Twice does no harm."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class Sockets:
    """Connections by origin: the one used last is used first, and what idles too long is closed by a timer."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, idle_seconds: float = IDLE_SECONDS) -> None:
        self._tls = tls
        self._idle_seconds = idle_seconds
        self._idle: dict[Origin, dict[_Connection, float]] = {}
        self._open: set[_Connection] = set()
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
        connection = await self._connect(origin, patience.connect)
        return await self._on_new(connection, method, prepared.head + b"\r\n", body, patience)

    async def send(
        self, origin: Origin, prepared: Prepared, body: Sequence[bytes], length: int | None, patience: Patience
    ) -> Reply:
        """The same for a head that is ready. length: of the body, where it is to be told. Raises UpstreamError."""
        head = prepared.head + (b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)
        connection = self._take_idle(origin)
        if connection is not None:
            try:
                await connection.send(prepared.method, head, body, patience.read)
                return Reply(connection)
            except _DiedUnanswered:
                pass
        connection = await self._connect(origin, patience.connect)
        return await self._on_new(connection, prepared.method, head, body, patience)

    async def _on_new(self, connection: _Connection, method: bytes, head: bytes, body: Body, patience: Patience) -> Reply:
        try:
            await connection.send(method, head, body, patience.read)
        except _DiedUnanswered:
            raise UpstreamError("the upstream closed the connection without an answer", reason="read") from None
        return Reply(connection)

    def _take_idle(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            connection.parked = False
            if connection.is_quiet():
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, limit: float | None) -> _Connection:
        made: list[_Connection] = []

        def make() -> _Connection:
            made.append(_Connection(self, origin))
            return made[-1]

        connected: _Connection | None = None
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
        if not connected.lost:  # it may have ended meanwhile, and would never be forgotten
            self._open.add(connected)
        return connected

    async def _dial(self, origin: Origin, make: Callable[[], _Connection]) -> _Connection:
        """Resolve anew each time, so that a change of address is seen as soon as connections are, and try all addresses."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        tls = self._tls if origin.tls else None
        if origin.tls and tls is None:
            tls = self._tls = tls_context()
        name = origin.host if tls is not None else None

        async def attempt(address: str) -> _Connection:
            _, connection = await loop.create_connection(make, address, origin.port, ssl=tls, server_hostname=name)
            return connection

        return await _first([partial(attempt, address) for address in _in_turn(found)])

    def park(self, connection: _Connection) -> None:
        """Keep a clean connection for the next caller."""
        if self._closed:
            connection.abort()
            return
        connection.parked = True
        loop = connection.loop
        self._idle.setdefault(connection.origin, {})[connection] = loop.time()
        if self._pruner is None:
            self._pruner = loop.call_later(self._idle_seconds, self._prune)

    def forget(self, connection: _Connection) -> None:
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
    fields = [b"%b: %b\r\n" % field for field in headers]
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


async def _first(attempts: Iterable[Callable[[], Coroutine[Any, Any, _Connection]]]) -> _Connection:
    """The first that connects. Each has ATTEMPT_DELAY for itself; a failure starts the next at once."""
    waiting = deque(attempts)
    if len(waiting) == 1:
        return await waiting.popleft()()
    running: set[asyncio.Task[_Connection]] = set()
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

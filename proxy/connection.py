"""One connection to an upstream, and one exchange at a time on it: a request is written, its answer kept until it is fetched.

What belongs to an exchange is in its `Reply`; a connection keeps nothing else, so that no exchange finds anything of the last.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import chain
from typing import NamedTuple, NoReturn, Protocol, cast

import httptools

from proxy.errors import UpstreamError

Headers = Sequence[tuple[bytes, bytes]]
Sink = Callable[[bytes], bool]
"""Takes a piece at once and says whether it can take more. Must not raise."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Fields that speak about one connection (RFC 9110, section 7.6.1)."""
NEVER_NAMED_AWAY = frozenset(
    {b"authorization", b"host", b"cookie", b"content-type", b"content-length", b"content-encoding", b"api-key", b"x-api-key"}
)
"""A client cannot have these removed by naming them in its Connection header."""
_USUAL_CONNECTIONS = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close"})

READ_AHEAD = 256 * 1024
"""Bytes of an answer held for a slow reader before we stop reading: one full read of uvloop, so a fast one never pauses."""
MAX_SILENT_BYTES = 128 * 1024
"""Bytes that may come without the head ending or the body growing: endless headers, trailers, chunk extensions."""
MAX_FIELDS = 500
"""Header fields of one answer. The busiest providers send about 40."""
MAX_INTERIM = 100
"""Interim answers (1xx) before the real one. One or two are usual; a flood is a fault."""
JOIN_BELOW = 64 * 1024
"""A request up to this size leaves as one buffer; copying more costs more than a second buffer."""


class Origin(NamedTuple):
    """Where a connection leads. host: a name or address, without brackets."""

    tls: bool
    host: str
    port: int


class DiedUnanswered(Exception):
    """The connection ended before a single byte of the answer came."""


class _Refused(Exception):
    """Raised inside a parser callback: what came is no answer that we pass on."""


class Pool(Protocol):
    """Where a connection is kept while nobody uses it."""

    def park(self, connection: Connection) -> None: ...

    def forget(self, connection: Connection) -> None: ...


class Reply:
    """The answer of one exchange: its head, then its pieces.

    status: 0 until the head is there. headers: as they came, names in lower case, without those of the connection.
    """

    # what most exchanges leave as it is stands here, for all of them
    status = 0
    headers: list[tuple[bytes, bytes]]
    finished = reusable = until_close = paused = full = False
    held = silent = interim = 0
    failure: UpstreamError | None = None
    reader: asyncio.Future[None] | None = None
    upload: asyncio.Task[None] | None = None
    sink: Sink | None = None

    def __init__(self, connection: Connection, bodiless: bool, patience: float | None) -> None:
        self.connection: Connection | None = connection
        self.bodiless, self.patience, self.loop = bodiless, patience, connection.loop
        self.pieces: list[bytes] = []

    async def next(self) -> bytes:
        """All that came since the last call; b"" at the clean end. Raises UpstreamError when it broke off or fell short."""
        while not self.pieces:
            if self.failure is not None:
                raise self.failure
            if self.finished:
                return b""
            await self.news()
        return self.take()

    def pour(self, sink: Sink) -> Awaitable[bool] | None:
        """All that comes, handed to the sink as it comes: True at the clean end, False when the sink is full. None where that
        cannot be: a silence could not be measured. Raises UpstreamError."""
        return None if self.connection is None or self.patience is not None else self._pour(sink)

    async def _pour(self, sink: Sink) -> bool:
        """Nobody is woken for what the sink takes."""
        self.sink, self.full = sink, False
        try:
            while not self.full:
                if self.pieces:
                    self.full = not sink(self.take())
                elif self.failure is not None:
                    raise self.failure
                elif self.finished:
                    return True
                else:
                    await self.news()
            return False
        finally:
            self.sink = None

    def rest(self) -> bytes | None:
        """All that has not been fetched, where it is here to the clean end; it is fetched then."""
        return self.take() if self.finished else None

    @property
    def ready(self) -> bool:
        """Whether a piece of it is here."""
        return bool(self.pieces)

    @property
    def ended(self) -> bool:
        """Whether all of it has been fetched, to its clean end."""
        return self.finished and not self.pieces

    def close(self) -> None:
        """Let the connection go: to the pool when its answer was read to the clean end, its request sent whole and not one byte
        too many came, else it is closed. Twice does no harm."""
        connection = self.connection
        if connection is None:
            return
        self.connection = None
        if (
            self.reusable
            and not self.pieces
            and (self.upload is None or self.upload.done())
            and connection.transport.get_write_buffer_size() == 0
        ):
            connection.pool.park(connection)
            return
        if not self.ended:
            self.pieces.clear()
            self.finished, self.failure = False, UpstreamError("the answer was closed", reason="read")
        connection.abort()

    def take(self) -> bytes:
        data = b"".join(self.pieces)  # a single one is handed on as it is
        self.pieces.clear()
        self.held = 0
        if self.paused:
            self.paused = False
            if self.connection is not None and self.connection.living:
                self.connection.transport.resume_reading()
        return data

    def news(self) -> Awaitable[None]:
        """Comes when something has come, or ended."""
        reader = self.reader = self.loop.create_future()  # `asyncio.Future` would ask the system for our process first
        return reader if self.patience is None else self._while_patient(reader, self.patience)

    async def _while_patient(self, reader: asyncio.Future[None], seconds: float) -> None:
        timer = self.loop.call_later(seconds, self._run_out_of_patience)
        try:
            await reader
        finally:
            timer.cancel()

    def _run_out_of_patience(self) -> None:
        if self.connection is not None and (self.upload is None or self.upload.done()):
            self.connection.fail("the upstream was silent for too long", "timeout")
        self.wake()  # an upload still under way is no silence: the reader waits again

    def wake(self) -> None:
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class Connection(asyncio.Protocol):
    """One socket: writes a request, parses the answer."""

    transport: asyncio.Transport

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self.pool, self.origin = pool, origin
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpResponseParser(self)
        self.made = self.lost = self.write_paused = False
        self.reading = 0  # bytes of the read that is being parsed
        self.writer: asyncio.Future[None] | None = None
        self.fields: list[tuple[bytes, bytes]] = []
        self.reply = Reply(self, False, None)
        self.reply.connection = None  # nobody has asked for anything
        self.probe = select.poll()

    # What the loop tells us

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.made = True
        if self.lost:  # given up while it was dialing
            self.transport.abort()
            return
        self.probe.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        reply = self.reply
        if reply.connection is None:  # nobody asked: these bytes must not become the next caller's answer
            self.abort()
            return
        size = self.reading = len(data)
        pieces = reply.pieces
        before = len(pieces)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail("the upstream switched protocols", "protocol")
        except httptools.HttpParserError:
            self.fail("the upstream's answer is not valid HTTP", "protocol")
        if len(pieces) == before:
            reply.silent += size
            if reply.silent > MAX_SILENT_BYTES and not reply.finished:
                self.fail("the upstream's answer has endless headers", "protocol")
        else:
            reply.silent = 0
            sink = reply.sink
            if sink is not None and not reply.full:
                piece = b"".join(pieces)
                pieces.clear()
                room = sink(piece)
                if room and not reply.finished and reply.failure is None:
                    return
                reply.full = not room
            else:
                reply.held += size
                if reply.held > READ_AHEAD and not reply.paused and self.living:
                    reply.paused = True
                    self.transport.pause_reading()
        if (reader := reply.reader) is not None and not reader.done():
            reader.set_result(None)

    def eof_received(self) -> None:
        return None  # the loop then closes the transport and calls connection_lost

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.pool.forget(self)
        reply = self.reply
        if reply.until_close and exc is None and reply.failure is None:
            reply.finished = True
        else:
            self.fail("the upstream closed the connection before the answer was complete", "read")
        reply.wake()
        self._wake_writer()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        self._wake_writer()

    # What the parser tells us

    def on_message_begin(self) -> None:
        if self.reply.finished:  # a second answer to one request
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        reply = self.reply
        status = self.parser.get_status_code()
        if status < 200:
            self._skip_interim(status)
            return
        fields = self.fields
        self.fields = []  # what comes later is a trailer: dropped
        if len(fields) > MAX_FIELDS:
            raise _Refused
        # one that does not end is given up as it comes; this one may have ended in the read that was too much
        if reply.silent + self.reading > MAX_SILENT_BYTES and sum(map(len, chain.from_iterable(fields))) > MAX_SILENT_BYTES:
            raise _Refused
        if status > 599 or self.parser.get_http_version() not in ("1.1", "1.0"):
            raise _Refused
        named = dict(fields)
        if b"transfer-encoding" in named:
            if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in fields):
                raise _Refused
        elif b"content-length" not in named:
            reply.until_close = status not in (204, 304)
        reply.status, reply.headers = status, fields if HOP_BY_HOP.isdisjoint(named) else end_to_end(fields)
        if reply.bodiless:  # the parser does not know that this answers a HEAD, so it cannot be used again
            reply.finished = True

    def _skip_interim(self, status: int) -> None:
        self.reply.interim += 1
        if status < 100 or status == 101 or self.reply.interim > MAX_INTERIM:
            raise _Refused

    def on_body(self, body: bytes) -> None:
        if self.reply.finished:
            self.reply.reusable = False
        else:
            self.reply.pieces.append(body)

    def on_message_complete(self) -> None:
        reply = self.reply
        if reply.status and not reply.finished:
            reply.finished = True
            reply.reusable = self.parser.should_keep_alive()
        self.fields = []  # what came behind the head were trailers

    # What the caller does

    def ask(self, head: bytes, body: Sequence[bytes], length: int | None, bodiless: bool, patience: float | None) -> Reply:
        """Begin an exchange: write the request. length: of the body, where it is known. bodiless: whether the answer is."""
        reply = self.reply = Reply(self, bodiless, patience)
        if (sum(map(len, body)) if length is None else length) <= JOIN_BELOW:
            self.transport.write(b"".join((head, *body)))
        else:
            self.transport.writelines((head, *body))
        return reply

    def send_on(self, pieces: AsyncIterator[bytes]) -> None:
        """Begin to pass on the body of the request just begun."""
        self.reply.upload = self.loop.create_task(self._send_pieces(pieces))
        self.reply.upload.add_done_callback(_heeded)

    async def _send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        """Pass an upload on as it comes. A failing source breaks the request off."""
        try:
            async for piece in pieces:
                if not self.living:
                    return
                self.transport.write(piece)
                if self.write_paused:
                    self.writer = self.loop.create_future()
                    await self.writer
        except BaseException:
            self.fail("the request was not sent whole", "read")
            self.reply.wake()
            raise

    def fail(self, message: str, reason: str) -> None:
        """Keep the first reason. After the clean end there is nothing left to fail; the socket is just not used again."""
        reply = self.reply
        reply.reusable = False
        if not reply.finished and reply.failure is None:
            timeout = reason == "timeout"
            code = "upstream_timeout" if timeout else "upstream_unreachable"
            reply.failure = UpstreamError(message, reason=reason, status=504 if timeout else 502, code=code)
        if self.living:
            self.transport.abort()

    def raise_failure(self, failure: UpstreamError) -> NoReturn:
        """Why there is no head. Raises UpstreamError, DiedUnanswered, and what the upload raised."""
        upload = self.reply.upload
        if upload is not None and upload.done() and not upload.cancelled():
            upload.result()  # the client's side of the upload failed: that is what its handler wants to know
        if self.lost and failure.reason == "read" and not self.reply.silent:
            raise DiedUnanswered
        raise failure

    @property
    def living(self) -> bool:
        """Whether the socket is neither closed nor closing: uvloop raises when told anything then."""
        return self.made and not self.lost and not self.transport.is_closing()

    def abort(self) -> None:
        upload = self.reply.upload
        if upload is not None and not upload.done():
            upload.cancel()
        if self.made:
            self.transport.abort()
        else:
            self.lost = True

    def _wake_writer(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)


def _heeded(upload: asyncio.Task[None]) -> None:
    """Its failure is kept with the connection; the request may be over before anybody asks the task for it."""
    if not upload.cancelled():
        upload.exception()


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The fields of an answer that are not about the connection that it came on; names in lower case."""
    named = dict(headers)
    dropped = HOP_BY_HOP
    if len(named) < len(headers) or named.get(b"connection", b"close") not in _USUAL_CONNECTIONS:
        dropped |= named_by_connection(headers)
    if b"transfer-encoding" in named:
        dropped |= {b"content-length"}
    return [field for field in headers if field[0] not in dropped]


def named_by_connection(headers: Headers) -> frozenset[bytes]:
    """The headers (names in lower case) that the connection's own says to drop, as far as it may."""
    values = [value for name, value in headers if name == b"connection"]
    if all(value in _USUAL_CONNECTIONS for value in values):
        return frozenset()
    tokens = frozenset(token.strip().lower() for value in values for token in value.split(b","))
    return tokens - NEVER_NAMED_AWAY - {b"", b"close", b"keep-alive"}

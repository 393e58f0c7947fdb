"""One request on a connection of ours, and the answer to it: what the app receives, sends, and is told of its client.

It stands where uvicorn's own class for this stood. The pieces of a body are handed on as they came, a body that stalls and a
client that leaves are told without a task or a timer for each request, and the head of an answer leaves together with the
first piece of its body where both are at hand.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from proxy.arrivals import CLIENT

JOIN_BELOW = 64 * 1024
"""A piece up to this size is copied to be written in one go with what frames it."""
READ_AHEAD = 256 * 1024
"""Bytes of a request held for the app before we stop reading: one full read of uvloop, so an app that keeps up never pauses."""
MOST_APART = 8
"""Pieces at hand that are handed on one by one. Where there are more they are small, and each weighs more as an object than
what it says: a body in chunks of two bytes would take thirty times its size."""
LOOK_EVERY = 0.25
"""Seconds between two looks whether a client is still there whose sending we do not read: the loop does not tell then."""

BODILESS = frozenset({204, 304})
"""Statuses of answers that have no body, whatever their headers say."""

_STATUS_LINES = {status: line.removesuffix(b"\r\n") for status, line in STATUS_LINE.items()}


class Cycle:
    """A request and its answer; what the app finds under CLIENT in its scope."""

    # what most requests leave as it is stands here, for all of them
    more_body = True
    disconnected = response_started = response_complete = False
    task: asyncio.Task[None] | None = None
    body_timeout: float | None = None
    _held = _left_to_send = 0
    _end_told = _until_close = _looking = False
    _waiter: asyncio.Future[None] | None = None
    _on_left: Callable[[], None] | None = None
    _chunked: bool | None = None
    _head = b""
    _flusher: asyncio.Handle | None = None

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        transport: asyncio.Transport,
        flow: FlowControl,
        loop: asyncio.AbstractEventLoop,
        on_response: Callable[[], None],
        sent: Awaitable[None],
        expect_100_continue: bool,
        keep_alive: bool,
    ) -> None:
        """sent: done; what `send` gives to wait for where there is nothing to wait for."""
        self.scope = scope
        scope[CLIENT] = self
        self._transport, self._flow, self._loop = transport, flow, loop
        self._on_response, self._sent = on_response, sent
        self.waiting_for_100_continue, self.keep_alive = expect_100_continue, keep_alive
        self._pieces: list[bytes] = []  # taken one by one only while they are few

    # What the connection tells

    def take(self, piece: bytes) -> None:
        """A piece of the body has come."""
        if self.response_complete:
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > READ_AHEAD and not self._flow.read_paused:
            self._flow.pause_reading()
            self.look_later()
        if self._waiter is not None:
            self.set()

    def end_body(self) -> None:
        """The body is whole."""
        if not self.response_complete:
            self.more_body = False
            if self._waiter is not None:
                self.set()

    def lose(self) -> None:
        """The client has left."""
        if self.response_complete:
            return
        self.disconnected = True
        self.set()
        if self._on_left is not None:
            self._on_left()

    def look_later(self) -> None:
        """Looks for the client from time to time, until its sending is read again."""
        if not self._looking:  # an upload stops and goes on a thousand times a second
            self._looking = True
            self._loop.call_later(LOOK_EVERY, self._look)

    def _look(self) -> None:
        """Whether the client has left, behind all that it has sent and we have not read."""
        self._looking = False
        if self.response_complete or self.disconnected or not self._flow.read_paused or self._transport.is_closing():
            return
        there = select.poll()
        there.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if there.poll(0):
            self._transport.abort()
        else:
            self.look_later()

    @property
    def message_event(self) -> Cycle:
        """What uvicorn's protocol wakes the app through."""
        return self

    def set(self) -> None:
        """There is news for `receive`."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # What the app does

    def when_left(self, tell: Callable[[], None] | None) -> None:
        """Calls `tell` as soon as the client leaves before it has its answer, in whatever phase; None: no longer."""
        self._on_left = tell
        if tell is not None and self.disconnected:
            tell()

    def whole(self, most: int) -> list[bytes] | None:
        """All of the body, where it is here already, in one piece or in no more than `most` bytes, and none of it was taken."""
        pieces = self._pieces
        if self.more_body or self._end_told or self.disconnected or self.response_complete:
            return None
        if not pieces or (len(pieces) > 1 and self._held > most):
            return None
        self._pieces, self._held, self._end_told = [], 0, True
        return pieces if len(pieces) <= MOST_APART else [b"".join(pieces)]

    async def receive(self) -> dict[str, Any]:
        """Raises TimeoutError when the body's next piece does not come within `body_timeout`."""
        if self.waiting_for_100_continue and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        while not self.disconnected and not self.response_complete:
            if self._pieces or not (self.more_body or self._end_told):
                body = self._next_piece()
                self._held -= len(body)
                more = self.more_body or bool(self._pieces)
                self._end_told = not more
                return {"type": "http.request", "body": body, "more_body": more}
            self._flow.resume_reading()
            await self._news()
        return {"type": "http.disconnect"}

    def _next_piece(self) -> bytes:
        pieces = self._pieces
        if len(pieces) > MOST_APART:
            joined = b"".join(pieces)
            pieces.clear()
            return joined
        return pieces.pop(0) if pieces else b""

    async def _news(self) -> None:
        waiter = self._waiter = self._loop.create_future()
        if not self.more_body or self.body_timeout is None:
            await waiter
            return
        timer = self._loop.call_later(self.body_timeout, _run_late, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def end(self) -> None:
        """The app is through with it, however that came."""
        self.task = None  # which may hold us: a circle that only the collector would find
        self._on_left = None
        if not (self.response_complete or self.disconnected):
            self._end_badly()
        self._on_response = _nothing

    def _end_badly(self) -> None:
        if not self.response_started:
            self._fail()
        self._flush()
        if not self.response_complete:
            self._break_off()

    def _break_off(self) -> None:
        """The end of an answer that is not whole, so that no client takes it for a whole one."""
        if self._until_close:  # a clean end would be the end of the answer: RST
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    def _fail(self) -> None:
        """An answer in place of the one that the app did not give."""
        body = b"Internal Server Error"
        self._start(
            500,
            [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")],
            waits=False,
        )
        self._send_body(body, more=False)

    def send(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        """Takes an ASGI message, at once where the client's socket is not full."""
        if self._flow.write_paused:
            return self._once_there_is_room(self.send, message)
        if not self.disconnected:
            kind = message["type"]
            if kind == "http.response.body" and self.response_started:
                if not self.response_complete:
                    self._send_body(message.get("body", b""), message.get("more_body", False))
            elif kind == "http.response.start" and not self.response_started:
                self._start(message["status"], message.get("headers", ()), message.get("waits", True))
            else:
                raise RuntimeError(f"unexpected ASGI message {kind!r}")
        return self._sent

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Awaitable[None]:
        """Sends a whole answer, at once where the client's socket is not full."""
        if self._flow.write_paused:
            return self._once_there_is_room(self.answer, status, headers, body)
        if not self.disconnected:
            self._start(status, headers, waits=False)
            self._send_body(body, more=False)
        return self._sent

    async def _once_there_is_room(self, sends: Callable[..., Awaitable[None]], *what: Any) -> None:
        await self.drain()
        await sends(*what)

    def put(self, piece: bytes) -> bool:
        """What `send` does with a piece of the body that is not the last, at once; whether the socket takes more."""
        if self.disconnected:
            return True
        if self._chunked and not self._head and len(piece) <= JOIN_BELOW:  # nearly all pieces of a stream
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            self._send_body(piece, more=True)
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Waits while the client's socket is full."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()

    def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]], waits: bool) -> None:
        """waits: whether the app may wait before the first piece of the body; the head then leaves alone."""
        self.response_started = True
        self.waiting_for_100_continue = False
        if status == 204:  # RFC 9110, section 8.6
            headers = [field for field in headers if field[0] != b"content-length"]
        parts = [_STATUS_LINES[status], *map(b": ".join, headers)]
        named = dict(headers)
        length = named.get(b"content-length")
        if length is not None:
            self._left_to_send, self._chunked = 0 if status == 304 else int(length), False
        elif status not in BODILESS and self.scope["method"] != "HEAD":
            self._until_close = self.scope["http_version"] == "1.0"  # such a client does not know chunks
            self._chunked = not self._until_close
            if self._chunked:
                parts.append(b"transfer-encoding: chunked")
        if b"connection" in named and named[b"connection"].lower() == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            parts.append(b"connection: close")
        count = len(parts) + 1
        head = b"\r\n".join(parts) + b"\r\n\r\n"
        if head.count(b"\n") != count or head.count(b"\r") != count or b"\0" in head:
            self.response_started = self._until_close = False
            raise RuntimeError("invalid response header")
        self._head = head
        if waits:
            self._flusher = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self.disconnected and not self._transport.is_closing():
            self._transport.write(head)

    def _send_body(self, body: bytes, more: bool) -> None:
        framed: tuple[bytes, ...] = ()
        if self.scope["method"] == "HEAD":
            self._left_to_send = 0
        elif self._chunked:
            if body:
                framed = (b"%x\r\n" % len(body), body, b"\r\n")
            if not more:
                framed += (b"0\r\n\r\n",)
        else:
            self._left_to_send -= 0 if self._until_close else len(body)
            if self._left_to_send < 0:
                raise RuntimeError("the body is longer than its content-length")
            framed = (body,)
        head, self._head = self._head, b""
        if head and self._flusher is not None:
            self._flusher.cancel()
        if len(body) > JOIN_BELOW:
            self._transport.writelines((head, *framed) if head else framed)
        elif data := b"".join((head, *framed)):
            self._transport.write(data)
        if not more:
            self._complete()

    def _complete(self) -> None:
        if self._left_to_send != 0:
            raise RuntimeError("the body is shorter than its content-length")
        self.response_complete = True
        self._pieces.clear()  # the connection keeps its last request until the next one
        if self._waiter is not None:
            self.set()
        if not self.keep_alive:
            self._transport.close()
        self._on_response()


def _run_late(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _nothing() -> None:
    """After the app has returned nobody is told of its answer's end."""

"""uvicorn's HTTP/1.1 protocol, hardened: a deadline and limits for what comes, and nothing that could be read in two ways.

uvicorn alone waits for ever for the end of a request's head, takes any number of headers, lets trailers into them, writes
a 400 into the middle of a running answer, and does not see a client leave while its requests queue.
It leans on uvicorn's internals: the locked version is the one that the tests ran with.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
MAX_FIELDS = 200
MAX_PIPELINED = 16
"""Requests that may wait behind one another on a connection before we stop reading it. Hardly any client sends two."""
JOIN_BELOW = 64 * 1024
"""A piece up to this size is copied to be written in one go with what frames it."""


class _BadRequest(Exception):
    """Raised inside a parser callback: uvicorn then answers 400 and closes."""


class _Cycle(RequestResponseCycle):
    """uvicorn's request and answer, with the head and the first piece of the body in one write where both are at hand."""

    _head = b""
    _flusher: asyncio.Handle | None = None
    _until_close = False

    async def run_asgi(self, app: Any) -> None:
        async def whole(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                self._flush()
                if self._until_close and not self.response_complete and not self.disconnected:
                    _reset(self.transport)  # a clean end would be the end of the answer

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
            self._until_close = self.scope["http_version"] == "1.0"  # such a client does not know chunks
            self.chunked_encoding = not self._until_close
        if self.chunked_encoding:
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
        elif self._until_close:
            parts = (body,) if body else ()
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


def _reset(transport: asyncio.Transport) -> None:
    """End the connection with an RST, which no client takes for the end of an answer."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


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

"""uvicorn's HTTP/1.1 protocol, hardened: a deadline and limits for what comes, and nothing that could be read in two ways.

uvicorn alone waits for ever for the end of a request's head, takes any number of headers, lets trailers into them, writes
a 400 into the middle of a running answer, and does not see a client leave while its requests queue.
It leans on uvicorn's internals: the locked version is the one that the tests ran with.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.arrivals import NOTES, Headers
from proxy.cycle import Cycle

MAX_HEAD_BYTES = 64 * 1024
MAX_FIELDS = 200
LONGEST_LENGTH = 20
"""Digits of a content-length that is taken for one more of the same head; a longer one is checked anew."""
MAX_PIPELINED = 16
"""Requests that may wait behind one another on a connection before we stop reading it. Hardly any client sends two."""
MOST_PIPELINED = 1_000
"""The same for what one read brings, which may be ten thousand: each takes 2.5 KB, ninety times what it says."""


class _BadRequest(Exception):
    """Raised inside a parser callback: uvicorn then answers 400 and closes."""


class _Head:
    """A head that was checked. Clients say the same with each request on a connection, but for the length of the body: what
    follows from the rest is found once, and kept for as long as it stays so.

    scope: what ASGI is told of it, without what belongs to one request.
    """

    __slots__ = ("_fields", "_length_at", "_method", "_url", "_version", "continues", "keep_alive", "scope")

    def __init__(self, url: bytes, method: bytes, version: str, fields: Headers) -> None:
        self._url, self._method, self._version, self._fields = url, method, version, fields.copy()
        self._length_at = next((at for at, field in enumerate(fields) if field[0] == b"content-length"), -1)
        self.scope: dict[str, Any] = {}
        self.keep_alive = self.continues = False

    def is_said_again(self, url: bytes, method: bytes, version: str, fields: Headers) -> bool:
        """Whether another head differs in nothing but the body's length."""
        mine, at = self._fields, self._length_at
        if at >= 0 and len(fields) > at and fields[at][0] == b"content-length" and len(fields[at][1]) <= LONGEST_LENGTH:
            mine[at] = fields[at]
        return fields == mine and url == self._url and method == self._method and version == self._version


class StrictHttp(HttpToolsProtocol):
    """uvicorn's httptools protocol with a deadline and limits for the head, and nothing ambiguous let through."""

    header_timeout = 10.0
    _head: _Head | None = None
    cycle: Any  # a Cycle of ours in place of uvicorn's own
    pipeline: Any
    _deadline: asyncio.TimerHandle | None = None
    _in_head = True
    _silent_bytes = 0
    _progress = 0
    _running: Any = None
    _next: Cycle | None = None
    _worker: asyncio.Task[None] | None = None
    _resting: asyncio.Future[None] | None = None
    _poisoned = False
    _idle_since: float | None = None

    def __init__(self, *settings: Any) -> None:
        # each field of each head passes here, so it is not a method; the parser looks it up once, which is right below
        fields: Headers = []
        append = fields.append

        def on_header(name: bytes, value: bytes) -> None:
            append((name.lower(), value))

        self._fields = fields
        self.on_header = on_header  # type: ignore[method-assign]
        super().__init__(*settings)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sent: asyncio.Future[None] = self.loop.create_future()
        self._sent.set_result(None)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        running, waiting = self._running, list(self.pipeline)
        super().connection_lost(exc)
        if self._resting is not None:
            self._wake()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        for cycle in (running, *waiting):  # uvicorn tells only the newest of several pipelined requests
            if cycle is not None:
                cycle.lose()

    def data_received(self, data: bytes) -> None:
        if self._poisoned:
            return
        before = self._progress
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is answered as if it had not asked
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request.")
            return
        if len(self._fields) > MAX_FIELDS:  # of a head that goes on, or of trailers: they weigh twenty times what they say
            self._fields.clear()
            if self._in_head:
                self.send_400_response("Too many headers.")
                return
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
        self._progress += 1
        self.url = b""

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._progress += 1
        parser, head, headers = self.parser, self._head, self._fields.copy()
        said = self.url, parser.get_method(), parser.get_http_version(), headers
        if head is None or not head.is_said_again(*said):
            head = self._head = self._new_head(*said)
        scope = head.scope.copy()
        scope["headers"] = headers
        before = self.cycle
        cycle = self.cycle = Cycle(
            scope,
            self.transport,
            self.flow,
            self.loop,
            self.on_response_complete,
            self._sent,
            head.continues,
            head.keep_alive,
        )
        if before is None or before.response_complete:
            self._start(cycle)
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            raise _BadRequest
        self.pipeline.appendleft(cycle)
        if len(self.pipeline) >= MAX_PIPELINED:  # until then we read on, and so see the client leave
            self.flow.pause_reading()
            self._running.look_later()

    def _new_head(self, url: bytes, method: bytes, version: str, fields: Headers) -> _Head:
        """Raises _BadRequest."""
        head = _Head(url, method, version, fields)
        head.continues = self._check_head(version, method, fields)
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("ascii")
        head.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "method": method.decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "state": self.app_state.copy(),
            NOTES: {},
        }
        # an upgrade is not taken up, and the parser stops after a request that asked for one
        head.keep_alive = version == "1.1" and self.parser.should_keep_alive() and not self.parser.should_upgrade()
        return head

    def on_body(self, body: bytes) -> None:
        self._progress += 1
        self.cycle.take(body)

    def on_message_complete(self) -> None:
        self._fields.clear()  # what came behind the head were trailers: dropped
        self.cycle.end_body()

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            return
        if self.flow.read_paused and len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()
        if self.pipeline:
            self._start(self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """One timer a connection looks from time to time whether it is idle for too long: cheaper than one a request."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None or self.transport.is_closing():
            return  # a request is under way: its end sets the next timer
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            self.transport.close()

    def _check_head(self, version: str, method: bytes, fields: Headers) -> bool:
        """Whether the client waits to be told to go on with the body. Raises _BadRequest."""
        hosts, size, continues = 0, len(self.url), False
        if len(fields) > MAX_FIELDS:
            raise _BadRequest
        for name, value in fields:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                if version == "1.0" or value.strip().lower() != b"chunked":
                    raise _BadRequest
            elif name == b"expect" and value.lower() == b"100-continue":
                continues = True
        if size > MAX_HEAD_BYTES:  # of a head that came in one read; a longer one is refused before it ends
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
        return continues

    def _start(self, cycle: Cycle) -> None:
        """Has a request answered, in the one task of the connection: to make one takes longer than to wake it."""
        self._running = self._next = cycle
        self._idle_since = None
        if self.flow.read_paused:
            cycle.look_later()
        worker = self._worker
        if worker is None:
            worker = self._worker = self.loop.create_task(self._work())
        elif self._resting is not None:
            self._wake()
        # else it takes this one up as soon as the app is through with the one before
        self.tasks.add(worker)

    def _wake(self) -> None:
        resting, self._resting = self._resting, None
        if resting is not None and not resting.done():
            resting.set_result(None)

    async def _work(self) -> None:
        """Answers the connection's requests one after another until it is lost. What an app raises ends it, and is for the loop
        to log; what comes then begins anew."""
        app, task = self.app, self._worker
        try:
            while (cycle := self._next) is not None:
                self._next, cycle.task = None, task
                try:
                    await app(cycle.scope, cycle.receive, cycle.send)
                finally:
                    cycle.end()
                if self._next is not None:
                    await asyncio.sleep(0)  # everyone else's turn: a client may send a thousand at once
                elif not self.transport.is_closing():
                    self.tasks.discard(task)
                    self._resting = self.loop.create_future()
                    await self._resting
        finally:
            self.tasks.discard(task)
            self._worker = self._resting = None
            if self._next is not None and not self.transport.is_closing():
                self._start(self._next)

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

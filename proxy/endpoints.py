"""The straight line of one request, and pass-through for everything else.

Plain ASGI: no framework object stands between the client's bytes and the upstream's. A task watches for the client leaving
from the moment its body was read, so that the upstream stops in whatever phase that happens.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import structlog

from proxy import overflow
from proxy.compaction import CriticalItems
from proxy.compactor import Compactor, Decision, Wish, read_wish
from proxy.errors import ClientError, ClientGone, Unreadable, UpstreamError
from proxy.metrics import ANY, CHAT, COMPACT, Metrics, RequestRecord, printable, saved_by_layer
from proxy.pricing import cost_saved
from proxy.upstream import Answer, Upstream
from proxy.wire import chat_completions, encodings, slices
from proxy.wire.sse import Usage, UsageTap

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Body = Sequence[bytes] | AsyncIterator[bytes]

T = TypeVar("T")

COMPACT_PATH = "/v1/compact"
REFUSALS = frozenset({400, 413, 422, 429, 500})
"""Statuses under which upstreams say that a prompt is too long."""
REFUSAL_BYTES = 64 * 1024
"""An error body up to this size is read whole to learn what it says; a longer one is passed on unread."""
FIRST_EVENT_SECONDS = 0.5
"""How long a stream's head waits for its first event when the prompt may be too long: a refusal comes at once."""
SUSPECT_TOKENS, SUSPECT_SHARE = 1_024, 0.5
"""From this size, or fill of the usable window, a prompt may be too long for the upstream whatever we think."""
LEFT = 499
"""The status under which a request counts whose client left before it had one."""
REWRITTEN = frozenset({b"content-encoding", b"content-md5", b"digest", b"content-digest"})
"""Request headers that speak of bytes which a compacted body no longer has."""

log = structlog.get_logger("proxy")


class Exchange:
    """What one request has come to so far: the facts that its record is made of."""

    __slots__ = (
        "aborted", "answering", "decision", "endpoint", "first_chunk_at", "gone", "overflow", "sent_at", "started", "status",
        "upstream_error", "upstream_seconds", "usage",
    )  # fmt: skip

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.started = time.perf_counter()
        self.sent_at: float | None = None
        self.first_chunk_at: float | None = None
        self.upstream_seconds = 0.0
        self.status = LEFT
        self.answering = False
        self.decision = Decision("none", "not_chat")
        self.usage = Usage()
        self.overflow: str | None = None
        self.upstream_error: str | None = None
        self.gone = False
        self.aborted = False


class Proxy:
    """The ASGI app of the proxy port.

    discover: told the headers of each chat request, to ask the upstream about its models when that is due; must not block.
    """

    def __init__(
        self,
        upstream: Upstream,
        compactor: Compactor,
        metrics: Metrics,
        *,
        max_body_bytes: int = 64 * 1024 * 1024,
        body_timeout: float = 30.0,
        client_keys: Sequence[str] = (),
        discover: Callable[[Headers], None] = lambda _: None,
    ) -> None:
        self._upstream, self._compactor, self._metrics = upstream, compactor, metrics
        self._max_body_bytes, self._body_timeout = max_body_bytes, body_timeout
        self._client_keys = tuple(key.encode() for key in client_keys)
        self._discover = discover

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if scope["method"] == "POST" and chat_completions.matches(path):
            await self._serve(Exchange(CHAT), scope, receive, send, self._chat)
        elif scope["method"] == "POST" and path == COMPACT_PATH:
            await self._serve(Exchange(COMPACT), scope, receive, send, self._compact)
        else:
            await self._serve(Exchange(ANY), scope, receive, send, self._pass)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send, handle: Handler) -> None:
        """One request, however it ends: answered, refused, broken off or left by its client."""
        with self._metrics.inflight(exchange.endpoint):
            try:
                with OURS:
                    await self._handled(exchange, scope, receive, send, handle)
                if not exchange.answering and not exchange.gone:
                    await _refuse(exchange, send, 500, "the proxy failed", "internal_error", None, "proxy_error")
            finally:
                with OURS:
                    self._record(exchange)

    async def _handled(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send, handle: Handler) -> None:
        try:
            self._admit(scope["headers"])
            await handle(exchange, scope, receive, send)
        except ClientError as error:
            await _refuse(exchange, send, error.status, error.message, error.code, error.param, "invalid_request_error")
        except UpstreamError as error:
            exchange.upstream_error = error.reason
            await _refuse(exchange, send, error.status, error.message, error.code, None, "upstream_error")
        except ClientGone:
            exchange.gone = True

    def _admit(self, headers: Headers) -> None:
        """Raises ClientError (401) unless the client has one of the keys, when there are any."""
        if not self._client_keys:
            return
        given = _header(headers, b"authorization").encode("latin-1")
        key = given[7:].strip() if given[:7].lower() == b"bearer " else _header(headers, b"api-key").encode("latin-1")
        # every key is compared, so that the time says nothing about which one was close
        if sum(hmac.compare_digest(key, known) for known in self._client_keys) == 0:
            message = "the client key is wrong" if key else "a client key is needed: send it as the API key"
            raise ClientError(message, status=401, code="invalid_api_key")

    async def _pass(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Everything that is no chat completion: streamed both ways."""
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        upload = Upload(receive, more=has_body)
        await while_client_stays(self._relay(exchange, scope, upload.pieces() if has_body else (), send), upload.left())

    async def _chat(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        wish = read_wish(dict(headers))
        self._discover(headers)
        pieces, more = await self._read_body(receive)
        upload = Upload(receive, pieces, more=more)
        if more:
            exchange.decision = Decision("none", "too_large")
            await while_client_stays(self._relay(exchange, scope, upload.pieces(), send), upload.left())
        else:
            await while_client_stays(self._line(exchange, scope, pieces, wish, send), upload.left())

    async def _compact(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """The sidecar: what would be forwarded, as an answer, and nothing sent anywhere."""
        wish = read_wish(dict(scope["headers"]))
        self._discover(scope["headers"])
        pieces, more = await self._read_body(receive)
        if more:
            raise ClientError("the body is too large", status=413, code="body_too_large")
        wish = replace(wish, mode="force") if wish.mode == "auto" else wish
        decision = exchange.decision = await self._decide(scope, pieces, wish)
        decision = exchange.decision = await self._safely(self._compactor.count(decision), decision)
        try:
            body = self._as_forwarded(decision, pieces, _header(scope["headers"], b"content-encoding"))
            answer = _compact_answer(decision, body)
        except Unreadable:
            raise ClientError("the body is not a chat-completions request", code="unreadable_body", param="messages") from None
        exchange.status, exchange.answering = 200, True
        await _answer(send, 200, b"application/json", answer, _told(decision))

    def _as_forwarded(self, decision: Decision, pieces: Sequence[bytes], coding: str) -> bytes:
        """The body that the upstream would read, without its codings. Raises Unreadable."""
        if decision.reason == "unreadable":
            raise Unreadable("unreadable")
        if decision.body is not None:
            return decision.body
        body = b"".join(pieces)
        return encodings.decoded(body, coding, self._max_body_bytes) if coding else body

    async def _line(self, exchange: Exchange, scope: Scope, pieces: Sequence[bytes], wish: Wish, send: Send) -> None:
        """Decide, forward, recover from an overflow, stream back."""
        exchange.decision = await self._decide(scope, pieces, wish)
        counting = self._count_meanwhile(exchange.decision)
        answer: Answer | Replay
        try:
            answer = await self._send(exchange, scope, pieces)
            if counting is not None:
                exchange.decision = await counting
        finally:
            if counting is not None:
                counting.cancel()
        try:
            if answer.status in REFUSALS:
                answer = await Replay.whole(answer)
            elif _may_be_too_long(exchange.decision, answer):
                answer = await Replay.begun(answer)
            if isinstance(answer, Replay):
                answer = await self._recover(exchange, scope, answer)
            await self._stream(exchange, answer, send)
        finally:
            answer.close()

    async def _relay(self, exchange: Exchange, scope: Scope, body: Body, send: Send) -> None:
        answer = await self._send(exchange, scope, body)
        try:
            await self._stream(exchange, answer, send)
        finally:
            answer.close()

    async def _decide(self, scope: Scope, pieces: Sequence[bytes], wish: Wish) -> Decision:
        encoding = _header(scope["headers"], b"content-encoding")
        credential = _credential(scope["headers"])
        deciding = self._compactor.decide(b"".join(pieces), scope["path"], wish, encoding, credential)
        return await self._safely(deciding, Decision("failed", "internal_error"))

    def _count_meanwhile(self, decision: Decision) -> asyncio.Task[Decision] | None:
        """Counts, while the upstream thinks, what was forwarded without a count."""
        if decision.before is not None or decision.request is None:
            return None
        return asyncio.ensure_future(self._safely(self._compactor.count(decision), decision))

    async def _safely(self, work: Awaitable[T], otherwise: T) -> T:
        """Our own part of a request, and what it comes to when it fails."""
        with OURS:
            return await work
        return otherwise

    async def _read_body(self, receive: Receive) -> tuple[tuple[bytes, ...], bool]:
        """The body's pieces, and whether there is more of it than we hold. Raises ClientGone, ClientError (408)."""
        pieces: list[bytes] = []
        size, more = 0, True
        while more and size <= self._max_body_bytes:
            try:
                async with asyncio.timeout(self._body_timeout):
                    message = await receive()
            except TimeoutError:
                raise ClientError("the request's body did not arrive in time", status=408, code="request_timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            if piece := message.get("body", b""):
                pieces.append(piece)
                size += len(piece)
            more = message.get("more_body", False)
        return tuple(pieces), more

    async def _send(self, exchange: Exchange, scope: Scope, body: Body) -> Answer:
        """The upstream's answer as far as its head."""
        headers: Headers = scope["headers"]
        if exchange.decision.body is not None:
            headers, body = [field for field in headers if field[0] not in REWRITTEN], (exchange.decision.body,)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        exchange.sent_at = time.perf_counter()
        try:
            return await self._upstream.forward(scope["method"].encode(), target, headers, body)
        finally:
            exchange.upstream_seconds += time.perf_counter() - exchange.sent_at

    async def _recover(self, exchange: Exchange, scope: Scope, first: Replay) -> Answer | Replay:
        """The answer to a second, smaller try when the first was refused for its length; else the first, untouched."""
        decision = exchange.decision
        harder = await self._safely(self._after_refusal(exchange, first), None)
        if harder is None:
            return first
        exchange.overflow, exchange.decision = "retried_failed", harder
        try:
            second = await self._send(exchange, scope, ())
        except UpstreamError as error:
            exchange.decision, exchange.upstream_error = decision, error.reason
            return first
        if second.status >= 400:
            second.close()
            exchange.decision = decision
            return first
        exchange.overflow = "retried_ok"
        first.close()
        return second

    async def _after_refusal(self, exchange: Exchange, first: Replay) -> Decision | None:
        """Learns from a refusal; what to try next, None when it was none or nothing can be done."""
        decision = exchange.decision
        refused = first.refusal(decision)
        if refused is None:
            return None
        exchange.overflow = "returned"
        if decision.model is not None:
            self._compactor.learned.refused(decision.model, refused)
        if refused.kind != "prompt" or decision.outcome in ("bypassed", "shadow") or decision.reason == "disabled":
            return None
        return await self._compactor.harder(decision, refused)

    async def _stream(self, exchange: Exchange, answer: Answer | Replay, send: Send) -> None:
        """The answer, chunk by chunk as it comes. One that breaks off never gets a clean end."""
        kind, coding = _header(answer.headers, b"content-type"), _header(answer.headers, b"content-encoding")
        chat = exchange.endpoint == CHAT
        tap = UsageTap(kind, coding) if chat and answer.status < 300 else None
        headers = answer.headers + _told(exchange.decision) if chat else answer.headers
        exchange.status, exchange.answering = answer.status, True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        last = b"\n\n"
        try:
            while chunk := await answer.next():
                if exchange.first_chunk_at is None:
                    exchange.first_chunk_at = time.perf_counter()
                if tap is not None:
                    tap = _fed(tap, chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = chunk
        except UpstreamError as error:
            exchange.upstream_error, exchange.aborted = error.reason, True
            if "event-stream" in kind and not coding:
                await send({"type": "http.response.body", "body": _error_event(error, last), "more_body": True})
            # without a last body message the server drops the connection: the client cannot take it for a whole answer
            return
        finally:
            exchange.upstream_seconds = time.perf_counter() - (exchange.sent_at or exchange.started)
            if tap is not None:
                with OURS:
                    exchange.usage = tap.usage()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _record(self, exchange: Exchange) -> None:
        decision, usage = exchange.decision, exchange.usage
        if exchange.endpoint == CHAT and exchange.status < 300:
            self._compactor.answered(decision, usage)
        self._metrics.record(_record(exchange))
        if decision.model is not None and decision.budget is not None and decision.window is not None:
            self._metrics.set_window(decision.model, decision.window.tokens, decision.budget.usable)
        if decision.is_event and decision.before:
            _tell(decision)


class _Ours:
    """Around our own part of a request. Whatever goes wrong in it, the request goes on: the one place where that is so."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)):
            return False
        # any other BaseException is meant: tiktoken's PanicException is no Exception
        log.error("compaction failed, the request goes on as it came", error=type(error).__name__, at=_where(error))
        return True


OURS = _Ours()

Handler = Callable[[Exchange, Scope, Receive, Send], Awaitable[None]]


class Upload:
    """A request's body: the pieces at hand, then what the client still sends."""

    def __init__(self, receive: Receive, pieces: Sequence[bytes] = (), *, more: bool) -> None:
        self._receive, self._first = receive, pieces
        self._read = asyncio.Event()
        if not more:
            self._read.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it in order. Raises ClientGone."""
        for piece in self._first:
            yield piece
        while not self._read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if not message.get("more_body", False):
                self._read.set()
            if piece := message.get("body", b""):
                yield piece

    async def left(self) -> None:
        """Returns when the client has left. Waits for the whole body first: it tells by itself when it breaks off."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def while_client_stays(work: Awaitable[None], left: Coroutine[Any, Any, None]) -> None:
    """Does the work; stops it at once when the client leaves. Raises ClientGone then."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.ensure_future(left)
    stop = lambda _: task.cancel()  # noqa: E731
    watcher.add_done_callback(stop)
    try:
        await work
    except asyncio.CancelledError:
        if not watcher.done() or watcher.cancelled():
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.remove_done_callback(stop)
        watcher.cancel()


class Replay:
    """An answer whose body was read as far as it says whether the prompt was too long; it can still be passed on."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.status, self.headers = answer.status, answer.headers
        self._pieces: list[bytes] = []
        self._pending: asyncio.Future[bytes] | None = None
        self._ended = False
        self._next = 0

    @classmethod
    async def whole(cls, answer: Answer) -> Replay:
        """Read to its end, or as far as an error's body may go. Raises UpstreamError."""
        replay, size = cls(answer), 0
        while not replay._ended and size <= REFUSAL_BYTES:
            size += replay._take(await answer.next())
        return replay

    @classmethod
    async def begun(cls, answer: Answer) -> Replay:
        """A stream read as far as its first event, if that comes soon; the client's first byte is not made to wait longer."""
        replay, size = cls(answer), 0
        while not replay._ended and size <= REFUSAL_BYTES and not _has_event(replay._pieces):
            replay._pending = asyncio.ensure_future(answer.next())
            await asyncio.wait({replay._pending}, timeout=FIRST_EVENT_SECONDS)
            if not replay._pending.done() or replay._pending.exception() is not None:
                break
            size += replay._take(replay._pending.result())
            replay._pending = None
        return replay

    def refusal(self, decision: Decision) -> overflow.Overflow | None:
        """What the answer says of the prompt's length; None when it says nothing of it."""
        body = b"".join(self._pieces)
        if self.status >= 300:
            return overflow.classify(self.status, body) if self._ended else None
        if not self._ended:
            return overflow.classify_event(body)
        window = decision.window.tokens if decision.window is not None else None
        return overflow.classify_event(body) or overflow.ended_empty(body, forwarded=decision.forwarded or 0, window=window)

    async def next(self) -> bytes:
        if self._next < len(self._pieces):
            self._next += 1
            return self._pieces[self._next - 1]
        if self._ended:
            return b""
        pending, self._pending = self._pending, None
        return await (self._answer.next() if pending is None else pending)

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        self._answer.close()

    def _take(self, piece: bytes) -> int:
        if piece:
            self._pieces.append(piece)
        else:
            self._ended = True
        return len(piece)


def _credential(headers: Headers) -> bytes:
    """What the client authenticates with: callers with different ones share nothing."""
    return b"\0".join(value for name, value in headers if name in (b"authorization", b"api-key", b"x-api-key"))


def _fed(tap: UsageTap, chunk: bytes) -> UsageTap | None:
    """The tap after a chunk; none when it broke: no answer ends because we cannot read it."""
    with OURS:
        tap.feed(chunk)
        return tap
    return None


def _has_event(pieces: list[bytes]) -> bool:
    """Whether an event that says something is there in full."""
    *whole, _ = b"".join(pieces).replace(b"\r\n", b"\n").split(b"\n")
    return any(line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]") for line in whole)


def _may_be_too_long(decision: Decision, answer: Answer) -> bool:
    """Whether a stream that began well may still turn out to be a refusal of the prompt's length."""
    if decision.forwarded is None or answer.status != 200 or "event-stream" not in _header(answer.headers, b"content-type"):
        return False
    return decision.forwarded >= (SUSPECT_TOKENS if decision.budget is None else decision.budget.usable * SUSPECT_SHARE)


def _header(headers: Headers, name: bytes) -> str:
    return next((value for key, value in headers if key.lower() == name), b"").decode("latin-1")


def _told(decision: Decision) -> Headers:
    """The response headers that say what was done."""
    told = [(b"x-compaction", decision.outcome.encode() if decision.outcome != "rejected" else b"none")]
    if decision.before is not None:
        after = decision.before if decision.after is None else decision.after
        told += [(b"x-compaction-tokens-before", b"%d" % decision.before), (b"x-compaction-tokens-after", b"%d" % after)]
    if decision.layers:
        told.append((b"x-compaction-layers", ",".join(decision.layers).encode()))
    if decision.reason is not None and decision.reason != "fits":
        told.append((b"x-compaction-reason", decision.reason.encode()))
    return told


def _compact_answer(decision: Decision, body: bytes) -> bytes:
    """The sidecar's answer: messages as they would be forwarded, and figures. Raises Unreadable."""
    messages = slices.split_object(body).get("messages", b"")
    if messages[:1] != b"[":
        raise Unreadable("no_messages")
    told = {
        "outcome": decision.outcome if decision.outcome != "rejected" else "none",
        "reason": decision.reason,
        "tokens_before": decision.before,
        "tokens_after": decision.after,
        "window": decision.budget.window if decision.budget else None,
        "usable": decision.budget.usable if decision.budget else None,
        "layers": [{"layer": layer, "saved": saved} for layer, saved in _saved(decision)],
    }
    return slices.join_object([("messages", messages), ("compaction", msgspec.json.encode(told))])


def _saved(decision: Decision) -> tuple[tuple[str, int], ...]:
    return saved_by_layer(decision.result) if decision.result is not None and decision.layers else ()


async def _answer(send: Send, status: int, content_type: bytes, body: bytes, headers: Headers) -> None:
    own = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": own + headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _refuse(exchange: Exchange, send: Send, status: int, message: str, code: str, param: str | None, kind: str) -> None:
    """An answer of our own, unless one has begun. Never holds anything that the client did not send as a control header."""
    if exchange.answering:
        return
    exchange.status, exchange.answering = status, True
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
    headers = [(b"x-compaction-error", b"1")]
    if status in (400, 408, 413):
        headers.append((b"connection", b"close"))
    await _answer(send, status, b"application/json", body, headers)


def _error_event(error: UpstreamError, last: bytes) -> bytes:
    """The event that tells a client that its stream broke off, begun on a line of its own."""
    told = {"error": {"message": error.message, "type": "upstream_error", "param": None, "code": error.code}}
    gap = b"" if last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) else b"\n\n"
    return gap + b"data: " + msgspec.json.encode(told) + b"\n\n"


def _where(error: BaseException) -> list[str]:
    """Where it was raised: files and lines, without the values that a traceback's text may hold."""
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]


def _record(exchange: Exchange) -> RequestRecord:
    decision, usage, now = exchange.decision, exchange.usage, time.perf_counter()
    aim, before, after = decision.budget, decision.before, decision.after
    own = max(now - exchange.started - exchange.upstream_seconds, 0.0)
    saved = _saved(decision) if decision.outcome in ("applied", "reused") else ()
    result = decision.result
    return RequestRecord(
        endpoint=exchange.endpoint,
        model=decision.model,
        code=exchange.status,
        stream=bool(decision.request and decision.request.stream),
        duration=now - exchange.started,
        first_chunk=None if exchange.first_chunk_at is None else exchange.first_chunk_at - exchange.started,
        upstream_duration=exchange.upstream_seconds if exchange.sent_at is not None else None,
        overhead=(*decision.seconds.items(), ("total", own)),
        received=before,
        forwarded=decision.forwarded,
        saved=saved,
        outcome=decision.outcome,
        shadow_saved=(before or 0) - (after or 0) if decision.outcome == "shadow" else 0,
        passthrough=decision.reason,
        ratio=(after or 0) / before if decision.is_event and before else None,
        prefix_break="event" if decision.is_event and decision.body is not None else None,
        fill_before=before / aim.usable if before is not None and aim is not None and aim.usable > 0 else None,
        fill_after=after / aim.usable if after is not None and aim is not None and aim.usable > 0 else None,
        validation_failures=tuple(report.refused for report in result.reports if report.refused) if result else (),
        critical=result.critical if result is not None else CriticalItems(),
        overflow=exchange.overflow,
        usage_input=usage.prompt,
        usage_output=usage.completion,
        usage_cached=usage.cached,
        count_error=decision.forwarded / usage.prompt if decision.forwarded and usage.prompt else None,
        upstream_error=exchange.upstream_error or _refusal_class(exchange),
        client_disconnect=exchange.gone,
        stream_abort=exchange.aborted,
        cost_saved=_cost_saved(decision, usage),
    )


def _refusal_class(exchange: Exchange) -> str | None:
    """The upstream's own error as a reason of the errors' metric."""
    if exchange.sent_at is None or exchange.status < 400 or exchange.status == LEFT:
        return None
    return "http_429" if exchange.status == 429 else "http_5xx" if exchange.status >= 500 else "http_4xx"


def _cost_saved(decision: Decision, usage: Usage) -> float | None:
    if decision.outcome not in ("applied", "reused") or decision.before is None or decision.after is None:
        return None
    price = decision.window.price if decision.window is not None else None
    return cost_saved(price, decision.before - decision.after, usage.prompt, usage.cached)


def _tell(decision: Decision) -> None:
    """One line an event, for people."""
    before, after = decision.before or 0, decision.after or 0
    share = 100 * (before - after) / before if before else 0.0
    verb = "Context compacted" if decision.outcome == "applied" else "Context would be compacted"
    log.info(
        f"{verb}: {before} → {after} tokens ({share:.1f}% saved), layers {', '.join(decision.layers) or 'none'}",
        model=printable(decision.model),
        window=decision.budget.window if decision.budget else None,
    )

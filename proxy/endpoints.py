"""The straight line of one request, and pass-through for everything else.

Plain ASGI: no framework object stands between the client's bytes and the upstream's.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from proxy.answers import REFUSALS, Replay, compact_answer, error_event, fed, may_be_too_long, refuse, reply, told
from proxy.arrivals import Body, Headers, Receive, Scope, Send, Upload, header, while_client_stays
from proxy.compactor import Compactor, Decision, Wish, read_wish
from proxy.errors import ClientError, ClientGone, Unreadable, UpstreamError
from proxy.exchange import OURS, Exchange, record_of, tell
from proxy.metrics import ANY, CHAT, COMPACT, Metrics
from proxy.summarizers.redaction import credentials
from proxy.upstream import Answer, Upstream
from proxy.wire import chat_completions, encodings
from proxy.wire.sse import UsageTap

T = TypeVar("T")

COMPACT_PATH = "/v1/compact"
REWRITTEN = frozenset({b"content-encoding", b"content-md5", b"digest", b"content-digest"})
"""Request headers that speak of bytes which a compacted body no longer has."""


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
                    await refuse(exchange, send, 500, "the proxy failed", "internal_error", None, "proxy_error")
            finally:
                with OURS:
                    self._record(exchange)

    async def _handled(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send, handle: Handler) -> None:
        try:
            self._admit(scope["headers"])
            await handle(exchange, scope, receive, send)
        except ClientError as error:
            await refuse(exchange, send, error.status, error.message, error.code, error.param, "invalid_request_error")
        except UpstreamError as error:
            exchange.upstream_error = error.reason
            await refuse(exchange, send, error.status, error.message, error.code, None, "upstream_error")
        except ClientGone:
            exchange.gone = True

    def _admit(self, headers: Headers) -> None:
        """Raises ClientError (401) unless the client has one of the keys, when there are any."""
        if not self._client_keys:
            return
        given = header(headers, b"authorization").encode("latin-1")
        key = given[7:].strip() if given[:7].lower() == b"bearer " else header(headers, b"api-key").encode("latin-1")
        # every key is compared, so that the time says nothing about which one was close
        if sum(hmac.compare_digest(key, known) for known in self._client_keys) == 0:
            message = "the client key is wrong" if key else "a client key is needed: send it as the API key"
            raise ClientError(message, status=401, code="invalid_api_key")

    async def _pass(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Everything that is no chat completion: streamed both ways."""
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        # a body that comes in one piece is kept: the upstream's idle connections serve only what can be sent a second time
        pieces, more = await self._read_body(receive, 0) if has_body else ((), False)
        upload = Upload(receive, pieces, more=more)
        await while_client_stays(self._relay(exchange, scope, upload.pieces() if more else pieces, send), upload.left())

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
            body = self._as_forwarded(decision, pieces, header(scope["headers"], b"content-encoding"))
            answer = compact_answer(decision, body)
        except Unreadable:
            raise ClientError("the body is not a chat-completions request", code="unreadable_body", param="messages") from None
        exchange.status, exchange.answering = 200, True
        await reply(send, 200, b"application/json", answer, told(decision))

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
            elif may_be_too_long(exchange.decision, answer):
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
        encoding = header(scope["headers"], b"content-encoding")
        credential = _credential(scope["headers"])
        # the sidecar asks nobody, so a summary is not asked for either
        headers = credentials(scope["headers"]) if scope["path"] != COMPACT_PATH else ()
        deciding = self._compactor.decide(b"".join(pieces), scope["path"], wish, encoding, credential, headers)
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

    async def _read_body(self, receive: Receive, most: int | None = None) -> tuple[tuple[bytes, ...], bool]:
        """The body's pieces, and whether there is more of it than `most` bytes. Raises ClientGone, ClientError (408)."""
        most = self._max_body_bytes if most is None else most
        pieces: list[bytes] = []
        size, more = 0, True
        while more and size <= most:
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
        kind, coding = header(answer.headers, b"content-type"), header(answer.headers, b"content-encoding")
        chat = exchange.endpoint == CHAT
        tap = UsageTap(kind, coding) if chat and answer.status < 300 else None
        headers = answer.headers + told(exchange.decision) if chat else answer.headers
        exchange.status, exchange.answering = answer.status, True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        last = b"\n\n"
        try:
            while chunk := await answer.next():
                if exchange.first_chunk_at is None:
                    exchange.first_chunk_at = time.perf_counter()
                if tap is not None:
                    tap = fed(tap, chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = chunk
        except UpstreamError as error:
            exchange.upstream_error, exchange.aborted = error.reason, True
            if "event-stream" in kind and not coding:
                await send({"type": "http.response.body", "body": error_event(error, last), "more_body": True})
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
        self._metrics.record(record_of(exchange))
        if decision.model is not None and decision.budget is not None and decision.window is not None:
            self._metrics.set_window(decision.model, decision.window.tokens, decision.budget.usable)
        if decision.is_event and decision.before:
            tell(decision)


Handler = Callable[[Exchange, Scope, Receive, Send], Awaitable[None]]


def _credential(headers: Headers) -> bytes:
    """What the client authenticates with: callers with different ones share nothing."""
    return b"\0".join(value for name, value in headers if name in (b"authorization", b"api-key", b"x-api-key"))

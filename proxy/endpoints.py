"""The straight line of one request, and pass-through for everything else.

Plain ASGI: no framework object stands between the client's bytes and the upstream's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from proxy.answers import (
    REFUSALS,
    Edited,
    Passing,
    Replay,
    compact_answer,
    error_event,
    may_be_too_long,
    refuse,
    refuse_for,
    reply,
    told,
    with_usage_raised,
)
from proxy.arrivals import Body, Client, Headers, Held, Notes, Receive, Scope, Send, Upload, notes_of
from proxy.asked import REWRITTEN, Asked, asked, endpoint_of
from proxy.compactor import Compactor
from proxy.decisions import Decision
from proxy.errors import ClientError, ClientGone, Unreadable, UpstreamError
from proxy.exchange import OURS, Exchange, record_of
from proxy.metrics import ANY, CHAT, COMPACT, Metrics
from proxy.overflow import Overflow
from proxy.telling import Explainer, notice_of, span_event, tell
from proxy.upstream import Answer, Upstream
from proxy.wire import encodings
from proxy.wire.fields import with_less_output, with_usage_asked
from proxy.wire.sse import UsageTap
from proxy.wire.usage import StreamEditor

if TYPE_CHECKING:
    from proxy.tracing import Tracing

T = TypeVar("T")

UNKNOWN_FIELD = frozenset({400, 422})
"""Statuses under which upstreams say that they do not know a field."""
MOST_HELD = 1024 * 1024 * 1024
"""Bytes of the bodies that are held whole: beyond, bodies are passed through as they come."""
FAILED = Decision("failed", "internal_error")
"""Where we could not decide: it goes on as it came."""
SILENT_MODELS = 256
"""Models remembered as not taking the question for usage; clients choose the names."""


@dataclass(frozen=True, slots=True)
class Options:
    """What may be done beyond the messages, all of it off by default.

    clamp_max_tokens: an answer's length that does not fit beside the prompt is lowered, once the upstream has said so.
    ask_usage: streams are asked to tell their usage, which is taken out again. original_usage: usage in answers counts what
    was saved, too.
    """

    clamp_max_tokens: bool = False
    ask_usage: bool = False
    original_usage: bool = False


class Proxy:
    """The ASGI app of the proxy port.

    discover: told the headers of each chat request, to ask the upstream about its models when that is due; must not block.
    notify: given each event as JSON; must not block.
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
        options: Options | None = None,
        explainer: Explainer | None = None,
        notify: Callable[[bytes], None] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._upstream, self._compactor, self._metrics = upstream, compactor, metrics
        self._max_body_bytes, self._body_timeout = max_body_bytes, body_timeout
        self._held = Held(MOST_HELD)
        self._client_keys = tuple(key.encode() for key in client_keys)
        self._discover = discover
        self._options = options or Options()
        self._explainer, self._notify, self._tracing = explainer, notify, tracing
        self._silent: dict[str | None, None] = {}  # models that do not take the question for usage

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return _nothing()
        return self._serve(notes_of(scope), scope, receive, send)

    async def _serve(self, notes: Notes, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, however it ends: answered, refused, broken off or left by its client."""
        known: Asked | None = notes.get(self)
        exchange = Exchange(endpoint_of(scope) if known is None else known.endpoint)
        serving, endpoint = self._metrics.serving, exchange.endpoint
        if self._tracing is not None and endpoint == CHAT:
            with OURS:
                exchange.trace = self._tracing.begin(scope["headers"], scope["path"])
        serving[endpoint] += 1
        try:
            with OURS:
                try:
                    if known is None:
                        known = notes[self] = asked(scope, endpoint, self._client_keys, self._upstream)
                    with Upload(scope, receive, self._body_timeout, self._held) as upload:
                        if endpoint == ANY:
                            await self._pass(exchange, known, scope, upload, send)
                        else:
                            self._discover(scope["headers"])
                            if not upload.takes_at_hand(self._max_body_bytes):
                                await upload.read(self._max_body_bytes)
                            if endpoint == COMPACT:
                                await self._compact(exchange, known, upload, send)
                            else:
                                upload.end_with_client()
                                await self._line(exchange, known, scope, upload, send)
                except ClientGone:
                    exchange.gone = True
                except (ClientError, UpstreamError) as error:
                    await refuse_for(exchange, send, error)
            if not exchange.answering and not exchange.gone:
                await refuse(exchange, send, 500, "the proxy failed", "internal_error", None, "proxy_error")
        finally:
            serving[endpoint] -= 1
            with OURS:
                self._record(exchange)

    async def _pass(self, exchange: Exchange, known: Asked, scope: Scope, upload: Upload, send: Send) -> None:
        """Everything that is no chat completion: streamed both ways."""
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]):
            # one that comes in one piece is kept: the upstream's idle connections serve only what can be sent a second time
            await upload.read(0)
        else:
            upload.whole = True
        upload.end_with_client()
        await self._relay(exchange, known, scope, upload, send)

    async def _relay(self, exchange: Exchange, known: Asked, scope: Scope, upload: Upload, send: Send) -> None:
        answer = await self._send(exchange, known, scope, upload.body)
        try:
            await self._stream(exchange, upload.client, answer, send)
        finally:
            answer.close()

    async def _compact(self, exchange: Exchange, known: Asked, upload: Upload, send: Send) -> None:
        """The sidecar: what would be forwarded, as an answer, and nothing sent anywhere."""
        if not upload.whole:
            if upload.size <= self._max_body_bytes:
                raise ClientError("too many large bodies are under way", status=503, code="busy")
            raise ClientError("the body is too large", status=413, code="body_too_large")
        wish = replace(known.wish, mode="force") if known.wish.mode == "auto" else known.wish
        deciding = self._compactor.decide(b"".join(upload.first), known.path, wish, known.coding, known.caller)
        decision = await self._safely(deciding, FAILED)
        decision = exchange.decision = await self._safely(self._compactor.count(decision), decision)
        try:
            answer = compact_answer(decision, self._as_forwarded(decision, upload.first, known.coding))
        except Unreadable:
            raise ClientError("the body is not a chat-completions request", code="unreadable_body", param="messages") from None
        exchange.status, exchange.answering = 200, True
        self._explain(exchange)
        await reply(send, 200, b"application/json", answer, told(decision) + exchange.beside)

    def _as_forwarded(self, decision: Decision, pieces: Sequence[bytes], coding: str) -> bytes:
        """The body that the upstream would read, without its codings. Raises Unreadable."""
        if decision.reason == "unreadable":
            raise Unreadable("unreadable")
        if decision.body is not None:
            return decision.body
        body = b"".join(pieces)
        return encodings.decoded(body, coding, self._max_body_bytes) if coding else body

    async def _line(self, exchange: Exchange, known: Asked, scope: Scope, upload: Upload, send: Send) -> None:
        """Decide, forward, recover from an overflow, stream back."""
        if not upload.whole:
            exchange.decision = Decision("none", "too_large")
            await self._relay(exchange, known, scope, upload, send)
            return
        pieces = upload.first
        deciding = self._compactor.decide(b"".join(pieces), known.path, known.wish, known.coding, known.caller)
        exchange.decision = await self._safely(deciding, FAILED)
        counting: asyncio.Task[Decision] | None = None
        if exchange.decision.before is None and exchange.decision.request is not None:
            # what is forwarded without a count is counted while the upstream thinks
            counting = asyncio.ensure_future(self._safely(self._compactor.count(exchange.decision), exchange.decision))
        if self._options.ask_usage:
            self._ask_usage(exchange, known, pieces)
        answer: Answer | Replay | None = None
        try:
            answer = await self._send(exchange, known, scope, pieces)
            if counting is not None:
                exchange.decision = await counting
            if exchange.asked_usage and answer.status in UNKNOWN_FIELD:
                answer = await self._unasked(exchange, known, scope, pieces, await Replay.whole(answer))
            if answer.status in REFUSALS:
                answer = await Replay.whole(answer)
            elif may_be_too_long(exchange.decision, answer):
                answer = await Replay.begun(answer)
            if isinstance(answer, Replay):
                answer = await self._recover(exchange, known, scope, pieces, answer)
            await self._stream(exchange, upload.client, answer, send)
        finally:
            if counting is not None:
                counting.cancel()
            if answer is not None:
                answer.close()

    async def _safely(self, work: Awaitable[T], otherwise: T) -> T:
        """Our own part of a request, and what it comes to when it fails."""
        with OURS:
            return await work
        return otherwise

    async def _send(self, exchange: Exchange, known: Asked, scope: Scope, body: Body) -> Answer:
        """The upstream's answer as far as its head."""
        instead, prepared = exchange.body, known.prepared
        headers: Headers = scope["headers"]
        if instead is not None:
            body = (instead,)
            if known.of_bytes:
                headers, prepared = [field for field in headers if field[0] not in REWRITTEN], None
        if exchange.asked_usage:  # what is compressed could not be edited on its way
            headers, prepared = [field for field in headers if field[0] != b"accept-encoding"], None
        if exchange.trace is not None:
            with OURS:
                headers, prepared = exchange.trace.sends(headers, exchange.decision.model), None
        exchange.sent, started = True, perf_counter()
        try:
            if prepared is None or not isinstance(body, (list, tuple)):
                answer = await self._upstream.forward(known.method, known.target, headers, body)
            else:
                answer = await self._upstream.send(prepared, body)
        finally:
            exchange.headed_at = perf_counter()
            exchange.upstream_seconds += exchange.headed_at - started
        if exchange.trace is not None:
            with OURS:
                exchange.trace.answered(answer.status)
        return answer

    def _ask_usage(self, exchange: Exchange, known: Asked, pieces: Sequence[bytes]) -> None:
        """Has a stream tell its usage, where its client did not ask and the model is not known to refuse the question."""
        decision = exchange.decision
        exchange.altered, exchange.asked_usage = None, False
        if decision.request is None or decision.outcome == "shadow" or decision.model in self._silent:
            return
        with OURS:
            if decision.request.stream:
                plain = self._as_forwarded(decision, pieces, known.coding)
                exchange.altered = with_usage_asked(plain, decision.request.fields)
                exchange.asked_usage = exchange.altered is not None

    async def _unasked(
        self, exchange: Exchange, known: Asked, scope: Scope, pieces: Sequence[bytes], first: Replay
    ) -> Answer | Replay:
        """The answer to the request as it came, when asking for usage was what the upstream refused."""
        if b"stream_options" not in (first.text or b"") and b"include_usage" not in (first.text or b""):
            return first
        if len(self._silent) >= SILENT_MODELS:
            self._silent.clear()
        self._silent[exchange.decision.model] = None
        exchange.altered, exchange.asked_usage = None, False
        first.close()
        return await self._send(exchange, known, scope, pieces)

    async def _recover(
        self, exchange: Exchange, known: Asked, scope: Scope, pieces: Sequence[bytes], first: Replay
    ) -> Answer | Replay:
        """The answer to a second, smaller try when the first was refused for its length; else the first, untouched."""
        was = exchange.decision, exchange.altered, exchange.asked_usage
        if not await self._safely(self._retries(exchange, known, pieces, first), False):
            exchange.decision, exchange.altered, exchange.asked_usage = was
            return first
        exchange.overflow = "retried_failed"
        try:
            second = await self._send(exchange, known, scope, ())
        except UpstreamError as error:
            exchange.decision, exchange.altered, exchange.asked_usage = was
            exchange.upstream_error = error.reason
            return first
        if second.status >= 400:
            second.close()
            exchange.decision, exchange.altered, exchange.asked_usage = was
            return first
        exchange.overflow = "retried_ok"
        first.close()
        return second

    async def _retries(self, exchange: Exchange, known: Asked, pieces: Sequence[bytes], first: Replay) -> bool:
        """Learns from a refusal; whether there is something else to try, which the exchange then holds."""
        decision = exchange.decision
        refused = first.refusal(decision)
        if refused is None:
            return False
        exchange.overflow = "returned"
        if decision.model is not None:
            self._compactor.learned.refused(decision.model, refused)
        if decision.outcome in ("bypassed", "shadow") or decision.reason == "disabled":
            return False
        if refused.kind == "max_tokens" and self._options.clamp_max_tokens:
            return self._clamps(exchange, known, pieces, refused)
        harder = await self._compactor.harder(decision, refused) if refused.kind == "prompt" else None
        if harder is None:
            return False
        exchange.decision = harder
        if exchange.asked_usage:
            self._ask_usage(exchange, known, ())
        return True

    def _clamps(self, exchange: Exchange, known: Asked, pieces: Sequence[bytes], refused: Overflow) -> bool:
        """Whether the answer's length could be lowered to what the upstream says is left beside the prompt."""
        request = exchange.decision.request
        if request is None or refused.limit is None or refused.input is None or not refused.exact or refused.of_prompt:
            return False
        plain = exchange.altered
        if plain is None:
            plain = self._as_forwarded(exchange.decision, pieces, known.coding)
        lowered = with_less_output(plain, request.fields, refused.limit - refused.input)
        exchange.altered = lowered if lowered is not None else exchange.altered
        return lowered is not None

    async def _edited(
        self, exchange: Exchange, answer: Answer | Replay, kind: str, coding: str, tap: UsageTap
    ) -> Answer | Replay | Edited:
        """The answer with its usage as the client is to see it; the same answer when there is nothing to do to it."""
        saved = exchange.saved if self._options.original_usage else 0
        if not saved and not exchange.asked_usage:
            return answer
        edited: Answer | Replay | Edited = answer
        raised = not coding and "event-stream" in kind
        if raised:
            edited = Edited(answer, StreamEditor(saved=saved, without_usage=exchange.asked_usage), tap)
        elif not coding and saved and "json" in kind:
            edited, raised = await with_usage_raised(answer, saved, tap)
        if saved:
            exchange.beside.append((b"x-compaction-usage", b"original" if raised else b"upstream"))
        return edited

    async def _stream(self, exchange: Exchange, client: Client | None, answer: Answer | Replay, send: Send) -> None:
        """The answer, chunk by chunk as it comes. One that breaks off never gets a clean end."""
        said = dict(answer.headers)
        kind, coding = said.get(b"content-type", b"").decode("latin-1"), said.get(b"content-encoding", b"").decode("latin-1")
        chat = exchange.endpoint == CHAT
        tap = UsageTap(kind, coding) if chat and answer.status < 300 else None
        source: Answer | Replay | Edited = answer
        if tap is not None and (exchange.asked_usage or self._options.original_usage):
            source = await self._edited(exchange, answer, kind, coding, tap)
        passing = Passing(tap if source is answer else None, coding)  # an edited answer is read as it came
        if self._explainer is not None:
            self._explain(exchange)
        headers = source.headers + told(exchange.decision) + exchange.beside if chat else source.headers
        exchange.status, exchange.answering = answer.status, True
        try:
            if client is not None and (whole := source.rest()) is not None:
                exchange.first_chunk_at = perf_counter()
                passing.see(whole)
                await client.answer(answer.status, headers, whole)
                return
            # waits: a hint to our own server, which ASGI leaves room for
            await send({"type": "http.response.start", "status": answer.status, "headers": headers, "waits": not source.ready})
            if source is answer and b"content-length" in said:
                client = None
            while chunk := await source.next():
                if exchange.first_chunk_at is None:
                    exchange.first_chunk_at = perf_counter()
                passing.see(chunk)
                ended = source.ended
                await send({"type": "http.response.body", "body": chunk, "more_body": not ended})
                if ended:
                    return
                if client is not None and await passing.poured(source, client):
                    break
        except UpstreamError as error:
            exchange.upstream_error, exchange.aborted = error.reason, True
            if "event-stream" in kind and not coding:
                await send({"type": "http.response.body", "body": error_event(error, passing.last), "more_body": True})
            # without a last body message the server drops the connection: the client cannot take it for a whole answer
            return
        finally:
            exchange.upstream_seconds += perf_counter() - exchange.headed_at
            exchange.tap = tap
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _explain(self, exchange: Exchange) -> None:
        """Has what was done explained, once, and tells the client under which id."""
        if self._explainer is None or exchange.explained:
            return
        with OURS:
            id = self._explainer.explain(exchange.decision)
            if id is not None:
                exchange.explained = True
                exchange.beside.append((b"x-compaction-id", id.encode()))

    def _record(self, exchange: Exchange) -> None:
        decision, tap = exchange.decision, exchange.tap
        if self._explainer is not None:
            self._explain(exchange)
        if tap is not None:
            exchange.usage = tap.usage()
            self._compactor.answered(decision, exchange.usage)
        record = record_of(exchange)
        self._metrics.record(record)
        if exchange.trace is not None:
            exchange.trace.end(record, exchange.usage.model, span_event(decision))
        if decision.is_event and decision.before:
            tell(decision)
            if self._notify is not None:
                self._notify(notice_of(decision, time.time()))


async def _nothing() -> None:
    """What is no request, as the start and the end of the app, is nothing to us."""

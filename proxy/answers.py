"""Answers on their way to the client: held back as far as they may be refusals, what we say beside them, and our own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import get_args

import msgspec

from proxy import overflow
from proxy.arrivals import Client, Headers, Send, header
from proxy.connection import Sink
from proxy.decisions import Decision, Outcome
from proxy.errors import ClientError, Unreadable, UpstreamError
from proxy.exchange import OURS, Exchange, saved
from proxy.upstream import Answer
from proxy.wire import slices
from proxy.wire.sse import WHOLE, UsageTap
from proxy.wire.usage import StreamEditor, with_more_prompt

REFUSALS = frozenset({400, 413, 422, 429, 500})
"""Statuses under which upstreams say that a prompt is too long."""
REFUSAL_BYTES = 64 * 1024
"""An error body up to this size is read whole to learn what it says; a longer one is passed on unread."""
FIRST_EVENT_SECONDS = 0.5
"""How long a stream's head waits for its first event when the prompt may be too long: a refusal comes at once."""
SUSPECT_TOKENS, SUSPECT_SHARE = 1_024, 0.5
"""From this size, or fill of the usable window, a prompt may be too long for the upstream whatever we think."""


class Replay:
    """An answer whose body was read as far as it says whether the prompt was too long; it can still be passed on."""

    def __init__(self, answer: Answer | Replay) -> None:
        self._answer = answer
        self.status: int = answer.status
        self.headers: Headers = answer.headers
        self._pieces: list[bytes] = []
        self._pending: asyncio.Future[bytes] | None = None
        self._ended = False
        self._next = 0

    @classmethod
    async def whole(cls, answer: Answer | Replay, limit: int = REFUSAL_BYTES) -> Replay:
        """Read to its end, or as far as `limit` bytes. Raises UpstreamError."""
        replay, size = cls(answer), 0
        while not replay._ended and size <= limit:
            size += replay._take(await answer.next())
        return replay

    @classmethod
    async def begun(cls, answer: Answer | Replay) -> Replay:
        """A stream read as far as its first event, if that comes soon; the client's first byte is not made to wait longer."""
        replay, size = cls(answer), 0
        while not replay._ended and size <= REFUSAL_BYTES and not _has_event(replay._pieces):
            replay._pending = asyncio.ensure_future(answer.next())
            try:
                await asyncio.wait({replay._pending}, timeout=FIRST_EVENT_SECONDS)
            except asyncio.CancelledError:
                replay._pending.cancel()
                raise
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

    @property
    def text(self) -> bytes | None:
        """The whole body, None when it was longer than what was read."""
        return b"".join(self._pieces) if self._ended else None

    def become(self, body: bytes) -> None:
        """What is passed on in place of the body that was read whole."""
        self._pieces = [body] if body else []

    async def next(self) -> bytes:
        if self._next < len(self._pieces):
            self._next += 1
            return self._pieces[self._next - 1]
        if self._ended:
            return b""
        pending, self._pending = self._pending, None
        return await (self._answer.next() if pending is None else pending)

    def pour(self, sink: Sink) -> Awaitable[bool] | None:
        held = self._ended or self._pending is not None or self._next < len(self._pieces)
        return None if held else self._answer.pour(sink)

    def rest(self) -> None:
        return None

    @property
    def ready(self) -> bool:
        return self._next < len(self._pieces)

    @property
    def ended(self) -> bool:
        return self._ended and self._next >= len(self._pieces)

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


class Edited:
    """A stream whose usage is taken out or put right on its way; the tap reads it as it came."""

    def __init__(self, answer: Answer | Replay, editor: StreamEditor, tap: UsageTap | None) -> None:
        self._answer, self._editor, self._tap = answer, editor, tap
        self._ended: UpstreamError | bool = False
        self.status = answer.status
        self.headers = [field for field in answer.headers if field[0] != b"content-length"]

    async def next(self) -> bytes:
        while not self._ended:
            try:
                piece = await self._answer.next()
            except UpstreamError as error:
                self._ended = error
            else:
                self._ended = not piece
                if self._tap is not None and piece:
                    self._tap = fed(self._tap, piece)
            if edited := self._editor.end() if self._ended else self._editor.feed(piece):
                return edited
        if isinstance(self._ended, UpstreamError):
            raise self._ended
        return b""

    def pour(self, sink: Sink) -> None:
        return None

    def rest(self) -> None:
        return None

    ready = ended = False  # what the editor holds back comes after the answer's end

    def close(self) -> None:
        self._answer.close()


async def with_usage_raised(answer: Answer | Replay, saved: int, tap: UsageTap | None) -> tuple[Replay, bool]:
    """A plain answer, read whole, and whether its usage counts `saved` prompt tokens more; a very long one stays as it came.

    The tap, which reads the answer as it came, must be fed no more. Raises UpstreamError.
    """
    replay = await Replay.whole(answer, WHOLE)
    text = replay.text
    if text is not None:
        if tap is not None:
            fed(tap, text)
        with OURS:
            raised = with_more_prompt(text, saved)
            replay.become(raised)
            length = (b"content-length", b"%d" % len(raised))
            replay.headers = [length if field[0] == b"content-length" else field for field in replay.headers]
    return replay, text is not None


def fed(tap: UsageTap, chunk: bytes) -> UsageTap | None:
    """The tap after a chunk; none when it broke: no answer ends because we cannot read it."""
    with OURS:
        tap.feed(chunk)
        return tap
    return None


class Passing:
    """An answer as it goes by: read by the tap, and how it ends so far is known. tap: None where nobody reads it."""

    __slots__ = ("_feed", "_tap", "last")

    def __init__(self, tap: UsageTap | None, coding: str) -> None:
        self._tap = tap
        # of what is not compressed the tap keeps the pieces and does no more: nothing there can fail
        self._feed: Callable[[bytes], None] = self._guarded if tap is None or coding else tap.feed
        self.last = b"\n\n"

    def _guarded(self, chunk: bytes) -> None:
        if self._tap is not None:
            self._tap = fed(self._tap, chunk)

    def see(self, chunk: bytes) -> None:
        """The next piece."""
        self._feed(chunk)
        self.last = chunk

    async def poured(self, source: Answer | Replay | Edited, client: Client) -> bool:
        """Whether the rest of an answer went to the client as it came, without waking us for each piece; else it is yet to be
        fetched. Raises UpstreamError."""

        def pass_on(chunk: bytes) -> bool:
            self.see(chunk)
            return client.put(chunk)

        while (rest := source.pour(pass_on)) is not None:
            if await rest:
                return True
            await client.drain()
        return False


def _has_event(pieces: list[bytes]) -> bool:
    """Whether an event that says something is there in full."""
    *whole, _ = b"".join(pieces).replace(b"\r\n", b"\n").split(b"\n")
    return any(line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]") for line in whole)


def may_be_too_long(decision: Decision, answer: Answer | Replay) -> bool:
    """Whether a stream that began well may still turn out to be a refusal of the prompt's length."""
    forwarded, budget = decision.forwarded, decision.budget
    if forwarded is None or forwarded < (SUSPECT_TOKENS if budget is None else budget.usable * SUSPECT_SHARE):
        return False
    return answer.status == 200 and "event-stream" in header(answer.headers, b"content-type")


def told(decision: Decision) -> Headers:
    """The response headers that say what was done."""
    before, reason = decision.before, decision.reason
    fields = [_OUTCOMES[decision.outcome]]
    if before is not None:
        after = before if decision.after is None else decision.after
        fields += ((b"x-compaction-tokens-before", b"%d" % before), (b"x-compaction-tokens-after", b"%d" % after))
    if decision.layers:
        fields.append((b"x-compaction-layers", ",".join(decision.layers).encode()))
    if reason is not None and reason != "fits":
        fields.append((b"x-compaction-reason", reason.encode()))
    return fields


_OUTCOMES = {outcome: (b"x-compaction", b"none" if outcome == "rejected" else outcome.encode()) for outcome in get_args(Outcome)}


def compact_answer(decision: Decision, body: bytes) -> bytes:
    """The sidecar's answer: messages as they would be forwarded, and figures. Raises Unreadable."""
    messages = slices.split_object(body).get("messages", b"")
    if messages[:1] != b"[":
        raise Unreadable("no_messages")
    figures = {
        "outcome": decision.outcome if decision.outcome != "rejected" else "none",
        "reason": decision.reason,
        "tokens_before": decision.before,
        "tokens_after": decision.after,
        "window": decision.budget.window if decision.budget else None,
        "usable": decision.budget.usable if decision.budget else None,
        "layers": [{"layer": layer, "saved": tokens} for layer, tokens in saved(decision)],
    }
    return slices.join_object([("messages", messages), ("compaction", msgspec.json.encode(figures))])


async def reply(send: Send, status: int, content_type: bytes, body: bytes, headers: Headers) -> None:
    own = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": own + headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(exchange: Exchange, send: Send, status: int, message: str, code: str, param: str | None, kind: str) -> None:
    """An answer of our own, unless one has begun. Never holds anything that the client did not send as a control header."""
    if exchange.answering:
        return
    exchange.status, exchange.answering = status, True
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
    headers = [(b"x-compaction-error", b"1")]
    if status == 408:  # to close while a body still comes is a reset, which takes the answer from a client that still sends
        headers.append((b"connection", b"close"))
    await reply(send, status, b"application/json", body, headers)


async def refuse_for(exchange: Exchange, send: Send, error: ClientError | UpstreamError) -> None:
    """The answer to a request that ended with this error."""
    if isinstance(error, UpstreamError):
        exchange.upstream_error = error.reason
        await refuse(exchange, send, error.status, error.message, error.code, None, "upstream_error")
    else:
        await refuse(exchange, send, error.status, error.message, error.code, error.param, "invalid_request_error")


def error_event(error: UpstreamError, last: bytes) -> bytes:
    """The event that tells a client that its stream broke off, begun on a line of its own."""
    error_body = {"error": {"message": error.message, "type": "upstream_error", "param": None, "code": error.code}}
    gap = b"" if last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) else b"\n\n"
    return gap + b"data: " + msgspec.json.encode(error_body) + b"\n\n"

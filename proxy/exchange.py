"""What one request has come to: its facts while it is served, and the record made of them."""

from __future__ import annotations

import asyncio
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog

from proxy.decisions import Decision
from proxy.pricing import cache_break_cost, cost_saved
from proxy.records import RequestRecord, saved_by_layer
from proxy.wire.sse import NOTHING, Usage

if TYPE_CHECKING:
    from proxy.tracing import Trace

LEFT = 499
"""The status under which a request counts whose client left before it had one."""

NOT_CHAT = Decision("none", "not_chat")

log = structlog.get_logger("proxy")


class Exchange:
    """What one request has come to so far: the facts that its record is made of.

    altered: the body to send in place of the decision's, with other fields than its messages changed. asked_usage: usage was
    asked for in the client's place. beside: further response headers. trace: its spans, when tracing is on.
    """

    __slots__ = (
        "aborted", "altered", "answering", "asked_usage", "beside", "decision", "endpoint", "explained", "first_chunk_at", "gone",
        "headed_at", "overflow", "sent", "started", "status", "trace", "upstream_error", "upstream_seconds", "usage",
    )  # fmt: skip

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.started = time.perf_counter()
        self.sent = False
        self.headed_at = self.started
        self.first_chunk_at: float | None = None
        self.upstream_seconds = 0.0
        self.status = LEFT
        self.answering = False
        self.decision = NOT_CHAT
        self.altered: bytes | None = None
        self.asked_usage = False
        self.explained = False
        self.trace: Trace | None = None
        self.beside: list[tuple[bytes, bytes]] = []
        self.usage: Usage = NOTHING
        self.overflow: str | None = None
        self.upstream_error: str | None = None
        self.gone = False
        self.aborted = False

    @property
    def body(self) -> bytes | None:
        """What is forwarded in place of the body that came; None: as it came."""
        return self.decision.body if self.altered is None else self.altered

    @property
    def saved(self) -> int:
        """Prompt tokens that came and were not forwarded."""
        before, forwarded = self.decision.before, self.decision.forwarded
        return max(before - forwarded, 0) if before is not None and forwarded is not None else 0


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


def _where(error: BaseException) -> list[str]:
    """Where it was raised: files and lines, without the values that a traceback's text may hold."""
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]]


def record_of(exchange: Exchange) -> RequestRecord:
    decision, usage, now = exchange.decision, exchange.usage, time.perf_counter()
    before, after, forwarded = decision.before, decision.after, decision.forwarded
    usable = decision.budget.usable if decision.budget is not None else 0
    stream = decision.request is not None and decision.request.stream
    own = max(now - exchange.started - exchange.upstream_seconds, 0.0)
    return RequestRecord(
        endpoint=exchange.endpoint,
        model=decision.model,
        code=exchange.status,
        stream=stream,
        duration=now - exchange.started,
        first_chunk=exchange.first_chunk_at - exchange.started if stream and exchange.first_chunk_at is not None else None,
        upstream_duration=exchange.upstream_seconds if exchange.sent else None,
        overhead=(*decision.seconds.items(), ("total", own)),
        received=before,
        forwarded=forwarded,
        outcome=decision.outcome,
        passthrough=decision.reason,
        fill_before=before / usable if before is not None and usable > 0 else None,
        fill_after=after / usable if after is not None and usable > 0 else None,
        overflow=exchange.overflow,
        usage_input=usage.prompt,
        usage_output=usage.completion,
        usage_cached=usage.cached,
        count_error=forwarded / usage.prompt if forwarded and usage.prompt else None,
        upstream_error=exchange.upstream_error or (_refusal_class(exchange) if exchange.status >= 400 else None),
        client_disconnect=exchange.gone,
        stream_abort=exchange.aborted,
        trace_id=exchange.trace.trace_id if exchange.trace is not None else None,
        **(_of_compaction(decision, usage) if decision.result is not None else {}),
    )


def _of_compaction(decision: Decision, usage: Usage) -> dict[str, Any]:
    """What there is to record of a request on which layers worked, whatever came of it."""
    result, before, after = decision.result, decision.before, decision.after
    assert result is not None
    return {
        "saved": saved(decision) if decision.outcome in ("applied", "reused") else (),
        "shadow_saved": (before or 0) - (after or 0) if decision.outcome == "shadow" else 0,
        "ratio": (after or 0) / before if decision.is_event and before else None,
        "prefix_break": decision.prefix_break if decision.body is not None else None,
        "validation_failures": tuple(report.refused for report in result.reports if report.refused),
        "critical": result.critical,
        "cost_saved": _cost_saved(decision, usage),
        "cost_broken": _cost_broken(decision, usage),
    }


def _refusal_class(exchange: Exchange) -> str | None:
    """The upstream's own error as a reason of the errors' metric."""
    if not exchange.sent or exchange.status == LEFT:
        return None
    return "http_429" if exchange.status == 429 else "http_5xx" if exchange.status >= 500 else "http_4xx"


def _cost_saved(decision: Decision, usage: Usage) -> float | None:
    if decision.outcome not in ("applied", "reused") or decision.before is None or decision.after is None:
        return None
    price = decision.window.price if decision.window is not None else None
    # what an event takes out was sent the turn before, so it would have been cached, although the event's own request is not
    cached = usage.prompt if decision.rewritten and usage.cached is not None else usage.cached
    return cost_saved(price, decision.before - decision.after, usage.prompt, cached)


def _cost_broken(decision: Decision, usage: Usage) -> float | None:
    if not decision.rewritten or decision.body is None:
        return None
    return cache_break_cost(decision.window.price if decision.window is not None else None, decision.rewritten, usage.cached)


def saved(decision: Decision) -> tuple[tuple[str, int], ...]:
    return saved_by_layer(decision.result) if decision.result is not None and decision.layers else ()

"""What one request has come to: its facts while it is served, and the record made of them."""

from __future__ import annotations

import asyncio
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from proxy.decisions import Decision
from proxy.pricing import cache_break_cost, cost_saved
from proxy.records import RequestRecord, saved_by_layer
from proxy.wire.sse import NOTHING, Usage, UsageTap

if TYPE_CHECKING:
    from proxy.tracing import Trace

LEFT = 499
"""The status under which a request counts whose client left before it had one."""

NOT_CHAT = Decision("none", "not_chat")

log = structlog.get_logger("proxy")


# A Struct, because one is made for every request, and a class of our own takes longer to make
class Exchange(msgspec.Struct):
    """What one request has come to so far: the facts that its record is made of.

    started, headed_at, first_chunk_at: seconds by one clock, at its start, at the answer's head and its first piece.
    altered: the body to send in place of the decision's, with other fields than its messages changed. asked_usage: usage was
    asked for in the client's place. beside: further response headers. tap: what reads a chat's good answer as it goes by, and
    has its usage at the end. trace: its spans, when tracing is on.
    """

    endpoint: str
    started: float = msgspec.field(default_factory=time.perf_counter)
    sent: bool = False
    headed_at: float = 0.0
    first_chunk_at: float | None = None
    upstream_seconds: float = 0.0
    status: int = LEFT
    answering: bool = False
    decision: Decision = NOT_CHAT
    altered: bytes | None = None
    asked_usage: bool = False
    explained: bool = False
    trace: Trace | None = None
    beside: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    tap: UsageTap | None = None
    usage: Usage = NOTHING
    overflow: str | None = None
    upstream_error: str | None = None
    gone: bool = False
    aborted: bool = False

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
    decision, usage = exchange.decision, exchange.usage
    started, upstream_seconds, code = exchange.started, exchange.upstream_seconds, exchange.status
    before, after = decision.before, decision.after
    usable = decision.budget.usable if decision.budget is not None else None
    request, reported = decision.request, usage.prompt
    duration = time.perf_counter() - started
    stream = request is not None and request.stream
    forwarded = before if decision.body is None else after
    fill_before = fill_after = before / usable if usable and before is not None else None
    if after != before:
        fill_after = after / usable if usable and after is not None else None
    # by their places: with names it takes five times as long
    record = RequestRecord(
        exchange.endpoint,
        decision.model,
        code,
        stream,
        duration,
        exchange.first_chunk_at - started if stream and exchange.first_chunk_at is not None else None,
        upstream_seconds if exchange.sent else None,
        (*decision.seconds.items(), ("total", duration - upstream_seconds)),
        before,
        forwarded,
        decision.outcome,
        decision.reason,
        decision.window,
        usable,
        fill_before,
        fill_after,
        reported,
        usage.completion,
        usage.cached,
        forwarded / reported if forwarded and reported else None,
        exchange.overflow,
        exchange.upstream_error if code < 400 else exchange.upstream_error or _refusal_class(exchange),
        exchange.gone,
        exchange.aborted,
        exchange.trace.trace_id if exchange.trace is not None else None,
    )
    return record if decision.result is None else msgspec.structs.replace(record, **_of_compaction(decision, usage))


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

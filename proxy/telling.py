"""What is told of a compaction beside its answer: a line in the log, a notice, an explanation for who wants to look."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from proxy.compaction import CompactionResult
from proxy.decisions import Decision
from proxy.exchange import OURS, saved
from proxy.explain import Shelf, explain, new_id
from proxy.metrics import printable

PENDING = 16
"""Explanations that wait to be written: under a load that makes more of them, some are left out."""
NOTHING_TO_EXPLAIN = frozenset({None, "fits", "unknown_window"})

log = structlog.get_logger("proxy")


class Explainer:
    """Writes explanations in a thread of its own, so that no request waits for one."""

    def __init__(self, explanations: Shelf, *, full_text: bool = False) -> None:
        self._explanations, self._full_text = explanations, full_text
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="explain")
        self._pending = 0

    def explain(self, decision: Decision) -> str | None:
        """The id under which the decision will soon be found; None where there is nothing to explain, or no room to."""
        if not is_notable(decision) or self._pending >= PENDING:
            return None
        id, at = new_id(), time.time()
        self._pending += 1
        writing = asyncio.get_running_loop().run_in_executor(self._pool, self._write, id, at, decision)
        writing.add_done_callback(self._written)
        return id

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _written(self, _: object) -> None:
        self._pending -= 1

    def _write(self, id: str, at: float, decision: Decision) -> None:
        request, aim, before = decision.request, decision.budget, decision.before
        if request is None or aim is None or before is None:
            return
        with OURS:
            came = request.conversation
            result = decision.result or CompactionResult(came, before, before, reason=decision.reason)
            explanation = explain(
                id,
                at=at,
                model=printable(decision.model),
                outcome=decision.outcome,
                reason=decision.reason,
                before=came,
                result=replace(result, tokens_before=before),
                budget=aim,
                stages=result.stages,
                full_text=self._full_text,
            )
            self._explanations.add(explanation)


def is_notable(decision: Decision) -> bool:
    """Whether it is an event, or a request over its trigger to which nothing was done."""
    if decision.request is None or decision.budget is None or decision.before is None:
        return False
    nothing_done = decision.outcome in ("none", "rejected", "failed") and decision.reason not in NOTHING_TO_EXPLAIN
    return decision.is_event or (nothing_done and decision.before > decision.budget.trigger)


def notice_of(decision: Decision, at: float) -> bytes:
    """One event as JSON: figures and names, never what was said. at: Unix time."""
    before, after = decision.before or 0, decision.after or 0
    told = {
        "event": "context_compacted",
        "time": round(at, 3),
        "outcome": decision.outcome,
        "model": printable(decision.model),
        "tokens_before": before,
        "tokens_after": after,
        "saved_share": round((before - after) / before, 4) if before else 0.0,
        "layers": [{"layer": layer, "saved": tokens} for layer, tokens in saved(decision)],
    }
    return msgspec.json.encode(told)


def span_event(decision: Decision) -> dict[str, Any] | None:
    """A compaction as an event of its request's span; None when there was none."""
    if not decision.is_event or decision.before is None or decision.after is None:
        return None
    parts = saved(decision)
    return {
        "compaction.outcome": decision.outcome,
        "compaction.tokens_before": decision.before,
        "compaction.tokens_after": decision.after,
        "compaction.layers": [layer for layer, _ in parts],
        "compaction.layers_saved": [tokens for _, tokens in parts],
    }


def tell(decision: Decision) -> None:
    """One line an event, for people."""
    before, after = decision.before or 0, decision.after or 0
    share = 100 * (before - after) / before if before else 0.0
    verb = "Context compacted" if decision.outcome == "applied" else "Context would be compacted"
    log.info(
        f"{verb}: {before} → {after} tokens ({share:.1f}% saved), layers {', '.join(decision.layers) or 'none'}",
        model=printable(decision.model),
        window=decision.budget.window if decision.budget else None,
    )

"""What one request contributes to the metrics: one frozen value, and tokens that add up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.compaction import CompactionResult, CriticalItems
from proxy.windows import Window

CHAT, COMPACT, ANY = "/chat/completions", "/v1/compact", "/{path}"
ENDPOINTS = (CHAT, COMPACT, ANY)
"""Route templates: the raw path is the client's and never becomes a label."""

CHECKPOINT = "checkpoint"
UNATTRIBUTED = "unattributed"
LAYERS = ("tool_result_budget", "snip", "microcompact", "context_collapse", "auto_compact", "emergency", "summary", CHECKPOINT)
"""Who saves tokens. `summary` is one by a model, `checkpoint` what an earlier event saved and this request resumed."""

OUTCOMES = ("applied", "reused", "rejected", "failed", "shadow")
PASSTHROUGH_REASONS = (
    *("fits", "bypass_header", "disabled", "floor", "unreadable", "deadline", "no_gain", "breaker", "not_chat"),
    *("too_large", "unknown_window", "internal_error", "postponed"),
)
PHASES = ("read", "count", "resume", "compact", "validate", "write", "total")
RULES = ("structure", "size", "lost_error", "lost_request", "lost_constraint", "lost_conclusion", "not_idempotent")
PREFIX_BREAKS = ("event", "edit", "new_conversation")
OVERFLOWS = ("retried_ok", "retried_failed", "returned")
UPSTREAM_ERRORS = ("connect", "timeout", "read", "protocol", "http_4xx", "http_429", "http_5xx")

NO_ITEMS = CriticalItems()


# A Struct, because a frozen dataclass of so many fields takes ten times as long to make, and one is made for each request
class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """What one request contributes. Callers fill what they know; None and () mean "not known" and leave no sample.

    First what every request may have, then what only one has on which layers worked.

    endpoint: one of `ENDPOINTS`. code: the status that the client got; 499 when it left before one.
    duration, first_chunk, upstream_duration: seconds. overhead: (phase, seconds) of our own time; those below 0 count as 0.
    received, forwarded: prompt tokens by our own count, None when nothing was counted; saved: (layer, tokens), net.
    outcome: none, applied, reused, rejected, failed, shadow or bypassed. shadow_saved: tokens that shadow mode would have saved.
    passthrough: why the body went on as it came; of no account when it did not. ratio: tokens after / before of one event.
    window, usable: what the model can hold, and what the request might weigh, None where either is not known.
    fill_before, fill_after: share of what is usable. validation_failures: one rule for each failure.
    usage_*: tokens that the upstream reported. cost_saved: US dollars, None when the price is unknown. cost_broken: those that
    the upstream's prompt cache would have saved, had an event not broken it.
    """

    endpoint: str = CHAT
    model: str | None = None
    code: int = 200
    stream: bool = False
    duration: float | None = None
    first_chunk: float | None = None
    upstream_duration: float | None = None
    overhead: tuple[tuple[str, float], ...] = ()
    received: int | None = None
    forwarded: int | None = None
    outcome: str = "none"
    passthrough: str | None = None
    window: Window | None = None
    usable: int | None = None
    fill_before: float | None = None
    fill_after: float | None = None
    usage_input: int | None = None
    usage_output: int | None = None
    usage_cached: int | None = None
    count_error: float | None = None
    overflow: str | None = None
    upstream_error: str | None = None
    client_disconnect: bool = False
    stream_abort: bool = False
    trace_id: str | None = None
    saved: tuple[tuple[str, int], ...] = ()
    shadow_saved: int = 0
    ratio: float | None = None
    prefix_break: str | None = None
    validation_failures: tuple[str, ...] = ()
    critical: CriticalItems = NO_ITEMS
    cost_saved: float | None = None
    cost_broken: float | None = None


class Account(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request that add up: received − forwarded == sum of saved. gap: tokens that had to be moved for it."""

    received: int
    forwarded: int
    saved: tuple[tuple[str, int], ...]
    gap: int = 0


def saved_by_layer(result: CompactionResult) -> tuple[tuple[str, int], ...]:
    """(layer, tokens) of the layers that had a part in it."""
    return tuple((report.layer, report.saved) for report in result.reports if report.saved and report.refused is None)


def settle(received: int, forwarded: int, saved: Sequence[tuple[str, int]]) -> Account:
    """The account that adds up. What no layer claims is `unattributed`; what is claimed too much is taken from the last layers.

    A request that grew counts as forwarded unchanged: counters cannot go down. Whatever is moved is told in `gap`.
    """
    if received == forwarded and not saved:
        return Account(received, forwarded, ())
    claims = [(layer, tokens) for layer, tokens in saved if tokens]
    total = received - forwarded
    if sum(tokens for _, tokens in claims) == total and all(tokens > 0 for _, tokens in claims):
        return Account(received, forwarded, tuple(claims))
    left, kept = max(total, 0), []
    for layer, tokens in claims:
        granted = min(max(tokens, 0), left)
        left -= granted
        kept.append((layer, granted))
    kept.append((UNATTRIBUTED, left))
    moved = left + max(-total, 0) + sum(abs(tokens - granted) for (_, tokens), (_, granted) in zip(claims, kept, strict=False))
    return Account(received, received - max(total, 0), tuple(one for one in kept if one[1]), moved)

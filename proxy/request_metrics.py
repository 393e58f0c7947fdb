"""The metrics that a request touches, and requests entered into them: many at once, by what they have in common.

A request touches a dozen metrics. Most requests that wait to be entered are alike but for their measures: for all of those
together each counter goes up once, and each histogram takes the whole column of its measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, groupby
from operator import attrgetter, is_not, itemgetter
from typing import Any

from proxy.labels import OTHER, ModelNames, closed, code
from proxy.records import (
    ANY,
    ENDPOINTS,
    NO_ITEMS,
    OUTCOMES,
    OVERFLOWS,
    PASSTHROUGH_REASONS,
    PHASES,
    PREFIX_BREAKS,
    RULES,
    UPSTREAM_ERRORS,
    Account,
    RequestRecord,
    settle,
)
from proxy.tally import Child, Counter, Histogram, Key, Tally

LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FIRST_CHUNK = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80)
SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
FILL = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.25, 2, 5)
ERROR = (0.5, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.25, 2)

MOST_TOKENS = 2**63
"""A number in an upstream's JSON may have any length, and with one that no float holds nothing would be entered."""

FEW = 4
"""Fewer requests of a kind than this cost less one by one than by columns."""

# Getters and a filter that go over all records of a batch without a step of ours for each

SAVING = ("saved", "shadow_saved", "cost_saved", "cost_broken", "critical")
"""What only a request has on which layers worked."""
SAVED = attrgetter(*SAVING)
NOTHING_SAVED = SAVED(RequestRecord())
KIND = attrgetter(
    *("endpoint", "model", "stream", "code", "outcome", "passthrough", "overflow", "upstream_error", "prefix_break"),
    *("validation_failures", "client_disconnect", "stream_abort", *SAVING),
)
"""What decides on labels, and on the way in. Requests that have it in common go up together."""
OBSERVED = attrgetter("duration", "first_chunk", "upstream_duration", "ratio", "fill_before", "fill_after", "count_error")
"""Measures of which a request has one or none, in the order of `_Row.observed`."""
TRACED = attrgetter("duration", "first_chunk", "upstream_duration")
"""Those whose histograms bear trace ids: the first of `OBSERVED`."""
ADDED = attrgetter("usage_input", "usage_output", "usage_cached")
"""Tokens that the upstream told of or not, in the order of `_Row.added`."""
TOKENS = attrgetter("received", "forwarded")
OVERHEAD = attrgetter("overhead")
is_known = partial(is_not, None)


@dataclass(frozen=True, slots=True)
class _Row:
    """What requests of one endpoint, model and kind touch, at hand: labels, and the histograms and counters that bear them.

    endpoint, model: label values as they stand in keys. codes: status → key of the requests' counter. observed, added: where
    each measure of `OBSERVED` and each amount of `ADDED` goes.
    """

    endpoint: Key
    model: Key
    stream: str
    codes: dict[int, Key]
    observed: tuple[Child, ...]
    added: tuple[tuple[Counter, Key], ...]


class RequestMetrics:
    """The metrics that a request touches. Whoever enters some holds the tally's lock.

    models, timed: the labels that names of models get, in counters and in histograms.
    """

    def __init__(self, tally: Tally, models: ModelNames, timed: ModelNames) -> None:
        self._tally, self._models, self._timed = tally, models, timed
        self._make_request_metrics()
        self._make_token_metrics()
        self._make_compaction_metrics()
        self._make_upstream_metrics()
        self._rows: dict[tuple[str, str, str, bool], _Row] = {}  # by label, which are few
        self._phases = {phase: self._overhead.child(phase) for phase in PHASES}
        self._other_phase = self._overhead.child(OTHER)
        self.serving = dict.fromkeys(ENDPOINTS, 0)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return self._tally.counter(f"compaction_{name}", told, *labels)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return self._tally.histogram(f"compaction_{name}", told, buckets, *labels)

    def _make_request_metrics(self) -> None:
        self._requests = self._counter("requests_total", "Requests answered.", "endpoint", "model", "code", "stream")
        self._duration = self._histogram(
            "request_duration_seconds", "From the request's head to the answer's end.", LONG, "endpoint", "model", "stream"
        )
        self._first_chunk = self._histogram(
            "time_to_first_chunk_seconds",
            "From the request's head to the first body bytes of a streamed answer.",
            FIRST_CHUNK,
            "model",
        )
        self._overhead = self._histogram("overhead_seconds", "Our own time in a request, without the upstream's.", SHORT, "phase")
        self._inflight = self._tally.gauge("compaction_inflight_requests", "Requests being served now.", "endpoint")
        self._disconnects = self._counter("client_disconnects_total", "Clients that left before their answer's end.", "endpoint")
        self._aborts = self._counter("stream_aborts_total", "Answers broken off because the upstream broke off.", "endpoint")

    def _make_token_metrics(self) -> None:
        self._received = self._counter(
            "prompt_tokens_received_total", "Prompt tokens that clients sent, by our own count.", "model"
        )
        self._forwarded = self._counter(
            "prompt_tokens_forwarded_total", "Prompt tokens that went upstream, by our own count.", "model"
        )
        self._saved = self._counter(
            "prompt_tokens_saved_total", "Prompt tokens not forwarded, net of stubs and summaries.", "model", "layer"
        )
        self._shadow = self._counter(
            "shadow_prompt_tokens_saved_total", "Prompt tokens that shadow mode would have saved.", "model"
        )
        self._gaps = self._counter(
            "unattributed_prompt_tokens_total", "Prompt tokens moved to make a request's account add up; stays 0.", "model"
        )
        self._cost = self._counter(
            "cost_saved_usd_total", "US dollars that the saved tokens would have cost; none when unpriced.", "model"
        )
        self._cost_broken = self._counter(
            "cache_break_cost_usd_total", "US dollars that prompts cost more where an event broke their cache.", "model"
        )

    def _make_compaction_metrics(self) -> None:
        self._events = self._counter("events_total", "Requests over their trigger, by what came of it.", "model", "outcome")
        self._passthrough = self._counter("passthrough_total", "Requests forwarded as they came, by reason.", "reason")
        self._ratio = self._histogram("ratio", "Tokens after an event / tokens before it.", SHARE, "model")
        self._fill = self._histogram("context_utilization_ratio", "Fill of the usable window.", FILL, "model", "stage")
        self._failures = self._counter("validation_failures_total", "Layers refused after their work was checked.", "rule")
        self._critical = self._counter("critical_items_total", "Facts that must survive, by what became of them.", "result")
        self._breaks = self._counter("prefix_breaks_total", "Forwarded prefixes that differ from the chain's last one.", "cause")

    def _make_upstream_metrics(self) -> None:
        self._upstream_duration = self._histogram(
            "upstream_duration_seconds", "From sending a request upstream to its answer's end.", LONG, "model"
        )
        self._overflows = self._counter("context_overflows_total", "Answers that the context is too long.", "model", "result")
        self._usage = self._counter("upstream_usage_tokens_total", "Tokens that the upstream reported.", "model", "type")
        self._cached = self._counter(
            "upstream_cached_input_tokens_total", "Prompt-cache hits that the upstream reported.", "model"
        )
        self._count_error = self._histogram("token_count_error_ratio", "Our count / reported prompt tokens.", ERROR, "model")
        self._upstream_errors = self._counter("upstream_errors_total", "Failures of the upstream.", "reason")

    def begin(self, models: Iterable[str], layers: Sequence[str]) -> None:
        """Shows what may happen before it happened. models: labels of those that are configured."""
        for by_endpoint in (self._disconnects, self._aborts):
            by_endpoint.begin(*((endpoint,) for endpoint in ENDPOINTS))
        self._overhead.begin(*((phase,) for phase in PHASES))
        self._passthrough.begin(*((reason,) for reason in PASSTHROUGH_REASONS))
        self._failures.begin(*((rule,) for rule in RULES))
        self._critical.begin(("kept",), ("repaired",), ("lost",))
        self._breaks.begin(*((cause,) for cause in PREFIX_BREAKS))
        self._upstream_errors.begin(*((reason,) for reason in UPSTREAM_ERRORS))
        for model in models:
            for tokens in (self._received, self._forwarded, self._gaps, self._shadow, self._cached):
                tokens.begin((model,))
            self._saved.begin(*((model, layer) for layer in layers))
            self._events.begin(*((model, outcome) for outcome in OUTCOMES))
            self._overflows.begin(*((model, result) for result in OVERFLOWS))
            self._usage.begin((model, "input"), (model, "output"))

    def show_serving(self) -> None:
        """Shows how many requests are being served at this moment."""
        for endpoint, many in self.serving.items():
            self._inflight.set((endpoint,), float(many))

    def enter(self, records: Sequence[RequestRecord]) -> None:
        """Takes requests into every metric that they touch. Names of models get their labels in the order of the records."""
        alike: dict[tuple[object, ...], list[RequestRecord]] = {}
        for kind, run in groupby(records, KIND):
            alike.setdefault(kind, []).extend(run)
        for group in alike.values():
            if len(group) < FEW or SAVED(group[0]) != NOTHING_SAVED:
                for record in group:
                    self.enter_one(record)
            else:
                row = self._row(group[0])
                self._count(group[0], len(group), row)
                self._measure_all(group, row)

    def enter_one(self, record: RequestRecord) -> None:
        """The same for one request. Its trace, if it has any, becomes the newest example of how long a request took."""
        row = self._row(record)
        self._count(record, 1, row)
        self._measure(record, row)
        if record.trace_id is not None:
            for child, value in zip(row.observed, TRACED(record), strict=False):
                if value is not None:
                    child.exemplify(value, record.trace_id)

    def _row(self, record: RequestRecord) -> _Row:
        endpoint = record.endpoint if record.endpoint in ENDPOINTS else ANY
        key = endpoint, self._models[record.model], self._timed[record.model], record.stream
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._new_row(endpoint, key[1], key[2], "true" if record.stream else "false")
        return row

    def _new_row(self, endpoint: str, model: str, timed: str, stream: str) -> _Row:
        observed = (
            self._duration.child(endpoint, timed, stream),
            self._first_chunk.child(timed),
            self._upstream_duration.child(timed),
            self._ratio.child(timed),
            self._fill.child(timed, "before"),
            self._fill.child(timed, "after"),
            self._count_error.child(timed),
        )
        added: tuple[tuple[Counter, Key], ...] = (
            (self._usage, (model, "input")),
            (self._usage, (model, "output")),
            (self._cached, (model,)),
        )
        return _Row((endpoint,), (model,), stream, {}, observed, added)

    def _count(self, one: RequestRecord, many: int, row: _Row) -> None:
        """So many requests of the kind of this one."""
        if one.code not in row.codes:
            row.codes[one.code] = (*row.endpoint, *row.model, code(one.code), row.stream)
        self._requests.add(row.codes[one.code], many)
        if one.client_disconnect:
            self._disconnects.add(row.endpoint, many)
        if one.stream_abort:
            self._aborts.add(row.endpoint, many)
        if one.outcome in OUTCOMES:
            self._events.add((*row.model, one.outcome), many)
        if one.passthrough is not None and one.outcome not in ("applied", "reused"):
            self._passthrough.add((closed(one.passthrough, PASSTHROUGH_REASONS),), many)
        for rule in one.validation_failures:
            self._failures.add((closed(rule, RULES),), many)
        if one.prefix_break is not None:
            self._breaks.add((closed(one.prefix_break, PREFIX_BREAKS),), many)
        if one.overflow is not None:
            self._overflows.add((*row.model, closed(one.overflow, OVERFLOWS)), many)
        if one.upstream_error is not None:
            self._upstream_errors.add((closed(one.upstream_error, UPSTREAM_ERRORS),), many)

    def _measure(self, record: RequestRecord, row: _Row) -> None:
        """What is measured of one request; what is not known of it leaves no sample."""
        for child, value in zip(row.observed, OBSERVED(record), strict=True):
            if value is not None:
                child.observe(value)
        for phase, seconds in record.overhead:
            self._phases.get(phase, self._other_phase).observe(max(seconds, 0.0))
        for (counter, key), tokens in zip(row.added, ADDED(record), strict=True):
            if tokens is not None:
                counter.add(key, min(max(tokens, 0), MOST_TOKENS))
        if record.critical is not NO_ITEMS:
            for result in ("kept", "repaired", "lost"):
                self._critical.add((result,), getattr(record.critical, result))
        self._add_account(record, row.model)

    def _measure_all(self, group: Sequence[RequestRecord], row: _Row) -> None:
        """The same for requests of one kind that saved nothing: a column of each measure."""
        for child, column in zip(row.observed, zip(*map(OBSERVED, group), strict=True), strict=True):
            if known := list(filter(is_known, column)):
                child.observe_all(known)
        self._observe_overhead(list(chain.from_iterable(map(OVERHEAD, group))))
        for (counter, key), column in zip(row.added, zip(*map(ADDED, group), strict=True), strict=True):
            if known := list(filter(is_known, column)):
                counter.add(key, min(sum(not_negative(known)), MOST_TOKENS))
        received, forwarded = zip(*map(TOKENS, group), strict=True)
        if received == forwarded and None not in received:
            self._received.add(row.model, sum(received))
            self._forwarded.add(row.model, sum(forwarded))
        elif any(map(is_known, received)):
            for record in group:
                self._add_account(record, row.model)

    def _observe_overhead(self, pairs: Sequence[tuple[str, float]]) -> None:
        phases, seconds = list(map(itemgetter(0), pairs)), list(map(itemgetter(1), pairs))
        for phase in dict.fromkeys(phases):
            of_phase = list(compress(seconds, map(phase.__eq__, phases)))
            self._phases.get(phase, self._other_phase).observe_all(not_negative(of_phase))

    def _add_account(self, record: RequestRecord, model: Key) -> None:
        account = account_of(record)
        if account is None:
            return
        self._received.add(model, account.received)
        self._forwarded.add(model, account.forwarded)
        for layer, tokens in account.saved:
            self._saved.add((*model, layer), tokens)
        if account.gap:
            self._gaps.add(model, account.gap)
        if record.shadow_saved > 0:
            self._shadow.add(model, record.shadow_saved)
        if record.cost_saved is not None:
            self._cost.add(model, max(record.cost_saved, 0.0))
        if record.cost_broken is not None:
            self._cost_broken.add(model, max(record.cost_broken, 0.0))


def not_negative(values: list[Any]) -> list[Any]:
    """Numbers, with 0 in place of those below."""
    return values if min(values) >= 0 else [max(value, 0) for value in values]


def account_of(record: RequestRecord) -> Account | None:
    """What the request's tokens come to; None when nothing was counted."""
    received, forwarded = record.received, record.forwarded
    return None if received is None else settle(received, received if forwarded is None else forwarded, record.saved)

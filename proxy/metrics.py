"""Every metric of the process, recorded in one place and exposed to a scraper."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from proxy import __version__
from proxy.figures import Figures, Rows, summary
from proxy.records import (
    ANY,
    CHAT,
    COMPACT,
    ENDPOINTS,
    LAYERS,
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
    saved_by_layer,
    settle,
)
from proxy.tally import Child, Counter, Gauge, Histogram, Key, Snapshot, Tally
from proxy.workers_figures import Places, bury, new_worker, page_of, read, snapshot_of, write

__all__ = ["ANY", "CHAT", "COMPACT", "Account", "Metrics", "ModelNames", "RequestRecord", "printable", "saved_by_layer", "settle"]

OTHER = "other"
MODELS_SEEN = 50
"""Names of models come from clients: beyond the configured ones and this many, all are `other`."""
MODELS_TIMED = 10
"""A histogram is fourteen lines of a scrape: of the names not configured, only this many have histograms of their own."""
MODEL_LENGTH = 80
TOGETHER = 64
"""Requests that are entered at once."""
RECENT = 50
"""Events that `/stats` remembers."""

LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FIRST_CHUNK = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80)
SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
FILL = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.25, 2, 5)
ERROR = (0.5, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.25, 2)


def printable(name: str | None) -> str:
    """A model's name as a label: at most 80 printable characters, never empty."""
    text = (name or "").strip()[:MODEL_LENGTH]
    return "".join(c if c.isprintable() else "?" for c in text) or "unknown"


def always(_: str) -> bool:
    return True


class ModelNames:
    """Which label a model's name gets: the configured ones and the first that come have their own, all others share one.

    takes: asked for a place that several workers share, before one is given.
    """

    def __init__(self, configured: Iterable[str] = (), room: int = MODELS_SEEN, takes: Callable[[str], bool] = always) -> None:
        self._labels = {name: printable(name) for name in configured}
        self._room, self._takes = room, takes
        self._lock = threading.Lock()

    def __getitem__(self, name: str | None) -> str:
        label = self._labels.get(name or "")
        return self._enter(name) if label is None else label

    def _enter(self, name: str | None) -> str:
        label = printable(name)
        known = self._labels.get(label)
        if known is not None:
            return known
        with self._lock:
            if self._room <= 0 or not self._takes(label):
                return OTHER
            # Under its printable form, so that two names that look alike take one place and a label is not counted twice
            self._room -= label not in self._labels
            return self._labels.setdefault(label, label)


@dataclass(frozen=True, slots=True)
class _Row:
    """What requests of one endpoint, model and kind touch, at hand: labels, and the histograms that bear them.

    endpoint, model, input, output: label values as they stand in keys. codes: status → key of the requests' counter.
    """

    endpoint: Key
    model: Key
    stream: str
    codes: dict[int, Key]
    duration: Child
    first_chunk: Child
    upstream_duration: Child
    ratio: Child
    fill_before: Child
    fill_after: Child
    count_error: Child
    input: Key
    output: Key


class _InFlight:
    """`with` it, a request of one endpoint counts as being served."""

    def __init__(self, gauge: Gauge, endpoint: str) -> None:
        self._gauge, self._key = gauge, (endpoint,)

    # without the lock: only the event loop's own thread does this, and it has to add up with no other metric

    def __enter__(self) -> None:
        self._gauge.add(self._key)

    def __exit__(self, *_: object) -> None:
        self._gauge.add(self._key, -1)


class Metrics:
    """All metrics of one process. `record` is called once a request, from any thread.

    model_names: exact names from the configuration, which always keep a label of their own.
    folder: where several workers share their figures (`workers_figures.fresh_folder()`); None when there is one worker.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        model_names: Iterable[str] = (),
        layers: Iterable[str] = LAYERS,
        version: str = __version__,
        folder: Path | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        names = tuple(model_names)
        self._folder, self._worker = folder, new_worker()
        self.models, self.timed = self._names(names, "models", MODELS_SEEN), self._names(names, "timed", MODELS_TIMED)
        self.started = time.time()
        self.recent: deque[dict[str, object]] = deque(maxlen=RECENT)
        self._tally = Tally()
        self._make_request_metrics()
        self._make_token_metrics()
        self._make_compaction_metrics()
        self._make_upstream_metrics()
        self._make_summary_and_store_metrics()
        self._make_process_metrics(version)
        self._waiting: deque[RequestRecord] = deque()
        self._sharing = threading.Lock()
        self._rows: dict[tuple[str, str, str, bool], _Row] = {}  # by label, which are few
        self._served = {name: _InFlight(self._inflight, name) for name in ENDPOINTS}
        self._phases = {phase: self._overhead.child(phase) for phase in PHASES}
        self._other_phase = self._overhead.child(OTHER)
        self._told_windows: dict[str, tuple[int, int]] = {}
        self._begin([self.models[name] for name in names], tuple(layers))
        self.registry.register(self)
        self.share()

    def _names(self, configured: tuple[str, ...], kind: str, room: int) -> ModelNames:
        return ModelNames(configured, room, always if self._folder is None else Places(self._folder, kind, room).take)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return self._tally.counter(f"compaction_{name}", told, *labels)

    def _gauge(self, name: str, told: str, *labels: str, across: Literal["sum", "max"] = "sum") -> Gauge:
        return self._tally.gauge(f"compaction_{name}", told, *labels, across=across)

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
        self._inflight = self._gauge("inflight_requests", "Requests being served now.", "endpoint")
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
        self._window = self._gauge("context_window_tokens", "What the model can hold.", "model", across="max")
        self._budget = self._gauge("budget_tokens", "What a request to the model may weigh.", "model", across="max")

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

    def _make_summary_and_store_metrics(self) -> None:
        self._summaries = self._counter("summarizer_requests_total", "Summaries asked of a model.", "model", "outcome")
        self._summary_tokens = self._counter("summarizer_tokens_total", "Tokens that summaries took.", "model", "type")
        self._summary_duration = self._histogram("summarizer_duration_seconds", "Time that a summary took.", FIRST_CHUNK, "model")
        self._summary_cost = self._counter(
            "summarizer_cost_usd_total", "US dollars that summaries cost; none when unpriced.", "model"
        )
        self._store = self._counter(
            "checkpoint_operations_total", "Calls to the checkpoint store.", "store", "operation", "result"
        )
        self._store_duration = self._histogram(
            "checkpoint_duration_seconds", "Time that a call to the checkpoint store took.", SHORT, "store", "operation"
        )
        self._store_bytes = self._gauge("checkpoint_bytes", "Size of the checkpoint store.", "store", across="max")
        self._notices = self._counter(
            "notifications_total", "Notices of events to the webhook, by what became of them.", "result"
        )
        self._degraded = self._gauge(
            "tokenizer_degraded", "1 while counts of this encoding are estimates.", "encoding", across="max"
        )

    def _make_process_metrics(self, version: str) -> None:
        self._gauge("build_info", "Always 1; the label says what runs.", "version", across="max").set((version,), 1)
        self._loaded = self._gauge("config_loaded_timestamp_seconds", "When the configuration was loaded.", across="max")
        self._loaded.set((), self.started)
        if self._folder is None:  # with several workers the figures of whichever answers the scrape would mislead
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def _begin(self, models: list[str], layers: tuple[str, ...]) -> None:
        for by_endpoint in (self._inflight, self._disconnects, self._aborts):
            by_endpoint.begin(*((endpoint,) for endpoint in ENDPOINTS))
        self._overhead.begin(*((phase,) for phase in PHASES))
        self._passthrough.begin(*((reason,) for reason in PASSTHROUGH_REASONS))
        self._failures.begin(*((rule,) for rule in RULES))
        self._critical.begin(("kept",), ("repaired",), ("lost",))
        self._notices.begin(("sent",), ("dropped",))
        self._breaks.begin(*((cause,) for cause in PREFIX_BREAKS))
        self._upstream_errors.begin(*((reason,) for reason in UPSTREAM_ERRORS))
        for model in models:
            for tokens in (self._received, self._forwarded, self._gaps, self._shadow, self._cached):
                tokens.begin((model,))
            self._saved.begin(*((model, layer) for layer in layers))
            self._events.begin(*((model, outcome) for outcome in OUTCOMES))
            self._overflows.begin(*((model, result) for result in OVERFLOWS))
            self._usage.begin((model, "input"), (model, "output"))

    def record(self, record: RequestRecord) -> None:
        """Takes one request into every metric that it touches; the one place where requests are counted.

        They are entered together, before anybody reads: a dozen metrics for each of many requests cost half of what they cost
        between other work.
        """
        self._waiting.append(record)
        if len(self._waiting) >= TOGETHER or record.outcome in OUTCOMES or record.trace_id is not None:  # those bear a time
            self._enter_all()

    def _enter_all(self) -> None:
        with self._tally.lock:
            while self._waiting:
                self._enter(self._waiting.popleft())

    def _enter(self, record: RequestRecord) -> None:
        row = self._row(record)
        self._record_request(record, row)
        account = self._record_tokens(record, row)
        self._record_compaction(record, row)
        self._record_upstream(record, row)
        if record.outcome in OUTCOMES:
            self._remember(record, row.model[0], account)

    def _row(self, record: RequestRecord) -> _Row:
        key = record.endpoint, self.models[record.model], self.timed[record.model], record.stream
        row = self._rows.get(key)
        if row is None:
            endpoint = record.endpoint if record.endpoint in ENDPOINTS else ANY
            row = self._rows[key] = self._new_row(endpoint, key[1], key[2], "true" if record.stream else "false")
        return row

    def _new_row(self, endpoint: str, model: str, timed: str, stream: str) -> _Row:
        return _Row(
            (endpoint,),
            (model,),
            stream,
            {},
            self._duration.child(endpoint, timed, stream),
            self._first_chunk.child(timed),
            self._upstream_duration.child(timed),
            self._ratio.child(timed),
            self._fill.child(timed, "before"),
            self._fill.child(timed, "after"),
            self._count_error.child(timed),
            (model, "input"),
            (model, "output"),
        )

    def _record_request(self, record: RequestRecord, row: _Row) -> None:
        code = record.code
        if code not in row.codes:
            row.codes[code] = (*row.endpoint, *row.model, _code(code), row.stream)
        self._requests.add(row.codes[code])
        if record.duration is not None:
            row.duration.observe(record.duration, record.trace_id)
        if record.first_chunk is not None:
            row.first_chunk.observe(record.first_chunk, record.trace_id)
        for phase, seconds in record.overhead:
            self._phases.get(phase, self._other_phase).observe(max(seconds, 0.0))
        if record.client_disconnect:
            self._disconnects.add(row.endpoint)
        if record.stream_abort:
            self._aborts.add(row.endpoint)

    def _record_tokens(self, record: RequestRecord, row: _Row) -> Account | None:
        received, forwarded, model = record.received, record.forwarded, row.model
        if received is None:
            return None
        account = settle(received, received if forwarded is None else forwarded, record.saved)
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
        return account

    def _record_compaction(self, record: RequestRecord, row: _Row) -> None:
        if record.outcome in OUTCOMES:
            self._events.add((*row.model, record.outcome))
        if record.passthrough is not None and record.outcome not in ("applied", "reused"):
            self._passthrough.add((_closed(record.passthrough, PASSTHROUGH_REASONS),))
        if record.ratio is not None:
            row.ratio.observe(record.ratio)
        if record.fill_before is not None:
            row.fill_before.observe(record.fill_before)
        if record.fill_after is not None:
            row.fill_after.observe(record.fill_after)
        for rule in record.validation_failures:
            self._failures.add((_closed(rule, RULES),))
        if record.critical is not NO_ITEMS:
            for result in ("kept", "repaired", "lost"):
                self._critical.add((result,), getattr(record.critical, result))
        if record.prefix_break is not None:
            self._breaks.add((_closed(record.prefix_break, PREFIX_BREAKS),))

    def _record_upstream(self, record: RequestRecord, row: _Row) -> None:
        if record.upstream_duration is not None:
            row.upstream_duration.observe(record.upstream_duration, record.trace_id)
        if record.overflow is not None:
            self._overflows.add((*row.model, _closed(record.overflow, OVERFLOWS)))
        if record.usage_input is not None:
            self._usage.add(row.input, max(record.usage_input, 0))
        if record.usage_output is not None:
            self._usage.add(row.output, max(record.usage_output, 0))
        if record.usage_cached is not None:
            self._cached.add(row.model, max(record.usage_cached, 0))
        if record.count_error is not None:
            row.count_error.observe(record.count_error)
        if record.upstream_error is not None:
            self._upstream_errors.add((_closed(record.upstream_error, UPSTREAM_ERRORS),))

    def _remember(self, record: RequestRecord, model: str, account: Account | None) -> None:
        self.recent.appendleft(
            {
                "at": round(time.time(), 3),
                "model": model,
                "outcome": record.outcome,
                "tokens_before": account.received if account else None,
                "tokens_after": account.forwarded if account else None,
                "layers": dict(account.saved) if account else {},
            }
        )

    def inflight(self, endpoint: str) -> AbstractContextManager[None]:
        """`with metrics.inflight(CHAT):` counts a request while it is served."""
        return self._served.get(endpoint, self._served[ANY])

    def set_window(self, model: str, window: int, budget: int) -> None:
        """What a model can hold and what a request to it may weigh, in tokens."""
        label = self.models[model]
        if self._told_windows.get(label) == (window, budget):
            return
        self._told_windows[label] = window, budget
        with self._tally.lock:
            self._window.set((label,), window)
            self._budget.set((label,), budget)

    def observe_summary(
        self,
        model: str,
        outcome: str,
        *,
        seconds: float | None = None,
        tokens_in: int = 0,
        tokens_out: int = 0,
        cost: float | None = None,
    ) -> None:
        """One call for a summary. outcome: `ok` or `SummaryFailed.outcome`. cost: US dollars, None unpriced."""
        label = self.models[model]
        with self._tally.lock:
            self._summaries.add((label, outcome))
            self._summary_tokens.add((label, "input"), tokens_in)
            self._summary_tokens.add((label, "output"), tokens_out)
            if seconds is not None:
                self._summary_duration.observe((self.timed[model],), seconds)
            if cost is not None:
                self._summary_cost.add((label,), cost)

    def observe_checkpoint(self, store: str, operation: str, result: str, seconds: float | None = None) -> None:
        """One call to the checkpoint store. store: its scheme; operation: get, put; result: hit, miss, stored, kept, error."""
        with self._tally.lock:
            self._store.add((store, operation, result))
            if seconds is not None:
                self._store_duration.observe((store, operation), seconds)

    def observe_notice(self, result: str) -> None:
        """What became of one notice to the webhook: `sent` or `dropped`."""
        with self._tally.lock:
            self._notices.add((result,))

    def set_checkpoint_bytes(self, store: str, size: int) -> None:
        with self._tally.lock:
            self._store_bytes.set((store,), size)

    def set_tokenizer_degraded(self, encoding: str, degraded: bool) -> None:
        with self._tally.lock:
            self._degraded.set((encoding,), 1 if degraded else 0)

    def set_config_loaded(self, timestamp: float) -> None:
        """When the configuration in force was loaded: Unix time."""
        with self._tally.lock:
            self._loaded.set((), timestamp)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) in the format that the scraper asks for: OpenMetrics or Prometheus text. Takes milliseconds."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """For the registry: every metric, all read at the same moment."""
        return self._tally.families(self._whole())

    def share(self) -> None:
        """Puts this worker's figures where whichever worker is scraped finds them. Due twice a second, and at the end."""
        if self._folder is None:
            return
        with self._sharing:  # the last time may come while another thread still shares
            self._enter_all()
            write(self._folder, self._worker, page_of(self._tally.snapshot(), tuple(self.recent)))

    def bury(self, process: int) -> None:
        """Keeps what a worker that is gone has counted. For the process that starts the workers."""
        if self._folder is not None:
            kinds = self._tally.definitions.values()
            bury(self._folder, process, {definition.name for definition in kinds if definition.kind != "gauge"})

    def _whole(self) -> Snapshot:
        if self._folder is None:
            self._enter_all()
            return self._tally.snapshot()
        return self._tally.merged(snapshot_of(page) for page in read(self._folder))

    def figures(self) -> Figures:
        """All samples as they stand."""
        found: dict[str, Rows] = {}
        for family in self.collect():
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return Figures(found)

    def stats(self) -> dict[str, object]:
        """The same figures as the exposition, for people and scripts: totals, by model, by layer, the last events."""
        uptime = {"started": round(self.started, 3), "uptime_seconds": round(time.time() - self.started, 3)}
        return uptime | summary(self.figures()) | {"recent_events": self._events_of_all()}

    def _events_of_all(self) -> list[dict[str, object]]:
        if self._folder is None:
            return list(self.recent)
        events = [event for page in read(self._folder) for event in page.events]
        return sorted(events, key=lambda event: str(event["at"]), reverse=True)[:RECENT]


def _code(status: int) -> str:
    return str(status) if 100 <= status <= 599 else OTHER


def _closed(value: str, known: tuple[str, ...]) -> str:
    return value if value in known else OTHER

"""Every metric of the process, recorded in one place and exposed to a scraper."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from operator import attrgetter, call
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from proxy import __version__
from proxy.figures import Figures, Rows, summary
from proxy.labels import MODELS_SEEN, MODELS_TIMED, ModelNames, always, printable
from proxy.records import ANY, CHAT, COMPACT, LAYERS, OUTCOMES, Account, RequestRecord, saved_by_layer, settle
from proxy.request_metrics import FIRST_CHUNK, SHORT, RequestMetrics, account_of
from proxy.tally import Counter, Gauge, Histogram, Snapshot, Tally
from proxy.workers_figures import Places, bury, new_worker, page_of, read, snapshot_of, write

__all__ = ["ANY", "CHAT", "COMPACT", "Account", "Metrics", "ModelNames", "RequestRecord", "printable", "saved_by_layer", "settle"]

TOGETHER = 64
"""Requests that are entered at once."""
SIZES = attrgetter("model", "window", "usable")
"""What a request says of its model."""
RECENT = 50
"""Events that `/stats` remembers."""


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
        self._requests = RequestMetrics(self._tally, self.models, self.timed)
        self.serving = self._requests.serving
        """Requests of each endpoint that are being served, to be counted up and down in place. Without the lock: only the event
        loop's own thread does this, and it has to add up with no other metric."""
        self._make_summary_and_store_metrics()
        self._make_process_metrics(version)
        self._waiting: deque[RequestRecord] = deque()
        self._sharing = threading.Lock()
        self._told_windows: dict[str, tuple[int, int]] = {}
        self._notices.begin(("sent",), ("dropped",))
        self._requests.begin([self.models[name] for name in names], tuple(layers))
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
        self._window = self._gauge("context_window_tokens", "What the model can hold.", "model", across="max")
        self._budget = self._gauge("budget_tokens", "What a request to the model may weigh.", "model", across="max")
        self._gauge("build_info", "Always 1; the label says what runs.", "version", across="max").set((version,), 1)
        self._loaded = self._gauge("config_loaded_timestamp_seconds", "When the configuration was loaded.", across="max")
        self._loaded.set((), self.started)
        if self._folder is None:  # with several workers the figures of whichever answers the scrape would mislead
            ProcessCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def record(self, record: RequestRecord) -> None:
        """Takes one request into every metric that it touches; the one place where requests are counted.

        They are entered together, before anybody reads: a dozen metrics for each of many alike requests cost less than half
        of what they cost one by one.
        """
        if record.outcome in OUTCOMES or record.trace_id is not None:
            self._enter_now(record)
            return
        self._waiting.append(record)
        if len(self._waiting) >= TOGETHER:
            self._enter_all()

    def _enter_now(self, record: RequestRecord) -> None:
        """What bears a time, an event or a trace, does not wait; what came before it is entered first."""
        with self._tally.lock:
            self._enter_waiting()
            self._requests.enter_one(record)
            self._note_windows((record,))
            if record.outcome in OUTCOMES:
                self._remember(record)

    def _enter_all(self) -> None:
        with self._tally.lock:
            self._enter_waiting()
            self._requests.show_serving()

    def _enter_waiting(self) -> None:
        if self._waiting:
            # one by one out of the queue, as other threads put theirs in meanwhile
            records = list(map(call, repeat(self._waiting.popleft, len(self._waiting))))
            self._requests.enter(records)
            self._note_windows(records)

    def _note_windows(self, records: Sequence[RequestRecord]) -> None:
        """What requests say of their models, the newest last: most say the same as the one before."""
        for (model, window, usable), _ in groupby(map(SIZES, records)):
            if model is not None and window is not None and usable is not None:
                self._note_window(model, window.tokens, usable)

    def _note_window(self, model: str, window: int, budget: int) -> None:
        if self._told_windows.get(model) == (window, budget):  # most names are their own label
            return
        label = self.models[model]
        self._told_windows[label] = window, budget
        self._window.set((label,), window)
        self._budget.set((label,), budget)

    def _remember(self, record: RequestRecord) -> None:
        account = account_of(record)
        self.recent.appendleft(
            {
                "at": round(time.time(), 3),
                "model": self.models[record.model],
                "outcome": record.outcome,
                "tokens_before": account.received if account else None,
                "tokens_after": account.forwarded if account else None,
                "layers": dict(account.saved) if account else {},
            }
        )

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

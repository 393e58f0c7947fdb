"""Counters, gauges and histograms in plain dictionaries, written under one lock and read as one consistent whole.

A request touches a dozen of them: with a lock for each, a scrape in between would see tokens received and not yet forwarded.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add, sub
from typing import Literal

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

Key = tuple[str, ...]
"""Label values, in the order of the metric's labels."""

Snapshot = dict[str, dict[Key, list[float]]]
"""Metric → label values → the value; of a histogram, the count of each bucket and then the sum of what was observed."""

FEW = 12
"""Below this it costs less to look each value's bucket up than to sort them and look up every bound."""


@dataclass(frozen=True, slots=True)
class Definition:
    """What a metric is. buckets: upper bounds, ascending. across: how a gauge's values of several workers become one."""

    name: str
    told: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    across: Literal["sum", "max"] = "sum"


class Counter:
    """Goes up. What is added must not be negative."""

    def __init__(self) -> None:
        self.values: dict[Key, float] = {}

    def begin(self, *keys: Key) -> None:
        """Shows these label values before anything happened, so that a first event is an increase."""
        for key in keys:
            self.values.setdefault(key, 0.0)

    def add(self, key: Key, amount: float = 1.0) -> None:
        self.values[key] = self.values.get(key, 0.0) + amount


class Gauge(Counter):
    """Goes up and down."""

    def set(self, key: Key, value: float) -> None:
        self.values[key] = value


class Histogram:
    """Counts what it is shown by size. The newest exemplar of each bucket is kept."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(buckets)
        self.values: dict[Key, list[float]] = {}
        self.exemplars: dict[Key, dict[int, Exemplar]] = {}

    def begin(self, *keys: Key) -> None:
        for key in keys:
            self.values.setdefault(key, [0.0] * (len(self.buckets) + 2))

    def child(self, *key: str) -> Child:
        """These label values at hand; they show from the first observation on."""
        return Child(self, key)

    def observe(self, key: Key, value: float) -> None:
        Child(self, key).observe(value)


class Child:
    """One set of label values of a histogram, for whoever observes it with every request."""

    __slots__ = ("_buckets", "_counts", "_histogram", "_key")

    def __init__(self, histogram: Histogram, key: Key) -> None:
        self._histogram, self._key, self._buckets = histogram, key, histogram.buckets
        self._counts = histogram.values.get(key)

    def observe(self, value: float) -> None:
        counts = self._begun()
        counts[bisect_left(self._buckets, value)] += 1
        counts[-1] += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Many at once: in order, how many there are up to each bound is found with as many steps as there are bounds."""
        if len(values) < FEW:
            for value in values:
                self.observe(value)
            return
        counts = self._begun()
        up_to = [*map(bisect_right, repeat(sorted(values)), self._buckets), len(values)]
        counts[:] = *map(add, counts, map(sub, up_to, (0, *up_to))), sum(values, counts[-1])

    def exemplify(self, value: float, trace_id: str) -> None:
        """Makes what was observed the newest exemplar of its bucket."""
        found = self._histogram.exemplars.setdefault(self._key, {})
        found[bisect_left(self._buckets, value)] = Exemplar({"trace_id": trace_id}, value, time.time())

    def _begun(self) -> list[float]:
        if self._counts is None:
            self._histogram.begin(self._key)
            self._counts = self._histogram.values[self._key]
        return self._counts


class Tally:
    """All metrics. Whoever writes or reads several that belong together holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.definitions: dict[str, Definition] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def counter(self, name: str, told: str, *labels: str) -> Counter:
        self.definitions[name] = Definition(name, told, "counter", labels)
        made = self._counters[name] = Counter()
        return made

    def gauge(self, name: str, told: str, *labels: str, across: Literal["sum", "max"] = "sum") -> Gauge:
        self.definitions[name] = Definition(name, told, "gauge", labels, across=across)
        made = self._counters[name] = Gauge()
        return made

    def histogram(self, name: str, told: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        self.definitions[name] = Definition(name, told, "histogram", labels, buckets)
        made = self._histograms[name] = Histogram(buckets)
        return made

    def snapshot(self) -> Snapshot:
        """Everything as it is at one moment."""
        with self.lock:
            whole: Snapshot = {name: {k: [v] for k, v in counter.values.items()} for name, counter in self._counters.items()}
            whole |= {name: {k: list(v) for k, v in histogram.values.items()} for name, histogram in self._histograms.items()}
        return whole

    def merged(self, snapshots: Iterable[Snapshot]) -> Snapshot:
        """Several workers' figures as one."""
        highest = {name for name, definition in self.definitions.items() if definition.across == "max"}
        whole: Snapshot = {}
        for snapshot in snapshots:
            merge(whole, snapshot, highest)
        return whole

    def families(self, snapshot: Snapshot) -> Iterator[Metric]:
        """The snapshot as prometheus-client writes it out."""
        for name, definition in self.definitions.items():
            rows = snapshot.get(name, {})
            match definition.kind:
                case "counter":
                    counted = CounterMetricFamily(name, definition.told, labels=definition.labels)
                    for key, (value,) in rows.items():
                        counted.add_metric(key, value)
                    yield counted
                case "gauge":
                    gauged = GaugeMetricFamily(name, definition.told, labels=definition.labels)
                    for key, (value,) in rows.items():
                        gauged.add_metric(key, value)
                    yield gauged
                case "histogram":
                    yield self._histogram_family(definition, rows)

    def _histogram_family(self, definition: Definition, rows: Mapping[Key, list[float]]) -> Metric:
        family = HistogramMetricFamily(definition.name, definition.told, labels=definition.labels)
        bounds = [floatToGoString(bound) for bound in (*definition.buckets, float("inf"))]  # type: ignore[no-untyped-call]
        exemplars = self._histograms[definition.name].exemplars
        for key, (*counts, total) in rows.items():
            seen, running = exemplars.get(key, {}), 0.0
            buckets: list[tuple[str, float, Exemplar | None]] = []
            for place, (bound, count) in enumerate(zip(bounds, counts, strict=True)):
                running += count
                buckets.append((bound, running, seen.get(place)))
            family.add_metric(key, buckets, total)  # type: ignore[arg-type]  # it takes (bound, count, exemplar) as well
        return family


def merge(into: Snapshot, snapshot: Snapshot, highest: Collection[str] = ()) -> None:
    """Adds a snapshot to another; of the metrics in `highest` the greater value holds."""
    for name, rows in snapshot.items():
        known = into.setdefault(name, {})
        for key, values in rows.items():
            if key not in known:
                known[key] = list(values)
            elif name in highest:
                known[key] = [max(pair) for pair in zip(known[key], values, strict=True)]
            else:
                known[key] = [a + b for a, b in zip(known[key], values, strict=True)]

"""What may stand in a metric's labels: words of closed sets, and names of models, of which clients can make up any number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

OTHER = "other"
MODELS_SEEN = 50
"""Names of models come from clients: beyond the configured ones and this many, all are `other`."""
MODELS_TIMED = 10
"""A histogram is fourteen lines of a scrape: of the names not configured, only this many have histograms of their own."""
MODEL_LENGTH = 80


def printable(name: str | None) -> str:
    """A model's name as a label: at most 80 printable characters, never empty."""
    text = (name or "").strip()[:MODEL_LENGTH]
    return "".join(c if c.isprintable() else "?" for c in text) or "unknown"


def code(status: int) -> str:
    return str(status) if 100 <= status <= 599 else OTHER


def closed(value: str, known: tuple[str, ...]) -> str:
    return value if value in known else OTHER


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

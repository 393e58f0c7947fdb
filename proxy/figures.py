"""The metrics read back: the same samples as a scrape, as sums that people and scripts understand."""

from __future__ import annotations

from collections.abc import Mapping

Rows = list[tuple[Mapping[str, str], float]]


class Figures:
    """Samples of one reading: name → (labels, value)."""

    def __init__(self, samples: Mapping[str, Rows]) -> None:
        self._samples = samples

    def of(self, name: str, model: str | None = None) -> Rows:
        rows = self._samples.get(f"compaction_{name}", [])
        return rows if model is None else [row for row in rows if row[0].get("model") == model]

    def whole(self, name: str, model: str | None = None) -> int:
        return int(sum(value for _, value in self.of(name, model)))

    def money(self, name: str, model: str | None = None) -> float | None:
        """US dollars; None when nothing was priced."""
        rows = self.of(name, model)
        return round(sum(value for _, value in rows), 6) if rows else None

    def by(self, name: str, label: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        for labels, value in self.of(name):
            sums[labels[label]] = sums.get(labels[label], 0) + int(value)
        return sums

    def values(self, label: str) -> list[str]:
        """All values of a label, sorted."""
        return sorted({labels[label] for rows in self._samples.values() for labels, _ in rows if label in labels})


def summary(figures: Figures) -> dict[str, object]:
    """Totals, by model, by layer."""
    return {
        "requests": figures.whole("requests_total"),
        "inflight": figures.by("inflight_requests", "endpoint"),
        "tokens": _tokens(figures, None),
        **_costs(figures),
        "events": figures.by("events_total", "outcome"),
        "passthrough": figures.by("passthrough_total", "reason"),
        "critical_items": figures.by("critical_items_total", "result"),
        "validation_failures": figures.by("validation_failures_total", "rule"),
        "context_overflows": figures.by("context_overflows_total", "result"),
        "upstream_errors": figures.by("upstream_errors_total", "reason"),
        "layers": figures.by("prompt_tokens_saved_total", "layer"),
        "models": {model: _of_model(figures, model) for model in figures.values("model")},
    }


def _costs(figures: Figures) -> dict[str, object]:
    """US dollars: what was saved, what that cost, and what is left of it; None where nothing was priced."""
    gross, broken = figures.money("cost_saved_usd_total"), figures.money("cache_break_cost_usd_total")
    summaries = figures.money("summarizer_cost_usd_total")
    net = None if gross is None else round(gross - (broken or 0.0) - (summaries or 0.0), 6)
    return {
        "cost_saved_usd": gross,
        "cache_break_cost_usd": broken,
        "summarizer_cost_usd": summaries,
        "cost_saved_net_usd": net,
    }


def _tokens(figures: Figures, model: str | None) -> dict[str, object]:
    received, forwarded = (
        figures.whole("prompt_tokens_received_total", model),
        figures.whole("prompt_tokens_forwarded_total", model),
    )
    saved = figures.whole("prompt_tokens_saved_total", model)
    return {
        "received": received,
        "forwarded": forwarded,
        "saved": saved,
        "saved_share": round(saved / received, 6) if received else 0.0,
    }


def _of_model(figures: Figures, model: str) -> dict[str, object]:
    return {
        "requests": figures.whole("requests_total", model),
        "tokens": _tokens(figures, model),
        "cost_saved_usd": figures.money("cost_saved_usd_total", model),
        "window": figures.whole("context_window_tokens", model) or None,
        "budget": figures.whole("budget_tokens", model) or None,
    }

"""Requests that are entered together come to the same figures as those entered one by one."""

from __future__ import annotations

from typing import Any

import pytest
from builders import window
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from proxy.compaction import CriticalItems
from proxy.metrics import ANY, CHAT, Metrics, RequestRecord

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
LATER = ("process_", "python_", "compaction_config_loaded")
"""Metrics that differ from one moment to the next."""

# Of values that a float holds exactly every sum is the same in whatever order
SECONDS = st.integers(0, 700 * 64).map(lambda n: n / 64)
SHARES = st.integers(0, 192).map(lambda n: n / 64)
TOKENS = st.integers(0, 10**6)


def maybe(known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | known


KINDS = st.builds(
    RequestRecord,
    endpoint=st.sampled_from([CHAT, CHAT, ANY, "/v1/files/secret"]),
    model=st.sampled_from(["gpt-4o", "a\x00", "a\x01", None, *(f"model-{number}" for number in range(60))]),
    code=st.sampled_from([200, 200, 404, 999]),
    stream=st.booleans(),
    outcome=st.sampled_from(["none", "none", "none", "bypassed", "applied", "reused"]),
    passthrough=st.sampled_from([None, "fits", "floor", "of no set"]),
    overflow=st.sampled_from([None, None, "returned", "of no set"]),
    upstream_error=st.sampled_from([None, None, "connect", "of no set"]),
    prefix_break=st.sampled_from([None, None, "edit", "of no set"]),
    validation_failures=st.sampled_from([(), (), ("size", "size", "of no set")]),
    client_disconnect=st.booleans(),
    stream_abort=st.booleans(),
    saved=st.sampled_from([(), (), (("snip", 700), ("emergency", -5))]),
    shadow_saved=st.sampled_from([0, 0, 70, -70]),
    cost_saved=st.sampled_from([None, None, 0.25, -1.0]),
    cost_broken=st.sampled_from([None, None, 0.5]),
    critical=st.sampled_from([CriticalItems(), CriticalItems(3, 2, 1)]),
)
PLAIN = st.builds(RequestRecord, model=st.sampled_from(["gpt-4o", "model-1"]), passthrough=st.just("fits"))
MEASURES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"received": st.one_of(TOKENS, TOKENS, TOKENS, st.none())},
    optional={
        "forwarded": maybe(TOKENS),
        "duration": SECONDS,
        "first_chunk": SECONDS,
        "upstream_duration": SECONDS,
        "overhead": st.lists(
            st.tuples(st.sampled_from(["read", "total", "of no set", "nor this"]), SHARES.map(lambda s: s - 1))
        ).map(tuple),
        "ratio": SHARES,
        "fill_before": SHARES,
        "fill_after": SHARES,
        "count_error": SHARES,
        "usage_input": st.integers(-5, 10**6),
        "usage_output": st.integers(-5, 10**6),
        "usage_cached": st.integers(-5, 10**6),
        "trace_id": st.sampled_from([None] * 30 + ["0af7651916cd43dd8448eb211c80319c"]),
    },
)


@st.composite
def requests(draw: st.DrawFn) -> list[RequestRecord]:
    """Requests of a few kinds, each several times, so that there are columns to enter."""
    kinds = draw(st.lists(PLAIN | KINDS, min_size=1, max_size=4))
    runs = draw(st.lists(st.tuples(st.sampled_from(kinds), MEASURES, st.integers(1, 8)), max_size=24))
    return [
        replace(kind, **{"forwarded": measured["received"]} | measured) for kind, measured, times in runs for _ in range(times)
    ]


def told(records: list[RequestRecord], together: int) -> tuple[object, ...]:
    """Samples with the traces that they bear, and the events, of these requests entered so many at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxy.metrics.TOGETHER", together)
        metrics = Metrics(model_names=["gpt-4o"], version="1")
        for record in records:
            metrics.record(record)
        families = list(text_string_to_metric_families(metrics.exposition(OPENMETRICS)[0].decode()))
    samples = {
        (sample.name, *sorted(sample.labels.items())): (
            sample.value,
            sample.exemplar and (sample.exemplar.labels["trace_id"], sample.exemplar.value),
        )
        for family in families
        for sample in family.samples
        if not family.name.startswith(LATER)
    }
    return samples, [event | {"at": None} for event in metrics.recent]


@settings(max_examples=150, deadline=None)
@given(requests(), st.integers(2, 100))
def test_requests_entered_together_or_one_by_one_are_told_the_same(records: list[RequestRecord], together: int) -> None:
    assert told(records, together) == told(records, 1)


def test_sixty_four_plain_requests_are_told_as_the_sum_of_what_each_was() -> None:
    metrics = Metrics()

    for number in range(64):
        metrics.record(
            RequestRecord(
                model="m",
                code=200,
                duration=number / 4,
                upstream_duration=0.25,
                overhead=(("read", -1.0), ("total", 0.0625)),
                received=number,
                forwarded=number,
                passthrough="fits",
                fill_before=0.25 if number % 2 else None,
                usage_input=-1 if number % 2 else 10,
                usage_output=None,
            )
        )

    figures = metrics.figures()
    assert figures.of("requests_total") == [({"endpoint": CHAT, "model": "m", "code": "200", "stream": "false"}, 64)]
    buckets = {labels["le"]: value for labels, value in figures.of("request_duration_seconds_bucket")}
    assert [buckets[le] for le in ("0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0", "+Inf")] == [2, 3, 5, 11, 21, 41, 64, 64]
    assert figures.whole("request_duration_seconds_sum") == 504
    assert figures.whole("upstream_duration_seconds_sum") == 16
    phases = {labels["phase"]: value for labels, value in figures.of("overhead_seconds_sum")}
    assert (phases["read"], phases["total"]) == (0, 4)
    assert figures.whole("prompt_tokens_received_total") == figures.whole("prompt_tokens_forwarded_total") == 2016
    assert figures.by("passthrough_total", "reason")["fits"] == 64
    assert figures.of("context_utilization_ratio_count") == [({"model": "m", "stage": "before"}, 32)]
    assert figures.of("upstream_usage_tokens_total") == [({"model": "m", "type": "input"}, 320)]


def test_names_get_labels_of_their_own_in_the_order_of_their_requests() -> None:
    metrics = Metrics()

    for number in (0, 1, 0, *range(60)):
        metrics.record(RequestRecord(model=f"model-{number}", duration=1.0))

    counted = metrics.figures().by("requests_total", "model")
    timed = metrics.figures().by("request_duration_seconds_count", "model")
    assert counted == {"model-0": 3, "model-1": 2, **{f"model-{number}": 1 for number in range(2, 50)}, "other": 10}
    assert timed == {"model-0": 3, "model-1": 2, **{f"model-{number}": 1 for number in range(2, 10)}, "other": 50}


def test_a_count_of_any_length_in_an_answer_keeps_no_other_request_from_being_counted() -> None:
    metrics = Metrics()

    for tokens in (5, 10**400, 7):
        metrics.record(RequestRecord(model="m", usage_input=tokens))

    assert metrics.figures().whole("requests_total") == 3


def test_a_request_that_waits_is_told_to_whoever_asks() -> None:
    metrics = Metrics()

    metrics.record(RequestRecord(model="m"))

    assert metrics.figures().whole("requests_total") == 1
    assert metrics.stats()["requests"] == 1


def test_an_event_gets_its_label_after_the_requests_that_came_before_it() -> None:
    metrics = Metrics()

    for number in range(10):
        metrics.record(RequestRecord(model=f"model-{number}", duration=1.0))
    metrics.record(RequestRecord(model="late", duration=1.0, outcome="applied"))

    timed = metrics.figures().by("request_duration_seconds_count", "model")
    assert timed == {**{f"model-{number}": 1 for number in range(10)}, "other": 1}


def test_requests_that_grew_are_told_as_forwarded_unchanged_and_the_gap_is_told() -> None:
    metrics = Metrics()

    for _ in range(20):
        metrics.record(RequestRecord(model="m", received=100, forwarded=130))

    figures = metrics.figures()
    names = ("prompt_tokens_received_total", "prompt_tokens_forwarded_total", "unattributed_prompt_tokens_total")
    assert [figures.whole(name) for name in names] == [2_000, 2_000, 600]


def test_a_window_is_the_one_told_last_also_when_names_share_a_label() -> None:
    metrics, seen = Metrics(), []

    for name, tokens in (("m", 1_000), ("m", 2_000), ("m", 1_000), ("a\x00", 100), ("a?", 200), ("a\x00", 100)):
        metrics.record(RequestRecord(model=name, window=window(tokens), usable=tokens // 2))
        figures = metrics.figures()
        seen.append((figures.by("context_window_tokens", "model"), figures.by("budget_tokens", "model")))

    assert seen == [
        ({"m": 1_000}, {"m": 500}),
        ({"m": 2_000}, {"m": 1_000}),
        ({"m": 1_000}, {"m": 500}),
        ({"m": 1_000, "a?": 100}, {"m": 500, "a?": 50}),
        ({"m": 1_000, "a?": 200}, {"m": 500, "a?": 100}),
        ({"m": 1_000, "a?": 100}, {"m": 500, "a?": 50}),
    ]


def test_the_windows_that_requests_were_measured_by_are_told_the_newest_last() -> None:
    metrics = Metrics()

    def told(*models: tuple[str, int | None]) -> tuple[dict[str, float], dict[str, float]]:
        for model, size in models:
            holds = None if size is None else window(size)
            metrics.record(RequestRecord(model=model, window=holds, usable=None if size is None else size // 2))
        figures = metrics.figures()
        return figures.by("context_window_tokens", "model"), figures.by("budget_tokens", "model")

    assert told(("m", 1_000), ("m", 2_000), ("other", None)) == ({"m": 2_000}, {"m": 1_000})
    assert told(("m", 1_000), ("m", None)) == ({"m": 1_000}, {"m": 500})
    assert told(("a\x00", 100), ("a?", 200), ("a\x00", 100)) == ({"m": 1_000, "a?": 100}, {"m": 500, "a?": 50})

"""Metrics: what a request contributes adds up, and nobody can make a scrape large."""

from __future__ import annotations

import random
import string
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import window
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from proxy.compaction import CompactionResult, CriticalItems, LayerReport
from proxy.conversation import Conversation
from proxy.metrics import CHAT, Account, Metrics, ModelNames, RequestRecord, saved_by_layer, settle

APPLIED = RequestRecord(
    endpoint=CHAT,
    model="gpt-4o",
    stream=True,
    duration=1.5,
    first_chunk=0.25,
    upstream_duration=1.25,
    overhead=(("compact", 0.03), ("total", 0.05)),
    received=10_000,
    forwarded=4_000,
    saved=(("snip", 1_500), ("context_collapse", 4_500)),
    outcome="applied",
    ratio=0.4,
    fill_before=0.9,
    fill_after=0.36,
    critical=CriticalItems(kept=7, repaired=1),
    prefix_break="event",
    usage_input=4_010,
    usage_output=20,
    usage_cached=1_000,
    count_error=0.9975,
    cost_saved=0.25,
)


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(exposition: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def scraped(metrics: Metrics) -> Samples:
    return samples(metrics.exposition()[0].decode())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return scraped(metrics).get((name, tuple(sorted(labels.items()))))


def summed(metrics: Metrics, name: str) -> float:
    return sum(amount for (found, _), amount in scraped(metrics).items() if found == name)


def test_one_request_shows_in_every_metric_that_it_touches() -> None:
    metrics = Metrics()

    metrics.record(APPLIED)

    assert value(metrics, "compaction_requests_total", endpoint=CHAT, model="gpt-4o", code="200", stream="true") == 1
    assert value(metrics, "compaction_request_duration_seconds_sum", endpoint=CHAT, model="gpt-4o", stream="true") == 1.5
    assert value(metrics, "compaction_time_to_first_chunk_seconds_sum", model="gpt-4o") == 0.25
    assert value(metrics, "compaction_upstream_duration_seconds_sum", model="gpt-4o") == 1.25
    assert value(metrics, "compaction_overhead_seconds_sum", phase="compact") == 0.03
    assert value(metrics, "compaction_prompt_tokens_received_total", model="gpt-4o") == 10_000
    assert value(metrics, "compaction_prompt_tokens_forwarded_total", model="gpt-4o") == 4_000
    assert value(metrics, "compaction_prompt_tokens_saved_total", model="gpt-4o", layer="snip") == 1_500
    assert value(metrics, "compaction_prompt_tokens_saved_total", model="gpt-4o", layer="context_collapse") == 4_500
    assert value(metrics, "compaction_events_total", model="gpt-4o", outcome="applied") == 1
    assert value(metrics, "compaction_ratio_sum", model="gpt-4o") == 0.4
    assert value(metrics, "compaction_context_utilization_ratio_sum", model="gpt-4o", stage="before") == 0.9
    assert value(metrics, "compaction_context_utilization_ratio_sum", model="gpt-4o", stage="after") == 0.36
    assert value(metrics, "compaction_critical_items_total", result="kept") == 7
    assert value(metrics, "compaction_critical_items_total", result="repaired") == 1
    assert value(metrics, "compaction_critical_items_total", result="lost") == 0
    assert value(metrics, "compaction_prefix_breaks_total", cause="event") == 1
    assert value(metrics, "compaction_upstream_usage_tokens_total", model="gpt-4o", type="input") == 4_010
    assert value(metrics, "compaction_upstream_usage_tokens_total", model="gpt-4o", type="output") == 20
    assert value(metrics, "compaction_upstream_cached_input_tokens_total", model="gpt-4o") == 1_000
    assert value(metrics, "compaction_token_count_error_ratio_sum", model="gpt-4o") == 0.9975
    assert value(metrics, "compaction_cost_saved_usd_total", model="gpt-4o") == 0.25


def test_failures_are_counted_by_their_closed_words() -> None:
    metrics = Metrics()

    metrics.record(
        RequestRecord(
            model="m",
            code=502,
            passthrough="deadline",
            validation_failures=("structure", "size", "size"),
            overflow="retried_ok",
            upstream_error="connect",
            client_disconnect=True,
            stream_abort=True,
        )
    )

    assert value(metrics, "compaction_passthrough_total", reason="deadline") == 1
    assert value(metrics, "compaction_validation_failures_total", rule="size") == 2
    assert value(metrics, "compaction_context_overflows_total", model="m", result="retried_ok") == 1
    assert value(metrics, "compaction_upstream_errors_total", reason="connect") == 1
    assert value(metrics, "compaction_client_disconnects_total", endpoint=CHAT) == 1
    assert value(metrics, "compaction_stream_aborts_total", endpoint=CHAT) == 1


def test_a_request_that_was_compacted_did_not_pass_through() -> None:
    metrics = Metrics()

    metrics.record(RequestRecord(model="m", outcome="applied", passthrough="floor"))
    metrics.record(RequestRecord(model="m", outcome="none", passthrough="floor"))

    assert value(metrics, "compaction_passthrough_total", reason="floor") == 1


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("compaction_passthrough_total", {"reason": "unknown_window"}),
        ("compaction_validation_failures_total", {"rule": "lost_constraint"}),
        ("compaction_critical_items_total", {"result": "lost"}),
        ("compaction_prefix_breaks_total", {"cause": "edit"}),
        ("compaction_upstream_errors_total", {"reason": "http_429"}),
        ("compaction_client_disconnects_total", {"endpoint": "/{path}"}),
        ("compaction_inflight_requests", {"endpoint": "/v1/compact"}),
        ("compaction_overhead_seconds_count", {"phase": "resume"}),
        ("compaction_prompt_tokens_saved_total", {"model": "gpt-4o", "layer": "emergency"}),
        ("compaction_events_total", {"model": "gpt-4o", "outcome": "failed"}),
        ("compaction_context_overflows_total", {"model": "gpt-4o", "result": "returned"}),
        ("compaction_upstream_usage_tokens_total", {"model": "gpt-4o", "type": "output"}),
    ],
)
def test_what_may_happen_shows_as_zero_before_it_happened(name: str, labels: dict[str, str]) -> None:
    metrics = Metrics(model_names=["gpt-4o"])

    assert value(metrics, name, **labels) == 0


def test_an_unknown_price_leaves_no_sample_rather_than_zero_dollars() -> None:
    metrics = Metrics(model_names=["gpt-4o"])

    metrics.record(replace(APPLIED, cost_saved=None))

    assert value(metrics, "compaction_cost_saved_usd_total", model="gpt-4o") is None
    assert metrics.stats()["cost_saved_usd"] is None


def test_what_is_not_known_leaves_no_sample() -> None:
    metrics = Metrics()

    metrics.record(RequestRecord(model="m"))

    names = {name for name, labels in scraped(metrics) if ("model", "m") in labels}
    assert names == {"compaction_requests_total"}


@pytest.mark.parametrize(
    ("received", "forwarded", "saved", "account"),
    [
        (100, 100, [], Account(100, 100, ())),
        (100, 60, [("a", 40)], Account(100, 60, (("a", 40),))),
        (100, 60, [("a", 30), ("b", 10)], Account(100, 60, (("a", 30), ("b", 10)))),
        (100, 60, [("a", 25)], Account(100, 60, (("a", 25), ("unattributed", 15)), gap=15)),
        (100, 60, [("a", 30), ("b", 30)], Account(100, 60, (("a", 30), ("b", 10)), gap=20)),
        (100, 130, [], Account(100, 100, (), gap=30)),
        (100, 130, [("a", 5)], Account(100, 100, (), gap=35)),
        (100, 60, [("a", -10), ("b", 50)], Account(100, 60, (("b", 40),), gap=20)),
        (100, 60, [("a", 0), ("b", 40)], Account(100, 60, (("b", 40),))),
    ],
)
def test_an_account_that_does_not_add_up_is_mended_and_says_how_much(
    received: int, forwarded: int, saved: list[tuple[str, int]], account: Account
) -> None:
    assert settle(received, forwarded, saved) == account


@given(
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-(10**6), 10**7)), max_size=6),
)
def test_every_account_adds_up(received: int, forwarded: int, saved: list[tuple[str, int]]) -> None:
    account = settle(received, forwarded, saved)

    assert account.received - account.forwarded == sum(tokens for _, tokens in account.saved)
    assert account.received == received
    assert all(tokens > 0 for _, tokens in account.saved)
    assert (account.gap == 0) == (received - forwarded == sum(t for _, t in saved) and all(t >= 0 for _, t in saved))


def test_received_minus_forwarded_is_what_the_layers_saved_whatever_is_recorded() -> None:
    metrics, chance = Metrics(), random.Random(7)

    for _ in range(500):
        received = chance.randrange(100_000)
        saved = tuple((layer, chance.randrange(-50, 5_000)) for layer in ("snip", "microcompact", "emergency"))
        forwarded = received - sum(t for _, t in saved) + chance.choice([0, 0, 0, 17, -17])
        metrics.record(RequestRecord(model="m", received=received, forwarded=max(forwarded, 0), saved=saved))

    gained = summed(metrics, "compaction_prompt_tokens_received_total") - summed(
        metrics, "compaction_prompt_tokens_forwarded_total"
    )
    assert gained > 0
    assert gained == summed(metrics, "compaction_prompt_tokens_saved_total")
    assert summed(metrics, "compaction_unattributed_prompt_tokens_total") > 0


def test_layers_that_were_refused_save_nothing() -> None:
    reports = (
        LayerReport("snip", 100, 80),
        LayerReport("microcompact", 80, 40, refused="structure"),
        LayerReport("emergency", 80, 50),
    )
    result = CompactionResult(Conversation(()), 100, 50, reports)

    assert saved_by_layer(result) == (("snip", 20), ("emergency", 30))


def test_ten_thousand_hostile_model_names_add_at_most_51_label_values() -> None:
    metrics, chance = Metrics(model_names=["gpt-4o", "qwen-max"]), random.Random(3)
    alphabet = string.printable + "\u202e\U0001f600\ud800é\x00"
    record = replace(APPLIED, model="gpt-4o")

    for _ in range(10_000):
        metrics.record(replace(record, model="".join(chance.choices(alphabet, k=chance.randrange(200)))))
    metrics.record(record)
    started = time.perf_counter()
    body, _ = metrics.exposition()
    took = time.perf_counter() - started

    models = {dict(labels)["model"] for _, labels in scraped(metrics) if "model" in dict(labels)}
    assert len(models - {"gpt-4o", "qwen-max"}) == 51
    assert "other" in models
    assert all(0 < len(model) <= 80 and model.isprintable() for model in models)
    assert value(metrics, "compaction_prompt_tokens_received_total", model="gpt-4o") == 10_000
    assert len(body) < 300_000
    print(f"{len(body)} bytes in {took * 1000:.0f} ms")


def test_the_same_from_three_workers_together(tmp_path: Path) -> None:
    workers = [Metrics(model_names=["gpt-4o"], folder=tmp_path) for _ in range(3)]

    for number in range(1_000):
        workers[number % 3].record(replace(APPLIED, model=f"hostile-{number}"))
    for one in workers:
        one.share()
    body, _ = workers[0].exposition()

    models = {dict(labels)["model"] for _, labels in scraped(workers[0]) if "model" in dict(labels)}
    assert len(models - {"gpt-4o"}) == 51
    assert len(body) < 300_000
    assert summed(workers[0], "compaction_prompt_tokens_received_total") == 10_000_000


def test_a_name_that_looks_like_another_shares_its_label() -> None:
    names = ModelNames(["gpt-4o"], room=2)

    assert [names[n] for n in ("gpt-4o", "a\x00", "a\x01", "b", "c", "a?", None, "")] == [
        *("gpt-4o", "a?", "a?", "b", "other", "a?", "other", "other")
    ]


def test_a_request_without_a_model_is_told_as_unknown() -> None:
    assert ModelNames()[None] == "unknown"
    assert ModelNames()["   "] == "unknown"


def test_an_endpoint_that_is_no_template_never_becomes_a_label() -> None:
    metrics = Metrics()

    metrics.record(RequestRecord(endpoint="/v1/files/secret", model="m"))

    assert value(metrics, "compaction_requests_total", endpoint="/{path}", model="m", code="200", stream="false") == 1
    assert b"secret" not in metrics.exposition()[0]


def test_requests_in_flight_go_up_and_down() -> None:
    metrics = Metrics()

    metrics.serving[CHAT] += 1
    during = value(metrics, "compaction_inflight_requests", endpoint=CHAT)
    metrics.serving[CHAT] -= 1

    assert during == 1
    assert value(metrics, "compaction_inflight_requests", endpoint=CHAT) == 0


def test_windows_summaries_stores_and_tokenizers_are_observed() -> None:
    metrics = Metrics(version="9.9.9")

    metrics.record(RequestRecord(model="gpt-4o", window=window(128_000), usable=102_400))
    metrics.observe_summary("gpt-4o-mini", "ok", seconds=2.0, tokens_in=900, tokens_out=100, cost=0.5)
    metrics.observe_summary("gpt-4o-mini", "timeout")
    metrics.observe_checkpoint("sqlite", "get", "hit", 0.25)
    metrics.set_checkpoint_bytes("sqlite", 4_096)
    metrics.set_tokenizer_degraded("o200k_base", True)
    metrics.set_config_loaded(1_000.0)

    assert value(metrics, "compaction_context_window_tokens", model="gpt-4o") == 128_000
    assert value(metrics, "compaction_budget_tokens", model="gpt-4o") == 102_400
    assert value(metrics, "compaction_summarizer_requests_total", model="gpt-4o-mini", outcome="ok") == 1
    assert value(metrics, "compaction_summarizer_requests_total", model="gpt-4o-mini", outcome="timeout") == 1
    assert value(metrics, "compaction_summarizer_tokens_total", model="gpt-4o-mini", type="input") == 900
    assert value(metrics, "compaction_summarizer_duration_seconds_sum", model="gpt-4o-mini") == 2.0
    assert value(metrics, "compaction_summarizer_cost_usd_total", model="gpt-4o-mini") == 0.5
    assert value(metrics, "compaction_checkpoint_operations_total", store="sqlite", operation="get", result="hit") == 1
    assert value(metrics, "compaction_checkpoint_duration_seconds_sum", store="sqlite", operation="get") == 0.25
    assert value(metrics, "compaction_checkpoint_bytes", store="sqlite") == 4_096
    assert value(metrics, "compaction_tokenizer_degraded", encoding="o200k_base") == 1
    assert value(metrics, "compaction_config_loaded_timestamp_seconds") == 1_000
    assert value(metrics, "compaction_build_info", version="9.9.9") == 1


def test_openmetrics_is_negotiated_and_carries_trace_ids() -> None:
    metrics = Metrics()
    metrics.record(replace(APPLIED, trace_id="4bf92f3577b34da6a3ce929d0e0e4736"))

    plain, plain_type = metrics.exposition("text/plain")
    body, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")

    assert plain_type.startswith("text/plain; version=0.0.4")
    assert b"trace_id" not in plain
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    exemplars = [s for f in openmetrics_families(body.decode()) for s in f.samples if s.exemplar]
    assert {s.name for s in exemplars} == {
        *("compaction_request_duration_seconds_bucket", "compaction_time_to_first_chunk_seconds_bucket"),
        "compaction_upstream_duration_seconds_bucket",
    }
    assert exemplars[0].exemplar is not None
    assert exemplars[0].exemplar.labels == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}


def test_stats_tell_what_the_metrics_say() -> None:
    metrics = Metrics(model_names=["gpt-4o"])
    metrics.record(replace(APPLIED, window=window(128_000), usable=102_400))
    metrics.record(RequestRecord(model="gpt-4o", received=500, forwarded=500, passthrough="fits"))

    stats = metrics.stats()

    assert stats["requests"] == 2
    assert stats["tokens"] == {"received": 10_500, "forwarded": 4_500, "saved": 6_000, "saved_share": 0.571429}
    assert stats["cost_saved_usd"] == 0.25
    assert stats["layers"] == {
        "tool_result_budget": 0,
        "snip": 1_500,
        "microcompact": 0,
        "context_collapse": 4_500,
        "auto_compact": 0,
        "emergency": 0,
        "summary": 0,
        "checkpoint": 0,
    }
    assert stats["models"] == {
        "gpt-4o": {
            "requests": 2,
            "tokens": {"received": 10_500, "forwarded": 4_500, "saved": 6_000, "saved_share": 0.571429},
            "cost_saved_usd": 0.25,
            "window": 128_000,
            "budget": 102_400,
        }
    }
    (event,) = stats["recent_events"]  # type: ignore[misc,attr-defined]
    assert event["outcome"] == "applied"
    assert event["tokens_before"] == 10_000
    assert event["tokens_after"] == 4_000
    assert event["layers"] == {"snip": 1_500, "context_collapse": 4_500}


def test_only_the_newest_fifty_events_are_remembered() -> None:
    metrics = Metrics()

    for tokens in range(1, 61):
        metrics.record(RequestRecord(model="m", received=tokens, forwarded=0, saved=(("snip", tokens),), outcome="applied"))

    recent = metrics.stats()["recent_events"]
    assert [event["tokens_before"] for event in recent] == list(range(60, 10, -1))  # type: ignore[attr-defined]


WORKER = """
import sys
from pathlib import Path
from proxy.metrics import Metrics, RequestRecord
from proxy.windows import Window
metrics = Metrics(model_names=["gpt-4o"], version="1", folder=Path(sys.argv[1]))
window = Window(1000, None, None, "config", None, None, None)
metrics.serving["/chat/completions"] += 1
for _ in range(int(sys.argv[2])):
    metrics.record(RequestRecord(model="gpt-4o", duration=0.5, received=100, forwarded=40, saved=(("snip", 60),),
                                 outcome="applied", window=window, usable=800))
metrics.share()
print(metrics.exposition()[0].decode())
"""


def worked(folder: Path, requests: int) -> tuple[int, Samples]:
    """A worker of its own that serves so many requests, and ends without a word: its process id, and what it told at last."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(requests)], stdout=subprocess.PIPE, text=True)
    printed, _ = worker.communicate()
    assert worker.returncode == 0
    return worker.pid, samples(printed)


def test_the_figures_of_several_workers_add_up_whichever_is_asked(tmp_path: Path) -> None:
    worked(tmp_path, 1)
    worked(tmp_path, 2)
    _, told = worked(tmp_path, 3)

    assert told["compaction_prompt_tokens_received_total", (("model", "gpt-4o"),)] == 600
    assert told["compaction_prompt_tokens_forwarded_total", (("model", "gpt-4o"),)] == 240
    assert told["compaction_prompt_tokens_saved_total", (("layer", "snip"), ("model", "gpt-4o"))] == 360
    duration = (("endpoint", CHAT), ("model", "gpt-4o"), ("stream", "false"))
    assert told["compaction_request_duration_seconds_count", duration] == 6
    assert told["compaction_context_window_tokens", (("model", "gpt-4o"),)] == 1000
    assert told["compaction_inflight_requests", (("endpoint", CHAT),)] == 3
    assert len(Metrics(folder=tmp_path).stats()["recent_events"]) == 6  # type: ignore[arg-type]


def test_what_a_worker_counted_outlives_it_and_what_it_had_in_flight_does_not(tmp_path: Path) -> None:
    starter = Metrics(folder=tmp_path)
    gone = [worked(tmp_path, requests)[0] for requests in (1, 2, 3)]

    for process in gone:
        starter.bury(process)
    starter.bury(gone[0])

    told = samples(starter.exposition()[0].decode())
    assert told["compaction_prompt_tokens_received_total", (("model", "gpt-4o"),)] == 600
    assert told["compaction_inflight_requests", (("endpoint", CHAT),)] == 0
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_no_counter_seems_to_go_back_when_another_worker_answers(tmp_path: Path) -> None:
    first, second = Metrics(folder=tmp_path), Metrics(folder=tmp_path)
    first.record(RequestRecord(model="m", received=10, forwarded=10))

    before = value(first, "compaction_prompt_tokens_received_total", model="m")
    told_by_other = value(second, "compaction_prompt_tokens_received_total", model="m")
    first.share()
    after = [value(one, "compaction_prompt_tokens_received_total", model="m") for one in (first, second)]

    assert before == told_by_other is None
    assert after == [10, 10]


def test_figures_shared_from_two_threads_at_once_are_whole(tmp_path: Path) -> None:
    metrics = Metrics(folder=tmp_path)

    with ThreadPoolExecutor(2) as threads:
        sharing = [threads.submit(metrics.share) for _ in range(200)]

    assert [one.exception() for one in sharing] == [None] * 200
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_the_account_adds_up_in_every_scrape_while_requests_are_recorded() -> None:
    metrics = Metrics()
    record = RequestRecord(model="m", received=100, forwarded=30, saved=(("snip", 70),), outcome="applied")
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            metrics.record(record)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        gaps = set()
        for _ in range(200):
            figures = metrics.figures()
            received, forwarded = (figures.whole(f"prompt_tokens_{one}_total") for one in ("received", "forwarded"))
            gaps.add(received - forwarded - figures.whole("prompt_tokens_saved_total"))
    finally:
        ended.set()
        serving.join()

    assert gaps == {0}


def test_costs_are_told_gross_and_net_and_what_was_not_priced_is_not_told() -> None:
    metrics = Metrics()

    assert metrics.stats()["cost_saved_net_usd"] is None

    metrics.record(replace(APPLIED, cost_saved=0.25, cost_broken=0.05))
    metrics.observe_summary("gpt-4o", "ok", tokens_in=100, tokens_out=10, cost=0.02)

    stats = metrics.stats()
    assert [stats[name] for name in ("cost_saved_usd", "cache_break_cost_usd", "summarizer_cost_usd", "cost_saved_net_usd")] == [
        0.25,
        0.05,
        0.02,
        0.18,
    ]
    assert value(metrics, "compaction_cache_break_cost_usd_total", model="gpt-4o") == 0.05

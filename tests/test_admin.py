"""The admin listener: what it answers, and that a scrape costs the requests nothing."""

from __future__ import annotations

import asyncio

import pytest
from starlette.testclient import TestClient

from proxy.admin import Readiness, Scrapes, admin_app
from proxy.metrics import Metrics, RequestRecord


def client(metrics: Metrics | None = None, state: Readiness | None = None, **options: object) -> TestClient:
    return TestClient(admin_app(metrics or Metrics(), ready=lambda: state or Readiness(), **options))  # type: ignore[arg-type]


def test_metrics_are_served_in_the_format_that_is_asked_for() -> None:
    metrics = Metrics()
    metrics.record(RequestRecord(model="m", received=10, forwarded=10))
    http = client(metrics)

    plain = http.get("/metrics")
    wanted = http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})

    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'compaction_prompt_tokens_received_total{model="m"} 10.0' in plain.text
    assert wanted.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert wanted.text.endswith("# EOF\n")


def test_twenty_scrapes_at_once_are_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, built = Metrics(), []
    build = metrics.exposition
    monkeypatch.setattr(metrics, "exposition", lambda accept: (built.append(accept), build(accept))[1])

    async def scrape() -> list[tuple[bytes, str]]:
        scrapes = Scrapes(metrics, fresh=3600)
        return await asyncio.gather(*(scrapes.get("text/plain") for _ in range(20)))

    answers = asyncio.run(scrape())

    assert built == ["text/plain"]
    assert len(set(answers)) == 1


def test_a_scrape_that_is_no_longer_fresh_is_read_anew() -> None:
    metrics = Metrics()

    async def scrape() -> tuple[bytes, bytes]:
        scrapes = Scrapes(metrics, fresh=0)
        before, _ = await scrapes.get("")
        metrics.record(RequestRecord(model="m", received=12, forwarded=12))
        after, _ = await scrapes.get("")
        return before, after

    before, after = asyncio.run(scrape())

    assert b'received_total{model="m"}' not in before
    assert b'received_total{model="m"} 12.0' in after


def test_health_says_that_the_process_is_up() -> None:
    answer = client().get("/healthz")

    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_readiness_says_what_works() -> None:
    answer = client(state=Readiness(details={"tokenizer": "exact", "store": "memory"})).get("/readyz")

    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "ready", "reasons": [], "tokenizer": "exact", "store": "memory"},
    )


def test_readiness_is_503_with_reasons_while_draining() -> None:
    answer = client(state=Readiness(False, ("draining",))).get("/readyz")

    assert (answer.status_code, answer.json()) == (503, {"status": "not ready", "reasons": ["draining"]})


def test_stats_are_json_with_what_the_app_adds() -> None:
    metrics = Metrics(model_names=["m"])
    metrics.record(RequestRecord(model="m", received=10, forwarded=4, saved=(("snip", 6),), outcome="applied"))

    stats = client(metrics, extras=lambda: {"store": "memory"}).get("/stats").json()

    assert stats["tokens"] == {"received": 10, "forwarded": 4, "saved": 6, "saved_share": 0.6}
    assert stats["store"] == "memory"


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/debug", "/v1/chat/completions", "/explain"])
def test_anything_else_is_a_404_in_json(path: str) -> None:
    answer = client().get(path)

    assert (answer.status_code, answer.json()) == (404, {"error": {"message": "Not Found", "code": 404}})


def test_a_method_that_changes_something_is_refused_in_json() -> None:
    answer = client().post("/metrics")

    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == 405

"""A real Prometheus scrapes the real proxy under a replayed load: rules hold, and every query of the dashboard answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "grafana/dashboards/overview.json").read_text())
TARGETS = [
    pytest.param(panel["title"], target["expr"], id=f"{panel['id']}{target['refId']} {panel['title']}")
    for panel in BOARD["panels"]
    for target in panel.get("targets", [])
]
SECONDS = 20
"""Of load. Long enough for events, overflows, failures and clients that leave."""

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(not shutil.which("prometheus") or not shutil.which("promtool"), reason="Prometheus is not installed"),
]


def loaded(name: str) -> ModuleType:
    """A program of the dashboard's folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "grafana" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Run:
    """What is left of a replay: each query's lines by its expression, the last scrape, how long it took."""

    courses: dict[str, list[dict[str, Any]]]
    variables: dict[str, list[str]]
    alerts: dict[str, str]
    scrape: bytes
    scraped_in: float
    stats: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    replay = loaded("replay")

    async def played() -> Run:
        async with replay.rig(tmp_path_factory.mktemp("replay"), summaries=True) as rig:
            await rig.load(SECONDS)
            await asyncio.sleep(3)  # two more scrapes and one more evaluation of the rules
            return await asyncio.to_thread(read, rig)

    return asyncio.run(played())


def read(rig: Any) -> Run:
    exprs = {target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])}
    rules = [rule for name in ("rules", "alerts") for rule in rules_of(name)]
    health = {rule["name"]: rule["health"] for group in rig.get("/api/v1/rules")["groups"] for rule in group["rules"]}
    with httpx.Client(base_url=rig.admin, trust_env=False) as http:
        started = time.perf_counter()
        scrape = http.get("/metrics").content
        took = time.perf_counter() - started
        stats = http.get("/stats").json()
    return Run(
        {expr: rig.course(expr) for expr in exprs | {side for rule in rules for side in measured(rule["expr"])}},
        {one["name"]: rig.values(one["query"]) for one in BOARD["templating"]["list"] if one["type"] == "query"},
        health,
        scrape,
        took,
        stats,
    )


def measured(expr: str) -> tuple[str, ...]:
    """What an alert compares, each side by itself: there also while all is well. A run of seconds has no hours and days."""
    for long, short in (("[1d] offset 1h", "[10s] offset 5s"), ("[1h]", "[10s]")):
        expr = expr.replace(long, short)
    return tuple(re.sub(r"\s*(?:>|==)\s*[\d.]+\s*$", "", side) for side in re.split(r"\s*< [\d.]+ \*\s*", expr))


def rules_of(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / f"deploy/prometheus/{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str, given: bytes | None = None) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=ROOT / "deploy/prometheus", input=given, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_promtool_finds_nothing_in_the_configuration_and_the_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "rules.yml", "alerts.yml")


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "tests.yml")


def test_promtool_finds_nothing_in_a_scrape_under_load(run: Run) -> None:
    promtool("check", "metrics", given=run.scrape)


def numbers(lines: list[dict[str, Any]]) -> list[float]:
    return [float(value) for line in lines for _, value in line["values"]]


@pytest.mark.parametrize(("title", "expr"), TARGETS)
def test_every_panel_shows_something_that_is_a_number(run: Run, title: str, expr: str) -> None:
    assert any(value == value for value in numbers(run.courses[expr])), title


@pytest.mark.parametrize("name", ["job", "instance", "model"])
def test_every_variable_offers_something(run: Run, name: str) -> None:
    assert run.variables[name]


def test_the_models_that_are_offered_are_those_that_were_asked_for(run: Run) -> None:
    assert set(run.variables["model"]) == {"gpt-4o", "gpt-4o-mini", "qwen-coder", "new-model"}


def test_every_rule_was_evaluated_without_an_error(run: Run) -> None:
    names = {rule.get("alert") or rule["record"] for name in ("rules", "alerts") for rule in rules_of(name)}

    assert run.alerts == dict.fromkeys(names, "ok")


@pytest.mark.parametrize("rule", [*rules_of("rules"), *rules_of("alerts")], ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_has_something_to_measure(run: Run, rule: dict[str, Any]) -> None:
    """An alert over what is never there would never fire."""
    for side in measured(rule["expr"]):
        assert any(value == value for value in numbers(run.courses[side]))


def test_received_less_forwarded_is_what_the_layers_saved_on_a_live_scrape(run: Run) -> None:
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(run.scrape.decode()):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    received, forwarded, saved = (sums[f"compaction_prompt_tokens_{which}_total"] for which in ("received", "forwarded", "saved"))

    assert saved > 0
    assert received - forwarded == saved
    assert sums["compaction_unattributed_prompt_tokens_total"] == 0
    assert run.stats["tokens"] == {
        "received": received,
        "forwarded": forwarded,
        "saved": saved,
        "saved_share": round(saved / received, 6),
    }


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What Prometheus saw of three workers under load, one of which was killed in between: query → lines, a point a scrape."""
    replay = loaded("replay")
    account = " - ".join(f"sum(compaction_prompt_tokens_{which}_total)" for which in ("received", "forwarded", "saved"))
    # under another label than __name__, which a function drops, the series stay apart
    counters = """label_replace({__name__=~"compaction_.+_(total|count|bucket)"}, "of", "$1", "__name__", "(.+)")"""
    asked = (account, "sum(compaction_prompt_tokens_saved_total)", f"resets({counters}[5m:1s])")

    async def played() -> dict[str, list[dict[str, Any]]]:
        async with replay.rig(tmp_path_factory.mktemp("three"), arguments=("--workers", "3")) as rig:
            await rig.load(6)
            os.kill(worker_of(rig.process), signal.SIGKILL)
            await rig.load(6)
            await asyncio.sleep(3)
            return {expr: await asyncio.to_thread(rig.course, expr) for expr in asked}

    return asyncio.run(played())


def worker_of(supervisor: int) -> int:
    """The process id of one of the workers."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return next(int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes())


def test_with_three_workers_the_account_adds_up_at_every_scrape_and_no_counter_is_reset(
    three: dict[str, list[dict[str, Any]]],
) -> None:
    account, saved, resets = map(numbers, three.values())

    assert len(account) >= 10
    assert set(account) == {0.0}
    assert saved == sorted(saved)
    assert saved[-1] > 0
    assert len(resets) > 1_000
    assert set(resets) == {0.0}


def test_a_scrape_under_load_is_small(run: Run) -> None:
    assert len(run.scrape) < 300_000
    print(f"{len(run.scrape)} bytes in {run.scraped_in * 1000:.0f} ms")


def test_nothing_that_was_said_and_no_path_or_key_is_in_a_scrape(run: Run) -> None:
    for word in (b"module_", b"careful", b"sk-", b"/v1/chat", b"call_1"):
        assert word not in run.scrape

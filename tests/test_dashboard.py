"""The dashboard: what is committed is what the code says, it lays out, and asks only for metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from builders import window

from proxy.metrics import Metrics, RequestRecord

ROOT = Path(__file__).parents[1]
BOARD: dict[str, Any] = json.loads((ROOT / "grafana/dashboards/overview.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
ALERTS = [
    (rule["alert"], rule["expr"])
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = [
    (rule["record"], rule["expr"])
    for group in yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
UNITS = {"short", "none", "percentunit", "currencyUSD", "s", "bytes", "reqps", "ops"}


def built() -> ModuleType:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk writes the dashboard")
    spec = importlib.util.spec_from_file_location("overview", ROOT / "grafana/overview.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["overview"] = module
    spec.loader.exec_module(module)
    return module


def registered() -> set[str]:
    """Every sample name that the code can expose, with each metric touched once."""
    metrics = Metrics(model_names=["m"], version="1")
    metrics.record(
        RequestRecord(model="m", duration=1, first_chunk=1, upstream_duration=1, ratio=1, fill_before=1, count_error=1)
    )
    metrics.record(RequestRecord(model="m", received=1, forwarded=1, cost_saved=1.0, cost_broken=1.0))
    metrics.observe_summary("m", "ok", seconds=1, cost=1.0)
    metrics.observe_checkpoint("memory", "get", "hit", 1)
    metrics.set_checkpoint_bytes("memory", 1)
    metrics.set_tokenizer_degraded("o200k_base", False)
    metrics.record(RequestRecord(model="m", window=window(2), usable=1))
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


def names(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:compaction|process|python)_[a-z0-9_]+", expr))


def test_the_committed_dashboard_is_what_the_code_writes() -> None:
    module = built()

    assert (ROOT / "grafana/dashboards/overview.json").read_text(encoding="utf-8") == module.written()


def test_the_dashboard_has_its_name_and_asks_nothing_at_import() -> None:
    assert BOARD["uid"] == "compaction-overview"
    assert BOARD["title"] == "Compaction proxy / Overview"
    assert "__inputs" not in BOARD
    assert "id" not in BOARD


def test_the_rows_are_those_that_people_look_for() -> None:
    assert [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"] == [
        "Savings",
        "Context pressure",
        "Compaction quality",
        "Latency and overhead",
        "Errors and overflows",
        "Summarizer and checkpoints",
        "Process",
    ]


def test_no_panel_leaves_the_grid_or_lies_on_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


def test_every_panel_has_an_id_and_a_title_of_its_own_in_its_row() -> None:
    assert [panel["id"] for panel in BOARD["panels"]] == list(range(1, len(BOARD["panels"]) + 1))
    row = ""
    seen: set[tuple[str, str]] = set()
    for panel in BOARD["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        assert (row, panel["title"]) not in seen or panel["type"] == "row"
        seen.add((row, panel["title"]))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_panel_says_what_it_shows_in_which_unit_and_what_when_there_is_nothing(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    last = panel["description"].split()[-1]

    assert panel["title"]
    assert defaults["unit"] in UNITS
    assert defaults["noValue"]
    assert re.search(r"\. Metric: [a-z_]+$", panel["description"])
    assert any(last in name for target in panel["targets"] for name in names(target["expr"]))
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_lines_of_one_panel_can_be_told_apart(panel: dict[str, Any]) -> None:
    legends = [target["legendFormat"] for target in panel["targets"]]

    assert len(set(legends)) == len(legends)
    for target in panel["targets"]:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert label == "instance" or any(label in re.split(r",\s*", group) for group in grouped)


@pytest.mark.parametrize(("title", "expr"), QUERIES)
def test_a_query_is_bound_to_the_variables_and_the_range(title: str, expr: str) -> None:
    for selector in re.findall(r"\{([^}]*)\}", expr):
        assert 'job=~"$job", instance=~"$instance"' in selector, title
    for span in re.findall(r"\[([^\]]*)\]", expr):
        assert span in {"$__rate_interval", "$__range"}, title
    for counter in re.findall(r"(\w*)\((\w+_total)\{", expr):
        assert counter[0] in {"rate", "increase"}, title
    assert len(re.findall(r"\brate\(", expr)) == expr.count("[$__rate_interval]")


def test_variables_are_there_multi_and_refreshed_with_the_time_range() -> None:
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}

    assert list(variables) == ["datasource", "job", "instance", "model"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for name in ("job", "instance", "model"):
        assert variables[name]["multi"] is True
        assert variables[name]["includeAll"] is True
        assert variables[name]["allValue"] == ".+"
        assert variables[name]["refresh"] == 2


@pytest.mark.parametrize(("name", "expr"), [*QUERIES, *ALERTS, *RECORDED])
def test_only_metrics_that_the_code_registers_are_asked_for(name: str, expr: str) -> None:
    assert names(expr) - {"compaction_proxy"} <= registered(), name


@pytest.mark.parametrize("query", [v["query"] for v in BOARD["templating"]["list"] if v["type"] == "query"])
def test_variables_ask_only_for_metrics_that_the_code_registers(query: str) -> None:
    assert names(query) <= registered()


@pytest.mark.parametrize(("name", "expr"), [*QUERIES, *ALERTS, *RECORDED])
def test_every_query_parses(name: str, expr: str) -> None:
    promql_parser = pytest.importorskip("promql_parser", reason="promql-parser reads PromQL")
    asked = (
        re.sub(r"\$__rate_interval|\$__range", "5m", expr)
        .replace("$job", ".+")
        .replace("$instance", ".+")
        .replace("$model", ".+")
    )

    promql_parser.parse(asked)


def test_each_metric_of_the_proxy_is_shown_somewhere() -> None:
    shown = {re.sub(r"_bucket$", "", name) for _, expr in QUERIES for name in names(expr)}
    exposed = {
        re.sub(r"_(bucket|count|sum)$", "", name) if not name.endswith("_bytes") else name
        for name in registered()
        if name.startswith("compaction_")
    }

    assert exposed - shown == {"compaction_shadow_prompt_tokens_saved_total", "compaction_unattributed_prompt_tokens_total"}


def test_the_provisioned_source_scrapes_as_often_as_the_dashboard_believes() -> None:
    source = yaml.safe_load((ROOT / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]

    assert source["jsonData"]["timeInterval"] == scrape


@pytest.mark.parametrize(("alert", "expr"), ALERTS)
def test_every_alert_says_how_bad_what_and_what_to_do(alert: str, expr: str) -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    rule = next(rule for group in groups for rule in group["rules"] if rule["alert"] == alert)
    tested = (ROOT / "deploy/prometheus/tests.yml").read_text()

    assert alert.startswith("CompactionProxy")
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert len(rule["annotations"]["summary"]) > 20
    assert len(rule["annotations"]["description"]) > 40
    assert alert in tested


def test_the_alerts_are_those_of_the_catalogue() -> None:
    assert [alert.removeprefix("CompactionProxy") for alert, _ in ALERTS] == [
        "Down",
        "HighErrorRate",
        "ContextOverflowReturned",
        "CriticalItemsLost",
        "OverheadHigh",
        "SavingsCollapsed",
        "SummarizerFailing",
        "TokenCountDrift",
        "TokenizerDegraded",
    ]


def test_panels_of_many_lines_leave_out_those_that_stay_at_zero_and_no_other_panel_hides_any() -> None:
    hidden = {"id": "custom.hideFrom", "value": {"legend": True, "tooltip": True, "viz": True}}
    zeros = {"id": "byValue", "options": {"reducer": "allIsZero", "op": "gte", "value": 0}}
    overridden = {panel["title"]: panel["fieldConfig"]["overrides"] for panel in PANELS if panel["fieldConfig"].get("overrides")}

    assert list(overridden) == [
        "Tokens saved by layer",
        "Forwarded as they came, by reason",
        "Validation failures",
        "Upstream errors",
    ]
    assert all(found == [{"matcher": zeros, "properties": [hidden]}] for found in overridden.values())


def test_what_is_one_number_is_asked_for_once() -> None:
    for panel in PANELS:
        (instant,) = {target.get("instant", False) for target in panel["targets"]}
        assert instant == (panel["type"] == "stat"), panel["title"]


def test_the_picture_shows_rows_that_are_there_without_a_gap() -> None:
    source = (ROOT / "grafana/picture.py").read_text()
    (listed,) = re.findall(r"^SHOWN = \(([^)]*)\)", source, flags=re.MULTILINE)
    shown = re.findall(r'"([^"]+)"', listed)
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]

    assert rows[: len(shown)] == shown

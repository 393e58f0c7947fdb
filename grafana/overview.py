"""The overview dashboard as code: run it to write `dashboards/overview.json` anew.

A panel is a value: what it shows, in which unit, and the queries. Everything that all panels share is added in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    MatcherConfig,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

OUTPUT = Path(__file__).parent / "dashboards" / "overview.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

HERE = 'job=~"$job", instance=~"$instance"'
MODEL = f'{HERE}, model=~"$model"'
INPUT = f'{MODEL}, type="input"'
COMPACTED = f'{MODEL}, outcome=~"applied|reused"'
SERVER_ERRORS = f'{MODEL}, code=~"5.."'


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = "__auto"
    exemplar: bool = False


@dataclass(frozen=True)
class Figure:
    """One number over the whole time range; six to a row. Asked for once: its course would be that sum again for each pixel."""

    title: str
    told: str
    metric: str
    unit: str
    query: Query
    decimals: int | None = None
    empty: str = "No data yet"


@dataclass(frozen=True)
class Course:
    """Lines over time; `width` of 24 columns. many: most of its lines stay at zero, and those are not shown."""

    title: str
    told: str
    metric: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 12
    stacked: bool = False
    many: bool = False
    empty: str = "Nothing in this time range"


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Figure | Course, ...]


def rate(metric: str, matchers: str = MODEL, window: str = "$__rate_interval") -> str:
    return f"rate({metric}{{{matchers}}}[{window}])"


def increase(metric: str, matchers: str = MODEL) -> str:
    """What was added over the whole time range that is shown."""
    return f"increase({metric}{{{matchers}}}[$__range])"


def share(part: str, whole: str) -> str:
    """A ratio that is absent, not NaN, when there is no traffic."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, metric: str, by: str = "", matchers: str = MODEL) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) ({rate(metric + '_bucket', matchers)}))"


def percentiles(metric: str, matchers: str = MODEL, exemplar: bool = False) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, metric, matchers=matchers), f"p{q * 100:.0f}", exemplar) for q in (0.5, 0.95, 0.99))


SAVED, RECEIVED, FORWARDED = (f"compaction_prompt_tokens_{which}_total" for which in ("saved", "received", "forwarded"))

SAVINGS = Section(
    "Savings",
    (
        Figure(
            "Tokens saved",
            "Prompt tokens that were not sent upstream in the time range shown, net of stubs and summaries.",
            SAVED,
            "short",
            Query(f"sum({increase(SAVED)})"),
        ),
        Figure(
            "Share saved",
            "How much of what clients sent was not sent upstream.",
            SAVED,
            "percentunit",
            Query(share(f"sum({increase(SAVED)})", f"sum({increase(RECEIVED)})")),
            decimals=1,
        ),
        Figure(
            "Dollars saved, net",
            "What the saved tokens would have cost (cached ones at the cached price), less broken caches and summaries.",
            "compaction_cost_saved_usd_total",
            "currencyUSD",
            Query(
                f"sum({increase('compaction_cost_saved_usd_total')}) "
                f"- (sum({increase('compaction_cache_break_cost_usd_total')}) or vector(0)) "
                f"- (sum({increase('compaction_summarizer_cost_usd_total', HERE)}) or vector(0))"
            ),
            decimals=2,
            empty="No prices known",
        ),
        Figure(
            "Cached share of input",
            "How much of the forwarded prompts the upstream had in its prompt cache, as it reports it.",
            "compaction_upstream_cached_input_tokens_total",
            "percentunit",
            Query(
                share(
                    f"sum({increase('compaction_upstream_cached_input_tokens_total')})",
                    f"sum({increase('compaction_upstream_usage_tokens_total', INPUT)})",
                )
            ),
            decimals=1,
            empty="Not reported",
        ),
        Figure(
            "Requests compacted",
            "Requests that were over their trigger and went on smaller, freshly compacted or resumed from a checkpoint.",
            "compaction_events_total",
            "short",
            Query(f"sum({increase('compaction_events_total', COMPACTED)})"),
        ),
        Figure(
            "Requests",
            "All requests answered in the time range shown.",
            "compaction_requests_total",
            "short",
            Query(f"sum({increase('compaction_requests_total')})"),
        ),
        Course(
            "Prompt tokens received and forwarded",
            "What clients sent and what went upstream, by the proxy's own count; the gap is what was saved.",
            RECEIVED,
            "short",
            (Query(f"sum({rate(RECEIVED)})", "received"), Query(f"sum({rate(FORWARDED)})", "forwarded")),
        ),
        Course(
            "Tokens saved by layer",
            "Which layer saved how many tokens a second; checkpoint is what earlier events saved and later requests resumed.",
            SAVED,
            "short",
            (Query(f"sum by (layer) ({rate(SAVED)})", "{{layer}}"),),
            stacked=True,
            many=True,
        ),
        Course(
            "Tokens saved by model",
            "Tokens saved a second, for each model.",
            SAVED,
            "short",
            (Query(f"sum by (model) ({rate(SAVED)})", "{{model}}"),),
            stacked=True,
        ),
        Course(
            "Dollars saved an hour, by model",
            "What the saved tokens would have cost, as an hourly rate; models without a known price are not shown.",
            "compaction_cost_saved_usd_total",
            "currencyUSD",
            (Query(f"3600 * sum by (model) ({rate('compaction_cost_saved_usd_total')})", "{{model}}"),),
            stacked=True,
            empty="No prices known",
        ),
    ),
)

FILL = "compaction_context_utilization_ratio"
PRESSURE = Section(
    "Context pressure",
    (
        Course(
            "Fill of the usable window",
            "How full requests were when they came and went on; above 100% the model would refuse them, above 500% reads 500%.",
            FILL,
            "percentunit",
            tuple(
                Query(quantile(q, FILL, matchers=f'{MODEL}, stage="{stage}"'), f"{stage} p{q * 100:.0f}")
                for stage in ("before", "after")
                for q in (0.5, 0.95)
            ),
        ),
        Course(
            "Requests over their trigger",
            "What came of the requests that were over their trigger; failed and rejected ones went on as they came.",
            "compaction_events_total",
            "reqps",
            (Query(f"sum by (outcome) ({rate('compaction_events_total')})", "{{outcome}}"),),
            stacked=True,
        ),
        Course(
            "Forwarded as they came, by reason",
            "Why requests went on untouched; most should simply fit.",
            "compaction_passthrough_total",
            "reqps",
            (Query(f"sum by (reason) ({rate('compaction_passthrough_total', HERE)})", "{{reason}}"),),
            stacked=True,
            many=True,
        ),
        Course(
            "Windows and budgets",
            "What each model can hold, and what a request to it may weigh, in tokens.",
            "compaction_context_window_tokens",
            "short",
            (
                Query(f"max by (model) (compaction_context_window_tokens{{{MODEL}}})", "{{model}} window"),
                Query(f"max by (model) (compaction_budget_tokens{{{MODEL}}})", "{{model}} budget"),
            ),
        ),
    ),
)

QUALITY = Section(
    "Compaction quality",
    (
        Course(
            "Critical items",
            "Errors, requests, constraints and conclusions that must survive: kept, repaired, or lost. Lost stays 0.",
            "compaction_critical_items_total",
            "short",
            (Query(f"sum by (result) ({rate('compaction_critical_items_total', HERE)})", "{{result}}"),),
            width=8,
            stacked=True,
        ),
        Course(
            "Validation failures",
            "Layers whose work was refused after the check, by the rule that it broke.",
            "compaction_validation_failures_total",
            "short",
            (Query(f"sum by (rule) ({rate('compaction_validation_failures_total', HERE)})", "{{rule}}"),),
            width=8,
            many=True,
        ),
        Course(
            "Prefix breaks",
            "Forwarded prefixes that differ from the last of their chain; each costs the upstream's prompt cache once.",
            "compaction_prefix_breaks_total",
            "short",
            (Query(f"sum by (cause) ({rate('compaction_prefix_breaks_total', HERE)})", "{{cause}}"),),
            width=8,
        ),
        Course(
            "Compaction ratio",
            "Tokens after an event, as a share of the tokens before it; lower saves more.",
            "compaction_ratio",
            "percentunit",
            (Query(quantile(0.5, "compaction_ratio"), "p50"), Query(quantile(0.95, "compaction_ratio"), "p95")),
        ),
        Course(
            "Token count, ours over reported",
            "The proxy's own count against the prompt tokens that the upstream reports; 1 is exact.",
            "compaction_token_count_error_ratio",
            "none",
            (
                Query(quantile(0.05, "compaction_token_count_error_ratio"), "p5"),
                Query(quantile(0.5, "compaction_token_count_error_ratio"), "p50"),
                Query(quantile(0.95, "compaction_token_count_error_ratio"), "p95"),
            ),
        ),
    ),
)

LATENCY = Section(
    "Latency and overhead",
    (
        Course(
            "Request duration",
            "From the request's head to the answer's end, as the client sees it.",
            "compaction_request_duration_seconds",
            "s",
            percentiles("compaction_request_duration_seconds", exemplar=True),
        ),
        Course(
            "Time to first chunk",
            "From the request's head to the first bytes of a streamed answer.",
            "compaction_time_to_first_chunk_seconds",
            "s",
            percentiles("compaction_time_to_first_chunk_seconds", exemplar=True),
        ),
        Course(
            "Our own time by phase, p95",
            "What the proxy itself adds to a request, without waiting for the upstream.",
            "compaction_overhead_seconds",
            "s",
            (Query(quantile(0.95, "compaction_overhead_seconds", "phase", HERE), "{{phase}}"),),
        ),
        Course(
            "Upstream duration",
            "From sending a request upstream to the end of its answer.",
            "compaction_upstream_duration_seconds",
            "s",
            percentiles("compaction_upstream_duration_seconds"),
        ),
        Course(
            "Requests by endpoint",
            "Requests a second by endpoint.",
            "compaction_requests_total",
            "reqps",
            (Query(f"sum by (endpoint) ({rate('compaction_requests_total')})", "{{endpoint}}"),),
            stacked=True,
        ),
        Course(
            "Requests in flight",
            "Requests being served, by endpoint.",
            "compaction_inflight_requests",
            "short",
            (Query(f"sum by (endpoint) (compaction_inflight_requests{{{HERE}}})", "{{endpoint}}"),),
            stacked=True,
        ),
    ),
)

REQUESTS = "compaction_requests_total"
ERRORS = Section(
    "Errors and overflows",
    (
        Course(
            "Answers by status",
            "Answers a second by status code, the upstream's and our own.",
            REQUESTS,
            "reqps",
            (Query(f"sum by (code) ({rate(REQUESTS)})", "{{code}}"),),
            width=8,
            stacked=True,
        ),
        Course(
            "Share of server errors",
            "Answers with a status of 500 or more, of all answers.",
            REQUESTS,
            "percentunit",
            (
                Query(
                    share(f"(sum({rate(REQUESTS, SERVER_ERRORS)}) or vector(0))", f"sum({rate(REQUESTS)})"),
                    "server errors",
                ),
            ),
            width=8,
        ),
        Course(
            "Upstream errors",
            "Failures of the upstream by reason: it could not be reached, broke off, or answered with an error.",
            "compaction_upstream_errors_total",
            "short",
            (Query(f"sum by (reason) ({rate('compaction_upstream_errors_total', HERE)})", "{{reason}}"),),
            width=8,
            stacked=True,
            many=True,
        ),
        Course(
            "Context overflows",
            "The upstream said that the context is too long although it should have fitted; returned ones reached the client.",
            "compaction_context_overflows_total",
            "short",
            (Query(f"sum by (result) ({rate('compaction_context_overflows_total')})", "{{result}}"),),
        ),
        Course(
            "Broken off",
            "Clients that left before their answer's end, and answers that broke off because the upstream did.",
            "compaction_client_disconnects_total",
            "short",
            (
                Query(f"sum({rate('compaction_client_disconnects_total', HERE)})", "client left"),
                Query(f"sum({rate('compaction_stream_aborts_total', HERE)})", "upstream broke off"),
            ),
        ),
    ),
)

SUMMARIES = "compaction_summarizer_requests_total"
SUMMARIZER = Section(
    "Summarizer and checkpoints",
    (
        Course(
            "Summaries",
            "Summaries asked of a model a second, by outcome; everything but ok fell back to the deterministic digest.",
            SUMMARIES,
            "reqps",
            (Query(f"sum by (outcome) ({rate(SUMMARIES, HERE)})", "{{outcome}}"),),
            width=8,
            stacked=True,
            empty="The summarizer is off",
        ),
        Course(
            "Time of a summary",
            "How long a summary took.",
            "compaction_summarizer_duration_seconds",
            "s",
            percentiles("compaction_summarizer_duration_seconds", HERE),
            width=8,
            empty="The summarizer is off",
        ),
        Course(
            "Price of summaries",
            "Tokens that summaries took a second, by type.",
            "compaction_summarizer_tokens_total",
            "short",
            (Query(f"sum by (type) ({rate('compaction_summarizer_tokens_total', HERE)})", "{{type}}"),),
            width=8,
            stacked=True,
            empty="The summarizer is off",
        ),
        Course(
            "Checkpoint operations",
            "Calls to the checkpoint store a second, by operation and result.",
            "compaction_checkpoint_operations_total",
            "ops",
            (
                Query(
                    f"sum by (store, operation, result) ({rate('compaction_checkpoint_operations_total', HERE)})",
                    "{{store}} {{operation}} {{result}}",
                ),
            ),
            width=8,
        ),
        Course(
            "Time of a checkpoint operation, p95",
            "How long calls to the checkpoint store take.",
            "compaction_checkpoint_duration_seconds",
            "s",
            (
                Query(
                    quantile(0.95, "compaction_checkpoint_duration_seconds", "store, operation", HERE),
                    "{{store}} {{operation}}",
                ),
            ),
            width=8,
        ),
        Course(
            "Size of the checkpoint store",
            "Bytes that checkpoints take.",
            "compaction_checkpoint_bytes",
            "bytes",
            (Query(f"max by (store) (compaction_checkpoint_bytes{{{HERE}}})", "{{store}}"),),
            width=8,
        ),
    ),
)

PROCESS = Section(
    "Process",
    (
        Course(
            "CPU",
            "Cores in use; one worker cannot use more than one.",
            "process_cpu_seconds_total",
            "short",
            (Query(rate("process_cpu_seconds_total", HERE), "{{instance}}"),),
            width=6,
        ),
        Course(
            "Memory",
            "Resident memory.",
            "process_resident_memory_bytes",
            "bytes",
            (Query(f"process_resident_memory_bytes{{{HERE}}}", "{{instance}}"),),
            width=6,
        ),
        Course(
            "Open files and sockets",
            "File descriptors in use.",
            "process_open_fds",
            "short",
            (Query(f"process_open_fds{{{HERE}}}", "{{instance}}"),),
            width=6,
        ),
        Course(
            "Tokenizer degraded",
            "1 while the counts of an encoding are estimates, because its vocabulary could not be read.",
            "compaction_tokenizer_degraded",
            "none",
            (Query(f"max by (encoding) (compaction_tokenizer_degraded{{{HERE}}})", "{{encoding}}"),),
            width=6,
        ),
        Course(
            "Version",
            "How many instances run which version.",
            "compaction_build_info",
            "short",
            (Query(f"count by (version) (compaction_build_info{{{HERE}}})", "{{version}}"),),
            width=8,
        ),
        Course(
            "Time since the configuration was loaded",
            "A saw-tooth tells of restarts.",
            "compaction_config_loaded_timestamp_seconds",
            "s",
            (Query(f"time() - compaction_config_loaded_timestamp_seconds{{{HERE}}}", "{{instance}}"),),
            width=8,
        ),
        Course(
            "Notices to the webhook",
            "Notices of events a second; dropped ones found nobody who took them.",
            "compaction_notifications_total",
            "ops",
            (Query(f"sum by (result) ({rate('compaction_notifications_total', HERE)})", "{{result}}"),),
            width=8,
        ),
    ),
)

SECTIONS = (SAVINGS, PRESSURE, QUALITY, LATENCY, ERRORS, SUMMARIZER, PROCESS)


ALL_ZERO = MatcherConfig("byValue", {"reducer": "allIsZero", "op": "gte", "value": 0})
HIDDEN = DynamicConfigValue("custom.hideFrom", {"legend": True, "tooltip": True, "viz": True})


def target(query: Query, ref: str) -> prometheus.Dataquery:
    built = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref).datasource(SOURCE)
    return built.exemplar(True) if query.exemplar else built


def described(panel: Figure | Course) -> str:
    return f"{panel.told} Metric: {panel.metric}"


def figure(panel: Figure) -> stat.Panel:
    built = (
        stat.Panel()
        .title(panel.title)
        .description(described(panel))
        .datasource(SOURCE)
        .unit(panel.unit)
        .no_value(panel.empty)
        .height(4)
        .span(4)
        .color_mode(BigValueColorMode.NONE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(target(panel.query, "A").instant())
    )
    return built if panel.decimals is None else built.decimals(panel.decimals)


def course(panel: Course) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True)
    if panel.width == 12:  # room for a table at the side, the largest first
        legend = legend.display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.RIGHT).calcs(["mean", "max"])
        legend = legend.sort_by("Mean").sort_desc(True)
    else:
        legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(described(panel))
        .datasource(SOURCE)
        .unit(panel.unit)
        .no_value(panel.empty)
        .height(8)
        .span(panel.width)
        .min(0)
        .line_width(1)
        .fill_opacity(40 if panel.stacked else 10)
        .show_points(VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if panel.many:
        built = built.with_override(ALL_ZERO, [HIDDEN])
    for index, query in enumerate(panel.queries):
        built = built.with_target(target(query, chr(ord("A") + index)))
    return built


def variables() -> Iterator[dashboard.QueryVariable]:
    queries = {
        "job": "label_values(compaction_build_info, job)",
        "instance": 'label_values(compaction_build_info{job=~"$job"}, instance)',
        "model": 'label_values(compaction_prompt_tokens_received_total{job=~"$job", instance=~"$instance"}, model)',
    }
    for name, query in queries.items():
        yield (
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(SOURCE)
            .query(query)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".+")
            .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
        )


def overview() -> dashboard.Dashboard:
    board = (
        dashboard.Dashboard("Compaction proxy / Overview")
        .uid("compaction-overview")
        .description(
            "What the proxy saves, how well it keeps what matters, and what it costs. "
            "What became of a single conversation is told by /explain on the proxy's admin port: no metric names one."
        )
        .tags(["compaction-proxy", "llm"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in variables():
        board = board.with_variable(variable)
    ids = count(1)  # given here, so that links to a panel keep pointing at it
    for section in SECTIONS:
        board = board.with_row(dashboard.Row(section.title).id(next(ids)))
        for panel in section.panels:
            built = figure(panel) if isinstance(panel, Figure) else course(panel)
            board = board.with_panel(built.id(next(ids)))
    return board


def written() -> str:
    """The dashboard as Grafana imports it."""
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(overview().build())
    return text + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(written(), encoding="utf-8")
    print(f"wrote {OUTPUT.name}")

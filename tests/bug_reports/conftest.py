"""One running proxy for the whole log, in front of one upstream that does what each row needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bug_reports.lab import Lab, leaks, toxic_upstream
from bug_reports.rows import all_rows
from live.toxic import Toxic
from running import running_proxy

MODELS = """
models:
  gpt-4o: {window: 128000}
  m128k: {window: 128000}
  m32k: {window: 32768}
  tiny: {window: 24}
  deepseek-v4-pro: {window: 128000}
compaction: {discovery: false, min_gain: 1, templates: [TEMPLATES]}
log: {level: debug}
"""
NAMED = "".join(f"  row-{row.id}: {{window: 128000}}\n" for row in all_rows())
"""A model for each row: metrics know configured names however many others clients have made up."""


def configured(templates: str) -> str:
    return MODELS.replace("TEMPLATES", templates).replace("compaction:", NAMED + "compaction:")


@pytest.fixture(scope="session")
def toxic_upstream_of_log() -> Iterator[Toxic]:
    with toxic_upstream() as upstream:
        yield upstream


@pytest.fixture(scope="session")
def lab(toxic_upstream_of_log: Toxic, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """In front of an upstream that takes what OpenAI takes."""
    path = tmp_path_factory.mktemp("bug_reports") / "proxy.yaml"
    path.write_text(configured("openai"))
    with running_proxy("--upstream", toxic_upstream_of_log.url, "--config", str(path)) as proxy:
        running = Lab(proxy, toxic_upstream_of_log)
        yield running
        shown = running.admin("/metrics") + running.admin("/stats")
    assert leaks(running.told + shown) == []


@pytest.fixture(scope="session")
def strict_lab(toxic_upstream_of_log: Toxic, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """In front of an upstream whose template wants user and assistant to take turns."""
    path = tmp_path_factory.mktemp("bug_reports") / "proxy.yaml"
    path.write_text(configured("openai, alternation"))
    with running_proxy("--upstream", toxic_upstream_of_log.url + "/v1", "--config", str(path)) as proxy:
        running = Lab(proxy, toxic_upstream_of_log, turns=True)
        yield running
    assert leaks(running.told) == []

"""A running proxy in front of the scripted upstream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import ScriptedUpstream
from running import RunningProxy, running_proxy

CONFIG = """
models:
  gpt-4o: {window: 6000, reserve: 500}
  "claude-*": {window: 4000, reserve: 500}
"""


@pytest.fixture(scope="session")
def proxy(_scripted: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """A real process; the window of gpt-4o is 6,000 tokens."""
    path = tmp_path_factory.mktemp("config") / "proxy.yaml"
    path.write_text(CONFIG)
    with running_proxy("--upstream", _scripted.url + "/v1", "--config", str(path)) as running:
        yield running

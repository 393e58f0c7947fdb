"""What a configuration becomes: who may be served with a key of the proxy's own, and what its parts do beside requests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from proxy import app
from proxy.app import check
from proxy.config import load
from proxy.errors import ConfigError
from proxy.metrics import Metrics

KEY = {"upstream": {"url": "http://127.0.0.1:9/v1", "api_key": "sk-house"}}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "llm.localhost"])
def test_a_key_of_our_own_is_served_to_this_machine(host: str) -> None:
    check(load({**KEY, "server": {"host": host}}, {}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "", "127.0.0.1.example.com", "my-laptop"])
def test_a_key_of_our_own_is_not_served_to_others(host: str) -> None:
    with pytest.raises(ConfigError, match="would serve whoever reaches the port: set client_keys"):
        check(load({**KEY, "server": {"host": host}}, {}))


@pytest.mark.parametrize(
    "settings",
    [
        {**KEY, "server": {"host": "0.0.0.0"}, "client_keys": ["one"]},
        {"server": {"host": "0.0.0.0"}},
        {**KEY, "server": {"admin_host": "0.0.0.0"}},
    ],
    ids=["to clients with a key of theirs", "no key of our own", "the admin port serves no key"],
)
def test_what_exposes_no_key_may_listen_anywhere(settings: dict[str, Any]) -> None:
    check(load(settings, {}))


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://127.0.0.1:8080/v1", "127.0.0.1"),
        ("http://localhost:8080", "127.0.0.1"),
        ("http://127.0.0.1:8080/v1", "localhost"),
        ("http://[::1]:8080/v1", "::1"),
        ("http://localhost:8080/v1", "0.0.0.0"),
        ("http://10.0.0.7:8080/v1", "10.0.0.7"),
    ],
)
def test_a_proxy_that_is_its_own_upstream_does_not_start(url: str, host: str) -> None:
    with pytest.raises(ConfigError, match="is where this proxy itself would listen"):
        check(load({"upstream": url, "server": {"host": host}}, {}))


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://127.0.0.1:8081/v1", {}),
        ("http://127.0.0.2:8080/v1", {}),
        ("http://10.0.0.7:8080/v1", {"host": "0.0.0.0"}),
        ("http://llm.example.com:8080/v1", {}),
        ("https://localhost/v1", {"port": 80}),
        ("http://127.0.0.1:8080/v1", {"port": 0}),
    ],
)
def test_a_neighbor_is_no_circle(url: str, server: dict[str, Any]) -> None:
    check(load({"upstream": url, "server": server}, {}))


def test_what_is_checked_leaves_nothing_running() -> None:
    before = threading.active_count()

    check(load({"tracing": {"enabled": True, "endpoint": "http://127.0.0.1:9/v1/traces"}}, {}))

    assert threading.active_count() == before


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_figures_are_shared_again_once_the_disk_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SHARE_SECONDS", 0.005)
    folder = tmp_path / "figures"
    folder.mkdir()
    sharing = asyncio.ensure_future(app._share(Metrics(folder=folder)))

    folder.rename(tmp_path / "away")
    await asyncio.sleep(0.1)
    folder.mkdir()
    await asyncio.sleep(0.1)
    sharing.cancel()
    await asyncio.wait({sharing})

    assert len(list(folder.glob("*.json"))) == 1

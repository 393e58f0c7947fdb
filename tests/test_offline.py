"""Closed networks: the whole proxy starts and counts exactly with nothing but loopback, an empty home and nowhere to write."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from builders import chat, user
from fakes import ScriptedUpstream
from running import running_proxy

ONLY_LOOPBACK = """
import sys

def refused(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect":
        host = arguments[1][0] if isinstance(arguments[1], tuple) else "localhost"
    else:
        return
    if str(host) not in ("127.0.0.1", "::1", "localhost", "None"):
        raise OSError("there is no network here")

sys.addaudithook(refused)
"""


@pytest.mark.parametrize(("model", "tokens"), [("gpt-4o", 16), ("gpt-4", 16)])
def test_a_proxy_without_network_home_or_a_place_to_write_counts_exactly(
    upstream: ScriptedUpstream, tmp_path: Path, model: str, tokens: int
) -> None:
    home, blocked, there = (tmp_path / name for name in ("home", "blocked", "there"))
    for folder in (home, blocked, there):
        folder.mkdir()
    (blocked / "sitecustomize.py").write_text(ONLY_LOOPBACK)
    there.chmod(0o555)
    home.chmod(0o555)
    environment = {"HOME": str(home), "PYTHONPATH": str(blocked), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(there)}
    body = chat([{"role": "system", "content": "Be brief."}, user("hello world")], model=model)

    with running_proxy("--upstream", upstream.url, environment=environment, cwd=str(there)) as proxy:
        request = urllib.request.Request(proxy.base_url + "/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            counted = int(answer.headers["x-compaction-tokens-before"])
        with urllib.request.urlopen(proxy.admin + "/readyz", timeout=30) as answer:
            ready = json.load(answer)

    assert counted == tokens
    assert ready["tokenizer"] == "exact"
    assert [*home.iterdir(), *there.iterdir()] == []

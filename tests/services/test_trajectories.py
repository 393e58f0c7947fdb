"""Every recorded conversation, turn by turn, through a running proxy to an upstream that counts and checks for itself.

The upstream's judgment (its token count, its check of the message contract) is code that the proxy shares nothing with.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
from fakes import Received, Reply, ScriptedUpstream, completion, too_long
from running import running_proxy

from proxy.tokens.vocabulary import vocabulary

pytestmark = pytest.mark.timeout(900)
RESERVE = 500


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Judge:
    """The upstream: exact about its window, strict about the contract."""

    def __init__(self, shared: Path, window: int) -> None:
        self._count = loaded(shared / "reference" / "count_reference.py").count_request
        self._check = loaded(shared / "data" / "check.py").strict_check
        self._tokens = lru_cache(maxsize=None)(vocabulary("o200k_base").count)
        self.window = window
        self.refused: list[int] = []
        self.violations: list[list[str]] = []

    def size(self, body: dict[str, object]) -> int:
        return self._count(body, "gpt-4o", self._tokens)

    def faults(self, messages: object) -> Counter[str]:
        """Violations by their kind; where they stand changes when something before them is folded."""
        return Counter(violation.split(":")[1] for violation in self._check(messages))

    def answer(self, one: Received) -> Reply:
        size = self.size(one.json)
        if size > self.window - RESERVE:
            self.refused.append(size)
            return too_long(self.window, size)
        return completion(prompt_tokens=size)


@pytest.mark.parametrize("window", [8_000, 32_000])
def test_every_request_whose_floor_fits_is_accepted_and_none_is_made_invalid(
    shared: Path, upstream: ScriptedUpstream, tmp_path: Path, window: int
) -> None:
    judge = Judge(shared, window)
    upstream.script = judge.answer
    config = tmp_path / "proxy.yaml"
    config.write_text(f"models: {{gpt-4o: {{window: {window}, reserve: {RESERVE}}}}}")

    accepted, floors = 0, 0
    faults = []
    with running_proxy("--upstream", upstream.url + "/v1", "--config", str(config)) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=120)
        for row in rows(shared / "data" / "trajectories.jsonl"):
            messages = row["messages"]
            assert isinstance(messages, list)
            for turn in [at for at, message in enumerate(messages) if message["role"] == "assistant" and at > 0]:
                body = {"model": "gpt-4o", "messages": messages[:turn], **({"tools": row["tools"]} if row.get("tools") else {})}
                raw = json.dumps(body, ensure_ascii=False).encode()
                connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                accepted += answer.status == 200
                floors += answer.status == 400 and answer.headers["x-compaction-reason"] == "floor"
                sent = upstream.chats[-1].json["messages"]
                upstream.received.clear()
                if new := judge.faults(sent) - judge.faults(messages[:turn]):
                    faults.append((row["id"], turn, new))
        connection.close()
        assert [line for line in proxy.errors if "failed" in line] == []

    assert faults == []
    # every refusal is of a request whose floor alone (system, tools, the last user message, the newest step) is too large
    assert accepted + floors == 1495
    assert floors == (5 if window == 8_000 else 0)


def test_requests_that_break_the_contract_are_forwarded_no_worse_than_they_came(
    shared: Path, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    judge = Judge(shared, 1_000_000)
    upstream.script = judge.answer
    config = tmp_path / "proxy.yaml"
    config.write_text("models: {gpt-4o: {window: 8000, reserve: 500}}")

    compacted = 0
    with running_proxy("--upstream", upstream.url + "/v1", "--config", str(config)) as proxy:
        for row in rows(shared / "data" / "wild.jsonl"):
            raw = json.dumps({"model": "gpt-4o", "messages": row["messages"]}, ensure_ascii=False).encode()
            connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=60)
            connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            connection.close()

            sent = upstream.chats[-1]
            assert answer.status == 200
            if answer.headers["x-compaction"] == "none":
                assert sent.body == raw
            else:
                compacted += 1
                assert judge.faults(sent.json["messages"]) <= judge.faults(row["messages"])
    assert compacted >= 3

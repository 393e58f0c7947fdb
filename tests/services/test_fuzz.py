"""Thousands of requests through two proxies with two workers each on one real Redis: the forwarded prefix stays what it was."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from builders import assistant, call, prose, tool, user
from fakes import Received, Reply, ScriptedUpstream
from redis_server import Redis
from running import RunningProxy, running_proxy

from proxy.compaction.validation import violations
from proxy.conversation import Conversation
from proxy.wire.chat_completions import read_message

REQUESTS = 2_000
CONVERSATIONS, MOST_TALKS = 20, 24
SAYS_NOTHING = Reply(chunks=[b'{"object": "chat.completion", "choices": []}'])
"""An answer without usage: what an upstream reports teaches each process on its own, and what does not fit by that is no matter of
the shared measure."""

CONFIG = "models: {gpt-4o: {window: 5000, reserve: 500}}"

pytestmark = [
    pytest.mark.service,
    pytest.mark.timeout(300),
]


@dataclass
class Talk:
    """One conversation of a client. marks: it moves a cache mark to its newest message with each request. steady: it only goes on.
    turned: it was edited, rewound or branched since the last request."""

    messages: list[dict[str, Any]]
    rng: random.Random
    marks: bool
    steady: bool = False
    turned: bool = False
    sent: list[str] = field(default_factory=list)

    def body(self) -> bytes:
        messages = self.messages
        if self.marks:
            text = messages[-1]["content"]
            part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
            messages = [*messages[:-1], {**messages[-1], "content": [part]}]
        return json.dumps({"model": "gpt-4o", "messages": messages}).encode()

    def answer(self) -> None:
        """The model's answer arrives, and the client acts on it."""
        n = len(self.messages)
        rng, words = self.rng, self.rng.randrange(20, 160)
        if rng.random() < 0.15:
            self.messages += [assistant(prose(words // 3, n)), user(f"Go on with part {n}. " + prose(8, n))]
            return
        calls = [call(f"call_{n}_{i}", "read_file", path=f"app/part_{n}_{i}.py") for i in range(rng.choice((1, 1, 1, 2, 3)))]
        self.messages.append(assistant(f"Looking at part {n}.", *calls))
        for one in calls:
            failed = "\nValueError: bad row in app/rows.py\nexit code 1" if rng.random() < 0.1 else ""
            self.messages.append(tool(one["id"], prose(words // len(calls), rng.randrange(10**6)) + failed))

    def edit(self) -> None:
        """One of the newest things said is said otherwise."""
        for at in range(len(self.messages) - 1, 1, -1):
            if self.messages[at]["role"] in ("user", "tool") and self.rng.random() < 0.5:
                self.messages[at] = {**self.messages[at], "content": prose(60, self.rng.randrange(10**6))}
                break
        self.turned = True

    def rewind(self) -> None:
        """Back to an earlier request."""
        ends = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"][-4:]
        if ends and ends[0] > 2:
            del self.messages[self.rng.choice(ends) :]
        self.turned = True

    def branch(self) -> Talk:
        """Somebody else goes on from here, too."""
        other = Talk([*self.messages], random.Random(self.rng.random()), self.marks, turned=True)
        other.answer()
        return other


class Address(Protocol):
    """Somebody who takes requests: a proxy, or what stands before several."""

    @property
    def url(self) -> str: ...


class Wire(threading.local):
    """Connections of one thread, kept open."""

    def __init__(self) -> None:
        self.open: dict[str, http.client.HTTPConnection] = {}

    def post(self, proxy: Address, body: bytes, key: str, mark: str) -> tuple[int, str]:
        """Status, and what the proxy says it did. A connection that a worker has closed meanwhile is made anew once."""
        netloc = urlsplit(proxy.url).netloc
        for last in (False, True):
            connection = self.open.setdefault(netloc, http.client.HTTPConnection(netloc, timeout=60))
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-mark": mark}
            try:
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = connection.getresponse()
                answer.read()
                return answer.status, answer.headers["x-compaction"]
            except (http.client.HTTPException, OSError):
                self.open.pop(netloc).close()
                if last:
                    raise
        raise AssertionError("the second try returns or raises")

    def close(self) -> None:
        for connection in self.open.values():
            connection.close()
        self.open.clear()


@dataclass
class Field:
    """What clients see of the proxies, and what the upstream sees of the clients."""

    upstream: ScriptedUpstream
    proxies: Sequence[Address]
    wire: Wire = field(default_factory=Wire)
    seen: dict[str, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    count: int = 0
    events: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def script(self, one: Received) -> Reply:
        """Remembers what came, as texts that do not depend on where cache marks stand."""
        self.seen[one.header("x-mark") or ""] = [plain(message) for message in one.json["messages"]]
        return SAYS_NOTHING

    def send(self, talk: Talk, rng: random.Random, key: str = "sk-one") -> tuple[list[str], str]:
        """What was forwarded for the conversation as it stands, and what the proxy says it did."""
        with self.lock:
            self.count += 1
            mark = f"{self.count}"
        status, outcome = self.wire.post(rng.choice(self.proxies), talk.body(), key, mark)
        assert mark in self.seen, f"{status}: it did not arrive"
        forwarded = self.seen.pop(mark)
        if status != 200:
            self.faults.append(f"{mark}: status {status}")
        if new := contract(forwarded) - contract([plain(message) for message in talk.messages]):
            self.faults.append(f"{mark}: {new}")
        with self.lock:
            self.events += outcome == "applied"
        return forwarded, outcome

    def turn(self, talk: Talk) -> None:
        """One request of a conversation, and sometimes the same one again meanwhile or afterwards."""
        rng = talk.rng
        outcomes = set()
        if rng.random() < 0.08:
            with ThreadPoolExecutor(2) as pool:
                both = [pool.submit(self._aside, talk, seed) for seed in (rng.random(), rng.random())]
                one, other = (future.result() for future in both)
            outcomes = {one[1], other[1]}
            # a refusal is an event for whoever met it, which the other one may not have known of in time
            if one[0] != other[0] and not (self.upstream.window and "applied" in outcomes):
                self.faults.append(f"parallel requests of one conversation differ ({one[1]}, {other[1]})")
        forwarded, outcome = self.send(talk, rng)
        grew = forwarded[: len(talk.sent)] == talk.sent
        if not grew and "applied" not in {*outcomes, outcome} and not talk.turned:
            self.faults.append(f"a prefix broke with no event ({outcome})")
        if rng.random() < 0.08 and self.send(talk, rng)[0] != forwarded:
            self.faults.append("the same request again was forwarded otherwise")
        talk.sent, talk.turned = forwarded, False

    def _aside(self, talk: Talk, seed: float) -> tuple[list[str], str]:
        try:
            return self.send(talk, random.Random(seed))
        finally:
            self.wire.close()

    def unchanged(self, talk: Talk) -> bool:
        return self.send(talk, talk.rng)[0] == talk.sent


def plain(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1:
        message = {**message, "content": content[0]["text"]}
    return json.dumps(message, sort_keys=True)


def contract(messages: list[str]) -> Any:
    return violations(Conversation(tuple(read_message(message.encode()) for message in messages)))


def fresh_talks() -> list[Talk]:
    return [
        Talk(
            [{"role": "system", "content": "You are careful."}, user(f"Task {n}: mend the import. Never touch table {n}.")],
            random.Random(n),
            marks=n % 3 == 0,
            steady=n % 2 == 0,
        )
        for n in range(CONVERSATIONS)
    ]


def one_life(field_: Field, talk: Talk, turns: int) -> list[Talk]:
    """A conversation for so many turns; returns the branches that left it."""
    branches = []
    for _ in range(turns):
        field_.turn(talk)
        chance = 1.0 if talk.steady else talk.rng.random()
        if chance < 0.05:
            talk.edit()
        elif chance < 0.1:
            talk.rewind()
        elif chance < 0.15:
            branches.append(talk.branch())
        else:
            talk.answer()
    field_.turn(talk)
    field_.wire.close()
    return branches


def test_nothing_breaks_a_prefix_but_events_and_edits_whichever_worker_is_met_and_whatever_restarts(
    redis: Redis, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text(CONFIG)
    flags = ("--upstream", upstream.url + "/v1", "--config", str(config))
    shared = (*flags, "--workers", "2", "--store", redis.url)
    talks = fresh_talks()
    with contextlib.ExitStack() as stays:
        first = stays.enter_context(running_proxy(*shared))
        field_ = Field(upstream, [first])
        upstream.script = field_.script
        while field_.count < REQUESTS:
            # the second proxy is another one each time: it has seen nothing of what it is asked to go on with
            with running_proxy(*shared) as second, ThreadPoolExecutor(3) as pool:
                field_.proxies = [first, second]
                differing = [talk for talk in talks if talk.sent and not field_.unchanged(talk)]
                assert differing == []
                lives = [pool.submit(one_life, field_, talk, 25) for talk in talks]
                branches = [branch for life in lives for branch in life.result()]
                talks += branches[: max(0, MOST_TALKS - len(talks))]
                upstream.received.clear()
        field_.wire.close()
        field_.proxies = [stays.enter_context(running_proxy(*flags))]
        # one that shares nothing with the others comes to the same bytes
        assert [talk for talk in talks if talk.steady and not field_.unchanged(talk)] == []
        field_.wire.close()

    assert field_.faults == []
    assert field_.count >= REQUESTS
    assert field_.events >= 100


NGINX = """daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit;
events {{ worker_connections 256; }}
http {{
  access_log off; client_max_body_size 0;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d;
  scgi_temp_path {folder}/e;
  upstream proxies {{ {servers} keepalive 16; keepalive_timeout 60s; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://proxies; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;
      proxy_buffering off; proxy_request_buffering off; proxy_next_upstream off;
    }}
  }}
}}
"""


@dataclass(frozen=True)
class Nginx:
    """One after the other of the proxies behind it, each in its turn."""

    url: str


@contextlib.contextmanager
def nginx_before(proxies: Sequence[RunningProxy], folder: Path) -> Iterator[Nginx]:
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    servers = " ".join(f"server {urlsplit(proxy.url).netloc};" for proxy in proxies)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, servers=servers, port=port))
    process = subprocess.Popen([program, "-c", str(config), "-e", "stderr"], stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            time.sleep(0.02)
        assert process.poll() is None, "nginx did not start"
        yield Nginx(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def test_behind_nginx_the_prefix_stands_whichever_of_several_proxies_serves(
    redis: Redis, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text(CONFIG)
    flags = ("--upstream", upstream.url + "/v1", "--config", str(config), "--workers", "2", "--store", redis.url)
    with running_proxy(*flags) as one, running_proxy(*flags) as other, nginx_before((one, other), tmp_path) as front:
        field_ = Field(upstream, [front])
        upstream.script = field_.script
        talks = [talk for talk in fresh_talks() if talk.steady][:8]
        with ThreadPoolExecutor(4) as pool:
            for life in [pool.submit(one_life, field_, talk, 45) for talk in talks]:
                life.result()
        while sum(served := [_requests_of(proxy) for proxy in (one, other)]) < field_.count:
            time.sleep(0.1)  # a worker tells of its requests now and then

    assert field_.faults == []
    assert field_.events >= 12
    # nginx gave each of them its turn
    assert abs(served[0] - served[1]) <= 1


def test_an_upstream_that_refuses_what_we_think_fits_sees_one_prefix_whichever_process_meets_the_refusal(
    redis: Redis, upstream: ScriptedUpstream, store_was_quick: Callable[..., None]
) -> None:
    # the table says 128,000; this one takes 4,000 of its own tokens, which are smaller than ours
    upstream.window = 4_000
    flags = ("--upstream", upstream.url + "/v1", "--workers", "2", "--store", redis.url)
    with running_proxy(*flags) as one, running_proxy(*flags) as other:
        field_ = Field(upstream, [one, other])
        upstream.script = field_.script
        talks = [talk for talk in fresh_talks() if talk.steady][:6]
        with ThreadPoolExecutor(3) as pool:
            for life in [pool.submit(one_life, field_, talk, 40) for talk in talks]:
                life.result()
        if field_.faults:
            store_was_quick(one, other)

    assert field_.faults == []
    assert field_.events >= 12


def _requests_of(proxy: RunningProxy) -> int:
    with contextlib.closing(http.client.HTTPConnection(urlsplit(proxy.admin).netloc, timeout=10)) as admin:
        admin.request("GET", "/metrics")
        scrape = admin.getresponse().read().decode()
    samples = [line for line in scrape.splitlines() if line.startswith("compaction_requests_total{")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in samples))


def test_a_redis_that_is_stopped_paused_and_flushed_costs_no_request(
    redis: Redis, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text(CONFIG)
    going = True

    def live(talk: Talk) -> None:
        while going:
            field_.turn(talk)
            talk.answer()
        field_.wire.close()

    def some(count: int) -> None:
        goal = field_.count + count
        while field_.count < goal:
            for life in lives:
                if life.done():
                    life.result()
            time.sleep(0.02)

    with running_proxy("--upstream", upstream.url, "--config", str(config), "--store", redis.url) as proxy:
        field_ = Field(upstream, [proxy])
        upstream.script = field_.script
        with ThreadPoolExecutor(4) as pool:
            talks = fresh_talks()[:4]
            for talk in talks * 40:
                talk.answer()
            lives = [pool.submit(live, talk) for talk in talks]
            try:
                some(100)
                redis.signal(signal.SIGSTOP)
                some(100)
                redis.signal(signal.SIGCONT)
                some(50)
                redis.say("FLUSHALL")
                some(50)
                redis.stop()
                some(100)
                redis.start()
                some(50)
            finally:
                going = False
        for life in lives:
            life.result()
        with contextlib.closing(http.client.HTTPConnection(urlsplit(proxy.admin).netloc, timeout=10)) as admin:
            admin.request("GET", "/metrics")
            scrape = admin.getresponse().read().decode()
        assert [line for line in proxy.errors if "failed" in line] == []

    assert field_.faults == []
    assert 'compaction_checkpoint_operations_total{operation="get",result="error",store="redis"}' in scrape


def test_two_callers_with_one_conversation_have_nothing_in_common(
    redis: Redis, upstream: ScriptedUpstream, tmp_path: Path
) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text(CONFIG)
    talk = fresh_talks()[1]
    for _ in range(40):
        talk.answer()
    with running_proxy("--upstream", upstream.url, "--config", str(config), "--store", redis.url) as proxy:
        field_ = Field(upstream, [proxy])
        upstream.script = field_.script
        first = field_.send(talk, talk.rng, "sk-one")
        held = int(redis.say("DBSIZE")[1:])
        again = field_.send(talk, talk.rng, "sk-one")
        unchanged = int(redis.say("DBSIZE")[1:])
        other = field_.send(talk, talk.rng, "sk-two")
        doubled = int(redis.say("DBSIZE")[1:])
        field_.wire.close()

    assert [first[1], again[1], other[1]] == ["applied", "reused", "applied"]
    assert held == unchanged
    assert doubled == 2 * held
    assert held >= 1

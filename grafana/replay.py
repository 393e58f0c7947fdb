"""A replayed load with everything real around it: the proxy and Prometheus as processes of their own, agents as clients.

Only the model is an act: an OpenAI-compatible server on loopback that counts prompts, remembers prefixes as a prompt cache
does, refuses what is too long, and now and then fails. Used to draw the dashboard and to try each of its queries.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import shutil
import socket
import sys
import time
from asyncio.subprocess import STDOUT, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from proxy import tokens

ROOT = Path(__file__).parents[1]
Messages = list[dict[str, Any]]

MODELS = {
    "gpt-4o": {"window": 32_000, "price": {"input": 2.5, "cached_input": 1.25, "output": 10.0}},
    "gpt-4o-mini": {"window": 20_000, "price": {"input": 0.15, "cached_input": 0.075, "output": 0.6}},
    "qwen-coder": {"window": 16_000, "reserve": 1_024},
}
"""As the proxy is told. The act refuses qwen-coder from 11,000 tokens on: a limit that the proxy has to learn."""
LIMITS = {"gpt-4o": 32_000, "gpt-4o-mini": 20_000, "qwen-coder": 11_000}
NAMES = ("gpt-4o", "gpt-4o-mini", "qwen-coder", "gpt-4o", "new-model", "gpt-4o-mini", "gpt-4o", "qwen-coder", "gpt-4o")
SUMMARY_MODEL = "gpt-4o-mini"
WORDS = ["Reading", "the", "next", "file", "now,", "then", "I", "run", "the", "tests", "again."]


# --- the model ------------------------------------------------------------------------------------------------------


class CutOff(Exception):
    """The model's server breaks off in the middle of an answer."""


@dataclass
class Model:
    """The act. Failures come from a seeded chance, so that two runs see the same ones."""

    chance: random.Random = field(default_factory=lambda: random.Random(11))
    seen: dict[bytes, int] = field(default_factory=dict)
    summaries: int = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
        ]
        return Starlette(routes=routes)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in LIMITS]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt, cached = self.count(body)
        limit = LIMITS.get(body["model"])
        if limit is not None and prompt > limit:
            said = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {prompt} tokens."
            return JSONResponse({"error": {"message": said, "code": "context_length_exceeded", "param": "messages"}}, 400)
        fate = self.chance.random()
        if fate < 0.01:
            return JSONResponse({"error": {"message": "The server had an error", "code": None}}, 500)
        if fate < 0.025:
            return JSONResponse({"error": {"message": "Rate limit reached", "code": "rate_limit_exceeded"}}, 429)
        await asyncio.sleep(0.05 + self.chance.expovariate(5))
        usage = {"prompt_tokens": prompt, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": cached}}
        words = self.summary(body) if is_summary(body) else WORDS
        if body.get("stream"):
            cut = len(words) // 2 if fate < 0.035 else None
            return StreamingResponse(self.stream(body["model"], words, usage, cut), media_type="text/event-stream")
        message = {"role": "assistant", "content": " ".join(words)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return JSONResponse({"id": "1", "object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage})

    async def stream(self, model: str, words: Sequence[str], usage: dict[str, Any], cut: int | None) -> AsyncIterator[bytes]:
        for place, word in enumerate(words):
            if place == cut:
                raise CutOff
            await asyncio.sleep(0.02)
            yield event(model, [{"index": 0, "delta": {"content": word + " "}}])
        yield event(model, [], usage=usage)
        yield b"data: [DONE]\n\n"

    def summary(self, body: dict[str, Any]) -> list[str]:
        """The headings that are asked for below the transcript, each with a line; one in four is chatter without any."""
        self.summaries += 1
        if self.summaries % 4 == 2:
            return WORDS
        asked = content(body["messages"][-1]).rpartition("</transcript>")[2]
        headings = re.findall(r"^## .+$", asked, flags=re.MULTILINE)
        line = ("\n-", "the", "parser", "was", "read", "and", "one", "test", "fails\n")
        return [word for heading in headings for word in (heading, *line)]

    def count(self, body: dict[str, Any]) -> tuple[int, int]:
        """Prompt tokens, and how many of them stand in a prefix that was seen before (in steps of 128, from 1,024 on)."""
        ruler = tokens.ruler(body["model"], {})
        chain, total, cached = b"", 3, 0
        for message in body["messages"]:
            text = json.dumps(message, sort_keys=True)
            total += 4 + ruler.text(content(message))
            chain = hashlib.sha256(chain + text.encode()).digest()
            if chain in self.seen:
                cached = total
            self.seen[chain] = total
        return total, cached // 128 * 128 if cached >= 1_024 else 0


def event(model: str, choices: list[Any], **fields: Any) -> bytes:
    chunk = {"id": "1", "object": "chat.completion.chunk", "model": model, "choices": choices, **fields}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def content(message: dict[str, Any]) -> str:
    """All that the model reads of a message."""
    said = message.get("content") or ""
    if not isinstance(said, str):
        said = "".join(part.get("text", "") for part in said)
    calls = "".join(call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls") or ())
    return str(said + calls)


def is_summary(body: dict[str, Any]) -> bool:
    """A request of the proxy's own: agents here always bring their tools."""
    return "tools" not in body


# --- the agents -----------------------------------------------------------------------------------------------------


def sessions(recorded: Path | None = None) -> list[Messages]:
    """The longer ones of the recorded sessions (JSON lines with `messages` and `tokens`), else made-up ones."""
    if recorded is None:
        return [made_up(seed) for seed in range(12)]
    rows = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    return [row["messages"] for row in rows if row["tokens"] > 9_000]


def made_up(seed: int, steps: int = 60) -> Messages:
    """A coding agent's session: reads, searches, test runs that fail and then pass."""
    chance = random.Random(seed)
    messages: Messages = [
        {"role": "system", "content": "You are a careful coding agent. Never push to the main branch."},
        {"role": "user", "content": f"The importer in module_{seed} drops the last row of each file. Find out why and fix it."},
    ]
    for step in range(steps):
        name, arguments, result = made_up_call(chance, seed, step)
        call = {"id": f"call_{step}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        messages.append({"role": "assistant", "content": f"Step {step}: {name}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{step}", "content": result})
        if step % 20 == 19:
            messages.append({"role": "user", "content": f"Good. Also look at release_{step}, but do not change its format."})
    return messages


def made_up_call(chance: random.Random, seed: int, step: int) -> tuple[str, dict[str, str], str]:
    path = f"src/module_{seed}/part_{chance.randrange(12)}.py"
    match chance.randrange(3):
        case 0:
            lines = (
                f"{n:4}  value_{n} = compute(row[{n % 7}], limit={chance.randrange(999)})"
                for n in range(chance.randrange(40, 160))
            )
            return "read_file", {"path": path}, "\n".join(lines)
        case 1:
            lines = (f"src/module_{seed}/part_{n % 12}.py:{n * 7}: rows.append(parse(line_{n}))" for n in range(30))
            return "search", {"pattern": f"parse_{step}"}, "\n".join(lines)
        case _:
            lines = (f"tests/test_{n}.py::test_case_{n} PASSED" for n in range(60))
            failed = f"tests/test_rows.py::test_last_row FAILED\nE  AssertionError: {step} != {step + 1}\n1 failed, 60 passed"
            return "run_tests", {"path": "tests"}, "\n".join([*lines, failed])


TOOLS = [
    {"type": "function", "function": {"name": name, "description": told, "parameters": {"type": "object", "properties": {}}}}
    for name, told in (("read_file", "Reads a file."), ("search", "Searches the code."), ("run_tests", "Runs the tests."))
]


def turns(session: Messages) -> Iterator[Messages]:
    """The requests of a session: all of it so far, whenever the model has to speak."""
    for place, message in enumerate(session):
        is_last = place + 1 == len(session) or session[place + 1]["role"] == "assistant"
        if message["role"] in ("user", "tool") and is_last:
            yield session[: place + 1]


async def agent(base_url: str, session: Messages, model: str, until: float, chance: random.Random) -> None:
    """Plays a session turn by turn until it ends or the time is over."""
    async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=60) as http:
        for messages in turns(session):
            if time.monotonic() > until:
                return
            body = {"model": model, "messages": messages, "tools": TOOLS, "stream": chance.random() < 0.7}
            with suppress(httpx.HTTPError):  # answers that break off are part of the play
                await ask(http, body, patience=3 if chance.random() < 0.02 else None)
            await asyncio.sleep(chance.expovariate(8))


async def ask(http: httpx.AsyncClient, body: dict[str, Any], patience: int | None) -> None:
    """One request; with `patience`, the client leaves after so many pieces of the answer."""
    async with http.stream("POST", "/chat/completions", json=body) as answer:
        pieces = 0
        async for _ in answer.aiter_raw():
            pieces += 1
            if pieces == patience:
                return


# --- the rig --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass(frozen=True)
class Rig:
    """Where everything listens, and since when (Unix time). process: the proxy's process id."""

    proxy: str
    admin: str
    prometheus: str
    started: float
    process: int

    async def load(self, seconds: float, agents: int = 8, recorded: Path | None = None) -> None:
        """`agents` agents at a time, each with a session and a model of its own."""
        until = time.monotonic() + seconds
        chance = random.Random(5)
        played = sessions(recorded)
        running: set[asyncio.Task[None]] = set()
        for number in range(10_000):
            if time.monotonic() > until:
                break
            model = NAMES[number % len(NAMES)]
            play = agent(self.proxy + "/v1", played[number % len(played)], model, until, random.Random(chance.random()))
            running.add(asyncio.create_task(play))
            if len(running) >= agents:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running)

    def get(self, path: str, **params: Any) -> Any:
        """`data` of an answer of Prometheus. Raises ValueError with what it says when a query is wrong."""
        answer = httpx.get(self.prometheus + path, params=params, trust_env=False, timeout=30).json()
        if answer["status"] != "success":
            raise ValueError(answer["error"])
        return answer["data"]

    def substituted(self, expr: str) -> str:
        """A dashboard's query as Grafana would send it for the whole run, with everything selected."""
        whole = f"{max(int(time.time() - self.started), 10)}s"
        for name, value in (("$__rate_interval", "15s"), ("$__range", whole)):
            expr = expr.replace(name, value)
        return re.sub(r"\$(job|instance|model)\b", ".+", expr)

    def course(self, expr: str, step: float = 1.0) -> list[dict[str, Any]]:
        """The lines of a query over the whole run."""
        data = self.get("/api/v1/query_range", query=self.substituted(expr), start=self.started, end=time.time(), step=step)
        lines: list[dict[str, Any]] = data["result"]
        return lines

    def values(self, query: str) -> list[str]:
        """What a dashboard's variable offers."""
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert found is not None
        names: list[str] = self.get(f"/api/v1/label/{found[2]}/values", **{"match[]": self.substituted(found[1])})
        return names


def proxy_config(store: str, summaries: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"models": MODELS, "store": store}
    if summaries:
        settings["summarizer"] = {"mode": "anchored", "model": SUMMARY_MODEL}
    return settings


def prometheus_config(admin_port: int) -> dict[str, Any]:
    rules = [str(ROOT / "deploy/prometheus" / name) for name in ("rules.yml", "alerts.yml")]
    target = {"job_name": "compaction-proxy", "static_configs": [{"targets": [f"127.0.0.1:{admin_port}"]}]}
    return {"global": {"scrape_interval": "1s", "evaluation_interval": "5s"}, "rule_files": rules, "scrape_configs": [target]}


@asynccontextmanager
async def rig(folder: Path, *, summaries: bool = False, arguments: Sequence[str] = ()) -> AsyncIterator[Rig]:
    """The model, the proxy and Prometheus, all up; their files and logs are below `folder`."""
    model_port, proxy_port, admin_port, prometheus_port = (free_port() for _ in range(4))
    model = uvicorn.Server(uvicorn.Config(Model().app(), port=model_port, log_level="critical"))
    serving = asyncio.create_task(model.serve())
    (folder / "proxy.yaml").write_text(yaml.safe_dump(proxy_config(f"sqlite:///{folder}/checkpoints.db", summaries)))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus_config(admin_port)))
    ports = ("--port", str(proxy_port), "--admin-port", str(admin_port))
    where = ("--upstream", f"http://127.0.0.1:{model_port}/v1", "--config", str(folder / "proxy.yaml"))
    commands = {
        "proxy": (sys.executable, "-m", "proxy", "serve", *ports, *where, *arguments),
        "prometheus": (
            *(shutil.which("prometheus") or "prometheus", f"--config.file={folder}/prometheus.yml"),
            *(f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address=127.0.0.1:{prometheus_port}"),
            "--enable-feature=exemplar-storage",
        ),
    }
    processes: list[Process] = []
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=STDOUT))
        here = "http://127.0.0.1"
        built = Rig(f"{here}:{proxy_port}", f"{here}:{admin_port}", f"{here}:{prometheus_port}", time.time(), processes[0].pid)
        await up(built.admin + "/readyz", processes[0], folder / "proxy.log")
        await up(built.prometheus + "/-/ready", processes[1], folder / "prometheus.log")
        yield built
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.terminate()
        for process in processes:
            await process.wait()
        model.should_exit = True
        await serving


async def up(url: str, process: Process, log: Path) -> None:
    """Waits until it answers 200. Raises RuntimeError when the process ends before."""
    async with httpx.AsyncClient(trust_env=False) as http:
        while process.returncode is None:
            with suppress(httpx.HTTPError):
                if (await http.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"what should answer at {url} ended with {process.returncode}: {end_of(log)}")


def end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2_000:]

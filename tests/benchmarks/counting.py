"""How right and how fast is the count?  Against recorded usage, beside plain tiktoken and LiteLLM.

    .venv/bin/python tests/benchmarks/counting.py [--pairs FILE] [--litellm PYTHON]

--pairs: recorded (request, usage) pairs, one JSON a line, `.xz` or plain; by default those of the shared folder beside the
repository, or else the small fixture of the tests. --litellm: the interpreter of an environment that has litellm (its own
virtual environment in a temporary folder will do); without it the column stays empty.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import lzma
import os
import resource
import statistics
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import tiktoken

from proxy import tokens
from proxy.tokens.vocabulary import PATTERNS, unpack, vocabulary
from proxy.wire.chat_completions import read

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "tokens" / "recorded_pairs.jsonl"
SHARED = Path(os.environ.get("COMPACTION_SHARED") or ROOT.parent / "shared") / "data" / "usage_pairs.jsonl.xz"
ELIDED = "data-elided:"
GROUPS = ("text", "tools", "schema", "images", "unseen", "all")

LITELLM = """
import json, sys
from litellm import token_counter
for line in sys.stdin:
    body = json.loads(line)
    try:
        print(token_counter(model=body["model"], messages=body["messages"], tools=body.get("tools"), tool_choice=body.get("tool_choice")))
    except Exception:
        print(-1)
"""

LITELLM_SPEED = """
import json, sys, time
from litellm import token_counter
body = json.loads(sys.stdin.read())
token_counter(model="gpt-4o", messages=[{"role": "user", "content": "hello"}])
before = time.perf_counter()
token_counter(model="gpt-4o", messages=body["messages"])
print(1e3 * (time.perf_counter() - before))
"""


@dataclass(frozen=True)
class Pair:
    """One recorded request and what its upstream said it weighed. repository: where the recording is from."""

    provider: str
    model: str
    repository: str
    expected: int
    body: dict[str, Any]
    group: str

    @property
    def is_openai(self) -> bool:
        return self.provider in ("openai", "azure") and "grok" not in self.model


def load(path: Path) -> list[Pair]:
    """The pairs of a file; those that were edited by hand or have no usage are left out."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Pair(
            row.get("provider", "openai"),
            row["model"] or row["request_model"],
            row["source"].split(":")[0],
            row["prompt_tokens"],
            restored(row["request"]),
            group(row["request"]),
        )
        for row in rows
        if row["prompt_tokens"] > 0 and not row.get("suspect") and row.get("endpoint", "chat.completions") == "chat.completions"
    ]


def restored(value: Any) -> Any:
    """Recordings keep the size of what they carried, not its bytes: something of the same kind and size stands in for it."""
    if isinstance(value, dict):
        return {key: restored(each) for key, each in value.items()}
    if isinstance(value, list):
        return [restored(each) for each in value]
    if not isinstance(value, str) or not value.startswith(ELIDED):
        return value
    told = json.loads(value[len(ELIDED) :])
    if "w" in told:
        return "data:image/png;base64," + base64.b64encode(png(told["w"], told["h"])).decode()
    data = base64.b64encode(bytes(told["bytes"])).decode()
    return f"data:{told['mime']};base64,{data}" if "mime" in told else data


def png(width: int, height: int) -> bytes:
    """The beginning of a picture."""
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + bytes(45)


def group(body: dict[str, Any]) -> str:
    """What is special about a request; `unseen` when it carries a picture or file whose size nobody can tell from it."""
    found = set()
    for message in body["messages"]:
        if message.get("tool_calls") or message.get("function_call") or message.get("role") in ("tool", "function"):
            found.add("tools")
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            found.add(_media(part))
    if "unseen" in found or "images" in found:
        return "unseen" if "unseen" in found else "images"
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return "schema"
    return "tools" if "tools" in found or body.get("tools") or body.get("functions") else "text"


def _media(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else "text"
    if kind != "image_url":
        return "text" if kind in ("text", "refusal") else "unseen"
    url = part["image_url"]
    return "images" if str(url if isinstance(url, str) else url.get("url")).startswith("data") else "unseen"


def ours(pair: Pair) -> int:
    request = read(json.dumps(pair.body).encode())
    return tokens.ruler(pair.model, request.fields).total(request.conversation.messages)


def plain_tiktoken(pair: Pair) -> int:
    """What people write first: the tokens of all text."""
    messages = read(json.dumps(pair.body).encode()).conversation.messages
    return sum(vocabulary(tokens.encoding_name(pair.model)).count(message.text) for message in messages)


def litellm(pairs: Sequence[Pair], python: str | None) -> list[int] | None:
    """Its counts of the same bodies, or None where it is not installed."""
    if python is None:
        return None
    bodies = "".join(json.dumps({**pair.body, "model": pair.model}) + "\n" for pair in pairs)
    done = subprocess.run([python, "-c", LITELLM], input=bodies, capture_output=True, text=True, check=False)
    counts = [int(line) for line in done.stdout.split() if line.lstrip("-").isdigit()]
    if done.returncode or len(counts) != len(pairs):
        print(f"litellm could not be asked: {done.stderr.strip().splitlines()[-1:]}")
        return None
    return counts


def table(title: str, rows: Iterable[Sequence[object]]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  " + "".join(str(cell).ljust(12 if i else 40) for i, cell in enumerate(row)).rstrip())


def share(errors: Sequence[float], within: float) -> str:
    return f"{100 * sum(abs(error) <= within for error in errors) / len(errors):.1f} %" if errors else "–"


def accuracy(pairs: Sequence[Pair], counters: dict[str, list[int] | None]) -> None:
    """Exact, and within 2 %, by group and by repository."""
    for title, key in (("by group", lambda pair: pair.group), ("by repository", lambda pair: pair.repository)):
        errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for name, counts in counters.items():
            for pair, count in zip(pairs, counts or (), strict=False):
                for where in (key(pair), "all"):
                    errors[where][name].append((count - pair.expected) / pair.expected)
        heads = [head for name in counters for head in (name, "≤ 2 %")]
        order = GROUPS if title == "by group" else sorted(errors)
        rows = [
            [where, len(errors[where]["ours"]), *(share(errors[where][name], limit) for name in counters for limit in (0, 0.02))]
            for where in order
            if where in errors
        ]
        table(f"OpenAI and Azure, exact {title}", [["", "requests", *heads], *rows])


def learning(pairs: Sequence[Pair]) -> None:
    """Other upstreams, in the order of recording: predicted, then learned from. Multi-turn requests without media."""
    calibrator = tokens.Calibrator()
    errors, bounds, cold = [], [], []
    answered: set[tuple[tokens.Key, int]] = set()
    for pair in pairs:
        request = read(json.dumps(pair.body).encode())
        messages = request.conversation.messages
        ruler = tokens.ruler(pair.model, request.fields)
        media = any(part.get("type") != "text" for m in messages for part in _opaque_parts(m.raw))
        key = tokens.Key(pair.provider, tokens.bare_name(pair.model), ruler.offers_tools, media)
        marks = tokens.chain(messages, ruler.around)
        line = calibrator.calibration(key, marks)
        known = line.samples >= 5 or any((key, mark) in answered for mark in marks)
        if not media and any(message.role in ("assistant", "tool") for message in messages):
            cold.append(ruler.raw(messages) / pair.expected - 1)
            if known:
                predicted = line.tokens(ruler.raw(messages))
                errors.append(predicted / pair.expected - 1)
                bounds.append(predicted * (1 + line.margin) / pair.expected - 1)
        if calibrator.observe(key, ruler.raw(messages), pair.expected, prefixes=marks):
            answered.add((key, marks[-1]))
    table(
        "Other upstreams, multi-turn (known: five answers seen, or an earlier turn)",
        [
            ["", "requests", "median error", "under by > 5 %"],
            ["uncalibrated", len(cold), f"{100 * _median(cold):.1f} %", f"{100 * _under(cold):.1f} %"],
            ["calibrated", len(errors), f"{100 * _median(errors):.1f} %", f"{100 * _under(errors):.1f} %"],
            ["calibrated, with its margin", len(bounds), "", f"{100 * _under(bounds):.1f} %"],
        ],
    )


def _opaque_parts(raw: bytes | None) -> list[dict[str, Any]]:
    content = json.loads(raw or b"{}").get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _median(errors: Sequence[float]) -> float:
    return statistics.median(map(abs, errors)) if errors else 0.0


def _under(errors: Sequence[float]) -> float:
    return sum(error < -0.05 for error in errors) / len(errors) if errors else 0.0


def long_body(size: int = 190_000) -> bytes:
    """A tool-using conversation of about so many tokens: recorded ones one after the other, or the fixture's texts again."""
    path = SHARED.parent / "trajectories.jsonl"
    messages: list[Any] = []
    total = 0
    if path.exists():
        for row in map(json.loads, path.read_text().splitlines()):
            if row["tokens"] < 60_000 and total + row["tokens"] < size * 1.02:
                messages += row["messages"]
                total += row["tokens"]
    while total < size:
        text = f"Line {total} of a long log says that nothing happened at all, which is what it said before. " * 50
        messages.append({"role": "user", "content": text})
        total += vocabulary("o200k_base").count(text)
    return json.dumps({"model": "gpt-4o", "messages": messages}).encode()


async def lag_while(work: Callable[[], object]) -> float:
    """The longest that the event loop was late, in seconds, while the work ran in a thread."""
    worst, done = 0.0, asyncio.create_task(asyncio.to_thread(work))
    while not done.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        worst = max(worst, time.perf_counter() - before - 0.001)
    return worst


def timed(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def speed() -> None:
    """Run in a process of its own, so that the vocabulary is cold and nothing else is in memory."""
    loading = timed(tokens.load)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    request = read(long_body())
    messages = request.conversation.messages
    ruler = tokens.ruler("gpt-4o", request.fields)
    asking = timed(lambda: ruler.cold_bytes(messages))
    cold = timed(lambda: ruler.total(messages))
    warm = statistics.median(timed(lambda: tokens.ruler("gpt-4o", request.fields).total(messages)) for _ in range(20))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    again = read(long_body()).conversation.messages
    plain = plain_speed([message.text for message in again])
    tokens.load("cl100k_base")
    lag = asyncio.run(lag_while(lambda: tokens.ruler("gpt-4", request.fields, encoding="cl100k_base").total(again)))
    print(json.dumps({
        "tokens": ruler.total(messages), "messages": len(messages), "vocabulary_ms": 1e3 * loading, "resident_mb": resident,
        "cold_bytes_ms": 1e3 * asking, "cold_ms": 1e3 * cold, "warm_ms": 1e3 * warm, "lag_ms": 1e3 * lag,
        "peak_mb": peak, "plain_ms": 1e3 * plain,
    }))  # fmt: skip


def litellm_speed(python: str | None) -> str:
    if python is None:
        return "–"
    done = subprocess.run([python, "-c", LITELLM_SPEED], input=long_body().decode(), capture_output=True, text=True, check=False)
    return f"{float(done.stdout.split()[-1]):.1f} ms" if done.returncode == 0 else "failed"


def plain_speed(texts: Sequence[str]) -> float:
    """The texts alone, through tiktoken, in seconds."""
    packed = files("proxy.tokens").joinpath("o200k_base.ranks.gz").read_bytes()
    encoding = tiktoken.Encoding("plain", pat_str=PATTERNS["o200k_base"], mergeable_ranks=unpack(packed), special_tokens={})
    return timed(lambda: [len(encoding.encode_ordinary(text)) for text in texts])


def show_speed(python: str | None) -> None:
    done = subprocess.run([sys.executable, __file__, "--speed"], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    table(
        f"Speed: {seen['tokens']} tokens in {seen['messages']} messages",
        [
            ["vocabulary loaded", f"{seen['vocabulary_ms']:.0f} ms", "goal 300"],
            ["memory with it", f"{seen['resident_mb']:.0f} MB", "goal 110"],
            ["memory at most (loading, counting)", f"{seen['peak_mb']:.0f} MB"],
            ["counted the first time", f"{seen['cold_ms']:.1f} ms", "goal 60"],
            ["  plain tiktoken, the texts alone", f"{seen['plain_ms']:.1f} ms"],
            ["  litellm.token_counter", litellm_speed(python)],
            ["counted again", f"{seen['warm_ms']:.2f} ms", "goal 1"],
            ["asked what would be counted", f"{seen['cold_bytes_ms']:.2f} ms"],
            ["event loop late meanwhile, at most", f"{seen['lag_ms']:.1f} ms", "goal 20"],
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path, default=SHARED if SHARED.exists() else FIXTURE)
    parser.add_argument("--litellm", metavar="PYTHON")
    parser.add_argument("--speed", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.speed:
        speed()
        return
    pairs = load(asked.pairs)
    openai = [pair for pair in pairs if pair.is_openai]
    counters: dict[str, list[int] | None] = {
        "ours": list(map(ours, openai)),
        "tiktoken": list(map(plain_tiktoken, openai)),
        "litellm": litellm(openai, asked.litellm),
    }
    accuracy(openai, {name: counts for name, counts in counters.items() if counts is not None})
    learning([pair for pair in pairs if not pair.is_openai])
    show_speed(asked.litellm)


if __name__ == "__main__":
    main()

"""How long a cold event takes: `python tests/benchmarks/engine.py`. One core, counting apart, sizes from 25k to 400k tokens.

Milliseconds of processor time, so that what else runs on the machine does not count.

The session is one of a coding agent: half of it tool output (logs, code, JSON, diffs), the rest words, calls and requests.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from builders import assistant, call, chat, prose, tool, user

from proxy import tokens
from proxy.compaction import compact
from proxy.compaction.strategies import build
from proxy.windows import Budget
from proxy.wire import chat_completions

SIZES = (25_000, 50_000, 100_000, 200_000, 400_000)
MODEL = "gpt-4o"


def output(n: int, draw: random.Random) -> str:
    """One tool result of some 500 to 3,000 tokens, of one of four kinds."""
    lines = draw.randrange(40, 200)
    match n % 4:
        case 0:
            body = [
                f"2026-03-0{n % 9 + 1} 10:{i % 60:02} INFO worker-{i % 9} took {draw.randrange(999)} ms for job_{n}_{i}"
                for i in range(lines)
            ]
            return "\n".join([*body, f"RuntimeError: job_{n} lost its lease", "exit code 1"])
        case 1:
            body = [
                f"{i:5}→    {draw.choice(('total', 'rows', 'cache'))}_{i} = load_{n}(path_{i}, {draw.randrange(99)})"
                for i in range(lines)
            ]
            return "\n".join([f"    0→def run_{n}(path: str) -> int:", *body])
        case 2:
            return json.dumps([{"id": i, "state": "ok", "path": f"src/part_{n}/file_{i}.py"} for i in range(lines)], indent=1)
        case _:
            body = [f"{draw.choice('+- ')}    value_{i} = {draw.randrange(999)}" for i in range(lines)]
            return "\n".join([f"diff --git a/src/part_{n}.py b/src/part_{n}.py", "@@ -1,9 +1,9 @@", *body])


def session(size: int) -> list[dict[str, Any]]:
    """A conversation of about `size` tokens."""
    draw = random.Random(7)
    messages: list[dict[str, Any]] = [user("Make the loader faster. Never touch the migrations.")]
    characters, n = 0, 0
    while characters < size * 3.1:
        text = output(n, draw)
        spoken = f"Part {n}: " + prose(60, n)
        messages += [assistant(spoken, call(f"c{n}", "bash", command=f"make part_{n}", note=prose(10, n))), tool(f"c{n}", text)]
        if n % 12 == 11:
            messages.append(user(f"Now check src/part_{n}.py. It must stay compatible. " + prose(40, n)))
        characters += len(text) + len(spoken) + 120
        n += 1
    return [*messages, user("What is left to do?")]


def measure(size: int) -> dict[str, float]:
    """Milliseconds of each part, and tokens before and after."""
    body = chat(session(size), MODEL)
    started = time.process_time()
    request = chat_completions.read(body)
    read = time.process_time()
    ruler = tokens.ruler(MODEL, request.fields)
    before = ruler.total(request.conversation.messages)
    counted = time.process_time()
    usable = int(before / 0.9)
    budget = Budget(usable, 0, usable, int(usable * 0.8), int(usable * 0.45), ruler)
    result = compact(request.conversation, budget, build("ladder"), target=int(before * 0.25))
    done = time.process_time()
    return {
        "tokens": before,
        "after": result.tokens_after,
        "read": 1e3 * (read - started),
        "count": 1e3 * (counted - read),
        "compact": 1e3 * (done - counted),
        "per 100k": 1e8 * (done - counted) / before,
        "lost": result.critical.lost,
    }


def main() -> None:
    tokens.ruler(MODEL, {}).text("warm up the vocabulary")
    rows = [measure(size) for size in SIZES]
    names = list(rows[0])
    print(" ".join(f"{name:>10}" for name in names) + "   (read, count, compact, per 100k: milliseconds)")
    for row in rows:
        print(" ".join(f"{row[name]:>10,.0f}" for name in names))


if __name__ == "__main__":
    main()

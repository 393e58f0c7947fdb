"""Draws `explain.png`: the explain page as it is, over a made-up session that the real layers have compacted.

    python grafana/explain_picture.py

Needs Chromium.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import picture

from proxy import tokens
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import build
from proxy.explain import Explanation, explain
from proxy.explain_pages import one_page
from proxy.windows import Budget
from proxy.wire import chat_completions

OUTPUT = Path(__file__).parent / "explain.png"
SIZE = (1280, 1500)


def call(number: int, name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def code(name: str, lines: int) -> str:
    """A module as an agent reads it, with line numbers."""
    verbs = (("load", "loaded"), ("parse", "parsed"), ("check", "checked"), ("store", "stored"), ("merge", "merged"))
    nouns = ("row", "file", "batch", "header", "total", "field", "chunk")
    made = [f"# {name}", "from importer.records import Record", ""]
    for n in range(lines):
        (verb, done), noun = verbs[n % 5], nouns[n % 7]
        made += [f"def {verb}_{noun}(source, limit={n * 10}):", f"    for {noun} in source.{noun}s(limit):"]
        made += [f"        if not {noun}.is_{done}:", f"            yield {verb}({noun})", ""]
    return "\n".join(f"{n:4}  {line}" for n, line in enumerate(made[:lines], 1))


def session() -> list[dict[str, Any]]:
    """An agent that looks for a fault: what it read first is long, and was not needed again."""
    tests = "\n".join(
        f"tests/test_{name}.py::test_{name}_{n} PASSED" for name in ("header", "totals", "dates") for n in range(30)
    )
    failed = f"{tests}\ntests/test_rows.py::test_the_last_row FAILED\nE  AssertionError: expected 1200 rows, got 1199\n1 failed"
    steps = [
        ("First the tests.", "run_tests", {"path": "tests"}, failed),
        ("The reader.", "read_file", {"path": "importer/reader.py"}, code("importer/reader.py", 300)),
        ("And what calls it.", "read_file", {"path": "importer/jobs.py"}, code("importer/jobs.py", 260)),
        (
            "The chunk size may matter: it is 100.",
            "read_file",
            {"path": "importer/settings.py"},
            code("importer/settings.py", 220),
        ),
        (
            "flush() is not called for the last chunk.",
            "read_file",
            {"path": "importer/chunks.py"},
            code("importer/chunks.py", 240),
        ),
        ("I add the missing flush().", "edit_file", {"path": "importer/chunks.py", "line": "88"}, "1 line added"),
        ("Once more.", "run_tests", {"path": "tests"}, f"{tests}\ntests/test_rows.py::test_the_last_row PASSED\n91 passed"),
    ]
    task = "The nightly import drops the last row of each file. Find out why and fix it. Do not change the file format."
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful coding agent. Never push to the main branch."},
        {"role": "user", "content": task},
    ]
    for number, (said, name, arguments, result) in enumerate(steps):
        messages.append({"role": "assistant", "content": said, "tool_calls": [call(number, name, **arguments)]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
    return [*messages, {"role": "user", "content": "Good. Is anything else affected by it?"}]


def explained() -> Explanation:
    """One event: a session in a window that holds half of it."""
    body = json.dumps({"model": "gpt-4o", "messages": session()}).encode()
    request = chat_completions.read(body, chat_completions.MessageCache().get)
    budget = Budget(16_000, 4_000, 12_000, 9_600, 5_400, tokens.ruler("gpt-4o", request.fields))
    result = compact(request.conversation, budget, build("ladder"))
    return explain(
        "0123456789abcdef",
        at=1_767_225_600,
        model="gpt-4o",
        outcome="applied",
        reason=result.reason,
        before=request.conversation,
        result=result,
        budget=budget,
        stages=result.stages,
        full_text=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(one_page(explained()), encoding="utf-8")
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            *picture.QUIET,
        )
        shot = ("--window-size={},{}".format(*SIZE), f"--screenshot={OUTPUT}", page.as_uri())
        subprocess.run(["chromium", *flags, *shot], check=True, stderr=subprocess.DEVNULL)
    print(f"wrote {OUTPUT.name}")


if __name__ == "__main__":
    main()

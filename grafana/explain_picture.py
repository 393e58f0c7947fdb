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

sys.path.insert(0, str(Path(__file__).parent))

import replay

from proxy import tokens
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import build
from proxy.explain import Explanation, explain
from proxy.explain_pages import one_page
from proxy.windows import Budget
from proxy.wire import chat_completions

OUTPUT = Path(__file__).parent / "explain.png"
SIZE = (1280, 1500)


def explained() -> Explanation:
    """One event: a session of forty steps in a window that holds half of it."""
    body = json.dumps({"model": "gpt-4o", "messages": replay.made_up(3, steps=24)}).encode()
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
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile")
        shot = ("--window-size={},{}".format(*SIZE), f"--screenshot={OUTPUT}", page.as_uri())
        subprocess.run(["chromium", *flags, *shot], check=True, stderr=subprocess.DEVNULL)
    print(f"wrote {OUTPUT.name}")


if __name__ == "__main__":
    main()

"""The explain page in a real browser: on a desk, on a phone, and with the keyboard alone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxy import tokens
from proxy.compaction import CompactionResult, CriticalItems, LayerReport
from proxy.conversation import Conversation, Message, Text, ToolCall, ToolResult, said
from proxy.explain import Explanation, brief, explain
from proxy.explain_pages import list_page, one_page
from proxy.windows import Budget

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(not shutil.which("chromium"), reason="Chromium is not installed"),
]

MEASURE = """
addEventListener('load', () => {
  const page = document.querySelector('iframe').contentDocument, root = page.documentElement;
  const reachable = [...page.querySelectorAll('a[href], summary, [tabindex="0"]')];
  const hidden = element => element.closest('details:not([open])') && element.tagName !== 'SUMMARY';
  const focused = reachable.filter(element => !hidden(element) && (element.focus(), page.activeElement === element));
  const row = [...page.querySelectorAll('.row')].find(one => !one.querySelector('.empty'));
  const [left, right] = row ? [...row.children].map(side => side.getBoundingClientRect()) : [null, null];
  const wide = [...page.querySelectorAll('body *')].filter(
    element => element.getBoundingClientRect().right > root.clientWidth + 1 && !element.closest('.wide') && !element.closest('.skip'));
  const told = {
    overflow: root.scrollWidth - root.clientWidth, wide: wide.map(element => element.outerHTML.slice(0, 80)),
    reachable: reachable.filter(element => !hidden(element)).length, focused: focused.length,
    beside: row && right.left > left.right - 1, below: row && right.top > left.bottom - 1,
    outside: performance.getEntriesByType('resource').map(one => one.name),
    text: page.body.innerText,
  };
  document.body.innerHTML = ''; document.body.textContent = 'TOLD' + JSON.stringify(told) + 'TOLD';
});
"""


def message(role: str, text: str) -> Message:
    return Message(role, (Text(text),), raw=json.dumps([role, text]).encode())


def explained() -> Explanation:
    """A conversation with what makes pages wide: long words, long lines, tables, many calls."""
    task = message("user", "Fix https://example.com/" + "a" * 300 + " please")
    call = Message(
        "assistant", tuple(ToolCall(f"c{n}", f"a_tool_with_a_long_name_{n}", '{"path":"x"}') for n in range(12)), raw=b"1"
    )
    log = Message("tool", (ToolResult("c1", "\n".join("x" * 400 for _ in range(80))),), raw=b"2")
    before = Conversation((message("system", "Be careful."), task, call, log, message("user", "Now?")))
    shorter = log.with_parts([ToolResult("c1", "x" * 400 + "\n[79 lines]")])
    after = Conversation((before.messages[0], task, said("user", "[summary]"), shorter, before.messages[4]))
    reports = tuple(LayerReport(name, 9_000, 4_000, 3) for name in ("tool_result_budget", "microcompact", "context_collapse"))
    result = CompactionResult(after, 9_000, 4_000, reports, CriticalItems(12, 1))
    budget = Budget(128_000, 4_096, 120_000, 96_000, 54_000, tokens.ruler("gpt-4o", {}))
    return explain(
        "0123456789abcdef",
        at=1_700_000_000,
        model="an-organization/a-model-with-a-very-long-name-2026-01-01-preview",
        outcome="applied",
        reason=None,
        before=before,
        result=result,
        budget=budget,
        stages=(("microcompact", Conversation((*before.messages[:3], shorter, before.messages[4]))), ("context_collapse", after)),
        full_text=True,
    )


PAGES = {"one": one_page(explained()), "list": list_page([brief(explained())] * 30), "empty": list_page([])}


def shown(page: str, width: int, folder: Path) -> dict[str, Any]:
    """What a browser of that width makes of a page."""
    frame = f'<iframe width="{width}" height="800" srcdoc="{html.escape(page)}"></iframe>'
    (folder / "page.html").write_text(f'<!doctype html><meta charset="utf-8">{frame}<script>{MEASURE}</script>', encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000")
    quiet = (
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
    )
    done = subprocess.run(
        ["chromium", *flags, *quiet, "--dump-dom", (folder / "page.html").as_uri()], capture_output=True, text=True, check=True
    )
    found = re.search(r"TOLD(.*)TOLD</body>", done.stdout, flags=re.DOTALL)
    assert found is not None, done.stdout[-500:]
    told: dict[str, Any] = json.loads(html.unescape(found[1]))
    return told


@pytest.mark.parametrize("width", [340, 390, 768, 1_400])
@pytest.mark.parametrize("name", list(PAGES))
def test_nothing_sticks_out_at_any_width(name: str, width: int, tmp_path: Path) -> None:
    told = shown(PAGES[name], width, tmp_path)

    assert told["overflow"] <= 0
    assert told["wide"] == []


def test_before_and_after_stand_side_by_side_on_a_desk_and_one_below_the_other_on_a_phone(tmp_path: Path) -> None:
    desk = shown(PAGES["one"], 1_400, tmp_path)
    phone = shown(PAGES["one"], 390, tmp_path)

    assert (desk["beside"], desk["below"]) == (True, False)
    assert (phone["beside"], phone["below"]) == (False, True)


@pytest.mark.parametrize("name", ["one", "list"])
def test_everything_can_be_reached_with_the_keyboard(name: str, tmp_path: Path) -> None:
    told = shown(PAGES[name], 1_400, tmp_path)

    assert told["reachable"] >= 3
    assert told["focused"] == told["reachable"]


def test_the_page_reads_as_one_would_tell_it(tmp_path: Path) -> None:
    text = shown(PAGES["one"], 1_400, tmp_path)["text"]

    for said_there in (
        "Compacted and forwarded.",
        "removed by context_collapse",
        "edited by microcompact",
        "12 kept, 1 repaired, 0 lost",
    ):
        assert said_there in text


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    assert shown(PAGES["one"], 1_400, tmp_path)["outside"] == []

"""Rows about what compaction does to a conversation: one test a row, at windows from roomy to desperate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from bug_reports import upstreams
from bug_reports.lab import Exchanged, Lab, holds
from bug_reports.rows import Request, Row, built, of_kinds

KINDS = (
    "tools.pairing", "tools.ids", "tools.arguments", "tools.content", "roles.system", "roles.alternation", "roles.developer",
    "roles.last", "content.empty", "reasoning.passthrough", "tokens.multimodal", "tokens.accounting", "window.max_tokens",
    "compaction.loop", "compaction.inflation", "compaction.intent", "compaction.oversize", "summariser.failure",
    "security.summary", "security.cache", "unicode", "tokenizer.panic", "tokenizer.loop", "prompt.cache", "failopen", "state",
)  # fmt: skip
AS_CONFIGURED = 0
WINDOWS = (AS_CONFIGURED, 24_000, 1_500)
"""Tokens that the client's control header narrows the window to."""
ONE_WINDOW = 1_000_000
"""Bytes from which one narrow window is enough."""

Passes = Mapping[int, Exchanged]
_passed: dict[tuple[str, bytes, int], Exchanged] = {}


def passes(lab: Lab, request: Request) -> Passes:
    """The request at each window. Rows that send the same bytes share the work."""
    windows = WINDOWS if len(request.body) < ONE_WINDOW else (AS_CONFIGURED, 1_500)
    return {window: _at(lab, request, window) for window in windows}


def _at(lab: Lab, request: Request, window: int) -> Exchanged:
    key = lab.proxy.url, request.body, window
    if key not in _passed:
        asked = request.having(x_compaction_window=str(window)) if window else request
        _passed[key] = exchanged = lab.send(asked, upstreams.silent)
        holds(exchanged)
        if not exchanged.untouched:
            again = lab.send(asked, upstreams.silent)
            assert again.forwarded == exchanged.forwarded, "the same request became something else"
            done = lab.send(replace(asked, body=exchanged.forwarded), upstreams.silent)
            assert done.untouched, "what was compacted was compacted once more"
    return _passed[key]


def compacted(*windows: int) -> Callable[[Passes], None]:
    """At these windows it is over budget and can be helped; at all others it goes as it came."""

    def check(found: Passes) -> None:
        assert [window for window, one in found.items() if not one.untouched] == list(windows)
        for window in windows:
            assert found[window].answer.tokens is not None
            assert found[window].answer.tokens[1] <= window or window == AS_CONFIGURED

    return check


never = compacted()


def floor(found: Passes) -> None:
    """Nothing that may be removed is left: it goes as it came, and says why."""
    assert all(one.untouched for one in found.values())
    assert found[1_500].answer.header("x-compaction-reason") == "floor"


def says(text: str) -> Callable[[Passes], None]:
    """It survives at every window."""

    def check(found: Passes) -> None:
        assert all(text in one.forwarded.decode() for one in found.values())

    return check


def ids_stay(found: Passes) -> None:
    for one in found.values():
        assert [m["tool_call_id"] for m in one.messages if m["role"] == "tool"] == ["functions.read:0"]


def calls_keep_their_own_results(found: Passes) -> None:
    for one in found.values():
        assert [m["content"] for m in one.messages if m["role"] == "tool"] == ["ok", "aborted"]


def images_stay_with_the_user(found: Passes) -> None:
    for one in found.values():
        with_images = [m for m in one.messages if isinstance(m["content"], list)]
        assert {m["role"] for m in with_images} <= {"user"}
        assert all(isinstance(m["content"], str) for m in one.messages if m["role"] == "tool")


def media_are_no_text(found: Passes) -> None:
    tokens = found[AS_CONFIGURED].answer.tokens
    assert tokens is not None
    assert tokens[0] < 30_000


def arguments_are_counted(found: Passes) -> None:
    tokens = found[AS_CONFIGURED].answer.tokens
    assert tokens is not None
    assert 39_000 < tokens[0] < 41_000


def newest_result_has_head_and_tail(found: Passes) -> None:
    for window in (AS_CONFIGURED, 24_000):
        newest = found[window].messages[-1]
        assert newest["tool_call_id"] == "c11"
        assert newest["content"].rstrip().endswith("l11 l11")
        assert len(newest["content"]) > 1_000


def nothing_invented(found: Passes) -> None:
    assert [m["content"] for m in found[AS_CONFIGURED].messages][-1] == "c"
    assert len(found[AS_CONFIGURED].messages) <= 3


def reasoning_all_or_none(found: Passes) -> None:
    for one in found.values():
        has = ["reasoning_content" in m for m in one.messages if m["role"] == "assistant"]
        assert all(has) or not any(has)


def whole_characters(found: Passes) -> None:
    for one in found.values():
        json.dumps(one.messages, ensure_ascii=False).encode()


TWICE = compacted(24_000, 1_500)

CHECKS: dict[str, tuple[Callable[[Passes], None], ...]] = {
    "H046": (TWICE,),
    "H048": (TWICE,),
    "H049": (TWICE,),
    "H051": (TWICE,),
    "H052": (floor, ids_stay),
    "H054": (never,),
    "H055": (never,),
    "H057": (TWICE,),
    "H058": (floor, calls_keep_their_own_results),
    "H062": (compacted(1_500),),
    "H063": (never,),
    "H065": (TWICE, images_stay_with_the_user),
    "H068": (TWICE, says("You are X. RULE-77: never delete.")),
    "H070": (TWICE, says("From now on answer in French.")),
    "H071": (TWICE, says("You are X. RULE-77: never delete."), says("From now on answer in French.")),
    "H073": (TWICE,),
    "H075": (TWICE,),
    "H076": (TWICE,),
    "H078": (never,),
    "H079": (TWICE, says("Be brief. RULE-9")),
    "H082": (TWICE, says("continue")),
    "H086": (never,),
    "H088": (TWICE, reasoning_all_or_none),
    "H092": (never, media_are_no_text),
    "H093": (never, media_are_no_text),
    "H095": (compacted(1_500), media_are_no_text),
    "H096": (floor, media_are_no_text),
    "H098": (TWICE, arguments_are_counted),
    "H101": (floor,),
    "H104": (never,),
    "H113": (floor,),
    "H115": (TWICE,),
    "H117": (nothing_invented,),
    "H120": (TWICE,),
    "H122": (TWICE,),
    "H123": (TWICE,),
    "H125": (TWICE,),
    "H129": (TWICE, says("LAST: explain B")),
    "H130": (TWICE, says("PIN-4711 do it")),
    "H132": (TWICE, says("please implement authentication KEY-GOAL")),
    "H134": (newest_result_has_head_and_tail,),
    "H137": (TWICE,),
    "H138": (never,),
    "H140": (TWICE,),
    "H141": (compacted(1_500), whole_characters),
    "H147": (floor,),
    "H149": (floor,),
    "H208": (TWICE,),
    "H215": (TWICE,),
    "H218": (TWICE,),
    "H224": (TWICE,),
    "H227": (TWICE,),
}


@pytest.mark.parametrize("row", of_kinds(*KINDS), ids=lambda row: f"{row.id}-{row.kind}")
def test_what_the_report_asks_for_holds(lab: Lab, strict_lab: Lab, row: Row) -> None:
    found = passes(strict_lab if row.kind.startswith("roles") else lab, built(row))
    for check in CHECKS[row.id]:
        check(found)

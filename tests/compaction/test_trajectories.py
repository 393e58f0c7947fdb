"""Recorded conversations, turn by turn as a client sends them, on small windows: every request fits, and none is broken.

A turn that is over the trigger is compacted from the raw history: the worst case, without any checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from builders import chat

from proxy import tokens
from proxy.compaction import compact
from proxy.compaction.emergency import floor
from proxy.compaction.strategies import build
from proxy.compaction.validation import violations
from proxy.windows import Budget
from proxy.wire import chat_completions

LADDER = build("ladder")
MOST_TURNS = 6  # of one conversation and window, spread evenly: each is compacted cold
SESSIONS = Path(__file__).parents[1] / "sessions"
Check = Callable[..., list[str]]


@pytest.fixture(scope="module")
def strict_check(shared: Path) -> Check:
    """The contract check that was written apart from this project."""
    spec = spec_from_file_location("recorded_check", shared / "data" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    check: Check = module.strict_check
    return check


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def turns(messages: list[dict[str, Any]]) -> list[int]:
    """Ends of the prefixes that a client would have sent, spread evenly over the conversation."""
    ends = [i for i in range(1, len(messages)) if messages[i]["role"] == "assistant"] + [len(messages)]
    ends = [end for end in ends if messages[end - 1]["role"] != "assistant"] or [len(messages)]
    step = max(1, -(-len(ends) // MOST_TURNS))
    return ends[::-1][::step][::-1]


def budget_of(window: int, request: Any) -> Budget:
    usable = window - window // 8
    return Budget(window, window // 8, usable, int(usable * 0.8), int(usable * 0.45), tokens.ruler("gpt-4o", request.fields))


@pytest.mark.parametrize("window", [8_000, 32_000])
def test_every_turn_whose_floor_fits_does_fit_and_is_clean(shared: Path, strict_check: Check, window: int) -> None:
    seen: Counter[str] = Counter()
    for row in rows(shared / "data" / "trajectories.jsonl"):
        fields = {"tools": row["tools"]} if row.get("tools") else {}
        for end in turns(row["messages"]):
            messages = row["messages"][:end]
            request = chat_completions.read(chat(messages, **fields))
            budget = budget_of(window, request)
            if budget.ruler.total(request.conversation.messages) <= budget.trigger:
                continue
            result = compact(request.conversation, budget, LADDER)
            made = json.loads(chat_completions.write(request, result.conversation))["messages"]
            seen["events"] += 1
            if floor(request.conversation, budget) > budget.usable:
                seen["floor"] += 1
                assert result.conversation is request.conversation
                continue
            assert result.tokens_after <= budget.usable, (row["id"], end)
            assert strict_check(made) == [], (row["id"], end)
            assert result.critical.lost == 0, (row["id"], end)
            assert sum(report.saved for report in result.reports) == result.tokens_before - result.tokens_after
            assert made[-1]["role"] == messages[-1]["role"]
    print(f"\n{window}: {dict(seen)}")
    assert seen["events"] > 30


@pytest.mark.parametrize("name", ["retail_support", "long_chat_zh", "shell_agent", "unanswered_calls"])
def test_a_session_of_each_kind_fits_at_a_half_and_a_quarter_and_loses_no_fact(
    contract: Callable[[list[dict[str, Any]]], Counter[str]], name: str
) -> None:
    messages = json.loads((SESSIONS / f"{name}.json").read_text(encoding="utf-8"))["messages"]
    request = chat_completions.read(chat(messages))
    ruler = tokens.ruler("gpt-4o", {})
    before = ruler.total(request.conversation.messages)
    for share in (0.5, 0.25):
        usable = max(int(before * share), floor(request.conversation, Budget(0, 0, 0, 0, 0, ruler)) + 300)
        result = compact(request.conversation, Budget(usable, 0, usable, usable, usable, ruler), LADDER)
        made = json.loads(chat_completions.write(request, result.conversation))["messages"]

        assert result.tokens_after <= usable < before
        assert result.critical.lost == 0
        assert not contract(made) - contract(messages)


def test_the_wild_ones_leave_no_more_broken_than_they_came(shared: Path, strict_check: Check) -> None:
    for row in rows(shared / "data" / "wild.jsonl"):
        request = chat_completions.read(chat(row["messages"]))
        before = Counter(_rule(violation) for violation in strict_check(row["messages"]))
        for window in (2_000, 8_000, 32_000):
            budget = budget_of(window, request)
            result = compact(request.conversation, budget, LADDER)
            made = json.loads(chat_completions.write(request, result.conversation))["messages"]

            after = Counter(_rule(violation) for violation in strict_check(made))
            assert not after - before, (row["id"], window)
            assert result.tokens_after <= budget.usable or floor(request.conversation, budget) > budget.usable
            assert not violations(result.conversation) - violations(request.conversation)


def _rule(violation: str) -> str:
    return violation.split(":")[1]

"""What is worth an explanation, and that explanations never pile up."""

from __future__ import annotations

import asyncio
import threading

import pytest
from builders import agent_session, chat

from proxy import tokens
from proxy.decisions import Decision
from proxy.explain import Explanation, Explanations
from proxy.telling import PENDING, Explainer, is_notable
from proxy.windows import Budget
from proxy.wire import chat_completions

REQUEST = chat_completions.read(chat(agent_session(2, 40), model="gpt-4"))
BUDGET = Budget(8_192, 1_000, 7_000, 5_600, 3_150, tokens.ruler("gpt-4", {}))
OVER = Decision("none", "floor", request=REQUEST, model="gpt-4", budget=BUDGET, before=6_000, after=6_000)


@pytest.mark.parametrize(
    ("decision", "notable"),
    [
        (OVER, True),
        (OVER.but(reason="no_gain", outcome="rejected"), True),
        (OVER.but(reason="deadline"), True),
        (OVER.but(outcome="applied", reason=None, is_event=True), True),
        (OVER.but(outcome="shadow", reason=None, is_event=True), True),
        (OVER.but(outcome="reused", reason=None), False),
        (OVER.but(reason="fits"), False),
        (OVER.but(before=5_000), False),
        (OVER.but(budget=None, reason="unknown_window"), False),
        (Decision("bypassed", "bypass_header"), False),
        (Decision("failed", "internal_error"), False),
    ],
)
def test_events_and_what_is_over_budget_are_explained(decision: Decision, notable: bool) -> None:
    assert is_notable(decision) is notable


def test_while_one_takes_long_only_so_many_wait() -> None:
    gate = threading.Event()
    written: list[Explanation] = []

    class Slow(Explanations):
        def add(self, explanation: Explanation) -> None:
            gate.wait(30)
            written.append(explanation)

    async def work() -> list[str | None]:
        explainer = Explainer(Slow())
        ids = [explainer.explain(OVER) for _ in range(PENDING + 3)]
        gate.set()
        while len(written) < PENDING:
            await asyncio.sleep(0.01)
        ids.append(explainer.explain(OVER))
        explainer.close()
        return ids

    ids = asyncio.run(work())

    assert [one is None for one in ids] == [False] * PENDING + [True] * 3 + [False]
    assert [one.id for one in written[:PENDING]] == ids[:PENDING]

"""How we do by measures that nobody here wrote: `python tests/benchmarks/yardsticks.py`.

`compaction-conformance-kit` plants facts, rules, limits, goals and preferences in sessions, compacts these five times in a row
and looks for what survived. It is installed into an environment of its own that is gone afterwards, and run as it comes: its
budget benchmark at its default budgets (10, 20 and 30 % of the characters), and its pytest plugin with its seeded session,
without a budget (our default marks) and at 20 %.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import rivals

from proxy.compaction import compact
from proxy.compaction.strategies import build
from proxy.conversation import Conversation, said
from proxy.tokens import ruler
from proxy.windows import Budget

KIT = "compaction-conformance-kit"
TRIGGER, TARGET = 0.80, 0.45
"""Our default marks: without a budget the session is taken to have just reached the trigger of its window."""
_MESSAGE = re.compile(r"^\[(system|user|assistant|tool)\] ", re.MULTILINE)


class Turn(Protocol):
    role: str
    text: str


class Adapter:
    """Our ladder as the kit wants it: turns in, one text out, which comes back as one turn in the next round."""

    name = "compaction-proxy"

    def __init__(self) -> None:
        self._usable: int | None = None

    def compact(self, turns: Sequence[Turn], round_num: int = 1, budget_chars: int | None = None) -> Any:
        conversation = _read(turns)
        counter = ruler("gpt-4o", {})
        tokens = counter.total(conversation.messages)
        if self._usable is None:
            self._usable = int(tokens / TRIGGER)
        if budget_chars is None:
            due = tokens > TRIGGER * self._usable - 1
            made = _compacted(conversation, self._usable, int(TARGET * self._usable)) if due else conversation
            return self._context(_written(made), round_num)
        text = _written(conversation)
        room = int(tokens * budget_chars / len(text))
        while len(text) > budget_chars and room > 0:
            # The budget is in characters, ours are tokens: where the guess was too high, a little less.
            text = _written(_compacted(conversation, room, room))
            room = room * 98 // 100 - 1
        return self._context(text, round_num)

    def _context(self, text: str, number: int) -> Any:
        made = import_module("compaction_kit.compacted")
        return made.CompactedContext(text=text, compactor_name=self.name, round_num=number)


def _read(turns: Sequence[Turn]) -> Conversation:
    if len(turns) == 1 and _MESSAGE.match(turns[0].text):
        pieces = _MESSAGE.split(turns[0].text)[1:]
        return Conversation(
            tuple(said(role, text.removesuffix("\n")) for role, text in zip(pieces[::2], pieces[1::2], strict=True))
        )
    return Conversation(tuple(said(turn.role, turn.text) for turn in turns))


def _written(conversation: Conversation) -> str:
    return "\n".join(f"[{message.role}] {message.text}" for message in conversation.messages)


def _compacted(conversation: Conversation, usable: int, target: int) -> Conversation:
    budget = Budget(usable, 0, usable, usable, target, ruler("gpt-4o", {}))
    return compact(conversation, budget, build("ladder"), hard=True).conversation


GATE = """
import pytest
from compaction_kit.testing import assert_no_flags

@pytest.fixture
def compactor():
    from yardsticks import Adapter
    return Adapter()

def test_without_a_budget(compaction_report):
    assert_no_flags(compaction_report)

@pytest.mark.compaction(rounds=5, budget_fraction=0.20)
def test_at_twenty_percent(compaction_report):
    assert_no_flags(compaction_report)
"""


def gate(library: str) -> str:
    """What the kit's own pytest plugin says of us."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), str(Path(__file__).parent), library])
    with tempfile.TemporaryDirectory(prefix="compaction-yardstick-") as folder:
        test = Path(folder) / "test_gate.py"
        test.write_text(GATE, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, "-c", os.devnull]
        ran = subprocess.run(
            [*command, str(test)], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
    return "\n".join(
        line for line in ran.stdout.splitlines() if line.startswith(("E  ", "FAILED")) or " passed" in line or " failed" in line
    )


def main() -> None:
    python = rivals.environment(KIT)
    if python is None:
        sys.exit(f"{KIT} could not be installed")
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    )
    library = found.stdout.strip()
    sys.path.append(library)
    benchmark = import_module("compaction_kit.benchmark")
    compactors = import_module("compaction_kit.cli").COMPACTORS
    told = benchmark.run_budget_benchmark({Adapter.name: Adapter, **compactors})
    print(f"{KIT} {told['kit_version']}, {told['rounds']} rounds, seeds {told['seeds']}\n")
    print(benchmark.budget_benchmark_to_markdown(told))
    for entry in told["entries"]:
        if entry["compactor"] == Adapter.name:
            kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in entry["randomized"]["final_median_by_type"].items())
            print(f"{entry['budget_fraction']:.0%}: {kinds}")
    print(f"\npytest plugin, seeded session, 5 rounds (without a budget, at 20 %):\n{gate(library)}")


if __name__ == "__main__":
    main()

"""Recorded conversations for the benchmarks: read, cut, scored. They lie in the folder `shared` beside the repository, or in
$COMPACTION_SHARED; without them a benchmark says so and ends."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from proxy.conversation import Conversation
from proxy.tokens import Ruler, ruler
from proxy.windows import Budget
from proxy.wire import chat_completions

SHARED = Path(os.environ.get("COMPACTION_SHARED") or Path(__file__).resolve().parents[2].parent / "shared")
SMALLEST_PREFIX = 8_000
"""Tokens: shorter prefixes are not worth compacting."""

Messages = list[dict[str, Any]]


def require() -> None:
    """End with a word when the recordings are not there."""
    if not (SHARED / "data" / "trajectories.jsonl").exists():
        sys.exit(f"no recorded conversations: {SHARED / 'data'} is missing (set COMPACTION_SHARED)")


@cache
def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SHARED / "data" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def counter() -> Ruler:
    return ruler("gpt-4o", {})


@dataclass(frozen=True)
class Cut:
    """A recorded conversation, cut where a request was sent: what came before is compacted, what came after tells what was needed."""

    id: str
    family: str
    messages: Messages
    at: int

    @cached_property
    def prefix(self) -> Conversation:
        return conversation(self.messages[: self.at])

    @cached_property
    def future(self) -> Conversation:
        return conversation(self.messages[self.at :])

    @cached_property
    def tokens(self) -> int:
        return counter().total(self.prefix.messages)

    @property
    def needed(self) -> dict[str, float]:
        """What the assistant uses later and only the prefix holds, with its weight."""
        return {name: weight for name, (_, weight) in self._scorer.needed.items()}

    @property
    def rate(self) -> float:
        """Tokens a character of the messages' JSON."""
        return self.tokens / len(json.dumps(self.messages[: self.at], ensure_ascii=False))

    @cached_property
    def _scorer(self) -> Any:
        return _module("recall").Prefix(self.messages[: self.at], self.messages[self.at :])

    @cached_property
    def _clean(self) -> bool:
        return not _module("check").strict_check(self.messages[: self.at])

    def score(self, compacted: Messages) -> dict[str, Any]:
        """recall_ctx, req_exact, err_last, concl, as far as they apply; None is left out."""
        return {key: value for key, value in self._scorer.score(compacted).items() if value is not None}

    def breaks(self, compacted: Messages) -> bool:
        """The contract is broken, and was not before."""
        return self._clean and bool(_module("check").strict_check(compacted))


def conversation(messages: Messages) -> Conversation:
    return chat_completions.read_messages(json.dumps(messages, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def plain(found: Conversation) -> Messages:
    """The messages as a client would see them."""
    return [json.loads(m.raw if m.raw is not None else chat_completions.write_message(m)) for m in found.messages]


def budget(target: int) -> Budget:
    """A budget whose target is all that there is."""
    return Budget(window=target, reserve=0, usable=target, trigger=target, target=target, ruler=counter())


def recordings() -> Iterator[dict[str, Any]]:
    with (SHARED / "data" / "trajectories.jsonl").open(encoding="utf8") as lines:
        for line in lines:
            yield json.loads(line)


def cuts(shares: tuple[float, ...] | None = None, smallest: int = SMALLEST_PREFIX) -> Iterator[Cut]:
    """Every recording at its own cut, or at these shares of its text; prefixes of at least `smallest` tokens."""
    for recording in recordings():
        messages = recording["messages"]
        if shares is None:
            places = [recording["cut"]] if "cut" in recording else []
        else:
            places = [_module("recall").cut_index(messages, share) for share in shares]
        for at in dict.fromkeys(place for place in places if place):
            found = Cut(recording["id"], recording["family"], messages, at)
            if found.tokens >= smallest:
                yield found

"""What does a session's input cost under a prompt cache?  Ours beside doing nothing and the usual ways of making room.

    .venv/bin/python tests/benchmarks/cost.py [--window N]… [--read 0.1] [--write 1.25] [--trajectories FILE] [--turns N]

Every request of a session is forwarded in turn. What it shares with the beginning of an earlier one is read from the cache
(--read times its tokens), the rest is written to it (--write times). One unit is one uncached input token, answers are left
out: they are the same everywhere. An event breaks the cache once; ours is run as it is, through chain, replay and layers.

Sessions: the recorded conversations that outgrow the window, and one of --turns turns made of recorded ones end to end, whose
messages are told apart by a number so that no content repeats. Without the shared folder: one made session of an agent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from builders import agent_session

from proxy import tokens
from proxy.checkpoints.chain import Digests, chain, namespace
from proxy.checkpoints.resume import Checkpoint, Decision, Refusals, replay, rule
from proxy.checkpoints.thaw import Thaws
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import build
from proxy.conversation import Conversation, Message, ToolResult
from proxy.tokens import Ruler
from proxy.windows import Budget
from proxy.wire.chat_completions import MessageCache, read_message, write_message

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("COMPACTION_SHARED") or ROOT.parent / "shared") / "data" / "trajectories.jsonl"
SEED = namespace(b"", b"benchmark")
KEPT_RESULTS = 10
"""Tool results that a mask leaves alone, as the agents that mask do."""

Policy = Callable[[Conversation], Conversation]


@dataclass
class Bill:
    """What the requests of one or more sessions came to, in tokens. breaks: requests whose beginning was not the last one's."""

    requests: int = 0
    overflows: int = 0
    breaks: int = 0
    sent: int = 0
    cached: int = 0
    seconds: float = 0.0

    def billed(self, read: float, write: float) -> float:
        return self.cached * read + (self.sent - self.cached) * write

    def __add__(self, other: Bill) -> Bill:
        mine, theirs = vars(self), vars(other)
        return Bill(**{name: mine[name] + theirs[name] for name in mine})


class Cache:
    """A provider's prompt cache of one session: every beginning of every request that it has seen."""

    def __init__(self, cost: Callable[[Message], int]) -> None:
        self._cost = cost
        self._seen: set[bytes] = set()
        self._last = b""

    def send(self, messages: Sequence[Message]) -> tuple[int, int, bool]:
        """Tokens of a request, those of them that were cached, and whether it goes on where the last one ended."""
        key, total, cached, goes_on, hit = b"", 0, 0, not self._last, True
        for message in messages:
            key = blake2b(key + write_message(message), digest_size=16).digest()
            total += self._cost(message)
            hit = hit and key in self._seen
            cached = total if hit else cached
            goes_on = goes_on or key == self._last
            self._seen.add(key)
        self._last = key
        return total, cached, goes_on


def nothing(budget: Budget) -> Policy:
    return lambda conversation: conversation


def drop_oldest(budget: Budget) -> Policy:
    """The oldest steps go each turn, as many as must."""

    def policy(conversation: Conversation) -> Conversation:
        ruler, steps = budget.ruler, conversation.steps
        room = budget.usable - ruler.total(conversation.preamble)
        first = len(steps) - 1
        room -= ruler.total(steps[first].messages) - ruler.fixed
        while first > 0 and (cost := ruler.total(steps[first - 1].messages) - ruler.fixed) <= room:
            room -= cost
            first -= 1
        return Conversation((*conversation.preamble, *conversation.messages[steps[first].start :]))

    return policy


def mask(budget: Budget) -> Policy:
    """All but the newest tool results are masked, anew each turn."""

    def policy(conversation: Conversation) -> Conversation:
        results = [i for i, message in enumerate(conversation.messages) if message.is_result]
        old = set(results[:-KEPT_RESULTS])
        return Conversation(tuple(masked(m) if i in old else m for i, m in enumerate(conversation.messages)))

    return policy


def masked(message: Message) -> Message:
    return message.with_parts(replace(p, text="[old result]") if isinstance(p, ToolResult) else p for p in message.parts)


def checkpoints(budget: Budget) -> Policy:
    """Events with the real layers, frozen and resumed as the proxy does."""
    layers, held, digests, refusals = build("ladder"), dict[bytes, Checkpoint](), Digests(), Refusals()
    thaws = Thaws(MessageCache().get)

    def decide(before: Conversation, checkpoint: Checkpoint | None, waiting: bool) -> Decision | None:
        result = compact(before, budget, layers)
        return Decision(result) if result.tokens_after < 0.95 * result.tokens_before else None

    def policy(conversation: Conversation) -> Conversation:
        keys = chain(conversation, SEED, digests)
        found = next(((i, held[keys.keys[i]]) for i in range(len(keys.keys) - 1, -1, -1) if keys.keys[i] in held), None)
        done = replay(conversation, keys, decide, rule(conversation, budget), found=found, thaws=thaws, refusals=refusals)
        for key, checkpoint in done.made:
            held.setdefault(key, checkpoint)
        return done.conversation

    return policy


POLICIES: dict[str, tuple[Callable[[Budget], Policy], float, float]] = {
    "no compaction": (nothing, 0.8, 0.45),
    "drop oldest each turn": (drop_oldest, 0.8, 0.45),
    "mask each turn": (mask, 0.8, 0.45),
    "checkpoint .80 to .70": (checkpoints, 0.8, 0.70),
    "ours: checkpoint .80 to .45": (checkpoints, 0.8, 0.45),
}


def turns(messages: Sequence[Message]) -> Iterator[Conversation]:
    """The requests of a session: before each answer, and the last."""
    for at, message in enumerate(messages):
        if message.role == "assistant" and at and messages[at - 1].role != "assistant":
            yield Conversation(tuple(messages[:at]))


def run(messages: Sequence[Message], make: Callable[[Budget], Policy], budget: Budget) -> Bill:
    """One session under one policy."""
    costs: dict[bytes, int] = {}

    def cost(message: Message) -> int:
        raw = write_message(message)
        if raw not in costs:
            costs[raw] = budget.ruler.message(message)
        return costs[raw]

    policy, cache, bill = make(budget), Cache(cost), Bill()
    for request in turns(messages):
        start = time.perf_counter()
        forwarded = policy(request)
        bill.seconds += time.perf_counter() - start
        sent, cached, goes_on = cache.send(forwarded.messages)
        bill.requests += 1
        bill.overflows += sent > budget.usable
        bill.breaks += not goes_on
        bill.sent += sent
        bill.cached += cached
    return bill


def budget_of(window: int, trigger: float, target: float, ruler: Ruler) -> Budget:
    usable = window - min(4_096, window // 4)
    return Budget(window, window - usable, usable, int(usable * trigger), int(usable * target), ruler)


def recorded(path: Path) -> list[list[dict[str, Any]]]:
    """The recorded conversations; a made one where they are missing."""
    if not path.exists():
        return [agent_session(400, words=300)]
    with path.open() as lines:
        return [json.loads(line)["messages"] for line in lines]


def parsed(messages: Sequence[dict[str, Any]]) -> list[Message]:
    return [read_message(json.dumps(message, ensure_ascii=False).encode()) for message in messages]


def long_session(conversations: Sequence[Sequence[dict[str, Any]]], count: int) -> list[Message]:
    """One session of so many turns: conversations with tools end to end, again from the first when there are too few."""
    with_tools = [c for c in conversations if sum(m["role"] == "tool" for m in c) > 8] or list(conversations)
    made: list[dict[str, Any]] = []
    number = turn = 0
    while turn < count:
        for message in with_tools[number % len(with_tools)]:
            if message["role"] in ("system", "developer") and made:
                continue
            content = message.get("content")
            numbered = f"({number}) {content}" if isinstance(content, str) and message["role"] == "user" else content
            made.append({**message, "content": numbered})
            turn += message["role"] == "assistant"
            if turn >= count:
                break
        number += 1
    return parsed(made)


def show(title: str, bills: dict[str, Bill], read: float, write: float) -> None:
    """A table of the policies, and whether ours is the cheapest of those that never overflow."""
    print(f"\n{title}")
    print(
        f"{'':30}{'requests':>9}{'breaks':>8}{'overflows':>10}{'sent':>9}{'cached':>8}{'billed':>10}{'/request':>9}{'ms/turn':>9}"
    )
    for name, bill in bills.items():
        billed = bill.billed(read, write)
        print(
            f"{name:30}{bill.requests:>9}{bill.breaks:>8}{bill.overflows:>10}{bill.sent / 1e6:>8.2f}M{bill.cached / bill.sent:>8.0%}"
            f"{billed / 1e6:>9.2f}M{billed / bill.requests:>9.0f}{1e3 * bill.seconds / bill.requests:>9.1f}"
        )
    fitting = {name: bill.billed(read, write) for name, bill in bills.items() if not bill.overflows}
    print(f"cheapest that never overflows: {min(fitting, key=lambda name: fitting[name]) if fitting else 'none'}")


def main() -> None:
    wanted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted.add_argument("--window", type=int, action="append", help="tokens; may be repeated (default 32000 and 128000)")
    wanted.add_argument("--read", type=float, default=0.1, help="price of a cached token, of an uncached one's")
    wanted.add_argument("--write", type=float, default=1.25, help="price of a token that is written to the cache")
    wanted.add_argument("--trajectories", type=Path, default=SHARED)
    wanted.add_argument("--turns", type=int, default=400, help="of the long session; 0 leaves it out")
    options = wanted.parse_args()
    conversations = recorded(options.trajectories)
    ruler = tokens.ruler("gpt-4o", {})
    for window in options.window or (32_000, 128_000):
        largest = budget_of(window, 0.8, 0.45, ruler)
        outgrown = [c for c in map(parsed, conversations) if ruler.total(c) > largest.trigger]
        named = [(f"recorded sessions that outgrow {window} tokens: {len(outgrown)}", outgrown)]
        if options.turns:
            named.append((f"one session of {options.turns} turns, window {window}", [long_session(conversations, options.turns)]))
        for title, sessions in named:
            if sessions:
                bills = {
                    name: sum((run(s, make, budget_of(window, trigger, target, ruler)) for s in sessions), Bill())
                    for name, (make, trigger, target) in POLICIES.items()
                }
                show(title, bills, options.read, options.write)


if __name__ == "__main__":
    main()

"""Recorded conversations, turn by turn through the real layers: the prefix breaks at events alone, and a replay agrees."""

import json

import pytest

from proxy import tokens
from proxy.checkpoints.chain import Digests, chain, namespace
from proxy.checkpoints.resume import Decision, Refusals, replay, rule
from proxy.checkpoints.thaw import Thaws
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import build
from proxy.compaction.validation import violations
from proxy.conversation import Conversation
from proxy.windows import Budget
from proxy.wire.chat_completions import MessageCache, write_message

SEED = namespace(b"", b"Bearer sk-one", "settings")
LAYERS = build("ladder")


def budget_of(window):
    usable = window * 7 // 8
    return Budget(window, window - usable, usable, int(usable * 0.8), int(usable * 0.45), tokens.ruler("gpt-4o", {}))


class Proxy:
    """One that remembers what it is given to remember."""

    def __init__(self, window, held=None):
        self.budget, self.held = budget_of(window), held if held is not None else {}
        self.digests, self.cache, self.refusals = Digests(), MessageCache(), Refusals()
        self.thaws = Thaws(self.cache.get)

    def decide(self, before, checkpoint, waiting):
        result = compact(before, self.budget, LAYERS)
        return Decision(result) if result.tokens_after < 0.95 * result.tokens_before else None

    def request(self, raws):
        seen = Conversation(tuple(map(self.cache.get, raws)))
        keys = chain(seen, SEED, self.digests)
        found = next(((i, self.held[k]) for i, k in reversed(list(enumerate(keys.keys))) if k in self.held), None)
        done = replay(seen, keys, self.decide, rule(seen, self.budget), found=found, thaws=self.thaws, refusals=self.refusals)
        for key, checkpoint in done.made:
            self.held.setdefault(key, checkpoint)
        assert violations(done.conversation) - violations(seen) == {}
        return done, [write_message(message) for message in done.conversation.messages]


def conversations(shared, window):
    """Those that outgrow the window, but not so far that a test takes minutes."""
    with (shared / "data" / "trajectories.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    return [row for row in rows if 0.7 * window < row["tokens"] < 3 * window]


def turns(messages):
    """How many messages each request of a session has."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i and messages[i - 1]["role"] != "assistant"]
    return [*answers, len(messages)]


@pytest.mark.parametrize("window", [8_000, 32_000])
def test_the_prefix_breaks_at_events_alone_and_a_cold_replica_agrees(shared, window):
    events = requests = 0
    for row in conversations(shared, window):
        raws = [json.dumps(message, ensure_ascii=False).encode() for message in row["messages"]]
        proxy, before = Proxy(window), []
        for number, stop in enumerate(turns(row["messages"])):
            done, now = proxy.request(raws[:stop])
            events += len(done.made)
            requests += 1
            assert done.made or done.live or now[: len(before)] == before, row["id"]
            before = now
            if number % 25 == 24:
                assert Proxy(window).request(raws[:stop])[1] == now, row["id"]
        assert Proxy(window).request(raws)[1] == before, row["id"]
        # another replica that knows every checkpoint of the first one says the same, too
        assert Proxy(window, dict(proxy.held)).request(raws)[1] == before, row["id"]

    assert requests > 100
    assert 0 < events < requests / 3

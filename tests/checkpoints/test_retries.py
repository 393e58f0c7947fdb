"""What is forwarded after a refusal, or as a last resort, is an event like any other: the next turns go on from it."""

import json

import pytest
from builders import agent_session, assistant, call, chat, prose, tool, user

from proxy.checkpoints.memory import MemoryStore
from proxy.compaction.strategies import build as build_layers
from proxy.compactor import Compactor
from proxy.config import Model
from proxy.decisions import Caller, Wish
from proxy.overflow import Overflow
from proxy.walk import Marks
from proxy.windows import Windows

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"


@pytest.fixture
async def proxy_for():
    """Builds a compactor; all share what is given as their store."""
    made = []

    def build(models=None, *, default=None, store=None, layers=None, timeout=60.0):
        windows = Windows(models or {}, default_window=default)
        made.append(Compactor(windows, layers or build_layers("ladder"), Marks(timeout=timeout), store=store))
        return made[-1]

    yield build
    for compactor in made:
        await compactor.aclose()


class Upstream:
    """Takes prompts of so many tokens, by a count of its own: a token is four characters, times `factor`. says: what it states."""

    def __init__(self, limit, *, factor=1.0, says=("limit", "input")):
        self.limit, self.factor, self.says = limit, factor, says
        self.taken, self.refused = [], 0

    def count(self, messages):
        return int(len(json.dumps(messages, ensure_ascii=False)) / 4 * self.factor)

    async def answer(self, proxy, messages):
        """What the proxy gets through with, retrying once."""
        decision = await proxy.decide(chat(messages, "m"), PATH, Wish(), caller=Caller(b"one"))
        decision = await proxy.count(decision)
        if (sent := self._takes(decision, messages)) is not None:
            return sent
        got = self.count(forwarded(decision, messages))
        refusal = Overflow(
            "prompt", self.limit if "limit" in self.says else None, got if "input" in self.says else None, None, True
        )
        proxy.learned.refused("m", refusal)
        harder = await proxy.harder(decision, refusal)
        assert harder is not None
        sent = self._takes(harder, messages)
        assert sent is not None, "refused twice"
        return sent

    def _takes(self, decision, messages):
        sent = forwarded(decision, messages)
        if self.count(sent) > self.limit:
            self.refused += 1
            return None
        self.taken.append(sent)
        return sent


def forwarded(decision, messages):
    return messages if decision.body is None else json.loads(decision.body)["messages"]


def grown(messages, n, words=20):
    return [*messages, assistant(f"Answer {n}."), user(f"Question {n}. " + prose(words, n))]


CONFIGURED = {"m": Model(window=16_000, reserve=500)}
"""The surest source: no refusal changes it."""


@pytest.mark.parametrize("says", [("limit", "input"), ("limit",), ()], ids=["all", "limit", "nothing"])
@pytest.mark.parametrize(
    ("models", "default"), [(CONFIGURED, None), (None, 16_000), (None, None)], ids=["configured", "default", "unknown"]
)
async def test_the_turns_after_a_retry_go_on_from_what_it_forwarded(proxy_for, models, default, says):
    upstream, proxy = Upstream(9_000, says=says), proxy_for(models, default=default)
    messages = agent_session(24, words=230)
    assert 9_000 < upstream.count(messages) < 12_000

    before = await upstream.answer(proxy, messages)
    assert upstream.refused == 1
    for n in range(5):
        messages = grown(messages, n)
        sent = await upstream.answer(proxy, messages)
        assert sent[: len(before)] == before
        assert sent[len(before) :] == messages[-2:]
        before = sent


async def test_a_limit_that_was_learned_is_kept_to_without_another_refusal(proxy_for):
    upstream, proxy = Upstream(9_000), proxy_for(default=16_000)
    messages = agent_session(24, words=230)
    for n in range(40):
        await upstream.answer(proxy, messages)
        messages = grown(messages, n, words=150)

    assert upstream.refused == 1


@pytest.mark.parametrize(
    ("models", "default"), [(CONFIGURED, None), (None, 16_000), (None, None)], ids=["configured", "default", "unknown"]
)
async def test_a_process_that_has_not_seen_the_refusal_goes_on_from_the_same(proxy_for, models, default):
    store = MemoryStore(ttl=9e9, max_bytes=1 << 26)
    upstream = Upstream(9_000)
    one, other = (proxy_for(models, default=default, store=store) for _ in range(2))
    messages = agent_session(24, words=230)

    before = await upstream.answer(one, messages)
    for n in range(6):
        messages = grown(messages, n)
        sent = await upstream.answer((other, one)[n % 2], messages)
        assert sent[: len(before)] == before
        before = sent


async def test_between_overflows_the_prefix_stands_whichever_process_is_met(proxy_for):
    store = MemoryStore(ttl=9e9, max_bytes=1 << 26)
    # it counts more than we do, and says nothing
    upstream = Upstream(9_000, factor=1.4, says=())
    proxies = [proxy_for(CONFIGURED, store=store) for _ in range(2)]
    messages, before, breaks = agent_session(8, words=230), [], 0
    for n in range(60):
        sent = await upstream.answer(proxies[n % 2], messages)
        breaks += sent[: len(before)] != before
        before = sent
        messages = grown(messages, n, words=200)

    # 60 turns of about 400 tokens with room for about ten of them after each event
    assert upstream.refused >= breaks >= 2
    assert breaks <= 12


def with_a_giant_result(words):
    return [
        *agent_session(4, words=120),
        assistant(None, call("giant", "read_log", path="build.log")),
        tool("giant", "\n".join(f"line {n}: {prose(12, n)}" for n in range(words // 12))),
    ]


class Told(MemoryStore):
    """A memory that tells what was put into it."""

    def __init__(self):
        super().__init__(ttl=9e9, max_bytes=1 << 26)
        self.editions = []

    async def put_if_absent(self, key, value):
        self.editions.append(value.edition)
        return await super().put_if_absent(key, value)


async def test_a_refusal_of_what_had_nothing_left_behind_it_makes_a_later_edition(proxy_for):
    store, upstream = Told(), Upstream(9_000, factor=2.0)
    one, other = (proxy_for(CONFIGURED, store=store) for _ in range(2))
    messages = with_a_giant_result(24_000)

    before = await upstream.answer(one, messages)
    assert upstream.refused == 1
    for n in range(4):
        messages = grown(messages, n)
        sent = await upstream.answer((other, one)[n % 2], messages)
        assert sent[: len(before)] == before
        before = sent
    assert set(store.editions) == {0, 1}
    assert upstream.refused == 1


async def test_a_request_that_is_refused_again_and_again_is_given_up(proxy_for):
    """The upstream says what cannot be: nothing is smaller than nothing."""
    proxy, messages = proxy_for(CONFIGURED), agent_session(24, words=230)
    decision = await proxy.count(await proxy.decide(chat(messages, "m"), PATH, Wish()))

    assert await proxy.harder(decision, Overflow("prompt", 3, 90_000, None, True)) is None


class Clock:
    """Time that only passes when somebody works."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Slow:
    """A layer whose every step takes a while and saves nothing."""

    name = "slow"

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def apply(self, conversation, budget):
        for _ in range(1_000):
            self.clock.now += self.seconds
            budget.ruler.total(conversation.messages)
        raise AssertionError("nobody stopped it")


async def test_one_deadline_holds_for_all_that_is_tried_for_a_request(proxy_for, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("proxy.threads.time", clock)
    proxy = proxy_for(CONFIGURED, layers=(Slow(clock, 0.125),), timeout=2.0)

    decision = await proxy.decide(chat(agent_session(60, words=230), "m"), PATH, Wish())

    assert (decision.outcome, decision.reason, decision.body) == ("none", "deadline", None)
    assert 2.0 <= clock.now <= 2.25

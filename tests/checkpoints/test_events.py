"""When an event happens, who makes it, and whose it is, through the whole decision of a request."""

import asyncio
import json
from dataclasses import replace

import pytest
from builders import agent_session, assistant, chat, prose, user

from proxy.checkpoints.memory import MemoryStore
from proxy.compaction.strategies import build as build_layers
from proxy.compactor import Compactor
from proxy.config import Model, Price
from proxy.decisions import Caller, Wish
from proxy.walk import Marks
from proxy.windows import Windows
from proxy.wire.sse import Usage

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"


@pytest.fixture
async def proxy_for():
    """Builds a compactor for an 8,000-token window."""
    made = []

    def build(*, price=None, thrifty=True, store=None):
        windows = Windows({"m": Model(window=8_000, reserve=1_000, price=price, encoding="o200k_base")})
        made.append(Compactor(windows, build_layers("ladder"), Marks(thrifty=thrifty), store=store))
        return made[-1]

    yield build
    for compactor in made:
        await compactor.aclose()


class Store(MemoryStore):
    """A memory that tells of its writes; before: what to do in front of each."""

    def __init__(self, before=None):
        super().__init__(ttl=9e9, max_bytes=1 << 26)
        self.puts, self._before = [], before

    async def put_if_absent(self, key, value):
        if self._before is not None:
            await self._before(self, key, value)
        stored = await super().put_if_absent(key, value)
        self.puts.append((key, stored))
        return stored


async def ask(proxy, messages, mode="auto"):
    return await proxy.decide(chat(messages, "m"), PATH, Wish(mode), caller=Caller(b"one"))


def sent(decision, messages):
    return messages if decision.body is None else json.loads(decision.body)["messages"]


def grown(messages, n):
    """The history after another answer."""
    return [*messages, assistant(f"Answer {n}."), user(f"Question {n}. " + prose(20, n))]


def long(words=230):
    return agent_session(22, words=words)


async def test_who_wrote_first_is_forwarded_by_whoever_came_second():
    winner = b'{"role":"user","content":"what the first writer wrote"}'

    async def somebody_else(store, key, value):
        await MemoryStore.put_if_absent(store, key, replace(value, replacement=(winner,)))

    proxy = Compactor(Windows({"m": Model(window=8_000, reserve=1_000)}), build_layers("ladder"), store=Store(somebody_else))
    decision = await ask(proxy, long())
    again = await ask(proxy, long())
    await proxy.aclose()

    assert winner in decision.body
    assert again.body == decision.body
    assert decision.outcome == again.outcome == "reused"


async def test_parallel_requests_of_one_conversation_make_one_event(proxy_for):
    store = Store()
    proxy = proxy_for(store=store)

    decisions = await asyncio.gather(*(ask(proxy, long()) for _ in range(6)))

    assert len({decision.body for decision in decisions}) == 1
    assert decisions[0].body is not None
    assert sorted(decision.outcome for decision in decisions) == ["applied", *["reused"] * 5]
    assert [stored for _, stored in store.puts] == [True] * len(store.puts)


CHEAP_READS = Price(input=3.0, cached_input=0.3, output=15.0)


def three_turns(words):
    """Few, long messages: nobody knows whether the conversation goes on for long."""
    return [user(prose(words, 1)), assistant("Yes."), user(prose(words, 2)), assistant("Yes."), user(prose(words, 3) + " Why?")]


async def test_an_event_that_costs_more_than_it_is_expected_to_save_waits_until_it_must(proxy_for):
    proxy = proxy_for(price=CHEAP_READS)
    waits, must = three_turns(1_400), three_turns(1_600)

    first = await ask(proxy, waits)
    second = await ask(proxy, must)

    assert (first.outcome, first.reason, first.body) == ("none", "postponed", None)
    assert second.is_event
    # the same from nothing: it depends on the history and the settings alone
    assert (await ask(proxy_for(price=CHEAP_READS), waits)).reason == "postponed"


@pytest.mark.parametrize(
    ("price", "thrifty"), [(CHEAP_READS, False), (None, True), (Price(input=3.0, output=15.0), True)], ids=["ignore", "?", "flat"]
)
async def test_no_event_waits_where_caches_are_ignored_unpriced_or_no_cheaper(proxy_for, price, thrifty):
    assert (await ask(proxy_for(price=price, thrifty=thrifty), three_turns(1_400))).is_event


async def test_a_first_request_breaks_no_cache_and_waits_for_nothing(proxy_for):
    decision = await ask(proxy_for(price=CHEAP_READS), [user(prose(2_400, 1)), user(prose(2_500, 2)), user("Why?")])

    assert decision.is_event
    assert (decision.prefix_break, decision.rewritten) == ("new_conversation", 0)


async def test_an_event_tells_how_much_of_the_prompt_is_read_anew(proxy_for):
    proxy, messages = proxy_for(), agent_session(12, words=230)
    told = []
    for n in range(60):
        told.append(await ask(proxy, messages))
        messages = grown(messages, n)
        messages[-1]["content"] += prose(120, n)

    events = [decision for decision in told if decision.is_event]
    assert events
    assert all(decision.prefix_break == "event" for decision in events)
    # all but the instructions
    assert all(0.9 * decision.after < decision.rewritten < decision.after for decision in events)
    assert {decision.prefix_break for decision in told if not decision.is_event} == {None}


async def test_an_edited_history_is_told_from_one_that_goes_on(proxy_for):
    proxy, messages = proxy_for(), long()
    await ask(proxy, messages)
    await ask(proxy, grown(messages, 1))

    edited = await ask(proxy, [*messages, assistant("Another answer."), user("And then?")])

    assert (edited.outcome, edited.prefix_break) == ("reused", "edit")


async def test_what_the_upstream_counts_higher_is_compacted_once_and_then_only_grows(proxy_for):
    proxy = proxy_for()
    for steps in range(2, 14):
        decision = await proxy.count(await ask(proxy, agent_session(steps, words=100)))
        ours = proxy.learned.steady_ruler(decision.request, "m", decision.window).raw(decision.request.conversation.messages)
        proxy.answered(decision, Usage(None, int(1.8 * ours), 1, None))
    # the steady measure is content with it
    messages = agent_session(14, words=230)

    first = await ask(proxy, messages)
    assert first.is_event
    before = sent(first, messages)
    for n in range(4):
        messages = grown(messages, n)
        decision = await ask(proxy, messages)
        assert decision.outcome == "reused"
        assert sent(decision, messages)[: len(before)] == before
        before = sent(decision, messages)


async def test_the_event_of_a_branch_does_not_change_what_is_forwarded_for_the_others(proxy_for):
    proxy, messages = proxy_for(), agent_session(14, words=230)
    kept = sent(await ask(proxy, messages), messages)
    branch = messages
    for n in range(6):
        branch = [*branch, assistant("Something else."), user(prose(200, 50 + n))]
        away = await ask(proxy, branch)
    assert away.body is not None

    assert sent(await ask(proxy, messages), messages) == kept
    assert sent(await ask(proxy, grown(messages, 1)), grown(messages, 1))[: len(kept)] == kept


async def test_calls_that_share_a_conversations_start_change_nothing_of_what_is_forwarded_for_it(proxy_for):
    proxy, messages = proxy_for(), long()
    kept = sent(await ask(proxy, messages), messages)

    title = [messages[0], messages[1], user("Give this conversation a title of five words.")]
    helper = [{"role": "system", "content": "You are a helper of an agent."}, *messages[1:9]]
    assert (await ask(proxy, title)).body is None
    own = []
    for n in range(40):
        helper = grown(helper, n)
        helper[-1]["content"] += prose(200, 70 + n)
        own.append((await ask(proxy, helper)).outcome)

    assert "applied" in own
    again = grown(messages, 1)
    assert sent(await ask(proxy, again), again) == [*kept, *again[-2:]]


async def test_each_model_of_a_conversation_goes_on_from_what_it_was_sent():
    sizes = {"m": 8_000, "small": 5_000, "large": 200_000}
    windows = Windows({name: Model(window=size, reserve=1_000, encoding="o200k_base") for name, size in sizes.items()})
    proxy = Compactor(windows, build_layers("ladder"), Marks())

    async def asked(model, messages):
        decision = await proxy.decide(chat(messages, model), PATH, Wish(), caller=Caller(b"one"))
        assert decision.budget.window == sizes[model]
        assert (await proxy.count(decision)).forwarded <= decision.budget.usable
        return sent(decision, messages)

    messages, before = long(), {}
    for n, model in enumerate(("m", "large", "small", "m", "small", "large", "m")):
        now = await asked(model, messages)
        assert now[: len(before.get(model, []))] == before.get(model, [])
        before[model] = now
        messages = grown(messages, n)
    await proxy.aclose()

    assert before["large"] == messages[: len(before["large"])]
    small, medium, large = (len(json.dumps(before[model])) for model in ("small", "m", "large"))
    assert small < medium < large


async def test_a_client_that_compacts_by_itself_begins_a_history_of_its_own(proxy_for):
    proxy, messages = proxy_for(), long()
    for n in range(6):
        messages = grown(messages, n)
        assert (await ask(proxy, messages)).body is not None

    # its own words in place of its history, the newest steps as they were
    own = [messages[0], user("Summary of the work so far: the import is mended, the tests are green."), *messages[-4:]]
    first = await ask(proxy, own)
    before, events = sent(first, own), 0
    for n in range(40):
        own = grown(own, n)
        own[-1]["content"] += prose(200, 30 + n)
        decision = await ask(proxy, own)
        now = sent(decision, own)
        assert decision.is_event or now[: len(before)] == before
        events += decision.is_event
        before = now

    assert (first.outcome, first.reason, first.body) == ("none", "fits", None)
    assert events >= 1
    assert "loader_core" not in json.dumps(before)  # nothing of the history that the client gave up

"""How long ago messages came, for the strategies that ask."""

import json

import pytest
from builders import assistant, chat, prose, user

from proxy.checkpoints.chain import Digests
from proxy.checkpoints.first_seen import FirstSeen
from proxy.compaction.strategies import ask_for_ages, build
from proxy.compactor import Compactor
from proxy.config import Model
from proxy.conversation import said
from proxy.decisions import Wish
from proxy.walk import Marks
from proxy.windows import Windows

pytestmark = pytest.mark.anyio

ONE, TWO = said("user", "one"), said("assistant", "two")
PATH = "/v1/chat/completions"


class Clock:
    """A clock that stands where it is put."""

    def __init__(self):
        self.now = 1_000.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("proxy.compactor.time", clock)
    monkeypatch.setattr("proxy.walk.time", clock)
    return clock


def test_the_first_time_counts_and_callers_share_nothing():
    seen = FirstSeen(Digests())
    seen.note(b"a", [ONE], 10.0)
    seen.note(b"a", [ONE, TWO], 70.0)

    assert seen.ages(b"a", [ONE, TWO, said("user", "three")], 100.0) == {ONE: 90.0, TWO: 30.0}
    assert seen.ages(b"b", [ONE], 100.0) == {}


def test_what_is_sent_again_is_remembered_and_the_rest_is_forgotten():
    seen = FirstSeen(Digests(), limit=8)
    for at in range(20):
        seen.note(b"a", [ONE, said("user", str(at))], float(at))

    ages = seen.ages(b"a", [ONE, said("user", "0"), said("user", "19")], 20.0)
    assert ages == {ONE: 20.0, said("user", "19"): 1.0}


@pytest.mark.parametrize(
    ("strategy", "asks"), [("ladder", False), ("auto", True), ("auto_literal", False), ("importance", True), ("layer1", False)]
)
def test_only_strategies_that_use_times_ask_for_them(strategy, asks):
    assert ask_for_ages(build(strategy)) is asks


def session(turns):
    messages = []
    for n in range(turns):
        messages += [
            user(f"Please add feature {n} to app/part_{n}.py. " + prose(40, n)),
            assistant(f"Done: {n} works. " + prose(60, 90 + n)),
        ]
    return [*messages, user("What is left to do?")]


def proxied(strategy):
    return Compactor(Windows({"*": Model(window=4_000)}), build(strategy), Marks(timeout=60.0))


async def forwarded(compactor, messages):
    decision = await compactor.decide(chat(messages), PATH, Wish())
    return None if decision.body is None else json.loads(decision.body)["messages"]


async def first_event(compactor, turns):
    """What is forwarded once the session is over its trigger, sent turn by turn as a client does."""
    for count in turns:
        if (made := await forwarded(compactor, session(count))) is not None:
            return made
    return None


async def test_a_session_of_more_than_two_hours_is_folded_to_key_decisions(clock):
    young, old = proxied("auto"), proxied("auto")
    assert await forwarded(old, session(2)) is None
    clock.now += 2 * 60 * 60 + 1

    merged, digested = await first_event(young, range(2, 40)), await first_event(old, range(3, 40))

    assert "=== Project status ===" not in str(merged)
    assert "=== Project status ===" in str(digested)


async def test_a_history_that_is_gone_through_again_is_compacted_without_times(clock):
    known, new = proxied("auto"), proxied("auto")
    await forwarded(known, session(2))
    clock.now += 2 * 60 * 60 + 1

    assert await forwarded(known, session(40)) == await forwarded(new, session(40))


async def test_what_an_event_made_of_the_times_is_frozen_with_it(clock):
    compactor = proxied("auto")
    first = await forwarded(compactor, session(40))
    clock.now += 3 * 60 * 60

    again = await forwarded(compactor, [*session(40), assistant("Nothing."), user("Good.")])

    assert again[: len(first)] == first


async def test_by_importance_what_was_said_in_the_last_five_minutes_is_recent(clock):
    def failing(n):
        return [
            user(f"Run it again, try {n}. " + prose(30, n)),
            assistant(f"ValueError: bad row in table_{n}\n" + prose(60, 90 + n)),
        ]

    early = [message for n in range(12) for message in failing(n)]
    late = [message for n in range(12, 20) for message in failing(n)]
    compactor = proxied("importance")
    await forwarded(compactor, early)
    clock.now += 5 * 60 + 1

    made = await forwarded(compactor, [*early, *late, user("So?")])

    whole = [n for n in range(20) if failing(n)[1] in made]
    assert whole
    assert min(whole) >= 12

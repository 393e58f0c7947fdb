"""What is worked out once and taken up by the next turn must come out as if it were worked out anew."""

import json
import random

import pytest
from builders import agent_session

from proxy import tokens
from proxy.checkpoints import Checkpoint
from proxy.checkpoints.chain import chain, namespace
from proxy.checkpoints.resume import replay, resume, rule
from proxy.checkpoints.thaw import Thaws
from proxy.checkpoints.trail import Trail
from proxy.conversation import Conversation, Messages
from proxy.errors import Unreadable
from proxy.windows import Budget
from proxy.wire.chat_completions import MessageCache, write_message

SEED = namespace(b"", b"Bearer sk-one", "settings")
BUDGET = Budget(4_000, 500, 3_500, 2_800, 1_500, tokens.ruler("gpt-4o", {}))


def parsed(cache, messages):
    return tuple(cache.get(json.dumps(message).encode()) for message in messages)


@pytest.mark.parametrize("seed", range(8))
def test_the_chain_of_a_history_that_grew_is_the_chain_of_the_whole(seed):
    """Cut anywhere: between a call and its results, too."""
    cache, rng = MessageCache(), random.Random(seed)
    whole = parsed(cache, agent_session(12, words=5))
    base = None
    for stop in sorted(rng.sample(range(1, len(whole) + 1), 10)):
        grown = Messages(whole[:stop], base)

        assert chain(Conversation(grown), SEED) == chain(Conversation(tuple(whole[:stop])), SEED)
        assert chain(Conversation(grown), b"another" * 4) == chain(Conversation(tuple(whole[:stop])), b"another" * 4)
        base = grown


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_over_a_history_that_grew_finds_the_same_event(seed):
    cache, rng = MessageCache(), random.Random(seed)
    whole = parsed(cache, agent_session(24, words=100))
    base = None
    for stop in sorted(rng.sample(range(2, len(whole) + 1), 16)):
        grown, anew = Conversation(Messages(whole[:stop], base)), Conversation(tuple(whole[:stop]))

        looked = [replay(seen, chain(seen, SEED), None, rule(seen, BUDGET)) for seen in (grown, anew)]

        assert looked[0].due == looked[1].due
        assert looked[0].complete is looked[1].complete
        base = grown.messages


def test_messages_that_say_the_same_in_other_bytes_are_forwarded_in_their_own():
    cache = MessageCache()
    messages = parsed(cache, agent_session(6, words=5))
    checkpoint = Checkpoint(cut=5, replacement=(b'{"role":"user","content":"before"}',))
    thaws = Thaws(cache.get)
    first = resume(Conversation(messages), checkpoint, thaws)
    spaced = tuple(cache.get(json.dumps(json.loads(write_message(message)), indent=1).encode()) for message in messages)

    again = resume(Conversation(spaced), checkpoint, thaws)

    assert again.messages == first.messages
    assert [write_message(m) for m in again.messages[2:]] == [write_message(m) for m in spaced[6:]]


def test_a_replacement_is_parsed_once_and_what_went_out_on_it_grows():
    parsings = []

    def parse(raw):
        parsings.append(raw)
        return MessageCache().get(raw)

    messages = parsed(MessageCache(), agent_session(6, words=5))
    checkpoint = Checkpoint(cut=5, replacement=(b'{"role":"user","content":"before"}',))
    thaws = Thaws(parse)

    shorter = resume(Conversation(messages[:-1]), checkpoint, thaws)
    longer = resume(Conversation(messages), checkpoint, thaws)

    assert len(parsings) == 1
    assert longer.messages.base is shorter.messages


def test_a_replacement_that_is_no_json_is_not_used():
    messages = parsed(MessageCache(), agent_session(6, words=5))

    def parse(raw):
        raise Unreadable("too_deep")

    assert resume(Conversation(messages), Checkpoint(cut=5, replacement=(b"[",)), Thaws(parse)) is None


def test_the_least_used_checkpoints_go_first():
    thaws = Thaws(max_bytes=1_500)
    held = [Checkpoint(cut=1, replacement=(b'{"role":"user","content":"%d"}' % n,)) for n in range(4)]
    first = thaws.get(held[0])
    for checkpoint in held[1:]:
        thaws.get(checkpoint)

    assert thaws.get(held[0]) is not first
    assert thaws.get(held[3]).messages[0].text == "3"


def test_a_history_goes_on_comes_again_or_leaves_its_way():
    trail = Trail()
    one, two, three, other = (bytes([n]) * 32 for n in range(4))

    assert trail.take([one]) == "unknown"
    assert trail.take([one, two]) == "on"
    assert trail.take([one, two]) == "again"
    assert trail.take([one, two, three]) == "on"
    assert trail.take([one, two, other]) == "edited"
    assert trail.take([]) == "unknown"


def test_the_oldest_histories_are_forgotten():
    trail = Trail(limit=2)
    keys = [bytes([n]) * 32 for n in range(4)]
    for key in keys[:3]:
        trail.take([key])

    assert trail.take([keys[0], keys[3]]) == "unknown"

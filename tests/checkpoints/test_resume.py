"""Between events a request only grows; a history that nobody remembers comes to the same bytes."""

import json
import random

import pytest
from builders import agent_session, assistant, call, prose, tool, user
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import tokens
from proxy.checkpoints import Checkpoint
from proxy.checkpoints.chain import Digests, chain, namespace
from proxy.checkpoints.memory import MemoryStore
from proxy.checkpoints.resume import Decision, Refusals, Replayed, Rule, decision_points, replay, resume, rule, unmarked
from proxy.checkpoints.thaw import Thaws
from proxy.compaction import CompactionResult
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import build
from proxy.compaction.validation import violations
from proxy.conversation import Conversation, said
from proxy.windows import Budget
from proxy.wire.chat_completions import MessageCache, read_message, write_message

SEED = namespace(b"", b"Bearer sk-one", "settings")


def conversation(messages):
    return Conversation(tuple(read_message(json.dumps(message).encode()) for message in messages))


def words(messages):
    """A size that anyone can check: one token a word, one a message."""
    return sum(1 + len(message.text.split()) + sum(len(c.arguments.split()) for c in message.calls) for message in messages)


def small_rule(seen, trigger=400, min_gain=20):
    return Rule(words(seen.preamble), words, trigger, min_gain)


def fold(keep=2):
    """An event that folds everything but the newest steps into one message; remembers what it was asked."""

    def decide(before, checkpoint, waiting):
        decide.asked.append(waiting)
        steps = before.steps
        if len(steps) <= keep + 1:
            return None
        folded = [message for step in steps[:-keep] for message in step.messages]
        kept = [message for step in steps[-keep:] for message in step.messages]
        first = " ".join(message.text[:9] for message in folded)
        summary = said("user", f"[Earlier: {len(folded)} messages, {words(folded)} words: {first[:200]}]")
        after = before.with_messages((*before.preamble, summary, *kept))
        ledger = (checkpoint.ledger if checkpoint else b"") + b"%d;" % len(folded)
        return Decision(CompactionResult(after, words(before.messages), words(after.messages)), ledger)

    decide.asked = []
    return decide


def forwarded(replayed):
    return [write_message(message) for message in replayed.conversation.messages]


def turns(messages):
    """The requests that a client sends on its way through a conversation: one before each assistant message, and the last."""
    return [
        messages[:i] for i, m in enumerate(messages) if m["role"] == "assistant" and i and messages[i - 1]["role"] != "assistant"
    ] + [messages]


class Proxy:
    """One request after another through a store of its own."""

    def __init__(self, decide, make_rule=small_rule):
        self.decide, self.make_rule = decide, make_rule
        self.store, self.digests, self.cache = MemoryStore(ttl=9e9, max_bytes=1 << 28), Digests(), MessageCache()
        self.refusals, self.thaws = Refusals(), Thaws(self.cache.get)

    async def request(self, messages):
        seen = Conversation(tuple(self.cache.get(json.dumps(message).encode()) for message in messages))
        keys = chain(seen, SEED, self.digests)
        found = await self.store.get_longest(keys.keys)
        done = replay(seen, keys, self.decide, self.make_rule(seen), found=found, thaws=self.thaws, refusals=self.refusals)
        for key, checkpoint in done.made:
            await self.store.put_if_absent(key, checkpoint)
        return done


def from_nothing(messages, decide=None, make_rule=small_rule):
    seen = conversation(messages)
    return replay(seen, chain(seen, SEED), decide or fold(), make_rule(seen))


def is_prefix(shorter, longer):
    return longer[: len(shorter)] == shorter


def points(messages):
    seen = conversation(messages)
    return decision_points(seen, chain(seen, SEED).cuts)


SESSION = agent_session(40, words=40)


def test_a_request_must_have_been_sent_before_each_answer():
    messages = [
        user("a"),
        assistant("b"),
        user("c"),
        user("d"),
        assistant(None, call("1", "ls"), call("2", "ls")),
        tool("1", "x"),
        tool("2", "y"),
        assistant("e"),
        assistant("f"),
        user("g"),
    ]

    assert points([{"role": "system", "content": "s"}, *messages]) == (1, 4, 7, 10)


def test_what_ends_with_an_answer_is_a_request_too_when_it_is_the_one_that_came():
    assert points([user("a"), assistant("b")]) == (1, 2)
    assert points([{"role": "system", "content": "s"}]) == ()


@pytest.mark.anyio
async def test_between_events_the_forwarded_request_only_grows():
    proxy = Proxy(fold())
    before, events, breaks = [], 0, 0
    for messages in turns(SESSION):
        done = await proxy.request(messages)
        now = forwarded(done)
        events += len(done.made)
        breaks += not is_prefix(before, now)
        if not done.made:
            assert is_prefix(before, now)
        before = now

    assert events == breaks
    assert 3 <= events <= 12


@pytest.mark.anyio
async def test_a_replay_of_every_turn_without_a_store_gives_the_same_bytes():
    proxy = Proxy(fold())
    for messages in turns(SESSION):
        assert forwarded(await proxy.request(messages)) == forwarded(from_nothing(messages))


@pytest.mark.anyio
async def test_a_replay_makes_the_same_checkpoints_and_ledgers():
    proxy = Proxy(fold())
    made = [pair for messages in turns(SESSION) for pair in (await proxy.request(messages)).made]

    again = from_nothing(SESSION)

    assert list(again.made) == made
    assert [checkpoint.generation for _, checkpoint in made] == list(range(1, len(made) + 1))
    assert [checkpoint.parent for _, checkpoint in made] == [None, *(key for key, _ in made[:-1])]
    assert again.checkpoint == made[-1][1]


@pytest.mark.anyio
async def test_a_store_that_forgot_some_generations_gives_the_same_bytes():
    proxy = Proxy(fold())
    for messages in turns(SESSION):
        whole = await proxy.request(messages)
    made = from_nothing(SESSION).made

    for key, checkpoint in made:
        cold = Proxy(fold())
        await cold.store.put_if_absent(key, checkpoint)
        assert forwarded(await cold.request(SESSION)) == forwarded(whole)


def test_points_that_fit_ask_nothing():
    decide = fold()

    from_nothing(SESSION[:8], decide)

    assert decide.asked == []


@pytest.mark.anyio
async def test_the_turn_after_an_event_asks_nothing():
    decide = fold()
    proxy = Proxy(decide)
    for messages in turns(SESSION):
        if (await proxy.request(messages)).made:
            break
    decide.asked.clear()

    await proxy.request([*messages, assistant("fine"), user("on")])

    assert decide.asked == []


@pytest.mark.anyio
async def test_an_event_that_came_to_nothing_is_not_tried_again_before_there_is_more():
    def decide(before, checkpoint, waiting):
        decide.tries += 1

    decide.tries = 0
    proxy = Proxy(decide, lambda seen: small_rule(seen, trigger=400, min_gain=200))
    for messages in turns(SESSION):
        done = await proxy.request(messages)
        assert forwarded(done) == [json.dumps(message).encode() for message in messages]

    # 1,761 words in the end: tried above 400, and after 200 more each time
    assert decide.tries == 7


def test_without_a_memory_of_refusals_a_replay_comes_to_the_same():
    def never(before, checkpoint, waiting):
        return None

    assert forwarded(from_nothing(SESSION, never)) == [json.dumps(message).encode() for message in SESSION]


def test_the_preamble_of_the_request_is_used_and_not_the_one_of_the_event():
    known = from_nothing(SESSION)
    today = [{"role": "system", "content": "Today is Tuesday."}, *SESSION[1:]]

    again = resume(conversation(today), known.checkpoint)

    assert again.messages[0].text == "Today is Tuesday."
    assert [write_message(message) for message in again.messages[1:]] == forwarded(known)[1:]


def test_a_forced_event_happens_below_the_trigger():
    seen = conversation(SESSION[:8])
    done = replay(seen, chain(seen, SEED), fold(), small_rule(seen), force=True)

    assert done.live is not None
    assert len(done.made) == 1
    assert len(done.conversation.messages) < 8
    assert done.resumed == seen


def test_what_was_stopped_is_not_complete():
    seen = conversation(SESSION)

    assert replay(seen, chain(seen, SEED), fold(), small_rule(seen), stop=lambda: True) == Replayed(seen, seen, complete=False)


def test_only_the_waiting_request_may_be_told_so():
    decide = fold()

    from_nothing(SESSION, decide)

    assert True not in decide.asked[:-1]


async def converse(proxy, messages):
    for part in turns(messages):
        done = await proxy.request(part)
    return done


@pytest.mark.anyio
async def test_an_edited_late_message_still_finds_the_checkpoint():
    proxy = Proxy(fold())
    done = await converse(proxy, SESSION)
    edited = [*SESSION[:-1], user("Something else: write the changelog.")]

    again = await proxy.request(edited)

    assert again.checkpoint == done.checkpoint
    assert forwarded(again)[:-1] == forwarded(done)[:-1]


@pytest.mark.anyio
async def test_an_edited_early_message_finds_nothing():
    proxy = Proxy(fold())
    await converse(proxy, SESSION)
    edited = [SESSION[0], user("Another task."), *SESSION[2:]]

    again = await proxy.request(edited)

    assert again.made
    assert again.made[0][1].parent is None
    assert forwarded(again) == forwarded(from_nothing(edited))


@pytest.mark.anyio
async def test_a_rewound_history_matches_an_older_generation():
    proxy = Proxy(fold())
    seen_then = {}
    for messages in turns(SESSION):
        seen_then[len(messages)] = forwarded(await proxy.request(messages))
    generations = [checkpoint for _, checkpoint in from_nothing(SESSION).made]

    rewound = SESSION[: generations[1].seen + 2]
    again = await proxy.request(rewound)

    assert again.made == ()
    assert again.checkpoint == generations[1]
    assert is_prefix(seen_then[len(turns(rewound)[-2])], forwarded(again))


@pytest.mark.anyio
async def test_branches_of_one_history_share_its_beginning_and_nothing_else():
    proxy = Proxy(fold())
    done = await converse(proxy, SESSION[:-1])
    left = await proxy.request([*SESSION[:-1], user("left")])
    right = await proxy.request([*SESSION[:-1], user("right")])

    assert left.checkpoint == right.checkpoint == done.checkpoint
    assert forwarded(left)[:-1] == forwarded(right)[:-1]


@pytest.mark.anyio
async def test_a_much_larger_message_on_another_branch_is_an_event_of_its_own():
    proxy = Proxy(fold(keep=1))
    await converse(proxy, SESSION)

    done = await proxy.request([*SESSION[:-1], user(prose(600))])

    assert done.live is not None


@pytest.mark.anyio
async def test_moving_cache_marks_break_no_prefix_and_are_not_frozen():
    def marked(messages):
        moved = [dict(message) for message in messages]
        for message in [m for m in moved if m["role"] == "user"][-2:]:
            part = {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
            message["content"] = [part]
        return moved

    talk = [{"role": "system", "content": "s"}]
    for i in range(60):
        talk += [user(prose(20, i)), assistant(prose(8, i + 1000))]
    talk.append(user("the end"))
    proxy = Proxy(fold())
    for messages in turns(talk):
        done = await proxy.request(marked(messages))
        replayed = forwarded(from_nothing(marked(messages)))
        assert [unmarked(raw) for raw in forwarded(done)] == [unmarked(raw) for raw in replayed]
        assert sum(b"cache_control" in raw for raw in forwarded(done)) <= 2

    assert done.checkpoint.generation > 3
    assert not any(b"cache_control" in raw for raw in done.checkpoint.replacement)


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        (
            b'{"role":"user","content":[{"type":"text","text":"a\\u0062","cache_control":{"type":"ephemeral"}}]}',
            b'{"role":"user","content":"a\\u0062"}',
        ),
        (
            b'{"content":[{"text":"a","type":"text"},{"text":"b","type":"text","cache_control":null}],"x":1.0,"role":"user"}',
            b'{"content":[{"text":"a","type":"text"},{"text":"b","type":"text"}],"x":1.0,"role":"user"}',
        ),
        (b'{"role":"user","content":"a", "cache_control":{}}', b'{"role":"user","content":"a"}'),
        (
            b'{"role":"assistant","tool_calls":[{"id":"1","cache_control":{},"type":"function"}]}',
            b'{"role":"assistant","tool_calls":[{"id":"1","type":"function"}]}',
        ),
        (b'{"role":"user", "content":[{"type":"text","text":"a"}]}', b'{"role":"user", "content":[{"type":"text","text":"a"}]}'),
        (b'"cache_control"', b'"cache_control"'),
    ],
)
def test_a_mark_is_taken_off_and_nothing_else_is_touched(marked, plain):
    assert unmarked(marked) == plain


@pytest.mark.parametrize(
    "value",
    [
        Checkpoint(cut=0, replacement=()),
        Checkpoint(cut=4, replacement=(b'{"role":"user","content":"x"}',)),
        Checkpoint(cut=400, replacement=(b'{"role":"user","content":"x"}',)),
        Checkpoint(cut=5, replacement=(b'{"role":"tool","tool_call_id":"1","content":"x"}',)),
        Checkpoint(cut=5, replacement=(b'{"role":"assistant","tool_calls":[{"id":"9","function":{"name":"ls"}}]}',)),
        Checkpoint(cut=5, replacement=(b"{",)),
    ],
    ids=["nothing", "inside a step", "beyond the end", "an orphan result", "an unanswered call", "no JSON"],
)
def test_a_checkpoint_that_would_be_illegal_is_not_used(value):
    seen = conversation(SESSION)
    keys = chain(seen, SEED)

    assert resume(seen, value) is None
    done = replay(seen, keys, fold(), small_rule(seen), found=(2, value))
    assert forwarded(done) == forwarded(from_nothing(SESSION))


def test_an_event_that_touches_the_preamble_is_not_kept():
    seen = conversation(SESSION)

    def decide(before, checkpoint, waiting):
        if not waiting:
            return None
        after = Conversation((said("system", "changed"), *before.messages[-3:]))
        return Decision(CompactionResult(after, 900, 100))

    done = replay(seen, chain(seen, SEED), decide, small_rule(seen, trigger=10, min_gain=1))

    assert done.made == ()


def test_an_event_that_only_shortens_what_was_replaced_before_is_kept_too():
    seen = conversation(SESSION[:20])
    keys = chain(seen, SEED)
    old = Checkpoint(cut=9, replacement=(write_message(said("user", prose(900))),), seen=17, tokens_after=100)

    def decide(before, checkpoint, waiting):
        after = before.with_messages((before.messages[0], said("user", "short"), *before.messages[2:]))
        return Decision(CompactionResult(after, words(before.messages), words(after.messages)))

    done = replay(seen, keys, decide, small_rule(seen), found=(keys.cuts.index(9), old))

    ((key, made),) = done.made
    assert key != keys.key(9)
    assert made.cut == 11
    assert made.generation == 2
    assert done.conversation.messages[1].text == "short"


def budget_of(seen, window=8_000):
    ruler = tokens.ruler("gpt-4o", {})
    usable = window - 1_000
    return Budget(window, 1_000, usable, int(usable * 0.8), int(usable * 0.45), ruler)


def ladder(window=8_000):
    layers = build("ladder")

    def decide(before, checkpoint, waiting):
        result = compact(before, budget_of(before, window), layers)
        return Decision(result) if result.tokens_after < result.tokens_before else None

    return decide


@pytest.mark.anyio
async def test_the_real_layers_replay_to_the_same_bytes():
    session = agent_session(60, words=260)
    proxy = Proxy(ladder(), lambda seen: rule(seen, budget_of(seen)))
    events = 0
    for messages in turns(session):
        done = await proxy.request(messages)
        events += len(done.made)

    again = from_nothing(session, ladder(), lambda seen: rule(seen, budget_of(seen)))

    assert events >= 3
    assert forwarded(again) == forwarded(done)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_any_session_replays_to_what_was_forwarded(seed):
    rng = random.Random(seed)
    messages = [user(prose(rng.randint(1, 60), seed))]
    for i in range(rng.randint(5, 60)):
        kind = rng.random()
        if kind < 0.5:
            ids = [f"c{rng.randint(0, 5)}" for _ in range(rng.randint(1, 3))]
            messages.append(assistant(rng.choice([None, "I look."]), *(call(id_, "look", at=i) for id_ in ids)))
            messages += [tool(id_, prose(rng.randint(0, 80), seed + i)) for id_ in ids]
        elif kind < 0.7:
            messages.append(user(prose(rng.randint(1, 40), seed + i)))
        elif kind < 0.9:
            messages.append(assistant(prose(rng.randint(1, 40), seed + i)))
        else:
            messages.append({"role": "system", "content": f"note {i}"})
    keep = rng.randint(1, 4)
    held = {}
    before = []
    for part in turns(messages):
        seen = conversation(part)
        keys = chain(seen, SEED)
        found = next(((i, held[k]) for i, k in reversed(list(enumerate(keys.keys))) if k in held), None)
        done = replay(seen, keys, fold(keep), small_rule(seen, trigger=200), found=found)
        for key, checkpoint in done.made:
            held.setdefault(key, checkpoint)
        assert done.made or is_prefix(before, forwarded(done))
        assert forwarded(from_nothing(part, fold(keep), lambda seen: small_rule(seen, trigger=200))) == forwarded(done)
        before = forwarded(done)


class Client:
    """Someone who talks, edits, rewinds, branches and moves marks; `parent` is what was forwarded for the request before."""

    def __init__(self, rng):
        self.rng, self.count = rng, 0
        self.lines = [[user("the task")]]

    def said(self):
        self.count += 1
        return prose(self.rng.randint(5, 40), self.count)

    def turn(self, messages):
        """One more exchange at the end of these messages."""
        if self.rng.random() < 0.6:
            ids = [f"c{self.rng.randint(0, 9)}" for _ in range(self.rng.randint(1, 3))]
            calls = [call(id_, "look", at=self.count) for id_ in ids]
            return [*messages, assistant(self.rng.choice([None, "I look."]), *calls), *(tool(id_, self.said()) for id_ in ids)]
        return [*messages, assistant(self.said()), user(self.said())]

    def marked(self, messages):
        moved = [dict(message) for message in messages]
        for message in [m for m in moved if m["role"] in ("user", "tool")][-2:]:
            message["content"] = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]
        return moved


@pytest.mark.anyio
async def test_two_thousand_requests_of_a_restless_client_break_nothing_but_what_was_edited():
    rng = random.Random(11)
    client, shared = Client(rng), MemoryStore(ttl=9e9, max_bytes=1 << 28)

    def fresh():
        proxy = Proxy(fold(3), lambda seen: small_rule(seen, trigger=500))
        proxy.store = shared
        return proxy

    proxies = [fresh(), fresh()]
    before = {}
    seen = dict.fromkeys(("turn", "edit", "rewind", "branch", "restart", "events"), 0)
    for _ in range(2000):
        at = rng.randrange(len(client.lines))
        line, move = client.lines[at], rng.random()
        known = before.get(json.dumps(line))
        if move < 0.86 or len(line) < 12:
            seen["turn"] += 1
            line = client.turn(line)
        elif move < 0.9:
            seen["edit"] += 1
            place = rng.randrange(len(line))
            line = (
                [*line[:place], {**line[place], "content": client.said()}, *line[place + 1 :]] if line[place]["content"] else line
            )
            known = None
        elif move < 0.94:
            seen["rewind"] += 1
            line = line[: rng.choice([i for i, m in enumerate(line) if m["role"] == "assistant"])] or line
            known = None
        elif move < 0.97:
            seen["branch"] += 1
            client.lines.append(client.turn(line))
            known = None
        else:
            seen["restart"] += 1
            proxies[rng.randrange(2)] = fresh()
        client.lines[at] = line
        if len(client.lines) > 6 or len(line) > 300:
            client.lines.pop(at)
            client.lines = client.lines or [[user(client.said())]]
        done = await rng.choice(proxies).request(client.marked(line))
        now = [json.loads(unmarked(raw)) for raw in forwarded(done)]
        seen["events"] += bool(done.made)
        assert violations(done.conversation).total() == 0
        if known is not None and done.checkpoint == known[1]:
            assert is_prefix(known[0], now)
        elif known is not None:
            # another checkpoint than before: this request's own event, or that of a branch with the same beginning
            assert done.made or len(client.lines) > 1
        before[json.dumps(line)] = (now, done.checkpoint)

    assert all(count > 30 for count in seen.values()), seen

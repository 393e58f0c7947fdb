"""What every layer must hold, by itself: the contract that a new one joins by being in this list."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import pytest
from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction import Layer
from proxy.compaction.autocompact import AutoCompact
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.emergency import Emergency
from proxy.compaction.merging import Auto, Digested, MergedTurns
from proxy.compaction.microcompact import Microcompact
from proxy.compaction.snip import Snip
from proxy.compaction.strategies import LAYERS
from proxy.compaction.tool_results import ToolResultBudget
from proxy.conversation import Conversation
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]
Wire = Callable[[Conversation], list[dict[str, Any]]]

EVERY_LAYER = [
    ToolResultBudget(per_result=120),
    Snip(),
    Microcompact(keep_recent=2),
    Microcompact(keep_recent=2, min_kept=0.0),
    ContextCollapse(),
    ContextCollapse(mode="sliding_window"),
    ContextCollapse(mode="importance"),
    ContextCollapse(style="brief"),
    MergedTurns(),
    Digested("blocks"),
    Digested("json"),
    Auto(),
    Auto(literal=True),
    AutoCompact(),
    AutoCompact("aggressive"),
    Emergency(),
]
IDS = [f"{number}-{layer.name}" for number, layer in enumerate(EVERY_LAYER)]


def text_agent() -> list[dict[str, Any]]:
    turns = []
    for n in range(12):
        turns += [assistant(f"I look at part {n}.\n```bash\ncat part_{n}.txt\n```"), user("OBSERVATION:\n" + prose(250, n))]
    return [user("Find the sum of all parts. Never guess."), *turns]


def parallel() -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for n in range(8):
        calls = [call(f"id_{k}", "read_file", path=f"app/{n}_{k}.py") for k in range(3)]
        turns += [assistant(None, *calls), *(tool(f"id_{k}", prose(90, 10 * n + k)) for k in range(3))]
    return [{"role": "developer", "content": "Be exact."}, user("Compare the parts."), *turns, user("Which is the longest?")]


def chat_only() -> list[dict[str, Any]]:
    turns = []
    for n in range(20):
        turns += [user(f"Please explain chapter {n}. " + prose(50, n)), assistant(prose(120, 100 + n))]
    return [{"role": "system", "content": "You teach."}, *turns, user("Thanks. What did I ask first?")]


def broken() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "S"}, user("Go."), tool("nobody", prose(200)), assistant(None, call("a", "bash", command="ls"), call("b", "bash", command="ls")),
        tool("a", prose(300, 1)), assistant(None, call("a", "bash", command="ls")), user("Well?"), assistant(""), {"role": "user", "content": []},
        {"role": "function", "name": "old", "content": prose(200, 2)}, assistant(prose(300, 3)), {"role": "narrator", "content": prose(100, 4)}, user("So?"),
    ]  # fmt: skip


HISTORIES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "coding agent": lambda: agent_session(16),
    "text agent": text_agent,
    "parallel calls": parallel,
    "chat": chat_only,
    "broken": broken,
}
each = pytest.mark.parametrize("layer", EVERY_LAYER, ids=IDS)
every = pytest.mark.parametrize("history", HISTORIES)


def applied(layer: Layer, history: str, talk: Talk, room: Room) -> tuple[Conversation, Conversation, Budget]:
    conversation = talk(HISTORIES[history]())
    budget = room(3_000, target=1_350)
    return conversation, layer.apply(conversation, budget), budget


def test_every_layer_that_can_be_configured_is_here() -> None:
    assert {layer.name for layer in EVERY_LAYER} == set(LAYERS)


@each
@every
def test_a_layer_gives_back_the_same_object_or_something_smaller(talk: Talk, room: Room, layer: Layer, history: str) -> None:
    conversation, made, budget = applied(layer, history, talk, room)

    assert made is conversation or budget.ruler.total(made.messages) < budget.ruler.total(conversation.messages)


@each
@every
def test_a_layer_breaks_no_rule_of_the_contract(
    talk: Talk, room: Room, wire: Wire, contract: Callable[[list[dict[str, Any]]], Counter[str]], layer: Layer, history: str
) -> None:
    conversation, made, _ = applied(layer, history, talk, room)

    before, after = contract(wire(conversation)), contract(wire(made))
    assert not {rule: count for rule, count in after.items() if count > before[rule]}


@each
@every
def test_a_layer_keeps_preamble_last_user_message_and_newest_step(talk: Talk, room: Room, layer: Layer, history: str) -> None:
    conversation, made, _ = applied(layer, history, talk, room)

    assert conversation.last_user is not None
    last_user, newest = conversation.steps[conversation.last_user].head, conversation.steps[-1].messages
    assert all(a is b for a, b in zip(conversation.preamble, made.preamble, strict=True))
    assert any(message is last_user for message in made.messages)
    assert all(a is b for a, b in zip(newest, made.messages[-len(newest) :], strict=True))


@each
@every
def test_a_layer_keeps_the_first_task(talk: Talk, room: Room, layer: Layer, history: str) -> None:
    conversation, made, _ = applied(layer, history, talk, room)

    assert conversation.first_user is not None
    task = conversation.steps[conversation.first_user].head.text
    assert any(task.split(".")[0] in message.text for message in made.messages)


@each
@every
def test_a_layer_does_not_change_what_it_was_given(talk: Talk, room: Room, wire: Wire, layer: Layer, history: str) -> None:
    conversation = talk(HISTORIES[history]())
    before = json.dumps(wire(conversation))

    layer.apply(conversation, room(3_000, target=1_350))

    assert json.dumps(wire(conversation)) == before


@each
@every
def test_a_layer_does_the_same_twice_and_nothing_the_second_time(
    talk: Talk, room: Room, wire: Wire, layer: Layer, history: str
) -> None:
    _, made, budget = applied(layer, history, talk, room)

    again = layer.apply(talk(HISTORIES[history]()), budget)
    twice = layer.apply(made, budget)

    assert wire(again) == wire(made)
    if budget.ruler.total(made.messages) <= budget.target or layer.name not in ("context_collapse", "auto_compact"):
        assert wire(twice) == wire(made)


@each
def test_no_layer_speaks_as_the_system(talk: Talk, room: Room, layer: Layer) -> None:
    for history in HISTORIES:
        conversation, made, _ = applied(layer, history, talk, room)
        came = [id(message) for message in conversation.messages]
        assert all(id(message) in came for message in made.messages if message.is_instruction)


@each
def test_a_layer_takes_an_empty_conversation_and_one_message(talk: Talk, room: Room, layer: Layer) -> None:
    nothing, one = Conversation(()), talk([user("Go.")])

    assert layer.apply(nothing, room(10)) is nothing
    assert layer.apply(one, room(10_000)) is one


@each
def test_a_layers_settings_are_frozen(layer: Layer) -> None:
    assert is_dataclass(layer)
    assert type(layer).__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert hash(layer) == hash(replace(layer))

"""Caps on tool results."""

from __future__ import annotations

import json
from collections.abc import Callable

from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction import compact
from proxy.compaction.strategies import build
from proxy.compaction.tool_results import ToolResultBudget
from proxy.conversation import Conversation
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]


def test_a_result_beyond_the_cap_keeps_head_tail_and_error(talk: Talk, room: Room) -> None:
    lines = [prose(12, n) for n in range(400)]
    lines[180] = "PermissionError: /srv/data is read-only"
    conversation = talk(
        [
            user("Go."),
            assistant(None, call("a", "bash", command="make")),
            tool("a", "\n".join(lines)),
            assistant("Done."),
            user("And now?"),
        ]
    )
    budget = room(10_000)

    made = ToolResultBudget(per_result=500).apply(conversation, budget)

    text = made.messages[2].text
    assert budget.ruler.message(made.messages[2]) <= 500
    assert text.startswith(lines[0])
    assert text.endswith(lines[-1])
    assert "PermissionError: /srv/data is read-only" in text
    assert "lines cut …]" in text


def test_what_is_below_the_cap_is_the_very_same_object(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(6))

    assert ToolResultBudget().apply(conversation, room(10_000)) is conversation


def test_the_newest_step_is_left_alone(talk: Talk, room: Room) -> None:
    conversation = talk([user("Go."), assistant(None, call("a", "bash", command="make")), tool("a", prose(4_000))])

    assert ToolResultBudget(per_result=100).apply(conversation, room(10_000)) is conversation


def test_parallel_results_share_the_cap_of_their_step_and_the_small_one_stays_whole(talk: Talk, room: Room) -> None:
    calls = [call(name, "read_file", path=name) for name in ("a", "b", "c")]
    conversation = talk(
        [
            user("Go."),
            assistant(None, *calls),
            tool("a", prose(3_000, 1)),
            tool("b", prose(3_000, 2)),
            tool("c", "short"),
            assistant("Read."),
            user("And now?"),
        ]
    )
    budget = room(10_000)

    made = ToolResultBudget(per_step=1_000).apply(conversation, budget)

    sizes = [budget.ruler.message(message) for message in made.messages[2:5]]
    assert sum(sizes) <= 1_000
    assert made.messages[4] is conversation.messages[4]
    assert abs(sizes[0] - sizes[1]) < 60


def test_a_json_result_stays_json(talk: Talk, room: Room) -> None:
    rows = json.dumps([{"id": i, "state": "ok"} for i in range(2_000)])
    conversation = talk(
        [user("Go."), assistant(None, call("a", "query", table="rows")), tool("a", rows), assistant("Done."), user("And now?")]
    )

    made = ToolResultBudget(per_result=400).apply(conversation, room(10_000))

    value = json.loads(made.messages[2].text)
    assert value[0] == {"id": 0, "state": "ok"}
    assert value[-1] == {"id": 1_999, "state": "ok"}


def test_observations_of_a_text_agent_are_tool_output_too(talk: Talk, room: Room) -> None:
    turns = []
    for n in range(6):
        turns += [assistant(f"I look at part {n}.\n```bash\ncat part_{n}.txt\n```"), user("OBSERVATION:\n" + prose(1_500, n))]
    conversation = talk([user("Find the sum."), *turns])
    budget = room(20_000)

    made = ToolResultBudget(per_result=300).apply(conversation, budget)

    assert all(budget.ruler.message(message) <= 300 for message in made.messages[2:-1] if message.role == "user")
    assert made.messages[0] is conversation.messages[0]
    assert made.messages[-1] is conversation.messages[-1]


def test_more_than_can_be_weighed_in_time_is_cut_even_in_the_newest_step_and_stays_json(talk: Talk, room: Room) -> None:
    rows = json.dumps([{"id": n, "state": "failed" if n == 700 else "ok", "note": prose(6, n)} for n in range(3_000)])
    live = [user("Look."), assistant(None, call("a", "query", sql="select")), tool("a", rows)]
    conversation = talk([*agent_session(3)[:-1], *live])

    made = ToolResultBudget(per_conversation=9_000).apply(conversation, room(5_000))

    shorter = json.loads(made.messages[-1].text)
    assert room(1).ruler.message(made.messages[-1]) <= 9_000
    assert {"id": 700, "state": "failed", "note": prose(6, 700)} in shorter
    assert ToolResultBudget().apply(conversation, room(5_000)) is conversation


def test_the_layers_that_weigh_each_line_are_given_no_more_than_they_can_weigh_in_time(talk: Talk, room: Room) -> None:
    text = "\n".join(f"row {n}: {prose(8, n)}" for n in range(3_000)) + "\nOSError: disk full"
    conversation = talk([user("Look."), assistant(None, call("a", "bash", command="cat x")), tool("a", text)])
    settings = {"tool_result_budget": {"per_conversation": 6_000}}

    result = compact(conversation, room(4_000, target=2_000), build("ladder", layers=settings))

    assert result.layers[0] == "tool_result_budget"
    assert result.tokens_after <= 2_000
    assert "OSError: disk full" in result.conversation.messages[-1].text

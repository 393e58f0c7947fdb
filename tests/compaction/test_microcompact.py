"""Old results as stubs."""

from __future__ import annotations

import json
from collections.abc import Callable

from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction.microcompact import Microcompact, digest_of
from proxy.conversation import Conversation, ToolCall
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]
STUBS = Microcompact(min_kept=0.0)


def test_a_stub_says_tool_arguments_size_first_line_and_error(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))

    made = STUBS.apply(conversation, room(20_000, target=10))

    assert made.messages[5].text.startswith("[read_file(path=app/part_1.py): ")
    assert " characters, 2 lines, cut]" in made.messages[5].text
    assert "ModuleNotFoundError: No module named 'loader_core'" in made.messages[5].text


def test_the_newest_results_stay_whole(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))

    made = STUBS.apply(conversation, room(20_000, target=10))

    changed = [i for i, (a, b) in enumerate(zip(conversation.messages, made.messages, strict=True)) if a is not b]
    assert changed == [3, 5, 7, 9]


def test_old_results_keep_the_lines_that_will_be_needed_as_far_as_the_target_leaves_room(talk: Talk, room: Room) -> None:
    rows = [prose(14, n) for n in range(200)]
    rows[90] = "the cap of forty rows is set in config/limits.yaml by the loader"
    turns = [assistant(None, call("a", "bash", command="grep -rn cap")), tool("a", "\n".join(rows))]
    conversation = talk([user("Go."), *turns, *agent_session(11)[2:]])
    total = room(1).ruler.total(conversation.messages)
    budget = room(20_000, target=total - 1_500)

    made = Microcompact().apply(conversation, budget)

    kept = made.messages[2].text.split("\n")
    assert budget.target - 500 <= budget.ruler.total(made.messages) <= budget.target
    assert rows[90] in kept
    assert "…" in kept
    assert len(kept) > 60


def test_a_json_result_that_keeps_its_best_lines_is_json(talk: Talk, room: Room) -> None:
    rows = json.dumps([{"id": i, "path": f"src/part_{i}.py"} for i in range(300)], indent=1)
    turns = [assistant(None, call("a", "query", table="parts")), tool("a", rows)]
    conversation = talk([user("Go."), *turns, *agent_session(11)[2:]])
    total = room(1).ruler.total(conversation.messages)

    made = Microcompact().apply(conversation, room(20_000, target=total - 1_000))

    assert isinstance(json.loads(made.messages[2].text), list)
    assert len(made.messages[2].text) < len(rows)


def test_what_would_be_left_as_stubs_is_left_to_a_fold(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))

    assert Microcompact().apply(conversation, room(20_000, target=10)) is conversation


def test_small_results_stay(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14, words=60))

    assert STUBS.apply(conversation, room(20_000, target=10)) is conversation


def test_long_old_arguments_become_shorter_json_with_the_same_keys(talk: Talk, room: Room) -> None:
    write = call("w", "write_file", path="app/new.py", content=prose(2_000))
    conversation = talk([user("Go."), assistant(None, write), tool("w", "written"), *agent_session(12)[2:]])

    made = STUBS.apply(conversation, room(20_000, target=10))

    arguments = json.loads(made.messages[1].calls[0].arguments)
    assert arguments["path"] == "app/new.py"
    assert "characters cut" in arguments["content"]
    assert len(made.messages[1].calls[0].arguments) < 500


def test_arguments_that_are_no_json_stay(talk: Talk, room: Room) -> None:
    write = {
        "id": "w",
        "type": "function",
        "function": {"name": "write_file", "arguments": '{"path": "app/new.py", "content": "' + prose(900)},
    }
    conversation = talk([user("Go."), assistant(None, write), tool("w", "written"), *agent_session(12)[2:]])

    made = STUBS.apply(conversation, room(20_000, target=10))

    assert made.messages[1] is conversation.messages[1]


def test_a_stub_names_the_lines_that_later_turns_speak_of(talk: Talk, room: Room) -> None:
    body = [prose(9, n) for n in range(80)]
    body[40] = "the limit is set in config/limits.yaml"
    turns = [assistant(None, call("a", "bash", command="grep -r limit")), tool("a", "\n".join(body))]
    conversation = talk(
        [user("Go."), *turns, *agent_session(11)[2:-1], assistant("I will edit config/limits.yaml now."), user("Yes.")]
    )

    made = STUBS.apply(conversation, room(20_000, target=10))

    assert "the limit is set in config/limits.yaml" in made.messages[2].text


def test_arguments_are_shown_on_one_bounded_line() -> None:
    shown = digest_of(ToolCall("a", "bash", json.dumps({"command": "echo one\necho two " + "x" * 900})).arguments)

    assert "\n" not in shown
    assert len(shown) <= 120

"""The last layers before the emergency."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction import summary
from proxy.compaction.autocompact import AutoCompact
from proxy.compaction.voices import DONE
from proxy.conversation import Conversation
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]
AGGRESSIVE = AutoCompact("aggressive")
POLITE = "I will now look at the file and then report back to you."


def test_standard_leaves_user_messages_byte_identical_and_takes_repetition_out_of_the_assistants(talk: Talk, room: Room) -> None:
    first = f"{POLITE} The loader opens the table twice."
    second = f"{POLITE} The parser is not at fault."
    conversation = talk([user(POLITE + " " + POLITE), assistant(first), user(POLITE), assistant(second), user("So?")])

    made = AutoCompact().apply(conversation, room(10_000))

    assert [m.text for m in made.messages if m.role == "assistant"] == [first, "The parser is not at fault."]
    assert all(a is b for a, b in zip(conversation.messages, made.messages, strict=True) if a.role == "user")


def test_standard_never_leaves_an_assistant_message_empty(talk: Talk, room: Room) -> None:
    conversation = talk([user("Go."), assistant(POLITE), user("On."), assistant(POLITE), user("So?")])

    made = AutoCompact().apply(conversation, room(10_000))

    assert [m.text for m in made.messages if m.role == "assistant"] == [POLITE, POLITE]


def test_code_blocks_are_not_taken_for_repetition(talk: Talk, room: Room) -> None:
    block = "```python\nprint('the very same line of code')\nprint('the very same line of code')\n```"
    conversation = talk(
        [user("Go."), assistant("First try.\n" + block), user("On."), assistant("Second try.\n" + block), user("So?")]
    )

    assert AutoCompact().apply(conversation, room(10_000)) is conversation


def test_standard_cuts_tool_results_to_ten_thousand_characters_and_keeps_the_error(talk: Talk, room: Room) -> None:
    text = prose(2_000) + "\nOSError: disk full\n" + prose(2_000, 1)
    conversation = talk(
        [user("Go."), assistant(None, call("a", "bash", command="make")), tool("a", text), assistant("Hm."), user("So?")]
    )

    made = AutoCompact().apply(conversation, room(10_000))

    assert len(text) > 20_000
    assert len(made.messages[2].text) <= 10_000
    assert "OSError: disk full" in made.messages[2].text


def test_aggressive_keeps_the_five_newest_and_one_message_on_the_rest(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))

    made = AGGRESSIVE.apply(conversation, room(10_000))

    assert all(a is b for a, b in zip(made.messages[:2], conversation.messages[:2], strict=True))
    assert "[Conversation history: Used tools: read_file. Encountered 1 error.]" in made.messages[2].text
    assert all(a is b for a, b in zip(made.messages[3:], conversation.messages[-5:], strict=True))


def test_no_errors_is_said(talk: Talk, room: Room) -> None:
    conversation = talk(
        [
            user("Go."),
            assistant("One."),
            user("On."),
            assistant("Two."),
            user("And."),
            assistant("3."),
            user("4?"),
            assistant("5"),
            user("So?"),
        ]
    )

    made = AGGRESSIVE.apply(conversation, room(10_000))

    assert "[Conversation history: Used no tools. No errors.]" in made.messages[1].text


def test_what_a_person_said_last_stays_the_last_thing_that_a_person_said(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14)[:-1])

    made = AGGRESSIVE.apply(conversation, room(10_000))

    assert [m.text for m in made.messages if m.role == "user"][-1] == conversation.messages[1].text
    assert summary.is_summary(made.messages[1])


def test_the_cut_snaps_to_whole_steps(talk: Talk, room: Room) -> None:
    calls = [call(f"p{n}", "read_file", path=str(n)) for n in range(6)]
    conversation = talk([*agent_session(6)[:-1], assistant(None, *calls), *(tool(f"p{n}", "x") for n in range(6)), user("So?")])

    made = AGGRESSIVE.apply(conversation, room(10_000))

    assert [m.role for m in made.messages] == ["system", "user", "user", "assistant", *["tool"] * 6, "user"]


def test_the_aggressive_summary_quotes_task_constraint_error_and_conclusion(talk: Talk, room: Room) -> None:
    turns = [assistant("The import is missing from setup.py."), user("On."), *agent_session(2)[2:]]
    conversation = talk([*agent_session(14)[:-1], *turns])

    made = AGGRESSIVE.apply(conversation, room(10_000))

    text = made.messages[2].text
    assert made.messages[1] is conversation.messages[1]
    assert "ModuleNotFoundError: No module named 'loader_core'" in text
    assert "The import is missing from setup.py." in text


def test_a_line_of_ours_is_not_what_the_assistant_said_last(talk: Talk, room: Room) -> None:
    early = [user("Go."), assistant("The loader works."), user("On."), assistant(DONE), user("And?")]
    work = [m for n in range(4) for m in (assistant(None, call(f"c{n}", "bash", command="ls")), tool(f"c{n}", "x"))]

    text = AGGRESSIVE.apply(talk([*early, *work, user("So?")]), room(10_000)).messages[1].text

    assert "- The loader works." in text


def test_of_a_task_that_is_too_long_to_stay_the_summary_quotes_the_beginning(talk: Talk, room: Room) -> None:
    conversation = talk([user("Port the loader to Rust. " + prose(3_000)), *agent_session(14)[2:]])

    text = AGGRESSIVE.apply(conversation, room(10_000)).messages[0].text

    assert "§ Goal\n- Port the loader to Rust. " in text


def test_errors_and_requests_are_left_out_when_that_is_wanted(talk: Talk, room: Room) -> None:
    conversation = talk([user("Hello there."), assistant("Hi."), *agent_session(14)[2:]])

    with_errors = AGGRESSIVE.apply(conversation, room(10_000)).messages[1].text
    without = AutoCompact("aggressive", preserve_errors=False).apply(conversation, room(10_000)).messages[1].text

    assert "ModuleNotFoundError" in with_errors
    assert "§ Errors" not in without


def test_the_summary_is_sealed_and_never_in_an_instructions_role(talk: Talk, room: Room) -> None:
    made = AGGRESSIVE.apply(talk(agent_session(14)), room(10_000))

    assert summary.is_summary(made.messages[2])
    assert made.messages[2].role == "user"


def test_a_later_system_message_stays_where_it_is(talk: Talk, room: Room) -> None:
    conversation = talk(
        [*agent_session(4)[:-1], {"role": "system", "content": "From now on answer in French."}, *agent_session(6)[2:]]
    )

    made = AGGRESSIVE.apply(conversation, room(10_000))

    assert [m.text for m in made.messages if m.role == "system"] == [
        "You are a careful engineer.",
        "From now on answer in French.",
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_a_short_history_is_left_as_it_is(talk: Talk, room: Room, count: int) -> None:
    conversation = talk([user("Go."), *[assistant("Yes."), user("On.")] * count][: count + 4])

    assert AGGRESSIVE.apply(conversation, room(10_000)) is conversation

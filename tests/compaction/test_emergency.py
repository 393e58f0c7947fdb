"""Whatever it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction import compact
from proxy.compaction.emergency import Emergency, floor
from proxy.compaction.strategies import build
from proxy.conversation import Conversation, Opaque
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]
IMAGE = {
    "type": "image_url",
    "image_url": {
        "url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg=="
    },
}


def photo(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, IMAGE]}


def media(conversation: Conversation) -> list[int]:
    return [sum(isinstance(part, Opaque) and part.kind == "image" for part in message.parts) for message in conversation.messages]


def test_what_fits_is_the_very_same_object(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(3))

    assert Emergency().apply(conversation, room(20_000)) is conversation


def test_media_of_the_history_go_first_with_a_word_in_their_place(talk: Talk, room: Room) -> None:
    conversation = talk([photo("Look at this."), assistant("A dot."), photo("And this?")])
    total = room(1).ruler.total(conversation.messages)

    made = Emergency().apply(conversation, room(total - 20))

    assert media(made) == [0, 0, 1]
    assert made.messages[0].text == "Look at this.[image cut to fit]"
    assert made.messages[2] is conversation.messages[2]


def test_an_image_in_a_tool_result_leaves_a_word_in_the_result(talk: Talk, room: Room) -> None:
    shot = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "The screen:"}, IMAGE]}
    conversation = talk([user("Look."), assistant(None, call("a", "screenshot")), shot, assistant("I see."), user("So?")])
    total = room(1).ruler.total(conversation.messages)

    made = Emergency().apply(conversation, room(total - 20))

    assert made.messages[2].text == "The screen:\n[image cut to fit]"
    assert made.messages[2].parts[0].call_id == "a"  # type: ignore[union-attr]
    assert sum(media(made)) == 0


def test_a_live_result_larger_than_the_window_is_cut_to_fit(talk: Talk, room: Room) -> None:
    lines = [prose(12, n) for n in range(3_000)]
    lines[1_500] = "TimeoutError: the store did not answer"
    conversation = talk(
        [*agent_session(3), assistant("I run it.", call("z", "bash", command="make all")), tool("z", "\n".join(lines))]
    )

    made = Emergency().apply(conversation, room(1_500))

    assert room(1).ruler.total(made.messages) <= 1_500
    assert [m.role for m in made.messages[-2:]] == ["assistant", "tool"]
    assert made.messages[-2] is conversation.messages[-2]
    assert "TimeoutError: the store did not answer" in made.messages[-1].text
    assert any(m.text == "What is left to do?" for m in made.messages)


def test_live_arguments_become_shorter_json(talk: Talk, room: Room) -> None:
    conversation = talk(
        [user("Write it."), assistant(None, call("w", "write_file", path="a.py", content=prose(3_000))), tool("w", "ok")]
    )

    made = Emergency().apply(conversation, room(300))

    assert room(1).ruler.total(made.messages) <= 300
    assert json.loads(made.messages[1].calls[0].arguments)["path"] == "a.py"
    assert made.messages[1].calls[0].id == "w"


def test_the_last_user_message_is_never_cut(talk: Talk, room: Room) -> None:
    long = prose(600)
    conversation = talk([*agent_session(8)[:-1], user(long)])
    needed = room(1).ruler.total(talk([{"role": "system", "content": "You are a careful engineer."}, user(long)]).messages)

    fits = compact(conversation, room(needed), (Emergency(),))
    too_small = compact(conversation, room(needed - 1), (Emergency(),))

    assert fits.conversation.messages[-1] is conversation.messages[-1]
    assert fits.tokens_after <= needed
    assert too_small.conversation is conversation
    assert too_small.reason == "floor"


def test_the_last_user_message_stays_where_the_newest_words_leave_no_room_for_the_history(talk: Talk, room: Room) -> None:
    newest = [assistant(prose(6_000), call("n", "bash", command="make")), tool("n", "ok")]
    conversation = talk([*agent_session(6)[:-1], user("Now port it to Rust."), *agent_session(4)[2:-1], *newest])

    result = compact(conversation, room(900, target=400), build("ladder"))

    assert result.tokens_after <= 900
    assert any(message.text == "Now port it to Rust." for message in result.conversation.messages)
    assert result.critical.lost == 0


def test_a_live_observation_of_a_text_agent_is_output_and_can_be_cut(talk: Talk, room: Room) -> None:
    turns = []
    for n in range(4):
        turns += [
            assistant(f"I look.\n```bash\ncat part_{n}.txt\n```"),
            user("OBSERVATION:\n" + prose(900 if n < 3 else 9_000, n)),
        ]
    conversation = talk([user("Find the sum."), *turns])

    made = Emergency().apply(conversation, room(800))

    assert room(1).ruler.total(made.messages) <= 800
    assert made.messages[-1].role == "user"
    assert made.messages[-1].text.startswith("OBSERVATION:")


SHELL = {"role": "system", "content": "You work in a shell. Answer with one command in a ```bash block."}
ACTION = assistant("I look.\n```bash\ncat part_0.txt\n```")


@pytest.mark.parametrize(
    ("system", "action", "printed", "is_cut"),
    [
        (SHELL, ACTION, "<returncode>0</returncode>\n<output>\n" + prose(3_000), True),
        (SHELL, ACTION, prose(3_000) + "\n(Open file: n/a)\n(Current directory: /app)\nbash-$", True),
        (SHELL, ACTION, "Here is the log of our server, what is wrong with it?\n" + prose(3_000), False),
        (SHELL, assistant("Which file?"), "OBSERVATION:\n" + prose(3_000), False),
        ({"role": "system", "content": "Be kind."}, ACTION, "OBSERVATION:\n" + prose(3_000), False),
    ],
)
def test_the_first_observation_of_an_evident_text_agent_can_be_cut_and_a_persons_words_never(
    talk: Talk, room: Room, system: dict[str, Any], action: dict[str, Any], printed: str, is_cut: bool
) -> None:
    conversation = talk([system, user("Find the sum."), action, user(printed)])

    result = compact(conversation, room(1_500, target=700), build("ladder"))

    assert (result.tokens_after <= 1_500) is is_cut
    assert (result.conversation.messages[-1] is conversation.messages[-1]) is not is_cut
    assert result.critical.lost == 0


def test_reasoning_is_on_all_that_stays_or_on_none(talk: Talk, room: Room) -> None:
    def thinking(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
        return {**assistant(text, *calls), "reasoning_content": prose(400)}

    steps = [m for n in range(6) for m in (thinking("One.", call(f"c{n}", "bash", command="ls")), tool(f"c{n}", prose(90, n)))]
    conversation = talk([user("Go."), *steps])

    for usable in (60, 150, 400):
        made = Emergency().apply(conversation, room(usable))

        spoken = [message for message in made.messages if message.role == "assistant"]
        assert room(1).ruler.total(made.messages) <= usable
        assert len({any(isinstance(part, Opaque) for part in message.parts) for message in spoken}) == 1


def test_the_floor_is_what_cannot_be_removed(talk: Talk, room: Room) -> None:
    short = talk([{"role": "system", "content": "Be brief."}, user("What now?")])
    long = talk([{"role": "system", "content": "Be brief."}, *agent_session(9)[1:-1], user("What now?")])

    assert floor(long, room(1)) == floor(short, room(1)) == room(1).ruler.total(short.messages)


def test_a_giant_reply_in_the_newest_step_is_cut_in_its_middle(talk: Talk, room: Room) -> None:
    conversation = talk([user("Go."), assistant(prose(5_000), call("a", "bash", command="ls")), tool("a", "x")])

    made = Emergency().apply(conversation, room(200))

    assert room(1).ruler.total(made.messages) <= 200
    assert "characters cut …]" in made.messages[1].text


def test_something_that_is_said_stays_beside_a_late_instruction(talk: Talk, room: Room) -> None:
    conversation = talk(
        [assistant("One. " + prose(300)), assistant("Two. " + prose(300, 1)), {"role": "system", "content": "Now stop."}]
    )

    made = compact(conversation, room(90), (Emergency(),))

    assert made.tokens_after <= 90
    assert [message.role for message in made.conversation.messages][-1] == "system"
    assert any(not message.is_instruction for message in made.conversation.messages)


def test_results_of_a_batch_that_cost_more_together_than_alone_are_cut_until_they_fit(talk: Talk, room: Room) -> None:
    rows = "[" + ", ".join(f'{{"id": {i}, "state": "ok", "value": {i}.5}}' for i in range(22)) + "]"
    calls = [call(name, "search", path="app/a.py") for name in "abc"]
    conversation = talk([assistant(None, *calls), tool("a", rows), tool("b", "[]"), tool("c", "")])
    budget = room(room(1).ruler.total(conversation.messages) - 15)

    made = Emergency().apply(conversation, budget)

    assert budget.ruler.total(made.messages) <= budget.usable
    assert made.messages[1].text.startswith('[{"id":0,"state":"ok","value":0.5}')
    assert len(made.messages[1].text) > 200
    assert made.messages[2:] == conversation.messages[2:]


def test_of_a_batch_beside_long_instructions_no_more_is_cut_than_is_too_much(talk: Talk, room: Room) -> None:
    rows = "[" + ", ".join(f'{{"id": {i}, "state": "ok", "value": {i}.5}}' for i in range(22)) + "]"
    calls = [call(name, "write", path="app/a.py", content=prose(300)) for name in "abc"]
    system = {"role": "system", "content": prose(6_000)}
    conversation = talk([system, assistant(None, *calls), tool("a", rows), tool("b", "[]"), tool("c", "")])
    budget = room(room(1).ruler.total(conversation.messages) - 15)

    made = Emergency().apply(conversation, budget)

    assert budget.ruler.total(made.messages) <= budget.usable
    assert len(made.messages[2].text) > 200
    assert made.messages[1] is conversation.messages[1]


def test_of_a_result_cut_to_nothing_the_length_that_it_had_is_told_however_often_it_is_cut(talk: Talk, room: Room) -> None:
    calls = [call("a", "bash", command="cat a"), call("b", "bash", command="cat b")]
    conversation = talk([user("Go."), assistant(None, *calls), tool("a", "ab " * 900_000), tool("b", "cd " * 40_000)])

    made = Emergency().apply(conversation, room(1))

    assert [message.text for message in made.messages[2:]] == ["[2,700,000 characters cut]", "[120,000 characters cut]"]
    assert Emergency().apply(made, room(1)) is made
    assert floor(conversation, room(1)) == room(1).ruler.total(made.messages)

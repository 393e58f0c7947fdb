"""Redundancy goes; nothing that is not said elsewhere does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builders import assistant, call, prose, tool, user

from proxy.compaction.snip import Snip, clean
from proxy.conversation import Conversation, Opaque
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]

FILE = "\n".join(f"row {i} of the ledger holds {i * 7}" for i in range(60))


def read(n: int, text: str, path: str = "ledger.txt") -> list[dict[str, Any]]:
    return [assistant(None, call(f"c{n}", "read_file", path=path)), tool(f"c{n}", text)]


def texts(talk: Talk, room: Room, messages: list[dict[str, Any]], **settings: bool) -> list[str]:
    return [message.text for message in Snip(**settings).apply(talk(messages), room(10_000)).messages]


def test_of_equal_results_the_newest_stays(talk: Talk, room: Room) -> None:
    said = texts(talk, room, [user("Go."), *read(1, FILE, "a"), *read(2, FILE, "b"), assistant("Equal."), user("So?")])

    assert said[2] == "[the same output came again later; 1,832 characters of read_file cut here]"
    assert said[4] == FILE


def test_a_read_that_was_made_again_is_superseded(talk: Talk, room: Room) -> None:
    newer = FILE + "\nrow 60 of the ledger is new"

    said = texts(talk, room, [user("Go."), *read(1, FILE), *read(2, newer), assistant("Changed."), user("So?")])

    assert said[2] == "[the same call was made again later; 1,832 characters of read_file cut here]"
    assert said[4] == newer


def test_a_read_that_later_failed_is_kept(talk: Talk, room: Room) -> None:
    said = texts(
        talk,
        room,
        [user("Go."), *read(1, FILE), *read(2, "Error: no such file ledger.txt" + " " * 200), assistant("Gone."), user("So?")],
    )

    assert said[2] == FILE


def test_a_run_that_was_made_again_is_not_a_read(talk: Talk, room: Room) -> None:
    def run(n: int, text: str) -> list[dict[str, Any]]:
        return [assistant(None, call(f"c{n}", "bash", command="pytest -q")), tool(f"c{n}", text)]

    said = texts(talk, room, [user("Go."), *run(1, prose(80, 1)), *run(2, prose(80, 2)), assistant("Ran."), user("So?")])

    assert said[2] == prose(80, 1)


def test_a_shell_command_that_only_reads_is_a_read(talk: Talk, room: Room) -> None:
    def cat(n: int, text: str) -> list[dict[str, Any]]:
        return [assistant(None, call(f"c{n}", "bash", command="cd app && cat ledger.txt | head -50")), tool(f"c{n}", text)]

    said = texts(talk, room, [user("Go."), *cat(1, prose(80, 1)), *cat(2, prose(80, 2)), assistant("Read."), user("So?")])

    assert said[2].startswith("[the same call was made again later;")


@pytest.mark.parametrize(
    ("noisy", "quiet"),
    [
        ("\x1b[1;31mred\x1b[0m text", "red text"),
        ("10%\r50%\r100% done\nnext", "100% done\nnext"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("plain", "plain"),
    ],
)
def test_terminal_noise_is_what_a_terminal_would_not_show(noisy: str, quiet: str) -> None:
    assert clean(noisy) == quiet


def test_an_empty_turn_between_two_assistant_turns_goes(talk: Talk, room: Room) -> None:
    said = texts(talk, room, [user("Go."), assistant("One."), assistant(""), assistant("Two."), user("So?")])

    assert said == ["Go.", "One.", "Two.", "So?"]


def test_an_empty_turn_that_keeps_two_user_messages_apart_stays(talk: Talk, room: Room) -> None:
    said = texts(talk, room, [user("Go."), assistant(""), user("On."), assistant("Yes."), user("So?")])

    assert said == ["Go.", "", "On.", "Yes.", "So?"]


def test_of_empty_turns_among_calls_one_stays_to_keep_two_user_messages_apart(talk: Talk, room: Room) -> None:
    messages = [user("Go."), *read(1, "1"), assistant(""), *read(2, "2"), assistant(""), user("So?")]

    assert texts(talk, room, messages) == ["Go.", "", "1", "", "2", "", "So?"]


def thinking(text: str, **fields: Any) -> dict[str, Any]:
    return {**assistant(text), **fields}


def kinds(talk: Talk, room: Room, messages: list[dict[str, Any]]) -> list[int]:
    made = Snip().apply(talk(messages), room(10_000))
    return [sum(isinstance(part, Opaque) for part in message.parts) for message in made.messages]


def test_reasoning_of_finished_turns_goes_where_the_new_turn_has_none(talk: Talk, room: Room) -> None:
    messages = [
        user("Go."),
        thinking("One.", reasoning_content="long thought"),
        thinking("Two.", reasoning_content="more"),
        user("So?"),
    ]

    assert kinds(talk, room, messages) == [0, 0, 0, 0]


def test_reasoning_goes_from_all_or_from_none(talk: Talk, room: Room) -> None:
    messages = [user("Go."), thinking("One.", reasoning_content="old"), user("So?"), thinking("Two.", reasoning_content="new")]

    assert kinds(talk, room, messages) == [0, 1, 0, 1]


def test_signed_thinking_of_finished_turns_goes_whole_and_the_newest_stays_whole(talk: Talk, room: Room) -> None:
    block = [{"type": "thinking", "thinking": "hm", "signature": "c2lnbmVk"}]
    messages = [user("Go."), thinking("One.", thinking_blocks=block), user("So?"), thinking("Two.", thinking_blocks=block)]

    assert kinds(talk, room, messages) == [0, 0, 0, 1]

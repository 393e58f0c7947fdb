"""Who speaks in a user message: a person, the world, or a client's machinery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builders import assistant, call, tool, user

from proxy.compaction.voices import is_notice, voices
from proxy.conversation import Conversation

Talk = Callable[..., Conversation]


def test_with_tools_user_messages_are_requests(talk: Talk) -> None:
    messages = [user("Fix it."), assistant(None, call("a", "bash", command="ls")), tool("a", "x"), user("Now the tests.")]

    assert voices(talk(messages).steps) == ("request", "assistant", "request")


def test_a_text_agents_user_messages_are_observations_after_its_first_turn(talk: Talk) -> None:
    messages: list[dict[str, Any]] = [user("Find the port.")]
    for n in range(4):
        messages += [assistant(f"I look.\n```bash\ncat part_{n}\n```"), user(f"port: {n}")]

    assert voices(talk(messages).steps) == ("request", *("assistant", "observation") * 4)


def test_a_chat_about_code_is_no_agent(talk: Talk) -> None:
    messages: list[dict[str, Any]] = []
    for n in range(4):
        messages += [user(f"How do I do {n}?"), assistant(f"You would write {n}, as the manual says.")]

    assert set(voices(talk(messages).steps)) == {"request", "assistant"}


def test_named_speakers_are_the_world_once_the_assistant_has_spoken(talk: Talk) -> None:
    messages = [
        user("Which hikes are best?"),
        assistant("I ask the others."),
        {**user("exitcode: 0"), "name": "Computer_terminal"},
        user("And the shortest?"),
    ]

    assert voices(talk(messages).steps) == ("request", "assistant", "observation", "request")


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("<system-reminder>Be brief.</system-reminder>", True),
        ("<command-name>/model</command-name>\n  <command-args></command-args>", True),
        ("[Request interrupted by user]", True),
        ("<system-reminder>Be brief.</system-reminder> Fix the loader.", False),
        ("<task>Fix the loader.</task>", False),
        ("<system-reminder>never closed", False),
        ("Fix the loader.", False),
    ],
)
def test_what_a_clients_machinery_wrote_is_a_notice(text: str, notice: bool) -> None:
    assert is_notice(text) is notice

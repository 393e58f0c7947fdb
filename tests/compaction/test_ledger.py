"""What the ledger keeps, merges and lets go."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from builders import assistant, call, tool, user

from proxy import tokens
from proxy.compaction import ledger
from proxy.compaction.ledger import EMPTY, Ledger
from proxy.conversation import Conversation

Talk = Callable[..., Conversation]
RULER = tokens.ruler("gpt-4o", {})

SESSION: list[dict[str, Any]] = [
    user("Fix the failing import in app/loader.py. Never touch the migrations."),
    assistant("Let me run the tests.", call("c1", "bash", command="pytest -q")),
    tool("c1", "E   ModuleNotFoundError: No module named 'loader_core'\n1 failed, 3 passed in 0.2s"),
    assistant("I'll use a relative import instead of the package.", call("c2", "edit_file", path="app/loader.py", text="x = 1")),
    tool("c2", "edited"),
    assistant(None, call("c3", "bash", command="pytest -q")),
    tool("c3", "4 passed in 0.2s"),
    assistant("The import is fixed and all tests pass."),
    user("Also rename read_rows to load_rows."),
]


def read(talk: Talk, messages: list[dict[str, Any]], previous: Ledger = EMPTY) -> Ledger:
    return ledger.extract(talk(messages).steps, previous)


def test_a_session_is_read_into_its_ledger(talk: Talk) -> None:
    book = read(talk, SESSION)

    assert book.goal == "Fix the failing import in app/loader.py. Never touch the migrations."
    assert book.constraints == ("Never touch the migrations.",)
    assert [(request.text, request.answered) for request in book.user_requests] == [
        ("Fix the failing import in app/loader.py. Never touch the migrations.", True),
        ("Also rename read_rows to load_rows.", False),
    ]
    assert [(use.path, use.operations) for use in book.files] == [("app/loader.py", ("edit",))]
    assert [(command.tool, command.outcome) for command in book.commands] == [("edit_file", "ok"), ("bash", "ok")]
    assert book.decisions == ("I'll use a relative import instead of the package.",)
    assert book.conclusions == ("The import is fixed and all tests pass.",)
    assert book.tools == ("bash", "edit_file")
    assert book.folded_messages == 9


def test_an_error_is_resolved_when_the_same_command_goes_well(talk: Talk) -> None:
    failing = read(talk, SESSION[:3])
    mended = read(talk, SESSION)

    assert [failure.first for failure in failing.unresolved] == [
        "E   ModuleNotFoundError: No module named 'loader_core'",
        "1 failed, 3 passed in 0.2s",
    ]
    assert mended.unresolved == ()
    assert {failure.resolved_by for failure in mended.errors} == {"bash command=pytest -q"}


def test_errors_that_differ_in_numbers_only_are_one(talk: Talk) -> None:
    text = "\n".join(f"ValueError: row {n} is empty" for n in range(40))

    book = read(talk, [assistant(None, call("a", "bash", command="load")), tool("a", text)])

    assert [(failure.first, failure.last, failure.count) for failure in book.errors] == [
        ("ValueError: row 0 is empty", "ValueError: row 39 is empty", 40)
    ]


def test_reading_in_two_parts_keeps_what_one_part_held(talk: Talk) -> None:
    steps = talk(SESSION).steps
    at_once = ledger.extract(steps)
    in_parts = ledger.extract(steps[4:], ledger.extract(steps[:4]))

    assert in_parts == at_once


def test_what_must_not_be_forgotten_outlives_a_thousand_commands(talk: Talk) -> None:
    more: list[dict[str, Any]] = []
    for n in range(1_000):
        more += [assistant(None, call(f"x{n}", "bash", command=f"echo {n}")), tool(f"x{n}", "fine")]

    book = read(talk, more, read(talk, [*SESSION[:3], user("Keep the log format.")]))

    assert book.goal.startswith("Fix the failing import")
    assert "Never touch the migrations." in book.constraints
    assert "Keep the log format." in [request.text for request in book.open_requests]
    assert len(book.unresolved) == 2
    assert len(book.commands) == 60
    assert book.commands[-1].arguments == "command=echo 999"


def test_a_very_long_request_is_kept_by_its_ends(talk: Talk) -> None:
    book = read(talk, [user("Begin here. " + "filler words " * 2_000 + "The end matters.")])

    assert book.user_requests[0].text.startswith("Begin here.")
    assert book.user_requests[0].text.endswith("The end matters.")
    assert len(book.user_requests[0].text) <= 2_400


def test_arguments_that_are_no_object_do_no_harm(talk: Talk) -> None:
    broken = call("a", "bash", command="x")
    broken["function"]["arguments"] = '["not", "an", "object"'

    book = read(talk, [assistant(None, broken), tool("a", "done")])

    assert [(command.tool, command.arguments) for command in book.commands] == [("bash", '["not", "an", "object"')]


def test_brief_is_one_line_of_requests_tools_and_findings(talk: Talk) -> None:
    text = ledger.render(read(talk, SESSION), style="brief", max_tokens=200, ruler=RULER)

    assert text == (
        "User requests: Fix the failing import in app/loader.py., Also rename read_rows to load_rows. . "
        "Tools used: bash, edit_file. Key findings: The import is fixed and all tests pass."
    ).replace(" . Tools", ". Tools")


def test_blocks_name_status_files_and_what_is_in_progress(talk: Talk) -> None:
    text = ledger.render(read(talk, SESSION), style="blocks", max_tokens=300, ruler=RULER)

    assert "=== Project status ===\n- I'll use a relative import" in text
    assert "=== Key files ===\n- app/loader.py" in text
    assert "=== In progress ===\nAlso rename read_rows to load_rows." in text


def test_json_has_the_seeds_fields(talk: Talk) -> None:
    found = json.loads(ledger.render(read(talk, SESSION), style="json", max_tokens=300, ruler=RULER))

    assert found == {
        "type": "compressed_history",
        "summary": "The import is fixed and all tests pass.",
        "decisions": ["I'll use a relative import instead of the package."],
        "files_touched": ["app/loader.py"],
        "active_task": "Also rename read_rows to load_rows.",
        "next_step": "I'll use a relative import instead of the package.",
    }


@pytest.mark.parametrize("style", ["detailed", "brief", "blocks", "json"])
@pytest.mark.parametrize("most", [80, 160, 400])
def test_a_rendering_keeps_to_its_size(talk: Talk, style: ledger.Style, most: int) -> None:
    wordy = [*SESSION, *(user(f"Please also check part {n} of the report, and say what you find there.") for n in range(60))]

    assert RULER.text(ledger.render(read(talk, wordy), style=style, max_tokens=most, ruler=RULER)) <= most


def test_detailed_leaves_out_the_least_needed_first(talk: Talk) -> None:
    book = read(talk, SESSION)

    text = ledger.render(book, style="detailed", max_tokens=60, ruler=RULER)

    assert "Never touch the migrations." in text
    assert "Also rename read_rows to load_rows." in text
    assert "Commands:" not in text

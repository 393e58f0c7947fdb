"""The checks themselves, on conversations that are broken by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction import compact, summary
from proxy.compaction.folding import gaps_closed, in_turns, moved_to_gaps
from proxy.compaction.strategies import build
from proxy.compaction.validation import Rules, broken, missing, needles, rules_for, trouble, violations
from proxy.compaction.voices import AFTER, BEFORE, DONE
from proxy.conversation import Conversation, Message, Opaque, Text, ToolCall, ToolResult, said
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]
CALL = call("a", "bash", command="ls")


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([user("Go."), assistant(None, CALL), tool("a", "x")], {}),
        ([user("Go."), assistant(None, CALL)], {"unanswered": 1, "ends_with_assistant": 1}),
        ([user("Go."), assistant(None, CALL), user("On.")], {"unanswered": 1}),
        ([user("Go."), assistant(None, CALL), tool("b", "x")], {"unanswered": 1, "orphan": 1}),
        ([user("Go."), tool("a", "x")], {"orphan": 1}),
        ([user("Go."), assistant(None, CALL), tool("a", "x"), tool("a", "x")], {"orphan": 1}),
        ([user("")], {"empty": 1}),
        (
            [user("Go."), assistant(None, {**CALL, "function": {"name": "bash", "arguments": "ls"}}), tool("a", "x")],
            {"arguments": 1},
        ),
        (
            [user("Go."), assistant(None, {**CALL, "function": {"name": "bash", "arguments": '["ls"]'}}), tool("a", "x")],
            {"arguments": 1},
        ),
        ([user("Go."), {"role": "system", "content": "Stop."}, user("On.")], {"instructions": 1}),
        ([user("Go."), {**assistant("1"), "reasoning_content": "r"}, user("On."), assistant("2"), user("So?")], {"reasoning": 1}),
        ([{"role": "system", "content": "S"}], {"nothing_said": 1}),
    ],
)
def test_each_rule_counts_what_breaks_it(talk: Talk, messages: list[dict[str, Any]], found: dict[str, int]) -> None:
    assert violations(talk(messages)) == found


@pytest.mark.parametrize(
    ("roles", "count"),
    [("uaua", 0), ("uuau", 1), ("au", 1), ("uaau", 1), ("u", 0), ("", 0)],
)
def test_turns_count_only_where_they_are_wanted(talk: Talk, roles: str, count: int) -> None:
    messages = [user("x") if role == "u" else assistant("y") for role in roles] or [{"role": "system", "content": "S"}]

    assert violations(talk(messages), Rules(alternate=True))["alternation"] == count
    assert "alternation" not in violations(talk(messages))


def test_calls_and_results_do_not_count_as_turns(talk: Talk) -> None:
    messages = [user("Go."), assistant(None, CALL), tool("a", "x"), assistant("Done."), user("So?")]

    assert violations(talk(messages), Rules(alternate=True))["alternation"] == 0


def test_templates_are_named_in_the_configuration() -> None:
    assert rules_for(("openai", "alternation")) == Rules(alternate=True)
    assert rules_for(("openai", "one_system", "deepseek")) == Rules()


def test_what_came_broken_may_go_out_as_broken(talk: Talk) -> None:
    before = talk([user("Go."), tool("x", prose(50)), assistant("Ok."), user("So?")])

    assert broken(before, before.with_messages([before.messages[0], *before.messages[1:2], before.messages[3]])) is None


def test_what_a_person_said_last_stays_whatever_else_may_change(talk: Talk) -> None:
    before = talk([user("Go."), assistant(None, CALL), tool("a", prose(50)), assistant("Hm.", CALL), tool("a", prose(50))])
    shorter = before.messages[4].with_parts([ToolResult("a", "cut")])
    live = [before.messages[3], shorter]

    def rule(*messages: Message, may_change: bool = True) -> str | None:
        return broken(before, before.with_messages(messages), live_turn_may_change=may_change)

    assert rule(before.messages[0], *live) is None
    assert rule(before.messages[0], *live, may_change=False) == "live_turn"
    assert rule(said("user", "Something else."), *live) == "live_turn"
    assert rule(*before.messages[:3], said("assistant", "Done.")) == "live_turn"
    assert rule(before.messages[0], said("assistant", "Hm."), said("user", "cut")) == "live_turn"
    assert rule(before.messages[0], before.messages[3].with_parts([ToolCall("b", "bash", "{}")]), shorter) == "live_turn"
    assert rule(before.messages[0], live[0], before.messages[4], said("user", "More.")) == "live_turn"
    assert rule(before.messages[0], *before.messages[1:4], shorter, may_change=False) == "live_turn"


def test_an_observation_that_has_just_come_may_be_cut_and_an_older_one_not(talk: Talk) -> None:
    before = talk([user("Go."), assistant("```bash\nls\n```"), user(prose(50))])
    cut = before.messages[2].with_parts([Text("cut")])

    assert broken(before, before.with_messages([*before.messages[:2], cut]), live_turn_may_change=True) is None
    assert broken(before, before.with_messages([*before.messages[:2], cut])) == "live_turn"
    assert broken(before, before.with_messages(before.messages[:2]), live_turn_may_change=True) == "live_turn"


def test_a_summary_of_ours_is_nobodys_last_words(talk: Talk) -> None:
    came = talk([user("Go."), assistant(None, CALL), tool("a", "x")])
    before = Conversation((SUMMARY, *came.messages[1:]))

    after = before.with_messages([said("user", "another summary"), *came.messages[1:]])

    assert broken(before, after, live_turn_may_change=True) is None


def test_half_a_thought_is_refused(talk: Talk) -> None:
    before = talk(
        [
            user("Go."),
            {**assistant("1"), "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "abc"}]},
            user("So?"),
        ]
    )
    thought = next(part for part in before.messages[1].parts if isinstance(part, Opaque))
    edited = before.messages[1].with_parts(
        [*before.messages[1].parts[:1], Opaque(thought.kind, b'[{"type":"thinking"}]', thought.place)]
    )

    assert broken(before, before.with_messages([before.messages[0], edited, before.messages[2]])) == "reasoning"


def test_reasoning_taken_from_some_only_is_refused(talk: Talk) -> None:
    before = talk(
        [
            user("Go."),
            {**assistant("1"), "reasoning_content": "r"},
            user("On."),
            {**assistant("2"), "reasoning_content": "s"},
            user("So?"),
        ]
    )
    bare = before.messages[1].with_parts(before.messages[1].parts[:1])

    assert broken(before, before.with_messages([before.messages[0], bare, *before.messages[2:]])) == "reasoning"


# --- needles -------------------------------------------------------------------------------------------------------------


def wanted(talk: Talk, messages: list[dict[str, Any]], size: int = 4_000) -> set[tuple[str, str]]:
    return {(needle.kind, needle.quote) for needle in needles(talk(messages), size)}


def test_errors_requests_constraints_and_the_conclusion_must_survive(talk: Talk) -> None:
    found = wanted(
        talk, [*agent_session(3)[:-1], assistant("It fails.\nThe module was never installed."), user("Install it, please.")]
    )

    assert {
        ("constraint", "Never touch the migrations."),
        ("request", "Fix the failing import in app/loader.py."),
        ("request", "Install it, please."),
        ("error", "ModuleNotFoundError: No module named 'loader_core'"),
        ("conclusion", "The module was never installed."),
    } <= found


@pytest.mark.parametrize(
    "sentence",
    [
        "Always run the tests.",
        "不要修改迁移文件",
        "必ずテストを実行してください",
        "Ändere niemals die Datenbank",
        "Ne touche jamais aux migrations",
        "Nunca borres la tabla",
    ],
)
def test_constraints_are_known_in_several_languages(talk: Talk, sentence: str) -> None:
    assert ("constraint", sentence) in wanted(talk, [user(sentence), assistant("Ok."), user("So?")])


def test_an_error_that_a_later_run_of_the_same_call_does_not_show_is_healed(talk: Talk) -> None:
    def ran(n: int, text: str) -> list[dict[str, Any]]:
        return [assistant(None, call(f"c{n}", "bash", command="pytest")), tool(f"c{n}", text)]

    found = wanted(
        talk, [user("Go."), *ran(1, "ValueError: bad row"), *ran(2, "all 12 tests ran"), assistant("Good."), user("So?")]
    )

    assert not any(kind == "error" for kind, _ in found)


def test_neither_a_summary_of_ours_nor_an_observation_asks_for_anything(talk: Talk) -> None:
    summed_up = summary.write(3, (), [("Kept", ["Please add a cache."])])
    conversation = Conversation((summed_up, *talk([assistant("Ok."), user("So?")]).messages))
    shell = {"role": "system", "content": "You work in a shell."}
    printed = talk([shell, user("Go."), assistant("```\nls\n```"), user("OBSERVATION:\nPlease always run make first.")])

    assert [needle.quote for needle in needles(conversation, 4_000) if needle.kind == "request"] == ["So?"]
    assert [needle.quote for needle in needles(printed, 4_000) if needle.kind in ("request", "constraint")] == ["Go."]


@pytest.mark.parametrize(
    ("line", "is_trouble"),
    [
        ("ValueError: bad row 17", True),
        ("fatal: not a git repository", True),
        ("cat: x: No such file or directory", True),
        ("错误：找不到文件 abc", True),
        ("    raise ValueError('bad row')", False),
        ("  12→ except KeyError:", False),
        ("+    log.error('failed')", False),
        ("12 passed, 0 errors in 3.1s", False),
        ("error_count = 17", False),
    ],
)
def test_trouble_is_told_from_code_about_trouble(line: str, is_trouble: bool) -> None:
    assert bool(trouble("some output\n" + line + "\nmore output")) is is_trouble


def test_needles_are_bounded(talk: Talk) -> None:
    found = needles(talk([user(f"Never touch file number {n}. " + prose(300, n)) for n in range(200)]), 1_000)

    assert sum(len(needle.quote.encode()) for needle in found) <= 1_000
    assert all(len(needle.quote) <= 160 for needle in found)


def test_a_needle_is_found_in_its_own_message_in_other_words_of_it_and_across_lines(talk: Talk) -> None:
    conversation = talk([user("Never touch\nthe migrations folder."), assistant("Ok."), user("So?")])
    found = needles(conversation, 4_000)
    rest = conversation.messages[1:]

    assert missing(found, conversation) == []
    assert {needle.quote for needle in missing(found, Conversation(rest))} == {"Never touch", "the migrations folder."} & {
        n.quote for n in found
    }
    assert missing(found, Conversation((said("user", "Quoted: Never   touch the migrations folder."), *rest))) == []


def test_what_an_earlier_summary_holds_must_survive_the_next_event(talk: Talk, room: Room) -> None:
    first = compact(talk(agent_session(14)), room(1_800, target=1_500), build("ladder")).conversation
    second = Conversation((*first.messages, said("assistant", "Ok."), said("user", "On.")))

    found = {(needle.kind, needle.quote) for needle in needles(second, 9_000)}

    assert any(summary.is_summary(message) for message in first.messages)
    assert ("error", "ModuleNotFoundError: No module named 'loader_core'") in found


def test_what_the_live_turn_refers_to_must_be_told_of_beside_it(talk: Talk) -> None:
    history = [
        user("Go."),
        assistant("config/limits.yaml holds the cap of 40 rows."),
        assistant("Other things."),
        user("Edit config/limits.yaml"),
    ]
    conversation = talk(history)
    found = [needle for needle in needles(conversation, 9_000) if needle.kind == "reference"]
    tail = conversation.messages[2:]

    assert [(needle.name, needle.quote) for needle in found] == [
        ("config/limits.yaml", "config/limits.yaml holds the cap of 40 rows.")
    ]
    assert missing(found, Conversation(tail)) == found
    assert missing(found, Conversation((said("user", "config/limits.yaml: 40 rows"), *tail))) == []


# --- turns ---------------------------------------------------------------------------------------------------------------

SUMMARY = summary.write(3, (), [("Kept", ["Never touch the migrations."])])


@pytest.mark.parametrize(
    ("around", "roles", "ours"),
    [
        (([], [said("assistant", "a"), said("user", "u")]), "uau", []),
        (([], [said("user", "u")]), "uau", [BEFORE]),
        (([said("user", "t")], [said("user", "u")]), "uau", []),
        (([said("user", "t")], [said("assistant", "a"), said("user", "u")]), "uauau", [AFTER]),
        (([said("user", "t"), said("assistant", "a")], [said("user", "u")]), "uauau", [BEFORE]),
        (([said("user", "t"), said("assistant", "a")], [said("assistant", "b"), said("user", "u")]), "uauau", []),
    ],
)
def test_a_summary_takes_the_role_that_the_turns_leave_it(
    around: tuple[list[Message], list[Message]], roles: str, ours: list[str]
) -> None:
    made = in_turns(Conversation((*around[0], SUMMARY, *around[1])))

    assert "".join(message.role[0] for message in made.messages) == roles
    assert sum(summary.is_summary(message) for message in made.messages) == 1
    assert [message.text for message in made.messages if message.text in (BEFORE, AFTER)] == ours
    assert in_turns(made).messages == made.messages


def test_a_summary_that_came_from_a_client_goes_out_in_its_new_role(
    talk: Talk, wire: Callable[[Conversation], list[dict[str, Any]]]
) -> None:
    came = talk([user("t"), user(SUMMARY.text), user("u")])

    made = wire(in_turns(came))

    assert [message["role"] for message in made] == ["user", "assistant", "user"]
    assert made[1]["content"] == SUMMARY.text


def test_a_summary_moves_to_where_what_it_folds_was_said() -> None:
    task, last = said("user", "t"), said("user", "u")
    asked = Message("assistant", (ToolCall("c", "read_file", "{}"),))
    answered = Message("tool", (ToolResult("c", "rows"),))

    made = in_turns(moved_to_gaps(Conversation((SUMMARY, task, asked, answered, last))))

    assert [message.role for message in made.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert made.messages[:3] == (task, asked, answered)
    assert summary.is_summary(made.messages[3])
    assert made.messages[4] is last
    assert in_turns(moved_to_gaps(made)) is made


def test_neither_a_line_of_ours_nor_a_summary_beside_it_is_a_fact_that_must_survive(talk: Talk) -> None:
    said_last = [user("Go."), assistant("It works."), user(AFTER), assistant(DONE), user("So?"), assistant(None, CALL)]
    messages = [user(BEFORE), assistant(SUMMARY.text), *said_last, tool("a", "x")]

    kept = ("constraint", "Never touch the migrations.")
    assert wanted(talk, messages) == {("conclusion", "It works."), kept, ("request", "Go."), ("request", "So?")}


def test_several_summaries_move_to_the_same_place_in_their_order() -> None:
    task, last = said("user", "t"), said("user", "u")
    later = summary.write(2, (), [("Kept", ["Run the tests."])])

    made = in_turns(moved_to_gaps(Conversation((SUMMARY, later, task, last))))

    assert [message.role for message in made.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert [message.text for message in made.messages] == ["t", SUMMARY.text, BEFORE, later.text, "u"]
    assert in_turns(moved_to_gaps(made)) is made


def test_two_user_messages_that_came_as_neighbors_are_not_parted(talk: Talk, room: Room) -> None:
    """What is folded of the first alone stands before whatever else a client says after it."""
    messages = [user(f"{prose(2_000)}\nNever touch the migrations.\n{prose(2_000)}"), user("So?")]

    made = compact(talk(messages), room(2_000, target=600), build("ladder"), rules=Rules(alternate=True)).conversation

    assert [message.role for message in made.messages] == ["user", "assistant", "user", "user"]
    assert summary.is_summary(made.messages[1])


@pytest.mark.parametrize(
    ("roles", "all_roles", "ours"),
    [
        ("uau", "uau", []),
        ("uu", "uau", [DONE]),
        ("uuu", "uauau", [DONE, DONE]),
        ("uctu", "uctau", [DONE]),
        ("uacta", "uactua", [AFTER]),
        ("au", "uau", [BEFORE]),
        ("sctau", "sctuau", [BEFORE]),
        ("uct", "uct", []),
    ],
)
def test_a_line_of_ours_stands_where_one_would_speak_twice(roles: str, all_roles: str, ours: list[str]) -> None:
    """c: a call, t: its result, s: an instruction."""
    kinds = {
        "u": said("user", "x"),
        "a": said("assistant", "x"),
        "s": said("system", "x"),
        "c": Message("assistant", (ToolCall("c", "read_file", "{}"),)),
        "t": Message("tool", (ToolResult("c", "rows"),)),
    }
    came = Conversation(tuple(kinds[role] for role in roles))

    made = gaps_closed(came)

    assert "".join("c" if message.calls else message.role[0] for message in made.messages) == all_roles
    assert [message.text for message in made.messages if message.text in (BEFORE, AFTER, DONE)] == ours
    assert gaps_closed(made) is made
    assert ours or made is came

"""Strategies by name, settings by field, and the seeds' blocks."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction import compact, compact_in_place
from proxy.compaction.autocompact import AutoCompact
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.merging import Auto, MergedTurns, choices, literal_choice, most_calls_in_a_turn
from proxy.compaction.microcompact import Microcompact
from proxy.compaction.pipeline import Admitted
from proxy.compaction.strategies import STRATEGIES, build
from proxy.compaction.voices import AFTER, BEFORE
from proxy.conversation import Conversation
from proxy.errors import ConfigError
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]


def test_the_ladder_has_the_seeds_order() -> None:
    assert [layer.name for layer in build("ladder")] == [
        "tool_result_budget", "snip", "microcompact", "context_collapse", "auto_compact", "auto_compact", "emergency",
    ]  # fmt: skip


def test_noop_does_nothing(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))

    result = compact(conversation, room(1_000), build("noop"))

    assert build("noop") == ()
    assert result.conversation is conversation


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "noop"])
def test_every_strategy_makes_a_session_fit(talk: Talk, room: Room, name: str) -> None:
    result = compact(talk(agent_session(40)), room(2_500, target=2_000), build(name))

    assert result.tokens_after <= 2_000
    assert result.critical.lost == 0


def test_settings_are_the_fields_of_the_layer() -> None:
    layers = build("ladder", layers={"microcompact": {"keep_recent": 3}, "tool_result_budget": {"per_result": 500, "head": 0.5}})

    assert layers[2] == Microcompact(keep_recent=3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"microcompat": {}}, ["compaction.layers", "'microcompat'", "'microcompact'"]),
        ({"microcompact": {"keep_recnt": 3}}, ["compaction.layers.microcompact", "'keep_recnt'", "'keep_recent'"]),
        ({"microcompact": {"keep_recent": "ten"}}, ["compaction.layers.microcompact.keep_recent", "'ten'", "whole number"]),
        ({"microcompact": {"keep_recent": -1}}, ["compaction.layers.microcompact.keep_recent", "-1"]),
        ({"microcompact": {"keep_recent": True}}, ["compaction.layers.microcompact.keep_recent", "True"]),
        ({"tool_result_budget": {"head": 1.5}}, ["compaction.layers.tool_result_budget.head", "1.5", "between 0 and 1"]),
        ({"context_collapse": {"style": "poem"}}, ["compaction.layers.context_collapse.style", "'poem'", "detailed"]),
        ({"context_collapse": {"role": "system"}}, ["compaction.layers.context_collapse.role", "'system'", "assistant"]),
        ({"context_collapse": {"key": "abc"}}, ["compaction.layers.context_collapse", "'key'"]),
        ({"snip": {"reasoning": "no"}}, ["compaction.layers.snip.reasoning", "'no'", "true nor false"]),
        ({"auto_compact": {"level": "aggressive"}}, ["compaction.layers.auto_compact", "'level'"]),
        ({"emergency": {"speed": 1}}, ["compaction.layers.emergency", "'speed'"]),
    ],
)
def test_a_wrong_setting_is_named_with_the_nearest_right_one(settings: dict[str, dict[str, object]], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        build("noop", layers=settings)

    assert all(word in str(raised.value) for word in words)


def test_an_unknown_strategy_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"compaction.strategy: there is no 'lader'; the nearest is 'ladder'"):
        build("lader")


SEED_COLLAPSE = {"enabled": True, "keepRecent": 10, "triggerThreshold": 150000, "summaryStyle": "detailed"}
SEED_AUTO = {
    "enabled": True, "triggerThreshold": 180000, "aggressiveThreshold": 190000, "keepRecent": 10, "preserveErrors": True,
    "preserveUserRequests": True,
}  # fmt: skip


def test_the_seeds_blocks_are_taken_as_they_stand() -> None:
    layers = build("ladder", context_collapse=SEED_COLLAPSE, auto_compact=SEED_AUTO)

    assert layers[3:6] == (
        Admitted(ContextCollapse(keep_recent=10, style="detailed"), 0.75, 150_000, 50),
        Admitted(AutoCompact(), 0.85, 180_000),
        Admitted(AutoCompact(level="aggressive", keep_recent=10), 0.90, 190_000),
    )


@pytest.mark.parametrize(
    ("usable", "tokens", "admitted"), [(196_000, 150_001, True), (196_000, 146_000, False), (100_000, 75_001, True)]
)
def test_an_absolute_threshold_is_the_least_of_itself_and_its_share(room: Room, usable: int, tokens: int, admitted: bool) -> None:
    collapse = build("ladder", context_collapse={"triggerThreshold": 150_000})[3]

    assert isinstance(collapse, Admitted)
    assert collapse.admits(tokens, 10, room(usable)) is admitted


def test_more_than_fifty_messages_admit_the_collapse_whatever_their_size(room: Room) -> None:
    collapse = build("ladder", context_collapse=SEED_COLLAPSE)[3]

    assert isinstance(collapse, Admitted)
    assert collapse.admits(100, 51, room(100_000))
    assert not collapse.admits(100, 50, room(100_000))


def test_a_block_that_is_not_enabled_takes_its_layers_out() -> None:
    layers = build("ladder", context_collapse={"enabled": False}, auto_compact={"enabled": False})

    assert [layer.name for layer in layers] == ["tool_result_budget", "snip", "microcompact", "emergency"]


@pytest.mark.parametrize(
    ("collapse", "auto", "words"),
    [
        ({"keepRecnt": 3}, None, ["contextCollapse", "'keepRecnt'", "'keepRecent'"]),
        ({"summaryStyle": "long"}, None, ["contextCollapse.summaryStyle", "'long'", "brief"]),
        ({"triggerThreshold": "150k"}, None, ["contextCollapse.triggerThreshold", "'150k'"]),
        (None, {"agressiveThreshold": 1}, ["autoCompact", "'agressiveThreshold'", "'aggressiveThreshold'"]),
        (None, {"preserveErrors": 1}, ["autoCompact.preserveErrors", "1"]),
    ],
)
def test_a_wrong_key_of_a_block_is_named(
    collapse: dict[str, object] | None, auto: dict[str, object] | None, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        build("ladder", context_collapse=collapse, auto_compact=auto)

    assert all(word in str(raised.value) for word in words)


# --- the three ways of folding, and the choice between them ------------------------------------------------------------


def chatter(turns: int, words: int = 60) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    for n in range(turns):
        messages += [
            user(f"Please add feature {n} to app/part_{n}.py."),
            assistant(f"Done: feature {n} works. " + prose(words, n)),
        ]
    return [*messages, user("What is left to do?")]


def test_merged_turns_quote_no_line_of_ours(talk: Talk, room: Room) -> None:
    made = MergedTurns().apply(talk([user(BEFORE), assistant("Yes."), user(AFTER), *chatter(20)[1:]]), room(4_000, target=1_500))

    assert "Please add feature 1 to app/part_1.py." in made.messages[0].text
    assert BEFORE not in made.messages[0].text
    assert AFTER not in made.messages[0].text


def test_merged_turns_are_one_request_and_one_result(talk: Talk, room: Room) -> None:
    made = MergedTurns().apply(talk(chatter(20)), room(4_000, target=1_500))

    assert [message.role for message in made.messages[:3]] == ["user", "assistant", "user"]
    assert "Please add feature 0 to app/part_0.py." in made.messages[0].text
    assert "Please add feature 14 to app/part_14.py." in made.messages[0].text
    assert made.messages[-1].text == "What is left to do?"


def test_key_decisions_are_three_blocks(talk: Talk, room: Room) -> None:
    made = compact(talk(agent_session(30)), room(4_000, target=1_800), build("layer2")).conversation

    text = "\n".join(message.text for message in made.messages)
    for heading in ("=== Project status ===", "=== Key files ===", "=== In progress ==="):
        assert heading in text


def test_metadata_are_one_json_object(talk: Talk, room: Room) -> None:
    made = compact(talk(agent_session(30)), room(4_000, target=1_800), build("layer3")).conversation

    text = "\n".join(message.text for message in made.messages)
    value, _ = json.JSONDecoder().raw_decode(text[text.index('{"type"') :])
    assert value["type"] == "compressed_history"
    assert {"summary", "decisions", "files_touched", "active_task", "next_step"} <= set(value)


def test_the_signals_choose_the_way(talk: Talk, room: Room) -> None:
    plain = talk(chatter(12))
    calls_only = talk([{"role": "system", "content": "Go."}, *agent_session(9)[2:-1]])
    many_calls = talk(agent_session(22, words=20))

    assert choices(plain, room(1_000)) == (1, 2, 3)
    assert choices(calls_only, room(1_000)) == (3,)
    assert choices(many_calls, room(1_000)) == (2, 3)
    assert choices(plain, room(1_000), {plain.messages[0]: 2 * 60 * 60.0 + 1}) == (2, 3)
    assert choices(plain, room(1_000), {plain.messages[0]: 2 * 60 * 60.0}) == (1, 2, 3)


def test_the_literal_choice_counts_messages_then_calls(talk: Talk) -> None:
    calls = [call(f"c{n}", "read_file", path=str(n)) for n in range(21)]
    wide = [user("Go."), assistant(None, *calls), *(tool(f"c{n}", "x") for n in range(17)), user("So?")]

    assert literal_choice(talk(chatter(11))) == 3
    assert literal_choice(talk(wide)) == 2
    assert literal_choice(talk(chatter(3))) == 1


def test_calls_are_counted_by_turn(talk: Talk) -> None:
    assert most_calls_in_a_turn(talk([*agent_session(5), *agent_session(3)[2:]])) == 5


def test_the_literal_strategy_folds_to_metadata_first(talk: Talk, room: Room) -> None:
    made = Auto(literal=True).apply(talk(chatter(12, words=150)), room(3_000, target=1_200))

    assert '"type": "compressed_history"' in made.messages[1].text


# --- what the seeds promise of a whole session ---------------------------------------------------------------------------


def working_session(steps: int, words: int, spoken_words: int = 60) -> list[dict[str, object]]:
    """`steps` calls with results, and the assistant's repeated politeness."""
    messages: list[dict[str, object]] = [user("Fix the loader. Never touch the migrations.")]
    for n in range(steps):
        spoken = f"I will now look at the next part and report back to you. Part {n} looks fine. " + prose(spoken_words, n)
        messages += [assistant(spoken, call(f"c{n}", "read_file", path=f"app/part_{n}.py")), tool(f"c{n}", prose(words, 500 + n))]
    return [*messages, assistant("All parts are read."), user("What is left to do?")]


def test_a_session_of_fifty_messages_over_the_aggressive_threshold_is_less_than_half_afterwards(talk: Talk, room: Room) -> None:
    conversation = talk(working_session(24, 6_500))
    before = room(1).ruler.total(conversation.messages)
    usable = int(before / 0.93)
    layers = build("ladder", context_collapse=SEED_COLLAPSE, auto_compact=SEED_AUTO)

    result = compact(conversation, room(usable, target=80_000, trigger=int(usable * 0.8)), layers)

    assert len(conversation.messages) == 51
    assert before > 150_000
    assert result.tokens_after <= 80_000
    assert result.critical.lost == 0
    assert result.conversation.messages[-1].text == "What is left to do?"


def test_thirty_messages_collapse_to_a_summary_and_the_recent_ones_and_save_more_than_sixty_percent(
    talk: Talk, room: Room
) -> None:
    conversation = talk([*working_session(13, 3_000, 2_500)[:-1], assistant("Read."), user("Go on?")])
    before = room(1).ruler.total(conversation.messages)

    made = ContextCollapse(keep_recent=10).apply(conversation, room(before, target=int(before * 0.375)))

    assert room(1).ruler.total(made.messages) <= before * 0.375
    assert sum("[Earlier conversation summary: " in message.text for message in made.messages) == 1
    assert made.messages[-1].text == "Go on?"


def test_a_history_in_a_list_is_compacted_in_place(talk: Talk, room: Room) -> None:
    messages = list(talk(agent_session(20)).messages)
    same = messages

    result = compact_in_place(messages, room(3_000, target=1_500), build("ladder"))

    assert messages is same
    assert tuple(messages) == result.conversation.messages
    assert result.tokens_after <= 1_500


def test_a_session_without_end_stays_within_its_window(talk: Talk, room: Room) -> None:
    messages = list(talk(agent_session(6)).messages)
    budget = room(5_000, target=2_250)

    for _ in range(12):
        compact_in_place(messages, budget, build("ladder"))
        messages += talk(agent_session(5)[2:]).messages

    assert budget.ruler.total(messages) <= 5_000
    assert any("Never touch the migrations." in message.text for message in messages)

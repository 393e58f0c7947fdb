"""What the four documents that the product began with ask for, row by row, and the tests that show it.

K: a compaction by a model's summary. L: three layers of compression. A: automatic compaction. C: collapse of the context.
X: where they contradict each other or would break a conversation, and how that is settled.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from builders import agent_session, assistant, call, chat, prose, tool, user
from checklists import unshown

from proxy import replay, tokens
from proxy.cli import explained
from proxy.compaction import compact, summary
from proxy.compaction.autocompact import AutoCompact
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.merging import Digested, MergedTurns
from proxy.compaction.microcompact import Microcompact
from proxy.compaction.pipeline import Admitted
from proxy.compaction.plan import History
from proxy.compaction.strategies import build
from proxy.compactor import Compactor
from proxy.config import Model
from proxy.conversation import Conversation
from proxy.decisions import Decision, Wish
from proxy.walk import Marks
from proxy.windows import Budget, Windows
from proxy.wire import chat_completions

ROWS: dict[str, tuple[str, ...]] = {
    # a summary by a model
    "K1": ("summarizers/test_kimi.py::test_k1_a_compaction_is_known_by_one_method",),
    "K2": ("summarizers/test_kimi.py::test_k2_every_role_and_kind_of_part_is_taken",),
    "K3": ("summarizers/test_kimi.py::test_k3_the_result_is_the_input_or_a_summary_and_the_newest_messages",),
    "K4": (
        "summarizers/test_kimi.py::test_k4_an_error_of_the_provider_reaches_the_caller",
        "summarizers/test_every_summarizer.py::test_three_failures_in_a_row_and_nobody_is_asked_for_a_while",
        "summarizers/test_adoption.py::test_where_the_summarizer_fails_the_deterministic_collapse_serves",
    ),
    "K5": (
        "summarizers/test_kimi.py::test_k5_and_k8_only_user_and_assistant_messages_count_and_the_others_go_with_their_side",
        "summarizers/test_plans.py::test_kimi_keeps_the_last_two_messages_of_people_and_assistant",
    ),
    "K6": ("summarizers/test_kimi.py::test_k6_prepare_says_what_to_ask_and_what_to_keep",),
    "K7": ("summarizers/test_kimi.py::test_k7_nothing_to_keep_or_nothing_at_all_is_left_alone",),
    "K8": ("summarizers/test_kimi.py::test_k5_and_k8_only_user_and_assistant_messages_count_and_the_others_go_with_their_side",),
    "K9": ("summarizers/test_kimi.py::test_k9_too_few_messages_ask_nobody",),
    "K10": ("summarizers/test_kimi.py::test_k10_one_user_message_with_numbered_blocks_and_the_instruction_last",),
    "K11": ("summarizers/test_kimi.py::test_k11_a_system_prompt_of_its_own_no_tools_and_nothing_but_that_message",),
    "K12": ("summarizers/test_kimi.py::test_k12_thinking_is_taken_out_on_the_way_in_and_on_the_way_out",),
    "K13": ("summarizers/test_kimi.py::test_k13_the_summary_speaks_as_the_user_after_a_marker",),
    "K14": ("summarizers/test_kimi.py::test_k14_the_tokens_of_the_question_are_recorded",),
    "K15": ("test_seeds.py::test_tokens_make_an_event_due_and_numbers_of_turns_do_not",),
    "K16": ("summarizers/test_kimi.py::test_k16_how_many_are_kept_is_a_setting",),
    "K17": (
        "summarizers/test_kimi.py::test_k17_doing_nothing_is_a_compaction_too",
        "compaction/test_strategies.py::test_noop_does_nothing",
    ),
    "K18": (
        "compaction/test_pipeline.py::test_the_target_of_the_call_goes_before_the_budgets",
        "summarizers/test_kimi.py::test_k18_the_summary_has_a_structure",
        "summarizers/test_adoption.py::test_no_request_waits_for_a_summary_and_the_deterministic_layers_serve_without_one",
        "test_seeds.py::test_a_recorded_session_is_sent_again_and_says_what_was_kept",
    ),
    "K19": (
        "summarizers/test_kimi.py::test_k19_the_role_of_the_summary_is_a_setting_and_the_answer_has_a_cap",
        "summarizers/test_every_summarizer.py::test_a_constraint_that_nobody_stated_is_taken_out_and_a_forgotten_one_put_in",
    ),
    "K20": ("summarizers/test_kimi.py::test_k20_the_strategy_knows_no_provider",),
    # three layers
    "L1": ("compaction/test_strategies.py::test_merged_turns_are_one_request_and_one_result",),
    "L2": ("test_seeds.py::test_events_may_begin_at_half_of_the_window",),
    "L3": ("test_seeds.py::test_the_second_layer_keeps_decisions_results_and_paths_and_drops_the_search_for_them",),
    "L4": (
        "compaction/test_strategies.py::test_key_decisions_are_three_blocks",
        "compaction/test_ledger.py::test_blocks_name_status_files_and_what_is_in_progress",
    ),
    "L5": (
        "compaction/test_strategies.py::test_metadata_are_one_json_object",
        "compaction/test_ledger.py::test_json_has_the_seeds_fields",
    ),
    "L6": (
        "compaction/test_strategies.py::test_the_signals_choose_the_way",
        "compaction/test_strategies.py::test_calls_are_counted_by_turn",
        "checkpoints/test_first_seen.py::test_a_session_of_more_than_two_hours_is_folded_to_key_decisions",
    ),
    "L7": (
        "compaction/test_strategies.py::test_the_literal_choice_counts_messages_then_calls",
        "compaction/test_strategies.py::test_the_literal_strategy_folds_to_metadata_first",
        "compaction/test_strategies.py::test_every_strategy_makes_a_session_fit",
    ),
    "L8": ("compaction/test_strategies.py::test_a_history_in_a_list_is_compacted_in_place",),
    "L9": (
        "test_seeds.py::test_task_files_and_plan_outlive_every_way_of_folding",
        "test_seeds.py::test_of_the_ways_that_are_enough_the_mildest_is_taken",
        "checkpoints/test_resume.py::test_a_replay_makes_the_same_checkpoints_and_ledgers",
        "test_explain_live.py::test_the_next_event_names_what_an_earlier_one_had_done",
        "summarizers/test_adoption.py::test_a_prepared_summary_is_adopted_at_the_next_event_and_kept",
    ),
    "L10": (
        "compaction/test_strategies.py::test_a_session_without_end_stays_within_its_window",
        "compaction/test_collapse.py::test_ten_compactions_in_a_row_keep_what_the_first_one_held",
    ),
    # automatic compaction
    "A1": (
        "compaction/test_strategies.py::test_the_ladder_has_the_seeds_order",
        "compaction/test_pipeline.py::test_it_stops_at_the_first_layer_that_is_enough",
    ),
    "A2": ("test_seeds.py::test_of_a_window_of_200000_standard_begins_above_170000_and_aggressive_above_180000",),
    "A3": ("test_seeds.py::test_the_last_layers_run_only_where_the_milder_ones_were_not_enough",),
    "A4": (
        "compaction/test_autocompact.py::"
        "test_standard_leaves_user_messages_byte_identical_and_takes_repetition_out_of_the_assistants",
    ),
    "A5": (
        "compaction/test_autocompact.py::test_standard_cuts_tool_results_to_ten_thousand_characters_and_keeps_the_error",
        "compaction/test_autocompact.py::test_code_blocks_are_not_taken_for_repetition",
        "compaction/test_autocompact.py::test_aggressive_keeps_the_five_newest_and_one_message_on_the_rest",
    ),
    "A6": ("compaction/test_autocompact.py::test_aggressive_keeps_the_five_newest_and_one_message_on_the_rest",),
    "A7": (
        "test_seeds.py::test_the_brief_summary_counts_errors_and_names_each_tool_once",
        "compaction/test_autocompact.py::test_no_errors_is_said",
    ),
    "A8": ("test_seeds.py::test_fifty_messages_of_180000_tokens_become_120000_and_then_80000",),
    "A9": (
        "compaction/test_validation.py::test_errors_requests_constraints_and_the_conclusion_must_survive",
        "compaction/test_autocompact.py::test_the_aggressive_summary_quotes_task_constraint_error_and_conclusion",
    ),
    "A10": (
        "compaction/test_pipeline.py::test_a_layer_that_loses_facts_that_cannot_be_put_back_is_refused",
        "compaction/test_pipeline.py::test_a_lost_constraint_is_put_back_word_by_word",
    ),
    "A11": (
        "test_endpoints.py::test_a_long_conversation_keeps_its_compacted_prefix_while_it_grows",
        "test_endpoints.py::test_the_log_holds_no_message_text_and_no_key",
    ),
    "A12": ("test_seeds.py::test_the_saving_is_told_in_tokens_and_percent",),
    "A13": (
        "compaction/test_strategies.py::test_the_seeds_blocks_are_taken_as_they_stand",
        "compaction/test_strategies.py::test_a_block_that_is_not_enabled_takes_its_layers_out",
        "compaction/test_strategies.py::test_a_wrong_key_of_a_block_is_named",
        "compaction/test_autocompact.py::test_errors_and_requests_are_left_out_when_that_is_wanted",
    ),
    # collapse
    "C1": ("test_seeds.py::test_the_ten_newest_messages_stay_in_full_and_ten_that_fit_are_left_alone",),
    "C2": (
        "compaction/test_collapse.py::test_old_steps_become_one_summary_and_the_target_is_met",
        "test_seeds.py::test_the_ten_newest_messages_stay_in_full_and_ten_that_fit_are_left_alone",
    ),
    "C3": ("compaction/test_ledger.py::test_brief_is_one_line_of_requests_tools_and_findings",),
    "C4": ("compaction/test_collapse.py::test_windows_become_a_summary_each",),
    "C5": (
        "compaction/test_collapse.py::test_by_importance_a_recent_error_stays_whole_and_old_chatter_goes",
        "test_seeds.py::test_by_importance_the_middle_is_summed_up_and_what_must_not_be_forgotten_is_quoted",
    ),
    "C6": (
        "test_seeds.py::test_a_step_scores_as_its_best_message_does",
        "checkpoints/test_first_seen.py::test_by_importance_what_was_said_in_the_last_five_minutes_is_recent",
    ),
    "C7": (
        "compaction/test_strategies.py::test_more_than_fifty_messages_admit_the_collapse_whatever_their_size",
        "compaction/test_strategies.py::test_an_absolute_threshold_is_the_least_of_itself_and_its_share",
    ),
    "C8": (
        "compaction/test_strategies.py::"
        "test_thirty_messages_collapse_to_a_summary_and_the_recent_ones_and_save_more_than_sixty_percent",
    ),
    "C9": (
        "compaction/test_strategies.py::test_the_seeds_blocks_are_taken_as_they_stand",
        "compaction/test_strategies.py::test_a_wrong_key_of_a_block_is_named",
        "compaction/test_collapse.py::test_a_short_style_comes_first_in_the_summary",
    ),
    # settled
    "X1 thresholds of one window": (
        "compaction/test_strategies.py::test_an_absolute_threshold_is_the_least_of_itself_and_its_share",
    ),
    "X2 two sets of thresholds, two numbers that stay": (
        "compaction/test_strategies.py::test_the_seeds_blocks_are_taken_as_they_stand",
        "test_seeds.py::test_of_a_window_of_200000_standard_begins_above_170000_and_aggressive_above_180000",
    ),
    "X3 the harshest first, or the mildest": (
        "compaction/test_strategies.py::test_the_literal_strategy_folds_to_metadata_first",
        "test_seeds.py::test_of_the_ways_that_are_enough_the_mildest_is_taken",
    ),
    "X4 times that messages do not carry": (
        "checkpoints/test_first_seen.py::test_what_an_event_made_of_the_times_is_frozen_with_it",
        "checkpoints/test_first_seen.py::test_a_history_that_is_gone_through_again_is_compacted_without_times",
        "checkpoints/test_first_seen.py::test_only_strategies_that_use_times_ask_for_them",
    ),
    "X5 scores that drop requests and old errors": (
        "test_seeds.py::test_by_importance_the_middle_is_summed_up_and_what_must_not_be_forgotten_is_quoted",
        "test_seeds.py::test_a_step_scores_as_its_best_message_does",
    ),
    "X6 cuts by number of messages": (
        "compaction/test_autocompact.py::test_the_cut_snaps_to_whole_steps",
        "compaction/test_every_layer.py::test_a_layer_breaks_no_rule_of_the_contract",
        "compaction/test_every_layer.py::test_a_layer_keeps_preamble_last_user_message_and_newest_step",
        "compaction/test_every_layer.py::test_a_layer_keeps_the_first_task",
    ),
    "X7 whole texts in a brief summary": (
        "compaction/test_validation.py::test_needles_are_bounded",
        "compaction/test_pipeline.py::test_a_lost_constraint_is_put_back_word_by_word",
    ),
    "X8 results inside the assistant's content": (
        "compaction/test_autocompact.py::test_standard_cuts_tool_results_to_ten_thousand_characters_and_keeps_the_error",
    ),
    "X9 a limit without a unit that cuts the tail": (
        "compaction/test_autocompact.py::test_standard_cuts_tool_results_to_ten_thousand_characters_and_keeps_the_error",
        "compaction/test_tool_results.py::test_a_result_beyond_the_cap_keeps_head_tail_and_error",
    ),
    "X10 half of the window, or three quarters": (
        "test_seeds.py::test_events_may_begin_at_half_of_the_window",
        "test_config.py::test_nothing_given_gives_the_defaults",
    ),
}
"""Row → ids of tests, below `tests/`."""

WANTED = [
    *(f"K{n}" for n in range(1, 21)),
    *(f"L{n}" for n in range(1, 11)),
    *(f"A{n}" for n in range(1, 14)),
    *(f"C{n}" for n in range(1, 10)),
    *(f"X{n}" for n in range(1, 11)),
]


def test_every_row_is_there() -> None:
    assert [row.split()[0] for row in ROWS] == WANTED
    assert all(ROWS.values())


def test_every_test_that_a_row_names_is_there() -> None:
    assert unshown(ROWS) == []


# --- rows that have no other test ----------------------------------------------------------------------------------------


def talk(messages: list[dict[str, Any]]) -> Conversation:
    return chat_completions.read(chat(messages)).conversation


def room(usable: int, target: int | None = None) -> Budget:
    return Budget(usable, 0, usable, usable, usable if target is None else target, tokens.ruler("gpt-4o", {}))


def size(conversation: Conversation) -> int:
    return room(1).ruler.total(conversation.messages)


def decided(messages: list[dict[str, Any]], window: int, marks: Marks | None = None) -> Decision:
    async def one() -> Decision:
        compactor = Compactor(Windows({"*": Model(window=window, reserve=0)}), build("ladder"), marks)
        try:
            return await compactor.decide(chat(messages), "/v1/chat/completions", Wish())
        finally:
            await compactor.aclose()

    return asyncio.run(one())


def turns(count: int, words: int = 60) -> list[dict[str, Any]]:
    """Requests and answers of about that many words, and a question."""
    messages = []
    for n in range(count):
        messages += [user(f"Please add feature {n} to app/part_{n}.py."), assistant(f"Feature {n} works. " + prose(words, n))]
    return [*messages, user("What is left to do?")]


def test_tokens_make_an_event_due_and_numbers_of_turns_do_not() -> None:
    many, few = turns(300, words=5), turns(3, words=6_000)

    assert len(many) > 600
    assert (decided(many, 20_000).outcome, decided(many, 20_000).reason) == ("none", "fits")
    assert decided(few, 20_000).outcome == "applied"


def test_a_recorded_session_is_sent_again_and_says_what_was_kept() -> None:
    async def again() -> dict[str, object]:
        compactor = Compactor(Windows({"*": Model(window=4_000)}), build("ladder"))
        row = replay.read_row(json.dumps({"id": "one", "messages": agent_session(30)}).encode(), 1)
        try:
            return (await replay.replay(row, compactor, Wish())).report()
        finally:
            await compactor.aclose()

    told = asyncio.run(again())

    assert told["requests"] == told["requests_that_fit"] == 31
    assert told["critical_lost"] == told["invalid_arrays"] == told["prefix_breaks_outside_events"] == 0
    assert int(str(told["critical_kept"])) > 0
    assert float(str(told["facts_kept_share"])) > 0.5


def test_events_may_begin_at_half_of_the_window() -> None:
    session = turns(30, words=150)
    window = int(size(talk(session)) / 0.6)

    assert decided(session, window).outcome == "none"
    assert decided(session, window, Marks(trigger=0.5, target=0.3)).outcome == "applied"


WORK = [
    user("Add sign-in to the API. Never store passwords in plain text."),
    assistant("Let me look around first.", call("a", "bash", command="ls apps")),
    tool("a", "\n".join(f"apps/unrelated_{n}.txt" for n in range(200))),
    assistant("I'll use signed tokens instead of server sessions.", call("b", "edit_file", path="apps/api/auth.py")),
    tool("b", "edited"),
    assistant(None, call("c", "bash", command="pytest -q")),
    tool("c", prose(300) + "\n12 passed in 3.1s"),
    assistant("Sign-in works and all 12 tests pass. Next I will add the endpoint for registration."),
    user("Also add an endpoint for registration."),
    *[
        message
        for n in range(6)
        for message in (assistant(None, call(f"r{n}", "bash", command=f"grep x {n}")), tool(f"r{n}", prose(200, n)))
    ],
    assistant("I have seen enough."),
    user("Go on."),
]


def test_the_second_layer_keeps_decisions_results_and_paths_and_drops_the_search_for_them() -> None:
    made = Digested("blocks").apply(talk(WORK), room(4_000, target=700))

    text = "\n".join(message.text for message in made.messages)
    assert "I'll use signed tokens instead of server sessions." in text
    assert "Sign-in works and all 12 tests pass." in text
    assert "apps/api/auth.py" in text
    assert "unrelated" not in text
    assert size(made) <= 700


@pytest.mark.parametrize("strategy", ["layer2", "layer3", "auto", "ladder"])
def test_task_files_and_plan_outlive_every_way_of_folding(strategy: str) -> None:
    made = compact(talk(WORK), room(2_000, target=800), build(strategy)).conversation

    text = "\n".join([message.text for message in made.messages] + [c.arguments for m in made.messages for c in m.calls])
    assert "Add sign-in to the API. Never store passwords in plain text." in text
    assert "Also add an endpoint for registration." in text
    assert "apps/api/auth.py" in text
    assert "I'll use signed tokens instead of server sessions." in text


def test_of_the_ways_that_are_enough_the_mildest_is_taken() -> None:
    made = compact(talk(turns(30)), room(4_000, target=1_500), build("auto")).conversation

    assert made.messages == MergedTurns().apply(talk(turns(30)), room(4_000, target=1_500)).messages
    assert not any(summary.is_summary(message) for message in made.messages)


@pytest.mark.parametrize(
    ("block", "standard", "aggressive"),
    [
        ({"triggerThreshold": 170_000, "aggressiveThreshold": 180_000}, 170_000, 180_000),
        ({"triggerThreshold": 180_000, "aggressiveThreshold": 190_000}, 170_000, 180_000),
        ({"triggerThreshold": 120_000, "aggressiveThreshold": 130_000}, 120_000, 130_000),
    ],
)
def test_of_a_window_of_200000_standard_begins_above_170000_and_aggressive_above_180000(
    block: dict[str, object], standard: int, aggressive: int
) -> None:
    layers = [layer for layer in build("ladder", auto_compact=block) if isinstance(layer, Admitted)]

    assert [layer.layer for layer in layers] == [AutoCompact(), AutoCompact("aggressive", keep_recent=5)]
    for layer, threshold in zip(layers, (standard, aggressive), strict=True):
        assert not layer.admits(threshold, 50, room(200_000))
        assert layer.admits(threshold + 1, 50, room(200_000))


def test_the_last_layers_run_only_where_the_milder_ones_were_not_enough() -> None:
    conversation = talk(agent_session(40))
    layers = (Microcompact(), ContextCollapse(), Admitted(AutoCompact("aggressive"), 0.75))
    before = size(conversation)

    enough = compact(conversation, room(before, target=before // 2), layers)
    milder_off = compact(conversation, room(before, target=before // 2), layers[2:])

    assert "auto_compact" not in enough.layers
    assert milder_off.layers == ("auto_compact",)


def test_the_brief_summary_counts_errors_and_names_each_tool_once() -> None:
    session = agent_session(14)
    session[7]["content"] += "\nOSError: disk full"

    made = AutoCompact("aggressive").apply(talk(session), room(10_000))

    written = next(message.text for message in made.messages if summary.is_summary(message))
    assert "[Conversation history: Used tools: read_file. Encountered 2 errors.]" in written


def test_fifty_messages_of_180000_tokens_become_120000_and_then_80000() -> None:
    messages = [user("Fix the loader. Never touch the migrations.")]
    for n in range(24):
        spoken = f"Part {n} looks fine. " + prose(1_300, n)
        messages += [assistant(spoken, call(f"c{n}", "read_file", path=f"app/part_{n}.py")), tool(f"c{n}", prose(5_200, 100 + n))]
    conversation = talk([*messages, user("What is left to do?")])
    before = size(conversation)

    standard = compact(conversation, room(before, target=120_000), (AutoCompact(),))
    harsher = compact(conversation, room(before, target=80_000), (AutoCompact(), AutoCompact("aggressive")))

    assert len(conversation.messages) == 50
    assert 170_000 < before < 190_000
    assert standard.tokens_after <= 120_000
    assert harsher.tokens_after <= 80_000
    assert standard.critical.lost == harsher.critical.lost == 0


def test_the_saving_is_told_in_tokens_and_percent() -> None:
    conversation = talk(agent_session(14))
    aim = room(5_000, target=1_500)
    result = compact(conversation, aim, build("ladder"))

    saved = 100 * (result.tokens_before - result.tokens_after) / result.tokens_before
    assert f"one: {result.tokens_before} → {result.tokens_after} tokens ({saved:.1f}% saved)" in explained("one", result, aim)


def test_the_ten_newest_messages_stay_in_full_and_ten_that_fit_are_left_alone() -> None:
    long, short = talk(turns(40, words=200)), talk(turns(5, words=200)[1:])
    before = size(long)

    made = ContextCollapse(keep_recent=10).apply(long, room(before, target=int(before * 0.6)))

    assert [summary.is_summary(message) for message in made.messages].count(True) == 1
    assert all(a is b for a, b in zip(made.messages[-10:], long.messages[-10:], strict=True))
    assert len(short.messages) == 10
    assert ContextCollapse(keep_recent=10).apply(short, room(4_000)) is short


def test_by_importance_the_middle_is_summed_up_and_what_must_not_be_forgotten_is_quoted() -> None:
    session = [*agent_session(40)[:-1], user("Please keep the log format."), assistant("Well noted."), *agent_session(12)[2:]]

    made = ContextCollapse(mode="importance").apply(talk(session), room(3_000))

    text = "\n".join(message.text for message in made.messages)
    assert size(made) <= 3_000
    assert "Please keep the log format." in text
    assert "Never touch the migrations." in text
    assert "ModuleNotFoundError: No module named 'loader_core'" in text


def test_a_step_scores_as_its_best_message_does() -> None:
    failed = "ValueError: bad row 17"
    history = History(
        talk(
            [
                user("Hello there."),
                assistant("Looking."),
                assistant(None, call("a", "bash", command="ls")),
                tool("a", "x"),
                assistant(None, call("b", "bash", command="make")),
                tool("b", failed),
                assistant(failed, call("c", "bash", command="make")),
                tool("c", "fine"),
                user("And now?"),
            ]
        ),
        room(1).ruler,
    )

    def scores(recent: int) -> list[float]:
        return [round(history.importance(i, recent), 6) for i in range(len(history.steps))]

    assert scores(0) == [0.0, 0.0, 0.2, 0.3, 0.5, 0.0]
    assert scores(3) == [0.0, 0.0, 0.2, 0.3, 1.0, 0.5]

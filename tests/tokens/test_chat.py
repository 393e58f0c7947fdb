"""Expected counts are added up in the comments: 3 around a message, its speaker, its words, and 3 (or 2) before the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from builders import agent_session, assistant, call, tool, user

from proxy.conversation import Message, Opaque, Text, ToolCall, ToolResult, said
from proxy.tokens import Calibration, ruler

Count = Callable[..., int]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("gpt-4o", 9), ("gpt-4", 9), ("gpt-3.5-turbo", 9), ("gpt-4.1-mini", 9), ("o3-mini", 8), ("gpt-5", 8), ("mystery-model", 9)],
)
def test_a_message_is_its_words_its_speaker_and_what_frames_them(total: Count, model: str, tokens: int) -> None:
    # 3 + user 1 + hello world 2, and the priming
    assert total([user("hello world")], model) == tokens


def test_a_request_without_messages_is_what_stands_before_the_answer() -> None:
    assert ruler("gpt-4o", {}).total(()) == 3
    assert ruler("o1", {}).fixed == 2


def test_a_name_is_written_after_the_role(total: Count) -> None:
    # ":user" is one token, ":primary" two
    assert total([{**user("hello world"), "name": "user"}]) == 10
    assert total([{**user("hello world"), "name": "primary"}]) == 11


def test_text_parts_are_joined_before_they_are_counted(total: Count) -> None:
    parts = [{"type": "text", "text": "hello wor"}, {"type": "text", "text": "ld"}]

    assert total([{"role": "user", "content": parts}]) == total([user("hello world")])


def test_an_empty_message_still_has_its_frame(total: Count) -> None:
    assert total([user("")]) == 7
    assert total([{"role": "assistant", "content": None}]) == 7


def test_one_call_is_a_message_of_its_own(total: Count) -> None:
    # 3 + assistant 1 + 2 + " to=functions.get_weather" 5 + {"city":"Paris"} 5, and 3
    assert total([assistant(None, call("1", "get_weather", city="Paris"))]) == 19
    # four more for gpt-5, whose priming is one less
    assert total([assistant(None, call("1", "get_weather", city="Paris"))], "gpt-5") == 22


def test_text_beside_a_call_is_another_message(total: Count) -> None:
    # 3 + assistant 1 + hello world 2 more
    assert total([assistant("hello world", call("1", "get_weather", city="Paris"))]) == 25


def test_arguments_are_counted_as_they_are_written_again(total: Count) -> None:
    spaced = {**call("1", "f"), "function": {"name": "f", "arguments": '{ "a" :   [1,  2] }'}}
    tight = {**call("1", "f"), "function": {"name": "f", "arguments": '{"a":[1,2]}'}}

    assert total([assistant(None, spaced)]) == total([assistant(None, tight)])


def test_a_result_is_counted_with_the_name_of_what_was_called(total: Count) -> None:
    asked = [assistant(None, call("1", "get_weather", city="Paris"))]

    # 3 + functions. 1 + get_weather 2 + sunny 2
    assert total([*asked, tool("1", "sunny")]) - total(asked) == 8


def test_a_result_finds_its_call_by_id_and_else_by_its_place(total: Count) -> None:
    asked = [assistant(None, call("1", "get_weather", city="Paris"))]

    assert total([*asked, tool("other", "sunny")]) == total([*asked, tool("1", "sunny")])


def test_parallel_results_are_one_json_list_in_which_indentation_costs_nothing(total: Count) -> None:
    asked = assistant(None, call("1", "f", a=1), call("2", "f", a=2))
    indented, tight = json.dumps({"rows": [1, 2, 3]}, indent=4), '{"rows":[1,2,3]}'

    assert total([asked, tool("1", indented), tool("2", indented)]) == total([asked, tool("1", tight), tool("2", tight)])


def test_parallel_results_are_escaped_for_some_models_and_not_for_others(total: Count) -> None:
    asked = assistant(None, call("1", "f", a=1), call("2", "f", a=2))
    results = [tool("1", "漢字"), tool("2", "ok")]
    plain = [tool("1", "ab"), tool("2", "ok")]

    # \u6f22\u5b57 is ten tokens or so, 漢字 two
    assert total([asked, *results], "gpt-4o-mini") - total([asked, *plain], "gpt-4o-mini") >= 6
    assert total([asked, *results], "gpt-4o-2024-08-06") - total([asked, *plain], "gpt-4o-2024-08-06") <= 2


def test_calls_of_the_retired_kind_count_like_calls(total: Count) -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    answer = {"role": "function", "name": "get_weather", "content": "sunny"}

    assert total([old, answer]) == total([assistant(None, call("1", "get_weather", city="Paris")), tool("1", "sunny")])


def test_tools_cost_their_typescript_and_a_heading(total: Count) -> None:
    # 28 for the TypeScript, 9 for a system message with the heading of tools
    assert total([user("hello world")], tools=[WEATHER]) - total([user("hello world")]) == 37


def test_tools_join_the_system_message_when_there_is_one(total: Count) -> None:
    system = {"role": "system", "content": "Be brief."}

    apart = total([user("hello world")], tools=[WEATHER]) - total([user("hello world")])
    joined = total([system, user("hello world")], tools=[WEATHER]) - total([system, user("hello world")])

    # four for a message of their own are saved; the newline after "brief." is part of its last token
    assert joined == apart - 4


@pytest.mark.parametrize(("choice", "tokens"), [("auto", 0), ("required", 0), ("none", 0), (None, 0)])
def test_an_open_tool_choice_is_free(total: Count, choice: str | None, tokens: int) -> None:
    assert total([user("x")], tools=[WEATHER], tool_choice=choice) - total([user("x")], tools=[WEATHER]) == tokens


def test_a_forced_tool_is_named_once_more(total: Count) -> None:
    forced = {"type": "function", "function": {"name": "get_weather"}}

    # 4 + " to=functions.get_weather" 5
    assert total([user("x")], tools=[WEATHER], tool_choice=forced) - total([user("x")], tools=[WEATHER]) == 9
    assert total([user("x")], "gpt-5", tools=[WEATHER], tool_choice=forced) == total([user("x")], "gpt-5", tools=[WEATHER])


FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "math_schema",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"final_answer": {"type": "string", "additionalProperties": False}},
            "additionalProperties": False,
            "required": ["final_answer"],
        },
    },
}


def test_a_wanted_schema_is_a_section_of_the_system_message(total: Count) -> None:
    system = {"role": "system", "content": "You are a student taking a math exam."}

    # recorded: 27
    assert total([system, user("x")], response_format=FORMAT) - total([system, user("x")]) == 27
    # a message of its own is four more
    assert total([user("x")], response_format=FORMAT) - total([user("x")]) == 31


def test_limits_and_defaults_within_a_wanted_schema_are_not_shown(total: Count) -> None:
    def asking(**more: Any) -> int:
        schema = {"type": "object", "properties": {"a": {"type": "number", **more}}}
        return total([user("x")], response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})

    assert asking(default=0.5, minimum=0, maximum=1, multipleOf=0.5) == asking()
    assert asking(description="half") > asking()


def test_a_property_may_have_the_name_of_a_keyword(total: Count) -> None:
    def asking(name: str) -> int:
        schema = {"type": "object", "properties": {name: {"type": "number"}}}
        return total([user("x")], response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})

    assert asking("default") == asking("answer")


def test_an_earlier_answer_in_a_wanted_format_is_addressed_to_it(total: Count) -> None:
    messages = [user("x"), assistant('{"output":7}')]
    named = {"type": "json_schema", "json_schema": {"name": "int", "strict": True, "schema": {}}}

    with_answer = total(messages, response_format=named) - total(messages)
    without = total(messages[:1], response_format=named) - total(messages[:1])

    # recorded: 3 more, two and one for the name
    assert with_answer - without == 3


def test_json_mode_without_a_schema_is_free(total: Count) -> None:
    assert total([user("x")], response_format={"type": "json_object"}) == total([user("x")])


def test_a_picture_is_counted_by_its_size_and_not_by_its_base64(total: Count) -> None:
    head = "iVBORw0KGgoAAAANSUhEUgAAAoAAAAHgCAYAAAA10dzk"  # 640 × 480
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{head}{'A' * 400_000}"}}

    # 85 + 170 for each of two by one tiles, as 640 × 480 fits as it is
    assert total([{"role": "user", "content": [part]}]) - total([user("")]) == 425


def test_reasoning_counts_while_its_turn_lasts_and_never_for_openai(total: Count) -> None:
    thinking = {**assistant(None, call("1", "f", a=1)), "reasoning_content": "hello world"}
    running, over = [user("x"), thinking, tool("1", "y")], [user("x"), thinking, tool("1", "y"), user("z")]

    def added(messages: list[dict[str, Any]], model: str) -> int:
        bare = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
        return total(messages, model) - total(bare, model)

    assert added(running, "qwen3:32b") == 2
    assert added(over, "qwen3:32b") == 0
    assert added(running, "gpt-4o") == 0


def test_reasoning_in_several_forms_counts_once(total: Count) -> None:
    forms = {
        "reasoning": "hello world",
        "reasoning_details": [{"type": "reasoning.text", "text": "hello world", "signature": "c2lnbmF0dXJl" * 50}],
    }

    assert total([user("x"), {**assistant("y"), **forms}], "claude-haiku-4.5") == total([user("x"), assistant("y")], "claude") + 2


def test_the_signature_of_a_thought_is_not_counted(total: Count) -> None:
    thought = {"type": "thinking", "thinking": "hello world", "signature": "c2lnbmF0dXJl" * 100}

    def told(parts: list[dict[str, Any]]) -> int:
        return total([user("x"), {"role": "assistant", "content": [*parts, {"type": "text", "text": "y"}]}], "claude")

    assert told([thought]) - told([]) == 2


def test_a_refusal_counts_as_its_words(total: Count) -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I'm sorry, I can't help with that."}
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I'm sorry, I can't help with that."}]}

    assert total([refused]) == total([part]) == total([assistant("I'm sorry, I can't help with that.")])


def test_a_format_costs_the_same_whatever_was_asked_before(total: Count) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "fresh", "strict": True, "schema": {"title": "nowhere else"}}}
    alone = total([user("x")], response_format=wanted)

    assert total([user("x")], response_format=wanted, tools=[]) == alone
    assert total([user("x")], response_format=wanted, functions=[WEATHER["function"]]) == total(
        [user("x")], response_format=wanted, tools=[WEATHER]
    )
    assert total([user("x")], response_format=wanted) == alone
    assert total([user("x")], tools=[WEATHER]) < total([user("x")], tools=[WEATHER], response_format=wanted)


def test_threads_that_count_at_once_agree(parsed: Callable[..., Any]) -> None:
    rule, messages = parsed(agent_session(30, words=120, system="Counted by many at once."), tools=[WEATHER])

    with ThreadPoolExecutor(8) as pool:
        totals = set(pool.map(lambda _: ruler("gpt-4o", rule.fields).total(messages), range(40)))

    assert totals == {rule.total(messages)}


def test_the_total_is_the_fixed_part_and_the_sum_of_whole_steps() -> None:
    rule = ruler("gpt-4o", {})
    steps = [
        (said("system", "Be brief."),),
        (said("user", "hello world"),),
        (Message("assistant", (ToolCall("1", "f", "{}"),)), Message("tool", (ToolResult("1", "one"),))),
        (
            Message("assistant", (ToolCall("2", "f", "{}"), ToolCall("3", "g", "{}"))),
            Message("tool", (ToolResult("2", "two"),)),
            Message("tool", (ToolResult("3", "three"),)),
        ),
    ]

    alone = [rule.total(step) - rule.fixed for step in steps]

    assert rule.total([message for step in steps for message in step]) == rule.fixed + sum(alone)


def test_one_message_costs_what_it_adds() -> None:
    rule = ruler("gpt-4o", {})

    assert rule.message(said("user", "hello world")) == 6
    assert rule.text("hello world") == 2


def test_shares_add_up_to_the_whole(parsed: Callable[..., Any]) -> None:
    for model in ("gpt-4o", "gpt-5", "o3", "claude-sonnet-4-5"):
        rule, messages = parsed(agent_session(6), model, tools=[WEATHER], response_format=FORMAT)

        assert sum(rule.shares(messages)) + rule.raw(()) == rule.raw(messages) == rule.total(messages)


def test_a_calibration_scales_and_shifts_every_count() -> None:
    rule = ruler("claude-sonnet-4-5", {}, calibration=Calibration(slope=1.5, offset=100.0, samples=9))

    assert rule.total([said("user", "hello world")]) == 114  # 9 · 1.5 + 100, rounded up
    assert rule.message(said("user", "hello world")) == 9
    assert rule.fixed == 105


def test_bytes_still_to_be_counted_are_known_beforehand(parsed: Callable[..., Any]) -> None:
    text = "A sentence of this test alone, which nobody has counted before it. " * 100
    rule, messages = parsed([user(text), user("and " + text)])

    assert rule.cold_bytes(messages) == 2 * len(text) + 4

    rule.total(messages)

    assert rule.cold_bytes(messages) == 0


def test_the_search_for_what_is_cold_ends_when_it_has_found_enough(parsed: Callable[..., Any]) -> None:
    rule, messages = parsed([user(f"{number} never counted " + "before " * 500) for number in range(40)])

    assert 10_000 < rule.cold_bytes(messages, enough=10_000) < 14_000
    assert rule.cold_bytes(messages, enough=10**9) == rule.cold_bytes(messages) > 140_000


def test_tools_and_formats_are_part_of_what_is_still_to_be_counted(parsed: Callable[..., Any]) -> None:
    tools = [{"type": "function", "function": {"name": f"unheard_of_{i}", "description": "word " * 50}} for i in range(200)]
    rule, messages = parsed([user("hi")], tools=tools, response_format=FORMAT)

    assert rule.cold_bytes(messages) > 50_000

    rule.total(messages)

    assert rule.cold_bytes(messages) == 0


def test_an_equal_message_is_the_same_whoever_sent_it() -> None:
    rule = ruler("gpt-4o", {})
    first = Message("user", (Text("told only in this very test"),), raw=b"one")
    again = Message("user", (Text("told only in this very test"),), raw=b"two")
    rule.total([first])

    assert rule.cold_bytes([again]) == 0


def test_families_do_not_share_costs() -> None:
    message = Message("assistant", (ToolCall("1", "shared_by_families", '{"a":1}'),))

    assert ruler("gpt-5", {}).message(message) == ruler("gpt-4o", {}).message(message) + 4


def test_files_and_recordings_have_a_bounded_cost() -> None:
    rule = ruler("gpt-4o", {})
    data = b"A" * 8_000_000
    file = Opaque("file", b'{"type":"file","file":{"file_data":"data:application/pdf;base64,' + data + b'"}}')
    speech = Opaque("audio", b'{"type":"input_audio","input_audio":{"data":"' + data + b'","format":"mp3"}}')
    film = Opaque("video_url", b'{"type":"video_url","video_url":{"url":"data:video/mp4;base64,' + data + b'"}}')

    assert [rule.message(Message("user", (part,))) for part in (file, speech, film)] == [50_004, 3_755, 50_004]

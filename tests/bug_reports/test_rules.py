"""Rows that send nothing, and rows whose subject lives elsewhere: each has a test that holds it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bug_reports import test_messages, test_passing, test_streams
from bug_reports.rows import all_rows
from builders import agent_session, assistant, chat

from proxy import tokens
from proxy.compaction.pipeline import compact
from proxy.compaction.strategies import build
from proxy.windows import Window, budget
from proxy.wire import chat_completions

TESTS = Path(__file__).parent.parent
PRODUCT = TESTS.parent / "proxy"

HELD_BY: dict[str, str] = {
    "H031": "live/test_upstream_faults.py::test_a_silent_upstream_is_a_504_only_where_a_limit_is_set",
    "H039": "bug_reports/test_failing_open.py",
    "H059": "bug_reports/judge.py",
    "H061": "bug_reports/judge.py",
    "H066": "bug_reports/judge.py",
    "H081": "bug_reports/judge.py",
    "H084": "bug_reports/judge.py",
    "H087": "bug_reports/judge.py",
    "H089": "bug_reports/judge.py",
    "H091": "bug_reports/test_rules.py::test_H091_signed_blocks_stay_whole_or_go_whole",
    "H100": "bug_reports/lab.py: the account of every compacted request is asked of the bytes that were sent",
    "H105": "wire/test_fields.py::test_there_is_no_lowering_to_nothing",
    "H107": "summarizers/test_every_summarizer.py::test_the_question_has_no_tools_a_system_prompt_of_its_own_and_a_cap",
    "H112": "bug_reports/test_passing.py::test_H112_other_endpoints_pass_with_all_their_headers",
    "H116": "compaction/test_pipeline.py::test_a_gain_of_next_to_nothing_is_not_worth_an_event",
    "H118": "summarizers/test_every_summarizer.py::test_bad_summaries_open_the_breaker_too_and_wrong_keys_do_not",
    "H126": "summarizers/test_every_summarizer.py::test_a_window_that_has_no_room_for_a_question_is_said_and_not_tried",
    "H128": "summarizers/test_every_summarizer.py::test_a_history_larger_than_the_window_is_given_in_pieces",
    "H135": "summarizers/test_every_summarizer.py::test_a_history_of_any_size_takes_eight_questions_at_most",
    "H143": "bug_reports/test_fuzz.py::test_a_conversation_with_any_flaw_arrives_no_worse_than_it_came",
    "H144": "bug_reports/test_fuzz.py::test_a_conversation_with_any_flaw_arrives_no_worse_than_it_came",
    "H146": "bug_reports/test_bad_input.py: special tokens",
    "H151": "bug_reports/test_passing.py::test_H149_health_is_answered_while_a_million_characters_are_counted",
    "H152": "tokens/test_offline.py::test_counts_are_exact_without_network_home_or_a_place_to_write",
    "H156": "bug_reports/test_bad_input.py: depth 10,000",
    "H195": "test_workers_figures.py::test_what_a_start_that_was_killed_has_left_is_removed",
    "H198": "bug_reports/test_passing.py::test_H198_no_secret_is_in_the_metrics",
    "H207": "test_cli.py::test_our_own_key_is_not_served_to_whoever_reaches_the_port",
    "H208": "bug_reports/test_passing.py::test_H226_H208_two_credentials_share_nothing_but_the_outcome",
    "H209": "checkpoints/test_chain.py::test_an_edit_changes_every_key_after_it",
    "H213": "bug_reports/test_passing.py::test_H213_many_requests_over_budget_at_once_are_all_answered",
    "H217": "bug_reports/test_passing.py::test_H215_H217_what_cannot_be_helped_gets_the_upstreams_own_words",
    "H219": "bug_reports/test_passing.py::test_H218_H219_what_is_forwarded_mostly_only_grows",
    "H226": "bug_reports/test_passing.py::test_H226_H208_two_credentials_share_nothing_but_the_outcome",
}
"""A file, a test of it (`file::test`), or a file and a phrase of it that says which (`file: words`)."""


def covered() -> set[str]:
    """Every row that some test names."""
    text = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_rules.py"
    )
    return set(re.findall(r"H\d{3}", text)) | {"H015", "H006", "H091"}


def test_every_row_of_the_log_has_a_test() -> None:
    assert sorted({one.id for one in all_rows()} - covered() - set(HELD_BY)) == []


def test_no_row_is_named_that_the_log_does_not_have() -> None:
    assert sorted((covered() | set(HELD_BY)) - {one.id for one in all_rows()}) == []


@pytest.mark.parametrize("row_id", HELD_BY)
def test_what_is_said_to_hold_a_rule_exists(row_id: str) -> None:
    file, _, test = HELD_BY[row_id].partition("::")
    path = TESTS / file.split(":")[0]
    assert path.exists()
    assert f"def {test}(" in path.read_text(encoding="utf-8") or not test


def test_every_row_with_a_request_is_sent_by_some_test() -> None:
    sent = {*test_messages.CHECKS, *test_passing.PASSING, *test_streams.READ}
    rest = {one.id for one in all_rows() if one.request is not None} - sent
    files = [Path(__file__).parent / name for name in ("test_passing.py", "test_streams.py", "test_failing_open.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [row_id for row_id in sorted(rest) if row_id not in text] == []


# --- rules of design ------------------------------------------------------------------------------------------------


def sources() -> dict[str, str]:
    """The product's rooms by their path."""
    return {path.relative_to(PRODUCT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PRODUCT.rglob("*.py"))}


def test_H015_only_one_room_takes_event_streams_apart() -> None:
    """Two more look at a stream's first event, and never pass on what they have read."""
    takes_apart = re.compile(r"""(?:startswith|removeprefix|partition|split)\(b?["']data:""")
    readers = {name for name, text in sources().items() if takes_apart.search(text)}
    assert readers <= {"wire/sse.py", "answers.py", "overflow.py"}


@pytest.mark.parametrize(
    "name", ["BaseHTTPMiddleware", "GZipMiddleware", "StreamingResponse", "BackgroundTask", "add_middleware"]
)
def test_H006_nothing_that_buffers_stands_between_the_client_and_the_upstream(name: str) -> None:
    assert [room for room, text in sources().items() if re.search(rf"(?:import|class|\.|\() ?.*\b{name}\b", text)] == []


def test_H091_signed_blocks_stay_whole_or_go_whole() -> None:
    """Through the product's own reader and writer at windows from roomy to desperate."""
    block = {"type": "thinking", "thinking": "I should  look. ", "signature": "c2ln" * 20}
    session = agent_session(10)
    session[2] = {**session[2], "thinking_blocks": [block]}
    session[-2:-2] = [{**assistant("Thought."), "thinking_blocks": [block]}]
    request = chat_completions.read(chat(session))
    for window in (60_000, 4_000, 2_000, 1_000):
        ruler = tokens.ruler("gpt-4o", {})
        aim = budget(
            Window(window, None, None, "config", None, None, None),
            requested_output=None,
            ruler=ruler,
            trigger=0.8,
            target=0.45,
            margin=0.0,
        )
        written = json.loads(
            chat_completions.write(request, compact(request.conversation, aim, build("ladder", layers={})).conversation)
        )
        found = [m["thinking_blocks"] for m in written["messages"] if "thinking_blocks" in m]
        assert all(blocks == [block] for blocks in found)

"""What an attacker may try, row by row, and the tests that show what becomes of it.

Who they are: anybody who reaches a port, a caller against another caller, what stands in tool results, a sloppy upstream, a web
page in the browser of a developer, a reader of logs and metrics, and a supplier.
"""

from __future__ import annotations

import itertools
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from builders import agent_session, chat, user
from checklists import unshown
from fakes import ScriptedUpstream
from running import RunningProxy, running_proxy, send

from proxy import tokens
from proxy.compaction import Layer
from proxy.compaction.autocompact import AutoCompact
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.microcompact import Microcompact
from proxy.windows import Budget
from proxy.wire import chat_completions

ROWS: dict[str, tuple[str, ...]] = {
    "S1 a client chooses the upstream": (
        "bug_reports/test_passing.py::test_a_target_that_names_a_host_goes_nowhere",
        "bug_reports/test_passing.py::test_H202_a_redirect_is_the_clients_to_follow",
        "test_upstream.py::test_a_redirect_is_passed_on_not_followed",
        "live/test_client_faults.py::test_each_accepted_request_is_exactly_one_upstream_and_nothing_ambiguous_gets_there",
    ),
    "S2 a key reaches a wrong origin": (
        "test_upstream.py::test_our_key_replaces_the_clients",
        "summarizers/test_adoption.py::test_a_summarizer_of_another_origin_never_sees_the_clients_key_nor_secrets",
        "summarizers/test_every_summarizer.py::test_secrets_and_credentials_do_not_reach_another_origin",
    ),
    "S3 keys or words in logs, metrics and errors": (
        "test_endpoints.py::test_the_log_holds_no_message_text_and_no_key",
        "bug_reports/test_failing_open.py::test_whatever_raises_the_request_gets_its_answer",
        "bug_reports/test_passing.py::test_H204_H205_no_key_is_said_when_an_upstream_breaks_off",
        "test_config.py::test_a_wrong_secret_is_not_repeated",
        "test_config.py::test_secrets_are_masked",
        "test_explain.py::test_no_text_is_kept_unless_it_was_asked_for",
    ),
    "S4 figures and health for everybody": (
        "test_security.py::test_the_proxy_port_has_none_of_the_admin_ports_pages",
        "test_security.py::test_the_admin_port_forwards_nothing",
        "test_config.py::test_nothing_given_gives_the_defaults",
        "test_explain.py::test_without_a_token_only_this_machine_may_look",
        "test_deploy.py::test_compose_brings_the_three_and_binds_them_to_this_machine",
    ),
    "S5 a key of ours for everybody": (
        "test_app.py::test_a_key_of_our_own_is_not_served_to_others",
        "test_cli.py::test_our_own_key_is_not_served_to_whoever_reaches_the_port",
        "test_endpoints.py::test_client_keys_are_asked_for_when_they_are_set",
    ),
    "S6 a page in a browser of this machine": (
        "test_gate.py::test_what_is_refused_reaches_nothing",
        "test_gate.py::test_what_passes_reaches_the_upstream",
        "test_gate.py::test_a_browser_sends_nothing_through_for_a_page_from_elsewhere",
        "test_gate.py::test_a_browser_sends_nothing_through_to_a_name_that_was_made_to_point_here",
        "test_explain.py::test_a_name_that_was_made_to_point_here_is_refused",
    ),
    "S7 one request that is read as two": (
        "test_server.py::test_what_proxies_read_in_two_ways_is_refused",
        "live/test_client_faults.py::test_each_accepted_request_is_exactly_one_upstream_and_nothing_ambiguous_gets_there",
        "live/test_client_faults.py::test_no_mutation_of_a_request_makes_more_or_fewer_of_it_upstream",
        "live/test_differential.py::test_what_both_let_through_of_a_damaged_request_is_the_same",
    ),
    "S8 one answer that is read as two": (
        "test_transport.py::test_extra_bytes_never_reach_another_request",
        "test_transport.py::test_extra_bytes_that_come_late_never_reach_another_request",
        "test_transport.py::test_ours_refuses_what_could_be_read_in_two_ways_or_never_ends",
        "live/test_upstream_faults.py::test_extra_bytes_of_an_answer_reach_no_other_client",
    ),
    "S9 too slow, too large, too deep": (
        "live/test_client_faults.py::test_half_open_clients_are_closed_in_time_and_hold_up_nobody",
        "live/test_client_faults.py::test_a_body_that_does_not_come_is_given_up",
        "live/test_uploads.py::test_beyond_what_may_be_held_of_all_bodies_they_pass_as_they_come",
        "test_server.py::test_a_head_that_drips_is_given_up_at_the_same_time",
        "wire/test_encodings.py::test_a_bomb_is_stopped_by_its_ratio",
        "bug_reports/test_bad_input.py::test_a_body_that_is_odd_goes_through_as_it_came",
        "bug_reports/test_passing.py::test_H149_health_is_answered_while_a_million_characters_are_counted",
        "bug_reports/test_passing.py::test_H213_many_requests_over_budget_at_once_are_all_answered",
        "test_metrics.py::test_ten_thousand_hostile_model_names_add_at_most_51_label_values",
        "tokens/test_hostile.py::test_any_messages_and_any_fields_have_a_count",
    ),
    "S10 summaries at our expense": (
        "summarizers/test_preparation.py::test_only_so_many_are_made_at_once",
        "summarizers/test_preparation.py::test_one_caller_does_not_take_the_places_of_all",
        "summarizers/test_every_summarizer.py::test_three_failures_in_a_row_and_nobody_is_asked_for_a_while",
        "summarizers/test_every_summarizer.py::test_a_history_of_any_size_takes_eight_questions_at_most",
    ),
    "S11 what one caller said, for another": (
        "test_endpoints.py::test_callers_with_different_keys_share_nothing",
        "bug_reports/test_passing.py::test_H226_H208_two_credentials_share_nothing_but_the_outcome",
        "checkpoints/test_chain.py::test_callers_with_another_key_or_settings_share_nothing",
        "summarizers/test_adoption.py::test_what_was_summed_up_for_one_caller_is_never_used_for_another",
        "test_compactor.py::test_a_summary_that_one_caller_got_means_nothing_from_another",
    ),
    "S12 what lies on the disk": (
        "test_config.py::test_nothing_given_gives_the_defaults",
        "checkpoints/test_sqlite.py::test_only_its_owner_can_read_it",
        "checkpoints/test_sqlite.py::test_what_nobody_uses_goes_after_its_time",
        "checkpoints/test_sqlite.py::test_it_stays_below_its_size_and_drops_what_was_used_longest_ago",
        "checkpoints/test_guard.py::test_values_in_a_file_are_sealed_when_a_key_is_set",
        "checkpoints/test_checkpoint.py::test_a_sealed_value_shows_nothing_of_the_conversation",
    ),
    "S13 orders in tool results that a summary carries on": (
        "compaction/test_collapse.py::test_content_cannot_forge_the_boundary",
        "compaction/test_autocompact.py::test_the_summary_is_sealed_and_never_in_an_instructions_role",
        "compaction/test_validation.py::test_neither_a_summary_of_ours_nor_an_observation_asks_for_anything",
        "summarizers/test_every_summarizer.py::test_a_summary_with_injected_instructions",
        "summarizers/test_every_summarizer.py::test_a_summary_with_an_address_or_a_command_that_was_never_there",
        "summarizers/test_every_summarizer.py::test_text_that_ends_the_transcript_stays_text",
        "summarizers/test_text.py::test_text_that_could_pass_for_structure_is_made_harmless_and_stays_readable",
    ),
    "S14 text that looks like ours": (
        "test_security.py::test_results_that_look_like_what_we_write_are_compacted_like_any_other",
        "test_compactor.py::test_what_a_client_sends_is_never_taken_for_a_summary_of_ours",
        "compaction/test_collapse.py::test_a_summary_is_told_by_its_seal_not_by_its_words",
        "summarizers/test_adoption.py::test_a_summary_with_a_foreign_seal_is_only_text",
    ),
    "S15 secrets for a second provider": (
        "summarizers/test_text.py::test_what_has_the_shape_of_a_secret_is_taken_out",
        "summarizers/test_text.py::test_a_secret_is_known_by_its_name_too",
        "summarizers/test_every_summarizer.py::test_secrets_and_credentials_do_not_reach_another_origin",
    ),
    "S16 a warning that is compacted away": (
        "compaction/test_validation.py::test_errors_requests_constraints_and_the_conclusion_must_survive",
        "compaction/test_validation.py::test_constraints_are_known_in_several_languages",
        "compaction/test_collapse.py::test_errors_requests_and_constraints_of_folded_steps_are_quoted",
        "compaction/test_pipeline.py::test_a_layer_that_loses_facts_that_cannot_be_put_back_is_refused",
    ),
    "S17 headers that say who somebody is": (
        "test_upstream.py::test_only_what_belongs_to_the_request_goes_upstream",
        "test_endpoints.py::test_a_client_may_narrow_the_window_but_not_widen_it",
        "test_endpoints.py::test_an_unknown_control_value_is_a_400_that_names_it",
        "test_endpoints.py::test_off_passes_untouched_and_the_control_headers_do_not_leave",
    ),
    "S18 TLS": (
        "test_transport.py::test_tls_is_verified_against_the_given_authority_and_sends_the_name",
        "live/test_upstream_faults.py::test_a_certificate_that_does_not_hold_is_a_502",
        "test_upstream.py::test_no_proxy_of_the_environment_is_used",
    ),
    "S19 settings that run or reach something": (
        "test_config.py::test_a_wrong_setting_is_named_with_what_it_takes",
        "test_explain.py::test_an_id_is_a_name_and_never_a_path",
    ),
    "S20 suppliers": (
        "test_deploy.py::test_the_image_installs_only_what_the_lock_names_by_hash",
        "test_deploy.py::test_the_image_is_slim_and_runs_as_a_numbered_user_without_rights",
        "test_deploy.py::test_a_workload_runs_without_rights_on_a_read_only_file_system",
        "tokens/test_vocabulary.py::test_the_packer_makes_the_same_bytes_again",
    ),
    "S21 what the time of an answer tells": (
        "checkpoints/test_chain.py::test_callers_with_another_key_or_settings_share_nothing",
    ),
    "S22 names that become labels": (
        "bug_reports/test_passing.py::test_H194_H197_names_from_clients_do_not_become_series",
        "test_metrics.py::test_ten_thousand_hostile_model_names_add_at_most_51_label_values",
        "test_explain.py::test_what_was_said_cannot_become_part_of_the_page",
    ),
}
"""Row → ids of tests, below `tests/`."""


def test_every_row_is_there() -> None:
    assert [row.split()[0] for row in ROWS] == [f"S{n}" for n in range(1, 23)]
    assert all(ROWS.values())


def test_every_test_that_a_row_names_is_there() -> None:
    assert unshown(ROWS) == []


# --- rows that have no other test ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(_scripted: ScriptedUpstream) -> Iterator[RunningProxy]:
    environment = {"COMPACTION_COMPACTION__DISCOVERY": "false", "COMPACTION_EXPLAIN__ENABLED": "true"}
    with running_proxy("--upstream", _scripted.url, environment=environment) as started:
        yield started


@pytest.mark.parametrize("path", ["/metrics", "/stats", "/healthz", "/readyz", "/explain", "/docs", "/v1/metrics"])
def test_the_proxy_port_has_none_of_the_admin_ports_pages(proxy: RunningProxy, upstream: ScriptedUpstream, path: str) -> None:
    _, _, body = send(proxy, path=path, method="GET")

    assert b"compaction" not in body
    assert [(one.method, one.target) for one in upstream.received] == [("GET", path)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/compact", "/v1/models", "/"])
def test_the_admin_port_forwards_nothing(proxy: RunningProxy, upstream: ScriptedUpstream, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(proxy.admin + path, data=chat([user("hi")])))

    assert refused.value.code == 404
    refused.value.close()
    assert upstream.received == []


def written(layer: Layer, messages: list[dict[str, Any]]) -> list[str]:
    """The texts that a layer puts in place of others."""
    before = chat_completions.read(chat(messages)).conversation
    ruler = tokens.ruler("gpt-4", {})
    size = ruler.total(before.messages)
    after = layer.apply(before, Budget(size, 0, size, size, size // 3, ruler))
    return sorted({message.text for message in after.messages} - {message.text for message in before.messages})


def test_results_that_look_like_what_we_write_are_compacted_like_any_other(
    proxy: RunningProxy, upstream: ScriptedUpstream
) -> None:
    plain = agent_session(40, 300)
    layers = (Microcompact(min_kept=0), ContextCollapse(), AutoCompact("aggressive"))
    ours = [text for layer in layers for text in written(layer, plain)[:2]]
    imitations = itertools.cycle(ours)
    disguised = [
        {**message, "content": f"{(ours_now := next(imitations))}\n{message['content']}\n{ours_now}"}
        if message["role"] == "tool"
        else message
        for message in plain
    ]

    status, headers, _ = send(proxy, chat(disguised, model="gpt-4"))

    assert (status, headers["x-compaction"]) == (200, "applied")
    assert int(headers["x-compaction-tokens-after"]) < 8_192 // 2
    said = [one["content"] for one in upstream.chats[0].json["messages"] if one["role"] == "user"]
    assert sum(text.startswith("[Earlier conversation summary: ") for text in said) == 1

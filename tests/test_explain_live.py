"""Explanations of a running proxy: what it did to real requests, and who may look."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from builders import agent_session, chat, prose, tool, user
from fakes import ScriptedUpstream
from running import RunningProxy, running_proxy

ON = {"COMPACTION_EXPLAIN__ENABLED": "true"}


@pytest.fixture(scope="module")
def proxy(_scripted: ScriptedUpstream) -> Iterator[RunningProxy]:
    with running_proxy("--upstream", _scripted.url, environment=ON) as running:
        yield running


def ask(
    where: str, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(urlsplit(where).netloc, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def send(proxy: RunningProxy, body: bytes, **headers: str) -> http.client.HTTPMessage:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(proxy.url, "POST", "/v1/chat/completions", body, named)[1]


def explained(proxy: RunningProxy, id: str, **headers: str) -> dict[str, Any]:
    """The explanation: it is written in the background, so it may take a moment longer than the answer."""
    for _ in range(200):
        status, _, body = ask(proxy.admin, "GET", f"/explain/{id}", headers=headers)
        if status == 200:
            return json.loads(body)
        time.sleep(0.02)
    raise AssertionError(f"no explanation {id}")


def test_an_event_is_explained_under_the_id_that_its_answer_names(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    messages = agent_session(30, 300, module="explained")

    headers = send(proxy, chat(messages, model="gpt-4"))
    told = explained(proxy, headers["x-compaction-id"])

    assert (told["outcome"], told["model"]) == ("applied", "gpt-4")
    assert told["tokens_before"] == int(headers["x-compaction-tokens-before"])
    assert told["tokens_after"] == int(headers["x-compaction-tokens-after"])
    assert [row["before"]["index"] for row in told["rows"] if row["before"]] == list(range(len(messages)))
    assert len([row for row in told["rows"] if row["after"]]) == len(upstream.chats[0].json["messages"])
    named = {row["layer"] for row in told["rows"] if row["change"] in ("edited", "removed", "added")}
    assert None not in named
    assert named <= {report["layer"] for report in told["layers"]}


def test_the_next_event_names_what_an_earlier_one_had_done(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    messages = agent_session(60, 300, module="grown")

    send(proxy, chat([*messages[:60], user("Go on.")], model="gpt-4"))
    headers = send(proxy, chat(messages, model="gpt-4"))
    told = explained(proxy, headers["x-compaction-id"])

    assert headers["x-compaction"] == "applied"
    assert None not in {row["layer"] for row in told["rows"] if row["change"] in ("edited", "removed", "added")}


def test_texts_are_masked(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    headers = send(proxy, chat(agent_session(30, 300, system="CANARY", module="masked"), model="gpt-4"))

    told = explained(proxy, headers["x-compaction-id"])

    assert told["masked"] is True
    assert "CANARY" not in json.dumps(told)
    assert "•" in told["rows"][0]["before"]["text"]


def test_a_request_over_its_budget_that_goes_on_as_it_came_says_why(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    headers = send(proxy, chat([user(prose(12_000))], model="gpt-4"))

    told = explained(proxy, headers["x-compaction-id"])

    assert (headers["x-compaction"], headers["x-compaction-reason"]) == ("none", "floor")
    assert (told["outcome"], told["reason"]) == ("none", "floor")
    assert told["tokens_before"] == told["tokens_after"] == int(headers["x-compaction-tokens-before"])
    assert [row["change"] for row in told["rows"]] == ["kept"]


def test_what_fits_and_what_is_taken_up_again_is_not_explained(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    long = chat(agent_session(30, 300, module="again"), model="gpt-4")

    fits = send(proxy, chat([user("hi")], model="gpt-4"))
    first, second = send(proxy, long), send(proxy, long)

    assert (first["x-compaction"], second["x-compaction"]) == ("applied", "reused")
    assert "x-compaction-id" in first
    assert "x-compaction-id" not in fits
    assert "x-compaction-id" not in second


def test_shadow_mode_explains_what_it_would_have_done(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    headers = send(proxy, chat(agent_session(30, 300, module="shadowed"), model="gpt-4"), x_compaction="shadow")

    told = explained(proxy, headers["x-compaction-id"])

    assert told["outcome"] == "shadow"
    assert told["tokens_after"] < told["tokens_before"] / 2


def test_the_sidecar_is_explained_too(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = chat(agent_session(30, 300, module="sidecar"), model="gpt-4")

    _, headers, _ = ask(proxy.url, "POST", "/v1/compact", body)

    assert explained(proxy, headers["x-compaction-id"])["outcome"] == "applied"


def test_an_event_whose_upstream_is_down_is_explained() -> None:
    with running_proxy("--upstream", "http://127.0.0.1:9/v1", environment=ON) as lonely:
        send(lonely, chat(agent_session(30, 300), model="gpt-4"))
        for _ in range(200):
            listed = json.loads(ask(lonely.admin, "GET", "/explain")[2])["explanations"]
            if listed:
                break
            time.sleep(0.02)

    assert [one["outcome"] for one in listed] == ["applied"]


def test_the_list_is_a_page_for_browsers(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    headers = send(proxy, chat(agent_session(30, 300, module="listed"), model="gpt-4"))
    explained(proxy, headers["x-compaction-id"])

    _, kind, page = ask(proxy.admin, "GET", "/explain", headers={"accept": "text/html"})

    assert kind["content-type"].startswith("text/html")
    assert f'href="/explain/{headers["x-compaction-id"]}"'.encode() in page


def test_a_token_is_asked_for_where_one_is_set(upstream: ScriptedUpstream) -> None:
    with running_proxy("--upstream", upstream.url, environment={**ON, "COMPACTION_EXPLAIN__TOKEN": "let-me-see"}) as guarded:
        without = ask(guarded.admin, "GET", "/explain")
        wrong = ask(guarded.admin, "GET", "/explain", headers={"authorization": "Bearer other"})
        right = ask(guarded.admin, "GET", "/explain", headers={"authorization": "Bearer let-me-see"})
        metrics = ask(guarded.admin, "GET", "/metrics")

    assert (without[0], wrong[0], right[0], metrics[0]) == (401, 401, 200, 200)


def test_without_the_option_there_is_nothing_to_see(upstream: ScriptedUpstream) -> None:
    with running_proxy("--upstream", upstream.url) as plain:
        headers = send(plain, chat(agent_session(30, 300), model="gpt-4"))
        status, _, _ = ask(plain.admin, "GET", "/explain")

    assert headers["x-compaction"] == "applied"
    assert "x-compaction-id" not in headers
    assert status == 404


def test_full_text_shows_what_was_said(upstream: ScriptedUpstream) -> None:
    with running_proxy("--upstream", upstream.url, environment={**ON, "COMPACTION_EXPLAIN__FULL_TEXT": "true"}) as open_book:
        messages = agent_session(30, 300, system="Mind the gap.")
        headers = send(open_book, chat([*messages[:-1], tool("stray", "x"), messages[-1]], model="gpt-4"))
        told = explained(open_book, headers["x-compaction-id"])

    assert told["rows"][0]["before"]["text"] == "Mind the gap."

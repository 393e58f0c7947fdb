"""The proxy port, black box: what a client of a running proxy sees beyond what the SDK tests show."""

from __future__ import annotations

import gzip
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from builders import agent_session, chat, user
from fakes import Reply, ScriptedUpstream, completion, stream, too_long
from running import RunningProxy, running_proxy, send

LONG = agent_session(30, 300)


@pytest.fixture(scope="module")
def proxy(_scripted: ScriptedUpstream) -> Iterator[RunningProxy]:
    with running_proxy("--upstream", _scripted.url) as running:
        yield running


def figure(proxy: RunningProxy, name: str) -> float:
    with_labels = [line for line in metrics(proxy).splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in with_labels)


def metrics(proxy: RunningProxy) -> str:
    time.sleep(1.1)  # an exposition is kept for a second
    connection = http.client.HTTPConnection(urlsplit(proxy.admin).netloc, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_a_request_that_fits_goes_upstream_byte_for_byte(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = b'{ "messages" : [{"content":"\\u0068i","role":"user"}],\n "model":"gpt-4","seed":1.0,"seed":2 }'

    status, headers, _ = send(proxy, body)

    assert status == 200
    assert upstream.chats[0].body == body
    assert headers["x-compaction"] == "none"
    assert "x-compaction-reason" not in headers


def test_a_long_conversation_keeps_its_compacted_prefix_while_it_grows(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    grown = [*LONG, {"role": "assistant", "content": "The cache is left."}, user("Do it.")]

    first = send(proxy, chat(LONG, model="gpt-4"))[1]["x-compaction"]
    second = send(proxy, chat(grown, model="gpt-4"))[1]["x-compaction"]

    assert (first, second) == ("applied", "reused")
    before, after = upstream.chats[0].json["messages"], upstream.chats[1].json["messages"]
    assert after[: len(before)] == before
    assert after[len(before) :] == grown[-2:]


def test_every_other_field_is_kept_in_order(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = json.dumps({"seed": 7, "model": "gpt-4", "messages": LONG, "temperature": 0.25, "x_vendor": {"a": [1, None]}}).encode()

    send(proxy, body)

    sent = upstream.chats[0].json
    assert list(sent) == ["seed", "model", "messages", "temperature", "x_vendor"]
    assert {**sent, "messages": None} == {**json.loads(body), "messages": None}
    assert b'"temperature":0.25' in upstream.chats[0].body


def test_off_passes_untouched_and_the_control_headers_do_not_leave(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = chat(LONG, model="gpt-4")

    _, headers, _ = send(proxy, body, x_compaction="off", x_compaction_session="one")

    assert headers["x-compaction"] == "bypassed"
    assert upstream.chats[0].body == body
    assert [name for name, _ in upstream.chats[0].headers if name.lower().startswith("x-compaction")] == []


def test_shadow_measures_and_forwards_untouched(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = chat(agent_session(31, 300, module="shadowed"), model="gpt-4")

    _, headers, _ = send(proxy, body, x_compaction="shadow")

    assert headers["x-compaction"] == "shadow"
    assert int(headers["x-compaction-tokens-after"]) < int(headers["x-compaction-tokens-before"]) / 2
    assert upstream.chats[0].body == body


def test_force_compacts_what_would_fit(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = chat(agent_session(12, 300, module="forced"), model="gpt-4")

    plain = send(proxy, body)[1]["x-compaction"]
    forced = send(proxy, body, x_compaction="force")[1]["x-compaction"]

    assert (plain, forced) == ("none", "applied")


def test_a_client_may_narrow_the_window_but_not_widen_it(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = chat(agent_session(12, 300), model="gpt-4")

    narrowed = send(proxy, body, x_compaction_window="3000")[1]["x-compaction"]
    widened = send(proxy, chat(LONG, model="gpt-4"), x_compaction_window="9000000")[1]["x-compaction"]

    assert narrowed == "applied"
    assert widened in ("applied", "reused")


@pytest.mark.parametrize(
    ("header", "value"), [("x-compaction", "maybe"), ("x-compaction-window", "big"), ("x-compaction-window", "0")]
)
def test_an_unknown_control_value_is_a_400_that_names_it(
    proxy: RunningProxy, upstream: ScriptedUpstream, header: str, value: str
) -> None:
    status, headers, body = send(proxy, chat([user("hi")]), **{header: value})

    error = json.loads(body)["error"]
    assert status == 400
    assert headers["x-compaction-error"] == "1"
    assert value in error["message"]
    assert error["param"] == header
    assert upstream.chats == []


def test_a_client_that_is_still_sending_gets_to_read_why_it_was_refused(proxy: RunningProxy) -> None:
    status, _, body = send(proxy, chat([user("x" * 8_000_000)]), x_compaction="maybe")

    assert status == 400
    assert "maybe" in json.loads(body)["error"]["message"]


def test_only_streams_have_a_time_to_their_first_chunk(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    before = figure(proxy, "compaction_time_to_first_chunk_seconds_count")

    send(proxy, method="GET", path="/v1/models")
    send(proxy, chat([user("hi")]))
    plain = figure(proxy, "compaction_time_to_first_chunk_seconds_count")
    upstream.script = lambda _: stream({"content": "Hello."})
    send(proxy, chat([user("hi")], stream=True))

    assert plain == before
    assert figure(proxy, "compaction_time_to_first_chunk_seconds_count") == before + 1


def test_the_time_of_a_first_try_that_was_refused_is_the_upstreams(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    refusal = replace(too_long(6_000, 24_000), delay=1.5)
    upstream.script = lambda _: refusal if len(upstream.chats) == 1 else completion()
    before = figure(proxy, 'compaction_overhead_seconds_sum{phase="total"}')

    _, headers, _ = send(proxy, chat(agent_session(30, 300, module="refused"), model="refused-once"))

    assert headers["x-compaction"] == "applied"
    assert figure(proxy, 'compaction_overhead_seconds_sum{phase="total"}') - before < 1.0
    assert figure(proxy, 'compaction_upstream_duration_seconds_sum{model="refused-once"}') > 1.5


def test_a_compressed_body_is_read_and_forwarded_as_it_came_when_it_fits(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = gzip.compress(chat([user("hi")], model="gpt-4"))

    send(proxy, body, content_encoding="gzip")

    assert upstream.chats[0].body == body
    assert upstream.chats[0].header("content-encoding") == "gzip"


def test_a_compressed_body_leaves_uncompressed_when_it_was_compacted(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    send(proxy, gzip.compress(chat(LONG, model="gpt-4")), content_encoding="gzip", content_md5="x")

    assert upstream.chats[0].header("content-encoding") is None
    assert upstream.chats[0].header("content-md5") is None
    assert upstream.chats[0].json["messages"][-1] == LONG[-1]


def test_a_compressed_body_is_measured_by_what_it_holds(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    alike = [user(f"{number}: " + "the same line again, word for word; " * 40) for number in range(60)]
    packed = gzip.compress(chat(alike, model="gpt-4"))
    assert len(packed) < 2_000

    _, headers, _ = send(proxy, packed, content_encoding="gzip")

    assert int(headers["x-compaction-tokens-before"]) > 8_192
    assert headers["x-compaction"] == "applied"


def test_an_azure_style_path_names_the_model_and_keeps_its_query(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = json.dumps({"messages": LONG}).encode()

    _, headers, _ = send(proxy, body, path="/openai/deployments/gpt-4/chat/completions?api-version=2024-10-21&a=%2F")

    assert headers["x-compaction"] in ("applied", "reused")
    assert upstream.chats[-1].target == "/openai/deployments/gpt-4/chat/completions?api-version=2024-10-21&a=%2F"


def test_an_unknown_model_passes_through_and_says_so(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    body = chat(LONG, model="nobody-knows-it")

    _, headers, _ = send(proxy, body)

    assert upstream.chats[0].body == body
    assert (headers["x-compaction"], headers["x-compaction-reason"]) == ("none", "unknown_window")


def test_answer_headers_pass_with_their_duplicates(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    sent = (("content-type", "application/json"), ("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-request-id", "r"))
    upstream.script = lambda _: Reply(200, sent, [b"{}"])

    _, headers, _ = send(proxy, chat([user("hi")]))

    assert headers.get_all("set-cookie") == ["a=1", "b=2"]
    assert headers["x-request-id"] == "r"
    assert "server" not in headers
    assert "date" not in headers


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_any_other_method_and_path_passes_as_it_came(proxy: RunningProxy, upstream: ScriptedUpstream, method: str) -> None:
    upstream.script = lambda _: Reply(201, (("content-type", "text/plain"),), [b"made"])

    status, headers, body = send(proxy, b"raw \xff bytes", "/v1/vector_stores/%2F..?x=1;y&x=2", method)

    assert (status, body) == (201, b"made")
    received = next(one for one in upstream.received if one.method == method and one.target.startswith("/v1/vector_stores"))
    assert (received.method, received.target, received.body) == (method, "/v1/vector_stores/%2F..?x=1;y&x=2", b"raw \xff bytes")
    assert "x-compaction" not in headers


def test_the_sidecar_compacts_without_the_upstream(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    status, _, body = send(proxy, chat(LONG, model="gpt-4"), "/v1/compact")

    told = json.loads(body)
    assert status == 200
    assert upstream.chats == []
    assert told["messages"][0] == LONG[0]
    assert told["messages"][-1] == LONG[-1]
    assert told["compaction"]["tokens_after"] < told["compaction"]["tokens_before"] / 2
    assert told["compaction"]["outcome"] in ("applied", "reused")


def test_the_sidecar_refuses_what_is_no_chat_body(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    status, headers, body = send(proxy, b"{", "/v1/compact")

    assert (status, headers["x-compaction-error"]) == (400, "1")
    assert json.loads(body)["error"]["code"] == "unreadable_body"


def test_received_less_forwarded_is_what_the_layers_saved(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    for n in range(3):
        send(proxy, chat(agent_session(28 + n, 300), model="gpt-4"))

    received, forwarded = (
        figure(proxy, "compaction_prompt_tokens_received_total"),
        figure(proxy, "compaction_prompt_tokens_forwarded_total"),
    )
    saved = figure(proxy, "compaction_prompt_tokens_saved_total")
    assert received > forwarded > 0
    assert received - forwarded == saved


def test_each_phase_of_our_own_time_is_told_and_none_twice(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    phases = ("read", "count", "resume", "compact", "validate", "write", "total")

    def spent(kind: str, text: str) -> list[float]:
        rows = dict(line.rsplit(" ", 1) for line in text.splitlines())
        return [float(rows[f'compaction_overhead_seconds_{kind}{{phase="{phase}"}}']) for phase in phases]

    before = metrics(proxy)
    _, headers, _ = send(proxy, chat(agent_session(31, 300, module="phases"), model="gpt-4"))
    after = metrics(proxy)

    assert headers["x-compaction"] == "applied"
    assert [now - then for now, then in zip(spent("count", after), spent("count", before), strict=True)] == [1] * len(phases)
    *parts, total = (now - then for now, then in zip(spent("sum", after), spent("sum", before), strict=True))
    assert min(parts) > 0
    assert sum(parts) <= total


def test_an_upstream_that_is_down_is_a_502_of_the_apis_shape() -> None:
    with running_proxy("--upstream", "http://127.0.0.1:9/v1") as lonely:
        status, headers, body = send(lonely, chat([user("hi")]))

    error = json.loads(body)["error"]
    assert (status, headers["x-compaction-error"], error["code"]) == (502, "1", "upstream_unreachable")


def test_client_keys_are_asked_for_when_they_are_set(upstream: ScriptedUpstream) -> None:
    environment = {"COMPACTION_CLIENT_KEYS": "house-key", "COMPACTION_UPSTREAM__API_KEY": "sk-upstream"}
    with running_proxy("--upstream", upstream.url, environment=environment) as guarded:
        without = send(guarded, chat([user("hi")]))
        wrong = send(guarded, chat([user("hi")]), authorization="Bearer other")
        right = send(guarded, chat([user("hi")]), authorization="Bearer house-key")

    assert (without[0], wrong[0], right[0]) == (401, 401, 200)
    assert json.loads(wrong[2])["error"]["code"] == "invalid_api_key"
    assert upstream.chats[0].header("authorization") == "Bearer sk-upstream"


def test_callers_with_different_keys_share_nothing(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    grown = [*agent_session(33, 300, module="shared"), {"role": "assistant", "content": "Done."}, user("Go on.")]

    outcomes = [
        send(proxy, chat(messages, model="gpt-4"), authorization=f"Bearer {key}")[1]["x-compaction"]
        for messages, key in ((grown[:-2], "one"), (grown, "two"), (grown, "one"))
    ]

    assert outcomes == ["applied", "applied", "reused"]


def test_the_log_holds_no_message_text_and_no_key(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    messages = agent_session(34, 300, system="CANARY-SYSTEM", module="canary")

    send(proxy, chat(messages, model="gpt-4"), authorization="Bearer CANARY-KEY")

    told = "\n".join(proxy.lines + proxy.errors) + metrics(proxy)
    assert "CANARY" not in told
    assert "Context compacted:" in told


def test_a_model_that_the_answer_calls_otherwise_keeps_its_window(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda _: completion(model="some-other-model", prompt_tokens=4_000)

    body = chat(agent_session(35, 300, module="renamed"), model="gpt-4")
    first, second = (send(proxy, body)[1]["x-compaction"] for _ in range(2))

    assert (first, second) == ("applied", "reused")

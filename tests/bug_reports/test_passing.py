"""Rows about what passes: bytes, headers, paths, encodings, connections, names and secrets."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import brotli
import pytest
import zstandard
from bug_reports import upstreams
from bug_reports.lab import Answer, Exchanged, Lab, holds, leaks, read_answer, received_to_end, until
from bug_reports.rows import CHAT, HEADERS, Request, built, row
from bug_reports.upstreams import field
from builders import agent_session, assistant, chat, prose, user
from live.toxic import Behavior, Toxic, events
from running import running_proxy

Check = Callable[[Exchanged], None]


def arrives(**headers: str | None) -> Check:
    """These headers as the upstream gets them; None: not at all."""

    def check(found: Exchanged) -> None:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        assert {name: field(found.received[0], name) for name in names} == names

    return check


def target(path: str) -> Check:
    def check(found: Exchanged) -> None:
        assert found.received[0].target == path.encode()

    return check


def comes_back(status: int, **headers: str) -> Check:
    def check(found: Exchanged) -> None:
        assert len(found.received) == 1
        assert found.answer.status == status
        assert {name: found.answer.header(name.replace("_", "-")) for name in headers} == headers

    return check


def nothing_more(_: Exchanged) -> None:
    """What holds for every exchange is all that the row asks for."""


PASSING: dict[str, tuple[str | Behavior, Check]] = {
    "H111": (upstreams.silent, nothing_more),
    "H155": (upstreams.silent, nothing_more),
    "H158": ("logprobs_nan", nothing_more),
    "H162": ("br_response", comes_back(200, content_encoding="br")),
    "H164": ("gzip_response", comes_back(200, content_encoding="gzip")),
    "H165": ("chunked_response", nothing_more),
    "H167": ("sse_with_content_length", nothing_more),
    "H168": (upstreams.refusing(400, "spaced  out"), comes_back(400)),
    "H170": ("status:429,retry-after:30", comes_back(429, retry_after="30")),
    "H171": (
        "status:429,anthropic-ratelimit-unified-status:rejected",
        comes_back(429, anthropic_ratelimit_unified_status="rejected"),
    ),
    "H173": ("echo", arrives(cf_visitor=None, cf_warp_tag_id=None, x_forwarded_for=None, via=None, forwarded=None)),
    "H174": ("echo", target("/v1/files?limit=2&after=a%2Fb;c")),
    "H175": ("echo", nothing_more),
    "H176": ("echo", nothing_more),
    "H178": ("echo", nothing_more),
    "H179": ("echo", target("/openai/deployments/gpt4o/chat/completions?api-version=2024-10-21")),
    "H197": (upstreams.silent, target("/v1/0/x")),
    "H200": ("echo", nothing_more),
    "H204": ("status:404", comes_back(404)),
    "H205": ("echo", arrives(authorization="Bearer SECRET-A", api_key="SECRET-B", cookie="c=SECRET-C")),
}


@pytest.mark.parametrize("row_id", PASSING)
def test_it_passes_as_it_came(lab: Lab, row_id: str) -> None:
    behavior, check = PASSING[row_id]
    exchanged = lab.send(built(row(row_id)), behavior)
    holds(exchanged)
    assert exchanged.untouched
    check(exchanged)


@pytest.mark.parametrize("row_id", ["H175", "H176", "H178", "H200"])
def test_fields_that_nobody_knows_survive_a_compaction(lab: Lab, row_id: str) -> None:
    given = json.loads(built(row(row_id)).body)
    given["messages"] = agent_session(12, 320)
    request = replace(built(row(row_id)), body=json.dumps(given, indent=1).encode()).having(x_compaction_window="3000")
    exchanged = lab.send(request, "echo")
    holds(exchanged)
    assert not exchanged.untouched
    assert list(json.loads(exchanged.forwarded)) == list(given)


@pytest.mark.parametrize(
    "name", ["模型/\x00x", "m" * 300, "", None, 7, ["gpt-4o"], {"a": 1}, "gpt-4o\n", "../../etc", "%s%n", "*"]
)
def test_H111_no_name_of_a_model_is_an_error(lab: Lab, name: object) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}]}).encode()
    exchanged = lab.send(Request(body=body), upstreams.silent)
    holds(exchanged)
    assert exchanged.untouched


def test_H112_other_endpoints_pass_with_all_their_headers(lab: Lab) -> None:
    beta = {"openai-beta": "assistants=v2", "anthropic-beta": "a,b"}
    exchanged = lab.send(Request("GET", "/v1/models?after=%20", {**HEADERS, **beta}), "models_list")
    holds(exchanged)
    arrives(openai_beta="assistants=v2", anthropic_beta="a,b")(exchanged)
    target("/v1/models?after=%20")(exchanged)


# --- encodings ------------------------------------------------------------------------------------------------------

CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("coding", CODINGS)
def test_H161_a_compressed_body_is_read_and_forwarded_as_it_came_or_plain(lab: Lab, coding: str) -> None:
    plain = chat(agent_session(12, 310))
    packed = Request(body=CODINGS[coding](plain)).having(content_encoding=coding)
    fits = lab.send(packed, "echo")
    holds(fits)
    arrives(content_encoding=coding)(fits)
    over = lab.send(packed.having(x_compaction_window="3000"), "echo")
    assert over.answer.outcome in ("applied", "reused")
    arrives(content_encoding=None)(over)
    holds(replace(over, request=replace(packed, body=plain)))


@pytest.mark.parametrize("coding", [*CODINGS, "gzip, gzip", "snappy"])
def test_H161_a_bomb_or_an_unknown_coding_passes_unread(lab: Lab, coding: str) -> None:
    body = b" " * (200 * 1024 * 1024 if coding == "gzip" else 8 * 1024 * 1024)
    for one in coding.split(", "):
        body = CODINGS.get(one, bytes)(body)
    before = lab.memory()
    exchanged = lab.send(Request(body=body).having(content_encoding=coding), upstreams.silent)
    holds(exchanged)
    assert exchanged.untouched
    assert exchanged.answer.header("x-compaction-reason") == "unreadable"
    assert lab.memory() - before < 100 * 1024 * 1024


def test_H185_uploads_stream_through(lab: Lab) -> None:
    request = replace(built(row("H185")), headers={**HEADERS, "content-type": "multipart/form-data; boundary=x"})
    before = lab.memory()
    exchanged = lab.send(request, upstreams.silent)
    holds(exchanged)
    assert len(exchanged.forwarded) == 104_857_600
    assert lab.memory() - before < 32 * 1024 * 1024


# --- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_id", "behavior"),
    [("H186", "close_idle_after:0.05s"), ("H187", "close_after_response_silently"), ("H234", "ok")],
)
def test_a_connection_that_was_closed_meanwhile_costs_no_request(lab: Lab, row_id: str, behavior: str) -> None:
    lab.answers(behavior)
    client = http.client.HTTPConnection(*lab.address, timeout=60)
    body = built(row(row_id)).body.replace(b"gpt-4o", b"unseen")
    try:
        for n in range(6):
            client.request("POST", CHAT, body, HEADERS)
            answer = client.getresponse()
            assert (answer.status, len(answer.read()) > 0) == (200, True)
            if n == 0:
                local = client.sock.getsockname()
            assert client.sock.getsockname() == local, "the proxy closed the client's connection"
            time.sleep(0.1)
    finally:
        client.close()


def test_H190_an_upstream_that_speaks_another_protocol_spoils_one_request_only(lab: Lab) -> None:
    broken = lab.send(built(row("H190")), "h2_goaway").answer
    assert broken.status == 502
    assert broken.json["error"]["code"] == "upstream_unreachable"
    holds(lab.send(built(row("H190")), upstreams.silent))


def test_H232_bytes_behind_an_answer_reach_nobody(lab: Lab) -> None:
    for tenant in "abababab":
        request = built(row("H232")).having(authorization=f"Bearer {tenant}")
        for behavior in ("extra_bytes_after_response", "extra_bytes_after_204"):
            assert b"injected" not in lab.send(request, behavior).answer.body


def test_H231_too_large_a_head_is_refused_and_the_next_client_served(lab: Lab) -> None:
    lab.answers(upstreams.silent)
    answer = read_answer(lab.bytes_back(built(row("H231")).raw()))
    assert answer.status in (400, 431)
    assert lab.upstream.requests == []
    holds(lab.send(built(row("H232")), upstreams.silent))


@pytest.mark.parametrize("row_id", ["H202", "H203"])
def test_a_target_that_names_a_host_goes_nowhere(lab: Lab, row_id: str) -> None:
    lab.answers(upstreams.silent)
    answer = read_answer(lab.bytes_back(built(row(row_id)).raw()))
    assert answer.status == 400
    assert lab.upstream.requests == []


def test_H202_a_redirect_is_the_clients_to_follow(lab: Lab) -> None:
    exchanged = lab.send(Request(body=built(row("H232")).body), "status:302,location:http://127.0.0.1:1/")
    holds(exchanged)
    comes_back(302, location="http://127.0.0.1:1/")(exchanged)


def test_H204_H205_no_key_is_said_when_an_upstream_breaks_off(lab: Lab) -> None:
    request = built(row("H205"))
    secret = replace(request, path=CHAT + "?key=SECRET-Q", body=request.body.replace(b'"hi"', b'"CANARY"'))
    for behavior in ("rst_after:headers", "die_without_answer", "short_content_length", "h2_goaway"):
        assert leaks(lab.send(secret, behavior).answer.raw.decode("latin-1")) == []
    assert leaks(lab.told) == []


def test_H198_no_secret_is_in_the_metrics(lab: Lab) -> None:
    body = chat([{"role": "user", "content": "CANARY"}], user="CANARY", metadata={"a": "CANARY"})
    lab.send(Request(path=CHAT + "?a=CANARY", body=body).having(x_compaction_session="CANARY"), upstreams.silent)
    assert leaks(lab.admin("/metrics") + lab.admin("/stats")) == []


def test_H194_H197_names_from_clients_do_not_become_series(lab: Lab) -> None:
    def burst(numbers: range) -> int:
        for n in numbers:
            holds(lab.send(built(row("H194"), n), upstreams.silent))
            holds(lab.send(built(row("H197"), n), upstreams.silent))
        time.sleep(1.1)  # a scrape is shared for a second
        return len(lab.admin("/metrics").splitlines())

    full = burst(range(55))
    assert burst(range(55, 75)) == full


def test_H213_many_requests_over_budget_at_once_are_all_answered(lab: Lab) -> None:
    lab.answers(upstreams.silent)
    answers: list[Answer] = []

    def one(n: int) -> None:
        request = Request(body=chat(agent_session(40, system=f"You are number {n}."))).having(x_compaction_window="8000")
        answers.append(read_answer(lab.bytes_back(request.raw())))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers] == [200] * 24
    assert {answer.header("x-compaction-error") for answer in answers} == {None}


def test_H149_health_is_answered_while_a_million_characters_are_counted(lab: Lab) -> None:
    lab.answers(upstreams.silent)
    body = built(row("H149")).body.replace(b"gpt-4o", b"m128k").replace(b"\\u6f22", b"\\u6f23")
    data: list[bytes] = []
    work = threading.Thread(target=lambda: data.append(lab.bytes_back(Request(body=body).raw())))
    work.start()
    answered = 0
    while work.is_alive():
        assert lab.admin("/healthz")
        answered += work.is_alive()
    assert read_answer(data[0]).status == 200
    assert answered > 3


def test_H224_requests_at_the_same_time_become_the_same(lab: Lab) -> None:
    lab.answers(upstreams.silent)
    raw = built(row("H224")).having(x_compaction_window="5000").raw()
    threads = [threading.Thread(target=lab.bytes_back, args=(raw,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lab.upstream.requests) == 12
    assert len({one.body for one in lab.upstream.requests}) == 1


def test_H218_H219_what_is_forwarded_mostly_only_grows(lab: Lab) -> None:
    """Between two events each turn extends the last one's bytes, so that the upstream's prompt cache holds."""
    session, breaks, last = agent_session(40, 120), 0, b""
    turns = range(3, len(session), 2)
    for end in turns:
        request = Request(body=chat(session[:end], "m128k")).having(x_compaction_window="6000")
        exchanged = lab.send(request, upstreams.silent)
        holds(exchanged)
        breaks += not exchanged.forwarded.startswith(last)
        last = exchanged.forwarded.removesuffix(b"]}")
    assert 1 <= breaks <= len(turns) // 5


def test_H226_H208_two_credentials_share_nothing_but_the_outcome(lab: Lab) -> None:
    request = Request(body=chat(agent_session(12))).having(x_compaction_window="3000", x_compaction_session="same")
    first = lab.send(request.having(authorization="Bearer one"), upstreams.silent)
    second = lab.send(request.having(authorization="Bearer two"), upstreams.silent)
    assert (first.answer.outcome, second.answer.outcome) == ("applied", "applied")
    again = lab.send(request.having(authorization="Bearer one"), upstreams.silent)
    assert again.answer.outcome == "reused"
    assert again.forwarded == first.forwarded
    # each caller's summaries bear a seal of its own
    assert first.forwarded != second.forwarded


@pytest.mark.parametrize("variety", range(6))
def test_a_client_that_goes_back_to_an_earlier_message_is_asked_that_one(lab: Lab, variety: int) -> None:
    """What was history, and folded, when it was first sent may be the newest message when the client edits or retries."""
    chosen = random.Random(variety)
    session = [user(f"Task {variety}.")]
    for n in range(9):
        speaker = chosen.choice([user, user, assistant])
        session.append(speaker(prose(chosen.choice([5, 5, 200, 500]), 100 * variety + n)))
    for end in range(len(session), 0, -1):
        body = chat([*session, user("Last?")] if end == len(session) else session[:end])
        holds(lab.send(Request(body=body).having(x_compaction_window="1500"), upstreams.silent))


# --- what the upstream teaches --------------------------------------------------------------------------------------


def test_H104_an_answer_as_long_as_the_window_is_the_upstreams_to_refuse(lab: Lab) -> None:
    refusal = upstreams.refusing(400, "max_tokens is too large: 128000", "invalid_value")
    exchanged = lab.send(built(row("H104")), refusal)
    holds(exchanged)
    comes_back(400)(exchanged)


def test_H108_an_unknown_model_passes_until_its_limit_is_learned(lab: Lab) -> None:
    upstream = upstreams.window_of(8_192, 3)
    hopeless = lab.send(built(row("H108")), upstream)
    holds(hopeless)
    comes_back(400)(hopeless)
    assert hopeless.untouched
    helped = lab.send(Request(body=chat(agent_session(40), "my-local-7b")), upstream)
    assert helped.answer.status == 200
    assert helped.answer.outcome == "applied"


def test_H215_H217_what_cannot_be_helped_gets_the_upstreams_own_words(lab: Lab) -> None:
    upstream = upstreams.window_of(2_000, 3)
    exchanged = lab.send(Request(body=chat([{"role": "user", "content": "word " * 9_000}], "no-help")), upstream)
    holds(exchanged)
    assert exchanged.answer.json["error"]["code"] == "context_length_exceeded"


def test_H101_an_upstream_that_counts_more_is_believed(lab: Lab) -> None:
    """20,000 words are 20,000 tokens for us, 25,000 for this upstream."""
    for n in range(6):
        body = chat([{"role": "user", "content": f"{n} " + "word " * 20_000}], "counts-more")
        holds(lab.send(Request(body=body).having(x_compaction_window="100000"), upstreams.reporting(25_000)))
    last = chat([{"role": "user", "content": "last " + "word " * 20_000}], "counts-more")
    exchanged = lab.send(Request(body=last).having(x_compaction_window="25000"), upstreams.reporting(25_000))
    assert exchanged.answer.tokens is not None
    assert 24_500 < exchanged.answer.tokens[0] < 25_500


def test_H109_the_upstream_is_asked_for_its_windows(lab: Lab, toxic_upstream_of_log: Toxic) -> None:
    lab.answers(_server_of_one_model)
    with running_proxy("--upstream", toxic_upstream_of_log.url + "/v1") as proxy:
        asking = Lab(proxy, toxic_upstream_of_log)
        body = chat(agent_session(40), "q27")
        until(lambda: b"x-compaction: applied" in asking.bytes_back(Request(body=body).raw()))


async def _server_of_one_model(ex: upstreams.Exchange) -> None:
    if ex.request.method == "GET" and ex.request.target == b"/v1/models":
        model = {"id": "q27", "object": "model", "max_model_len": 4096}
        return await ex.answer(json.dumps({"object": "list", "data": [model]}).encode(), 200, b"content-type: application/json")
    return await upstreams.silent(ex)


# --- the process ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """Two streams at the time of a SIGTERM: one that comes to its end, one that never does."""

    finite: Answer
    hanging: Answer
    code: int


@pytest.fixture(scope="module")
def ending(toxic_upstream_of_log: Toxic, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ending]:
    config = tmp_path_factory.mktemp("ending") / "proxy.yaml"
    config.write_text("server: {drain_timeout: 2}\ncompaction: {discovery: false}\n")
    with running_proxy("--upstream", toxic_upstream_of_log.url + "/v1", "--config", str(config)) as proxy:
        lab = Lab(proxy, toxic_upstream_of_log)
        with lab.connection() as finite, lab.connection() as hanging:
            lab.answers("chunks:20@0.05s")
            finite.sendall(built(row("H221")).raw())
            begun = finite.recv(16)
            lab.answers(upstreams.unending)
            hanging.sendall(built(row("H223")).raw())
            hung = hanging.recv(16)
            proxy.process.send_signal(signal.SIGTERM)
            answers = [read_answer(start + received_to_end(one)) for start, one in ((begun, finite), (hung, hanging))]
        yield Ending(*answers, proxy.process.wait())


def test_H221_a_stream_is_finished_before_the_process_ends(ending: Ending) -> None:
    assert ending.finite.clean
    assert ending.finite.body == b"".join(events(20))


def test_H223_a_stream_that_hangs_does_not_keep_the_process(ending: Ending) -> None:
    assert not ending.hanging.clean
    assert ending.code in (0, -signal.SIGTERM)


def test_H229_a_store_that_is_garbage_costs_no_request(toxic_upstream_of_log: Toxic, tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"this is no database " * 5_000)
    config = tmp_path / "proxy.yaml"
    config.write_text(f"store: sqlite:///{tmp_path}/store.db\ncompaction: {{discovery: false}}\n")
    with running_proxy("--upstream", toxic_upstream_of_log.url + "/v1", "--config", str(config)) as proxy:
        lab = Lab(proxy, toxic_upstream_of_log)
        request = Request(body=chat(agent_session(12))).having(x_compaction_window="3000")
        for _ in range(2):
            exchanged = lab.send(request, upstreams.silent)
            holds(exchanged)
            assert not exchanged.untouched
        assert leaks(lab.told) == []

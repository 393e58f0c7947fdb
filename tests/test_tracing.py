"""Spans of a running proxy: what a trace of a chat request holds, and what of it goes upstream."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from builders import agent_session, chat, user
from fakes import Received, Reply, ScriptedUpstream, completion, stream, too_long
from running import RunningProxy, running_proxy, send

from proxy.config import load
from proxy.errors import ConfigError

CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")
collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


class Collector:
    """A real OTLP receiver: the spans that came, by name."""

    def __init__(self, receiver: ScriptedUpstream) -> None:
        self._receiver = receiver

    def spans(self) -> list[Any]:
        found = []
        for one in self._receiver.received:
            body = gzip.decompress(one.body) if one.header("content-encoding") == "gzip" else one.body
            request = collector.ExportTraceServiceRequest.FromString(body)
            found += [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]
        return found

    def wait(self, count: int) -> list[Any]:
        for _ in range(500):
            if len(self.spans()) >= count:
                break
            time.sleep(0.02)
        return sorted(self.spans(), key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collecting() -> Iterator[ScriptedUpstream]:
    yield from ScriptedUpstream(script=lambda _: Reply(chunks=[b""])).start()


@pytest.fixture
def spans(collecting: ScriptedUpstream) -> Collector:
    return Collector(collecting)


@pytest.fixture
def proxy(upstream: ScriptedUpstream, collecting: ScriptedUpstream) -> Iterator[RunningProxy]:
    environment = {
        "COMPACTION_TRACING__ENABLED": "true",
        "COMPACTION_TRACING__ENDPOINT": collecting.url + "/v1/traces",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with running_proxy("--upstream", upstream.url, environment=environment) as running:
        yield running


def attributes(holder: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in holder.attributes}


def test_a_stream_of_many_chunks_is_two_spans(proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 200, "total_tokens": 209}
    upstream.script = lambda _: stream(*[{"content": f"word {n} "} for n in range(200)], usage=usage)

    send(proxy, chat([user("hi")], model="gpt-4", stream=True))

    request, attempt = spans.wait(2)
    time.sleep(0.2)
    assert len(spans.spans()) == 2
    assert (request.name, attempt.name) == ("POST /chat/completions", "chat gpt-4")
    assert (request.kind, attempt.kind) == (2, 3)  # server, client
    assert attempt.parent_span_id == request.span_id
    assert request.parent_span_id == b""
    told = attributes(attempt)
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", "gpt-4")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (9, 200)
    assert told["gen_ai.response.model"] == "gpt-4o"
    assert told["server.address"] == "127.0.0.1"
    assert attributes(request)["http.route"] == "/chat/completions"
    assert attributes(request)["compaction.outcome"] == "none"
    assert attempt.end_time_unix_nano <= request.end_time_unix_nano


def test_a_compaction_is_an_event_with_its_tokens_and_layers(
    proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector
) -> None:
    _, headers, _ = send(proxy, chat(agent_session(30, 300, system="CANARY"), model="gpt-4"))

    request = spans.wait(2)[0]
    before, after = (int(headers[f"x-compaction-tokens-{what}"]) for what in ("before", "after"))
    [event] = request.events
    told = attributes(event)
    assert event.name == "context_compacted"
    assert (told["compaction.tokens_before"], told["compaction.tokens_after"]) == (before, after)
    assert sum(told["compaction.layers_saved"]) == before - after
    assert len(told["compaction.layers"]) == len(told["compaction.layers_saved"])
    assert "CANARY" not in str(spans.spans())


def test_the_clients_trace_goes_on_upstream(proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector) -> None:
    send(proxy, chat([user("hi")], model="gpt-4"), traceparent=CLIENTS, tracestate="vendor=1", baggage="a=b")

    request, attempt = spans.wait(2)
    sent = upstream.chats[0]
    assert request.trace_id.hex() == attempt.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert request.parent_span_id.hex() == "b7ad6b7169203331"
    assert sent.header("traceparent") == f"00-0af7651916cd43dd8448eb211c80319c-{attempt.span_id.hex()}-01"
    assert (sent.header("tracestate"), sent.header("baggage")) == ("vendor=1", "a=b")
    assert len([name for name, _ in sent.headers if name.lower() == "traceparent"]) == 1


def test_a_trace_that_the_client_does_not_record_is_not_recorded(
    proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector
) -> None:
    send(proxy, chat([user("hi")], model="gpt-4"), traceparent=UNSAMPLED)
    send(proxy, chat([user("hi")], model="gpt-4"))

    spans.wait(2)
    assert len(spans.spans()) == 2
    assert re.fullmatch(r"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-00", upstream.chats[0].header("traceparent") or "")


def test_a_trace_begins_here_where_the_client_has_none(proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector) -> None:
    send(proxy, chat([user("hi")], model="gpt-4"))

    attempt = spans.wait(2)[1]
    sent, flags = (upstream.chats[0].header("traceparent") or "").rsplit("-", 1)
    assert sent == f"00-{attempt.trace_id.hex()}-{attempt.span_id.hex()}"
    assert int(flags, 16) & 1 == 1  # recorded


def test_each_try_is_a_span(proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector) -> None:
    def narrow(one: Received) -> Reply:
        return too_long(4_000, 10_000) if len(one.body) > 30_000 else completion()

    upstream.script = narrow

    status, _, _ = send(proxy, chat(agent_session(30, 300), model="nobody-knows-it"))

    request, first, second = spans.wait(3)
    assert status == 200
    assert [attributes(one)["http.response.status_code"] for one in (first, second)] == [400, 200]
    assert [attributes(one).get("error.type") for one in (first, second)] == ["400", None]
    assert {first.parent_span_id, second.parent_span_id} == {request.span_id}


def test_an_upstream_that_breaks_off_is_an_error(proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector) -> None:
    upstream.script = lambda _: stream({"content": "half"}, cut=True)

    with pytest.raises(http.client.IncompleteRead):
        send(proxy, chat([user("hi")], model="gpt-4", stream=True))

    request, attempt = spans.wait(2)
    assert (request.status.code, attempt.status.code) == (2, 2)


def test_metrics_name_the_trace(proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector) -> None:
    send(proxy, chat([user("hi")], model="gpt-4"))

    trace_id = spans.wait(2)[0].trace_id.hex()
    connection = http.client.HTTPConnection(urlsplit(proxy.admin).netloc, timeout=30)
    connection.request("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    scrape = connection.getresponse().read().decode()
    connection.close()
    assert f'# {{trace_id="{trace_id}"}}' in scrape


def test_only_chat_requests_are_traced(proxy: RunningProxy, upstream: ScriptedUpstream, spans: Collector) -> None:
    connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=30)
    connection.request("GET", "/v1/files", headers={"traceparent": CLIENTS})
    connection.getresponse().read()
    connection.close()
    send(proxy, chat([user("hi")], model="gpt-4"))

    assert [span.name for span in spans.wait(2)] == ["POST /chat/completions", "chat gpt-4"]
    assert next(one for one in upstream.received if one.target == "/v1/files").header("traceparent") == CLIENTS


def test_a_collector_that_is_down_harms_no_request_and_no_end(upstream: ScriptedUpstream) -> None:
    environment = {"COMPACTION_TRACING__ENABLED": "true", "COMPACTION_TRACING__ENDPOINT": "http://127.0.0.1:9/v1/traces"}
    with running_proxy("--upstream", upstream.url, environment=environment) as lonely:
        status, _, _ = send(lonely, chat([user("hi")], model="gpt-4"))
        lonely.process.terminate()
        code = lonely.process.wait(10)

    assert (status, code) == (200, 0)


def test_without_tracing_the_context_passes_as_it_came_and_nothing_is_imported(upstream: ScriptedUpstream) -> None:
    with running_proxy("--upstream", upstream.url) as plain:
        send(plain, chat([user("hi")], model="gpt-4"), traceparent=CLIENTS)
    script = "import sys, proxy.app; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"

    assert upstream.chats[0].header("traceparent") == CLIENTS
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_packages_that_are_missing_are_named() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from proxy.app import build_tracing\n"
        "from proxy.config import load\n"
        "from proxy.errors import ConfigError\n"
        "try:\n"
        "    build_tracing(load({'tracing': {'enabled': True}}, {}))\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )

    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout

    assert "pip install 'compaction-proxy[otel]'" in said


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tracing\.sample"):
        load({"tracing": {"sample": 2}}, {})


def test_the_answers_are_what_they_are_without_tracing(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    upstream.script = lambda _: completion("a word")

    _, headers, body = send(proxy, chat([user("hi")], model="gpt-4"))

    assert json.loads(body) == json.loads(completion("a word").chunks[0])
    assert "traceparent" not in headers


def test_spans_can_be_taken_by_another_processor() -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from proxy.records import RequestRecord
    from proxy.tracing import Tracing

    memory = InMemorySpanExporter()
    tracing = Tracing("https://api.example/v1", service="desk", processor=SimpleSpanProcessor(memory))

    trace = tracing.begin([(b"traceparent", CLIENTS.encode())], "/v1/chat/completions")
    headers = trace.sends([(b"traceparent", CLIENTS.encode()), (b"accept", b"*/*")], None)
    trace.end(RequestRecord(code=499, client_disconnect=True), None, None)
    tracing.close()

    attempt, request = memory.get_finished_spans()
    assert (attempt.name, request.name) == ("chat", "POST /chat/completions")
    assert trace.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert [name for name, _ in headers] == [b"accept", b"traceparent"]
    assert (attempt.attributes["server.address"], attempt.attributes["server.port"]) == ("api.example", 443)
    assert request.attributes["error.type"] == "client_disconnect"
    assert request.resource.attributes["service.name"] == "desk"

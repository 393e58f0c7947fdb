"""Spans of chat requests for OpenTelemetry: one for the request, one for each try at the upstream, none for a chunk.

Imported only when tracing is on: the packages are an extra, and nothing of them costs those who do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__
from proxy.records import RequestRecord

Headers = list[tuple[bytes, bytes]]

CONTEXT = frozenset({b"traceparent", b"tracestate"})
"""Headers that carry the trace (W3C Trace Context); baggage is the client's own and passes as it came."""
LEFT = 499
EVENT = "context_compacted"


class Tracing:
    """Makes the spans of one proxy. upstream: its URL. processor: who takes them; by default a batch at a time to `endpoint`.

    endpoint: of an OTLP receiver over HTTP, None for what OTEL_EXPORTER_OTLP_ENDPOINT says. sample: share of the traces that
    begin here; one that the client has begun is recorded when the client says so.
    """

    def __init__(
        self,
        upstream: str,
        *,
        endpoint: str | None = None,
        sample: float = 1.0,
        service: str = "compaction-proxy",
        processor: SpanProcessor | None = None,
    ) -> None:
        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sample)), resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self.tracer = self._provider.get_tracer("compaction-proxy", __version__)
        self.propagator = TraceContextTextMapPropagator()
        parts = urlsplit(upstream)
        self.peer: dict[str, Any] = {
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        }

    def begin(self, headers: Sequence[tuple[bytes, bytes]], path: str) -> Trace:
        """A request whose head has come."""
        carried = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in CONTEXT}
        return Trace(self, self.propagator.extract(carried), path)

    def close(self) -> None:
        """Hands over what is left; may block as long as the receiver lets it."""
        self._provider.shutdown()


class Trace:
    """The spans of one request. trace_id: as metrics name it, None when the trace is not recorded."""

    def __init__(self, tracing: Tracing, parent: Context, path: str) -> None:
        self._tracing = tracing
        attributes = {"http.request.method": "POST", "url.path": path, "gen_ai.operation.name": "chat"}
        self._request: Span = tracing.tracer.start_span(
            "POST /chat/completions", context=parent, kind=SpanKind.SERVER, attributes=attributes
        )
        self._try: Span | None = None
        context = self._request.get_span_context()
        self.trace_id: str | None = format_trace_id(context.trace_id) if context.trace_flags.sampled else None

    def sends(self, headers: Headers, model: str | None) -> Headers:
        """Begins a try at the upstream: the headers with the context that it is to carry on."""
        self._end_try()
        attributes: dict[str, Any] = {"http.request.method": "POST", "gen_ai.operation.name": "chat", **self._tracing.peer}
        if model is not None:
            attributes["gen_ai.request.model"] = model
        span = self._try = self._tracing.tracer.start_span(
            f"chat {model}" if model else "chat",
            context=set_span_in_context(self._request, Context()),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        carried: dict[str, str] = {}
        self._tracing.propagator.inject(carried, set_span_in_context(span, Context()))
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in carried.items()]
        return [field for field in headers if field[0] not in CONTEXT] + own

    def answered(self, status: int) -> None:
        """The head of the answer to the last try."""
        if self._try is not None:
            self._try.set_attribute("http.response.status_code", status)
            if status >= 400:
                _fail(self._try, str(status))

    def end(self, record: RequestRecord, answered_by: str | None, event: Mapping[str, Any] | None) -> None:
        """The request is over. answered_by: the model that the answer names. event: attributes of its compaction, if any."""
        usage = {
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": answered_by,
            "gen_ai.usage.input_tokens": record.usage_input,
            "gen_ai.usage.output_tokens": record.usage_output,
            "gen_ai.usage.cache_read.input_tokens": record.usage_cached,
        }
        known = {name: value for name, value in usage.items() if value is not None}
        if self._try is not None:
            self._try.set_attributes(known)
            if record.upstream_error is not None and not record.upstream_error.startswith("http_"):
                _fail(self._try, record.upstream_error)
        self._end_try()
        facts = {
            **known,
            "http.route": record.endpoint,
            "http.response.status_code": record.code,
            "compaction.outcome": record.outcome,
            "compaction.reason": record.passthrough,
            "compaction.tokens_before": record.received,
            "compaction.tokens_after": record.forwarded,
        }
        self._request.set_attributes({name: value for name, value in facts.items() if value is not None})
        if event is not None:
            self._request.add_event(EVENT, event)
        if record.client_disconnect or record.code == LEFT:
            _fail(self._request, "client_disconnect")
        elif record.stream_abort or record.code >= 500:
            _fail(self._request, record.upstream_error or str(record.code))
        self._request.end()

    def _end_try(self) -> None:
        if self._try is not None:
            self._try.end()
            self._try = None


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)

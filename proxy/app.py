"""The composition root: a configuration becomes rooms, and the rooms two ASGI apps."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy import __version__, tokens
from proxy.admin import Readiness, admin_app
from proxy.arrivals import Headers, header
from proxy.checkpoints import CheckpointStore, OpenedStore, open_store
from proxy.compaction.strategies import Pipeline, build
from proxy.compaction.validation import rules_for
from proxy.compactor import Compactor
from proxy.config import Config, Log
from proxy.discovery import Discoverer
from proxy.endpoints import Options, Proxy
from proxy.errors import ConfigError
from proxy.explain import Explanations, Shelf
from proxy.explain_pages import explain_routes
from proxy.gate import ANYONE, Gate, Gated, is_loopback
from proxy.metrics import ANY, Metrics
from proxy.notify import Notifier
from proxy.pricing import cost_of
from proxy.records import RequestRecord
from proxy.server import Draining
from proxy.summarizers import Completer
from proxy.summarizers.anchored import AnchoredSummarizer
from proxy.summarizers.background import Background, Terms
from proxy.summarizers.call import Caller, Settings
from proxy.summarizers.kimi import KimiSummarizer
from proxy.summarizers.redaction import origin
from proxy.telling import Explainer
from proxy.upstream import Upstream
from proxy.walk import Marks
from proxy.windows import Windows, built_in
from proxy.workers_explanations import SharedExplanations
from proxy.workers_figures import hold

if TYPE_CHECKING:
    from proxy.tracing import Tracing

SHARE_SECONDS = 0.5
"""Between two times that a worker's figures are put where the others find them."""
CLOSE_SECONDS = 1.0
"""What the last spans get to be handed over."""
WARM_ENCODING = "o200k_base"
"""Loaded before the first request comes: most models use it."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""To listen on all addresses, and where this machine's own clients then find us."""

log = structlog.get_logger("proxy")


@dataclass(frozen=True, slots=True)
class Application:
    """What the server runs. proxy: the proxy port's app. admin: the admin port's."""

    proxy: ASGIApp
    admin: ASGIApp
    metrics: Metrics
    compactor: Compactor


def build_windows(config: Config) -> Windows:
    """The registry of windows as configured."""
    return Windows(config.models, default_window=config.default_window, upstream=config.upstream.url)


def build_layers(config: Config) -> Pipeline:
    """The configured strategy. Raises ConfigError."""
    blocks = {
        name: None if block is None else msgspec.to_builtins(block)
        for name, block in (("context_collapse", config.context_collapse), ("auto_compact", config.auto_compact))
    }
    return build(config.compaction.strategy, layers=config.compaction.layers, **blocks)


def build_compactor(
    config: Config, windows: Windows, store: CheckpointStore | None = None, summaries: Background | None = None
) -> Compactor:
    """Everything that decides, without the network. Raises ConfigError."""
    compaction = config.compaction
    marks = Marks(
        compaction.trigger,
        compaction.target,
        compaction.min_gain,
        compaction.timeout_ms / 1000,
        thrifty=compaction.prompt_cache == "aware",
    )
    return Compactor(
        windows,
        build_layers(config),
        marks,
        store=store,
        secret=(config.store.encrypt_key or "").encode(),
        rules=rules_for(compaction.templates),
        enabled=compaction.enabled,
        shadow=compaction.shadow,
        upstream=config.upstream.url,
        max_body_bytes=config.max_body_bytes,
        summaries=summaries,
    )


def build_summaries(config: Config, windows: Windows, metrics: Metrics, upstream: Completer) -> Background | None:
    """Summaries by a model, told to the metrics with their price; None when they are off. upstream: who is asked."""
    given = config.summarizer
    if given.mode == "off":
        return None

    def observe(model: str, outcome: str, *, seconds: float, tokens_in: int, tokens_out: int) -> None:
        window = windows.lookup(model, time.monotonic())
        spent = cost_of(window.price, tokens_in, tokens_out) if window is not None and tokens_in + tokens_out else None
        metrics.observe_summary(model, outcome, seconds=seconds, tokens_in=tokens_in, tokens_out=tokens_out, cost=spent)

    def window(model: str) -> int | None:
        found = windows.lookup(given.model or model, time.monotonic())
        return None if found is None else found.tokens

    settings = Settings(
        model=given.model,
        timeout=given.timeout_s,
        max_output=given.max_output_tokens,
        foreign=origin(config.upstream.url) != origin(given.base_url or config.upstream.url),
    )
    caller = Caller(upstream, settings, observe=observe)
    terms = Terms(
        given.mode, given.prefetch, given.wait_ms / 1000, given.role, given.max_preserved_messages, given.max_output_tokens
    )
    return Background(KimiSummarizer(caller) if given.mode == "kimi" else AnchoredSummarizer(caller), terms, window=window)


def _summarizer(config: Config, upstream: Upstream) -> Upstream:
    """The server that writes summaries: the upstream itself unless it has a place or a key of its own."""
    given = config.summarizer
    if given.base_url is None and given.api_key is None:
        return upstream
    url = given.base_url or config.upstream.url
    # a private authority is trusted for the upstream that it was given for
    ours = origin(url) == origin(config.upstream.url)
    return Upstream(
        url,
        connect_timeout=config.upstream.connect_timeout,
        api_key=given.api_key or (config.upstream.api_key if ours else None),
        ca_file=config.upstream.ca_file if ours else None,
        transport=config.upstream.transport,
    )


def build_options(config: Config) -> Options:
    """What is done beyond the messages."""
    compaction = config.compaction
    return Options(
        clamp_max_tokens=compaction.clamp_max_tokens,
        ask_usage=compaction.stream_usage == "inject",
        original_usage=compaction.usage_report == "original",
    )


def build_notifier(config: Config, metrics: Metrics) -> Notifier | None:
    """Who tells the webhook, None without one."""
    given = config.notify
    if given.webhook is None:
        return None
    return Notifier(
        given.webhook,
        metrics.observe_notice,
        timeout=given.timeout_s,
        attempts=given.attempts,
        backoff=given.backoff_s,
        waiting=given.waiting,
    )


def build_explanations(config: Config, folder: Path | None) -> Shelf | None:
    """Where explanations are kept, None without them. folder: where several processes share their figures."""
    if not config.explain.enabled:
        return None
    if folder is None:
        return Explanations(config.explain.max_bytes)
    return SharedExplanations(folder, config.explain.max_bytes)


def build_tracing(config: Config) -> Tracing | None:
    """Who makes the spans, None without tracing. Raises ConfigError where the packages are missing."""
    given = config.tracing
    if not given.enabled:
        return None
    return _tracing_class()(config.upstream.url, endpoint=given.endpoint, sample=given.sample, service=given.service)


def _tracing_class() -> type[Tracing]:
    try:
        from proxy.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            f"tracing.enabled needs packages that are not installed ({error.name}): pip install 'compaction-proxy[otel]'"
        ) from None
    return Tracing


async def _closed(tracing: Tracing) -> None:
    """Hands over the last spans, and does not wait for a receiver that is not there."""
    closing = threading.Thread(target=tracing.close, daemon=True)  # a pool's threads would be waited for at the end
    closing.start()
    await asyncio.to_thread(closing.join, CLOSE_SECONDS)


def check(config: Config) -> None:
    """Raises ConfigError where `build_app` would, and leaves nothing running: who starts workers asks before they do."""
    if config.tracing.enabled:
        _tracing_class()
    build_app(msgspec.structs.replace(config, tracing=msgspec.structs.replace(config.tracing, enabled=False)))


def build_worker(config: Config, folder: Path) -> tuple[ASGIApp, ASGIApp]:
    """The two apps in one of several processes. folder: where they share their figures."""
    configure_logging(config.log)
    hold(folder)
    built = build_app(config, folder)
    return built.proxy, built.admin


def build_app(config: Config, folder: Path | None = None) -> Application:
    """The two apps of a configuration. folder: where several processes share their figures. Raises ConfigError."""
    _check_exposure(config)
    _check_circle(config)
    windows = build_windows(config)
    metrics = Metrics(model_names=model_names(config), folder=folder)
    metrics.set_config_loaded(time.time())
    store = _store(config, metrics)
    api, root = _upstream(config, config.upstream.url), _upstream(config, _without_version(config.upstream.url))
    summarizer = _summarizer(config, api)
    compactor = build_compactor(config, windows, store, build_summaries(config, windows, metrics, summarizer))
    discoverer = Discoverer(api, root, windows)
    explanations = build_explanations(config, folder)
    explainer = None if explanations is None else Explainer(explanations, full_text=config.explain.full_text)
    notifier, tracing = build_notifier(config, metrics), build_tracing(config)
    proxy = Proxy(
        api,
        compactor,
        metrics,
        max_body_bytes=config.max_body_bytes,
        body_timeout=config.server.body_timeout,
        client_keys=config.client_keys,
        discover=discoverer.notice if config.compaction.discovery else lambda _: None,
        options=build_options(config),
        explainer=explainer,
        notify=None if notifier is None else notifier.notice,
        tracing=tracing,
    )

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        tokens.ruler("gpt-4o", {}).text("warm")
        built_in()
        metrics.set_tokenizer_degraded(WARM_ENCODING, tokens.degraded().get(WARM_ENCODING, False))
        if config.compaction.discovery and _is_local(config.upstream.url):
            discoverer.notice([])
        sharing = None if folder is None else asyncio.ensure_future(_share(metrics))
        yield
        if sharing is not None:
            sharing.cancel()
            with suppress(OSError):  # the folder may be gone; the rest is to be closed all the same
                metrics.share()
        await discoverer.aclose()
        if notifier is not None:
            await notifier.aclose()
        if explainer is not None:
            explainer.close()
        if tracing is not None:
            await _closed(tracing)
        await compactor.aclose()
        for server in dict.fromkeys((api, root, summarizer)):
            await server.aclose()

    outer = _WithLifespan(_gated(proxy, config.server.host, config, metrics), Starlette(lifespan=lifespan))

    def ready() -> Readiness:
        degraded = sorted(name for name, wrong in tokens.degraded().items() if wrong)
        details = {
            "tokenizer": f"degraded: {', '.join(degraded)}" if degraded else "exact",
            "store": "ok" if store.is_healthy else "does not answer: memory only",
            "version": __version__,
        }
        return Readiness(not outer.draining.active, ("draining",) if outer.draining.active else (), details)

    def extras() -> Mapping[str, object]:
        calibration = [
            {**key._asdict(), **msgspec.structs.asdict(line)} for key, line in compactor.learned.calibrator.learned().items()
        ]
        return {"version": __version__, "windows": {"learned": windows.learned(time.monotonic())}, "calibration": calibration}

    pages = () if explanations is None else explain_routes(explanations, token=config.explain.token)
    admin = admin_app(metrics, ready=ready, extras=extras, routes=pages)
    return Application(outer, _gated(admin, config.server.admin_host, config), metrics, compactor)


def model_names(config: Config) -> list[str]:
    """The configured names that are no globs: each has a label of its own."""
    return [name for name in config.models if not set(name) & set("*?[")]


async def _share(metrics: Metrics) -> None:
    while True:
        await asyncio.sleep(SHARE_SECONDS)
        with suppress(OSError):  # a full disk: readers keep what was told last, and the next time may do
            await asyncio.to_thread(metrics.share)


def _store(config: Config, metrics: Metrics) -> OpenedStore:
    """The configured store, its calls and its size told to the metrics."""
    given = config.store

    def observe(name: str, operation: str, result: str, seconds: float) -> None:
        metrics.observe_checkpoint(name, operation, result, seconds)
        metrics.set_checkpoint_bytes(name, store.size)

    store = open_store(given.url, ttl=given.ttl_s, max_bytes=given.max_bytes, encrypt_key=given.encrypt_key, observe=observe)
    return store


def _gated(app: ASGIApp, host: str, config: Config, metrics: Metrics | None = None) -> ASGIApp:
    """The app of a listener, behind a gate where only this machine reaches it or names were given; else the very same app.

    host: what the listener is bound to. metrics: where refusals are counted.
    """
    allowed = tuple(name.lower() for name in config.server.allowed_hosts)
    if ANYONE in allowed or not (allowed or is_loopback(host)):
        return app
    told: set[str] = set()

    def refused(reason: str, headers: Headers) -> None:
        if metrics is not None:
            metrics.record(RequestRecord(endpoint=ANY, code=403))
        if reason not in told:  # a page may try without end
            told.add(reason)
            log.warning("a request was refused", why=reason, host=header(headers, b"host"), origin=header(headers, b"origin"))

    return Gated(app, Gate(allowed), refused)


class _WithLifespan:
    """The hot path for requests, Starlette for start and stop. draining: the server's own flag, once it has started us."""

    def __init__(self, proxy: ASGIApp, lifespan: Starlette) -> None:
        self._proxy, self._lifespan = proxy, lifespan
        self.draining = Draining()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            self.draining = scope.get("state", {}).get("draining", self.draining)
            return self._lifespan(scope, receive, send)
        return self._proxy(scope, receive, send)


def configure_logging(log: Log) -> None:
    """Structured lines on stderr: for people on a terminal, JSON elsewhere. Never message text, never credentials."""
    level = getattr(logging, log.level.upper())
    console = log.format == "console" or (log.format == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _upstream(config: Config, url: str) -> Upstream:
    given = config.upstream
    return Upstream(
        url,
        connect_timeout=given.connect_timeout,
        read_timeout=given.read_timeout,
        api_key=given.api_key,
        ca_file=given.ca_file,
        transport=given.transport,
    )


def _without_version(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")))


def _is_local(url: str) -> bool:
    """A server on this machine or network: it needs no key, so it can be asked before a client brings one."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost" or "." not in host


def _check_exposure(config: Config) -> None:
    """Raises ConfigError where our own key would serve whoever reaches the port."""
    host = config.server.host
    if config.upstream.api_key and not is_loopback(host) and not config.client_keys:
        raise ConfigError(
            f"upstream.api_key with server.host {host!r} would serve whoever reaches the port: "
            "set client_keys (COMPACTION_CLIENT_KEYS) or listen on 127.0.0.1"
        )


def _check_circle(config: Config) -> None:
    """Raises ConfigError where the upstream is the proxy port, so that each request would come back to us for ever."""
    upstream, own = urlsplit(config.upstream.url), config.server
    host = upstream.hostname or ""
    here = host == own.host or (
        is_loopback(host) and (own.host in EVERYWHERE or (is_loopback(own.host) and "localhost" in (host, own.host)))
    )
    if here and (upstream.port or (443 if upstream.scheme == "https" else 80)) == own.port:
        raise ConfigError(
            f"upstream.url {config.upstream.url!r} is where this proxy itself would listen: give it another port (--port)"
        )

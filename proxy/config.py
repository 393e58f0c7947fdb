"""Every setting, where it comes from, and what it may be: flag > environment > file > default.

The only room that reads the environment and the configuration file.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin
from urllib.parse import quote, urlsplit

import msgspec
import yaml

from proxy.errors import ConfigError

PREFIX = "COMPACTION_"
SECRETS = ("api_key", "encrypt_key", "client_keys", "token", "webhook")
MASK = "***"
ABOVE_ZERO = (
    "window", "connect_timeout", "read_timeout", "header_timeout", "body_timeout", "timeout_s", "timeout_ms", "backoff_s",
    "ttl_s", "workers", "attempts", "waiting", "max_bytes", "max_preserved_messages", "max_output_tokens", "Threshold",
)  # fmt: skip
"""Ends of the names of numbers that are above 0; all others may be 0, and none is below."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings."""


class Upstream(Settings, frozen=True):
    """Where requests go. api_key: replaces the client's Authorization. ca_file: PEM, for private authorities.

    transport: `sockets` is ours; `httpx` is the stock one, for forward proxies and HTTP/2.
    connect_timeout, read_timeout: seconds; no read time-out by default, because reasoning models think for minutes.
    """

    url: str = "https://api.openai.com/v1"
    transport: Literal["sockets", "httpx"] = "sockets"
    connect_timeout: float = 5.0
    read_timeout: float | None = None
    api_key: str | None = None
    ca_file: str | None = None


class Price(Settings, frozen=True):
    """Dollars a million tokens. cached_input: what a prompt token costs that the provider had in its cache, if less."""

    input: float
    output: float
    cached_input: float | None = None


class Model(Settings, frozen=True):
    """What is known of a model (or a glob of names). window, reserve: tokens. encoding: a tiktoken name."""

    window: int | None = None
    reserve: int | None = None
    encoding: Literal["o200k_base", "cl100k_base", "o200k_harmony"] | None = None
    price: Price | None = None


class Compaction(Settings, frozen=True):
    """trigger, target: fractions of usable, or tokens when > 1. timeout_ms: after that a request goes on as it came.

    layers: settings of each layer by its name. min_gain: tokens that an event must save, by default 2 % of the window and at
    least 1,024. discovery: ask the upstream's /models for windows. shadow: measure what would be done, forward untouched.
    templates: what the upstream's chat template asks of a result beyond the API's own rules. prompt_cache: `aware` puts an
    event off that nothing forces while it would cost more than it saves; `ignore` does not ask.
    clamp_max_tokens: an answer's length that does not fit beside the prompt is lowered once the upstream has said what is left.
    stream_usage: `inject` asks streams for their usage and takes the extra chunk out again. usage_report: `original` has usage in
    uncompressed answers count what was saved, too.
    """

    enabled: bool = True
    strategy: str = "ladder"
    trigger: float = 0.80
    target: float = 0.45
    min_gain: int | None = None
    timeout_ms: int = 2_000
    discovery: bool = True
    shadow: bool = False
    layers: dict[str, dict[str, Any]] = {}
    templates: tuple[Literal["openai", "one_system", "alternation", "deepseek"], ...] = ("openai",)
    prompt_cache: Literal["aware", "ignore"] = "aware"
    clamp_max_tokens: bool = False
    stream_usage: Literal["pass", "inject"] = "pass"
    usage_report: Literal["upstream", "original"] = "upstream"


class ContextCollapse(Settings, frozen=True, rename="camel"):
    """The block as its authors wrote it. trigger_threshold: tokens, of a 200k window."""

    enabled: bool = True
    keep_recent: int = 10
    trigger_threshold: int = 150_000
    summary_style: Literal["detailed", "brief"] = "detailed"


class AutoCompact(Settings, frozen=True, rename="camel"):
    """The block as its authors wrote it. Thresholds: tokens, of a 200k window."""

    enabled: bool = True
    trigger_threshold: int = 180_000
    aggressive_threshold: int = 190_000
    keep_recent: int = 10
    preserve_errors: bool = True
    preserve_user_requests: bool = True


class Summarizer(Settings, frozen=True):
    """Summaries by a model, off by default; they are made in the background, and no request waits for one unless wait_ms says so.

    mode: `anchored` carries a summary on from event to event; `kimi` condenses all but the last max_preserved_messages user and
    assistant messages. model, base_url, api_key: who is asked, the conversation's own model with the client's key unless they
    say otherwise; the client's key is never sent to another origin. prefetch: share of usable from which one is prepared.
    timeout_s: for one try. max_output_tokens: that it may have. role: in which it speaks.
    """

    mode: Literal["off", "kimi", "anchored"] = "off"
    model: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    wait_ms: int = 0
    prefetch: float = 0.68
    timeout_s: float = 60.0
    max_preserved_messages: int = 2
    max_output_tokens: int = 4_096
    role: Literal["user", "assistant"] = "user"


class Store(Settings, frozen=True):
    """Where checkpoints are kept. url: memory://, sqlite:///PATH or redis://HOST:PORT/DB; with several workers and none set, a
    file in the state directory. ttl_s: seconds without use. max_bytes: of the memory, and of the file. encrypt_key: seals what
    leaves the process, and is part of what summaries are sealed with, beside the caller's credential.
    """

    url: str = "memory://"
    ttl_s: int = 86_400
    max_bytes: int = 256 * 1024 * 1024
    encrypt_key: str | None = None


class Explain(Settings, frozen=True):
    """Keeps what compactions did to recent requests: in memory; with several workers in files that are gone when the proxy ends.

    full_text: message texts unmasked. max_bytes: of all together. token: who has it may look from anywhere; without one, only
    who comes over loopback.
    """

    enabled: bool = False
    full_text: bool = False
    max_bytes: int = 32 * 1024 * 1024
    token: str | None = None


class Notify(Settings, frozen=True):
    """One POST an event, figures only. webhook: URL. timeout_s: of one try. attempts, backoff_s: tries, and the wait before the
    second, which doubles each time. waiting: notices that are kept while the receiver is slow; further ones are dropped.
    """

    webhook: str | None = None
    timeout_s: float = 5.0
    attempts: int = 5
    backoff_s: float = 1.0
    waiting: int = 256


class Tracing(Settings, frozen=True):
    """Spans for OpenTelemetry; needs the extra `otel`. endpoint: of an OTLP receiver over HTTP (…/v1/traces), by default what
    OTEL_EXPORTER_OTLP_ENDPOINT says. sample: share of the traces that begin here. service: the name that they come under.
    """

    enabled: bool = False
    endpoint: str | None = None
    sample: float = 1.0
    service: str = "compaction-proxy"


class Server(Settings, frozen=True):
    """Ports and patience. drain_timeout, header_timeout, body_timeout: seconds.

    allowed_hosts: names besides this machine's own under which a listener on 127.0.0.1 may be reached, and whose web pages may
    use it: `llm.example.com`, `*.example.com`, `*` for any. When set, they hold for every address that is listened on.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int = 9464
    allowed_hosts: tuple[str, ...] = ()
    workers: int = 1
    drain_timeout: float = 30.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0


class Log(Settings, frozen=True):
    """format: `auto` is console on a terminal, else JSON lines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Config(Settings, frozen=True):
    """Everything. `models` maps exact names or globs; the most specific wins."""

    upstream: Upstream = Upstream()
    default_window: int | None = None
    models: dict[str, Model] = {}
    compaction: Compaction = Compaction()
    context_collapse: ContextCollapse | None = msgspec.field(default=None, name="contextCollapse")
    auto_compact: AutoCompact | None = msgspec.field(default=None, name="autoCompact")
    summarizer: Summarizer = Summarizer()
    store: Store = Store()
    explain: Explain = Explain()
    notify: Notify = Notify()
    tracing: Tracing = Tracing()
    server: Server = Server()
    log: Log = Log()
    max_body_bytes: int = 64 * 1024 * 1024
    client_keys: tuple[str, ...] = ()


def load(flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None, file: str | None = None) -> Config:
    """The effective configuration. `flags` is nested like the file; None values are flags that were not given.

    Raises ConfigError: unknown key (with the nearest known one), wrong value (with what it takes), unreadable file.
    """
    environment = os.environ if environment is None else environment
    path = file or environment.get(PREFIX + "CONFIG") or None
    merged: dict[str, Any] = {}
    for source in (read_file(path) if path else {}, _from_environment(environment), _without_none(flags or {})):
        _merge(merged, _normal(source))
    _check_keys(Config, merged, "")
    for path, kind, values in _named_by_users(merged):  # msgspec does not say which of them is wrong
        _converted(kind, values, path)
    config = _converted(Config, merged)
    _check_values(config)
    return _with_shared_store(config, merged, environment)


def _with_shared_store(config: Config, given: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    """Several workers share a file in the state directory, unless a store was set."""
    if config.server.workers == 1 or "url" in given.get("store", {}):
        return config
    state = environment.get("XDG_STATE_HOME", "")
    # the specification of these directories says to ignore a path that is not absolute
    home = Path(state) if os.path.isabs(state) else Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    url = "sqlite:///" + quote(str(home / "compaction-proxy" / "checkpoints.db"))
    return msgspec.structs.replace(config, store=msgspec.structs.replace(config.store, url=url))


def read_file(path: str) -> dict[str, Any]:
    """A YAML (or JSON) file as it stands. Raises ConfigError."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise ConfigError(f"{path} is not valid YAML{line}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not {type(data).__name__}")
    return data


def masked(config: Config) -> dict[str, Any]:
    """The configuration as plain data with secrets masked, for people to read."""
    plain: dict[str, Any] = _mask(msgspec.to_builtins(config))
    return plain


def _mask(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _mask(item, name) for name, item in value.items()}
    if key in SECRETS and value:
        return [MASK] * len(value) if isinstance(value, list | tuple) else MASK
    if key in ("url", "base_url") and isinstance(value, str):
        return _without_password(value)
    return value


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@]*@", f"//{MASK}@", text)


def _normal(source: Mapping[str, Any]) -> dict[str, Any]:
    """Short forms spelled out: an upstream or a store given as its URL; lists with commas; YAML's `off`, a boolean to it."""
    plain = dict(source)
    for key in ("upstream", "store"):
        if isinstance(plain.get(key), str):
            plain[key] = {"url": plain[key]}
    if isinstance(plain.get("client_keys"), str):
        plain["client_keys"] = _listed(plain["client_keys"])
    server = plain.get("server")
    if isinstance(server, dict) and isinstance(server.get("allowed_hosts"), str):
        plain["server"] = {**server, "allowed_hosts": _listed(server["allowed_hosts"])}
    summarizer = plain.get("summarizer")
    if isinstance(summarizer, dict) and summarizer.get("mode") is False:
        plain["summarizer"] = {**summarizer, "mode": "off"}
    return plain


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: _without_none(item) if isinstance(item, Mapping) else item for key, item in value.items() if item is not None}
    return {key: item for key, item in plain.items() if item != {}}


def _merge(into: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, dict) else value


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """`COMPACTION_SUMMARIZER__MODE=anchored` → {"summarizer": {"mode": "anchored"}}; a mapping may be given as JSON."""
    nested: dict[str, Any] = {}
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in (PREFIX + "CONFIG", PREFIX + "SHARED"):
            continue
        group, here = Config, nested
        words = name.removeprefix(PREFIX).split("__")
        for word in words[:-1]:
            key = _spelled(group, word, name)
            if key == "models":  # no variable can be named after every model
                raise ConfigError(f'{name}: takes JSON, {PREFIX}MODELS={{"NAME": {{"window": 32768}}}}')
            child = _group(group, key)
            if isinstance(here.get(key), str):
                here[key] = {"url": here[key]}
            here = here.setdefault(key, {})
            group = child
        here[_spelled(group, words[-1], name)] = _from_json(value) if value.startswith("{") else value
    return nested


def _from_json(value: str) -> Any:
    """The mapping, or the text where it is none: what is wrong is then said of its key."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _spelled(group: Any, word: str, name: str) -> str:
    """A key as the file spells it: the environment has no case."""
    if group is None:
        return word.lower()
    known = {key.lower().replace("_", ""): key for key in _keys(group)}
    key = known.get(word.lower().replace("_", ""))
    if key is None:
        raise ConfigError(f"unknown environment variable {name}{_nearest(word.lower(), _keys(group))}")
    return key


def _keys(group: Any) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(group))


def _group(group: Any, key: str) -> Any:
    """The settings class of a key, None for a plain value or a free mapping."""
    if group is None:
        return None
    field = next((f for f in msgspec.structs.fields(group) if f.encode_name == key), None)
    if field is None:
        return None
    kinds = [field.type, *getattr(field.type, "__args__", ())]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)), None)


def _check_keys(group: Any, values: Mapping[str, Any], path: str) -> None:
    for key, value in values.items():
        if key not in _keys(group):
            raise ConfigError(f"unknown setting `{path}{key}`{_nearest(str(key), _keys(group))}")
        child = _group(group, key)
        if key == "models" and not path and isinstance(value, dict):
            for name, model in value.items():
                if isinstance(model, dict):
                    _check_keys(Model, model, f"models.{name}.")
        elif child is not None and isinstance(value, dict):
            _check_keys(child, value, f"{path}{key}.")


def _nearest(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(known)}"


def _named_by_users(merged: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What stands below names that are not ours: (path, kind, value) of each model and each layer's settings."""
    models, compaction = merged.get("models"), merged.get("compaction")
    layers = compaction.get("layers") if isinstance(compaction, dict) else None
    for path, kind, group in (("models", Model, models), ("compaction.layers", dict[str, Any], layers)):
        if isinstance(group, dict):
            yield from ((f"{path}.{name}", kind, value) for name, value in group.items())


def _converted(kind: Any, values: Any, path: str = "") -> Any:
    """The values as that kind of settings. Raises ConfigError."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_wrong_value(error, kind, values, path)) from None


def _wrong_value(error: msgspec.ValidationError, kind: Any, value: Any, path: str) -> str:
    """The key, what it got and what it takes, out of msgspec's words. kind, value: what was to be read, at that path."""
    match = re.search(r" - at `\$\.?(.*?)`$", str(error))
    words = re.findall(r"[^.\[\]]+", match[1]) if match else []
    group = kind if isinstance(kind, type) and issubclass(kind, Settings) else None
    for word in words:
        if group is not None:
            kind = next((field.type for field in msgspec.structs.fields(group) if field.encode_name == word), kind)
            group = _group(group, word)
            path = f"{path}.{word}".lstrip(".")
            value = value.get(word) if isinstance(value, Mapping) else value
    shown = MASK if path.split(".")[-1] in SECRETS else _without_password(repr(value))[:80]
    takes = "a mapping of settings" if group is not None else _kind_words(kind)
    return f"wrong value for `{path}`: got {shown}; it takes {takes}"


_KIND_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing (null)"}


def _kind_words(kind: Any) -> str:
    options = getattr(kind, "__args__", ())
    if get_origin(kind) is Literal:
        return " or ".join(map(str, options))
    if kind in _KIND_WORDS:
        return _KIND_WORDS[kind]
    if get_origin(kind) is dict:
        return "a mapping of names"
    if options:
        words = list(dict.fromkeys(_kind_words(option) for option in options if option is not ...))
        return ("a list of: " if get_origin(kind) in (tuple, list) else "") + " or ".join(words)
    return "a mapping of settings"


def _check_values(config: Config) -> None:
    def wrong(key: str, got: object, takes: str) -> ConfigError:
        return ConfigError(f"wrong value for `{key}`: got {_without_password(repr(got))}; takes {takes}")

    urls = {
        "upstream.url": config.upstream.url,
        "summarizer.base_url": config.summarizer.base_url,
        "notify.webhook": config.notify.webhook,
        "tracing.endpoint": config.tracing.endpoint,
    }
    for key, url in urls.items():
        if url is not None and not _is_url(url):
            raise wrong(key, MASK if key == "notify.webhook" else url, "an http:// or https:// URL")
    if config.notify.webhook is not None and "@" in urlsplit(config.notify.webhook).netloc:
        raise wrong("notify.webhook", MASK, "a URL without a user name and password")
    compaction = config.compaction
    for key, mark in (("trigger", compaction.trigger), ("target", compaction.target)):
        if not mark > 0:
            raise wrong(f"compaction.{key}", mark, "a fraction of usable (0–1) or a number of tokens")
    if (compaction.trigger <= 1) == (compaction.target <= 1) and compaction.target >= compaction.trigger:
        raise wrong("compaction.target", compaction.target, f"less than the trigger ({compaction.trigger})")
    for key, number in _numbers(config):
        above = key.endswith(ABOVE_ZERO)
        if number is not None and not (number > 0 if above else number >= 0):
            raise wrong(key, number, "a number above 0" if above else "0 or more")
    for key, port in (("server.port", config.server.port), ("server.admin_port", config.server.admin_port)):
        if not 0 <= port <= 65_535:
            raise wrong(key, port, "a port, 0 to 65535 (0: any free one)")
    for name in config.server.allowed_hosts:
        if not _is_host(name):
            raise wrong("server.allowed_hosts", name, "host names without scheme, port and path, `*.NAME`, or `*`")
    if not 0 <= config.tracing.sample <= 1:
        raise wrong("tracing.sample", config.tracing.sample, "a share, 0 to 1")
    if not 0 < config.summarizer.prefetch <= 1:
        raise wrong("summarizer.prefetch", config.summarizer.prefetch, "a fraction of usable (0–1)")
    if urlsplit(config.store.url).scheme not in ("memory", "sqlite", "redis", "rediss", "unix"):
        raise wrong("store.url", config.store.url, "memory://, sqlite:///PATH or redis://HOST:PORT/DB")


def _numbers(settings: Settings, path: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number with its path; of models, those of each."""
    for name, value in zip(_keys(type(settings)), msgspec.structs.astuple(settings), strict=True):
        if isinstance(value, Settings):
            yield from _numbers(value, f"{path}{name}.")
        elif name == "models":
            for model, known in value.items():
                yield from _numbers(known, f"models.{model}.")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


def _is_host(text: str) -> bool:
    """A name, all names below one, any, or an address; an IPv6 address has two colons or more, a port one."""
    name = text.removeprefix("*.")
    return text == "*" or text.count(":") > 1 or re.fullmatch(r"[\w-]+(\.[\w-]+)*", name) is not None


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False

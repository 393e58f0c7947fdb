"""How much may it be?  The context window of each model, and the budget within it.

What is known of a model comes from five places, the surest first: the configuration, a limit that the upstream stated
when it refused a request (learned), what the upstream says of its models (discovered), the table in this package
(built in), and `default_window`. The table is believed for every upstream, because its errors mend themselves: where
it says too much, the upstream's refusal teaches the limit and the request is retried; where it says too little (a local
server that gave its model a famous name), discovery outranks it as soon as the server was asked.

Nothing here does I/O or reads a clock: `now` is monotonic seconds, and discovery is a list of paths with their readers.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from proxy.tokens import Ruler

Value = TypeVar("Value")

Source = Literal["config", "learned", "discovered", "built in", "default"]


@dataclass(frozen=True, slots=True)
class Budget:
    """The limit together with its ruler, all in tokens.

    window: what the model can hold. reserve: what the answer may take. usable = window − reserve − margin: what a request
    may weigh. trigger: from here on it is compacted. target: what an event aims at. limit: what it must not exceed.
    """

    window: int
    reserve: int
    usable: int
    trigger: int
    target: int
    ruler: Ruler

    @property
    def limit(self) -> int:
        """What a request must not exceed: another word for usable."""
        return self.usable

    def by(self, ruler: Ruler) -> Budget:
        """The same limit measured by another ruler."""
        return Budget(self.window, self.reserve, self.usable, self.trigger, self.target, ruler)


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens. cached_input: what a prompt token costs that the provider had in its cache."""

    input: float
    cached_input: float
    output: float


@dataclass(frozen=True, slots=True)
class Window:
    """What a model can hold, in tokens, and where `tokens` comes from.

    max_input: a limit on the prompt alone, where the upstream has one beside the window. reserve, encoding: as configured.
    """

    tokens: int
    max_output: int | None
    max_input: int | None
    source: Source
    encoding: str | None
    reserve: int | None
    price: Price | None


class ConfiguredPrice(Protocol):
    """A price as the configuration holds it, in dollars per million tokens."""

    @property
    def input(self) -> float | None: ...
    @property
    def cached_input(self) -> float | None: ...
    @property
    def output(self) -> float | None: ...


class Configured(Protocol):
    """What the configuration says of a model; what is None is left to the other sources."""

    @property
    def window(self) -> int | None: ...
    @property
    def reserve(self) -> int | None: ...
    @property
    def encoding(self) -> str | None: ...
    @property
    def price(self) -> ConfiguredPrice | None: ...


# ---------------------------------------------------------------- names


_DATE = re.compile(r"-(?:20\d\d-?[01]\d-?[0-3]\d|[0-2]\d[0-3]\d|[01]\d-[0-3]\d|latest)$")
_CLOUD_VENDOR = re.compile(
    r"^(?:(?:us|eu|apac|au|jp|ca|sa|global|us-gov)\.)?"
    r"(?:ai21|amazon|anthropic|cohere|deepseek|google|meta|minimax|mistral|moonshot|nvidia|openai|qwen|writer|zai)\."
)
_CLOUD_VERSION = re.compile(r"-v\d+(?::\d+k?)*$")
_DEPLOYMENT = re.compile(r"/deployments/([^/?]+)/")

NAME_LIMIT: Final = 256
"""Longer names are looked up by nothing but the globs' first characters: clients choose them, and no model has one."""


def fold(name: str) -> str:
    """A name as the table spells it: lower case, and one sign for all that vendors use between words."""
    return name.strip().lower().replace(".", "-").replace("_", "-").replace("@", "-").replace(" ", "-")


def undated(name: str) -> str:
    """A folded name without the date, or `-latest`, at its end."""
    return _DATE.sub("", name)


@lru_cache(maxsize=1024)
def spellings(name: str) -> tuple[str, ...]:
    """The folded names under which a model may be known, the most literal first, each once.

    `openrouter/openai/gpt-4o-2024-08-06:floor` ends as `gpt-4o`; `ft:gpt-4o-mini:acme::id` as `gpt-4o-mini`.
    """
    lowered = name[:NAME_LIMIT].strip().lower()
    if lowered.startswith("ft:"):
        lowered = lowered.split(":")[1]
    parts = lowered.split("/", 4)  # account, publisher, gateway and provider at most stand before a name
    heads = ["/".join(parts[start:]) for start in range(len(parts))]
    found = [fold(head) for head in heads]
    found += [fold(_CLOUD_VERSION.sub("", _CLOUD_VENDOR.sub("", head))) for head in heads]
    found += [head.replace(":", "-") for head in found] + [head.partition(":")[0] for head in found]
    found += [undated(head) for head in found]
    found += [head.replace("gpt-35", "gpt-3-5") for head in found]  # Azure allows no dot in a name
    return tuple(dict.fromkeys(head for head in found if head))


def requested_model(path: str, model: str | None) -> str:
    """The name that decides: the deployment in an Azure path, where the body's `model` means nothing, else the body's."""
    deployment = _DEPLOYMENT.search(path)
    return deployment[1] if deployment else model or ""


# ---------------------------------------------------------------- the table in the package


@dataclass(frozen=True, slots=True)
class Limits:
    """One row of the table."""

    window: int
    max_output: int | None
    max_input: int | None
    price: Price | None


@dataclass(frozen=True, slots=True)
class Table:
    """The limits of known models: `models[""]` for a name wherever it is served, `models[provider]` where that differs.

    made: the day of the snapshot. hosts: upstream host, or its end when it starts with a dot or a hyphen, to provider.
    """

    made: str
    origin: Mapping[str, str]
    hosts: Mapping[str, str]
    models: Mapping[str, Mapping[str, Limits]]

    def provider(self, upstream: str) -> str | None:
        """The provider behind a base URL, None when it is not a public one that we know."""
        host = (urlsplit(upstream).hostname or "") if "://" in upstream else upstream.lower()
        if host in self.hosts:
            return self.hosts[host]
        return next((name for end, name in self.hosts.items() if end.startswith((".", "-")) and host.endswith(end)), None)

    def find(self, model: str, provider: str | None = None) -> Limits | None:
        """What is known of a model: as this provider serves it, as the provider in its name does, as its maker says."""
        names = spellings(model)
        for rows, name in self._places(names, provider):
            if name in rows:
                return rows[name]
        return None

    def _places(self, names: tuple[str, ...], provider: str | None) -> Iterator[tuple[Mapping[str, Limits], str]]:
        nothing: Mapping[str, Limits] = {}
        for name in names:
            yield self.models.get(provider or "", nothing), name.rpartition("/")[2]
        for name in names:
            if "/" in name:
                yield self.models.get(name.partition("/")[0], nothing), name.rpartition("/")[2]
        for name in names:
            yield self.models[""], name


def read_table(packed: bytes) -> Table:
    """The table from the form in which the snapshot command packs it: gzipped JSON that states each set of limits once."""
    data = json.loads(gzip.decompress(packed))
    rows = []
    for window, max_output, max_input, *price in data["limits"]:
        rows.append(Limits(window, max_output, max_input, Price(*map(float, price)) if price else None))
    models = {provider: {name: rows[row] for name, row in named.items()} for provider, named in data["models"].items()}
    return Table(data["made"], data["from"], data["hosts"], models)


@cache
def built_in() -> Table:
    """The table of this package, read at first use."""
    return read_table(files("proxy").joinpath("windows_table.json.gz").read_bytes())


# ---------------------------------------------------------------- what is known of each model


LEARNED_FOR: Final = 24 * 3600.0
"""Seconds for which a refusal is believed: servers are restarted with other limits, routers change their backends."""

NAMES_KEPT: Final = 1_024
"""Models whose learned limit, real name and looked-up window are remembered: clients choose names, memory is ours."""

DISCOVERED_KEPT: Final = 16_384
"""Models that discovery may name: the largest gateways list some hundreds to a few thousand."""

PLAUSIBLE: Final = range(64, 1_000_000_000)
"""A stated limit outside is a mistake of the answer, or of our reading of it."""

EVERY_MODEL: Final = "*"
"""The name under which a reader reports the limit of a server that runs one model and does not say its name."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A limit from a refusal. exact: stated, not just exceeded. prompt_only: of the prompt, not of prompt and answer."""

    tokens: int
    exact: bool
    prompt_only: bool
    until: float


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and where it comes from."""

    value: int | str | Price
    source: Source


@dataclass(frozen=True, slots=True)
class Description:
    """What a model name gets, each value with its source, None where nothing is known.

    known_as: the model that the upstream says it really is. encoding None: the tokens room chooses it by the name.
    table: the day of the built-in table.
    """

    model: str
    known_as: str | None
    window: Fact | None
    max_input: Fact | None
    reserve: Fact | None
    encoding: Fact | None
    price: Fact | None
    table: str


@dataclass(frozen=True, slots=True)
class _Setting:
    """One configured name or glob, folded, with what makes it more or less specific."""

    name: str
    pattern: re.Pattern[str] | None
    model: Configured

    @property
    def specificity(self) -> tuple[int, bool]:
        """More literal characters first; of two alike the one that is no glob."""
        return len(re.sub(r"\[.*?\]|[*?]", "", self.name)), self.pattern is None

    def matches(self, names: tuple[str, ...]) -> bool:
        """Whether it means one of these spellings."""
        return any(self.pattern.match(name) for name in names) if self.pattern else self.name in names


def _setting(name: str, model: Configured) -> _Setting:
    folded = fold(name)
    return _Setting(folded, re.compile(fnmatch.translate(folded)) if set("*?[") & set(folded) else None, model)


class Windows:
    """The registry of one upstream: fixed knowledge from configuration and table, and what is found out on the way.

    Every method is a few dictionary steps without waiting, so the event loop may call it for each request. What is found
    out is bounded; the oldest goes first.
    """

    def __init__(
        self,
        models: Mapping[str, Configured] | None = None,
        *,
        default_window: int | None = None,
        upstream: str = "",
        table: Callable[[], Table] = built_in,
    ) -> None:
        """models: name or glob → what is configured. upstream: its base URL, which tells whose limits the table gives."""
        self._models = dict(models or {})
        settings = [_setting(name, model) for name, model in self._models.items()]
        self._settings = sorted(settings, key=lambda setting: setting.specificity, reverse=True)
        self._default = default_window
        self._upstream = upstream
        self._table = table
        self._learned: dict[str, Learned] = {}
        self._discovered: dict[str, int] = {}
        self._real_names: dict[str, str] = {}
        self._found: dict[str, tuple[Window | None, float]] = {}

    def lookup(self, model: str, now: float) -> Window | None:
        """The window of a model by the surest source, None when no source knows one: such a model passes through."""
        key = _key(model)
        found = self._found.get(key)
        if found is None or found[1] <= now:
            found = self._find(model, now)
            _remember(self._found, key, found, NAMES_KEPT)
        return found[0]

    def learn(self, model: str, tokens: int, *, exact: bool, now: float, prompt_only: bool = False) -> None:
        """Remember what a refusal told of a model's limit; for a day, and until `accepted` proves it wrong.

        exact: the upstream stated the limit, so it counts whatever other sources say. Otherwise `tokens` is a size that
        did not fit: it can only narrow what is known, and makes an unknown model known.
        """
        if tokens not in PLAUSIBLE:
            return
        held = self._live(model, now)
        if not exact and held is not None and (held.exact or held.tokens <= tokens):
            return
        _remember(self._learned, _key(model), Learned(tokens, exact, prompt_only, now + LEARNED_FOR), NAMES_KEPT)
        self._found.pop(_key(model), None)

    def accepted(self, model: str, prompt_tokens: int) -> None:
        """The upstream took a prompt of this size: forget a learned limit that says it cannot."""
        held = self._learned.get(_key(model))
        if held is not None and prompt_tokens > held.tokens:
            del self._learned[_key(model)]
            self._found.pop(_key(model), None)

    def discovered(self, models: Mapping[str, int]) -> None:
        """Take over what the upstream says of its models; names that it no longer lists keep what they had."""
        known = {_key(name): tokens for name, tokens in models.items() if tokens in PLAUSIBLE}
        if any(self._discovered.get(name) != tokens for name, tokens in known.items()):
            for name, tokens in known.items():
                _remember(self._discovered, name, tokens, DISCOVERED_KEPT)
            self._found.clear()

    def answered_as(self, model: str, real: str) -> None:
        """Remember which model answered to a name: an Azure deployment, or a gateway's alias."""
        if self._real_names.get(model) == real:  # most names are written as they are kept, and most answers say it again
            return
        key, name = _key(model), real[:NAME_LIMIT]
        if name and _key(name) != key and self._real_names.get(key) != name:
            _remember(self._real_names, key, name, NAMES_KEPT)
            self._found.pop(key, None)

    def learned(self, now: float) -> dict[str, int]:
        """The limits learned from refusals that still count, by model."""
        return {name: held.tokens for name, held in list(self._learned.items()) if held.until > now}

    def names(self) -> tuple[str, ...]:
        """The models that somebody spoke of: configured names and globs, discovered and learned ones."""
        spoken_of = [*self._models, *self._discovered, *self._learned]
        return tuple(dict.fromkeys(name for name in spoken_of if name != EVERY_MODEL))

    def describe(self, model: str, now: float) -> Description:
        """What `lookup` and `budget` make of a name, and why."""
        window = self.lookup(model, now)
        real = self._real_names.get(_key(model))
        configured = self._configured(self._also(model))
        limits = self._limits(model)
        price = _price(configured.price, limits.price if limits else None)
        return Description(
            model,
            real,
            window=Fact(window.tokens, window.source) if window else None,
            max_input=Fact(window.max_input, window.source) if window and window.max_input else None,
            reserve=Fact(output_reserve(window), "config" if window.reserve is not None else "default") if window else None,
            encoding=Fact(window.encoding, "config") if window and window.encoding else None,
            price=Fact(price, "config" if configured.price else "built in") if price else None,
            table=self._table().made,
        )

    def further_probes(self, models_answer: bytes | None) -> tuple[Probe, ...]:
        """What else to ask an upstream, after its answer (None: it gave none) to the first of DISCOVERY.

        Nothing when it is a public provider that the table knows, or when it has said how long each model's context is.
        """
        if self._table().provider(self._upstream) is not None:
            return ()
        if models_answer is not None and states_every_length(models_answer):
            return ()
        return DISCOVERY[1:]

    def _find(self, model: str, now: float) -> tuple[Window | None, float]:
        """The window and until when it may be remembered."""
        configured, limits, held = self._configured(self._also(model)), self._limits(model), self._live(model, now)
        until = held.until if held else float("inf")
        tokens, source = self._stated(model, configured, limits)
        max_input = limits.max_input if limits and tokens == limits.window else None
        if held and source != "config":
            tokens, max_input, source = _corrected(held, tokens, max_input, source)
        if tokens is None:
            return None, until
        max_output = min(limits.max_output, tokens) if limits and limits.max_output else None
        price = _price(configured.price, limits.price if limits else None)
        return Window(tokens, max_output, max_input, source, configured.encoding, configured.reserve, price), until

    def _stated(self, model: str, configured: _Fields, limits: Limits | None) -> tuple[int | None, Source]:
        """What all sources but refusals say."""
        if configured.window:
            return configured.window, "config"
        discovered = self._discovery(model)
        if discovered:
            return discovered, "discovered"
        if limits:
            return limits.window, "built in"
        return self._default, "default"

    def _discovery(self, model: str) -> int | None:
        """A server-wide limit holds for each of its models, and is the smaller when a model was trained for more."""
        keys = [key for key in map(_key, self._also(model)) if key in self._discovered]
        stated = [self._discovered[key] for key in (*keys[:1], EVERY_MODEL) if key in self._discovered]
        return min(stated, default=None)

    def _also(self, model: str) -> tuple[str, ...]:
        """The name, and the real one behind it when an answer told it."""
        real = self._real_names.get(_key(model))
        return (model, real) if real else (model,)

    def _limits(self, model: str) -> Limits | None:
        """The table's row of the name itself, else of what answers call it: a deployment may be named after anything. Not the
        other way round: gateways that fall back answer under a different name from one request to the next."""
        table = self._table()
        provider = table.provider(self._upstream) if self._upstream else None
        return next((row for name in self._also(model) if (row := table.find(name, provider))), None)

    def _live(self, model: str, now: float) -> Learned | None:
        held = self._learned.get(_key(model))
        return held if held and held.until > now else None

    def _configured(self, names: tuple[str, ...]) -> _Fields:
        """The configuration for these names: each field from the most specific setting that has it."""
        matching = [self._models[name] for name in names[:1] if name in self._models]
        for name in names:
            matching += [setting.model for setting in self._settings if setting.matches(spellings(name))]
        return _Fields(
            next((model.window for model in matching if model.window), None),
            next((model.reserve for model in matching if model.reserve is not None), None),
            next((model.encoding for model in matching if model.encoding), None),
            next((model.price for model in matching if model.price is not None), None),
        )


@dataclass(frozen=True, slots=True)
class _Fields:
    """What is configured for one model, from all settings that match it."""

    window: int | None
    reserve: int | None
    encoding: str | None
    price: ConfiguredPrice | None


def _price(configured: ConfiguredPrice | None, listed: Price | None) -> Price | None:
    """The configured price, what it leaves out from the table; None when even so something is unknown.

    Without a price for cached input, a cached token costs what any other does.
    """
    if configured is None:
        return listed
    prompt, answer = configured.input, configured.output
    if listed is not None:
        prompt, answer = listed.input if prompt is None else prompt, listed.output if answer is None else answer
    if prompt is None or answer is None:
        return None
    return Price(prompt, prompt if configured.cached_input is None else configured.cached_input, answer)


def _corrected(held: Learned, tokens: int | None, max_input: int | None, source: Source) -> tuple[int | None, int | None, Source]:
    """What a refusal leaves of a stated window: (window, limit of the prompt alone, source)."""
    if tokens is None:
        return held.tokens, None, "learned"
    if held.tokens < tokens and (held.prompt_only or held.tokens == max_input):
        return tokens, held.tokens, "learned"
    if held.exact or held.tokens < tokens:
        return held.tokens, None, "learned"
    return tokens, max_input, source


def _key(name: str) -> str:
    return name[:NAME_LIMIT].strip().lower()


def _remember(kept: dict[str, Value], key: str, value: Value, most: int) -> None:
    """Put it in as the newest; the oldest goes when there are too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        kept.pop(next(iter(kept)), None)


# ---------------------------------------------------------------- the budget


ANSWER_ROOM: Final = 4_096
"""What an answer may take when nobody said: the longest that the models of the chat API's first years could write."""


def output_reserve(window: Window, tokens: int | None = None) -> int:
    """Tokens kept free for an answer whose length the request does not limit, in a window of `tokens` (or its own size)."""
    size = window.tokens if tokens is None else tokens
    if window.reserve is not None and 0 <= window.reserve < size:
        return window.reserve
    return min(window.max_output or ANSWER_ROOM, ANSWER_ROOM, size // 4)


def budget(
    window: Window,
    *,
    requested_output: int | None,
    ruler: Ruler,
    trigger: float,
    target: float,
    narrowed_to: int | None = None,
    margin: float = 0,
) -> Budget:
    """What a request to this model may weigh.

    requested_output: the request's max_completion_tokens or max_tokens. trigger, target: fractions of usable, or tokens
    when above 1. narrowed_to: the client's smaller window. margin: for counts that are estimates, a fraction of the
    window, or tokens when 1 or more.

    A requested output that would leave no room at all for a prompt is not reserved: no compaction can make such a request
    fit, so it is measured as if it had not been asked for, and the upstream answers for it. It is not cut down to the
    table's largest output either: were the table out of date, the request would be refused for want of room. usable,
    trigger and target are at least 1.
    """
    tokens = max(1, window.tokens if narrowed_to is None else min(window.tokens, narrowed_to))
    spare = min(max(0, int(tokens * margin if margin < 1 else margin)), tokens // 2)
    reserve = _reserve(window, tokens, tokens - spare, requested_output)
    usable = max(1, min(tokens - reserve, window.max_input or tokens) - spare)
    starts = _share(trigger, usable)
    return Budget(tokens, reserve, usable, starts, min(_share(target, usable), starts), ruler)


def _reserve(window: Window, tokens: int, room: int, requested: int | None) -> int:
    if requested is not None and 0 <= requested < room:
        return requested
    return min(output_reserve(window, tokens), max(0, room - 1))


def _share(part: float, usable: int) -> int:
    return max(1, min(usable, int(usable * part if part <= 1 else part)))


# ---------------------------------------------------------------- discovery


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to an upstream about its models.

    below: `api` when the path goes after the configured base URL (which ends in /v1), `root` when it goes after the base
    URL without that /v1. read: answer's body → model → tokens; {} for whatever it does not understand.
    """

    server: str
    below: Literal["api", "root"]
    path: str
    read: Callable[[bytes], dict[str, int]]


def read_models(payload: bytes) -> dict[str, int]:
    """The context lengths in a list of models, by every name that it gives them; {} when there are none.

    What a server runs with comes before what a model could do, and that before what it was trained for.
    """
    found: dict[str, int] = {}
    for entry in _entries(_parsed(payload)):
        length = _running(entry) or _offered(entry) or _possible(entry) or _length(entry, "meta", "n_ctx_train")
        if length:
            found.update(dict.fromkeys(_names(entry), length))
    return found


def states_every_length(payload: bytes) -> bool:
    """Whether a list of models says of each how long a context it runs with: then nothing else need be asked."""
    entries = list(_entries(_parsed(payload)))
    return bool(entries) and all(_running(entry) or _offered(entry) or _possible(entry) for entry in entries)


def read_props(payload: bytes) -> dict[str, int]:
    """llama.cpp /props: the context of one slot, whatever the model is called."""
    length = _length(_parsed(payload), "default_generation_settings", "n_ctx")
    return {EVERY_MODEL: length} if length else {}


def read_running(payload: bytes) -> dict[str, int]:
    """Ollama /api/ps: the loaded models with the context they were loaded with; `name:latest` is also `name`."""
    found: dict[str, int] = {}
    for entry in _entries(_parsed(payload)):
        length = _length(entry, "context_length")
        if length:
            found.update({name: length for full in _names(entry) for name in (full, full.removesuffix(":latest"))})
    return found


def read_info(payload: bytes) -> dict[str, int]:
    """TGI /info: prompt and answer together of the one model that it serves."""
    length = _length(_parsed(payload), "max_total_tokens")
    return {EVERY_MODEL: length} if length else {}


def read_gateway(payload: bytes) -> dict[str, int]:
    """LiteLLM /v1/model/info: of several backends under one name the smallest counts, any of them may be chosen."""
    found: dict[str, int] = {}
    for entry in _entries(_parsed(payload)):
        length = _length(entry, "model_info", "max_input_tokens")
        name = entry.get("model_name")
        if length and isinstance(name, str):
            found[name] = min(length, found.get(name, length))
    return found


DISCOVERY: Final = (
    Probe("any", "api", "/models", read_models),
    Probe("llama.cpp", "root", "/props", read_props),
    Probe("Ollama", "root", "/api/ps", read_running),
    Probe("TGI", "root", "/info", read_info),
    Probe("LM Studio", "root", "/api/v0/models", read_models),
    Probe("LiteLLM", "api", "/model/info", read_gateway),
)
"""What to ask, in this order; a later answer outranks an earlier one. The first always, the rest as `further_probes` says."""


def _parsed(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None


def _entries(answer: object) -> Iterator[dict[str, object]]:
    """The models in an answer: a list, or one under `data` or `models`."""
    listed = answer
    if isinstance(answer, dict):
        listed = next((answer[key] for key in ("data", "models") if isinstance(answer.get(key), list)), None)
    if isinstance(listed, list):
        yield from (entry for entry in listed[:DISCOVERED_KEPT] if isinstance(entry, dict))


def _names(entry: dict[str, object]) -> list[str]:
    stated = [entry.get("id"), entry.get("name"), entry.get("model")]
    aliases = entry.get("aliases")
    stated += aliases[:100] if isinstance(aliases, list) else []
    return [name.removeprefix("models/") for name in stated if isinstance(name, str) and name]


def _running(entry: dict[str, object]) -> int | None:
    return _length(entry, "max_model_len") or _length(entry, "loaded_context_length") or _length(entry, "meta", "n_ctx")


def _offered(entry: dict[str, object]) -> int | None:
    lengths = _length(entry, "context_length"), _length(entry, "top_provider", "context_length")
    return min((length for length in lengths if length), default=None)


def _possible(entry: dict[str, object]) -> int | None:
    paths = (
        ("context_window",),
        ("max_context_length",),
        ("metadata", "context_length"),
        ("max_input_tokens",),
        ("inputTokenLimit",),
    )
    return next((length for path in paths if (length := _length(entry, *path))), None)


def _length(value: object, *path: str) -> int | None:
    """A plausible number of tokens at a path; numbers in strings count."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, str) and len(value) < 12 and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value in PLAUSIBLE else None

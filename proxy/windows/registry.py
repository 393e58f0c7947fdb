"""What is known of each model of one upstream, and what is found out about it on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from proxy.windows.budgets import output_reserve
from proxy.windows.configured import Configured, Settings, Settled, price_of
from proxy.windows.discovery import DISCOVERED_KEPT, DISCOVERY, EVERY_MODEL, PLAUSIBLE, Probe, states_every_length
from proxy.windows.names import NAME_LIMIT, kept_as
from proxy.windows.sizes import Price, Source, Window
from proxy.windows.table import Limits, Table, built_in

Value = TypeVar("Value")

LEARNED_FOR: Final = 24 * 3600.0
"""Seconds for which a refusal is believed: servers are restarted with other limits, routers change their backends."""

NAMES_KEPT: Final = 1_024
"""Models whose learned limit, real name and looked-up window are remembered: clients choose names, memory is ours."""

FOREVER: Final = float("inf")
"""Until when a window holds that no refusal has narrowed."""


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
        self._settings = Settings(models or {})
        self._default = default_window
        self._upstream = upstream
        self._table = table
        self._learned: dict[str, Learned] = {}
        self._discovered: dict[str, int] = {}
        self._real_names: dict[str, str] = {}
        self._found: dict[str, tuple[Window | None, float]] = {}
        self._lasting: dict[str, Window] = {}
        self.at_hand: Callable[[str], Window | None] = self._lasting.get
        """What `lookup` says at any time of a name as it is kept (`kept_as`); None where it is to be asked."""
        self.heard: set[tuple[str, str | None]] = set()
        """(model, real name) of answers that `answered` takes nothing from when they come again."""

    def lookup(self, model: str, now: float) -> Window | None:
        """The window of a model by the surest source, None when no source knows one: such a model passes through."""
        key = kept_as(model)
        window = self._lasting.get(key)
        if window is not None:
            return window
        found = self._found.get(key)
        if found is None or found[1] <= now:
            found = self._find(model, now)
            if found[0] is not None and found[1] == FOREVER:
                self._found.pop(key, None)
                _remember(self._lasting, key, found[0], NAMES_KEPT)
            else:
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
        _remember(self._learned, kept_as(model), Learned(tokens, exact, prompt_only, now + LEARNED_FOR), NAMES_KEPT)
        self.heard.clear()
        self._forget(kept_as(model))

    def answered(self, model: str, prompt_tokens: int, real: str | None) -> None:
        """The upstream took a prompt of this size and answered, under this name if it told one."""
        if real and real != model and self._real_names.get(model) != real:  # most answers say the same again
            self.answered_as(model, real)
        if self._learned:
            self.accepted(model, prompt_tokens)
        elif len(model) <= NAME_LIMIT and len(real or "") <= NAME_LIMIT:
            if len(self.heard) >= NAMES_KEPT:
                self.heard.clear()
            self.heard.add((model, real))

    def accepted(self, model: str, prompt_tokens: int) -> None:
        """The upstream took a prompt of this size: forget a learned limit that says it cannot."""
        held = self._learned.get(kept_as(model))
        if held is not None and prompt_tokens > held.tokens:
            del self._learned[kept_as(model)]
            self._forget(kept_as(model))

    def discovered(self, models: Mapping[str, int]) -> None:
        """Take over what the upstream says of its models; names that it no longer lists keep what they had."""
        known = {kept_as(name): tokens for name, tokens in models.items() if tokens in PLAUSIBLE}
        if any(self._discovered.get(name) != tokens for name, tokens in known.items()):
            for name, tokens in known.items():
                _remember(self._discovered, name, tokens, DISCOVERED_KEPT)
            self._found.clear()
            self._lasting.clear()

    def answered_as(self, model: str, real: str) -> None:
        """Remember which model answered to a name: an Azure deployment, or a gateway's alias."""
        key, name = kept_as(model), real[:NAME_LIMIT]
        if name and kept_as(name) != key and self._real_names.get(key) != name:
            _remember(self._real_names, key, name, NAMES_KEPT)
            self._forget(key)
            self.heard.clear()

    def learned(self, now: float) -> dict[str, int]:
        """The limits learned from refusals that still count, by model."""
        return {name: held.tokens for name, held in list(self._learned.items()) if held.until > now}

    def names(self) -> tuple[str, ...]:
        """The models that somebody spoke of: configured names and globs, discovered and learned ones."""
        spoken_of = [*self._settings.models, *self._discovered, *self._learned]
        return tuple(dict.fromkeys(name for name in spoken_of if name != EVERY_MODEL))

    def describe(self, model: str, now: float) -> Description:
        """What `lookup` and `budget` make of a name, and why."""
        window = self.lookup(model, now)
        real = self._real_names.get(kept_as(model))
        configured = self._settings.of(self._also(model))
        limits = self._limits(model)
        price = price_of(configured.price, limits.price if limits else None)
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

    def _forget(self, key: str) -> None:
        """Have it found anew."""
        self._found.pop(key, None)
        self._lasting.pop(key, None)

    def _find(self, model: str, now: float) -> tuple[Window | None, float]:
        """The window and until when it may be remembered."""
        configured, limits, held = self._settings.of(self._also(model)), self._limits(model), self._live(model, now)
        until = held.until if held else FOREVER
        tokens, source = self._stated(model, configured, limits)
        max_input = limits.max_input if limits and tokens == limits.window else None
        if held and source != "config":
            tokens, max_input, source = _corrected(held, tokens, max_input, source)
        if tokens is None:
            return None, until
        max_output = min(limits.max_output, tokens) if limits and limits.max_output else None
        price = price_of(configured.price, limits.price if limits else None)
        return Window(tokens, max_output, max_input, source, configured.encoding, configured.reserve, price), until

    def _stated(self, model: str, configured: Settled, limits: Limits | None) -> tuple[int | None, Source]:
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
        keys = [key for key in map(kept_as, self._also(model)) if key in self._discovered]
        stated = [self._discovered[key] for key in (*keys[:1], EVERY_MODEL) if key in self._discovered]
        return min(stated, default=None)

    def _also(self, model: str) -> tuple[str, ...]:
        """The name, and the real one behind it when an answer told it."""
        real = self._real_names.get(kept_as(model))
        return (model, real) if real else (model,)

    def _limits(self, model: str) -> Limits | None:
        """The table's row of the name itself, else of what answers call it: a deployment may be named after anything. Not the
        other way round: gateways that fall back answer under a different name from one request to the next."""
        table = self._table()
        provider = table.provider(self._upstream) if self._upstream else None
        return next((row for name in self._also(model) if (row := table.find(name, provider))), None)

    def _live(self, model: str, now: float) -> Learned | None:
        held = self._learned.get(kept_as(model))
        return held if held and held.until > now else None


def _corrected(held: Learned, tokens: int | None, max_input: int | None, source: Source) -> tuple[int | None, int | None, Source]:
    """What a refusal leaves of a stated window: (window, limit of the prompt alone, source)."""
    if tokens is None:
        return held.tokens, None, "learned"
    if held.tokens < tokens and (held.prompt_only or held.tokens == max_input):
        return tokens, held.tokens, "learned"
    if held.exact or held.tokens < tokens:
        return held.tokens, None, "learned"
    return tokens, max_input, source


def _remember(kept: dict[str, Value], key: str, value: Value, most: int) -> None:
    """Put it in as the newest; the oldest goes when there are too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        kept.pop(next(iter(kept)), None)

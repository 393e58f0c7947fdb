"""What the configuration says of models."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from proxy.windows.names import fold, spellings
from proxy.windows.sizes import Price


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


@dataclass(frozen=True, slots=True)
class Settled:
    """What is configured for one model, from all settings that match it."""

    window: int | None
    reserve: int | None
    encoding: str | None
    price: ConfiguredPrice | None


class Settings:
    """What is configured, by name or glob."""

    def __init__(self, models: Mapping[str, Configured]) -> None:
        self.models = dict(models)
        settings = [_setting(name, model) for name, model in models.items()]
        self._settings = sorted(settings, key=lambda setting: setting.specificity, reverse=True)

    def of(self, names: tuple[str, ...]) -> Settled:
        """The configuration for these names: each field from the most specific setting that has it."""
        matching = [self.models[name] for name in names[:1] if name in self.models]
        for name in names:
            matching += [setting.model for setting in self._settings if setting.matches(spellings(name))]
        return Settled(
            next((model.window for model in matching if model.window), None),
            next((model.reserve for model in matching if model.reserve is not None), None),
            next((model.encoding for model in matching if model.encoding), None),
            next((model.price for model in matching if model.price is not None), None),
        )


def price_of(configured: ConfiguredPrice | None, listed: Price | None) -> Price | None:
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

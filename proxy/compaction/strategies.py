"""Which layers, in which order, with which settings: named strategies, and the seeds' configuration blocks as they stand."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace

from proxy.compaction import Layer
from proxy.compaction.autocompact import AutoCompact
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.emergency import Emergency
from proxy.compaction.merging import Ages, Auto, Digested, MergedTurns
from proxy.compaction.microcompact import Microcompact
from proxy.compaction.pipeline import Admitted
from proxy.compaction.snip import Snip
from proxy.compaction.tool_results import ToolResultBudget
from proxy.errors import ConfigError

Pipeline = tuple[Layer, ...]
Settings = Mapping[str, object]

COLLAPSE_SHARE, STANDARD_SHARE, AGGRESSIVE_SHARE = 0.75, 0.85, 0.90
"""The seeds' thresholds (150k, 170k, 180k of a 200k window) as shares of what is usable."""
COLLAPSE_MESSAGES = 50
"""The seeds' other trigger of a collapse."""

RECENT = 5 * 60
"""Seconds: what was first seen within them is recent."""

LAYERS: Mapping[str, Callable[[], Layer]] = {
    "tool_result_budget": ToolResultBudget,
    "snip": Snip,
    "microcompact": Microcompact,
    "context_collapse": ContextCollapse,
    "auto_compact": AutoCompact,
    "emergency": Emergency,
}
"""Every layer by its name: what `compaction.layers` may hold settings for."""

STRATEGIES = ("ladder", "auto", "auto_literal", "layer1", "layer2", "layer3", "sliding_window", "importance", "kimi", "noop")
"""`kimi` is the ladder: its summary comes from a model, and these layers serve while there is none."""

_FIXED = frozenset({("auto_compact", "level"), ("context_collapse", "key"), ("context_collapse", "mode")})
_COLLAPSE_KEYS = ("enabled", "keepRecent", "triggerThreshold", "summaryStyle")
_AUTO_KEYS = ("enabled", "triggerThreshold", "aggressiveThreshold", "keepRecent", "preserveErrors", "preserveUserRequests")


def build(
    name: str,
    *,
    layers: Mapping[str, Settings] | None = None,
    context_collapse: Settings | None = None,
    auto_compact: Settings | None = None,
) -> Pipeline:
    """The layers of a strategy. layers: settings by layer, their keys the fields of the layer. context_collapse, auto_compact:
    the seeds' blocks with their own keys (`keepRecent`, …); their absolute thresholds hold as `min(absolute, share × usable)`.

    Raises ConfigError, which names the key, what it got and the nearest key that there is.
    """
    if name not in STRATEGIES:
        raise ConfigError(_unknown("compaction.strategy", name, STRATEGIES))
    made = _Layers(layers or {}, context_collapse, auto_compact)
    return made.strategy(name)


def ask_for_ages(layers: Iterable[Layer]) -> bool:
    """Whether any of them would do better if it were told how long ago messages were first seen (`with_ages`)."""
    return any(_asks(layer) for layer in layers)


def with_ages(layers: Iterable[Layer], ages: Ages) -> Pipeline:
    """The layers, told how long ago messages were first seen. Those that do not ask for it stay the very same."""
    return tuple(_told(layer, ages) if _asks(layer) else layer for layer in layers)


def _asks(layer: Layer) -> bool:
    return (isinstance(layer, Auto) and not layer.literal) or (isinstance(layer, ContextCollapse) and layer.mode == "importance")


def _told(layer: Layer, ages: Ages) -> Layer:
    if isinstance(layer, ContextCollapse):
        # In this mode `keep_recent` is the number of messages that score for being recent.
        return replace(layer, keep_recent=sum(age <= RECENT for age in ages.values())) if ages else layer
    return replace(layer, ages=ages)  # type: ignore[type-var]


class _Layers:
    """The layers with their settings, ready to be put in an order."""

    def __init__(self, settings: Mapping[str, Settings], collapse: Settings | None, auto: Settings | None) -> None:
        for key in settings:
            if key not in LAYERS:
                raise ConfigError(_unknown("compaction.layers", key, LAYERS))
        self._settings = settings
        self._collapse = _block("contextCollapse", collapse, _COLLAPSE_KEYS)
        self._auto = _block("autoCompact", auto, _AUTO_KEYS)
        for key in LAYERS:
            self._make(key)  # a wrong setting is an error even where the strategy does not use the layer

    def strategy(self, name: str) -> Pipeline:
        collapse = self._context_collapse()
        last = (self._make("emergency"),)
        match name:
            case "noop":
                return ()
            case "layer1":
                return (*self._mild("snip"), MergedTurns(), *last)
            case "layer2":
                return (*self._mild("snip"), Digested("blocks"), *last)
            case "layer3":
                return (*self._mild("snip"), Digested("json"), *last)
            case "auto":
                return (*self._mild("snip"), Auto(), *self._auto_compacts(), *last)
            case "auto_literal":
                return (*self._mild("snip"), Auto(literal=True), *last)
            case "sliding_window" | "importance":
                return (*self._mild("snip"), self._in_mode(collapse, name), *self._auto_compacts(), *last)
            case _:
                mild = self._mild("tool_result_budget", "snip", "microcompact")
                if not collapse and "min_kept" not in self._settings.get("microcompact", {}):
                    mild = (*mild[:-1], replace(mild[-1], min_kept=0.0))  # type: ignore[type-var]
                return (*mild, *collapse, *self._auto_compacts(), *last)

    def _mild(self, *names: str) -> Pipeline:
        return tuple(self._make(name) for name in names)

    def _in_mode(self, collapse: Pipeline, mode: str) -> Layer:
        """The collapse in another mode; in a strategy that is made of it, it cannot be switched off, nor wait."""
        layer = self._make("context_collapse")
        if collapse:
            layer = collapse[0].layer if isinstance(collapse[0], Admitted) else collapse[0]
        assert isinstance(layer, ContextCollapse)
        return replace(layer, mode=mode)  # type: ignore[arg-type]

    def _context_collapse(self) -> Pipeline:
        block, layer = self._collapse, self._make("context_collapse")
        assert isinstance(layer, ContextCollapse)
        if block is None:
            return (layer,)
        if not _flag("contextCollapse.enabled", block.get("enabled", True)):
            return ()
        keep = _whole("contextCollapse.keepRecent", block.get("keepRecent", layer.keep_recent))
        style = block.get("summaryStyle", "detailed")
        if style not in ("detailed", "brief"):
            raise ConfigError(f"contextCollapse.summaryStyle: {style!r} is none of detailed, brief")
        layer = replace(layer, keep_recent=keep, style=style)
        tokens = _whole("contextCollapse.triggerThreshold", block.get("triggerThreshold", 150_000))
        return (Admitted(layer, COLLAPSE_SHARE, tokens, COLLAPSE_MESSAGES),)

    def _auto_compacts(self) -> Pipeline:
        block, standard = self._auto, self._make("auto_compact")
        assert isinstance(standard, AutoCompact)
        aggressive = replace(standard, level="aggressive")
        if block is None:
            return (standard, aggressive)
        if not _flag("autoCompact.enabled", block.get("enabled", True)):
            return ()
        aggressive = replace(
            aggressive,
            keep_recent=_whole("autoCompact.keepRecent", block.get("keepRecent", aggressive.keep_recent)),
            preserve_errors=_flag("autoCompact.preserveErrors", block.get("preserveErrors", True)),
            preserve_user_requests=_flag("autoCompact.preserveUserRequests", block.get("preserveUserRequests", True)),
        )
        first = _whole("autoCompact.triggerThreshold", block.get("triggerThreshold", 180_000))
        second = _whole("autoCompact.aggressiveThreshold", block.get("aggressiveThreshold", 190_000))
        return (Admitted(standard, STANDARD_SHARE, first), Admitted(aggressive, AGGRESSIVE_SHARE, second))

    def _make(self, name: str) -> Layer:
        layer = LAYERS[name]()
        given = self._settings.get(name, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"compaction.layers.{name}: {given!r} is not a mapping of settings")
        hints = typing.get_type_hints(type(layer))
        known = [field.name for field in fields(layer) if (name, field.name) not in _FIXED]  # type: ignore[arg-type]
        for key, value in given.items():
            if key not in known:
                raise ConfigError(_unknown(f"compaction.layers.{name}", key, known))
            _check(f"compaction.layers.{name}.{key}", value, hints[key])
        return replace(layer, **dict(given)) if given else layer  # type: ignore[type-var]


def _block(where: str, block: Settings | None, keys: tuple[str, ...]) -> Settings | None:
    if block is None:
        return None
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}: {block!r} is not a mapping of settings")
    for key in block:
        if key not in keys:
            raise ConfigError(_unknown(where, key, keys))
    return block


def _check(where: str, value: object, wanted: object) -> None:
    """Raises ConfigError unless the value is what the field takes."""
    choices = typing.get_args(wanted) if typing.get_origin(wanted) is typing.Literal else ()
    if choices:
        if value not in choices:
            raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(str, choices))}")
    elif wanted is bool:
        _flag(where, value)
    elif wanted is int:
        _whole(where, value)
    elif wanted is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ConfigError(f"{where}: {value!r} is not a share between 0 and 1")
    elif wanted is str and (not isinstance(value, str) or (where.endswith(".role") and value not in ("user", "assistant"))):
        raise ConfigError(
            f"{where}: {value!r} is none of user, assistant" if where.endswith(".role") else f"{where}: {value!r} is not a word"
        )


def _whole(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}: {value!r} is not a whole number of 0 or more")
    return value


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {value!r} is neither true nor false")
    return value


def _unknown(where: str, key: object, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.4)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    return f"{where}: there is no {key!r}{hint} (known: {', '.join(names) or 'none'})"

"""What upstreams say of their models: what to ask them, and how to read the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

DISCOVERED_KEPT: Final = 16_384
"""Models that discovery may name: the largest gateways list some hundreds to a few thousand."""

PLAUSIBLE: Final = range(64, 1_000_000_000)
"""A stated limit outside is a mistake of the answer, or of our reading of it."""

EVERY_MODEL: Final = "*"
"""The name under which a reader reports the limit of a server that runs one model and does not say its name."""


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

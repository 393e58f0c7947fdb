"""What a model is called: the names under which it may be known, and the one that a request means."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

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


def kept_as(name: str) -> str:
    """The name under which is kept what is found out about a model."""
    return name[:NAME_LIMIT].strip().lower()

"""JSON within a request, read and written as upstreams do it."""

from __future__ import annotations

import json
from typing import Any


def read_json(raw: bytes) -> Any:
    """The value, or None for what is not JSON."""
    if not raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def read_result(text: str) -> object:
    """What a tool answered, as JSON where it is that; else its words."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def dumped(value: object, *, ascii_only: bool) -> str:
    """The value as Python writes it; nothing where that cannot be."""
    try:
        return json.dumps(value, ensure_ascii=ascii_only)
    except (ValueError, RecursionError):
        return ""


def compact(arguments: str) -> str:
    """The arguments as they are written again by the upstream; as they came when they are not JSON."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments

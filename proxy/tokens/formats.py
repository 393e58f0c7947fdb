"""How a wanted answer format is shown to the model: a section of the system message with the schema in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

UNSEEN_KEYWORDS = frozenset(
    {
        *("additionalProperties", "required", "default", "format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("minProperties", "maxProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    }
)
"""Schema keywords that bind the answer's form but are not shown to the model."""


@dataclass(frozen=True, slots=True)
class Format:
    """The schema of a `response_format`. strict: the answer is held to it."""

    name: str
    description: str
    schema: Any
    strict: bool

    def render(self, *, after_tools: bool) -> str:
        """The section of the system message that shows it."""
        lines = "\n".join(("# Response Formats", "", f"## {self.name}", "", ""))
        told = f"// {self.description}\n" if self.description else ""
        head = "" if after_tools else f"type {self.name} = "
        return f"{lines}{told}{head}{minimal(_shown(self.schema, 0))}"


def read_format(wanted: object) -> Format | None:
    """The format within a decoded `response_format`; None when it asks for no schema."""
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return None
    described = wanted.get("json_schema")
    described = described if isinstance(described, dict) else {}
    name, description = described.get("name"), described.get("description")
    return Format(
        name if isinstance(name, str) else "",
        description if isinstance(description, str) else "",
        described.get("schema"),
        described.get("strict") is True,
    )


def _shown(schema: object, depth: int, names: bool = False) -> Any:
    """The schema without the keywords that are not shown to the model. names: the keys are property names, not keywords."""
    if depth > 100:
        return None
    if isinstance(schema, dict):
        return {
            key: _shown(value, depth + 1, key in ("properties", "$defs"))
            for key, value in schema.items()
            if names or key not in UNSEEN_KEYWORDS
        }
    if isinstance(schema, list):
        return [_shown(each, depth + 1) for each in schema]
    return schema


def minimal(value: object) -> str:
    """Schemas are shown in ASCII: a dash becomes an escape of four tokens."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (ValueError, RecursionError):
        return ""

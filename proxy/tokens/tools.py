"""How the upstream shows tools to its model: JSON schemas written as TypeScript."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

DEEPEST = 24
"""Levels of a schema that are written; what lies deeper is `any`."""

MOST_KINDS = 16
"""There are seven types."""

LONGEST_REFERENCE = 1_000

LEAST_WRITTEN = 50_000
"""Characters that even a small schema may take when it is written out."""


def functions(tools: object, legacy: object) -> list[Mapping[str, Any]]:
    """The functions of a request's decoded `tools` and `functions` fields; entries that are none are left out."""
    found: list[Mapping[str, Any]] = []
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict):
            found.append(function)
    found.extend(each for each in (legacy if isinstance(legacy, list) else ()) if isinstance(each, dict))
    return found


def others(tools: object) -> list[object]:
    """The tools of a decoded `tools` field that are no functions: custom grammars, hosted tools."""
    if not isinstance(tools, list):
        return []
    return [tool for tool in tools if not (isinstance(tool, dict) and isinstance(tool.get("function"), dict))]


def render(offered: Sequence[Mapping[str, Any]], most: int = LEAST_WRITTEN) -> str:
    """The TypeScript of these functions. After about `most` characters of types, what is left becomes `any`."""
    lines = ["namespace functions {", ""]
    left = max(LEAST_WRITTEN, most)
    for function in offered:
        schema = function.get("parameters")
        writer = _Writer(schema if isinstance(schema, dict) else {}, left)
        lines += [*writer.function(function), ""]
        left = writer.left
    return "\n".join([*lines, "} // namespace functions"])


class _Writer:
    """Writes the schemas of one function; `root` is where its references point into."""

    def __init__(self, root: dict[str, Any], left: int) -> None:
        self.root, self.left = root, left

    def function(self, function: Mapping[str, Any]) -> Iterator[str]:
        name = function.get("name", "")
        yield from _comment(function.get("description"))
        if isinstance(self.root.get("properties"), dict) and self.root["properties"]:
            written = "\n".join([*_comments(self.root), self.object(self.root, 0)])
            yield f"type {name} = (_: {written}) => any;"
        else:
            yield f"type {name} = () => any;"

    def resolved(self, schema: object) -> dict[str, Any]:
        """The schema with its reference followed, its own keywords on top."""
        if not isinstance(schema, dict):
            return {}
        for _ in range(16):
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            target: Any = self.root
            for word in reference[:LONGEST_REFERENCE].lstrip("#/").split("/"):
                target = target.get(word) if isinstance(target, dict) else None
            own = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**target, **own} if isinstance(target, dict) else own
            self.left -= 16 * len(schema)
        return {}

    def comments(self, schema: Mapping[str, Any]) -> list[str]:
        if self.left < 0:
            return []
        written = _comments(schema)
        self.left -= sum(map(len, written))
        return written

    def literal(self, value: object) -> str:
        if self.left < 0:
            return "any"
        written = _literal(value)
        self.left -= 16 + len(written)
        return written

    def type(self, schema: object, depth: int) -> str:
        self.left -= 16
        if not isinstance(schema, dict) or depth > DEEPEST or self.left < 0:
            return "any"
        schema = self.resolved(schema)
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                return self.union(schema, [self.type(each, depth + 1) for each in schema[word]])
        every = schema.get("allOf")
        if isinstance(every, list) and len(every) == 1:
            return self.type(every[0], depth + 1)
        if "const" in schema:
            return self.literal(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return " | ".join(map(self.literal, schema["enum"]))
        return self.plain(schema, depth)

    def plain(self, schema: dict[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            return self.either(schema, kind, depth)
        if kind in ("integer", "number"):
            return "number"
        if kind in ("string", "boolean", "null"):
            return str(kind)
        if kind == "array":
            return self.array(schema, depth)
        if isinstance(schema.get("properties"), dict) and schema["properties"]:
            return self.object(schema, depth + 1)
        return "object" if kind == "object" else "any"

    def union(self, schema: dict[str, Any], written: list[str]) -> str:
        if schema.get("title") or schema.get("description"):
            return " \n" + "".join(f"| {each}\n" for each in written)
        return " | ".join(written)

    def either(self, schema: dict[str, Any], kinds: list[Any], depth: int) -> str:
        written = [self.type({**schema, "type": kind}, depth + 1) for kind in kinds[:MOST_KINDS]]
        told = schema.get("description")
        if told and depth > 1 and self.left >= 0:
            self.left -= len(written) * len(str(told))
            return "\n" + "".join(f"| {each} // {told}\n" for each in written)
        return " | ".join(written)

    def array(self, schema: dict[str, Any], depth: int) -> str:
        if not schema.get("items"):
            return "any[]"
        item = self.type(schema["items"], depth + 1)
        if item.startswith("{\n"):
            inside = self.comments(self.resolved(schema["items"]))
            return "\n".join(["Array<", *inside, item, ">"])
        return f"Array<{item}>" if " | " in item else f"{item}[]"

    def object(self, schema: dict[str, Any], depth: int) -> str:
        needed = schema.get("required")
        required = {name for name in needed if isinstance(name, str)} if isinstance(needed, list) else set()
        lines: list[str] = []
        fields: list[str] = []
        plain = True
        for key, value in schema["properties"].items():
            self.left -= len(key)
            known = self.resolved(value)
            comments = self.comments(known)
            default = f" // default: {self.literal(known['default'])}" if "default" in known else ""
            field = f"{key}{'' if key in required else '?'}: {self.type(known, depth)}"
            plain = plain and not comments and not default and "\n" not in field
            fields.append(field)
            lines += [*comments, f"{field},{default}"]
        return "{ " + ", ".join(fields) + " }" if plain else "\n".join(["{", *lines, "}"])


def _comments(schema: Mapping[str, Any]) -> list[str]:
    """Title and description of a schema, an empty comment between them."""
    title, description = _comment(schema.get("title")), _comment(schema.get("description"))
    return [*title, *(["//"] if title and description else []), *description]


def _comment(text: object) -> list[str]:
    return [f"// {line.strip()}".rstrip() for line in str(text).strip().split("\n")] if text else []


def _literal(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "any"

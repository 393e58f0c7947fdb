from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.tokens import ruler
from proxy.tokens.tools import functions, others, render


def shown(**function: Any) -> str:
    """The TypeScript of one function, without the namespace around it."""
    return (
        render([{"name": "f", **function}]).removeprefix("namespace functions {\n\n").removesuffix("\n\n} // namespace functions")
    )


def typed(schema: Any) -> str:
    """How the type of one required property is written."""
    text = shown(parameters={"type": "object", "properties": {"p": schema}, "required": ["p"]})
    return text.removeprefix("type f = (_: { p: ").removesuffix(" }) => any;")


def test_functions_stand_in_a_namespace() -> None:
    assert render([{"name": "a"}, {"name": "b", "description": "Second."}]) == (
        "namespace functions {\n\ntype a = () => any;\n\n// Second.\ntype b = () => any;\n\n} // namespace functions"
    )


def test_a_function_without_comments_fits_on_a_line() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}

    assert shown(parameters=schema) == "type f = (_: { city: string, days?: number }) => any;"


def test_comments_and_defaults_give_every_property_a_line() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "title": "City", "description": "Where."},
            "unit": {"enum": ["C", "F"], "default": "C"},
        },
    }

    assert shown(parameters=schema) == (
        'type f = (_: {\n// City\n//\n// Where.\ncity?: string,\nunit?: "C" | "F", // default: "C"\n}) => any;'
    )


def test_descriptions_keep_their_blank_lines_but_not_their_indentation_or_ends() -> None:
    assert (
        shown(description="\n  Add.\n\n    Args:\n      a: one\n   ") == "// Add.\n//\n// Args:\n// a: one\ntype f = () => any;"
    )


def test_title_and_description_of_the_parameters_follow_the_bracket() -> None:
    schema = {"type": "object", "title": "Args", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    assert shown(parameters=schema) == "type f = (_: // Args\n{ a: number }) => any;"


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "integer"}, "number"),
        ({"type": "boolean"}, "boolean"),
        ({"type": "null"}, "null"),
        ({"type": "object"}, "object"),
        ({}, "any"),
        ({"type": "unheard of"}, "any"),
        ({"const": "a"}, '"a"'),
        ({"enum": [1, "b", None]}, '1 | "b" | null'),
        ({"type": ["string", "null"]}, "string | null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, "string | number"),
        ({"allOf": [{"type": "string"}]}, "string"),
        ({"type": "array"}, "any[]"),
        ({"type": "array", "items": {"type": "string"}}, "string[]"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, 'Array<"a" | "b">'),
        ({"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}}, "{ x?: number }[]"),
        ({"type": "string", "minLength": 3, "format": "date", "pattern": "x"}, "string"),
        ("not a schema", "any"),
        (None, "any"),
        (True, "any"),
    ],
)
def test_types_are_written_as_typescript(schema: Any, written: str) -> None:
    assert typed(schema) == written


def test_lists_of_commented_objects_take_lines_of_their_own() -> None:
    item = {"type": "object", "description": "A step.", "properties": {"n": {"type": "integer", "description": "Number."}}}

    text = shown(parameters={"properties": {"steps": {"type": "array", "items": item}}, "required": ["steps"]})

    assert text == "type f = (_: {\nsteps: Array<\n// A step.\n{\n// Number.\nn?: number,\n}\n>,\n}) => any;"


def test_described_alternatives_take_a_line_each() -> None:
    schema = {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Country."}

    text = shown(parameters={"properties": {"c": schema}, "required": ["c"]})

    assert text == "type f = (_: {\n// Country.\nc:  \n| string\n| null\n,\n}) => any;"


def test_described_type_lists_deeper_down_repeat_their_description() -> None:
    item = {"type": "object", "properties": {"t": {"type": ["string", "null"], "description": "Tool."}}, "required": ["t"]}

    text = shown(parameters={"properties": {"s": {"type": "array", "items": item}}, "required": ["s"]})

    assert "t: \n| string // Tool.\n| null // Tool.\n," in text


def test_references_are_followed_and_what_stands_beside_them_wins() -> None:
    schema = {
        "type": "object",
        "properties": {"home": {"$ref": "#/$defs/Place", "description": "Where from."}},
        "required": ["home"],
        "$defs": {"Place": {"type": "string", "description": "A place."}},
    }

    assert shown(parameters=schema) == "type f = (_: {\n// Where from.\nhome: string,\n}) => any;"


@pytest.mark.parametrize("reference", ["#/$defs/missing", "", "#", "https://elsewhere/schema.json", "#/properties/p/$ref/x"])
def test_a_reference_that_leads_nowhere_or_in_a_circle_ends(reference: str) -> None:
    text = shown(parameters={"type": "object", "properties": {"p": {"$ref": reference}}})

    assert len(text) < 60_000


DEEP: dict[str, Any] = {"type": "object", "properties": {}}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"deeper": DEEP}}


def fan(width: int, levels: int) -> dict[str, Any]:
    """References that multiply: width ** levels of them, if one followed them all."""
    definitions = {
        f"d{level}": {"type": "object", "properties": {f"p{i}": {"$ref": f"#/$defs/d{level + 1}"} for i in range(width)}}
        for level in range(levels)
    }
    return {"type": "object", "properties": {"start": {"$ref": "#/$defs/d0"}}, "$defs": definitions}


def repeated(definition: dict[str, Any]) -> dict[str, Any]:
    """One costly definition that is referred to ten thousand times."""
    properties = {f"p{i}": {"$ref": "#/$defs/big"} for i in range(10_000)}
    return {"type": "object", "properties": properties, "$defs": {"big": definition}}


HOSTILE: dict[str, dict[str, Any]] = {
    "ten thousand properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}},
    "nested 300 deep": DEEP,
    "multiplying references": fan(4, 30),
    "wide references": fan(3_000, 3),
    "a long description repeated": repeated({"type": "string", "description": "word " * 40_000}),
    "a long default repeated": repeated({"type": "string", "default": ["w"] * 20_000}),
    "a long enum repeated": repeated({"enum": ["w"] * 20_000}),
    "alternatives of themselves": repeated({"anyOf": [{"$ref": "#/$defs/big"}] * 2_000}),
    "types by the thousand": repeated({"type": ["object"] * 3_000, "description": "d" * 1_000, "properties": {"a": {}}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_written_in_bounded_space(name: str) -> None:
    schema = HOSTILE[name]
    size = len(json.dumps(schema))

    text = render([{"name": "f", "parameters": schema}], 4 * size)

    assert len(text) < 6 * size + 200_000


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_counted(name: str) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": HOSTILE[name]}}]).encode()

    assert 20 < ruler("gpt-4o", {"tools": tools}).fixed < 3 * len(tools) + 100_000


def test_a_large_honest_schema_is_written_whole() -> None:
    text = render(
        [{"name": "f", "parameters": HOSTILE["ten thousand properties"]}], 4 * len(json.dumps(HOSTILE["ten thousand properties"]))
    )

    assert "p9999?: string" in text


@pytest.mark.parametrize("tools", [None, [], {}, "x", [1, None, "x"], [{"type": "function"}], [{"function": []}]])
def test_what_is_no_list_of_functions_holds_none(tools: Any) -> None:
    assert functions(tools, None) == []


def test_tools_that_are_no_functions_are_counted_as_their_json(total: Callable[..., int]) -> None:
    custom = {"type": "custom", "custom": {"name": "math", "description": "Mathematical expressions", "format": {"type": "text"}}}

    assert others([custom]) == [custom]
    assert 20 < total([], tools=[custom]) - total([]) < 60


def test_functions_of_the_retired_kind_are_shown_alike(total: Callable[..., int]) -> None:
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}

    assert total([], functions=[function]) == total([], tools=[{"type": "function", "function": function}])

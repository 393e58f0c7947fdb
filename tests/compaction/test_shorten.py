"""Each kind of text, shorter: what must survive stands here as literals."""

from __future__ import annotations

import json
import random

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.compaction import graphemes, json_text
from proxy.compaction.line_kinds import Kind, fold_shapes, kind_of
from proxy.compaction.shorten import SMALLEST, cut_middle, shorten

FILLER = [f"INFO worker {i % 7} handled request {i} in {i * 3 % 50} ms" for i in range(400)]


def test_a_short_text_is_itself() -> None:
    assert shorten("all is well", 200) == "all is well"


def test_a_log_keeps_its_errors_with_their_neighborhood_its_exit_line_and_both_ends() -> None:
    lines = list(FILLER)
    lines[200:200] = [
        "opening the ledger of branch 12",
        "ConnectionError: ledger refused the connection",
        "rolling back the transfer",
    ]
    text = "\n".join([*lines, "Process exited with code 3"])

    short = shorten(text, 1_500)

    assert len(short) <= 1_500
    assert "ConnectionError: ledger refused the connection" in short
    assert "opening the ledger of branch 12" in short
    assert "rolling back the transfer" in short
    assert "Process exited with code 3" in short
    assert short.startswith("INFO worker 0 handled request 0 in 0 ms")


def test_repeated_shapes_of_a_log_are_folded_with_their_count() -> None:
    folded = fold_shapes(["start", *FILLER, "stop"])

    assert folded == ["start", FILLER[0], FILLER[1], "[… 397 similar lines …]", FILLER[-1], "stop"]


def test_shapes_that_are_shorter_than_their_marker_stay() -> None:
    assert fold_shapes(["a 1", "a 2", "a 3", "a 4", "a 5", "b"]) == ["a 1", "a 2", "a 3", "a 4", "a 5", "b"]


def test_test_output_keeps_each_failure_and_the_summary() -> None:
    passed = [f"tests/test_part.py::test_case_{name} PASSED [ {i % 100}%]" for i, name in enumerate(_words(300))]
    passed[140] = "tests/test_ledger.py::test_transfer FAILED [ 46%]"
    text = "\n".join(
        [
            *passed,
            "E       AssertionError: balance is 7, not 9",
            "FAILED tests/test_ledger.py::test_transfer",
            "==== 1 failed, 299 passed in 4.21s ====",
        ]
    )

    short = shorten(text, 1_200)

    assert "tests/test_ledger.py::test_transfer FAILED [ 46%]" in short
    assert "E       AssertionError: balance is 7, not 9" in short
    assert "==== 1 failed, 299 passed in 4.21s ====" in short


def test_a_diff_keeps_its_files_and_hunks() -> None:
    hunks = []
    for name in ("loader", "parser", "report", "tables"):
        hunks += [
            f"diff --git a/app/{name}.py b/app/{name}.py",
            f"--- a/app/{name}.py",
            f"+++ b/app/{name}.py",
            "@@ -10,40 +10,41 @@ def run():",
        ]
        hunks += [f"     context line {name} {i}" for i in range(40)]
        hunks += [f"+    added_in_{name} = True"]
    text = "\n".join(hunks)

    short = shorten(text, 1_800)

    assert kind_of(hunks) is Kind.DIFF
    for name in ("loader", "parser", "report", "tables"):
        assert f"diff --git a/app/{name}.py b/app/{name}.py" in short


def test_code_keeps_its_signatures() -> None:
    lines = ["import os"]
    for name in ("open_store", "read_rows", "close_store"):
        lines += [f"def {name}(path: str) -> None:", *(f"    step_{name}_{i} = path + '{i}'" for i in range(30))]
    text = "\n".join(lines)

    short = shorten(text, 1_000)

    assert kind_of(lines) is Kind.CODE
    assert "def read_rows(path: str) -> None:" in short
    assert "def close_store(path: str) -> None:" in short


def test_a_numbered_read_keeps_its_numbers_and_signatures() -> None:
    lines = [f"{i:5}→    value_{i} = {i}" for i in range(1, 300)]
    lines[149] = "  150→class Ledger:"

    short = shorten("\n".join(lines), 900)

    assert "  150→class Ledger:" in short
    assert "    1→    value_1 = 1" in short


def test_search_results_keep_a_match_of_each_file() -> None:
    lines = [f"src/app/{name}.py:{i}: rows = load(path)" for name in ("alpha", "beta", "gamma") for i in range(1, 60)]

    short = shorten("\n".join(lines), 900)

    assert "src/app/alpha.py:1:" in short
    assert "src/app/beta.py:1:" in short
    assert "src/app/gamma.py:1:" in short


def test_a_table_keeps_its_head() -> None:
    rows = ["| id | name | state |", "|---|---|---|", *(f"| {i} | item {i} | ok |" for i in range(200))]

    short = shorten("\n".join(rows), 500)

    assert short.startswith("| id | name | state |\n|---|---|---|\n| 0 | item 0 | ok |")
    assert short.endswith("| 199 | item 199 | ok |")
    assert "lines cut …]" in short


def test_a_stack_trace_keeps_first_and_last_frames_and_its_message() -> None:
    frames = [
        line
        for i in range(60)
        for line in (f'  File "/srv/app/layer_{i}.py", line {i + 1}, in call', f"    return next_{i}(value)")
    ]
    text = "\n".join([*FILLER[:60], "Traceback (most recent call last):", *frames, "KeyError: 'branch'", *FILLER[60:120]])

    short = shorten(text, 1_500)

    assert "Traceback (most recent call last):" in short
    assert 'File "/srv/app/layer_0.py", line 1, in call' in short
    assert 'File "/srv/app/layer_59.py", line 60, in call' in short
    assert "KeyError: 'branch'" in short


def test_a_long_json_array_stays_json_and_keeps_head_tail_and_the_odd_ones_out() -> None:
    items = [{"id": i, "status": "ok", "note": f"row {i} was copied"} for i in range(500)]
    items[311] = {"id": 311, "status": "failed", "note": "disk full"}
    items[77] = {"id": 77, "status": "ok", "note": "row 77 was copied", "warning": "slow"}

    short = shorten(json.dumps(items, indent=2), 1_200)

    value = json.loads(short)
    kept = [item["id"] for item in value if isinstance(item, dict)]
    assert len(short) <= 1_200
    assert kept[0] == 0
    assert kept[-1] == 499
    assert 311 in kept
    assert 77 in kept
    assert any(isinstance(item, str) and "of 500 items cut" in item for item in value)


def test_a_json_text_of_millions_of_characters_is_no_exception() -> None:
    rows = [{"id": n, "state": "failed" if n == 9_000 else "ok", "note": "steady " * 9} for n in range(15_000)]
    text = json.dumps(rows)

    made = shorten(text, 4_000)

    assert len(text) > 1_000_000
    assert len(made) <= 4_000
    assert rows[9_000] in json.loads(made)
    assert rows[0] in json.loads(made)


def test_a_very_long_json_text_that_fits_without_its_white_space_loses_nothing_else() -> None:
    rows = [{"id": n} for n in range(15_000)]
    text = json.dumps(rows, indent=40)

    made = shorten(text, 300_000)

    assert len(text) > 1_000_000
    assert len(made) <= 300_000
    assert json.loads(made) == rows


def test_numbers_in_json_are_never_rewritten() -> None:
    text = json.dumps({"rows": ["x" * 50] * 40})[:-1] + ', "big": 123456789012345678901234567890, "small": 1.10, "exp": 1E5}'

    short = shorten(text, 400)

    assert '"big":123456789012345678901234567890' in short
    assert '"small":1.10' in short
    assert '"exp":1E5' in short


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', "[" * 5_000 + "]" * 5_000, '{"a": ', "17", '"word"', ""])
def test_what_is_not_plainly_json_is_not_taken_for_it(text: str) -> None:
    assert json_text.parse(text) is None


def test_json_of_one_enormous_string_stays_json() -> None:
    value = json.loads(shorten(json.dumps({"ok": True, "log": "a b c " * 20_000}), 300))

    assert value["ok"] is True
    assert "characters cut" in value["log"]


def test_json_with_thousands_of_keys_becomes_a_skeleton_at_worst() -> None:
    short = shorten(json.dumps({f"key_{i}": {"deep": [i] * 10} for i in range(3_000)}), SMALLEST)

    assert len(short) <= SMALLEST
    assert isinstance(json.loads(short), dict)


def test_a_cut_says_how_much_is_missing() -> None:
    short = cut_middle("word " * 400, 200)

    head, _, rest = short.partition(" [… ")
    cut, _, tail = rest.partition(" characters cut …] ")
    assert len(short) <= 200
    assert len(head) + int(cut.replace(",", "")) + len(tail) == 2_000


FAMILY = "👩\u200d👩\u200d👧\u200d👦"


@pytest.mark.parametrize(
    "piece", [FAMILY, "🇩🇪", "e\u0301\u0302", "👍🏽", "각", "ก\u0e33", "\U0001f3f4\U000e0067\U000e0062\U000e007f", "\r\n"]
)
def test_no_character_as_readers_see_it_is_split(piece: str) -> None:
    text = piece * 400
    clusters = regex.findall(r"\X", text)
    borders = set()
    position = 0
    for cluster in clusters:
        borders.add(position)
        position += len(cluster)
    borders.add(position)

    for index in range(60):
        assert graphemes.before(text, index) in borders
        assert graphemes.after(text, index) in borders


@settings(deadline=None, max_examples=150)
@given(
    st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=40), st.integers(1, 60), st.integers(SMALLEST, 600)
)
def test_shortening_any_text_keeps_the_limit_and_valid_unicode(piece: str, times: int, limit: int) -> None:
    short = shorten(piece * times, limit)

    assert len(short) <= max(limit, SMALLEST)
    assert short
    assert short.encode("utf-8")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=80)),
    lambda inner: st.one_of(st.lists(inner, max_size=30), st.dictionaries(st.text(max_size=12), inner, max_size=12)),
    max_leaves=120,
)


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.lists(JSON), st.dictionaries(st.text(max_size=12), JSON)), st.integers(SMALLEST, 800))
def test_shortening_any_json_gives_json(value: object, limit: int) -> None:
    short = shorten(json.dumps(value), limit)

    assert type(json.loads(short)) is type(value)
    assert len(short) <= max(limit, SMALLEST)


def _words(count: int) -> list[str]:
    letters = random.Random(5)
    return ["".join(letters.choice("abcdefghijklmnop") for _ in range(9)) for _ in range(count)]

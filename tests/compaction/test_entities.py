"""Lines and the names in them."""

from __future__ import annotations

import pytest

from proxy.compaction import entities


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("see app/core/loader.py for it", {"app/core/loader.py", "loader.py"}),
        ("edit ./src/main.rs:12:5 now", {"./src/main.rs", "main.rs"}),
        ("calls read_rows() in parseHeader", {"read_rows", "parseHeader"}),
        ("raise LoaderError here", {"LoaderError"}),
        ("commit 3f2a9c1 is bad", {"3f2a9c1"}),
        ("order K1NW8N for 4875 dollars", {"K1NW8N", "4875"}),
        ("GET https://api.example.com/v1/users?id=7", {"https://api.example.com/v1/users?id=7", "api.example.com"}),
        ("os.path.join is used", {"os.path.join"}),
        ('the key "user name" is missing', {"user name"}),
        ("订单「北京店」已取消", {"北京店"}),
        ("plain words have no names", set()),
        ("only 12 and 345", set()),
    ],
)
def test_names_are_found_in_a_line(line: str, names: set[str]) -> None:
    assert set(entities.scan(line).distinct) == names


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("app/core/loader.py", "path"), ("loader.py", "file"), ("read_rows", "name"), ("LoaderError", "error"), ("4875", "number"),
        ("K1NW8N", "id"), ("3f2a9c1", "hash"), ("https://example.com", "url"), ("user name", "quoted"),
    ],
)  # fmt: skip
def test_a_name_has_a_kind(name: str, kind: str) -> None:
    assert entities.kind(name) == kind


def test_names_belong_to_their_line_and_blank_lines_are_left_out() -> None:
    scan = entities.scan("first_name here\n\n  \nnothing\nlast_name there")

    assert scan.lines == ("first_name here", "nothing", "last_name there")
    assert scan.names == (("first_name",), (), ("last_name",))
    assert scan.whole == (True, True, True)


def test_a_long_line_is_cut_at_sentences_and_nothing_is_lost() -> None:
    line = " ".join(f"Sentence number {n} says a little." for n in range(60))

    scan = entities.scan(line)

    assert max(map(len, scan.lines)) <= 240
    assert all(piece.endswith("little.") for piece in scan.lines)
    assert " ".join(scan.lines) == line
    assert scan.whole == (*[False] * (len(scan.lines) - 1), True)


def test_a_line_without_spaces_is_cut_between_characters() -> None:
    family = "👨‍👩‍👧"

    pieces = entities.scan(family * 200).lines

    assert "".join(pieces) == family * 200
    assert all(piece.startswith("👨") and piece.endswith("👧") for piece in pieces)


def test_data_is_no_name() -> None:
    assert entities.scan("QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo" * 30).distinct == ()


def test_lone_surrogates_are_read_like_any_character() -> None:
    assert entities.scan("a\ud800b loader_core").distinct == ("loader_core",)

"""Which lines are chosen when not all can stay."""

from __future__ import annotations

from proxy.compaction import digest, entities, forecast
from proxy.compaction.digest import Picks, Source
from proxy.compaction.forecast import Mention


def picked(texts: list[str], needs: dict[str, float], room: float, *, inline: bool = False) -> list[set[int]]:
    picks = Picks([Source(n, f"{n} tool", text, 0.25, inline) for n, text in enumerate(texts)])
    digest.choose(picks, needs, room)
    return picks.chosen


def test_the_line_that_shows_what_is_needed_is_taken() -> None:
    text = "nothing of note here\nthe port of order_service is set in deploy.yaml\nmore words without names"

    assert picked([text], {"order_service": 1.0, "deploy.yaml": 1.0}, 40) == [{1}]


def test_of_lines_that_show_the_same_only_the_newest_is_taken() -> None:
    line = "the value of order_service was read from the table"

    assert picked([line, line, line], {"order_service": 1.0}, 500) == [set(), set(), {0}]


def test_a_bare_name_leaves_room_for_a_line_that_explains_it() -> None:
    chosen = picked(
        ["order_service", "the order_service reads its port from the table of settings at start"], {"order_service": 1.0}, 500
    )

    assert chosen[1] == {0}


def test_a_short_line_wins_over_a_long_one_that_shows_the_same() -> None:
    long = "the order_service is named here too " + "and then many further words follow " * 5

    assert picked([long, "the order_service is named here"], {"order_service": 1.0}, 30) == [set(), {0}]


def test_no_more_is_taken_than_there_is_room_for() -> None:
    lines = "\n".join(f"line about name_{n} with words around it" for n in range(100))
    picks = Picks([Source(0, "0 tool", lines, 0.25)])

    digest.choose(picks, {f"name_{n}": 1.0 for n in range(100)}, 120)

    assert 0 < len(picks.chosen[0]) < 20
    assert picks.spent <= 120


def test_what_is_left_goes_to_the_newest_lines() -> None:
    picks = Picks([Source(0, "0 a", "old one\nold two", 0.25), Source(1, "1 b", "new one\nnew two", 0.25)])

    digest.fill(picks, 9)

    assert picks.chosen == [set(), {1}]


def test_lines_taken_last_are_given_up_first() -> None:
    picks = Picks([Source(0, "0 a", "first line\nsecond line", 0.25, inline=True)])
    picks.take(0, 0)
    picks.take(0, 1)

    assert picks.drop(1)
    assert picks.chosen == [{0}]


def test_gaps_are_marked_in_a_text_that_stays() -> None:
    assert digest.in_place("a\nb\nc\nd", {1}) == "…\nb\n…"
    assert digest.in_place("a\nb\nc\nd", {0, 3}) == "a\n…\nd"
    assert digest.in_place("a\nb", set()) == "[… 2 lines left out]"


def test_a_text_of_which_all_lines_stay_is_the_very_text() -> None:
    text = "a\r\n\n\n  b  \nc"

    assert digest.in_place(text, {0, 1, 2}) is text


def test_pieces_of_one_line_are_joined_again() -> None:
    line = " ".join(f"Sentence {n} is here." for n in range(40))
    scan = entities.scan(f"{line}\nnext")

    assert digest.excerpt(scan, range(len(scan.lines))) == [line, "next"]


def test_names_in_use_are_worth_more_than_names_in_a_listing() -> None:
    listing = "\n".join(f"lib/module_{n}.py" for n in range(200))
    mentions = [
        Mention("list the files", 0, "asked"),
        Mention("list path: lib", 1, "assistant"),
        Mention(listing, 1, "output"),
        Mention("Now I edit lib/module_7.py", 2, "assistant"),
        Mention("edit path: lib/module_7.py", 2, "assistant"),
        Mention("edited", 2, "output"),
    ]

    needs = forecast.needs(mentions)

    assert max(needs, key=lambda name: needs[name]) in ("lib/module_7.py", "module_7.py", "module_7")
    assert needs["lib/module_7.py"] > 3 * needs["lib/module_8.py"]


def test_every_feature_has_its_weight() -> None:
    use = forecast.uses([Mention("read_rows", 1, "assistant")])["read_rows"]

    x = forecast.features("read_rows", use, 3)

    assert len(forecast.FEATURES) == len(forecast.WEIGHTS) == len(x)
    score = sum(a * b for a, b in zip(forecast.WEIGHTS, x, strict=True))
    assert abs(forecast.chance("read_rows", use, 3) - 1 / (1 + 2.718281828459045**-score)) < 1e-9

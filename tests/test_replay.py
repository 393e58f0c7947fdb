"""Recorded conversations again: what the figures say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders import agent_session, assistant, user

from proxy import config
from proxy.app import build_compactor, build_windows
from proxy.decisions import Wish
from proxy.errors import Unreadable
from proxy.replay import Tally, read_row, replay

pytestmark = pytest.mark.anyio


def row(messages: list[dict[str, object]], **fields: object) -> bytes:
    return json.dumps({"messages": messages, **fields}).encode()


async def tally_of(raw: bytes, window: int) -> Tally:
    settings = config.load({"models": {"*": {"window": window, "reserve": 500}}}, {})
    return await replay(read_row(raw, 1), build_compactor(settings, build_windows(settings)), Wish())


def test_a_request_stood_before_each_assistant_message() -> None:
    asked = [user("a"), assistant("b"), user("c"), assistant("d")]

    assert read_row(row(asked, id="x"), 1).turns == [1, 3]
    assert read_row(row([*asked, user("e")]), 7).turns == [1, 3, 5]
    assert (read_row(row(asked, id="x"), 1).name, read_row(row(asked), 7).name) == ("x", "line 7")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"messages": 7}'])
def test_what_is_no_conversation_is_unreadable(raw: bytes) -> None:
    with pytest.raises(Unreadable):
        read_row(raw, 1)


async def test_what_fits_is_forwarded_as_it_came() -> None:
    tally = await tally_of(row([user("hi"), assistant("yes"), user("go on"), assistant("done")]), 128_000)

    assert (tally.requests, tally.fit, tally.compacted, tally.events, tally.breaks) == (2, 2, 0, 0, 0)
    assert tally.received == tally.forwarded > 0


async def test_a_long_session_fits_breaks_its_prefix_only_at_events_and_loses_nothing_critical() -> None:
    tally = await tally_of(row([*agent_session(40, 250), assistant("The import in app/part_39.py is left.")]), 6_000)

    assert tally.requests == tally.fit == 41
    assert 2 <= tally.events <= 12
    assert tally.breaks <= tally.events
    assert (tally.breaks_outside, tally.invalid, tally.critical["lost"]) == (0, 0, 0)
    assert tally.forwarded < tally.received / 2
    assert 0 < tally.facts_kept <= tally.facts_needed


def test_the_command_prints_one_object_for_machines_and_a_table_for_people(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_bytes(
        row([*agent_session(20, 250), assistant("Done.")], id="long") + b"\n" + row([user("hi"), assistant("yes")], id="short")
    )
    command = [sys.executable, "-m", "proxy", "replay", str(path), "--window", "6000", "--window", "90000"]

    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=60, check=True).stdout)
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert list(told) == ["6000", "90000"]
    assert list(told["6000"]["conversations"]) == ["long", "short"]
    assert told["6000"]["total"]["requests"] == 22
    assert told["6000"]["total"]["requests_that_fit"] == 22
    assert told["6000"]["total"]["tokens_saved_share"] > 0.2
    assert told["90000"]["total"]["tokens_saved_share"] == 0
    assert [line.split()[0] for line in table.splitlines() if line.startswith(("long", "short", "total"))] == [
        "long",
        "short",
        "total",
    ] * 2

"""The folder that workers share: each start has its own, and what a killed start has left is removed, nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from proxy.errors import ConfigError
from proxy.workers_figures import Places, fresh_folder

HOLDER = """
import sys
from pathlib import Path
from proxy.workers_figures import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(place: Path, name: str = "compaction-proxy-figures-old", age: float = 3_600) -> Path:
    """A folder with a worker's figures in it, last written so many seconds ago."""
    folder = place / name
    (folder / "explanations").mkdir(parents=True)
    (folder / "1-1.json").write_text("{}")
    os.utime(folder, (time.time() - age, time.time() - age))
    return folder


def test_each_start_has_a_folder_for_its_user_only(temporary: Path) -> None:
    first, second = fresh_folder(), fresh_folder()

    assert first != second
    assert {first.parent, second.parent} == {temporary}
    assert oct(first.stat().st_mode & 0o777) == "0o700"


def test_what_a_start_that_was_killed_has_left_is_removed(temporary: Path) -> None:
    old = left_behind(temporary)

    fresh_folder()

    assert not old.exists()


def test_what_a_living_process_holds_stays_until_it_has_ended(temporary: Path) -> None:
    old = left_behind(temporary)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(old)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"

    fresh_folder()
    while_alive = old.exists()
    holder.kill()
    holder.communicate()
    fresh_folder()

    assert while_alive
    assert not old.exists()


def test_what_was_just_made_or_is_not_ours_stays(temporary: Path) -> None:
    young = left_behind(temporary, "compaction-proxy-figures-young", age=5)
    other = left_behind(temporary, "another-programs-files")
    target = left_behind(temporary, "target")
    (temporary / "compaction-proxy-figures-link").symlink_to(target)

    fresh_folder()

    assert young.exists()
    assert other.exists()
    assert (target / "1-1.json").exists()


def test_where_nothing_can_be_written_it_is_said_in_one_sentence(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))

    with pytest.raises(ConfigError, match=r"^several workers need a writable directory for temporary files \(TMPDIR\): No such"):
        fresh_folder()


def test_all_workers_together_give_so_many_places_and_no_more(temporary: Path) -> None:
    first, second = Places(temporary, "models", 3), Places(temporary, "models", 3)

    took = [
        one.take(name) for one, name in [(first, "a"), (second, "b"), (first, "a"), (second, "a"), (first, "c"), (second, "d")]
    ]

    assert took == [True, True, True, True, True, False]
    assert [one.take(name) for one in (first, second) for name in ("a", "b", "c", "d", "e")] == [
        True,
        True,
        True,
        False,
        False,
    ] * 2
    assert Places(temporary, "models", 3).take("b")
    assert Places(temporary, "timed", 1).take("d")


def test_a_place_that_cannot_be_noted_is_not_given(temporary: Path) -> None:
    assert not Places(temporary / "gone", "models", 3).take("a")

"""The figures of several workers, in a folder that they share: each writes its own, whoever is scraped reads them all.

Also a worker that is scraped reads its own figures from the folder: every worker then tells the same, and no counter seems
to go back because the last scrape was answered by another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from proxy.errors import ConfigError
from proxy.tally import Key, Snapshot, merge

ENDED = "ended.json"
"""What is left of workers that are gone."""
PREFIX = "compaction-proxy-figures-"
JUST_MADE = 60.0
"""Seconds in which a folder may not be held yet by who made it."""


class Page(msgspec.Struct, frozen=True):
    """One worker's figures as they are written. events: the newest of its events, newest first. holds: workers within it."""

    figures: dict[str, list[tuple[Key, list[float]]]]
    events: list[dict[str, object]] = []
    holds: list[str] = []


def snapshot_of(page: Page) -> Snapshot:
    return {name: {tuple(key): values for key, values in rows} for name, rows in page.figures.items()}


def page_of(snapshot: Snapshot, events: Sequence[dict[str, object]] = (), holds: Sequence[str] = ()) -> Page:
    return Page({name: list(rows.items()) for name, rows in snapshot.items()}, list(events), list(holds))


def fresh_folder() -> Path:
    """A folder for one start of the proxy: what an earlier start has left must not count, and is removed.

    Raises ConfigError where there is no place for temporary files.
    """
    try:
        _sweep(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise ConfigError(f"several workers need a writable directory for temporary files (TMPDIR): {error.strerror}") from None
    hold(folder)
    return folder


def hold(folder: Path) -> None:
    """Keeps the folder from being swept away for as long as this process lives: its end lets go of the lock."""
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)


def _sweep(place: Path) -> None:
    """Removes folders of ours whose processes were killed, all of them: nobody else would."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # held, or gone meanwhile
            found = folder.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > JUST_MADE:
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)


def new_worker() -> str:
    """A name for this worker; process ids are used again, so the time is in it."""
    return f"{os.getpid()}-{time.time_ns()}"


class Places:
    """So many places for names in all workers together: whichever comes first has one, and has it in every worker.

    Else each worker would give places of its own, and what they tell together would name a multiple.
    """

    def __init__(self, folder: Path, kind: str, room: int) -> None:
        self._file, self._room = folder / f"{kind}.names", room
        self._known: frozenset[str] = frozenset()

    def take(self, name: str) -> bool:
        """Whether the name, one line of text, has a place now. Once all are taken, no file is touched any more."""
        if name not in self._known and len(self._known) < self._room:
            with contextlib.suppress(OSError):  # a disk that refuses: the name is one of the others
                self._known = self._with(name)
        return name in self._known

    def _with(self, name: str) -> frozenset[str]:
        """The names that have a place, this one among them if there was room."""
        with self._file.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            taken = file.read().split("\n")[:-1]
            if name not in taken and len(taken) < self._room:
                file.write(f"{name}\n")
                taken.append(name)
        return frozenset(taken)


def write(folder: Path, worker: str, page: Page) -> None:
    """Puts a worker's figures there, whole or not at all."""
    draft = folder / f".{worker}"
    draft.write_bytes(msgspec.json.encode(page))
    draft.replace(folder / f"{worker}.json")


def read(folder: Path) -> list[Page]:
    """Every worker's figures, and those of the ones that are gone; nobody's twice, and nobody's left out."""
    while True:
        try:
            return _read(folder)
        except FileNotFoundError:  # one was buried meanwhile: once more, and it is in what is left of them
            continue


def _read(folder: Path) -> list[Page]:
    ended = folder / ENDED
    pages = [_decoded(ended)] if ended.exists() else []
    gone = {worker for page in pages for worker in page.holds}
    return pages + [_decoded(path) for path in sorted(folder.glob("*.json")) if path.stem not in gone and path != ended]


def _decoded(path: Path) -> Page:
    return msgspec.json.decode(path.read_bytes(), type=Page)


def bury(folder: Path, process: int, kept: Collection[str]) -> None:
    """Adds what a process that is gone has counted to what is left of all before it. For whoever starts the workers, alone.

    kept: metrics that outlive their worker: counters and histograms. What it had in flight is gone with it.
    """
    for path in folder.glob(f"{process}-*.json"):
        ended = folder / ENDED
        pages = [_decoded(one) for one in (ended, path) if one.exists()]
        sums: Snapshot = {}
        for page in pages:
            merge(sums, {name: rows for name, rows in snapshot_of(page).items() if name in kept})
        holds = [worker for page in pages for worker in page.holds] + [path.stem]
        write(folder, ended.stem, page_of(sums, holds=holds))
        path.unlink()

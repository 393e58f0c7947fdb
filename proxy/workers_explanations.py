"""The explanations of several workers, in the folder that they share: each writes its own, whoever is asked reads them all.

One file an explanation, for this user only: its line in the list, and below that the whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
import structlog

from proxy.explain import Brief, Explanation, brief, write

FOLDER = "explanations"
MOST = 1_000
"""Explanations that are kept, however small: the folder is listed for each that comes."""

log = structlog.get_logger("proxy")


class SharedExplanations:
    """The newest explanations of all workers, as many as go into `max_bytes`. folder: of one start of the proxy."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder / FOLDER, max_bytes
        self._failing = False

    def add(self, explanation: Explanation) -> None:
        """Keeps it, and forgets the oldest for it. Where the disk refuses, it is not kept, and the log says so once."""
        try:
            self._put(explanation)
            self._make_room()
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("an explanation could not be kept", reason=error.strerror)
            self._failing = True

    def _put(self, explanation: Explanation) -> None:
        """The file is there whole or not at all. Names are in the order in which they were made."""
        name = f"{time.time_ns():020}-{explanation.id}"
        draft = self._folder / f".{name}"
        line = msgspec.json.encode(brief(explanation)) + b"\n"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with open(draft, "wb", opener=_private) as file:
            file.write(line + write(explanation, self._max_bytes - len(line)))
        draft.rename(self._folder / name)

    def _make_room(self) -> None:
        files = self._newest_first()
        size = 0
        for place, file in enumerate(files):
            with contextlib.suppress(FileNotFoundError):  # another worker made room as well
                size += file.stat().st_size
                if size > self._max_bytes or place >= MOST:
                    file.unlink()

    def written(self, id: str) -> bytes | None:
        for file in self._newest_first():
            if file.name.partition("-")[2] == id:
                with contextlib.suppress(FileNotFoundError):
                    return file.read_bytes().partition(b"\n")[2]
        return None

    def recent(self, limit: int = 100) -> tuple[Brief, ...]:
        briefs: list[Brief] = []
        for file in self._newest_first()[:limit]:
            with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
                briefs.append(msgspec.json.decode(opened.readline(), type=Brief))
        return tuple(briefs)

    def _newest_first(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):  # nothing was explained yet
            return sorted((file for file in self._folder.iterdir() if not file.name.startswith(".")), reverse=True)
        return []


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

"""Seconds from the command to the first answer through it, and the size of what is installed.

python tests/benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import contextlib
from importlib.metadata import distribution, requires
from pathlib import Path

from peers import OURS, compare
from rig import ROOT, Part, Running, options


def first_answer(one: Running) -> dict[str, float]:
    return {"start to first answer, s ↓": one.first_answer}


def installed_mb(name: str) -> float:
    """The distribution with everything that it requires without extras."""
    seen: set[str] = set()
    waiting, total = [name], 0
    while waiting:
        current = waiting.pop().lower().replace("_", "-")
        if current in seen:
            continue
        seen.add(current)
        with contextlib.suppress(Exception):  # a requirement of another platform
            found = distribution(current)
            total += sum(
                path.stat().st_size for file in found.files or () if (path := Path(str(found.locate_file(file)))).is_file()
            )
            needs = [need.split(";")[0] for need in requires(current) or () if "extra ==" not in need and "win32'" not in need]
            waiting += ["".join(c if c.isalnum() or c in "-_." else " " for c in need).split()[0] for need in needs]
    return total / 1e6


def package_mb() -> float:
    """Our own package: an editable install does not list its files."""
    return sum(path.stat().st_size for path in (ROOT / "proxy").rglob("*") if path.is_file() and path.suffix != ".pyc") / 1e6


def main() -> None:
    compare("startup", [Part(first_answer, proxies_only=True)], options(__doc__).parse_args())
    print(
        f"Installed, with all that it requires: {installed_mb(OURS) + package_mb():.1f} MB, {package_mb():.1f} MB of it our own."
    )


if __name__ == "__main__":
    main()

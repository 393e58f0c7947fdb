"""Seconds from the command to the first answer, and the size of what is installed.

python tests/benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import distribution, requires
from pathlib import Path

from rig import OTHER_CORE, PEERS, body, free_port, machine, middle, stub, table


def first_answer(command: list[str], port: int) -> float:
    """Seconds until a request is answered through it."""
    request = body(1_000)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("POST", "/v1/chat/completions", request, {"content-type": "application/json"})
                if connection.getresponse().status == 200:
                    return time.perf_counter() - started
            time.sleep(0.01)
        raise RuntimeError(f"{command} ended")
    finally:
        process.terminate()
        process.wait()


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
    root = Path(__file__).parent.parent.parent / "proxy"
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, {OTHER_CORE})
    print(f"startup: {machine()}")
    ours = next(one for one in PEERS if one.name == "compaction-proxy")
    times = []
    with stub() as upstream, tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            port = free_port()
            command = ours.command(Path(folder), port, upstream)
            assert command is not None
            times.append(first_answer(command, port))
    rows = [
        [
            "start to first answer, s",
            middle(times),
            f"best {min(times):.2f}, worst {max(times):.2f}, median {statistics.median(times):.2f}",
        ],
        ["installed, MB", f"{installed_mb('compaction-proxy') + package_mb():.1f}", f"of it ours {package_mb():.1f}"],
    ]
    table(["what", "value", "remark"], rows)


if __name__ == "__main__":
    main()

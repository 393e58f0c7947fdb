"""Requests/s and CPU per request of the proxies, at three body sizes and several numbers of connections.

    python tests/benchmarks/throughput.py --seconds 5 --rounds 5

Counting and metrics are on in ours; the peers only forward. Rounds go through the peers in turn; figures are the median
with minimum and maximum. CPU per request is what noise on the machine spares: read it first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from rig import OTHER_CORE, PEERS, body, cpu_seconds, machine, middle, peer, stub, table, which

LUA = """local f = io.open("{path}", "rb"); wrk.body = f:read("*a"); f:close()
wrk.method = "POST"; wrk.headers["content-type"] = "application/json"; wrk.headers["authorization"] = "Bearer sk-bench"
"""
SIZES = {"1KB": 1_000, "100KB": 100_000, "1MB": 1_000_000}


def load(port: int, script: Path, connections: int, seconds: float) -> tuple[int, float, float]:
    """Requests answered, requests/s, median latency in ms."""
    command = ["taskset", "-c", str(OTHER_CORE), which("wrk") or "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--latency"]
    output = subprocess.run(
        [*command, "-s", str(script), f"http://127.0.0.1:{port}/v1/chat/completions"], capture_output=True, text=True
    ).stdout
    if "Non-2xx" in output:
        raise RuntimeError(output)
    count = int(re.search(r"(\d+) requests in", output)[1])  # type: ignore[index]
    rate = float(re.search(r"Requests/sec: +([\d.]+)", output)[1])  # type: ignore[index]
    number, unit = re.search(r"50% +([\d.]+)(us|ms|s)", output).groups()  # type: ignore[union-attr]
    return count, rate, float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1KB,100KB,1MB")
    parser.add_argument("--connections", default="16")
    parser.add_argument("--peers", default=",".join(one.name for one in PEERS))
    options = parser.parse_args()
    if which("wrk") is None:
        print("throughput: wrk is not installed, nothing measured")
        return
    print(f"throughput: {machine()}")

    rates, costs, delays = defaultdict(list), defaultdict(list), defaultdict(list)
    cases = [(size, int(number)) for size in options.sizes.split(",") for number in options.connections.split(",")]
    names = options.peers.split(",")
    missing: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, stub() as upstream:
        for size in options.sizes.split(","):
            (Path(folder) / size).write_bytes(body(SIZES[size]))
            (Path(folder) / f"{size}.lua").write_text(LUA.format(path=Path(folder) / size))
        for _ in range(options.rounds):
            for one in PEERS:
                if one.name not in names:
                    continue
                with peer(one, upstream) as running:
                    if running is None:
                        missing.add(one.name)
                        continue
                    port, pid = running
                    for size, connections in cases:
                        script = Path(folder) / f"{size}.lua"
                        load(port, script, connections, 1)
                        before = cpu_seconds(pid)
                        count, rate, delay = load(port, script, connections, options.seconds)
                        key = one.name, size, connections
                        rates[key].append(rate)
                        costs[key].append((cpu_seconds(pid) - before) / count * 1e6)
                        delays[key].append(delay)

    rows = []
    for size, connections in cases:
        for name in names:
            key = name, size, connections
            if rates[key]:
                ratios = [_ratio(costs, key, other) for other in ("envoy", "nginx", "starlette+httpx")]
                rows.append([size, connections, name, middle(rates[key]), middle(costs[key]), middle(delays[key]), *ratios])
    header = ["body", "conns", "proxy", "requests/s", "CPU µs/request", "p50 ms", "× Envoy", "× nginx", "× stock"]
    table([*header[:-3], *(f"{word} (by CPU)" for word in header[-3:])], rows)
    for name in sorted(missing):
        print(f"not installed, not measured: {name}")


def _ratio(costs: dict[tuple[str, str, int], list[float]], key: tuple[str, str, int], other: str) -> str:
    """How many requests it serves in the CPU time in which the other serves one."""
    theirs = costs.get((other, *key[1:]))
    return f"{sorted(theirs)[len(theirs) // 2] / sorted(costs[key])[len(costs[key]) // 2]:.2f}" if theirs else "–"


if __name__ == "__main__":
    main()

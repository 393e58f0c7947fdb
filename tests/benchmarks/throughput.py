"""Requests/s and CPU per request of the proxies, at three body sizes and several numbers of connections.

    python tests/benchmarks/throughput.py --seconds 5 --rounds 5 --connections 1,16,128

Counting and metrics are on in ours; the peers only forward. Rounds go through the peers in turn. CPU per request is what noise on
the machine spares: read it first. With one connection the delay that the proxy adds is shown instead of requests/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from load import load
from peers import compare
from rig import Part, Running, body, options

SIZES = {"1KB": 1_000, "100KB": 100_000, "1MB": 1_000_000}


def measure(one: Running, sizes: Sequence[str], connections: Sequence[int], seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for size in sizes:
        load(one, body(SIZES[size]), 4, 0.2)  # warm
        for number in connections:
            found |= _figures(one, size, number, seconds)
    return found


def _figures(one: Running, size: str, connections: int, seconds: float) -> Mapping[str, float]:
    before = one.cpu()
    got = load(one, body(SIZES[size]), connections, seconds)
    name = f"{size}, {connections} connection{'s' * (connections > 1)}"
    cost = {} if one.pid is None else {f"{name}: CPU µs a request ↓": (one.cpu() - before) / got.answered * 1e6}
    if connections == 1:
        return {f"added p50 at 1 connection, {size}, ms ↓": got.half} | cost
    return {f"{name}: requests/s ↑": got.rate} | cost


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", default="1KB,100KB,1MB")
    parser.add_argument("--connections", default="16")
    asked = parser.parse_args()
    sizes, connections = asked.sizes.split(","), [int(number) for number in asked.connections.split(",")]
    compare("throughput", [Part(lambda one: measure(one, sizes, connections, asked.seconds))], asked)


if __name__ == "__main__":
    main()

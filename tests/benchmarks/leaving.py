"""How long until the upstream is let go when the client leaves: while it waits for an answer, and amid a stream.

    python tests/benchmarks/leaving.py --tries 50

The stub says over UDP when a request came and when its connection was closed under it. Of a proxy that does not let the upstream go
within the patience the patience is shown: the upstream goes on, and what it makes is paid for.
"""

from __future__ import annotations

import socket
import statistics
import time

from peers import compare
from rig import Part, Running, asking, options

PATIENCE = 1.0
"""Seconds. What is let go later than that is not let go because the client left."""
PHASES = {"it waits": "hold", "it streams": "100000@5000"}


def measure(one: Running, tries: int) -> dict[str, float]:
    return {
        f"client leaves while {phase}, upstream let go after, ms ↓": _median(one, wish, tries) for phase, wish in PHASES.items()
    }


def _median(one: Running, wish: str, tries: int) -> float:
    request, waits = one.request(asking(wish)), list[float]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as told:
        told.bind(("127.0.0.1", one.upstream))
        while len(waits) < tries and waits[-2:] != [PATIENCE] * 2:  # twice in vain is enough
            waits.append(_leave(one.port, request, told))
    return statistics.median(waits) * 1e3


def _leave(port: int, request: bytes, told: socket.socket) -> float:
    """Seconds from the client's FIN until the stub saw its own connection end."""
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(request)
        told.settimeout(10)
        while told.recv(16) != b"came":
            pass
        time.sleep(0.02)
    left = time.perf_counter()
    told.settimeout(PATIENCE)
    try:
        while told.recv(16) != b"left":
            pass
    except TimeoutError:
        return PATIENCE
    return time.perf_counter() - left


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tries", type=int, default=20)
    asked = parser.parse_args()
    compare("leaving", [Part(lambda one: measure(one, asked.tries))], asked)


if __name__ == "__main__":
    main()

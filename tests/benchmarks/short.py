"""Speed beside the proxies that are installed, in a short form and as one table: what `make bench` runs.

    python tests/benchmarks/short.py [--seconds 1] [--rounds 3] [--connections 16,128] [--peers nginx,Envoy] [--smoke]

Requests/s and CPU per request at three sizes, the delay that is added, event streams, memory, start, and what happens when a client
leaves. Ours, nginx and Envoy are measured in every round, as far as noise matters, the others in the first. --smoke takes a few
seconds and only shows that all of it runs. For figures to rely on run throughput.py, streams.py, leaving.py, memory.py and startup.py for longer.
"""

from __future__ import annotations

import leaving
import memory
import streams
import throughput
from peers import OURS, PEERS, compare
from rig import Part, options


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--connections", default="16")
    parser.add_argument("--smoke", action="store_true", help="ours and nginx, a few seconds")
    parser.set_defaults(seconds=1.0)
    asked = parser.parse_args()
    few, many, tries, sizes = 256, 2_000, 10, list(throughput.SIZES)
    if asked.smoke:
        few, many, tries = 32, 64, 3
        asked.seconds, asked.rounds, asked.peers = 0.3, 1, asked.peers or f"{OURS},nginx"
    asked.peers = asked.peers or ",".join(peer.name for peer in PEERS if peer.name != "HAProxy")  # much like nginx
    seconds, connections = asked.seconds, [int(number) for number in asked.connections.split(",")]
    compare(
        "make bench",
        [
            Part(memory.at_rest, proxies_only=True),
            Part(lambda one: streams.paced(one, many, seconds), once=True, heavy=True),  # before others have left their memory
            Part(lambda one: throughput.measure(one, sizes, connections, seconds), proxies_only=True),
            Part(lambda one: throughput.measure(one, ["1KB"], [1], seconds)),
            Part(lambda one: streams.paced(one, few, seconds)),
            Part(lambda one: streams.in_batches(one, few, seconds), proxies_only=True),
            Part(lambda one: streams.flood(one, few, seconds), once=True, heavy=True),
            Part(lambda one: streams.head_of_line(one, seconds), once=True, heavy=True),
            Part(lambda one: leaving.measure(one, tries), once=True),
        ],
        asked,
        often=(OURS, "nginx", "Envoy"),
    )


if __name__ == "__main__":
    main()

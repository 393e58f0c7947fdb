"""How the forecast's coefficients were fitted: `python tests/benchmarks/fit_weights.py [--l2 100]`.

Each recorded conversation is cut at eight places. Every name of the part before the cut is an example; it is positive when the
assistant uses it later before anyone else brings it up again. What stays in place anyway (instructions, the task, the newest
step) is left out. A ridge logistic regression; every conversation weighs the same however long it is. Printed: how much of
what was needed stands among the best-ranked names of conversations that were held out, one at a time, and the coefficients.
Needs numpy, which is not among the locked requirements: run it from an environment of its own that has it.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import recorded

from proxy.compaction import entities, forecast
from proxy.compaction.plan import History, told
from proxy.conversation import Message

try:
    import numpy
except ImportError:
    sys.exit("fitting needs numpy: pip install numpy (in an environment of its own)")

SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SMALLEST = 1_500
TOP = (0.05, 0.1, 0.2, 0.4)
Row = tuple[str, Any, Any, Any]
"""Conversation, features, needed or not, rarity."""


def names(message: Message) -> set[str]:
    return set(entities.scan(told(message)).distinct)


def needed(cut: recorded.Cut) -> set[str]:
    supplied: set[str] = set()
    seen: set[str] = set()
    found: set[str] = set()
    for message in cut.future.messages:
        if message.role == "assistant":
            fresh = names(message) - seen
            seen |= fresh
            found |= fresh - supplied
        else:
            supplied |= names(message)
    return found


def row(cut: recorded.Cut) -> Row | None:
    history = History(cut.prefix, recorded.counter(), b"")
    mentions = tuple(history.mentions())
    if not mentions:
        return None
    stays = [*cut.prefix.preamble, *cut.prefix.steps[-1].messages]
    stays += [cut.prefix.steps[i].head for i in (history.task, history.last_user) if i is not None]
    shown = set().union(*map(names, stays))
    found = {name: use for name, use in forecast.uses(mentions).items() if name not in shown}
    if len(found) < 5:
        return None
    wanted, now = needed(cut), mentions[-1].turn
    return (
        cut.id,
        numpy.array([forecast.features(name, use, now) for name, use in found.items()]),
        numpy.array([float(name in wanted) for name in found]),
        numpy.array([math.log1p(len(mentions) / use.messages) for use in found.values()]),
    )


def fit(rows: list[Row], l2: float) -> Any:
    x = numpy.concatenate([features for _, features, _, _ in rows])
    y = numpy.concatenate([labels for _, _, labels, _ in rows])
    # A conversation's examples share one unit of weight; the least is for those that need next to nothing.
    weight = numpy.concatenate([rarity / max(float(rarity @ labels), 8.0) for _, _, labels, rarity in rows])
    weight *= 150 * len(rows) / weight.sum()
    mean, scale = x.mean(0), x.std(0) + 1e-9
    mean[0], scale[0] = 0.0, 1.0
    z = (x - mean) / scale
    ridge = numpy.full(z.shape[1], l2)
    ridge[0] = 1e-6
    b = numpy.zeros(z.shape[1])
    for _ in range(30):
        p = 1 / (1 + numpy.exp(-z @ b))
        gradient = z.T @ (weight * (p - y)) + ridge * b
        step = numpy.linalg.solve((z * (weight * p * (1 - p))[:, None]).T @ z + numpy.diag(ridge), gradient)
        b -= step
        if abs(step).max() < 1e-6:
            break
    coefficients = b / scale
    coefficients[0] = b[0] - (b * mean / scale).sum()
    return coefficients


def ranked(rows: list[Row], weights: Any) -> list[float] | None:
    """Share of what was needed among the best-ranked names, by their rarity."""
    found = []
    for _, x, y, rarity in rows:
        if y.sum() < 3:
            continue
        order = numpy.argsort(-rarity / (1 + numpy.exp(-x @ weights)))
        worth = (rarity * y)[order]
        found.append([float(worth[: max(1, int(share * len(order)))].sum() / worth.sum()) for share in TOP])
    return [sum(column) / len(column) for column in zip(*found, strict=True)] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--l2", type=float, default=100.0)
    options = parser.parse_args()
    recorded.require()
    rows = [found for cut in recorded.cuts(SHARES, SMALLEST) if (found := row(cut)) is not None]
    held_out = []
    for conversation in sorted({name for name, *_ in rows}):
        weights = fit([r for r in rows if r[0] != conversation], options.l2)
        held_out.append(ranked([r for r in rows if r[0] == conversation], weights))
    scores = [score for score in held_out if score is not None]
    print(f"{len(rows)} cuts of {len(held_out)} conversations")
    for share, column in zip(TOP, zip(*scores, strict=True), strict=True):
        print(f"needed among the best {share:.0%} of names, held out: {sum(column) / len(column):.3f}")
    for name, weight in zip(forecast.FEATURES, fit(rows, options.l2), strict=True):
        print(f"{name:14}{weight:8.3f}")


if __name__ == "__main__":
    main()

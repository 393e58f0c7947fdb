"""What survives a compaction: `python tests/benchmarks/quality.py [--peers] [--cuts .4,.6,.8] [--cycles]`.

Recorded conversations are cut where a request was sent; what came before is compacted to a share of its tokens. recall_ctx:
of what the assistant used later and only the folded part held, how much is still there with words around it. req: sentences
of the user still there word by word. err: the last five error lines. concl: the assistant's last words. fits: the budget was
met, of those whose floor fits. broken: conversations that the API would now refuse.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import recorded
import rivals
from recorded import Cut, Messages

from proxy.compaction import forecast, ledger, summary
from proxy.compaction.collapse import ContextCollapse
from proxy.compaction.emergency import floor
from proxy.conversation import Conversation

BUDGETS = (0.5, 0.25, 0.1)
COLUMNS = ("recall_ctx", "req_exact", "err_last", "concl")
Rows = dict[float, list[dict[str, Any]]]


def ours(conversation: Conversation, tokens: int) -> Messages:
    return recorded.plain(ContextCollapse().apply(conversation, recorded.budget(tokens)))


def measured(cuts: list[Cut], way: Callable[[Cut, int], Messages | None]) -> Rows:
    rows: Rows = defaultdict(list)
    for cut in cuts:
        for share in BUDGETS:
            tokens = int(share * cut.tokens)
            started = time.process_time()
            made = way(cut, tokens)
            spent = time.process_time() - started
            if made is None:
                rows[share].append({"family": cut.family, "raised": True})
                continue
            size = recorded.counter().total(recorded.conversation(made).messages)
            rows[share].append(
                {
                    "family": cut.family,
                    **cut.score(made),
                    "fits": size <= tokens if floor(cut.prefix, recorded.budget(tokens)) <= tokens else None,
                    "broken": cut.breaks(made),
                    "ms": 1e8 * spent / cut.tokens,
                }
            )
    return rows


def mean(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def shown(value: float | None) -> str:
    return "   –" if value is None else f"{value:.3f}" if value < 0.9995 else "1.00 "


def line(name: str, rows: Rows) -> str:
    columns = ["/".join(shown(mean(rows[share], key)) for share in BUDGETS) for key in (*COLUMNS, "fits")]
    broken = sum(bool(row.get("broken")) or bool(row.get("raised")) for share in BUDGETS for row in rows[share])
    return f"{name:32} " + "  ".join(f"{column:17}" for column in columns) + f"  {broken:4}"


def future_known(cut: Cut, tokens: int) -> Messages:
    """Our assembly, told which names will be needed: the distance to it is what a better forecast could bring."""
    guess = forecast.needs

    def knows(mentions: Sequence[forecast.Mention]) -> dict[str, float]:
        return {**{name: worth / 100 for name, worth in guess(mentions).items()}, **cut.needed}

    with mock.patch.object(forecast, "needs", knows):
        return ours(cut.prefix, tokens)


def libraries(cuts: list[Cut]) -> Iterator[tuple[str, Rows | None]]:
    jobs = [(cut.messages[: cut.at], int(share * cut.tokens), cut.rate) for cut in cuts for share in BUDGETS]
    for name in rivals.LIBRARIES:
        made = rivals.library(name, jobs)
        if made is None:
            yield name, None
            continue
        found = dict(zip(((id(cut), int(share * cut.tokens)) for cut in cuts for share in BUDGETS), made, strict=True))
        yield name, measured(cuts, lambda cut, tokens, found=found: found[id(cut), tokens])  # type: ignore[misc]


def table(cuts: list[Cut], peers: bool) -> None:
    heads = [f"{key} 50/25/10 %" if key == "recall_ctx" else key for key in (*COLUMNS, "fits")]
    print(f"{len(cuts)} cuts; shares of the prefix's tokens: 50 / 25 / 10 %\n")
    print(f"{'':32} " + "  ".join(f"{head:17}" for head in heads) + "  broken")
    mine = measured(cuts, lambda cut, tokens: ours(cut.prefix, tokens))
    print(line("compaction-proxy", mine))
    print(line("  the same, future known", measured(cuts, future_known)))
    others = {name: measured(cuts, lambda cut, tokens, way=way: way(cut.prefix, tokens)) for name, way in rivals.WAYS.items()}  # type: ignore[misc]
    for name, rows in others.items():
        print(line(name, rows))
    if peers:
        for name, rows in libraries(cuts):
            print(line(name, rows) if rows is not None else f"{name:32} could not be installed")
    print(f"\ntime of ours, cold: {mean(mine[BUDGETS[0]], 'ms') or 0:.0f} ms a 100k tokens\n")
    by_family(mine, others["head+tail, first user + last k"])


def by_family(mine: Rows, other: Rows) -> None:
    print(f"{'recall_ctx by family':32} {'ours':17}  {'head+tail':17}")
    for family in sorted({row["family"] for row in mine[BUDGETS[0]]}):
        sides = []
        for rows in (mine, other):
            own = {share: [row for row in rows[share] if row["family"] == family] for share in BUDGETS}
            sides.append("/".join(shown(mean(own[share], "recall_ctx")) for share in BUDGETS))
        print(f"{family:32} {sides[0]:17}  {sides[1]:17}")


def cycles(times: int) -> None:
    """Each conversation goes on and is compacted again, `times` in a row, to a quarter of its tokens: is the first cycle still there?"""
    kept: dict[str, list[bool]] = defaultdict(list)
    sizes: list[float] = []
    for recording in recorded.recordings():
        steps = recorded.conversation(recording["messages"])
        total = recorded.counter().total(steps.messages)
        if total < 2 * recorded.SMALLEST_PREFIX or len(steps.steps) < 2 * times:
            continue
        target = total // 4
        talk = Conversation(steps.preamble)
        first: ledger.Ledger | None = None
        for cycle in range(times):
            begin, end = (len(steps.steps) * part // times for part in (cycle, cycle + 1))
            more = [message for step in steps.steps[begin:end] for message in step.messages]
            # Small at first, so that every cycle folds something.
            size = max(2_000, min(target, recorded.counter().total([*talk.messages, *more]) // 2))
            talk = ContextCollapse().apply(Conversation((*talk.messages, *more)), recorded.budget(size))
            if first is None:
                first = next((summary.read(body).ledger for m in talk.messages if (body := summary.body_of(m)) is not None), None)
        if first is None:
            continue
        sizes.append(recorded.counter().total(talk.messages) / target)
        text = "\n".join(message.text for message in talk.messages) + "\n".join(
            call.arguments for message in talk.messages for call in message.calls
        )
        words = "".join(text.split())  # a quote of several lines is indented in a summary
        for what, quotes in {
            "constraints": first.constraints,
            "open requests": [request.text for request in first.open_requests],
            "unresolved errors": [failure.first for failure in first.unresolved],
            "edited files": [use.path for use in first.files if use.edited],
        }.items():
            kept[what].extend("".join(quote.split()) in words for quote in quotes)
    print(
        f"\n{times} compactions in a row, {len(sizes)} conversations: of what the first summary held, the last request still holds"
    )
    for what, found in kept.items():
        print(f"  {what:20} {sum(found)}/{len(found)}")
    print(f"  size against the target: at most {max(sizes, default=0):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--peers", action="store_true", help="also run litellm and langchain-core, each in an environment of its own"
    )
    parser.add_argument("--cuts", default=".4,.6,.8", help="shares of the text; `own` takes each recording's own cut")
    parser.add_argument("--cycles", action="store_true", help="only the compactions in a row")
    options = parser.parse_args()
    recorded.require()
    if not options.cycles:
        shares = None if options.cuts == "own" else tuple(map(float, options.cuts.split(",")))
        table(list(recorded.cuts(shares)), options.peers)
        if not options.peers:
            print("\nlitellm and langchain-core are left out: --peers installs and runs them")
    for times in (5, 10):
        cycles(times)


if __name__ == "__main__":
    main()

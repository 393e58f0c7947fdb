"""The commands: serve, and the same decisions offline."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import functools
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from proxy import __version__, app, config, replay, tokens
from proxy.compaction import CompactionResult
from proxy.compaction.pipeline import compact
from proxy.config import Config
from proxy.decisions import Wish
from proxy.errors import CompactionProxyError, ConfigError, Unreadable
from proxy.windows import Budget, Window, Windows, budget
from proxy.wire import Request, chat_completions, slices

WRONG_USE = 2
"""Exit code for a wrong flag, setting or file: the one that argparse uses."""
BAR_FROM = 20
"""Bodies in a file from which a progress bar is worth its flicker."""


class Failure(CompactionProxyError):
    """Something that ends a command with one readable line."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console command. Exit codes: 0 done, 1 failed, 2 wrong flag, setting or file."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
    except (ConfigError, Failure) as error:
        print(f"compaction-proxy: {error}", file=sys.stderr)
        code = WRONG_USE
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compaction-proxy",
        description="A transparent, OpenAI-compatible proxy that makes long conversations fit the model's context window.",
        epilog="Settings: flag > environment (COMPACTION_…, nested with __) > --config FILE > default.",
    )
    parser.add_argument("--version", action="version", version=f"compaction-proxy {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the proxy", description="Run the proxy.")
    serve.add_argument("--upstream", metavar="URL", help="OpenAI-compatible base URL (default https://api.openai.com/v1)")
    serve.add_argument("--host", help="address of the proxy port (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="proxy port (default 8080; 0: any free one)")
    serve.add_argument("--admin-host", help="address of the admin port (default 127.0.0.1)")
    serve.add_argument("--admin-port", type=int, help="port of /metrics, /healthz, /readyz, /stats (default 9464)")
    serve.add_argument("--workers", type=int, metavar="N", help="processes on the same ports (default 1)")
    serve.add_argument("--store", metavar="URL", help="checkpoints: memory://, sqlite:///PATH or redis://HOST:PORT/DB")
    serve.add_argument("--shadow", action="store_true", default=None, help="measure what would be saved, forward untouched")
    serve.set_defaults(run=_serve)

    shrink = commands.add_parser(
        "compact",
        help="write what would be forwarded for the bodies in a file",
        description="Read a request body (JSON), one a line (JSONL) or a bare messages array; write what would be forwarded, "
        "one JSON a line. With --budget, compact to at most that many tokens whatever the window.",
    )
    _add_file(shrink)
    shrink.add_argument("--window", type=_positive, metavar="N", help="the model's context window in tokens")
    shrink.add_argument("--budget", type=_budget_word, metavar="N|P%", help="at most N tokens, or P%% of the input's")
    shrink.add_argument("--explain", action="store_true", help="a table of what each layer did, on stderr")
    shrink.set_defaults(run=_compact)

    again = commands.add_parser(
        "replay",
        help="send recorded conversations again, turn by turn, and print what compaction does to them",
        description="Replay recorded conversations (one JSON object with `messages` a line) as their clients sent them, each "
        "request through the proxy's own decisions, and print tokens saved, facts kept, prefix breaks, requests that fit and "
        "time per turn.",
    )
    _add_file(again)
    again.add_argument("--window", type=_positive, action="append", metavar="N", help="context window in tokens; repeatable")
    again.add_argument("--json", action="store_true", help="one JSON object for machines")
    again.set_defaults(run=_replay)

    count = commands.add_parser(
        "count", help="count the tokens of the bodies in a file", description="The token count that the proxy would use."
    )
    _add_file(count)
    count.add_argument("--json", action="store_true", help="one JSON object a body")
    count.set_defaults(run=_count)

    models = commands.add_parser("models", help="which window a model gets, and from where", description=_models.__doc__)
    models.add_argument("name", nargs="?", metavar="NAME", help="a model's name (default: all configured ones)")
    models.set_defaults(run=_models)

    check = commands.add_parser(
        "check-config", help="validate a configuration", description="Print the effective configuration, secrets masked."
    )
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=_check_config)

    for command in (serve, shrink, again, count, models):
        command.add_argument("--config", metavar="FILE", help="configuration file, YAML or JSON (default: COMPACTION_CONFIG)")
    return parser


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a JSON or JSONL file; - is stdin")
    parser.add_argument("--model", metavar="M", help="the model, where the body names none or another is meant")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: takes a number of tokens above 0")
    return int(text)


@dataclass(frozen=True, slots=True)
class Share:
    """A budget as the flag gives it: tokens, or a share of the input's."""

    tokens: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        return self.tokens if self.tokens is not None else max(1, int(total * (self.share or 0)))


def _budget_word(text: str) -> Share:
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 < share <= 1:
                return Share(share=share)
        elif int(text) > 0:
            return Share(tokens=int(text))
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: takes a number of tokens (20000) or a share of the input's (25%)")


def _serve(options: argparse.Namespace) -> int:
    from proxy import server  # starts uvicorn's import only where it serves

    flags = {
        "upstream": {"url": options.upstream},
        "server": {name: getattr(options, name) for name in ("host", "port", "admin_host", "admin_port", "workers")},
        "compaction": {"shadow": options.shadow},
        "store": {"url": options.store},
    }
    settings = config.load(flags, file=options.config)
    app.configure_logging(settings.log)
    place = settings.server
    where: dict[str, Any] = {
        "host": place.host,
        "port": place.port,
        "admin_host": place.admin_host,
        "admin_port": place.admin_port,
        "drain_timeout": place.drain_timeout,
        "header_timeout": place.header_timeout,
        "on_started": lambda addresses: _banner(settings, _url(addresses.proxy), _url(addresses.admin)),
    }
    if place.workers > 1:
        return _serve_workers(settings, where)
    built = app.build_app(settings)
    return server.serve(built.proxy, built.admin, **where)


def _serve_workers(settings: Config, where: dict[str, Any]) -> int:
    from proxy import workers, workers_figures
    from proxy.metrics import Metrics

    app.check(settings)
    folder = workers_figures.fresh_folder()
    counted = Metrics(model_names=app.model_names(settings), folder=folder)
    build = functools.partial(app.build_worker, settings, folder)
    try:
        return workers.serve_workers(build, settings.server.workers, on_worker_gone=counted.bury, **where)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _url(address: tuple[str, int]) -> str:
    host = app.EVERYWHERE.get(address[0]) or (f"[{address[0]}]" if ":" in address[0] else address[0])
    return f"http://{host}:{address[1]}"


def _banner(settings: Config, proxy: str, admin: str) -> None:
    """What to paste where. proxy, admin: the two listeners' URLs."""
    shadow = " (shadow: measured, forwarded untouched)" if settings.compaction.shadow else ""
    shown = config.masked(settings)
    upstream = shown["upstream"]["url"]
    lines = [
        f"compaction-proxy {__version__}{shadow}",
        f"  base_url   {proxy}/v1      <- paste this into your OpenAI client",
        f"  upstream   {upstream}",
        f"  store      {shown['store']['url']}",
        f"  metrics    {admin}/metrics   savings so far: {admin}/stats",
    ]
    if settings.server.host in app.EVERYWHERE:
        lines.insert(2, f"  listening  on every address of this machine ({settings.server.host})")
    print("\n".join(lines), flush=True)


def _compact(options: argparse.Namespace) -> int:
    settings = config.load(file=options.config)
    layers = app.build_layers(settings)
    windows = app.build_windows(settings)
    for body in _bodies(options):
        request, aim, before = _measured(body, options, settings, windows)
        if aim is None:
            print(
                f"{body.place}: the window of {request.model or 'the model'} is unknown: use --window or --budget",
                file=sys.stderr,
            )
            body.write(request, None)
            continue
        hard = options.budget is not None
        if not hard and before <= aim.trigger:
            result = CompactionResult(request.conversation, before, before, reason="fits")
        else:
            result = compact(request.conversation, aim, layers, hard=hard)
        if result.tokens_after > aim.usable:
            print(f"{body.place}: {result.tokens_after} tokens do not fit {aim.usable} ({result.reason})", file=sys.stderr)
        body.write(request, result)
        if options.explain:
            print(explained(body.place, result, aim), file=sys.stderr)
    return 0


def _measured(body: Body, options: argparse.Namespace, settings: Config, windows: Windows) -> tuple[Request, Budget | None, int]:
    """A body as read, the budget that it gets (None: window unknown), and its tokens."""
    request = body.request(options.model)
    window = windows.lookup(request.model, time.monotonic())
    ruler = tokens.ruler(request.model, request.fields, encoding=window.encoding if window else None)
    before = ruler.total(request.conversation.messages)
    if options.budget is not None:
        most = options.budget.of(before)
        return request, Budget(most, 0, most, most, most, ruler), before
    if options.window is not None:
        window = Window(options.window, None, None, "config", None, window.reserve if window else None, None)
    if window is None:
        return request, None, before
    marks = settings.compaction
    return (
        request,
        budget(window, requested_output=request.max_output, ruler=ruler, trigger=marks.trigger, target=marks.target),
        before,
    )


def explained(place: str, result: CompactionResult, aim: Budget) -> str:
    """A table: layer, tokens before, after, saved, messages touched, why skipped or refused."""
    rows = [("layer", "before", "after", "saved", "touched", "skipped")]
    for report in result.reports:
        why = f"refused: {report.refused}" if report.refused else report.skipped or ""
        rows.append((report.layer, str(report.before), str(report.after), str(report.saved), str(report.touched), why))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in (0, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    share = 100 * (result.tokens_before - result.tokens_after) / result.tokens_before if result.tokens_before else 0.0
    kept = result.critical
    reason = f", {result.reason}" if result.reason else ""
    lines += [
        f"{place}: {result.tokens_before} → {result.tokens_after} tokens ({share:.1f}% saved){reason}",
        f"target {aim.target}, usable {aim.usable}; critical items: {kept.kept} kept, {kept.repaired} repaired, {kept.lost} lost",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _replay(options: argparse.Namespace) -> int:
    settings = config.load(file=options.config)
    told: dict[str, object] = {}
    for window in options.window or [None]:
        total, rows = asyncio.run(_replay_all(options, settings, window))
        told[str(window or "model's own")] = {"total": total, "conversations": rows}
    if options.json:
        print(json.dumps(told, ensure_ascii=False))
    else:
        print(replay.LEGEND)
    return 0


async def _replay_all(
    options: argparse.Namespace, settings: Config, window: int | None
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Every conversation of the file under one window. Raises Failure."""
    windows = app.build_windows(settings)
    if window is not None:
        windows = Windows({"*": config.Model(window=window)})
    compactor = app.build_compactor(settings, windows)
    whole, rows = replay.Tally(), {}
    if not options.json:
        print(f"window {window or 'as the model has it'}\n{replay.heading()}")
    for number, body in enumerate(_bodies(options), 1):
        try:
            row = replay.read_row(body.raw, number, options.model)
        except Unreadable as error:
            raise Failure(f"{body.place}: not a recorded conversation ({error.reason})") from None
        tally = await replay.replay(row, compactor, Wish())
        rows[row.name] = tally.report()
        whole.add(tally)
        if not options.json:
            print(replay.line(row.name, rows[row.name]), flush=True)
    await compactor.aclose()
    if not options.json:
        print(replay.line("total", whole.report()) + "\n")
    return whole.report(), rows


def _count(options: argparse.Namespace) -> int:
    settings = config.load(file=options.config)
    windows = app.build_windows(settings)
    for body in _bodies(options):
        request = body.request(options.model)
        window = windows.lookup(request.model, time.monotonic())
        found = tokens.breakdown(
            request.model, request.fields, request.conversation.messages, encoding=window.encoding if window else None
        )
        print(json.dumps(asdict(found), ensure_ascii=False) if options.json else _counted(found))
    return 0


def _counted(found: tokens.Breakdown) -> str:
    """A table: each message with its parts, tools, the rest, the sum."""
    rows = [(f"{index}", message.role, message.tokens, message.parts) for index, message in enumerate(found.messages)]
    lines = [f"{found.model or '(no model)'}  {found.encoding}", f"{'':>5}  {'role':<12}{'tokens':>9}  parts"]
    for index, role, count, parts in rows:
        told = ", ".join(f"{part.kind} {part.tokens}" for part in parts)
        lines.append(f"{index:>5}  {role:<12}{count:>9}  {told}")
    sums = (("tools", found.tools), ("other", found.other), ("total", found.tokens))
    lines += [f"{'':>5}  {label:<12}{count:>9}" for label, count in sums]
    return "\n".join(line.rstrip() for line in lines)


def _models(options: argparse.Namespace) -> int:
    """Which window, output reserve, tokenizer and price a model name gets, and from where."""
    windows = app.build_windows(config.load(file=options.config))
    names = [options.name] if options.name else list(windows.names())
    if not names:
        print("no models are configured; `compaction-proxy models NAME` tells of any name")
    for name in names:
        told = windows.describe(name, time.monotonic())
        print(name)
        price = told.price.value if told.price else None
        rows = [
            ("window", f"{told.window.value} tokens" if told.window else "unknown: passes through", told.window),
            ("max input", f"{told.max_input.value} tokens" if told.max_input else None, told.max_input),
            ("output reserve", f"{told.reserve.value} tokens" if told.reserve else "-", told.reserve),
            ("tokenizer", str(told.encoding.value) if told.encoding else tokens.encoding_name(name), told.encoding),
            ("price", _price_words(price) if price else "unknown", told.price),
        ]
        for label, value, fact in rows:
            if value is not None:
                source = fact.source if fact else ("name" if label == "tokenizer" else "-")
                print(f"  {label:<15}{value:<44}{source}")
    return 0


def _price_words(price: Any) -> str:
    cached = f" (cached ${price.cached_input:g})" if price.cached_input != price.input else ""
    return f"${price.input:g}{cached} in, ${price.output:g} out a million"


def _check_config(options: argparse.Namespace) -> int:
    settings = config.load(environment={}, file=options.file)
    app.build_layers(settings)
    print(yaml.safe_dump(config.masked(settings), sort_keys=False, allow_unicode=True), end="")
    return 0


@dataclass(frozen=True, slots=True)
class Body:
    """One body of a file. place: where it stands, for messages. bare: it is a messages array."""

    raw: bytes
    place: str
    bare: bool

    def request(self, model: str | None) -> Request:
        """Raises Failure."""
        try:
            whole = slices.join_object([("messages", self.raw)]) if self.bare else self.raw
            request = chat_completions.read(whole)
        except Unreadable as error:
            raise Failure(f"{self.place}: not a chat-completions body ({error.reason})") from None
        return msgspec.structs.replace(request, model=model) if model else request

    def write(self, request: Request, result: CompactionResult | None) -> None:
        """What would be forwarded, as one line."""
        out = self.raw
        if result is not None and result.tokens_after < result.tokens_before:
            written = [chat_completions.write_message(message) for message in result.conversation.messages]
            out = slices.join_array(written) if self.bare else chat_completions.write(request, result.conversation)
        # line breaks between JSON tokens only: inside strings they are escaped
        sys.stdout.write(out.replace(b"\n", b" ").replace(b"\r", b" ").decode() + "\n")


def _bodies(options: argparse.Namespace) -> Iterator[Body]:
    """The bodies of a file: one JSON value, or one a line. Raises Failure."""
    try:
        data = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    except OSError as error:
        raise Failure(f"cannot read {options.file}: {error.strerror}") from None
    data = data.removeprefix(codecs.BOM_UTF8)  # as editors on Windows write it
    name = "stdin" if options.file == "-" else options.file
    found = [(data.strip(), name)] if _is_one(data) else _lines(data, name)
    for done, (raw, place) in enumerate(found, 1):
        yield Body(raw, place, raw[:1] == b"[")
        if len(found) >= BAR_FROM and sys.stderr.isatty():
            filled = 30 * done // len(found)
            end = "\n" if done == len(found) else ""
            print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{len(found)}", end=end, file=sys.stderr, flush=True)


def _lines(data: bytes, name: str) -> list[tuple[bytes, str]]:
    return [(line.strip(), f"{name}:{number}") for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


def _is_one(data: bytes) -> bool:
    """Whether the file is one JSON value (perhaps over many lines) and not one a line."""
    if data.strip().count(b"\n") == 0:
        return True
    try:
        slices.split_object(data.strip()) if data.strip()[:1] == b"{" else slices.split_array(data.strip())
    except Unreadable:
        return False
    return True

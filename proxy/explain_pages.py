"""The explanations as JSON and as two plain pages: no script, no outside asset, for a phone and a keyboard as well."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from html import escape
from itertools import groupby

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.compaction import LayerReport
from proxy.explain import Brief, Explanation, Row, Shelf, View, read

REASONS = {
    "floor": "What may never be removed (instructions, tools, the last user message, the newest step) is too large by itself.",
    "no_gain": "It would have saved too little to be worth breaking the upstream's prompt cache.",
    "deadline": "It took longer than compaction.timeout_ms, so the request went on as it came.",
    "breaker": "The last event of this conversation is too recent: there is not enough new to compact.",
    "target": "It fits now, though it is not as small as the target.",
    "internal_error": "Something failed in the proxy; the log names where. The request went on as it came.",
}
OUTCOMES = {
    "applied": "Compacted and forwarded.",
    "reused": "Forwarded with what an earlier event had compacted.",
    "shadow": "Forwarded as it came: this is what would have been done.",
    "rejected": "Forwarded as it came: the result was not worth it.",
    "failed": "Forwarded as it came: compaction failed.",
    "none": "Forwarded as it came.",
}

STYLE = """
:root{color-scheme:light dark;--line:#8886;--soft:#8881;--add:#2a7a3a;--del:#b3261e;--edit:#8a5a00;--link:#0b57d0}
@media(prefers-color-scheme:dark){:root{--add:#7ddc8f;--del:#ff9e95;--edit:#f2c46d;--link:#a8c7fa}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:90rem;padding:0 1rem 4rem}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:1rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:2rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:.5rem;margin:1rem 0}
dl div{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .75rem}
dt{font-size:.8rem;opacity:.8}dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.4rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.row{display:grid;grid-template-columns:1fr 1fr;gap:.5rem;margin:.5rem 0}
.side{border:1px solid var(--line);border-radius:.5rem;min-width:0}
.side p{margin:0;padding:.35rem .6rem;background:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
.empty{display:flex;align-items:center;justify-content:center;opacity:.75;border-style:dashed}
.removed>.side:first-child{border-color:var(--del)}.added>.side:last-child{border-color:var(--add)}.edited>.side{border-color:var(--edit)}
pre{margin:0;padding:.5rem .6rem;white-space:pre-wrap;overflow-wrap:anywhere;max-height:24rem;overflow:auto;font-size:.85rem}
b.removed{color:var(--del)}b.added{color:var(--add)}b.edited{color:var(--edit)}
summary{cursor:pointer;padding:.35rem 0}
@media(min-width:44rem){dl div:last-child{grid-column:span 2}}
@media(max-width:44rem){.row{grid-template-columns:1fr}.empty{display:none}}
"""
STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
GUARDED = {
    "cache-control": "no-store",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

Handler = Callable[[Request], Awaitable[Response]]


def explain_routes(explanations: Shelf, *, token: str | None = None) -> tuple[Route, ...]:
    """`/explain` and `/explain/{id}` for the admin listener; HTML for browsers, JSON for everyone else.

    token: who has it may look, from anywhere (as a bearer token, or as the password of HTTP Basic). Without one, only who
    comes over loopback and under a loopback name: a page of another site must not be able to read along.
    """

    async def recent(request: Request) -> Response:
        briefs = await asyncio.to_thread(explanations.recent)
        if not _wants_page(request):
            return JSONResponse({"explanations": msgspec.to_builtins(briefs)}, headers=GUARDED)
        return _page(list_page(briefs))

    async def one(request: Request) -> Response:
        written = await asyncio.to_thread(explanations.written, request.path_params["id"])
        if not _wants_page(request):
            if written is None:
                return _error(404, "no such explanation: it was never there, or newer ones have taken its place")
            return Response(written, media_type="application/json", headers=GUARDED)
        if written is None:
            return _page(_document("Not there", "<p>It was never there, or newer ones have taken its place.</p>" + BACK), 404)
        return _page(one_page(read(written)))

    return (Route("/explain", _guarded(recent, token)), Route("/explain/{id}", _guarded(one, token)))


def _guarded(handler: Handler, token: str | None) -> Handler:
    async def guarded(request: Request) -> Response:
        if token is not None:
            if not hmac.compare_digest(_given(request).encode(), token.encode()):
                ask = {"www-authenticate": 'Basic realm="explain", charset="UTF-8"'}
                return _error(401, "a token is needed: as a bearer token, or as the password with any name", ask)
        elif not _is_local(request):
            return _error(403, "explanations hold what was said: they are shown on this machine only, or to who has a token")
        return await handler(request)

    return guarded


def _given(request: Request) -> str:
    """The token that came with the request, empty when none did."""
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _is_local(request: Request) -> bool:
    """From loopback, and under one of its names: by any other name it could be a page of a site that points here."""
    name = request.url.hostname or ""
    return request.client is not None and _is_loopback(request.client.host) and (name == "localhost" or _is_loopback(name))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "") and request.query_params.get("format") != "json"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status, GUARDED | (headers or {}))


def _page(html: str, status: int = 200) -> Response:
    return Response(html, status, GUARDED, "text/html")


BACK = '<p><a href="/explain">All explanations</a></p>'


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        '<body><a class="skip" href="#main">Skip to the content</a>'
        f'<main id="main"><h1>{escape(title)}</h1>{body}</main></body></html>'
    )


def list_page(briefs: Iterable[Brief]) -> str:
    """The newest explanations, one a line."""
    lines = "".join(_line(one) for one in briefs)
    if not lines:
        return _document("Explanations", "<p>Nothing yet. Requests appear here once one is over its budget.</p>")
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in COLUMNS)
    return _document(
        "Explanations", f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


NUMBER = ' class="n"'
COLUMNS = (("When (UTC)", ""), ("Model", ""), ("Outcome", ""), ("Before", NUMBER), ("After", NUMBER), ("Layers", ""))


def _line(one: Brief) -> str:
    why = f" ({escape(one.reason)})" if one.reason else ""
    return (
        f'<tr><td><a href="/explain/{escape(one.id)}">{_when(one.at)}</a></td><td>{escape(one.model)}</td>'
        f"<td>{escape(one.outcome)}{why}</td><td{NUMBER}>{one.tokens_before:,}</td><td{NUMBER}>{one.tokens_after:,}</td>"
        f"<td>{escape(', '.join(one.layers))}</td></tr>"
    )


def one_page(e: Explanation) -> str:
    """One request: the figures, the layers, and all its messages before beside after."""
    saved = 1 - e.tokens_after / e.tokens_before if e.tokens_before else 0.0
    said = OUTCOMES.get(e.outcome, "") + (" " + REASONS.get(e.reason, f"Reason: {e.reason}.") if e.reason else "")
    facts = {
        "Tokens before": f"{e.tokens_before:,}",
        "Tokens after": f"{e.tokens_after:,}",
        "Saved": f"{saved:.1%}",
        "Window": f"{e.window:,}",
        "Usable": f"{e.usable:,}",
        "Compacted from": f"{e.trigger:,}",
        "Target": f"{e.target:,}",
        "Critical facts": f"{e.critical.kept} kept, {e.critical.repaired} repaired, {e.critical.lost} lost",
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    masked = "<p>Texts are masked. explain.full_text shows them.</p>" if e.masked else ""
    return _document(
        f"{e.model}, {_when(e.at)} UTC",
        f"{BACK}<p>{escape(said)}</p><dl>{listed}</dl>{_layers(e.layers)}<h2>Messages</h2>{masked}{''.join(_messages(e.rows))}",
    )


def _layers(reports: Iterable[LayerReport]) -> str:
    lines = "".join(
        f"<tr><td>{escape(r.layer)}</td><td{NUMBER}>{r.before:,}</td><td{NUMBER}>{r.after:,}</td><td{NUMBER}>{r.saved:,}</td>"
        f"<td{NUMBER}>{r.touched:,}</td><td>{escape(_fate(r))}</td></tr>"
        for r in reports
    )
    if not lines:
        return "<h2>Layers</h2><p>No layer ran.</p>"
    names = (("Layer", ""), ("Before", NUMBER), ("After", NUMBER), ("Saved", NUMBER), ("Messages", NUMBER), ("", ""))
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in names)
    return f'<h2>Layers</h2><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _fate(report: LayerReport) -> str:
    if report.refused:
        return f"refused: {report.refused}" + (f" ({report.skipped})" if report.skipped else "")
    return f"skipped: {report.skipped}" if report.skipped else ""


def _messages(rows: Iterable[Row]) -> Iterator[str]:
    """Changed messages open, runs of untouched ones folded away."""
    for change, run in groupby(rows, lambda row: row.change):
        together = list(run)
        if change != "kept":
            yield from map(_row, together)
            continue
        many = "1 message kept as it came" if len(together) == 1 else f"{len(together)} messages kept as they came"
        sides = "".join(_side(row.after) for row in together if row.after is not None)
        yield f"<details><summary>{many}</summary>{sides}</details>"


def _row(row: Row) -> str:
    told = f'<b class="{row.change}">{row.change}</b>' + (f" by {escape(row.layer)}" if row.layer else "")
    before = _side(row.before, told) if row.before else '<div class="side empty">not there before</div>'
    after = _side(row.after, told if row.before is None else "") if row.after else '<div class="side empty">removed</div>'
    return f'<div class="row {row.change}">{before}{after}</div>'


def _side(view: View, told: str = "") -> str:
    extras = [f"calls {', '.join(view.calls)}"] if view.calls else []
    extras += [f"holds {', '.join(view.media)}"] if view.media else []
    facts = [f"#{view.index} {view.role}", f"{view.tokens:,} tokens", *extras]
    cut = f"\n… {view.cut:,} more characters" if view.cut else ""
    head = escape(", ".join(facts)) + (f" · {told}" if told else "")
    return f'<div class="side"><p>{head}</p><pre tabindex="0">{escape(view.text + cut)}</pre></div>'


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))

"""Who may ask where only this machine can reach us: its programs, and no web page from elsewhere.

Every page that a browser shows may send requests to 127.0.0.1, and a page whose own name was made to point there may read the
answers, too. What a page cannot forge are the Host and the Origin that its browser writes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp

from proxy.answers import reply
from proxy.arrivals import Headers, Receive, Scope, Send, notes_of

ANYONE = "*"
"""The allowed host that leaves a listener ungated."""
USUAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""Looked up first: to parse an address takes longer than all the rest."""
NEVER_PUBLIC = (".localhost", ".internal")
"""Names below these cannot be registered, so no page from elsewhere has one: `host.docker.internal` is how containers call us."""
SETTING = "server.allowed_hosts (COMPACTION_SERVER__ALLOWED_HOSTS)"
WRONG_HOST = f"the Host header names neither this machine nor a host of {SETTING}: add the name under which the proxy is reached"
WRONG_ORIGIN = f"the request comes from a web page of another host: add that host to {SETTING} if it may use the proxy"


@dataclass(frozen=True, slots=True)
class Gate:
    """Decides by headers alone. allowed: further host names, in lower case: `name`, or `*.name` for all below it."""

    allowed: tuple[str, ...] = ()

    def refusal(self, headers: Headers) -> str | None:
        """Why a request is refused, None where it may pass. headers: names in lower case, as ASGI has them."""
        told = dict(headers)
        host = told.get(b"host")
        if host and not self._is_ours(_hostname(host)):  # a client so old that it sends none is no browser
            return WRONG_HOST
        origin = told.get(b"origin")
        if origin is None:
            # what a page shows (pictures, scripts) is asked for without an Origin, but every browser of today says this much
            shown = told.get(b"sec-fetch-site") == b"cross-site" and told.get(b"sec-fetch-mode") == b"no-cors"
            return WRONG_ORIGIN if shown else None
        return None if self._may_come(origin, host or b"", b"sec-fetch-site" in told) else WRONG_ORIGIN

    def _is_ours(self, name: str) -> bool:
        """An address cannot be made to point elsewhere; a name can, unless it is one that only this machine or we know."""
        return name in USUAL or name.endswith(NEVER_PUBLIC) or _address(name) is not None or self._is_allowed(name)

    def _may_come(self, origin: bytes, host: bytes, fetched: bool) -> bool:
        scheme, separator, authority = origin.partition(b"://")
        if separator and scheme not in (b"http", b"https"):
            return True  # app://, file://, tauri://, vscode-webview://, chrome-extension://: what this machine's user installed
        if separator and is_loopback(_hostname(authority)):
            return True
        # any page may hide its origin in a sandboxed frame, but then its browser still says that it fetches (to loopback);
        # programs whose origin HTTP has no words for send `null` alone
        unnamed = origin == b"null" and not fetched and is_loopback(_hostname(host))
        return unnamed or self._is_allowed(_hostname(authority) if separator else "null" if origin == b"null" else "")

    def _is_allowed(self, name: str) -> bool:
        return name in self.allowed or any(one[:2] == "*." and name.endswith(one[1:]) for one in self.allowed)


class Gated:
    """An ASGI app behind a gate. refused: told of each refusal with its reason and the request's headers; must not block."""

    def __init__(self, app: ASGIApp, gate: Gate, refused: Callable[[str, Headers], None]) -> None:
        self._app, self._gate, self._refused = app, gate, refused

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        notes = notes_of(scope)
        try:
            reason = notes[self]
        except KeyError:
            reason = notes[self] = self._gate.refusal(scope["headers"])
        return self._app(scope, receive, send) if reason is None else self._refuse(reason, scope["headers"], send)

    async def _refuse(self, reason: str, headers: Headers, send: Send) -> None:
        self._refused(reason, headers)
        code = "host_not_allowed" if reason is WRONG_HOST else "origin_not_allowed"
        error = {"message": reason, "type": "invalid_request_error", "param": None, "code": code}
        await reply(send, 403, b"application/json", msgspec.json.encode({"error": error}), [(b"x-compaction-error", b"1")])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that host. A name that is neither `localhost` nor below it counts as reachable."""
    address = _address(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def _hostname(authority: bytes) -> str:
    """`Host:8080` → `host`, `[::1]:8080` → `::1`; empty for what is neither."""
    text = authority.decode("latin-1").lower()
    name, _, port = text[1:].partition("]") if text.startswith("[") else text.partition(":")
    return name.removesuffix(".") if port.strip(":").isdigit() or not port else ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None

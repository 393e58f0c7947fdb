"""What the head of a request asks for, whatever its body says: who asks, for what, and what leaves for the upstream first."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.arrivals import Headers, Scope, header
from proxy.decisions import NO_WISH, NOBODY, Caller, Wish, read_wish
from proxy.errors import ClientError
from proxy.records import ANY, CHAT, COMPACT
from proxy.summarizers.redaction import credentials
from proxy.transport import Prepared
from proxy.upstream import Upstream
from proxy.wire import chat_completions

COMPACT_PATH = "/v1/compact"
REWRITTEN = frozenset({b"content-encoding", b"content-md5", b"digest", b"content-digest"})
"""Request headers that speak of bytes which a compacted body no longer has."""
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One for all the requests whose heads say the same, but for the length of the body.

    path: as ASGI has it. method, target: as they came. coding: the body's content-encoding. of_bytes: whether a header speaks of
    the body's very bytes. prepared: what is sent before a body that goes on as it came; chat requests alone have it.
    """

    endpoint: str
    method: bytes
    path: str
    target: bytes
    coding: str
    of_bytes: bool
    wish: Wish = NO_WISH
    caller: Caller = NOBODY
    prepared: Prepared | None = None


def endpoint_of(scope: Scope) -> str:
    """Which kind of request it is."""
    if scope["method"] == "POST":
        if chat_completions.matches(scope["path"]):
            return CHAT
        if scope["path"] == COMPACT_PATH:
            return COMPACT
    return ANY


def asked(scope: Scope, endpoint: str, client_keys: Sequence[bytes], upstream: Upstream) -> Asked:
    """Raises ClientError for a client that may not ask, or asks for what there is not; UpstreamError for what cannot be sent."""
    headers: Headers = scope["headers"]
    _admit(headers, client_keys)
    method, query = scope["method"].encode(), scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    of_bytes = any(name in REWRITTEN for name, _ in headers)
    coding = header(headers, b"content-encoding")
    if endpoint == ANY:
        return Asked(endpoint, method, scope["path"], target, coding, of_bytes)
    wish = read_wish(headers)
    credential = b"\0".join([value for name, value in headers if name in CREDENTIALS])
    # the sidecar asks nobody, so a summary is not asked for either
    caller = Caller(credential, credentials(headers) if endpoint == CHAT else (), wish.window)
    prepared = upstream.prepare(method, target, headers) if endpoint == CHAT else None
    return Asked(endpoint, method, scope["path"], target, coding, of_bytes, wish, caller, prepared)


def _admit(headers: Headers, client_keys: Sequence[bytes]) -> None:
    """Raises ClientError (401) unless the client has one of the keys, when there are any."""
    if not client_keys:
        return
    given = header(headers, b"authorization").encode("latin-1")
    key = given[7:].strip() if given[:7].lower() == b"bearer " else header(headers, b"api-key").encode("latin-1")
    # every key is compared, so that the time says nothing about which one was close
    if sum(hmac.compare_digest(key, known) for known in client_keys) == 0:
        message = "the client key is wrong" if key else "a client key is needed: send it as the API key"
        raise ClientError(message, status=401, code="invalid_api_key")

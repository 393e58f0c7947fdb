"""Secrets in text that goes to another party: found by their shape and taken out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("private key", re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.S)),
    ("token", re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}")),
    ("key", re.compile(r"\b(?:sk|pk|rk)[-_][A-Za-z0-9][\w-]{15,}")),
    ("key", re.compile(r"\b(?:AKIA|ASIA|AGPA|AROA)[0-9A-Z]{16}\b")),
    ("token", re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|npm_|hf_|pypi-)[\w-]{16,}")),
    ("token", re.compile(r"\bxox[abeprs]-[\w-]{10,}")),
    ("key", re.compile(r"\bAIza[\w-]{30,}")),
    ("webhook", re.compile(r"https://hooks\.[\w.-]+/[\w/-]{20,}")),
)
_AUTHORIZATION = re.compile(r"\b(Bearer|Basic|Token)(\s+)(?=[\w~+/=-]*[\d=+_.])[\w.~+/=-]{12,}", re.I)
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@\"'\\,<>]{0,80}):[^\s/@\"'\\,<>]{1,200}@", re.I)
_NAMED = re.compile(
    r"""(?P<name>(?:passwo?r?d|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?token
        |access[_-]?token|refresh[_-]?token|client[_-]?secret|credential)s?["']?\s{0,3}[:=]\s{0,3}["']?)
        (?P<value>[^\s"',;}{)(<>\[\]]{6,})""",
    re.I | re.X,
)
_PLACEHOLDER = re.compile(r"\$|\*{3}|<|\.\.\.|(?:None|null|true|false|undefined|required|optional|string)\b", re.I)


def redacted(text: str) -> str:
    """The text with everything that has the shape of a secret replaced by what it was."""
    for kind, shape in _SHAPES:
        text = shape.sub(f"[redacted {kind}]", text)
    text = _AUTHORIZATION.sub(r"\1\2[redacted credential]", text)
    text = _USERINFO.sub(r"\1:[redacted password]@", text)
    return _NAMED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    # code says `password=get_password(` and `secret: None` much more often than it says a secret
    called = match.string[match.end() : match.end() + 1] in ("(", "[")
    if called or _PLACEHOLDER.match(value) or value.startswith("[redacted") or not re.search(r"[\d\W_]", value):
        return match[0]
    return match["name"] + "[redacted secret]"


def origin(url: str) -> tuple[str, str, int]:
    """(scheme, host, port) of a URL: who receives what is sent there."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, (parts.hostname or "").lower(), parts.port or (443 if scheme == "https" else 80)


CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key", b"openai-organization", b"openai-project"})
"""Request headers that say who pays."""


def credentials(headers: Sequence[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """The client's own credentials among its headers. A `Caller` whose server is another origin never sends them."""
    return tuple((name, value) for name, value in headers if name.lower() in CREDENTIALS)

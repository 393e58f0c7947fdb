"""What can go wrong, in our own words: each exception carries what its handler needs."""

from __future__ import annotations


class CompactionProxyError(Exception):
    """The root of all of ours."""


class ConfigError(CompactionProxyError):
    """A setting that we cannot start with. The message names the key, what it got and what it takes."""


class Unreadable(CompactionProxyError):
    """A body that we do not understand: it goes to the upstream as it came. `reason` is a short closed word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ClientError(CompactionProxyError):
    """A request that we answer ourselves, OpenAI-shaped."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param


class ClientGone(CompactionProxyError):
    """The client left before its answer was complete."""


class UpstreamError(CompactionProxyError):
    """The upstream cannot be reached or broke off. reason: connect, timeout, read, protocol (the metric's label)."""

    def __init__(self, message: str, *, reason: str, status: int = 502, code: str = "upstream_unreachable") -> None:
        super().__init__(message)
        self.message, self.reason, self.status, self.code = message, reason, status, code


class SummaryFailed(CompactionProxyError):
    """No summary came of it. `outcome` is a short closed word (the metric's label)."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(detail or outcome)
        self.outcome = outcome


class StoreUnavailable(CompactionProxyError):
    """The checkpoint store does not answer: the request goes on with memory only."""

"""The admin listener: metrics, health, readiness and figures, on a socket of its own and never with a secret."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from proxy.metrics import Metrics

FRESH = 1.0
"""Seconds that a scrape is kept: several scrapers, or a hasty one, must not cost the requests their loop."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """May requests come? reasons: why not, a short word each. details: worth knowing either way (`tokenizer`: `exact`)."""

    ready: bool = True
    reasons: tuple[str, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)


class Scrapes:
    """The exposition, built in a thread and kept for a second; whoever comes meanwhile waits for the one being built."""

    def __init__(self, metrics: Metrics, fresh: float = FRESH) -> None:
        self._metrics, self._fresh = metrics, fresh
        self._kept: dict[str, tuple[float, bytes, str]] = {}
        self._building = asyncio.Lock()

    async def get(self, accept: str) -> tuple[bytes, str]:
        kind = "application/openmetrics-text" if "application/openmetrics-text" in accept else "text/plain"
        async with self._building:
            kept = self._kept.get(kind)
            if kept is None or time.monotonic() - kept[0] >= self._fresh:
                body, content_type = await asyncio.to_thread(self._metrics.exposition, kind)
                kept = self._kept[kind] = (time.monotonic(), body, content_type)
        return kept[1], kept[2]


def admin_app(
    metrics: Metrics,
    *,
    ready: Callable[[], Readiness],
    extras: Callable[[], Mapping[str, object]] | None = None,
    routes: tuple[BaseRoute, ...] = (),
) -> Starlette:
    """The ASGI app of the admin listener.

    ready: asked at each `/readyz`, must not block. extras: further keys of `/stats`. routes: further pages (explain).
    """
    scrapes = Scrapes(metrics)

    async def exposition(request: Request) -> Response:
        body, content_type = await scrapes.get(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readiness(_: Request) -> Response:
        state = ready()
        told = {"status": "ready" if state.ready else "not ready", "reasons": list(state.reasons), **state.details}
        return JSONResponse(told, status_code=200 if state.ready else 503)

    async def stats(_: Request) -> Response:
        figures = await asyncio.to_thread(metrics.stats)
        return JSONResponse(figures | dict(extras() if extras else {}))

    own = [Route("/metrics", exposition), Route("/healthz", health), Route("/readyz", readiness), Route("/stats", stats)]
    return Starlette(routes=[*own, *routes], exception_handlers={HTTPException: _refuse})


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": {"message": error.detail, "code": error.status_code}}, error.status_code, error.headers)

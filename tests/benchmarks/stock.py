"""The usual way, for comparison: Starlette's Request and StreamingResponse over a stock httpx client; nothing counted."""

from __future__ import annotations

import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

upstream = f"http://127.0.0.1:{sys.argv[2]}"
client = httpx.AsyncClient(
    timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None), trust_env=False
)


async def forward(request: Request) -> StreamingResponse:
    headers = [(name, value) for name, value in request.headers.raw if name not in (b"host", b"content-length")]
    sent = client.build_request(request.method, upstream + request.url.path, headers=headers, content=await request.body())
    answer = await client.send(sent, stream=True)
    kept = {
        name: value for name, value in answer.headers.items() if name not in ("content-length", "transfer-encoding", "connection")
    }
    return StreamingResponse(answer.aiter_raw(), answer.status_code, kept)


app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)

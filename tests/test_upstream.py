"""What leaves for the upstream and what comes back: targets, headers, and requests of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from live.toxic import Exchange, Toxic

from proxy.errors import ConfigError, UpstreamError
from proxy.upstream import Upstream, answer_headers, join_target, request_headers


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def toxic() -> AsyncIterator[Toxic]:
    async with Toxic() as upstream:
        yield upstream


CHAT = b"/v1/chat/completions"
MODELS = b"/v1/models?limit=1"
AZURE = b"/openai/deployments/d/chat/completions?api-version=2024-06-01"
BARE = b"/models"


@pytest.mark.parametrize(
    ("base", "target", "joined"),
    [
        (b"", CHAT, b"/v1/chat/completions"),
        (b"", MODELS, b"/v1/models?limit=1"),
        (b"", AZURE, b"/openai/deployments/d/chat/completions?api-version=2024-06-01"),
        (b"", BARE, b"/models"),
        (b"/v1", CHAT, b"/v1/chat/completions"),
        (b"/v1", MODELS, b"/v1/models?limit=1"),
        (b"/v1", AZURE, b"/v1/openai/deployments/d/chat/completions?api-version=2024-06-01"),
        (b"/v1", BARE, b"/v1/models"),
        (b"/api/openai/v1", CHAT, b"/api/openai/v1/chat/completions"),
        (b"/api/openai/v1", MODELS, b"/api/openai/v1/models?limit=1"),
        (b"/api/openai/v1", AZURE, b"/api/openai/v1/openai/deployments/d/chat/completions?api-version=2024-06-01"),
        (b"/api/openai/v1", BARE, b"/api/openai/v1/models"),
        (b"/openai", CHAT, b"/openai/v1/chat/completions"),
        (b"/openai", MODELS, b"/openai/v1/models?limit=1"),
        (b"/openai", AZURE, b"/openai/deployments/d/chat/completions?api-version=2024-06-01"),
        (b"/openai", BARE, b"/openai/models"),
        (b"/v1", b"/v1", b"/v1"),
        (b"/v1", b"/v10/x", b"/v1/v10/x"),
        (b"/v1", b"/", b"/v1/"),
        (b"/v1", b"/v1/a%2Fb/../%2e%2e/c%zz;d?x=%00&x=%2F;y", b"/v1/a%2Fb/../%2e%2e/c%zz;d?x=%00&x=%2F;y"),
    ],
)
def test_a_target_goes_under_the_base_path_and_nothing_is_doubled(base: bytes, target: bytes, joined: bytes) -> None:
    assert join_target(base, b"", target) == joined


@pytest.mark.parametrize(
    ("query", "target", "joined"),
    [
        (b"api-version=1", b"/v1/models", b"/v1/models?api-version=1"),
        (b"api-version=1", b"/v1/models?a=2", b"/v1/models?api-version=1&a=2"),
        (b"api-version=1&k=v", b"/v1/models?api-version=2&api-version=3", b"/v1/models?k=v&api-version=2&api-version=3"),
        (b"api-version=1", b"/v1/models?", b"/v1/models?api-version=1"),
    ],
)
def test_the_query_of_the_base_is_merged_and_the_request_wins(query: bytes, target: bytes, joined: bytes) -> None:
    assert join_target(b"", query, target) == joined


@pytest.mark.parametrize("url", ["{url}", "{url}/", "{url}/v1", "{url}/v1/"])
@pytest.mark.anyio
async def test_an_upstream_is_given_with_or_without_v1_and_slash(toxic: Toxic, url: str) -> None:
    upstream = Upstream(url.format(url=toxic.url))

    answer = await upstream.forward(b"GET", b"/v1/models", [])
    answer.close()

    assert toxic.requests[0].target == b"/v1/models"
    assert toxic.requests[0].headers == [(b"host", toxic.url.removeprefix("http://").encode())]
    await upstream.aclose()


def test_only_what_belongs_to_the_request_goes_upstream() -> None:
    kept = [
        (b"authorization", b"Bearer k"),
        (b"content-type", b"application/json"),
        (b"x-one", b"1"),
        (b"accept", b"a"),
        (b"accept", b"b"),
        (b"x-one", b"2"),
        (b"max-forwards", b"3"),
        (b"x_custom", b"4"),
        (b"cookie", b"a=b"),
    ]
    dropped = [
        (b"host", b"me"),
        (b"connection", b"close, X-Named"),
        (b"connection", b"Authorization,, cookie , content-type"),
        (b"x-named", b"gone"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-connection", b"x"),
        (b"proxy-authorization", b"x"),
        (b"proxy-authenticate", b"x"),
        (b"te", b"trailers"),
        (b"trailer", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"websocket"),
        (b"expect", b"100-continue"),
        (b"content-length", b"5"),
        (b"forwarded", b"for=1"),
        (b"x-forwarded-for", b"1.2.3.4"),
        (b"x-forwarded-anything", b"1"),
        (b"x-real-ip", b"1.2.3.4"),
        (b"cf-connecting-ip", b"1.2.3.4"),
        (b"true-client-ip", b"1.2.3.4"),
        (b"x-compaction", b"off"),
        (b"x-compaction-window", b"100"),
        (b"x_forwarded_for", b"1.2.3.4"),
        (b"x_compaction_window", b"5"),
        (b"content_length", b"5"),
        (b"api_key", b"other"),
    ]
    mixed = [field for pair in zip(kept, dropped, strict=False) for field in pair] + dropped[len(kept) :]

    assert request_headers(mixed) == kept


def test_only_what_belongs_to_the_answer_goes_to_the_client() -> None:
    came = [
        (b"Server", b"up"),
        (b"Set-Cookie", b"a"),
        (b"Connection", b"keep-alive, X-Hop, Authorization"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Hop", b"1"),
        (b"Set-Cookie", b"b"),
        (b"x-ratelimit-remaining", b"5"),
        (b"Trailer", b"x"),
    ]

    assert answer_headers(came) == [
        (b"server", b"up"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"x-ratelimit-remaining", b"5"),
    ]


def test_the_length_is_dropped_when_the_framing_was_another() -> None:
    came = [(b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked"), (b"X", b"1")]

    assert answer_headers(came) == [(b"x", b"1")]


@pytest.mark.anyio
@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_nothing_is_added_but_host_and_length(toxic: Toxic, transport: Any) -> None:
    upstream = Upstream(toxic.url, transport=transport)
    host = (b"host", toxic.url.removeprefix("http://").encode())

    for method, body in ((b"GET", ()), (b"DELETE", ()), (b"POST", (b"ab", b"c")), (b"POST", ()), (b"PATCH", ())):
        answer = await upstream.forward(method, b"/v1/x", [(b"x-a", b"1")], body)
        while await answer.next():
            pass
        answer.close()

    assert [request.headers for request in toxic.requests] == [
        [host, (b"x-a", b"1")],
        [host, (b"x-a", b"1")],
        [host, (b"x-a", b"1"), (b"content-length", b"3")],
        [host, (b"x-a", b"1"), (b"content-length", b"0")],
        [host, (b"x-a", b"1"), (b"content-length", b"0")],
    ]
    assert {request.connection for request in toxic.requests} == ({1} if transport == "sockets" else {1, 2, 3, 4, 5})
    await upstream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_prepared_request_is_sent_any_number_of_times_each_with_its_own_length(toxic: Toxic, transport: Any) -> None:
    upstream = Upstream(toxic.url + "/v1", api_key="sk-ours", transport=transport)
    host = (b"host", toxic.url.removeprefix("http://").encode())
    ours = (b"authorization", b"Bearer sk-ours")
    client = [(b"content-length", b"999"), (b"x-a", b"1"), (b"connection", b"x-hop"), (b"x-hop", b"1")]

    post = upstream.prepare(b"POST", b"/v1/x?a=%2F", client)
    delete = upstream.prepare(b"DELETE", b"/v1/x", client)
    bodies: tuple[tuple[bytes, ...], ...] = ((b"one",), (), (b"", b"t" * 70_000, b"wo"), (b"",))
    for prepared in (post, delete, post):
        for body in bodies:
            answer = await upstream.send(prepared, body)
            echo = b""
            while piece := await answer.next():
                echo += piece
            answer.close()
            assert echo == (b"".join(body) or echo)

    framings = [
        [(b"content-length", b"3")],
        [(b"content-length", b"0")],
        [(b"content-length", b"70002")],
        [(b"content-length", b"0")],
    ]
    bare: list[list[tuple[bytes, bytes]]] = [framings[0], [], framings[2], []]
    assert [request.headers for request in toxic.requests] == [
        [host, (b"x-a", b"1"), ours, *framing] for framing in [*framings, *bare, *framings]
    ]
    assert {request.head.partition(b"\r\n")[0] for request in toxic.requests} == {
        b"POST /v1/x?a=%2F HTTP/1.1",
        b"DELETE /v1/x HTTP/1.1",
    }
    await upstream.aclose()


@pytest.mark.parametrize("transport", ["sockets", "httpx"])
@pytest.mark.parametrize(
    ("target", "field"),
    [(b"/ HTTP/1.1\r\nx: y", (b"x", b"a")), (b"/a b", (b"x", b"a")), (b"/", (b"x", b"a\r\nb: c")), (b"/", (b"x", b"a\0"))],
)
def test_what_would_break_the_head_cannot_be_prepared(transport: Any, target: bytes, field: tuple[bytes, bytes]) -> None:
    with pytest.raises(UpstreamError) as caught:
        Upstream("http://host", transport=transport).prepare(b"POST", target, [field])

    assert caught.value.reason == "protocol"


def test_what_is_prepared_shows_no_credential() -> None:
    prepared = Upstream("http://host").prepare(b"POST", b"/v1/x", [(b"authorization", b"Bearer hidden")])

    assert b"hidden" in prepared.head
    assert "hidden" not in repr(prepared)


@pytest.mark.anyio
async def test_an_upload_ends_when_its_connection_dies_unanswered() -> None:
    ended = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"begun")
        writer.close()

    async with await asyncio.start_server(dying, "127.0.0.1", 0) as server:
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(UpstreamError):
            await upstream.forward(b"POST", b"/v1/files", [], pieces())
        await asyncio.wait_for(ended.wait(), 5)
        await upstream.aclose()


WHOLE_ANSWERS = {
    "its length": b"Content-Length: 2\r\n\r\nok",
    "no bytes": b"Content-Length: 0\r\n\r\n",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
}


@pytest.mark.anyio
@pytest.mark.parametrize("framed", WHOLE_ANSWERS.values(), ids=WHOLE_ANSWERS)
async def test_what_is_left_of_an_answer_is_had_at_once_where_it_is_here_to_its_end(toxic: Toxic, framed: bytes) -> None:
    upstream = Upstream(toxic.url)

    async def behave(ex: Exchange) -> None:
        await ex.send(b"HTTP/1.1 200 OK\r\n" + framed)

    toxic.behavior = behave
    answer = await upstream.forward(b"GET", b"/", [])

    assert answer.rest() == (b"" if b"Length: 0" in framed else b"ok")
    assert answer.ended
    assert await answer.next() == b""
    answer.close()
    await upstream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("begun", "held"),
    [(b"Content-Length: 3\r\n\r\nok", b"ok"), (b"Connection: close\r\n\r\nok", b"ok")],
    ids=["short", "until close"],
)
async def test_of_an_answer_that_may_go_on_nothing_is_left_out_by_asking_for_the_rest(
    toxic: Toxic, begun: bytes, held: bytes
) -> None:
    upstream = Upstream(toxic.url)
    going_on = asyncio.Event()

    async def behave(ex: Exchange) -> None:
        await ex.send(b"HTTP/1.1 200 OK\r\n" + begun)
        await going_on.wait()

    toxic.behavior = behave
    answer = await upstream.forward(b"GET", b"/", [])

    assert answer.rest() is None
    assert await answer.next() == held
    answer.close()
    going_on.set()
    await upstream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_cookie_of_one_answer_is_not_sent_with_the_next_request(toxic: Toxic, transport: Any) -> None:
    upstream = Upstream(toxic.url, transport=transport)
    toxic.behavior = "status:200,set-cookie:tenant=one"

    for _ in range(20):
        answer = await upstream.forward(b"GET", b"/", [])
        while await answer.next():
            pass
        answer.close()

    assert all(request.header(b"cookie") is None for request in toxic.requests)
    await upstream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_a_redirect_is_passed_on_not_followed(toxic: Toxic, transport: Any) -> None:
    upstream = Upstream(toxic.url, transport=transport)
    toxic.behavior = "status:302,location:http://127.0.0.1:1/"

    answer = await upstream.forward(b"GET", b"/", [])
    answer.close()

    assert (answer.status, len(toxic.requests)) == (302, 1)
    assert (b"location", b"http://127.0.0.1:1/") in answer.headers
    await upstream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("transport", ["sockets", "httpx"])
async def test_no_proxy_of_the_environment_is_used(toxic: Toxic, transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    upstream = Upstream(toxic.url, transport=transport)

    answer = await upstream.forward(b"GET", b"/", [])
    answer.close()

    assert answer.status == 200
    await upstream.aclose()


@pytest.mark.anyio
async def test_our_key_replaces_the_clients(toxic: Toxic) -> None:
    upstream = Upstream(toxic.url, api_key="sk-ours")

    answer = await upstream.forward(b"GET", b"/", [(b"authorization", b"Bearer sk-client"), (b"x-a", b"1")])
    answer.close()

    assert toxic.requests[0].headers[1:] == [(b"x-a", b"1"), (b"authorization", b"Bearer sk-ours")]
    await upstream.aclose()


@pytest.mark.anyio
async def test_a_fetch_is_a_small_get_under_the_base_path(toxic: Toxic) -> None:
    upstream = Upstream(toxic.url + "/api/v1")
    toxic.behavior = "models_max_len:4096"

    status, body = await upstream.fetch("/v1/models", [(b"authorization", b"Bearer k")], timeout=5, max_bytes=1000)

    assert status == 200
    assert b'"max_model_len": 4096' in body
    assert toxic.requests[0].head.startswith(b"GET /api/v1/models HTTP/1.1\r\n")
    assert toxic.requests[0].header(b"authorization") == b"Bearer k"
    await upstream.aclose()


@pytest.mark.anyio
async def test_a_fetch_is_bounded_in_time_and_size(toxic: Toxic) -> None:
    upstream = Upstream(toxic.url)
    toxic.script = ["headers_then_silence", "slow_headers", "sse_line:1MB"]

    for timeout, reason in ((0.1, "timeout"), (0.1, "timeout"), (5.0, "protocol")):
        with pytest.raises(UpstreamError) as caught:
            await upstream.fetch("/v1/models", [], timeout=timeout, max_bytes=10_000)
        assert caught.value.reason == reason
    await upstream.aclose()


@pytest.mark.anyio
async def test_a_completion_of_our_own_is_posted_whole(toxic: Toxic) -> None:
    upstream = Upstream(toxic.url + "/v1")

    status, body = await upstream.complete(b'{"model": "m"}', [(b"authorization", b"Bearer k")], timeout=5)

    assert (status, body) == (200, b'{"model": "m"}')
    assert toxic.requests[0].head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert toxic.requests[0].header(b"content-type") == b"application/json"
    await upstream.aclose()


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host/", "http://", "https:///v1", "http://user:pw@host/", "http://host/#x", "http://ho st"],
)
def test_a_url_that_we_cannot_speak_to_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="upstream"):
        Upstream(url)


def test_a_key_that_would_break_the_head_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Upstream("http://host", api_key="sk-secret\r\nx: y")

    assert "sk-secret" not in str(caught.value)


def test_a_missing_authority_file_is_said() -> None:
    with pytest.raises(ConfigError, match=r"ca_file.*no-such\.pem"):
        Upstream("https://host", ca_file="no-such.pem")


def test_a_port_of_its_own_and_an_ipv6_address_are_written_as_they_should_be() -> None:
    assert Upstream("http://[::1]:9000")._host == (b"host", b"[::1]:9000")
    assert Upstream("http://host:80")._host == (b"host", b"host")
    assert Upstream("http://[::1]:9000")._origin.host == "::1"

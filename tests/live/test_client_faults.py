"""What clients do to us, one test or more a row of the fault matrix; the rows are named in the headings."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import resource
import time
from pathlib import Path

import httpx
import pytest
from builders import agent_session
from live.conftest import BODY, Product, Start, inflight, leave, open_files, request, settled, settled_inflight, volume
from live.toxic import Exchange, Toxic, completion, events, never_accepting
from live.traffic import mutated, poke

from proxy.compactor import Compactor
from proxy.decisions import Decision

pytestmark = pytest.mark.anyio

# F10: clients that are slow on purpose


async def test_half_open_clients_are_closed_in_time_and_hold_up_nobody(toxic: Toxic, start: Start) -> None:
    toxic.behavior = "ok"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    async with start(toxic.url, server={"header_timeout": 1.0}) as product:
        halves = [await product.raw(b"POST /v1/chat/completions HTTP/1.1\r\nHost") for _ in range(volume(300, 5_000))]
        started = time.perf_counter()
        async with product.client() as client:
            for _ in range(20):
                assert (await client.post("/v1/chat/completions", content=BODY)).status_code == 200
        assert {await reader.read() for reader, _ in halves} == {b""}
        assert time.perf_counter() - started < 2.0
        for _, writer in halves:
            writer.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/files"])
@pytest.mark.parametrize("sent", [1, 60_000])
async def test_a_body_that_does_not_come_is_given_up(toxic: Toxic, start: Start, path: bytes, sent: int) -> None:
    whole = request(path, b"x" * 300_000)
    async with start(toxic.url, server={"body_timeout": 0.2}) as product:
        reader, writer = await product.raw(whole[: whole.index(b"\r\n\r\n") + 4 + sent])
        answer = await reader.read()
        writer.close()
        await settled(lambda: not toxic.sockets)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert [received for received in toxic.requests if received.complete] == []


# F11: the client leaves, in every phase, with FIN and RST


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("behavior", ["slow_headers", "headers_then_silence", "half_event_then_silence", "chunks:100000@0.001"])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings"])
async def test_the_upstream_is_let_go_when_the_client_leaves(
    toxic: Toxic, product: Product, how: str, behavior: str, path: bytes
) -> None:
    toxic.behavior = behavior
    reader, writer = await product.raw(request(path))
    await settled(lambda: bool(toxic.requests))
    if behavior != "slow_headers":
        await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.02)

    leave(writer, how)
    left = time.perf_counter()
    await toxic.requests[0].aborted.wait()

    assert time.perf_counter() - left < 1.0
    await settled(lambda: not toxic.sockets)


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("part", [b"POST /v1/chat", request()[:-5], request(b"/v1/files")[:-5], b""])
async def test_a_client_that_leaves_before_its_request_is_whole_leaves_nothing_upstream(
    toxic: Toxic, product: Product, how: str, part: bytes
) -> None:
    _, writer = await product.raw(part)
    await asyncio.sleep(0.05)

    leave(writer, how)
    await asyncio.sleep(0.05)

    await settled(lambda: not toxic.sockets)
    assert all(received.body == b"" for received in toxic.requests)


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_client_that_leaves_while_we_connect_is_forgotten(start: Start, how: str) -> None:
    async with contextlib.AsyncExitStack() as opened:
        url = opened.enter_context(never_accepting())
        product = await opened.enter_async_context(start(url, connect_timeout=30.0))
        before = open_files()
        _, writer = await product.raw(request())
        await settled(lambda: open_files() >= before + 3)  # the client's socket, our end of it, the one being connected

        leave(writer, how)

        await settled(lambda: open_files() <= before)


LONG = json.dumps({"model": "m", "messages": agent_session(400, words=400)}).encode()
NARROW = {"models": {"m": {"window": 20_000}}}


async def test_a_client_that_leaves_while_we_compact_never_gets_upstream(toxic: Toxic, start: Start) -> None:
    async with start(toxic.url, sections=NARROW) as product:
        for stay in (0.0, 0.002, 0.01):
            _, writer = await product.raw(request(body=LONG))
            await writer.drain()
            await asyncio.sleep(stay)
            leave(writer, "RST")
        await settled_inflight(product)
        toxic.behavior = "ok"
        assert (await product.post()).content == completion()

    assert [received.body for received in toxic.requests if received.complete] == [BODY]


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_a_client_that_leaves_while_a_summary_is_written_never_gets_upstream(toxic: Toxic, start: Start, how: str) -> None:
    async with Toxic("slow_headers") as writer_model:
        summarizer = {"mode": "anchored", "base_url": writer_model.url, "model": "w", "wait_ms": 60_000}
        async with start(toxic.url, sections={**NARROW, "summarizer": summarizer}) as product:
            _, writer = await product.raw(request(body=LONG))
            await settled(lambda: bool(writer_model.requests))
            assert await inflight(product) == 1

            leave(writer, how)

            await settled_inflight(product)
    assert toxic.requests == []


async def test_a_client_that_leaves_while_we_compact_is_no_fault_of_ours_in_the_metrics(toxic: Toxic, start: Start) -> None:
    async with Toxic("slow_headers") as writer_model:
        summarizer = {"mode": "anchored", "base_url": writer_model.url, "model": "w", "wait_ms": 60_000}
        async with start(toxic.url, sections={**NARROW, "summarizer": summarizer}) as product:
            _, writer = await product.raw(request(body=LONG))
            await settled(lambda: bool(writer_model.requests))
            leave(writer, "FIN")
            await settled_inflight(product)
            async with httpx.AsyncClient(base_url=f"http://{product.admin[0]}:{product.admin[1]}", trust_env=False) as client:
                scrape = (await client.get("/metrics")).text

    assert re.findall(r'^compaction_client_disconnects_total\{endpoint="/chat/completions"\} (\S+)$', scrape, re.M) == ["1.0"]
    faults = re.findall(r'^compaction_\w+\{.*(?:outcome="failed"|reason="internal_error").*\} (\S+)$', scrape, re.M)
    assert set(faults) <= {"0.0"}


async def test_a_client_that_leaves_before_the_first_event_of_a_suspect_stream_leaves_no_traceback(
    toxic: Toxic, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    toxic.behavior = "headers_then_silence"
    suspect = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "word " * 10_000}]}).encode()
    async with start(toxic.url, sections=NARROW) as product:
        _, writer = await product.raw(request(body=suspect))
        await settled(lambda: bool(toxic.requests))
        await asyncio.sleep(0.1)

        leave(writer, "RST")

        await toxic.requests[0].aborted.wait()
        await settled_inflight(product)
        gc.collect()

    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_client_that_leaves_while_its_prompt_is_still_counted_lets_the_upstream_go(
    toxic: Toxic, product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Compactor.count

    async def slow(self: Compactor, decision: Decision) -> Decision:
        await asyncio.sleep(30)  # both worker threads may be busy for long
        return await count(self, decision)

    monkeypatch.setattr(Compactor, "count", slow)
    toxic.behavior = "chunks:100000@0.001"
    _, writer = await product.raw(request())
    await settled(lambda: bool(toxic.requests))
    await asyncio.sleep(0.1)

    leave(writer, "RST")

    await asyncio.wait_for(toxic.requests[0].aborted.wait(), 5)
    await settled(lambda: not toxic.sockets)


@pytest.mark.parametrize("queued", [3, 40])
async def test_a_client_that_leaves_a_queue_of_requests_ends_them_all(toxic: Toxic, product: Product, queued: int) -> None:
    toxic.behavior = "slow_headers"
    _, writer = await product.raw(request() * queued)
    await settled(lambda: bool(toxic.requests))

    leave(writer, "FIN")

    await toxic.requests[0].aborted.wait()
    await settled_inflight(product)
    assert len(toxic.requests) == 1


@pytest.mark.parametrize(("transport", "idle"), [("sockets", 0), ("httpx", 16 * 50)])
async def test_clients_that_leave_at_random_lose_no_connection_and_no_slot(
    toxic: Toxic, start: Start, transport: str, idle: int
) -> None:
    """Streams, plain answers and uploads, in whatever phase they are. idle: stock httpx closes what idles when it is used again."""
    chance = random.Random(11)
    asked = [request(), request(b"/v1/embeddings"), request(b"/v1/files", b"x" * 300_000), request()[:-30]]

    async def answering(ex: Exchange) -> None:
        if b"embeddings" in ex.request.target:
            await asyncio.sleep(0.05)
            await ex.answer(completion())
        else:
            await ex.stream(events(40), 0.002)

    async def visit(product: Product) -> None:
        reader, writer = await product.raw(chance.choice(asked))
        reading = asyncio.ensure_future(reader.read())
        await asyncio.sleep(chance.uniform(0, 0.12))
        leave(writer, chance.choice(("FIN", "RST")))
        await asyncio.gather(reading, return_exceptions=True)

    toxic.behavior = answering
    async with start(toxic.url, transport=transport) as product:
        await visit(product)
        await settled(lambda: not toxic.sockets)
        before = open_files()
        for _ in range(volume(400, 10_000) // 50):
            await asyncio.gather(*(visit(product) for _ in range(50)))
            toxic.requests.clear()
        toxic.behavior = "ok"
        assert (await product.post()).content == completion()

        await settled_inflight(product)
        await settled(lambda: open_files() <= before + 2 * len(toxic.sockets))
        await settled(lambda: len(toxic.sockets) <= idle)


# F12: malformed requests


VECTORS = json.loads((Path(__file__).parent / "smuggling_vectors.json").read_text())


async def test_each_accepted_request_is_exactly_one_upstream_and_nothing_ambiguous_gets_there(toxic: Toxic, start: Start) -> None:
    async with start(toxic.url) as product:
        for vector in VECTORS:
            if vector["raw"] is None:
                continue
            accepted = vector["status"].count("200")
            for patience in (0.05, 1.0):  # a slow machine may need the second try
                toxic.requests.clear()
                answer = await poke(product.address[1], vector["raw"].encode("latin-1"), patience)
                got = len(toxic.requests), len(re.findall(rb"HTTP/1\.1 200 ", answer))
                if got == (accepted, accepted):
                    break
            assert got == (accepted, accepted), vector["name"]
            for received in toxic.requests:
                lengths = [value for name, value in received.headers if name == b"content-length"]
                codings = [value for name, value in received.headers if name == b"transfer-encoding"]
                assert len(lengths) + len(codings) <= 1, vector["name"]
                assert [name for name, _ in received.headers].count(b"host") == 1, vector["name"]


async def test_no_mutation_of_a_request_makes_more_or_fewer_of_it_upstream(toxic: Toxic, start: Start) -> None:
    chance = random.Random(3)
    async with start(toxic.url) as product:
        for _ in range(volume(250, 5_000)):
            toxic.requests.clear()
            sent = mutated(chance)
            answer = await poke(product.address[1], sent, 0.03)
            answered = len(re.findall(rb"HTTP/1\.1 200 ", answer))
            refused = len(re.findall(rb"HTTP/1\.1 [45]\d\d ", answer))
            assert len([one for one in toxic.requests if not one.aborted.is_set()]) in (answered, answered + 1), sent
            assert answered + refused <= 2, sent
            for received in toxic.requests:
                assert len([1 for name, _ in received.headers if name in (b"content-length", b"transfer-encoding")]) <= 1, sent
                assert b"\n" not in received.target, sent

        toxic.requests.clear()
        assert (await product.post()).content == BODY

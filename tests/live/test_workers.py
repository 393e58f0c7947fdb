"""Three workers of the real proxy on the same ports: whichever is asked tells of all, also when one was killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from builders import agent_session, chat, user
from fakes import ScriptedUpstream
from prometheus_client.parser import text_string_to_metric_families
from running import RunningProxy, running_proxy, send

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
KEPT_SECONDS = 1.1
"""A little more than a worker keeps a scrape."""


def started(upstream: ScriptedUpstream, folder: Path, **environment: str) -> Iterator[RunningProxy]:
    """Three workers that write nowhere but below a folder."""
    homes = {"TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
    with running_proxy("--upstream", upstream.url, "--workers", "3", environment={**homes, **environment}) as proxy:
        yield proxy


@pytest.fixture
def proxy(upstream: ScriptedUpstream, tmp_path: Path) -> Iterator[RunningProxy]:
    yield from started(upstream, tmp_path)


def workers(proxy: RunningProxy) -> set[int]:
    """Process ids of those that live."""
    pid, alive = proxy.process.pid, set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                alive.add(int(child))
    return alive


def kill_one(proxy: RunningProxy) -> None:
    """Ends a worker without a word, and waits until another has taken its place."""
    living = workers(proxy)
    os.kill(min(living), signal.SIGKILL)
    while not workers(proxy) - living:
        time.sleep(0.05)


def ask(proxy: RunningProxy, path: str) -> tuple[int, bytes]:
    """On a connection of its own, so that any worker may take it."""
    connection = http.client.HTTPConnection(urlsplit(proxy.admin).netloc, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def scraped(proxy: RunningProxy) -> Samples:
    _, body = ask(proxy, "/metrics")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def total(samples: Samples, name: str) -> float:
    return sum(value for (found, _), value in samples.items() if found == name)


def scraped_once_all_is_told(proxy: RunningProxy, requests: int) -> Samples:
    """A scrape that holds so many requests: workers tell the others of their figures twice a second."""
    while True:
        time.sleep(KEPT_SECONDS)
        samples = scraped(proxy)
        if total(samples, "compaction_requests_total") == requests:
            return samples


def talk(proxy: RunningProxy, name: str, conversations: int = 9) -> int:
    """Conversations that are compacted, sent twice, and a request that fits after each: how many requests that were."""
    for number in range(conversations):
        body = chat(agent_session(30, 300, module=f"{name}_{number}"), model="gpt-4")
        for one in (body, body, chat([user(f"Hello, {name} {number}.")], model="gpt-4o")):
            assert send(proxy, one)[0] == 200
    return 3 * conversations


def assert_the_account_adds_up(samples: Samples) -> None:
    received, forwarded, saved = (
        total(samples, f"compaction_prompt_tokens_{which}_total") for which in ("received", "forwarded", "saved")
    )
    assert saved > 0
    assert received - forwarded == saved
    assert total(samples, "compaction_unattributed_prompt_tokens_total") == 0


def counted(samples: Samples) -> Samples:
    """What may only grow."""
    return {key: value for key, value in samples.items() if key[0].endswith(("_total", "_count", "_sum", "_bucket"))}


def test_the_account_adds_up_and_no_counter_goes_back_when_a_worker_is_killed(proxy: RunningProxy) -> None:
    sent = talk(proxy, "before")
    before = scraped_once_all_is_told(proxy, sent)

    kill_one(proxy)
    between = scraped_once_all_is_told(proxy, sent)
    sent += talk(proxy, "after")
    after = scraped_once_all_is_told(proxy, sent)

    for samples in (before, between, after):
        assert_the_account_adds_up(samples)
    assert counted(between) == counted(before)
    assert all(after[key] >= value for key, value in counted(before).items())
    assert total(after, "compaction_prompt_tokens_received_total") == 2 * total(before, "compaction_prompt_tokens_received_total")
    assert total(after, "compaction_inflight_requests") == 0


def test_all_workers_tell_the_same(proxy: RunningProxy) -> None:
    sent = talk(proxy, "same", conversations=3)
    told = scraped_once_all_is_told(proxy, sent)
    time.sleep(KEPT_SECONDS)

    scrapes = [counted(scraped(proxy)) for _ in range(12)]
    stats = [json.loads(ask(proxy, "/stats")[1])["tokens"] for _ in range(12)]

    assert all(one == counted(told) for one in scrapes)
    assert {one["saved"] for one in stats} == {total(told, "compaction_prompt_tokens_saved_total")}


def test_hostile_names_of_models_make_no_scrape_large_whichever_worker_they_meet(proxy: RunningProxy) -> None:
    names = [f'{number}\n\u202e\x00{{}}"' + "x" * (number % 200) for number in range(300)]
    for name in names:
        assert send(proxy, chat([user("Hello.")], model=name))[0] == 200
    samples = scraped_once_all_is_told(proxy, len(names))

    models = {dict(labels).get("model", "other") for _, labels in samples}
    assert len(models) == 51
    assert all(0 < len(model) <= 80 and model.isprintable() for model in models)
    assert len(ask(proxy, "/metrics")[1]) < 300_000


def test_whichever_worker_is_asked_explains_what_any_of_them_did(upstream: ScriptedUpstream, tmp_path: Path) -> None:
    for proxy in started(upstream, tmp_path, COMPACTION_EXPLAIN__ENABLED="true"):
        bodies = [chat(agent_session(30, 300, system="CANARY", module=f"told_{n}"), model="gpt-4") for n in range(6)]
        ids = [send(proxy, body)[1]["x-compaction-id"] for body in bodies]
        listed: list[str] = []
        while len(listed) < len(ids):  # they are written in the background
            listed = [one["id"] for one in json.loads(ask(proxy, "/explain")[1])["explanations"]]
        found = {id: [ask(proxy, f"/explain/{id}") for _ in range(6)] for id in ids}
        kill_one(proxy)
        outlived = [ask(proxy, f"/explain/{id}")[0] for id in ids]
        files = [file for file in tmp_path.rglob("*") if file.is_file() and file.parent.name == "explanations"]
        modes = {oct(file.stat().st_mode & 0o777) for file in files}
        held = b"".join(file.read_bytes() for file in files)

    assert sorted(listed) == sorted(ids)
    assert all(status == 200 and json.loads(body)["id"] == id for id, answers in found.items() for status, body in answers)
    assert outlived == [200] * 6
    assert modes == {"0o600"}
    assert b"CANARY" not in held
    assert list(tmp_path.glob("compaction-proxy-figures-*")) == []

"""Explanations: what became of each message, bounded in bytes, masked unless asked, and shown only to who may look."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from structlog.testing import capture_logs

from proxy.admin import Readiness, admin_app
from proxy.compaction import CompactionResult, CriticalItems, LayerReport
from proxy.conversation import Conversation, Message, Opaque, Text, ToolCall, ToolResult, said
from proxy.explain import Explanation, Explanations, Shelf, explain, new_id, read
from proxy.explain_pages import explain_routes
from proxy.metrics import Metrics
from proxy.windows import Budget
from proxy.workers_explanations import SharedExplanations


@dataclass(frozen=True)
class Letters:
    """A ruler of one token a character."""

    fixed: int = 0

    def text(self, text: str) -> int:
        return len(text)

    def message(self, message: Message) -> int:
        return len(message.text)

    def total(self, messages: Sequence[Message]) -> int:
        return sum(map(self.message, messages))


BUDGET = Budget(1_000, 100, 900, 720, 405, Letters())


def came(role: str, text: str) -> Message:
    return Message(role, (Text(text),), raw=json.dumps({"role": role, "content": text}).encode())


SYSTEM, TASK, OLD, LOG, LAST = (
    came("system", "You are careful."),
    came("user", "Fix the parser, my password is hunter2"),
    came("assistant", "I read the file."),
    Message("tool", (ToolResult("c1", "line\n" * 50),), raw=b'{"role":"tool"}'),
    came("user", "And now?"),
)
BEFORE = Conversation((SYSTEM, TASK, OLD, LOG, LAST))
SHORTER = LOG.with_parts([ToolResult("c1", "line\n[48 lines]")])
SUMMARY = said("user", "[Earlier conversation summary: read a file]")
EDITED = Conversation((SYSTEM, TASK, OLD, SHORTER, LAST))
AFTER = Conversation((SYSTEM, TASK, SUMMARY, SHORTER, LAST))
RESULT = CompactionResult(
    AFTER,
    800,
    300,
    (
        LayerReport("tool_result_budget", 800, 500, 1),
        LayerReport("context_collapse", 500, 300, 1),
        LayerReport("emergency", 300, 300),
    ),
    CriticalItems(kept=3),
)


def explained(
    *, full_text: bool = False, outcome: str = "applied", reason: str | None = None, id: str = "0123456789abcdef"
) -> Explanation:
    return explain(
        id,
        at=1_700_000_000.0,
        model="gpt-4o",
        outcome=outcome,
        reason=reason,
        before=BEFORE,
        result=RESULT,
        budget=BUDGET,
        stages=(("tool_result_budget", EDITED), ("context_collapse", AFTER)),
        full_text=full_text,
    )


def admin(
    explanations: Shelf, *, token: str | None = None, client: str = "127.0.0.1", host: str = "127.0.0.1:9464"
) -> TestClient:
    app = admin_app(Metrics(), ready=Readiness, routes=explain_routes(explanations, token=token))
    return TestClient(app, client=(client, 50_000), base_url=f"http://{host}")


def holding(*kept: Explanation) -> Explanations:
    explanations = Explanations()
    for one in kept:
        explanations.add(one)
    return explanations


PAGE = {"accept": "text/html,application/xhtml+xml"}


def test_each_message_stands_beside_what_became_of_it_and_who_changed_it() -> None:
    rows = explained(full_text=True).rows

    assert [(row.change, row.layer) for row in rows] == [
        ("kept", None),
        ("kept", None),
        ("removed", "context_collapse"),
        ("added", "context_collapse"),
        ("edited", "tool_result_budget"),
        ("kept", None),
    ]
    assert rows[3].after is not None
    assert rows[3].after.text == "[Earlier conversation summary: read a file]"
    assert rows[4].before is not None
    assert rows[4].after is not None
    assert (rows[4].before.tokens, rows[4].after.tokens) == (250, 15)
    assert [row.before.index for row in rows if row.before] == [0, 1, 2, 3, 4]
    assert [row.after.index for row in rows if row.after] == [0, 1, 2, 3, 4]


def test_a_result_that_was_not_forwarded_shows_the_messages_as_they_went() -> None:
    explanation = explained(outcome="rejected", reason="no_gain")

    assert {row.change for row in explanation.rows} == {"kept"}
    assert (explanation.tokens_before, explanation.tokens_after) == (800, 800)
    assert explanation.reason == "no_gain"


def test_a_prefix_that_was_resumed_is_recognized_though_it_was_read_anew() -> None:
    again = Conversation((came("system", "You are careful."), came("user", "And now?")))
    result = CompactionResult(again, 800, 20)

    explanation = explain(
        "a", at=0, model="m", outcome="reused", reason=None, before=BEFORE, result=result, budget=BUDGET, full_text=True
    )

    assert [row.change for row in explanation.rows] == ["kept", "removed", "removed", "removed", "kept"]


@given(st.data())
def test_every_message_is_shown_exactly_once_and_in_order(data: st.DataObject) -> None:
    messages = tuple(came("user", text) for text in data.draw(st.lists(st.sampled_from("abc"), max_size=8)))
    after: list[Message] = []
    for message in messages:
        match data.draw(st.sampled_from(["keep", "drop", "edit", "add", "copy"])):
            case "keep":
                after.append(message)
            case "edit":
                after.append(message.with_parts([Text("shorter")]))
            case "add":
                after += [said("user", "new"), message]
            case "copy":
                after.append(came("user", message.text))
    result = CompactionResult(Conversation(tuple(after)), 9, 1)

    rows = explain(
        "a", at=0, model="m", outcome="applied", reason=None, before=Conversation(messages), result=result, budget=BUDGET
    ).rows

    assert [row.before.index for row in rows if row.before] == list(range(len(messages)))
    assert [row.after.index for row in rows if row.after] == list(range(len(after)))


def test_no_text_is_kept_unless_it_was_asked_for() -> None:
    written = holding(explained()).written("0123456789abcdef") or b""
    open_text = holding(explained(full_text=True)).written("0123456789abcdef") or b""

    for secret in (b"hunter2", b"careful", b"Earlier", b"line"):
        assert secret not in written
        assert secret in open_text
    assert "••• ••• ••••••••".encode() in written


def test_tools_and_media_are_named_and_long_texts_are_cut() -> None:
    call = Message("assistant", (ToolCall("c1", "read_file", '{"path":"a"}'), Opaque("image", b"{}"), Text("x" * 30_000)))
    before = Conversation((call,))

    row = explain(
        "a",
        at=0,
        model="m",
        outcome="none",
        reason="floor",
        before=before,
        result=CompactionResult(before, 9, 9),
        budget=BUDGET,
        full_text=True,
    ).rows[0]

    assert row.before is not None
    assert row.before.calls == ("read_file",)
    assert row.before.media == ("image",)
    assert len(row.before.text) == 20_000
    assert row.before.cut == row.before.characters - 20_000


def test_lone_surrogates_are_no_obstacle() -> None:
    before = Conversation((came("user", "bad \ud800 half"),))
    result = CompactionResult(before, 9, 9)

    explanations = holding(
        explain("a", at=0, model="m", outcome="none", reason="floor", before=before, result=result, budget=BUDGET, full_text=True)
    )

    assert "bad ? half" in (explanations.written("a") or b"").decode()


MakeShelf = Callable[[int], Shelf]


@pytest.fixture(params=["memory", "files"])
def every_shelf(request: pytest.FixtureRequest, tmp_path: Path) -> MakeShelf:
    """Makes a shelf of so many bytes: in memory, or in files that several workers share."""
    return Explanations if request.param == "memory" else functools.partial(SharedExplanations, tmp_path)


def test_explanations_never_take_more_bytes_than_they_may(every_shelf: MakeShelf) -> None:
    size = len(holding(explained(full_text=True)).written("0123456789abcdef") or b"") + 250  # a line of the list in each file
    explanations = every_shelf(3 * size)

    for number in range(10):
        explanations.add(explained(full_text=True, id=f"{number:016}"))

    assert sum(len(explanations.written(one.id) or b"") for one in explanations.recent()) <= 3 * size
    assert [one.id for one in explanations.recent()] == [f"{number:016}" for number in (9, 8, 7)]
    assert explanations.written("0000000000000000") is None


def test_one_that_is_too_large_is_kept_without_its_messages(every_shelf: MakeShelf) -> None:
    explanations = every_shelf(1_400)

    explanations.add(explained(full_text=True))

    kept = read(explanations.written("0123456789abcdef") or b"")
    assert kept.rows == ()
    assert kept.tokens_before == 800
    assert len(explanations.written("0123456789abcdef") or b"") <= 1_400


def test_what_comes_back_is_what_was_put_in(every_shelf: MakeShelf) -> None:
    explanations = every_shelf(100_000)

    explanations.add(explained())

    assert read(explanations.written("0123456789abcdef") or b"") == explained()
    assert [(one.id, one.tokens_after) for one in explanations.recent()] == [("0123456789abcdef", 300)]


def test_an_id_is_a_name_and_never_a_path(every_shelf: MakeShelf, tmp_path: Path) -> None:
    explanations = every_shelf(100_000)
    explanations.add(explained())
    (tmp_path / "other").write_text("{}")

    for id in ("", ".", "..", "../other", "/etc/passwd", "*", "0123456789abcde", "\x00"):
        assert explanations.written(id) is None


def test_every_worker_shows_what_any_of_them_explained(tmp_path: Path) -> None:
    first, second = SharedExplanations(tmp_path, 100_000), SharedExplanations(tmp_path, 100_000)

    first.add(explained(id="a" * 16))
    second.add(explained(id="b" * 16))

    for worker in (first, second, SharedExplanations(tmp_path, 100_000)):
        assert [one.id for one in worker.recent()] == ["b" * 16, "a" * 16]
        assert [one.id for one in worker.recent(1)] == ["b" * 16]
        assert read(worker.written("a" * 16) or b"").id == "a" * 16


def test_files_are_for_this_user_only_and_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.workers_explanations.MOST", 3)
    explanations = SharedExplanations(tmp_path, 100_000)

    for number in range(5):
        explanations.add(explained(id=f"{number:016}"))

    files = list((tmp_path / "explanations").iterdir())
    assert len(files) == 3
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}
    assert oct((tmp_path / "explanations").stat().st_mode & 0o777) == "0o700"


def test_a_disk_that_refuses_costs_an_explanation_and_is_told_of_once(tmp_path: Path) -> None:
    explanations = SharedExplanations(tmp_path / "gone", 100_000)

    with capture_logs() as told:
        explanations.add(explained())
        explanations.add(explained())

    assert told == [{"event": "an explanation could not be kept", "reason": "No such file or directory", "log_level": "warning"}]


def test_ids_do_not_repeat() -> None:
    ids = {new_id() for _ in range(1_000)}

    assert len(ids) == 1_000
    assert {len(id) for id in ids} == {16}


def test_scripts_get_json_newest_first() -> None:
    http = admin(holding(explained(id="a" * 16), explained(id="b" * 16)))

    listed = http.get("/explain")
    one = http.get("/explain/" + "a" * 16)

    assert listed.headers["content-type"] == "application/json"
    assert [item["id"] for item in listed.json()["explanations"]] == ["b" * 16, "a" * 16]
    assert listed.json()["explanations"][0]["layers"] == ["tool_result_budget", "context_collapse"]
    assert one.json()["tokens_after"] == 300
    assert one.json()["critical"] == {"kept": 3, "repaired": 0, "lost": 0}
    assert http.get("/explain/unknown").status_code == 404


class Outline(HTMLParser):
    """What a page refers to, and whether its tags are closed."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("path", ["/explain", "/explain/0123456789abcdef", "/explain/unknown"])
def test_browsers_get_a_page_without_script_or_outside_asset(path: str) -> None:
    answer = admin(holding(explained())).get(path, headers=PAGE)
    outline = Outline()

    outline.feed(answer.text)

    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert outline.open == []
    assert "script" not in outline.tags
    assert all(link == "#main" or link.startswith("/explain") for link in outline.links)
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert answer.headers["cache-control"] == "no-store"
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in answer.text


def test_what_was_said_cannot_become_part_of_the_page() -> None:
    evil = '</pre><script>alert(1)</script><img src=x onerror="alert(1)">'
    before = Conversation((came("user", evil), Message("assistant", (ToolCall("c", evil, evil),))))
    result = CompactionResult(before, 9, 9, (LayerReport("snip", 9, 9, refused=evil),))
    explanation = explain(
        "a", at=0, model=evil, outcome="none", reason=evil, before=before, result=result, budget=BUDGET, full_text=True
    )

    page = admin(holding(explanation)).get("/explain/a", headers=PAGE).text
    listed = admin(holding(explanation)).get("/explain", headers=PAGE).text

    assert "<script" not in page + listed
    assert "<img" not in page + listed
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_page_says_what_was_done_by_whom_and_why() -> None:
    page = admin(holding(explained(full_text=True))).get("/explain/0123456789abcdef", headers=PAGE).text

    assert "Compacted and forwarded." in page
    assert "3 kept, 0 repaired, 0 lost" in page
    assert '<b class="removed">removed</b> by context_collapse' in page
    assert '<b class="edited">edited</b> by tool_result_budget' in page
    assert "62.5%" in page
    assert "2 messages kept as they came" in page


def test_the_page_says_why_nothing_was_done() -> None:
    page = admin(holding(explained(outcome="none", reason="floor"))).get("/explain/0123456789abcdef", headers=PAGE).text

    assert "too large by itself" in page
    assert "5 messages kept as they came" in page


def test_without_a_token_only_this_machine_may_look() -> None:
    explanations = holding(explained())

    assert admin(explanations).get("/explain").status_code == 200
    assert admin(explanations, client="::1", host="[::1]:9464").get("/explain").status_code == 200
    assert admin(explanations, host="localhost:9464").get("/explain").status_code == 200
    assert admin(explanations, client="10.1.2.3").get("/explain").status_code == 403
    assert admin(explanations, client="10.1.2.3").get("/explain/0123456789abcdef").status_code == 403


def test_a_name_that_was_made_to_point_here_is_refused() -> None:
    assert admin(holding(explained()), host="evil.example:9464").get("/explain").status_code == 403


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"any:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer let-me-in", 200),
        (basic("let-me-in"), 200),
        (basic("wrong"), 401),
        ("Bearer wrong", 401),
        ("Basic %%%", 401),
        ("Basic " + base64.b64encode(b"\xff").decode(), 401),
        ("let-me-in", 401),
        ("", 401),
    ],
)
def test_with_a_token_who_has_it_may_look_from_anywhere(authorization: str, status: int) -> None:
    http = admin(holding(explained()), token="let-me-in", client="10.1.2.3", host="proxy.example")

    answer = http.get("/explain/0123456789abcdef", headers={"authorization": authorization})

    assert answer.status_code == status
    assert ("www-authenticate" in answer.headers) == (status == 401)


def test_a_layer_that_started_over_is_the_author_of_what_it_left() -> None:
    """The milder layer had shortened the log; the next one began anew, folded the older message and kept the log whole."""
    folded = Conversation((SYSTEM, TASK, SUMMARY, LOG, LAST))
    result = CompactionResult(folded, 800, 500)

    rows = explain(
        "a",
        at=0,
        model="m",
        outcome="applied",
        reason=None,
        before=BEFORE,
        result=result,
        budget=BUDGET,
        stages=(("microcompact", EDITED), ("context_collapse", folded)),
    ).rows

    assert [(row.change, row.layer) for row in rows] == [
        ("kept", None),
        ("kept", None),
        ("removed", "context_collapse"),
        ("added", "context_collapse"),
        ("kept", None),
        ("kept", None),
    ]

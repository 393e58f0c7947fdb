"""One event: order, checks, and an account that adds up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from builders import agent_session, assistant, call, prose, tool, user

from proxy.compaction import CompactionResult, Layer, compact
from proxy.compaction.emergency import Emergency
from proxy.compaction.merging import MergedTurns
from proxy.compaction.microcompact import Microcompact
from proxy.compaction.pipeline import Admitted
from proxy.compaction.snip import Snip
from proxy.compaction.strategies import build
from proxy.compaction.tool_results import ToolResultBudget
from proxy.compaction.validation import Rules
from proxy.conversation import Conversation, Message, Text, said
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]
LADDER = build("ladder")
EAGER = build("ladder", layers={"microcompact": {"min_kept": 0.0}})
"""Its stubs are enough more often, so that there is something for a fold to start over from."""


@dataclass(frozen=True)
class Doing:
    """A layer that does what it is told."""

    change: Callable[[Conversation], Conversation]
    name: str = "doing"

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        return self.change(conversation)


def without(*indices: int) -> Doing:
    return Doing(lambda c: Conversation(tuple(m for i, m in enumerate(c.messages) if i not in indices)))


def run(conversation: Conversation, budget: Budget, *layers: Layer, **options: object) -> CompactionResult:
    return compact(conversation, budget, layers, **options)  # type: ignore[arg-type]


def test_what_meets_the_target_is_the_very_same_object(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(4))

    result = compact(conversation, room(100_000), LADDER)

    assert result.conversation is conversation
    assert result.reports == ()
    assert result.reason is None


def test_it_stops_at_the_first_layer_that_is_enough(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))
    before = room(1).ruler.total(conversation.messages)

    result = compact(conversation, room(before, target=before - 900), EAGER)

    assert [report.layer for report in result.reports] == ["tool_result_budget", "snip", "microcompact"]
    assert result.layers == ("microcompact",)
    assert result.tokens_after <= before - 900


def test_the_target_of_the_call_goes_before_the_budgets(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))
    before = room(1).ruler.total(conversation.messages)

    result = compact(conversation, room(before), LADDER, target=before // 4)

    assert result.tokens_after <= before // 4


def test_the_saved_tokens_of_the_layers_add_up(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(40))

    for target in (9_000, 4_000, 2_000, 900):
        result = compact(conversation, room(20_000, target=target), LADDER)

        assert sum(report.saved for report in result.reports) == result.tokens_before - result.tokens_after
        assert all(report.saved >= 0 for report in result.reports)
        assert result.reports[0].before == result.tokens_before
        assert result.reports[-1].after == result.tokens_after


def test_work_that_a_fold_starts_over_from_is_not_counted_twice(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(40))

    result = compact(conversation, room(20_000, target=2_000), EAGER)

    skipped = {report.layer: report.skipped for report in result.reports}
    assert skipped["microcompact"] == "superseded"
    assert result.layers == ("context_collapse",)


def test_messages_that_nobody_touched_keep_their_identity(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))
    before = room(1).ruler.total(conversation.messages)

    result = compact(conversation, room(before, target=before - 900), LADDER)

    came = {id(message) for message in conversation.messages}
    touched = [message for message in result.conversation.messages if id(message) not in came]
    assert len(touched) == sum(report.touched for report in result.reports)
    assert all(message.raw is None and message.origin is not None for message in touched)


def test_a_layer_that_orphans_a_result_is_undone_and_the_next_one_runs(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))
    before = room(1).ruler.total(conversation.messages)

    result = run(conversation, room(before, target=before - 900), without(2), Microcompact(min_kept=0.0))

    assert result.reports[0].refused == "structure"
    assert result.reports[0].skipped == "orphan"
    assert result.reports[0].saved == 0
    assert result.layers == ("microcompact",)


@pytest.mark.parametrize(
    ("change", "refused", "detail"),
    [
        (lambda c: c.with_messages(c.messages[1:]), "structure", "instructions"),
        (lambda c: c.with_messages(c.messages[:-1]), "structure", "live_turn"),
        (lambda c: c.with_messages([*c.messages, said("user", "more")]), "size", None),
        (lambda c: c.with_messages([c.messages[0], said("assistant", ""), *c.messages[4:]]), "structure", "empty"),
        (lambda c: c.with_messages([c.messages[0], said("system", "Obey."), *c.messages[4:]]), "structure", "instructions"),
        (lambda c: c.with_messages([*c.messages[:3], replace(c.messages[3], parts=()), *c.messages[4:]]), "structure", "empty"),
    ],
)
def test_a_broken_rule_is_named(
    talk: Talk, room: Room, change: Callable[[Conversation], Conversation], refused: str, detail: str | None
) -> None:
    conversation = talk(agent_session(6))
    before = room(1).ruler.total(conversation.messages)

    result = run(conversation, room(before, target=before // 2), Doing(change))

    assert (result.reports[0].refused, result.reports[0].skipped) == (refused, detail)
    assert result.conversation is conversation
    assert result.reason == "no_gain"


def test_two_user_messages_in_a_row_are_refused_where_the_template_wants_turns(talk: Talk, room: Room) -> None:
    conversation = talk([user("Go."), assistant(prose(400)), user("On."), assistant(prose(400)), user("So?")])
    budget = room(2_000, target=600)

    strict = run(conversation, budget, without(1), rules=Rules(alternate=True))
    lenient = run(conversation, budget, without(1))

    assert (strict.reports[0].refused, strict.reports[0].skipped) == ("structure", "alternation")
    assert lenient.reports[0].refused is None


@pytest.mark.parametrize("layers", [LADDER, (Emergency(),)], ids=["ladder", "last resort"])
def test_a_reply_after_the_task_can_be_folded_where_calls_came_before_it(talk: Talk, room: Room, layers: Sequence[Layer]) -> None:
    rows = "[" + ", ".join(f'{{"id": {i}, "state": "ok", "value": {i}.5}}' for i in range(8)) + "]"
    conversation = talk(
        [assistant(None, call("a", "read_file", path="app/a.py")), tool("a", ""), user(""), assistant(rows), user("")]
    )
    tokens = room(1).ruler.total(conversation.messages)

    result = run(conversation, room(tokens - 4, target=tokens // 2), *layers, rules=Rules(alternate=True))

    assert [message.role for message in result.conversation.messages] == ["user", "assistant", "user"]
    assert result.tokens_after <= tokens // 2
    assert all(report.refused is None for report in result.reports)


@pytest.mark.parametrize("usable", [30, 60, 92, 100, 120])
def test_the_last_resort_fits_with_the_lines_that_keep_the_turns(talk: Talk, room: Room, usable: int) -> None:
    conversation = talk([user("Go. " + prose(400)), assistant(prose(400)), user("So?")])

    result = run(conversation, room(usable), Emergency(), rules=Rules(alternate=True))

    assert result.tokens_after <= usable
    assert [message.role for message in result.conversation.messages] in (["user"], ["user", "assistant", "user"])
    assert result.reports[-1].refused is None


@pytest.mark.parametrize("usable", [400, 500, 600, 700, 800])
def test_the_lines_that_keep_the_turns_do_not_cost_the_summary(talk: Talk, room: Room, usable: int) -> None:
    """What is too much then are a few tokens of the newest output."""
    files = [f"app/f{i}.py" for i in range(8)]
    early = [m for path in files for m in (assistant(None, call(path, "read_file", path=path)), tool(path, prose(1_500)))]
    newest = [assistant(None, call("z", "bash", command="pytest")), tool("z", prose(30_000))]
    conversation = talk([user("Fix the import."), *early, *newest])

    for rules in (Rules(), Rules(alternate=True)):
        result = run(conversation, room(usable), Emergency(), rules=rules)

        assert result.tokens_after <= usable
        assert sum("Used tools: read_file." in message.text for message in result.conversation.messages) == 1


def test_the_last_resort_drops_the_history_where_a_summary_of_it_is_longer_than_it_was(talk: Talk, room: Room) -> None:
    line = "The loader reads each line, and splits it into fields."
    calls = [call("a", "search"), call("c", "read_file", path="app/a.py")]
    early = [user("Do not touch app/b.py."), assistant(None, *calls), tool("a", "ok"), tool("c", "Do not touch app/b.py.")]
    newest = [assistant("ok"), user(line), assistant(line), assistant(None, call("c", "search")), tool("c", line)]
    conversation = talk([*early, *newest])
    usable = room(1).ruler.total(conversation.messages) - 3

    result = run(conversation, room(usable, target=usable // 2), *LADDER, rules=Rules(alternate=True))

    assert result.tokens_after <= usable
    assert result.reports[-1].layer == "emergency"
    assert result.reports[-1].refused is None


def test_what_a_way_of_folding_writes_is_kept_in_turns_by_a_line_of_ours(talk: Talk, room: Room) -> None:
    early = [user("Go."), assistant(prose(400)), user("On."), assistant(prose(400)), user("Then?"), assistant(prose(400))]
    newest = [assistant(None, call("a", "read_file", path="app/a.py")), tool("a", "rows"), user("So?")]
    conversation = talk([*early, *newest])

    result = run(conversation, room(2_000, target=400), MergedTurns(), rules=Rules(alternate=True))

    assert result.reports[0].refused is None
    roles = [message.role for message in result.conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant", "user"]
    assert result.conversation.messages[-2].text == "(Done.)"
    assert result.conversation.messages[-1] is conversation.messages[-1]


def test_a_lost_constraint_is_put_back_word_by_word(talk: Talk, room: Room) -> None:
    history = [user("Never touch the migrations folder."), *agent_session(14)[2:]]
    conversation = talk([user("Fix the import."), assistant("Which one?"), *history])
    before = room(1).ruler.total(conversation.messages)

    result = run(conversation, room(before, target=before // 2), without(*range(1, 23)))

    assert result.reports[0].refused is None
    assert result.critical.repaired >= 1
    assert result.critical.lost == 0
    assert any("Never touch the migrations folder." in message.text for message in result.conversation.messages)


def test_a_layer_that_loses_facts_that_cannot_be_put_back_is_refused(talk: Talk, room: Room) -> None:
    conversation = talk(
        [user("Fix the import."), assistant("Ok."), user("Never touch the migrations folder."), *agent_session(14)[2:]]
    )
    before = room(1).ruler.total(conversation.messages)

    def no_repair(conversation: Conversation, lines: Sequence[str], budget: Budget) -> Conversation:
        return conversation

    result = run(conversation, room(before, target=before // 2), without(*range(1, 21)), repair=no_repair)

    assert result.reports[0].refused == "lost_constraint"
    assert result.conversation is conversation


def test_a_layer_that_only_loses_what_the_live_turn_refers_to_is_not_refused(talk: Talk, room: Room) -> None:
    told = [assistant("config/limits.yaml holds the cap of 40 rows. " + prose(300)), assistant("Other things.")]
    conversation = talk([user("Go."), *told, user("Edit config/limits.yaml")])
    before = room(1).ruler.total(conversation.messages)

    def no_repair(conversation: Conversation, lines: Sequence[str], budget: Budget) -> Conversation:
        return conversation

    result = run(conversation, room(before, target=before // 2), without(1), repair=no_repair)

    assert result.layers == ("doing",)
    assert result.critical.lost == 0


def test_a_layer_that_saves_tokens_and_costs_bytes_is_refused(talk: Talk, room: Room) -> None:
    conversation = talk([user("Go."), assistant("~" * 40 + " 0 1 2 3 4 5 6 7 8 9" * 40), user("So?")])
    before = room(1).ruler.total(conversation.messages)
    longer = said("assistant", " information" * 90)

    result = run(
        conversation, room(before, target=before // 4), Doing(lambda c: c.with_messages([c.messages[0], longer, c.messages[2]]))
    )

    assert (result.reports[0].refused, result.reports[0].skipped) == ("size", "bytes")


def test_a_deadline_between_layers_keeps_what_was_done(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(40))
    passed: list[int] = []

    def late(conversation: Conversation) -> Conversation:
        passed.append(1)
        return conversation

    result = run(conversation, room(20_000, target=900), *EAGER[:3], Doing(late), *EAGER[3:], stop=lambda: bool(passed))

    assert result.reason == "deadline"
    assert [report.layer for report in result.reports] == ["tool_result_budget", "snip", "microcompact", "doing"]
    assert result.tokens_after < result.tokens_before


@pytest.mark.parametrize("layer", [layer for layer in build("ladder") if layer.name not in ("snip", "auto_compact")])
def test_a_deadline_inside_a_layer_ends_it(talk: Talk, room: Room, layer: Layer) -> None:
    conversation = talk(agent_session(40))
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return bool(measured) and len(asked) > measured[0] // 2

    measured: list[int] = []
    run(conversation, room(1_200, target=900), layer, stop=stop)
    measured.append(len(asked))
    asked.clear()
    result = run(conversation, room(1_200, target=900), layer, stop=stop)

    assert result.reason == "deadline"
    assert result.conversation is conversation
    assert len(asked) <= measured[0] // 2 + 2


def test_long_arguments_are_cut_before_what_must_not_be_forgotten(talk: Talk, room: Room) -> None:
    wrote = assistant(None, call("w", "write_file", path="app/new.py", content=prose(2_000)))
    conversation = talk([*agent_session(14)[:-1], user("Write it."), wrote, tool("w", "Written.")])

    result = compact(conversation, room(1_500, target=700), LADDER)

    text = "\n".join(message.text for message in result.conversation.messages)
    assert result.tokens_after <= 1_500
    assert result.critical.lost == 0
    assert "ModuleNotFoundError: No module named 'loader_core'" in text
    assert "Never touch the migrations." in text
    assert len(result.conversation.messages[-2].calls[0].arguments) > 1_500


def test_a_floor_beyond_the_window_forwards_as_it_came(talk: Talk, room: Room) -> None:
    conversation = talk([{"role": "system", "content": prose(900)}, *agent_session(6)[1:]])

    result = compact(conversation, room(500), LADDER)

    assert result.conversation is conversation
    assert result.reason == "floor"
    assert result.tokens_after == result.tokens_before


def test_a_floor_near_the_target_is_said_and_does_not_cost_the_whole_history(talk: Talk, room: Room) -> None:
    conversation = talk([{"role": "system", "content": prose(1_000)}, *agent_session(20)[1:]])

    result = compact(conversation, room(4_000, target=1_000), LADDER)

    assert result.reason == "floor"
    assert 1_000 < result.tokens_after <= 1_400


def test_a_gain_of_next_to_nothing_is_not_worth_an_event(talk: Talk, room: Room) -> None:
    conversation = talk([user("Go."), assistant(prose(2_000)), assistant("Well."), assistant("Done."), user("So?")])

    result = run(conversation, room(8_000, target=1_000), without(2))

    assert result.conversation is conversation
    assert result.reason == "no_gain"
    assert [(report.saved, report.skipped) for report in result.reports] == [(0, "no_gain")]


def test_the_last_resort_waits_until_nothing_else_helps(talk: Talk, room: Room) -> None:
    live = [user("Read both."), assistant(None, call("a", "read_file", path="a")), tool("a", prose(1_500))]
    conversation = talk([*agent_session(6)[:-1], *live])

    roomy = compact(conversation, room(6_000, target=1_000), LADDER)
    tight = compact(conversation, room(1_200, target=1_000), LADDER)

    assert roomy.tokens_after <= 6_000
    assert "emergency" not in roomy.layers
    assert tight.tokens_after <= 1_200


def test_an_admitted_layer_waits_for_its_fill(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))
    before = room(1).ruler.total(conversation.messages)
    budget = room(before * 2, target=before // 2)

    below = run(conversation, budget, Admitted(Microcompact(keep_recent=0, min_kept=0.0), 0.75, tokens=before + 1))
    above = run(conversation, budget, Admitted(Microcompact(keep_recent=0, min_kept=0.0), 0.75, tokens=before - 1))
    by_count = run(conversation, budget, Admitted(Microcompact(keep_recent=0, min_kept=0.0), 0.75, messages=20))

    assert below.reports[0].skipped == "below_threshold"
    assert above.layers == ("microcompact",)
    assert by_count.layers == ("microcompact",)


def test_ten_events_in_a_row_keep_the_task_the_constraint_and_the_open_error_and_stay_bounded(
    talk: Talk, room: Room, wire: Callable[[Conversation], list[dict[str, object]]]
) -> None:
    messages = [dict(m) for m in agent_session(12)[:-1]]
    budget = room(6_000, target=2_700)
    sizes = []
    for cycle in range(10):
        result = compact(talk(messages), budget, LADDER)
        sizes.append(result.tokens_after)
        assert result.critical.lost == 0
        messages = [*wire(result.conversation), user(f"Now do part {cycle} of the rest."), *agent_session(10)[2:-1]]

    text = "\n".join(str(message.get("content")) for message in messages)
    assert "Fix the failing import in app/loader.py." in text
    assert "Never touch the migrations." in text
    assert "ModuleNotFoundError: No module named 'loader_core'" in text
    assert max(sizes) <= 2_970


def test_edits_are_made_from_the_message_that_came(talk: Talk, room: Room) -> None:
    conversation = talk(agent_session(14))

    made = ToolResultBudget(per_result=50).apply(conversation, room(50_000))

    edited = made.messages[3]
    assert edited.origin == conversation.messages[3].raw
    assert isinstance(edited, Message)
    assert not any(isinstance(part, Text) for part in edited.parts)


def test_lossless_work_is_kept_when_a_fold_starts_over(talk: Talk, room: Room) -> None:
    page = prose(900, 3)
    twice = [*agent_session(14)[:-1], *_read("a", page), *_read("b", page), assistant("Both read."), user("So?")]
    conversation = talk(twice)

    result = run(conversation, room(20_000, target=1_500), ToolResultBudget(per_result=200), Snip(), *build("sliding_window"))

    assert result.tokens_after <= 1_500
    assert sum(report.saved for report in result.reports) == result.tokens_before - result.tokens_after


def _read(name: str, text: str) -> list[dict[str, object]]:
    return [assistant(None, call(name, "read_file", path=name)), tool(name, text)]

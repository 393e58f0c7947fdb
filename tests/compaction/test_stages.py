"""What the conversation was like after each layer: for who wants to know which of them changed what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from builders import agent_session

from proxy.compaction import compact
from proxy.compaction.strategies import build
from proxy.conversation import Conversation
from proxy.windows import Budget

Talk = Callable[..., Conversation]
Room = Callable[..., Budget]


@dataclass(frozen=True)
class Drops:
    """A layer that leaves out the sixth and the seventh message."""

    name: str

    def apply(self, conversation: Conversation, budget: Budget) -> Conversation:
        return Conversation((*conversation.messages[:6], *conversation.messages[8:]))


def test_there_is_a_stage_for_each_layer_and_the_last_is_the_result(talk: Talk, room: Room) -> None:
    result = compact(talk(agent_session(8)), room(10_000), (Drops("first"), Drops("second")), target=1_900)

    assert [(layer, len(after.messages)) for layer, after in result.stages[:2]] == [("first", 17), ("second", 15)]
    assert result.stages[-1][1] is result.conversation


def test_an_event_that_comes_to_nothing_has_no_stages(talk: Talk, room: Room) -> None:
    result = compact(talk(agent_session(3)), room(100_000), build("ladder"))

    assert result.stages == ()

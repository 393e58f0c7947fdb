"""The strategy of Kimi's agent, requirement by requirement (K1 to K20 of the seed's description)."""

import pytest

from proxy.conversation import Message, Opaque, Text, said
from proxy.errors import SummaryFailed
from proxy.summarizers import Usage
from proxy.summarizers.call import Caller, Settings
from proxy.summarizers.kimi import (
    LLM,
    MARKER,
    ChatModel,
    Compaction,
    NoopCompaction,
    PrepareResult,
    SimpleCompaction,
    StepResult,
    prepare,
)
from proxy.summarizers.prompts import LANGUAGES, prompt

pytestmark = pytest.mark.anyio

INSTRUCTION = "\n\n" + prompt("kimi", "en").instruction


class Model:
    """An LLM that says this."""

    def __init__(self, *parts, usage=None):
        self.answer = StepResult(Message("assistant", parts or (Text("the gist"),)), usage)
        self.calls = []

    async def step(self, *, system_prompt, history):
        self.calls.append((system_prompt, list(history)))
        return self.answer


@pytest.fixture
def talk(conversation):
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "src"}'}}
    return conversation(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is in src?"},
        {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a.py b.py"},
        {"role": "assistant", "content": "a.py and b.py."},
        {"role": "user", "content": "Open a.py."},
    ).messages


async def test_k1_a_compaction_is_known_by_one_method():
    class Mine:
        async def compact(self, messages, llm):
            return messages

    assert isinstance(SimpleCompaction(), Compaction)
    assert isinstance(NoopCompaction(), Compaction)
    assert isinstance(Mine(), Compaction)
    assert isinstance(Model(), LLM)
    assert not isinstance(object(), Compaction)


async def test_k2_every_role_and_kind_of_part_is_taken(conversation):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = conversation(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
        {"role": "assistant", "content": [{"type": "text", "text": "I see"}]},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "so"},
    ).messages

    parts = prepare(messages).compact_message.parts

    assert Opaque("image", parts[4].raw) in parts
    assert [part.text for part in parts if isinstance(part, Text)] == [
        "## Message 1\nRole: developer\nContent:\n",
        "d",
        "\n\n## Message 2\nRole: user\nContent:\n",
        "see",
        "\n\n## Message 3\nRole: assistant\nContent:\n",
        "I see",
        INSTRUCTION,
    ]


async def test_k3_the_result_is_the_input_or_a_summary_and_the_newest_messages(talk):
    compacted = await SimpleCompaction().compact(talk, Model())

    assert [message.role for message in compacted] == ["user", "assistant", "user"]
    assert compacted[1] is talk[4]
    assert compacted[2] is talk[5]
    assert await SimpleCompaction(9).compact(talk, Model()) is talk


async def test_k4_an_error_of_the_provider_reaches_the_caller(talk, scripted):
    llm = ChatModel(Caller(scripted((500, b"")), Settings(pause=0)), "gpt-4o")

    with pytest.raises(SummaryFailed) as caught:
        await SimpleCompaction().compact(talk, llm)
    assert caught.value.outcome == "http_5xx"


@pytest.mark.parametrize(("kept", "at"), [(1, 5), (2, 4), (3, 2), (4, 1)])
async def test_k5_and_k8_only_user_and_assistant_messages_count_and_the_others_go_with_their_side(talk, kept, at):
    prepared = SimpleCompaction(max_preserved_messages=kept).prepare(talk)

    assert prepared.to_preserve == talk[at:]


async def test_k6_prepare_says_what_to_ask_and_what_to_keep(talk):
    prepared = prepare(talk)

    assert isinstance(prepared, PrepareResult)
    assert prepared.compact_message.role == "user"
    assert prepared == SimpleCompaction().prepare(talk)


@pytest.mark.parametrize("kept", [0, -1])
async def test_k7_nothing_to_keep_or_nothing_at_all_is_left_alone(talk, kept):
    model = Model()

    assert SimpleCompaction(kept).prepare(talk) == PrepareResult(None, talk)
    assert await SimpleCompaction(kept).compact(talk, model) is talk
    assert list(await SimpleCompaction().compact([], model)) == []
    assert model.calls == []


async def test_k9_too_few_messages_ask_nobody(talk):
    model = Model()

    assert await SimpleCompaction(5).compact(talk, model) is talk
    assert await SimpleCompaction(2).compact(talk[-2:], model) is not None
    assert prepare([said("system", "s"), said("tool", "t")]).compact_message is None
    assert model.calls == []


async def test_k10_one_user_message_with_numbered_blocks_and_the_instruction_last(talk):
    text = prepare(talk).compact_message.text

    assert text == (
        "## Message 1\nRole: system\nContent:\nBe brief."
        "\n\n## Message 2\nRole: user\nContent:\nWhat is in src?"
        '\n\n## Message 3\nRole: assistant\nContent:\nCalled ls: {"path": "src"}'
        "\n\n## Message 4\nRole: tool\nContent:\na.py b.py" + INSTRUCTION
    )


async def test_k11_a_system_prompt_of_its_own_no_tools_and_nothing_but_that_message(talk, scripted, words):
    model = Model()
    await SimpleCompaction().compact(talk, model)
    assert model.calls == [(prompt("kimi", "en").system, [prepare(talk).compact_message])]

    server = scripted((200, words["completion"]("the gist")))
    await SimpleCompaction().compact(talk, ChatModel(Caller(server, Settings(max_output=700)), "gpt-4o"))
    assert server.asked == [
        {
            "model": "gpt-4o",
            "messages": [
                {"role": "system", "content": prompt("kimi", "en").system},
                {"role": "user", "content": prepare(talk).compact_message.text},
            ],
            "max_tokens": 700,
        }
    ]


async def test_k12_thinking_is_taken_out_on_the_way_in_and_on_the_way_out(talk):
    model = Model(Opaque("reasoning", b'"hm"', "reasoning_content"), Text("<think>hm</think>the gist"))

    compacted = await SimpleCompaction().compact(talk, model)

    assert "I must look" not in model.calls[0][1][0].text
    assert not any(isinstance(part, Opaque) for part in model.calls[0][1][0].parts)
    assert compacted[0].parts == (Text(MARKER), Text("the gist"))


async def test_k13_the_summary_speaks_as_the_user_after_a_marker(talk):
    compacted = await SimpleCompaction().compact(talk, Model())

    assert compacted[0] == Message("user", (Text(MARKER), Text("the gist")))
    assert MARKER.startswith("<system>")


async def test_k14_the_tokens_of_the_question_are_recorded(talk, scripted, words, told):
    llm = ChatModel(Caller(scripted((200, words["completion"]("the gist"))), observe=told), "gpt-4o")

    result = await llm.step(system_prompt="s", history=[said("user", "u")])

    assert result.usage == Usage(900, 120)
    assert told == [("gpt-4o", "ok", 900, 120)]


async def test_k16_how_many_are_kept_is_a_setting(talk):
    assert len(SimpleCompaction(max_preserved_messages=1).prepare(talk).to_preserve) == 1
    assert SimpleCompaction().max_preserved_messages == 2


async def test_k17_doing_nothing_is_a_compaction_too(talk):
    assert await NoopCompaction().compact(talk, Model()) is talk


async def test_k18_the_summary_has_a_structure():
    for language in LANGUAGES:
        assert len(prompt("kimi", language).sections) == 5
    assert prompt("kimi", "en").sections == ("Goal", "Constraints", "Done", "Open", "Facts")


async def test_k19_the_role_of_the_summary_is_a_setting_and_the_answer_has_a_cap(talk, scripted, words):
    compacted = await SimpleCompaction(role="assistant").compact(talk, Model())
    assert compacted[0].role == "assistant"

    server = scripted((200, words["completion"]("the gist")))
    await ChatModel(Caller(server), "m").step(system_prompt="s", history=[said("user", "u")])
    assert server.asked[0]["max_tokens"] == 4096


async def test_k20_the_strategy_knows_no_provider(talk):
    compacted = await SimpleCompaction().compact(talk, Model(Text("anything that has a step method will do")))

    assert compacted[0].parts[1] == Text("anything that has a step method will do")


@pytest.mark.parametrize("name", ["kimi", "anchored"])
@pytest.mark.parametrize("language", LANGUAGES)
async def test_every_prompt_has_both_halves_and_distinct_sections(name, language):
    found = prompt(name, language)

    assert found.system
    assert len(set(found.sections)) == {"kimi": 5, "anchored": 7}[name]
    assert found.instruction.splitlines()[-2].startswith("## ")


async def test_a_language_without_a_prompt_gets_the_english_one():
    assert prompt("kimi", "sw") == prompt("kimi", "en")
    assert prompt("kimi", None) == prompt("kimi", "en")

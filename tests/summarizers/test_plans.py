"""What a summary replaces, and that it stands in the right place afterwards."""

import pytest
from builders import agent_session, assistant, call, prose, tool, user

from proxy import tokens
from proxy.compaction import entities
from proxy.compaction.validation import violations
from proxy.conversation import said
from proxy.summarizers.plans import adopt, missing_names, plan, plan_kimi

RULER = tokens.ruler("gpt-4o", {})
SUMMARY = said("user", "[the gist]")


def texts(conversation):
    return [message.text for message in conversation.messages]


def test_the_newest_steps_and_the_task_stay(conversation):
    session = conversation(*agent_session(30, words=200))
    made = plan(session, RULER, keep_tokens=2_000)

    after = adopt(session, made, SUMMARY)

    assert after.messages[:2] == session.messages[:2]
    assert after.messages[2] == SUMMARY
    assert after.messages[3:] == session.messages[made.stop :]
    assert 1_000 < RULER.total(after.messages[3:]) <= 2_003
    assert made.after == len(session.messages) - made.stop
    assert made.tokens == RULER.total(session.messages[made.start : made.stop]) - RULER.fixed
    assert violations(after).total() == 0


def test_a_task_that_is_too_long_to_stay_is_folded_too(conversation):
    session = conversation(
        {"role": "system", "content": "s"}, user(prose(3_000)), assistant("a"), user("b"), assistant("c"), user("d")
    )
    made = plan(session, RULER, keep_tokens=5)

    assert made.folded[0] == session.messages[1]


def test_too_little_is_not_worth_a_question(conversation):
    session = conversation(*agent_session(3, words=20))

    assert plan(session, RULER, keep_tokens=10) is None
    assert plan(conversation(user("a")), RULER, keep_tokens=0, least=0) is None
    assert plan(conversation(), RULER, keep_tokens=0, least=0) is None


def test_the_last_user_message_stays_and_stays_the_last(conversation):
    long = [user("the task " + prose(2_100)), assistant("ok"), user("now the other thing")]
    for i in range(20):
        long += [assistant(None, call(f"c{i}", "f", n=i)), tool(f"c{i}", prose(200, i))]
    session = conversation(*long)
    made = plan(session, RULER, keep_tokens=1_000)

    after = adopt(session, made, SUMMARY)

    assert texts(after)[:2] == ["[the gist]", "now the other thing"]
    assert after.messages[2].calls
    assert violations(after).total() == 0


def test_instructions_in_the_middle_stay(conversation):
    session = conversation(
        user("task"), assistant(prose(900)), {"role": "system", "content": "new rule"}, assistant(prose(900, 1)), user("on"), assistant("x"), user("y")
    )  # fmt: skip
    made = plan(session, RULER, keep_tokens=20, least=100)

    assert texts(adopt(session, made, SUMMARY)) == ["task", "[the gist]", "new rule", "on", "x", "y"]


def test_a_loop_of_calls_with_reasoning_is_not_taken_apart(conversation):
    session = [user("task"), assistant(prose(900)), user("go")]
    for i in range(12):
        session += [{**assistant(None, call(f"c{i}", "f")), "reasoning_content": "hm"}, tool(f"c{i}", prose(100, i))]
    made = plan(conversation(*session), RULER, keep_tokens=400, least=100)

    assert made.stop <= 3


def test_kimi_keeps_the_last_two_messages_of_people_and_assistant(conversation):
    session = conversation(*agent_session(10, words=100))
    made = plan_kimi(session, RULER)

    after = adopt(session, made, SUMMARY)

    assert after.messages[0] == session.messages[0]
    assert after.messages[1] == SUMMARY
    assert after.messages[2:] == session.messages[-3:]
    assert plan_kimi(conversation(user("a"), assistant("b")), RULER) is None


def test_a_summary_is_put_only_where_its_words_still_stand(conversation):
    messages = agent_session(20, words=100)
    session = conversation(*messages)
    made = plan(session, RULER, keep_tokens=500, least=100)
    grown = conversation(*messages, assistant("x"), user("y"))
    edited = conversation(*messages[:4], assistant("something else"), *messages[5:])

    assert adopt(grown, made, SUMMARY).messages[3:] == grown.messages[made.stop :]
    assert adopt(edited, made, SUMMARY) is None
    assert adopt(conversation(*messages[:6]), made, SUMMARY) is None


def test_names_that_newer_messages_need_are_found(conversation):
    folded = conversation(user("look at app/loader.py and app/upload.py"), assistant("found retry_limit in app/upload.py"))
    arrived = conversation(user("raise retry_limit, and see app/new.py"))

    names = missing_names(
        "The user works on app/loader.py.", folded.messages, arrived.messages, lambda text: entities.scan(text).distinct
    )

    assert names == ("retry_limit",)


@pytest.mark.parametrize("keep", [0, 100, 1_000, 5_000, 50_000])
def test_every_size_of_the_rest_leaves_a_valid_conversation(conversation, keep):
    session = conversation(*agent_session(25, words=120))
    made = plan(session, RULER, keep_tokens=keep, least=1)

    if made is not None:
        after = adopt(session, made, SUMMARY)
        assert violations(after).total() == 0
        assert after.messages[-1] == session.messages[-1]

"""Keys of histories: the same for the same words, whatever moves around them, and shared by nobody else."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.checkpoints.chain import Digests, canonical, chain, digest, keys, namespace
from proxy.conversation import Conversation, said
from proxy.wire.chat_completions import read_message

SEED = namespace(b"secret", b"Bearer sk-one", "settings")

CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"path": null}'}}
TURN = [
    {"role": "user", "content": "list the files"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a.py b.py"},
    {"role": "assistant", "content": "There are two."},
]


def message(value):
    return read_message(json.dumps(value).encode())


def test_a_cache_mark_an_id_and_a_timestamp_change_nothing():
    plain = message({"role": "user", "content": [{"type": "text", "text": "go"}]})
    marked = message(
        {
            "id": "msg_7",
            "timestamp": 1764000000,
            "role": "user",
            "content": [{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}],
            "cache_control": {"type": "ephemeral"},
        }
    )

    assert digest(plain) == digest(marked)


def test_a_string_and_its_one_text_part_are_the_same_words():
    assert digest(message({"role": "user", "content": "go"})) == digest(
        message({"role": "user", "content": [{"type": "text", "text": "go"}]})
    )


def test_null_is_the_same_as_absent():
    bare = {"role": "assistant", "tool_calls": [CALL]}
    full = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [{**CALL, "index": None}]}

    assert digest(message(bare)) == digest(message(full))


def test_order_of_keys_and_white_space_change_nothing():
    assert canonical(b'{"role":"user","content":"go"}') == canonical(b'{ "content" : "go",\n "role":"user" }')


def test_a_message_of_our_own_has_the_digest_of_the_same_words_from_a_client():
    assert digest(said("user", "go")) == digest(message({"content": "go", "role": "user"}))


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "go "},
        {"role": "assistant", "content": "go"},
        {"role": "user", "content": "go", "name": "ann"},
        {"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]},
        {"role": "user", "content": "go", "weight": 1.0},
        {"role": "user", "content": ""},
        {"role": "user"},
    ],
)
def test_other_words_have_another_digest(other):
    assert digest(message({"role": "user", "content": "go"})) != digest(message(other))


def test_the_id_of_a_call_matters_because_results_refer_to_it():
    other = {**CALL, "id": "call_2"}

    assert digest(message({"role": "assistant", "tool_calls": [CALL]})) != digest(
        message({"role": "assistant", "tool_calls": [other]})
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"role":"user","content":"\\ud800"}', b'{"role":"user","content":"\\ud801"}'),
        (b'{"role":"user","content":"x","n":NaN}', b'{"role":"user","content":"y","n":NaN}'),
        (b'{"role":"user","content":"x","n":18446744073709551617}', b'{"role":"user","content":"x","n":18446744073709551616}'),
        (b'{"role":"user","content":"x","n":0.1}', b'{"role":"user","content":"x","n":0.10000000000000000001}'),
        (b"7", b"8"),
        (b'"words"', b'"other words"'),
        (
            b'{"role":"user","content":' + b"[" * 3000 + b"]" * 3000 + b"}",
            b'{"role":"user","content":' + b"[" * 2999 + b"]" * 2999 + b"}",
        ),
    ],
)
def test_what_few_parsers_take_still_has_a_digest_of_its_own(one, other):
    assert canonical(one) == canonical(one)
    assert canonical(one) != canonical(other)


def test_a_cache_mark_on_a_lone_surrogate_changes_nothing():
    assert canonical(b'{"role":"user","content":"\\ud800"}') == canonical(
        b'{"role":"user","cache_control":{},"content":[{"type":"text","text":"\\ud800","cache_control":{}}]}'
    )


def test_keys_stand_at_whole_steps_only(history):
    found = chain(history({"role": "system", "content": "s"}, *TURN), SEED)

    assert found.cuts == (1, 3, 4)
    assert len(set(found.keys)) == 3


def test_a_pending_call_is_no_place_to_cut(history):
    assert chain(history(*TURN[:2]), SEED).cuts == (1,)


def test_a_result_that_answers_nothing_is_not_cut_off_from_what_stands_before_it(history):
    stray = {"role": "tool", "tool_call_id": "call_9", "content": "late"}

    assert chain(history({"role": "user", "content": "go"}, stray, {"role": "user", "content": "on"}), SEED).cuts == (2, 3)


def test_one_half_of_parallel_results_is_no_place_to_cut(history):
    second = {**CALL, "id": "call_2"}
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL, second]}
    results = [{"role": "tool", "tool_call_id": id_, "content": "ok"} for id_ in ("call_1", "call_2")]

    assert chain(history(TURN[0], calls, results[0]), SEED).cuts == (1,)
    assert chain(history(TURN[0], calls, *results), SEED).cuts == (1, 4)


def test_the_next_turn_has_all_keys_of_the_turn_before(history):
    now = keys(history(*TURN), SEED)
    later = keys(history(*TURN, {"role": "user", "content": "open a.py"}), SEED)

    assert later[:3] == now
    assert len(later) == 4


def test_the_preamble_is_no_part_of_the_keys(history):
    monday = history({"role": "system", "content": "Today is Monday."}, *TURN)
    tuesday = history({"role": "system", "content": "Today is Tuesday."}, {"role": "developer", "content": "Be brief."}, *TURN)

    assert keys(monday, SEED) == keys(tuesday, SEED)


def test_an_instruction_in_the_middle_is_part_of_the_keys(history):
    one = history(*TURN, {"role": "system", "content": "a"}, *TURN)
    other = history(*TURN, {"role": "system", "content": "b"}, *TURN)

    assert keys(one, SEED)[:3] == keys(other, SEED)[:3]
    assert not set(keys(one, SEED)[3:]) & set(keys(other, SEED)[3:])


def test_an_edit_changes_every_key_after_it(history):
    edited = [TURN[0], TURN[1], {**TURN[2], "content": "a.py"}, TURN[3]]

    assert keys(history(*TURN), SEED)[0] == keys(history(*edited), SEED)[0]
    assert not set(keys(history(*TURN), SEED)[1:]) & set(keys(history(*edited), SEED)[1:])


@pytest.mark.parametrize(
    "other",
    [
        namespace(b"secret", b"Bearer sk-two", "settings"),
        namespace(b"other secret", b"Bearer sk-one", "settings"),
        namespace(b"secret", b"Bearer sk-one", "other settings"),
        namespace(b"secret", b"Bearer sk-one", "settings", ""),
        namespace(b"secret", b"Bearer sk-onesettings"),
    ],
)
def test_callers_with_another_key_or_settings_share_nothing(history, other):
    assert not set(keys(history(*TURN), SEED)) & set(keys(history(*TURN), other))


def test_keys_are_the_same_in_every_process_and_with_every_hash_seed(history):
    program = (
        "import json, sys; from proxy.checkpoints.chain import *; from proxy.conversation import Conversation;"
        "from proxy.wire.chat_completions import read_message;"
        "c = Conversation(tuple(read_message(json.dumps(m).encode()) for m in json.loads(sys.argv[1])));"
        "print(keys(c, namespace(b'secret', b'Bearer sk-one', 'settings'))[-1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, json.dumps(TURN)],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert printed == {keys(history(*TURN), SEED)[-1].hex()}


def test_a_bounded_cache_gives_the_digests_of_no_cache(history):
    many = history(*({"role": "user", "content": f"message {i} " * 20} for i in range(200)))
    small = Digests(max_bytes=4096)

    assert keys(many, SEED, small) == keys(many, SEED)
    assert keys(many, SEED, small) == keys(many, SEED)


@given(st.lists(st.text(max_size=8), min_size=1, max_size=12), st.lists(st.text(max_size=8), min_size=1, max_size=12))
def test_two_histories_share_keys_exactly_as_far_as_they_say_the_same(one, other):
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    left = keys(Conversation(tuple(said("user", text) for text in one)), SEED)
    right = keys(Conversation(tuple(said("user", text) for text in other)), SEED)

    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={"content": st.none() | TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3), "x": VALUES},
)  # fmt: skip


def restless(value):
    """The same message as another client, or the same one a turn later, would write it."""
    noisy = {
        "id": "m1",
        "cache_control": {"type": "ephemeral"},
        "refusal": None,
        **dict(reversed(value.items())),
        "created_at": 7,
    }
    content = value.get("content")
    if isinstance(content, str):
        noisy["content"] = [{"cache_control": {"type": "ephemeral"}, "text": content, "type": "text"}]
    elif isinstance(content, list):
        noisy["content"] = [{**part, "cache_control": None} for part in content]
    return noisy


@given(MESSAGES)
def test_the_same_words_have_one_digest_however_they_are_written(value):
    assert digest(message(value)) == canonical_digest(json.dumps(restless(value), indent=2, ensure_ascii=False).encode())


@given(MESSAGES, MESSAGES)
def test_different_words_have_different_digests(one, other):
    def plain(value):
        kept = {key: item for key, item in value.items() if item is not None}
        content = kept.get("content")
        return {**kept, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else kept

    # 1 and True, or 1 and 1.0, are one to Python and two to JSON
    assert (digest(message(one)) == digest(message(other))) == (
        repr(sorted_deeply(plain(one))) == repr(sorted_deeply(plain(other)))
    )


def canonical_digest(raw):
    return digest(read_message(raw))


def sorted_deeply(value):
    if isinstance(value, dict):
        return {key: sorted_deeply(value[key]) for key in sorted(value)}
    return [sorted_deeply(item) for item in value] if isinstance(value, list) else value

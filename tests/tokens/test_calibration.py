from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation import said
from proxy.tokens import Calibration, Calibrator, Key, chain, cold
from proxy.tokens.calibration import fit

QWEN = Key("http://upstream", "qwen3:32b", tools=False)
GPT = Key("https://api.openai.com", "gpt-4o", tools=False)
CLAUDE = Key("https://openrouter.ai", "claude-sonnet-4-5", tools=True)


def taught(key: Key, *samples: tuple[int, int]) -> Calibrator:
    calibrator = Calibrator()
    for estimated, reported in samples:
        calibrator.observe(key, estimated, reported)
    return calibrator


@pytest.mark.parametrize(
    ("model", "slope", "margin"),
    [
        ("gpt-4o", 1.0, 0.02),
        ("o3-mini", 1.0, 0.02),
        ("gpt-35-turbo", 1.0, 0.02),
        ("claude-sonnet-4-5", 1.15, 0.1),
        ("us.anthropic.claude-3-haiku", 1.15, 0.1),
        ("qwen3", 1.1, 0.1),
        ("", 1.1, 0.1),
    ],
)
def test_before_the_first_answer_the_usual_is_assumed(model: str, slope: float, margin: float) -> None:
    assert cold(model) == Calibration(slope=slope, offset=0.0, margin=margin, samples=0)
    assert Calibrator().calibration(Key("u", model, tools=False)) == cold(model)


def test_a_line_is_learned_from_answers() -> None:
    learned = taught(QWEN, *((n, 2 * n // 1 * 6 // 10 + 300) for n in range(1_000, 9_000, 1_000))).calibration(QWEN)

    assert learned.slope == pytest.approx(1.2)
    assert learned.offset == pytest.approx(300)
    assert learned.samples == 8
    assert learned.tokens(10_000) == pytest.approx(12_300)


def test_a_model_that_is_counted_exactly_stays_so_in_spite_of_outliers() -> None:
    samples = [(n, n) for n in range(100, 2_000, 100)] + [(1_000, 1_400), (500, 700), (3_000, 3_300)]

    learned = taught(GPT, *samples).calibration(GPT)

    assert (learned.slope, learned.offset) == (1.0, 0.0)
    assert 0.01 <= learned.margin <= 0.2


def test_the_first_answers_move_the_offset_and_keep_the_margin() -> None:
    learned = taught(CLAUDE, (200, 730), (250, 788)).calibration(CLAUDE)

    assert learned == Calibration(slope=1.15, offset=pytest.approx(500.25), margin=0.1, samples=2)


def test_five_answers_replace_the_margin_by_what_was_seen() -> None:
    samples = [(n, round(1.2 * n)) for n in (1_000, 2_000, 3_000, 4_000, 5_000)]

    assert taught(QWEN, *samples).calibration(QWEN).margin == 0.03
    assert taught(QWEN, *samples[:4]).calibration(QWEN).margin == 0.1


def test_short_greetings_do_not_make_long_requests_look_cheap() -> None:
    # A tokenizer of their own frames "hi" with seven tokens less than we do.
    learned = taught(QWEN, *[(14, 7), (17, 10), (15, 8), (14, 7), (20, 13), (16, 9)]).calibration(QWEN)

    assert learned.tokens(100_000) >= 100_000


def test_long_answers_that_weigh_less_lower_the_slope() -> None:
    learned = taught(QWEN, *[(n, round(0.8 * n)) for n in range(2_000, 12_000, 1_000)]).calibration(QWEN)

    assert learned.slope == pytest.approx(0.8, abs=0.01)


def test_tools_media_models_and_upstreams_are_learned_apart() -> None:
    calibrator = taught(QWEN, *[(n, 2 * n) for n in range(1_000, 9_000, 1_000)])

    for other in (QWEN._replace(tools=True), QWEN._replace(media=True), QWEN._replace(model="x"), QWEN._replace(upstream="y")):
        assert calibrator.calibration(other) == cold("qwen3")


@pytest.mark.parametrize(
    ("estimated", "reported"), [(0, 5), (5, 0), (-1, 5), (5, -1), (100_000, 4_096), (1_000, 90_000)], ids=range(6)
)
def test_an_answer_that_cannot_be_to_this_request_is_refused(estimated: int, reported: int) -> None:
    calibrator = Calibrator()

    assert not calibrator.observe(QWEN, estimated, reported)
    assert calibrator.calibration(QWEN) == cold("qwen3")


def test_an_outlier_among_many_answers_is_refused() -> None:
    calibrator = taught(QWEN, *[(n, round(1.2 * n)) for n in range(10_000, 20_000, 1_000)])
    before = calibrator.calibration(QWEN)

    assert not calibrator.observe(QWEN, 50_000, 8_192)
    assert not calibrator.observe(QWEN, 10_000, 40_000)
    assert calibrator.calibration(QWEN) == before


def test_an_upstream_that_changed_for_good_is_believed_in_the_end() -> None:
    calibrator = taught(QWEN, *[(n, n) for n in range(10_000, 20_000, 1_000)])

    taken = [calibrator.observe(QWEN, n, round(1.9 * n)) for n in (20_000, 21_000, 22_000, 23_000, 24_000, 25_000)]

    assert taken == [False, False, False, False, True, True]
    assert calibrator.calibration(QWEN).tokens(30_000) == pytest.approx(57_000, rel=0.02)


def test_the_next_turn_of_a_known_conversation_starts_from_its_answer() -> None:
    first = [said("system", "Be brief."), said("user", "Tell me about the parser.")]
    more = [*first, said("assistant", "It splits lines."), said("user", "And then?")]
    calibrator = Calibrator()
    calibrator.observe(QWEN, 3_000, 3_800, prefixes=chain(first))

    line = calibrator.calibration(QWEN, chain(more))

    assert line.tokens(3_000) == pytest.approx(3_800)
    assert line.tokens(4_000) == pytest.approx(4_900)


def test_an_anchor_below_the_line_never_makes_a_shorter_request_free() -> None:
    line = Calibration(slope=1.1).through(100_000, 83_000)

    assert line.tokens(100_000) == pytest.approx(83_000)
    assert line.tokens(101_000) == pytest.approx(84_100)
    assert line.tokens(20_000) == pytest.approx(16_600)


def test_another_conversation_has_no_anchor() -> None:
    calibrator = Calibrator()
    messages = [said("user", "one")]
    calibrator.observe(QWEN, 3_000, 4_500, prefixes=chain(messages, around=3))

    other = calibrator.calibration(QWEN, chain([said("user", "two")], around=3))
    with_tools = calibrator.calibration(QWEN, chain(messages, around=400))

    assert other == with_tools == calibrator.calibration(QWEN)


def test_the_longest_known_prefix_is_the_anchor() -> None:
    messages = [said("user", "one"), said("assistant", "two"), said("user", "three")]
    calibrator = Calibrator()
    calibrator.observe(QWEN, 1_000, 1_300, prefixes=chain(messages[:1]))
    calibrator.observe(QWEN, 2_000, 2_300, prefixes=chain(messages[:2]))

    assert calibrator.calibration(QWEN, chain(messages)).tokens(2_000) == pytest.approx(2_300)


def test_marks_are_the_same_for_messages_that_say_the_same() -> None:
    one, two = [said("user", "a"), said("user", "b")], [said("user", "a"), said("user", "b")]

    assert chain(one) == chain(two)
    assert chain(one)[0] == chain(one[:1])[0]
    assert chain(one) != chain(list(reversed(one)))
    assert chain([]) == []


def test_what_is_held_is_bounded() -> None:
    calibrator = Calibrator(keys=10, anchors=20)

    for number in range(200):
        key = Key("u" * 5_000, f"model-{number}" + "x" * 5_000, tools=False)
        calibrator.observe(key, 1_000, 1_200, prefixes=chain([said("user", str(number))]))

    assert len(calibrator.learned()) == 10
    assert len(calibrator._anchors) == 20
    assert all(len(key.model) <= 200 and len(key.upstream) <= 200 for key in calibrator.learned())


def test_keys_in_use_outlive_those_that_are_not() -> None:
    calibrator = Calibrator(keys=3)

    for number in range(20):
        calibrator.observe(Key("u", f"m{number}", tools=False), 1_000, 1_200)
        calibrator.observe(QWEN, 1_000, 1_200)

    assert QWEN in calibrator.learned()


def test_a_key_whose_answers_teach_nothing_more_is_in_use_all_the_same() -> None:
    calibrator = Calibrator(keys=2)
    for ours in range(1_000, 41_000, 1_000):
        calibrator.observe(GPT, ours, ours)

    calibrator.observe(GPT._replace(model="second"), 1_000, 1_000)
    assert calibrator.says_all(GPT, 5_000, 5_000)
    calibrator.observe(GPT._replace(model="third"), 1_000, 1_000)

    assert GPT in calibrator.learned()
    assert GPT._replace(model="second") not in calibrator.learned()


def test_old_answers_make_room_for_new_ones() -> None:
    calibrator = taught(QWEN, *[(n, round(1.4 * n)) for n in range(1_000, 101_000, 1_000)])

    assert calibrator.calibration(QWEN).samples == 40


def test_people_can_see_what_was_learned() -> None:
    calibrator = taught(QWEN, (1_000, 1_200))
    calibrator.observe(GPT, 0, 0)

    assert list(calibrator.learned()) == [QWEN]


@given(
    st.lists(st.tuples(st.integers(-10, 10**7), st.integers(-10, 10**7)), max_size=60), st.sampled_from(["gpt-4o", "claude", "x"])
)
def test_whatever_is_reported_the_line_stays_sane(samples: list[tuple[int, int]], model: str) -> None:
    key = Key("u", model, tools=True)

    line = taught(key, *samples).calibration(key)

    assert 0.5 <= line.slope <= 2.0
    assert line.offset >= 0
    assert 0.01 <= line.margin <= 0.2
    assert line.tokens(1_000) <= line.tokens(2_000)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=40))
def test_a_fit_does_not_depend_on_the_order_of_answers(samples: list[tuple[int, int]]) -> None:
    one, two = fit(samples, cold("x")), fit(list(reversed(samples)), cold("x"))

    assert (one.slope, one.offset, one.margin) == pytest.approx((two.slope, two.offset, two.margin))


def test_an_upstream_that_reports_only_a_fraction_of_long_requests_never_bends_the_line() -> None:
    calibrator = Calibrator()
    key = Key("http://upstream/v1", "house-model", False)

    taken = [calibrator.observe(key, estimated, 11) for estimated in range(1_000, 21_000, 1_000)]

    assert not any(taken)
    assert calibrator.calibration(key) == cold("house-model")

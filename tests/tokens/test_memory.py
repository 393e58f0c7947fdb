from __future__ import annotations

import threading

from proxy.tokens.memory import Remembered


def test_what_was_put_is_found() -> None:
    known: Remembered[str] = Remembered(1000)

    known.put("a", 7, 10)

    assert known.get("a") == 7
    assert "a" in known
    assert known.get("b") is None


def test_a_count_of_nothing_is_remembered_as_well() -> None:
    known: Remembered[str] = Remembered(1000)

    known.put("", 0, 10)

    assert known.get("") == 0


def test_it_never_holds_more_than_its_limit() -> None:
    known: Remembered[int] = Remembered(1000)

    for number in range(500):
        known.put(number, number, 100)

    assert sum(number in known for number in range(500)) <= 10
    assert 499 in known


def test_what_is_asked_for_stays_and_the_rest_goes() -> None:
    known: Remembered[int] = Remembered(1000)
    known.put(-1, 42, 100)

    for number in range(100):
        known.put(number, number, 100)
        assert known.get(-1) == 42

    assert 0 not in known


def test_what_would_fill_half_of_it_is_not_kept() -> None:
    known: Remembered[str] = Remembered(1000)
    known.put("small", 1, 10)

    known.put("huge", 2, 600)

    assert "huge" not in known
    assert "small" in known


def test_many_threads_may_use_it_at_once() -> None:
    known: Remembered[int] = Remembered(20_000)
    wrong: list[int] = []

    def use(seed: int) -> None:
        for step in range(5_000):
            number = (seed * 31 + step * 17) % 997
            found = known.get(number)
            if found not in (None, number * 2):
                wrong.append(number)
            known.put(number, number * 2, 50)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert sum(number in known for number in range(997)) <= 400

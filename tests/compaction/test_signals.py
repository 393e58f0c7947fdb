"""What counts as an error, a request, a constraint, a conclusion: lines and sentences written for the tests."""

from __future__ import annotations

import pytest

from proxy.compaction import signals


@pytest.mark.parametrize(
    "line",
    [
        "ModuleNotFoundError: No module named 'loader_core'",
        "E       AssertionError: assert 3 == 4",
        "FAILED tests/test_loader.py::test_reads_rows - KeyError: 'name'",
        "=================== 2 failed, 31 passed in 4.12s ===================",
        "Tests:       1 failed, 12 passed, 13 total",
        "--- FAIL: TestParse (0.00s)",
        "FAIL\tgithub.com/acme/tool/parser\t0.004s",
        "thread 'main' panicked at src/main.rs:12:5:",
        "error[E0308]: mismatched types",
        "src/app.ts(23,35): error TS2345: Argument of type 'string' is not assignable.",
        "main.go:14:2: undefined: fmt.Printl",
        "npm ERR! code ELIFECYCLE",
        "npm error Lifecycle script `build` failed with error:",
        "make: *** [Makefile:192: build] Error 2",
        "CMake Error at CMakeLists.txt:27 (find_package):",
        "Exit code 127",
        "Command exited with code 2",
        "Process finished with exit code 1",
        "bash: jq: command not found",
        "(eval):4: command not found: python3.12",
        "cat: notes.txt: No such file or directory",
        "fatal: not a git repository (or any of the parent directories): .git",
        "CONFLICT (content): Merge conflict in app/loader.py",
        "Segmentation fault (core dumped)",
        "java.lang.NullPointerException: Cannot invoke \"String.length()\"",
        "psycopg2.OperationalError: connection to server failed",
        "HTTP/1.1 503 Service Unavailable",
        "Command timed out after 30 seconds",
        "Error: payment amount does not add up, total price is 4875, but paid 1625",
        "2026-03-01 10:00:00 ERROR worker crashed",
        "错误：找不到文件",
        "エラー：ファイルが見つかりません",
        "Fehler: Datei nicht gefunden",
        "Erreur : fichier introuvable",
        "✗ parses empty input",
    ],
)  # fmt: skip
def test_a_report_of_a_failure_is_an_error_line(line: str) -> None:
    assert signals.is_error_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "31 passed in 4.12s",
        "0 errors, 0 warnings",
        "Process finished with exit code 0",
        "    raise ValueError('bad row')",
        "except ValueError as error:",
        "        if err != nil {",
        "   148→\treturn fmt.Errorf(\"cannot open: %w\", err)",
        "  57\terrorType := classifyCheckError(err)",
        "317:\t\t\tlog.Error(\"failed to sync\", err)",
        "+    raise RuntimeError('failed')",
        "-  throw new Error('failed');",
        "class LoaderError(Exception):",
        "from app.errors import LoaderError",
        "// returns an error when the file is missing",
        "# Errors: what can go wrong",
        "const handleError = (error) => {",
        "The loader reads the file and reports what it found.",
        "drwxr-xr-x  2 dev dev 4096 errors",
    ],
)  # fmt: skip
def test_code_reads_diffs_and_prose_are_no_error_lines(line: str) -> None:
    assert not signals.is_error_line(line)


def test_error_lines_come_in_order_and_without_trailing_space() -> None:
    text = "collecting\nE   KeyError: 'name'   \nok\n1 failed, 2 passed in 0.1s\n"

    assert signals.error_lines(text) == ("E   KeyError: 'name'", "1 failed, 2 passed in 0.1s")


def test_text_that_changes_length_in_lower_case_still_gives_the_right_lines() -> None:
    assert signals.error_lines("İİİ\nfine\nValueError: İ is no digit") == ("ValueError: İ is no digit",)


@pytest.mark.parametrize(
    "sentence",
    [
        "Never touch the migrations.",
        "You must keep the public API as it is.",
        "Please don't add dependencies.",
        "From now on answer in French.",
        "I'd rather keep the old name.",
        "Use at most three retries.",
        "不要修改数据库迁移。",
        "必须保持接口不变。",
        "以后都用中文回答。",
        "尽量使用标准库。",
        "マイグレーションは変更しないでください。",
        "必ずテストを実行してください。",
        "今後は日本語で答えてください。",
        "Die Migrationen dürfen nicht geändert werden.",
        "Du musst immer die Tests laufen lassen.",
        "Ab jetzt bitte auf Deutsch antworten.",
        "Ne touche pas aux migrations.",
        "Il faut toujours lancer les tests.",
        "Désormais, réponds en français.",
        "No toques las migraciones.",
        "Siempre debes ejecutar las pruebas.",
        "A partir de ahora responde en español.",
    ],
)
def test_prohibition_obligation_preference_and_permanence_bind(sentence: str) -> None:
    assert signals.constraints(sentence) == [sentence]


@pytest.mark.parametrize("sentence", ["The file has 40 lines.", "Thanks, that works.", "今天天气很好。", "Das sieht gut aus."])
def test_plain_statements_bind_nobody(sentence: str) -> None:
    assert signals.constraints(sentence) == []


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("The build is red again. Please fix the loader. Thanks.", ["Please fix the loader."]),
        ("Why does the cache grow?", ["Why does the cache grow?"]),
        ("also add a test for empty rows", ["also add a test for empty rows"]),
        ("这个页面很慢。请帮我优化查询。", ["请帮我优化查询。"]),
        ("画面が遅いです。クエリを直してください。", ["クエリを直してください。"]),
        ("Die Seite ist langsam. Kannst du die Abfrage prüfen?", ["Kannst du die Abfrage prüfen?"]),
        ("La page est lente. Pouvez-vous corriger la requête ?", ["Pouvez-vous corriger la requête ?"]),
        ("La página va lenta. ¿Puedes revisar la consulta?", ["¿Puedes revisar la consulta?"]),
        ("something odd with the loader", ["something odd with the loader"]),
    ],
)
def test_requests_are_found_among_the_sentences(text: str, asked: list[str]) -> None:
    assert signals.requests(text) == asked


def test_fenced_code_is_not_a_request() -> None:
    assert signals.requests("Fix this:\n```\nadd(1, 2)\n```") == ["Fix this:"]


def test_the_conclusion_is_the_last_sentence_that_states_a_result() -> None:
    text = "I looked at the loader. The tests pass now because the import is fixed. Shall I go on?"

    assert signals.conclusion(text) == "The tests pass now because the import is fixed."
    assert signals.conclusion("") == ""


def test_the_next_step_is_what_the_assistant_says_it_will_do() -> None:
    assert signals.next_step("The import is fixed. Next I will run the whole suite.") == "Next I will run the whole suite."
    assert signals.next_step("It is fixed.") == ""

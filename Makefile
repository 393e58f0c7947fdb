# compaction-proxy. Each target builds .venv from the locked requirements when it is missing or older than they are.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
LOCKS := deploy/requirements
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --require-hashes
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install run test demo bench lint format lock windows dashboard picture clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(VENV)/.run: $(LOCKS)/run.txt
	@echo "building $(VENV) from $(LOCKS)/run.txt"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r $(LOCKS)/run.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.run $(LOCKS)/dev.txt pyproject.toml
	@echo "completing $(VENV) from $(LOCKS)/dev.txt"
	@$(PIP) -r $(LOCKS)/dev.txt
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.dev $(LOCKS)/demo.txt
	@echo "adding a real llama.cpp server from $(LOCKS)/demo.txt"
	@$(PIP) --no-deps -r $(LOCKS)/demo.txt
	@touch $@

install: $(VENV)/.dev  ## build .venv from the lock

run: $(VENV)/.run  ## start the proxy; ARGS="--upstream http://…" passes flags
	@exec $(BIN)/python -m proxy serve $(ARGS)

test: $(VENV)/.dev  ## run the tests; ARGS passes flags to pytest
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

demo: $(VENV)/.demo  ## a real llama.cpp server, a conversation that is too long for it, and the proxy between
	@$(BIN)/python tests/demo.py

bench: $(VENV)/.dev  ## speed beside the proxies that are installed, short form; ARGS passes flags
	@$(BIN)/python tests/benchmarks/short.py $(ARGS)

lint: $(VENV)/.dev  ## format check, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(VENV)/.dev  ## renew the locked requirements (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet --upgrade \
	  pyproject.toml --extra redis --extra encrypt -o $(LOCKS)/run.txt
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet --upgrade \
	  pyproject.toml --extra redis --extra encrypt --extra otel --group dev -c $(LOCKS)/run.txt -o $(LOCKS)/dev.txt
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet --upgrade \
	  --no-deps $(LOCKS)/demo.in -o $(LOCKS)/demo.txt

windows: $(VENV)/.dev  ## renew the table of context windows and prices from its public sources
	@$(BIN)/python deploy/snapshot_windows.py

dashboard: $(VENV)/.dev  ## write the dashboard's JSON from its code
	@$(BIN)/python grafana/overview.py

picture: $(VENV)/.dev  ## draw the dashboard over a replayed load, and an explanation (needs Prometheus, npm and Chromium)
	@$(BIN)/python grafana/picture.py $(ARGS)
	@$(BIN)/python grafana/explain_picture.py

clean:  ## remove what the targets made
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

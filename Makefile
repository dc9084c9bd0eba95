PYTHON ?= python3
PRESET ?= baseline
WORKLOAD ?=
ARGS ?=
PORT ?= 5000

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help venv run test test-slow lint ui clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1: /p' Makefile

# Written last, so that an install that failed or was interrupted is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3' >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

venv: $(STAMP)  ## build .venv with the tested versions, if they changed

run: $(STAMP)  ## measure one training: PRESET=checkpointing [WORKLOAD=...] [ARGS="-P micro_batch=2"]
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m mlflow run . --env-manager local \
	  -P 'preset=$(PRESET)' $(if $(WORKLOAD),-P 'workload=$(WORKLOAD)') $(ARGS)

test: $(STAMP)  ## run the tests that need no GPU
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(STAMP)  ## and those with browsers, servers and whole searches
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)  ## check style, format and types
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

# A server that serves artifacts and creates the store makes them unwritable for runs without a server.
ui: $(STAMP)  ## browse the runs
	@echo 'http://127.0.0.1:$(PORT)/#/experiments/0/runs?workflowType=machine_learning'
	$(BIN)/python -m mlflow ui --host 127.0.0.1 --port $(PORT) --backend-store-uri sqlite:///mlflow.db \
	  --no-serve-artifacts

clean:  ## remove the environment and the caches; recorded runs stay
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

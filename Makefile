# Each target first makes what it needs; what is there already is skipped in half a second.
# Presupposed: git, make, Python 3.11 or newer; root for the host's part (`belayer setup`).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

VLLM := .venv-vllm

.PHONY: setup demo fmt lint types test test-slow test-vllm test-integrations test-nightly bench check clean

setup: $(VENV)/.installed
	@$(BIN)/belayer setup

demo: setup
	@$(BIN)/belayer demo

fmt: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -z -- ':!LICENSE' | xargs -0 $(BIN)/codespell

types: $(VENV)/.installed
	$(BIN)/mypy

# The tests of the docker runtime need an Engine: `belayer setup --docker` starts one, as .ci/run does.
test: lint types setup
	$(BIN)/pytest -m "not slow and not vllm and not trainers" --durations=20

test-slow: setup
	$(BIN)/pytest -m "slow and not nightly and not vllm and not trainers" --durations=20

# vLLM has an environment of its own (about 2.5 GB).
test-vllm: $(VENV)/.installed
	@scripts/install-vllm $(VLLM) $(PYTHON)
	$(VLLM)/bin/python -m pytest -m "vllm and not trainers and not nightly" --durations=20

# The same environment, and OpenRLHF and TRL in it.
test-integrations: setup
	@scripts/install-trainers $(VLLM) $(PYTHON)
	$(VLLM)/bin/python -m pytest -m "trainers and not nightly" --durations=20

# Chaos with 300 faults, and the state machines at length.
test-nightly: setup
	$(BIN)/pytest -m nightly

bench: setup
	$(BIN)/belayer bench checkpoint
	$(BIN)/belayer bench density
	$(BIN)/belayer bench recovery

check: test test-slow

# What `belayer setup` made on the host stays: other checkouts use it too.
clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamp comes last: an interrupted install is done again.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@scripts/ensure-venv $(PYTHON)
	@echo "Installing the Python packages into $(VENV) ..."
	@test -x $(BIN)/python && $(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --editable '.[dev]'
	@touch $@

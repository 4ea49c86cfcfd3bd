# `make test` and `make demo` set up everything they need in .venv, once, and can be run again at any time.
#   make test     lint, types, tests
#   make demo     train a small GPT plainly and under three budgets, and compare
#   make lint     lint and types only
#   make clean    remove .venv and caches
# PYTHON picks the interpreter (3.11 or newer), TORCH the build, PYTEST_ARGS what pytest runs, JOBS how many at a time.

PYTHON ?= python3
# An exact version first and by itself: pip then takes the build that the configured index prefers (on a machine without
# a GPU a CPU build, where one is offered) and the second install leaves it alone.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# torch's Linux wheels for ARM embed mimalloc, which keeps freed pages unless told so before it is loaded; tests measure the
# resident set. Elsewhere these variables do nothing.
export MIMALLOC_PURGE_DELAY := 0
export MIMALLOC_EAGER_COMMIT := 0
export MIMALLOC_ARENA_EAGER_COMMIT := 0
# Several test processes share the cores: threads that spin while they wait take them from each other.
export OMP_WAIT_POLICY := passive

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/legroom demo

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --timeout 600 $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/mypy

# The stamp depends on pyproject.toml alone: the install is editable, so only new dependencies call for another one.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "legroom needs Python 3.11 or newer as '$(PYTHON)'; name another one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade > /dev/null 2>&1 || \
		{ rm -rf $(VENV); echo "'$(PYTHON) -m venv' makes environments without pip; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

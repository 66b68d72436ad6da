# Two commands do everything: `make lab` and `make test`. The others are parts of them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.labkit-installed

.PHONY: setup lab test check check-all clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "labkit needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Say which: make PYTHON=python3.12 …"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing labkit and its pinned dependencies into $(VENV) (a few minutes the first time) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,check]'
	@touch $@

lab: setup
	@$(BIN)/labkit lab $(ARGS)

# Ranks and browsers need both cores for themselves; what only computes shares them.
test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not engine and not browser" tests
	@$(BIN)/python -m pytest -m "not slow and (engine or browser)" tests
	@$(BIN)/python -m pytest --nbval-lax --nbval-cell-timeout=240 -p no:cacheprovider labs dashboards

check: setup
	@$(BIN)/ruff check labkit tests benchmarks
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tests/notebooks_are_clean.py

check-all: check test
	@$(BIN)/python -m pytest -m slow tests

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

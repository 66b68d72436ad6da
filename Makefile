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
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[test,check]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true # on all cores, where pip uses one
	@touch $@

lab: setup
	@$(BIN)/labkit lab $(ARGS)

test: setup
	@tests/in_parts.sh $(BIN)/python

check: setup
	@$(BIN)/ruff check labkit tests benchmarks
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tests/notebooks_are_clean.py

check-all: check test
	@$(BIN)/python -m pytest -m slow tests

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

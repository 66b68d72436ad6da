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

# Ranks and browsers need both cores for themselves, and mostly wait: what only computes and has no clock takes the rest.
IDLY := $(shell chrt -i 0 true 2>/dev/null && echo chrt -i 0 || echo nice -n 19)
COMPUTES := "not slow and not engine and not browser"
CLOCKLESS := tests/layout tests/model $(wildcard tests/engine/*parity*.py) \
  $(filter-out tests/plan/test_shell_manners.py,$(wildcard tests/plan/test_*.py))
test: setup
	@said=$$(mktemp); $(IDLY) $(BIN)/python -m pytest -p no:cacheprovider -m $(COMPUTES) $(CLOCKLESS) >$$said 2>&1 & \
	beside=$$!; trap 'kill $$beside 2>/dev/null; rm -f '$$said EXIT; failed=0; \
	$(BIN)/python -m pytest -m "not slow and (engine or browser)" tests || failed=1; \
	wait $$beside || failed=1; cat $$said; \
	$(BIN)/python -m pytest -n 2 --dist loadfile -m $(COMPUTES) $(CLOCKLESS:%=--ignore=%) tests || failed=1; \
	$(BIN)/python -m pytest --nbval-lax --nbval-cell-timeout=240 -p no:cacheprovider labs dashboards || failed=1; exit $$failed

check: setup
	@$(BIN)/ruff check labkit tests benchmarks
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tests/notebooks_are_clean.py

check-all: check test
	@$(BIN)/python -m pytest -m slow tests

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Every target builds .venv when it is missing; python3 (3.11 or newer) with venv and pip is all that is presumed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench soak clean

demo: $(VENV)/ready            ## train the demo: two to three minutes
	$(BIN)/python train.py

test: $(VENV)/ready            ## every test, a few minutes
	$(BIN)/python -m pytest

lint: $(VENV)/ready            ## format, style, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

soak: $(VENV)/ready            ## 30 kills at random over one run
	$(BIN)/python bench/soak.py

bench: $(VENV)/ready           ## one benchmark a claim
	for b in $(filter-out bench/soak.py,$(wildcard bench/*.py)); do $(BIN)/python $$b || exit 1; done

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: python3 is too old, 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@# torch first: where the index has a CPU build of the pinned version, nothing heavier is pulled in
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs .cache

# Every target builds .venv if it is missing. All that is needed is python3 (3.11 or newer) with venv and pip.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-runs test-sglang agents lint structure bench soak clean

demo: $(VENV)/ready            ## train the demo, in two to three minutes
	$(BIN)/python train.py

test: $(VENV)/ready            ## the tests of every concept, in minutes; the tests of a file share servers and run on one worker
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not runs" tests/test_train.py tests

test-runs: $(VENV)/ready       ## tests of whole runs: several ranks, restarts after kills, recipes, slurm
	$(BIN)/python -m pytest -n 2 --dist loadfile -m runs

test-sglang: $(VENV)/ready .venv-sglang/ready   ## the wire contract, the parsers and a training run with the real SGLang, on a CPU
	NANO_AREAL_SGLANG=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest -vv tests/inference/test_contract.py tests/calls/test_tools.py tests/run/test_sglang_run.py

lint: $(VENV)/ready            ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

structure: $(VENV)/ready       ## draw docs/structure.svg, the picture of what imports what
	$(BIN)/python docs/structure.py

soak: $(VENV)/ready            ## kill a run 30 times at random, and check what it has trained on
	$(BIN)/python bench/soak.py

bench: $(VENV)/ready           ## run the benchmarks, one for each claim
	for b in $(filter-out bench/soak.py bench/gpu_check.py,$(wildcard bench/*.py)); do $(BIN)/python $$b || exit 1; done

agents: .venv-agents/ready     ## test the examples, in a venv of their own with the agent frameworks
	AGENTS=1 .venv-agents/bin/python -m pytest tests/test_examples.py

.venv-agents/ready: examples/requirements.txt
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: python3 is too old, 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@# torch goes first: if the index has a CPU build of the pinned version, pip takes it and no larger build
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv-sglang/ready: tests/sglang_cpu/install.sh tests/sglang_cpu/requirements.txt
	tests/sglang_cpu/install.sh .venv-sglang $(PYTHON)
	@touch $@

clean:
	rm -rf $(VENV) .venv-agents .venv-sglang runs .cache

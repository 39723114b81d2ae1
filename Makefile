# Every target sets up what it needs. `make` alone prints this list.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# An active virtualenv is used as it is; otherwise one is made in .venv.
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
PYTHON ?= python3
# Extra pip arguments that find torch, e.g. TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
TORCH_INDEX ?=
TORCH ?= torch==2.13.0
# Pytest arguments, e.g. make test ARGS="tests/unit/rpc -k drain"
ARGS ?=
# Benchmark to run, e.g. make bench NAME=cpu_decode ARGS="--json out.json"
NAME ?= cpu_decode
# Platform of the container image: cpu, cuda or rocm.
TARGET ?= cpu
# What resolves the locks of the image.
UV ?= uv==0.13.9

BIN := $(VENV)/bin
# Per checkout: a virtualenv shared by two checkouts serves the one that was set up last.
CHECKOUT := $(shell printf %s '$(CURDIR)' | cksum | cut -d' ' -f1)
# What running needs, and that with what tests and checks need.
RUN_READY := $(VENV)/.kvbraid-run-ready-$(CHECKOUT)
READY := $(VENV)/.kvbraid-ready-$(CHECKOUT)
# One thread a process: the suite starts many, and more threads than cores only slow each other.
export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## Print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## Install the project and its tools (a .venv is made if no virtualenv is active)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_READY): pyproject.toml | $(BIN)/python
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "KVBraid needs Python 3.11 or newer; name one with PYTHON=python3.x" >&2; exit 1; }
	$(BIN)/python -m pip install --progress-bar on $(TORCH_INDEX) "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(READY): $(RUN_READY)
	$(BIN)/python -m pip install --quiet -e ".[dev,docs,deploy,observability]"
	$(BIN)/python -m tools.fetch_helm $(BIN)
	$(BIN)/python -m tools.fetch_prometheus $(BIN)
	touch $@

.PHONY: demo
demo: $(RUN_READY) ## Start all services on this machine, stream an answer from a real model, stop
	$(BIN)/kvbraid demo

.PHONY: test
test: $(READY) ## Run the tests (CPU, no network beyond the package index)
	$(BIN)/python -m pytest -m "not gpu and not slow" $(ARGS)

.PHONY: check
check: format lint types imports protos test ## Everything that must hold before a merge

.PHONY: format
format: $(READY) ## Fail when a file is not formatted
	$(BIN)/ruff format --check .

.PHONY: fmt
fmt: $(READY) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(READY) ## Lint
	$(BIN)/ruff check .

.PHONY: types
types: $(READY) ## Type check, strict
	$(BIN)/mypy

.PHONY: imports
imports: $(READY) ## Check who imports whom
	$(BIN)/lint-imports --no-cache

.PHONY: protos
protos: $(READY) ## Fail when the generated stubs are not what protos/ says
	$(BIN)/python -m pytest -q tests/contract/test_generated_code.py tests/contract/test_proto_rules.py

.PHONY: gen-protos
gen-protos: $(READY) ## Generate kvbraid/v1 from protos/
	$(BIN)/python tools/gen_protos.py

.PHONY: gen-docs
gen-docs: $(READY) ## Generate the reference pages of docs/
	$(BIN)/python -m tools.gen_docs

.PHONY: docs
docs: $(READY) ## Build the documentation site in build/site
	$(BIN)/python -m mkdocs build --strict

.PHONY: image
image: ## Build the container image: make image TARGET=cpu|cuda|rocm
	docker build -f deploy/docker/Dockerfile --target $(TARGET) -t kvbraid:$(TARGET) .

.PHONY: test-image
test-image: $(READY) ## Run the steps of the cpu image in a directory and serve from there
	$(BIN)/python -m pytest tests/integration/image $(ARGS)

.PHONY: lock-image
lock-image: $(READY) ## Lock the packages of the image anew
	$(BIN)/python -m pip install --quiet "$(UV)"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tools.lock_image

.PHONY: matrix
matrix: $(READY) ## Greedy equality in every layout, engine seam and services (over an hour)
	$(BIN)/kvbraid model pull smollm2-135m-instruct
	model=$$($(BIN)/kvbraid model path smollm2-135m-instruct) && \
	$(BIN)/python -m tools.equality_matrix --model "$$model" --model tests/assets/tiny-mla \
	  --json benchmarks/results/equality_matrix.json && \
	$(BIN)/python -m tools.services_matrix --model "$$model" --model tests/assets/tiny-mla \
	  --json benchmarks/results/services_matrix.json

.PHONY: test-alerts
test-alerts: $(READY) ## Dashboards and alerts against a live Prometheus, on a quiet machine (ten minutes)
	$(BIN)/python -m pytest tests/integration/observability $(ARGS)

.PHONY: soak
soak: $(READY) ## Watch a healthy, mildly busy cluster for 15 minutes: nothing grows, nothing fires
	$(BIN)/python -m tools.soak --json benchmarks/results/soak.json $(ARGS)

.PHONY: test-gpu
test-gpu: $(READY) ## Tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

.PHONY: bench
bench: $(READY) ## Run one benchmark: make bench NAME=cpu_decode ARGS="--json out.json"
	$(BIN)/kvbraid bench $(NAME) $(ARGS)

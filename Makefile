# The two commands of the README are `make lora` and `make test`. Both set up everything they need in .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell for python in python3.11 python3; do "$$python" -c "" 2>/dev/null && { echo "$$python"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONFIG ?= examples/lora_smollm2.yaml
RANKS ?= 3
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help lora test lint format clean docker-test-gpu docker-test-cpu

help:
	@echo "make lora    set up, fetch the demo model, train it with LoRA on $(RANKS) tensor-parallel ranks"
	@echo "             (ARGS=\"max_steps=20 dtype=fp32\" overrides keys of $(CONFIG))"
	@echo "make test    set up, run all tests (ARGS=\"tests/unit -k fold\" narrows them)"
	@echo "make docker-test-gpu, make docker-test-cpu    build the image and run tests/functional in it, on all GPUs of the"
	@echo "             machine with NCCL, or on CPUs"
	@echo "make lint    ruff, its format check and pyright"
	@echo "make format  let ruff format and fix what it can"
	@echo "make clean   remove $(VENV), caches and build leftovers (runs/ and the model cache stay)"

lora: $(READY)
	@$(BIN)/megatron-frozen fetch-demo-model
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m megatron_frozen train $(CONFIG) $(ARGS)

test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

docker-test-gpu:
	docker build --build-arg ON=gpu --build-arg EXTRA=test --tag megatron-frozen:gpu-test .
	docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 megatron-frozen:gpu-test \
		torchrun --standalone --nproc-per-node gpu -m pytest tests/functional $(ARGS)

docker-test-cpu:
	docker build --build-arg ON=cpu --build-arg EXTRA=test --build-arg PIP_EXTRA_INDEX_URL --tag megatron-frozen:cpu-test .
	docker run --rm --ipc=host --env OMP_NUM_THREADS=1 megatron-frozen:cpu-test \
		python -m pytest tests/functional $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements-dev.txt setup.py pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "make: no Python found$(if $(PYTHON), at $(PYTHON)); install Python 3.11 or newer or give its path: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "make: $(PYTHON) is $$("$(PYTHON)" --version 2>&1), and the pinned development environment needs Python 3.11 or newer; give one with make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$("$(PYTHON)" --version); the first time takes a few minutes."
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

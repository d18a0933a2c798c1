# The trainer's environment is .venv, SGLang's own is .venv/sglang-cpu. What is set up
# leaves a stamp, so that the next call returns at once; what was interrupted is redone.
#
# PYTHON                      the interpreter to start from
# SEED, OUTPUT                the demo's seed and the folder that it writes to
# PYTEST_ARGS                 what `make test` and `make test-all` pass on to pytest
# TORCHRL_SGLANG_TORCH_INDEX  a wheel index for torch alone, where pip's has no build
#                             that fits; empty by default

# What is compiled at its first import stays so, for the many processes of demo and tests.
export PYTHONDONTWRITEBYTECODE =

PYTHON ?= python3.11
SEED ?= 0
OUTPUT ?= runs/grpo_tiny
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
TRAINER := $(VENV)/.trainer-complete
ENGINE := $(VENV)/.engine-complete
CPU := torchrl_sglang/backends/cpu

# A second generation of SGLang, from before update sessions, for the tests.
ENGINE_VERSIONS := 0.5.20

# Errors only: the pins are the answer to every warning that pip could give. Nothing is
# compiled ahead of its first import, which few of torch's modules ever see.
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
PIP_INSTALL := $(PIP) install --no-compile

TORCH := $(shell sed -n '/^torch==/p' requirements/trainer.txt)
ifdef TORCHRL_SGLANG_TORCH_INDEX
# That index may hold torch alone; what torch needs is among the pins.
TORCH_SOURCE := --no-deps --index-url "$(TORCHRL_SGLANG_TORCH_INDEX)"
else
# A build for an accelerator brings packages that are not among the pins.
TORCH_SOURCE := --constraint requirements/trainer.txt
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

.PHONY: help
help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install:  ## Set everything up: .venv for the trainer, .venv/sglang-cpu for SGLang
	@$(MAKE) --silent --no-print-directory --jobs=2 --output-sync=line \
		$(TRAINER) $(ENGINE)

.PHONY: demo
demo: install  ## Train a tiny model with GRPO against a real SGLang server
	@$(BIN)/python examples/grpo_tiny/train.py --seed "$(SEED)" --output "$(OUTPUT)"

.PHONY: test
test: install  ## Run the CPU test suite, with real SGLang servers
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: install
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

.PHONY: test-all
test-all: install  ## Run the further cases of its long matrices, too
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: lint
lint: $(TRAINER)  ## Check style, formatting, types and spelling
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

.PHONY: fix
fix: $(TRAINER)  ## Repair what of that can be repaired
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: docs
docs: install  ## Build the documentation, warnings as errors, into docs/build/html
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet \
		docs/source docs/build/html

.PHONY: bench
bench: install  ## Run the benchmarks for CPU, each of which prints a ratio
	@$(BIN)/python benchmarks/rollout_throughput.py
	@$(BIN)/python benchmarks/wrapper_overhead.py
	@$(BIN)/python benchmarks/weight_sync.py

.PHONY: clean
clean:  ## Remove the environments and everything that was built
	@rm -rf $(VENV) build dist runs docs/build docs/source/tutorials \
		docs/source/reference/generated \
		.benchmarks .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Keeps SGLang's environment, which looks after itself.
$(CREATED):
	@echo "Setting up $(VENV), which takes some minutes ..."
	@mkdir -p $(VENV)
	@find $(VENV) -mindepth 1 -maxdepth 1 ! -name '*sglang-cpu*' \
		! -name $(notdir $(ENGINE)) -exec rm -rf {} +
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# An interrupted pip can leave half a package that counts as installed: until this has
# ended well, the environment does not count as created.
$(TRAINER): requirements/trainer.txt requirements/dev.txt pyproject.toml | $(CREATED)
	@rm -f $(CREATED) $@
	@$(PIP_INSTALL) $(TORCH_SOURCE) $(TORCH)
	@$(PIP_INSTALL) --no-deps -r requirements/trainer.txt -r requirements/dev.txt
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $(CREATED) $@

# Needs nothing of the trainer's packages, so both can be installed at the same time.
$(ENGINE): $(CPU)/requirements.txt $(CPU)/install.py $(CPU)/__init__.py | $(CREATED)
	@rm -f $@
	@$(BIN)/python -m torchrl_sglang.backends.cpu.install --version $(ENGINE_VERSIONS)
	@touch $@

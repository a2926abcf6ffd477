# make demo   a real model answers (the first time: installs, and fetches 98 MB)
# make test   the whole test suite
# make lint   formatting, lint, types
# make gpu-test, gpu-bench   the tests that need a GPU, every row of `nanovllm bench`; see below
#
# All of it happens in .venv; what is installed there is not looked at again until pyproject.toml or
# constraints.txt change, so a second run starts at once and needs no network. PYTHON names another Python.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint clean gpu-test gpu-bench gpu-python

demo: $(VENV)/.installed
	$(BIN)/nanovllm generate --temperature 0 --max-tokens 48 \
	    "The capital of France is" "def fibonacci(n):" "Once upon a time, there was a little girl named"
	$(BIN)/nanovllm generate --temperature 0 --max-tokens 96 --chat "What is gravity?"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# On a machine with a GPU, with the Python there that has a torch with CUDA (and, for the tests, pytest and what
# tests/conftest.py imports): nothing is installed, nothing but what is measured is left behind.
GPU_PYTHON ?= python3
GPU_RUN = PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON)

gpu-test: gpu-python
	$(GPU_RUN) -m pytest -q -p no:cacheprovider -m gpu
	$(GPU_RUN) -m pytest -q -p no:cacheprovider -m "not gpu" tests/ops

# BENCH_ARGS="--rows main" times one row; the gate is always first, and the last line is JSON.
gpu-bench: gpu-python
	$(GPU_RUN) -m nanovllm bench $(BENCH_ARGS)

gpu-python:
	@$(GPU_PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || { \
	    echo "$(GPU_PYTHON) has no torch that sees a CUDA device; name one that does: make ... GPU_PYTHON=/path/to/python" >&2; \
	    exit 1; }

# The stamps are written last: an installation that was interrupted is simply done again.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $(VENV)/.installed $@

# make demo   a real model answers (the first time: installs, and fetches 98 MB)
# make test   the whole test suite
# make lint   formatting, lint, types
#
# All of it happens in .venv; what is installed there is not looked at again until pyproject.toml or
# constraints.txt change, so a second run starts at once and needs no network. PYTHON names another Python.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint clean

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

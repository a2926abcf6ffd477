# make demo   a real model answers (the first time: installs, and fetches 98 MB)
# make test   the whole test suite, a process for each core but at most four (TEST_JOBS); each computes on one thread
# make lint   formatting, lint, types
# make browser     installs Chromium where it can, for the tests of the trace's page; they are skipped without it
# make page        builds that page from web/ (needs npm); page-check holds the committed one to be what web/ builds
# make gpu-test, gpu-bench   the tests that need a GPU, every row of `nanovllm bench`; see below
#
# All of it happens in .venv; what is installed there is not looked at again until pyproject.toml or
# constraints.txt change, so a second run starts at once and needs no network. PYTHON names another Python.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint clean browser page page-check page-checked gpu-test gpu-bench gpu-python

demo: $(VENV)/.installed
	$(BIN)/nanovllm generate --temperature 0 --max-tokens 48 \
	    "The capital of France is" "def fibonacci(n):" "Once upon a time, there was a little girl named"
	$(BIN)/nanovllm generate --temperature 0 --max-tokens 96 --chat "What is gravity?"

# worksteal: each process begins with a part of the list, so a file's tests, which share models, stay together.
TEST_JOBS ?= logical --maxprocesses 4
test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) web/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Only as root, and only where apt-get has it: on any other machine this says so and does nothing.
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then \
	    echo "browser: it is here"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	        >/dev/null 2>&1 || echo "browser: apt-get could not install chromium; tests of the page will be skipped" >&2; \
	else \
	    echo "browser: install Chromium to run the tests of the page; they will be skipped" >&2; \
	fi

page: web/node_modules/.installed
	cd web && npm run --silent build

page-check:
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory page-checked; \
	else echo "page-check: npm is not here, so the page was not built again" >&2; fi

page-checked: web/node_modules/.installed
	cd web && npm run --silent check

web/node_modules/.installed: web/package.json web/package-lock.json
	cd web && npm ci --silent --no-audit --no-fund --ignore-scripts
	touch $@

# On a machine with a GPU, with the Python there that has a torch with CUDA, what nanovllm imports and, for the tests,
# pytest: nothing is installed, nothing but what is measured is left behind. pytest-timeout, beartype and hypothesis are
# not needed. Tests mostly wait for kernels to be compiled, so each file is a process, GPU_JOBS at a time (give each
# about 20 GB of the GPU); those marked "alone" want all of its memory and come last. If any fails, make fails.
GPU_PYTHON ?= python3
GPU_JOBS ?= 6
GPU_RUN = PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON)
GPU_PYTEST = $(GPU_RUN) -m pytest -q -rfEs -p no:cacheprovider -o addopts="--strict-markers --import-mode=importlib" \
    -W ignore::pytest.PytestConfigWarning
GPU_FILES = grep -rl --include="test_*.py" "mark\.gpu" tests | grep -v "^tests/ops/" | sort
# The output of a process in one piece; status 5 says that none of a file's tests was asked for.
GPU_EACH = xargs -P $(GPU_JOBS) -I FILE sh -c 'out=$$($(GPU_PYTEST) $(1) FILE 2>&1); status=$$?; \
    echo "== FILE"; echo "$$out"; test $$status = 0 -o $$status = 5'

gpu-test: gpu-python
	@$(GPU_RUN) -c 'import pytest' || { echo "$(GPU_PYTHON) has no pytest: $(GPU_PYTHON) -m pip install pytest" >&2; exit 1; }
	@failed=0; \
	ls tests/ops/test_*.py | $(call GPU_EACH,) || failed=1; \
	$(GPU_FILES) | $(call GPU_EACH,-m "gpu and not alone") || failed=1; \
	echo "== alone"; $(GPU_PYTEST) -m "gpu and alone" \
	    $$(grep -rl --include="test_*.py" "mark\.alone" tests) || failed=1; \
	if [ $$failed = 1 ]; then echo "gpu-test: some failed" >&2; fi; exit $$failed

# BENCH_ARGS="--rows main" times one row; the gate is always first, and the last line is JSON.
gpu-bench: gpu-python
	$(GPU_RUN) -m nanovllm bench $(BENCH_ARGS)

gpu-python:
	@$(GPU_PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || { \
	    echo "$(GPU_PYTHON) has no torch that sees a CUDA device; name one that does: make ... GPU_PYTHON=/path/to/python" >&2; \
	    exit 1; }
	@$(GPU_RUN) -c 'import nanovllm.llm' || { \
	    echo "$(GPU_PYTHON) lacks what nanovllm imports; pyproject.toml lists it under dependencies" >&2; exit 1; }

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

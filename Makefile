# Every target does its own set-up: the environment is made on first use and remade when its inputs change. Of the
# 22,000 modules that are installed few are ever loaded, so each is compiled when it is.

PYTHON ?= python3
# Tests start hundreds of processes, which should not compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
DOCS_STAMP := $(VENV)/.complete-docs
FRAMEWORKS_STAMP := $(VENV)/.complete-frameworks
APART_STAMPS := $(patsubst %,$(VENV)/apart/%/.complete,ray-default spark tensorflow)
# More tests at a time than cores: much of a test of processes is waiting for them to start.
PARALLEL := -n 3 --dist worksteal

.PHONY: demo test test-slow test-products test-gpu lint docs results clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/paceline demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu"

# What `make test` leaves out, and properties with many more examples.
test-slow: $(FRAMEWORKS_STAMP) $(APART_STAMPS)
	$(BIN)/python -m pytest $(PARALLEL) -m "(slow or hypothesis) and not (gpu or product)" --hypothesis-profile thorough --durations 30 --durations-min 20

# The cases that others stand for (tests/covering.py), for whoever changes what is taken to be independent.
test-products: $(FRAMEWORKS_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "product and not gpu"

# On a machine with a GPU and a torch that sees it, which the constraints file's does not.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2 --strict paceline benchmarks
	$(BIN)/lint-imports

# A warning fails it. The site is docs/_build/index.html.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build

# Measures what the documentation shows; ONLY="NAME..." measures these. The machine must have nothing else to do.
results: $(STAMP)
	$(BIN)/python benchmarks/results.py $(ONLY)

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp lies in the environment and is written last: an installation that broke off leaves none.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Paceline needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
			"Name a newer one: make PYTHON=python3.11" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The stamps below are called after their extras: docs and frameworks.
$(DOCS_STAMP) $(FRAMEWORKS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$(@:$(STAMP)-%=%)]'
	touch $@

# Where an index lacks one of these, the tests that need it are skipped.
$(VENV)/apart/%/.complete: tests/environments/%.txt $(STAMP)
	$(BIN)/python tests/apart.py $*

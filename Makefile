PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run docs test test-all bench lint clean

run: $(VENV)/.run  ## reproduce the paper: report/index.html
	$(BIN)/vsgd figures --out report

docs: run  ## what README and docs show of it
	cp report/figure-6.png docs/figures/comparison.png
	cp report/figure-drift.png docs/figures/drift.png
	cp report/numbers.md docs/results.md

test: lint  ## everything but the slow tests
	$(BIN)/pytest -q -m "not slow"

test-all: lint
	$(BIN)/pytest -q

bench: $(VENV)/.test  ## ratios, measured side by side
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) report

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED := 1
DEVICE_TESTS := -m "not slow"
RUNS := benchmarks/results
COMPARE = $(BIN)/vsgd compare $(STORED) --out $(RUNS)
LARGE_SEEDS := 3
SCIENCE_SEEDS := 3
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run docs docs-site results results-train pages test test-all test-device test-flaky coverage fuzz bench
.PHONY: lint dist pythons clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

run: $(VENV)/.run  ## reproduce the figures of the paper: report/index.html
	$(BIN)/vsgd figures --out report

docs: run  ## copy the figures and numbers of the paper to docs
	cp report/figure-drift.png docs/figures/drift.png
	cp report/numbers.md docs/results.md

results: $(VENV)/.test  ## write the tables of the comparison from the stored runs, without training
	$(MAKE) --no-print-directory pages STORED=--stored GIVEN=1

results-train: $(VENV)/.test  ## train missing and outdated runs (hours; can be interrupted), then write the tables
	$(MAKE) --no-print-directory pages STORED=

# Settings are taken from rates.json if GIVEN is set. Without it, they are searched.
pages: rates = $(if $(GIVEN),--rates $(RUNS)/$(1)/rates.json)
pages:
	$(COMPARE) $(call rates,small)
	$(COMPARE) --suite large --seeds $(LARGE_SEEDS) $(call rates,large)
	$(COMPARE) --suite unseen $(call rates,unseen)
	$(COMPARE) --suite science --seeds $(SCIENCE_SEEDS)
	$(COMPARE) --ablations --seeds 2
	$(COMPARE) --sensitivity --seeds 2
	$(COMPARE) --stress --seeds 1
	cp $(RUNS)/small/results.md docs/results-networks.md
	for suite in large unseen science ablations sensitivity stress; do cp $(RUNS)/$$suite/results.md docs/results-$$suite.md; done
	cp $(RUNS)/large/profiles.png docs/figures/profiles.png
	cp $(RUNS)/sensitivity/sensitivity.png docs/figures/sensitivity.png
	$(BIN)/python scripts/readme_tables.py

docs-site: $(VENV)/.test run  ## build the documentation: site/index.html
	$(BIN)/sphinx-build -W --keep-going -q docs site
	cp report/index.html site/report.html

test: lint  ## run all tests except the slow ones, with fixed random cases
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" --hypothesis-profile ci
	$(MAKE) --no-print-directory test-device

test-all: lint  ## run all tests, with new random cases
	$(BIN)/pytest -q
	$(MAKE) --no-print-directory test-device DEVICE_TESTS=

test-device: $(VENV)/.test  ## tests on a simulated accelerator, in processes of their own
	$(BIN)/pytest -q -n 2 --dist loadfile $(DEVICE_TESTS) tests/device

test-flaky: $(VENV)/.test  ## run the timing-sensitive tests twenty times with all cores busy
	scripts/test_flaky.sh 20 $(BIN)/pytest

coverage: $(VENV)/.test  ## run the tests of `make test` with line and branch coverage
	$(PIP) --editable '.[coverage]'
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" --hypothesis-profile ci --cov --cov-report term:skip-covered

fuzz: $(VENV)/.test  ## test damaged files, signals and kills at random times; SEED=7 for other cases
	VSGD_FUZZ=$(SEED) $(BIN)/pytest -q -rP tests/fuzz tests/pytorch/test_interrupts.py::test_real_signals_at_any_time

bench: $(VENV)/.test  ## run all benchmarks
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

lint: $(VENV)/.test  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(VENV)/.test  ## build wheel and sdist, and try the wheel in a clean environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	PYTHON=$(PYTHON) scripts/try_wheel.sh

pythons:  ## run the tests on every supported Python that is installed
	scripts/pythons.sh

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.run

clean:  ## remove the environment and all generated pages
	rm -rf $(VENV) .cache report site

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED := 1
DEVICE_TESTS := -m "not slow"
RUNS := benchmarks/results
TUNED := adamw-cosine,soap-cosine,muon-cosine,sgd
UNTUNED := prodigy,prodigy-cosine,schedulefree-adamw,schedulefree-adamw-warmup,schedulefree-sgd,dadapt-adam,dadapt-sgd,dog,cocob
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run docs docs-site results results-train pages test test-all test-device test-flaky fuzz bench lint dist pythons clean

run: $(VENV)/.run  ## reproduce the paper: report/index.html
	$(BIN)/vsgd figures --out report

docs: run  ## what README and docs show of it
	cp report/figure-drift.png docs/figures/drift.png
	cp report/numbers.md docs/results.md

results: $(VENV)/.test  ## the tables of the comparison in docs, from the runs in benchmarks/results; trains nothing
	$(MAKE) --no-print-directory pages STORED=--stored

results-train: $(VENV)/.test  ## train the runs that are missing or of another version of the source, then write the tables
	$(MAKE) --no-print-directory pages STORED=

pages:
	$(BIN)/vsgd compare $(STORED) --optimizers vsgd,$(TUNED),$(UNTUNED) --out $(RUNS) --rates $(RUNS)/small/rates.json
	$(BIN)/vsgd compare $(STORED) --suite large --out $(RUNS) --rates $(RUNS)/large/rates.json
	$(BIN)/vsgd compare $(STORED) --suite unseen --out $(RUNS) --rates $(RUNS)/unseen/rates.json
	$(BIN)/vsgd compare $(STORED) --ablations --seeds 2 --out $(RUNS)
	$(BIN)/vsgd compare $(STORED) --stress --seeds 1 --out $(RUNS)
	cp $(RUNS)/small/results.md docs/results-networks.md
	for suite in large unseen ablations stress; do cp $(RUNS)/$$suite/results.md docs/results-$$suite.md; done
	cp $(RUNS)/large/profiles.png docs/figures/profiles.png
	$(BIN)/python scripts/readme_tables.py

docs-site: $(VENV)/.test run  ## the site with guides, API reference and tutorials: site/index.html
	$(BIN)/sphinx-build -W --keep-going -q docs site
	cp report/index.html site/report.html

test: lint  ## everything but the slow tests, with the same random cases each time
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" --hypothesis-profile ci
	$(MAKE) --no-print-directory test-device

test-all: lint  ## the slow tests too, with new random cases
	$(BIN)/pytest -q
	$(MAKE) --no-print-directory test-device DEVICE_TESTS=

test-device: $(VENV)/.test  ## tests on a simulated accelerator, in processes of their own
	$(BIN)/pytest -q -n 2 --dist loadfile $(DEVICE_TESTS) tests/device

test-flaky: $(VENV)/.test  ## twenty rounds of the timing-sensitive tests with all cores busy
	scripts/test_flaky.sh 20 $(BIN)/pytest

fuzz: $(VENV)/.test  ## damaged files without end and kills at random; SEED=7 for others
	VSGD_FUZZ=$(SEED) $(BIN)/pytest -q -rP tests/fuzz

bench: $(VENV)/.test  ## ratios, measured side by side
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(VENV)/.test  ## wheel and sdist, tried in a clean environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	PYTHON=$(PYTHON) scripts/try_wheel.sh

pythons:  ## the tests on every supported Python that is installed
	scripts/pythons.sh

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) .cache report site

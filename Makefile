# Everything starts from python3, make and git alone: each target first creates the environment that it needs.

PYTHON ?= python3
ARGS ?=
# Compiled modules are kept, even where the environment forbids it: else each process that starts compiles the package once more.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
OLDEST_BIN := .venv-oldest/bin
MOSAIC_BIN := .venv-mosaic/bin
PEERS_BIN := .venv-peers/bin
OUTSIDE_BIN := .venv-outside/bin
# One stamp per environment, newer than what its packages were chosen from: a second call installs nothing.
INSTALLED := .venv/.installed
RAY_INSTALLED := .venv/.installed-ray
OLDEST_INSTALLED := .venv-oldest/.installed
MOSAIC_INSTALLED := .venv-mosaic/.installed
PEERS_INSTALLED := .venv-peers/.installed
OUTSIDE_INSTALLED := .venv-outside/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-rest test-other lightning-tests test-all test-ray gpu lint docs links dist bench soak evidence wallclock peers test-oldest test-mosaic test-outside clean

help: ## show this list
	@echo 'make TARGET [ARGS="..."]   (ARGS go to the program that the target runs)'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## create .venv with everything that the other targets use

demo: $(INSTALLED) ## train on digits plain, with a factor, on demand and with a cache; print a table, save a plot
	$(BIN)/python examples/digits.py $(ARGS)

# Side by side, one process more than cores, since many tests wait: a thread each, single tests handed from one process to the
# other when it has none left.
PROCESSES ?= $(shell expr $$(nproc) + 1)
SIDE_BY_SIDE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses $(PROCESSES) --dist worksteal
# Left to test-rest: of each grid of parameters all but a few (CI runs each pair of values), what takes seconds, programs started as
# users start them, tests of times.
LEAN := not rest_of_grid and not slow and not program and not alone and not ray
REST := (rest_of_grid or slow or program) and not rest_of_pairs and not alone and not ray
# And the tests of benchmarks/.
BENCHMARK_TESTS := tests/unit/benchmarks $(addprefix tests/integration/,test_learning_runs.py test_wallclock.py test_peers.py test_gpu_run.py)
OF_PACKAGE := $(addprefix --ignore=,$(BENCHMARK_TESTS))
TESTED := tests/unit tests/integration tests/docs tests/gpu
# What a first look at a change to Lightning's side needs of tests/integration.
SMOKE := test_loader_plain_equivalence test_loader_counts test_loader_growing_data test_longer_schedules test_two_trainers

test: $(INSTALLED) ## run the tests, a few of each grid of parameters (or those that ARGS choose)
ifeq ($(ARGS),)
	$(SIDE_BY_SIDE) -m "$(LEAN)" $(OF_PACKAGE) $(TESTED)
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-fast: $(INSTALLED) ## run the unit tests and a few with a Trainer
	$(SIDE_BY_SIDE) -m "$(LEAN)" $(OF_PACKAGE) tests/unit $(SMOKE:%=tests/integration/%.py) $(ARGS)

test-rest: $(INSTALLED) ## run what `make test` leaves out: pairs of parameters, programs, outside loaders, then what compares times
	$(SIDE_BY_SIDE) -m "$(REST)" $(OF_PACKAGE) $(TESTED)
	$(SIDE_BY_SIDE) -m "not alone and not ray" $(BENCHMARK_TESTS) tests/outside
	$(MAKE) test-other ARGS=
	$(BIN)/python -m pytest -q -m alone $$(grep -rl pytest.mark.alone tests --include=test_*.py)

# The same tests in programs that import pytorch_lightning in place of lightning: CI those of Lightning's side, test-all all.
OTHER := .pytorch_lightning
OTHER_TESTS := tests/unit/training $(addprefix tests/integration/test_,after_transfer.py callback.py callback_attachment.py \
	collections.py datamodule.py loaders_passed_to_fit.py logger_files.py tuner.py)
OTHER_MARKS := $(LEAN)

test-other: $(INSTALLED) ## run tests with pytorch_lightning in place of lightning
	$(BIN)/python tests/other_package.py $(OTHER)
	cd $(OTHER) && OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python -m pytest -q --numprocesses $(PROCESSES) --dist worksteal \
		-m "$(OTHER_MARKS)" $(OTHER_TESTS) $(ARGS)

lightning-tests: $(INSTALLED) ## run Lightning's own tests with our callback in every Trainer (DIR=the folder tests of its repository)
	$(BIN)/python tests/lightning_tests.py $(DIR) $(ARGS)

test-all: ## run all tests, with full grids of parameters
	$(MAKE) test ARGS=
	$(MAKE) test-rest
	$(MAKE) test-other OTHER_TESTS=tests/integration OTHER_MARKS="not alone and not ray"
	$(SIDE_BY_SIDE) -m rest_of_pairs $(OF_PACKAGE) $(TESTED)

test-ray: $(RAY_INSTALLED) ## run the tests on a Ray cluster of several nodes on this machine (CI does)
	$(BIN)/python -m pytest -m ray $(wildcard tests/integration/test_ray_*.py) $(ARGS)

lint: $(INSTALLED) ## check style, types, imports, messages, and files that must agree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/lint.py

docs: $(INSTALLED) ## build the site into docs/_build/html, run its notebooks; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html $(ARGS)
	@echo 'docs/_build/html/index.html'

links: $(INSTALLED) ## look whether the addresses on the site still answer (needs the network)
	DOCS_ONLINE=1 $(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/linkcheck $(ARGS)

dist: $(INSTALLED) ## build the source archive and the wheel into dist/ (people publish them)
	$(BIN)/python -m build --no-isolation $(ARGS)

bench: $(RAY_INSTALLED) ## measure speed-up and overhead, print a table, write it as CSV
	$(BIN)/python benchmarks/run.py $(ARGS)

gpu: $(INSTALLED) ## ten minutes on a GPU: its tests, then what only it can measure (ARGS=--tiny: on a processor, no evidence)
	PYTHON=$(BIN)/python bash benchmarks/gpu/run.sh $(ARGS)

# Sixty kills take longer than a test may by itself.
soak: $(RAY_INSTALLED) ## share for ten minutes, with kills every few seconds, then 60 kills in a Ray cluster: nothing may be lost, nothing may grow
	$(BIN)/python benchmarks/soak.py $(ARGS)
	RANDOM_KILLS=60 $(BIN)/python -m pytest -m ray --timeout 3600 -o faulthandler_timeout=3900 -k random_kills \
		tests/integration/test_ray_worker_faults.py

evidence: $(INSTALLED) ## run the learning experiments (hours; goes on where it stopped), write tables and plots
	PYTHONPATH=benchmarks $(BIN)/python -m learning $(ARGS)

wallclock: $(INSTALLED) ## time to the target behind slow sources (about two hours on a quiet machine; --help says which part takes how long)
	$(BIN)/python benchmarks/wallclock $(ARGS)

peers: $(PEERS_INSTALLED) ## compare with what people use instead, print tables, write them as CSV and Markdown
	$(PEERS_BIN)/python benchmarks/peers $(ARGS)

# Deprecations are shown only: an old version uses what newer ones of its own requirements deprecate. SchNetPack runs with no newer
# torch and torchmetrics.
test-oldest: $(OLDEST_INSTALLED) ## run unit and Trainer tests on the oldest declared versions (Python 3.10 to 3.12)
	$(OLDEST_BIN)/python -m pytest -W default::DeprecationWarning tests/unit tests/integration tests/outside/test_schnetpack.py $(ARGS)

test-mosaic: $(MOSAIC_INSTALLED) ## run the tests of mosaicml-streaming, which needs an older numpy than the rest may have
	$(MOSAIC_BIN)/python -m pytest tests/outside $(ARGS)

test-outside: $(OUTSIDE_INSTALLED) ## run the tests with public projects (PyG, MONAI, TorchIO, Lhotse, Kornia and others)
	OMP_NUM_THREADS=1 $(OUTSIDE_BIN)/python -m pytest tests/outside $(ARGS)

clean: ## remove all environments, what the runs wrote, and the tools' caches
	rm -rf .venv .venv-oldest .venv-mosaic .venv-peers .venv-outside $(OTHER) runs lightning_logs dist docs/_build docs/reference/generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch and torchvision must come from the same source, or torchvision does not import: hence one
# installation of everything together.
$(INSTALLED): pyproject.toml
	@$(call require_python,(3, 10) <= version,3.10 or newer)
	@echo 'Creating .venv: torch, torchvision, lightning and the tools, some gigabytes; takes a few minutes ...'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[examples,evidence,bench,test,test-loaders,test-configs,dev,docs]'
	@touch $@

$(RAY_INSTALLED): $(INSTALLED)
	@echo 'Adding Ray to .venv, 80 megabytes ...'
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[ray]'
	@touch $@

$(OLDEST_INSTALLED): pyproject.toml tests/oldest.txt
	@$(call require_python,(3, 10) <= version < (3, 13),3.10 to 3.12 (torch 2.4 runs on no newer one))
	@echo 'Creating .venv-oldest: the oldest declared versions, some gigabytes; takes a few minutes ...'
	$(PYTHON) -m venv --clear .venv-oldest
	$(OLDEST_BIN)/python -m pip install -q --disable-pip-version-check -c tests/oldest.txt \
		-e '.[examples]' hypothesis psutil pytest pytest-timeout rich "schnetpack>=2.0.4; python_version < '3.12'"
	@touch $@

$(MOSAIC_INSTALLED): pyproject.toml
	@$(call require_python,(3, 10) <= version < (3, 14),3.10 to 3.13 (numpy 2.1 runs on no newer one))
	@echo 'Creating .venv-mosaic: torch and what mosaicml-streaming brings, seven gigabytes; takes some minutes ...'
	$(PYTHON) -m venv --clear .venv-mosaic
	$(MOSAIC_BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,test-loaders,test-mosaic]'
	@touch $@

$(PEERS_INSTALLED): pyproject.toml
	@$(call require_python,(3, 10) <= version < (3, 14),3.10 to 3.13 (tensorflow 2.21 runs on no newer one))
	@echo 'Creating .venv-peers: torch and what is compared (timm, MONAI, TensorFlow), some gigabytes; takes a few minutes ...'
	$(PYTHON) -m venv --clear .venv-peers
	$(PEERS_BIN)/python -m pip install -q --disable-pip-version-check -e '.[peers]'
	@touch $@

$(OUTSIDE_INSTALLED): pyproject.toml
	@$(call require_python,(3, 11) <= version,3.11 or newer (kornia and torchgeo run on no older one))
	@echo 'Creating .venv-outside: torch and the projects whose data is tested, some gigabytes; takes a few minutes ...'
	$(PYTHON) -m venv --clear .venv-outside
	$(OUTSIDE_BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,test-outside]'
	@touch $@

# $(call require_python,condition on `version`,the same in words)
require_python = $(PYTHON) -c 'import sys; version = sys.version_info[:2]; \
	sys.exit(None if $(1) else f"$(PYTHON) is Python {sys.version.split()[0]}, but this needs $(2): make PYTHON=...")'

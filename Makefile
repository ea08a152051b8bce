# grappe's commands: `make help` lists them. Everything is installed into .venv, once.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet install --constraint constraints.txt

.DEFAULT_GOAL := help

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

train: .venv/train  ## train LeNet on handwritten digits, on two CPU processes
	@$(BIN)/grappe train digits --plan replicate=2,device=cpu

demo: .venv/train  ## train, kill, resume, verify, report, opened in a browser where there is one
	@$(BIN)/python scripts/demo.py

WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --no-loadscope-reorder
quick: .venv/test  ## run the quick tests: after each edit, in a minute
	@$(PYTEST) -m "not slow and not soak"

test: .venv/test  ## run the tests of each commit, in twelve to twenty minutes on two cores
	@$(BIN)/python -m tests.operators >/dev/null 2>&1 || true  # compiles once, for minutes, of which no test has as many
	@$(PYTEST) -m "not nightly and not artefact and not soak" --durations 10 -rs

TESTS ?=
artefacts: .venv/test  ## test the documentation site in a browser, the wheel, two labs, the notebook and the demo
	@$(PYTEST) -m "artefact and not soak" --durations 5 $(TESTS)

PART ?= parity faults slurm verbs rest artefacts soak bare newest oldest
nightly: .venv/test  ## run what no commit waits for: grids, kills, long jobs, other versions of torch (PART=faults for one part)
	@for part in $(PART); do $(MAKE) --no-print-directory "nightly-$$part" || failed="$$failed $$part"; done; \
	if [ -n "$$failed" ]; then echo "failed at night:$$failed"; exit 1; fi

nightly-newest nightly-oldest: nightly-%:
	@$(MAKE) --no-print-directory $*

nightly-bare: .venv/test
	@$(BIN)/python -m tests.bare

nightly-%: .venv/test
	@PYTEST_TIMEOUT=$(if $(filter soak,$*),0,400) $(PYTEST) --part $* --durations 10

lint: .venv/dev  ## style, names, import directions, README's generated parts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	@$(BIN)/python scripts/lint.py
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/python -m docs.messages --check
	@$(BIN)/python -m docs.translations || true  # named; their pages say so
	@$(BIN)/python -m docs.labs --check

types: .venv/dev  ## check types
	@$(BIN)/pyrefly check

horovod: .venv/train  ## build Horovod's last release for engine=horovod (two minutes, a C++ compiler)
	@scripts/build_horovod.sh

operators: .venv/test  ## compile DeepSpeed's operators for engine=deepspeed (three minutes, a C++ compiler)
	@$(BIN)/python -m tests.operators

docs: .venv/test  ## regenerate the README's tables and the catalogue of French messages
	@$(BIN)/python docs/generate.py
	@$(BIN)/python -m docs.messages

site: .venv/docs  ## build the documentation site, which opens from its folder: build/site/index.html
	@$(BIN)/python -m docs.site

labs: .venv/test  ## execute the labs and store what they print in them (ONLY=02 for one)
	@$(BIN)/python -m docs.labs $(ONLY)

KILLS ?= 5000
FUZZ ?= 1000
soak: export PYTEST_TIMEOUT = 0
soak: .venv/test  ## thousands of kills, files damaged at random (hours; KILLS=1000 for less)
	@GRAPPE_SOAK=$(KILLS) $(BIN)/python -m pytest -v tests/faults/test_kill.py tests/faults/test_resume.py \
		--durations 5
	@GRAPPE_FUZZ=$(FUZZ) $(BIN)/python -m pytest -v tests/faults/test_fuzz.py tests/faults/test_fuzz_files.py
	@$(BIN)/python -W ignore -m tests.faults.whole_life 1000
	@$(BIN)/python -W ignore -m tests.faults.study_life 50
	@$(BIN)/python -W ignore -m tests.faults.study_life 50 --halving 3

bench: .venv/test  ## compare with the rivals, in an environment of their own (40 minutes; ONLY=pages for one)
	@benchmarks/run

gpu: .venv/train  ## prove grappe on this machine's GPU in ten minutes; without one, try the same code on the CPU
	@PYTHON=$(BIN)/python benchmarks/gpu/run --out .bench/gpu

slurm-up: .venv/bin/pip  ## start a real Slurm of four nodes on this machine, to try grappe submit on
	@$(BIN)/python -m tests.slurm.cluster up

slurm-down:  ## end it
	@$(BIN)/python -m tests.slurm.cluster down

URL ?= https://example.org/grappe
wheel: .venv/test  ## build a wheel, an sdist and two recipes of the last commit, in dist/ (URL= where they will be)
	@rm -rf .bench/wheel dist/grappe-* && mkdir -p .bench/wheel dist && git archive HEAD | tar -x -C .bench/wheel
	@cd .bench/wheel && $(abspath $(BIN))/python -c "from setuptools import build_meta as build; \
		build.build_sdist('$(abspath dist)'); build.build_wheel('$(abspath dist)')" >/dev/null 2>&1
	@digest=$$(sha256sum dist/grappe-*.tar.gz | cut -c 1-64); for file in packaging/*/*; do \
	sed -e "s/0\{64\}/$$digest/" -e 's#https://example.org/grappe#$(URL)#' $$file >dist/$$(basename $$file); done
	@cd dist && sha256sum grappe-* recipe.yaml

sbom: .venv/bin/pip  ## list all that is installed, with versions, licences and hashes, in CycloneDX's form
	@$(BIN)/python scripts/sbom.py

locked.txt: .venv/bin/pip constraints.txt pyproject.toml  ## requirements with hashes, for this kind of machine
	@$(PIP) --dry-run --ignore-installed --report .venv/report.json torch '.[demo]'
	@$(BIN)/python scripts/lock.py .venv/report.json >$@

TORCH_oldest := ==2.8.0
TORCH_newest := >2.13,<2.16
QUICK ?= tests
define on_other_torch
	@.venv-$@/bin/python -m pytest -q -m "not slow and not soak" $(QUICK) --numprocesses $(WORKERS) --no-loadscope-reorder
	@.venv-$@/bin/python -m pytest -q -m "slow and not nightly and not soak" tests/parity tests/checkpoint --numprocesses $(WORKERS) --no-loadscope-reorder
endef
oldest: .venv-oldest/test  ## run the quick tests, parity and checkpoints on the oldest torch (7 GB, with its CUDA)
	$(on_other_torch)

newest: .venv-newest/test  ## the same on the newest torch (6 GB)
	$(on_other_torch)

constraints: .venv/bin/pip  ## write constraints.txt from the newest of everything; then: make clean newest test
	@$(BIN)/pip --disable-pip-version-check --quiet install --dry-run --ignore-installed --report .venv/newest.json \
		'.[demo,docs,test,dev]'
	@$(BIN)/python scripts/lock.py .venv/newest.json --versions >.venv/constraints.txt && mv .venv/constraints.txt constraints.txt

clean:  ## forget the environments
	rm -rf .venv .venv-oldest .venv-newest .bench

.venv/bin/pip:
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

# torch first and pinned: another package asking for plain `torch` would bring a build with gigabytes of CUDA.
.venv/train: .venv/bin/pip pyproject.toml constraints.txt
	@echo "installing grappe and what it needs"
	@$(PIP) torch && $(PIP) --editable '.[demo]'
	@touch $@

.venv/docs: .venv/train
	@$(PIP) --editable '.[docs]'
	@touch $@

.venv/test: .venv/train
	@$(PIP) --editable '.[test]'
	@touch $@

.venv/dev: .venv/test
	@$(PIP) --editable '.[test,dev]'
	@touch $@

.venv-oldest/test .venv-newest/test: .venv-%/test: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-$*
	@grep -vE '^(torch|triton|nvidia-.*)==' constraints.txt >.venv-$*/constraints.txt
	@.venv-$*/bin/pip --disable-pip-version-check --quiet install --constraint .venv-$*/constraints.txt \
		'torch$(TORCH_$*)' --editable '.[corpus,demo,images,lightning,tune]' \
		'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'expecttest>=0.3' 'setuptools>=77' 'zstandard>=0.23' 'nbclient>=0.10' 'ipykernel>=6.29' 'babel>=2.16' 'pandas>=3' 'pyyaml>=6'
	@touch $@

.PHONY: help train demo quick nightly oldest newest constraints test artefacts lint types horovod operators docs site labs soak wheel sbom bench gpu slurm-up slurm-down clean

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
N      ?= 3
FUZZ_SECONDS ?= 300
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest --doctest-modules -n $(N) --dist loadfile --no-loadscope-reorder

.PHONY: run test test-all test-cluster test-in-process matrix coverage floor fuzz check bench \
        examples docs dist changelog size clean

run: $(VENV)/.run                       ## collect 200,000 frames of CartPole-v1 and print a summary
	$(BIN)/swath collect CartPole-v1 --envs 8 --frames 200000

test: $(VENV)/.dev                      ## all but the long suites over clusters; N=0 for one process
	$(PYTEST) -m "not cluster"

test-cluster: $(VENV)/.dev              ## the long suites over gloo, RPC, MPI, Slurm and Ray
	$(PYTEST) -m cluster

test-all: $(VENV)/.dev                  ## all tests
	$(PYTEST)

# What needs no process beside, no Unix sockets and no file locks: it has to work on all platforms.
IN_PROCESS := tests/memory/test_layout.py tests/memory/test_leases.py tests/policies \
  tests/delivery tests/envs/test_kinds.py tests/envs/test_spaces.py tests/envs/test_native.py \
  tests/envs/test_tensor_envs.py tests/envs/test_limits.py tests/data/test_replay_samplers.py \
  tests/platforms/test_system.py

test-in-process: $(VENV)/.test          ## the tests that have to pass on every platform
	$(BIN)/python -m pytest -n $(N) --dist loadfile -m "not cluster and not processes" $(IN_PROCESS)

matrix:                                 ## make test with the lowest, the pinned and the newest versions
	$(PYTHON) scripts/matrix.py $(ARGS)

coverage: $(VENV)/.dev                  ## lines and branches that `make test` runs, workers included
	rm -f .coverage*
	$(BIN)/coverage run -m pytest --doctest-modules -n $(N) --dist loadfile -m "not cluster"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

fuzz: $(VENV)/.dev                      ## the random testers, each for FUZZ_SECONDS; says what they tried
	SWATH_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests -m "fuzz and not cluster" -s \
	  -o faulthandler_timeout=0

# Measuring takes twice as long as `make test`, so this judges what was measured last.
floor:                                  ## the floor of the coverage that was measured last
	@if [ -f .coverage ]; then $(BIN)/coverage report --format=total > .coverage.total || \
	    { echo "coverage $$(cat .coverage.total) % is below the floor in pyproject.toml"; exit 1; }; \
	  echo "coverage: $$(cat .coverage.total) %"; \
	else echo "coverage: not measured here; make coverage does"; fi

check: $(VENV)/.dev                     ## lint, format, types, layers, size, floor of the coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory size floor

bench: $(VENV)/.bench                   ## the comparison of the README; ARGS=--quick for a short one
	$(BIN)/python -m bench $(ARGS)

examples: $(VENV)/.examples             ## train all examples whole; docs/examples.md has the results
	$(BIN)/python examples/run_all.py

docs: $(VENV)/.docs                     ## the site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/.release                  ## wheel and sdist in dist/, checked, and tried in a bare venv
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/try_wheel.py dist $(TAG)

changelog:                              ## move changes/ to CHANGELOG.md; VERSION=0.2.0
	$(PYTHON) scripts/changelog.py $(VERSION)

size:                                   ## lines of the package; a ceiling that is raised on purpose
	@find src/swath -name '*.py' | xargs wc -l | awk '$$2 == "total" { print "src/swath: " $$1 " lines"; \
	  if ($$1 > 29950) exit 1 }'

# One stamp per set of packages, made again when the declarations change.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit("swath needs Python 3.10 or newer; set PYTHON=...") \
	  if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) -e .
	@touch $@

$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) -e '.[$*]'
	@touch $@

clean:                                  ## forget the environment and all that was built
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*

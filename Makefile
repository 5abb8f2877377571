# All development tasks. `make` lists the targets.

PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# Some virtual machines report AMX, but crash with an illegal instruction when oneDNN uses it for bfloat16. Limit oneDNN
# to the instruction set before AMX, unless the caller sets another one.
ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export ONEDNN_MAX_CPU_ISA

# One torch thread per worker, so that workers do not compete for cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help env test slow campaign check format demo results clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## create .venv with the package and its tools, at the tested versions

# Touch the stamp last, so that `make` repeats an interrupted install.
$(STAMP): pyproject.toml constraints.txt tests/judges.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[dev]"
	$(INSTALL) --no-deps -r tests/judges.txt
	@touch $@

test: env ## run the test suite, without the slow tests
	$(PYTEST) -m "not slow and not campaign"

slow: env ## run the slow tests only
	$(PYTEST) -m "slow and not campaign"

campaign: env ## run the campaigns: hundreds of random networks, damaged files, kills; takes hours
	$(PYTEST) -m campaign

check: env ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: env ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

demo: env ## compare all methods on handwritten digits, and write a page about it; takes about three minutes
	$(BIN)/multitudes compare digits --methods all --out runs/demo

results: env ## make results/README.md and its figures from the raw files beside it
	$(BIN)/python -m recipes.report

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

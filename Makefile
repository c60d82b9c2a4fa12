# Two commands need nothing before them: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Python compiles each file once, also where the environment says otherwise: hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo federation test quick check format setup data docs papers bench guard clean

demo: setup data
	$(BIN)/fedveil train examples/fashion-mnist.toml

federation: setup
	$(BIN)/python -m scripts.federation

test: setup data
	@sh scripts/mnist
	@sh scripts/chromium
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 FEDVEIL_MNIST=.cache/mnist/package/data $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

quick: setup
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "(unit or contracts) and not slow"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q --doctest-modules fedveil

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python -m fedveil.algorithms.citations > docs/papers.md
	$(BIN)/fedveil reproduce --page > docs/reproductions.md.new
	mv docs/reproductions.md.new docs/reproductions.md

papers: setup
	OMP_NUM_THREADS=1 $(BIN)/fedveil reproduce --scale $(or $(SCALE),ci) --save

bench: setup data
	$(BIN)/python -m benchmarks $(if $(filter-out 0,$(QUICK)),--quick)

guard: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -q benchmarks/test_ratios.py

setup: $(READY)

$(READY): pyproject.toml constraints.txt constraints-hashed.txt scripts/setup
	PYTHON=$(PYTHON) VENV=$(VENV) sh scripts/setup
	touch $(READY)

data:
	@sh scripts/data

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

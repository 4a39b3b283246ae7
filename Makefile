# Each target makes what it needs from nothing: a virtual environment in .venv, with the versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
# Compiling all of torch while installing takes longer than the rest: each module is compiled when first imported, and kept.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -qq --no-compile -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: demo test check bench docs soak clean

# The whole story in about a minute, once torch is installed in .venv: train, kill, resume, compare, damage, refuse, fall back.
demo: .venv/.demo
	@$(BIN)/safepoint demo

# Every test but the long ones. The tests of one file stay on one worker, in order; files of few tests are the slow ones,
# and are not kept for the end.
test: .venv/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: .venv/.dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/architecture

# The Python of the pages runs, and their links lead somewhere.
docs: .venv/.dev
	@$(BIN)/python -m pytest -q tests/architecture/test_docs.py

# One JSON document for each question, tables and plots in benchmarks/results; under ten minutes on two cores.
bench: .venv/.bench
	@$(BIN)/python benchmarks

# The long checks with their full counts, and random examples instead of fixed ones.
soak: .venv/.dev
	@$(BIN)/python -m pytest -m soak --timeout 0 --hypothesis-profile soak

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.demo: pyproject.toml constraints.txt
	@echo "making .venv with what the demo needs; torch is large, up to several GB: downloading it may take minutes"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) -e '.[examples]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt
	@echo "making .venv with what the tests need; torch is large, up to several GB: downloading it may take minutes"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) -e '.[dev]'
	@touch $@ .venv/.demo

.venv/.bench: pyproject.toml constraints.txt
	@echo "making .venv with what the benchmarks need, the other libraries included"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) -e '.[bench]'
	@touch $@

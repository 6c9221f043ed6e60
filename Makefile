# make run    an environment, then a compile, its report and a short training run
# make test   an environment, then all tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test lint rules golden verify-grid bench env clean

run: $(READY)
	$(BIN)/shardc compile --model Qwen3-4B --tp 2 --pp 2 -o plans/qwen3-4b
	$(BIN)/shardc show plans/qwen3-4b
	$(BIN)/python examples/train_tiny.py

test: $(READY)
	$(BIN)/python -m pytest -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Each op rule against simulated ranks; OP=softmax runs one.
rules: $(READY)
	$(BIN)/python -m pytest -q tests/sharding/rules $(if $(OP),-k $(OP))

# Rewrites tests/golden; review the diff.
golden: $(READY)
	SHARDC_GOLDEN=write $(BIN)/python -m pytest -q tests/golden

verify-grid: $(READY)
	$(BIN)/python -m pytest -q -m grid

bench: $(READY)
	$(BIN)/python benchmarks/compile_time.py

env: $(READY)

# torch comes first and alone, at the pinned version, so that pip takes the build meant for this machine. The oldest
# transformers lies beside, in a folder that its test puts on PYTHONPATH.
$(READY): pyproject.toml constraints.txt constraints-oldest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardc needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/oldest -r constraints-oldest.txt
	@touch $@

clean:
	rm -rf $(VENV) plans

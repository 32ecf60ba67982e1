# `make train` and `make test` set themselves up; all they need is Python >= 3.10, make and a C++
# compiler.

PYTHON ?= python3
# Installed before everything else, so that nothing below chooses another build of torch.
TORCH ?= torch==2.13.0
# Another PyG release to test with, processes that share the tests (one more than there are cores, as some wait for
# timeouts), and arguments of pytest: make test PYG=2.6.0 JOBS=0 ARGS='test/nn -k gat'
PYG ?=
JOBS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
ARGS ?=

# What `make train` trains on, and epochs of GraphSAGE and of GAT: make train GRAPH=Community/10000/250000 EPOCHS=3
GRAPH ?= Community
EPOCHS ?= 30
GAT_EPOCHS ?= 10

VENV := .venv/stamp
BIN := $(CURDIR)/.venv/bin
# Python compiles what it imports, which is a fraction of what is installed, and keeps it, also where images say no.
INSTALL := $(BIN)/python -m pip install --no-compile
unexport PYTHONDONTWRITEBYTECODE
DATA := runs/$(shell echo $(subst /,-,$(GRAPH)) | tr A-Z a-z)-2
TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2

.PHONY: train test test-grid lint docs sanitize venv clean

train: $(DATA)
	$(TORCHRUN) examples/train.py $(DATA) --model sage --epochs $(EPOCHS) --save runs/sage.safetensors
	$(TORCHRUN) examples/check.py $(DATA) $(GRAPH) --model sage --weights runs/sage.safetensors
	$(TORCHRUN) examples/train.py $(DATA) --model gat --epochs $(GAT_EPOCHS) --save runs/gat.safetensors
	$(TORCHRUN) examples/check.py $(DATA) $(GRAPH) --model gat --weights runs/gat.safetensors

# A release asked for by name stands before the one in .venv on the path.
test: $(VENV) $(if $(PYG),.pyg/$(PYG)/stamp)
	$(if $(PYG),PYTHONPATH=$(CURDIR)/.pyg/$(PYG)) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# All settings of all layers, and the tests that take long: benchmarks, examples, simulated hosts, kernels for GPUs.
test-grid:
	$(MAKE) test ARGS='-m "grid or not grid" $(ARGS)'

lint: $(VENV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site, in build/site/index.html.
docs: $(VENV)
	$(BIN)/python -m sphinx -q -W -E -b html docs build/site

# The kernels without torch, under the address and undefined-behaviour sanitizers. `make build/check-thread` builds the
# same for the sanitizer of threads, which takes many minutes to run.
sanitize: build/check-memory
	build/check-memory

build/check-memory: SANITIZERS = address,undefined
build/check-thread: SANITIZERS = thread
build/check-%: $(wildcard pyg_sar/csrc/* test/csrc/*)
	mkdir -p build
	$(CXX) -std=c++20 -O1 -g1 -Wall -Wextra -pthread -fopenmp-simd -ffp-contract=fast -fno-math-errno \
	  -fno-trapping-math -fsanitize=$(SANITIZERS) -fno-sanitize-recover=all \
	  test/csrc/check.cpp $(patsubst %,pyg_sar/csrc/%.cpp,plain avx2 avx512) -o $@

venv: $(VENV)

$(VENV): pyproject.toml setup.py $(wildcard pyg_sar/csrc/*)
	$(PYTHON) -m venv .venv
	$(INSTALL) $(TORCH)
	$(INSTALL) setuptools wheel ninja
	$(INSTALL) --no-build-isolation -e '.[dev]'
	touch $@

# Without its dependencies, which .venv has: above all no second torch.
.pyg/%/stamp: | $(VENV)
	$(INSTALL) --no-deps --upgrade --target $(@D) torch_geometric==$*
	touch $@

$(DATA): | $(VENV)
	$(BIN)/pyg-sar partition $(GRAPH) --num-parts 2 --out $@

clean:
	rm -rf .venv .pyg runs build dist *.egg-info pyg_sar/*.so .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

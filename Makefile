# make demo | test | check | lint | types | format | soak | soak-offload | venv
#
# Each target makes .venv where there is none and installs what it needs; a second run does not
# install again until pyproject.toml changes. Needed: Python >= 3.10, make, a C++ compiler.
#
#   make test PYTHON=python3.12               another interpreter
#   make test ARGS="-k profile"               arguments for pytest
#   make test JOBS=8                          processes with a thread each; 0 for one process
#   make demo TORCH="torch --index-url URL"   another build of torch (any arguments of pip install)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev

.PHONY: demo test check lint types format soak soak-offload venv
.DELETE_ON_ERROR:

demo: $(RUN)
	$(BIN)/python -m examples.demo $(ARGS)

test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: lint types test

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(DEV)
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(DEV)
	$(BIN)/python -m benchmarks.soak $(ARGS)

soak-offload: $(DEV)
	$(BIN)/python -m benchmarks.offload_soak $(ARGS)

venv: $(DEV)

# torch comes first, and pinned: any other order lets a dependency choose the build of torch, which
# is several GB of CUDA packages on some indexes. deepspeed's set-up imports the torch that is there
# (--no-build-isolation) and would build its CUDA extensions without DS_BUILD_OPS=0.
$(RUN): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed; make PYTHON=/path/to/python3 names one")'
	@echo "installing into $(VENV): torch, moe (about two minutes)"
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed (Debian: apt-get install python3-venv)"; exit 1; }
	@$(PIP) $(TORCH)
	@$(PIP) "setuptools>=77" wheel
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(DEV): $(RUN)
	@echo "installing into $(VENV): deepspeed, and tools for tests and checks"
	@$(PIP) packaging py-cpuinfo ninja
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation "deepspeed>=0.18"
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@touch $@

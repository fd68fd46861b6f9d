# Addax: one name per need. `make help` lists them.
CARGO ?= cargo
SEEDS ?= 0..2000
SECONDS ?= 60

.PHONY: help setup build programs demo test lint fmt docs guest k8s sim model lvol-crash fuzz bench bench-pause soak instructions

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort | expand -t 14

setup: ## install what the tests need (Debian; only what is missing)
	tests/setup.sh

build: ## the three programs, under target/release
	$(CARGO) build --release -p addax -p addax-engine -p addax-perf

demo: build ## the main job end to end on this machine, cleaned up afterwards
	target/release/addax demo

programs: # the three programs as the tests build them: dependencies are shared with the tests' own build
	$(CARGO) build -p addax -p addax-engine -p addax-perf

test: setup programs ## everything the project can show about itself on one machine
	ADDAX_ENGINE=$${CARGO_TARGET_DIR:-$(CURDIR)/target}/debug/addax-engine $(CARGO) test --workspace --exclude e2e
	$(CARGO) run --release -p engine-sim -- --seeds $(SEEDS)
	$(MAKE) instructions
	$(CARGO) test -p e2e -- --test-threads=1

instructions: ## instructions and calls per I/O against their record (ADDAX_RECORD=1 records anew)
	$(CARGO) build --release -p engine-step
	ADDAX_STEP=$${CARGO_TARGET_DIR:-$(CURDIR)/target}/release/step \
		$(CARGO) test -p engine-step --test instructions -- --nocapture

lint: ## formatting, clippy, licences and sources, generated files
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) deny --log-level error check bans licenses sources
	$(CARGO) test -p addax-api --test schema

fmt: ## format the sources
	$(CARGO) fmt --all

docs: ## the API documentation, under target/doc
	$(CARGO) doc --workspace --no-deps

guest: setup programs ## the real-Linux-kernel tests alone
	$(CARGO) test -p e2e --test 'guest*' -- --test-threads=1

k8s: setup programs ## the suites on a real kube-apiserver alone
	$(CARGO) test -p e2e --test 'k8s*' -- --test-threads=1

sim: ## the mirror's simulator over SEEDS (make sim SEEDS=0..20000)
	$(CARGO) run --release -p engine-sim -- --seeds $(SEEDS)

model: ## every state of the mirror's protocol model, all scenarios
	$(CARGO) run --release -p mirror-model
	$(CARGO) test --release -p mirror-model --test product -- --include-ignored

lvol-crash: ## power cut after every write and flush of random programs on lvolstores, in full
	LVOL_TESTS=full $(CARGO) test -p lvol-core --test store -- --nocapture

fuzz: ## every fuzzer for SECONDS (needs cargo-fuzz and a nightly toolchain)
	cd spdk-engine/wire && for target in pdu sqe connect identify; do \
		$(CARGO) +nightly fuzz run $$target -- -max_total_time=$(SECONDS) || exit 1; done
	cd spdk-engine/format && for target in super_block page image raid; do mkdir -p fuzz/corpus/$$target && \
		$(CARGO) +nightly fuzz run $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
			-max_total_time=$(SECONDS) || exit 1; done

bench: ## data-plane benchmark, against a stock SPDK when SPDK_DIR is set; report under target/bench (BENCH="--help" for options)
	$(CARGO) build --release -p addax-engine -p addax-perf
	$${CARGO_TARGET_DIR:-target}/release/addax-perf bench \
		--engine $${ADDAX_ENGINE_BIN:-$${CARGO_TARGET_DIR:-target}/release/addax-engine} $(BENCH)

bench-pause: setup programs ## how long I/O pauses when a replica or an engine dies; report under target/bench
	$(CARGO) run -p e2e --bin pauses

soak: setup programs ## chaos on a cluster with SOAK_VOLUMES=10 under verify load for SOAK_MINUTES=30, by SOAK_SEED
	$(CARGO) run -p e2e --bin soak

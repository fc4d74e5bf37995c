# `make` says what there is. Everything built or downloaded goes to the cache, nothing into this directory.
PADDOCK_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/paddock
CARGO_TARGET_DIR ?= $(PADDOCK_CACHE)/target
export PADDOCK_CACHE CARGO_TARGET_DIR

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
IMAGE ?= paddock:$(VERSION)
IMAGE_TAR ?= $(CARGO_TARGET_DIR)/paddock-$(VERSION).tar

# What the demo, the bed and the benchmarks start.
BED_TOOLS := kube-apiserver kube-controller-manager kube-scheduler kubectl etcd helm dynamodb elasticmq moto

# Options of `make bed`: simulated board nodes, and whether an operator runs.
NODES ?= 4
OPERATOR ?= 1

# Always the whole workspace: a part of it would enable other features of shared crates and compile them again.
BUILD := build --workspace --bins
BIN := $(CARGO_TARGET_DIR)/debug

DENY_VERSION := 0.20.2
DENY := $(PADDOCK_CACHE)/tools/cargo-deny-$(DENY_VERSION)/bin/cargo-deny

.PHONY: help demo bed test generate lint bench image clean
.DEFAULT_GOAL := help

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## Show a claim going Ready on a real cluster of your own; Ctrl-C ends it (CI=1: ends by itself)
	@hack/prerequisites.sh
	@hack/prepare.sh $(BED_TOOLS) -- $(BUILD)
	@$(BIN)/paddock-bed demo

# As root the kubelet is built here, beside the rest; where containerd cannot be fetched the bed goes without them.
bed: ## Keep all of it running for kubectl, curl or a script, until Ctrl-C or SIGTERM (NODES=300, OPERATOR=0); prints an env file
	@hack/prerequisites.sh
	@hack/prepare.sh $(BED_TOOLS) kwok $(if $(filter 0,$(shell id -u)),kubelet) -- $(BUILD)
	@exec $(BIN)/paddock-bed serve --nodes $(NODES) $(if $(filter 0,$(OPERATOR)),--without-operator)

test: ## Run all tests, those against real Kubernetes and emulated AWS and GitHub among them
	@hack/prerequisites.sh
	@cargo fmt --all --check
	@hack/check-docs.sh
	@hack/prepare.sh all -- $(BUILD) --tests
	@cargo clippy --quiet --package paddock-core -- -D warnings # no clock and no I/O in decisions
	@cargo test --workspace --no-fail-fast

generate: ## Write the generated files: CRDs, their copies in the chart, the reference
	@hack/prerequisites.sh cargo cc
	@hack/prepare.sh -- $(BUILD)
	@$(BIN)/paddock generate

lint: $(DENY) ## Check format, clippy, licences and bans, the chart, and the shell scripts
	@hack/prerequisites.sh cargo cc go
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	@hack/deny.sh $(DENY)
	"$$(hack/tools.sh helm | cut -d= -f2)" lint --strict --quiet charts/paddock
	@if command -v shellcheck >/dev/null; then shellcheck -x hack/*.sh .ci/run; else echo "shellcheck is not there: the shell scripts were not checked"; fi

bench: ## Measure an optimised build (the first one takes a quarter of an hour)
	@hack/prerequisites.sh
	@hack/prepare.sh $(BED_TOOLS) kwok -- $(BUILD) --release
	@$(CARGO_TARGET_DIR)/release/paddock-bed bench

image: ## Build the OCI image without a Docker engine (IMAGE=name:tag, IMAGE_TAR=file)
	@hack/prerequisites.sh cargo cc
	@hack/prepare.sh -- $(BUILD) --release
	@$(CARGO_TARGET_DIR)/release/paddock-bed image $(IMAGE_TAR) --binary $(CARGO_TARGET_DIR)/release/paddock --tag $(IMAGE)
	@echo "$(IMAGE) is in $(IMAGE_TAR)"

clean: ## Remove what cargo built (ALL=1: the tools, too)
	rm -rf "$(CARGO_TARGET_DIR)" $(if $(ALL),"$(PADDOCK_CACHE)/tools" "$(PADDOCK_CACHE)/log")

$(DENY):
	@hack/prerequisites.sh cargo cc go
	env -u CARGO_TARGET_DIR cargo install cargo-deny --version $(DENY_VERSION) --locked --root $(PADDOCK_CACHE)/tools/cargo-deny-$(DENY_VERSION)

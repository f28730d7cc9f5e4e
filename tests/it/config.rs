//! What can be set: which source wins, what is refused and how it is told.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use onejob::config::{Config, ConfigError, Environment, FailoverOn, Problem, Route, Sources, TCP_USER_TIMEOUT, token_sha256};
use onejob::job::Class;

/// A configuration that is accepted, to which a test adds what it is about.
const BASE: &str = r#"
[provider.laser]
base_url = "https://laser.example/v1"

[provider.inkjet]
base_url = "https://inkjet.example"
timeouts = { total = "60s" }

[route.print]
providers = ["laser", "inkjet"]
"#;

struct Given {
    directory: tempfile::TempDir,
    toml: String,
    variables: BTreeMap<String, String>,
    overrides: Vec<(String, String)>,
}

fn given(toml: &str) -> Given {
    let directory = tempfile::tempdir().unwrap();
    Given { directory, toml: toml.to_owned(), variables: BTreeMap::new(), overrides: Vec::new() }
}

impl Given {
    fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    fn flag(mut self, key: &str, value: &str) -> Self {
        self.overrides.push((key.to_owned(), value.to_owned()));
        self
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("onejob.toml")
    }

    fn load(&self) -> Result<Config, ConfigError> {
        std::fs::write(self.file(), &self.toml).unwrap();
        Config::load(Sources {
            file: Some(self.file()),
            overrides: self.overrides.clone(),
            environment: Environment::Given(self.variables.clone()),
        })
    }

    fn problems(&self) -> Vec<Problem> {
        match self.load() {
            Err(ConfigError::Refused { problems }) => problems,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("accepted:\n{}", self.toml),
        }
    }

    /// The one problem.
    fn problem(&self) -> Problem {
        let problems = self.problems();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        problems.into_iter().next().unwrap()
    }
}

/// The base with a route whose requirements are in files.
fn requiring(keys: &str, files: &[(&str, &str)]) -> Given {
    let mut given = route("");
    for (name, text) in files {
        std::fs::write(given.directory.path().join(name), text).unwrap();
    }
    let keys = keys.replace("DIR", given.directory.path().to_str().unwrap());
    given.toml.push_str(&keys);
    given
}

#[test]
fn what_a_route_requires_is_compiled_with_the_configuration() {
    let files =
        [("print.json", r#"{"required":["total"]}"#), ("print.assertions", "# money\n\noutput.total > 0\n output.total < 9 \n")];
    let keys = r#"
        input = { assertions = ["input.pages < 10"] }
        output = { schema = "DIR/print.json", assertions = "DIR/print.assertions", pointer = "/a", parse = "json" }
    "#;
    let config = requiring(keys, &files).load().unwrap();
    let validator = config.validator("print").unwrap();
    assert!(validator.check_input(br#"{"pages":10}"#).is_err() && validator.check_input(br#"{"pages":9}"#).is_ok());
    let checked =
        |body: &str| validator.check_output(b"{}", onejob::validate::Answer { content_encoding: None, body: body.as_bytes() });
    assert!(checked(r#"{"a":"{\"total\":8}"}"#).is_ok());
    for invalid in [r#"{"a":"{\"total\":9}"}"#, r#"{"a":"{\"total\":0}"}"#, r#"{"a":"{}"}"#, r#"{"a":{"total":8}}"#] {
        assert!(checked(invalid).is_err(), "{invalid}");
    }
    assert!(given(BASE).load().unwrap().validator("print").is_none());

    let long = "output.a\n".repeat(100_000);
    let bad = [
        ("bad.json", r#"{"properties":{"total":{"type":"nmber"}}}"#),
        ("remote.json", r#"{"$ref":"https://a.example/x.json"}"#),
        ("empty.assertions", "# nothing\n"),
        ("long.assertions", &long),
    ];
    for (keys, key, what) in [
        (r#"output = {}"#, "route.print.output", "nothing is required"),
        (r#"input = { assertions = [] }"#, "route.print.input", "nothing is required"),
        (r#"output = { schema = "DIR/none.json" }"#, "route.print.output.schema", "it cannot be read"),
        (r#"output = { schema = "DIR/bad.json" }"#, "route.print.output.schema", "at /properties/total/type: "),
        (
            r#"output = { schema = "DIR/remote.json" }"#,
            "route.print.output.schema",
            "at /$ref: https://a.example/x.json leads out",
        ),
        (
            r#"output = { assertions = ["output.a", "outptu.a"] }"#,
            "route.print.output.assertions",
            "assertion 2: outptu.a: there is no outptu",
        ),
        (r#"input = { assertions = ["output.a"] }"#, "route.print.input.assertions", "there is no output; known are input"),
        (r#"output = { assertions = "DIR/empty.assertions" }"#, "route.print.output.assertions", "it has no expression"),
        (r#"output = { assertions = "DIR/long.assertions" }"#, "route.print.output.assertions", "the limit"),
        (r#"output = { assertions = 7 }"#, "route.print.output.assertions", "a number stands where something else is wanted"),
        (r#"output = { assertions = ["output.a"], pointer = "a" }"#, "route.print.output.pointer", "no JSON pointer"),
        (r#"output = { assertions = ["output.a"], parse = "json" }"#, "route.print.output.parse", "it is a text in it"),
        (r#"output = { assertions = ["output.a"], shema = "x" }"#, "route.print.output.shema", "unknown key"),
    ] {
        let problem = requiring(keys, &bad).problem();
        assert_eq!(problem.key, key, "{problem}");
        assert!(problem.what.contains(what), "{problem}");
    }
}

#[test]
fn http_2_is_agreed_on_over_tls_or_known_before() {
    let provider = |keys: &str| with(&format!("[provider.ink]\n{keys}"));
    for keys in [
        "base_url = \"https://ink.example\"\nhttp2 = \"alpn\"",
        "base_url = \"http://ink.example\"\nhttp2 = \"prior_knowledge\"",
        "adapter = \"simulated\"\nhttp2 = \"prior_knowledge\"",
        "base_url = \"http://ink.example\"\nhttp2 = \"off\"",
    ] {
        provider(keys).load().unwrap();
    }
    for keys in ["base_url = \"http://ink.example\"\nhttp2 = \"alpn\"", "adapter = \"simulated\"\nhttp2 = \"alpn\""] {
        let problem = provider(keys).problem();
        assert_eq!((problem.key.as_str(), problem.value.as_deref()), ("provider.ink.http2", Some("alpn")), "{problem}");
        assert!(problem.what.contains("TLS handshake"), "{problem}");
    }
    let problem = provider("base_url = \"https://ink.example\"\nhttp2 = \"maybe\"").problem();
    assert!(problem.what.contains("maybe") && problem.key == "provider.ink.http2", "{problem}");
}

fn with(addition: &str) -> Given {
    given(&format!("{BASE}{addition}"))
}

/// The base with further keys of the route `print`.
fn route(keys: &str) -> Given {
    given(&format!("{BASE}{keys}"))
}

/// One provider with these keys.
fn provider(keys: &str) -> Given {
    given(&format!("[provider.laser]\n{keys}"))
}

fn print(config: &Config) -> &Route {
    &config.route["print"]
}

#[test]
fn nothing_at_all_is_a_configuration() {
    let sources = Sources { file: None, overrides: Vec::new(), environment: Environment::Given(BTreeMap::new()) };
    let config = Config::load(sources).unwrap();
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:7470");
    assert!(config.redis.url.is_none() && config.route.is_empty());
}

#[test]
fn the_example_loads_and_each_commented_key_is_known() {
    given(Config::example()).load().unwrap();
    // Every `# key = value` is a default or an example that would load too, if its file and variable were there.
    let mut uncommented = String::new();
    for line in Config::example().lines() {
        let is_setting = |rest: &str| rest.split_once(" = ").is_some_and(|(key, _)| !key.contains(' '));
        let setting = line.strip_prefix("# ").filter(|rest| rest.starts_with('[') || is_setting(rest));
        let skipped =
            setting.is_some_and(|setting| setting.starts_with("ca_file") || setting.starts_with("trusted_owner_header"));
        uncommented.push_str(if skipped { "" } else { setting.unwrap_or(line) });
        uncommented.push('\n');
    }
    let config =
        given(&uncommented).variable("INKJET_TOKEN", "hunter2").variable("PRESS_SECRET", "0123456789abcdef").load().unwrap();
    assert_eq!(config.webhook_secret("press").unwrap().reveal(), "0123456789abcdef");
    assert_eq!(config.server.cors_origins, ["https://shop.example"]);
    assert_eq!(config.bearer("inkjet").unwrap().reveal(), "hunter2");
    assert_eq!(config.owner.keys().collect::<Vec<_>>(), ["desk", "shop"]);
}

#[test]
fn the_example_shows_the_defaults() {
    let example = given(Config::example()).load().unwrap();
    let default = given("").load().unwrap();
    for section in ["server", "redis", "runtime"] {
        assert_eq!(example.describe_json()["settings"][section], default.describe_json()["settings"][section]);
    }
}

#[test]
fn later_sources_win() {
    let file = given("[server]\nwait_max = \"1s\"\nproxy_wait = \"1s\"\nbody_timeout = \"1s\"");
    let config = file
        .variable("ONEJOB_SERVER__PROXY_WAIT", "2s")
        .variable("ONEJOB_SERVER__BODY_TIMEOUT", "2s")
        .flag("server.body_timeout", "3s")
        .load()
        .unwrap();
    assert_eq!(config.server.head_timeout, Duration::from_secs(10), "default");
    assert_eq!(config.server.wait_max, Duration::from_secs(1), "file");
    assert_eq!(config.server.proxy_wait, Duration::from_secs(2), "variable");
    assert_eq!(config.server.body_timeout, Duration::from_secs(3), "flag");
}

#[test]
fn a_variable_is_a_number_a_list_or_a_text_as_its_key_wants() {
    let config = with("")
        .variable("ONEJOB_REDIS__PREFIX", "1")
        .variable("ONEJOB_REDIS__LANES", "3")
        .variable("ONEJOB_ROUTE__PRINT__PROVIDERS", "[\"inkjet\"]")
        .variable("ONEJOB_PROVIDER__LASER__TIMEOUTS__TOTAL", "90s")
        .variable("ONEJOB_REDIS__ALLOW_EVICTION", "true")
        .load()
        .unwrap();
    assert_eq!(config.redis.prefix, "1");
    assert_eq!(config.redis.lanes, 3);
    assert_eq!(print(&config).providers, ["inkjet"]);
    assert_eq!(config.provider["laser"].timeouts.total, Duration::from_secs(90));
    assert!(config.redis.allow_eviction);
}

#[test]
fn a_variable_that_names_no_key_is_refused_and_others_are_left_alone() {
    let problem = with("").variable("ONEJOB_SERVER_LISTEN", "x").problem();
    assert_eq!(problem.key, "ONEJOB_SERVER_LISTEN");
    assert!(problem.hint.contains("two underscores"), "{problem}");
    with("")
        .variable("ONEJOB_CONFIG", "/etc/onejob.toml")
        .variable("ONEJOB_PORT", "tcp://10.0.0.7:7470")
        .variable("ONEJOB_SERVICE_HOST", "10.0.0.7")
        .variable("ONEJOB_REDIS_PORT_6379_TCP_ADDR", "10.0.0.8")
        .variable("HOME", "/root")
        .load()
        .unwrap();
}

#[test]
fn an_unknown_key_is_refused_by_name_from_every_source() {
    let problem = with("[server]\nlisen = \"127.0.0.1:1\"").problem();
    assert_eq!((problem.key.as_str(), problem.hint.as_str()), ("server.lisen", "did you mean listen?"));
    let problem = with("").variable("ONEJOB_SERVER__LISEN", "127.0.0.1:1").problem();
    assert_eq!((problem.key.as_str(), problem.origin.as_deref()), ("server.lisen", Some("ONEJOB_SERVER__LISEN")));
    let problem = with("").flag("server.lisen", "127.0.0.1:1").problem();
    assert_eq!((problem.key.as_str(), problem.origin.as_deref()), ("server.lisen", Some("flag server.lisen")));
    let problem = with("[servr]").problem();
    assert_eq!((problem.key.as_str(), problem.hint.as_str()), ("servr", "did you mean server?"));
    let problem = with("[provider.ink.timeouts]\nwhole = \"1s\"\n[provider.ink]\nbase_url = \"http://ink\"").problem();
    assert_eq!(problem.key, "provider.ink.timeouts.whole");
}

#[test]
fn durability_is_a_word_or_a_number_of_replicas() {
    use onejob::config::Durability;
    const URL: &str = "[redis]\nurl = \"redis://127.0.0.1\"\n";
    let level = |line: &str| with(&format!("{URL}{line}")).load().unwrap().redis.durability;
    assert_eq!(level(""), Durability::Memory);
    assert_eq!(level("durability = \"memory\""), Durability::Memory);
    assert_eq!(level("durability = \"fsync\""), Durability::Fsync);
    assert_eq!(level("durability = { replicated = 2 }"), Durability::Replicated(2));
    let said = with(URL).variable("ONEJOB_REDIS__DURABILITY", "{ replicated = 3 }").load().unwrap();
    assert_eq!(said.redis.durability, Durability::Replicated(3));
    // What nobody can keep, or what would keep anything from being sent.
    let private = with("[redis]\ndurability = { replicated = 1 }").problem();
    assert_eq!((private.key.as_str(), private.what.as_str()), ("redis.durability", "a private Redis has no replica"));
    let slow = with("[redis]\ndurability = \"fsync\"\ndurability_timeout = \"5s\"").problem();
    assert!(slow.key == "redis.durability_timeout" && slow.what.contains("12s 500ms"), "{slow}");
    with("[redis]\ndurability_timeout = \"9s\"").load().unwrap();
}

#[test]
fn everything_wrong_is_told_at_once_each_on_its_line() {
    let given = given(
        r#"
        [server]
        lisen = "127.0.0.1:1"
        conflict_status = 418
        wait_max = 5
        [redis]
        prefix = "NO"
        [provider.laser]
        adapter = "smoke"
        base_url = "ftp://laser.example"
        [route.print]
        providers = ["laser", "inkjet"]
        attempts = 33
        deadline = "0s"
        failover_on = ["not_sent", "timeout"]
        "#,
    );
    let error = given.load().unwrap_err().to_string();
    let keys: Vec<_> = given.problems().into_iter().map(|problem| problem.key).collect();
    for key in [
        "server.lisen",
        "server.conflict_status",
        "server.wait_max",
        "redis.prefix",
        "provider.laser.adapter",
        "provider.laser.base_url",
        "route.print.providers",
        "route.print.attempts",
        "route.print.deadline",
        "route.print.failover_on",
    ] {
        assert!(keys.iter().filter(|known| *known == key).count() == 1, "{key} once in {keys:?}");
        assert!(
            error.lines().any(|line| line.trim_start().starts_with(key) && line.contains("; ")),
            "{key} on a line of {error}"
        );
    }
    assert_eq!(error.lines().count(), 11, "{error}");
    let line =
        format!("  route.print.attempts = 33 ({}): it must be 1 to 32; choose a number in this range", given.file().display());
    assert!(error.lines().any(|l| l == line), "{error}");
}

#[test]
fn a_value_of_another_kind_is_told_what_is_wanted() {
    for (keys, key, hint) in [
        ("[redis]\nlanes = \"many\"", "redis.lanes", "write a whole number, 0 or more"),
        ("[redis]\nallow_eviction = 1", "redis.allow_eviction", "write true or false"),
        ("[redis]\nprefix = 1", "redis.prefix", "write a text in quotes"),
        ("[server]\nwait_max = 5", "server.wait_max", "write a time with its unit, as in \"30s\""),
        ("[server]\ncors_origins = \"https://shop.example\"", "server.cors_origins", "write a list in [ ]"),
        ("[provider.ink]\nbase_url = \"http://ink\"\ntimeouts = \"5s\"", "provider.ink.timeouts", "write a table in { }"),
    ] {
        let problem = with(keys).problem();
        assert_eq!((problem.key.as_str(), problem.hint.as_str()), (key, hint), "{problem}");
    }
}

#[test]
fn a_file_that_is_not_there_or_not_toml_is_told_without_its_text() {
    let missing = Sources {
        file: Some(PathBuf::from("/nowhere/onejob.toml")),
        overrides: Vec::new(),
        environment: Environment::Given(BTreeMap::new()),
    };
    assert!(matches!(Config::load(missing).unwrap_err(), ConfigError::Unreadable { .. }));
    let error = given("[redis]\n\nurl = \"redis://:hunter2@host\" oops").load().unwrap_err();
    assert!(matches!(error, ConfigError::Syntax { line: 3, .. }), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[test]
fn a_routes_providers_exist_once_each() {
    assert_eq!(given("[route.print]\nproviders = []").problem().key, "route.print.providers");
    let problem = route("[route.scan]\nproviders = [\"laser\", \"fax\"]").problem();
    assert_eq!((problem.key.as_str(), problem.value.as_deref()), ("route.scan.providers", Some("fax")));
    assert_eq!(problem.hint, "known are inkjet, laser");
    let problem = route("[route.scan]\nproviders = [\"laser\", \"laser\"]").problem();
    assert_eq!(problem.what, "it is there twice");
}

#[test]
fn a_route_for_executors_outside_names_no_provider() {
    let config = given("[route.scan]\nexecutors = \"outside\"\ndeadline = \"1h\"").load().unwrap();
    // The pause, the kernel's patience, the deadline for the provider that is not known here, the clock's step.
    assert_eq!(config.quarantine(&config.route["scan"]), Duration::from_secs(30 + 20 + 3600 + 1));
    let problem = route("[route.scan]\nexecutors = \"outside\"\nproviders = [\"laser\"]").problem();
    assert_eq!(problem.key, "route.scan.providers");
}

#[test]
fn the_attempts_of_a_route_are_bounded() {
    for attempts in [1, 32] {
        let config = route(&format!("attempts = {attempts}")).load().unwrap();
        assert_eq!(config.provider_calls_max(print(&config)), attempts);
    }
    for attempts in ["0", "33", "4294967295", "-1", "4294967296"] {
        assert_eq!(route(&format!("attempts = {attempts}")).problem().key, "route.print.attempts", "{attempts}");
    }
}

#[test]
fn a_breaker_that_never_opens_a_burst_without_a_rate_and_an_endless_budget_are_refused() {
    let never = provider("base_url = \"https://laser.example\"\nbreaker = { consecutive = 0, ratio = 0.0 }").problem();
    assert_eq!(never.key, "provider.laser.breaker");
    let burst = provider("base_url = \"https://laser.example\"\nlimits = { burst = 5 }").problem();
    assert_eq!(burst.key, "provider.laser.limits.burst");
    let endless = route("retry_budget = { percent = 1001 }").problem();
    assert_eq!(endless.key, "route.print.retry_budget.percent");
    let config = provider("base_url = \"https://laser.example\"\nbreaker = {}\nlimits = { per_second = 0.5 }").load().unwrap();
    let laser = &config.provider["laser"];
    assert_eq!((laser.breaker.as_ref().unwrap().consecutive, laser.limits.per_second), (5, Some(0.5)));
    let config = route("retry_budget = { percent = 20 }").load().unwrap();
    assert_eq!(print(&config).retry_budget.unwrap().min_per_second, 1);
}

#[test]
fn replays_are_counted_apart_and_only_at_providers_that_honour_keys() {
    let config = route("attempts = 4").load().unwrap();
    assert_eq!((config.provider_calls_max(print(&config)), config.provider_replays_max(print(&config))), (4, 0));
    let given = route("attempts = 4").flag("provider.laser.idempotency", r#"{ header = "Idempotency-Key", ttl = "24h" }"#);
    let config = given.load().unwrap();
    assert_eq!((config.provider_calls_max(print(&config)), config.provider_replays_max(print(&config))), (4, 20));
    let line = "route print: at most 4 provider calls and 20 replays a job; quarantine 3m21s";
    assert!(config.describe().contains(line), "{}", config.describe());
    assert_eq!(config.describe_json()["routes"]["print"]["provider_replays_max"], 20);
}

#[test]
fn a_race_begins_after_a_time_or_a_percentile_with_a_fallback() {
    let race = |after: &str| route(&format!("class = \"race\"\neffects = \"pure\"\nrace = {{ max = 2, {after} }}"));
    let config = race("after = \"p95\", after_fallback = \"10s\"").load().unwrap();
    let tracked = print(&config).tracked().unwrap();
    assert_eq!((tracked.percentile, tracked.fallback), (95, Duration::from_secs(10)));
    assert_eq!(config.rules(print(&config)).race_after_ms, 10, "the earliest");
    assert!(config.describe().contains("route.print.race.after = \"p95\""));
    let config = race("after = \"10s\"").load().unwrap();
    assert_eq!((print(&config).tracked(), config.rules(print(&config)).race_after_ms), (None, 10_000));
    for (after, key) in [
        ("after = \"p95\"", "race.after_fallback"),
        ("after = \"p95\", after_fallback = \"5m\"", "race.after_fallback"),
        ("after = \"10s\", after_fallback = \"10s\"", "race.after_fallback"),
        ("after = \"p49\", after_fallback = \"10s\"", "race.after"),
        ("after = \"p100\", after_fallback = \"10s\"", "race.after"),
    ] {
        let problem = race(after).problem();
        assert_eq!(problem.key, format!("route.print.{key}"), "{after}: {problem}");
    }
    for after in ["p", "p256", "often"] {
        let problems = race(&format!("after = \"{after}\", after_fallback = \"10s\"")).problems();
        assert!(problems.iter().any(|problem| problem.key == "route.print.race.after"), "{after}: {problems:#?}");
    }
}

#[test]
fn questions_have_an_order_and_only_pure_work_is_abandoned_by_a_policy() {
    let config = route("").load().unwrap();
    let reconcile = print(&config).reconcile();
    let told = [reconcile.first, reconcile.max, reconcile.give_up].map(|time| time.as_secs());
    assert_eq!((told, reconcile.abandon_after), ([2, 300, 3600], None));
    let config = route("effects = \"pure\"\nabandon_after = \"30m\"\nreconcile = { first = \"1s\" }").load().unwrap();
    let reconcile = print(&config).reconcile();
    assert_eq!((reconcile.first.as_secs(), reconcile.max.as_secs()), (1, 300));
    assert_eq!(reconcile.abandon_after, Some(Duration::from_secs(1800)));
    for (keys, key) in [
        ("reconcile = { first = \"0s\" }", "reconcile.first"),
        ("reconcile = { first = \"2m\", max = \"1m\" }", "reconcile.max"),
        ("reconcile = { first = \"2m\", give_up = \"1m\" }", "reconcile.give_up"),
        ("reconcile = { max = \"367d\" }", "reconcile.max"),
        ("reconcile = { often = true }", "reconcile.often"),
        ("abandon_after = \"30m\"", "abandon_after"),
        ("effects = \"pure\"\nabandon_after = \"0s\"", "abandon_after"),
    ] {
        let problem = route(keys).problem();
        assert_eq!(problem.key, format!("route.print.{key}"), "{keys}: {problem}");
    }
}

#[test]
fn a_race_needs_pure_effects_and_two_who_run() {
    let race = |keys: &str| route(&format!("class = \"race\"\n{keys}"));
    let config = race("effects = \"pure\"\nrace = { after = \"1s\", max = 2 }").load().unwrap();
    assert_eq!((print(&config).class, config.rules(print(&config)).race_after_ms), (Class::Race, 1000));
    assert_eq!(race("race = { after = \"1s\", max = 2 }").problem().key, "route.print.effects");
    assert_eq!(race("effects = \"pure\"").problem().key, "route.print.race");
    for max in [0, 1, 4] {
        let problem = race(&format!("effects = \"pure\"\nrace = {{ after = \"1s\", max = {max} }}")).problem();
        assert_eq!(problem.key, "route.print.race.max");
    }
    assert_eq!(race("effects = \"pure\"\nrace = { after = \"5m\", max = 2 }").problem().key, "route.print.race.after");
    assert_eq!(race("effects = \"pure\"\nrace = { after = \"1s\" }").problem().key, "route.print.race");
    assert_eq!(route("race = { after = \"1s\", max = 2 }").problem().key, "route.print.race");
}

#[test]
fn only_definite_failures_lead_to_failover() {
    for (word, parsed) in [
        ("not_sent", FailoverOn::NotSent),
        ("rejected:400", FailoverOn::Rejected { status: 400 }),
        ("rejected:599", FailoverOn::Rejected { status: 599 }),
        ("invalid_output", FailoverOn::InvalidOutput),
    ] {
        let config = route(&format!("failover_on = [\"{word}\"]")).load().unwrap();
        assert_eq!(print(&config).failover_on, [parsed]);
        assert_eq!(parsed.to_string(), word);
    }
    for word in [
        "unknown",
        "timeout",
        "rejected",
        "rejected:",
        "rejected:399",
        "rejected:600",
        "rejected:+42",
        "rejected:0429",
        "NOT_SENT",
    ] {
        let problem = route(&format!("failover_on = [\"{word}\"]")).problem();
        assert!(problem.what.contains(word) && problem.key == "route.print.failover_on", "{problem}");
    }
    assert_eq!(route("failover_on = [\"not_sent\", \"not_sent\"]").problem().what, "it is there twice");
}

#[test]
fn the_key_stands_as_long_as_the_result() {
    let config = route("retention = \"1h\"\nkey_life = \"2h\"").load().unwrap();
    let rules = config.rules(print(&config));
    assert_eq!((rules.retention_ms, rules.key_life_ms), (3_600_000, 7_200_000));
    let config = route("retention = \"1h\"").load().unwrap();
    assert_eq!(print(&config).key_life(), Duration::from_secs(3600));
    let problem = route("retention = \"2h\"\nkey_life = \"1h\"").problem();
    assert!(problem.key == "route.print.key_life" && problem.what.contains("retention = 2h"), "{problem}");
}

#[test]
fn the_quarantine_outlasts_a_paused_gateway() {
    let config = route("").load().unwrap();
    let shortest = Duration::from_secs(30 + 120 + 30 + 1) + TCP_USER_TIMEOUT;
    assert_eq!(
        config.quarantine(print(&config)),
        shortest,
        "the longest call of its providers counts, and how long it listens on"
    );
    let config = route("[runtime]\npause_max = \"2m\"").load().unwrap();
    assert_eq!(config.quarantine(print(&config)), shortest + Duration::from_secs(90));
    let config = route("quarantine = \"1h\"").load().unwrap();
    assert_eq!(config.rules(print(&config)).quarantine_ms, 3_600_000);
    let exactly = route(&format!("quarantine = \"{}s\"", shortest.as_secs())).load().unwrap();
    assert_eq!(exactly.quarantine(print(&exactly)), shortest);
    let problem = route(&format!("quarantine = \"{}s\"", shortest.as_secs() - 1)).problem();
    let both = (problem.value.as_deref(), problem.what.contains("3m 21s"));
    assert_eq!(both, (Some("3m 20s"), true), "{problem}");
}

#[test]
fn the_lease_has_room_for_its_margin_and_its_renewal() {
    let margin = |margin: &str| with(&format!("[runtime]\nlease = \"10s\"\nlease_margin = \"{margin}\""));
    margin("4999ms").load().unwrap();
    margin("60ms").load().unwrap();
    for refused in ["5s", "59ms", "0s", "1h"] {
        assert_eq!(margin(refused).problem().key, "runtime.lease_margin", "{refused}");
    }
    let problem = with("[runtime]\nlease = \"1200ms\"\nlease_margin = \"100ms\"").problem();
    assert!(problem.key == "runtime.lease" && problem.hint.contains("1s 500ms"), "{problem}");
}

#[test]
fn the_grace_of_a_blob_outlasts_the_lease_of_who_died() {
    let grace = |grace: &str| with(&format!("[runtime]\nlease = \"2m\"\nlease_margin = \"10s\"\nblob_grace = \"{grace}\""));
    grace("241s").load().unwrap();
    let problem = grace("240s").problem();
    assert!(problem.key == "runtime.blob_grace" && problem.hint.contains("4m 1s"), "{problem}");
}

#[test]
fn a_phase_of_a_call_is_not_longer_than_the_call() {
    let timeouts = |keys: &str| provider(&format!("base_url = \"http://laser\"\ntimeouts = {{ {keys} }}"));
    let config = timeouts("total = \"1s\"").load().unwrap();
    assert_eq!(config.provider["laser"].timeouts.first_byte, Duration::from_secs(1), "what is not set gives way");
    for phase in ["connect", "first_byte", "idle"] {
        let problem = timeouts(&format!("total = \"1s\", {phase} = \"2s\"")).problem();
        assert_eq!(problem.key, format!("provider.laser.timeouts.{phase}"));
        assert_eq!(timeouts(&format!("{phase} = \"0s\"")).problem().key, format!("provider.laser.timeouts.{phase}"));
    }
}

#[test]
fn a_base_url_is_http_without_credentials() {
    for url in ["http://laser", "https://laser.example:8443/v1", "http://[::1]:80", "http://127.0.0.1:1/"] {
        provider(&format!("base_url = \"{url}\"")).load().unwrap();
    }
    for url in [
        "",
        "laser.example",
        "ftp://laser",
        "https://",
        "https:///v1",
        "/v1",
        "http://laser/?a=b",
        "http://laser/#a",
        "http://a b",
    ] {
        assert_eq!(provider(&format!("base_url = \"{url}\"")).problem().key, "provider.laser.base_url", "{url}");
    }
    let error = provider("base_url = \"https://app:hunter2@laser\"").load().unwrap_err().to_string();
    assert!(error.contains("holds a credential") && !error.contains("hunter2"), "{error}");
    assert_eq!(provider("adapter = \"simulated\"\nbase_url = \"http://laser\"").problem().key, "provider.laser.base_url");
    provider("adapter = \"simulated\"").load().unwrap();
}

#[test]
fn a_credential_is_taken_from_where_its_entry_says_and_never_printed() {
    let auth = |keys: &str| provider(&format!("base_url = \"http://laser\"\nauth = {{ {keys} }}"));
    let given = auth("bearer_env = \"LASER_TOKEN\"").variable("LASER_TOKEN", "hunter2");
    let config = given.load().unwrap();
    assert_eq!(config.bearer("laser").unwrap().reveal(), "hunter2");
    assert!(config.bearer("inkjet").is_none());
    for print in
        [format!("{config:?}"), config.describe(), config.describe_json().to_string(), serde_json::to_string(&config).unwrap()]
    {
        assert!(!print.contains("hunter2"), "{print}");
    }
    assert!(config.describe().contains("LASER_TOKEN"));

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "from a file\n").unwrap();
    let from_file = auth(&format!("bearer_file = \"{}\"", file.display()));
    assert!(from_file.problem().what.contains("visible ASCII"));
    std::fs::write(&file, "from-a-file\n").unwrap();
    assert_eq!(from_file.load().unwrap().bearer("laser").unwrap().reveal(), "from-a-file");
}

#[test]
fn a_credential_that_cannot_be_had_is_told_by_its_name_never_its_value() {
    let auth = |keys: &str| provider(&format!("base_url = \"http://laser\"\nauth = {{ {keys} }}"));
    let problem = auth("bearer_env = \"LASER_TOKEN\"").problem();
    assert!(problem.what.contains("LASER_TOKEN") && problem.what.contains("not set"), "{problem}");
    for bad in ["", "hunter2\nx-evil: 1", "hunter2 ", "h\u{fc}nter2"] {
        let error = auth("bearer_env = \"LASER_TOKEN\"").variable("LASER_TOKEN", bad).load().unwrap_err().to_string();
        assert!(error.contains("LASER_TOKEN") && !error.contains("nter2"), "{error}");
    }
    assert!(auth("bearer_file = \"/nowhere/token\"").problem().what.contains("/nowhere/token"));
    assert_eq!(auth("bearer_env = \"A\", bearer_file = \"/b\"").problem().key, "provider.laser.auth");
    // Somebody who writes the secret itself into the file does not find it in a log.
    for keys in ["bearer = \"hunter2\"", "bearer_env = [\"hunter2\"]"] {
        let error = auth(keys).load().unwrap_err().to_string();
        assert!(error.contains("provider.laser.auth") && !error.contains("hunter2"), "{error}");
    }
    for keys in ["auth = \"Bearer hunter2\"", "headers = { authorization = \"Bearer hunter2\" }"] {
        let error = provider(&format!("base_url = \"http://laser\"\n{keys}")).load().unwrap_err().to_string();
        assert!(error.contains("provider.laser.") && !error.contains("hunter2"), "{error}");
    }
    let error = with("").variable("ONEJOB_PROVIDER__LASER__AUTH__BEARER", "hunter2").load().unwrap_err().to_string();
    assert!(error.contains("ONEJOB_PROVIDER__LASER__AUTH__BEARER") && !error.contains("hunter2"), "{error}");
}

#[test]
fn the_password_of_redis_is_never_printed() {
    let config = with("[redis]\nurl = \"redis://app:hunter2@redis.example:6379/2\"").load().unwrap();
    assert_eq!(config.redis.url.as_ref().unwrap().reveal(), "redis://app:hunter2@redis.example:6379/2");
    for print in [format!("{config:?}"), config.describe(), config.describe_json().to_string()] {
        assert!(!print.contains("hunter2"), "{print}");
    }
    assert!(config.describe().contains("redis://(hidden)@redis.example:6379/2"), "{}", config.describe());
    for url in ["http://app:hunter2@host", "app:hunter2@host", "redis://", "redis:///0", ""] {
        let problem = with(&format!("[redis]\nurl = \"{url}\"")).problem();
        assert!(problem.key == "redis.url" && !problem.to_string().contains("hunter2"), "{problem}");
    }
    with("[redis]\nurl = \"redis+unix:///run/redis.sock\"").load().unwrap();
}

#[test]
fn a_header_of_a_provider_that_may_hold_a_credential_is_hidden() {
    let config =
        provider("base_url = \"http://laser\"\nheaders = { x-api-key = \"hunter2\", x-tenant = \"shop\" }").load().unwrap();
    let print = config.describe();
    assert!(!print.contains("hunter2") && print.contains("\"shop\""), "{print}");
}

#[test]
fn an_owner_has_tokens_of_its_own() {
    let token = token_sha256("open sesame");
    assert_eq!(token, "41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb");
    let owner = |tokens: &str| with(&format!("[owner.shop]\ntokens_sha256 = {tokens}"));
    let config = owner(&format!("[\"{}\"]", token.to_uppercase())).load().unwrap();
    assert_eq!(config.owner["shop"].tokens_sha256, std::slice::from_ref(&token));
    for (tokens, word) in [("[]", "no token"), ("[\"open sesame\"]", "11 characters"), ("[\"zz\"]", "64 hexadecimal digits")] {
        let problem = owner(tokens).problem();
        assert!(problem.key == "owner.shop.tokens_sha256" && problem.what.contains(word), "{problem}");
        assert!(!problem.to_string().contains("sesame"), "{problem}");
    }
    let twice = owner(&format!("[\"{token}\"]\n[owner.till]\ntokens_sha256 = [\"{token}\"]"));
    assert_eq!(twice.problem().key, "owner.till.tokens_sha256");
    assert_eq!(owner(&format!("[\"{token}\"]\nroles = []")).problem().key, "owner.shop.roles");
    assert_eq!(owner(&format!("[\"{token}\"]\nroles = [\"admin\"]")).problem().key, "owner.shop.roles");
    assert!(with(&format!("[owner.\"a b\"]\ntokens_sha256 = [\"{token}\"]")).problem().what.contains("visible ASCII"));
}

#[test]
fn without_owners_only_this_machine_may_submit() {
    for listen in ["127.0.0.1:0", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        with("").flag("server.listen", listen).load().unwrap();
    }
    for listen in ["0.0.0.0:7470", "[::]:7470", "10.0.0.7:7470"] {
        let problem = with("").flag("server.listen", listen).problem();
        assert_eq!((problem.key.as_str(), problem.value.as_deref()), ("server.listen", Some(listen)));
        let token = token_sha256("t");
        with(&format!("[owner.shop]\ntokens_sha256 = [\"{token}\"]")).flag("server.listen", listen).load().unwrap();
        with("").flag("server.listen", listen).flag("server.trusted_owner_header", "x-owner").load().unwrap();
    }
}

#[test]
fn the_owners_header_is_one_that_nothing_else_uses() {
    for header in ["authorization", "Idempotency-Key", "host", "x owner", "", "content-length"] {
        let problem = with("").flag("server.trusted_owner_header", header).problem();
        assert_eq!(problem.key, "server.trusted_owner_header", "{header}");
    }
    let token = token_sha256("t");
    let both = with(&format!("[owner.shop]\ntokens_sha256 = [\"{token}\"]")).flag("server.trusted_owner_header", "x-owner");
    both.load().unwrap();
    let named = |roles: &str| {
        with(&format!("[owner.shop]\ntokens_sha256 = []\nroles = [{roles}]")).flag("server.trusted_owner_header", "x-owner")
    };
    named("\"submit\"").load().unwrap();
    assert_eq!(named("\"submit\", \"operate\"").problem().key, "owner.shop.tokens_sha256", "only a token can operate");
}

#[test]
fn names_fit_labels_and_urls() {
    let named = |name: &str| {
        given(&format!("[provider.\"{name}\"]\nbase_url = \"http://laser\"\n[route.\"{name}\"]\nproviders = [\"{name}\"]"))
    };
    for name in ["a", "0", "laser-2_b", &"a".repeat(32)] {
        named(name).load().unwrap();
    }
    for name in ["", "A", "-a", "_a", "a.b", "a/b", "a b", "\u{e9}", &"a".repeat(33)] {
        let problems = named(name).problems();
        assert_eq!(problems.len(), 2, "{name:?}: {problems:#?}");
        assert!(problems.iter().all(|problem| problem.what.contains("1 to 32")), "{problems:#?}");
    }
}

#[test]
fn the_numbers_of_routes_and_providers_are_bounded() {
    let many = |routes: usize, providers: usize| {
        let mut toml = String::new();
        for n in 0..providers {
            toml.push_str(&format!("[provider.p{n}]\nbase_url = \"http://p\"\n"));
        }
        for n in 0..routes {
            toml.push_str(&format!("[route.r{n}]\nproviders = [\"p0\"]\n"));
        }
        given(&toml)
    };
    many(256, 256).load().unwrap();
    assert!(many(257, 1).problem().what.contains("257; the limit is 256"));
    assert_eq!(many(0, 257).problem().key, "provider");
}

#[test]
fn a_stream_of_clicks_has_the_defaults_of_the_library_and_its_limits() {
    let stream = |keys: &str| given(&format!("{BASE}[stream.clicks]\nfields = [\"user\", \"/ad/id\"]\n{keys}"));
    let config = stream("").load().unwrap();
    let declared = config.stream["clicks"].stream("clicks");
    assert_eq!(declared, onejob::dedup::Stream::new("clicks", &["user", "/ad/id"]));
    let all = "window = \"7d\"\nslices = 3\nshards = 5\nexpected = 70000\nkeep = \"1h\"\nlease = \"5m\"\nmirrored = true";
    let [week, hour, five] = [7 * 86_400, 3600, 300].map(Duration::from_secs);
    let expected = onejob::dedup::Stream {
        window: week,
        slices: 3,
        shards: 5,
        expected: 70_000,
        keep: hour,
        lease: five,
        mirrored: true,
        ..declared
    };
    assert_eq!(stream(all).load().unwrap().stream["clicks"].stream("clicks"), expected);
    for (keys, key, what) in [
        ("window = \"999ms\"", "window", "it must be 1s to"),
        ("window = \"367days\"", "window", "it must be 1s to"),
        ("slices = 0", "slices", "it must be 1 to 64"),
        ("slices = 65", "slices", "it must be 1 to 64"),
        ("shards = 0", "shards", "it must be 1 to 256"),
        ("shards = 257", "shards", "it must be 1 to 256"),
        ("expected = 0", "expected", "it must be 1 to 1000000000000"),
        ("expected = 1000000000001", "expected", "it must be 1 to 1000000000000"),
        ("keep = \"0s\"", "keep", "it must be 1s to 1day, the window"),
        ("keep = \"25h\"", "keep", "it must be 1s to 1day, the window"),
        ("window = \"1m\"\nkeep = \"601s\"", "keep", "it must be 1s to 10m"),
        ("lease = \"25h\"", "lease", "it must be 1s to 1day, the window"),
        ("lease = \"0s\"", "lease", "it must be 1s to 1day, the window"),
        ("size = 7", "size", "unknown key"),
        ("window = 7", "window", "a number stands where something else is wanted"),
        ("mirrored = \"yes\"", "mirrored", "a text stands where something else is wanted"),
    ] {
        let problem = stream(keys).problem();
        assert_eq!(problem.key, format!("stream.clicks.{key}"), "{problem}");
        assert!(problem.what.contains(what), "{problem}");
    }
    let many: Vec<String> = (0..17).map(|field| format!("\"f{field}\"")).collect();
    for (fields, what) in [
        ("[]".to_owned(), "it names no field"),
        ("[\"user\", \"user\"]".to_owned(), "it is there twice"),
        ("[\"\"]".to_owned(), "a field has no name"),
        ("[\"/a~2\"]".to_owned(), "no JSON pointer"),
        (format!("[{}]", many.join(", ")), "there are 17; the limit is 16"),
    ] {
        let problem = given(&format!("[stream.clicks]\nfields = {fields}")).problem();
        assert_eq!(problem.key, "stream.clicks.fields", "{problem}");
        assert!(problem.what.contains(what), "{problem}");
    }
    assert!(given("[stream.clicks]").problem().what.contains("it names no field"));
    assert!(given("[stream.\"a.b\"]\nfields = [\"user\"]").problem().what.contains("1 to 32"));
    let streams: String = (0..257).map(|n| format!("[stream.s{n}]\nfields = [\"user\"]\n")).collect();
    assert!(given(&streams).problem().what.contains("257; the limit is 256"));
}

#[test]
fn every_number_and_time_has_limits() {
    for (key, values) in [
        ("server.body_bytes_max", &["0", "536870913"][..]),
        ("server.head_bytes_max", &["0", "8191", "1048577"]),
        ("server.headers_max", &["0", "1001"]),
        ("server.connections_max", &["0", "1000001"]),
        ("server.waiters_max", &["0"]),
        ("server.head_timeout", &["0s", "367d"]),
        ("server.body_timeout", &["0s"]),
        ("server.wait_max", &["0s"]),
        ("server.proxy_wait", &["0s"]),
        ("server.conflict_status", &["200", "400"]),
        ("server.cors_origins", &["[\"*\"]", "[\"https://shop.example/\"]", "[\"shop.example\"]", "[\"https://u@shop\"]"]),
        ("redis.prefix", &["", "OJ", "a:b", "abcdefghijklmnopq", "{a}"]),
        ("redis.lanes", &["0", "65"]),
        ("redis.pool_max", &["0", "2", "1025"]),
        ("redis.connect_timeout", &["0s"]),
        ("redis.response_timeout", &["0s"]),
        ("redis.durability", &["disk", "{ replicated = 0 }", "{ replicated = 17 }", "{ replicated = 1 }", "{ copies = 1 }"]),
        ("redis.durability_timeout", &["0s", "367d"]),
        ("redis.data_dir", &[""]),
        ("runtime.sweep", &["0s"]),
        ("runtime.drain", &["367d"]),
        ("runtime.jobs_max", &["0"]),
        ("runtime.pause_max", &["0s", "400d"]),
        ("runtime.result_bytes_max", &["0", "536870913"]),
        ("runtime.blob_bytes_min", &["0", "1048577"]),
        ("runtime.blob_grace", &["59s"]),
        ("runtime.spool_dir", &[""]),
        ("runtime.spool_bytes_max", &["1", "1125899906842625"]),
        ("route.print.deadline", &["0s", "99ms", "367d"]),
        ("route.print.retention", &["0s", "1ns"]),
        ("route.print.backoff", &["0s"]),
        ("route.print.fingerprint_ignore", &["[\"\"]", "[\"a\"]", "[\"/a~2\"]", "[\"/a\", \"/a\"]"]),
        (
            "route.print.forward_headers",
            &["[\"authorization\"]", "[\"Cookie\"]", "[\"host\"]", "[\"a b\"]", "[\"X-A\", \"x-a\"]"],
        ),
        ("provider.laser.path", &["prints", "", "/a b", "/a#b"]),
        ("provider.laser.method", &["post", "", "CONNECT", "P OST"]),
        ("provider.laser.not_executed", &["[200]", "[600]", "[429, 429]"]),
        ("provider.laser.stream.end", &["[]", "done", "[\"eof\", \"data: x\"]"]),
        ("provider.laser.stream.error", &["error"]),
        ("provider.laser.cost", &["usage", "/a~2", ""]),
        ("provider.laser.limits.in_flight", &["0"]),
        ("provider.laser.limits.fleet_in_flight", &["0", "1000001"]),
        ("provider.laser.limits.per_second", &["0", "-1", "1000001"]),
        ("provider.laser.limits.hold_max", &["0s", "13h"]),
        ("provider.laser.breaker.ratio", &["-0.1", "1.1"]),
        ("provider.laser.breaker.min_calls", &["0"]),
        ("provider.laser.breaker.window", &["999ms", "13h"]),
        ("provider.laser.breaker.open", &["0s"]),
        ("provider.laser.breaker.open_max", &["29s", "13h"]),
        ("provider.laser.breaker.probe_lease", &["0s", "13h"]),
        ("provider.laser.breaker.statuses", &["[200]", "[429, 429]"]),
        ("provider.laser.ca_file", &["/nowhere/ca.pem"]),
        ("provider.laser.behaviour", &["slow"]),
    ] {
        for value in values {
            let problems = with("").flag(key, value).problems();
            let problem =
                problems.iter().find(|problem| problem.key == key).unwrap_or_else(|| panic!("{key} = {value}: {problems:#?}"));
            assert_eq!(problem.origin.as_deref(), Some(format!("flag {key}").as_str()));
        }
    }
}

#[test]
fn the_description_tells_each_value_its_origin_and_what_a_job_may_cost() {
    let given = with("attempts = 4\n[redis]\nprefix = \"shop\"").variable("ONEJOB_REDIS__LANES", "3");
    let config = given.load().unwrap();
    let text = config.describe();
    let line = |key: &str| text.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("{key} in {text}"));
    assert!(line("redis.prefix = \"shop\"").ends_with(&format!("# {}", given.file().display())));
    assert!(line("redis.lanes = 3").ends_with("# ONEJOB_REDIS__LANES"));
    assert!(line("redis.pool_max = 16").ends_with("# default"));
    assert!(line("runtime.lease = \"15s\"").ends_with("# default"));
    assert_eq!(line("route print"), "route print: at most 4 provider calls a job; quarantine 3m21s");
    let json = config.describe_json();
    assert_eq!(json["routes"]["print"]["provider_calls_max"], 4);
    assert_eq!(json["routes"]["print"]["quarantine_ms"], 201_000);
    assert_eq!(json["settings"]["redis"]["prefix"], "shop");
}

#[test]
fn a_late_answer_is_listened_for_no_longer_than_the_limit() {
    let toml = |linger: &str| {
        format!(
            r#"
            [provider.laser]
            base_url = "http://127.0.0.1:1"
            timeouts = {{ total = "3s"{linger} }}
            [route.print]
            providers = ["laser"]
            "#
        )
    };
    let linger = |text: &str| given(&toml(text)).load().map(|config| config.provider["laser"].timeouts.linger);
    assert_eq!(linger("").unwrap(), Duration::from_secs(30));
    assert_eq!(linger(", linger = \"0s\"").unwrap(), Duration::ZERO);
    assert_eq!(linger(", linger = \"1h\"").unwrap(), Duration::from_secs(3600));
    let refused = linger(", linger = \"3601s\"").unwrap_err().to_string();
    assert!(refused.contains("provider.laser.timeouts.linger = 1h 1s") && refused.contains("longer than 1h"), "{refused}");
}

#[test]
fn the_end_marker_of_a_stream_is_one_text_or_several() {
    use onejob::config::{Stream, StreamEnd, StreamError};
    let stream = |given: Given| given.load().unwrap().provider["laser"].stream.clone();
    assert_eq!(stream(with("")), Stream::default());
    let one = stream(with("").flag("provider.laser.stream.end", "event: message_stop").flag("provider.laser.stream.error", "[]"));
    assert_eq!(one, Stream { end: vec![StreamEnd::Event("message_stop".to_owned())], error: Vec::new() });
    let several = with("").flag("provider.laser.stream", r#"{ end = ["data: [DONE]", "event: end"], error = "/failure" }"#);
    let several = stream(several);
    assert_eq!(several.end.len(), 2);
    assert_eq!(several.error, [StreamError::Pointer("/failure".to_owned())]);
}

/// An asynchronous provider with these keys beside the preset's.
fn queue(keys: &str) -> Given {
    given(&format!("[provider.press]\npreset = \"job-queue\"\nbase_url = \"https://press.example\"\n{keys}"))
}

#[test]
fn a_preset_fills_an_entry_and_what_the_entry_says_wins() {
    use onejob::config::{Adapter, Means};
    let config =
        queue("timeouts = { total = \"5m\" }\nstatus = { retention = \"2h\", states = { lost = \"failed\" } }\n").load().unwrap();
    let press = &config.provider["press"];
    assert_eq!((press.adapter, press.path.as_str()), (Adapter::AsyncHttp, "/jobs"));
    let status = press.status.as_ref().unwrap();
    assert_eq!((status.path.as_str(), status.result.as_str()), ("/jobs/{{ remote.id }}", "/result"));
    assert_eq!(status.retention, Some(Duration::from_secs(7200)));
    assert_eq!((status.states["lost"], status.states["completed"]), (Means::Failed, Means::Succeeded));
    assert!(config.describe().contains("provider.press.path = \"/jobs\""));

    for preset in ["openai-chat", "openai-responses", "openai-embeddings"] {
        let config = given(&format!("[provider.model]\npreset = \"{preset}\"\n")).load().unwrap();
        assert_eq!(config.provider["model"].base_url, "https://api.openai.com/v1");
        assert!(config.provider["model"].idempotency.is_none(), "not documented, so not believed");
        let config =
            given(&format!("[provider.model]\npreset = \"{preset}\"\nbase_url = \"http://127.0.0.1:8000/v1\"\n")).load().unwrap();
        assert_eq!(config.provider["model"].base_url, "http://127.0.0.1:8000/v1");
    }
    let problem = given("[provider.model]\npreset = \"openai\"\nbase_url = \"http://a\"\n").problem();
    assert_eq!((problem.key.as_str(), problem.what.as_str()), ("provider.model.preset", "\"openai\" is not known here"));
}

#[test]
fn the_entry_of_the_page_on_providers_loads() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/PROVIDERS.md")).unwrap();
    let (_, rest) = page.split_once("```toml\n").unwrap();
    let entry = given(rest.split("```").next().unwrap());
    let config = entry.variable("PRESS_SECRET", "0123456789abcdef").variable("PRESS_TOKEN", "hunter2-hunter2").load().unwrap();
    let words = config.assertions();
    assert_eq!(
        words[0],
        "provider press: status by its id, remembered for 1day; found by our key; does not honour our key; \
         cancels what has not begun; calls back"
    );
    for preset in ["openai-chat", "openai-responses", "openai-embeddings", "job-queue"] {
        assert!(page.contains(&format!("| `{preset}` |")), "{preset} has no row");
    }
}

#[test]
fn each_assertion_of_an_entry_has_a_line_of_its_own() {
    let keys = "not_executed = [429, 503]\nidempotency = { header = \"idempotency-key\", ttl = \"24h\" }\n\
                status = { missing = \"not_found\" }\ncancel = { semantics = \"confirmed\" }\n";
    let lines = queue(keys).load().unwrap().assertions();
    let swears = |what: &str| format!("provider press: its entry swears that {what}");
    assert_eq!(
        lines[1..],
        [
            swears("status 429 means that nothing was done"),
            swears("status 503 means that nothing was done"),
            swears("the same key in idempotency-key is the same work, for 1day"),
            swears("404 to a status call within the retention means that it never came there"),
            swears("what is not found by our key within the retention never came there"),
            swears("what it says it stopped is stopped"),
        ]
    );
}

#[test]
fn what_of_a_route_may_surprise_is_told() {
    let remarks = |keys: &str, route: &str| {
        let given = queue(keys);
        let toml = format!("{}[provider.laser]\nbase_url = \"http://a\"\n[route.print]\n{route}", given.toml);
        Given { toml, ..given }.load().unwrap().remarks()
    };
    assert!(remarks("", "providers = [\"press\"]\n").is_empty());
    for gate in ["off", "shadow"] {
        let open = remarks("", &format!("providers = [\"press\", \"laser\"]\ngate = \"{gate}\"\n"));
        let said = format!("route print: gate = \"{gate}\": jobs fail over to providers that have proved nothing; ");
        assert!(open.len() == 1 && open[0].starts_with(&said), "{open:?}");
        assert!(remarks("", &format!("providers = [\"press\"]\ngate = \"{gate}\"\n")).is_empty(), "there is nowhere to go");
    }
    let alone = remarks("", "providers = [\"laser\", \"press\"]\n");
    assert_eq!(alone.len(), 1);
    assert!(alone[0].starts_with("route print: laser alone is called, for gate = \"enforce\""), "{alone:?}");
    let never = remarks("", "providers = [\"laser\"]\nfailover_on = [\"rejected:404\", \"rejected:503\"]\n");
    assert_eq!(never.len(), 1);
    assert!(never[0].contains("\"rejected:503\" waits for what never comes"), "{never:?}");
    let sworn = remarks("not_executed = [503]\n", "providers = [\"press\"]\nfailover_on = [\"rejected:503\"]\n");
    assert!(sworn.is_empty(), "{sworn:?}");
    let early = remarks("cancel = { settle = \"2m\" }\n", "providers = [\"press\"]\nreconcile = { give_up = \"90s\" }\n");
    assert_eq!(early, ["route print: a person is called after 1m 30s, and a cancel at press is settled only after 2m"]);
}

#[test]
fn what_has_the_wrong_type_is_told_what_to_write() {
    for (provider, route, key, what, hint) in [
        ("not_executed = [429, \"503\"]\n", "", "provider.laser.not_executed", "number 2 in it is a text", "a whole number"),
        ("", "gate = false\n", "route.print.gate", "a truth value", "one of its words in quotes"),
        ("", "output = { schema = 7 }\n", "route.print.output.schema", "a number stands", "a path in quotes"),
        ("cost = \"usage\"\n", "", "provider.laser.cost", "no JSON pointer", "/usage/total_tokens"),
    ] {
        let toml =
            format!("[provider.laser]\nbase_url = \"http://a\"\n{provider}[route.print]\nproviders = [\"laser\"]\n{route}");
        let problem = given(&toml).problem();
        assert_eq!(problem.key, key);
        assert!(problem.what.contains(what) && problem.hint.contains(hint), "{problem:?}");
    }
    let race = "[provider.laser]\nbase_url = \"http://a\"\n[route.print]\nproviders = [\"laser\"]\nclass = \"race\"\n\
                effects = \"pure\"\nrace = { after = 10, max = 2 }\n";
    let problems = given(race).problems();
    assert!(problems[0].hint.contains("a time with its unit"), "{problems:?}");
}

#[test]
fn templates_and_pointers_are_checked_when_they_are_read() {
    let long = format!("status = {{ path = \"/{}\" }}\n", "x".repeat(8 << 10));
    for (keys, key, what) in [
        ("status = { path = \"/jobs/{{ remote.name }}\" }\n", "status.path", "undefined value"),
        ("status = { path = \"/jobs/{{ remote.id\" }\n", "status.path", "template, line 1"),
        ("status = { path = \"jobs\" }\n", "status.path", "it must begin with /"),
        (long.as_str(), "status.path", "the limit is 8192"),
        ("status = { id = \"id\" }\n", "status.id", "no JSON pointer"),
        ("status = { states = { done = \"finished\" } }\n", "status.states.done", "\"finished\" is not known here"),
        ("status = { method = \"get\" }\n", "status.method", "no method in capital letters"),
        ("find = { key = \"\" }\n", "find.key", "what is found must name our key"),
        ("find = { header = \"cookie\" }\n", "find.header", "cannot be used here"),
        ("cancel = { semantics = \"maybe\" }\n", "cancel.semantics", "\"maybe\" is not known here"),
        ("submit = { body = \"{{ body\" }\n", "submit.body", "template, line 1"),
        ("submit = { id = \"print/id\" }\n", "submit.id", "no JSON pointer"),
        ("adapter = \"http\"\n", "submit.id", "nothing is handed in"),
        ("submit = { body = \"{{ with(body, a=webhook.url) }}\" }\n", "submit.body", "there is no webhook"),
        ("poll = { factor = 0.5 }\n", "poll.factor", "it must be 1 to 10"),
        ("poll = { first = \"1m\" }\n", "poll.first", "it is longer than max = 30s"),
        ("former_base_urls = [\"ftp://a\"]\n", "former_base_urls", "no http:// or https:// URL"),
    ] {
        let problem = queue(keys).problem();
        assert_eq!(problem.key, format!("provider.press.{key}"), "{keys}: {problem}");
        assert!(problem.what.contains(what), "{keys}: {problem}");
    }
    let one = "[provider.press]\nbase_url = \"https://press.example\"\nsubmit = { body = \"{{ body }}\" }\n";
    assert!(given(one).load().is_ok(), "a body is made for either adapter");
    assert_eq!(given(&one.replace("body = ", "id = \"/id\", body = ")).problem().key, "provider.press.submit.id");
    let bare = "[provider.press]\nadapter = \"async_http\"\nbase_url = \"https://press.example\"\n";
    assert_eq!(given(bare).problem().key, "provider.press.status");
}

#[test]
fn a_webhook_needs_a_secret_an_address_and_somebody_who_tells_it() {
    let body = "submit = { body = \"{{ with(body, hook=webhook.url) }}\" }\n";
    let hook = |more: &str| {
        format!("{body}webhook = {{ secret_env = \"PRESS_SECRET\"{more} }}\n[server]\npublic_url = \"https://jobs.example\"\n")
    };
    let secret = "0123456789abcdef";
    assert!(queue(&hook("")).variable("PRESS_SECRET", secret).load().is_ok());
    for (given, key, what) in [
        (queue(&hook("")), "provider.press.webhook.secret_env", "it is not set"),
        (queue(&hook("")).variable("PRESS_SECRET", "hunter2"), "provider.press.webhook.secret_env", "it has 7 bytes"),
        (
            queue(&hook(", tolerance = \"2h\"")).variable("PRESS_SECRET", secret),
            "provider.press.webhook.tolerance",
            "it must be 1s to 1h",
        ),
        (queue(&hook(", item = \"x\"")).variable("PRESS_SECRET", secret), "provider.press.webhook.item", "no JSON pointer"),
        (
            queue(&hook("").replace("https://jobs", "ftp://jobs")).variable("PRESS_SECRET", secret),
            "server.public_url",
            "no http:// or https:// URL",
        ),
        (
            queue(hook("").split("[server]").next().unwrap()).variable("PRESS_SECRET", secret),
            "server.public_url",
            "it is missing, and provider.press.webhook needs it",
        ),
        (
            queue(&hook("").replace(body, "")).variable("PRESS_SECRET", secret),
            "provider.press.webhook",
            "nothing tells the provider where to call",
        ),
    ] {
        let problem = given.problem();
        assert_eq!(problem.key, key, "{problem}");
        assert!(problem.what.contains(what) && !problem.to_string().contains("hunter2"), "{problem}");
    }
}

/// Whoever starts it elsewhere than beside its files is told where they were looked for.
#[test]
fn a_file_that_is_not_there_is_told_with_the_directory_it_was_looked_up_from() {
    let beside = "[provider.a]\nbase_url = \"http://a.example\"\n[route.r]\nproviders = [\"a\"]\n";
    let here = std::env::current_dir().unwrap().display().to_string();
    for entry in ["qualify = { suite = \"@\" }", "output = { schema = \"@\" }", "input = { assertions = \"@\" }"] {
        let problem = |file| given(&format!("{beside}{}\n", entry.replace('@', file))).problem();
        let relative = problem("nowhere/a.file");
        assert!(relative.what.starts_with(&format!("it cannot be read from the working directory {here}: ")), "{relative}");
        let absolute = problem("/nowhere/a.file");
        assert!(absolute.what.starts_with("it cannot be read: "), "{absolute}");
    }
}

/// What the walk sends is what its certificate covers.
#[test]
fn the_request_of_the_walk_is_covered_by_its_suite() {
    let example = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/qualify");
    let toml = std::fs::read_to_string(example.join("onejob.toml")).unwrap();
    let at = |name: &str| format!("\"{}\"", example.join(name).display());
    let files = ["suites/city.yaml", "schemas/city.json"];
    let toml = files.iter().fold(toml, |toml, file| toml.replace(&format!("\"{file}\""), &at(file)));
    let config = given(&toml).load().unwrap();
    let qualified = config.qualified("city").unwrap();
    let asked = std::fs::read(example.join("ask.json")).unwrap();
    for (contract, bound) in qualified.contracts.iter().zip(&qualified.bound) {
        assert_eq!(&config.bound(contract, &qualified.suite.path, &asked), bound);
    }
}

#[test]
fn a_suite_and_its_limits_are_checked_when_they_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("suite.yaml");
    let good = "cases: [{ name: a, input: { n: 1 }, assert: [output.ok] }]\n";
    std::fs::write(&suite, good).unwrap();
    let route = |more: &str| {
        let effects = if more.contains("effects") { "" } else { "effects = \"pure\"\n" };
        let suite = suite.display();
        let provider = "[provider.a]\nbase_url = \"http://a.example\"\n";
        given(&format!("{provider}[route.r]\nproviders = [\"a\"]\n{effects}qualify = {{ suite = \"{suite}\"{more} }}\n"))
    };
    for (more, key, what) in [
        (", life = \"200d\"", "life", "it is longer than 90d, the limit"),
        (", life = \"40000d\"", "life", "it is longer than 90d, the limit"),
        (", life = \"1d\", renew = \"1d\"", "renew", "not shorter than a certificate's life, 1d"),
        (", renew = \"7d\"", "renew", "not shorter than a certificate's life, 7d"),
        (", renew = \"1d\" }\neffects = \"external\"\nreconcile = { first = \"1s\"", "renew", "would happen for real"),
        (", suspend = { invalid = 3, of = 1001 }", "suspend.of", "1000"),
        (", suspend = { invalid = 3, of = 2 }", "suspend.invalid", "2"),
    ] {
        let problem = route(more).problem();
        assert_eq!(problem.key, format!("route.r.qualify.{key}"), "{problem}");
        assert!(problem.what.contains(what), "{problem}");
    }
    // An empty suite, a case without an assertion, one that is not there.
    std::fs::write(&suite, "cases: []\n").unwrap();
    assert!(route("").problem().what.contains("no cases"));
    std::fs::write(&suite, "cases: [{ name: a, input: {} }]\n").unwrap();
    assert!(route("").problem().what.contains("asserts nothing"));
    // With its line, and what nothing breaks.
    std::fs::write(&suite, format!("runs: 2\n{}", good.replace("output.ok", "output == output"))).unwrap();
    let problem = route("").problem();
    let place = format!("{}:2: case \"a\": assertion 1: output == output: nothing", suite.display());
    assert!(problem.what.starts_with(&place), "{problem}");
    // Parameters for a provider that there is, and for one that there is not.
    let special = |name: &str| format!("providers:\n  {name}: {{ parameters: {{ temperature: 0 }} }}\n{good}");
    std::fs::write(&suite, special("a")).unwrap();
    route("").load().unwrap();
    std::fs::write(&suite, special("b")).unwrap();
    let place = format!("{}:2: providers.b: there is no such provider", suite.display());
    assert_eq!(route("").problem().what, place);
    std::fs::remove_file(&suite).unwrap();
    assert!(route("").problem().what.contains("cannot be read"));
}

#[test]
fn a_suite_is_one_contract_at_each_provider_that_must_prove_itself() {
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("suite.yaml");
    let loaded = |providers: &str, second: &str, text: &str| {
        std::fs::write(&suite, text).unwrap();
        let (first, suite) = ("[provider.a]\nbase_url = \"http://a.example\"\n", suite.display());
        let address = if second.contains("simulated") { "" } else { "base_url = \"http://b.example\"\n" };
        let second = format!("[provider.b]\n{address}{second}\n");
        given(&format!("{first}{second}[route.r]\nproviders = {providers}\nqualify = {{ suite = \"{suite}\" }}\n"))
    };
    let case = |name: &str, input: &str| format!("  - {{ name: {name}, input: {{ {input} }}, assert: [answer.ok] }}\n");
    let cases = |first: &str, second: &str| format!("cases:\n{}{}", case("x", first), case("y", second));
    let (same, both) = (cases("messages: [1]", "messages: [2]"), r#"["a", "b"]"#);
    let relation = "vary: [/messages]\ncases:\n  - name: x\n    values: { n: [1, 2] }\n    input: { t: \"{{ n[0] }}\" }\n    \
         assert: [answer.ok]\n    relations: [{ shuffle: n, same: answer.ok }]\n";
    let wants = "submit = { body = \"{{ with(body, n=body.absent) }}\" }";
    for (second, text, what) in [
        ("", same.clone(), "at provider b: vary is missing, and it has no preset"),
        ("preset = \"job-queue\"", same.clone(), "at provider b: vary is missing, and the body is the user's own"),
        (
            "",
            format!("vary: [/mesages]\n{}", cases("messages: [1], t: 0", "messages: [2], t: 1, model: m")),
            "cases \"x\" and \"y\" differ in what is bound (model, parameters: /messages, /t); vary: /mesages leads nowhere",
        ),
        (
            "",
            format!("vary: [/mesages, /strem]\n{}", cases("messages: [1]", "messages: [1]")),
            "at provider b: vary: /mesages, /strem lead nowhere in any request of the suite",
        ),
        (
            "submit = { body = \"{{ with(body, options=body) }}\" }",
            format!("vary: [/stream, /absent]\n{}", cases("n: 1, stream: true", "n: 2")),
            "differ in what is bound (parameters: /n, /options/n, /options/stream); vary: /absent leads nowhere",
        ),
        ("preset = \"openai-chat\"", cases("t: 1", "t: 2"), "cases \"x\" and \"y\" differ in what is bound (parameters: /t)"),
        ("preset = \"openai-chat\"", cases("model: m", "model: n"), "cases \"x\" and \"y\" differ in what is bound (model)"),
        ("", relation.to_owned(), "cases \"x\" and \"x\": shuffle n differ in what is bound (parameters: /t)"),
        (wants, format!("vary: [/messages]\n{same}"), "at provider b: case \"x\": template, line 1: "),
    ] {
        let problem = loaded(both, second, &text).problem();
        assert_eq!(problem.key, "route.r.qualify.suite", "{problem}");
        assert!(problem.what.contains(what), "{problem}");
    }
    for (second, text) in [
        ("preset = \"openai-chat\"", same.clone()),
        ("", format!("vary: [/messages]\n{same}")),
        ("", format!("vary: [/stream, /messages]\n{same}")),
        ("", format!("vary: [\"\"]\n{same}")),
        ("", format!("vary: []\n{}", cases("messages: [3]", "messages: [3]"))),
        // What names the attempt differs in each.
        ("submit = { body = \"{{ with(body, user=key, n=attempt) }}\" }", format!("vary: [/messages]\n{same}")),
        ("adapter = \"simulated\"", format!("vary: [/messages]\n{same}")),
    ] {
        let config = loaded(both, second, &text).load().unwrap();
        let qualified = config.qualified("r").unwrap();
        assert!(qualified.bound[1].is_ok(), "{second}: {text}");
        let asked = config.bound(&qualified.contracts[1], "", br#"{"messages":[3]}"#);
        assert_eq!(asked.as_ref(), qualified.bound[1].as_ref(), "{second}: {text}");
    }
    // The first one needs no certificate; if one is wanted all the same, it is said why there is none.
    let config = loaded(r#"["a"]"#, "", &same).load().unwrap();
    assert!(config.qualified("r").unwrap().bound[0].as_ref().unwrap_err().contains("vary is missing"));
    // What is wrong with a provider is told once.
    let broken = loaded(both, "path = \"nowhere\"\n", &format!("vary: [/messages]\n{same}"));
    assert_eq!(broken.problem().key, "provider.b.path");
}

/// A route whose suite speaks of its output, at a provider with this preset.
fn speaking_of(expression: &str, preset: &str, output: &str) -> Given {
    let mut given = given("");
    let directory = given.directory.path();
    let suite = format!("vary: [/n]\ncases: [{{ name: a, input: {{ n: 1 }}, assert: [\"{expression}\"] }}]\n");
    std::fs::write(directory.join("suite.yaml"), suite).unwrap();
    std::fs::write(directory.join("schema.json"), r#"{ "type": "object" }"#).unwrap();
    let (suite, schema) = (directory.join("suite.yaml"), directory.join("schema.json"));
    let output = output.replace("SCHEMA", &format!("schema = {schema:?}"));
    given.toml.push_str(&format!(
        "[provider.a]\nbase_url = \"http://a.example\"\n{preset}\n[route.r]\nproviders = [\"a\"]\neffects = \"pure\"\n\
         {output}\nqualify = {{ suite = {suite:?} }}\n"
    ));
    given
}

#[test]
fn a_suite_speaks_of_an_output_that_the_route_names() {
    let chat = "preset = \"openai-chat\"";
    for output in ["", "output = { SCHEMA }"] {
        let problem = speaking_of("output.city == 'Paris'", chat, output).problem();
        assert_eq!(problem.key, "route.r.qualify.suite", "{problem}");
        let what =
            "speak of output.city, but the route names no place of the output: then it is the whole answer, which has no city";
        assert!(problem.what.contains(what), "{problem}");
        assert!(problem.to_string().contains("/choices/0/message/content"), "{problem}");
    }
    for (expression, preset, output) in [
        ("output.city == 'Paris'", chat, "output = { SCHEMA, pointer = \"/choices/0/message/content\", parse = \"json\" }"),
        ("output.usage.total_tokens < 9", chat, ""),
        ("answer.timings.ms < 9", chat, ""),
        ("output.city == 'Paris'", "", ""),
    ] {
        assert!(speaking_of(expression, preset, output).load().is_ok(), "{expression} {preset} {output}");
    }
}

#[test]
fn a_refused_output_makes_no_further_problems_of_a_suite() {
    let pointer = "output = { SCHEMA, pointer = \"choices/0\" }";
    assert_eq!(speaking_of("output.city == 'Paris'", "", pointer).problem().key, "route.r.output.pointer");
    // What is wrong with the suite itself is told all the same.
    let problems = speaking_of("output.city = 'Paris'", "", pointer).problems();
    let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
    assert_eq!(keys, ["route.r.output.pointer", "route.r.qualify.suite"], "{problems:#?}");
}

#[test]
fn what_a_model_is_prompted_with_is_bound_to_the_byte() {
    use onejob::qualify::Part::{ChatTemplate, Tokenizer};
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("suite.yaml", "vary: [/n]\ncases: [{ name: a, input: { n: 1 }, assert: [output.ok] }]\n");
    let bound = |prompt: &str| {
        let prompt = if prompt.is_empty() { String::new() } else { format!("[provider.b.prompt]\n{prompt}\n") };
        let providers = format!("[provider.a]\nbase_url = \"http://a\"\n[provider.b]\nbase_url = \"http://b\"\n{prompt}");
        let suite = dir.path().join("suite.yaml");
        let toml = format!("{providers}[route.r]\nproviders = [\"a\", \"b\"]\nqualify = {{ suite = {suite:?} }}\n");
        given(&toml).load().unwrap().qualified("r").unwrap().bound[1].clone().unwrap()
    };
    let (template, tokenizer) = (dir.path().join("chat.jinja"), dir.path().join("tokenizer.json"));
    write("chat.jinja", "{{ messages }}");
    write("tokenizer.json", "{}");
    let files = format!("chat_template = {template:?}\ntokenizer = {tokenizer:?}\nbos_token = '<s>'\n");
    let certified = bound(&files);
    let differ = |prompt: &str| certified.differ(&bound(prompt));
    assert_eq!(differ(&files), []);
    for other in ["bos_token = '<S>'", "bos_token = ''", "bos_token = '<s>'\neos_token = '</s>'", ""] {
        assert_eq!(differ(&files.replace("bos_token = '<s>'", other)), [ChatTemplate], "{other}");
    }
    assert_eq!(differ(&format!("{files}context_tokens = 9\n")), [ChatTemplate]);
    assert_eq!(differ("apply_template = 'http://b/t'\ntokenize = 'http://b/k'"), [ChatTemplate, Tokenizer]);
    assert_eq!(differ(""), [ChatTemplate, Tokenizer]);
    assert_eq!((bound("").get(ChatTemplate), bound("").get(Tokenizer)), ("", ""));
    // Where the files are does not count, what is in them does.
    std::fs::rename(&template, dir.path().join("moved.jinja")).unwrap();
    assert_eq!(differ(&files.replace("chat.jinja", "moved.jinja")), []);
    write("chat.jinja", "{{ messages}}");
    assert_eq!(differ(&files), [ChatTemplate]);
    write("chat.jinja", "{{ messages }}");
    write("tokenizer.json", "{ }");
    assert_eq!(differ(&files), [Tokenizer]);
}

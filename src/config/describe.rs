//! The whole effective configuration as text or JSON, secrets hidden, with where each value comes from and what follows from it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::secret::HIDDEN;
use super::sources::may_be_secret;
use super::{Cancel, Config, Idempotency, Missing, ProviderEntry, Route, Status};
use crate::policy::{FailoverOn, Gate};
use crate::provider::CancelSemantics;
use crate::provider::http::refuses;

impl Config {
    /// Prints every key with its value and where it comes from, then for each route what follows from them.
    pub fn describe(&self) -> String {
        let mut lines = Vec::new();
        flatten("", &self.settings(), &mut lines);
        let width = lines.iter().map(|(key, value)| key.chars().count() + value.chars().count() + 3).max().unwrap_or(0).min(72);
        let mut out = String::new();
        for (key, value) in lines {
            let line = format!("{key} = {value}");
            let origin = self.origin(&key).unwrap_or("default");
            writeln!(out, "{line:<width$}  # {origin}").expect("a string takes every write");
        }
        for (name, route) in &self.route {
            let calls = self.provider_calls_max(route);
            let word = if calls == 1 { "call" } else { "calls" };
            let replays = match self.provider_replays_max(route) {
                0 => String::new(),
                replays => format!(" and {replays} replays"),
            };
            let quarantine = humantime::format_duration(self.quarantine(route)).to_string().replace(' ', "");
            writeln!(out, "route {name}: at most {calls} provider {word}{replays} a job; quarantine {quarantine}")
                .expect("a string takes every write");
        }
        out
    }

    /// The same for programs: `settings` as they would be written, and `routes` with what follows from them.
    pub fn describe_json(&self) -> Value {
        let routes: serde_json::Map<_, _> = self
            .route
            .iter()
            .map(|(name, route)| {
                let follows = json!({
                    "provider_calls_max": self.provider_calls_max(route),
                    "provider_replays_max": self.provider_replays_max(route),
                    "quarantine_ms": super::whole_ms(self.quarantine(route)),
                    "key_life_ms": super::whole_ms(route.key_life()),
                });
                (name.clone(), follows)
            })
            .collect();
        json!({ "settings": self.settings(), "origins": self.origins, "routes": routes })
    }

    /// What each provider can be asked, and each thing that its entry swears, a line each.
    pub fn assertions(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, entry) in &self.provider {
            lines.push(format!("provider {name}: {}", asked(entry)));
            let swears = |what: String| format!("provider {name}: its entry swears that {what}");
            lines.extend(entry.not_executed.iter().map(|status| swears(format!("status {status} means that nothing was done"))));
            if let Some(Idempotency { header, ttl }) = &entry.idempotency {
                let ttl = humantime::format_duration(*ttl);
                lines.push(swears(format!("the same key in {header} is the same work, for {ttl}")));
            }
            let remembers =
                |missing| missing == Missing::NotFound && entry.status.as_ref().is_some_and(|s| s.retention.is_some());
            if entry.status.as_ref().is_some_and(|status| remembers(status.missing)) {
                lines.push(swears("404 to a status call within the retention means that it never came there".to_owned()));
            }
            if entry.find.as_ref().is_some_and(|find| remembers(find.missing)) {
                lines.push(swears("what is not found by our key within the retention never came there".to_owned()));
            }
            if entry.cancel.as_ref().is_some_and(|cancel| cancel.semantics == CancelSemantics::Confirmed) {
                lines.push(swears("what it says it stopped is stopped".to_owned()));
            }
        }
        lines
    }

    /// Each route on which jobs fail over to providers that have proved nothing, because its gate says so, a line each.
    pub fn open_gates(&self) -> Vec<String> {
        let open = self.route.iter().filter(|(_, route)| route.providers.len() > 1);
        let line = |(name, route): (&String, &Route)| {
            let (gate, counted) = match route.gate {
                Gate::Enforce => return None,
                Gate::Shadow => ("shadow", "what \"enforce\" would deny is counted"),
                Gate::Off => ("off", "nobody counts what \"enforce\" would deny"),
            };
            Some(format!("route {name}: gate = \"{gate}\": jobs fail over to providers that have proved nothing; {counted}"))
        };
        open.filter_map(line).collect()
    }

    /// What of a route may surprise, though it is allowed, a line each.
    pub fn remarks(&self) -> Vec<String> {
        let mut lines = self.open_gates();
        for (name, route) in &self.route {
            match (route.providers.as_slice(), route.gate, &route.qualify) {
                ([first, _, ..], Gate::Enforce, None) => lines.push(format!(
                    "route {name}: {first} alone is called, for gate = \"enforce\" and there is no suite to certify the others by; \
                     gate = \"off\" if they are all the same to you"
                )),
                ([first, others @ ..], Gate::Enforce, Some(_)) if !others.is_empty() => lines.push(format!(
                    "route {name}: what fails at {first} goes only where onejob can-failover --route {name} says yes: {}",
                    others.join(", ")
                )),
                _ => {}
            }
            for failure in &route.failover_on {
                let FailoverOn::Rejected { status } = *failure else { continue };
                let entries = route.providers.iter().filter_map(|provider| self.provider.get(provider));
                if !refuses(status) && !entries.into_iter().any(|entry| entry.not_executed.contains(&status)) {
                    lines.push(format!(
                        "route {name}: failover_on = \"{failure}\" waits for what never comes: {status} is unknown, \
                         unless a provider's not_executed swears that it did nothing"
                    ));
                }
            }
            let give_up = route.reconcile.give_up;
            for provider in &route.providers {
                let cancel = self.provider.get(provider).and_then(|entry| entry.cancel.as_ref());
                let Some(settle) = cancel.map(|cancel| cancel.settle).filter(|settle| *settle > give_up) else { continue };
                let [give_up, settle] = [give_up, settle].map(humantime::format_duration);
                lines.push(format!(
                    "route {name}: a person is called after {give_up}, and a cancel at {provider} is settled only after {settle}"
                ));
            }
        }
        lines
    }

    fn settings(&self) -> Value {
        let mut settings = serde_json::to_value(self).expect("plain values serialize");
        for provider in settings["provider"].as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
            for (name, value) in provider["headers"].as_object_mut().into_iter().flatten() {
                if may_be_secret(name) {
                    *value = json!(HIDDEN);
                }
            }
        }
        settings
    }

    fn origin(&self, key: &str) -> Option<&str> {
        self.origins.get(key).map(String::as_str)
    }
}

/// What a provider can be asked, in words.
fn asked(entry: &ProviderEntry) -> String {
    let time = |duration| humantime::format_duration(duration).to_string();
    let status = match entry.status.as_ref().filter(|status| !status.path.is_empty()) {
        None => "no status call".to_owned(),
        Some(Status { retention: None, .. }) => "status by its id, remembered for nobody knows how long".to_owned(),
        Some(Status { retention: Some(retention), .. }) => format!("status by its id, remembered for {}", time(*retention)),
    };
    let find = if entry.find.is_some() { "found by our key" } else { "not found by our key" };
    let replay = if entry.idempotency.is_some() { "honours our key" } else { "does not honour our key" };
    let cancel = match &entry.cancel {
        None => "no cancel".to_owned(),
        Some(Cancel { semantics, settle, .. }) => match semantics {
            CancelSemantics::None => "no cancel".to_owned(),
            CancelSemantics::QueuedOnly => "cancels what has not begun".to_owned(),
            CancelSemantics::BestEffort => format!("tries to cancel, settled after {}", time(*settle)),
            CancelSemantics::Confirmed => "cancels".to_owned(),
        },
    };
    let webhook = if entry.webhook.is_some() { "calls back" } else { "does not call back" };
    format!("{status}; {find}; {replay}; {cancel}; {webhook}")
}

/// Each leaf with its key. What is absent is left out.
fn flatten(prefix: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&key, member, lines);
            }
        }
        Value::Null => {}
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            lines.push((prefix.to_owned(), value.to_string()));
        }
    }
}

//! The whole effective configuration as text or JSON, secrets hidden, with where each value comes from and what follows from it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Config;
use super::secret::HIDDEN;
use super::sources::may_be_secret;

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

//! A suite as it is written in YAML, with the lines on which things stand.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use serde_saphyr::Spanned;

use super::{Finish, ForProvider, Level, Wrong, one_line};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Written {
    #[serde(default = "five")]
    pub(super) runs: u32,
    #[serde(default)]
    pub(super) failures_max: u32,
    pub(super) levels: Option<Vec<Level>>,
    pub(super) vary: Option<Vec<String>>,
    #[serde(default = "slash_model")]
    pub(super) model: String,
    #[serde(default)]
    pub(super) path: String,
    pub(super) finish: Option<Finish>,
    #[serde(default)]
    pub(super) parameters: Map<String, Value>,
    #[serde(default)]
    pub(super) providers: BTreeMap<String, Spanned<ForProvider>>,
    #[serde(default)]
    pub(super) cases: Vec<Spanned<WrittenCase>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenCase {
    pub(super) name: String,
    #[serde(default)]
    pub(super) values: Map<String, Value>,
    pub(super) input: Value,
    #[serde(default)]
    pub(super) assert: Vec<Spanned<String>>,
    #[serde(default)]
    pub(super) refuse: Vec<Spanned<Refuse>>,
    #[serde(default)]
    pub(super) relations: Vec<Spanned<WrittenRelation>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Refuse {
    pub(super) output: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenRelation {
    pub(super) shuffle: Option<String>,
    pub(super) replace: Option<Map<String, Value>>,
    pub(super) same: String,
}

fn five() -> u32 {
    5
}

fn slash_model() -> String {
    "/model".to_owned()
}

/// On which line something stands, if that is known.
pub(super) fn line_of<T>(spanned: &Spanned<T>) -> Option<u64> {
    Some(spanned.referenced.line()).filter(|line| *line > 0)
}

impl Written {
    pub(super) fn read(text: &str) -> Result<Self, Wrong> {
        serde_saphyr::from_str(text).map_err(|error| {
            let line = error.location().map(|location| location.line()).filter(|line| *line > 0);
            Wrong { line, what: one_line(&error.without_snippet().to_string()) }
        })
    }
}

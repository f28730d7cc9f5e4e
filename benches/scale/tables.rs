//! Tables: as text for people, as JSON for programs, and between their marker lines in a document.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// One table with what was measured.
pub(crate) struct Table {
    /// The name of its marker lines.
    name: &'static str,
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    /// When, under which load, how large.
    note: String,
}

impl Table {
    pub(crate) fn new(name: &'static str, head: &[&str]) -> Table {
        Table { name, head: head.iter().map(|cell| (*cell).to_owned()).collect(), rows: Vec::new(), note: String::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        eprintln!("  {}", line(&cells));
        self.rows.push(cells);
    }

    /// Says something below the table, and how busy the machine is at this moment.
    pub(crate) fn note(&mut self, note: &str) -> Result<()> {
        self.note = format!("{note} Load average while it ran: {}.", load_average()?);
        Ok(())
    }

    pub(crate) fn markdown(&self) -> String {
        let rule = format!("|---|{}", "--:|".repeat(self.head.len().saturating_sub(1)));
        let rows: Vec<String> = self.rows.iter().map(|row| line(row)).collect();
        format!("{}\n{rule}\n{}\n\n{}\n", line(&self.head), rows.join("\n"), self.note)
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({ "table": self.name, "head": self.head, "rows": self.rows, "note": self.note })
    }

    /// Replaces what stands between the marker lines of a document.
    pub(crate) fn write_into(&self, document: &Path) -> Result<()> {
        let text = std::fs::read_to_string(document).with_context(|| format!("cannot read {}", document.display()))?;
        let (open, close) = (format!("<!-- {} -->\n", self.name), format!("<!-- /{} -->", self.name));
        let missing = || format!("{} has no lines {} and {close}", document.display(), open.trim_end());
        let (before, rest) = text.split_once(&open).with_context(missing)?;
        let (_, after) = rest.split_once(&close).with_context(missing)?;
        Ok(std::fs::write(document, format!("{before}{open}{}{close}{after}", self.markdown()))?)
    }
}

fn line(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}

/// Of the last minute: how calm the machine is.
fn load_average() -> Result<String> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}

/// Whole numbers in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap_or("")).collect();
    groups.join(" ")
}

//! What was measured: medians, ratios round by round, as a table for people and as JSON for programs.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use crate::Bounds;

/// One side of one round.
#[derive(Clone, Debug)]
pub(crate) struct Side {
    pub(crate) ops_a_second: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Processor time an operation, by process, in µs.
    pub(crate) cpu_us: BTreeMap<String, f64>,
}

/// What a figure should be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Aim {
    AtLeast(f64),
    AtMost(f64),
}

impl Aim {
    fn is_met(self, figure: f64) -> bool {
        match self {
            Aim::AtLeast(least) => figure >= least,
            Aim::AtMost(most) => figure <= most,
        }
    }

    fn words(self) -> String {
        match self {
            Aim::AtLeast(least) => format!("≥ {least}"),
            Aim::AtMost(most) => format!("≤ {most}"),
        }
    }
}

/// Everything that was measured.
pub(crate) struct Report {
    bounds: Bounds,
    machine: String,
    comparisons: Vec<Comparison>,
    overheads: Vec<(u32, Vec<[Side; 3]>)>,
    alone: Vec<(String, Vec<Side>)>,
    steps: Vec<(String, Vec<Side>)>,
    bytes: Vec<(String, String, f64, Aim)>,
}

struct Comparison {
    name: String,
    ceiling: String,
    aim: Aim,
    rounds: Vec<(Side, Side)>,
}

impl Report {
    pub(crate) fn new(bounds: Bounds) -> Result<Self> {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo")?;
        let model = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name"))
            .unwrap_or(": unknown")
            .trim_start_matches(['\t', ':', ' ']);
        let cores = std::thread::available_parallelism()?;
        let machine = format!("{cores} × {model}");
        Ok(Report {
            bounds,
            machine,
            comparisons: Vec::new(),
            overheads: Vec::new(),
            alone: Vec::new(),
            steps: Vec::new(),
            bytes: Vec::new(),
        })
    }

    pub(crate) fn comparison(&mut self, name: &str, ceiling: &str, aim: Aim, rounds: Vec<(Side, Side)>) {
        let comparison = Comparison { name: name.to_owned(), ceiling: ceiling.to_owned(), aim, rounds };
        eprintln!("  {}", comparison.row());
        self.comparisons.push(comparison);
    }

    /// Of each round: direct, by nginx, by onejob.
    pub(crate) fn overhead(&mut self, connections: u32, rounds: Vec<[Side; 3]>) {
        overhead_rows(connections, &rounds).iter().for_each(|row| eprintln!("  {row}"));
        self.overheads.push((connections, rounds));
    }

    pub(crate) fn alone(&mut self, name: &str, sides: Vec<Side>) {
        eprintln!("  {}", side_row(name, &sides));
        self.alone.push((name.to_owned(), sides));
    }

    pub(crate) fn step(&mut self, name: &str, sides: Vec<Side>) {
        eprintln!("  {}", side_row(name, &sides));
        self.steps.push((name.to_owned(), sides));
    }

    pub(crate) fn bytes(&mut self, name: &str, what: &str, bytes: f64, aim: Aim) {
        eprintln!("  {name}: {bytes:.0}, aim {}: {what}", aim.words());
        self.bytes.push((name.to_owned(), what.to_owned(), bytes, aim));
    }

    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("{}; {} rounds of {:?} a side\n", self.machine, self.bounds.rounds, self.bounds.window);
        if !self.comparisons.is_empty() {
            text.push_str("\n| what | ops/s | ceiling | ops/s | ratio (min–max) | aim | CPU µs/op | ceiling's CPU µs/op |\n");
            text.push_str("|---|--:|---|--:|--:|--:|---|---|\n");
            self.comparisons.iter().for_each(|comparison| text.push_str(&format!("{}\n", comparison.row())));
        }
        if !self.overheads.is_empty() {
            text.push_str("\n| one call | p50 ms | p99 ms | p50 / direct (min–max) | p99 / direct (min–max) | CPU µs/op |\n");
            text.push_str("|---|--:|--:|--:|--:|---|\n");
            let rows = self.overheads.iter().flat_map(|(connections, rounds)| overhead_rows(*connections, rounds));
            rows.for_each(|row| text.push_str(&format!("{row}\n")));
        }
        for (head, rows) in [("what", &self.alone), ("what Redis does, by `redis-benchmark -c 50 -P 16`", &self.steps)] {
            if !rows.is_empty() {
                text.push_str(&format!("\n| {head} | ops/s | p50 ms | p99 ms | CPU µs/op |\n|---|--:|--:|--:|---|\n"));
                rows.iter().for_each(|(name, sides)| text.push_str(&format!("{}\n", side_row(name, sides))));
            }
        }
        if !self.bytes.is_empty() {
            text.push_str("\n| memory | bytes | aim | |\n|---|--:|--:|---|\n");
            for (name, what, bytes, aim) in &self.bytes {
                text.push_str(&format!("| {name} | {bytes:.0} | {} {} | {what} |\n", aim.words(), verdict(*aim, *bytes)));
            }
        }
        text
    }

    pub(crate) fn to_json(&self) -> Value {
        let sides = |sides: &[Side]| sides.iter().map(Side::to_json).collect::<Vec<_>>();
        let alone = |rows: &[(String, Vec<Side>)]| {
            rows.iter().map(|(name, rounds)| json!({ "name": name, "rounds": sides(rounds) })).collect::<Vec<_>>()
        };
        let comparisons = self.comparisons.iter().map(|comparison| {
            let (ours, theirs): (Vec<Side>, Vec<Side>) = comparison.rounds.iter().cloned().unzip();
            let (ratio, min, max) = comparison.ratios();
            json!({
                "name": comparison.name, "ceiling": comparison.ceiling, "aim": comparison.aim.words(),
                "met": comparison.aim.is_met(ratio), "ratio": { "median": ratio, "min": min, "max": max },
                "ours": sides(&ours), "theirs": sides(&theirs),
            })
        });
        let bytes = self.bytes.iter().map(|(name, what, bytes, aim)| {
            json!({ "name": name, "what": what, "bytes": bytes, "aim": aim.words(), "met": aim.is_met(*bytes) })
        });
        let overheads = self.overheads.iter().map(|(connections, rounds)| {
            let by = |place: usize| rounds.iter().map(|round| round[place].to_json()).collect::<Vec<_>>();
            json!({ "connections": connections, "direct": by(0), "nginx": by(1), "onejob": by(2) })
        });
        json!({
            "machine": self.machine,
            "rounds": self.bounds.rounds,
            "window_ms": self.bounds.window.as_millis() as u64,
            "comparisons": comparisons.collect::<Vec<_>>(),
            "overhead": overheads.collect::<Vec<_>>(),
            "alone": alone(&self.alone),
            "redis": alone(&self.steps),
            "memory": bytes.collect::<Vec<_>>(),
        })
    }
}

impl Side {
    fn to_json(&self) -> Value {
        json!({ "ops_a_second": self.ops_a_second, "p50_us": self.p50_us, "p99_us": self.p99_us, "cpu_us": self.cpu_us })
    }
}

impl Comparison {
    /// Median, least and greatest of the rounds' ratios.
    fn ratios(&self) -> (f64, f64, f64) {
        let mut ratios: Vec<f64> = self.rounds.iter().map(|(ours, theirs)| ours.ops_a_second / theirs.ops_a_second).collect();
        ratios.sort_by(f64::total_cmp);
        (median(ratios.clone()), ratios.first().copied().unwrap_or_default(), ratios.last().copied().unwrap_or_default())
    }

    fn row(&self) -> String {
        let (ours, theirs): (Vec<Side>, Vec<Side>) = self.rounds.iter().cloned().unzip();
        let (ratio, min, max) = self.ratios();
        format!(
            "| {} | {:.0} | {} | {:.0} | **{ratio:.2}** ({min:.2}–{max:.2}) | {} {} | {} | {} |",
            self.name,
            rate(&ours),
            self.ceiling,
            rate(&theirs),
            self.aim.words(),
            verdict(self.aim, ratio),
            spent(&ours),
            spent(&theirs),
        )
    }
}

/// A row each for a direct call, one by nginx and one by onejob: medians, and their ratios to the direct call of the same round.
fn overhead_rows(connections: u32, rounds: &[[Side; 3]]) -> Vec<String> {
    let row = |(place, by): (usize, &str)| {
        let sides: Vec<Side> = rounds.iter().map(|round| round[place].clone()).collect();
        let of = |read: fn(&Side) -> f64| median(sides.iter().map(read).collect()) / 1000.0;
        let ratio = |read: fn(&Side) -> f64| {
            let mut ratios: Vec<f64> = rounds.iter().map(|round| read(&round[place]) / read(&round[0])).collect();
            ratios.sort_by(f64::total_cmp);
            let (least, most) = (ratios.first().copied().unwrap_or_default(), ratios.last().copied().unwrap_or_default());
            format!("**{:.2}** ({least:.2}–{most:.2})", median(ratios))
        };
        let p50: fn(&Side) -> f64 = |side| side.p50_us;
        let p99: fn(&Side) -> f64 = |side| side.p99_us;
        let ratios = if place == 0 { "1 | 1".to_owned() } else { format!("{} | {}", ratio(p50), ratio(p99)) };
        format!("| {by}, {connections} at once | {:.3} | {:.3} | {ratios} | {} |", of(p50), of(p99), spent(&sides))
    };
    ["direct", "by nginx proxy_pass", "by onejob /proxy"].into_iter().enumerate().map(row).collect()
}

fn verdict(aim: Aim, figure: f64) -> &'static str {
    if aim.is_met(figure) { "met" } else { "missed" }
}

fn side_row(name: &str, sides: &[Side]) -> String {
    let of = |read: fn(&Side) -> f64| median(sides.iter().map(read).collect());
    let (p50, p99) = (of(|side| side.p50_us) / 1000.0, of(|side| side.p99_us) / 1000.0);
    format!("| {name} | {:.0} | {p50:.2} | {p99:.2} | {} |", rate(sides), spent(sides))
}

fn rate(sides: &[Side]) -> f64 {
    median(sides.iter().map(|side| side.ops_a_second).collect())
}

/// The median of what each process spent.
fn spent(sides: &[Side]) -> String {
    let mut by_name: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, spent) in sides.iter().flat_map(|side| &side.cpu_us) {
        by_name.entry(name).or_default().push(*spent);
    }
    by_name.into_iter().map(|(name, spent)| format!("{name} {:.1}", median(spent))).collect::<Vec<_>>().join(", ")
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    match figures.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => figures[middle],
        _ => f64::midpoint(figures[middle - 1], figures[middle]),
    }
}

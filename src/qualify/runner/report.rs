//! What a suite's runs come to: whether they prove the contract, and how far.
//!
//! Only runs of the suite's cases are samples of what the model answers. What was asked once more through a gateway, and what the
//! provider can be asked, is told apart from them: it says something of the way and of the provider's entry, and nothing of the
//! failure rate.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Run, Verdict, variant};
use crate::qualify::statistics::{says, wilson};
use crate::qualify::suite::{Level, Suite};

/// So many models or builds are named where there should be one.
const NAMES_SHOWN: usize = 4;

/// What a suite's runs come to.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Report {
    /// The route.
    pub route: String,
    /// The provider.
    pub provider: String,
    /// Whether a certificate can be issued.
    pub verdict: Verdict,
    /// Why not, or how far the proof goes; the first line is the shortest.
    pub says: Vec<String>,
    /// Runs of cases that were decided.
    pub runs: u32,
    /// Of these, failed.
    pub failures: u32,
    /// Runs of cases of which nothing can be said.
    pub inconclusive: u32,
    /// The failure rate at 95 %, below and above.
    pub interval: (f64, f64),
    /// What came of the cases through a gateway (L3); no samples.
    pub gateway: Apart,
    /// What came of the claims of the provider's entry (L4); no samples.
    pub capabilities: Apart,
    /// The model that answered; `""` if it never said, or if there was more than one. Where the suite passed, each answer said it, or
    /// none did.
    pub model: String,
    /// Which build of it; `""` likewise.
    pub build: String,
    /// What it cost, in the provider's unit.
    pub cost: u64,
    /// What every request had in common, as it was sent: the temperature, the model's name.
    pub parameters: Map<String, Value>,
    /// Each run.
    pub all: Vec<Run>,
}

/// What was looked at apart from the cases: it must hold as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Apart {
    /// So many held.
    pub held: u32,
    /// So many did not.
    pub failed: u32,
    /// Of so many nothing can be said.
    pub open: u32,
}

impl Apart {
    fn of(all: &[Run], level: Level) -> Self {
        let mut apart = Apart::default();
        for run in all.iter().filter(|run| run.level == level) {
            match run.verdict {
                Verdict::Passed => apart.held += 1,
                Verdict::Failed => apart.failed += 1,
                Verdict::Inconclusive => apart.open += 1,
            }
        }
        apart
    }

    fn words(self, what: &str) -> Option<String> {
        let Apart { held, failed, open } = self;
        let all = held + failed + open;
        (all > 0).then(|| format!("{held} of {all} {what}"))
    }
}

fn counted(number: u32, one: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{number} {one}s") }
}

/// The first of them; what else there is, is counted.
fn listed(names: &[String]) -> String {
    let shown = &names[..names.len().min(NAMES_SHOWN)];
    let more = names.len() - shown.len();
    if more == 0 { shown.join(", ") } else { format!("{} and {more} more", shown.join(", ")) }
}

fn were(number: u32, one: &str) -> String {
    format!("{} {}", counted(number, one), if number == 1 { "was" } else { "were" })
}

impl Report {
    /// Sums up runs.
    ///
    /// A proof takes that every run was begun, that every case, and each of its variants, was decided in at least half of its runs,
    /// that no more failed than may, and that one build of one model answered, by the word of each answer or of none. What was cut
    /// short proves nothing, however much of it was decided: when it stopped may hang on what it had seen.
    pub fn of(route: &str, provider: &str, suite: &Suite, all: Vec<Run>) -> Self {
        let samples: Vec<&Run> = all.iter().filter(|run| run.level < Level::Gateway).collect();
        let count = |verdict| u32::try_from(samples.iter().filter(|run| run.verdict == verdict).count()).unwrap_or(u32::MAX);
        let (passed, failures, inconclusive) = (count(Verdict::Passed), count(Verdict::Failed), count(Verdict::Inconclusive));
        let runs = passed + failures;
        let (gateway, capabilities) = (Apart::of(&all, Level::Gateway), Apart::of(&all, Level::Capabilities));
        let mut decided: BTreeMap<(String, String), u32> = BTreeMap::new();
        for case in &suite.cases {
            let places = (0..case.relations.len()).map(Some).chain([None]);
            decided.extend(places.map(|place| ((case.name.clone(), variant(case, place)), 0)));
        }
        for run in samples.iter().filter(|run| run.verdict != Verdict::Inconclusive) {
            if let Some(count) = decided.get_mut(&(run.case.clone(), run.variant.clone())) {
                *count += 1;
            }
        }
        let needed = suite.runs.div_ceil(2);
        let undecided: Vec<String> = decided
            .iter()
            .filter(|(_, count)| **count < needed)
            .map(|((case, variant), count)| {
                let variant = if variant.is_empty() { String::new() } else { format!(", {variant}") };
                let are = if needed == 1 { "is" } else { "are" };
                format!("{case:?}{variant}: decided in {count} of {}, and {needed} {are} needed", counted(suite.runs, "run"))
            })
            .collect();
        let several = |of: fn(&Run) -> &String| {
            let mut names: Vec<String> = all.iter().map(of).filter(|name| !name.is_empty()).cloned().collect();
            names.sort();
            names.dedup();
            names
        };
        let (models, builds) = (several(|run| &run.model), several(|run| &run.build));
        // Who does not say may be another one.
        let unsaid = |of: fn(&Run) -> &String| all.iter().filter(|run| run.answered && of(run).is_empty()).count();
        let others = [("model", &models, unsaid(|run| &run.model)), ("build", &builds, unsaid(|run| &run.build))];
        let others = others.into_iter().find_map(|(what, names, unsaid)| match names.len() {
            2.. => Some(format!("inconclusive: more than one {what} answered: {}", listed(names))),
            1 if unsaid > 0 => Some(format!("inconclusive: {unsaid} answers do not say which {what} made them, and others do")),
            _ => None,
        });
        let cut = u32::try_from(all.iter().filter(|run| run.cut).count()).unwrap_or(u32::MAX);
        let mut lines = Vec::new();
        let verdict = if failures > suite.failures_max {
            lines.push(format!("refused: {failures} of {} failed; {} may", counted(runs, "run"), suite.failures_max));
            lines.extend(undecided);
            Verdict::Failed
        } else if cut > 0 {
            lines.push(format!("inconclusive: it was cut short: {} not made", were(cut, "request")));
            Verdict::Inconclusive
        } else if runs == 0 || !undecided.is_empty() {
            lines.push("inconclusive: the suite could not be decided".to_owned());
            lines.extend(undecided);
            Verdict::Inconclusive
        } else if gateway.failed + capabilities.failed > 0 {
            // What is no case of the suite, a capability or the way through the gateway, must hold as it is.
            let what = [(gateway.failed, "the way through a gateway"), (capabilities.failed, "what the provider's entry claims")];
            let what: Vec<&str> = what.iter().filter(|(failed, _)| *failed > 0).map(|(_, what)| *what).collect();
            lines.push(format!("refused: {} does not hold", what.join(", ")));
            Verdict::Failed
        } else if gateway.open + capabilities.open > 0 {
            // Neither is what could not be found out about them.
            lines.push(
                "inconclusive: the way through a gateway, or what the provider can be asked, could not be decided".to_owned(),
            );
            Verdict::Inconclusive
        } else if let Some(others) = others {
            lines.push(others);
            Verdict::Inconclusive
        } else {
            lines.push(format!("passed: {passed} of {}", counted(runs, "run")));
            Verdict::Passed
        };
        lines.push(says(failures, runs));
        let apart: Vec<String> =
            [gateway.words("checks through a gateway"), capabilities.words("capabilities")].into_iter().flatten().collect();
        if !apart.is_empty() {
            lines.push(format!("and apart from these, {} held", apart.join(" and ")));
        }
        if inconclusive > 0 {
            let verb = if inconclusive == 1 { "counts" } else { "count" };
            lines.push(format!("{} inconclusive and {verb} for nothing", were(inconclusive, "run")));
        }
        let single =
            |names: Vec<String>| if names.len() == 1 { names.into_iter().next().unwrap_or_default() } else { String::new() };
        Report {
            route: route.to_owned(),
            provider: provider.to_owned(),
            verdict,
            says: lines,
            runs,
            failures,
            inconclusive,
            interval: wilson(failures, runs),
            gateway,
            capabilities,
            model: single(models),
            build: single(builds),
            cost: all.iter().map(|run| run.cost).sum(),
            parameters: Map::new(),
            all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite() -> Suite {
        let case = |name| format!("  - {{ name: {name}, input: {{}}, assert: [output.ok] }}\n");
        let yaml = format!("runs: 2\ncases:\n{}{}", case("a"), case("b"));
        Suite::load(yaml.as_bytes(), None).unwrap()
    }

    fn run(case: &str, number: u32, verdict: Verdict) -> Run {
        Run { verdict, answered: true, model: "m".to_owned(), cost: 1, ..Run::blank(case, "", number, Level::Meaning) }
    }

    fn verdict(runs: &[(&str, Verdict)]) -> Verdict {
        let runs = runs.iter().enumerate().map(|(place, (case, verdict))| run(case, u32::try_from(place).unwrap(), *verdict));
        Report::of("r", "p", &suite(), runs.collect()).verdict
    }

    #[test]
    fn what_is_not_decided_proves_nothing() {
        use Verdict::{Failed, Inconclusive, Passed};
        assert_eq!(verdict(&[]), Inconclusive);
        assert_eq!(verdict(&[("a", Inconclusive), ("a", Inconclusive), ("b", Inconclusive), ("b", Inconclusive)]), Inconclusive);
        assert_eq!(verdict(&[("a", Passed), ("a", Passed), ("b", Inconclusive), ("b", Inconclusive)]), Inconclusive);
        assert_eq!(verdict(&[("a", Passed), ("a", Passed), ("b", Passed), ("b", Inconclusive)]), Passed);
        assert_eq!(verdict(&[("a", Passed), ("a", Passed), ("b", Passed), ("b", Failed)]), Failed);
        assert_eq!(verdict(&[("a", Failed), ("b", Inconclusive)]), Failed);
    }

    #[test]
    fn what_is_apart_from_the_cases_must_hold_as_it_is() {
        let mut runs: Vec<Run> =
            ["a", "a", "b", "b"].iter().zip(1..).map(|(case, number)| run(case, number, Verdict::Passed)).collect();
        for (verdict, expected) in [
            (Verdict::Passed, Verdict::Passed),
            (Verdict::Inconclusive, Verdict::Inconclusive),
            (Verdict::Failed, Verdict::Failed),
        ] {
            for level in [Level::Gateway, Level::Capabilities] {
                runs.truncate(4);
                runs.push(Run { level, ..run("apart", 1, verdict) });
                let mut suite = suite();
                suite.failures_max = 5;
                assert_eq!(Report::of("r", "p", &suite, runs.clone()).verdict, expected, "{level:?}");
            }
        }
    }

    #[test]
    fn two_models_prove_nothing_of_either() {
        let mut runs: Vec<Run> =
            ["a", "a", "b", "b"].iter().zip(1..).map(|(case, number)| run(case, number, Verdict::Passed)).collect();
        assert_eq!(Report::of("r", "p", &suite(), runs.clone()).model, "m");
        runs[3].model = "n".to_owned();
        assert_eq!(Report::of("r", "p", &suite(), runs).verdict, Verdict::Inconclusive);
    }

    #[test]
    fn two_builds_or_answers_that_do_not_all_say_who_made_them_prove_nothing() {
        let runs: Vec<Run> = ["a", "a", "b", "b"].iter().zip(1..).map(|(case, n)| run(case, n, Verdict::Passed)).collect();
        let says = |builds: [&str; 4], apart: Option<(&str, &str)>| {
            let mut runs: Vec<Run> =
                runs.iter().zip(builds).map(|(run, build)| Run { build: build.to_owned(), ..run.clone() }).collect();
            runs.extend(apart.map(|(model, build)| Run {
                level: Level::Gateway,
                model: model.to_owned(),
                build: build.to_owned(),
                ..run("a", 1, Verdict::Passed)
            }));
            let report = Report::of("r", "p", &suite(), runs);
            (report.verdict, report.build, report.says[0].clone())
        };
        let passed = Verdict::Passed;
        assert_eq!(says([""; 4], None), (passed, String::new(), "passed: 4 of 4 runs".to_owned()));
        assert_eq!(says(["x"; 4], Some(("m", "x"))), (passed, "x".to_owned(), "passed: 4 of 4 runs".to_owned()));
        let open = |what: &str| (Verdict::Inconclusive, format!("inconclusive: {what}"));
        let said = |(verdict, _, says): (Verdict, String, String)| (verdict, says);
        assert_eq!(said(says(["x", "y", "x", "y"], None)), open("more than one build answered: x, y"));
        let unsaid = open("1 answers do not say which build made them, and others do");
        assert_eq!(said(says(["x", "x", "x", ""], None)), unsaid);
        assert_eq!(said(says(["x"; 4], Some(("m", "")))), unsaid);
        assert_eq!(said(says(["x"; 4], Some(("m", "y")))), open("more than one build answered: x, y"));
        assert_eq!(said(says([""; 4], Some(("n", "")))), open("more than one model answered: m, n"));
    }

    /// What is asked once more another way says nothing more of how often the model fails.
    #[test]
    fn only_runs_of_cases_are_samples_of_the_model() {
        let mut runs: Vec<Run> = ["a", "a", "b", "b"].iter().zip(1..).map(|(case, n)| run(case, n, Verdict::Passed)).collect();
        for (level, case) in [(Level::Gateway, "a"), (Level::Gateway, "b"), (Level::Capabilities, "status after it is done")] {
            runs.push(Run { level, variant: "apart".to_owned(), ..run(case, 1, Verdict::Passed) });
        }
        let report = Report::of("r", "p", &suite(), runs);
        assert_eq!((report.verdict, report.runs, report.failures), (Verdict::Passed, 4, 0));
        assert_eq!((report.gateway.held, report.capabilities.held), (2, 1));
        assert_eq!(report.says[0], "passed: 4 of 4 runs");
        assert!(report.says[1].contains("at most 3/4 = 75.0 %"), "{:?}", report.says);
        assert_eq!(report.says[2], "and apart from these, 2 of 2 checks through a gateway and 1 of 1 capabilities held");
        assert_eq!(report.interval, wilson(0, 4));
    }
}

//! What a client wants, how the provider will treat it, and what may come of it: all drawn from the seed.

use super::dice::Dice;

/// The longest body that is padded: over the size from which bodies have a key of their own.
const LARGE_BYTES: usize = 12_000;

/// What the provider makes of an intent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// It does it and says so.
    Success,
    /// It refuses, and did nothing.
    Refusal,
    /// It is silent, or says nothing that can be believed.
    Silence,
    /// Any of these.
    Anything,
}

#[derive(Clone, Debug)]
pub struct Intent {
    pub number: usize,
    pub key: String,
    pub route: &'static str,
    /// The input, as the provider is sent it.
    pub input: String,
    pub expect: Expect,
    /// How many callers submit it at the same moment.
    pub callers: usize,
    /// Whether another comes after all have been told.
    pub latecomer: bool,
}

impl Intent {
    pub fn draw(seed: u64, number: usize) -> Intent {
        let mut dice = Dice::of(seed, "intent", number);
        let (behaviour, expect, route) = draw_behaviour(&mut dice);
        let mut input = serde_json::json!({ "order": number });
        if !behaviour.is_empty() {
            input["simulate"] = behaviour.into();
        }
        if dice.percent(2) {
            input["note"] = "n".repeat(LARGE_BYTES).into();
        }
        let callers = match dice.below(100) {
            0..50 => 1,
            50..85 => 2,
            85..95 => 3,
            _ => 4,
        };
        Intent {
            number,
            key: format!("intent-{seed}-{number}"),
            route,
            input: input.to_string(),
            expect,
            callers,
            latecomer: route == "race" || dice.percent(10),
        }
    }

    /// The body of its submit.
    pub fn body(&self) -> String {
        format!("{{\"route\":\"{}\",\"input\":{}}}", self.route, self.input)
    }
}

fn draw_behaviour(dice: &mut Dice) -> (String, Expect, &'static str) {
    let mut ms = |from, to| dice.between_ms(from, to).as_millis();
    let (short, middle, race) = (ms(5, 60), ms(300, 900), ms(250, 700));
    let (text, expect, route) = match dice.below(1000) {
        0..540 => ("succeed".to_owned(), Expect::Success, "print"),
        540..660 => (format!("delay={short}ms"), Expect::Success, "print"),
        660..690 => (format!("delay={middle}ms"), Expect::Success, "print"),
        690..720 => (format!("queue={middle}ms"), Expect::Success, "print"),
        720..725 => ("delay=2s".to_owned(), Expect::Success, "print"),
        725..745 => ("size=20000".to_owned(), Expect::Success, "print"),
        745..785 => (format!("queue={race}ms"), Expect::Success, "race"),
        785..815 => (format!("delay={race}ms"), Expect::Success, "race"),
        815..845 => ("refuse_status=400".to_owned(), Expect::Refusal, "print"),
        845..860 => ("jam".to_owned(), Expect::Refusal, "print"),
        860..870 => ("refuse_status=429,retry_after=1s".to_owned(), Expect::Refusal, "print"),
        870..895 => ("status=500".to_owned(), Expect::Silence, "print"),
        895..915 => ("drop".to_owned(), Expect::Silence, "print"),
        915..930 => ("half".to_owned(), Expect::Silence, "print"),
        930..940 => ("unexecuted,drop".to_owned(), Expect::Silence, "print"),
        940..945 => ("invalid_json".to_owned(), Expect::Anything, "print"),
        945..950 => ("hang".to_owned(), Expect::Silence, "print"),
        // As the provider's default draws it, anew for each attempt.
        _ => (String::new(), Expect::Anything, "print"),
    };
    (text, expect, route)
}

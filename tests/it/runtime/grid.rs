//! How often a provider that always fails is called, for every mix of settings.

use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use onejob::attempt::AttemptState::Aborted;
use onejob::job::JobState;
use onejob::policy::{Breaker, FailoverOn, Gate, RetryBudget, UNSENT_MAX};
use onejob::provider::http::{HttpOptions, HttpProvider};

use super::protection::{LONG, breaker, protect};
use super::{Shop, ended, slot, submission};

/// How each call of the grid fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    /// Refused with 429.
    Refused,
    /// Refused with 503, of which the provider swears that it did nothing.
    Sworn,
    /// Not even connected.
    Unsent,
}

impl Fails {
    fn failover_on(self) -> FailoverOn {
        match self {
            Fails::Refused => FailoverOn::Rejected { status: 429 },
            Fails::Sworn => FailoverOn::Rejected { status: 503 },
            Fails::Unsent => FailoverOn::NotSent,
        }
    }
}

/// One setting of the grid.
#[derive(Clone, Copy, Debug)]
struct Setting {
    fails: Fails,
    attempts: u32,
    providers: usize,
    fails_over: bool,
    gate: Gate,
    retry_after: bool,
    breaker: bool,
    budget: bool,
}

/// How many calls fail before a breaker of the grid opens.
const OPENS_AFTER: u64 = 2;

impl Setting {
    /// By the plain rules: one budget of attempts for all providers, whatever else is set only takes away from it.
    fn calls(self) -> u64 {
        let Setting { fails, attempts, providers, fails_over, gate, breaker, budget, .. } = self;
        let reached = if gate == Gate::Off { providers as u64 } else { 1 };
        let further = fails_over && !budget;
        // What never left uses up no attempt, and has a limit of its own.
        let most = if fails == Fails::Unsent { UNSENT_MAX as u64 } else { u64::from(attempts) };
        let wanted = if further { most } else { 1 };
        if breaker { wanted.min(reached * OPENS_AFTER) } else { wanted }
    }
}

fn grid() -> Vec<Setting> {
    let mut grid = Vec::new();
    for attempts in [1, 2, 3, 5] {
        for providers in [1, 2] {
            for bits in 0..32_u32 {
                let setting = setting(Fails::Refused, attempts, providers, bits);
                // A pause of a second before each further attempt: enough of those are among the small ones.
                if !(setting.retry_after && attempts > 3) {
                    grid.push(setting);
                }
            }
        }
    }
    // Other failures, by the same rules: without a `Retry-After`.
    for fails in [Fails::Sworn, Fails::Unsent] {
        grid.extend((0..32_u32).map(|bits| setting(fails, 3, 2, bits)).filter(|setting| !setting.retry_after));
    }
    grid
}

fn setting(fails: Fails, attempts: u32, providers: usize, bits: u32) -> Setting {
    let is = |bit: u32| bits & (1 << bit) != 0;
    let gate = if is(1) { Gate::Off } else { Gate::Enforce };
    Setting { fails, attempts, providers, fails_over: is(0), gate, retry_after: is(2), breaker: is(3), budget: is(4) }
}

/// Case 41, for every mix of settings: calls equal the budget, counted at the providers; of those that no call reaches, in the record.
#[tokio::test]
async fn a_provider_that_always_fails_is_called_as_often_as_the_plain_rules_say() {
    let (open, closed) = tokio::join!(Shop::open(), Shop::open());
    for printer in [&closed.inkjet, &closed.laser] {
        printer.set_behaviour("refuse").unwrap();
    }
    let run = |number: usize, setting: Setting| {
        let (open, closed) = (&open, &closed);
        async move {
            let shop = if setting.fails == Fails::Unsent { closed } else { open };
            let behaviour = match (setting.fails, setting.retry_after) {
                (Fails::Refused, true) => "refuse_status=429,retry_after=1s",
                (Fails::Refused, false) => "refuse_status=429",
                (Fails::Sworn, _) => "refuse_status=503",
                (Fails::Unsent, _) => "succeed",
            };
            let runtime = shop
                .gateway_with(|setup| {
                    setup.store.prefix = format!("oj-{number}");
                    setup.route.providers = ["inkjet", "laser"][..setting.providers].iter().map(ToString::to_string).collect();
                    setup.route.rules.attempts_max = setting.attempts;
                    setup.route.plan.gate = setting.gate;
                    setup.route.plan.backoff = Duration::from_millis(1);
                    setup.route.plan.failover_on = match (setting.fails, setting.fails_over) {
                        (Fails::Refused | Fails::Sworn, true) => vec![FailoverOn::NotSent, setting.fails.failover_on()],
                        (Fails::Refused | Fails::Sworn, false) => vec![FailoverOn::NotSent],
                        (Fails::Unsent, true) => vec![setting.fails.failover_on()],
                        (Fails::Unsent, false) => Vec::new(),
                    };
                    let printers = [("inkjet", &shop.inkjet), ("laser", &shop.laser)];
                    let swearing = printers.map(|(name, printer)| {
                        let options = HttpOptions { not_executed: vec![503], ..HttpOptions::new(&printer.base_url()) };
                        slot(name, HttpProvider::new(name, options).unwrap())
                    });
                    setup.providers = Some(swearing.into());
                    setup.route.deadline = Some(Duration::from_secs(8));
                    if setting.breaker {
                        for provider in ["inkjet", "laser"] {
                            let consecutive = OPENS_AFTER as u32;
                            let rules = Breaker { consecutive, statuses: vec![429], ..breaker(LONG) };
                            protect(setup, provider, |provider| provider.breaker = Some(rules));
                        }
                    }
                    if setting.budget {
                        let none = RetryBudget { percent: 0, min_per_second: 0 };
                        setup.options.protection.retry_budgets.insert("print".to_owned(), none);
                    }
                })
                .await;
            let body = format!(r#"{{"simulate":"{behaviour}"}}"#);
            let id = runtime.submit(submission(&format!("order-{number}"), &body)).await.unwrap().job.id;
            let job = ended(&runtime, id).await;
            let ledgers = [&shop.inkjet, &shop.laser].map(|printer| printer.ledger_of(&id.to_string()));
            let (calls, executed) =
                ledgers.iter().fold((0, 0), |(calls, executed), ledger| (calls + ledger.received, executed + ledger.executed));
            runtime.shutdown(Duration::from_secs(1)).await;
            assert_eq!((job.state, executed), (JobState::Failed, 0), "{setting:?}: {job:?}");
            if setting.fails == Fails::Unsent {
                // No provider can count what it was never sent.
                assert_eq!((calls, job.attempts.len() as u64), (0, setting.calls()), "{setting:?}: {job:?}");
                assert!(job.attempts.iter().all(|attempt| attempt.state == Aborted), "{setting:?}: {job:?}");
                return setting.calls();
            }
            assert_eq!(calls, setting.calls(), "{setting:?}: {job:?}");
            assert!(calls <= u64::from(setting.attempts), "{setting:?}");
            calls
        }
    };
    let settings = grid();
    let count = settings.len();
    let calls: Vec<u64> =
        stream::iter(settings.into_iter().enumerate()).map(|(number, setting)| run(number, setting)).buffered(30).collect().await;
    println!("{count} settings, {} calls, none too many and none missing", calls.iter().sum::<u64>());
}

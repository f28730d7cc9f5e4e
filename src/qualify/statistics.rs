//! What some runs say of all: bounds, and no more than they can carry.

/// 97.5 % of a standard normal are below: two-sided 95 %.
const Z: f64 = 1.959_963_984_540_054;

/// The Wilson score interval of a failure rate, at 95 %: below and above.
///
/// Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927). Nothing was decided: 0 to 1.
pub fn wilson(failures: u32, runs: u32) -> (f64, f64) {
    if runs == 0 {
        return (0.0, 1.0);
    }
    let (n, p) = (f64::from(runs), f64::from(failures) / f64::from(runs));
    let (z2, middle) = (Z * Z, p + Z * Z / (2.0 * n));
    let spread = Z * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    let scale = 1.0 + z2 / n;
    (((middle - spread) / scale).clamp(0.0, p), ((middle + spread) / scale).clamp(p, 1.0))
}

/// What the runs say, in words: without a failure by the rule of three, else by Wilson's interval.
pub fn says(failures: u32, runs: u32) -> String {
    let percent = |rate: f64| format!("{:.1} %", rate * 100.0);
    let all = if runs == 1 { "1 run".to_owned() } else { format!("{runs} runs") };
    match (failures, runs) {
        (_, 0) => "nothing was decided, so nothing is known".to_owned(),
        // The rule says no more than what is true of every rate.
        (0, 1..=3) => format!("no failure in {all}: so few say nothing of the failure rate, at 95 % it is at most 100.0 %"),
        (0, n) => {
            format!("no failure in {all}: at 95 % the failure rate is at most 3/{n} = {}", percent(3.0 / f64::from(n)))
        }
        (failures, n) => {
            let (low, high) = wilson(failures, n);
            format!("{failures} of {all} failed: at 95 % the failure rate is {} to {}", percent(low), percent(high))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_interval_is_as_in_the_books() {
        // Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
        for (failures, runs, low, high) in
            [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
        {
            let (below, above) = wilson(failures, runs);
            assert!((below - low).abs() < 5e-5 && (above - high).abs() < 5e-5, "{failures}/{runs}: {below} {above}");
        }
        assert_eq!(wilson(0, 0), (0.0, 1.0));
    }

    #[test]
    fn words_claim_no_more_than_the_runs_carry() {
        assert_eq!(says(0, 30), "no failure in 30 runs: at 95 % the failure rate is at most 3/30 = 10.0 %");
        assert_eq!(says(0, 1), "no failure in 1 run: so few say nothing of the failure rate, at 95 % it is at most 100.0 %");
        assert!(says(0, 2).starts_with("no failure in 2 runs: ") && says(0, 3).ends_with("100.0 %") && !says(0, 3).contains('/'));
        assert!(says(0, 4).ends_with("3/4 = 75.0 %") && says(1, 1).starts_with("1 of 1 run failed: "));
        assert!(says(0, 0).contains("nothing is known"));
        assert!(says(1, 29).contains("0.6 % to 17.2 %"));
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_rate_and_narrows_with_more_runs(failures in 0_u32..200, more in 0_u32..200) {
            let runs = failures + more.max(1);
            let (low, high) = wilson(failures, runs);
            let rate = f64::from(failures) / f64::from(runs);
            prop_assert!((0.0..=rate).contains(&low) && (rate..=1.0).contains(&high));
            let (low10, high10) = wilson(failures * 10, runs * 10);
            prop_assert!(high10 - low10 <= high - low + 1e-12);
        }
    }
}

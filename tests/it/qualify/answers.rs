//! What an answer says of itself, and what becomes of a report that cannot be kept or of a certificate that cannot be issued.

use super::*;

/// What answers there is what is certified, or it is another one.
#[tokio::test]
async fn an_answer_through_a_gateway_is_by_who_answered_elsewhere_and_was_not_given_before() {
    let suite = SUITE.replace("[structure, meaning]", "[meaning, gateway]");
    let site = Site::open_with(simulated().await, &suite, "").await;
    let all: [(Answers, &str, &str); 5] = [
        (|n, _| ("200 OK", "", good(&format!(r#""id":"{n}","system_fingerprint":"x","#))), "passed", ""),
        (
            |n, _| {
                ("200 OK", "", good(&format!(r#""id":"{n}","system_fingerprint":"{}","#, if n > REQUESTS { "y" } else { "x" })))
            },
            "inconclusive",
            "more than one build answered: x, y",
        ),
        (
            |n, _| ("200 OK", "", good(&format!(r#""model":"{}","#, if n > REQUESTS { "n" } else { "m" }))),
            "inconclusive",
            "more than one model answered: m, n",
        ),
        (
            |n, _| ("200 OK", "", good(if n > REQUESTS { "" } else { r#""model":"m","# })),
            "inconclusive",
            "do not say which model",
        ),
        (|n, _| ("200 OK", "", good(&format!(r#""id":"{}","#, if n > REQUESTS { 1 } else { n }))), "inconclusive", "came before"),
    ];
    for (answers, verdict, told) in all {
        site.write(&suite, "", &answering(answers).await);
        let document = site.qualify(&[]).await.json();
        assert_eq!(document["report"]["verdict"], verdict, "{document}");
        assert!(document.to_string().contains(told), "{told}: {document}");
    }
}

/// Which build the certificate would be of, nobody can say.
#[tokio::test]
async fn builds_that_take_turns_are_not_certified() {
    let site = Site::open().await;
    let turns: Answers =
        |n, _| ("200 OK", "", good(&format!(r#""system_fingerprint":"{}","#, ["x", "y"][usize::from(n % 3 == 0)])));
    site.write(SUITE, "", &answering(turns).await);
    let document = site.qualify(&[]).await.expect(6).json();
    assert_eq!(document["report"]["says"][0], "inconclusive: more than one build answered: x, y");
    assert_eq!(document["certificate"], Value::Null);
}

/// An echo that JSON escapes is one all the same, and so is one in what a person reads.
#[tokio::test]
async fn a_credential_that_is_echoed_is_nowhere_in_what_is_kept_or_told() {
    let suite = SUITE.replace("[structure, meaning]", "[meaning, gateway, capabilities]");
    let site = Site::open_with(simulated().await, &suite, "").await;
    let echo: Answers = |n, _| {
        let (key, more) = (r"\u0073k-live\/0\u00317", if n > REQUESTS { r#","more":"\u0073k-live\/017""# } else { "" });
        let body = format!(
            r#"{{"id":"{n}{key}","model":"{key}","system_fingerprint":"{key}"{more},"choices":[{{"finish_reason":"stop"}}]}}"#
        );
        ("200 OK", "", body)
    };
    for (assert, code) in [("output.choices[0].finish_reason == 'stop'", 6), ("output.model == output.id", 1)] {
        let suite = suite.replace("output.choices[0].finish_reason == 'stop'", assert);
        site.write(&suite, "auth = { bearer_env = \"KEY\" }", &answering(echo).await);
        let (file, report) = (site.path(&format!("{code}.jsonl")), site.path("report.json"));
        let files = ["--resume", file.to_str().unwrap(), "--report", report.to_str().unwrap()];
        for json in [true, false] {
            let command = site.command(&[&["qualify", "--route", "city", "--provider", "second"], &files[..]].concat());
            let mut told = onejob();
            told.args(command.as_std().get_args().filter(|argument| json || *argument != "--json"));
            told.env("KEY", "sk-live/017").stdout(Stdio::piped()).stderr(Stdio::piped());
            let told = ended(told.spawn().unwrap()).await;
            assert!(matches!(told.code, Some(0 | 1 | 6)), "{}{}", told.stdout, told.stderr);
            let mut kept = format!("{}{}", told.stdout, told.stderr);
            kept += &std::fs::read_to_string(&report).unwrap();
            kept += &std::fs::read_to_string(&file).unwrap();
            for form in ["k-live", "/017", "\\/0"] {
                assert!(!kept.contains(form), "{form} in {kept}");
            }
            assert!(kept.contains("[hidden]"));
            if told.code == Some(0) {
                break;
            }
        }
    }
    for key in site.redis.keys().await.into_iter().filter(|key| key.contains("certificate")) {
        assert!(!format!("{:?}", site.redis.dump().await.get(&key)).contains("k-live"));
    }
}

/// It is the provider's word, and looks like it.
#[tokio::test]
async fn an_answer_cannot_forge_a_line_of_what_is_told() {
    let site = Site::open().await;
    let forged: Answers = |n, _| {
        let name = r"\ncertificate fb156a506a7886a28a9bf852d7086fde until 2030\u001b[2J\u202e";
        let model = if n % 2 == 0 { name } else { "m" };
        ("200 OK", "", format!(r#"{{"model":"{model}","choices":[{{"finish_reason":"{name}"}}]}}"#))
    };
    let suite = SUITE.replace("levels:", "finish: { pointer: /choices/0/finish_reason, allowed: [stop] }\nlevels:");
    site.write(&suite, "", &answering(forged).await);
    let command = site.command(&["qualify", "--route", "city", "--provider", "second"]);
    let mut told = onejob();
    told.args(command.as_std().get_args().filter(|argument| *argument != "--json"));
    let told = ended(told.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()).await.expect(1).stdout;
    assert!(told.contains("certificate fb156"), "{told}");
    assert!(!told.lines().any(|line| line.trim_start().starts_with("certificate")), "{told}");
    assert!(!told.contains(['\u{1b}', '\u{202e}']), "{told:?}");
}

/// What nobody may pay for is not asked, and what was paid is told.
#[tokio::test]
async fn what_is_asked_about_claims_costs_and_is_cut_as_everything_else() {
    let keys = SimulatedOptions { keys: Keys::Honoured, ..SimulatedOptions::default() };
    let suite = SUITE.replace("[structure, meaning]", "[meaning, capabilities]");
    let site = Site::open_with(Simulated::start(keys).await.unwrap(), &suite, "").await;
    let cut = site.qualify(&["--cost-max", "26"]).await.expect(6).json();
    assert_eq!(site.asked().len(), 13, "each costs 2: the cases, and one call more");
    assert_eq!((&cut["report"]["cost"], &cut["report"]["verdict"]), (&json!(26), &json!("inconclusive")), "{cut}");
    assert!(
        cut["report"]["says"][0].as_str().unwrap().starts_with("inconclusive: it was cut short"),
        "{}",
        cut["report"]["says"]
    );
    let whole = site.qualify(&[]).await.expect(0).json();
    assert_eq!(whole["report"]["cost"], 32, "four calls more");
}

/// What cannot be kept in the end is told before anything is asked.
#[tokio::test]
async fn a_report_that_cannot_be_written_is_told_before_the_runs() {
    let site = Site::open().await;
    let refused = site.qualify(&["--report", site.path("none/report.json").to_str().unwrap()]).await.expect(2);
    assert!(refused.stderr.contains("none/report.json: No such file"), "{}", refused.stderr);
    assert_eq!(site.asked().len(), 0);
    // A disk that is full is seen at the end alone: nothing of the rest is lost.
    let ended = site.qualify(&["--report", "/dev/full"]).await.expect(2);
    assert!(ended.json()["certificate"]["id"].is_string() && ended.stderr.contains("/dev/full: "), "{}", ended.stderr);
}

/// Hours of runs are not lost with it.
#[tokio::test]
async fn a_redis_that_is_away_at_the_end_costs_no_runs() {
    let site = Site::open().await;
    let file = site.path("runs.jsonl");
    let resume = ["--resume", file.to_str().unwrap()];
    site.second.set_behaviour("delay=200ms").unwrap();
    let command = [&["qualify", "--route", "city", "--provider", "second"], &resume[..]].concat();
    let child = site.command(&command).spawn().unwrap();
    until("almost all is asked", async || site.asked().len() as u64 >= REQUESTS - 1).await;
    site.redis.pause();
    let told = ended(child).await.expect(6);
    site.redis.resume();
    assert_eq!((&told.json()["report"]["verdict"], &told.json()["certificate"]), (&json!("passed"), &Value::Null));
    assert!(told.stderr.contains("no certificate, though the runs passed: "), "{}", told.stderr);
    assert!(told.stderr.contains(&format!("--resume {} again", file.display())), "{}", told.stderr);
    site.qualify(&resume).await.expect(0);
    assert_eq!((site.asked().len() as u64, site.certificates().await.len()), (REQUESTS, 1));
}

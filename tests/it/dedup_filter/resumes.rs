//! What becomes of `onejob dedup` when it, or Redis, is killed at any moment: with a state, nothing.

use std::collections::HashSet;
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::join_all;
use onejob::dedup::{BatchToken, Claimed, Dedup, Stream};
use rustix::process::Signal;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Child;

use super::{DISTINCT, Place, ROWS, clicks, id, kill, lines_of, summary, within};
use crate::cli::ended;
use crate::fleet::proxy::{Mode, Proxy};
use crate::fleet::redis::DurableRedis;
use crate::support::{Redis, until_within};

const LINES: &[&str] = &["--lines", "--batch", "200", "--in-flight", "3", "--lease", "5s"];
/// A process of a debug build begins, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a process has written its state so many times more, or has ended.
async fn progress(place: &Place, child: &mut Child, steps: usize) {
    let mut seen = place.read("state");
    for _ in 0..steps {
        let before = std::mem::take(&mut seen);
        until_within(PATIENCE, "it gets further, or ends", async || {
            seen = place.read("state");
            seen != before || child.try_wait().unwrap().is_some()
        })
        .await;
    }
}

/// Kills it again and again after random progress, until it is complete. Says how often.
pub(super) async fn killed_until_complete(place: &Place, arguments: &[&str], signal: Signal) -> u32 {
    let (mut kills, mut dice) = (0, 1_usize);
    loop {
        let mut command = place.resumable(arguments);
        command.stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        dice = dice.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        progress(place, &mut child, dice / 65_536 % 7).await;
        // Somewhere between two states.
        tokio::time::sleep(Duration::from_micros((dice / 4096 % 4_000) as u64)).await;
        kill(&child, signal);
        let output = within(child.wait_with_output()).await.unwrap();
        match output.status.code() {
            Some(0) => return kills,
            Some(130) | None => kills += 1,
            code => panic!("{code:?}: {}", String::from_utf8_lossy(&output.stderr)),
        }
        assert!(kills < 500, "it gets nowhere");
    }
}

async fn killed_at_many_moments(mirrored: bool) {
    let redis = Redis::start().await;
    let place = Place { mirrored, ..Place::new(redis.url(), "csv") };
    let arguments = ["--format", "csv", "--key", "click_id", "--batch", "200", "--in-flight", "3", "--lease", "5s"];
    let kills = killed_until_complete(&place, &arguments, Signal::KILL).await;
    assert!(kills >= 3, "{kills} kills");
    place.is_as_undisturbed();
    let told = ended(place.resumable(&arguments)).await.expect(0);
    let told = summary(&told);
    assert_eq!((&told["records"], &told["first"], &told["lost"]), (&ROWS.into(), &DISTINCT.into(), &0.into()), "{told}");
    // Everything is remembered: nothing of it counts again.
    let mut again = place.filter(&["--format", "csv", "--key", "click_id", "--input", "input"]);
    again.stdout(Stdio::piped());
    assert_eq!(ended(again).await.expect(0).stdout.lines().count(), 1);
}

#[tokio::test]
async fn killed_at_many_moments_it_ends_with_the_same_bytes() {
    killed_at_many_moments(false).await;
}

#[tokio::test]
async fn killed_at_many_moments_it_ends_with_the_same_bytes_with_a_copy() {
    killed_at_many_moments(true).await;
}

#[tokio::test]
async fn signaled_at_many_moments_it_ends_with_the_same_bytes() {
    let redis = Redis::start().await;
    let place = Place::new(redis.url(), "lines");
    killed_until_complete(&place, LINES, Signal::INT).await;
    place.is_as_undisturbed();
}

/// The same log from its beginning and from its end: whatever one has claimed the other one waits for, and neither waits for ever.
async fn two_at_once(mirrored: bool) {
    let redis = Redis::start().await;
    let forth = Place { mirrored, ..Place::new(redis.url(), "lines") };
    let back = Place {
        mirrored,
        ..Place::of(
            redis.url(),
            &lines_of(&forth.path("input")).into_iter().rev().map(|l| l + "\n").collect::<String>(),
            String::new(),
        )
    };
    let same = Place { mirrored, ..Place::new(redis.url(), "lines") };
    let arguments = ["--lines", "--batch", "300", "--in-flight", "3"];
    let runs = [&forth, &back, &same].map(|place| ended(place.resumable(&arguments)));
    for told in within(join_all(runs)).await {
        let told = summary(&told.expect(0));
        assert_eq!((&told["records"], &told["lost"]), (&ROWS.into(), &0.into()), "{told}");
    }
    let all: Vec<String> = [&forth, &back, &same].iter().flat_map(|place| lines_of(&place.path("output"))).collect();
    let distinct: HashSet<&String> = all.iter().collect();
    assert_eq!((all.len(), distinct.len()), (DISTINCT, DISTINCT));
    // Each is in the order of its input.
    for place in [&forth, &back, &same] {
        let input = lines_of(&place.path("input"));
        let mut input = input.iter();
        assert!(lines_of(&place.path("output")).iter().all(|line| input.any(|of| of == line)));
    }
}

#[tokio::test]
async fn two_at_once_let_each_record_through_once() {
    two_at_once(false).await;
}

#[tokio::test]
async fn two_at_once_let_each_record_through_once_each_with_a_copy() {
    two_at_once(true).await;
}

async fn a_redis_dies_or_pauses(mirrored: bool) {
    let directory = tempfile::tempdir().unwrap();
    let redis = DurableRedis::start_with(directory.path(), &[]).await;
    let place = Place { mirrored, ..Place::new(&redis.url(), "lines") };
    let start = |arguments: &[&str]| {
        let mut command = place.resumable(&[LINES, arguments].concat());
        command.stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut child = start(&["--patience", "2s"]);
    progress(&place, &mut child, 4).await;
    redis.die().await;
    let output = within(child.wait_with_output()).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(6), "{stderr}");
    assert!(stderr.contains("the same command goes on from there"), "{stderr}");
    // It is not there yet when this one begins.
    let mut child = start(&["--patience", "100s"]);
    redis.revive().await;
    progress(&place, &mut child, 4).await;
    redis.kill(Duration::from_millis(300)).await;
    progress(&place, &mut child, 4).await;
    redis.pause(Duration::from_millis(800)).await;
    let output = within(child.wait_with_output()).await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    place.is_as_undisturbed();
}

#[tokio::test]
async fn a_redis_that_dies_or_pauses_is_waited_for_and_given_up_in_time() {
    a_redis_dies_or_pauses(false).await;
}

#[tokio::test]
async fn a_redis_that_dies_or_pauses_is_waited_for_and_given_up_in_time_with_a_copy() {
    a_redis_dies_or_pauses(true).await;
}

/// Killed between its state and its commits, away until its claims have lapsed, and somebody else counts meanwhile.
#[tokio::test]
async fn records_that_somebody_else_counted_meanwhile_are_told_as_lost() {
    let redis = Redis::start().await;
    let place = Place::new(redis.url(), "lines");
    let mut command = place.resumable(&["--lines", "--batch", "100", "--in-flight", "1"]);
    command.stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    until_within(PATIENCE, "something is written and not known to be committed", async || {
        place.state().is_some_and(|state| state["pending"].as_array().is_some_and(|pending| !pending.is_empty()))
    })
    .await;
    kill(&child, Signal::KILL);
    within(child.wait()).await.unwrap();
    let state = place.state().unwrap();
    assert_eq!(state["complete"], false, "it was killed in the middle");
    let settled = usize::try_from(state["counts"]["records"].as_u64().unwrap()).unwrap();
    // As if it had not come to its commits and its claims had lapsed.
    redis.command::<String>(&["FLUSHALL"]).await;
    let other = ended(place.filter(&["--lines", "--input", "input"])).await.expect(0);
    assert_eq!(other.stdout.lines().count(), DISTINCT);
    let told = ended(place.resumable(&["--lines", "--batch", "100", "--in-flight", "1"])).await.expect(1);
    let said = summary(&told);
    let begin = state["pending"][0]["begin"].as_u64().unwrap();
    let written = usize::try_from(begin).unwrap()..usize::try_from(state["output_bytes"].as_u64().unwrap()).unwrap();
    let lost = place.firsts[written].lines().count();
    assert_eq!((&said["lost"], &said["records"]), (&lost.into(), &ROWS.into()), "{said}");
    let before: HashSet<String> = clicks().into_iter().take(settled).map(|click| click.id).collect();
    assert_eq!(lines_of(&place.path("output")).len(), before.len(), "nothing more was let through");
    // It is said again, whoever asks.
    assert_eq!(summary(&ended(place.resumable(&["--lines"])).await.expect(1))["lost"], lost);
}

#[tokio::test]
async fn a_state_is_good_for_its_own_run_alone() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "a\nb\na\nc\n", "a\nb\nc\n".to_owned());
    let refused = async |arguments: &[&str], what: &str| {
        let told = ended(place.resumable(arguments)).await.expect(2);
        assert!(told.stderr.contains(what), "{what}: {}", told.stderr);
    };
    std::fs::write(place.path("output"), "mine\n").unwrap();
    refused(&["--lines"], "output: it has 5 bytes already").await;
    std::fs::remove_file(place.path("output")).unwrap();
    ended(place.resumable(&["--lines"])).await.expect(0);
    place.is_as_undisturbed();
    let state = place.read("state");
    refused(&["--lines", "--stream", "views"], "its run has stream = \"clicks\", and now it is \"views\"").await;
    refused(&["--lines", "--window", "1h"], "window_ms = 86400000").await;
    refused(&["--key", "a"], "format").await;
    std::fs::write(place.path("input"), "x\nb\na\nc\nd\n").unwrap();
    refused(&["--lines"], "it begins differently").await;
    std::fs::write(place.path("input"), "a\nb\n").unwrap();
    refused(&["--lines"], "it begins differently").await;
    std::fs::write(place.path("input"), "a\nb\na\nc\nd\n").unwrap();
    std::fs::write(place.path("output"), "a\n").unwrap();
    refused(&["--lines"], "it has 2 bytes, and the run had written 6").await;
    assert_eq!(place.read("output"), "a\n");
    assert_eq!(place.read("state"), state);
}

/// While one waits for its input the second one is told so, and nothing of the first changes.
#[tokio::test]
async fn two_with_one_state_are_one_too_many() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "a\n", String::new());
    let mut command = place.filter(&["--lines", "--output", "output", "--state", "state"]);
    command.stdin(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all("a\n".repeat(5_000).as_bytes()).await.unwrap();
    until_within(PATIENCE, "it has its state", async || place.state().is_some()).await;
    let told = ended(place.resumable(&["--lines"])).await.expect(2);
    assert!(told.stderr.contains("state: another process works with it"), "{}", told.stderr);
    let told = ended(place.filter(&["--lines", "--input", "input", "--output", "output", "--state", "other"])).await.expect(2);
    assert!(told.stderr.contains("output: another process writes to it"), "{}", told.stderr);
    drop(stdin);
    assert_eq!(within(child.wait()).await.unwrap().code(), Some(0));
    assert_eq!(place.read("output"), "a\n");
}

#[tokio::test]
async fn an_input_that_grows_is_read_on() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "id,x\n1,a\n2,b\n2,", String::new());
    let csv = &["--format", "csv", "--key", "id"][..];
    let growing = &["--format", "csv", "--key", "id", "--growing"][..];
    let grow = |text: &str| std::fs::write(place.path("input"), place.read("input") + text).unwrap();
    ended(place.resumable(growing)).await.expect(0);
    assert_eq!(place.read("output"), "id,x\n1,a\n2,b\n");
    let told = ended(place.resumable(growing)).await.expect(0);
    assert_eq!(summary(&told)["records"], 2);
    grow("c\n1,d\n3,e\n4,f");
    ended(place.resumable(growing)).await.expect(0);
    assert_eq!(place.read("output"), "id,x\n1,a\n2,b\n3,e\n");
    // Said to be whole, its last record is one.
    ended(place.resumable(csv)).await.expect(0);
    assert_eq!(place.read("output"), "id,x\n1,a\n2,b\n3,e\n4,f");
    let told = ended(place.resumable(csv)).await.expect(0);
    assert!(told.stderr.contains("nothing was added since"), "{}", told.stderr);
    grow("oo\n");
    let told = ended(place.resumable(csv)).await.expect(2);
    assert!(told.stderr.contains("had no line end, and now more follows"), "{}", told.stderr);
    assert_eq!(place.read("output"), "id,x\n1,a\n2,b\n3,e\n4,f");
    // A pipe is read from its beginning again.
    let piped = Place::of(redis.url(), "", String::new());
    for (input, output) in [("p\nq\np\n", "p\nq\n"), ("p\nq\np\nr\n", "p\nq\nr\n")] {
        std::fs::write(piped.path("input"), input).unwrap();
        let mut command = piped.filter(&["--lines", "--stream", "piped", "--output", "output", "--state", "state"]);
        command.stdin(std::fs::File::open(piped.path("input")).unwrap());
        ended(command).await.expect(0);
        assert_eq!(piped.read("output"), output);
    }
}

/// A process that was stopped for longer than its claims stand makes them anew, and lets nothing through that others counted.
#[tokio::test]
async fn claims_that_lapsed_while_the_process_stood_still_are_made_anew() {
    let redis = Redis::start().await;
    let place = Place::new(redis.url(), "lines");
    let mut command = place.resumable(&["--lines", "--batch", "100", "--in-flight", "8", "--lease", "3s"]);
    command.stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    progress(&place, &mut child, 3).await;
    kill(&child, Signal::STOP);
    let claims = "oj:dedup:{clicks/00}:l";
    // Nothing but time makes a claim lapse here: it is what the test is about.
    until_within(PATIENCE, "the claims have lapsed", async || {
        let now: (u64, u64) = redis.command(&["TIME"]).await;
        let now_ms = (now.0 * 1000).to_string();
        redis.command::<u64>(&["ZCOUNT", claims, &now_ms, "+inf"]).await == 0
    })
    .await;
    let other = ended(place.filter(&["--lines", "--input", "input"])).await.expect(0);
    kill(&child, Signal::CONT);
    let output = within(child.wait_with_output()).await.unwrap();
    // What stood between its writing and its commit is told as lost; nothing else may be in both.
    let told: serde_json::Value =
        String::from_utf8_lossy(&output.stderr).lines().find_map(|line| serde_json::from_str(line).ok()).unwrap();
    let mine = lines_of(&place.path("output"));
    let theirs: HashSet<&str> = other.stdout.lines().collect();
    let both = mine.iter().filter(|line| theirs.contains(line.as_str())).count();
    assert_eq!(told["lost"], both, "{told}");
    assert_eq!(mine.len() + theirs.len() - both, DISTINCT);
}

/// What a process wrote before it died, and no state tells of, is not in the output. Somebody else counted that record meanwhile, so
/// that nothing is written in its place.
#[tokio::test]
async fn what_is_behind_the_state_is_cut_off_the_output_and_the_rejects() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "{\"id\":1}\n?\n", "{\"id\":1}\n".to_owned());
    let arguments = ["--key", "id", "--on-error", "skip", "--rejects", "rejects"];
    ended(place.resumable(&arguments)).await.expect(0);
    let more = "{\"id\":2}\n";
    std::fs::write(place.path("more"), more).unwrap();
    assert_eq!(ended(place.filter(&["--key", "id", "--input", "more"])).await.expect(0).stdout, more);
    for (name, more) in [("input", more), ("output", more), ("rejects", "??\n")] {
        std::fs::write(place.path(name), place.read(name) + more).unwrap();
    }
    // A state of a run that was under way: behind one that was complete it would be somebody else's.
    let mut state = place.state().unwrap();
    state["complete"] = false.into();
    std::fs::write(place.path("state"), state.to_string()).unwrap();
    let told = ended(place.resumable(&arguments)).await.expect(0);
    assert_eq!(summary(&told)["records"], 3);
    place.is_as_undisturbed();
    assert_eq!(place.read("rejects"), "?\n");
}

/// Five starts died with claims. Those of the last four are given back by the next one; the oldest one's must lapse, or be given back.
#[tokio::test]
async fn claims_of_the_last_starts_are_given_back_and_older_ones_are_waited_for() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "a\n", "a\nb\nc\nd\ne\nf\n".to_owned());
    let arguments = ["--lines", "--lease", "1h"];
    ended(place.resumable(&arguments)).await.expect(0);
    std::fs::write(place.path("input"), &place.firsts).unwrap();
    let mut state = place.state().unwrap();
    (state["session"], state["released"]) = (9.into(), 0.into());
    std::fs::write(place.path("state"), state.to_string()).unwrap();
    let stream = Stream { lease: Duration::from_secs(3600), ..Stream::new("clicks", &["line"]) };
    let dedup = Dedup::new(&redis.store().await, stream).unwrap();
    let of_start = |session: u32| format!("dedup {} {session} 2 0", state["run"].as_str().unwrap());
    for (session, line) in [(9, "b"), (8, "c"), (7, "d"), (6, "e"), (5, "f")] {
        let token = of_start(session);
        assert_eq!(dedup.claim(&[id(dedup.stream(), line)], BatchToken::named(&token)).await.unwrap(), [Claimed::First]);
    }
    let mut command = place.resumable(&arguments);
    command.stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    until_within(PATIENCE, "the four are through", async || place.read("output") == "a\nb\nc\nd\ne\n").await;
    dedup.release(&[id(dedup.stream(), "f")], BatchToken::named(&of_start(5))).await.unwrap();
    let output = within(child.wait_with_output()).await.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    place.is_as_undisturbed();
}

/// The wires of some are cut while batches are claimed and others being committed, for longer than claims stand. Only what was
/// written already may be lost to whoever counts meanwhile.
async fn claims_lapse_before_they_are_written(mirrored: bool) {
    let directory = tempfile::tempdir().unwrap();
    let redis = DurableRedis::start_with(directory.path(), &[]).await;
    // It writes two states before its first batch. At one moment or another there are claims in its hands.
    join_all((3..=7).map(|steps| cut_off_for_a_lease(mirrored, &redis, steps))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_claims_that_lapsed_before_they_were_written_nothing_is_lost() {
    claims_lapse_before_they_are_written(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_claims_that_lapsed_before_they_were_written_nothing_is_lost_with_a_copy() {
    claims_lapse_before_they_are_written(true).await;
}

async fn cut_off_for_a_lease(mirrored: bool, redis: &DurableRedis, steps: usize) {
    let wire = Proxy::start(redis.socket(), redis.announced());
    let place = Place { mirrored, ..Place::new(&wire.url(), "lines") };
    let stream = format!("clicks-{steps}");
    let mut command = place.resumable(&["--lines", "--batch", "300", "--in-flight", "8", "--lease", "4s", "--stream", &stream]);
    command.stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    progress(&place, &mut child, steps).await;
    wire.set(Mode::Refuse);
    // Nothing but time makes a claim lapse here: it is what the test is about.
    until_within(PATIENCE, "the claims have lapsed", async || {
        let now: (u64, u64) = redis.ask(&["TIME"]).await.unwrap();
        let lapses = format!("oj:dedup:{{{stream}/00}}:l");
        redis.ask::<u64>(&["ZCOUNT", &lapses, &(now.0 * 1000).to_string(), "+inf"]).await.unwrap() == 0
    })
    .await;
    let pending = place.state().unwrap()["pending"].as_array().unwrap().clone();
    let at = |value: &serde_json::Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let written: usize = pending.iter().map(|batch| place.firsts[at(&batch["begin"])..at(&batch["end"])].lines().count()).sum();
    let direct = Place { mirrored, ..Place::of(&redis.url(), &place.read("input"), String::new()) };
    let other = ended(direct.filter(&["--lines", "--input", "input", "--stream", &stream])).await.expect(0);
    wire.set(Mode::Pass);
    let output = within(child.wait_with_output()).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let told: serde_json::Value = stderr.lines().find_map(|line| serde_json::from_str(line).ok()).unwrap();
    let (mine, theirs) = (lines_of(&place.path("output")), other.stdout.lines().count());
    let both = mine.len() + theirs - DISTINCT;
    assert_eq!(told["lost"], both, "{told}");
    assert!(both <= written, "{both} are lost, and {written} were written before their claims lapsed");
}

/// Each answer takes longer than half of the lease, so that no claim is ever young enough. It ends, nothing is written, and with a
/// better wire the same command goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_that_are_always_too_old_are_given_up_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let redis = DurableRedis::start_with(directory.path(), &[]).await;
    let wire = Proxy::start(redis.socket(), redis.announced());
    // More than tells an input from another one, which is read before Redis is asked anything.
    let (known, new) = ("a\n".repeat(3_000), "b\n");
    let place = Place::of(&wire.url(), &format!("{known}{new}"), "a\nb\n".to_owned());
    // Redis answers late, and not too late for being waited for.
    let redis_url = format!("redis.url={}", wire.url());
    let arguments = ["--lines", "--lease", "1s", "--output", "output", "--state", "state"];
    let arguments = [&arguments[..], &["--set", &redis_url, "--set", "redis.response_timeout=3s"]].concat();
    let mut command = place.filter(&arguments);
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(known.as_bytes()).await.unwrap();
    until_within(PATIENCE, "its first batch is through", async || place.read("output") == "a\n").await;
    wire.set(Mode::Hold(Duration::from_millis(550)));
    stdin.write_all(new.as_bytes()).await.unwrap();
    drop(stdin);
    let output = within(child.wait_with_output()).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(6), "{stderr}");
    assert!(stderr.contains("claims are older than half of --lease, 1s"), "{stderr}");
    assert_eq!(place.read("output"), "a\n");
    wire.set(Mode::Pass);
    let mut command = place.filter(&arguments);
    command.stdin(std::fs::File::open(place.path("input")).unwrap());
    ended(command).await.expect(0);
    place.is_as_undisturbed();
}

//! What `onejob dedup` refuses, and what it says where it goes no further: nothing but what is true.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

use super::{Place, ROWS, summary, within};
use crate::cli::{ended, onejob};
use crate::support::Redis;

const RESUMABLE: &[&str] = &["--lines", "--batch", "100", "--in-flight", "2"];

#[tokio::test]
async fn what_could_not_be_written_is_not_said_to_be_settled() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "a\nb\nc\n", String::new());
    let mut command = place.filter(&["--lines", "--input", "input"]);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let child = command.stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    let output = within(child.wait_with_output()).await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{stderr}");
    let told = "of 3 records that were asked about not all are in the output, and they will be duplicates next time";
    assert!(stderr.contains(told) && !stderr.contains("settled"), "{stderr}");
    assert!(stderr.contains("\"records\":0"), "{stderr}");

    // A disk that is full after some of it.
    let place = Place::new(redis.url(), "lines");
    let whole = place.resumable(&[RESUMABLE, &["--stream", "full"]].concat());
    let mut command = Command::new("sh");
    command.current_dir(place.path("")).args(["-c", "trap '' XFSZ; ulimit -f 32; exec \"$0\" \"$@\""]);
    command.arg(whole.as_std().get_program()).args(whole.as_std().get_args());
    let told = ended(command).await.expect(6);
    let settled = place.state().unwrap()["counts"]["records"].as_u64().unwrap();
    assert!(settled > 0 && settled < ROWS as u64, "{settled}");
    let what = format!("{settled} records are settled; the same command goes on from there");
    assert!(told.stderr.contains(&what), "{what}: {}", told.stderr);
    assert_eq!(summary(&told)["records"], settled);
    ended(place.resumable(&[RESUMABLE, &["--stream", "full"]].concat())).await.expect(0);
    place.is_as_undisturbed();
}

#[tokio::test]
async fn a_complete_run_whose_output_is_another_is_refused() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "a\nb\na\n", "a\nb\n".to_owned());
    ended(place.resumable(RESUMABLE)).await.expect(0);
    ended(place.resumable(RESUMABLE)).await.expect(0);
    let output = place.path("output");
    for grown in [false, true] {
        if grown {
            std::fs::write(place.path("input"), "a\nb\na\nc\n").unwrap();
        }
        for (there, what) in [
            (None, "output: it is not there, and the run had written 4 bytes"),
            (Some("a\n"), "output: it has 2 bytes, and the run had written 4"),
            (Some("a\nb\nforeign\n"), "output: it has 12 bytes, and the run was complete with 4"),
        ] {
            match there {
                Some(text) => std::fs::write(&output, text).unwrap(),
                None => std::fs::remove_file(&output).unwrap(),
            }
            let told = ended(place.resumable(RESUMABLE)).await.expect(2);
            assert!(told.stderr.contains(what), "{what}: {}", told.stderr);
            assert_eq!(std::fs::read_to_string(&output).ok().as_deref(), there);
        }
        let other = ["--lines", "--input", "input", "--output", "other", "--state", "state"];
        let told = ended(place.filter(&other)).await.expect(2);
        assert!(told.stderr.contains("other: it is not there"), "{}", told.stderr);
        assert!(!place.path("other").exists());
    }
    std::fs::write(&output, "a\nb\n").unwrap();
    ended(place.resumable(RESUMABLE)).await.expect(0);
    assert_eq!(place.read("output"), "a\nb\nc\n");
}

#[tokio::test]
async fn a_member_that_is_named_twice_makes_a_record_bad() {
    let redis = Redis::start().await;
    let bad = ["{\"a\":1,\"a\":2}\n", "{\"a\":1,\"x\":{\"b\":1,\"\\u0062\":2}}\n"];
    for (number, bad) in bad.into_iter().enumerate() {
        let place = Place::of(redis.url(), &format!("{{\"a\":7}}\n{bad}{{\"a\":8.0e0,\"a2\":1}}\n"), String::new());
        let stream = format!("twice-{number}");
        let told = ended(place.filter(&["--key", "a", "--input", "input", "--stream", &stream])).await.expect(2);
        assert!(told.stderr.contains("record 2 at byte 8: an object in it names a member twice"), "{}", told.stderr);
        let skip = ["--key", "a", "--input", "input", "--on-error", "skip", "--rejects", "rejects", "--stream", "skip"];
        ended(place.filter(&skip)).await.expect(0);
        assert!(place.read("rejects").starts_with(bad));
    }
}

#[tokio::test]
async fn a_header_that_is_not_finished_is_waited_for() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "a,b", "a,b\n1,2\n".to_owned());
    let arguments = ["--format", "csv", "--key", "a", "--growing"];
    for input in ["", "a,b"] {
        std::fs::write(place.path("input"), input).unwrap();
        let told = ended(place.resumable(&arguments)).await.expect(0);
        assert_eq!((&summary(&told)["records"], place.read("output").as_str()), (&0.into(), ""));
        let told = ended(place.filter(&[&arguments[..], &["--input", "input"]].concat())).await.expect(0);
        assert_eq!(told.stdout, "");
    }
    std::fs::write(place.path("input"), "a,b\n1,2\n1,3\n").unwrap();
    ended(place.resumable(&arguments)).await.expect(0);
    place.is_as_undisturbed();
}

#[tokio::test]
async fn a_redis_that_is_not_there_is_told_at_once_and_leaves_no_file() {
    let place = Place::of("redis://user:hush@127.0.0.1:1/0", "a\n", String::new());
    let told = ended(place.resumable(&["--lines", "--patience", "1s"])).await.expect(6);
    let what = "redis at 127.0.0.1:1/0 does not answer; trying for 1s";
    assert_eq!(told.stderr.matches(what).count(), 1, "{}", told.stderr);
    assert!(!told.stderr.contains("hush"), "{}", told.stderr);
    assert!(!place.path("output").exists());
    // The second file is refused: the first one goes.
    std::fs::write(place.path("rejects"), "something\n").unwrap();
    let skip = ["--lines", "--on-error", "skip", "--rejects", "rejects"];
    let told = ended(place.resumable(&skip)).await.expect(2);
    assert!(told.stderr.contains("rejects: it has 10 bytes already"), "{}", told.stderr);
    assert!(!place.path("output").exists());
}

#[tokio::test]
async fn numbers_below_their_limit_are_refused_and_spaces_around_names_do_not_count() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "{\"a b\":1,\"a\":2}\n{\"a b\":1,\"a\":2}\n", String::new());
    for (argument, what) in [("--expected=0", "0 is not in 1.."), ("--patience=0s", "1ms at least"), ("--key=a, ", "has a name")]
    {
        let told = ended(place.filter(&["--input", "input", argument])).await.expect(2);
        assert!(told.stderr.contains(what), "{what}: {}", told.stderr);
    }
    let told = ended(place.filter(&["--input", "input", "--key", "a b, a "])).await.expect(0);
    assert_eq!(summary(&told)["duplicates"], 1);
}

#[tokio::test]
async fn who_finds_the_private_redis_in_use_is_told_how_to_share_one() {
    let place = Place::of("", "", String::new());
    let filter = || {
        let mut command = onejob();
        command.current_dir(place.path("")).args(["dedup", "--lines"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    };
    let mut child = filter().spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"a\n").await.unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(within(lines.next_line()).await.unwrap().as_deref(), Some("a"));
    let told = ended(filter()).await.expect(6);
    assert!(told.stderr.contains("set redis.url for all who share one redis"), "{}", told.stderr);
    drop(stdin);
    assert!(within(child.wait()).await.unwrap().success());
}

//! A filter of a stream that the configuration declares: a gateway and a filter ask about one thing.

use onejob::dedup::{BatchToken, Dedup, Stream, Verdict};

use super::{Place, summary};
use crate::cli::ended;
use crate::support::Redis;

#[tokio::test]
async fn a_declared_stream_has_the_key_and_the_window_of_its_declaration() {
    let redis = Redis::start().await;
    let (first, second, third) = (r#"{"user":"ada","at":1}"#, r#"{"user":"bob"}"#, r#"{"user":"ada","at":3}"#);
    let place = Place::of(redis.url(), &format!("{first}\n{second}\n{third}\n"), String::new());
    let declared = ["stream.clicks.fields=[\"user\"]", "stream.clicks.window=\"2h\"", "stream.clicks.shards=3"];
    let filter = |arguments: &[&str]| {
        let mut command = crate::cli::onejob();
        command.current_dir(place.path("")).args(["--set", &format!("redis.url={}", redis.url())]);
        for entry in declared {
            command.args(["--set", entry]);
        }
        command.args(["dedup", "--summary", "json"]).args(arguments);
        command
    };
    // Somebody else has seen one of them, as the stream is declared.
    let stream = Stream { shards: 3, ..Stream::new("clicks", &["user"]) };
    let dedup = Dedup::new(&redis.store().await, stream).unwrap();
    let bob = dedup.stream().id_of_json(&serde_json::json!({"user": "bob"})).unwrap();
    assert_eq!(dedup.check(&[bob], BatchToken::random()).await.unwrap(), [Verdict::First]);
    let told = ended(filter(&["--input", "input"])).await.expect(0);
    assert_eq!(told.stdout, format!("{first}\n"));
    assert_eq!(summary(&told)["duplicates"], 2);
    // Said again it must be the same; another stream is not declared.
    let told = ended(filter(&["--input", "input", "--key", "user", "--window", "2h", "--shards", "3"])).await.expect(0);
    assert_eq!(told.stdout, "");
    for (arguments, what) in [
        (&["--key", "at"][..], r#"the key is ["at"], and [stream.clicks] of the configuration says ["user"]"#),
        (&["--lines"], "the key is"),
        (&["--window", "1h"], "--window is 3600s, and [stream.clicks] of the configuration says 7200s"),
        (&["--mirrored"], "--mirrored is true, and [stream.clicks] of the configuration says false"),
        (&["--shards", "1"], "--shards is 1, and [stream.clicks] of the configuration says 3"),
        (&["--stream", "others"], "--key names what makes two records the same"),
    ] {
        let told = ended(filter(&[&["--input", "input"], arguments].concat())).await.expect(2);
        assert!(told.stderr.contains(what), "{what}: {}", told.stderr);
        assert_eq!(told.stdout, "");
    }
}

#[tokio::test]
async fn a_stream_that_is_declared_mirrored_is_so_for_the_filter_and_said_of_another_one_it_is_refused() {
    let redis = Redis::start().await;
    let place = Place::of(redis.url(), "{\"user\":\"ada\"}\n{\"user\":\"bob\"}\n", String::new());
    let filter = |declared: &[&str], arguments: &[&str]| {
        let mut command = crate::cli::onejob();
        command.current_dir(place.path("")).args(["--set", &format!("redis.url={}", redis.url())]);
        command.args(declared.iter().flat_map(|entry| ["--set", entry]));
        command.args(["dedup", "--input", "input", "--key", "user"]).args(arguments);
        command
    };
    let declared = ["stream.clicks.fields=[\"user\"]", "stream.clicks.mirrored=true"];
    let stream = Stream { mirrored: true, ..Stream::new("clicks", &["user"]) };
    let dedup = Dedup::new(&redis.store().await, stream).unwrap();
    let bob = dedup.stream().id_of_json(&serde_json::json!({"user": "bob"})).unwrap();
    assert_eq!(dedup.check(&[bob], BatchToken::random()).await.unwrap(), [Verdict::First]);
    let told = ended(filter(&declared, &[])).await.expect(0);
    assert_eq!(told.stdout, "{\"user\":\"ada\"}\n");
    // Said again, or by somebody who has no declaration.
    for declared in [&declared[..], &[]] {
        assert_eq!(ended(filter(declared, &["--mirrored"])).await.expect(0).stdout, "");
    }
    // Redis says it to who does not know of it.
    let told = ended(filter(&[], &["--patience", "1s"])).await.expect(2);
    assert_eq!(told.stdout, "");
    assert!(told.stderr.contains("the stream is mirrored"), "{}", told.stderr);
    assert!(told.stderr.contains("; nothing was remembered"), "{}", told.stderr);
}

//! Words on certificates, by the real program: what is lost on the way, what overtakes what, and what cannot be read.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::net::{TcpStream, UnixStream};

use super::*;

/// The parts of every word on the route's second provider.
const PAIR: [&str; 4] = ["--route", "city", "--provider", "second"];

impl Site {
    async fn say(&self, word: &str, more: &[&str]) -> Ended {
        self.run(&[&[word], &PAIR[..], more].concat()).await
    }

    async fn certificates_key(&self) -> String {
        self.redis.keys().await.into_iter().find(|key| key.contains(":certificate:")).unwrap()
    }

    /// Makes a certificate say something else than it was issued with.
    async fn rewrite(&self, (route, provider): (&str, &str), change: impl FnOnce(&mut Value)) {
        let store = self.redis.store().await;
        let newest = store.certificates(route, provider).await.unwrap().remove(0).certificate;
        let mut certificate = serde_json::to_value(&newest).unwrap();
        change(&mut certificate);
        let field = format!("certificate:{}", newest.id);
        for key in self.redis.keys().await.into_iter().filter(|key| key.contains(":certificate:")) {
            if self.redis.command::<bool>(&["HEXISTS", &key, &field]).await {
                let _: i64 = self.redis.command(&["HSET", &key, &field, &certificate.to_string()]).await;
            }
        }
    }

    async fn words(&self) -> Vec<(String, String)> {
        let events = self.redis.store().await.certificate_events("city", "second").await.unwrap();
        events.into_iter().map(|event| (event.event, event.by)).collect()
    }
}

fn ends_soon(certificate: &mut Value) {
    certificate["expires_ms"] = json!(certificate["expires_ms"].as_u64().unwrap() - 40 * 60_000);
}

/// Carries everything to Redis and back, but cuts a connection that says these words once Redis has answered them, so many times.
async fn cutter(socket: &str, words: &'static str, times: Arc<AtomicU32>) -> SocketAddr {
    async fn carry(mut client: TcpStream, mut server: UnixStream, words: &str, times: &AtomicU32) -> std::io::Result<()> {
        let (mut asked, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
        let mut cut = false;
        loop {
            tokio::select! {
                length = client.read(&mut asked) => {
                    let bytes = &asked[..length?];
                    let says = !bytes.is_empty() && bytes.windows(words.len()).any(|part| part == words.as_bytes());
                    let count = |left: u32| left.checked_sub(1);
                    cut |= says && times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count).is_ok();
                    match bytes {
                        [] => return Ok(()),
                        bytes => server.write_all(bytes).await?,
                    }
                }
                length = server.read(&mut answered) => match length? {
                    0 => return Ok(()),
                    _ if cut => return Ok(()),
                    length => client.write_all(&answered[..length]).await?,
                },
            }
        }
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (addr, socket) = (listener.local_addr().unwrap(), socket.trim_start_matches("redis+unix://").to_owned());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, times) = (UnixStream::connect(&socket).await.unwrap(), Arc::clone(&times));
            tokio::spawn(async move { carry(client, server, words, &times).await });
        }
    });
    addr
}

/// It ended with "redis may have executed the call", and whoever revoked did not know whether it was revoked.
#[tokio::test]
async fn a_word_whose_answer_is_lost_is_said_again_and_counts_once() {
    let site = Site::open().await;
    let id = site.certified().await;
    // From here on Redis knows the script.
    site.mark("suspend").await.expect(0);
    // More often than the store tries by itself.
    let times = Arc::new(AtomicU32::new(7));
    let addr = cutter(site.redis.socket(), "it lies", Arc::clone(&times)).await;
    let url = format!("redis.url=redis://{addr}");
    let revoke = [&["--set", &url, "revoke"], &PAIR[..], &["--reason", "it lies", "--actor", "ada"]].concat();
    let told = site.run(&revoke).await.expect(0);
    assert_eq!(times.load(Ordering::SeqCst), 0);
    assert!(told.stderr.matches("the same call again in").count() >= 2, "{}", told.stderr);
    assert_eq!(told.json()["result"], "unchanged", "the first of them had changed it");
    assert_eq!(site.certificates().await, [(id, Standing::Revoked, false)]);
    assert_eq!(site.words().await.iter().filter(|(event, _)| event == "revoked").count(), 1);
}

/// Its certificate was the newer word, and undid the revoke.
#[tokio::test]
async fn a_revoke_while_a_qualification_runs_leaves_it_without_a_certificate() {
    let site = Site::open().await;
    let old = site.certified().await;
    site.second.set_behaviour("delay=50ms").unwrap();
    let qualification = site.command(&[&["qualify"], &PAIR[..]].concat()).spawn().unwrap();
    until("it is under way", async || site.second.ledger().received >= 2).await;
    site.mark("revoke").await.expect(0);
    let told = ended(qualification).await.expect(1).json();
    assert_eq!((&told["report"]["verdict"], &told["certificate"]), (&json!("passed"), &Value::Null));
    assert_eq!(site.certificates().await, [(old, Standing::Revoked, false)]);
    // What begins afterwards knows of the revoke.
    site.qualify(&[]).await.expect(0);
    assert_eq!(site.certificates().await[0].1, Standing::Live);
}

/// Nobody could revoke, and the gate went on saying yes.
#[tokio::test]
async fn events_that_cannot_be_read_keep_nobody_from_revoking() {
    let site = Site::open().await;
    site.certified().await;
    let key = site.certificates_key().await;
    let wrong = [
        "garbage",
        "7",
        "{\"a\":1}",
        "[1,[],{\"at_ms\":\"x\"}]",
        "[{\"at_ms\":1.5,\"event\":\"a\",\"id\":\"\",\"by\":\"\",\"reason\":\"\"}]",
    ];
    let words = ["suspend", "revoke"];
    for (place, garbage) in wrong.into_iter().enumerate() {
        let _: i64 = site.redis.command(&["HSET", &key, "events", garbage]).await;
        let marked = site.mark(words[place % 2]).await.expect(0).json();
        assert_eq!(marked["count"], 1, "{garbage}");
        assert_eq!(site.words().await.last().unwrap().1, "ada", "{garbage}");
        let _: i64 = site.redis.command(&["HSET", &key, "events", garbage]).await;
        site.certified().await;
        assert_eq!(site.words().await, [("issued".to_owned(), "operator".to_owned())], "{garbage}");
        site.mark("revoke").await.expect(0);
        site.certified().await;
    }
}

/// An empty --id, as a script has it whose variable is not set, took back every certificate.
#[tokio::test]
async fn an_empty_name_or_word_is_refused_and_takes_nothing_back() {
    let site = Site::open().await;
    let id = site.certified().await;
    let (reason, actor) = (["--reason", "doubts"], ["--actor", "ada"]);
    for name in ["", " ", "zz", "abc", &id.to_uppercase().replace(|c: char| c.is_ascii_digit(), "A")] {
        for word in ["suspend", "revoke", "reinstate"] {
            let refused = site.say(word, &[&reason[..], &actor, &["--id", name]].concat()).await.expect(2);
            assert!(refused.stderr.contains("32 hexadecimal digits"), "{}", refused.stderr);
        }
    }
    site.say("suspend", &[&reason[..], &["--actor", ""]].concat()).await.expect(2);
    site.say("suspend", &[&actor[..], &["--reason", " "]].concat()).await.expect(2);
    assert_eq!(site.certificates().await, [(id, Standing::Live, false)]);
}

/// What was renewed one after the other waited for a provider that did not answer until its certificate had ended.
#[tokio::test]
async fn a_provider_that_hangs_keeps_no_other_certificate_from_being_renewed() {
    let site = Site::open().await;
    let third = simulated().await;
    // By name it comes before the other one.
    let more = format!(
        r#"
        [provider.third]
        base_url = "{}"
        path = "/chat/completions"
        idempotency = {{ header = "idempotency-key", ttl = "1h" }}
        [route.alone]
        effects = "pure"
        providers = ["first", "third"]
        qualify = {{ suite = "{}", life = "1h", renew = "30m" }}
        "#,
        third.base_url(),
        site.path("suite.yaml").display()
    );
    let config = std::fs::read_to_string(site.path("onejob.toml")).unwrap();
    std::fs::write(site.path("onejob.toml"), config + &more).unwrap();
    site.run(&["qualify", "--route", "alone", "--provider", "third"]).await.expect(0);
    site.qualify(&[]).await.expect(0);
    third.clear_ledger();
    third.set_behaviour("hang").unwrap();
    site.rewrite(("alone", "third"), ends_soon).await;
    let gateway = site.serve("serve.log").await;
    until("the renewal of the one hangs", async || third.ledger().received > 0).await;
    site.rewrite(("city", "second"), ends_soon).await;
    until("the other one is renewed", async || site.certificates().await.len() == 2).await;
    assert_eq!(site.redis.store().await.certificates("alone", "third").await.unwrap().len(), 1);
    gateway.terminate().await.expect(0);
}

/// The new certificate was for any build, and drift was noticed no more.
#[tokio::test]
async fn a_renewal_by_answers_that_name_no_build_proves_nothing() {
    let site = Site::open().await;
    let id = site.certified().await;
    site.rewrite(("city", "second"), |certificate| certificate["fingerprint"] = json!("fp_1")).await;
    let gateway = site.serve("serve.log").await;
    let said = "build \\\"fp_1\\\" is certified, and the answers name none";
    until("the renewal has ended", async || gateway.words().replace('\\', "").contains(&said.replace('\\', ""))).await;
    assert!(gateway.words().contains("a renewal proves nothing"));
    assert_eq!(site.certificates().await, [(id, Standing::Live, false)]);
    gateway.terminate().await.expect(0);
}

#[tokio::test]
async fn what_cannot_be_read_is_told_and_the_other_certificates_are_listed() {
    let site = Site::open().await;
    let id = site.certified().await;
    site.rewrite(("city", "second"), |certificate| certificate["expires_ms"] = json!(u64::MAX)).await;
    let listed = async |code: i32| {
        let listed = site.run(&["certificates"]).await.expect(code);
        assert_eq!(listed.json()[0]["certificate"]["id"], json!(id));
        listed.stderr
    };
    listed(0).await;
    let mut plain = onejob();
    plain.arg("--config").arg(site.path("onejob.toml")).arg("certificates").stdout(Stdio::piped()).stderr(Stdio::piped());
    let table = ended(plain.spawn().unwrap()).await.expect(0).stdout;
    assert!(table.contains("18446744073709551615 ms after"), "{table}");
    site.run(&["can-failover", "--route", "city"]).await.expect(0);

    let raw = "return redis.call('ZADD', KEYS[1], 1, 'a\\255\\nb', 2, 'nobody')";
    let _: i64 = site.redis.command(&["EVAL", raw, "1", "oj:certificates"]).await;
    let told = listed(6).await;
    assert!(told.contains("a\\xff\\nb") && told.contains("\"nobody\""), "{told}");
    let key = site.certificates_key().await;
    let _: i64 = site.redis.command(&["HSET", &key, "events", "garbage"]).await;
    let told = listed(6).await;
    assert!(told.contains("the events of \"city\", \"second\""), "{told}");
    let _: i64 = site.redis.command(&["HSET", &key, &format!("certificate:{id}"), "garbage"]).await;
    let told = site.run(&["certificates"]).await.expect(6).stderr;
    assert!(told.contains("the certificates of \"city\", \"second\""), "{told}");
}

#[tokio::test]
async fn the_report_that_a_certificate_stands_on_is_printed() {
    let site = Site::open().await;
    let issued = site.qualify(&[]).await.expect(0).json();
    let id = issued["certificate"]["id"].as_str().unwrap();
    let evidence = site.run(&["certificates", "--evidence", id]).await.expect(0).json();
    assert_eq!(evidence, issued["report"]);
    site.run(&["certificates", "--evidence", &"a".repeat(32)]).await.expect(5);
    site.run(&["certificates", "--evidence", ""]).await.expect(2);
}

/// It needed a right to keys beside its own, and did not say which.
#[tokio::test]
async fn who_may_use_the_configured_prefix_may_qualify_through_a_gateway() {
    let site = Site::open_with(simulated().await, &SUITE.replace("[structure, meaning]", "[meaning, gateway]"), "").await;
    site.redis.command::<()>(&["ACL", "SETUSER", "default", "resetkeys", "~oj:*", "resetchannels", "&oj:*"]).await;
    site.qualify(&[]).await.expect(0);
}

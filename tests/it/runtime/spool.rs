//! Results that Redis did not take outlive their gateway, in a directory.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use onejob::attempt::AttemptState::{Failed, Succeeded};
use onejob::job::{JobId, JobState};
use onejob::provider::Response;
use onejob::runtime::{Drained, Replayed, Runtime, RuntimeOptions, SpoolOptions};
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions};
use onejob::store::{Store, StoreOptions};
use tempfile::TempDir;

use super::{Setup, Shop, ended, settled, states, submission, until};

const MIB: u64 = 1 << 20;

fn spooling(setup: &mut Setup, dir: &Path) {
    setup.options.spool = Some(SpoolOptions { dir: dir.to_owned(), bytes_max: MIB });
}

/// The files of a directory whose names end so, sorted.
fn files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries.filter(|path| path.to_str().unwrap().ends_with(ending)).collect();
    files.sort();
    files
}

/// Redis takes no script any more, or does so again. Nothing of what it refused was executed.
async fn refuse(shop: &Shop) {
    shop.redis.command::<()>(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]).await;
}

async fn accept(shop: &Shop) {
    shop.redis.command::<()>(&["ACL", "SETUSER", "default", "+@all"]).await;
}

/// Jobs whose provider answered while Redis took nothing, and whose gateway has stopped since.
async fn in_the_spool(shop: &Shop, dir: &Path, keys: &[&str]) -> Vec<JobId> {
    let runtime = shop.gateway_with(|setup| spooling(setup, dir)).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let mut ids = Vec::new();
    for key in keys {
        ids.push(runtime.submit(submission(key, "{}")).await.unwrap().job.id);
    }
    until("the calls are at the provider", async || shop.inkjet.ledger().received >= keys.len() as u64).await;
    refuse(shop).await;
    until("all are in the spool", async || files(dir, ".verdict").len() == keys.len()).await;
    let all = keys.len();
    let drained = runtime.shutdown(Duration::ZERO).await;
    assert_eq!(drained, Drained { running: all, unknown: 0, unwritten: 0, spooled: all });
    accept(shop).await;
    ids
}

/// Everything that is counted on this thread, and so by the runtimes of one test.
fn counted() -> (PrometheusHandle, impl Drop) {
    let recorder: &'static _ = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
    (recorder.handle(), metrics::set_default_local_recorder(recorder))
}

/// A file is counted a moment after it is there, or gone.
async fn counts(handle: &PrometheusHandle, line: &str) {
    until(line, async || handle.render().lines().any(|known| known == line)).await;
}

async fn result(runtime: &Runtime, id: JobId) -> Response {
    runtime.result(&runtime.read(id).await.unwrap()).await.unwrap().unwrap()
}

/// Case 26: Redis died, the provider answered, the gateway was stopped. A small result and one with a blob of its own.
#[tokio::test]
async fn a_result_that_redis_did_not_take_is_stored_by_the_next_gateway() {
    let shop = Shop::open().await;
    let (home, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let spool = dir.path().join("made/spool");
    let options = PrivateRedisOptions { data_dir: home.path().to_owned(), server: None };
    let redis = PrivateRedis::start(options.clone()).await.unwrap();
    let url = redis.url().to_owned();
    let change = |url: String| {
        let spool = spool.clone();
        move |setup: &mut Setup| {
            spooling(setup, &spool);
            setup.store = StoreOptions { response_timeout: Duration::from_secs(2), ..StoreOptions::new(&url) };
        }
    };
    let runtime = shop.gateway_with(change(url)).await;
    shop.inkjet.set_behaviour("delay=700ms").unwrap();
    let small = runtime.submit(submission("small", "{}")).await.unwrap().job.id;
    let large = runtime.submit(submission("large", r#"{"simulate":"delay=700ms,size=20000"}"#)).await.unwrap().job.id;
    until("the calls are at the provider", async || shop.inkjet.ledger().received == 2).await;
    redis.stop().await;
    until("both are in the spool", async || files(&spool, ".verdict").len() == 2).await;
    assert_eq!(fs::metadata(&spool).unwrap().permissions().mode() & 0o777, 0o700);
    for file in files(&spool, ".verdict") {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let drained = runtime.shutdown(Duration::ZERO).await;
    assert_eq!(drained, Drained { running: 2, unknown: 0, unwritten: 0, spooled: 2 });
    runtime.store().close().await;

    let redis = PrivateRedis::start(options).await.unwrap();
    let next = shop.gateway_with(change(redis.url().to_owned())).await;
    for (id, key, body) in [(small, "small", "{}"), (large, "large", r#"{"simulate":"delay=700ms,size=20000"}"#)] {
        let job = ended(&next, id).await;
        assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
        let again = next.submit(submission(key, body)).await.unwrap();
        assert_eq!((again.job.id, again.replayed), (id, Replayed::Yes));
        assert_eq!(shop.executions(id), 1);
    }
    assert!(result(&next, large).await.body.len() >= 20_000);
    assert_eq!(result(&next, small).await.status, 200);
    until("the spool is empty", async || files(&spool, "").is_empty()).await;
    next.shutdown(Duration::ZERO).await;
    redis.stop().await;
}

/// A definite failure and its refusal are no less worth than a success: the key is free sooner.
#[tokio::test]
async fn a_refusal_is_stored_by_the_next_gateway_too() {
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let runtime = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    shop.inkjet.set_behaviour("queue=300ms,refuse_status=400").unwrap();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    refuse(&shop).await;
    until("it is in the spool", async || files(dir.path(), ".verdict").len() == 1).await;
    runtime.shutdown(Duration::ZERO).await;
    accept(&shop).await;
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    let job = ended(&next, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Failed, vec![Failed]));
    assert_eq!(result(&next, id).await.status, 400);
}

#[tokio::test]
async fn a_result_that_redis_takes_soon_never_touches_the_disk() {
    let (handle, _counting) = counted();
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let runtime = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    ended(&runtime, id).await;
    runtime.shutdown(Duration::from_secs(5)).await;
    for fate in ["written", "stored", "refused"] {
        counts(&handle, &format!("onejob_spooled_total{{fate=\"{fate}\"}} 0")).await;
    }
}

/// The gateway that has it in hand stores it as soon as Redis is back, and tidies up.
#[tokio::test]
async fn a_result_in_the_spool_is_still_tried_from_memory() {
    let (handle, _counting) = counted();
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let runtime = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    refuse(&shop).await;
    until("it is in the spool", async || files(dir.path(), ".verdict").len() == 1).await;
    counts(&handle, "onejob_spool_results 1").await;
    accept(&shop).await;
    assert_eq!(ended(&runtime, id).await.state, JobState::Succeeded);
    until("the spool is empty", async || files(dir.path(), "").is_empty()).await;
    counts(&handle, "onejob_spool_results 0").await;
    counts(&handle, "onejob_spooled_total{fate=\"written\"} 1").await;
    counts(&handle, "onejob_spooled_total{fate=\"stored\"} 1").await;
    assert_eq!(shop.executions(id), 1);
}

#[tokio::test]
async fn files_that_nobody_can_read_are_put_aside_and_stop_no_other() {
    let (handle, _counting) = counted();
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let ids = in_the_spool(&shop, dir.path(), &["cut", "flipped", "foreign", "whole"]).await;
    let file_of =
        |id: JobId| files(dir.path(), ".verdict").into_iter().find(|file| file.to_str().unwrap().contains(&id.to_string()));
    let [cut, flipped, foreign, _] = [0, 1, 2, 3].map(|place: usize| file_of(ids[place]).unwrap());
    let bytes = fs::read(&cut).unwrap();
    fs::write(&cut, &bytes[..bytes.len() - 7]).unwrap();
    let mut bytes = fs::read(&flipped).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&flipped, bytes).unwrap();
    let bytes = fs::read(&foreign).unwrap();
    fs::write(&foreign, [b"onejob verdict 2\n", &bytes[17..]].concat()).unwrap();
    fs::write(dir.path().join("empty.verdict"), "").unwrap();

    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, ids[3]).await.state, JobState::Succeeded);
    until("the others are put aside", async || files(dir.path(), ".verdict.bad").len() == 4).await;
    assert!(files(dir.path(), ".verdict").is_empty());
    counts(&handle, "onejob_spooled_total{fate=\"bad\"} 4").await;
    counts(&handle, "onejob_spooled_total{fate=\"stored\"} 1").await;
}

/// Its writer died between the write and the rename.
#[tokio::test]
async fn a_file_that_nobody_finished_is_taken_over_once_it_is_old() {
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let ids = in_the_spool(&shop, dir.path(), &["old", "young"]).await;
    for (id, age) in [(ids[0], 120), (ids[1], 0)] {
        let file =
            files(dir.path(), ".verdict").into_iter().find(|file| file.to_str().unwrap().contains(&id.to_string())).unwrap();
        let modified = fs::metadata(&file).unwrap().modified().unwrap() - Duration::from_secs(age);
        fs::File::options().write(true).open(&file).unwrap().set_modified(modified).unwrap();
        fs::rename(&file, file.with_extension("verdict.tmp")).unwrap();
    }
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, ids[0]).await.state, JobState::Succeeded);
    assert_eq!(files(dir.path(), ".verdict.tmp").len(), 1, "somebody may be writing it");
}

/// Somebody was paid, and the store has forgotten for what.
#[tokio::test]
async fn a_verdict_without_a_job_is_kept_for_a_person() {
    let (handle, _counting) = counted();
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let ids = in_the_spool(&shop, dir.path(), &["lost", "there"]).await;
    shop.redis.command::<i64>(&["DEL", &format!("oj:{{{}}}", ids[0].identity())]).await;
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, ids[1]).await.state, JobState::Succeeded);
    until("it is put aside", async || files(dir.path(), ".verdict.orphan").len() == 1).await;
    counts(&handle, "onejob_spooled_total{fate=\"orphan\"} 1").await;

    // The same for one that was never written down before.
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let id = next.submit(submission("order-3", "{}")).await.unwrap().job.id;
    shop.redis.command::<i64>(&["DEL", &format!("oj:{{{}}}", id.identity())]).await;
    until("it is put aside too", async || files(dir.path(), ".verdict.orphan").len() == 2).await;
    assert_eq!(files(dir.path(), "").len(), 2, "nothing else is there");
}

#[tokio::test]
async fn beyond_its_limit_the_spool_takes_nothing_and_the_result_stays_in_memory() {
    let (handle, _counting) = counted();
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("for-a-person.verdict.bad"), vec![0; 1000]).unwrap();
    let limit = |setup: &mut Setup| setup.options.spool = Some(SpoolOptions { dir: dir.path().to_owned(), bytes_max: 1000 });
    let runtime = shop.gateway_with(limit).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    refuse(&shop).await;
    until("the spool refuses it", async || handle.render().contains("onejob_spooled_total{fate=\"refused\"} 1")).await;
    assert_eq!(files(dir.path(), "").len(), 1);
    accept(&shop).await;
    assert_eq!(ended(&runtime, id).await.state, JobState::Succeeded);
    counts(&handle, "onejob_spooled_total{fate=\"written\"} 0").await;
}

/// What is lost with the process is told at its end.
#[tokio::test]
async fn a_result_that_fits_nowhere_is_counted_as_lost_when_the_gateway_stops() {
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let limit = |setup: &mut Setup| setup.options.spool = Some(SpoolOptions { dir: dir.path().to_owned(), bytes_max: 10 });
    let runtime = shop.gateway_with(limit).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    runtime.submit(submission("order-1", "{}")).await.unwrap();
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    refuse(&shop).await;
    until("it was answered", async || shop.inkjet.ledger().answered == 1).await;
    until("its storing is refused", async || !shop.redis.command::<Vec<redis::Value>>(&["ACL", "LOG"]).await.is_empty()).await;
    let drained = runtime.shutdown(Duration::ZERO).await;
    assert_eq!(drained, Drained { running: 1, unknown: 0, unwritten: 1, spooled: 0 });
}

/// No locks: who comes second is answered that it was stored already.
#[tokio::test]
async fn two_gateways_over_one_directory_store_each_result_once() {
    let (handle, _counting) = counted();
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let keys: Vec<String> = (0..20).map(|order| format!("order-{order}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let ids = in_the_spool(&shop, dir.path(), &keys).await;
    let (one, other) = tokio::join!(
        shop.gateway_with(|setup| spooling(setup, dir.path())),
        shop.gateway_with(|setup| spooling(setup, dir.path()))
    );
    for id in ids {
        let job = ended(&one, id).await;
        assert_eq!((job.state, states(&job), job.version), (JobState::Succeeded, vec![Succeeded], 1));
        assert_eq!(shop.executions(id), 1);
    }
    until("the spool is empty", async || files(dir.path(), "").is_empty()).await;
    counts(&handle, "onejob_spooled_total{fate=\"stored\"} 20").await;
    counts(&handle, "onejob_results_total{fate=\"won\"} 20").await;
    for runtime in [one, other] {
        runtime.shutdown(Duration::ZERO).await;
    }
}

/// The store refused it for good, until somebody put the record right.
#[tokio::test]
async fn a_result_that_the_store_refuses_for_good_stays_in_the_spool() {
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let runtime = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    let key = format!("oj:{{{}}}", id.identity());
    shop.redis.command::<()>(&["RENAME", &key, "aside"]).await;
    shop.redis.command::<i64>(&["RPUSH", &key, "no record"]).await;
    until("it is in the spool", async || files(dir.path(), ".verdict").len() == 1).await;
    runtime.shutdown(Duration::ZERO).await;
    shop.redis.command::<()>(&["RENAME", "aside", &key]).await;
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, id).await.state, JobState::Succeeded);
    assert_eq!(shop.executions(id), 1);
}

/// A late success of an attempt that was called unknown meanwhile wins.
#[tokio::test]
async fn a_result_from_the_spool_wins_although_its_attempt_became_unknown() {
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let change = |setup: &mut Setup| {
        spooling(setup, dir.path());
        setup.options = RuntimeOptions {
            lease: Duration::from_millis(1200),
            lease_margin: Duration::from_millis(300),
            ..setup.options.clone()
        };
    };
    let runtime = shop.gateway_with(change).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    refuse(&shop).await;
    until("it is in the spool", async || files(dir.path(), ".verdict").len() == 1).await;
    runtime.shutdown(Duration::ZERO).await;
    accept(&shop).await;
    let without = shop.gateway().await;
    assert_eq!(settled(&without, id).await.state, JobState::Unknown);
    let _with = shop.gateway_with(change).await;
    let job = ended(&without, id).await;
    assert_eq!((job.state, states(&job)), (JobState::Succeeded, vec![Succeeded]));
    assert_eq!(job.events.last().unwrap().event, "late_success");
}

#[tokio::test]
async fn a_spool_that_cannot_be_written_is_no_start() {
    let shop = Shop::open().await;
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("a-file");
    fs::write(&file, "").unwrap();
    for bad in [file.clone(), file.join("spool"), PathBuf::from("/proc/spool")] {
        let (store, _) = Store::connect(shop.redis.options()).await.unwrap();
        let spool = Some(SpoolOptions { dir: bad.clone(), bytes_max: MIB });
        let options = RuntimeOptions { spool, ..RuntimeOptions::default() };
        let Err(error) = Runtime::start(store, options, vec![], vec![]) else { panic!("{} is no spool", bad.display()) };
        let told = error.to_string();
        assert!(told.starts_with(&format!("cannot use the spool directory {}: making it: ", bad.display())), "{told}");
        assert!(told.contains("os error"), "{told}");
    }
}

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
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions, Syncs};
use onejob::store::{Store, StoreOptions};
use tempfile::TempDir;

use super::{Setup, Shop, ended, settled, states, submission, until};
use crate::support::until_within;

const MIB: u64 = 1 << 20;

fn spooling(setup: &mut Setup, dir: &Path) {
    setup.options.spool = Some(SpoolOptions { dir: dir.to_owned(), bytes_max: MIB });
}

/// A directory that nobody else may enter.
fn closed() -> TempDir {
    tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
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
    let (home, dir) = (closed(), closed());
    let spool = dir.path().join("made/spool");
    let options = PrivateRedisOptions {
        data_dir: home.path().to_owned(),
        server: Some(crate::support::server::program()),
        syncs: Syncs::EverySecond,
    };
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
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
    let dir = closed();
    let runtime = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    let id = runtime.submit(submission("order-1", "{}")).await.unwrap().job.id;
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    let key = format!("oj:{{{}}}", id.identity());
    let aside = format!("{{{}}}aside", id.identity());
    shop.redis.command::<()>(&["RENAME", &key, &aside]).await;
    shop.redis.command::<i64>(&["RPUSH", &key, "no record"]).await;
    until("it is in the spool", async || files(dir.path(), ".verdict").len() == 1).await;
    runtime.shutdown(Duration::ZERO).await;
    shop.redis.command::<()>(&["RENAME", &aside, &key]).await;
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, id).await.state, JobState::Succeeded);
    assert_eq!(shop.executions(id), 1);
}

/// A late success of an attempt that was called unknown meanwhile wins.
#[tokio::test]
async fn a_result_from_the_spool_wins_although_its_attempt_became_unknown() {
    let shop = Shop::open().await;
    let dir = closed();
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
    let dir = closed();
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

#[tokio::test]
async fn a_result_that_the_spool_refused_is_written_once_there_is_room() {
    let (handle, _counting) = counted();
    let shop = Shop::open().await;
    let dir = closed();
    let bad = dir.path().join("for-a-person.verdict.bad");
    fs::write(&bad, vec![0; 1000]).unwrap();
    let limit = |setup: &mut Setup| setup.options.spool = Some(SpoolOptions { dir: dir.path().to_owned(), bytes_max: 1000 });
    let runtime = shop.gateway_with(limit).await;
    shop.inkjet.set_behaviour("delay=300ms").unwrap();
    runtime.submit(submission("order-1", "{}")).await.unwrap();
    until("the call is at the provider", async || shop.inkjet.ledger().received == 1).await;
    refuse(&shop).await;
    until("the spool refuses it", async || handle.render().contains("onejob_spooled_total{fate=\"refused\"} 1")).await;
    fs::remove_file(&bad).unwrap();
    // A scan sees that there is room; then it is offered again.
    let within = Duration::from_secs(60);
    until_within(within, "it is in the spool", async || files(dir.path(), ".verdict").len() == 1).await;
    counts(&handle, "onejob_spooled_total{fate=\"refused\"} 1").await;
    counts(&handle, "onejob_spooled_total{fate=\"written\"} 1").await;
}

/// A directory may be shared by gateways over two stores: both default to the same one where they are started.
#[tokio::test]
async fn a_verdict_of_another_store_is_left_to_its_own_gateways() {
    let (handle, _counting) = counted();
    let (shop, stranger) = (Shop::open().await, Shop::open().await);
    let dir = closed();
    let ids = in_the_spool(&shop, dir.path(), &["order-1"]).await;
    let other_prefix = |setup: &mut Setup| {
        spooling(setup, dir.path());
        setup.store.prefix = "other".to_owned();
    };
    let strangers = [stranger.gateway_with(|setup| spooling(setup, dir.path())).await, shop.gateway_with(other_prefix).await];
    for (number, other) in strangers.into_iter().enumerate() {
        // Files are looked at in order; this one is the last.
        let last = dir.path().join(format!("zz-{number}.verdict"));
        fs::write(&last, "").unwrap();
        until_within(Duration::from_secs(60), "the directory was looked through", async || !last.exists()).await;
        other.shutdown(Duration::ZERO).await;
    }
    assert_eq!((files(dir.path(), ".verdict").len(), files(dir.path(), ".orphan").len()), (1, 0));
    counts(&handle, "onejob_spool_results 0").await;
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, ids[0]).await.state, JobState::Succeeded);
}

/// What a gateway writes after its Redis was wiped is for the jobs that were made since.
#[tokio::test]
async fn a_store_that_was_wiped_under_a_gateway_gets_its_name_back() {
    let shop = Shop::open().await;
    let dir = closed();
    let _runtime = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    let name = async || shop.redis.command::<Option<String>>(&["HGET", "oj:meta", "store"]).await;
    let before = name().await;
    assert!(before.is_some());
    shop.redis.command::<()>(&["FLUSHALL"]).await;
    until_within(Duration::from_secs(60), "it has its name again", async || name().await == before).await;
}

/// Out of memory Redis takes endings without a blob; one with a blob must not stand in their way.
#[tokio::test]
async fn a_large_result_that_is_refused_stops_no_small_one() {
    let shop = Shop::open().await;
    let dir = closed();
    let runtime = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    let large = r#"{"simulate":"delay=500ms,size=20000"}"#;
    let large = runtime.submit(submission("large", large)).await.unwrap().job.id;
    let small = runtime.submit(submission("small", r#"{"simulate":"delay=500ms"}"#)).await.unwrap().job.id;
    until("the calls are at the provider", async || shop.inkjet.ledger().received == 2).await;
    refuse(&shop).await;
    until("all are in the spool", async || files(dir.path(), ".verdict").len() == 2).await;
    runtime.shutdown(Duration::ZERO).await;
    // Files are looked at in order: the large one is the first.
    let is_large = |file: &PathBuf| file.to_str().unwrap().contains(&large.to_string());
    let file = files(dir.path(), ".verdict").into_iter().find(is_large).unwrap();
    fs::rename(file, dir.path().join("0-large.verdict")).unwrap();
    shop.redis.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]).await;
    accept(&shop).await;
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, small).await.state, JobState::Succeeded);
    assert!(dir.path().join("0-large.verdict").exists(), "the large one waits");
    shop.redis.command::<()>(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_eq!(ended(&next, large).await.state, JobState::Succeeded);
}

/// Reading one would wait for ever, or read what somebody else chose.
#[tokio::test]
async fn what_is_no_regular_file_is_put_aside_and_stops_no_other() {
    let shop = Shop::open().await;
    let dir = closed();
    let ids = in_the_spool(&shop, dir.path(), &["order-1"]).await;
    let fifo = dir.path().join("0-fifo.verdict");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("0-link.verdict")).unwrap();
    std::os::unix::fs::symlink(&fifo, dir.path().join("0-link-to-fifo.verdict")).unwrap();
    fs::create_dir(dir.path().join("0-directory.verdict")).unwrap();
    let next = shop.gateway_with(|setup| spooling(setup, dir.path())).await;
    assert_eq!(ended(&next, ids[0]).await.state, JobState::Succeeded);
    assert_eq!(files(dir.path(), ".verdict.bad").len(), 4);
}

/// It may hold other people's files, and they may read what is put into it.
#[tokio::test]
async fn a_directory_that_others_may_enter_is_no_spool_and_stays_as_it_is() {
    let shop = Shop::open().await;
    let dir = closed();
    for (mode, is_closed) in [(0o755, false), (0o770, false), (0o701, false), (0o1777, false), (0o700, true)] {
        let shared = dir.path().join(format!("{mode:o}"));
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(mode)).unwrap();
        let (store, _) = Store::connect(shop.redis.options()).await.unwrap();
        let spool = Some(SpoolOptions { dir: shared.clone(), bytes_max: MIB });
        let started = Runtime::start(store, RuntimeOptions { spool, ..RuntimeOptions::default() }, vec![], vec![]);
        assert_eq!(started.is_ok(), is_closed, "{mode:o}");
        if let Err(error) = started {
            let told = error.to_string();
            for words in [shared.to_str().unwrap(), &format!("mode {mode:04o}"), "chmod 700", "runtime.spool_dir"] {
                assert!(told.contains(words), "{words}: {told}");
            }
        }
        assert_eq!(fs::metadata(&shared).unwrap().permissions().mode() & 0o7777, mode);
    }
}

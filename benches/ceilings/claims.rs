//! The job that every benchmark submits: its shape, its claim and its end by the store's own calls, and keys that nobody has used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use onejob::attempt::{AttemptToken, FinishOutcome};
use onejob::fingerprint::{digest, second_half, sha256};
use onejob::job::{Body, Class, Identity, JobId, Key, Owner, Payload, Rules};
use onejob::store::{Begin, FinishAttempt, Finished, Follow, Store, StoreOptions, SubmitJob, Submitted, Tell, WriteAhead};

/// How long a call may wait: the machine may be busy with something else.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// The size of an input's and a result's body, where nothing else is said.
pub(crate) const INPUT_BYTES: usize = 40;
pub(crate) const RESULT_BYTES: usize = 280;

/// The job that everything here submits: each side of a comparison takes its arguments from it.
pub(crate) struct JobShape {
    pub(crate) owner: Owner,
    pub(crate) route: &'static str,
    pub(crate) rules: Rules,
    pub(crate) deadline_ms: u64,
    pub(crate) input_head: &'static str,
    pub(crate) input: Arc<[u8]>,
    pub(crate) lease_ms: u64,
    pub(crate) provider: &'static str,
    pub(crate) gateway: &'static str,
    pub(crate) url: &'static str,
}

impl Default for JobShape {
    fn default() -> Self {
        JobShape {
            owner: Owner::new("shop").expect("visible ASCII"),
            route: "print",
            rules: rules(),
            deadline_ms: 300_000,
            input_head: " \ncontent-type: application/json",
            input: input(),
            lease_ms: 15_000,
            provider: "laser",
            gateway: "gateway-1-4f1a2b",
            url: "http://laser.example/v1/prints",
        }
    }
}

pub(crate) fn rules() -> Rules {
    const DAY_MS: u64 = 86_400_000;
    Rules {
        attempts_max: 3,
        race_max: 1,
        race_after_ms: 0,
        key_life_ms: DAY_MS,
        retention_ms: DAY_MS,
        releases_on_failure: false,
        quarantine_ms: 171_000,
    }
}

fn input() -> Arc<[u8]> {
    let input = br#"{"file":"invoice-000001.pdf","copies":1}"#;
    debug_assert_eq!(input.len(), INPUT_BYTES);
    Arc::from(&input[..])
}

pub(crate) async fn store(url: &str) -> Result<Store> {
    let patient = StoreOptions { connect_timeout: PATIENCE, response_timeout: PATIENCE, ..StoreOptions::new(url) };
    Ok(Store::connect(patient).await?.0)
}

/// What a claim has made, or met.
pub(crate) struct Claim {
    pub(crate) id: JobId,
    pub(crate) token: AttemptToken,
    pub(crate) hint_ms: u64,
    pub(crate) submitted: Submitted,
}

/// Claims one key, its first attempt's write-ahead included.
pub(crate) async fn claim(store: &Store, shape: &JobShape, key: &Key) -> Result<Claim> {
    let request_hash = digest(shape.owner.as_str(), key.as_str());
    let sent = WriteAhead { url: shape.url, request_hash: &request_hash, certificate: "" };
    claim_as(store, shape, key, Begin::Running { provider: shape.provider, sent }).await
}

/// Claims one key, and begins as far as is said.
pub(crate) async fn claim_as(store: &Store, shape: &JobShape, key: &Key, begin: Begin<'_>) -> Result<Claim> {
    let digest = digest(shape.owner.as_str(), key.as_str());
    let id = JobId::new(store.now_ms(), Identity::of(&digest));
    let token = AttemptToken::random();
    let hint_ms = store.now_ms() + shape.lease_ms;
    let input = Payload { head: shape.input_head.to_owned(), body: Body::Inline(Arc::clone(&shape.input)) };
    let submit = SubmitJob {
        id,
        digest: second_half(&digest),
        fingerprint: second_half(&sha256(&shape.input)),
        owner: &shape.owner,
        route: shape.route,
        class: Class::Exclusive,
        deadline_ms: shape.deadline_ms,
        rules: shape.rules,
        input: &input,
        token,
        lease_ms: shape.lease_ms,
        hint_ms,
        gateway: shape.gateway,
        begin,
    };
    let submitted = store.submit_job(&submit).await?;
    Ok(Claim { id, token, hint_ms, submitted })
}

/// Ends a claimed job with a result, and takes its hint away if it is told when that is due.
pub(crate) async fn finish(store: &Store, claim: &Claim, hint_ms: Option<u64>, result: &Payload) -> Result<()> {
    let finish = FinishAttempt {
        job: claim.id,
        number: 1,
        token: claim.token,
        outcome: FinishOutcome::Succeeded,
        result,
        reason: "",
        remote_id: "",
        model: "",
        follow: Follow::End,
        hint_ms,
        strip_at_ms: None,
        tell: Tell::Nothing,
    };
    match store.finish_attempt(&finish).await? {
        Finished::Won { .. } => Ok(()),
        other => bail!("a result was answered {other:?}"),
    }
}

/// Keys that nobody has used before.
#[derive(Clone)]
pub(crate) struct Keys {
    run: Arc<str>,
    next: Arc<AtomicU64>,
}

impl Keys {
    pub(crate) fn new() -> Self {
        let run = uuid::Uuid::new_v4().simple().to_string();
        Keys { run: Arc::from(&run[..12]), next: Arc::new(AtomicU64::new(0)) }
    }

    pub(crate) fn next(&self) -> Key {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Key::new(&format!("{}-{number}", self.run)).expect("digits are visible ASCII")
    }
}

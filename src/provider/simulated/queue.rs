//! The simulated provider's queue of jobs, `/jobs`: taken on at once, done afterwards, asked about, canceled, called back about.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::{Path, Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::behaviour::{Cancels, End, Executes, Id, Queued, Treatment, Webhook};
use super::server::{App, Order, Received, dropped, executed, finish, made, receive, refusal};
use super::{KEY_HEADER, Keys, LEDGER_ENTRIES_MAX, Made, Mark};
use crate::provider::webhook::sign;

/// How often a webhook is sent that nobody takes.
const WEBHOOK_TRIES_MAX: u32 = 8;
/// How long to wait before it is sent again.
const WEBHOOK_PAUSE: Duration = Duration::from_millis(100);
/// How long the other side may take for it.
const WEBHOOK_TIME_MAX: Duration = Duration::from_secs(10);

/// A name that leads out of `/jobs`, if somebody puts it into a path as it is.
const HOSTILE_ID: &str = "../../ledger?job=x#";

/// All jobs, the oldest of which go first.
#[derive(Default)]
pub(super) struct Queue(Mutex<Jobs>);

#[derive(Default)]
struct Jobs {
    by_id: BTreeMap<String, Job>,
    order: VecDeque<String>,
    taken_on: u64,
}

struct Job {
    key: String,
    state: Stands,
    treatment: Queued,
    result: Option<Value>,
    /// Whether it has ended, and has called back if it does.
    over: watch::Sender<Over>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    No,
    Yes,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stands {
    Queued,
    Running,
    Completed,
    Failed,
    Canceled,
}

impl Stands {
    fn as_str(self) -> &'static str {
        match self {
            Stands::Queued => "queued",
            Stands::Running => "running",
            Stands::Completed => "completed",
            Stands::Failed => "failed",
            Stands::Canceled => "canceled",
        }
    }
}

impl Job {
    fn document(&self, id: &str) -> Value {
        let status = self.treatment.report.as_deref().unwrap_or(self.state.as_str());
        let mut document = json!({ "id": id, "object": "job", "key": self.key, "status": status });
        if let Some(result) = &self.result {
            document["result"] = result.clone();
        }
        if self.state == Stands::Failed {
            document["error"] = json!({ "type": "jam", "message": "the paper is jammed; nothing was printed" });
        }
        document
    }
}

impl Queue {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn document(&self, id: &str) -> Option<Value> {
        self.jobs().by_id.get(id).map(|job| job.document(id))
    }

    fn change<T>(&self, id: &str, change: impl FnOnce(&mut Job) -> T) -> Option<T> {
        self.jobs().by_id.get_mut(id).map(change)
    }
}

impl Jobs {
    /// The job of this key, if keys are honoured and it is there; else a new one.
    fn take_on(&mut self, name: &str, keys: Keys, key: &str, treatment: &Queued) -> (String, Fresh) {
        if keys == Keys::Honoured
            && !key.is_empty()
            && let Some((id, _)) = self.by_id.iter().find(|(_, job)| job.key == key)
        {
            return (id.clone(), Fresh::No);
        }
        self.taken_on += 1;
        let id = match treatment.id {
            Id::Plain | Id::Missing => format!("{name}-job-{}", self.taken_on),
            Id::Hostile => HOSTILE_ID.to_owned(),
        };
        if self.order.len() == LEDGER_ENTRIES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_id.remove(&oldest);
        }
        let job = Job {
            key: key.to_owned(),
            state: Stands::Queued,
            treatment: treatment.clone(),
            result: None,
            over: watch::Sender::new(Over::No),
        };
        self.by_id.insert(id.clone(), job);
        self.order.push_back(id.clone());
        (id, Fresh::Yes)
    }
}

#[derive(PartialEq, Eq)]
enum Fresh {
    Yes,
    No,
}

pub(super) async fn submit(State(app): State<App>, request: Request) -> Response {
    let Received { order, treatment, sequence, authorization } = match receive(&app, request).await {
        Ok(received) => received,
        Err(refused) => return *refused,
    };
    if treatment.executes == Executes::No {
        let refused = made(refusal("refused", "nothing was taken on"), &order, &treatment);
        return finish(&app, refused, &treatment, sequence, authorization).await;
    }
    app.shared.mark(sequence, Mark::Accepted);
    let key = order.header(KEY_HEADER).to_owned();
    let (id, fresh) = app.shared.queue.jobs().take_on(&app.shared.name, app.shared.keys, &key, &treatment.job);
    let mut document = app.shared.queue.document(&id).unwrap_or_default();
    if treatment.job.id == Id::Missing
        && let Some(members) = document.as_object_mut()
    {
        members.remove("id");
    }
    let status = if treatment.status == 200 { 202 } else { treatment.status };
    let accepted = Made { status, ..made(document, &order, &treatment) };
    if fresh == Fresh::Yes {
        app.tasks.spawn(run(app.clone(), id.clone(), order, treatment.clone(), sequence));
    }
    let over = app.shared.queue.change(&id, |job| job.over.subscribe());
    if let (Webhook::BeforeTheAnswer, Some(mut over)) = (treatment.job.webhook, over) {
        tokio::select! {
            () = app.stop.cancelled() => return dropped(),
            _ = over.wait_for(|over| *over == Over::Yes) => {}
        }
    }
    finish(&app, accepted, &treatment, sequence, authorization).await
}

/// Does a job that was taken on.
async fn run(app: App, id: String, order: Order, treatment: Treatment, sequence: u64) {
    let work = async {
        tokio::time::sleep(treatment.queue).await;
        let queue = &app.shared.queue;
        let began = queue.change(&id, |job| {
            let begins = job.state == Stands::Queued || job.treatment.cancels == Cancels::AreIgnored;
            if job.state == Stands::Queued {
                job.state = Stands::Running;
            }
            begins
        });
        if began == Some(true) {
            let result = match treatment.job.end {
                End::Completed => Some(execution(&app, &order, sequence, &treatment)),
                End::Failed => None,
            };
            tokio::time::sleep(treatment.job.run).await;
            queue.change(&id, |job| {
                if job.state == Stands::Running || job.treatment.cancels == Cancels::AreIgnored {
                    job.state = if result.is_some() { Stands::Completed } else { Stands::Failed };
                    job.result = result;
                }
            });
        }
        if let Some(Value::String(url)) = order.json().get("webhook_url") {
            call_back(&app, &id, url).await;
        }
        queue.change(&id, |job| job.over.send_replace(Over::Yes));
        if let Some(forget) = treatment.job.forget {
            tokio::time::sleep(forget).await;
            queue.jobs().by_id.remove(&id);
        }
    };
    tokio::select! {
        () = app.stop.cancelled() => {}
        () = work => {}
    }
}

/// Executes it, which the ledger counts, and returns what was made.
fn execution(app: &App, order: &Order, sequence: u64, treatment: &Treatment) -> Value {
    // Keys were looked at when it was taken on.
    let made = app.shared.execute(sequence, "", |number, id| made(executed(app, order, number, id), order, treatment));
    serde_json::from_slice(&made.body).unwrap_or(Value::Null)
}

pub(super) async fn read(State(app): State<App>, Path(id): Path<String>) -> Response {
    document_or_404(app.shared.queue.document(&id))
}

#[derive(Deserialize)]
pub(super) struct ListQuery {
    key: Option<String>,
}

pub(super) async fn list(State(app): State<App>, Query(query): Query<ListQuery>) -> Response {
    let jobs = app.shared.queue.jobs();
    let wanted = |job: &Job| query.key.as_ref().is_none_or(|key| job.key == *key);
    let found: Vec<Value> = jobs.by_id.iter().filter(|(_, job)| wanted(job)).map(|(id, job)| job.document(id)).collect();
    axum::Json(json!({ "jobs": found })).into_response()
}

pub(super) async fn cancel(State(app): State<App>, Path(id): Path<String>) -> Response {
    app.shared.queue.change(&id, |job| {
        if matches!(job.state, Stands::Queued | Stands::Running) {
            job.state = Stands::Canceled;
        }
    });
    document_or_404(app.shared.queue.document(&id))
}

fn document_or_404(document: Option<Value>) -> Response {
    match document {
        Some(document) => axum::Json(document).into_response(),
        None => (StatusCode::NOT_FOUND, axum::Json(refusal("not_found", "there is no such job"))).into_response(),
    }
}

/// Calls back until somebody takes it, a few times.
async fn call_back(app: &App, id: &str, url: &str) {
    for _ in 0..WEBHOOK_TRIES_MAX {
        let Some(document) = app.shared.queue.document(id) else { return };
        let taken = tokio::time::timeout(WEBHOOK_TIME_MAX, post(url, &app.shared.webhook_secret, &document.to_string())).await;
        match taken {
            Ok(Some(status)) if status < 500 => return,
            Ok(Some(_) | None) | Err(_) => tokio::time::sleep(WEBHOOK_PAUSE).await,
        }
    }
}

/// One call over plain HTTP; its status, if there is one.
async fn post(url: &str, secret: &str, body: &str) -> Option<u16> {
    let uri: http::Uri = url.parse().ok()?;
    let authority = uri.authority()?;
    let target = uri.path_and_query()?;
    #[expect(clippy::disallowed_methods, reason = "a webhook is signed with the time on everybody's wall clock")]
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let signature = sign(secret, now_s, body.as_bytes());
    let request = format!(
        "POST {target} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nwebhook-timestamp: {now_s}\r\nwebhook-signature: {signature}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect((authority.host(), authority.port_u16().unwrap_or(80))).await.ok()?;
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    stream.take(64 << 10).read_to_end(&mut answer).await.ok()?;
    String::from_utf8_lossy(&answer).split(' ').nth(1)?.parse().ok()
}

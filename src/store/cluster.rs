//! The way of a command through a cluster: to the master of its first key, over lanes to each master.
//!
//! Nothing is sent again behind anybody's back but what a node refused because the key is not its own: `MOVED` and `ASK` are answers
//! of a node that did nothing. All else comes back as it is and is judged as on a single server. The map of slots is read when the
//! store connects, and again when a node says that it is another one (`MOVED`), that something is amiss, or nothing: in the
//! background, by one task at a time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, join_all};
use redis::{Cmd, ServerError, Value};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::{Refusal, StoreError};
use crate::metrics;
use crate::place::NodeUrl;
use crate::store::commit::{Commit, CommitOptions, Leads};
use crate::store::dial::{Dial, Whom};
use crate::store::lanes::{Lanes, Source};
use crate::store::nodes::{Came, in_one};
use crate::store::slots::{Redirect, SlotMap, key_of, slot};
use crate::store::{By, retry};

/// How often one command is sent on to another node, before its refusal is the answer.
const REDIRECTS_MAX: usize = 4;
/// The first pause before the map is read again; doubles up to [`REFRESH_PAUSE_MAX`] while it is asked for again and again.
const REFRESH_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause before the map is read again.
const REFRESH_PAUSE_MAX: Duration = Duration::from_secs(1);

/// What the lanes to a node are opened with.
#[derive(Clone)]
pub(crate) struct Opening {
    pub(crate) dial: Dial,
    pub(crate) lanes: usize,
    pub(crate) deadline: Duration,
    /// How each node's commit lane works, where one is needed.
    pub(super) commit: Option<CommitOptions>,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
}

pub(crate) struct Cluster {
    url: NodeUrl,
    seeds: Vec<String>,
    opening: Opening,
    map: Mutex<Arc<SlotMap>>,
    nodes: Mutex<HashMap<Arc<str>, Node>>,
    /// Held while lanes to a node are opened, so that they are opened once.
    door: tokio::sync::Mutex<()>,
    refresh: Mutex<Refresh>,
    next: AtomicUsize,
}

#[derive(Clone)]
struct Node {
    lanes: Arc<Lanes>,
    commit: Option<Commit>,
    stop: CancellationToken,
}

/// The reading of the map.
struct Refresh {
    under_way: bool,
    ended: Instant,
    pause: Duration,
}

/// What must be true before a script is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    /// What goes before it was done.
    Done,
    /// It was tried.
    Tried,
}

type Answer = Result<(Value, Came), StoreError>;

/// Commands for one node, by their places.
struct Part {
    node: Arc<str>,
    places: Vec<usize>,
    /// Those of them that the node must be asked for (`ASKING`).
    asking: bool,
}

impl Cluster {
    /// Reads the map from the first seed that answers, and opens lanes to every master.
    ///
    /// # Errors
    /// `NotExecuted` if no seed says which master has which slot.
    pub(crate) async fn connect(url: NodeUrl, seeds: Vec<String>, opening: Opening) -> Result<Arc<Self>, StoreError> {
        let map = Mutex::new(Arc::new(read_map(&url, &opening.dial, &seeds).await?));
        let refresh = Mutex::new(Refresh { under_way: false, ended: Instant::now(), pause: Duration::ZERO });
        let (nodes, door, next) = (Mutex::default(), tokio::sync::Mutex::default(), AtomicUsize::new(0));
        let cluster = Arc::new(Cluster { url, seeds, opening, map, nodes, door, refresh, next });
        cluster.settle().await;
        Ok(cluster)
    }

    /// The masters that have slots, in the order of their addresses.
    pub(crate) fn masters(&self) -> Vec<Arc<str>> {
        self.map().masters().to_vec()
    }

    /// A key's master, as far as the map knows.
    pub(crate) fn master_of(&self, key: &[u8]) -> Option<Arc<str>> {
        self.map().of(slot(key)).cloned()
    }

    /// The URL of some master, another one each time.
    pub(crate) fn some_url(&self) -> String {
        let masters = self.masters();
        self.url.of(&masters[self.next.fetch_add(1, Ordering::Relaxed) % masters.len()])
    }

    /// Sends one command to one node, whatever its keys.
    pub(crate) async fn on(self: &Arc<Self>, node: &Arc<str>, command: &Cmd) -> Result<Value, StoreError> {
        let part = Part { node: Arc::clone(node), places: vec![0], asking: false };
        let (mut values, _) = self.send_part(&part, &[command], By::Lanes).await.inspect_err(|_| self.read_again())?;
        match values.swap_remove(0) {
            Value::ServerError(error) => Err(at(node, retry::of_server(&error))),
            value => Ok(value),
        }
    }

    /// Sends commands, each to its node: at once to different nodes, in order to the same one. One that any node can answer goes
    /// with its neighbour. An error of Redis is a value.
    ///
    /// # Errors
    /// The first of any of them; the others may have been executed.
    pub(crate) async fn send(self: &Arc<Self>, commands: &[Cmd], by: By) -> Result<Vec<Value>, StoreError> {
        self.send_each(commands, by).await.into_iter().collect()
    }

    /// The same, and an error for each command that brought no answer.
    pub(crate) async fn send_each(self: &Arc<Self>, commands: &[Cmd], by: By) -> Vec<Result<Value, StoreError>> {
        let commands: Vec<&Cmd> = commands.iter().collect();
        self.gather(&commands, by).await.into_iter().map(|answer| answer.map(|(value, _)| value)).collect()
    }

    /// Sends commands of which one is the `main` one: what stands before it is done before it, what stands behind it afterwards; what
    /// is for the same node goes in one pipeline with it, and by the same way; what is for others goes by the lanes. Returns the
    /// way by which its reply came.
    ///
    /// # Errors
    /// Those of the main command. What else could not be done is no reply (`Nil`); but where everything before it must be `Done`, the
    /// main command is not sent.
    pub(crate) async fn send_around(
        self: &Arc<Self>,
        commands: &[Cmd],
        main: usize,
        before: Before,
        by: By,
    ) -> Result<(Vec<Value>, Came), StoreError> {
        let nodes = self.nodes_of(&commands.iter().collect::<Vec<_>>());
        let beside = |place: &usize| nodes[*place] == nodes[main];
        let (with_before, first): (Vec<usize>, Vec<usize>) = (0..main).partition(beside);
        let (with_after, last): (Vec<usize>, Vec<usize>) = (main + 1..commands.len()).partition(beside);
        let mut values = vec![Value::Nil; commands.len()];
        let failed = keep(&mut values, &first, self.gather(&pick(commands, &first), By::Lanes).await);
        if before == Before::Done {
            let refused = first.iter().find_map(|place| match &values[*place] {
                Value::ServerError(error) => Some(retry::of_server(error)),
                _ => None,
            });
            if let Some(error) = refused.or_else(|| failed.map(not_begun)) {
                return Err(error);
            }
        }
        let mut with = with_before;
        let place = with.len();
        with.push(main);
        with.extend(with_after);
        let mut answers = self.gather(&pick(commands, &with), by).await;
        let (value, came) = answers.remove(place)?;
        with.remove(place);
        let failed = keep(&mut values, &with, answers);
        if before == Before::Done && with[..place].iter().any(|place| values[*place] == Value::Nil) {
            let detail = failed.map_or_else(String::new, |error| error.to_string());
            return Err(StoreError::Ambiguous { detail: format!("its hint was not confirmed: {detail}") });
        }
        // A script that its node has forgotten was not run: what stands behind it is sent behind its whole text.
        if !matches!(&value, Value::ServerError(error) if retry::is_noscript(error)) {
            keep(&mut values, &last, self.gather(&pick(commands, &last), By::Lanes).await);
        }
        values[main] = value;
        Ok((values, came))
    }

    /// Sends commands to their nodes and follows redirects. An answer for each. What must be durable has no more time for all its ways
    /// together than for one: nobody looks for it earlier than it can have arrived.
    async fn gather(self: &Arc<Self>, commands: &[&Cmd], by: By) -> Vec<Answer> {
        let (By::Commit, Some(commit)) = (by, &self.opening.commit) else { return self.follow(commands, by).await };
        let late = || StoreError::Ambiguous { detail: format!("not committed within {:?}", commit.deadline()) };
        let followed = tokio::time::timeout(commit.deadline(), self.follow(commands, by)).await;
        followed.unwrap_or_else(|_| commands.iter().map(|_| Err(late())).collect())
    }

    /// Boxed: what it awaits is a long type, and whoever spawns a call has it in its own.
    fn follow<'a>(self: &'a Arc<Self>, commands: &'a [&'a Cmd], by: By) -> BoxFuture<'a, Vec<Answer>> {
        Box::pin(self.follow_redirects(commands, by))
    }

    async fn follow_redirects(self: &Arc<Self>, commands: &[&Cmd], by: By) -> Vec<Answer> {
        let mut answers: Vec<Option<Answer>> = commands.iter().map(|_| None).collect();
        let mut parts: Vec<Part> = Vec::new();
        for (place, node) in self.nodes_of(commands).into_iter().enumerate() {
            match node {
                Some(node) => add(&mut parts, &node, place, false),
                None => {
                    self.read_again();
                    let detail = "no master is known for a slot".to_owned();
                    answers[place] = Some(Err(StoreError::NotExecuted { code: Refusal::Cluster, detail }));
                }
            }
        }
        for turn in 0..=REDIRECTS_MAX {
            let sent = join_all(parts.iter().map(|part| self.send_part(part, commands, by))).await;
            let mut further = Vec::new();
            for (part, sent) in parts.iter().zip(sent) {
                match sent {
                    Ok((values, came)) => self.sort(commands, part, values, &came, turn, &mut answers, &mut further),
                    Err(error) => {
                        self.read_again();
                        for place in &part.places {
                            answers[*place] = Some(Err(error.clone()));
                        }
                    }
                }
            }
            parts = further;
            if parts.is_empty() {
                break;
            }
        }
        let lost = || StoreError::Ambiguous { detail: "a command got no answer".to_owned() };
        answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(lost()))).collect()
    }

    /// Takes the replies of one node: which are answers, and which send us on.
    #[expect(clippy::too_many_arguments, reason = "one step of one loop")]
    fn sort(
        self: &Arc<Self>,
        commands: &[&Cmd],
        part: &Part,
        values: Vec<Value>,
        came: &Came,
        turn: usize,
        answers: &mut [Option<Answer>],
        further: &mut Vec<Part>,
    ) {
        let mut sent_on: Option<(Arc<str>, bool)> = None;
        for (place, value) in part.places.iter().zip(values) {
            let redirect = match Redirect::read(&part.node, &value) {
                Some(_) if turn == REDIRECTS_MAX => {
                    metrics::redirect("exhausted");
                    None
                }
                redirect => redirect,
            };
            match redirect {
                Some(Redirect::Moved { slot, to }) => {
                    metrics::redirect("moved");
                    self.moved(slot, &to);
                    let to: Arc<str> = Arc::from(to);
                    add(further, &to, *place, false);
                    sent_on = Some((to, false));
                }
                Some(Redirect::Ask { to }) => {
                    metrics::redirect("ask");
                    let to: Arc<str> = Arc::from(to);
                    add(further, &to, *place, true);
                    sent_on = Some((to, true));
                }
                None => {
                    let value = match value {
                        Value::ServerError(error) => {
                            if error.code() == "TRYAGAIN" {
                                metrics::redirect("tryagain");
                            }
                            if says_amiss(&error) {
                                self.read_again();
                            }
                            retry::told_by(&part.node, &error)
                        }
                        value => value,
                    };
                    answers[*place] = Some(Ok((value, came.clone())));
                    // What goes with its neighbour, and came too early now.
                    if let Some((to, asking)) = &sent_on
                        && key_of(commands[*place]).is_none()
                    {
                        add(further, to, *place, *asking);
                    }
                }
            }
        }
    }

    async fn send_part(self: &Arc<Self>, part: &Part, commands: &[&Cmd], by: By) -> Result<(Vec<Value>, Came), StoreError> {
        let node = self.node(&part.node).await?;
        let each = if part.asking { 2 } else { 1 };
        let mut sent = Vec::with_capacity(part.places.len() * each);
        for place in &part.places {
            if part.asking {
                sent.push(redis::cmd("ASKING"));
            }
            sent.push(commands[*place].clone());
        }
        let (values, came) = node.send(sent, by).await.map_err(|error| at(&part.node, error))?;
        Ok((values.into_iter().skip(each - 1).step_by(each).collect(), came))
    }

    /// The node of each command; of one that any node can answer, its neighbour's: the next one's, or the one's before.
    fn nodes_of(&self, commands: &[&Cmd]) -> Vec<Option<Arc<str>>> {
        let map = self.map();
        let keys: Vec<Option<&[u8]>> = commands.iter().map(|command| key_of(command)).collect();
        let neighbour = |place: usize| {
            let next = keys[place..].iter().find_map(|key| *key);
            next.or_else(|| keys[..place].iter().rev().find_map(|key| *key))
        };
        let node = |place: usize| match neighbour(place) {
            Some(key) => map.of(slot(key)).cloned(),
            None => map.masters().first().cloned(),
        };
        (0..commands.len()).map(node).collect()
    }

    /// The ways to a node, opened if there are none. They need not stand.
    async fn node(&self, address: &Arc<str>) -> Result<Node, StoreError> {
        if let Some(known) = self.known(address) {
            return Ok(known);
        }
        let _door = self.door.lock().await;
        if let Some(known) = self.known(address) {
            return Ok(known);
        }
        let Opening { dial, lanes, deadline, commit, tasks, stop } = &self.opening;
        let (stop, url) = (stop.child_token(), self.url.of(address));
        let commit = match commit {
            None => None,
            Some(options) => {
                let leads = Leads::To { client: Box::new(dial.client(&url)?), node: Some(Arc::clone(address)) };
                let (commit, lane) = Commit::new(leads, options.clone());
                tasks.spawn(lane.run(stop.clone()));
                Some(commit)
            }
        };
        let source = Source::Node(dial.pool(&url)?, Arc::clone(address));
        let lanes = Lanes::open_or_build(source, *lanes, *deadline, tasks.clone(), stop.clone()).await;
        let node = Node { lanes, commit, stop };
        self.nodes_known().insert(Arc::clone(address), node.clone());
        Ok(node)
    }

    fn known(&self, address: &Arc<str>) -> Option<Node> {
        self.nodes_known().get(address).cloned()
    }

    /// A slot is another node's: that is known at once, and what else has moved is asked for.
    fn moved(self: &Arc<Self>, slot: u16, to: &str) {
        {
            let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
            if map.of(slot).is_none_or(|known| **known != *to) {
                *map = Arc::new(map.with(slot, to));
            }
        }
        self.read_again();
    }

    /// Reads the map again in the background, unless that is under way.
    pub(crate) fn read_again(self: &Arc<Self>) {
        let mut pause = {
            let mut refresh = self.refresh.lock().unwrap_or_else(PoisonError::into_inner);
            if refresh.under_way {
                return;
            }
            refresh.under_way = true;
            refresh.pause = if refresh.ended.elapsed() >= REFRESH_PAUSE_MAX {
                Duration::ZERO
            } else {
                (refresh.pause * 2).clamp(REFRESH_PAUSE, REFRESH_PAUSE_MAX)
            };
            refresh.pause
        };
        let cluster = Arc::clone(self);
        let stop = self.opening.stop.clone();
        self.opening.tasks.spawn(async move {
            let read = async {
                loop {
                    tokio::time::sleep(pause).await;
                    match read_map(&cluster.url, &cluster.opening.dial, &cluster.candidates()).await {
                        Ok(map) => break map,
                        Err(error) => {
                            metrics::map_read("failed");
                            tracing::debug!(%error, "no node of the cluster says who has which slot");
                        }
                    }
                    pause = (pause * 2).clamp(REFRESH_PAUSE, REFRESH_PAUSE_MAX);
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                map = read => cluster.replace(map),
            }
            // The lanes are opened while the next reading may be asked for.
            {
                let mut refresh = cluster.refresh.lock().unwrap_or_else(PoisonError::into_inner);
                (refresh.under_way, refresh.ended) = (false, Instant::now());
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = cluster.settle() => {}
            }
        });
    }

    fn replace(&self, map: SlotMap) {
        let mut known = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        metrics::map_read(if **known == map { "same" } else { "changed" });
        if known.masters() != map.masters() {
            tracing::info!(masters = ?map.masters(), "the cluster has other masters");
        }
        *known = Arc::new(map);
    }

    /// Opens lanes to masters that have none, and gives up those to nodes that are none any more.
    async fn settle(&self) {
        let masters = self.masters();
        join_all(masters.iter().map(|node| self.node(node))).await;
        self.nodes_known().retain(|node, known| {
            let stays = masters.contains(node);
            if !stays {
                known.stop.cancel();
            }
            stays
        });
    }

    /// Whom to ask for the map: another node first each time, the seeds last.
    fn candidates(&self) -> Vec<String> {
        let map = self.map();
        let mut nodes: Vec<String> = map.nodes().map(|node| node.to_string()).collect();
        if !nodes.is_empty() {
            let first = self.next.fetch_add(1, Ordering::Relaxed) % nodes.len();
            nodes.rotate_left(first);
        }
        nodes.extend(self.seeds.iter().cloned());
        nodes
    }

    fn map(&self) -> Arc<SlotMap> {
        Arc::clone(&self.map.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn nodes_known(&self) -> MutexGuard<'_, HashMap<Arc<str>, Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    async fn send(&self, commands: Vec<Cmd>, by: By) -> Result<(Vec<Value>, Came), StoreError> {
        in_one(&self.lanes, self.commit.as_ref(), commands, by).await
    }
}

fn pick<'a>(commands: &'a [Cmd], places: &[usize]) -> Vec<&'a Cmd> {
    places.iter().map(|place| &commands[*place]).collect()
}

/// Puts answers in their places; the first of the errors.
fn keep(values: &mut [Value], places: &[usize], answers: Vec<Answer>) -> Option<StoreError> {
    let mut failed = None;
    for (place, answer) in places.iter().zip(answers) {
        match answer {
            Ok((value, _)) => values[*place] = value,
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed
}

fn add(parts: &mut Vec<Part>, node: &Arc<str>, place: usize, asking: bool) {
    match parts.iter_mut().find(|part| part.node == *node && part.asking == asking) {
        Some(part) => part.places.push(place),
        None => parts.push(Part { node: Arc::clone(node), places: vec![place], asking }),
    }
}

/// Asks one node after the other which master has which slot.
async fn read_map(url: &NodeUrl, dial: &Dial, nodes: &[String]) -> Result<SlotMap, StoreError> {
    let mut failed = None;
    for node in nodes {
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        match dial.ask(&url.of(node), Whom::Node, command).await.map(|ranges| SlotMap::read(node, ranges)) {
            Ok(Ok(map)) => return Ok(map),
            Ok(Err(what)) => {
                failed = Some(StoreError::NotExecuted { code: Refusal::Cluster, detail: format!("{node}: {what}") });
            }
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| StoreError::fatal("BADURL", "redis.url names no node")))
}

/// Whether a node says that the cluster, or its part in it, is not what it was.
fn says_amiss(error: &ServerError) -> bool {
    matches!(error.code(), "MOVED" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "LOADING")
}

/// The same error, with the node that it came from.
pub(super) fn at(node: &str, error: StoreError) -> StoreError {
    match error {
        StoreError::NotExecuted { code, detail } => StoreError::NotExecuted { code, detail: format!("{node}: {detail}") },
        StoreError::Ambiguous { detail } => StoreError::Ambiguous { detail: format!("{node}: {detail}") },
        StoreError::Fatal { code, detail } => StoreError::Fatal { code, detail: format!("{node}: {detail}") },
        error @ StoreError::NotDurable { .. } => error,
    }
}

/// What had to be done first was not, or is not known to be: the script was not sent.
fn not_begun(error: StoreError) -> StoreError {
    match error {
        StoreError::Ambiguous { detail } => {
            StoreError::NotExecuted { code: Refusal::Connect, detail: format!("its hint was not confirmed: {detail}") }
        }
        error @ (StoreError::NotExecuted { .. } | StoreError::NotDurable { .. } | StoreError::Fatal { .. }) => error,
    }
}

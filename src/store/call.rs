//! How a call is made, and made again: one pipeline with what goes before and after the script.
//!
//! All of it is harmless to repeat. `retry.rs` says when it is worth it; `lanes.rs` carries it.

use std::time::Instant;

use redis::Value;

use crate::error::{Refusal, StoreError};
use crate::metrics;
use crate::store::cluster::Before;
use crate::store::commit::Durable;
use crate::store::nodes::{Came, Master};
use crate::store::reply::Reply;
use crate::store::slots::slot;
use crate::store::{Script, Store, retry};

/// Room for the arguments of the largest call, and for the bytes of most.
const ARGUMENTS: usize = 32;
const ARGUMENTS_BYTES: usize = 1 << 10;

/// A call of a script by its hash, built once, so that the same call can be made again.
pub(super) struct Call {
    script: Script,
    command: redis::Cmd,
    echo: Vec<u8>,
}

impl Call {
    pub(super) fn new(script: Script, keys: &[&str], arguments: impl FnOnce(&mut redis::Cmd), echo: Vec<u8>) -> Self {
        debug_assert!(
            keys.windows(2).all(|pair| slot(pair[0].as_bytes()) == slot(pair[1].as_bytes())),
            "{keys:?}: several slots"
        );
        let mut command = redis::Cmd::with_capacity(ARGUMENTS, ARGUMENTS_BYTES);
        command.arg("EVALSHA").arg(script.sha1()).arg(keys.len()).arg(keys);
        arguments(&mut command);
        Call { script, command, echo }
    }

    /// The same call with the script's whole text.
    fn whole(&self) -> redis::Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(self.script.code());
        // After the command's name and the hash.
        for argument in self.command.args_iter().skip(2) {
            if let redis::Arg::Simple(bytes) = argument {
                command.arg(bytes);
            }
        }
        command
    }
}

/// What goes before and after a script in the same pipeline: all of it harmless to repeat.
#[derive(Default)]
pub(super) struct Around {
    pub(super) before: Vec<redis::Cmd>,
    pub(super) after: Vec<Afterwards>,
}

/// A command after a script. If it is a script itself and Redis has forgotten it, the whole text is sent instead.
pub(super) struct Afterwards {
    pub(super) command: redis::Cmd,
    pub(super) whole: Option<redis::Cmd>,
}

impl Store {
    /// Makes a call as [`Store::run_told`] does; where its reply may not be told yet, that is the error.
    pub(super) async fn run(&self, call: &Call, around: &Around) -> Result<Reply, StoreError> {
        let (reply, durable) = self.run_told(call, around).await?;
        durable.settle(reply)
    }

    /// Makes a call, and the same call again where the error allows it, within a bounded number of tries and a bounded time. Says
    /// whether what it brought is as durable as this handle requires.
    ///
    /// Once a try may have been executed, the call may have been, whatever a later try says.
    pub(super) async fn run_told(&self, call: &Call, around: &Around) -> Result<(Reply, Durable), StoreError> {
        let began = Instant::now();
        let budget = self.inner.options.response_timeout * retry::PATIENCE;
        let mut pause = retry::PAUSE;
        let mut ambiguous = None;
        let mut tries = 1;
        let outcome = loop {
            let error = match self.run_once(call, around).await {
                Ok((reply, durable)) => {
                    if let Durable::Short { have, want } = durable {
                        metrics::store_error(StoreError::NotDurable { have, want }.class());
                    }
                    break Ok((reply, durable));
                }
                Err(error) => error,
            };
            metrics::store_error(error.class());
            if matches!(error, StoreError::Ambiguous { .. }) {
                ambiguous = Some(error.clone());
            }
            if !retry::is_worth_it(&error) || tries == retry::TRIES_MAX || began.elapsed() + pause >= budget {
                break Err(if error.is_retryable() { ambiguous.unwrap_or(error) } else { error });
            }
            tries += 1;
            tokio::time::sleep(pause).await;
            pause *= 2;
        };
        metrics::script(call.script.name(), began.elapsed());
        outcome
    }

    async fn run_once(&self, call: &Call, around: &Around) -> Result<(Reply, Durable), StoreError> {
        let mut commands = around.before.clone();
        commands.push(call.command.clone());
        commands.extend(around.after.iter().map(|after| after.command.clone()));
        let place = around.before.len();
        let before = if call.script.needs_its_hint() { Before::Done } else { Before::Tried };
        let (mut values, mut came) = self.inner.nodes.send_around(commands, place, before, self.by).await?;
        // Where a job would have no other hint, a refused hint is a refused call: nobody would find the job again.
        if call.script.needs_its_hint()
            && let Some(Value::ServerError(error)) = values[..place].iter().find(|value| matches!(value, Value::ServerError(_)))
        {
            let refused = retry::of_server(error);
            // Memory that came free in between: the hint is missing, the call is not.
            return Err(match &values[place] {
                Value::ServerError(_) => refused,
                _ => StoreError::Ambiguous { detail: format!("its hint was refused: {refused}") },
            });
        }
        if call.script == Script::ReadJob && values[..place].iter().any(is_replica) {
            came.on_replica();
            return Err(a_replica());
        }
        let forgotten: Vec<bool> = values[place..].iter().map(is_forgotten).collect();
        let mut value = values.swap_remove(place);
        if forgotten.contains(&true) {
            let (values, again) = self.send_whole(call, around, &forgotten).await?;
            if forgotten[0] {
                came = again;
                value = values.into_iter().next().unwrap_or(Value::Nil);
            }
        }
        match value {
            Value::ServerError(error) => Err(retry::of_server(&error)),
            // Somebody else's reply says nothing about this call but that it was sent.
            value => match Reply::read(call.script, &call.echo, value) {
                Ok(reply) => Ok((reply, came.durable())),
                Err(error) => {
                    came.distrust();
                    Err(StoreError::Ambiguous { detail: error.to_string() })
                }
            },
        }
    }

    /// Redis has forgotten a script: sends its whole text, which it then remembers. If it is the main one, what comes after it is
    /// sent once more too.
    async fn send_whole(&self, call: &Call, around: &Around, forgotten: &[bool]) -> Result<(Vec<Value>, Came), StoreError> {
        let main = forgotten[0];
        let mut commands = Vec::with_capacity(forgotten.len());
        if main {
            commands.push(call.whole());
        }
        for (after, forgotten) in around.after.iter().zip(&forgotten[1..]) {
            match &after.whole {
                Some(whole) if *forgotten => commands.push(whole.clone()),
                _ if main => commands.push(after.command.clone()),
                _ => {}
            }
        }
        self.inner.nodes.send_around(commands, 0, Before::Tried, self.by).await
    }

    /// Sends one command on a lane.
    pub(super) async fn command(&self, command: redis::Cmd) -> Result<Value, StoreError> {
        let mut values = self.commands(vec![command]).await?;
        match values.swap_remove(0) {
            Value::ServerError(error) => Err(retry::of_server(&error)),
            value => Ok(value),
        }
    }

    /// Sends one command on a lane, and believes its answer only where a master gave it: a replica may be behind.
    pub(super) async fn command_of_master(&self, command: redis::Cmd) -> Result<Value, StoreError> {
        if !self.inner.nodes.may_answer_as_replica() {
            return self.command(command).await;
        }
        let sent = self.inner.nodes.send_around(vec![redis::cmd("ROLE"), command], 1, Before::Tried, self.by).await;
        let (mut values, came) = sent.inspect_err(|error| metrics::store_error(error.class()))?;
        if values.first().is_some_and(is_replica) {
            came.on_replica();
            return Err(a_replica());
        }
        match values.swap_remove(1) {
            Value::ServerError(error) => Err(retry::of_server(&error)),
            value => Ok(value),
        }
    }

    /// Sends commands on a lane, in one pipeline for each node; an error of Redis is a value. Those of one key are done in order.
    pub(super) async fn commands(&self, commands: Vec<redis::Cmd>) -> Result<Vec<Value>, StoreError> {
        self.inner.nodes.send(commands, self.by).await.inspect_err(|error| metrics::store_error(error.class()))
    }

    /// Sends one command to one master.
    pub(super) async fn on(&self, master: &Master, command: redis::Cmd) -> Result<Value, StoreError> {
        self.inner.nodes.on(master, command).await.inspect_err(|error| metrics::store_error(error.class()))
    }
}

fn a_replica() -> StoreError {
    StoreError::NotExecuted { code: Refusal::ReadOnly, detail: "a replica answers here".to_owned() }
}

/// Whether `ROLE` was answered by a replica. Where it may not be asked, its word is believed as before.
pub(super) fn is_replica(role: &Value) -> bool {
    let Value::Array(role) = role else { return false };
    !matches!(role.first(), Some(Value::BulkString(word)) if word == b"master")
}

fn is_forgotten(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if retry::is_noscript(error))
}

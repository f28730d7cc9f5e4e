//! `onejob dedup`: a filter for pipes. Of the records that it reads it writes those that are seen for the first time, as they came.
//!
//! `records` cuts an input into batches, `filter` asks about them and settles them in order, `sink` is where they go, `state` is
//! what a run leaves behind so that it can go on after a death. What is promised, with a state and without, is
//! `docs/DEDUP.md`, "In a pipe".
//!
//! Deliberately not here: a second way to ask. It uses the library's `Dedup` as anybody would.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use onejob::config::Config;
use onejob::dedup::{BATCH_IDS_MAX, Dedup, Stream};
use onejob::store::Store;
use onejob::store::private_redis::{PrivateRedis, PrivateRedisOptions};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::signals::Signals;
use super::{Context, Exit, Failure, OrExit as _, assemble, duration, say};
use filter::{Broken, Ended, Filter};
use records::{Cutter, Format, Input, OnError, Piece, RECORD_BYTES_MAX, Reader, Stopped, fingerprint};
use sink::{Left, Sink};
use state::{Counts, Parameters, State, StateFile};

mod filter;
mod records;
mod sink;
mod state;

/// Most batches that are asked about at once.
const IN_FLIGHT_MAX: u64 = 64;
/// Batches that are read and wait to be asked about.
const READ_AHEAD: usize = 2;
/// How long a claim stands, unless its caller says otherwise or the window is shorter.
const LEASE: Duration = Duration::from_secs(30);
/// How long what became of a commit is kept: as long as the window, within these.
const KEEP: (Duration, Duration) = (Duration::from_secs(600), Duration::from_secs(86_400));
/// The shortest time that Redis may be away.
const PATIENCE_MIN: Duration = Duration::from_millis(1);
/// The pause before Redis is tried again at the start.
const CONNECT_PAUSE: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// What makes two records the same, in this order: columns of CSV; members of a JSON object, or JSON pointers. Not needed
    /// where the configuration declares the stream.
    #[arg(long, value_name = "FIELD,…", value_delimiter = ',', value_parser = field)]
    key: Vec<String>,
    /// How the records are written.
    #[arg(long, default_value = "ndjson", value_name = "FORMAT")]
    format: Format,
    /// The whole line is the key: short for --format lines.
    #[arg(long, conflicts_with_all = ["key", "format"])]
    lines: bool,
    /// How long a record is remembered at least [default: as the configuration declares the stream, or 24h]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    window: Option<Duration>,
    /// The stream: all who name the same one share what was seen, if they have the same --key and --shards. What the configuration
    /// declares of it, [stream.NAME], holds here too.
    #[arg(long, default_value = "clicks", value_name = "NAME")]
    stream: String,
    /// What is read instead of stdin.
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// What is written instead of stdout: a new file, or the one that --state knows.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Where it is kept how far this is. The same command goes on there, whatever became of it before; with --output.
    #[arg(long, value_name = "FILE", requires = "output")]
    state: Option<PathBuf>,
    /// What becomes of a record without a key, or that is none: the run ends there, or it is skipped and counted.
    #[arg(long, default_value = "stop", value_name = "WHAT")]
    on_error: OnError,
    /// Where skipped records are written.
    #[arg(long, value_name = "FILE")]
    rejects: Option<PathBuf>,
    /// The input is still written to: a last record without its line end is left for the next run.
    #[arg(long)]
    growing: bool,
    /// What separates the columns of CSV, one ASCII character; \t is a tab.
    #[arg(long, default_value = ",", value_name = "CHAR", value_parser = delimiter)]
    delimiter: u8,
    /// Records that are asked about together.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=BATCH_IDS_MAX as u64))]
    batch: u64,
    /// Batches that are asked about at once.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=IN_FLIGHT_MAX))]
    in_flight: u64,
    /// Different records of a window, roughly [default: as declared, or 1000000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    expected: Option<u64>,
    /// Over how many slots of a cluster the stream is spread [default: as declared, or 1]
    #[arg(long)]
    shards: Option<u16>,
    /// This process has a copy of what the stream remembers: less work for Redis, memory here. All who ask about the stream do so, or
    /// nobody; as declared, where it is declared.
    #[arg(long)]
    mirrored: bool,
    /// How long what is claimed and not yet written is kept from others, with --state [default: 30s, or the window]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    lease: Option<Duration>,
    /// The longest record.
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES",
        value_parser = clap::value_parser!(u64).range(1..=RECORD_BYTES_MAX as u64))]
    record_bytes_max: u64,
    /// How long Redis may be away.
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = patience)]
    patience: Duration,
    /// How it is told at the end what came of it, on stderr.
    #[arg(long, default_value = "text", value_name = "HOW")]
    summary: Summary,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Summary {
    Text,
    Json,
    None,
}

/// A name without the spaces around it.
fn field(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("a field has a name".to_owned()),
        name => Ok(name.to_owned()),
    }
}

fn patience(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        patience if patience < PATIENCE_MIN => Err(format!("it is {PATIENCE_MIN:?} at least")),
        patience => Ok(patience),
    }
}

fn delimiter(text: &str) -> Result<u8, String> {
    match text.as_bytes() {
        b"\\t" => Ok(b'\t'),
        [one] if one.is_ascii() && !matches!(one, b'"' | b'\r' | b'\n') => Ok(*one),
        _ => Err(format!("{text:?} is not one ASCII character that is neither a quote nor a line end")),
    }
}

impl Arguments {
    fn format(&self) -> Format {
        if self.lines { Format::Lines } else { self.format }
    }

    /// Checks what belongs together, and says which stream this is.
    fn stream(&self, config: &Config) -> Result<Stream, Failure> {
        let usage = |what: &str| Err(Failure::new(Exit::Usage, what.to_owned()));
        let declared = config.stream.get(&self.stream);
        let key = match (self.format(), declared) {
            (Format::Lines, _) if !self.key.is_empty() => {
                return usage("with --format lines the whole line is the key: no --key");
            }
            (Format::Lines, _) => vec!["line".to_owned()],
            (Format::Csv | Format::Ndjson, Some(declared)) if self.key.is_empty() => declared.fields.clone(),
            (Format::Csv | Format::Ndjson, _) if self.key.is_empty() => {
                return usage("--key names what makes two records the same");
            }
            (Format::Csv | Format::Ndjson, _) => self.key.clone(),
        };
        if self.rejects.is_some() && self.on_error == OnError::Stop {
            return usage("--rejects is where skipped records go: with --on-error skip");
        }
        let paths = [&self.input, &self.output, &self.state, &self.rejects];
        let mut named: Vec<_> = paths.into_iter().flatten().map(|path| std::path::absolute(path).ok()).collect();
        named.sort();
        if named.windows(2).any(|pair| pair[0] == pair[1]) {
            return usage("--input, --output, --state and --rejects are different files");
        }
        let of = declared.map_or_else(|| Stream::new(&self.stream, &[]), |declared| declared.stream(&self.stream));
        let window = self.window.unwrap_or(of.window);
        let stream = Stream {
            fields: key,
            window,
            shards: self.shards.unwrap_or(of.shards),
            expected: self.expected.unwrap_or(of.expected),
            lease: self.lease.unwrap_or(LEASE.min(window)),
            keep: window.clamp(KEEP.0, KEEP.1),
            mirrored: self.mirrored || of.mirrored,
            ..of
        };
        stream.check().or_exit(Exit::Usage)?;
        if let Some(declared) = declared {
            self.agrees(&stream, &declared.stream(&self.stream))?;
        }
        Ok(stream)
    }

    /// A stream is one thing for all who ask: with another key, window or number of shards its clicks would not meet, or be
    /// forgotten early.
    fn agrees(&self, stream: &Stream, declared: &Stream) -> Result<(), Failure> {
        let name = &self.stream;
        let differs = |what: &str, here: String, there: String| {
            Err(Failure::new(Exit::Usage, format!("{what} is {here}, and [stream.{name}] of the configuration says {there}")))
        };
        if stream.fields != declared.fields {
            return differs("the key", format!("{:?}", stream.fields), format!("{:?}", declared.fields));
        }
        if stream.window != declared.window {
            return differs("--window", format!("{:?}", stream.window), format!("{:?}", declared.window));
        }
        if stream.shards != declared.shards {
            return differs("--shards", stream.shards.to_string(), declared.shards.to_string());
        }
        if stream.mirrored != declared.mirrored {
            return differs("--mirrored", stream.mirrored.to_string(), declared.mirrored.to_string());
        }
        Ok(())
    }

    fn parameters(&self, stream: &Stream, config: &Config) -> Parameters {
        Parameters {
            stream: stream.name.clone(),
            key: stream.fields.clone(),
            window_ms: u64::try_from(stream.window.as_millis()).unwrap_or(u64::MAX),
            shards: stream.shards,
            format: self.format().as_str().to_owned(),
            delimiter: char::from(self.delimiter).to_string(),
            on_error: format!("{:?}", self.on_error).to_lowercase(),
            rejects: self.rejects.is_some(),
            prefix: config.redis.prefix.clone(),
        }
    }
}

pub(super) async fn run(arguments: Arguments, context: &Context) -> Result<Exit, Failure> {
    if context.format == super::Format::Json {
        return Err(Failure::new(Exit::Usage, "stdout is for records: --summary json instead of --json"));
    }
    let config = context.load()?;
    let stream = arguments.stream(&config)?;
    let mut signals = Signals::listen()?;
    let stop = CancellationToken::new();
    let running = AbortOnDropHandle::new(tokio::spawn(Box::pin(prepared(arguments, stream, config, stop.clone()))));
    let mut running = std::pin::pin!(running);
    tokio::select! {
        ended = running.as_mut() => return ended.or_exit(Exit::Internal)?,
        _ = signals.next() => stop.cancel(),
    }
    tokio::select! {
        ended = running.as_mut() => ended.or_exit(Exit::Internal)?,
        signal = signals.next() => Err(Failure::new(Exit::Interrupted, format!("{signal} again: what was under way is left"))),
    }
}

/// What was found before Redis is asked anything.
struct Prepared {
    input: Input,
    header: Vec<u8>,
    /// Where in the input the header ends.
    header_end: u64,
    cutter: Cutter,
    head: Vec<u8>,
    output: Sink,
    rejects: Option<Sink>,
    file: Option<StateFile>,
    state: State,
}

impl Prepared {
    /// Nothing came of it: the files that it made go.
    fn withdraw(self) {
        self.output.withdraw();
        if let Some(rejects) = self.rejects {
            rejects.withdraw();
        }
    }
}

/// Opens everything, and sees that what is there belongs together. `None`: there is nothing left to do.
fn prepare(arguments: &Arguments, stream: &Stream, config: &Config) -> Result<Result<Prepared, State>, Failure> {
    let usage = |what: String| Failure::new(Exit::Usage, what);
    let name = arguments.input.as_deref().map_or_else(|| "stdin".to_owned(), |path| path.display().to_string());
    let unreadable = |error: std::io::Error| usage(format!("{name}: {error}"));
    let mut input = Input::open(arguments.input.as_deref()).map_err(unreadable)?;
    let parameters = arguments.parameters(stream, config);
    let (file, found) = match &arguments.state {
        Some(path) => StateFile::open(path, &parameters).map(|(file, found)| (Some(file), found))?,
        None => (None, None),
    };
    let is_ours = found.is_some();
    let left = match &found {
        None => Left::Nothing,
        Some(state) if state.complete => Left::Complete,
        Some(_) => Left::Interrupted,
    };
    let state = found.unwrap_or_else(|| State::begin(parameters));
    // Where nobody asks later, what comes slowly is not waited for.
    let head = if file.is_some() { input.head().map_err(unreadable)? } else { Vec::new() };
    let head_bytes = usize::try_from(state.head_bytes).unwrap_or(usize::MAX);
    if is_ours && head_bytes > 0 && head.get(..head_bytes).is_none_or(|head| fingerprint(head) != state.head) {
        return Err(usage(format!("{name}: it begins differently than what the run had read: it is another input")));
    }
    let record_bytes_max = usize::try_from(arguments.record_bytes_max).unwrap_or(RECORD_BYTES_MAX);
    let delimiter = arguments.delimiter;
    let mut cutter = Cutter::new(arguments.format(), stream.clone(), delimiter, record_bytes_max, arguments.growing);
    let header = cutter.header(&mut input).map_err(|stopped| refused(&name, stopped))?;
    let header_end = input.offset();
    let mut is_over = false;
    if state.input_bytes > 0 {
        let length = input.length().map_or_else(String::new, |bytes| format!("{bytes} bytes, "));
        if !input.go_to(state.input_bytes).map_err(unreadable)? {
            let read = state.input_bytes;
            return Err(usage(format!(
                "{name}: it has {length}fewer than the {read} that were read: it is another input, or was cut"
            )));
        }
        let has_grown = input.has_more().map_err(unreadable)?;
        if has_grown && !state.whole {
            let what = "the last record that was read of it had no line end, and now more follows";
            return Err(usage(format!("{name}: {what}; a file that is still written to is read with --growing")));
        }
        is_over = state.complete && !has_grown;
    }
    let sink = |path: &Path, bytes| Sink::open(path, bytes, left);
    let output = match &arguments.output {
        Some(path) => sink(path, state.output_bytes)?,
        None => Sink::stdout().or_exit(Exit::Unavailable)?,
    };
    let rejects = match arguments.rejects.as_deref().map(|path| sink(path, state.rejects_bytes)).transpose() {
        Ok(rejects) => rejects,
        Err(failure) => {
            output.withdraw();
            return Err(failure);
        }
    };
    if is_over {
        return Ok(Err(state));
    }
    Ok(Ok(Prepared { input, header, header_end, cutter, head, output, rejects, file, state }))
}

fn refused(name: &str, stopped: Stopped) -> Failure {
    Failure::new(
        Exit::Usage,
        match stopped {
            Stopped::Read(error) => format!("{name}: {error}"),
            Stopped::Record(bad) => format!("{name}: {bad}"),
        },
    )
}

async fn prepared(arguments: Arguments, stream: Stream, config: Config, stop: CancellationToken) -> Result<Exit, Failure> {
    let began = Instant::now();
    let prepared = match prepare(&arguments, &stream, &config)? {
        Ok(prepared) => prepared,
        Err(complete) => {
            say("onejob: it is complete, and nothing was added since");
            told(&arguments, &complete.counts, complete.counts.records, began, "complete");
            return Ok(exit_of(&complete.counts));
        }
    };
    let private_redis = match &config.redis.url {
        Some(_) => None,
        None => {
            let (data_dir, server) = (config.redis.data_dir.clone(), config.redis.server.clone());
            let options = PrivateRedisOptions { data_dir, server, syncs: assemble::syncs(&config) };
            match PrivateRedis::start(options).await.or_exit(Exit::Unavailable) {
                Ok(private_redis) => Some(private_redis),
                Err(failure) => {
                    prepared.withdraw();
                    return Err(failure);
                }
            }
        }
    };
    let url = match (&config.redis.url, &private_redis) {
        (_, Some(private_redis)) => private_redis.url(),
        (Some(url), None) => url.reveal(),
        (None, None) => return Err(Failure::new(Exit::Internal, "there is no redis, neither ours nor another")),
    };
    let outcome = match connect(&config, url, arguments.patience, &stop).await {
        Ok(store) => {
            let outcome = Box::pin(filter(&arguments, stream, prepared, &store, stop, began)).await;
            store.close().await;
            outcome
        }
        Err(failure) => {
            prepared.withdraw();
            Err(failure)
        }
    };
    if let Some(private_redis) = private_redis {
        private_redis.stop().await;
    }
    outcome
}

/// Connects, and tries that again as long as there is patience.
async fn connect(config: &Config, url: &str, patience: Duration, stop: &CancellationToken) -> Result<Store, Failure> {
    let began = Instant::now();
    let mut is_told = false;
    loop {
        match Store::connect(assemble::store_options(config, url)).await {
            Ok((store, _)) => return Ok(store),
            Err(error) if error.is_retryable() && began.elapsed() + CONNECT_PAUSE < patience => {}
            Err(error) => return Err(error).or_exit(Exit::Unavailable),
        }
        if !std::mem::replace(&mut is_told, true) {
            say(format_args!("onejob: redis at {} does not answer; trying for {patience:?}", address(url)));
        }
        tokio::select! {
            () = tokio::time::sleep(CONNECT_PAUSE) => {}
            () = stop.cancelled() => return Err(Failure::new(Exit::Interrupted, "a signal; nothing was done")),
        }
    }
}

/// Where a URL leads, without what may be a password.
fn address(url: &str) -> &str {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let (place, parameters) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    // Somewhere in there is a password, and it is not said where.
    if parameters.contains('@') || place.is_empty() {
        return "redis.url";
    }
    place.rsplit_once('@').map_or(place, |(_, address)| address)
}

async fn filter(
    arguments: &Arguments,
    stream: Stream,
    prepared: Prepared,
    store: &Store,
    stop: CancellationToken,
    began: Instant,
) -> Result<Exit, Failure> {
    let Prepared { input, header, header_end, cutter, head, output, rejects, file, state } = prepared;
    let dedup = Dedup::new(store, stream).or_exit(Exit::Usage)?.with_patience(arguments.patience);
    let (sender, pieces) = mpsc::channel(READ_AHEAD);
    let (length, before) = (input.length(), state.counts.records);
    let bar = bar(length, state.input_bytes);
    let showing = bar.clone();
    let show = move |state: &State| {
        showing.set_position(state.input_bytes);
        showing.set_message(format!("{} records, {} duplicates", state.counts.records, state.counts.duplicates));
    };
    let in_flight = usize::try_from(arguments.in_flight).unwrap_or(1);
    let reader = Reader {
        early: file.is_none(),
        batch: usize::try_from(arguments.batch).unwrap_or(BATCH_IDS_MAX),
        on_error: arguments.on_error,
        number: state.counts.records,
        cutter: cutter.between_rows(),
        input,
    };
    let has_state = file.is_some();
    let mut filter =
        Filter::new(dedup, store.clone(), pieces, output, rejects, file, state, head, in_flight, stop, Box::new(show));
    let ended = Box::pin(drive(&mut filter, reader, sender, (&header, header_end), &cutter)).await;
    bar.finish_and_clear();
    let counts = filter.state.counts;
    let settled = match (has_state, filter.asked_about) {
        (true, _) => format!("{} records are settled; the same command goes on from there", counts.records),
        (false, 0) => "no record was asked about".to_owned(),
        (false, asked) => {
            format!("of {asked} records that were asked about not all are in the output, and they will be duplicates next time")
        }
    };
    let tell = |how| told(arguments, &counts, before, began, how);
    match ended {
        // It has seen enough.
        Err(Broken::Closed) => {
            filter.wind_up().await;
            Ok(Exit::Done)
        }
        Err(Broken::Failed(failure)) => {
            tell("failed");
            let settled =
                if failure.exit == Exit::Usage && counts.records == 0 { "nothing was remembered".to_owned() } else { settled };
            Err(Failure { error: anyhow::Error::msg(format!("{failure}; {settled}")), ..failure })
        }
        Ok(Ended::Refused(stopped)) => {
            tell("refused");
            let name = arguments.input.as_deref().map_or_else(|| "stdin".to_owned(), |path| path.display().to_string());
            let failure = refused(&name, stopped);
            Err(Failure {
                error: anyhow::Error::msg(format!("{failure}; all {} records before are settled", counts.records)),
                ..failure
            })
        }
        Ok(Ended::Stopped) => {
            tell("stopped");
            let settled = if has_state { settled } else { format!("{} records are settled", counts.records) };
            Err(Failure::new(Exit::Interrupted, format!("a signal; {settled}")))
        }
        Ok(Ended::AtTheEnd) => {
            tell("complete");
            Ok(exit_of(&counts))
        }
    }
}

/// Takes up what was left, begins to read, and runs until it ends.
async fn drive(
    filter: &mut Filter,
    reader: Reader,
    sender: mpsc::Sender<Piece>,
    (header, header_end): (&[u8], u64),
    cutter: &Cutter,
) -> Result<Ended, Broken> {
    filter.state.session += 1;
    filter.commit_again(cutter).await?;
    filter.state.complete = false;
    // From here on whatever is claimed is claimed by this start.
    filter.write_state()?;
    if filter.state.input_bytes == 0 {
        filter.write_header(header, header_end)?;
    }
    // It ends when nobody takes what it reads; one that waits for its input is left behind when the process ends.
    let _reading = tokio::task::spawn_blocking(move || reader.run(|piece| sender.blocking_send(piece).is_ok()));
    filter.run().await
}

fn bar(length: Option<u64>, position: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match length {
        Some(bytes) => (ProgressBar::new(bytes), "{bar:30} {bytes}/{total_bytes}, {elapsed}, {msg}"),
        None => (ProgressBar::new_spinner(), "{spinner} {bytes}, {elapsed}, {msg}"),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    bar.set_position(position);
    bar.with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn exit_of(counts: &Counts) -> Exit {
    if counts.lost + counts.unsure > 0 { Exit::Failed } else { Exit::Done }
}

/// Says what came of it.
fn told(arguments: &Arguments, counts: &Counts, before: u64, began: Instant, how: &str) {
    let seconds = began.elapsed().as_secs_f64();
    let Counts { records, first, duplicates, rejected, lost, unsure } = *counts;
    let now = records - before;
    let rate = now as f64 / seconds.max(1e-3);
    match arguments.summary {
        Summary::None => {}
        Summary::Json => say(json!({
            "stream": arguments.stream, "ended": how, "records": records, "first": first, "duplicates": duplicates,
            "rejected": rejected, "lost": lost, "unsure": unsure, "records_before": before, "seconds": (seconds * 1e3).round() / 1e3,
            "records_per_second": rate.round(),
        })),
        Summary::Text => {
            let more = [
                (before, "of them settled by an earlier start"),
                (rejected, "skipped"),
                (lost, "LOST: in the output, and counted by somebody else too"),
                (unsure, "UNSURE: in the output, and perhaps counted by somebody else too"),
            ];
            let more: String = more.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}")).collect();
            say(format_args!(
                "onejob: {}: {records} records, {first} first, {duplicates} duplicates{more}; {seconds:.1} s, {rate:.0} records/s",
                arguments.stream
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_said_without_a_password_wherever_that_stands() {
        for (url, told) in [
            ("redis://127.0.0.1", "127.0.0.1"),
            ("redis://user:hush@one:1/0?protocol=3", "one:1/0"),
            ("redis://:hu@sh@one:1", "one:1"),
            ("redis://:hush?hush@one:1", "redis.url"),
            ("redis+unix:///run/r.sock?user=a&pass=hush", "/run/r.sock"),
            ("redis+unix:///run/r.sock?pass=hush@hush", "redis.url"),
            ("redis+sentinel://:hush@one,two/jobs?sentinel_pass=hush", "one,two/jobs"),
        ] {
            assert_eq!(address(url), told, "{url}");
        }
    }
}

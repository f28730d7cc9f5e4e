//! Records of an input, cut out byte for byte, and their ids: a batch at a time, and no more than that in memory.
//!
//! Where a record ends is told by its format: a line, or a row of CSV, whose quoted fields may have line ends. Empty lines are no
//! records, except in `lines`. What is wrong with a record is told with its number and where it begins.

use std::fmt;
use std::fs::File;
use std::io::{self, Cursor, Read, Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::path::Path;

use onejob::dedup::{ClickId, FieldValue, Stream};
use onejob::fingerprint::{hex, sha256, unique_json};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::error::Category;

/// What is read at once.
const CHUNK_BYTES: usize = 256 << 10;
/// So much of an input's beginning tells it from another one.
pub(super) const HEAD_BYTES: usize = 4 << 10;
/// The longest record, whatever is asked for.
pub(super) const RECORD_BYTES_MAX: usize = 64 << 20;
/// Bytes of a batch: with long records it has fewer.
pub(super) const BATCH_BYTES_MAX: usize = 4 << 20;
/// Columns of a CSV file.
pub(super) const COLUMNS_MAX: usize = 10_000;

/// How records are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// A JSON object a line.
    Ndjson,
    /// Rows with a header.
    Csv,
    /// The whole line is the key.
    Lines,
}

impl Format {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Format::Ndjson => "ndjson",
            Format::Csv => "csv",
            Format::Lines => "lines",
        }
    }
}

/// Something to read, with what is read of it and not used yet.
pub(super) struct Input {
    source: Source,
    bytes: Vec<u8>,
    /// Where in `bytes` the unused ones begin.
    at: usize,
    /// Where in the input those are.
    offset: u64,
    ended: bool,
}

enum Source {
    File(File),
    /// What cannot be read from another place than where it is.
    Pipe(File),
    Memory(Cursor<Vec<u8>>),
}

impl Input {
    /// A file, or stdin.
    pub(super) fn open(path: Option<&Path>) -> io::Result<Self> {
        Ok(Input::of(match path {
            Some(path) => {
                let file = File::open(path)?;
                if file.metadata()?.is_file() { Source::File(file) } else { Source::Pipe(file) }
            }
            None => Source::Pipe(File::from(io::stdin().as_fd().try_clone_to_owned()?)),
        }))
    }

    /// Some bytes.
    pub(super) fn of_bytes(bytes: Vec<u8>) -> Self {
        Input::of(Source::Memory(Cursor::new(bytes)))
    }

    fn of(source: Source) -> Self {
        Input { source, bytes: Vec::new(), at: 0, offset: 0, ended: false }
    }

    /// How long it is, if that is known before it is read.
    pub(super) fn length(&self) -> Option<u64> {
        match &self.source {
            Source::File(file) => file.metadata().ok().map(|about| about.len()),
            Source::Pipe(_) | Source::Memory(_) => None,
        }
    }

    /// Reads its beginning, as much as tells it from others.
    pub(super) fn head(&mut self) -> io::Result<Vec<u8>> {
        while self.rest().len() < HEAD_BYTES && self.more()? {}
        Ok(self.rest()[..self.rest().len().min(HEAD_BYTES)].to_vec())
    }

    /// Goes on at an offset behind what was used. `false`: it ends before that.
    pub(super) fn go_to(&mut self, offset: u64) -> io::Result<bool> {
        if let Source::File(file) = &mut self.source {
            if file.metadata()?.len() < offset {
                return Ok(false);
            }
            file.seek(SeekFrom::Start(offset))?;
            (self.at, self.offset, self.ended) = (0, offset, false);
            self.bytes.clear();
            return Ok(true);
        }
        loop {
            let missing = usize::try_from(offset.saturating_sub(self.offset)).unwrap_or(usize::MAX);
            self.take(missing.min(self.rest().len()));
            if self.offset >= offset {
                return Ok(true);
            }
            if !self.more()? {
                return Ok(false);
            }
        }
    }

    /// Where what is not used begins.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether there is something behind what was used.
    pub(super) fn has_more(&mut self) -> io::Result<bool> {
        Ok(!self.rest().is_empty() || self.more()?)
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.at..]
    }

    fn take(&mut self, bytes: usize) {
        self.at += bytes;
        self.offset += bytes as u64;
    }

    /// Reads on. `false`: there is no more.
    fn more(&mut self) -> io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        if self.at > 0 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        let had = self.bytes.len();
        self.bytes.resize(had + CHUNK_BYTES, 0);
        let read = loop {
            let read = match &mut self.source {
                Source::File(file) | Source::Pipe(file) => file.read(&mut self.bytes[had..]),
                Source::Memory(bytes) => bytes.read(&mut self.bytes[had..]),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read,
            }
        };
        self.bytes.truncate(had + read.as_ref().map_or(0, |read| *read));
        self.ended = *read.as_ref().unwrap_or(&1) == 0;
        read.map(|read| read > 0)
    }

    /// Whether reading on would have to wait for whoever writes.
    fn would_wait(&self) -> bool {
        let Source::Pipe(file) = &self.source else { return false };
        let mut asked = [PollFd::new(file, PollFlags::IN)];
        poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready == 0)
    }
}

/// Why reading goes no further.
#[derive(Debug)]
pub(super) enum Stopped {
    /// The input could not be read.
    Read(io::Error),
    /// A record is none, or has no key.
    Record(BadRecord),
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Self {
        Stopped::Read(error)
    }
}

/// What is wrong with a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BadRecord {
    /// From 1; 0 is the header.
    pub(super) number: u64,
    /// Where it begins.
    pub(super) offset: u64,
    pub(super) what: String,
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            0 => write!(f, "the header: {}", self.what),
            number => write!(f, "record {number} at byte {}: {}", self.offset, self.what),
        }
    }
}

/// What stands next in an input.
enum Next {
    /// A record: so many bytes before it that are none, then its own.
    Record {
        before: usize,
        length: usize,
    },
    /// It may be there later.
    Wait,
    End,
}

/// Finds where records end, and what their keys are.
pub(super) struct Cutter {
    format: Format,
    stream: Stream,
    delimiter: u8,
    csv: Box<csv_core::Reader>,
    /// The fields of the row that was found last, one after another, and where each ends.
    fields: Vec<u8>,
    ends: Vec<usize>,
    /// How many fields that row has, and how many the header.
    row: usize,
    columns: usize,
    /// Which column each field of the key is.
    key: Vec<usize>,
    record_bytes_max: usize,
    /// The input is still written to: a last record without an end is none yet.
    growing: bool,
}

impl Cutter {
    pub(super) fn new(format: Format, stream: Stream, delimiter: u8, record_bytes_max: usize, growing: bool) -> Self {
        Cutter {
            format,
            stream,
            delimiter,
            csv: Box::new(csv_core::ReaderBuilder::new().delimiter(delimiter).build()),
            fields: vec![0; 1024],
            ends: vec![0; 64],
            row: 0,
            columns: 0,
            key: Vec::new(),
            record_bytes_max,
            growing,
        }
    }

    /// One that knows the same header, and begins with a row.
    pub(super) fn between_rows(&self) -> Self {
        Cutter {
            stream: self.stream.clone(),
            csv: parser(self.delimiter),
            fields: vec![0; 1024],
            ends: vec![0; 64],
            key: self.key.clone(),
            ..*self
        }
    }

    /// Reads the header, if the format has one, and finds the key's columns in it. Returns its bytes: none where the input is still
    /// written to and the header is not there yet; nothing is read then.
    pub(super) fn header(&mut self, input: &mut Input) -> Result<Vec<u8>, Stopped> {
        match self.format {
            Format::Lines | Format::Ndjson => return Ok(Vec::new()),
            Format::Csv => {}
        }
        let bad = |what: String| Stopped::Record(BadRecord { number: 0, offset: 0, what });
        let found = self.next(input, false).map_err(|stopped| match stopped {
            Stopped::Record(BadRecord { what, .. }) => bad(what),
            Stopped::Read(error) => Stopped::Read(error),
        })?;
        let Next::Record { before, length } = found else {
            if self.growing {
                return Ok(Vec::new());
            }
            return Err(bad("there is no header row, which names the columns".to_owned()));
        };
        let header = input.rest()[before..before + length].to_vec();
        input.take(before + length);
        self.columns = self.row;
        let names: Vec<&[u8]> = (0..self.columns).map(|column| self.field(column)).collect();
        let mut key = Vec::new();
        for field in &self.stream.fields {
            let mut places = names.iter().enumerate().filter(|(_, name)| **name == field.as_bytes()).map(|(place, _)| place);
            key.push(match (places.next(), places.next()) {
                (Some(place), None) => place,
                (Some(_), Some(_)) => return Err(bad(format!("several columns are named {field:?}"))),
                (None, _) => {
                    let names: Vec<_> = names.iter().take(20).map(|name| String::from_utf8_lossy(name)).collect();
                    return Err(bad(format!("no column is named {field:?}, of {}: {names:?}", self.columns)));
                }
            });
        }
        self.key = key;
        Ok(header)
    }

    fn field(&self, column: usize) -> &[u8] {
        let begin = if column == 0 { 0 } else { self.ends[column - 1] };
        &self.fields[begin..self.ends[column]]
    }

    fn next(&mut self, input: &mut Input, early: bool) -> Result<Next, Stopped> {
        match self.format {
            Format::Lines | Format::Ndjson => self.next_line(input, early),
            Format::Csv => self.next_row(input, early),
        }
    }

    fn next_line(&self, input: &mut Input, early: bool) -> Result<Next, Stopped> {
        let (mut before, mut searched) = (0, 0);
        loop {
            if let Some(found) = memchr::memchr(b'\n', &input.rest()[searched..]) {
                let end = searched + found + 1;
                if self.format == Format::Ndjson && input.rest()[before..end].trim_ascii().is_empty() {
                    (before, searched) = (end, end);
                    if before >= CHUNK_BYTES {
                        input.take(before);
                        (before, searched) = (0, 0);
                    }
                    continue;
                }
                self.check_length(end - before)?;
                return Ok(Next::Record { before, length: end - before });
            }
            searched = input.rest().len();
            self.check_length(searched - before)?;
            if early && input.would_wait() {
                return Ok(Next::Wait);
            }
            if !input.more()? {
                let length = searched - before;
                let is_none = self.format == Format::Ndjson && input.rest()[before..].trim_ascii().is_empty();
                return Ok(if length == 0 || is_none || self.growing { Next::End } else { Next::Record { before, length } });
            }
        }
    }

    fn next_row(&mut self, input: &mut Input, early: bool) -> Result<Next, Stopped> {
        use csv_core::ReadRecordResult::{End, InputEmpty, OutputEndsFull, OutputFull, Record};
        let (mut read, mut filled, mut columns, mut end) = (0, 0, 0, 0);
        loop {
            if input.rest().len() == read && !input.ended {
                self.check_length(read)?;
                if early && input.would_wait() {
                    // It begins with this row again.
                    self.csv = parser(self.delimiter);
                    return Ok(Next::Wait);
                }
                input.more()?;
                continue;
            }
            let unread = &input.rest()[read..];
            let at_end = unread.is_empty() && input.ended;
            if at_end {
                let begun = input.rest().iter().position(|byte| !matches!(byte, b'\r' | b'\n'));
                let Some(before) = begun else { return Ok(Next::End) };
                if self.growing {
                    return Ok(Next::End);
                }
                end = before;
            }
            // A line end that is not there ends the last row too; inside of quotes it does not.
            let given = if at_end { b"\n" } else { unread };
            let (told, more, bytes, ends) = self.csv.read_record(given, &mut self.fields[filled..], &mut self.ends[columns..]);
            (filled, columns) = (filled + bytes, columns + ends);
            read += if at_end { 0 } else { more };
            match told {
                Record => break,
                End => return Ok(Next::End),
                OutputFull => self.fields.resize(self.fields.len() * 2, 0),
                OutputEndsFull if columns > COLUMNS_MAX => {
                    return Err(self.bad(format!("it has more than {COLUMNS_MAX} columns"), 0));
                }
                OutputEndsFull => self.ends.resize(self.ends.len() * 2, 0),
                InputEmpty if at_end => {
                    return Err(self.bad("it has a quote that nothing closes before the input ends".to_owned(), end));
                }
                InputEmpty => {}
            }
        }
        if columns > COLUMNS_MAX {
            return Err(self.bad(format!("it has {columns} columns, of {COLUMNS_MAX} at most"), 0));
        }
        // A row that ends in CR LF is told at its CR.
        if input.rest()[..read].ends_with(b"\r") {
            if read == input.rest().len() {
                input.more()?;
            }
            read += usize::from(input.rest().get(read) == Some(&b'\n'));
        }
        let before = input.rest().iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(0);
        self.row = columns;
        self.check_length(read - before)?;
        Ok(Next::Record { before, length: read - before })
    }

    fn bad(&self, what: String, before: usize) -> Stopped {
        Stopped::Record(BadRecord { number: 0, offset: before as u64, what })
    }

    fn check_length(&self, bytes: usize) -> Result<(), Stopped> {
        if bytes <= self.record_bytes_max {
            return Ok(());
        }
        let limit = self.record_bytes_max;
        Err(self.bad(format!("it has more than {limit} bytes, which --record-bytes-max allows; where it ends is not known"), 0))
    }

    /// The id of a record that was just found.
    fn id(&self, record: &[u8]) -> Result<ClickId, String> {
        let not_text = |what: &str| format!("{what} is not UTF-8");
        match self.format {
            Format::Lines => {
                let line = record.strip_suffix(b"\n").unwrap_or(record);
                let line = std::str::from_utf8(line).map_err(|_| not_text("it"))?;
                self.stream.id(|_| Some(FieldValue::Text(line))).map_err(|error| error.to_string())
            }
            Format::Ndjson => {
                let value = unique_json(record).map_err(|error| match error.classify() {
                    Category::Data => "an object in it names a member twice".to_owned(),
                    Category::Io | Category::Syntax | Category::Eof => format!("it is no JSON: {error}"),
                })?;
                if !value.is_object() {
                    return Err("it is JSON, but no object".to_owned());
                }
                self.stream.id_of_json(&value).map_err(|error| error.to_string())
            }
            Format::Csv => {
                if self.row != self.columns {
                    return Err(format!("it has {} columns, and the header {}", self.row, self.columns));
                }
                let mut texts = Vec::with_capacity(self.key.len());
                for (field, column) in self.stream.fields.iter().zip(&self.key) {
                    let text =
                        std::str::from_utf8(self.field(*column)).map_err(|_| not_text(&format!("the column {field:?}")))?;
                    texts.push((field.as_str(), text));
                }
                let value = |name: &str| texts.iter().find(|(field, _)| *field == name).map(|(_, text)| FieldValue::Text(text));
                self.stream.id(value).map_err(|error| error.to_string())
            }
        }
    }

    /// The ids of records that were cut out of an input before.
    pub(super) fn ids(&mut self, records: Vec<u8>) -> Result<Vec<ClickId>, String> {
        let mut input = Input::of_bytes(records);
        let mut ids = Vec::new();
        while let Next::Record { before, length } = self.next(&mut input, false).map_err(|stopped| format!("{stopped:?}"))? {
            ids.push(self.id(&input.rest()[before..before + length])?);
            input.take(before + length);
        }
        Ok(ids)
    }
}

/// A parser that begins with a row, and takes no bytes there for a mark of the input's beginning.
fn parser(delimiter: u8) -> Box<csv_core::Reader> {
    // A copy of one that has read would not do: it lacks what a parser is built with.
    let mut parser = Box::new(csv_core::ReaderBuilder::new().delimiter(delimiter).build());
    parser.read_record(b"\n", &mut [0; 8], &mut [0; 8]);
    parser
}

/// Records that are asked about together.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// The records, one after another.
    bytes: Vec<u8>,
    /// Where in `bytes` each of them ends.
    ends: Vec<usize>,
    pub(super) ids: Vec<ClickId>,
    /// Where in the input each of them begins.
    pub(super) offsets: Vec<u64>,
    /// Records that are not asked about, each with how many good ones of the batch stand before it.
    pub(super) rejects: Vec<(usize, Vec<u8>, BadRecord)>,
    /// Where in the input the batch ends.
    pub(super) end: u64,
    /// The last record has its line end.
    pub(super) whole: bool,
    /// So many of the first records are settled.
    pub(super) from: usize,
    /// How often it was asked about.
    pub(super) asked: u32,
    /// Its place among the batches.
    pub(super) serial: u64,
}

impl Batch {
    pub(super) fn record(&self, place: usize) -> &[u8] {
        let begin = if place == 0 { 0 } else { self.ends[place - 1] };
        &self.bytes[begin..self.ends[place]]
    }

    /// Where in the input begins what is not settled.
    pub(super) fn begin(&self) -> u64 {
        self.offsets.get(self.from).copied().unwrap_or(self.end)
    }

    fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.rejects.is_empty()
    }
}

/// What the reader hands on.
pub(super) enum Piece {
    Batch(Batch),
    End(Result<(), Stopped>),
}

/// Whether bad records end the reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum OnError {
    Stop,
    Skip,
}

/// Cuts an input into batches.
pub(super) struct Reader {
    pub(super) input: Input,
    pub(super) cutter: Cutter,
    /// How many records there were before.
    pub(super) number: u64,
    pub(super) batch: usize,
    pub(super) on_error: OnError,
    /// A batch is handed on before it is full where whoever writes makes a pause.
    pub(super) early: bool,
}

impl Reader {
    /// Reads until the end, or until nobody takes what it reads.
    pub(super) fn run(mut self, hand_on: impl Fn(Piece) -> bool) {
        loop {
            let mut batch = Batch { whole: true, ..Batch::default() };
            let ended = self.fill(&mut batch);
            let is_last = !matches!(ended, Ok(false));
            batch.end = self.input.offset;
            if !batch.is_empty() && !hand_on(Piece::Batch(batch)) {
                return;
            }
            if is_last {
                hand_on(Piece::End(ended.map(|_| ())));
                return;
            }
        }
    }

    /// Fills a batch. `true`: the input has ended.
    fn fill(&mut self, batch: &mut Batch) -> Result<bool, Stopped> {
        while batch.ids.len() + batch.rejects.len() < self.batch && batch.bytes.len() < BATCH_BYTES_MAX {
            let early = self.early && !batch.is_empty();
            let placed = |stopped, number, offset| match stopped {
                Stopped::Record(BadRecord { offset: before, what, .. }) => {
                    Stopped::Record(BadRecord { number: number + 1, offset: offset + before, what })
                }
                Stopped::Read(error) => Stopped::Read(error),
            };
            let found =
                self.cutter.next(&mut self.input, early).map_err(|stopped| placed(stopped, self.number, self.input.offset))?;
            let (before, length) = match found {
                Next::Record { before, length } => (before, length),
                Next::Wait => return Ok(false),
                Next::End => return Ok(true),
            };
            let record = &self.input.rest()[before..before + length];
            let offset = self.input.offset + before as u64;
            match self.cutter.id(record) {
                Ok(id) => {
                    batch.bytes.extend_from_slice(record);
                    batch.ends.push(batch.bytes.len());
                    batch.offsets.push(offset);
                    batch.ids.push(id);
                }
                Err(what) => {
                    let bad = BadRecord { number: self.number + 1, offset, what };
                    match self.on_error {
                        OnError::Stop => return Err(Stopped::Record(bad)),
                        OnError::Skip => batch.rejects.push((batch.ids.len(), record.to_vec(), bad)),
                    }
                }
            }
            batch.whole = record.ends_with(b"\n") || record.ends_with(b"\r");
            self.number += 1;
            self.input.take(before + length);
        }
        Ok(false)
    }
}

/// What tells an input from another one: so many bytes of its beginning, and their hash.
pub(super) fn fingerprint(head: &[u8]) -> String {
    hex(&sha256(head)[..16])
}

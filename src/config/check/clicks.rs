//! Streams of clicks: each value alone and with the window.

use std::time::Duration;

use super::{Checker, shown};
use crate::config::{CLICK_STREAMS_MAX, Document, EXPECTED_MAX, StreamEntry};
use crate::dedup::{STREAM_FIELDS_MAX, STREAM_SHARDS_MAX, STREAM_SLICES_MAX, STREAM_WINDOW_MAX};

/// Shortest window, shortest time that verdicts are kept, shortest claim: less is gone before its answer is read.
const CLICKS_DURATION_MIN: Duration = Duration::from_secs(1);
/// So long verdicts may be kept whatever the window is.
const KEEP_ANYWAY: Duration = Duration::from_secs(600);

impl Checker<'_> {
    pub(super) fn click_streams(&mut self, document: &Document) {
        self.count("stream", document.stream.len(), CLICK_STREAMS_MAX);
        for (name, entry) in &document.stream {
            let key = format!("stream.{name}");
            self.name("stream", name);
            self.click_fields(&format!("{key}.fields"), &entry.fields);
            let StreamEntry { window, slices, shards, expected, keep, lease, .. } = *entry;
            let key_of_window = format!("{key}.window");
            self.click_time(&key_of_window, window, STREAM_WINDOW_MAX, "");
            // One that is refused itself is no measure.
            let window = if self.told_of(&key_of_window) { STREAM_WINDOW_MAX } else { window };
            self.number(&format!("{key}.slices"), slices as usize, 1, STREAM_SLICES_MAX as usize);
            self.number(&format!("{key}.shards"), shards.into(), 1, STREAM_SHARDS_MAX.into());
            let expected = usize::try_from(expected).unwrap_or(usize::MAX);
            self.number(&format!("{key}.expected"), expected, 1, usize::try_from(EXPECTED_MAX).unwrap_or(usize::MAX));
            let (keep_max, of_window) = (window.max(KEEP_ANYWAY), ", the window");
            self.click_time(&format!("{key}.keep"), keep, keep_max, if keep_max == window { of_window } else { "" });
            self.click_time(&format!("{key}.lease"), lease, window, of_window);
            // What the stream itself refuses beyond that.
            if !self.told_of(&key)
                && let Err(error) = entry.stream(name).check()
            {
                self.refuse(&key, None, error.what, "correct it");
            }
        }
    }

    fn click_fields(&mut self, key: &str, fields: &[String]) {
        if fields.is_empty() {
            let what = "it names no field, and nothing else makes two clicks the same";
            return self.refuse(key, None, what, "as in fields = [\"user\", \"/ad/id\"]");
        }
        self.count(key, fields.len(), STREAM_FIELDS_MAX);
        self.repeated(key, fields);
        for field in fields {
            if field.is_empty() {
                self.refuse(key, Some(&"\"\""), "a field has no name", "name a member, or a JSON pointer");
            } else if field.starts_with('/') {
                self.body_pointer(key, field, "as in /ad/id");
            }
        }
    }

    fn click_time(&mut self, key: &str, value: Duration, max: Duration, of: &str) {
        if value < CLICKS_DURATION_MIN || value > max {
            let what = format!("it must be {} to {}{of}", shown(CLICKS_DURATION_MIN), shown(max));
            self.refuse(key, Some(&shown(value)), what, "choose a time in this range");
        }
    }
}

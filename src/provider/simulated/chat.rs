//! The simulated provider's OpenAI-compatible side: a chat completion, whole or as a stream of server-sent events.
//!
//! A request on a path that ends in `/chat/completions` is answered as such APIs answer, and with `"stream": true` in its body as a
//! stream: one event for each piece of the text, the last with its `finish_reason`, then `[DONE]`. Both say the same text for the same
//! execution and the same number of pieces.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::behaviour::{Credential, Marker, Treatment};

/// Pieces of a streamed text, unless the behaviour says otherwise.
const PIECES: usize = 4;

/// Whether a path asks for a chat completion.
pub(super) fn is_chat(path: &str) -> bool {
    path.split('?').next().is_some_and(|path| path.ends_with("/chat/completions"))
}

/// Whether a request's body asks for a stream.
pub(super) fn wants_stream(body: &Map<String, Value>) -> bool {
    body.get("stream") == Some(&Value::Bool(true))
}

/// What one execution says.
pub(super) struct Said<'a> {
    pub(super) id: &'a str,
    pub(super) model: &'a str,
    pub(super) provider: &'a str,
    pub(super) number: u64,
    /// The request's `Authorization`.
    pub(super) authorization: &'a str,
}

impl Said<'_> {
    fn pieces(&self, count: usize, treatment: &Treatment) -> Vec<String> {
        let mut pieces = vec![format!("execution {} by {}", self.number, self.provider)];
        pieces.extend((1..count).map(|place| format!(" {place}")));
        if treatment.credential == Credential::Echoed {
            pieces.push(format!(" {}", self.authorization));
        }
        pieces
    }

    /// Makes a whole completion of an execution's plain answer.
    pub(super) fn complete(&self, value: &mut Value, created: u64, treatment: &Treatment) {
        let content = self.pieces(treatment.chunks.unwrap_or(1), treatment).concat();
        value["object"] = json!("chat.completion");
        value["created"] = json!(created);
        value["choices"] =
            json!([{ "index": 0, "message": { "role": "assistant", "content": content }, "finish_reason": "stop" }]);
        value["usage"] = json!({ "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2 });
    }

    /// Makes the stream.
    pub(super) fn stream(&self, created: u64, treatment: &Treatment) -> Bytes {
        let event = |delta: Value, finish: Value| {
            let chunk = json!({
                "id": self.id, "object": "chat.completion.chunk", "created": created, "model": self.model,
                "choices": [{ "index": 0, "delta": delta, "finish_reason": finish }],
            });
            format!("data: {chunk}\n\n")
        };
        let pieces = self.pieces(treatment.chunks.unwrap_or(PIECES), treatment);
        let plain: usize = pieces.iter().map(|piece| event(json!({ "content": piece }), Value::Null).len()).sum();
        // As many bytes as are asked for, in equal shares.
        let padding = "x".repeat(treatment.size_bytes.saturating_sub(plain).div_ceil(pieces.len()));
        let mut text = event(json!({ "role": "assistant", "content": "" }), Value::Null);
        for piece in &pieces {
            text.push_str(&event(json!({ "content": format!("{piece}{padding}") }), Value::Null));
        }
        match treatment.marker {
            Marker::Done => {
                text.push_str(&event(json!({}), json!("stop")));
                text.push_str("data: [DONE]\n\n");
            }
            Marker::Missing => {}
            Marker::Error => {
                let error = json!({ "error": { "message": "overloaded in the middle", "type": "server_error" } });
                text.push_str(&format!("data: {error}\n\ndata: [DONE]\n\n"));
            }
        }
        text.into()
    }
}

/// How a stream is cut into what is sent at once: an event each, or so many bytes each.
pub(super) fn parts(stream: &Bytes, treatment: &Treatment) -> Vec<Bytes> {
    if treatment.part_bytes > 0 {
        return stream.chunks(treatment.part_bytes).map(|part| stream.slice_ref(part)).collect();
    }
    let mut parts = Vec::new();
    let mut rest = stream.clone();
    while let Some(end) = rest.windows(2).position(|pair| pair == b"\n\n") {
        parts.push(rest.split_to(end + 2));
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
}

//! What a stream of events comes to: the answer that an OpenAI-compatible chat completion says in parts, as it would have been said at
//! once. Pure.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// The whole answer of a stream of chat completion chunks; `None` for whatever else it is: JSON, or events that this does not know.
///
/// Texts of deltas are put together, tool calls by their place; of what is said more than once the last counts. Whether the stream is
/// whole is not looked at: that is the adapter's.
pub fn gathered(body: &[u8]) -> Option<Vec<u8>> {
    // JSON never begins like this.
    if !matches!(body.iter().find(|byte| !byte.is_ascii_whitespace()), Some(b'd' | b'e' | b'i' | b'r' | b':')) {
        return None;
    }
    let text = std::str::from_utf8(body).ok()?;
    let (mut whole, mut choices) = (Map::new(), BTreeMap::<u64, Map<String, Value>>::new());
    for data in text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim).filter(|data| *data != "[DONE]") {
        let Value::Object(chunk) = serde_json::from_str(data).ok()? else { return None };
        for (name, value) in chunk {
            match (name.as_str(), value) {
                ("choices", Value::Array(deltas)) => {
                    for delta in deltas {
                        let Value::Object(delta) = delta else { return None };
                        if !delta.contains_key("delta") {
                            return None;
                        }
                        let place = delta.get("index").and_then(Value::as_u64).unwrap_or(0);
                        add(choices.entry(place).or_default(), delta)?;
                    }
                }
                ("choices", _) => return None,
                ("object", _) => {}
                (_, Value::Null) => {
                    whole.entry(name).or_insert(Value::Null);
                }
                (_, value) => {
                    whole.insert(name, value);
                }
            }
        }
    }
    if choices.is_empty() {
        return None;
    }
    whole.insert("object".to_owned(), "chat.completion".into());
    whole.insert("choices".to_owned(), choices.into_values().map(Value::Object).collect());
    serde_json::to_vec(&Value::Object(whole)).ok()
}

/// Adds a chunk's choice to what is there of it.
fn add(choice: &mut Map<String, Value>, chunk: Map<String, Value>) -> Option<()> {
    for (name, value) in chunk {
        match (name.as_str(), value) {
            ("delta", Value::Object(delta)) => {
                let message = choice.entry("message").or_insert_with(|| Value::Object(Map::new()));
                merge(message.as_object_mut()?, delta)?;
            }
            ("delta", _) => return None,
            (_, Value::Null) => {
                choice.entry(name).or_insert(Value::Null);
            }
            (_, value) => {
                choice.insert(name, value);
            }
        }
    }
    Some(())
}

/// Puts a delta to what is there: texts go on, lists by the place that their items name, the rest is replaced.
fn merge(there: &mut Map<String, Value>, delta: Map<String, Value>) -> Option<()> {
    // These are said once for all, by some in each chunk.
    const ONCE: [&str; 4] = ["role", "id", "type", "index"];
    for (name, value) in delta {
        match (there.get_mut(&name), value) {
            (Some(Value::String(text)), Value::String(more)) if !ONCE.contains(&name.as_str()) => text.push_str(&more),
            (Some(Value::Object(there)), Value::Object(more)) => merge(there, more)?,
            (there_already, Value::Array(items)) => {
                let mut list = match there_already {
                    Some(Value::Array(list)) => std::mem::take(list),
                    _ => Vec::new(),
                };
                for (order, item) in items.into_iter().enumerate() {
                    let Value::Object(item) = item else { return None };
                    let place = item.get("index").and_then(Value::as_u64);
                    let place = place.and_then(|place| usize::try_from(place).ok()).unwrap_or(order);
                    if place == list.len() {
                        list.push(Value::Object(Map::new()));
                    }
                    merge(list.get_mut(place)?.as_object_mut()?, item)?;
                }
                there.insert(name, Value::Array(list));
            }
            (Some(_), Value::Null) => {}
            (_, value) => {
                there.insert(name, value);
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn whole(chunks: &[Value]) -> Option<Value> {
        let events: String = chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect();
        gathered(format!(": hello\n\n{events}data: [DONE]\n\n").as_bytes()).map(|json| serde_json::from_slice(&json).unwrap())
    }

    fn chunk(delta: &Value, finish: &Value) -> Value {
        let choices = json!([{ "index": 0, "delta": delta, "finish_reason": finish }]);
        json!({ "id": "c-1", "object": "chat.completion.chunk", "model": "m", "choices": choices })
    }

    #[test]
    fn a_stream_comes_to_what_would_have_been_said_at_once() {
        let usage = json!({ "id": "c-1", "choices": [], "usage": { "total_tokens": 7 } });
        let said = [
            chunk(&json!({ "role": "assistant", "content": null }), &Value::Null),
            chunk(&json!({ "role": "assistant", "content": "{\"a\"" }), &Value::Null),
            chunk(&json!({ "content": ":1}" }), &Value::Null),
            chunk(&json!({}), &json!("stop")),
            usage,
        ];
        let message = json!({ "role": "assistant", "content": "{\"a\":1}" });
        let expected = json!({
            "id": "c-1", "object": "chat.completion", "model": "m", "usage": { "total_tokens": 7 },
            "choices": [{ "index": 0, "message": message, "finish_reason": "stop" }],
        });
        assert_eq!(whole(&said), Some(expected));
    }

    #[test]
    fn calls_of_tools_and_several_choices_are_put_together_by_their_place() {
        let call = |index: u64, function: Value| json!({ "tool_calls": [{ "index": index, "function": function }] });
        let two = json!({ "choices": [{ "index": 1, "delta": { "content": "second" }, "finish_reason": "length" }] });
        let said = [
            chunk(&call(0, json!({ "name": "f", "arguments": "{" })), &Value::Null),
            chunk(&call(0, json!({ "arguments": "}" })), &Value::Null),
            chunk(&call(1, json!({ "name": "g", "arguments": "1" })), &json!("tool_calls")),
            two,
        ];
        let whole = whole(&said).unwrap();
        let of = |pointer: &str| whole.pointer(pointer).cloned().unwrap();
        assert_eq!(of("/choices/0/message/tool_calls/0/function"), json!({ "name": "f", "arguments": "{}" }));
        assert_eq!(of("/choices/0/message/tool_calls/1/function"), json!({ "name": "g", "arguments": "1" }));
        assert_eq!((of("/choices/1/message/content"), of("/choices/1/finish_reason")), (json!("second"), json!("length")));
    }

    #[test]
    fn whatever_else_it_is_stays_what_it_is() {
        for body in
            ["{\"a\":1}", "", "[1]", "data: {\"type\":\"response.output_text.delta\"}\n\n", "data: no json\n\n", "data: 1\n\n"]
        {
            assert_eq!(gathered(body.as_bytes()), None, "{body}");
        }
        assert_eq!(gathered(b"data: {\"choices\":[{\"delta\":{\"content\":\"\xff\"}}]}\n\n"), None);
        assert_eq!(whole(&[chunk(&json!("text"), &Value::Null)]), None);
        // Completions of a time before chats have no delta.
        assert_eq!(whole(&[json!({ "choices": [{ "index": 0, "text": "a" }] })]), None);
    }
}

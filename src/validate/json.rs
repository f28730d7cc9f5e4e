//! JSON from outside, read within bounds.
//!
//! A member that is named twice is refused: readers differ in which one they take, and a check of one says nothing of the other.

use serde_json::Value;

use super::{CHECKED_BYTES_MAX, NUMBER_CHARS_MAX, VALUES_MAX};
use crate::fingerprint::unique_json;

/// Reads one value. The error is in words that repeat nothing of it.
pub(super) fn read(body: &[u8]) -> Result<Value, String> {
    if body.len() > CHECKED_BYTES_MAX {
        return Err(format!("it has {} bytes; the limit for what is checked is {CHECKED_BYTES_MAX}", body.len()));
    }
    let body = body.strip_prefix("\u{feff}".as_bytes()).unwrap_or(body);
    let size = measure(body);
    if size.values > VALUES_MAX {
        return Err(format!("it has more than {VALUES_MAX} values, the limit for what is checked"));
    }
    if size.number_chars > NUMBER_CHARS_MAX {
        return Err(format!("it has a number of more than {NUMBER_CHARS_MAX} characters, the limit for what is checked"));
    }
    let value = unique_json(body).map_err(|error| format!("it is no JSON: {error}"))?;
    // serde_json reads an object with its own private name for numbers as a number; nobody else does.
    if objects(&value) != size.objects {
        return Err("it is no JSON: an object names a private member of this reader".to_owned());
    }
    Ok(value)
}

/// What a text would come to, from its bytes alone. Of what is no JSON it says nothing useful, and it need not.
struct Size {
    /// At most so many values.
    values: usize,
    objects: usize,
    /// The longest number.
    number_chars: usize,
}

fn measure(body: &[u8]) -> Size {
    let mut size = Size { values: 1, objects: 0, number_chars: 0 };
    let (mut in_string, mut escaped, mut number) = (false, false, 0);
    for byte in body {
        if in_string {
            in_string = escaped || *byte != b'"';
            escaped = !escaped && *byte == b'\\';
            continue;
        }
        number = if matches!(byte, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e' | b'E') { number + 1 } else { 0 };
        size.number_chars = size.number_chars.max(number);
        match byte {
            b'"' => in_string = true,
            b'{' => {
                size.objects += 1;
                size.values += 1;
            }
            b'[' | b',' => size.values += 1,
            _ => {}
        }
    }
    size
}

fn objects(value: &Value) -> usize {
    match value {
        Value::Object(members) => 1 + members.values().map(objects).sum::<usize>(),
        Value::Array(items) => items.iter().map(objects).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_bounded_in_bytes_values_depth_and_digits() {
        for (body, expected) in [
            (vec![b' '; CHECKED_BYTES_MAX + 1], "the limit for what is checked is 16777216"),
            (format!("[{}0]", "0,".repeat(VALUES_MAX)).into_bytes(), "more than 1048576 values"),
            (format!("[{}]", "[],".repeat(VALUES_MAX)).into_bytes(), "more than 1048576 values"),
            (format!("{}1{}", "[".repeat(1000), "]".repeat(1000)).into_bytes(), "recursion limit"),
            (format!("1{}", "0".repeat(NUMBER_CHARS_MAX)).into_bytes(), "more than 1100 characters"),
        ] {
            let error = read(&body).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        // The same bytes within a string count as one value.
        assert!(read(format!("\"{}\\\"1{}\"", "0,{[".repeat(VALUES_MAX), "0".repeat(2000)).as_bytes()).is_ok());
        assert!(read(f64::MIN_POSITIVE.to_string().as_bytes()).is_ok());
    }

    #[test]
    fn what_readers_would_read_differently_is_no_json() {
        for body in [
            r#"{"total":1,"total":2}"#,
            r#"{"a":[{"b":1,"\u0062":2}]}"#,
            r#"{"total":{"$serde_json::private::Number":"7"}}"#,
            r#"{"total":{"\u0024serde_json::private::Number":"7"}}"#,
            "{} {}",
            "",
            "data: {}\n\n",
            "[NaN]",
        ] {
            assert!(read(body.as_bytes()).is_err(), "{body}");
        }
        assert!(read("\u{feff}{\"a\":\"{\"}".as_bytes()).is_ok());
    }
}

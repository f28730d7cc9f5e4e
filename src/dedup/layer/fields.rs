//! What makes two requests the same: the stream's fields, each from a header, a parameter of the query or a part of the path.

use http::request::Parts;
use percent_encoding::percent_decode_str;

use crate::dedup::{ClickId, FieldError, FieldValue, Stream, StreamError};

/// Where a field of a request is. Its value is a text, whatever it looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The header of this name. There once, or the request is refused.
    Header(String),
    /// The parameter of the query of this name, percent-decoded, `+` as a space. There once, or the request is refused.
    Query(String),
    /// The part of the path at this place, from 0, percent-decoded. Within a nested router the path is what is left of it.
    Segment(usize),
}

/// A function for [`DedupLayer::new`](super::DedupLayer::new) that reads every field of a stream where it is said to be.
///
/// # Errors
/// A field of the stream without a source or with two, or a source of a field that the stream has not.
pub fn fields(
    stream: &Stream,
    sources: &[(&str, Source)],
) -> Result<impl Fn(&Parts) -> Result<ClickId, FieldError> + Send + Sync + 'static, StreamError> {
    let wrong = |what: String| StreamError { name: stream.name.clone(), what };
    if let Some((strange, _)) = sources.iter().find(|(name, _)| !stream.fields.iter().any(|field| field == name)) {
        return Err(wrong(format!("it has no field {strange:?}")));
    }
    let mut ordered = Vec::new();
    for field in &stream.fields {
        match &sources.iter().filter(|(name, _)| name == field).collect::<Vec<_>>()[..] {
            [(_, source)] => ordered.push((field.clone(), source.clone())),
            others => return Err(wrong(format!("the field {field:?} has {} sources, not one", others.len()))),
        }
    }
    let stream = stream.clone();
    Ok(move |parts: &Parts| {
        let values = ordered.iter().map(|(field, source)| value(parts, field, source)).collect::<Result<Vec<_>, _>>()?;
        stream.id(|name| {
            let place = ordered.iter().position(|(field, _)| field == name)?;
            Some(FieldValue::Text(&values[place]))
        })
    })
}

fn value(parts: &Parts, field: &str, source: &Source) -> Result<String, FieldError> {
    let missing = || FieldError::Missing { field: field.to_owned() };
    let unusable = |what| FieldError::Unusable { field: field.to_owned(), what };
    let decoded = |text: &str| {
        let bytes = percent_decode_str(text);
        bytes.decode_utf8().map(|text| text.into_owned()).map_err(|_| unusable("not UTF-8"))
    };
    match source {
        Source::Header(name) => {
            let mut values = parts.headers.get_all(name).iter();
            let value = values.next().ok_or_else(missing)?;
            if values.next().is_some() {
                return Err(unusable("there more than once"));
            }
            std::str::from_utf8(value.as_bytes()).map(str::to_owned).map_err(|_| unusable("not UTF-8"))
        }
        Source::Query(name) => {
            let mut found = None;
            for pair in parts.uri.query().unwrap_or_default().split('&') {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                // A name that is no text is nobody's.
                if decoded(&key.replace('+', " ")).is_ok_and(|key| key == *name) {
                    if found.is_some() {
                        return Err(unusable("there more than once"));
                    }
                    found = Some(decoded(&value.replace('+', " "))?);
                }
            }
            found.ok_or_else(missing)
        }
        Source::Segment(place) => {
            let segment = parts.uri.path().trim_start_matches('/').split('/').nth(*place).filter(|segment| !segment.is_empty());
            decoded(segment.ok_or_else(missing)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn parts(uri: &str, headers: &[(&str, &[u8])]) -> Parts {
        let mut request = Request::get(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn stream() -> Stream {
        Stream::new("clicks", &["user", "ad", "page"])
    }

    fn sources() -> [(&'static str, Source); 3] {
        [("ad", Source::Query("ad".to_owned())), ("user", Source::Header("x-user".to_owned())), ("page", Source::Segment(1))]
    }

    #[test]
    fn fields_of_a_request_are_texts_in_the_streams_order() {
        let key_of = fields(&stream(), &sources()).unwrap();
        let by_hand = |user, ad, page| {
            stream()
                .id(|field| {
                    Some(FieldValue::Text(match field {
                        "user" => user,
                        "ad" => ad,
                        _ => page,
                    }))
                })
                .unwrap()
        };
        let request = parts("/click/front%20page/x?b=1&ad=7%2B8+9&c", &[("X-User", "ad\u{e4}".as_bytes())]);
        assert_eq!(key_of(&request).unwrap(), by_hand("ad\u{e4}", "7+8 9", "front page"));
        assert_eq!(key_of(&parts("/click/p?%61d=", &[("x-user", b"")])).unwrap(), by_hand("", "", "p"));
    }

    #[test]
    fn a_field_that_is_missing_twice_there_or_no_text_is_named() {
        let key_of = fields(&stream(), &sources()).unwrap();
        let user: (&str, &[u8]) = ("x-user", b"ada");
        for (uri, headers, field, what) in [
            ("/click/p?ad=1", &[][..], "user", "missing"),
            ("/click/p?b=1", &[user], "ad", "missing"),
            ("/click/p", &[user], "ad", "missing"),
            ("/click?ad=1", &[user], "page", "missing"),
            ("/click/?ad=1", &[user], "page", "missing"),
            ("/click/p?ad=1&ad=1", &[user], "ad", "more than once"),
            ("/click/p?ad=1", &[user, user], "user", "more than once"),
            ("/click/p?ad=%ff", &[user], "ad", "not UTF-8"),
            ("/click/%ff?ad=1", &[user], "page", "not UTF-8"),
            ("/click/p?ad=1", &[("x-user", &b"\xff"[..])], "user", "not UTF-8"),
        ] {
            let error = key_of(&parts(uri, headers)).unwrap_err().to_string();
            assert!(error.contains(&format!("{field:?}")) && error.contains(what), "{uri}: {error}");
        }
    }

    #[test]
    fn sources_that_do_not_fit_the_stream_are_refused_with_the_fields_name() {
        let [ad, user, page] = sources();
        for (sources, what) in [
            (vec![ad.clone(), user.clone()], "\"page\" has 0 sources"),
            (vec![ad.clone(), user.clone(), page.clone(), ad.clone()], "\"ad\" has 2 sources"),
            (vec![ad, user, page, ("time", Source::Segment(0))], "no field \"time\""),
        ] {
            let error = fields(&stream(), &sources).err().unwrap().to_string();
            assert!(error.contains(what) && error.contains("clicks"), "{error}");
        }
    }
}

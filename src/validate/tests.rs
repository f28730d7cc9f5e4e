//! What is valid, and what is told of what is not.

use serde_json::json;

use super::*;

fn schema(schema: Value) -> Check {
    let text = schema.to_string();
    Check::compile(Of::Output, &Required { schema: Some(text.as_bytes()), assertions: &[] }).unwrap()
}

fn refused_schema(text: &str) -> String {
    let refused = Check::compile(Of::Output, &Required { schema: Some(text.as_bytes()), assertions: &[] }).unwrap_err();
    let [Refused { part: Part::Schema, what }] = &refused[..] else { panic!("{refused:?}") };
    what.clone()
}

fn assertions(texts: &[&str]) -> Result<Check, Vec<Refused>> {
    let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
    Check::compile(Of::Output, &Required { schema: None, assertions: &texts })
}

fn refused_assertion(text: &str) -> String {
    let refused = assertions(&[text]).unwrap_err();
    let [Refused { part: Part::Assertions, what }] = &refused[..] else { panic!("{refused:?}") };
    what.clone()
}

fn outputs(check: Check) -> Validator {
    Validator { output: Some(check), ..Validator::default() }
}

fn answer(body: &str) -> Answer<'_> {
    Answer { content_encoding: None, body: body.as_bytes() }
}

/// What is said of an output by one assertion; `""` if it holds.
fn said(assertion: &str, input: &str, output: &str) -> String {
    let validator = outputs(assertions(&[assertion]).unwrap_or_else(|refused| panic!("{refused:?}")));
    validator.check_output(input.as_bytes(), answer(output)).map_or_else(|invalid| invalid.to_string(), |()| String::new())
}

fn faults(validator: &Validator, body: &str) -> Vec<(String, String)> {
    let Err(invalid) = validator.check_output(b"{}", answer(body)) else { return Vec::new() };
    invalid.faults.into_iter().map(|fault| (fault.pointer, fault.rule)).collect()
}

fn fault_of(pointer: &str, rule: &str) -> (String, String) {
    (pointer.to_owned(), rule.to_owned())
}

/// Case 56.
#[test]
fn valid_json_with_a_wrong_total_is_invalid() {
    let total = r#"output.total == output.items | map(attribute="price") | sum"#;
    assert_eq!(said(total, "{}", r#"{"total":25.3,"items":[{"price":20.1},{"price":5.2}]}"#), "");
    assert_eq!(said(total, "{}", r#"{"total":30,"items":[{"price":10},{"price":20.0}]}"#), "");
    let wrong = said(total, "{}", r#"{"total":26,"items":[{"price":20.1},{"price":5.2}]}"#);
    assert_eq!(wrong, format!("assertion 1: does not hold: {total}"));
}

#[test]
fn a_fault_names_its_place_and_rule_and_repeats_no_value() {
    let validator = outputs(schema(json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "pages": { "type": "array", "items": { "type": "integer", "maximum": 9 } },
            "mail": { "format": "email" },
            "word": { "enum": ["a", "b"] },
            "code": { "pattern": "^[a-z]+$" },
        },
    })));
    let body = r#"{"pages":[1,70007],"mail":"private text","word":"hidden word","code":"SECRET"}"#;
    let mut told = faults(&validator, body);
    told.sort();
    let expected = [("", "required"), ("/code", "pattern"), ("/mail", "format"), ("/pages/1", "maximum"), ("/word", "enum")];
    assert_eq!(told, expected.map(|(pointer, rule)| fault_of(pointer, rule)));
    let text = validator.check_output(b"", answer(body)).unwrap_err().to_string();
    for value in ["70007", "private", "hidden", "SECRET"] {
        assert!(!text.contains(value), "{text}");
    }
}

#[test]
fn what_is_told_is_bounded() {
    let validator = outputs(schema(json!({ "items": { "type": "string" }, "additionalProperties": false })));
    for body in [json!(vec![0; 100]).to_string(), json!(vec![0; 50_000]).to_string()] {
        let told = faults(&validator, &body);
        assert!((1..=FAULTS_MAX).contains(&told.len()), "{told:?}");
    }
    let long = format!("{{\"{}\":1}}", "x".repeat(10_000));
    let text = validator.check_output(b"", answer(&long)).unwrap_err().to_string();
    assert!(text.chars().count() < 3 * FAULT_CHARS_MAX + 10, "{text}");
    let validator = outputs(assertions(&["output.a == 1 or output.b == 2 and output.b != 3"; ASSERTIONS_MAX]).unwrap());
    assert_eq!(faults(&validator, r#"{"a":0,"b":0}"#).len(), FAULTS_MAX);
}

#[test]
fn formats_are_asserted_and_unknown_ones_refused() {
    let mail = outputs(schema(json!({ "format": "date-time" })));
    assert_eq!(faults(&mail, r#""2024-02-30T00:00:00Z""#), [fault_of("", "format")]);
    assert_eq!(faults(&mail, r#""2024-02-29T00:00:00Z""#), []);
    assert!(refused_schema(r#"{"properties":{"a":{"format":"data-time"}}}"#).contains("data-time"));
}

#[test]
fn a_reference_leads_within_its_document_or_nowhere() {
    let within = schema(json!({ "$defs": { "page": { "type": "integer" } }, "items": { "$ref": "#/$defs/page" } }));
    assert_eq!(faults(&outputs(within), r#"["a"]"#), [fault_of("/0", "type")]);
    let named =
        json!({ "$defs": { "p": { "$id": "https://a.example/page", "type": "integer" } }, "$ref": "https://a.example/page" });
    assert_eq!(faults(&outputs(schema(named)), r#""a""#), [fault_of("", "type")]);
    for (text, reference) in [
        (r#"{"properties":{"a":{"$ref":"https://a.example/page.json"}}}"#, "https://a.example/page.json"),
        (r#"{"properties":{"a":{"$ref":"http://127.0.0.1:1/page.json#/x"}}}"#, "http://127.0.0.1:1/page.json"),
        (r#"{"properties":{"a":{"$ref":"file:///etc/passwd"}}}"#, "file:///etc/passwd"),
        (r#"{"properties":{"a":{"$ref":"page.json"}}}"#, "page.json"),
        (r##"{"properties":{"a":{"$ref":"#/$defs/page"}}}"##, "#/$defs/page"),
    ] {
        let refused = refused_schema(text);
        assert!(refused.starts_with("at /properties/a/$ref: ") && refused.contains(reference), "{refused}");
    }
}

#[test]
fn what_is_no_schema_of_the_one_dialect_is_refused_with_its_place() {
    for (text, expected) in [
        ("{", "no JSON"),
        (r#"{"a":1,"a":2}"#, "repeated"),
        ("[]", "type"),
        (r#"{"properties":{"total":{"type":"nmber"}}}"#, "at /properties/total/type: "),
        (r#"{"$schema":"http://json-schema.org/draft-07/schema#"}"#, "at /$schema: "),
        (r#"{"$schema":"https://a.example/own"}"#, "at /$schema: "),
    ] {
        let refused = refused_schema(text);
        assert!(refused.contains(expected), "{refused}");
    }
    assert!(refused_schema(&" ".repeat(SCHEMA_BYTES_MAX + 1)).contains("the limit is 1048576"));
    schema(json!({ "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://a.example/print" }));
}

/// An engine that backtracks would not come back.
#[test]
fn patterns_take_linear_time_or_are_refused() {
    let evil = outputs(schema(json!({ "pattern": "^(a+)+$" })));
    assert_eq!(faults(&evil, &format!("\"{}!\"", "a".repeat(50_000))), [fault_of("", "pattern")]);
    for pattern in [r"^(?=a)b", r"(a)\1", "((a{1000}){1000}){1000}"] {
        let refused = refused_schema(&json!({ "properties": { "a": { "pattern": pattern } } }).to_string());
        assert!(refused.starts_with("at /properties/a/pattern: "), "{refused}");
    }
}

#[test]
fn a_schema_that_leads_to_itself_ends() {
    for text in [
        json!({ "$ref": "#" }),
        json!({ "allOf": [{ "$ref": "#" }] }),
        json!({ "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } }, "$ref": "#/$defs/a" }),
        json!({ "properties": { "a": { "$ref": "#" } }, "items": { "$dynamicRef": "#" } }),
    ] {
        let validator = outputs(schema(text));
        let deep = format!("{}1{}", r#"{"a":["#.repeat(60), "]}".repeat(60));
        let _ = validator.check_output(b"", answer(&deep));
    }
}

#[test]
fn numbers_are_judged_as_written() {
    let validator = outputs(schema(json!({ "properties": {
        "cents": { "multipleOf": 0.01 }, "id": { "maximum": 9_007_199_254_740_992_u64 }, "whole": { "type": "integer" },
    } })));
    assert_eq!(faults(&validator, r#"{"cents":19.99,"id":9007199254740992,"whole":1.0}"#), []);
    assert_eq!(faults(&validator, r#"{"cents":1e3,"whole":1e3}"#), []);
    assert_eq!(faults(&validator, r#"{"cents":19.995}"#), [fault_of("/cents", "multipleOf")]);
    assert_eq!(faults(&validator, r#"{"id":9007199254740993}"#), [fault_of("/id", "maximum")]);
    for (assertion, output) in [
        ("output.id == 9007199254740993", r#"{"id":9007199254740993}"#),
        ("output.id != 9007199254740992", r#"{"id":9007199254740993}"#),
        ("output.id > 9223372036854775807", r#"{"id":170141183460469231731687303715884105727}"#),
        ("output.total == 25", r#"{"total":25.0}"#),
        ("output | sum == 0.3", "[0.1,0.2]"),
        ("output | sum == 0.6", "[0.1,0.2,0.3]"),
        ("output | sum == 9007199254740993", "[9007199254740992,1]"),
        ("output | sum == 0", "[]"),
        ("output | sum == -1.5", "[-0.25,-1.25]"),
        ("output | sum > 1e299", "[1e300,1e-300]"),
        ("(output[0] + output[1]) | round(2) == 0.3", "[0.1,0.2]"),
    ] {
        assert_eq!(said(assertion, "{}", output), "", "{output}");
    }
    let beyond = "number: the output has a number that neither 128 bits nor a double hold";
    assert_eq!(said("output.a == 1", "{}", r#"{"a":1e400}"#), beyond);
    assert_eq!(said("output.a == 1", "{}", r#"{"a":170141183460469231731687303715884105728}"#), beyond);
}

#[test]
fn an_assertion_that_cannot_be_judged_is_a_fault() {
    for (assertion, output, expected) in [
        ("output.total > 0", "{}", "cannot be judged: "),
        ("output.a.b.c == 1", r#"{"a":1}"#, "cannot be judged: "),
        ("output.total + 1 > 0", r#"{"total":"private"}"#, "cannot be judged: "),
        ("output.total", r#"{"total":1}"#, "comes to a number, not to true or false"),
        ("output.total", r#"{"total":"private"}"#, "comes to a string, not to true or false"),
        ("output | sum == 0", r#"["private"]"#, "cannot be judged: "),
        ("output.nothing is defined", "{}", "does not hold"),
        ("output.list | map('nothing') | list == []", r#"{"list":[1]}"#, "cannot be judged: "),
    ] {
        let said = said(assertion, "{}", output);
        assert!(said.starts_with(&format!("assertion 1: {expected}")) && !said.contains("private"), "{said}");
    }
    assert_eq!(said("output.nothing is not defined", "{}", "{}"), "");
}

#[test]
fn an_expression_runs_no_longer_than_its_fuel() {
    let list = |items: usize| json!((0..items).collect::<Vec<_>>()).to_string();
    // Each item is looked for among all: some steps for a short list, and the square of a long one's.
    let squared = "(output | select('in', output) | list | length) == (output | length)";
    assert_eq!(said(squared, "{}", &list(100)), "");
    assert!(said(squared, "{}", &list(8000)).starts_with("assertion 1: cannot be judged: "));
    // What is made costs too, before it is made.
    assert!(said("('x' * 100000000000) != output", "{}", "[]").starts_with("assertion 1: cannot be judged: "));
}

#[test]
fn an_assertion_that_can_never_be_judged_is_refused_when_it_is_written() {
    for (assertion, expected) in [
        ("", "it is empty"),
        ("output.total ==", "assertion 1: output.total ==: "),
        ("outptu.total == 1", "there is no outptu; known are input, output, answer"),
        ("range(3) | list == output", "there is no range"),
        ("1 == 1", "it speaks of nothing"),
        ("output | smu == 1", "there is no filter smu"),
        ("output is numbr", "there is no test numbr"),
        ("output is not numbr", "there is no test numbr"),
    ] {
        let refused = refused_assertion(assertion);
        assert!(refused.contains(expected), "{refused}");
    }
    // What is in a text is no name.
    assertions(&["output.text == 'a | b is c' or output.is == 1 or output.text is string | bool"]).unwrap();
    assert!(refused_assertion(&format!("output == '{}'", "x".repeat(ASSERTION_BYTES_MAX))).contains("the limit is 4096"));
    let many = vec!["output.a"; ASSERTIONS_MAX + 1];
    assert_eq!(assertions(&many).unwrap_err()[0].what, "there are 65; the limit is 64");
    let input = Check::compile(Of::Input, &Required { schema: None, assertions: &["output.a == 1".to_owned()] }).unwrap_err();
    assert!(input[0].what.contains("there is no output; known are input"), "{input:?}");
}

#[test]
fn an_output_is_found_by_its_pointer_and_parsed_from_its_text() {
    let mut validator = outputs(schema(json!({ "required": ["total"] })));
    validator.extract = Extract { pointer: "/choices/0/message/content".to_owned(), parse: Parse::Json };
    let chat = |content: &str| json!({ "choices": [{ "message": { "content": content } }] }).to_string();
    assert_eq!(faults(&validator, &chat(r#"{"total":1}"#)), []);
    assert_eq!(faults(&validator, &chat("{}")), [fault_of("", "required")]);
    let place = "/choices/0/message/content";
    for (body, rule) in [
        (chat("```json\n{\"total\":1}\n```"), "json"),
        (chat(""), "json"),
        (json!({ "choices": [] }).to_string(), "pointer"),
        (json!({ "choices": [{ "message": { "content": { "total": 1 } } }] }).to_string(), "pointer"),
    ] {
        assert_eq!(faults(&validator, &body), [fault_of(place, rule)], "{body}");
    }
    validator.extract.parse = Parse::AsIs;
    assert_eq!(faults(&validator, &json!({ "choices": [{ "message": { "content": { "total": 1 } } }] }).to_string()), []);
    // A stream of events is no JSON.
    assert_eq!(faults(&validator, "data: {\"total\":1}\n\ndata: [DONE]\n\n"), [fault_of("", "json")]);
    let coded = Answer { content_encoding: Some("gzip"), body: b"{\"total\":1}" };
    assert!(validator.check_output(b"{}", coded).unwrap_err().to_string().contains("content coding gzip"));
}

#[test]
fn assertions_see_the_input_and_the_whole_answer() {
    let both = &["output.pages == input.pages", "answer.finish == 'stop'"];
    let mut validator = outputs(assertions(both).unwrap());
    validator.extract = Extract { pointer: "/text".to_owned(), parse: Parse::Json };
    let done = |finish: &str| json!({ "text": r#"{"pages":3}"#, "finish": finish }).to_string();
    assert_eq!(validator.check_output(br#"{"pages":3}"#, answer(&done("stop"))), Ok(()));
    let invalid = validator.check_output(br#"{"pages":4}"#, answer(&done("length"))).unwrap_err();
    assert_eq!(invalid.faults.iter().map(|fault| fault.rule.as_str()).collect::<Vec<_>>(), ["assertion 1", "assertion 2"]);
    // An input that the assertions need is looked at before anything is done.
    assert!(validator.check_input(b"no json").is_err());
    assert!(validator.check_input(br#"{"pages":1e400}"#).is_err());
    assert_eq!(validator.check_input(br#"{"pages":3}"#), Ok(()));
}

#[test]
fn an_input_is_checked_only_if_something_is_required_of_it() {
    assert_eq!(Validator::default().check_input(b"no json"), Ok(()));
    assert_eq!(outputs(schema(json!({}))).check_input(b"no json"), Ok(()));
    let required = Required { schema: Some(br#"{"required":["pages"]}"#), assertions: &["input.pages < 100".to_owned()] };
    let validator = Validator { input: Some(Check::compile(Of::Input, &required).unwrap()), ..Validator::default() };
    assert_eq!(validator.check_input(br#"{"pages":99}"#), Ok(()));
    for (body, rule) in [("{}", "required"), (r#"{"pages":100}"#, "assertion 1"), ("", "json")] {
        let invalid = validator.check_input(body.as_bytes()).unwrap_err();
        assert_eq!(invalid.faults[0].rule, rule);
    }
}

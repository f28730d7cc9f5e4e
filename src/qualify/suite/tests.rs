//! What is a suite, and what is none.

use super::*;

fn load(yaml: &str) -> Result<Suite, Vec<String>> {
    Suite::load(yaml.as_bytes(), None).map_err(|wrong| wrong.iter().map(ToString::to_string).collect())
}

const GOOD: &str = r#"
runs: 2
parameters: { temperature: 0 }
providers: { tiny: { parameters: { temperature: 0.01 } } }
cases:
  - name: adds
    values: { items: [3, 4, 5] }
    input: { messages: [{ role: user, content: "add {{ items | join(', ') }}" }] }
    assert: ["output.total == 12"]
    refuse: [{ output: { total: 13 } }]
    relations:
      - { shuffle: items, same: output.total }
      - { replace: { items: [6, 6] }, same: output.total }
"#;

#[test]
fn requests_are_the_input_with_its_values_and_the_parameters() {
    let suite = load(GOOD).unwrap();
    let case = &suite.cases[0];
    let body = |provider, relation, turn| String::from_utf8(case.request(&suite, provider, relation, turn).unwrap()).unwrap();
    let asks = |text: &str, temperature: &str| {
        format!(r#"{{"messages":[{{"content":"add {text}","role":"user"}}],"temperature":{temperature}}}"#)
    };
    assert_eq!(body("big", None, 0), asks("3, 4, 5", "0"));
    assert_eq!(body("tiny", None, 0), asks("3, 4, 5", "0.01"));
    assert_eq!(body("big", Some(0), 0), asks("4, 5, 3", "0"));
    assert_eq!(body("big", Some(0), 1), asks("5, 3, 4", "0"));
    assert_eq!(body("big", Some(1), 0), asks("6, 6", "0"));
}

#[test]
fn what_would_prove_nothing_is_no_suite() {
    let wrong = |from: &str, to: &str| load(&GOOD.replace(from, to)).unwrap_err().join("; ");
    assert!(load("cases: []").unwrap_err()[0].contains("no cases"));
    assert!(wrong(r#"["output.total == 12"]"#, "[]").contains("asserts nothing"));
    assert!(wrong("    assert: [\"output.total == 12\"]\n", "").contains("asserts nothing"));
    assert!(wrong("total: 13", "total: 12").contains("refuse 1: its assertions and the route accept it"));
    assert!(wrong("items |", "thing |").contains("case \"adds\": input: there is no thing in values; known are items"));
    assert!(wrong("shuffle: items", "shuffle: thing").contains("shuffle = \"thing\""));
    assert!(wrong("runs: 2", "runs: 0").contains("runs = 0"));
    assert!(wrong("runs: 2", "run: 2").contains("run"));
    assert!(wrong("output.total == 12", "output.total = 12").contains("assert"));
    assert!(wrong("runs: 2", "levels: []").contains("levels is empty"));
    let twice = format!("{GOOD}{}", &GOOD[GOOD.find("  - name").unwrap()..]);
    assert!(load(&twice).unwrap_err().join("; ").contains("another case has that name"));
}

#[test]
fn what_is_not_there_is_not_the_same_as_what_is_not_there() {
    let suite = load(GOOD).unwrap();
    let case = &suite.cases[0];
    let comes_to = |same: &str, body: &str| case.comes_to(&Expression::compile(same).unwrap(), b"{}", body.as_bytes());
    for same in [
        "output.total",
        "output.total == 12",
        "output.total > 3",
        "output.total is number",
        "[output.total, 1]",
        "{'a': [output.total]}",
        "output.inner.total",
        "output.items | map(attribute='price')",
        "output['total']",
    ] {
        let why = comes_to(same, r#"{"totl":12,"items":[{}]}"#).unwrap_err();
        assert!(why.contains("cannot be judged"), "{same}: {why}");
    }
    assert_eq!(comes_to("output.total", r#"{"total":null}"#), Ok("null".to_owned()));
    assert_eq!(comes_to("[output.total, {'a': 1}]", r#"{"total":[12]}"#), Ok(r#"[[12],{"a":1}]"#.to_owned()));
    // Where it says what is to be then, it is the author's word.
    assert_eq!(comes_to("output.note | default('')", "{}"), Ok(r#""""#.to_owned()));
    assert_eq!(comes_to("output.note is defined", "{}"), Ok("false".to_owned()));
}

#[test]
fn a_relation_over_what_the_schema_never_allows_is_refused() {
    let schema = r#"{"type":"object","properties":{"total":{"type":"number"},"more":{}},"additionalProperties":false}"#;
    let required = Required { schema: Some(schema.as_bytes()), assertions: &[] };
    let route = Validator { output: Some(Check::compile(Of::Output, &required).unwrap()), ..Validator::default() };
    let load = |same: &str| Suite::load(GOOD.replace("same: output.total", &format!("same: {same}")).as_bytes(), Some(&route));
    assert!(load("output.total").is_ok() && load("output.more.or.less").is_ok());
    let wrong = load("output.totl").unwrap_err();
    assert!(wrong[0].what.contains(r#"same: output.totl: the route's schema allows no "totl" there"#), "{wrong:?}");
}

#[test]
fn a_bomb_of_aliases_is_refused() {
    let mut yaml = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..12 {
        let last = n - 1;
        yaml.push_str(&format!("a{n}: &a{n} [{}]\n", vec![format!("*a{last}"); 10].join(", ")));
    }
    assert!(load(&yaml).is_err());
}

#[test]
fn an_answer_is_judged_where_the_route_looks() {
    let extract = Extract { pointer: "/choices/0/message/content".to_owned(), parse: Parse::Json };
    let route = Validator { extract, ..Validator::default() };
    let suite = Suite::load(GOOD.as_bytes(), Some(&route)).unwrap();
    let case = &suite.cases[0];
    let answer = |text: &str| serde_json::json!({ "choices": [{ "message": { "content": text } }] }).to_string();
    assert_eq!(case.faults(b"{}", answer(r#"{"total":12}"#).as_bytes()), [""; 0]);
    assert_eq!(case.faults(b"{}", answer(r#"{"total":13}"#).as_bytes()).len(), 1);
    assert_eq!(case.shown(answer("no").as_bytes()), "no");
    let same = |text: &str| case.comes_to(&case.relations[0].same, b"{}", answer(text).as_bytes());
    assert_eq!(same(r#"{"total":12}"#), same(r#"{ "total": 12 }"#));
    assert_ne!(same(r#"{"total":12}"#), same(r#"{"total":13}"#));
}

#[test]
fn an_assertion_that_nothing_breaks_is_refused() {
    let with = |assertion: &str| {
        let assertion = serde_json::to_string(&[assertion]).unwrap();
        load(&GOOD.replace(r#"["output.total == 12"]"#, &assertion).replace("    refuse: [{ output: { total: 13 } }]\n", ""))
    };
    for assertion in [
        "output == output",
        "output is defined or true",
        "input.messages | length == 1",
        "output is defined",
        "not (output is undefined)",
        "answer is defined",
        "output in [output]",
        "output.total is undefined or output.total == output.total",
        "output.total is string or output.total is not string",
    ] {
        let wrong = with(assertion).unwrap_err().join("; ");
        assert!(wrong.contains("nothing that an answer could say breaks it"), "{assertion}: {wrong}");
    }
    for assertion in ["true", "1 == 1"] {
        assert!(with(assertion).unwrap_err().join("; ").contains("speaks of nothing"));
    }
    for assertion in [
        "output.total == 12",
        "output.total is undefined or output.total < 1000000",
        "output.total | default(0) <= 12",
        "output.note | default('') != 'draft'",
        "'secret' not in output | string",
        "output.kind is undefined or output.kind in ['a', 'b']",
        "output.a.b.c | default(1) != 2.5",
        "output.a | default(1) == output.b | default(1)",
        "answer.usage.total | default(1) < 5000",
        "output is mapping",
        "output != 'no'",
        "output | length < 100 or output is mapping",
        "output.items | default([]) | map(attribute='price') | sum <= 0",
    ] {
        assert!(with(assertion).is_ok(), "{assertion}: {:?}", with(assertion).err());
    }
}

#[test]
fn an_answer_that_has_no_output_breaks_no_assertion() {
    for (pointer, parse) in [("/0", Parse::AsIs), ("/choices/0/message/content", Parse::Json)] {
        let route = Validator { extract: Extract { pointer: pointer.to_owned(), parse }, ..Validator::default() };
        let load = |assertion: &str| Suite::load(GOOD.replace("output.total == 12", assertion).as_bytes(), Some(&route));
        let wrong = load("answer.usage is defined or true").unwrap_err();
        assert!(wrong.iter().any(|wrong| wrong.what.contains("nothing that an answer could say")), "{wrong:?}");
        assert!(load("output.total == 12").is_ok());
    }
}

#[test]
fn what_is_named_as_bad_shows_that_an_assertion_breaks() {
    let with = |output: &str| {
        let assertion = r#"["output.total | string | reverse != '77031'"]"#;
        load(&GOOD.replace(r#"["output.total == 12"]"#, assertion).replace("{ total: 13 }", output))
    };
    assert!(with("{ total: 12 }").unwrap_err().join("; ").contains("refuse 1"));
    assert!(with("{ total: 13077 }").is_ok());
}

#[test]
fn a_relation_that_is_the_same_whatever_is_answered_is_refused() {
    let with =
        |same: &str| {
            load(&GOOD.replace(
                "replace: { items: [6, 6] }, same: output.total",
                &format!("replace: {{ items: [6, 6] }}, same: {same:?}"),
            ))
        };
    for same in ["input.messages | length", "output == output", "output.total is undefined or true", "[input, 1]"] {
        let wrong = with(same).unwrap_err().join("; ");
        assert!(wrong.contains("replace items: same: ") && wrong.contains("comes to the same whatever"), "{same}: {wrong}");
    }
    for same in ["output", "output.total", "output.total > 12", "output.items | map(attribute='price') | sum", "output | length"]
    {
        assert!(with(same).is_ok(), "{same}: {:?}", with(same).err());
    }
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    let line = |from: &str, to: &str| {
        let wrong = Suite::load(GOOD.replace(from, to).as_bytes(), None).unwrap_err();
        (wrong.first().unwrap().line, wrong.len())
    };
    assert_eq!(line("runs: 2", "runs: 0"), (None, 1));
    assert_eq!(line("runs: 2", "run: 2"), (Some(2), 1));
    assert_eq!(line("{ total: 13 }", "{ total: 12 }"), (Some(10), 1));
    assert_eq!(line("output.total == 12", "output == output"), (Some(9), 2));
    assert_eq!(line("output.total == 12", "output.total = 12"), (Some(9), 1));
    assert_eq!(line("shuffle: items", "shuffle: thing"), (Some(12), 1));
    assert_eq!(line("    refuse: [{ output", "    refuses: [{ output"), (Some(10), 1));
    // Once, however many relations are asked too.
    assert_eq!(line("items |", "thing |"), (Some(6), 1));
    let wrong = Suite::load(GOOD.replace("shuffle: items", "shuffle: thing").as_bytes(), None).unwrap_err();
    assert!(wrong[0].to_string().starts_with("line 12: case \"adds\": shuffle = \"thing\""), "{}", wrong[0]);
}

#[test]
fn a_value_that_is_not_there_is_named_with_those_that_are() {
    let told = |values: &str, text: &str| {
        let yaml = serde_json::json!({ "cases": [{
            "name": "c", "values": serde_json::from_str::<Value>(values).unwrap(), "input": { "t": text }, "assert": ["output.ok"],
        }] });
        load(&yaml.to_string()).map(drop).map_err(|wrong| wrong.join("; "))
    };
    let person = r#"{ "person": { "name": "Ada" }, "all": [{ "n": 1 }] }"#;
    for (values, text, what) in [
        ("{}", "{{ nobody }}", "there is no nobody in values; there are none"),
        (person, "{{ person.nam }}", "there is no person.nam in values; known are all, person"),
        (person, "{{ a }}{{ person.name }}{{ b }}", "there is no a, b in values; known are all, person"),
        (person, "{% for one in all %}{{ one.m }}{% endfor %}", "undefined value"),
    ] {
        let wrong = told(values, text).unwrap_err();
        assert!(wrong.contains(what), "{text}: {wrong}");
    }
    assert_eq!(told(person, "{% for one in all %}{{ one.n }}{{ loop.index }}{% endfor %}{{ person.name | upper }}"), Ok(()));
}

#[test]
fn a_value_of_another_kind_is_told_with_its_key_and_an_example() {
    let line = |from: &str, to: &str| load(&GOOD.replace(from, to)).unwrap_err().join("; ");
    let runs = "line 2: runs: it must be a whole number of 1 or more, as in runs: 5";
    for written in ["runs: two", "runs: -1", "\"runs\": two", "runs: [2]", "runs: 1.5"] {
        assert_eq!(line("runs: 2", written), runs, "{written}");
    }
    let finish = "finish: { pointer: /why, allowed: stop }";
    for (from, to, what) in [
        ("runs: 2", "runs:\n  two", "line 3: runs: it must be a whole number"),
        ("runs: 2", "vary: messages", "line 2: vary: it must be a list of JSON pointers, as in vary: [/messages]"),
        ("runs: 2", "levels: prompt", "line 2: levels: it must be a list of levels"),
        ("runs: 2", finish, "line 2: allowed: it must be a list of words, as in allowed: [stop]"),
        ("[\"output.total == 12\"]", "output.ok", "line 9: assert: it must be a list of expressions"),
        ("[{ output: { total: 13 } }]", "{ output: { total: 13 } }", "line 10: refuse: it must be a list of known-bad outputs"),
        ("{ items: [3, 4, 5] }", "[3]", "line 7: values: it must be values by their names"),
        ("{ temperature: 0 }", "0", "line 3: parameters: it must be members of every request"),
    ] {
        let wrong = line(from, to);
        assert!(wrong.starts_with(what), "{to}: {wrong}");
    }
    assert!(load("cases: none").unwrap_err()[0].contains("cases: it must be a list of cases"));
    assert!(load("cases:\n  - none").unwrap_err()[0].contains("cases: it must be a list of cases"));
    assert!(line("runs: 2", "run: 2").contains("unknown field"));
}

#[test]
fn two_relations_that_change_the_same_have_names_of_their_own() {
    let more = |items: &str| format!("      - {{ replace: {{ items: {items} }}, same: output.total }}\n");
    let suite = load(&format!("{GOOD}{}{}", more("[5, 7]"), more("[4, 8]"))).unwrap();
    let names: Vec<&str> = suite.cases[0].variants().collect();
    assert_eq!(names, ["", "shuffle items", "replace items", "replace items (2)", "replace items (3)"]);
    let told: Vec<String> = suite.cases[0].relations.iter().map(Relation::what).collect();
    assert_eq!(told, names[1..]);
}

/// A suite of one case for a route with this schema: with this assertion, this relation and these known-bad outputs.
fn for_schema(schema: &str, assertion: &str, same: Option<&str>, refuse: &str) -> Result<Suite, String> {
    let check = Check::compile(Of::Output, &Required { schema: Some(schema.as_bytes()), assertions: &[] }).unwrap();
    let route = Validator { output: Some(check), ..Validator::default() };
    let relations =
        same.map(|same| serde_json::json!([{ "shuffle": "items", "same": same }])).unwrap_or_else(|| serde_json::json!([]));
    let case = serde_json::json!({
        "name": "c", "values": { "items": [1, 2] }, "input": { "question": "why so?" }, "assert": [assertion],
        "refuse": serde_json::from_str::<Value>(refuse).unwrap(), "relations": relations,
    });
    let yaml = serde_json::json!({ "cases": [case] }).to_string();
    Suite::load(yaml.as_bytes(), Some(&route))
        .map_err(|wrong| wrong.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
}

const COLOR: &str = r##"{
    "type": "object", "required": ["color"], "additionalProperties": false,
    "properties": {
        "color": { "enum": ["red", "green", "blue", "none"] }, "shade": { "$ref": "#/$defs/shade" }, "kind": { "const": "paint" },
        "note": { "type": "string" }, "code": { "type": "string", "pattern": "^(A1|B2|Q9)7$" },
        "count": { "type": "integer", "minimum": 0 },
        "items": { "type": "array", "items": { "type": "object", "properties": { "price": { "type": "number" } } } }
    },
    "$defs": { "shade": { "enum": ["dark", "light"] } }
}"##;

#[test]
fn an_assertion_that_the_schema_makes_true_is_refused() {
    for assertion in [
        "output.color == output.color",
        "output.color == 'red' or true",
        "output.color is defined",
        "output.color is string",
        "output.color in ['red', 'green', 'blue', 'none']",
        "output.color | length > 0",
        "output.color != 'purple'",
        "output.shade is undefined or output.shade in ['light', 'dark']",
        "output.kind | default('paint') == 'paint'",
        "output.count | default(0) >= 0",
        "output.items | default([]) | length >= 0",
    ] {
        let wrong = for_schema(COLOR, assertion, None, "[]").unwrap_err();
        assert!(wrong.contains("only what the route's schema refuses anyway breaks it"), "{assertion}: {wrong}");
        assert!(wrong.contains("name an output in refuse that the schema accepts and this must refuse"), "{wrong}");
        // What the schema refuses is no evidence either.
        assert!(for_schema(COLOR, assertion, None, r#"[{ "output": { "color": "pink" } }]"#).is_err(), "{assertion}");
    }
    let small = r#"{ "type": "object", "required": ["color"], "properties": { "color": { "type": "string" } } }"#;
    for assertion in ["output['color'] is defined", "output is mapping", "output | length > 0"] {
        assert!(for_schema(small, assertion, None, "[]").is_err_and(|wrong| wrong.contains("refuses anyway")), "{assertion}");
    }
}

#[test]
fn an_assertion_that_says_more_than_the_schema_is_good() {
    for assertion in [
        "output.color == 'red'",
        "output.color in ['red', 'green', 'blue']",
        "output.color != 'none'",
        "output.color | length > 3",
        "output.shade is defined",
        "output.shade | default('') != output.color | default('')  and output.shade is defined",
        "output.note | length < 1500",
        "output.note | default('') | length < 1500",
        "output.note | default('') != 'draft'",
        "'secret' not in output | string",
        "output.note | default('') | lower == output.note | default('')",
        "output.note | default('') != input.question",
        // No text of that form is known: nothing can be said.
        "output.code | default('A17') in ['A17', 'B27', 'Q97']",
        "output.count | default(0) < 1000000",
        "output.count | default(0) % 2 == 0",
        "output.items | default([]) | length <= 40",
        "output.items | default([]) | map(attribute='price') | sum <= 0",
        "answer.usage.total | default(1) < 5000",
        "output.color == 'red' or output.count | default(0) > 3",
    ] {
        let suite = for_schema(COLOR, assertion, None, "[]");
        assert!(suite.is_ok(), "{assertion}: {:?}", suite.err());
    }
    let two = r#"{ "type": "object", "required": ["a", "b"],
        "properties": { "a": { "enum": ["x", "y", "w"] }, "b": { "enum": ["z", "w", "v"] } } }"#;
    assert!(for_schema(two, "output.a != output.b", None, "[]").is_ok());
    let unlikely = r#"{ "type": "object", "required": ["id"],
        "properties": { "id": { "type": "string", "pattern": "^Q9[a-f]{7}$" } } }"#;
    assert!(for_schema(unlikely, "output.id is defined", None, "[]").is_ok());
    // What is named as bad, and accepted by the schema, shows that an assertion says more.
    let reversed = "output.note | default('') | reverse != '77031'";
    assert!(for_schema(COLOR, reversed, None, "[]").is_err());
    assert!(for_schema(COLOR, reversed, None, r#"[{ "output": { "color": "red", "note": "13077" } }]"#).is_ok());
}

#[test]
fn an_assertion_that_can_never_hold_is_refused() {
    for (assertion, why) in [
        ("output.colour == 'red'", "the route's schema allows no \"colour\" there"),
        ("output.colour is undefined", "the route's schema allows no \"colour\" there"),
        ("output.color == 'purple'", "it can never hold: in the route's schema output.color is \"red\" or \"green\""),
        ("'purple' == output.color", "it can never hold"),
        ("output.color in ['purple', 'pink']", "it can never hold"),
        ("output.color == 'red' and output.shade == 'pink'", "it can never hold"),
        ("output.kind == 'ink'", "output.kind is \"paint\""),
        ("output.count == '12'", "it can never hold: the route's schema has type integer there"),
        ("output.note == 12", "it can never hold: the route's schema has type string there"),
    ] {
        let wrong = for_schema(COLOR, assertion, None, "[]").unwrap_err();
        assert!(wrong.contains(why), "{assertion}: {wrong}");
    }
    for assertion in ["output.color == 'red' and output.shade == 'dark'", "output.count == 12", "output.note == '12'"] {
        assert!(for_schema(COLOR, assertion, None, "[]").is_ok(), "{assertion}");
    }
}

#[test]
fn a_relation_that_the_schema_makes_the_same_is_refused() {
    for same in
        ["output.color is defined", "output.color is string", "output.color in ['red', 'green', 'blue', 'none']", "output.kind"]
    {
        let wrong = for_schema(COLOR, "output.color == 'red'", Some(same), "[]").unwrap_err();
        assert!(wrong.contains("it comes to the same for all that the route's schema accepts"), "{same}: {wrong}");
    }
    for same in ["output.color", "output.shade is defined", "output.color == 'red'", "output.code", "output | length"] {
        let suite = for_schema(COLOR, "output.color == 'red'", Some(same), "[]");
        assert!(suite.is_ok(), "{same}: {:?}", suite.err());
    }
}

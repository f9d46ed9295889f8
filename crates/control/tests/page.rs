//! docs/control.md shows requests, answers and events as they are: a line that the code would not
//! read, or not write, is found here.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::Duration;

use godwit_control::asked::{Asked, VERSIONS};
use godwit_control::events;
use godwit_control::messages::{Answer, Cost, MigrationLook, Request};
use godwit_engine::report::{Measures, Progress, Severed};
use godwit_engine::{EngineError, Failure, Phase, Survivor};
use serde_json::Value;

fn page() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/control.md");
    std::fs::read_to_string(path).unwrap()
}

/// The lines of the page's blocks of JSON, each with whether more fields follow.
fn lines(page: &str) -> Vec<(Value, bool)> {
    let blocks = page.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let read = |line: &str| {
        let whole = line.replace(",…}", "}");
        let value = serde_json::from_str(&whole).unwrap_or_else(|error| panic!("{line}: {error}"));
        (value, whole != line)
    };
    blocks.flat_map(str::lines).map(read).collect()
}

fn look() -> Progress {
    let severed = Severed {
        since: Duration::ZERO,
        left: Duration::from_secs(60),
        attempts: 1,
        why: String::new(),
    };
    let line = r#"{"elapsed_ms":1.5,"stage":"pre-copy","round":0,"round_ended":false,
        "sent_bytes":4096,"remaining_bytes":8192,"dirty_bytes_per_second":null,
        "bandwidth_bytes_per_second":null,"expected_downtime_ms":null,"remaining_time":null,
        "throttle":0.0,"guest_speed":null,"delayed_segments":0,"advice":null,"warning":null}"#;
    let look: Progress = serde_json::from_str(line).unwrap();
    Progress { severed: Some(severed), ..look }
}

/// One of each line that the page has to show, as it is written.
fn written() -> Vec<Value> {
    let answer = |answer: Answer| serde_json::to_value(answer).unwrap();
    let [.., version] = VERSIONS;
    let migration = MigrationLook {
        version: Some(version),
        vm: None,
        to: None,
        progress: None,
        settings: Vec::new(),
    };
    let cause = EngineError::Layout(String::new());
    let failure = Failure { phase: Phase::PreCopy, survivor: Survivor::Source, cause };
    vec![
        answer(Answer::Done),
        answer(Answer::Refused { error: String::new() }),
        answer(Answer::Migration(migration)),
        answer(Answer::Watching { version }),
        answer(Answer::Listening { address: String::new() }),
        events::progress(&look()),
        events::turn(&look()),
        events::turn(&Progress { severed: None, ..look() }),
        events::migrated(&Measures::default(), Cost::default()),
        events::failed(&failure),
        events::refused(&""),
    ]
}

/// What kind of line it is.
fn kind(line: &Value) -> String {
    let tags = ["answer", "event", "outcome"].map(|tag| (tag, line[tag].as_str()));
    let found: Vec<String> =
        tags.iter().filter_map(|(tag, word)| word.map(|word| format!("{tag} {word}"))).collect();
    assert_eq!(found.len(), 1, "{line}");
    found[0].clone()
}

fn fields(line: &Value) -> BTreeSet<&String> {
    line.as_object().unwrap().keys().collect()
}

#[test]
fn what_the_page_shows_of_answers_and_events_is_what_is_written() {
    // Mutations: a field gets another name in the code; a kind of line is left out of the page.
    let (page, written) = (page(), written());
    let lines = lines(&page);
    let shown: Vec<_> = lines.iter().filter(|(line, _)| line.get("command").is_none()).collect();
    for (line, more) in &shown {
        let found = written.iter().find(|written| kind(written) == kind(line));
        let written = found.unwrap_or_else(|| panic!("nothing writes {line}"));
        assert!(fields(line).is_subset(&fields(written)), "{line} is written as {written}");
        assert!(*more || fields(line) == fields(written), "{line} is written as {written}");
    }
    for written in &written {
        assert!(shown.iter().any(|(line, _)| kind(line) == kind(written)), "no {written}");
    }
}

#[test]
fn the_requests_on_the_page_are_understood_and_none_is_left_out() {
    let page = page();
    let mut shown = BTreeSet::new();
    for (line, _) in lines(&page).into_iter().filter(|(line, _)| line.get("command").is_some()) {
        let asked = Asked::read(line.to_string().as_bytes());
        match line["version"].as_u64() {
            Some(version) if !VERSIONS.contains(&version) => {
                let error = asked.unwrap_err();
                assert!(
                    page.contains(&format!("{{\"answer\":\"refused\",\"error\":\"{error}\"}}"))
                );
            }
            version => assert_eq!(asked.unwrap().version, version, "{line}"),
        }
        shown.insert(line["command"].as_str().unwrap().to_owned());
    }
    // Who knows all of them is serde.
    let error = serde_json::from_str::<Request>(r#"{"command":"explode"}"#).unwrap_err();
    let known = error.to_string();
    let known = known.split("expected one of").nth(1).unwrap();
    let known: BTreeSet<String> = known.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(known.contains("watch"), "{known:?}");
    assert_eq!(shown, known);
}

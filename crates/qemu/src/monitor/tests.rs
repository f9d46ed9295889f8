//! Typed commands over a stand-in, and events over a socket.

use std::io::Write;

use super::commands::{
    BitmapAction, ExportAdd, QomGet, QueryBlock, QueryCpus, QueryMigrate, QueryStatus, Stop,
    Transaction,
};
use super::stand_in::StandIn;
use super::*;

fn monitor(answers: &[(&str, Value)]) -> Box<dyn Monitor> {
    Box::new(StandIn::new(answers))
}

#[test]
fn what_an_answer_has_beside_is_passed_over() {
    let mut qmp = monitor(&[("query-status", json!({ "status": "paused", "singlestep": false }))]);
    assert_eq!(qmp.run(&QueryStatus).unwrap().status, "paused");
    let migration = qmp.run(&QueryMigrate).unwrap();
    assert!(migration.status.is_empty() && migration.blocked_reasons.is_empty());
}

#[test]
fn what_is_missing_is_told_with_the_command_and_qemus_version() {
    let mut qmp = monitor(&[("query-cpus-fast", json!([{ "qom-path": "/machine/cpu" }]))]);
    assert_eq!(
        qmp.run(&QueryCpus).unwrap_err().to_string(),
        "QEMU 10.0.2 answers query-cpus-fast in a way that godwit does not know \
         (missing field `thread-id`): godwit is made for QEMU 7.2 to 11.1"
    );
    let mut qmp = monitor(&[("query-block", json!({ "what": "else" }))]);
    assert!(qmp.run(&QueryBlock).unwrap_err().to_string().contains("invalid type: map"));
}

#[test]
fn commands_are_written_as_qemu_reads_them() {
    let mut stand_in = StandIn::default();
    let qmp: &mut dyn Monitor = &mut stand_in;
    qmp.run(&Stop).unwrap();
    let (node, name) = ("n1".to_owned(), "b".to_owned());
    let add = BitmapAction::Add { node, name, granularity: 4096, persistent: false };
    qmp.run(&Transaction { actions: vec![add] }).unwrap();
    qmp.run(&ExportAdd::writing("e", "n1", "disk")).unwrap();
    let bitmaps = ["b".to_owned()];
    qmp.run(&ExportAdd::reading("e", "n1", "disk").with_bitmaps(&bitmaps)).unwrap();
    qmp.run(&QomGet::<Value>::new("/machine", "smp")).unwrap();
    let data = json!({ "node": "n1", "name": "b", "granularity": 4096, "persistent": false });
    let actions = json!([{ "type": "block-dirty-bitmap-add", "data": data }]);
    let export = json!({ "type": "nbd", "id": "e", "node-name": "n1", "name": "disk" });
    let with = |more: Value| {
        let mut export = export.clone();
        let more = more.as_object().unwrap().clone();
        export.as_object_mut().unwrap().extend(more);
        ("block-export-add".to_owned(), export)
    };
    let expected = [
        ("stop".to_owned(), Value::Null),
        ("transaction".to_owned(), json!({ "actions": actions })),
        with(json!({ "writable": true })),
        with(json!({ "writable": false, "bitmaps": ["b"] })),
        ("qom-get".to_owned(), json!({ "path": "/machine", "property": "smp" })),
    ];
    assert_eq!(*stand_in.told.lock().unwrap(), expected);
}

/// A monitor over a socket whose other end has said `lines`.
fn heard(lines: &str) -> (Qmp, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(lines.as_bytes()).unwrap();
    (Qmp::over(ours), theirs)
}

#[test]
fn a_wait_for_one_event_loses_no_other() {
    // Mutation: a wait drops what it does not wait for.
    let (mut qmp, _theirs) =
        heard("{\"event\": \"STOP\"}\n{\"event\": \"JOB\"}\n{\"event\": \"RESUME\"}\n");
    let limit = Duration::from_secs(1);
    assert_eq!(qmp.wait_event("RESUME", limit).unwrap().name, "RESUME");
    assert_eq!(qmp.wait_event("STOP", limit).unwrap().name, "STOP");
    let left: Vec<String> =
        qmp.take_events().unwrap().into_iter().map(|event| event.name).collect();
    assert_eq!(left, ["JOB"]);
}

#[test]
fn an_event_of_any_time_is_taken() {
    // Regression: seconds and microseconds together were more than a duration holds.
    let stamp = |seconds: &str, micros: &str| {
        format!("{{\"seconds\": {seconds}, \"microseconds\": {micros}}}")
    };
    let most = u64::MAX.to_string();
    for (seconds, micros) in [(&*most, &*most), (&*most, "1000000"), ("-1", "-1"), ("1e300", "0")] {
        let stamp = stamp(seconds, micros);
        let line = format!("{{\"event\": \"STOP\", \"timestamp\": {stamp}}}\n");
        let before = Instant::now();
        let event = heard(&line).0.wait_event("STOP", Duration::from_secs(1)).unwrap();
        assert!(event.at >= before, "as if it had come just now: {event:?}");
    }
}

#[test]
fn what_a_wait_has_taken_in_is_not_told_again() {
    // Mutation: an event that was taken in stays, and a reset counts twice.
    let (mut qmp, mut theirs) = heard("{\"event\": \"RESET\"}\n{\"event\": \"JOB\"}\n");
    let mut seen = Vec::new();
    let mut look = |event: &Event| {
        seen.push(event.name.clone());
        match event.name.as_str() {
            "RESET" => Seen::TakenIn,
            "STOP" => Seen::Awaited,
            _ => Seen::Kept,
        }
    };
    let monitor: &mut dyn Monitor = &mut qmp;
    let late = monitor.watch("the stop", Duration::from_millis(20), &mut look).unwrap_err();
    assert_eq!(late.to_string(), "QEMU did not answer the stop within 20ms");
    theirs.write_all(b"{\"event\": \"STOP\"}\n").unwrap();
    monitor.watch("the stop", Duration::from_secs(1), &mut look).unwrap();
    assert_eq!(seen, ["RESET", "JOB", "JOB", "STOP"]);
}

#[test]
fn of_events_that_nobody_waits_for_the_oldest_go_first() {
    let mut lines: String = (0..1500).map(|n| format!("{{\"event\": \"E{n}\"}}\n")).collect();
    lines += "{\"event\": \"STOP\"}\n";
    let (mut qmp, _theirs) = heard(&lines);
    let mut looked = 0;
    let mut look = |event: &Event| {
        looked += 1;
        if event.name == "STOP" { Seen::Awaited } else { Seen::Kept }
    };
    let monitor: &mut dyn Monitor = &mut qmp;
    monitor.watch("the stop", Duration::from_secs(5), &mut look).unwrap();
    // Each of them once, also those that made room for others.
    assert_eq!(looked, 1501);
    assert_eq!(qmp.take_events().unwrap().len(), 1023);
}

//! Readers that go away: `godwit status | head -1`, a terminal that is closed.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output, Stdio};

/// Runs godwit with a reader at its standard output, or error, that has gone before anything is
/// written.
fn unread(arguments: &[&str], errors: bool) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if errors {
        command.stderr(writer)
    } else {
        command.stdout(writer)
    };
    command.output().unwrap()
}

#[test]
fn what_only_prints_ends_quietly_when_nobody_reads() {
    // Mutation: the standard macros, which panic (exit 101).
    for arguments in [
        &["simulate", "--list"][..],
        &["simulate", "--scenario", "idle"],
        &["status"],
        &["status", "--json"],
        &["--help"],
        &["--version"],
    ] {
        let output = unread(arguments, false);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {}: {errors}", output.status);
        assert!(errors.is_empty(), "{arguments:?}: {errors}");
    }
}

#[test]
fn a_complaint_that_nobody_reads_changes_no_exit_code() {
    let nowhere = ["--vm", "qemu:/nonexistent/monitor"];
    for (arguments, code) in [
        (&["set", "--migration", "/nonexistent/socket", "patience=5s"][..], 1),
        (&["cancel", "--migration", "/nonexistent/socket"], 1),
        (&[&["migrate"], &nowhere[..], &["--to", "127.0.0.1:1"]].concat(), 1),
        (&[&["receive"], &nowhere[..], &["--listen", "127.0.0.1:0"]].concat(), 1),
        (&[&["plan"], &nowhere[..]].concat(), 1),
        (&["migrate"], 2),
    ] {
        let output = unread(arguments, true);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_told() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_godwit"))
        .args(["simulate", "--list"])
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).starts_with("godwit: cannot write the output: ")
    );
}

//! The bench of the write governor ends when what it measures goes wrong.
//!
//! Regression: the writers were joined on every way out, and they never end. So a bench whose
//! writers did not regain their speed waited for ever, without a word.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The size of the writers' memory, which they map whole.
const MEMORY: u64 = 256 << 20;

struct Memory(PathBuf);

impl Memory {
    fn new(name: &str) -> Self {
        let path =
            Path::new("/dev/shm").join(format!("godwit-bench-test-{name}-{}", std::process::id()));
        File::create(&path).unwrap().set_len(MEMORY).unwrap();
        Self(path)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Eight writers that were asked `questions`: how they ended, and what they said on standard error.
/// They are killed, and there is no status, when they have not ended after ten seconds.
fn ask(memory: &Memory, questions: &str) -> (Option<ExitStatus>, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_governor"))
        .env("GODWIT_BENCH_ROLE", format!("writers {} 8", memory.0.display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(questions.as_bytes()).unwrap();
    let status = await_end(&mut child);
    let mut said = String::new();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    while lines.read_line(&mut said).unwrap() > 0 {}
    (status, said)
}

fn await_end(child: &mut Child) -> Option<ExitStatus> {
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

#[test]
fn writers_that_do_not_regain_their_speed_end_with_the_reason() {
    let memory = Memory::new("speed");
    // No look comes after the end of time, so at none of them the writers are at full speed.
    let (status, said) = ask(&memory, &format!("hurry\nspeed {}\n", u64::MAX));
    assert_eq!(status.expect("they have ended").code(), Some(1));
    assert!(said.contains("the writers have not regained their speed"), "{said}");
}

#[test]
fn a_question_out_of_order_ends_them_as_well() {
    let memory = Memory::new("order");
    let (status, said) = ask(&memory, "speed 0\n");
    assert_eq!(status.expect("they have ended").code(), Some(1));
    assert!(said.contains("nobody has watched"), "{said}");
}

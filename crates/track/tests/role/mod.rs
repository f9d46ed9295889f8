//! This test program once more, as another process: it does what it is told by lines, and answers
//! each by one. It ends with its value.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub(crate) struct Role {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Role {
    /// A process that runs `test` alone, which knows by the environment's `variable` that it is no
    /// test then.
    pub(crate) fn start(test: &str, variable: &str, value: impl AsRef<OsStr>) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(variable, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the process ended");
        line.trim().to_owned()
    }

    /// The harness of the other program speaks first.
    pub(crate) fn hear_until(&mut self, wanted: &str) {
        while self.hear() != wanted {}
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        writeln!(self.stdin, "{command}").unwrap();
        self.hear()
    }

    /// Has it do what it answers by no more than that it has.
    pub(crate) fn tell(&mut self, command: &str) {
        assert_eq!(self.ask(command), "done");
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

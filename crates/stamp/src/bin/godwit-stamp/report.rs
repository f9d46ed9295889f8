//! What is told: findings, progress and the result.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use godwit_stamp::finding::{Finding, Told};
use godwit_units::ByteCount;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Findings that are told in full.
const IN_FULL: u64 = 100;
/// Progress is told of what takes longer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Nanoseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Clean,
    Bugs,
    /// By Ctrl-C.
    Interrupted,
}

impl Outcome {
    pub(crate) fn of(bugs: u64, signals: &Signals) -> Self {
        match bugs {
            1.. => Self::Bugs,
            0 if signals.interrupted() => Self::Interrupted,
            0 => Self::Clean,
        }
    }

    pub(crate) fn exit_code(self) -> ExitCode {
        ExitCode::from(match self {
            Self::Clean => 0,
            Self::Bugs => 3,
            Self::Interrupted => 130,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Bugs => "bugs",
            Self::Interrupted => "interrupted",
        }
    }
}

/// The signals that end the program in good order.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Arc<AtomicBool>,
    terminate: Arc<AtomicBool>,
}

impl Signals {
    pub(crate) fn catch() -> std::io::Result<Self> {
        let signals = Self { interrupt: Arc::default(), terminate: Arc::default() };
        signal_hook::flag::register(SIGINT, Arc::clone(&signals.interrupt))?;
        signal_hook::flag::register(SIGTERM, Arc::clone(&signals.terminate))?;
        Ok(signals)
    }

    pub(crate) fn interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    pub(crate) fn any(&self) -> bool {
        self.interrupted() || self.terminate.load(Ordering::Relaxed)
    }
}

/// Where lines and findings go.
#[derive(Debug)]
pub(crate) struct Report {
    json: bool,
    bugs: AtomicU64,
    findings: Mutex<Vec<Value>>,
}

impl Report {
    /// Lines on standard output, or JSON there and lines on standard error.
    pub(crate) fn new(json: bool) -> Self {
        Self { json, bugs: AtomicU64::new(0), findings: Mutex::default() }
    }

    /// One line.
    pub(crate) fn line(&self, line: &str) {
        if self.json {
            tell!("{line}");
        } else {
            say!("{line}");
        }
    }

    /// One bug, in a place of this name.
    pub(crate) fn bug(&self, finding: &Finding, name: &str) {
        let before = self.bugs.fetch_add(1, Ordering::Relaxed);
        if before >= IN_FULL {
            return;
        }
        let told = Told { finding, name, now: now() };
        self.line(&told.to_string());
        let value = json!({
            "kind": finding.kind.name(),
            "place": name,
            "sector": finding.sector,
            "byte": finding.sector * 512,
            "wrong_sectors": finding.sectors,
            "expected": told.expected(),
            "found": told.found(),
        });
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).push(value);
        if before + 1 == IN_FULL {
            self.line("more bugs are counted and not told one by one");
        }
    }

    /// How many there are.
    pub(crate) fn bugs(&self) -> u64 {
        self.bugs.load(Ordering::Relaxed)
    }

    /// The result: `facts` and what was found, as JSON if asked for, else as `line`.
    pub(crate) fn result(&self, outcome: Outcome, line: &str, mut facts: Value) {
        let bugs = self.bugs();
        let said = match outcome {
            Outcome::Clean => format!("no bug found: {line}"),
            Outcome::Interrupted => format!("interrupted, no bug found until then: {line}"),
            Outcome::Bugs => format!("{bugs} units with a BUG: {line}"),
        };
        self.line(&said);
        if self.json {
            facts["outcome"] = outcome.name().into();
            facts["bugs"] = bugs.into();
            let findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
            facts["findings"] = Value::Array(findings.clone());
            say!("{facts:#}");
        }
    }
}

/// Progress of what may take long, on standard error: a line that changes on a terminal, else a
/// line now and then.
#[derive(Debug)]
pub(crate) struct Progress {
    what: &'static str,
    total: u64,
    started: Instant,
    next: Duration,
    shown: bool,
}

impl Progress {
    /// Of `total` bytes.
    pub(crate) fn new(what: &'static str, total: u64) -> Self {
        Self { what, total, started: Instant::now(), next: PATIENCE, shown: false }
    }

    /// So many bytes are done.
    pub(crate) fn tell(&mut self, done: u64) {
        let elapsed = self.started.elapsed();
        if elapsed < self.next {
            return;
        }
        let terminal = std::io::stderr().is_terminal();
        self.next = elapsed + Duration::from_secs(if terminal { 1 } else { 10 });
        let rate = ByteCount(done).per(elapsed.as_secs_f64());
        let percent = done * 100 / self.total.max(1);
        let text = format!("{} {percent} % of {}, {rate}", self.what, ByteCount(self.total));
        if terminal {
            self.shown = true;
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K{text}");
        } else {
            tell!("{text}");
        }
    }

    /// Takes the line away again.
    pub(crate) fn done(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
        }
    }
}

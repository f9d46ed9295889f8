//! What is printed: progress and results for people (on standard error and output), or lines of JSON for programs.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use godwit_engine::report::{DiskMeasures, Measures, Progress, Stage};
use godwit_engine::{EngineError, Failure, Survivor};
use godwit_units::{ByteCount, PageCount, Rate, format_duration};
use serde_json::{Value, json};

/// Prints one line of JSON to standard output, at once.
pub(crate) fn json_line(value: &Value) {
    let mut out = std::io::stdout().lock();
    // A reader that went away is no reason to stop a migration.
    let _ = writeln!(out, "{value}");
    let _ = out.flush();
}

/// How often a line is printed where lines cannot be rewritten.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Shows a migration in progress.
#[derive(Debug)]
pub(crate) struct Display {
    json: bool,
    terminal: bool,
    line_open: bool,
    last_line: Instant,
    warned: bool,
}

impl Display {
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            terminal: std::io::stderr().is_terminal(),
            line_open: false,
            last_line: Instant::now(),
            warned: false,
        }
    }

    /// Shows one look: as JSON always, on a terminal in place, elsewhere at the end of rounds and every two seconds.
    pub(crate) fn progress(&mut self, progress: &Progress) {
        if self.json {
            json_line(&progress_json(progress));
            return;
        }
        let ends = progress.round_ended;
        if !self.terminal && !ends && self.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        self.last_line = Instant::now();
        let mut err = std::io::stderr().lock();
        if let Some(warning) =
            progress.warning.as_ref().filter(|_| !std::mem::replace(&mut self.warned, true))
        {
            let _ = writeln!(err, "godwit: {warning}");
        }
        let start = if self.terminal { "\r\x1b[K" } else { "" };
        let end = if ends || !self.terminal { "\n" } else { "" };
        let _ = write!(err, "{start}{}{end}", progress_line(progress));
        let _ = err.flush();
        self.line_open = self.terminal && !ends;
    }

    /// Ends a line that is still being rewritten.
    pub(crate) fn finish(&mut self) {
        if std::mem::take(&mut self.line_open) {
            eprintln!();
        }
    }
}

fn optional<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "?".to_owned(), show)
}

/// What is said of disks beside memory: what is sent and what remains of all of them.
fn disks_text(progress: &Progress) -> String {
    if progress.disks.is_empty() {
        return String::new();
    }
    let sent: ByteCount = progress.disks.iter().map(|disk| disk.sent).sum();
    let remaining: ByteCount = progress.disks.iter().map(|disk| disk.remaining).sum();
    let full = if progress.disks.iter().any(|disk| disk.full_pass) { " (full pass)" } else { "" };
    let limit = progress.disk_limit.map(|rate| format!("  disk writes limited to {rate}"));
    format!("  disks: sent {sent}, remaining {remaining}{full}{}", limit.unwrap_or_default())
}

/// One line about a migration in progress.
pub(crate) fn progress_line(progress: &Progress) -> String {
    let throttle = if progress.throttle > 0.0 {
        format!("  throttle {:.0} %", progress.throttle * 100.0)
    } else {
        String::new()
    };
    let throttle = match progress.first_writes {
        Some(rate) => format!("{throttle}  {rate:.0} first writes/s"),
        None => throttle,
    };
    let stage = match progress.stage {
        Stage::PreCopy => format!("round {}", progress.round),
        Stage::StopAndCopy => "last round".to_owned(),
        Stage::Handover => "handover".to_owned(),
    };
    format!(
        "{:>7}  {stage:<10} sent {:>8}  remaining {:>8}  dirty {:>10}  link {:>10}  expected downtime {}{}{throttle}",
        format_duration(progress.elapsed),
        progress.sent,
        progress.remaining,
        optional(progress.dirty_rate, |rate: Rate| rate.to_string()),
        optional(progress.bandwidth, |rate: Rate| rate.to_string()),
        optional(progress.expected_downtime, format_duration),
        disks_text(progress),
    )
}

/// What there is to say beside the line: the throttle, delayed segments, advice, warnings.
pub(crate) fn remarks(progress: &Progress) -> Vec<String> {
    let mut remarks = Vec::new();
    if progress.throttle > 0.0 {
        let seen = progress.guest_speed.map(|speed| format!(", the guest runs at {:.0} %", speed * 100.0));
        remarks.push(format!("throttled by {:.0} %{}", progress.throttle * 100.0, seen.unwrap_or_default()));
    }
    if let Some(rate) = progress.first_writes {
        let seen = progress.guest_speed.map(|speed| format!(", the guest runs at {:.0} %", speed * 100.0));
        remarks.push(format!("governed: {rate:.0} first writes a second{}", seen.unwrap_or_default()));
    }
    for disk in &progress.disks {
        let pass = if disk.full_pass { "in its full pass" } else { "in rounds" };
        let (sent, remaining, size) = (disk.sent, disk.remaining, disk.size);
        remarks.push(format!("disk '{}' of {size}, {pass}: sent {sent}, remaining {remaining}", disk.name));
    }
    if !progress.disks.is_empty() {
        remarks
            .push(format!("memory gets {} parts of the link for each 1024 of disks", progress.memory_share));
    }
    if progress.delayed_segments > 0 {
        remarks.push(format!("{} hot segments are left for later", progress.delayed_segments));
    }
    if let Some(time) = &progress.remaining_time {
        remarks.push(format!(
            "probably done in {} ({} to {})",
            format_duration(time.mid),
            format_duration(time.low),
            format_duration(time.high)
        ));
    }
    remarks.extend(progress.advice.iter().map(|advice| format!("advice: {advice}")));
    remarks.extend(progress.warning.iter().map(|warning| format!("warning: {warning}")));
    remarks
}

fn progress_json(progress: &Progress) -> Value {
    let mut value = json!({ "event": "progress" });
    if let (Value::Object(object), Ok(Value::Object(rest))) = (&mut value, serde_json::to_value(progress)) {
        object.extend(rest);
    }
    value
}

/// The measures for people.
pub(crate) fn measures_text(measures: &Measures, cpu_ms: f64, rss: u64) -> String {
    let parts = &measures.parts;
    let mut list = vec![
        ("drain", parts.drain),
        ("last pages", parts.copy),
        ("save", parts.save),
        ("load", parts.load),
        ("handover", parts.handover),
    ];
    if measures.verified {
        list.insert(2, ("verify", parts.verify));
    }
    let parts: Vec<String> =
        list.iter().map(|(name, time)| format!("{name} {}", format_duration(*time))).collect();
    let slower = if measures.throttled.is_zero() {
        "never slowed".to_owned()
    } else {
        format!(
            "slowed for {}, guest time lost {}, under 50 % for {}, under 10 % for {}",
            format_duration(measures.throttled),
            format_duration(measures.lost),
            format_duration(measures.under_half),
            format_duration(measures.under_tenth),
        )
    };
    let slower = if measures.first_writes_delayed == 0 {
        slower
    } else {
        format!(
            "{slower}; {} first writes waited, vCPUs for {} together, the longest {}",
            measures.first_writes_delayed,
            format_duration(measures.vcpus_waited),
            format_duration(measures.longest_wait),
        )
    };
    let verified = if measures.verified && measures.hinted > PageCount::ZERO {
        let free = measures.hinted.bytes();
        format!(
            "yes: digests of all {} equal on both sides; pages that the guest said are free ({free} at first) count as zero",
            measures.ram
        )
    } else if measures.verified {
        format!("yes: digests of all {} equal on both sides", measures.ram)
    } else {
        "checksums of all frames (--verify compares digests of all memory)".to_owned()
    };
    let free = if measures.hinted == PageCount::ZERO {
        String::new()
    } else {
        format!("; {} left out, which the guest said are free", measures.hinted.bytes())
    };
    let disks: String = measures.disks.iter().map(disk_line).collect();
    let verified = if measures.disks.is_empty() {
        verified
    } else {
        format!("{verified}; disks: checksums of all frames")
    };
    format!(
        "set-up    {}  (a thread of the VM was stopped for {})\n\
         total     {}  in {} rounds\n\
         downtime  {}  ({})\n\
         sent      {} of {} RAM{free}{disks}\n\
         slower    {} with writes tracked; {slower}\n\
         used      {:.0} ms CPU, {} memory at most (this side)\n\
         verified  {verified}",
        format_duration(measures.setup),
        format_duration(measures.tracking_stop),
        format_duration(measures.total),
        measures.rounds,
        format_duration(measures.downtime),
        parts.join(", "),
        measures.sent,
        measures.ram,
        format_duration(measures.tracked),
        cpu_ms,
        ByteCount(rss),
    )
}

/// What moved of a disk, as the rest of a line.
fn disk_line(disk: &DiskMeasures) -> String {
    let data = disk.data.bytes();
    format!(
        ", disk '{}': {} of {} ({data} of data, blocks of {})",
        disk.name, disk.sent, disk.size, disk.granularity
    )
}

/// Where the guest is, and what is to be done, if anything.
pub(crate) fn survivor_text(survivor: Survivor) -> &'static str {
    match survivor {
        Survivor::Source => "the guest is at the source, as it was before",
        Survivor::SourceStopped => {
            "the guest is at the source but could not be made to run again: look at the VM's log, then resume it (QEMU: `migrate_cancel`, then `cont` if it does not run)"
        }
        Survivor::Unknown => {
            "IN DOUBT: the guest is stopped here and perhaps runs at the destination; ask there (QEMU: query-status): if it runs there, quit this VM, if it does not and never will, run this one on (QEMU: `cont`)"
        }
        Survivor::Destination => "the guest runs at the destination; end the stopped VM at the source",
    }
}

/// Tells a failure: one line for people on standard error, and with `json` an object as the last line.
pub(crate) fn failure(failure: &Failure, json: bool) {
    eprintln!("godwit: {failure}; {}", survivor_text(failure.survivor));
    if json {
        let outcome = match (&failure.cause, failure.survivor) {
            (_, Survivor::Unknown) => "in-doubt",
            (EngineError::Cancelled, _) => "cancelled",
            _ => "failed",
        };
        let guest = match failure.survivor {
            Survivor::Source => "source",
            Survivor::SourceStopped => "source-stopped",
            Survivor::Unknown => "unknown",
            Survivor::Destination => "destination",
        };
        json_line(&json!({
            "outcome": outcome,
            "phase": failure.phase.to_string(),
            "guest": guest,
            "error": failure.cause.to_string(),
        }));
    }
}

/// Tells that a VM was refused before anything began.
pub(crate) fn refusal(error: &dyn std::fmt::Display, json: bool) {
    eprintln!("godwit: {error}");
    if json {
        json_line(&json!({ "outcome": "refused", "guest": "untouched", "error": error.to_string() }));
    }
}

//! What is printed: progress and results for people (on standard error and output), or lines of
//! JSON for programs.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use godwit_control::events;
use godwit_engine::report::{DiskMeasures, Measures, PostCopyMeasures, Progress, Severed, Stage};
use godwit_engine::{EngineError, Failure, Survivor, limits};
use godwit_qemu::ListedDisk;
use godwit_units::{ByteCount, PageCount, format_duration};
use serde_json::{Value, json};

use crate::progress::{Table, believable};
use crate::{layout, say};

/// Prints one line of JSON to standard output, at once.
pub fn json_line(value: &Value) {
    println!("{value}");
}

/// Tells of the guest's disks and what becomes of each, before anything is done.
pub fn disks(disks: &[ListedDisk], json: bool) {
    if json && !disks.is_empty() {
        json_line(&json!({ "event": "disks", "disks": disks_json(disks) }));
    }
    if !json {
        eprint!("{}", disk_list(disks));
    }
}

/// A line for each of the guest's disks.
pub fn disk_list(disks: &[ListedDisk]) -> String {
    let line = |disk: &ListedDisk| {
        let ListedDisk { name, size, file, moves, .. } = disk;
        let name = say::line(name);
        if *moves {
            format!("disk '{name}' ({size}) moves along\n")
        } else {
            let file = say::line(file);
            format!("disk '{name}' ({size}) stays; the destination must have the same:\n  {file}\n")
        }
    };
    disks.iter().map(line).collect()
}

/// The same for programs.
pub fn disks_json(disks: &[ListedDisk]) -> Vec<Value> {
    let one = |disk: &ListedDisk| {
        json!({
            "name": disk.name, "size_bytes": disk.size.0, "file": disk.file, "cache": disk.cache,
            "moves": disk.moves,
        })
    };
    disks.iter().map(one).collect()
}

/// How often a line is printed where lines cannot be rewritten.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Shows a migration in progress.
#[derive(Debug)]
pub struct Display {
    json: bool,
    terminal: bool,
    line_open: bool,
    last_line: Instant,
    warned: bool,
    /// Whether the connections were lost when this was last told.
    severed: bool,
    table: Option<Table>,
}

impl Display {
    /// Output for people, or lines of JSON.
    #[must_use]
    pub fn new(json: bool) -> Self {
        Self {
            json,
            terminal: std::io::stderr().is_terminal(),
            line_open: false,
            last_line: Instant::now(),
            warned: false,
            severed: false,
            table: None,
        }
    }

    /// Shows one look: as JSON always, on a terminal in place, elsewhere at the end of rounds and
    /// every two seconds.
    pub fn progress(&mut self, progress: &Progress) {
        let severed = progress.severed.is_some();
        let turns = std::mem::replace(&mut self.severed, severed) != severed;
        if self.json {
            if turns {
                json_line(&events::turn(progress));
            }
            json_line(&events::progress(progress));
            return;
        }
        if turns || severed {
            return self.outage(progress, turns);
        }
        let ends = progress.round_ended;
        if !self.terminal && !ends && self.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        self.last_line = Instant::now();
        // One column stays free: the cursor must not go to the next line, where a rewrite would
        // begin.
        let (width, disks) = (layout::width(&std::io::stderr()) - 1, !progress.disks.is_empty());
        let mut err = std::io::stderr().lock();
        let start = if self.terminal { say::REWRITE } else { "" };
        if let Some(warning) =
            progress.warning.as_ref().filter(|_| !std::mem::replace(&mut self.warned, true))
        {
            let _ = writeln!(err, "{start}{}", layout::wrap("godwit: ", warning, 8, width));
        }
        // The headings come again when the terminal has become wider or narrower.
        if !self.table.as_ref().is_some_and(|table| table.fits(width, disks)) {
            let table = Table::new(width, disks);
            let _ = writeln!(err, "{start}{}", table.head());
            self.table = Some(table);
        }
        let row = self.table.as_ref().map(|table| table.row(progress)).unwrap_or_default();
        let end = if ends || !self.terminal { "\n" } else { "" };
        let _ = write!(err, "{start}{row}{end}");
        let _ = err.flush();
        self.line_open = self.terminal && !ends;
    }

    /// Tells that the connections are lost, how much longer they are tried for, and that they stand
    /// again.
    fn outage(&mut self, progress: &Progress, turns: bool) {
        if !self.terminal && !turns && self.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        self.last_line = Instant::now();
        let start = if self.terminal { "\r\x1b[K" } else { "" };
        let mut err = std::io::stderr().lock();
        let end = match &progress.severed {
            Some(Severed { why, .. }) if turns => {
                let width = layout::width(&std::io::stderr()) - 1;
                let why = layout::wrap("godwit: ", why, 8, width);
                let _ = writeln!(err, "{start}{why}");
                if self.terminal { "" } else { "\n" }
            }
            Some(_) if self.terminal => "",
            Some(_) | None => "\n",
        };
        let _ = write!(err, "{start}{}{end}", outage_text(progress));
        let _ = err.flush();
        self.line_open = end.is_empty();
    }

    /// Ends a line that is still being rewritten.
    pub fn finish(&mut self) {
        if std::mem::take(&mut self.line_open) {
            eprintln!();
        }
    }
}

/// That the connections are lost, or stand again, in a line that fits everywhere.
fn outage_text(progress: &Progress) -> String {
    progress.severed.as_ref().map_or("connected again".to_owned(), |severed| {
        if severed.left > limits::ENDLESS / 2 {
            "connection lost, trying again until it stands".to_owned()
        } else {
            format!("connection lost, trying again for {} s", severed.left.as_secs().max(1))
        }
    })
}

/// How a migration gets on, for `godwit status`: each line with its label.
pub fn status_text(progress: &Progress, width: usize) -> String {
    let stage = match progress.stage {
        Stage::PreCopy => format!("round {}", progress.round),
        Stage::StopAndCopy => "the guest is stopped, the last pages are sent".to_owned(),
        Stage::Handover => "the guest is being handed over".to_owned(),
        Stage::PostCopy => "the guest runs at the destination, and pages follow".to_owned(),
    };
    let mut lines = vec![
        ("stage", format!("{stage}, {} after the start", format_duration(progress.elapsed))),
        ("sent", format!("{} in all; {} of memory left", progress.sent, progress.remaining)),
    ];
    if let Some(Severed { since, attempts, why, .. }) = &progress.severed {
        let (text, since) = (outage_text(progress), format_duration(*since));
        let tried = format!("{text}: lost {since} ago, {attempts} attempts; {why}");
        lines.push(("link", tried));
    }
    let progress = &believable(progress);
    if let (Some(dirty), Some(link)) = (progress.dirty_rate, progress.bandwidth) {
        lines.push((
            "rates",
            format!("the link carries {link} ({}); the guest dirties {dirty}", link.in_bits()),
        ));
    }
    if let Some(downtime) = progress.expected_downtime {
        lines.push(("downtime", format!("{} if it switched over now", format_duration(downtime))));
    }
    lines.extend(remarks(progress));
    lines.iter().map(|(label, text)| labelled(&format!("  {label}"), 12, text, width)).collect()
}

/// A line with its label; what does not fit goes on below the text.
pub fn labelled(label: &str, indent: usize, text: &str, width: usize) -> String {
    layout::wrap(&format!("{label:<indent$}"), text, indent, width) + "\n"
}

/// What there is to say beside figures: the throttle, disks, delayed segments, advice, warnings.
fn remarks(progress: &Progress) -> Vec<(&'static str, String)> {
    let mut remarks = Vec::new();
    let seen =
        progress.guest_speed.map(|speed| format!(", the guest runs at {:.0} %", speed * 100.0));
    let seen = seen.unwrap_or_default();
    if progress.throttle > 0.0 {
        remarks.push(("slowed", format!("throttled by {:.0} %{seen}", progress.throttle * 100.0)));
    }
    if let Some(rate) = progress.dirty_rate_limit {
        remarks.push(("slowed", format!("held to {rate:.0} dirty pages a second{seen}")));
    }
    for disk in &progress.disks {
        let pass = if disk.full_pass { "in its full pass" } else { "in rounds" };
        let (sent, remaining, size) = (disk.sent, disk.remaining, disk.size);
        let text = format!("'{}' of {size}, {pass}: {sent} sent, {remaining} left", disk.name);
        remarks.push(("disk", text));
    }
    if let Some(limit) = progress.disk_limit {
        remarks.push(("disks", format!("the guest's writes to them are limited to {limit}")));
    }
    if !progress.disks.is_empty() {
        let share = progress.memory_share;
        remarks.push(("link", format!("memory gets {share} parts of it for each 1024 of disks")));
    }
    if progress.delayed_segments > 0 {
        remarks.push((
            "later",
            format!("{} hot segments are left for later", progress.delayed_segments),
        ));
    }
    if let Some(time) = &progress.remaining_time {
        let [low, mid, high] = [time.low, time.mid, time.high].map(format_duration);
        remarks.push(("to go", format!("probably {mid} ({low} to {high})")));
    }
    remarks.extend(progress.advice.iter().map(|advice| ("advice", advice.clone())));
    remarks.extend(progress.warning.iter().map(|warning| ("warning", warning.clone())));
    remarks
}

/// Below this a time says nothing to people.
const NOTHING: Duration = Duration::from_micros(1);

/// `times` with their names, without those that say nothing.
fn times(list: &[(&str, Duration)]) -> String {
    let told = list.iter().filter(|(_, time)| *time >= NOTHING);
    let told: Vec<String> =
        told.map(|(name, time)| format!("{name} {}", format_duration(*time))).collect();
    told.join(", ")
}

/// The measures for people, in lines of at most `width` columns.
pub fn measures_text(measures: &Measures, cpu_ms: f64, rss: u64, width: usize) -> String {
    let parts = &measures.parts;
    let parts = times(&[
        ("drain", parts.drain),
        ("last pages", parts.copy),
        ("verify", if measures.verified { parts.verify } else { Duration::ZERO }),
        ("safe", parts.safe),
        ("save", parts.save),
        ("load", parts.load),
        ("handover", parts.handover),
    ]);
    let mut setup = format_duration(measures.setup);
    if measures.tracking_stop >= NOTHING {
        let stop = format_duration(measures.tracking_stop);
        setup += &format!(" (a thread of the VM was stopped for {stop})");
    }
    let lines = [
        ("set-up", setup),
        ("total", format!("{} in {} rounds", format_duration(measures.total), measures.rounds)),
        ("downtime", format!("{} ({parts})", format_duration(measures.downtime))),
        ("sent", sent_text(measures)),
        ("slower", slower_text(measures)),
        ("used", format!("{cpu_ms:.0} ms CPU, {} memory at most (this side)", ByteCount(rss))),
        ("verified", verified_text(measures)),
        ("followed", followed_text(measures)),
        ("severed", severed_text(measures)),
    ];
    let lines = lines.iter().filter(|(_, text)| !text.is_empty());
    lines.map(|(label, text)| labelled(label, 10, text, width)).collect()
}

/// What was put on the wire, all of it first, then what it was for.
fn sent_text(measures: &Measures) -> String {
    let of_disks: ByteCount = measures.disks.iter().map(|disk| disk.sent).sum();
    let mut text = match measures.disks.is_empty() {
        true => format!("{} for {} of RAM", measures.sent, measures.ram),
        false => {
            let memory = measures.sent.saturating_sub(of_disks);
            format!("{} in all: {memory} for {} of RAM", measures.sent, measures.ram)
        }
    };
    if measures.hinted > PageCount::ZERO {
        let free = measures.hinted.bytes();
        text += &format!(" ({free} left out, which the guest said are free)");
    }
    for DiskMeasures { name, size, granularity, sent, data, .. } in &measures.disks {
        let data = data.bytes();
        text += &format!(
            ", {sent} for disk '{name}' of {size} ({data} of data, blocks of {granularity})"
        );
    }
    text
}

/// What followed when the guest ran at the destination already.
fn followed_text(measures: &Measures) -> String {
    measures.post_copy.as_ref().map_or(String::new(), |it| {
        let time = format_duration(it.time);
        let PostCopyMeasures { missing, asked, .. } = it;
        format!("{missing} when the guest ran there, within {time}; {asked} pages were asked for")
    })
}

/// How often connections were lost, if they were.
fn severed_text(measures: &Measures) -> String {
    let Measures { resumptions, severed, sent_again, .. } = measures;
    let times = match resumptions {
        0 => return String::new(),
        1 => "once".to_owned(),
        more => format!("{more} times"),
    };
    let time = format_duration(*severed);
    format!("{times}, for {time} in all, and taken up again; {sent_again} of pages sent again")
}

fn slower_text(measures: &Measures) -> String {
    // Not so where it left at once, or another godwit was at it then.
    let mut text = match measures.tracked {
        Duration::ZERO => String::new(),
        time => format!("{} with writes tracked; ", format_duration(time)),
    };
    if measures.throttled < NOTHING {
        text += "never slowed";
    } else {
        let more = times(&[
            ("guest time lost", measures.lost),
            ("under 50 % for", measures.under_half),
            ("under 10 % for", measures.under_tenth),
        ]);
        let comma = if more.is_empty() { "" } else { ", " };
        text += &format!("slowed for {}{comma}{more}", format_duration(measures.throttled));
    }
    if measures.write_faults_delayed > 0 {
        text += &format!(
            "; {} write faults waited, vCPUs for {} together, the longest {}",
            measures.write_faults_delayed,
            format_duration(measures.vcpus_waited),
            format_duration(measures.longest_wait),
        );
    }
    text
}

fn verified_text(measures: &Measures) -> String {
    let mut text = if measures.verified {
        let looked_back = measures.look_back.map_or(String::new(), |time| {
            format!("; nothing was missed (looked back for {})", format_duration(time))
        });
        format!("yes: digests of all {} equal on both sides{looked_back}", measures.ram)
    } else {
        "checksums of all frames (--verify compares digests of all memory)".to_owned()
    };
    if measures.verified && measures.hinted > PageCount::ZERO {
        let free = measures.hinted.bytes();
        text += &format!("; pages that the guest said are free ({free} at first) count as zero");
    }
    if !measures.disks.is_empty() {
        text += "; disks: checksums of all frames";
    }
    text
}

/// Where the guest is, and what is to be done, if anything.
pub fn survivor_text(survivor: Survivor) -> &'static str {
    match survivor {
        Survivor::Source => "the guest is at the source, as it was before",
        Survivor::SourceStopped => {
            "the guest is at the source but could not be made to run again: look at the VM's log, \
             then resume it (QEMU: `migrate_cancel`, then `cont` if it does not run)"
        }
        Survivor::Unknown => {
            "IN DOUBT: the guest is stopped here and perhaps runs at the destination; godwit \
             recover --vm VM, on both sides, tells who has it and what to do (a microvm says it \
             by godwit microvm status, and runs on by resume --force)"
        }
        Survivor::Destination => {
            "the guest runs at the destination; end the stopped VM at the source"
        }
        Survivor::Ended => {
            "the guest has ended with its VM at the source, before the handover: start it again"
        }
        Survivor::Lost => {
            "the guest is LOST: it ran at the destination while part of its memory was still here; \
             end both VMs, and start it again"
        }
    }
}

/// Tells a failure: one line for people on standard error, and with `json` an object as the last
/// line.
pub fn failure(failure: &Failure, json: bool) {
    let guest = match (&failure.cause, failure.survivor) {
        // A guest that powered off or panicked is not as it was before.
        (EngineError::Befallen(_), Survivor::Source) => "the guest is at the source",
        (_, survivor) => survivor_text(survivor),
    };
    eprintln!("godwit: {}; {guest}", say::line(failure));
    if json {
        json_line(&events::failed(failure));
    }
}

/// Tells that a VM was refused before anything began.
pub fn refusal(error: &dyn std::fmt::Display, json: bool) {
    eprintln!("godwit: {}", say::line(error));
    if json {
        json_line(&events::refused(error));
    }
}

#[cfg(test)]
mod tests;

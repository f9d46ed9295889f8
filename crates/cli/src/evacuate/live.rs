//! The moves under way as a table on the terminal, which is rewritten below what is printed.
//!
//! Each move is asked at its own control socket, by a thread of its own: one that does not answer
//! keeps the table waiting, and never the evacuation.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use godwit_control::client;
use godwit_engine::report::Progress;
use godwit_evacuate::{Report, migration};
use godwit_qemu::run_directory;
use godwit_terminal::progress::{believable, stage};
use godwit_units::{ByteCount, Rate, format_duration};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use super::tell;
use crate::layout::{self, Column};

/// How often moves are asked.
const LOOK: Duration = Duration::from_millis(500);
/// Lines of the screen that are for others than the moves: what was printed last, headings, counts.
const OTHER_LINES: usize = 6;

/// A move under way.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Moving {
    name: String,
    to: String,
    /// Its part of the budget, and the rate that this is.
    share: Option<(f64, Rate)>,
    socket: PathBuf,
}

impl Moving {
    /// Those of the evacuation `name`, by what it says of itself.
    pub(super) fn all(name: &str, report: &Value) -> Vec<Self> {
        let sockets = run_directory::path();
        let budget = report["budget_bytes_per_second"].as_f64().unwrap_or(0.0);
        let vms = report["vms"].as_array().into_iter().flatten();
        let moving = vms.filter(|vm| vm["state"] == "moving").map(|vm| {
            let word = |key: &str| vm[key].as_str().unwrap_or_default().to_owned();
            let rate = vm["bytes_per_second"].as_f64();
            Self {
                socket: sockets.join(format!("{}.sock", migration(name, &word("name")))),
                name: word("name"),
                to: word("to"),
                share: rate.map(|rate| (rate / budget.max(1.0), Rate::from_bytes_per_second(rate))),
            }
        });
        moving.collect()
    }
}

/// How far each of them is; nothing of one that cannot be asked yet, or not any more.
pub(super) fn look(moving: &[Moving]) -> Vec<Option<Progress>> {
    let ask = |it: &Moving| client::migration(&it.socket).ok()?.progress.map(|progress| *progress);
    moving.iter().map(ask).collect()
}

/// A row for each move, and a heading.
pub(super) fn table(moving: &[Moving], progress: &[Option<Progress>], width: usize) -> String {
    if moving.is_empty() {
        return String::new();
    }
    let columns = [
        Column::words("VM", 0),
        Column::words("to", 2),
        Column::words("phase", 1),
        Column::number("sent", 3),
        Column::number("left", 1),
        Column::number("to go", 1),
        Column::number("share", 2),
        Column::number("held to", 4),
    ];
    let cells = |(it, progress): (&Moving, &Option<Progress>)| {
        let now = progress.as_ref().map(believable);
        let of = |show: &dyn Fn(&Progress) -> Option<String>| {
            now.as_ref().and_then(show).unwrap_or_else(|| "-".to_owned())
        };
        let (part, rate) = it.share.unzip();
        vec![
            it.name.clone(),
            it.to.clone(),
            now.as_ref().map_or("setting up".to_owned(), stage),
            of(&|now| Some(now.sent.to_string())),
            of(&|now| Some(left(now).to_string())),
            of(&|now| Some(format_duration(now.remaining_time.as_ref()?.mid))),
            part.map_or("-".to_owned(), |part| format!("{:.0} %", part * 100.0)),
            rate.map_or("-".to_owned(), |rate| rate.to_string()),
        ]
    };
    let rows: Vec<Vec<String>> = moving.iter().zip(progress).map(cells).collect();
    layout::table(&columns, &rows, 0, width)
}

/// What is still to be sent of memory and disks.
fn left(now: &Progress) -> ByteCount {
    now.remaining + now.disks.iter().map(|disk| disk.remaining).sum::<ByteCount>()
}

/// The table of an evacuation. It goes with this value.
pub(super) struct Live {
    bar: ProgressBar,
    reports: Sender<Value>,
}

impl Live {
    /// For the evacuation `name`, where there is a terminal.
    pub(super) fn start(name: &str) -> Option<Self> {
        if !std::io::stderr().is_terminal() {
            return None;
        }
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{msg}").ok()?);
        let (reports, coming) = channel();
        let (name, shown) = (name.to_owned(), bar.clone());
        let draw = move || {
            let mut last = Value::Null;
            loop {
                match coming.recv_timeout(LOOK) {
                    Ok(report) => last = report,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                // Only the newest counts.
                while let Ok(report) = coming.try_recv() {
                    last = report;
                }
                let moving = Moving::all(&name, &last);
                let text = screen(&last, &moving, &look(&moving));
                if shown.is_finished() {
                    return;
                }
                shown.set_message(text);
                std::thread::sleep(LOOK);
            }
        };
        // It ends when there is nobody to report, and is not waited for: a move that does not
        // answer may keep it.
        std::thread::Builder::new().name("live".to_owned()).spawn(draw).ok()?;
        Some(Self { bar, reports })
    }

    /// How far it is.
    pub(super) fn show(&self, report: &Report) {
        let _ = self.reports.send(tell::as_json(report));
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Prints beside the table, which is taken off the screen meanwhile.
pub(super) fn beside(live: Option<&Live>, print: impl FnOnce()) {
    match live {
        Some(live) => live.bar.suspend(print),
        None => print(),
    }
}

/// What is on the screen: the table, as far as there is room, and the counts.
fn screen(report: &Value, moving: &[Moving], progress: &[Option<Progress>]) -> String {
    let err = std::io::stderr();
    // One column stays free: a full line would go on in the next one.
    let (width, height) = (layout::width(&err) - 1, layout::height(&err));
    let room = height.saturating_sub(OTHER_LINES).max(1).min(moving.len());
    let mut text = table(&moving[..room], &progress[..room], width);
    if room < moving.len() {
        text += &format!("and {} more\n", moving.len() - room);
    }
    if report.is_object() {
        let counts = tell::counts(report);
        text += &layout::wrap("", &format!("{counts}; {}", tell::budget(report)), 0, width);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report() -> Value {
        json!({
            "budget_bytes_per_second": 1e8,
            "at_once": 2,
            "vms": [
                { "name": "web01", "state": "moving", "to": "east", "bytes_per_second": 2.5e7 },
                { "name": "db", "state": "moving", "to": "west", "bytes_per_second": null },
                { "name": "cache", "state": "waiting", "to": "west" },
            ],
        })
    }

    fn progress() -> Progress {
        serde_json::from_value(json!({
            "elapsed_ms": 900, "stage": "pre-copy", "round": 2, "round_ended": false,
            "sent_bytes": 3 << 20, "remaining_bytes": 5 << 20, "dirty_bytes_per_second": null,
            "bandwidth_bytes_per_second": 1e9, "expected_downtime_ms": null,
            "remaining_time": { "low_ms": 1000.0, "mid_ms": 2000.0, "high_ms": 3000.0 },
            "throttle": 0.0, "guest_speed": null, "delayed_segments": 0, "advice": null,
            "warning": null,
        }))
        .unwrap()
    }

    #[test]
    fn a_row_tells_of_a_move_that_is_under_way_and_of_one_that_sets_up() {
        let moving = Moving::all("weekly", &report());
        assert!(moving[0].socket.ends_with("weekly.web01.sock"), "{:?}", moving[0].socket);
        let text = table(&moving, &[Some(progress()), None], 120);
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows.len(), 3, "{text}");
        let first = "web01 east round 2 3MiB 5MiB 2s 25 % 23.8MiB/s";
        assert_eq!(rows[1].join(" "), first);
        assert_eq!(rows[2].join(" "), "db west setting up - - - - -");
    }

    #[test]
    fn the_screen_is_as_wide_and_high_as_the_terminal() {
        // What is no terminal has 80 columns and 24 lines.
        let mut many = report();
        let vm = many["vms"][0].clone();
        many["vms"] = (0..40)
            .map(|at| {
                let mut vm = vm.clone();
                vm["name"] = json!(format!("{at}-{}", "x".repeat(45)));
                vm
            })
            .collect();
        let moving = Moving::all("weekly", &many);
        let text = screen(&many, &moving, &vec![Some(progress()); 40]);
        assert!(text.lines().count() < 24 && text.contains("and 22 more"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() < 80), "{text}");
        assert!(text.contains("0 moved, 40 on their way"), "{text}");
    }
}

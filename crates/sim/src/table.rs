//! Outcomes as text: the rounds of one, or several side by side.

use std::fmt::Write as _;
use std::time::Duration;

use godwit_units::{ByteCount, Rate, format_duration};

use crate::outcome::{End, Outcome};

fn time(seconds: f64) -> String {
    format_duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

fn bytes(count: f64) -> String {
    ByteCount(count as u64).to_string()
}

fn end(outcome: &Outcome) -> &'static str {
    match outcome.end {
        End::Moved => "moved",
        End::GaveUp => "gave up",
        End::Stayed => "failed, stayed",
        End::InDoubt => "in doubt",
        End::Endless => "endless",
    }
}

/// The rounds of `outcome`, one a line, and its measures.
#[must_use]
pub fn rounds(outcome: &Outcome) -> String {
    let disks = outcome.disk_sent > 0.0;
    let mut text = String::new();
    let mut line = |cells: [&str; 8], more: [&str; 3]| {
        let [a, b, c, d, e, f, g, h] = cells;
        let _ = write!(text, "{a:>5} {b:>8} {c:>8} {d:>9} {e:>9} {f:>8} {g:>6} {h:>8}");
        if disks {
            let _ = write!(text, " {:>6} {:>9} {:>9}", more[0], more[1], more[2]);
        }
        text.push('\n');
    };
    line(
        ["round", "start", "time", "sent", "left", "throttle", "speed", "expected"],
        ["share", "disk left", "limit"],
    );
    let many = outcome.rounds.len() > 40;
    for (number, row) in outcome.rounds.iter().enumerate() {
        if many && number >= 20 && number + 10 < outcome.rounds.len() {
            if number == 20 {
                line(["…", "", "", "", "", "", "", ""], ["", "", ""]);
            }
            continue;
        }
        let limit =
            row.disk_limit.map_or_else(|| "-".to_owned(), |r| Rate::from_bytes_per_second(r).to_string());
        line(
            [
                &row.round.to_string(),
                &time(row.start),
                &time(row.seconds),
                &bytes(row.sent),
                &bytes(row.remaining),
                &format!("{:.1} %", row.throttle * 100.0),
                &format!("{:.0} %", row.speed * 100.0),
                &row.expected.map_or_else(|| "-".to_owned(), time),
            ],
            [&row.memory_share.to_string(), &bytes(row.disk_remaining), &limit],
        );
    }
    let _ = write!(
        text,
        "{} after {}, downtime {}, {} of memory in {} passes",
        end(outcome),
        time(outcome.total),
        time(outcome.downtime),
        bytes(outcome.sent),
        outcome.memory_passes,
    );
    if disks {
        let _ = write!(text, ", {} of disks", bytes(outcome.disk_sent));
    }
    let _ = writeln!(
        text,
        "; work lost {}, under 10 % for {}, under 50 % for {}",
        time(outcome.lost_work),
        time(outcome.under_10),
        time(outcome.under_50)
    );
    if let Some(reason) = &outcome.reason {
        let _ = writeln!(text, "{reason}");
    }
    text
}

/// Several outcomes of one scenario, one a line, as a table that Markdown understands.
#[must_use]
pub fn comparison(what: &str, outcomes: &[(String, Outcome)]) -> String {
    let mut text = format!(
        "| {what} | end | time | downtime | memory sent | passes | work lost | under 10 % | under 50 % | throttle |\n\
         |---|---|---|---|---|---|---|---|---|---|\n"
    );
    for (name, outcome) in outcomes {
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {} | {} | {} | {} | {:.1} % |",
            end(outcome),
            time(outcome.total),
            time(outcome.downtime),
            bytes(outcome.sent),
            outcome.memory_passes,
            time(outcome.lost_work),
            time(outcome.under_10),
            time(outcome.under_50),
            outcome.throttle * 100.0,
        );
    }
    text
}

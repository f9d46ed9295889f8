//! Simulated migrations as text: the rounds of one, or several side by side.

use std::time::Duration;

use godwit_sim::{End, Outcome};
use godwit_units::{ByteCount, Rate, format_duration};

use crate::layout::{Column, table, wrap};

fn time(seconds: f64) -> String {
    format_duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

fn bytes(count: f64) -> String {
    ByteCount(count as u64).to_string()
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn end(outcome: &Outcome) -> &'static str {
    match outcome.end {
        End::Moved => "moved",
        End::GaveUp => "gave up",
        End::Stayed => "failed",
        End::InDoubt => "in doubt",
        End::Endless => "endless",
    }
}

/// Rounds that are shown at the beginning and at the end of a long list.
const SHOWN: (usize, usize) = (20, 10);

/// The rounds of `outcome`, one a line, and its measures.
pub(super) fn rounds(outcome: &Outcome, width: usize) -> String {
    let mut columns = vec![
        Column::number("round", 0),
        Column::number("start", 6),
        Column::number("time", 1),
        Column::number("sent", 5),
        Column::number("left", 2),
        Column::number("throttle", 3),
        Column::number("speed", 7),
        Column::number("expected", 4),
    ];
    let disks = outcome.disk_sent > 0.0;
    if disks {
        let more = [
            Column::number("disk left", 2),
            Column::number("memory share", 8),
            Column::number("disk limit", 9),
        ];
        columns.extend(more);
    }
    let limit = |limit: Option<f64>| {
        limit.map_or_else(|| "-".to_owned(), |rate| Rate::from_bytes_per_second(rate).to_string())
    };
    let count = outcome.rounds.len();
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (number, row) in outcome.rounds.iter().enumerate() {
        if count > SHOWN.0 + 2 * SHOWN.1 && number >= SHOWN.0 && number + SHOWN.1 < count {
            if number == SHOWN.0 {
                rows.push(
                    [vec!["...".to_owned()], vec![String::new(); columns.len() - 1]].concat(),
                );
            }
            continue;
        }
        let mut cells = vec![
            row.round.to_string(),
            time(row.start),
            time(row.seconds),
            bytes(row.sent),
            bytes(row.remaining),
            percent(row.throttle),
            format!("{:.0} %", row.speed * 100.0),
            row.expected.map_or_else(|| "-".to_owned(), time),
        ];
        if disks {
            cells.extend([
                bytes(row.disk_remaining),
                row.memory_share.to_string(),
                limit(row.disk_limit),
            ]);
        }
        rows.push(cells);
    }
    let of_disks =
        if disks { format!(", {} of disks", bytes(outcome.disk_sent)) } else { String::new() };
    let text = format!(
        "{} after {}, downtime {}, {} of memory in {} passes{of_disks}; work lost {}, under 10 % \
         for {}, under 50 % for {}",
        end(outcome),
        time(outcome.total),
        time(outcome.downtime),
        bytes(outcome.sent),
        outcome.memory_passes,
        time(outcome.lost_work),
        time(outcome.under_10),
        time(outcome.under_50),
    );
    let followed = outcome.post_copy.map_or_else(String::new, |followed| {
        let follows = if outcome.moved() { "followed within" } else { "had not followed after" };
        format!(
            "; the guest left before {} of memory, which {follows} {}: it waited for {:.0} pages, \
             {} of its work",
            bytes(followed.missing),
            time(followed.seconds),
            followed.faults,
            time(followed.lost_work),
        )
    });
    let text = text + &followed;
    let reason = outcome.reason.as_ref().map(|reason| wrap("", reason, 2, width) + "\n");
    format!(
        "{}{}\n{}",
        table(&columns, &rows, 0, width),
        wrap("", &text, 2, width),
        reason.unwrap_or_default()
    )
}

/// Several outcomes of one scenario, one a line. `what` is what differs.
pub(super) fn comparison(what: &str, outcomes: &[(String, Outcome)], width: usize) -> String {
    let columns = [
        Column::words(what, 0),
        Column::words("end", 1),
        Column::number("time", 2),
        Column::number("downtime", 3),
        Column::number("sent", 6),
        Column::number("passes", 8),
        Column::number("lost", 5),
        Column::number("<10 %", 7),
        Column::number("<50 %", 9),
        Column::number("throttle", 4),
    ];
    let row = |(name, outcome): &(String, Outcome)| {
        vec![
            name.clone(),
            end(outcome).to_owned(),
            time(outcome.total),
            time(outcome.downtime),
            bytes(outcome.sent),
            outcome.memory_passes.to_string(),
            time(outcome.lost_work),
            time(outcome.under_10),
            time(outcome.under_50),
            percent(outcome.throttle),
        ]
    };
    let legend = "sent: memory on the wire; lost: work of the guest; <10 %: time in which it ran \
                  under 10 % of its speed";
    table(&columns, &outcomes.iter().map(row).collect::<Vec<_>>(), 0, width)
        + &wrap("", legend, 2, width)
        + "\n"
}

#[cfg(test)]
mod tests {
    use godwit_sim::{Followed, NAMES, named, run};

    use super::*;

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
    }

    #[test]
    fn tables_fit_80_columns() {
        for (name, _) in
            NAMES.iter().filter(|(name, _)| ["busy", "disk-share", "huge"].contains(name))
        {
            let outcome = run(&named(name).unwrap());
            let outcome = Outcome { post_copy: Some(Followed::default()), ..outcome };
            for width in [40, 80, 120] {
                let text = rounds(&outcome, width);
                assert!(widest(&text) <= width, "{text}");
                let unfinished = Outcome { end: End::Endless, ..outcome.clone() };
                let [text, other] = [text, rounds(&unfinished, width)]
                    .map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
                assert!(text.contains("which followed within"), "{text}");
                assert!(other.contains("which had not followed after"), "{other}");
                let extreme = Outcome {
                    total: 1e9,
                    downtime: 1e9,
                    lost_work: 1e9,
                    sent: 1e18,
                    ..outcome.clone()
                };
                let outcomes = vec![
                    ("auto-converge".to_owned(), outcome.clone()),
                    ("max".to_owned(), extreme),
                ];
                let text = comparison("throttle", &outcomes, width);
                assert!(widest(&text) <= width, "{text}");
            }
        }
    }

    #[test]
    fn a_comparison_is_a_table_that_people_read() {
        let outcome = run(&named("idle").unwrap());
        let text = comparison("throttle", &[("adaptive".to_owned(), outcome)], 80);
        assert!(!text.contains('|'), "{text}");
        assert!(text.starts_with("throttle  end    "), "{text}");
    }
}

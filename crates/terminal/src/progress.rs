//! A migration in progress as a table that grows by a row a round, and whose last row is rewritten
//! in between.
//!
//! Columns have fixed widths, so that nothing jumps while it is rewritten. At 80 columns there is
//! room for what matters most; wider terminals show more.

use godwit_engine::report::{Progress, RemainingTime, Stage};
use godwit_units::{ByteCount, Rate, format_duration};

use crate::layout::{Column, fitting};

/// A column, how wide it is, and what it shows.
struct Shown {
    column: Column<'static>,
    width: usize,
    cell: fn(&Progress) -> String,
}

const GAP: usize = 2;

const COLUMNS: [Shown; 15] = [
    shown(Column::number("time", 0), 6, |now| format_duration(now.elapsed)),
    shown(Column::words("stage", 1), 9, stage),
    shown(Column::number("sent", 10), 7, |now| now.sent.to_string()),
    shown(Column::number("left", 2), 7, |now| now.remaining.to_string()),
    shown(Column::number("disk left", 3), 9, disks_left),
    shown(Column::number("dirtied", 9), 9, |now| known(now.dirty_rate, |rate| rate.to_string())),
    shown(Column::number("link", 6), 9, |now| known(now.bandwidth, |rate| rate.to_string())),
    shown(Column::number("downtime", 4), 8, |now| known(now.expected_downtime, format_duration)),
    shown(Column::number("slowed", 7), 8, slowed),
    shown(Column::number("speed", 11), 5, |now| {
        known(now.guest_speed, |speed| format!("{:.0} %", speed * 100.0))
    }),
    shown(Column::number("to go", 5), 12, |now| known(now.remaining_time.as_ref(), bounds)),
    shown(Column::number("later", 8), 5, later),
    shown(Column::number("in bits", 12), 8, |now| known(now.bandwidth, Rate::in_bits)),
    shown(Column::number("writes", 13), 9, |now| {
        known(now.dirty_rate_limit, |rate| format!("{rate:.0}/s"))
    }),
    shown(Column::number("disk limit", 14), 10, |now| {
        known(now.disk_limit, |rate| rate.to_string())
    }),
];

const fn shown(column: Column<'static>, width: usize, cell: fn(&Progress) -> String) -> Shown {
    Shown { column, width, cell }
}

/// Of less nobody can tell what the link carries.
const SAID_LITTLE: ByteCount = ByteCount(64 << 10);

/// `now` without what was reckoned from next to nothing: a first round over empty disks sends some
/// hundred bytes, by which the rest would take days.
pub fn believable(now: &Progress) -> Progress {
    let mut now = now.clone();
    if now.sent < SAID_LITTLE && now.remaining > SAID_LITTLE {
        (now.bandwidth, now.expected_downtime, now.remaining_time) = (None, None, None);
    }
    now
}

/// What it is, or a dash as long as nobody knows.
fn known<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

/// What is going on, in a word or two.
pub fn stage(now: &Progress) -> String {
    match now.stage {
        Stage::PreCopy if now.severed.is_some() => "severed".to_owned(),
        Stage::PreCopy => format!("round {}", now.round),
        Stage::StopAndCopy => "stopped".to_owned(),
        Stage::Handover => "handover".to_owned(),
        Stage::PostCopy if now.severed.is_some() => "severed".to_owned(),
        Stage::PostCopy => "follows".to_owned(),
    }
}

/// From when to when it will probably end: a unit that both have stands once.
fn bounds(time: &RemainingTime) -> String {
    let [low, high] = [time.low, time.high].map(format_duration);
    let unit = |text: &str| text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (figure, its_unit) = low.split_at(low.len() - unit(&low));
    match low == high {
        true => low,
        false if high.ends_with(its_unit) && unit(&high) == its_unit.len() => {
            format!("{figure}-{high}")
        }
        false => format!("{low}-{high}"),
    }
}

/// Segments that are too hot to be sent now.
fn later(now: &Progress) -> String {
    if now.delayed_segments == 0 { "-".to_owned() } else { now.delayed_segments.to_string() }
}

fn disks_left(now: &Progress) -> String {
    now.disks.iter().map(|disk| disk.remaining).sum::<ByteCount>().to_string()
}

fn slowed(now: &Progress) -> String {
    match now.dirty_rate_limit {
        Some(_) if now.throttle == 0.0 => "governed".to_owned(),
        _ if now.throttle > 0.0 => format!("{:.0} %", now.throttle * 100.0),
        _ => "-".to_owned(),
    }
}

/// The table of one migration.
#[derive(Debug)]
pub struct Table {
    width: usize,
    disks: bool,
}

impl Table {
    /// For lines of at most `width` columns.
    pub fn new(width: usize, disks: bool) -> Self {
        Self { width, disks }
    }

    /// Whether it was made for this.
    pub fn fits(&self, width: usize, disks: bool) -> bool {
        self.width == width && self.disks == disks
    }

    /// The headings.
    pub fn head(&self) -> String {
        let heads: Vec<String> = COLUMNS.iter().map(|shown| shown.column.head.to_owned()).collect();
        self.line(&heads)
    }

    /// The row for `now`.
    pub fn row(&self, now: &Progress) -> String {
        let now = believable(now);
        let cells: Vec<String> = COLUMNS.iter().map(|shown| (shown.cell)(&now)).collect();
        self.line(&cells)
    }

    /// One line. A value that is wider than its column takes the room of the least important ones.
    fn line(&self, cells: &[String]) -> String {
        let in_use: Vec<usize> = (0..COLUMNS.len())
            .filter(|&i| self.disks || !COLUMNS[i].column.head.starts_with("disk"))
            .collect();
        let columns: Vec<Column<'_>> = in_use.iter().map(|&i| COLUMNS[i].column).collect();
        let nominal: Vec<usize> = in_use.iter().map(|&i| COLUMNS[i].width).collect();
        let widths: Vec<usize> = in_use
            .iter()
            .zip(&nominal)
            .map(|(&i, width)| cells[i].chars().count().max(*width))
            .collect();
        // Columns that do not fit with their usual widths are in no line at all, so that lines stay
        // alike.
        let usual = fitting(&columns, &nominal, GAP, self.width);
        let now: Vec<usize> = (0..columns.len()).filter(|&i| usual[i]).collect();
        let chosen = |list: &[usize]| -> Vec<usize> { now.iter().map(|&i| list[i]).collect() };
        let columns: Vec<Column<'_>> = now.iter().map(|&i| columns[i]).collect();
        let (in_use, widths) = (chosen(&in_use), chosen(&widths));
        let fit = fitting(&columns, &widths, GAP, self.width);
        let text: Vec<String> = (0..columns.len())
            .filter(|&i| fit[i])
            .map(|i| columns[i].cell(&cells[in_use[i]], widths[i]))
            .collect();
        text.join(&" ".repeat(GAP)).trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use godwit_engine::report::DiskProgress;

    use super::*;

    /// The longest that anything can come to.
    fn extreme(disks: bool) -> Progress {
        let time = Duration::from_secs(35 * 60 + 54);
        let bytes = ByteCount(1023 << 40);
        let rate = Rate::from_bytes_per_second(1023.0 * f64::from(1 << 30));
        Progress {
            elapsed: time,
            stage: Stage::PreCopy,
            round: 4_000_000,
            round_ended: false,
            sent: bytes,
            remaining: bytes,
            dirty_rate: Some(rate),
            bandwidth: Some(rate),
            expected_downtime: Some(time),
            remaining_time: Some(RemainingTime { low: time, mid: time, high: time }),
            throttle: 0.999,
            dirty_rate_limit: Some(12_345_678.0),
            guest_speed: Some(1.0),
            delayed_segments: 4096,
            disks: if disks { vec![disk(bytes); 3] } else { Vec::new() },
            memory_share: 1024,
            disk_limit: Some(rate),
            advice: Some("advice".to_owned()),
            warning: Some("warning".to_owned()),
            severed: None,
        }
    }

    fn disk(bytes: ByteCount) -> DiskProgress {
        DiskProgress {
            name: "disk0".to_owned(),
            size: bytes,
            sent: bytes,
            remaining: bytes,
            full_pass: true,
        }
    }

    #[test]
    fn rows_fit_whatever_the_values() {
        for width in [20, 40, 79, 80, 100, 120, 160] {
            for disks in [false, true] {
                let table = Table::new(width, disks);
                let usual = Progress { round: 3, throttle: 0.0, ..extreme(disks) };
                for line in [table.head(), table.row(&extreme(disks)), table.row(&usual)] {
                    assert!(line.chars().count() <= width, "{width}: {line:?}");
                }
            }
        }
    }

    #[test]
    fn the_narrow_table_has_what_matters_and_the_wide_one_more() {
        let narrow = |disks| Table::new(79, disks).head();
        let words =
            |line: String| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(words(narrow(false)), "time stage left link downtime slowed to go later");
        assert_eq!(words(narrow(true)), "time stage left disk left link downtime to go");
        assert!(
            words(Table::new(160, true).head())
                .ends_with("slowed speed to go later in bits writes disk limit")
        );
        let row = Table::new(79, false).row(&Progress { round: 3, ..extreme(false) });
        assert_eq!(words(row), "35.9min round 3 1023TiB 1023GiB/s 35.9min 100 % 35.9min 4096");
        let governed = Progress { throttle: 0.0, round: 3, ..extreme(false) };
        assert!(words(Table::new(79, false).row(&governed)).ends_with("governed 35.9min 4096"));
        let early =
            Progress { dirty_rate: None, bandwidth: None, expected_downtime: None, ..governed };
        assert!(words(Table::new(79, false).row(&early)).ends_with("- - governed 35.9min 4096"));
        // 184 bytes in 84 ms made 39 h of a guest of 227 MiB.
        let little = Progress { sent: ByteCount(184), round: 3, ..extreme(false) };
        assert!(words(Table::new(79, false).row(&little)).ends_with("1023TiB - - 100 % - 4096"));
        let all = Progress { remaining: ByteCount(4096), ..little };
        assert!(words(Table::new(79, false).row(&all)).ends_with("35.9min 100 % 35.9min 4096"));
    }

    #[test]
    fn when_it_ends_is_told_with_its_bounds_and_what_waits_by_its_number() {
        // Mutations: one of the bounds alone; a unit of one that is not the other's goes.
        let time = |low, high| RemainingTime {
            low: Duration::from_millis(low),
            mid: Duration::from_millis(low + 1),
            high: Duration::from_millis(high),
        };
        let told = [(9100, 14_200), (900, 14_200), (5000, 5000), (30_000, 900_000)];
        let told = told.map(|(low, high)| bounds(&time(low, high)));
        assert_eq!(told, ["9.1-14.2s", "900ms-14.2s", "5s", "30s-15min"]);
        let now = Progress { delayed_segments: 7, ..extreme(false) };
        let now = Progress { remaining_time: Some(time(9100, 14_200)), round: 3, ..now };
        assert!(Table::new(79, false).row(&now).ends_with("   9.1-14.2s      7"));
        let none = Progress { delayed_segments: 0, remaining_time: None, ..now };
        assert!(Table::new(79, false).row(&none).ends_with("           -      -"));
    }
}

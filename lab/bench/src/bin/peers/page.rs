//! The section of docs/benchmarks.md, and its charts, made from the rows that are kept.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::Context;
use godwit_bench::chart::Chart;
use godwit_bench::report::{Report, least, most, with_table};
use godwit_bench::table::figure;

use crate::cells::{CELLS, Cell};
use crate::contestants::Contestant;
use crate::rows::{Figure, Moves, Row, latest};
use crate::verdicts;

const PAGE: &str = "docs/benchmarks.md";
const BEGIN: &str = "<!-- made by `make bench-peers`: begin -->\n";
const END: &str = "<!-- made by `make bench-peers`: end -->";

/// The figures of the tables: what stands over them, and digits behind the point.
const COLUMNS: [(&str, Figure, usize, f64); 9] = [
    ("total s", Figure::Total, 2, 1e-3),
    ("downtime ms", Figure::Downtime, 1, 1.0),
    ("by events ms", Figure::Events, 1, 1.0),
    ("wire MiB", Figure::Wire, 0, 1.0),
    ("CPU s", Figure::Cpu, 2, 1.0),
    ("vCPUs s", Figure::Vcpus, 2, 1.0),
    ("lost before s", Figure::LostBefore, 2, 1.0),
    ("during s", Figure::LostDuring, 2, 1.0),
    ("after s", Figure::LostAfter, 2, 1.0),
];
/// Of these the spread is shown, too.
const WITH_SPREAD: [Figure; 3] = [Figure::Total, Figure::Downtime, Figure::Cpu];

/// Writes the section, and draws the charts.
pub(crate) fn write() -> anyhow::Result<()> {
    let rows = latest()?;
    let page = std::fs::read_to_string(PAGE).with_context(|| format!("cannot read {PAGE}"))?;
    std::fs::write(PAGE, with_table(&page, BEGIN, END, &section(&rows))?)?;
    draw(&rows)?;
    println!("section written to {PAGE}, charts to docs/charts");
    Ok(())
}

fn measured<'a>(rows: &[Row]) -> impl Iterator<Item = &'a Cell> {
    CELLS.iter().filter(|cell| rows.iter().any(|row| row.cell == cell.name()))
}

/// The section.
fn section(rows: &[Row]) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "\n{}\n", conditions(rows));
    let mut report = Report::new("peers");
    measured(rows).for_each(|cell| verdicts::enter(cell, rows, &mut report));
    let _ = writeln!(text, "{}", summary(&report));
    for cell in measured(rows) {
        let _ = writeln!(text, "{}", table(cell, rows));
    }
    let _ = writeln!(
        text,
        "![total time](charts/peers-total.svg)\n\n![downtime](charts/peers-downtime.svg)\n"
    );
    text
}

/// When, where and with what it was measured.
fn conditions(rows: &[Row]) -> String {
    let all = |of: fn(&Row) -> &String| {
        let words: BTreeSet<&str> = rows.iter().map(|row| of(row).as_str()).collect();
        words.into_iter().collect::<Vec<_>>().join("; ")
    };
    let loads: Vec<f64> = rows.iter().map(|row| row.load).collect();
    wrapped(&format!(
        "Measured on {}, with {} and {}; TCP: {}; runs begun at {} UTC. {} moves. Load average of \
         the host before each round: {:.1} to {:.1}, the contestants' own work included.",
        all(|row| &row.machine),
        all(|row| &row.qemu),
        all(|row| &row.godwit),
        all(|row| &row.tcp),
        all(|row| &row.run),
        rows.len(),
        least(&loads),
        most(&loads)
    ))
}

/// The verdicts, misses first.
fn summary(report: &Report) -> String {
    let mut targets: Vec<_> = report.targets().iter().collect();
    targets.sort_by_key(|target| (target.met, target.within_noise));
    let mut text = "| target | value | rounds | limit | verdict |\n\
                    | --- | ---: | ---: | ---: | --- |\n"
        .to_owned();
    for target in targets {
        let spread = target.spread.map_or(String::new(), |[least, most]| {
            format!("{} to {}", number(least, 2), number(most, 2))
        });
        let (value, verdict) = (number(target.value, 2), target.verdict());
        let verdict = if target.met { verdict.to_owned() } else { format!("**{verdict}**") };
        let _ = writeln!(
            text,
            "| {} | {value} | {spread} | {} | {verdict} |",
            target.name, target.limit
        );
    }
    text
}

/// The table of a cell.
fn table(cell: &Cell, rows: &[Row]) -> String {
    let name = cell.name();
    let what = format!("{}; {}", cell.guest.what(), cell.link.what());
    let mut text = format!("### {name}\n\n{}\n\n| who | finished |", wrapped(&(what + ".")));
    COLUMNS.iter().for_each(|(head, ..)| _ = write!(text, " {head} |"));
    let _ = write!(text, "\n| --- | ---: |{}\n", " ---: |".repeat(COLUMNS.len()));
    let mut reasons = Vec::new();
    for who in cell.contestants {
        let moves = Moves::of(rows, &name, who.name());
        if moves.count() == 0 {
            continue;
        }
        let bold = if who.style().is_none() { "**" } else { "" };
        let (who, finished, count) = (who.name(), moves.finished(), moves.count());
        let _ = write!(text, "| {bold}{who}{bold} | {finished} of {count} |");
        for (_, of, digits, scale) in COLUMNS {
            let _ = write!(text, " {} |", shown(&moves, of, digits, scale));
        }
        text.push('\n');
        reasons.extend(moves.reasons().into_iter().map(|why| format!("{who}: {why}")));
    }
    for reason in reasons {
        let _ = write!(text, "\n{}\n", wrapped(&reason));
    }
    text
}

/// A median, and its spread where there is one to show.
fn shown(moves: &Moves<'_>, of: Figure, digits: usize, scale: f64) -> String {
    let median = moves.median(of);
    // That a move never ends is said once.
    if median.is_infinite() && of != Figure::Total {
        return "–".to_owned();
    }
    let median = number(median * scale, digits);
    if !WITH_SPREAD.contains(&of) || moves.count() < 2 {
        return median;
    }
    let [least, most] = moves.spread(of).map(|value| number(value * scale, digits));
    format!("{median} ({least}..{most})")
}

fn number(value: f64, digits: usize) -> String {
    if value.is_infinite() { "never".to_owned() } else { figure(value, digits) }
}

/// `text` in lines of at most 100 columns.
fn wrapped(text: &str) -> String {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 100 {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.join("\n")
}

/// A chart of total times, and one of downtimes.
fn draw(rows: &[Row]) -> anyhow::Result<()> {
    let charts = [
        ("peers-total", "Total time", "ms", Figure::Total),
        ("peers-downtime", "Downtime, as the guest has it", "ms", Figure::Downtime),
    ];
    for (name, title, axis, of) in charts {
        let groups = measured(rows).map(|cell| {
            let own = |who: Contestant| Moves::of(rows, &cell.name(), who.name()).median(of);
            let best = |post_copy| {
                verdicts::best(rows, cell, of, post_copy).map_or(f64::NAN, |(_, median)| median)
            };
            let values =
                vec![own(Contestant::Godwit), best(false), best(true), own(Contestant::Plain)];
            (cell.name(), values)
        });
        let series = ["godwit", "QEMU's best pre-copy", "QEMU's best way", "QEMU plain"];
        let chart = Chart {
            title: title.to_owned(),
            axis: axis.to_owned(),
            series: series.map(str::to_owned).into(),
            groups: groups.collect(),
        };
        chart.write(name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_section_tells_what_never_ended_and_why_and_misses_come_first() {
        let row = |contestant: &str, total: Option<f64>| -> Row {
            let (fate, why) = match total {
                Some(_) => ("moved", None),
                None => ("late", Some("not done within 30 s")),
            };
            let figures =
                total.map_or(json!({}), |total| json!({ "total": total, "downtime": 5.0 }));
            serde_json::from_value(json!({
                "run": "2026-11-26 07:00:00", "machine": "here", "qemu": "QEMU 10.0.2",
                "godwit": "godwit 0.1.0", "tcp": "cubic", "load": 0.5, "cell": "speed/loop",
                "contestant": contestant, "round": 1, "place": 1, "fate": fate, "why": why,
                "figures": figures, "bugs": 0, "own_words": null
            }))
            .unwrap()
        };
        let rows = [row("godwit", Some(2000.0)), row("QEMU plain", None)];
        let text = section(&rows);
        assert!(text.contains("| **godwit** | 1 of 1 | 2.00 | 5.0 |"), "{text}");
        assert!(text.contains("| QEMU plain | 0 of 1 | never | – |"), "{text}");
        assert!(text.contains("QEMU plain: not done within 30 s"), "{text}");
        // Of who never ends nobody takes the measure; without rounds all is within the noise.
        assert!(text.contains("speed/loop: godwit / QEMU plain: total time | 0.00 |"), "{text}");
        let missed = text.find("**MISSED").unwrap();
        assert!(missed < text.find("| met").unwrap(), "{text}");
    }

    #[test]
    fn lines_are_wrapped() {
        let text = wrapped(&"word ".repeat(50));
        assert!(text.lines().all(|line| line.len() <= 100) && text.lines().count() == 3);
        assert_eq!(wrapped("one two"), "one two");
    }

    #[test]
    fn what_never_ends_is_told_as_such() {
        assert_eq!(number(f64::INFINITY, 2), "never");
        assert_eq!((number(f64::NAN, 2).as_str(), number(1.25, 1).as_str()), ("-", "1.2"));
    }
}

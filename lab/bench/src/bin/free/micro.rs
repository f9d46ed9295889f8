//! A microvm whose guest hints its free pages, beside the same whose free pages are holes already,
//! so that only used ones are there to send; and beside one that has used no more than that, all of
//! it in one piece.

use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_bench::report::{Better, Report, median};
use godwit_bench::table::{Column, Table, figure};
use godwit_testbed::{Godwit, MicroVm, Movable, kvm_for};
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(120);
/// More often than the others: a move takes a fraction of a second.
const MOVES: usize = 5;

/// 1 GiB of memory of which 128 MiB are in use at a time, while pages come and go.
const BUSY: &[&str] =
    &["--memory", "1GiB", "--mode", "churn", "--working-set", "128MiB", "--rate", "1000"];
const WAYS: [(&str, &[&str]); 4] = [
    ("896 MiB were used, hints", &["--fill", "896MiB", "--balloon", "hints"]),
    ("the same, free pages holes", &["--fill", "896MiB", "--balloon", "reporting"]),
    ("the same, no balloon", &["--fill", "896MiB"]),
    ("128 MiB were used at all", &["--fill", "130MiB"]),
];
/// The guest of the second way has given back what it does not use.
const GIVEN_BACK: u64 = 144 << 20;

pub(crate) fn compare(rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    if !kvm_for("bench free: microvm") {
        return Ok(());
    }
    let godwit = Godwit::built()?;
    println!("\nmicrovm: 1 GiB guest, 128 MiB in use, {} moves over loopback", rounds * MOVES);
    TABLE.print_head();
    let mut totals = [const { Vec::new() }; WAYS.len()];
    let mut list = Vec::new();
    for _ in 0..rounds * MOVES {
        for ((name, options), totals) in WAYS.iter().zip(&mut totals) {
            let row = one_move(&godwit, options)?;
            totals.push(row[0]);
            list.push(json!({ "way": name, "total_ms": row[0], "sent_mib": row[1],
                "hinted_mib": row[2] }));
        }
    }
    for ((name, _), totals) in WAYS.iter().zip(&totals) {
        let of = |key: &str| {
            let own =
                list.iter().filter(|row| row["way"] == *name).filter_map(|row| row[key].as_f64());
            median(&own.collect::<Vec<_>>())
        };
        TABLE.print(&(name, [median(totals), of("sent_mib"), of("hinted_mib")]));
    }
    report.figure("microvm_hints_to_one_piece", median(&totals[0]) / median(&totals[3]));
    let ratio = median(&totals[0]) / median(&totals[1]);
    let name = "microvm: total time with hints / of sending only used pages";
    report.target(name, ratio, 1.1, Better::Lower);
    report.figure("microvm", list);
    Ok(())
}

/// Medians of what [`one_move`] returns.
const TABLE: Table<(&str, [f64; 3])> = Table(&[
    Column { head: "", width: 28, cell: |row| row.0.to_owned() },
    Column { head: "total ms", width: 9, cell: |row| figure(row.1[0], 1) },
    Column { head: "sent MiB", width: 9, cell: |row| figure(row.1[1], 1) },
    Column { head: "hinted MiB", width: 12, cell: |row| figure(row.1[2], 1) },
]);

/// Total time, MiB sent and MiB hinted of one move.
fn one_move(godwit: &Godwit, options: &[&str]) -> anyhow::Result<[f64; 3]> {
    let options = [BUSY, options].concat();
    let source = MicroVm::start(godwit, &options)?;
    let destination = MicroVm::start(godwit, &[&options[..], &["--incoming"]].concat())?;
    source.wait_ready(LIMIT)?;
    source.wait_for_heartbeats_after(Instant::now(), 5, LIMIT)?;
    if options.contains(&"reporting") {
        source.await_held(LIMIT, &|held| held.0 <= GIVEN_BACK)?;
    }
    let (receive, address) = godwit.receive(&destination, &[])?;
    let ended = godwit.migrate(&source, &address, &["--compression", "none"])?.wait(LIMIT)?;
    let last = ended.last();
    ensure!(last["outcome"] == "migrated", "{last} {}", ended.errors);
    receive.wait(LIMIT)?;
    destination.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    let bugs = [source.bugs(), destination.bugs()].concat();
    ensure!(bugs.is_empty(), "{bugs:?}");
    let number = |key: &str| last[key].as_f64().unwrap_or(f64::NAN);
    Ok([number("total_ms"), number("sent_bytes") / 1_048_576.0, number("hinted_pages") / 256.0])
}

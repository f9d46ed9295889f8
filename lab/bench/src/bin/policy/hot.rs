//! A guest that gives nine writes of ten to a tenth of its memory, moved with and without delaying
//! its hot segments.
//!
//! Nothing is throttled. The link is such that both ways end: what is hot fits into the downtime,
//! and what is not is written at a part of what the link carries. A microvm, since its guest runs
//! at full speed here.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report, median_of};
use godwit_bench::table::{Column, Table, figure};
use godwit_testbed::{BeaconPlace, Godwit, MicroVm, Movable, Observer, kvm_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
const MIB: f64 = 1_048_576.0;
/// 480 MiB are filled and written; 48 MiB are the hot tenth.
const GUEST: [&str; 10] = [
    "--memory",
    "512MiB",
    "--fill",
    "480MiB",
    "--working-set",
    "480MiB",
    "--mode",
    "hot-tenth",
    "--rate",
    RATE,
];
const RATE: &str = "600000";
const LINK: [&str; 8] = [
    "--max-bandwidth",
    "256MiB/s",
    "--downtime-limit",
    "490ms",
    "--throttle",
    "off",
    "--compression",
    "none",
];
const WAYS: [(&str, &str); 2] =
    [("nothing delayed", "delay-hot-percent=0"), ("default", "delay-hot-percent=30")];

/// The figures of one move.
struct Move {
    way: &'static str,
    total_ms: f64,
    sent: f64,
    gap_ms: f64,
    rounds: f64,
    own_words: Value,
}

/// Moves the guest `rounds` times each way and enters figures and targets into `report`.
pub(crate) fn compare(rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    if !kvm_for("the hot/cold guest") {
        return Ok(());
    }
    let godwit = Godwit::built()?;
    println!("\nmicrovm, {}; {}", GUEST.join(" "), LINK.join(" "));
    TABLE.print_head();
    let mut moves = Vec::new();
    for _ in 0..rounds {
        for (way, setting) in WAYS {
            let one = one_move(&godwit, way, setting)?;
            TABLE.print(&one);
            moves.push(one);
        }
    }
    let median = |way: &str, figure: fn(&Move) -> f64| {
        median_of(moves.iter().filter(|one| one.way == way), figure)
    };
    println!("medians:");
    for (way, _) in WAYS {
        TABLE.print(&Move {
            way,
            total_ms: median(way, |one| one.total_ms),
            sent: median(way, |one| one.sent),
            gap_ms: median(way, |one| one.gap_ms),
            rounds: median(way, |one| one.rounds),
            own_words: Value::Null,
        });
    }
    let ratio =
        |figure: fn(&Move) -> f64| median("default", figure) / median("nothing delayed", figure);
    report.target(
        "hot/cold guest, delayed / not: bytes sent",
        ratio(|one| one.sent),
        0.7,
        Better::Lower,
    );
    report.target(
        "hot/cold guest, delayed / not: total time",
        ratio(|one| one.total_ms),
        1.0,
        Better::Lower,
    );
    let entry = |one: &Move| {
        json!({
            "way": one.way, "total_ms": one.total_ms, "sent_bytes": one.sent,
            "gap_ms": one.gap_ms, "own_words": one.own_words,
        })
    };
    report.figure("hot_moves", Value::Array(moves.iter().map(entry).collect()));
    Ok(())
}

const TABLE: Table<Move> = Table(&[
    Column { head: "", width: 18, cell: |one| one.way.to_owned() },
    Column { head: "total ms", width: 8, cell: |one| figure(one.total_ms, 0) },
    Column { head: "sent MiB", width: 9, cell: |one| figure(one.sent / MIB, 0) },
    Column { head: "gap ms", width: 7, cell: |one| figure(one.gap_ms, 0) },
    Column { head: "rounds", width: 7, cell: |one| figure(one.rounds, 0) },
]);

fn one_move(godwit: &Godwit, way: &'static str, setting: &str) -> anyhow::Result<Move> {
    let source = MicroVm::start(godwit, &GUEST)?;
    source.wait_ready(LIMIT)?;
    source.wait_for_heartbeats_after(Instant::now(), 10, LIMIT)?;
    let place = BeaconPlace::find(source.ram_file())?;
    let destination = MicroVm::start(godwit, &[&GUEST[..], &["--incoming"]].concat())?;
    let observer = Observer::start(place, source.ram_file(), destination.ram_file())?;
    let (receive, address) = godwit.receive(&destination, &[])?;
    let options = [&LINK[..], &["--set", setting]].concat();
    let ended = godwit.migrate(&source, &address, &options)?.wait(LIMIT)?;
    let last = ended.last();
    ensure!(last["outcome"] == "migrated", "{last} {}", ended.errors);
    receive.wait(LIMIT)?;
    destination.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    let seen = observer.finish()?;
    ensure!(!seen.ran_on_both, "the guest counted on both sides");
    let bugs = [source.bugs(), destination.bugs()].concat();
    ensure!(bugs.is_empty(), "{bugs:?}");
    let figure = |key: &str| last[key].as_f64().unwrap_or(f64::NAN);
    Ok(Move {
        way,
        total_ms: figure("total_ms"),
        sent: figure("sent_bytes"),
        gap_ms: seen.switchover.context("the guest was not seen to move")?.length.as_secs_f64()
            * 1e3,
        rounds: figure("rounds"),
        own_words: last.clone(),
    })
}

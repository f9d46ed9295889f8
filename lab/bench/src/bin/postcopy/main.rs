//! The benchmark of post-copy: a guest that writes as fast as it can leaves at once, and its memory
//! follows; moved by godwit, and by QEMU's own post-copy with preemption.
//!
//! Keeps it fair: one QEMU, the same machines and the same work for both, anonymous memory, TCP
//! loopback, no bandwidth limit; a freshly started guest for each move; pairs, of which each begins
//! with the other one. Both leave as early as they can. All that is compared is seen by bystanders:
//! the stop and the start of the guest are QEMU's own events, how long its processors wait for
//! pages is the kernel's account, its work is its own counter in its memory. The targets are ratios
//! of medians of one run, and were fixed before any.
//!
//! Keeps one promise: a move that fails or cannot be measured is told and counted, and is in no
//! median; where most moves of one side are such, there is no verdict, but an error.

mod cases;
mod moves;
mod qemu;

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::arguments::at_least_once;
use godwit_bench::fixture::check_room;
use godwit_bench::report::{Better, Report, machine};
use godwit_bench::waits::Waits;
use godwit_testbed::{Accelerator, Godwit, QemuBuild, kvm_for};
use godwit_units::ByteCount;
use rustix::thread::gettid;

const MIB: u64 = 1 << 20;
/// What a move takes beside the guest's memory: the guest's kernel, four processes, and notes.
const BESIDE: u64 = 512 * MIB;

/// A guest that runs elsewhere before its memory is there: godwit beside QEMU's own post-copy.
#[derive(Parser)]
struct Options {
    /// Pairs of moves under each of KVM and TCG
    #[arg(long, value_name = "N", default_value = "5", value_parser = at_least_once())]
    rounds: usize,

    /// The guest's memory
    #[arg(long, value_name = "MIB", default_value = "1024", value_parser = at_least_once())]
    memory: usize,

    /// Of it, what holds data
    #[arg(long, value_name = "MIB", default_value = "512", value_parser = at_least_once())]
    fill: usize,

    /// Of that, what is written
    #[arg(long, value_name = "MIB", default_value = "256", value_parser = at_least_once())]
    working_set: usize,

    /// One more option for godwit migrate, as in --with=--compression=none
    #[arg(long, value_name = "OPTION")]
    with: Vec<String>,

    /// Guests under this alone: kvm, tcg
    #[arg(long, value_name = "WHICH", value_parser = ["kvm", "tcg"])]
    under: Option<String>,
}

fn main() -> anyhow::Result<()> {
    let Options { rounds, memory, fill, working_set, with, under } = Options::parse();
    let [memory, fill, working_set] = [memory, fill, working_set].map(|size| size as u64 * MIB);
    ensure!(working_set <= fill, "--working-set: at most what --fill says");
    ensure!(fill < memory, "--fill: less than what --memory says");
    check_room(memory + fill, BESIDE, "less with --memory and --fill")?;
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let godwit = Godwit::built()?;
    // Before anything takes long: on a host that does not tell, nothing can be measured.
    Waits::of(&[gettid().as_raw_nonzero().get()])?.end()?;

    println!("{}", machine());
    let mut report = Report::new("postcopy");
    report.figure("qemu", build.to_string());
    report.figure("rounds", rounds);
    report.figure("with", with.as_slice());
    let mut tally = cases::Tally::default();
    for (name, accelerator) in [("kvm", Accelerator::Kvm), ("tcg", Accelerator::Tcg)] {
        if under.as_ref().is_some_and(|under| under != name) {
            continue;
        }
        if accelerator == Accelerator::Kvm && !kvm_for("post-copy under KVM") {
            continue;
        }
        let sizes = [memory, fill, working_set].map(ByteCount);
        let config = cases::config(&build, accelerator, sizes);
        let by = (&godwit, with.as_slice());
        let compared = cases::compare((name, &config), rounds, by, &mut tally, &mut report);
        compared.with_context(|| format!("guests under {name}"))?;
    }
    ensure!(!tally.moves.is_empty(), "nothing was moved");
    let [godwits, qemus] = tally.failures();
    report.figure("moves of QEMU's own that failed", qemus);
    report.target("moves of godwit that failed", godwits as f64, 0.0, Better::Lower);
    report.target("BUG lines of guests, all moves", tally.bugs() as f64, 0.0, Better::Lower);
    report.figure("moves", serde_json::to_value(&tally.moves)?);
    report.figure("failed", serde_json::to_value(&tally.failed)?);
    report.finish()?;
    Ok(())
}

//! The benchmark of VMs as everyone runs them: anonymous memory on huge pages, under KVM and TCG,
//! moved by godwit and by QEMU itself in each of its fast ways.
//!
//! Keeps it fair: one QEMU, the same machines and the same work for all, TCP loopback, no bandwidth
//! limit, a downtime limit of 300 ms; a freshly started guest for each move; each round begins with
//! another contestant. A move is over when the guest runs at the destination, by QEMU's own time
//! stamp. The work counted is that of all threads but the guest's processors, in both QEMUs and in
//! both godwit processes. What the guest felt is seen from outside, the same way for everybody, and
//! for some seconds longer than the move takes. The targets are ratios against multifd (time, work)
//! and against QEMU's best way (downtime, the guest's loss), figure by figure, and were fixed
//! before any full run.

mod cases;
mod moves;

use anyhow::{Context, ensure};
use clap::Parser;
use godwit_bench::arguments::at_least_once;
use godwit_bench::report::Report;
use godwit_testbed::{Accelerator, Godwit, QemuBuild};

/// Anonymous memory on huge pages, under KVM and TCG, moved by godwit and by QEMU itself.
#[derive(Parser)]
struct Options {
    /// Rounds of each case
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_once())]
    rounds: usize,

    /// This case alone; more than once for several
    #[arg(long, value_name = "CASE", value_parser = cases::NAMES)]
    only: Vec<String>,

    /// Guests under this alone: kvm, tcg
    #[arg(long, value_name = "WHICH", value_parser = ["kvm", "tcg"])]
    under: Option<String>,
}

fn main() -> anyhow::Result<()> {
    let Options { rounds, only, under } = Options::parse();
    let wanted = |case: &str| only.is_empty() || only.iter().any(|name| name == case);
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    ensure!(
        enabled.is_ok_and(|text| !text.contains("[never]")),
        "this host gives no transparent huge pages: write madvise to \
         /sys/kernel/mm/transparent_hugepage/enabled"
    );
    let godwit = Godwit::built()?;
    let mut report = Report::new("any");
    report.figure("qemu", build.to_string());
    report.figure("rounds", rounds);
    let mut rows = Vec::new();
    for case in cases::CASES.iter().filter(|case| wanted(case.name)) {
        for (name, accelerator) in [("kvm", Accelerator::Kvm), ("tcg", Accelerator::Tcg)] {
            if under.as_ref().is_some_and(|under| under != name) {
                continue;
            }
            if accelerator == Accelerator::Kvm && !godwit_testbed::kvm_for("cases under KVM") {
                continue;
            }
            let under = cases::Under { name, accelerator };
            let context = || format!("case {} under {name}", case.name);
            let moved = cases::compare(case, under, rounds, (&build, &godwit), &mut report);
            rows.extend(moved.with_context(context)?);
        }
    }
    cases::targets_of_all(&rows, &mut report);
    report.figure("moves", serde_json::to_value(&rows)?);
    report.finish()?;
    Ok(())
}

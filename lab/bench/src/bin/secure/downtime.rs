//! A guest of QEMU under KVM, moved with keys and without, by turns.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use godwit_bench::figures::Figures;
use godwit_bench::fixture::{Fixture, Moved};
use godwit_bench::godwit::Attempt;
use godwit_bench::report::{Better, Report, median};
use godwit_testbed::{Accelerator, Backend, Godwit, GuestConfig, QemuBuild, VmConfig};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(300);
/// Pairs for each round of the other parts: a downtime differs by as much as is looked for here,
/// and a move takes a second.
const PAIRS: usize = 4;

pub(crate) fn run(report: &mut Report, keys: &Path, rounds: usize) -> anyhow::Result<()> {
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    let config = VmConfig::new(&build, GuestConfig::standard()).with_backend(Backend::Anonymous);
    let config = VmConfig { accelerator: Accelerator::Kvm, ..config };
    let keys = keys.to_str().context("a directory whose name is text")?;
    let godwit = Godwit::built()?;
    let pairs = rounds * PAIRS;
    println!("\na guest that writes, {build} under KVM, medians of {pairs} pairs");
    let mut downtimes = [const { Vec::new() }; 2];
    for round in 0..pairs {
        for turn in 0..2 {
            let who = (round + turn) % 2;
            // The source QEMU must live on to be asked what it used.
            let options: &[&str] = &["--keep-source", "--keys", keys][..1 + 2 * who];
            let mut fixture = Fixture::new(config.clone(), LIMIT);
            let outcome = fixture.one_move(|source, destination| {
                let attempt = Attempt::within(LIMIT, &godwit, source, destination, options)?;
                attempt.moved()?;
                Ok(Moved::by_godwit(&attempt, Value::Null))
            })?;
            downtimes[who].push(Figures::of("godwit", &outcome).downtime_ms);
        }
    }
    let of = |who: usize| median(&downtimes[who]);
    println!("downtime: {:.1} ms in the clear, {:.1} ms encrypted", of(0), of(1));
    report.figure("downtime_ms", json!({ "clear": downtimes[0], "encrypted": downtimes[1] }));
    let differences: Vec<f64> =
        downtimes[0].iter().zip(&downtimes[1]).map(|(clear, keys)| keys - clear).collect();
    let more = median(&differences);
    println!("{more:.1} ms more in the median pair; all: {differences:.1?}");
    report.target("downtime: ms more by encryption", more, 3.0, Better::Lower);
    Ok(())
}

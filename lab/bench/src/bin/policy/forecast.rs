//! Ten forecasts by `godwit plan`, each against the migration that then took place.
//!
//! The guest goes on with what it did when it was looked at; link and settings are those of the
//! forecast. Total time and downtime are godwit's own words on both sides.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bench::report::{Better, Report};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Godwit, GuestConfig, MicroVm, Movable, QemuBuild, TestVm, VmConfig, kvm_for};
use godwit_units::ByteCount;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);

/// Microvms: mode, working set, link.
const MICROVMS: [(&str, &str, &str); 6] = [
    ("idle", "64MiB", "1Gbit"),
    ("rate", "64MiB", "1Gbit"),
    ("full", "128MiB", "128MiB/s"),
    ("full", "256MiB", "2Gbit"),
    ("hot-cold", "256MiB", "1Gbit"),
    ("sequential", "128MiB", "1Gbit"),
];
/// QEMU guests: mode, working set in MiB, link.
const QEMUS: [(Mode, u64, &str); 4] = [
    (Mode::Idle, 64, "1Gbit"),
    (Mode::Rate, 128, "1Gbit"),
    (Mode::Full, 128, "128MiB/s"),
    (Mode::Full, 256, "2Gbit"),
];

/// Foretells and makes ten migrations and enters what came of it into `report`.
pub(crate) fn compare(report: &mut Report) -> anyhow::Result<()> {
    let godwit = Godwit::built()?;
    println!(
        "\n{:<42} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6}",
        "forecast", "total s", "was", "ratio", "down ms", "was", "ratio"
    );
    let mut figures = Vec::new();
    if kvm_for("forecasts for microvms") {
        for (mode, working_set, link) in MICROVMS {
            let options = [
                "--memory",
                "1GiB",
                "--fill",
                "512MiB",
                "--mode",
                mode,
                "--working-set",
                working_set,
            ];
            let source = MicroVm::start(&godwit, &options)?;
            let destination = MicroVm::start(&godwit, &[&options[..], &["--incoming"]].concat())?;
            source.wait_ready(LIMIT)?;
            let name = format!("microvm, {mode} over {working_set}, {link}");
            figures.push(one(&godwit, &name, &source, &destination, link)?);
        }
    }
    let build = QemuBuild::unpacked().context("QEMU 10 is missing: run `make qemu`")?;
    for (mode, working_set, link) in QEMUS {
        let guest = GuestConfig {
            mode,
            working_set: ByteCount(working_set << 20),
            ..GuestConfig::standard()
        };
        let config = VmConfig::new(&build, guest);
        let source = TestVm::source(&config)?;
        let destination = TestVm::destination(&config)?;
        source.wait_ready(LIMIT)?;
        let name = format!("QEMU, {mode} over {working_set}MiB, {link}");
        figures.push(one(&godwit, &name, &source, &destination, link)?);
    }
    for figure in &figures {
        let name = figure["name"].as_str().unwrap_or_default();
        let off = |key: &str| {
            let ratio = figure[key].as_f64().unwrap_or(f64::NAN);
            ratio.max(1.0 / ratio)
        };
        report.target(
            format!("forecast of total time, off by: {name}"),
            off("total_ratio"),
            1.25,
            Better::Lower,
        );
        report.target(
            format!("forecast of downtime, off by: {name}"),
            off("downtime_ratio"),
            2.0,
            Better::Lower,
        );
    }
    report.figure("forecasts", Value::Array(figures));
    Ok(())
}

fn one(
    godwit: &Godwit,
    name: &str,
    source: &dyn Movable,
    destination: &dyn Movable,
    link: &str,
) -> anyhow::Result<Value> {
    source.wait_for_heartbeats_after(Instant::now(), 10, LIMIT)?;
    let arguments = ["plan", "--vm", &source.vm_name(), "--link", link, "--json"];
    let output = godwit.done(&arguments)?;
    let plan: Value = serde_json::from_slice(&output.stdout)?;
    let forecast = &plan["plans"][0]["cases"][0]["forecast"];
    // What the look cost the guest is over.
    source.wait_for_heartbeats_after(Instant::now(), 5, LIMIT)?;
    let (receive, address) = godwit.receive(destination, &[])?;
    let ended = godwit.migrate(source, &address, &["--max-bandwidth", link])?.wait(LIMIT)?;
    let last = ended.last();
    ensure!(last["outcome"] == "migrated", "{name}: {last} {}", ended.errors);
    receive.wait(LIMIT)?;
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let (total, downtime) = (number(&forecast["seconds"][1]), number(&forecast["downtime"]) * 1e3);
    let (was, was_down) = (number(&last["total_ms"]) / 1e3, number(&last["downtime_ms"]));
    let (ratio, down_ratio) = (total / was, downtime / was_down);
    println!(
        "{name:<42} {total:>9.2} {was:>9.2} {ratio:>6.2} {downtime:>9.1} {was_down:>9.1} \
         {down_ratio:>6.2}"
    );
    Ok(json!({
        "name": name, "total_ratio": ratio, "downtime_ratio": down_ratio, "forecast": forecast,
        "measured": plan["measured"], "migration": last,
    }))
}

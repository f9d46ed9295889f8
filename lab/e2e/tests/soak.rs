//! A short soak of a few VMs of different kinds: all of it is green, and it is red where its moves
//! get something wrong.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context, ensure};
use godwit_testbed::{Godwit, builds_for, images_for, kvm_builds_for};
use serde_json::Value;

/// VMs of `make soak`, each of another kind, of those that this host can have.
fn vms(test: &str) -> Vec<&'static str> {
    let mut vms = Vec::new();
    if !kvm_builds_for(test).is_empty() && images_for(test) {
        vms.extend(["kvm-disk", "microvm-ring"]);
    }
    if !builds_for(test).is_empty() {
        vms.push("tcg-anonymous");
    }
    vms
}

/// What a soak said, and its report.
struct Soaked {
    output: Output,
    said: String,
    report: Value,
}

impl Soaked {
    /// What `name` came to, and whether that is as it should be.
    fn target(&self, name: &str) -> Option<(f64, bool)> {
        let targets = self.report["targets"].as_array()?;
        let target = targets.iter().find(|target| target["name"] == name)?;
        Some((target["value"].as_f64()?, target["met"].as_bool()?))
    }
}

/// Runs `godwit-soak` where it leaves its report to nobody else.
fn soak(name: &str, vms: &[&str], arguments: &[&str]) -> anyhow::Result<Soaked> {
    let place = std::env::temp_dir().join(format!("godwit-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&place)?;
    let place = Place(place);
    let program = Godwit::built()?.beside("godwit-soak");
    let mut command = Command::new(program.program());
    command.current_dir(&place.0).args(["--no-load", "--only", &vms.join(",")]).args(arguments);
    let output = command.output().context("no godwit-soak: cargo build --package godwit-soak")?;
    let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    let report = std::fs::read_to_string(place.0.join("target/bench/soak.json"));
    let report = report.with_context(|| said.clone())?;
    Ok(Soaked { output, said, report: serde_json::from_str(&report)? })
}

/// A directory that goes with the value.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn guests_of_several_kinds_move_to_and_fro_unharmed() -> anyhow::Result<()> {
    let vms = vms("guests_of_several_kinds_move_to_and_fro_unharmed");
    if vms.is_empty() {
        return Ok(());
    }
    let soaked = soak("soak", &vms, &["--each", "2", "--seed", "5", "--from", "3"])?;
    println!("{}", soaked.said);
    ensure!(soaked.output.status.code() == Some(0), "{}", soaked.said);
    let of = |name| soaked.target(name);
    let moves = 2.0 * vms.len() as f64;
    ensure!(of("moves with equal digests") == Some((moves, true)), "{}", soaked.said);
    ensure!(of("VMs that moved") == Some((vms.len() as f64, true)), "{}", soaked.said);
    ensure!(of("BUGs") == Some((0.0, true)), "{}", soaked.said);
    ensure!(of("moves that failed") == Some((0.0, true)), "{}", soaked.said);
    Ok(())
}

#[test]
fn a_soak_whose_moves_flip_a_bit_is_red_and_says_how_it_is_made_again() -> anyhow::Result<()> {
    let vms = vms("a_soak_whose_moves_flip_a_bit_is_red_and_says_how_it_is_made_again");
    let Some(vm) = vms.first() else { return Ok(()) };
    let options = ["--moves", "1", "--seed", "5", "--from", "3", "--defect", "flip"];
    let soaked = soak("red-soak", &[*vm], &options)?;
    println!("{}", soaked.said);
    ensure!(soaked.output.status.code() == Some(1), "{}", soaked.said);
    ensure!(soaked.target("moves with equal digests") == Some((0.0, false)), "{}", soaked.said);
    let failed = soaked.target("moves that failed");
    ensure!(failed.is_some_and(|(moves, met)| moves >= 1.0 && !met), "{}", soaked.said);
    let again =
        format!("again: make soak SOAK='--seed 5 --only {vm} --from 3 --moves 1 --defect flip'");
    ensure!(soaked.said.contains(&again), "{}", soaked.said);
    // It failed for what was wrong with it, and not for want of anything.
    let evidence = soaked.report["rows"][0]["evidence"].as_str().unwrap_or_default();
    ensure!(evidence.contains("NOT exact"), "{evidence}");
    Ok(())
}

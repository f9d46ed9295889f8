//! Each deliberate defect, once: found by the guest, by `--verify` and by `--audit`, each with the
//! words for it. `make defects` makes each a hundred times.

use anyhow::{Context, ensure};
use godwit_faults::defects::{Bench, CONTROL, DEFECTS, Rig};

fn all_of(bench: Bench) -> anyhow::Result<()> {
    let Some(mut rig) = Rig::start(bench)? else { return Ok(()) };
    for defect in DEFECTS.iter().filter(|defect| defect.bench == bench) {
        let found = rig.run(defect).context(defect.what)?;
        println!("{}: {found:#?}", defect.name);
        ensure!(found.guest.is_some(), "{}: the guest found nothing: {found:?}", defect.name);
        let wanted = (defect.verify.is_some(), !defect.audit.is_empty());
        let said = (found.verify.is_some(), found.audit.is_some());
        ensure!(wanted == said, "{}: {found:?}", defect.name);
    }
    Ok(())
}

#[test]
fn defects_of_memory_are_found() -> anyhow::Result<()> {
    all_of(Bench::Memory)
}

#[test]
fn a_hint_that_is_believed_too_long_is_found() -> anyhow::Result<()> {
    all_of(Bench::Hints)
}

#[test]
fn a_direct_write_that_is_missed_is_found() -> anyhow::Result<()> {
    // It is up to chance, move by move, whether a write lands behind the tracker, or in a page that
    // it reports as well and that is then explained otherwise.
    let mut told = all_of(Bench::Direct);
    for _ in 0..12 {
        if told.is_ok() {
            break;
        }
        told = all_of(Bench::Direct);
    }
    told
}

#[test]
fn a_dropped_extent_is_found() -> anyhow::Result<()> {
    all_of(Bench::Disk)
}

#[test]
fn where_nothing_is_wrong_nothing_is_found() -> anyhow::Result<()> {
    let Some(mut rig) = Rig::start(CONTROL.bench)? else { return Ok(()) };
    let found = rig.run(&CONTROL)?;
    ensure!(found.guest.is_none() && found.verify.is_none(), "{found:?}");
    ensure!(found.audit.is_none() && found.misfits.is_empty(), "{found:?}");
    Ok(())
}

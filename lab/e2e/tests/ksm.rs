//! Guests whose equal pages the host merges (KSM) while they move, as libvirt and QEMU let it by
//! default: pages of zeros, pages that both QEMUs have alike, and pages like no other, which are
//! merged and split while they are tracked, read and written.

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, check_moved};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, GuestConfig, Ksm, TestVm, VmConfig, at_most, builds_for, builds_since, images_for,
    kvm_builds_for,
};
use godwit_units::ByteCount;

/// Pages that are merged before a move begins.
const MERGED: u64 = 1000;

/// Moves a guest `moves` times, from each host to the next, while another of its kind runs, whose
/// stamps are the same where neither has written since it began.
fn hops(config: &VmConfig, moves: usize, ksm: &Ksm) -> anyhow::Result<()> {
    let twin = TestVm::source(config)?;
    let mut pair = Pair::start(config)?;
    twin.wait_ready(LIMIT)?;
    for number in 0..moves {
        ksm.wait_for(pair.source.pid(), MERGED, LIMIT)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate).with_context(|| format!("move {number}"))?;
        let next = TestVm::destination(config)?;
        pair.move_on(next);
    }
    ensure!(twin.bugs().is_empty(), "{:?}", twin.bugs());
    Ok(())
}

fn under_tcg(test: &str, moves: usize) -> anyhow::Result<()> {
    if !images_for(test) {
        return Ok(());
    }
    let Some(ksm) = Ksm::for_test(test) else { return Ok(()) };
    for build in &builds_since(8, builds_for(test), test) {
        let config = VmConfig::new(build, GuestConfig::small(Mode::Rate));
        hops(&config.with_backend(Backend::Anonymous), moves, &ksm)?;
    }
    Ok(())
}

fn on_kvm(test: &str, moves: usize) -> anyhow::Result<()> {
    let builds = builds_since(8, kvm_builds_for(test), test);
    let Some(ksm) = Ksm::for_test(test).filter(|_| !builds.is_empty()) else { return Ok(()) };
    for build in &builds {
        let guest = GuestConfig { fill: ByteCount(64 << 20), ..GuestConfig::small(Mode::Rate) };
        let config = VmConfig::new(build, guest).with_backend(Backend::Anonymous);
        hops(&config.on_kvm(), moves, &ksm)?;
    }
    Ok(())
}

#[test]
fn a_guest_moves_while_its_pages_are_merged() -> anyhow::Result<()> {
    under_tcg("a_guest_moves_while_its_pages_are_merged", 2)
}

#[test]
fn a_guest_on_kvm_moves_while_its_pages_are_merged() -> anyhow::Result<()> {
    on_kvm("a_guest_on_kvm_moves_while_its_pages_are_merged", 2)
}

#[test]
#[ignore = "long"]
fn fifty_moves_while_pages_are_merged() -> anyhow::Result<()> {
    under_tcg("fifty_moves_while_pages_are_merged", at_most(10))?;
    on_kvm("fifty_moves_while_pages_are_merged", at_most(40))
}

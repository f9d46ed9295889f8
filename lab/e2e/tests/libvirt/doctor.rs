//! What `godwit doctor` finds of a domain.

use anyhow::ensure;
use godwit_e2e::Findings;
use godwit_stamp::settings::Mode;

use crate::hosts::Hosts;

#[test]
fn a_doctor_looks_at_a_domain() -> anyhow::Result<()> {
    let Some(hosts) = Hosts::start("a_doctor_looks_at_a_domain", Mode::Idle, true)? else {
        return Ok(());
    };
    let (godwit, domain) = (&hosts.godwit, hosts.west.domain(hosts.name()));

    let found = Findings::of(godwit, &domain, &[])?;

    ensure!(found.code == Some(0), "{found:?}");
    ensure!(found.without_cure().is_empty(), "{:?}", found.without_cure());
    ensure!(found.find("vm", "VM")["name"] == domain, "{found:?}");
    for what in ["VM", "disks", "tracking"] {
        ensure!(found.find("vm", what)["verdict"] == "good", "{what}: {found:?}");
    }
    let balloon = found.find("vm", "free memory");
    ensure!(balloon["verdict"] == "note", "{balloon}");
    ensure!(balloon["cure"].to_string().contains("free-page-reporting=on"), "{balloon}");

    // With nobody at the address, of the other host, and shut off.
    let alone = Findings::of(godwit, &domain, &["--to", "127.0.0.1:1"])?;
    ensure!(alone.code == Some(1), "{alone:?}");
    ensure!(alone.without_cure().is_empty(), "{:?}", alone.without_cure());
    let cure = alone.find("destination", "destination")["cure"].to_string();
    ensure!(cure.contains("start `godwit receive` there"), "{alone:?}");
    hosts.check_guest()?;
    hosts.west.virsh(&["destroy", hosts.name()])?;
    for (domain, words) in [
        (hosts.east.domain(hosts.name()), "no domain"),
        (hosts.west.domain(hosts.name()), "is shut off"),
    ] {
        let found = Findings::of(godwit, &domain, &[])?;
        ensure!(found.code == Some(1) && found.answer["verdict"] == "bad", "{found:?}");
        let vm = found.find("vm", "VM");
        ensure!(vm["text"].to_string().contains(words), "{vm}");
        ensure!(vm["cure"].to_string().contains("`godwit list`"), "{vm}");
    }
    Ok(())
}

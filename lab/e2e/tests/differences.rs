//! VMs that are not alike: refused before the first byte, with every difference and its cure, while
//! both QEMUs stay as they were. And VMs that are alike though they were started or built up
//! differently: moved.

use anyhow::ensure;
use godwit_e2e::{LIMIT, Pair, check_moved, check_refused, check_untouched, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Godwit, GuestConfig, QemuBuild, TestVm, VmConfig, builds_for, builds_in_turn_for,
};
use serde_json::json;

/// The config of a small guest, or nothing where there is no QEMU.
fn config(test: &str) -> anyhow::Result<Option<VmConfig>> {
    let builds: Vec<QemuBuild> = builds_for(test);
    if builds.is_empty() {
        return Ok(None);
    }
    Ok(Some(VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate))))
}

/// Both QEMUs, if they are here.
fn both(test: &str) -> Option<[QemuBuild; 2]> {
    let mut builds = builds_for(test);
    builds.sort_by_key(|build| build.version);
    let found = <[QemuBuild; 2]>::try_from(builds).ok();
    if found.is_none() {
        println!("SKIPPED {test}: it needs two QEMUs: run `make qemu`");
    }
    found
}

/// Checks that both sides refuse with all of `words`, and that neither QEMU was touched.
fn check_different(pair: &mut Pair, words: &[&str]) -> anyhow::Result<()> {
    let words = [words, &["the two VMs differ", "--allow-differences"]].concat();
    let (migrate, receive) = pair.migrate(&[])?;
    check_refused(&migrate, 1, &words)?;
    check_refused(&receive, 1, &words)?;
    let state = pair.destination.status()?;
    ensure!(state == "inmigrate", "the destination is '{state}'");
    check_untouched(&mut pair.source)
}

/// Each of these was found only by the failed load, with the guest stopped and the destination used
/// up; another CPU model and one more device at the destination were not found at all.
#[test]
fn vms_that_differ_are_refused_before_the_first_byte() -> anyhow::Result<()> {
    let Some(config) = config("vms_that_differ_are_refused_before_the_first_byte")? else {
        return Ok(());
    };
    let rng = ["-device", "virtio-rng-pci,id=rng0,addr=07.0"];
    let mut pair = Pair::start(&config.clone().with_extra(&rng))?;
    let cases: [(&[&str], &[&str]); 5] = [
        (
            &["-machine", "pc"],
            &["[machine] machine: pc-q35-", "pc-i440fx-", "(use -machine pc-q35-"],
        ),
        (&["-cpu", "max"], &["[cpu] CPU model: qemu64 at the source, max here (use -cpu qemu64)"]),
        (&["-cpu", "qemu64,+avx"], &["[cpu.features] CPU features: avx only here"]),
        (
            &["-device", "virtio-balloon-pci,id=balloon0,addr=08.0"],
            &["[device.q35-pcihost/08.0] device 'balloon0' (virtio-balloon-pci) only here \
               (leave it out)"],
        ),
        (&["-device", "isa-serial,index=1"], &["isa-serial#2] isa-serial at", "only here"]),
    ];
    for (extra, words) in cases {
        pair.destination = TestVm::destination(&config.clone().with_extra(&rng).with_extra(extra))?;
        check_different(&mut pair, words)?;
    }
    // Without the device, and with one of its properties changed.
    pair.destination = TestVm::destination(&config)?;
    let words = "device 'rng0' (virtio-rng-pci) only at the source (add -device \
                 virtio-rng-pci,id=rng0,addr=07.0)";
    check_different(&mut pair, &[words])?;
    let other =
        ["-device", "virtio-rng-pci,id=rng0,addr=07.0,max-bytes=1024,period=1000", "-smp", "2"];
    pair.destination = TestVm::destination(&config.clone().with_extra(&other))?;
    let words = [
        "[smp] processors: 1 at the source, 2 here (use -smp 1)",
        "device 'rng0'",
        "max-bytes=",
        "period=",
    ];
    check_different(&mut pair, &words)?;

    pair.destination = TestVm::destination(&config.with_extra(&rng))?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    check_moved(&mut pair, &migrate)
}

#[test]
fn a_destination_that_refused_takes_the_guest_that_fits() -> anyhow::Result<()> {
    let Some(config) = config("a_destination_that_refused_takes_the_guest_that_fits")? else {
        return Ok(());
    };
    let mut two = config.clone();
    two.cpus = 2;
    let mut pair = Pair::start_apart(&two, &config)?;
    check_different(&mut pair, &["[smp] processors: 2 at the source, 1 here (use -smp 2)"])?;

    pair.source = TestVm::source(&config)?;
    pair.source.wait_ready(LIMIT)?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    check_moved(&mut pair, &migrate)
}

#[test]
fn a_machine_type_that_the_destination_does_not_have_is_refused() -> anyhow::Result<()> {
    let Some([old, new]) = both("a_machine_type_that_the_destination_does_not_have_is_refused")
    else {
        return Ok(());
    };
    let config = |build| VmConfig::new(build, GuestConfig::small(Mode::Rate));
    let mut pair = Pair::start_apart(&config(&new), &config(&old))?;
    let words = [
        "[machine] machine: pc-q35-10",
        "pc-q35-7.2 here",
        "does not have that",
        "-machine pc-q35-7.2)",
    ];
    check_different(&mut pair, &words)
}

#[test]
fn a_guest_moves_to_a_newer_qemu_and_back() -> anyhow::Result<()> {
    let Some([old, new]) = both("a_guest_moves_to_a_newer_qemu_and_back") else { return Ok(()) };
    let devices =
        ["-machine", "pc-q35-7.2", "-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0"];
    let config = |build| VmConfig::new(build, GuestConfig::small(Mode::Rate)).with_extra(&devices);
    let mut pair = Pair::start_apart(&config(&old), &config(&new))?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    check_moved(&mut pair, &migrate)?;

    let back = TestVm::destination(&config(&old))?;
    let (receive, address) = pair.godwit.receive(&back, &[])?;
    let migrate = pair.godwit.migrate(&pair.destination, &address, &["--verify"])?.wait(LIMIT)?;
    ensure!(migrate.last()["outcome"] == "migrated", "{} {}", migrate.last(), migrate.errors);
    drop(receive.wait(LIMIT)?);
    back.wait_for_heartbeats_after(std::time::Instant::now(), 3, LIMIT)?;
    ensure!(back.bugs().is_empty(), "{:?}", back.bugs());
    Ok(())
}

#[test]
fn a_device_plugged_at_the_source_is_found_on_the_destinations_command_line() -> anyhow::Result<()>
{
    let test = "a_device_plugged_at_the_source_is_found_on_the_destinations_command_line";
    for build in builds_in_turn_for(test) {
        let port = ["-device", "pcie-root-port,id=port0,chassis=1,addr=06.0"];
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_extra(&port);
        let mut pair = Pair::start(&config)?;
        let device = json!({ "driver": "virtio-rng-pci", "bus": "port0", "id": "rng0" });
        pair.source.qmp().execute("device_add", device)?;
        check_different(&mut pair, &["device 'rng0' (virtio-rng-pci) only at the source"])?;
        let plugged = ["-device", "virtio-rng-pci,bus=port0,id=rng0"];
        pair.destination = TestVm::destination(&config.with_extra(&plugged))?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

#[test]
fn a_difference_is_let_pass_by_its_key_and_no_other() -> anyhow::Result<()> {
    let Some(config) = config("a_difference_is_let_pass_by_its_key_and_no_other")? else {
        return Ok(());
    };
    // A guest that does not look does not mind another name of its processor.
    let other = config.clone().with_extra(&["-cpu", "qemu64,model-id=other"]);
    let mut pair = Pair::start_apart(&config, &other)?;
    check_different(&mut pair, &["[cpu.model-id] CPU model-id: QEMU Virtual CPU"])?;
    let (migrate, _) = pair.migrate(&["--allow-differences", "cpu.model,smp"])?;
    check_refused(&migrate, 1, &["[cpu.model-id]"])?;
    let (migrate, _) = pair.migrate(&["--allow-differences", "cpu.model-id"])?;
    check_moved(&mut pair, &migrate)
}

/// False alarms would keep people from migrating: machines of all kinds that were started alike, of
/// one version or of two.
#[test]
fn machines_that_were_started_alike_are_alike() -> anyhow::Result<()> {
    let Some([old, new]) = both("machines_that_were_started_alike_are_alike") else {
        return Ok(());
    };
    let machines: [&[&str]; 5] = [
        &["-machine", "pc-q35-7.2"],
        &["-machine", "pc-i440fx-7.2", "-vga", "std", "-usb", "-device", "usb-tablet"],
        &[
            "-machine",
            "pc-q35-7.2",
            "-smp",
            "2,sockets=1,cores=2,maxcpus=2",
            "-netdev",
            "user,id=n0",
            "-netdev",
            "user,id=n1",
            "-device",
            "virtio-net-pci,netdev=n0",
            "-device",
            "e1000e,netdev=n1",
            "-device",
            "virtio-balloon-pci",
            "-device",
            "virtio-rng-pci",
            "-device",
            "virtio-serial-pci",
            "-chardev",
            "null,id=c0",
            "-device",
            "virtserialport,chardev=c0,name=agent",
        ],
        &[
            "-machine",
            "pc-q35-7.2",
            "-device",
            "virtio-scsi-pci,id=s0",
            "-blockdev",
            "driver=null-co,node-name=d0,read-zeroes=on,read-only=on",
            "-device",
            "scsi-cd,drive=d0,bus=s0.0",
            "-device",
            "qemu-xhci",
            "-device",
            "usb-kbd",
            "-device",
            "pcie-root-port,id=p0,chassis=1",
            "-device",
            "intel-hda",
            "-vga",
            "virtio",
        ],
        &[
            "-machine",
            "pc-i440fx-7.2,hpet=off",
            "-cpu",
            "Nehalem",
            "-device",
            "pci-bridge,id=b0,chassis_nr=1",
        ],
    ];
    for machine in machines {
        for (from, to) in [(&old, &old), (&new, &new), (&old, &new), (&new, &old)] {
            let config =
                |build| VmConfig::new(build, GuestConfig::small(Mode::Rate)).with_extra(machine);
            let (source, destination) =
                (TestVm::source(&config(from))?, TestVm::destination(&config(to))?);
            let godwit = Godwit::built()?;
            let (mut receive, address) = godwit.receive(&destination, &[])?;
            let migrate = godwit.migrate(&source, &address, &["--max-bandwidth", "1MiB/s"])?;
            let accepted = receive.wait_for("accepted", LIMIT, |line| line["event"] == "accepted");
            let said = if accepted.is_ok() { String::new() } else { migrate.wait(LIMIT)?.errors };
            ensure!(accepted.is_ok(), "{from} to {to}, {machine:?}: {said}");
            receive.kill();
        }
    }
    Ok(())
}

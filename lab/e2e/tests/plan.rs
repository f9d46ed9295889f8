//! `godwit plan` and `godwit doctor`: they tell what would be, and leave the guest as it was.

use std::process::{Command, Output, Stdio};
use std::time::Instant;

use anyhow::ensure;
use godwit_e2e::{Findings, LIMIT, MicroPair, Pair, check_moved, check_untouched};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    DiskImage, Godwit, GuestConfig, MicroVm, Movable, TestVm, VmConfig, builds_for,
    builds_in_turn_for, images_for, kvm_for,
};
use godwit_units::ByteCount;
use serde_json::Value;

/// Plans for `vm` and checks the answer.
fn plan(godwit: &Godwit, vm: &dyn Movable) -> anyhow::Result<()> {
    let name = vm.vm_name();
    let arguments =
        ["plan", "--vm", &name, "--for", "700ms", "--link", "1MiB/s", "--link", "10Gbit", "--json"];
    let look = || -> anyhow::Result<Value> {
        Ok(serde_json::from_slice(&godwit.done(&arguments)?.stdout)?)
    };
    let finishes = |answer: &Value, link: usize, case: usize| {
        answer["plans"][link]["cases"][case]["forecast"]["finishes"].clone()
    };
    let mut answer = look()?;
    // On a busy machine the guest may not have run all the while.
    for _ in 0..4 {
        if finishes(&answer, 0, 1) == false {
            break;
        }
        answer = look()?;
    }
    let samples = answer["measured"]["dirty"].as_array().map_or(0, Vec::len);
    ensure!(samples >= 5, "{answer}");
    ensure!(answer["measured"]["dirty"][samples - 1][1].as_u64() > Some(1000), "{answer}");
    ensure!(finishes(&answer, 0, 1) == false, "without a throttle it does not: {answer}");
    ensure!(finishes(&answer, 1, 1) == true, "over a fast link it does: {answer}");
    let seconds = answer["plans"][0]["cases"][0]["forecast"]["seconds"].clone();
    ensure!(
        seconds[0].as_f64() <= seconds[1].as_f64() && seconds[1].as_f64() <= seconds[2].as_f64()
    );

    // As `| head -1` does it, before anything is written.
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let mut unread = Command::new(godwit.program());
    unread.args(["plan", "--vm", &name, "--for", "200ms"]).stdout(writer).stderr(Stdio::null());
    let status = unread.status()?;
    ensure!(status.success(), "nobody reads the plan: {status}");

    let wrong = godwit.run(&["plan", "--vm", &name, "--for", "1ms"])?;
    ensure!(wrong.status.code() == Some(2), "{}", wrong.status);
    let wrong = godwit.run(&["plan", "--vm", &name, "--set", "speed=9"])?;
    ensure!(wrong.status.code() == Some(2), "{}", wrong.status);
    Ok(())
}

#[test]
fn a_plan_for_a_busy_qemu_guest() -> anyhow::Result<()> {
    let builds = builds_for("a_plan_for_a_busy_qemu_guest");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut vm = TestVm::source(&VmConfig::new(build, GuestConfig::small(Mode::Full)))?;
    vm.wait_ready(LIMIT)?;
    plan(&Godwit::built()?, &vm)?;
    check_untouched(&mut vm)
}

#[test]
fn a_plan_tells_how_to_make_images() -> anyhow::Result<()> {
    let builds = builds_for("a_plan_tells_how_to_make_images");
    let Some(build) = builds.last() else { return Ok(()) };
    let image = DiskImage::create("qcow2", ByteCount(3 << 20))?;
    let mut config = VmConfig::new(build, GuestConfig::small(Mode::Rate));
    config.extra.extend(image.arguments("data"));
    let mut vm = TestVm::source(&config)?;
    vm.wait_ready(LIMIT)?;
    let godwit = Godwit::built()?;
    let name = vm.vm_name();
    let plan = |disks: &str| {
        let arguments = ["plan", "--vm", &name, "--for", "200ms", "--disks", disks, "--json"];
        godwit.run(&arguments)
    };
    let answer: Value = serde_json::from_slice(&plan("all")?.stdout)?;
    let command = answer["images"][0].as_str().unwrap_or_default();
    ensure!(command.starts_with("qemu-img create -f qcow2 /dev/shm/"), "{answer}");
    ensure!(command.contains(" 3145728 ") && command.ends_with("# data"), "{answer}");
    ensure!(
        answer["receive"].as_str().is_some_and(|line| line.contains("receive --disks all")),
        "{answer}"
    );
    let unknown = plan("other")?;
    ensure!(String::from_utf8_lossy(&unknown.stderr).contains("no disk 'other'"), "{unknown:?}");
    check_untouched(&mut vm)
}

/// What `godwit doctor` finds of a guest that fits and of one that does not.
fn doctor(godwit: &Godwit, fits: &TestVm, differs: &TestVm, to: &str) -> anyhow::Result<()> {
    for (vm, verdict, code) in [(fits, "good", Some(0)), (differs, "bad", Some(1))] {
        let output = godwit.run(&["doctor", "--vm", &vm.vm_name(), "--to", to, "--json"])?;
        ensure!(output.status.code() == code, "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout)?;
        let findings = answer["findings"].as_array().map_or(&[][..], |all| all);
        let find = |about: &str, what: &str| {
            let mut named = findings.iter().filter(|it| it["about"] == about && it["what"] == what);
            named.next().cloned().unwrap_or_default()
        };
        ensure!(find("host", "page tables")["verdict"] == "good", "{answer}");
        ensure!(find("vm", "tracking")["verdict"] == "good", "{answer}");
        let network = find("destination", "network").to_string();
        ensure!(network.contains("one connection carries") == (verdict == "good"), "{answer}");
        ensure!(find("destination", "guest")["verdict"] == verdict, "{answer}");
        ensure!(find("vm", "devices")["verdict"] == "good", "{answer}");
        let clocks = find("destination", "clocks").to_string();
        ensure!(clocks.contains("apart") == (verdict == "good"), "{answer}");
        // The destination is this host, whose memory holds the guest.
        let memory = find("destination", "memory");
        ensure!(memory["verdict"] == "good", "{answer}");
        ensure!(memory.to_string().contains("the guest may come to use"), "{answer}");
        let processor = find("destination", "processor");
        ensure!(processor["verdict"] == "good", "{answer}");
        ensure!(processor.to_string().contains("on both hosts; it has all"), "{answer}");
        let others = findings.iter().filter(|it| it["what"] != "guest" && it["verdict"] == "bad");
        ensure!(others.count() == 0, "{answer}");
    }
    // Without a VM: what the host has, and what the link carries.
    let output = godwit.run(&["doctor", "--to", to])?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{output:?}");
    let one_line = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in
        ["one connection carries", "apart", "its host has", "good huge pages", "on both hosts"]
    {
        ensure!(one_line.contains(words), "{words}: {said}");
    }
    ensure!(!said.contains("fits there") && !said.contains("may come to use"), "{said}");
    let shared = godwit.run(&["doctor", "--to", to, "--disks-are-shared"])?;
    ensure!(shared.status.code() == Some(2), "it is said of a VM: {shared:?}");
    let nobody = godwit.run(&["doctor", "--vm", "qemu:/nowhere"])?;
    let said = String::from_utf8_lossy(&nobody.stdout);
    ensure!(nobody.status.code() == Some(1) && said.contains("/nowhere"), "{nobody:?}");
    Ok(())
}

/// What `godwit doctor` says, in words, of a VM with a device and a disk.
#[test]
fn a_doctor_looks_at_each_device_and_disk() -> anyhow::Result<()> {
    let test = "a_doctor_looks_at_each_device_and_disk";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let image = DiskImage::create("raw", ByteCount(1 << 20))?;
        let drive = format!("file={},if=none,id=data,format=raw", image.path().display());
        let plain = ["-drive", &drive, "-device", "virtio-blk-pci,drive=data,id=disk0"];
        let cached = drive.clone() + ",cache=unsafe";
        let risky = ["-drive", &cached, "-device", "virtio-blk-pci,drive=data,id=disk0"];
        for (words, verdict, mode) in [(plain, "good", "writeback"), (risky, "note", "unsafe")] {
            let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle)).with_extra(&words);
            let mut vm = TestVm::source(&config)?;
            vm.wait_ready(LIMIT)?;
            let output = Godwit::built()?.run(&["doctor", "--vm", &vm.vm_name()])?;
            let said = String::from_utf8(output.stdout)?;
            ensure!(output.status.success(), "{said}");
            let line = |words: &str| said.lines().find(|line| line.contains(words));
            let device = line("virtio-blk-pci 'disk0' can move").unwrap_or_default();
            ensure!(device.trim_start().starts_with("good  device"), "{said}");
            let disk = line(&format!("cache={mode}")).unwrap_or_default();
            ensure!(disk.trim_start().starts_with(&format!("{verdict}  disk")), "{said}");
            ensure!(said.contains("cure: any other cache=") == (mode == "unsafe"), "{said}");
            check_untouched(&mut vm)?;
        }
    }
    Ok(())
}

/// A small microvm that has nothing to do.
const SMALL: [&str; 4] = ["--memory", "64MiB", "--mode", "idle"];

#[test]
fn a_doctor_looks_at_a_microvm() -> anyhow::Result<()> {
    let test = "a_doctor_looks_at_a_microvm";
    if !kvm_for(test) {
        return Ok(());
    }
    let godwit = Godwit::built()?;
    // Of these trackers the second can govern.
    for (tracker, governor) in [("kvm-log", "note"), ("pagemap", "good")] {
        let vm = MicroVm::start(&godwit, &[&SMALL[..], &["--tracker", tracker]].concat())?;
        vm.wait_ready(LIMIT)?;

        let found = Findings::of(&godwit, &vm.vm_name(), &[])?;

        ensure!(found.code == Some(0), "{found:?}");
        // Mutation: a note or what is bad goes without its cure.
        ensure!(found.without_cure().is_empty(), "{:?}", found.without_cure());
        let machine = found.find("vm", "VM");
        ensure!(machine["verdict"] == "good" && machine["name"] == vm.vm_name(), "{machine}");
        ensure!(machine["text"].to_string().contains("the machine is running"), "{machine}");
        let tracking = found.find("vm", "tracking");
        ensure!(tracking["verdict"] == "good", "{tracking}");
        ensure!(tracking["text"].to_string().contains("64MiB of memory"), "{tracking}");
        // Mutation: the cure is that of a QEMU, whose rights are what it lacks.
        let governs = found.find("vm", "governor");
        ensure!(governs["verdict"] == governor, "{governs}");
        let cure = governs["cure"].to_string();
        ensure!(cure.contains("--tracker pagemap") == (governor == "note"), "{governs}");
        vm.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        ensure!(vm.status()? == "running");
    }
    Ok(())
}

#[test]
fn a_doctor_says_what_to_do_about_a_microvm_without_a_guest_of_its_own() -> anyhow::Result<()> {
    let test = "a_doctor_says_what_to_do_about_a_microvm_without_a_guest_of_its_own";
    let Some(pair) = MicroPair::start(test, &SMALL)? else { return Ok(()) };
    let look = |vm: &str, options: &[&str]| Findings::of(&pair.godwit, vm, options);
    let is_bad = |vm: &str, words: &str| {
        let found = look(vm, &[])?;
        ensure!(found.code == Some(1) && found.answer["verdict"] == "bad", "{found:?}");
        ensure!(found.without_cure().is_empty(), "{:?}", found.without_cure());
        let cure = found.find("vm", "VM")["cure"].to_string();
        ensure!(cure.contains(words), "{words}: {found:?}");
        // What cannot be tracked was not tried to.
        ensure!(found.find("vm", "tracking").is_null(), "{found:?}");
        Ok(())
    };
    let source = pair.source.vm_name();

    is_bad("microvm:/nowhere", "name the --control socket")?;
    is_bad(&pair.destination.vm_name(), "name the machine that the guest is in")?;
    // Its destination tells of its host, and nothing of the guest.
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let found = look(&source, &["--to", &address])?;
    ensure!(found.code == Some(0), "{found:?}");
    ensure!(found.without_cure().is_empty(), "{:?}", found.without_cure());
    ensure!(found.find("destination", "network")["verdict"] == "good", "{found:?}");
    let asked = found.find("vm", "destination")["cure"].to_string();
    ensure!(asked.contains("begin the migration"), "{found:?}");
    let migrate = pair.godwit.migrate(&pair.source, &address, &["--keep-source"])?.wait(LIMIT)?;
    receive.wait(LIMIT)?;
    ensure!(migrate.last()["outcome"] == "migrated", "{}", migrate.last());
    is_bad(&source, "`godwit microvm quit`: its guest runs elsewhere")
}

/// The destination is asked what it would say, to a guest that fits and to one that does not, and
/// then takes the one that fits.
#[test]
fn a_plan_asks_the_destination() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_plan_asks_the_destination") {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let mut pair = Pair::start(&config)?;
        let mut two = config.clone();
        two.cpus = 2;
        let mut other = TestVm::source(&two)?;
        other.wait_ready(LIMIT)?;
        let godwit = Godwit::built()?;
        let (receive, address) = godwit.receive(&pair.destination, &[])?;
        let plan = |vm: &TestVm| {
            godwit.run(&[
                "plan",
                "--vm",
                &vm.vm_name(),
                "--for",
                "200ms",
                "--to",
                &address,
                "--json",
            ])
        };
        let (fits, differs) = (plan(&pair.source)?, plan(&other)?);
        let answer = |output: &Output| serde_json::from_slice::<Value>(&output.stdout);
        ensure!(fits.status.success(), "{fits:?}");
        ensure!(answer(&fits)?["destination"]["accepts"] == true, "{fits:?}");
        ensure!(differs.status.code() == Some(1), "{differs:?}");
        let refusal = answer(&differs)?["destination"]["refusal"].to_string();
        ensure!(refusal.contains("[smp] processors: 2 at the source, 1 here"), "{refusal}");
        doctor(&godwit, &pair.source, &other, &address)?;
        ensure!(pair.destination.status()? == "inmigrate");
        check_untouched(&mut other)?;
        let migrate = godwit.migrate(&pair.source, &address, &["--verify"])?.wait(LIMIT)?;
        let receive = receive.wait(LIMIT)?;
        let asked: Vec<_> = receive.lines.iter().filter(|line| line["event"] == "asked").collect();
        ensure!(asked.len() == 4, "{asked:?}");
        let looked = receive.lines.iter().filter(|line| line["event"] == "looked").count();
        ensure!(looked == 1, "who has no VM is told of as such");
        check_moved(&mut pair, &migrate)?;
    }
    let nobody = Godwit::built()?.run(&["plan", "--vm", "qemu:/nowhere", "--disks-are-shared"])?;
    ensure!(nobody.status.code() == Some(2), "--disks-are-shared needs --to: {nobody:?}");
    Ok(())
}

#[test]
fn a_plan_for_a_busy_microvm() -> anyhow::Result<()> {
    if !kvm_for("a_plan_for_a_busy_microvm") {
        return Ok(());
    }
    let godwit = Godwit::built()?;
    for tracker in ["kvm-log", "kvm-ring", "pagemap"] {
        let options = [
            "--memory",
            "128MiB",
            "--mode",
            "full",
            "--working-set",
            "64MiB",
            "--tracker",
            tracker,
        ];
        let vm = MicroVm::start(&godwit, &options)?;
        vm.wait_ready(LIMIT)?;
        plan(&godwit, &vm)?;
        ensure!(vm.status()? == "running");
        vm.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());
    }
    Ok(())
}

/// The simulator held against real migrations: the forecast is a simulation of the guest that was
/// looked at. The bounds are those of a busy host; `make bench-policy` measures how far it is off.
#[test]
fn a_simulated_migration_is_like_the_real_one() -> anyhow::Result<()> {
    let test = "a_simulated_migration_is_like_the_real_one";
    let godwit = Godwit::built()?;
    let alike = |source: &dyn Movable, destination: &dyn Movable| -> anyhow::Result<()> {
        let name = source.vm_name();
        let arguments = ["plan", "--vm", &name, "--for", "1s", "--link", "400Mbit", "--json"];
        let output = godwit.run(&arguments)?;
        let plan: Value = serde_json::from_slice(&output.stdout)?;
        let simulated = &plan["plans"][0]["cases"][0]["forecast"];
        let (receive, address) = godwit.receive(destination, &[])?;
        let migrate =
            godwit.migrate(source, &address, &["--max-bandwidth", "400Mbit"])?.wait(LIMIT)?;
        ensure!(receive.wait(LIMIT)?.status.success(), "{}", migrate.errors);
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let time = number(&simulated["seconds"][1]) * 1e3 / number(&migrate.last()["total_ms"]);
        let bytes = number(&simulated["bytes"]) / number(&migrate.last()["sent_bytes"]);
        ensure!((0.4..2.5).contains(&time), "{name}: simulated time / real time = {time}");
        ensure!((0.5..2.0).contains(&bytes), "{name}: simulated bytes / real bytes = {bytes}");
        Ok(())
    };
    if let Some(build) = builds_for(test).last() {
        let config = VmConfig::new(build, GuestConfig::small(Mode::Rate));
        let (source, destination) = (TestVm::source(&config)?, TestVm::destination(&config)?);
        source.wait_ready(LIMIT)?;
        alike(&source, &destination)?;
    }
    let options =
        ["--memory", "256MiB", "--mode", "rate", "--working-set", "64MiB", "--fill", "192MiB"];
    if let Some(pair) = MicroPair::start(&format!("microvm: {test}"), &options)? {
        alike(&pair.source, &pair.destination)?;
    }
    Ok(())
}

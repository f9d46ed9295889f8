//! VMs of stock QEMU on KVM, whose guest runs at the processor's own speed: millions of page writes
//! a second, where one under TCG makes some ten thousand.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, Pair, await_alone, await_copying, await_quit, check_moved, check_refused,
    check_untouched,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, DISK_WORK, DiskImage, Ended, GuestConfig, QemuBuild, TestVm, VmConfig, at_most,
    images_for, kvm_builds_for, kvm_builds_in_turn_for, skip,
};
use godwit_units::ByteCount;
use rustix::process::Signal;
use serde_json::{Value, json};

/// So slow that the guest outruns it, however busy this host is.
const SLOW: [&str; 4] = ["--max-bandwidth", "20MiB/s", "--compression", "none"];

/// VGA memory and firmware are RAM blocks, too, where they are. The guest maps no VGA memory, and
/// before QEMU 8.0 what it has not mapped is not found.
fn config(build: &QemuBuild, mode: Mode, backend: Backend) -> VmConfig {
    let guest = GuestConfig { fill: ByteCount(32 << 20), ..GuestConfig::small(mode) };
    let config = VmConfig::new(build, guest).with_backend(backend).on_kvm();
    let devices = ["-device", "virtio-rng-pci", "-device", "VGA"];
    let known = backend == Backend::SharedFile || build.version.0 >= 8;
    config.with_extra(if known { &devices } else { &devices[..2] })
}

/// Memory of `vm` that is in huge pages of anonymous memory.
fn in_huge_pages(vm: &TestVm) -> anyhow::Result<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", vm.pid()))?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("AnonHugePages:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).context("no AnonHugePages")?;
    Ok(kib.parse::<u64>()? << 10)
}

/// Whether this host gives huge pages to whoever asks for them, as QEMU does for RAM.
fn has_huge_pages() -> bool {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    enabled.is_ok_and(|text| !text.contains("[never]"))
}

/// It runs there, on KVM, and its memory arrived as it was.
fn check_arrived(pair: &mut Pair, migrate: &Ended) -> anyhow::Result<()> {
    check_moved(pair, migrate)?;
    ensure!(migrate.last()["verified"] == true, "{}", migrate.last());
    ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());
    let kvm = pair.destination.qmp().execute("query-kvm", Value::Null)?;
    ensure!(kvm["enabled"] == true, "{kvm}");
    await_quit(&mut pair.source)
}

fn moves(test: &str, mode: Mode, backend: Backend, cpus: u32) -> anyhow::Result<()> {
    for build in kvm_builds_in_turn_for(test) {
        let config = VmConfig { cpus, ..config(&build, mode, backend) };
        let mut pair = Pair::start(&config)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_arrived(&mut pair, &migrate).with_context(|| build.to_string())?;
    }
    Ok(())
}

#[test]
fn an_idle_guest_on_kvm_in_a_ram_file() -> anyhow::Result<()> {
    moves("an_idle_guest_on_kvm_in_a_ram_file", Mode::Idle, Backend::SharedFile, 1)
}

#[test]
fn a_writing_guest_on_kvm_in_a_memfd() -> anyhow::Result<()> {
    moves("a_writing_guest_on_kvm_in_a_memfd", Mode::Rate, Backend::Memfd, 1)
}

#[test]
fn a_guest_on_kvm_with_four_processors() -> anyhow::Result<()> {
    moves("a_guest_on_kvm_with_four_processors", Mode::Rate, Backend::Anonymous, 4)
}

#[test]
fn anonymous_huge_pages_on_kvm_arrive_as_huge_pages() -> anyhow::Result<()> {
    let test = "anonymous_huge_pages_on_kvm_arrive_as_huge_pages";
    if !has_huge_pages() {
        skip(test, "this host gives no huge pages: /sys/kernel/mm/transparent_hugepage is 'never'");
        return Ok(());
    }
    for build in kvm_builds_in_turn_for(test) {
        let mut pair = Pair::start(&config(&build, Mode::Idle, Backend::Anonymous))?;
        let fill = pair.source.config().guest.fill.0;
        let before = in_huge_pages(&pair.source)?;
        ensure!(before >= fill, "{before} bytes in huge pages at the source");

        let (migrate, _) = pair.migrate(&["--verify"])?;

        check_arrived(&mut pair, &migrate)?;
        let after = in_huge_pages(&pair.destination)?;
        ensure!(after >= before / 2, "{after} bytes in huge pages arrived of {before}");
    }
    Ok(())
}

#[test]
fn what_a_guest_never_touched_is_not_taken_for_given_back() -> anyhow::Result<()> {
    // Regression: the kernel's marks where nothing was yet, by which the tracker knows a first
    // write, were counted as memory in the swap; when they were gone by the second round, all of
    // memory was searched for holes, and segments kept to one connection each.
    let test = "what_a_guest_never_touched_is_not_taken_for_given_back";
    for build in kvm_builds_for(test) {
        let config = config(&build, Mode::Idle, Backend::Anonymous);
        let mut pair = Pair::start(&config)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_arrived(&mut pair, &migrate).with_context(|| build.to_string())?;
        let rounds = migrate.last()["round_list"].as_array().cloned().unwrap_or_default();
        let zero = rounds.iter().skip(1).filter_map(|round| round["zero_pages"].as_u64()).max();
        // A search is made where 1,024 pages or more seem to have been given back.
        ensure!(zero.is_some_and(|zero| zero < 1024), "{build}: {rounds:?}");
    }
    Ok(())
}

#[test]
fn a_guest_on_kvm_at_full_speed_is_throttled_and_arrives() -> anyhow::Result<()> {
    let test = "a_guest_on_kvm_at_full_speed_is_throttled_and_arrives";
    for build in kvm_builds_in_turn_for(test) {
        let mut pair = Pair::start(&config(&build, Mode::Full, Backend::Anonymous))?;
        let throttled = ["--throttle", "direct", "--verify"];
        let (migrate, _) = pair.migrate(&[&SLOW[..], &throttled].concat())?;
        check_arrived(&mut pair, &migrate).with_context(|| build.to_string())?;
        ensure!(migrate.last()["throttled_ms"].as_f64() > Some(0.0), "{}", migrate.last());
    }
    Ok(())
}

#[test]
fn a_guest_on_kvm_at_full_speed_is_governed_and_arrives() -> anyhow::Result<()> {
    let test = "a_guest_on_kvm_at_full_speed_is_governed_and_arrives";
    for build in kvm_builds_in_turn_for(test) {
        let config = VmConfig { cpus: 2, ..config(&build, Mode::Full, Backend::Anonymous) };
        let mut pair = Pair::start(&config)?;
        let governed = ["--throttle", "governor", "--downtime-limit", "200ms", "--verify"];
        let (migrate, _) = pair.migrate(&[&SLOW[..], &governed].concat())?;
        check_arrived(&mut pair, &migrate)?;
        ensure!(migrate.last()["write_faults_delayed"].as_u64() > Some(0), "{}", migrate.last());
    }
    Ok(())
}

/// What the guest on KVM uses of a disk.
const DISK: ByteCount = DISK_WORK.span;

/// QEMU writes what it reads from the disk into memory, while the guest writes at its own speed.
#[test]
fn a_disk_on_shared_storage_that_a_guest_on_kvm_writes() -> anyhow::Result<()> {
    let test = "a_disk_on_shared_storage_that_a_guest_on_kvm_writes";
    if !images_for(test) {
        return Ok(());
    }
    for build in kvm_builds_in_turn_for(test) {
        let image = DiskImage::create("raw", DISK)?;
        let mut config = config(&build, Mode::Rate, Backend::Anonymous);
        config.guest.disk = DISK_WORK;
        let mut pair = Pair::start(&config.with_disk("disk0", &image))?;
        let before = written(&image)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_arrived(&mut pair, &migrate).with_context(|| build.to_string())?;
        await_writes(&pair, &image, before).with_context(|| build.to_string())?;
    }
    Ok(())
}

#[test]
fn a_disk_moves_along_with_a_guest_on_kvm() -> anyhow::Result<()> {
    let test = "a_disk_moves_along_with_a_guest_on_kvm";
    if !images_for(test) {
        return Ok(());
    }
    for build in kvm_builds_in_turn_for(test) {
        let images = [DiskImage::create("raw", DISK)?, DiskImage::create("raw", DISK)?];
        let mut config = config(&build, Mode::Rate, Backend::Anonymous);
        config.guest.disk = DISK_WORK;
        let [from, to] = images.each_ref().map(|image| config.clone().with_disk("disk0", image));
        let mut pair = Pair::start_apart(&from, &to)?;
        let before = await_writes(&pair, &images[0], 0)?;
        let (migrate, _) = pair.migrate(&["--disks", "all", "--verify"])?;
        check_arrived(&mut pair, &migrate).with_context(|| build.to_string())?;
        await_writes(&pair, &images[1], before).with_context(|| build.to_string())?;
    }
    Ok(())
}

/// Pages of `image` that the guest has written.
fn written(image: &DiskImage) -> anyhow::Result<usize> {
    let bytes = std::fs::read(image.path())?;
    Ok(bytes.chunks_exact(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count())
}

/// Waits until the guest has written a hundred pages of `image` more than `before`, or nearly all
/// of them; how many they are. It reads them back meanwhile, and finds them right.
fn await_writes(pair: &Pair, image: &DiskImage, before: usize) -> anyhow::Result<usize> {
    let until = Instant::now() + LIMIT;
    let enough = (before + 100).min(DISK.0 as usize / 4096 * 9 / 10);
    loop {
        let pages = written(image)?;
        let bugs = [pair.source.bugs(), pair.destination.bugs()].concat();
        ensure!(bugs.is_empty(), "{bugs:?}");
        if pages >= enough {
            return Ok(pages);
        }
        ensure!(Instant::now() < until, "the guest has written {pages} pages, {enough} are due");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The most writes a second that it has told of.
fn fastest(vm: &TestVm) -> u64 {
    vm.heartbeats().iter().map(|beat| beat.heartbeat.rate).max().unwrap_or(0)
}

/// Waits until the guest writes about as fast as it did: nothing holds it any more.
fn await_speed(vm: &TestVm, free: u64) -> anyhow::Result<()> {
    let (began, until) = (Instant::now(), Instant::now() + LIMIT);
    loop {
        let beats = vm.heartbeats();
        if beats.iter().any(|beat| beat.at > began && beat.heartbeat.rate > free / 2) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "it never wrote {free} times a second again: {beats:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_guest_on_kvm_whose_move_is_cancelled_or_killed_runs_on_at_full_speed() -> anyhow::Result<()> {
    let test = "a_guest_on_kvm_whose_move_is_cancelled_or_killed_runs_on_at_full_speed";
    for build in kvm_builds_in_turn_for(test) {
        let mut pair = Pair::start(&config(&build, Mode::Full, Backend::Anonymous))?;
        let free = fastest(&pair.source);

        // While it copies, and holds the guest: Ctrl-C, and kill -9.
        for signal in [Signal::INT, Signal::KILL] {
            let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let held = ["--throttle", "direct", "--downtime-limit", "30ms"];
            let options = [&SLOW[..], &held].concat();
            let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
            await_copying(&migrate)?;
            migrate.wait_for("a throttle", LIMIT, |line| line["throttle"].as_f64() > Some(0.0))?;
            migrate.signal(signal)?;
            let migrate = migrate.wait(LIMIT)?;
            ensure!(!migrate.status.success(), "{}", migrate.last());
            check_untouched(&mut pair.source).with_context(|| format!("{signal:?}"))?;
            await_speed(&pair.source, free).with_context(|| format!("{signal:?}"))?;
            drop(receive);
            // It may have been told to load already, and then it has ended.
            pair.destination = TestVm::destination(pair.source.config())?;
        }

        // With the guest stopped: the guardian brings it back.
        for fault in ["kill-after-stop", "kill-after-state"] {
            let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let options = ["--downtime-limit", "10s", "--fault", fault];
            let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
            migrate.wait(LIMIT)?;
            await_alone(&pair.source)?;
            check_untouched(&mut pair.source).with_context(|| fault.to_owned())?;
            await_speed(&pair.source, free).with_context(|| fault.to_owned())?;
            pair.destination = TestVm::destination(pair.source.config())?;
        }

        let (migrate, _) = pair.migrate(&["--verify", "--downtime-limit", "10s"])?;
        check_arrived(&mut pair, &migrate)?;
    }
    Ok(())
}

/// A switch that is on in the CPU of `vm`, and in no word of CPUID.
fn beyond_cpuid(vm: &mut TestVm) -> anyhow::Result<Option<&'static str>> {
    let cpus = vm.qmp().execute("query-cpus-fast", Value::Null)?;
    for name in ["rdctl-no", "mds-no", "taa-no", "skip-l1dfl-vmentry"] {
        let asked = json!({ "path": cpus[0]["qom-path"], "property": name });
        if vm.qmp().execute("qom-get", asked).is_ok_and(|on| on == true) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

#[test]
fn another_processor_is_refused_with_its_features_and_the_same_one_is_not() -> anyhow::Result<()> {
    // Mutation: switches that are in no word of CPUID are not compared. Then the last case moves.
    let test = "another_processor_is_refused_with_its_features_and_the_same_one_is_not";
    for build in kvm_builds_in_turn_for(test) {
        let with =
            |cpu: &str| config(&build, Mode::Rate, Backend::Anonymous).with_extra(&["-cpu", cpu]);
        // Some hosts' KVM refuses what QEMU makes of MSR_IA32_ARCH_CAPABILITIES, and QEMU ends.
        let host = match TestVm::destination(&with("host")) {
            Err(error) if error.to_string().contains("failed to set MSR 0x10a") => {
                "host,arch-capabilities=off"
            }
            started => started.map(|_| "host")?,
        };
        let mut pair = Pair::start(&with("qemu64,pni=off"))?;
        let refused = |pair: &mut Pair, cpu: &str, words: &[&str]| -> anyhow::Result<()> {
            pair.destination = TestVm::destination(&with(cpu))?;
            let (migrate, receive) = pair.migrate(&[])?;
            let words = [words, &["the two VMs differ", "--allow-differences"]].concat();
            check_refused(&migrate, 1, &words).with_context(|| format!("{build}: {cpu}"))?;
            check_refused(&receive, 1, &words).with_context(|| format!("{build}: {cpu}"))?;
            ensure!(pair.destination.status()? == "inmigrate", "{cpu}: it was touched");
            check_untouched(&mut pair.source).with_context(|| format!("{build}: {cpu}"))
        };
        let (only_here, only_there) = ("cx16 only here", "cx16 only at the source");
        refused(&mut pair, "qemu64,pni=off,cx16=off", &["[cpu.features]", only_there])?;
        let model = "[cpu] CPU model: qemu64 at the source, host here (use -cpu qemu64)";
        refused(&mut pair, &format!("{host},migratable=on"), &[model])?;

        pair.source = TestVm::source(&with(&format!("{host},cx16=off")))?;
        pair.source.wait_ready(LIMIT)?;
        let hosts = "start both with a -cpu that both hosts have";
        refused(&mut pair, host, &["[cpu.features]", only_here, hosts])?;

        pair.source = TestVm::source(&with(host))?;
        pair.source.wait_ready(LIMIT)?;
        match beyond_cpuid(&mut pair.source)? {
            Some(name) => {
                let words = ["[cpu.features]", &format!("{name} only at the source"), hosts];
                refused(&mut pair, &format!("{host},{name}=off"), &words)?;
            }
            None => skip(test, format_args!("{build}: no feature beyond CPUID on this processor")),
        }

        pair.destination = TestVm::destination(&with(host))?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_arrived(&mut pair, &migrate).with_context(|| build.to_string())?;
    }
    Ok(())
}

/// Page writes a second of the guest, by the clock of this host, over about a second.
fn writes_a_second(vm: &TestVm) -> anyhow::Result<f64> {
    let beats = vm.wait_for_heartbeats_after(Instant::now(), 10, LIMIT)?;
    let (first, last) = (beats[0], beats[beats.len() - 1]);
    let writes = (last.heartbeat.writes - first.heartbeat.writes) as f64;
    Ok(writes / last.at.duration_since(first.at).as_secs_f64())
}

/// A measurement (docs/trackers.md), which prints: the huge pages of a guest and its speed before
/// it is tracked, meanwhile, and after the move was cancelled, when khugepaged makes huge pages
/// again.
#[test]
#[ignore = "takes two minutes, and measures: run it by its name"]
fn what_tracking_does_to_huge_pages() -> anyhow::Result<()> {
    let test = "what_tracking_does_to_huge_pages";
    let builds = kvm_builds_for(test);
    let Some(build) = builds.last().filter(|_| has_huge_pages()) else { return Ok(()) };
    let mib = |mib: u64| ByteCount(mib << 20);
    let guest = GuestConfig {
        memory: mib(1024),
        fill: mib(768),
        working_set: mib(256),
        ..GuestConfig::small(Mode::Full)
    };
    let config = VmConfig::new(build, guest).with_backend(Backend::Anonymous).on_kvm();
    let mut pair = Pair::start(&config)?;
    let show = |vm: &TestVm, when: &str| -> anyhow::Result<()> {
        let writes = writes_a_second(vm)?;
        println!("{when}: {} MiB in huge pages, {writes:.0} writes/s", in_huge_pages(vm)? >> 20);
        Ok(())
    };
    show(&pair.source, "before")?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let free = [&SLOW[..], &["--throttle", "off"]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &free)?;
    await_copying(&migrate)?;
    for when in ["while it is tracked", "a second later", "another second later"] {
        show(&pair.source, when)?;
    }
    migrate.signal(Signal::INT)?;
    migrate.wait(LIMIT)?;
    let cancelled = Instant::now();
    drop(receive);
    for seconds in [0, 2, 5, 10, 20, 40, 60, 90] {
        std::thread::sleep(Duration::from_secs(seconds).saturating_sub(cancelled.elapsed()));
        show(&pair.source, &format!("{:.0} s after it", cancelled.elapsed().as_secs_f64()))?;
    }
    check_untouched(&mut pair.source)
}

/// Moves a guest on KVM so often in a row, each time into a new QEMU, with its memory compared.
fn repeat(test: &str, times: usize) -> anyhow::Result<()> {
    for build in kvm_builds_in_turn_for(test) {
        let mut config = VmConfig { cpus: 2, ..config(&build, Mode::Rate, Backend::Anonymous) };
        config.guest.rate = 50_000;
        let mut pair = Pair::start(&config)?;
        for number in 1..=times {
            let (migrate, _) = pair.migrate(&["--verify"])?;
            check_arrived(&mut pair, &migrate).with_context(|| format!("move {number}"))?;
            let next = TestVm::destination(&config)?;
            pair.move_on(next);
        }
    }
    Ok(())
}

#[test]
fn three_moves_in_a_row_on_kvm() -> anyhow::Result<()> {
    repeat("three_moves_in_a_row_on_kvm", 3)
}

#[test]
#[ignore = "takes two minutes: make test-long"]
fn a_hundred_moves_in_a_row_on_kvm() -> anyhow::Result<()> {
    repeat("a_hundred_moves_in_a_row_on_kvm", at_most(100))
}

//! Guests of QEMU on KVM: they start, work, tell of damage, and are slowed by a throttle.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_engine::vm::SourceVm;
use godwit_qemu::QemuSource;
use godwit_stamp::settings::Mode;
use godwit_stamp::stamp::Page;
use godwit_stamp::workload::Order;
use godwit_testbed::{
    Backend, BeaconPlace, GuestConfig, Mount, Observer, QemuBuild, Style, TestVm, VmConfig,
    builds_since, kvm_builds_for, kvm_builds_in_turn_for, longest_pause, own_migration, skip,
};
use godwit_units::{ByteCount, PageCount, PageRun};
use godwit_vcpu_throttle::VcpuThrottle;

const LIMIT: Duration = Duration::from_secs(120);

fn ready(build: &QemuBuild, mode: Mode, cpus: u32) -> TestVm {
    let config = VmConfig { cpus, ..VmConfig::new(build, GuestConfig::small(mode)).on_kvm() };
    let vm = TestVm::source(&config).unwrap();
    vm.wait_ready(LIMIT).unwrap();
    vm
}

/// Page writes a second, by the clock of this host.
fn speed(vm: &TestVm) -> f64 {
    let beats = vm.wait_for_heartbeats_after(Instant::now(), 10, LIMIT).unwrap();
    let (first, last) = (beats[0], beats[beats.len() - 1]);
    let writes = (last.heartbeat.writes - first.heartbeat.writes) as f64;
    writes / last.at.duration_since(first.at).as_secs_f64()
}

#[test]
fn the_guest_on_kvm_works_in_every_mode() {
    for build in kvm_builds_in_turn_for("the_guest_on_kvm_works_in_every_mode") {
        for (mode, cpus) in [(Mode::Idle, 1), (Mode::Rate, 2), (Mode::Mixed, 2), (Mode::Full, 4)] {
            let vm = ready(&build, mode, cpus);
            let beats = vm.wait_for_heartbeats_after(Instant::now(), 10, LIMIT).unwrap();
            let (first, last) = (beats[0].heartbeat, beats[beats.len() - 1].heartbeat);
            println!("{build} {mode}: {last}, longest pause {:?}", longest_pause(&beats));
            assert_eq!((vm.bugs(), vm.errors()), (vec![], String::new()));
            assert_eq!(vm.vcpu_threads().len(), cpus as usize);
            assert!(last.count > first.count && last.checked > first.checked);
            assert_eq!(last.writes > first.writes, mode != Mode::Idle);
            BeaconPlace::find(vm.ram_file()).unwrap();
        }
    }
}

#[test]
fn a_guest_on_kvm_tells_of_damage() {
    for build in kvm_builds_in_turn_for("a_guest_on_kvm_tells_of_damage") {
        let vm = ready(&build, Mode::Rate, 1);
        let ram = File::options().read(true).write(true).open(vm.ram_file()).unwrap();
        // A page beyond the working set, which the guest only looks at.
        let config = vm.config();
        let index = config.guest.working_set.0 / 4096 + 7;
        let wanted: Vec<u8> =
            Page::first(index).0.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut page = [0; 4096];
        let mut offsets = (0..config.guest.memory.0).step_by(4096);
        let damaged = offsets.find(|&offset| {
            ram.read_exact_at(&mut page, offset).unwrap();
            page == wanted[..]
        });
        ram.write_all_at(&[0; 4096], damaged.unwrap()).unwrap();
        let told = format!("BUG page={index} ");
        let until = Instant::now() + LIMIT;
        while !vm.bugs().iter().any(|bug| bug.starts_with(&told)) {
            assert!(Instant::now() < until, "{:?}", vm.bugs());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn memory_that_the_guest_has_not_used_is_not_there() {
    let test = "memory_that_the_guest_has_not_used_is_not_there";
    for build in builds_since(9, kvm_builds_for(test), test) {
        for backend in [Backend::Anonymous, Backend::SharedFile] {
            let guest = GuestConfig::small(Mode::Idle);
            let config = VmConfig::new(&build, guest).with_backend(backend).on_kvm();
            let vm = TestVm::source(&config).unwrap();
            vm.wait_ready(LIMIT).unwrap();
            let rss = godwit_testbed::peak_rss(vm.pid()).unwrap().0;
            assert!(rss < guest.fill.0 + (100 << 20), "{backend:?}: {rss} bytes resident");
        }
    }
}

#[test]
fn a_throttle_slows_a_guest_on_kvm() {
    for build in kvm_builds_in_turn_for("a_throttle_slows_a_guest_on_kvm") {
        let vm = ready(&build, Mode::Full, 2);
        let free = speed(&vm);
        let mut throttle = VcpuThrottle::new(vm.pid(), vm.vcpu_threads());
        throttle.set(0.9).unwrap();
        let slow = speed(&vm);
        drop(throttle);
        let after = speed(&vm);
        println!("{build}: {free:.0} page writes a second, at 90 % {slow:.0}, then {after:.0}");
        // Others use the processors, too, so the bounds are far apart.
        assert!(slow < free / 3.0 && after > slow * 2.0, "{free} {slow} {after}");
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

#[test]
fn an_observer_sees_a_guest_move_whose_ram_is_anonymous() {
    let test = "an_observer_sees_a_guest_move_whose_ram_is_anonymous";
    for build in builds_since(8, kvm_builds_for(test), test) {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let config = config.with_backend(Backend::Anonymous).on_kvm();
        let mut source = TestVm::source(&config).unwrap();
        let mut destination = TestVm::destination(&config).unwrap();
        source.wait_ready(LIMIT).unwrap();
        let (here, there) = (source.ram().unwrap(), destination.ram().unwrap());
        let place = BeaconPlace::find(here.clone()).unwrap();
        let observer = Observer::start(place, here, there).unwrap();

        let own = own_migration(&mut source, &mut destination, Style::Plain, LIMIT).unwrap();

        destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        let seen = observer.finish().unwrap();
        let gap = seen.switchover.expect("it was not seen to move");
        println!("{build}: {gap:?}, by QEMU's own word {:?}", own.downtime);
        assert!(gap.at_least > Duration::ZERO && !seen.ran_on_both, "{seen:?}");
        assert_eq!([source.bugs(), destination.bugs()].concat(), [""; 0]);
    }
}

/// Pages of `vm` that KVM has in the guest's page tables now, as debugfs at `debug` tells.
fn mapped_by_kvm(debug: &Path, vm: &TestVm) -> u64 {
    let own = format!("{}-", vm.pid());
    let dirs = std::fs::read_dir(debug.join("kvm")).unwrap().flatten();
    let dir = dirs
        .map(|dir| dir.path())
        .find(|dir| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&own)));
    let dir = dir.unwrap();
    let count = |name: &str| {
        std::fs::read_to_string(dir.join(name)).unwrap().trim().parse::<u64>().unwrap()
    };
    count("pages_4k") + 512 * count("pages_2m")
}

#[test]
fn a_harvest_leaves_alone_what_nobody_wrote() {
    // Mutation: all of a block is scanned and protected in one step. Then nothing is mapped.
    let test = "a_harvest_leaves_alone_what_nobody_wrote";
    for build in &builds_since(8, kvm_builds_for(test), test) {
        let debug = match Mount::new("debugfs", "defaults") {
            Ok(debug) => debug,
            Err(error) => return skip(test, error),
        };
        let guest = GuestConfig { fill: ByteCount(32 << 20), ..GuestConfig::small(Mode::Rate) };
        let config = VmConfig::new(build, guest).with_backend(Backend::Anonymous).on_kvm();
        let mut vm = TestVm::source(&config).unwrap();
        vm.wait_ready(LIMIT).unwrap();
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
        let ram = source.ram();
        let tracker = source.start_tracking().unwrap();
        let harvest = || {
            let mut found = 0;
            for (number, block) in ram.iter().enumerate() {
                let count = &mut |run: PageRun| found += run.count.0;
                tracker.harvest(number, block.all(), PageCount(0), count).unwrap();
            }
            found
        };
        // What it reads comes back, and then nothing changes any more.
        harvest();
        vm.wait_for_heartbeats_after(Instant::now(), 10, LIMIT).unwrap();
        vm.pause().unwrap();
        harvest();
        let before = mapped_by_kvm(debug.dir(), &vm);
        assert!(before > 1000, "the guest has come to use its memory: {before} pages");
        assert_eq!(harvest(), 0, "it stands still");
        let after = mapped_by_kvm(debug.dir(), &vm);
        assert!(after * 10 > before * 9, "{before} pages were mapped, and then {after}");
    }
}

#[test]
fn a_guest_on_kvm_writes_in_the_order_it_is_told() {
    for build in kvm_builds_for("a_guest_on_kvm_writes_in_the_order_it_is_told") {
        let guest =
            GuestConfig { rate: 4000, order: Order::HotTenth, ..GuestConfig::small(Mode::Rate) };
        let vm = TestVm::source(&VmConfig::new(&build, guest).on_kvm()).unwrap();
        vm.wait_ready(LIMIT).unwrap();
        let last = || {
            let beats = vm.wait_for_heartbeats_after(Instant::now(), 1, LIMIT).unwrap();
            beats[beats.len() - 1].heartbeat.writes
        };
        let (ram, before) = (std::fs::read(vm.ram_file()).unwrap(), last());
        vm.wait_for_heartbeats_after(Instant::now(), 10, LIMIT).unwrap();
        let (after, later) = (last(), std::fs::read(vm.ram_file()).unwrap());
        let pages = ram.chunks(4096).zip(later.chunks(4096));
        let written = pages.filter(|(old, new)| old != new).count() as u64;
        println!("{build}: {written} pages in {} writes", after - before);
        // At random it would be two pages of three writes.
        assert!(written > 100 && written < (after - before) / 2, "{written}");
    }
}

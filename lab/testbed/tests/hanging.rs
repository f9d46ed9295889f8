//! A source QEMU whose storage hangs or is taken while its guest is stopped: the guest runs on, or
//! it is said why not.
//!
//! The limits are shorter than those of the product, in the same order.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use godwit_disk::DiskChoice;
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, Interrupt};
use godwit_qemu::{Limits, QemuSource};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, DiskImage, GuestConfig, QemuBuild, RemoteDisk, TestVm, VmConfig, builds_in_turn_for,
    drained, images_for,
};
use godwit_units::ByteCount;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(600);

/// QEMUs that the test `test` can run with.
fn qemus(test: &str) -> Vec<QemuBuild> {
    if images_for(test) { builds_in_turn_for(test) } else { Vec::new() }
}

/// A guest, and its disk on storage that hangs with a write on its way.
fn hung(build: &QemuBuild) -> (TestVm, RemoteDisk) {
    let disk = RemoteDisk::start(ByteCount(1 << 20)).unwrap();
    let mut config = VmConfig::new(build, GuestConfig::small(Mode::Idle));
    config.extra.extend(disk.arguments("disk"));
    let mut vm = TestVm::source(&config).unwrap();
    vm.wait_ready(LIMIT).unwrap();
    disk.hang().unwrap();
    let write = "qemu-io -d /machine/peripheral/disk-device/virtio-backend \"aio_write 0 4k\"";
    let said = vm.qmp().execute("human-monitor-command", json!({ "command-line": write })).unwrap();
    assert_eq!(said, "");
    (vm, disk)
}

/// An idle guest that has booted.
fn started(build: &QemuBuild, backend: Backend) -> TestVm {
    let config = VmConfig::new(build, GuestConfig::small(Mode::Idle)).with_backend(backend);
    let vm = TestVm::source(&config).unwrap();
    vm.wait_ready(LIMIT).unwrap();
    vm
}

/// The guest runs, and nothing of godwit's is left in its QEMU.
fn assert_as_before(vm: &mut TestVm, case: &str) {
    assert_eq!(vm.status().unwrap(), "running", "{case}");
    assert_eq!(capabilities_on(vm), [Value::Null; 0], "{case}");
    let sets = vm.qmp().execute("query-fdsets", Value::Null).unwrap();
    assert_eq!(sets, json!([]), "{case}");
}

fn capabilities_on(vm: &mut TestVm) -> Vec<Value> {
    let all = vm.qmp().execute("query-migrate-capabilities", Value::Null).unwrap();
    all.as_array().unwrap().iter().filter(|entry| entry["state"] == true).cloned().collect()
}

#[test]
fn a_guest_runs_on_when_its_storage_answers_again() {
    // On QEMU 7.2 `migrate_cancel` comes too early now and then for the migration's thread to hear
    // it: so several times.
    for build in qemus("a_guest_runs_on_when_its_storage_answers_again") {
        let (mut vm, disk) = hung(&build);
        for round in 0..4 {
            let limits = Limits { answer: SHORT, stop: SHORT, hang: LIMIT, resume: LIMIT };
            let mut source = QemuSource::open(&vm.qmp_socket()).unwrap().with_limits(limits);
            drop(drained(source.open_state().unwrap()));
            let stopped = source.stop();

            // Longer than any answer is waited for, several times over.
            let resumed = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(SHORT * 3);
                    disk.answer().unwrap();
                });
                source.resume()
            });

            assert!(stopped.unwrap_err().to_string().contains("did not answer pre-switchover"));
            resumed.unwrap();
            assert_eq!(vm.status().unwrap(), "running", "{build}, attempt {round}");
            assert_eq!(capabilities_on(&mut vm), [Value::Null; 0]);
            vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
            disk.hang().unwrap();
            let write =
                "qemu-io -d /machine/peripheral/disk-device/virtio-backend \"aio_write 0 4k\"";
            vm.qmp().execute("human-monitor-command", json!({ "command-line": write })).unwrap();
        }
        disk.answer().unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

#[test]
fn who_waits_for_storage_is_told() {
    static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
    for build in qemus("who_waits_for_storage_is_told").iter().take(1) {
        let (mut vm, disk) = hung(build);
        let limits = Limits { answer: SHORT, stop: SHORT * 6, hang: LIMIT, resume: LIMIT };
        let source = QemuSource::open(&vm.qmp_socket()).unwrap().with_limits(limits);
        let mut source = source.telling(|what| TOLD.lock().unwrap().push(what.to_owned()));
        drop(drained(source.open_state().unwrap()));

        source.stop().unwrap_err();
        let resumed = std::thread::scope(|scope| {
            scope.spawn(|| {
                let until = Instant::now() + LIMIT;
                while TOLD.lock().unwrap().len() < 2 && Instant::now() < until {
                    std::thread::sleep(SHORT / 10);
                }
                disk.answer().unwrap();
            });
            source.resume()
        });

        resumed.unwrap();
        let told = TOLD.lock().unwrap().clone();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(
            told[0].contains("still flushes its disks; waiting for it, up to 3.6s"),
            "{told:?}"
        );
        assert!(
            told[1].contains("its storage seems to hang") && told[1].contains("up to 120s"),
            "{told:?}"
        );
        assert_eq!(vm.status().unwrap(), "running");
    }
}

/// The calls of a switchover up to and including number `last`, within which `cancel` comes and
/// QEMU stands still; what that one said.
fn interrupted(source: &mut QemuSource, vm: &TestVm, last: usize, cancel: &Cancel) -> String {
    let pid = Pid::from_raw(vm.pid()).unwrap();
    let mut reader = None;
    for call in 0..=last {
        if call == last {
            kill_process(pid, Signal::STOP).unwrap();
        }
        let said = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(SHORT / 2);
                if call == last {
                    cancel.cancel();
                }
            });
            match call {
                0 => source.open_state().map(|mut state| {
                    // While nobody reads it, QEMU may answer nothing.
                    reader = Some(std::thread::spawn(move || {
                        state.read_to_end(&mut Vec::new()).unwrap()
                    }));
                }),
                1 => source.stop().map(drop),
                _ => source.release_state(),
            }
        });
        if call == last {
            kill_process(pid, Signal::CONT).unwrap();
            source.heed(&Interrupt::default());
            source.resume().unwrap();
            reader.map(|reader| reader.join().unwrap());
            return said.err().map_or("it needs no answer".to_owned(), |error| error.to_string());
        }
        said.unwrap();
    }
    unreachable!("the last call returns")
}

#[test]
fn nobody_waits_for_a_qemu_that_stands_still_once_that_is_of_no_use() {
    // Mutations: a monitor does not look at the interrupt, and it is an answer that did not come;
    // the set of descriptors is not removed when the devices are saved too late.
    for build in qemus("nobody_waits_for_a_qemu_that_stands_still_once_that_is_of_no_use") {
        for backend in [Backend::SharedFile, Backend::Anonymous] {
            let mut vm = started(&build, backend);
            for last in 0..3 {
                let case = format!("{build}, {backend:?}, call {last}");
                let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
                let cancel = Cancel::default();
                source.heed(&Interrupt::new(&cancel));

                let said = interrupted(&mut source, &vm, last, &cancel);
                drop(source);

                assert!(said.contains("not waited for any longer"), "{case}: {said}");
                assert_as_before(&mut vm, &case);
            }
            vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
            assert_eq!(vm.bugs(), [""; 0]);
        }
    }
}

#[test]
fn a_guest_runs_on_whose_devices_are_saved_for_nobody() {
    // What fails in post-copy while QEMU saves them, as the loss of the link, is followed by this.
    for build in qemus("a_guest_runs_on_whose_devices_are_saved_for_nobody") {
        for backend in [Backend::SharedFile, Backend::Anonymous] {
            let mut vm = started(&build, backend);
            let pid = Pid::from_raw(vm.pid()).unwrap();
            let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
            let reader = drained(source.open_state().unwrap());
            source.stop().unwrap();
            kill_process(pid, Signal::STOP).unwrap();
            // Mutation: the answer is waited for, and does not come.
            source.begin_release().unwrap();
            kill_process(pid, Signal::CONT).unwrap();
            source.resume().unwrap();
            // Mutation: what was to be saved outlives that, and whoever reads it waits for ever.
            let until = Instant::now() + LIMIT;
            while !reader.is_finished() {
                assert!(Instant::now() < until, "its stream does not end");
                std::thread::sleep(SHORT / 10);
            }
            reader.join().unwrap();
            drop(source);

            let case = format!("{build}, {backend:?}");
            assert_as_before(&mut vm, &case);
            vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
            assert_eq!(vm.bugs(), [""; 0], "{case}");
        }
    }
}

#[test]
fn nothing_stays_of_a_tracking_of_disks_that_nobody_waited_for() {
    // Mutation: what takes it back is interrupted as well. Then bitmaps stay.
    for build in qemus("nothing_stays_of_a_tracking_of_disks_that_nobody_waited_for") {
        let (mut vm, disk) = hung(&build);
        let source = QemuSource::open(&vm.qmp_socket()).unwrap();
        let mut source = source.with_disks(&DiskChoice::All, Some(ByteCount(65536))).unwrap();
        let cancel = Cancel::default();
        source.heed(&Interrupt::new(&cancel));

        // QEMU makes the bitmaps when its disks are drained, which is when the storage answers.
        let started = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(SHORT / 2);
                cancel.cancel();
                std::thread::sleep(SHORT * 2);
                disk.answer().unwrap();
            });
            source.moving_disks().unwrap().start_disk_tracking()
        });
        source.heed(&Interrupt::default());
        source.resume().unwrap();

        let told = started.unwrap_err().to_string();
        assert!(told.contains("not waited for any longer"), "{build}: {told}");
        let nodes = vm.qmp().execute("query-named-block-nodes", Value::Null).unwrap();
        let bitmaps = nodes.as_array().unwrap().iter().map(|node| &node["dirty-bitmaps"]);
        let left: Vec<&Value> = bitmaps.filter(|bitmaps| !bitmaps.is_null()).collect();
        assert!(left.iter().all(|bitmaps| **bitmaps == json!([])), "{build}: {left:?}");
        let exports = vm.qmp().execute("query-block-exports", Value::Null).unwrap();
        assert_eq!(exports, json!([]), "{build}");
        assert_eq!(vm.status().unwrap(), "running");
    }
}

#[test]
fn the_cure_that_is_told_brings_a_guest_back() {
    for build in qemus("the_cure_that_is_told_brings_a_guest_back") {
        let (mut vm, disk) = hung(&build);
        let limits = Limits { answer: SHORT, stop: SHORT, hang: SHORT, resume: SHORT };
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap().with_limits(limits);
        drop(drained(source.open_state().unwrap()));
        source.stop().unwrap_err();

        let told = source.resume().unwrap_err().to_string();
        drop(source);
        disk.answer().unwrap();

        assert!(told.contains("once that answers again, give it `migrate_cancel`"), "{told}");
        // `cont`, of which one would think first, is refused.
        let until = Instant::now() + LIMIT;
        while vm.qmp().execute("query-migrate", Value::Null).unwrap()["status"] != "pre-switchover"
        {
            assert!(Instant::now() < until);
        }
        vm.qmp().execute("cont", Value::Null).unwrap_err();
        vm.qmp().execute("migrate_cancel", Value::Null).unwrap();
        while vm.status().unwrap() != "running" {
            assert!(Instant::now() < until);
        }
        vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

#[test]
fn qemus_refusal_to_run_the_guest_is_told_in_its_words() {
    for build in qemus("qemus_refusal_to_run_the_guest_is_told_in_its_words") {
        let image = DiskImage::create("raw", ByteCount(1 << 20)).unwrap();
        let config =
            VmConfig::new(&build, GuestConfig::small(Mode::Idle)).with_disk("disk", &image);
        let mut vm = TestVm::source(&config).unwrap();
        vm.wait_ready(LIMIT).unwrap();
        let limits = Limits { resume: SHORT, ..Limits::default() };
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap().with_limits(limits);
        let mut state = source.open_state().unwrap();
        source.stop().unwrap();
        // While nobody reads it, QEMU may answer nothing.
        let reader = std::thread::spawn(move || state.read_to_end(&mut Vec::new()).unwrap());
        source.release_state().unwrap();
        source.state_saved().unwrap();
        assert!(reader.join().unwrap() > 0);

        // It has let go of its image, which somebody else takes.
        let thief = RemoteDisk::serve(image).unwrap();
        let told = source.resume().unwrap_err().to_string();
        drop(thief);

        assert!(told.contains("'postmigrate' and it refuses `cont`"), "{told}");
        assert!(told.contains("Failed to get shared \"write\" lock"), "{told}");
        // What it says is what helps.
        vm.qmp().execute("cont", Value::Null).unwrap();
        vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

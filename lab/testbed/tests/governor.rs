//! A real QEMU under the write governor: its guest is held to the rate, its monitor answers, its
//! main loop never waits.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use godwit_engine::vm::{Brake, SourceVm};
use godwit_qemu::QemuSource;
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, QemuBuild, TestVm, VmConfig, builds_in_turn_for, skip};
use godwit_units::PageCount;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn a_guest_is_held_to_its_rate_and_let_go() {
    for build in builds_in_turn_for("a_guest_is_held_to_its_rate_and_let_go") {
        let mut vm =
            TestVm::source(&VmConfig::new(&build, GuestConfig::small(Mode::Full))).unwrap();
        vm.wait_ready(LIMIT).unwrap();
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
        if let Some(why) = source.cannot_govern() {
            skip("a_guest_is_held_to_its_rate_and_let_go", why);
            return;
        }
        let tracker = source.start_tracking().unwrap();
        let pages = source.ram()[0].all();
        let harvest = || tracker.harvest(0, pages, PageCount::ZERO, &mut |_| {}).unwrap();
        source.govern(Some(1000.0)).unwrap();
        harvest();
        let (began, before) = (Instant::now(), source.governor_measures());
        let mut answers = 0;
        while began.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(10));
            assert_eq!(vm.status().unwrap(), "running");
            answers += 1;
            harvest();
        }
        let measures = source.governor_measures();
        let allowed = (measures.dirtied - before.dirtied) as f64 / began.elapsed().as_secs_f64();
        println!("{build}: {allowed:.0} pages a second, {answers} answers, {measures:?}");
        // Others use the processors, too, so the bounds are far apart.
        assert!((500.0..1300.0).contains(&allowed), "{allowed}");
        assert!(measures.delayed > before.delayed);

        // Free again, in segments that the governor still has and in those that go back.
        source.govern(None).unwrap();
        harvest();
        let freed = Instant::now();
        vm.wait_for_heartbeats_after(freed, 3, LIMIT).unwrap();
        drop(tracker);
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid())).unwrap();
        assert!(!smaps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" uw")));
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

/// The cause that this is named for: QEMU tells the threads of its vCPUs by the numbers of its own
/// PID namespace, and so does the kernel tell who faults. Taken for numbers of ours they were
/// strangers', who never wait and cannot be throttled.
#[test]
fn a_qemu_in_a_pid_namespace_of_its_own_is_governed_and_throttled() {
    for build in
        builds_in_turn_for("a_qemu_in_a_pid_namespace_of_its_own_is_governed_and_throttled")
    {
        // `unshare` is the process that the test knows; QEMU, its child, is number 1 in there.
        let script =
            std::env::temp_dir().join(format!("godwit-pid-namespace-{}", std::process::id()));
        let program = build.program.display();
        std::fs::write(
            &script,
            format!("#!/bin/sh\nexec unshare --pid --fork --kill-child {program} \"$@\"\n"),
        )
        .unwrap();
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .unwrap();
        let wrapped = QemuBuild { program: script.clone(), ..build.clone() };
        let vm = TestVm::source(&VmConfig::new(&wrapped, GuestConfig::small(Mode::Full)));
        std::fs::remove_file(&script).unwrap();
        let vm = vm.unwrap();
        vm.wait_ready(LIMIT).unwrap();
        assert!(vm.vcpu_threads().iter().all(|thread| *thread < 100), "{:?}", vm.vcpu_threads());
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();

        let tracker = source.start_tracking().unwrap();
        let pages = source.ram()[0].all();
        let harvest = || tracker.harvest(0, pages, PageCount::ZERO, &mut |_| {}).unwrap();
        source.govern(Some(1000.0)).unwrap();
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(1) {
            harvest();
            std::thread::sleep(Duration::from_millis(10));
        }
        let measures = source.governor_measures();
        source.govern(None).unwrap();
        harvest();
        drop(tracker);
        println!("{build}: {measures:?}");
        assert!(measures.delayed > 10, "{measures:?}");

        source.throttle(0.9).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        let throttled = source.throttle_measures();
        source.throttle(0.0).unwrap();
        println!("{build}: {throttled:?}");
        assert!(throttled.ran_share().unwrap() < 0.5, "{throttled:?}");
        vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

//! A real QEMU under the write governor: its guest is held to the rate, its monitor answers, its main loop never waits.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use godwit_engine::vm::SourceVm;
use godwit_qemu::QemuSource;
use godwit_testbed::{GuestConfig, TestVm, VmConfig, flavours_for, skip};
use godwit_units::PageCount;
use godwit_verify::settings::Mode;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn a_guest_is_held_to_its_rate_and_let_go() {
    for flavour in flavours_for("a_guest_is_held_to_its_rate_and_let_go") {
        let mut vm = TestVm::source(&VmConfig::new(&flavour, GuestConfig::small(Mode::Full))).unwrap();
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
        let allowed = (measures.first_writes - before.first_writes) as f64 / began.elapsed().as_secs_f64();
        println!("{flavour}: {allowed:.0} first writes a second, {answers} answers, {measures:?}");
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

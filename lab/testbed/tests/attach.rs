//! Attaching to a real QEMU: whoever does it may be killed at any moment, and its sandbox is no
//! obstacle.
//!
//! The process that is killed is this test program run again.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use godwit_engine::vm::SourceVm;
use godwit_qemu::QemuSource;
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, TestVm, VmConfig, builds_in_turn_for};
use godwit_track::{Approach, attach};
use godwit_units::PageCount;
use rustix::thread::CapabilitySet;

const LIMIT: Duration = Duration::from_secs(120);
const PROCESS: &str = "GODWIT_ATTACH_TO";
/// As libvirt asks for it.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Not a test of its own: the process that attaches again and again, and is killed.
#[test]
fn as_a_child() {
    let Ok(pid) = std::env::var(PROCESS) else { return };
    eprintln!("attaching");
    loop {
        attach(pid.parse().unwrap(), Approach::default()).unwrap();
    }
}

fn ready(config: &VmConfig) -> TestVm {
    let vm = TestVm::source(config).unwrap();
    vm.wait_ready(LIMIT).unwrap();
    vm
}

/// The lines of QEMU's status that tell of its main thread's signals and tracer.
fn signals(vm: &TestVm) -> Vec<String> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    let told = |line: &&str| {
        line.starts_with("Sig") && !line.starts_with("SigQ") || line.starts_with("Tracer")
    };
    status.lines().filter(told).map(str::to_owned).collect()
}

#[test]
fn kills_of_who_attaches_leave_qemu_as_it_was() {
    for build in builds_in_turn_for("kills_of_who_attaches_leave_qemu_as_it_was") {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Full));
        let mut vm = ready(&config);
        let before = signals(&vm);
        for kill in 0..40_u32 {
            let mut attacher = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "as_a_child", "--nocapture", "--quiet"])
                .env(PROCESS, vm.pid().to_string())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(attacher.stderr.take().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "attaching\n");
            // All over the first few attachments.
            let until = Instant::now() + Duration::from_micros(u64::from(kill * 1319 % 40) * 100);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            attacher.kill().unwrap();
            attacher.wait().unwrap();
            assert_eq!(vm.status().unwrap(), "running", "{build}: kill {kill}");
            assert_eq!(signals(&vm), before, "{build}: kill {kill}");
        }
        vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        assert_eq!((vm.bugs(), vm.errors()), (Vec::new(), String::new()));
    }
}

#[test]
fn a_sandboxed_qemu_is_tracked_with_the_right_to_suspend_filters_and_without() {
    for build in builds_in_turn_for("a_sandboxed_qemu_is_tracked") {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Full));
        let mut vm = ready(&config.with_extra(&["-sandbox", SANDBOX]));
        let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
        assert!(
            status.contains("Seccomp:\t2") && status.contains("Seccomp_filters:\t1"),
            "{status}"
        );
        for without in [false, true] {
            let socket = vm.qmp_socket();
            let work = move || {
                if without {
                    drop_sys_admin();
                }
                let mut source = QemuSource::open(&socket).unwrap();
                let tracker = source.start_tracking().unwrap();
                let mut found = PageCount::ZERO;
                tracker
                    .harvest(0, source.ram()[0].all(), PageCount::ZERO, &mut |run| {
                        found += run.count
                    })
                    .unwrap();
                found
            };
            assert!(std::thread::spawn(work).join().unwrap() > PageCount::ZERO);
            assert_eq!(vm.status().unwrap(), "running");
        }
        vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

/// Takes CAP_SYS_ADMIN from this thread: it may still trace, and no longer suspend filters.
fn drop_sys_admin() {
    let mut sets = rustix::thread::capabilities(None).unwrap();
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::SYS_ADMIN);
    }
    rustix::thread::set_capabilities(None, sets).unwrap();
}

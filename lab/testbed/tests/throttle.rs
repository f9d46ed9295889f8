//! A real QEMU under a throttle: it answers, it can be stopped, and nothing slows it when the
//! throttle is gone.
//!
//! Prints the figures of docs/throttle.md (`--nocapture`). The process that is killed is this test
//! program run again.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use godwit_disk::DiskChoice;
use godwit_engine::vm::{Brake, DiskVm, SourceVm};
use godwit_qemu::QemuSource;
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    GuestConfig, QemuBuild, TestVm, VmConfig, builds_for, builds_in_turn_for, drained,
};
use godwit_units::Rate;
use godwit_vcpu_throttle::{VcpuThrottle, vcpu_time};

const LIMIT: Duration = Duration::from_secs(120);

fn ready(build: &QemuBuild, cpus: u32) -> TestVm {
    let config = VmConfig { cpus, ..VmConfig::new(build, GuestConfig::small(Mode::Full)) };
    let vm = TestVm::source(&config).unwrap();
    vm.wait_ready(LIMIT).unwrap();
    vm
}

/// Whether any thread of QEMU is traced.
fn is_traced(vm: &TestVm) -> bool {
    let traced = |tid: &i32| {
        let status =
            std::fs::read_to_string(format!("/proc/{}/task/{tid}/status", vm.pid())).unwrap();
        !status.lines().any(|line| line == "TracerPid:\t0")
    };
    vm.vcpu_threads().iter().any(traced)
}

/// Processor time of the vCPUs as a share of the time that passes.
fn speed(vm: &TestVm) -> f64 {
    let time = || vcpu_time(vm.pid(), vm.vcpu_threads()).unwrap();
    let (began, before) = (Instant::now(), time());
    std::thread::sleep(Duration::from_secs(1));
    (time() - before).as_secs_f64() / began.elapsed().as_secs_f64()
}

/// How long QEMU takes to answer: median and most, in milliseconds.
fn latency(vm: &mut TestVm) -> (f64, f64) {
    let mut times: Vec<f64> = (0..100)
        .map(|_| {
            let asked = Instant::now();
            vm.status().unwrap();
            let took = asked.elapsed();
            // Not in step with the period.
            std::thread::sleep(Duration::from_micros(3300));
            took.as_secs_f64() * 1e3
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    (times[50], times[99])
}

/// Not a test of its own: the process that throttles and is killed.
#[test]
fn as_a_child() {
    let Ok(numbers) = std::env::var("GODWIT_THROTTLE_THREADS") else { return };
    let numbers: Vec<i32> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
    let mut throttle = VcpuThrottle::new(numbers[0], &numbers[1..]);
    throttle.set(0.99).unwrap();
    eprintln!("throttled");
    std::thread::sleep(LIMIT);
}

#[test]
fn a_killed_throttler_leaves_qemu_at_full_speed() {
    for build in builds_in_turn_for("a_killed_throttler_leaves_qemu_at_full_speed") {
        let mut vm = ready(&build, 2);
        let free = speed(&vm);
        let numbers = [&[vm.pid()], vm.vcpu_threads()].concat();
        let numbers: Vec<String> = numbers.iter().map(i32::to_string).collect();
        let mut throttler = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "as_a_child", "--nocapture", "--quiet"])
            .env("GODWIT_THROTTLE_THREADS", numbers.join(" "))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(throttler.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let (slow, traced) = (speed(&vm), is_traced(&vm));
        let answered = vm.status();

        throttler.kill().unwrap();
        throttler.wait().unwrap();

        let killed = Instant::now();
        let traced_after = is_traced(&vm);
        let after = speed(&vm);
        println!("{build}: free {free:.3}, at 99 % {slow:.3}, after SIGKILL {after:.3}");
        assert_eq!(line, "throttled\n");
        assert!(traced && !traced_after);
        assert_eq!(answered.unwrap(), "running");
        // Others use the processors, too, so the bounds are far apart.
        assert!(slow < 0.15 && after > slow * 3.0, "{free} {slow} {after}");
        vm.wait_for_heartbeats_after(killed, 3, LIMIT).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

#[test]
fn qemu_answers_under_a_throttle() {
    for build in builds_in_turn_for("qemu_answers_under_a_throttle") {
        let mut vm = ready(&build, 1);
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
        for share in [0.0, 0.5, 0.9, 0.99] {
            source.throttle(share).unwrap();
            let (ran, (median, most)) = (speed(&vm), latency(&mut vm));
            let longest = source.throttle_measures().longest_stop;
            println!(
                "{build} at {share}: runs {ran:.3}, answers in {median:.2} ms, at most {most:.2} \
                 ms; longest stop {longest:?}"
            );
            assert_eq!(is_traced(&vm), share > 0.0);
        }
        source.throttle(0.0).unwrap();
        assert!(!is_traced(&vm));
        assert!(source.throttle(1.0).unwrap_err().to_string().contains("use 0 (none) to 0.99"));
        assert_eq!(source.vcpus(), 1);
        assert!(source.vcpu_time().unwrap() > Duration::ZERO);
        vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

#[test]
fn a_throttle_ends_when_the_guest_stops_and_on_every_way_back() {
    for build in builds_in_turn_for("a_throttle_ends_when_the_guest_stops_and_on_every_way_back") {
        let mut vm = ready(&build, 1);
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
        for share in [0.0, 0.5, 0.9, 0.99] {
            let (mut stops, mut saved) = (Vec::new(), 0);
            for _ in 0..10 {
                source.throttle(share).unwrap();
                std::thread::sleep(Duration::from_millis(23));
                let reader = drained(source.open_state().unwrap());
                let asked = Instant::now();
                let stopped = source.stop().unwrap();
                stops.push((
                    asked.elapsed().as_secs_f64() * 1e3,
                    stopped.duration_since(asked).as_secs_f64() * 1e3,
                ));
                assert!(!is_traced(&vm));
                source.resume().unwrap();
                assert_eq!(vm.status().unwrap(), "running");
                saved = saved.max(reader.join().unwrap());
            }
            stops.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
            println!(
                "{build} at {share}: migrate to pre-switchover (of which until STOP), ms: \
                 {stops:.2?}; at most {saved} bytes"
            );
        }
        // Nothing was opened, so QEMU refuses to migrate.
        source.throttle(0.99).unwrap();
        assert!(source.stop().is_err());
        assert!(!is_traced(&vm));
        source.resume().unwrap();
        source.throttle(0.99).unwrap();
        source.resume().unwrap();
        assert!(!is_traced(&vm));
        source.throttle(0.99).unwrap();
        source.retire(true).unwrap();
        assert!(!is_traced(&vm));
        source.throttle(0.99).unwrap();
        drop(source);
        assert!(!is_traced(&vm));
        vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT).unwrap();
        assert_eq!(vm.bugs(), [""; 0]);
    }
}

#[test]
fn the_end_of_qemu_is_told_at_the_next_call() {
    for build in builds_in_turn_for("the_end_of_qemu_is_told_at_the_next_call") {
        let mut vm = ready(&build, 1);
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
        source.throttle(0.9).unwrap();
        vm.kill();
        assert!(source.throttle(0.9).unwrap_err().to_string().contains("has ended"));
        assert!(source.throttle(0.5).is_err());
    }
}

#[test]
fn disk_writes_are_limited_and_put_back() {
    // Regression: every writable disk had the limit that was meant for all together, moving or not.
    let names = ["d", "e", "stays"];
    let images = names.map(|name| {
        std::env::temp_dir().join(format!("godwit-limits-{name}-{}", std::process::id()))
    });
    let mut options = Vec::new();
    for (name, image) in names.iter().zip(&images) {
        std::fs::write(image, vec![0; 1 << 20]).unwrap();
        let own = if *name == "d" { ",throttling.bps-read=7000000" } else { "" };
        let drive = format!("file={},if=none,id={name},format=raw{own}", image.display());
        options.extend(["-drive".to_owned(), drive]);
        options.extend(["-device".to_owned(), format!("virtio-blk-pci,drive={name}")]);
    }
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let rates = |texts: [&str; 2]| texts.map(|text| text.parse::<Rate>().unwrap());
    for build in builds_for("disk_writes_are_limited_and_put_back") {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle)).with_extra(&options);
        let mut vm = TestVm::source(&config).unwrap();
        vm.wait_ready(LIMIT).unwrap();
        // A monitor of its own serves the test.
        let limits = |vm: &mut TestVm| {
            let blocks = vm.qmp().execute("query-block", serde_json::Value::Null).unwrap();
            names.map(|name| {
                let disk = blocks.as_array().unwrap().iter().find(|block| block["device"] == name);
                let inserted = &disk.unwrap()["inserted"];
                (inserted["bps_wr"].as_u64().unwrap(), inserted["bps_rd"].as_u64().unwrap())
            })
        };
        let before = [(0, 7_000_000), (0, 0), (0, 0)];
        assert_eq!(limits(&mut vm), before);
        let choice = DiskChoice::Named(vec!["d".to_owned(), "e".to_owned()]);
        let source = QemuSource::open(&vm.qmp_socket()).unwrap();
        let mut source = source.with_disks(&choice, None).unwrap();
        source.limit_disks(&rates(["1MiB/s", "3MiB/s"])).unwrap();
        assert_eq!(limits(&mut vm), [(1 << 20, 7_000_000), (3 << 20, 0), (0, 0)], "{build}");
        source.limit_disks(&rates(["2MiB/s", "1MiB/s"])).unwrap();
        assert_eq!(limits(&mut vm), [(2 << 20, 7_000_000), (1 << 20, 0), (0, 0)], "{build}");
        source.limit_disks(&[]).unwrap();
        assert_eq!(limits(&mut vm), before, "{build}");
        source.limit_disks(&rates(["2MiB/s", "1MiB/s"])).unwrap();
        source.resume().unwrap();
        assert_eq!(limits(&mut vm), before, "{build}");
    }
    for image in images {
        std::fs::remove_file(image).unwrap();
    }
}

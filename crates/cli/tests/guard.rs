//! A guardian whose godwit is killed while it starts.
#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// When process `pid` was started: field 22 of its `stat` (proc_pid_stat(5)).
fn start_time(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields = stat.rsplit_once(") ").unwrap().1;
    fields.split(' ').nth(22 - 3).unwrap().to_owned()
}

/// The process and the beginning of a godwit that was killed.
fn killed() -> (u32, String) {
    let mut godwit = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = godwit.id();
    let started = start_time(pid);
    godwit.kill().unwrap();
    godwit.wait().unwrap();
    (pid, started)
}

/// What the guardian of process `pid` says, of which nobody uses the monitor any more.
fn guard(record: &Path, pid: u32) -> Output {
    let (line, _ours) = UnixStream::pair().unwrap();
    let (monitor, _) = UnixStream::pair().unwrap();
    Command::new(env!("CARGO_BIN_EXE_godwit"))
        .args(["guard".as_ref(), record.as_os_str(), pid.to_string().as_ref()])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(line)))
        .stdout(Stdio::from(std::os::fd::OwnedFd::from(monitor)))
        .output()
        .unwrap()
}

#[test]
fn a_record_goes_with_a_qemu_that_ends_while_it_is_asked() {
    // Mutation: a guardian that cannot reach QEMU leaves the record without a second look.
    let (pid, started) = killed();
    let mut qemu = Command::new("sleep").arg("60").spawn().unwrap();
    let directory = std::env::temp_dir().join(format!("godwit-ends-{pid}-{started}"));
    std::fs::create_dir(&directory).unwrap();
    let record = directory.join(format!("godwit-{pid}-{started}-guard-{}", qemu.id()));
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let number: u64 = start_time(qemu.id()).parse().unwrap();
    let left = serde_json::json!({
        "qemu": qemu.id(), "qemu_started": number, "boot": boot.trim(),
        "stage": "handing-over",
        "was_running": true, "settings": null, "limits": { "before": [], "ours": [] },
        "disks": false, "definition": null,
        "lock": null, "started": false,
    });
    std::fs::write(&record, format!("\n{left}\n")).unwrap();

    // One that does not end is somebody's to look at.
    let guardian = guard(&record, pid);
    let errors = String::from_utf8_lossy(&guardian.stderr);
    assert!(!guardian.status.success() && record.exists(), "{errors}");
    assert!(errors.contains("QEMU closed the monitor"), "{errors}");

    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        qemu.kill().unwrap();
        qemu.wait().unwrap();
    });
    let guardian = guard(&record, pid);
    ends.join().unwrap();
    let errors = String::from_utf8_lossy(&guardian.stderr);
    assert!(guardian.status.success() && errors.is_empty(), "{errors}");
    assert!(!record.exists(), "the record stays");
    std::fs::remove_dir(directory).unwrap();
}

#[test]
fn one_that_comes_too_late_leaves_no_record() {
    // Mutation: the guardian ends as soon as it finds that its parent is another.
    let (pid, started) = killed();
    let directory = std::env::temp_dir().join(format!("godwit-late-{pid}-{started}"));
    std::fs::create_dir(&directory).unwrap();
    let record = directory.join(format!("godwit-{pid}-{started}-guard-1"));
    // A godwit that was killed may have written nothing down, or that there is nothing.
    for text in [None, Some(""), Some("\n{\"qemu\":1,\"qemu_st")] {
        if let Some(text) = text {
            std::fs::write(&record, text).unwrap();
        }
        let guardian = guard(&record, pid);
        let errors = String::from_utf8_lossy(&guardian.stderr);
        assert!(guardian.status.success(), "{text:?}: {}: {errors}", guardian.status);
        assert!(errors.is_empty(), "{text:?}: {errors}");
        assert!(!record.exists(), "{text:?}: the record stays");
    }
    std::fs::remove_dir(directory).unwrap();
}

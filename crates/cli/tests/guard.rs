//! A guardian whose godwit is killed while it starts.
#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

/// When process `pid` was started: field 22 of its `stat` (proc_pid_stat(5)).
fn start_time(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields = stat.rsplit_once(") ").unwrap().1;
    fields.split(' ').nth(22 - 3).unwrap().to_owned()
}

#[test]
fn one_that_comes_too_late_leaves_no_record() {
    // Mutation: the guardian ends as soon as it finds that its parent is another.
    let mut godwit = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = godwit.id();
    let started = start_time(pid);
    godwit.kill().unwrap();
    godwit.wait().unwrap();

    let directory = std::env::temp_dir().join(format!("godwit-late-{pid}-{started}"));
    std::fs::create_dir(&directory).unwrap();
    let record = directory.join(format!("godwit-{pid}-{started}-guard-1"));
    // A godwit that was killed may have written nothing down, or that there is nothing.
    for text in [None, Some(""), Some("\n{\"qemu\":1,\"qemu_st")] {
        if let Some(text) = text {
            std::fs::write(&record, text).unwrap();
        }
        let (line, _ours) = UnixStream::pair().unwrap();
        let (monitor, _qemu) = UnixStream::pair().unwrap();
        let guardian = Command::new(env!("CARGO_BIN_EXE_godwit"))
            .args(["guard".as_ref(), record.as_os_str(), pid.to_string().as_ref()])
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(line)))
            .stdout(Stdio::from(std::os::fd::OwnedFd::from(monitor)))
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&guardian.stderr);
        assert!(guardian.status.success(), "{text:?}: {}: {errors}", guardian.status);
        assert!(errors.is_empty(), "{text:?}: {errors}");
        assert!(!record.exists(), "{text:?}: the record stays");
    }
    std::fs::remove_dir(directory).unwrap();
}

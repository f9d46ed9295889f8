//! Whose fault it is: a thread's that writes for the guest, or one's that nobody may keep waiting.

use std::collections::HashMap;

use crate::threads::threads_of;

/// On whose behalf a thread writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// The guest's own stores; the number tells writers apart.
    Guest(i32),
    /// The VMM's: its main loop, its I/O threads, and kernel threads such as vhost's.
    Machine,
}

/// Kernel workers write for a guest whose page fault KVM handles asynchronously
/// (virt/kvm/async_pf.c): then not the vCPU faults but a worker, while the vCPU does something
/// else. They count as one writer.
const WORKERS: i32 = -1;
/// Threads remembered, at the most.
const KNOWN: usize = 4096;

/// Tells them apart. Threads that fault come with the numbers of their own PID namespace.
#[derive(Debug, Default)]
pub(crate) struct Writers {
    pid: i32,
    /// In those numbers.
    vcpus: Vec<i32>,
    known: HashMap<i32, Writer>,
}

impl Writers {
    /// The threads of process `pid`, of which `vcpus` run the guest; all these are numbers here.
    pub(crate) fn new(pid: i32, vcpus: &[i32]) -> Self {
        let threads = threads_of(pid);
        let inside = |here: i32| {
            threads.iter().find(|thread| thread.here == here).map(|thread| thread.inside)
        };
        // One that has ended, and may be replaced under its number, keeps it.
        let vcpus = vcpus.iter().map(|&here| inside(here).unwrap_or(here)).collect();
        Self { pid, vcpus, known: HashMap::new() }
    }

    /// On whose behalf `thread` writes.
    pub(crate) fn of(&mut self, thread: i32) -> Writer {
        if self.vcpus.contains(&thread) {
            return Writer::Guest(thread);
        }
        if self.known.len() >= KNOWN {
            self.known.clear();
        }
        let pid = self.pid;
        *self.known.entry(thread).or_insert_with(|| stranger(pid, thread))
    }
}

/// A thread that is no vCPU. A kernel worker has the number that it has here: it is in no namespace
/// of a process.
fn stranger(pid: i32, thread: i32) -> Writer {
    let own = threads_of(pid).iter().any(|own| own.inside == thread);
    let name = std::fs::read_to_string(format!("/proc/{thread}/comm")).unwrap_or_default();
    if !own && name.starts_with("kworker/") { Writer::Guest(WORKERS) } else { Writer::Machine }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_told_from_all_others() {
        let pid = std::process::id().cast_signed();
        let mut writers = Writers::new(pid, &[7, 9]);
        assert_eq!(writers.of(9), Writer::Guest(9));
        assert_eq!(writers.of(pid), Writer::Machine);
        // One that is gone.
        assert_eq!(writers.of(i32::MAX), Writer::Machine);
    }

    /// The kernel tells who faults by the numbers of their own PID namespace, in which the first
    /// process is number 1.
    #[test]
    fn vcpus_of_a_pid_namespace_are_known_by_the_numbers_in_it() {
        use std::process::{Command, Stdio};
        let script = ["--pid", "--fork", "--kill-child", "sh", "-c", "echo in; read line"];
        let mut outer = Command::new("unshare");
        let outer = outer.args(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let Ok(mut outer) = outer else { return };
        let mut said = [0; 3];
        let mut stdout = outer.stdout.take().unwrap();
        // Without the right to a namespace it says nothing.
        if std::io::Read::read_exact(&mut stdout, &mut said).is_ok() {
            let children = format!("/proc/{0}/task/{0}/children", outer.id());
            let pid: i32 = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
            let mut writers = Writers::new(pid, &[pid]);
            assert_eq!(writers.of(1), Writer::Guest(1));
            assert_eq!(Writers::new(pid, &[]).of(1), Writer::Machine);
        }
        let _ = outer.kill();
        outer.wait().unwrap();
    }

    #[test]
    fn kernel_workers_write_for_the_guest() {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let mut numbers =
            processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let worker = numbers.find(|pid| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.starts_with("kworker/")
        });
        // A container's /proc shows none.
        let Some(worker) = worker else { return };
        assert_eq!(Writers::new(1, &[]).of(worker), Writer::Guest(WORKERS));
    }
}

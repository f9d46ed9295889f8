//! The threads of a process by both their numbers: ours, and those of its own PID namespace.
//!
//! What a process says of its threads (QMP's `thread-id`), and what the kernel says of them to a
//! userfaultfd, is in its own numbers; what can be traced or looked up in /proc is in ours
//! (pid_namespaces(7), proc(5): `NSpid`).

/// A thread.
///
/// ```
/// use godwit_track::threads_of;
///
/// /// What QEMU calls thread 17 in a container is known by another number here.
/// fn known_as(qemu: i32) -> Option<i32> {
///     threads_of(qemu).iter().find(|thread| thread.inside == 17).map(|thread| thread.here)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadNumbers {
    /// As /proc has it here.
    pub here: i32,
    /// As the process itself has it.
    pub inside: i32,
}

/// All threads of process `pid`, which is a number here; none when it has ended.
///
/// ```
/// let process = std::process::id() as i32;
/// let threads = godwit_track::threads_of(process);
/// assert!(threads.iter().any(|thread| thread.here == process));
/// ```
#[must_use]
pub fn threads_of(pid: i32) -> Vec<ThreadNumbers> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let numbers = tasks.filter_map(|task| {
        let here = task.file_name().to_str()?.parse().ok()?;
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        Some(ThreadNumbers { here, inside: innermost(&status).unwrap_or(here) })
    });
    numbers.collect()
}

/// The number in the innermost namespace.
fn innermost(status: &str) -> Option<i32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_the_innermost() {
        assert_eq!(innermost("Name:\tx\nNSpid:\t4711\t23\t7\nVmPeak:\t1\n"), Some(7));
        assert_eq!(innermost("NSpid:\t4711\n"), Some(4711));
        assert_eq!(innermost("Name:\tx\n"), None);
    }

    #[test]
    fn own_threads_have_the_numbers_that_they_give() {
        let pid = std::process::id().cast_signed();
        let threads = threads_of(pid);
        assert!(threads.iter().any(|thread| thread.here == pid));
        assert_eq!(threads_of(i32::MAX), []);
    }
}

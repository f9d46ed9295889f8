//! Who goes first where memory runs out (`oom_score_adj`, proc_pid_oom_score_adj(5)): a QEMU that
//! was started for a guest, as long as that runs elsewhere.
//!
//! Invariant: a QEMU that has the guest stands where another would, and not in front.

use std::io;

/// Whoever has it is ended before all others.
const FIRST: i32 = 1000;

fn file(process: &str) -> String {
    format!("/proc/{process}/oom_score_adj")
}

fn of(process: &str) -> Option<i32> {
    std::fs::read_to_string(file(process)).ok()?.trim().parse().ok()
}

fn put(pid: i32, rank: i32) -> io::Result<()> {
    std::fs::write(file(&pid.to_string()), rank.to_string())
}

/// Process `pid` is the first to go. Everybody may be that; where it cannot be said, it stands
/// where whoever has started it does.
pub(crate) fn put_first(pid: i32) {
    let _ = put(pid, FIRST);
}

/// It stands where the process `like` does from now on; without one, or where that takes a right
/// which is not there, where this one does.
///
/// # Errors
/// When it stays the first.
pub(crate) fn leave_first(pid: i32, like: Option<i32>) -> io::Result<()> {
    // The kernel lets everybody go back to where they came from, and no further; but where whoever
    // put it first may go further (CAP_SYS_RESOURCE), it takes that to go back (`__set_oom_adj`,
    // fs/proc/base.c).
    let own = of("self").unwrap_or(0);
    let wanted = like.and_then(|like| of(&like.to_string())).unwrap_or(own);
    let left = put(pid, wanted).or_else(|_| put(pid, own));
    left.or_else(|error| if of(&pid.to_string()) == Some(FIRST) { Err(error) } else { Ok(()) })
}

/// The children of process `pid`, such as a helper for its network, have come first with it, and
/// stand where it does from now on, as far as that can be: the guest does not depend on them as it
/// does on the process. What is nobody's child any more stays the first.
pub(crate) fn leave_first_below(pid: i32) {
    for child in children_of(pid).filter(|child| of(&child.to_string()) == Some(FIRST)) {
        let _ = leave_first(child, Some(pid));
        leave_first_below(child);
    }
}

/// What the threads of process `pid` have started, as far as it is told (proc_tid_children(5)).
fn children_of(pid: i32) -> impl Iterator<Item = i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|it| std::fs::read_to_string(it.path().join("children")).ok());
    lists.flat_map(|list| {
        let pids: Vec<i32> = list.split(' ').filter_map(|pid| pid.parse().ok()).collect();
        pids
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use super::*;

    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            Self(Command::new("sleep").arg("60").spawn().unwrap())
        }

        fn pid(&self) -> i32 {
            self.0.id().cast_signed()
        }

        fn rank(&self) -> Option<i32> {
            of(&self.pid().to_string())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn what_a_process_has_started_is_not_left_the_first() {
        // Mutations: its children stay the first; a child that came elsewhere by itself is moved.
        const STARTS_TWO: &str = "echo 1000 > /proc/$$/oom_score_adj; sleep 60 & \
                                  echo 900 > /proc/$!/oom_score_adj; sleep 60 & wait";
        let parent = Sleeper(Command::new("sh").args(["-c", STARTS_TWO]).spawn().unwrap());
        let until = Instant::now() + Duration::from_secs(10);
        let ranks = || -> Vec<_> {
            let of_children = children_of(parent.pid()).map(|child| of(&child.to_string()));
            of_children.collect()
        };
        while ranks() != [Some(900), Some(FIRST)] {
            assert!(Instant::now() < until, "{:?}", ranks());
        }
        leave_first(parent.pid(), None).unwrap();
        leave_first_below(parent.pid());
        assert_eq!(ranks(), [Some(900), of("self")]);
        children_of(parent.pid()).for_each(|child| {
            let child = rustix::process::Pid::from_raw(child).unwrap();
            let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
        });
    }

    #[test]
    fn who_waits_for_a_guest_goes_first_and_who_has_it_goes_where_the_one_before_did() {
        // Mutation: it stays the first.
        let (old, new) = (Sleeper::new(), Sleeper::new());
        let own = of("self").unwrap();
        put_first(new.pid());
        assert_eq!(new.rank(), Some(FIRST));
        leave_first(new.pid(), None).unwrap();
        assert_eq!(new.rank(), Some(own));
        // Behind where it came from, which takes no right.
        let before = (own + FIRST) / 2;
        put(old.pid(), before).unwrap();
        put_first(new.pid());
        leave_first(new.pid(), Some(old.pid())).unwrap();
        assert_eq!(new.rank(), Some(before));
    }
}

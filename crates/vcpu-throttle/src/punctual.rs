//! A thread that wakes when it said it would.
#![allow(unsafe_code)]

/// Makes the calling thread punctual for the rest of its life: at real-time priority where that is
/// permitted (root, CAP_SYS_NICE), and without slack on its timers. Whether it got the priority.
/// Such a thread must sleep most of the time.
pub fn become_punctual() -> bool {
    // A millionth of a second would do; the default is 50 µs (prctl(2)). It is refused to nobody.
    // SAFETY: takes a number and changes the calling thread only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1u64) };
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: reads one `sched_param`; thread 0 is the calling one.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const parameters) == 0 }
}

//! Scheduling of our own threads: urgent while a thread of the VMM is held, punctual for the
//! governor.
#![allow(unsafe_code)]

/// Puts the calling thread at real-time priority for the rest of its life, if it may have that
/// (root, CAP_SYS_NICE): while it holds a thread of the VMM stopped, nothing else on the host may
/// make it wait. The thread of the VMM is left as it is: were this process killed now, nobody would
/// put its priority back.
pub(super) fn become_urgent() {
    // SAFETY: asks for a number.
    if unsafe { libc::sched_getscheduler(0) } == libc::SCHED_OTHER {
        schedule(libc::SCHED_RR, 1);
    }
    tighten_timers();
}

/// Makes the calling thread wake when it said it would, for the rest of its life: real-time
/// priority, if it may have that, and no slack on its timers.
pub(crate) fn become_punctual() {
    schedule(libc::SCHED_RR, 1);
    tighten_timers();
}

fn tighten_timers() {
    // SAFETY: takes a number and changes the calling thread only (prctl(2)).
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1u64) };
}

/// Puts the calling thread under a scheduling policy, or leaves it where it is.
fn schedule(policy: libc::c_int, priority: libc::c_int) {
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: reads one `sched_param`; thread 0 is the calling one.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
}

//! The numbered list of faults.
//!
//! Keeps two promises: a number is never given to another fault, so that what was red once can be
//! found again; and what must come of a fault stands beside it, not in the code that looks.

use std::time::Duration;

use godwit_testbed::Harm;
use rustix::process::Signal;

use crate::phase::Phase;
use crate::rig::{Adapter, Side};
use crate::scene::Scene;

/// Short enough that nobody gives up.
const MOMENT: Duration = Duration::from_millis(1500);
/// Longer than a peer is not heard of before it is given up (10 s).
const LONG: Duration = Duration::from_secs(13);
/// A guest that stands still does so for longer than anybody should wait, though not by much: the
/// machine may be busy.
const SOON: Duration = Duration::from_secs(30);

/// What must come of a fault, beside that exactly one side has the guest, unharmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Must {
    /// Nothing more: it stays or it moves.
    Settle,
    /// The migration comes to its end as if nothing had been.
    Move,
    /// The same if it strikes before the guest is stopped.
    MoveBeforeStop,
    /// The guest is at the source.
    Stay,
    /// The guest is at the source unless COMMIT was sent.
    StayBeforeCommit,
    /// It goes with the VM that had it, and comes to run nowhere else.
    GoWithItsVm(Side),
}

/// One fault.
pub struct Point {
    /// Its number, for good.
    pub number: u32,
    /// What is struck: godwit, its guardian, the VM, the link.
    pub place: &'static str,
    /// What befalls it.
    pub what: &'static str,
    /// Options of `godwit migrate`.
    pub options: &'static [&'static str],
    /// When it can strike.
    pub phases: &'static [Phase],
    /// Whom it can strike.
    pub adapters: &'static [Adapter],
    /// What must come of it.
    pub must: Must,
    /// By then `migrate` must have ended, where both sides are there and can tell each other.
    pub within: Option<Duration>,
    /// Nobody is left who could clean up: the next migration does.
    pub leaves: bool,
    /// Makes it.
    pub strike: fn(&mut Scene<'_>) -> anyhow::Result<()>,
}

const EVERY: &[Phase] = &Phase::ALL;
/// Those in which there are guardians on both sides.
const GUARDED: &[Phase] = &[
    Phase::FirstRound,
    Phase::LaterRound,
    Phase::Prepare,
    Phase::Prepared,
    Phase::LastRound,
    Phase::State,
    Phase::Ready,
    Phase::Commit,
];
/// Some that differ in who has to answer, for faults that take long.
const TELLING: &[Phase] = &[Phase::FirstRound, Phase::Prepare, Phase::LastRound, Phase::Ready];
const ALL: &[Adapter] = &Adapter::ALL;
/// Those in a process apart from godwit's.
const APART: &[Adapter] =
    &[Adapter::Kvm, Adapter::QemuFile, Adapter::QemuAnonymous, Adapter::Libvirt];

/// Those that strike the VM at the destination.
const DESTINATION_VM: [u32; 3] = [21, 23, 25];

impl Point {
    /// Whether there is anything to strike: libvirt has no VM at the destination before `receive`
    /// knows what comes.
    #[must_use]
    pub fn can_strike(&self, adapter: Adapter, phase: Phase) -> bool {
        let not_there_yet = adapter == Adapter::Libvirt && phase == Phase::Offer;
        self.adapters.contains(&adapter)
            && !(not_there_yet && DESTINATION_VM.contains(&self.number))
    }
}

/// All faults.
#[must_use]
pub fn points() -> Vec<Point> {
    [processes(), vms(), links()].into_iter().flatten().collect()
}

fn point(
    number: u32,
    place: &'static str,
    what: &'static str,
    must: Must,
    strike: fn(&mut Scene<'_>) -> anyhow::Result<()>,
) -> Point {
    let (options, phases, adapters) = (&[][..], EVERY, ALL);
    let (within, leaves) = (None, false);
    Point { number, place, what, options, phases, adapters, must, within, leaves, strike }
}

/// 1 to 19: the processes of godwit.
fn processes() -> Vec<Point> {
    use Side::{Destination, Source};
    let on = |point: Point| Point { adapters: APART, ..point };
    let unguarded =
        |point: Point| Point { adapters: APART, phases: GUARDED, leaves: true, ..point };
    let guarded = |point: Point| Point { adapters: APART, phases: GUARDED, ..point };
    vec![
        on(point(1, "migrate", "killed", Must::StayBeforeCommit, |scene| {
            scene.kill(Source);
            scene.pass();
            Ok(())
        })),
        on(point(2, "receive", "killed", Must::StayBeforeCommit, |scene| {
            scene.kill(Destination);
            scene.pass();
            Ok(())
        })),
        on(point(3, "migrate, receive", "both killed", Must::StayBeforeCommit, |scene| {
            scene.kill(Source);
            scene.kill(Destination);
            scene.pass();
            Ok(())
        })),
        point(4, "migrate", "interrupted (Ctrl-C)", Must::Settle, |scene| {
            scene.signal(Source, Signal::INT)?;
            scene.pass();
            Ok(())
        }),
        point(5, "receive", "interrupted (Ctrl-C)", Must::Settle, |scene| {
            scene.signal(Destination, Signal::INT)?;
            scene.pass();
            Ok(())
        }),
        point(6, "migrate", "hangs for a moment", Must::Move, |scene| scene.hang(Source, MOMENT)),
        point(7, "receive", "hangs for a moment", Must::Move, |scene| {
            scene.hang(Destination, MOMENT)
        }),
        guarded(point(8, "guardian of migrate", "killed", Must::Move, |scene| {
            scene.kill_guardian(Source)?;
            scene.pass();
            Ok(())
        })),
        guarded(point(9, "guardian of receive", "killed", Must::Move, |scene| {
            scene.kill_guardian(Destination)?;
            scene.pass();
            Ok(())
        })),
        unguarded(point(
            10,
            "migrate, its guardian",
            "both killed",
            Must::StayBeforeCommit,
            |scene| {
                scene.kill_with_guardian(Source)?;
                scene.pass();
                Ok(())
            },
        )),
        unguarded(point(
            11,
            "receive, its guardian",
            "both killed",
            Must::StayBeforeCommit,
            |scene| {
                scene.kill_with_guardian(Destination)?;
                scene.pass();
                Ok(())
            },
        )),
        // Its memory in a file is filled by `receive`.
        Point {
            phases: &[Phase::Accept, Phase::FirstRound],
            adapters: &[Adapter::Kvm, Adapter::QemuFile],
            ..point(12, "receive", "gets no more memory", Must::Stay, |scene| {
                scene.take_memory(Destination)?;
                scene.pass();
                Ok(())
            })
        },
    ]
}

/// 20 to 31: the VMs, and who manages them.
fn vms() -> Vec<Point> {
    use Side::{Destination, Source};
    let late = |point: Point| Point { phases: TELLING, ..point };
    let managed = |point: Point| Point { adapters: &[Adapter::Libvirt], ..point };
    vec![
        point(20, "VM at the source", "killed", Must::GoWithItsVm(Source), |scene| {
            scene.signal_vm(Source, Signal::KILL)?;
            scene.pass();
            Ok(())
        }),
        point(21, "VM at the destination", "killed", Must::GoWithItsVm(Destination), |scene| {
            scene.signal_vm(Destination, Signal::KILL)?;
            scene.pass();
            Ok(())
        }),
        point(22, "VM at the source", "answers late", Must::Move, |scene| {
            scene.hang_vm(Source, MOMENT)
        }),
        point(23, "VM at the destination", "answers late", Must::Move, |scene| {
            scene.hang_vm(Destination, MOMENT)
        }),
        late(point(24, "VM at the source", "answers very late", Must::Settle, |scene| {
            scene.hang_vm(Source, LONG)
        })),
        late(point(25, "VM at the destination", "answers very late", Must::Settle, |scene| {
            scene.hang_vm(Destination, LONG)
        })),
        managed(point(30, "libvirt at the source", "killed, started", Must::Settle, |scene| {
            scene.restart_manager(Source)?;
            scene.pass();
            Ok(())
        })),
        managed(point(
            31,
            "libvirt at the destination",
            "killed, started",
            Must::Settle,
            |scene| {
                scene.restart_manager(Destination)?;
                scene.pass();
                Ok(())
            },
        )),
    ]
}

/// 40 to 59: the link.
fn links() -> Vec<Point> {
    use Side::{Destination, Source};
    let soon = |point: Point| Point { within: Some(SOON), ..point };
    let reconnect = |point: Point| Point { options: &["--reconnect", "30s"], ..point };
    vec![
        point(40, "link", "cut for good", Must::StayBeforeCommit, |scene| {
            scene.proxy.cut();
            Ok(())
        }),
        reconnect(point(41, "link", "cut, and mended", Must::MoveBeforeStop, |scene| {
            scene.proxy.cut();
            std::thread::sleep(MOMENT);
            scene.proxy.mend();
            Ok(())
        })),
        point(42, "link", "half open: source not told", Must::StayBeforeCommit, |scene| {
            scene.half_open(Destination);
            Ok(())
        }),
        point(43, "link", "half open: destination not told", Must::StayBeforeCommit, |scene| {
            scene.half_open(Source);
            Ok(())
        }),
        point(44, "link", "stalls for a moment", Must::Move, |scene| {
            std::thread::sleep(MOMENT);
            scene.pass();
            Ok(())
        }),
        point(45, "link", "stalls for long", Must::Settle, |scene| {
            std::thread::sleep(LONG);
            scene.pass();
            Ok(())
        }),
        soon(point(46, "bytes", "lost", Must::Settle, |scene| {
            let count = scene.rng.usize(1..24);
            scene.harm(Harm::Lose(count));
            Ok(())
        })),
        soon(point(47, "bytes", "in another order", Must::Settle, |scene| {
            let count = scene.rng.usize(8..24);
            scene.harm(Harm::Reorder(count));
            Ok(())
        })),
        soon(point(48, "bytes", "a bit flipped", Must::Settle, |scene| {
            let bit = scene.rng.usize(..24 * 8);
            scene.harm(Harm::Flip(bit));
            Ok(())
        })),
        point(49, "bytes", "come one to seven at a time", Must::Move, |scene| {
            scene.harm(Harm::Pieces(4096));
            Ok(())
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rise_and_every_point_can_strike_somebody_somewhen() {
        let points = points();
        assert!(points.windows(2).all(|pair| pair[0].number < pair[1].number));
        assert!(points.iter().all(|point| !point.phases.is_empty() && !point.adapters.is_empty()));
    }
}

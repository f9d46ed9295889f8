//! Many moves in a row between two hosts, with failures among them: of the guest's disks one is on
//! storage that both have, the other moves along. What fails, and when, comes from one number,
//! which is printed; `GODWIT_SEED` repeats it.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_testbed::{Running, at_most};
use rustix::process::{Pid, Signal, kill_process};

use crate::disks::Own;

/// A destination whose source is gone when all is ready waits for two minutes.
const PATIENCE: Duration = Duration::from_secs(240);

/// What ends in the midst of a move.
#[derive(Clone, Copy, Debug)]
enum Strike {
    Nothing,
    Migrate,
    Receive,
    SourceLibvirt,
    DestinationLibvirt,
    DestinationQemu,
}

impl Strike {
    const ALL: [Self; 5] = [
        Self::Migrate,
        Self::Receive,
        Self::SourceLibvirt,
        Self::DestinationLibvirt,
        Self::DestinationQemu,
    ];

    /// What befalls so many moves: of each ten half fail, in each way once.
    fn for_moves(moves: usize, rng: &mut fastrand::Rng) -> Vec<Self> {
        let mut strikes = Vec::new();
        while strikes.len() < moves {
            let mut ten = [Self::ALL, [Self::Nothing; 5]].concat();
            rng.shuffle(&mut ten);
            strikes.extend(ten);
        }
        strikes.truncate(moves);
        strikes
    }
}

fn seed() -> u64 {
    let given = std::env::var("GODWIT_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("GODWIT_SEED={seed}");
    seed
}

/// Has it happen.
fn strike(own: &mut Own, what: Strike, godwits: &mut [Running; 2]) -> anyhow::Result<()> {
    let name = own.hosts.name().to_owned();
    match what {
        Strike::Nothing => {}
        Strike::Migrate => godwits[0].kill(),
        Strike::Receive => godwits[1].kill(),
        Strike::SourceLibvirt => own.hosts.west.restart_daemon()?,
        Strike::DestinationLibvirt => own.hosts.east.restart_daemon()?,
        Strike::DestinationQemu => {
            // Once the guest is its own that would be the guest's end, which is nobody's to undo.
            let qemu = own.hosts.east.qemu(&name).ok().and_then(Pid::from_raw);
            if own.hosts.east.state(&name)? != "running"
                && let Some(qemu) = qemu
            {
                let _ = kill_process(qemu, Signal::KILL);
            }
        }
    }
    Ok(())
}

/// Waits until the guest runs on one host alone, and returns whether that is the destination.
fn settle(own: &Own) -> anyhow::Result<bool> {
    let until = Instant::now() + PATIENCE;
    let rests = |state: &str| matches!(state, "none" | "shut off");
    loop {
        // A daemon that was just started anew may not have looked at its domains yet.
        let states = own.hosts.states().unwrap_or_default();
        match states.each_ref().map(String::as_str) {
            ["running", other] if rests(other) => return Ok(false),
            [other, "running"] if rests(other) => return Ok(true),
            _ => {}
        }
        ensure!(Instant::now() < until, "virsh shows {states:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// One move, into which `what` strikes when `rng` says; returns whether the guest has moved.
fn one_move(own: &mut Own, what: Strike, rng: &mut fastrand::Rng) -> anyhow::Result<bool> {
    let options = ["--disks", "vda", "--disks-are-shared"];
    let told = own.receive();
    let receive: Vec<&str> = told.iter().map(String::as_str).collect();
    let ended = if matches!(what, Strike::Nothing) {
        own.hosts.migrate_with(&options, &receive)?.into()
    } else {
        let (migrate, receive) = own.hosts.begin_at("60MiB/s", &options, &receive)?;
        let mut godwits = [migrate, receive];
        // From the first pages to a little behind the end.
        std::thread::sleep(Duration::from_millis(rng.u64(0..2500)));
        strike(own, what, &mut godwits)?;
        let [migrate, receive] = godwits;
        [migrate.wait(PATIENCE)?, receive.wait(PATIENCE)?]
    };
    let told = ended.each_ref().map(|it| format!("{} {}", it.last(), it.errors)).join("\n");
    let told = format!("{what:?}: {told}");
    let moved = settle(own).context(told.clone())?;
    ensure!(moved || !matches!(what, Strike::Nothing), "it has not moved: {told}");
    if moved {
        own.turn();
    }
    own.check(moved).context(told)?;
    Ok(moved)
}

fn to_and_fro(test: &str, moves: usize) -> anyhow::Result<()> {
    let Some(mut own) = Own::with_one_shared(test)? else { return Ok(()) };
    let mut rng = fastrand::Rng::with_seed(seed());
    let began = Instant::now();
    for (number, what) in Strike::for_moves(moves, &mut rng).into_iter().enumerate() {
        let moved = one_move(&mut own, what, &mut rng).with_context(|| format!("move {number}"))?;
        let seconds = began.elapsed().as_secs();
        eprintln!("{seconds:4} s: move {number}: {what:?} ended, the guest moved: {moved}");
    }
    Ok(())
}

#[test]
fn moves_to_and_fro_with_failures_leave_all_as_it_was() -> anyhow::Result<()> {
    to_and_fro("moves_to_and_fro_with_failures_leave_all_as_it_was", 4)
}

#[test]
#[ignore = "takes six minutes: make test-long"]
fn fifty_moves_to_and_fro_with_failures_leave_all_as_it_was() -> anyhow::Result<()> {
    to_and_fro("fifty_moves_to_and_fro_with_failures_leave_all_as_it_was", at_most(50))
}

//! The same faults while the memory of a microvm's guest follows it: machine and engine are one
//! process there, so a command that is killed takes nothing along.
//!
//! Keeps two promises: a fault counts as one of post-copy only where pages were missing when it
//! struck; and behind each move exactly one machine runs the guest, which has found no damage, and
//! each page that came behind it is as it was at its source. A machine that is killed is lost with
//! its guest, or with what its guest lacks: of the source that is done where there is a copy, of
//! the destination it is not.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use fastrand::Rng;
use godwit_e2e::{LIMIT, MicroPair, Third, check_no_userfaultfd};
use godwit_testbed::{Beat, Link, Movable, Running};
use rustix::process::Signal;
use serde_json::Value;

use crate::followed::{BETWEEN, Counts, Fault, LOOK, Placed, WHEN, words};

/// So slow that the memory of a small machine takes a few seconds.
const SLOW: [&str; 7] =
    ["--max-bandwidth", "20MiB/s", "--compression", "none", "--reconnect", "60s", "--postcopy"];
/// How long a guest is to stay that is taken for one that stays.
const STAYS: Duration = Duration::from_millis(500);

/// Options of the machines that guests leave.
pub const MACHINES: [&[&str]; 3] = [
    &["--memory", "128MiB", "--mode", "rate", "--working-set", "16MiB"],
    &["--memory", "128MiB", "--mode", "full", "--working-set", "32MiB", "--cpus", "2"],
    &["--memory", "128MiB", "--mode", "churn", "--balloon", "hints,reporting"],
];

/// A move in which faults strike.
struct Move {
    pair: MicroPair,
    link: Link,
    /// `migrate` and `receive`, while they were not killed.
    commands: [Option<Running>; 2],
    counts: Counts,
    third: Option<Third>,
    lost: bool,
    placed: Placed,
    /// The memory that the guest leaves: its name goes with the machine.
    ram: File,
}

/// Moves a guest between two machines with `options` while `faults` strike, one after the other;
/// `None` where there is no KVM.
///
/// # Errors
/// What is not as it should be.
pub fn run(options: &[&str], faults: &[Fault], rng: &mut Rng) -> anyhow::Result<Option<Counts>> {
    let placed = Placed::new()?;
    let own = placed.option()?;
    let own: Vec<&str> = own.iter().flatten().map(String::as_str).collect();
    let there = [options, &own].concat();
    let Some(pair) = MicroPair::start_apart("followed", options, &there)? else { return Ok(None) };
    let ram = File::open(pair.source.ram_file()).context("no memory of the source")?;
    let third = faults.contains(&Fault::LoseSource).then(Third::new).transpose()?;
    let safe = third.as_ref().map(Third::option);
    let (receive, address) = pair.godwit.receive(&pair.destination, &words(&[], &safe))?;
    let link = Link::to(&address)?;
    let when = WHEN[rng.usize(..WHEN.len())];
    let leaving = [&SLOW[..], &[when]].concat();
    let migrate = pair.godwit.migrate(&pair.source, link.address(), &words(&leaving, &safe))?;
    let commands = [Some(migrate), Some(receive)];
    let counts = Counts::default();
    let mut one = Move { pair, link, commands, counts, third, lost: false, placed, ram };
    if when != WHEN[0] {
        // What comes before the guest leaves is not what this is about.
        let until = Instant::now() + LIMIT;
        while !one.lacks() && !one.is_over() {
            ensure!(Instant::now() < until, "the guest does not leave: {}", one.words());
            std::thread::sleep(LOOK);
        }
    }
    for fault in faults {
        std::thread::sleep(BETWEEN.mul_f64(rng.f64()));
        if one.is_over() {
            break;
        }
        one.strike(*fault)?;
    }
    one.settle().map(Some)
}

impl Move {
    /// What the machines say of themselves: source and destination.
    fn states(&self) -> [String; 2] {
        let gone = |_| "gone".to_owned();
        let MicroPair { source, destination, .. } = &self.pair;
        [source, destination].map(|machine| machine.status().unwrap_or_else(gone))
    }

    fn lacks(&self) -> bool {
        self.states()[1] == "lacks-pages"
    }

    fn is_over(&self) -> bool {
        // One that was killed says nothing any more.
        let [migrate, _] = &self.commands;
        let ended = migrate.as_ref().is_none_or(Running::has_ended);
        let [here, there] = self.states();
        there == "running" || (ended && matches!(here.as_str(), "running" | "in-doubt"))
    }

    fn strike(&mut self, fault: Fault) -> anyhow::Result<()> {
        let [here, there] = self.states();
        let lacks = there == "lacks-pages";
        let kills = match fault {
            // A guest that has not left is lost with its machine.
            Fault::LoseSource if here != "follows" || !lacks => return Ok(()),
            Fault::LoseSource => {
                self.pair.source.kill();
                self.lost = true;
                self.counts.lost += 1;
                return Ok(());
            }
            Fault::KillMigrate => [true, false],
            Fault::KillReceive => [false, true],
            Fault::KillBoth => [true, true],
            Fault::Cut(time) => {
                // Where the source is lost nobody uses the link.
                self.counts.cut(&self.link, time, lacks && !self.lost);
                return Ok(());
            }
        };
        for (side, killed) in kills.into_iter().enumerate() {
            let Some(killed) = self.commands[side].take_if(|_| killed) else { continue };
            let alive = !killed.has_ended() && killed.signal(Signal::KILL).is_ok();
            drop(killed.wait(LIMIT)?);
            let counts = &mut self.counts;
            let counted = if lacks { &mut counts.kills[side] } else { &mut counts.others };
            *counted += u32::from(alive);
        }
        Ok(())
    }

    /// No more faults: it has to come to an end by itself, or by what docs/recovery.md says.
    fn settle(self) -> anyhow::Result<Counts> {
        let until = Instant::now() + LIMIT;
        while !self.is_over() {
            ensure!(Instant::now() < until, "it does not end: {}", self.words());
            std::thread::sleep(LOOK);
        }
        let words = self.words();
        if self.states()[1] == "running" {
            return self.moved().context(words);
        }
        std::thread::sleep(STAYS);
        match self.is_over() && !matches!(&*self.states()[1], "running" | "lacks-pages") {
            true => self.stayed().context(words),
            false => self.settle(),
        }
    }

    /// The guest is at the destination, whole.
    fn moved(mut self) -> anyhow::Result<Counts> {
        let [migrate, receive] = std::mem::take(&mut self.commands);
        if let Some(migrate) = migrate {
            let ended = migrate.wait(LIMIT)?;
            let said = ended.last();
            let fits =
                if self.lost { said["guest"] == "destination" } else { ended.status.success() };
            ensure!(fits, "{said} {}", ended.errors);
        }
        if let Some(receive) = receive {
            // A source that is lost may only be far away, and is waited for.
            if self.lost {
                let hurt = |line: &Value| line["event"] == "copy" && !line["why"].is_null();
                let hurt = receive.lines().into_iter().find(hurt);
                ensure!(hurt.is_none(), "{hurt:?}");
            } else {
                let ended = receive.wait(LIMIT)?;
                ensure!(ended.status.success(), "{} {}", ended.last(), ended.errors);
            }
        }
        let MicroPair { source, destination, .. } = &mut self.pair;
        if !self.lost {
            ensure!(source.wait(LIMIT)?.success(), "{}", source.errors());
        }
        let until = Instant::now() + LIMIT;
        // Where the source is lost the machine waits for it, and lets go of this when that is over.
        while let Err(stays) = check_no_userfaultfd(destination.pid())
            && !self.lost
        {
            ensure!(Instant::now() < until, "{stays:#}");
            std::thread::sleep(LOOK);
        }
        while let Some(third) = &self.third
            && third.files()? > 0
        {
            ensure!(Instant::now() < until, "the copy stays");
            std::thread::sleep(LOOK);
        }
        let status = destination.status()?;
        ensure!(status == "running", "the guest is '{status}'");
        destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        let beats = source.heartbeats_across(destination);
        let next = |pair: &[Beat]| pair[1].heartbeat.n == pair[0].heartbeat.n + 1;
        ensure!(beats.windows(2).all(next), "{beats:?}");
        let bugs = [source.bugs(), destination.bugs()].concat();
        ensure!(bugs.is_empty(), "{bugs:?}");
        self.counts.compare(&self.placed, &self.ram)?;
        self.counts.moves += 1;
        Ok(self.counts)
    }

    /// The guest never ran at the destination.
    fn stayed(mut self) -> anyhow::Result<Counts> {
        let [migrate, receive] = std::mem::take(&mut self.commands);
        if let Some(migrate) = migrate {
            let ended = migrate.wait(LIMIT)?;
            ensure!(!ended.status.success(), "{}", ended.last());
        }
        if let Some(receive) = receive {
            let _ = receive.signal(Signal::INT);
            drop(receive.wait(LIMIT)?);
        }
        if self.states()[0] == "in-doubt" {
            let socket = self.pair.source.control_socket();
            let resume = ["microvm", "resume", "--force", &socket.to_string_lossy()];
            self.pair.godwit.done(&resume)?;
        }
        self.pair.check_untouched()?;
        self.counts.stayed += 1;
        Ok(self.counts)
    }

    fn words(&self) -> String {
        let said = self.commands.each_ref().map(|command| {
            let last = |it: &Running| it.lines().last().cloned().unwrap_or_default();
            command
                .as_ref()
                .map_or("killed".to_owned(), |it| format!("{} {}", last(it), it.errors()))
        });
        let [migrate, receive] = said;
        format!("{:?}; migrate: {migrate}; receive: {receive}", self.states())
    }
}

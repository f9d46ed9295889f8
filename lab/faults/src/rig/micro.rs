//! Two microvms, each of which has the engine in its own process.

use std::time::Instant;

use anyhow::ensure;
use godwit_e2e::{LIMIT, MicroPair};
use godwit_testbed::{Godwit, MicroVm, Movable};
use rustix::process::Pid;

use super::{Rig, Side, State};

const GUEST: &[&str] = &["--memory", "128MiB", "--mode", "rate", "--working-set", "16MiB"];

/// Two microvms.
#[derive(Debug)]
pub struct Micro {
    pair: MicroPair,
}

impl Micro {
    /// Starts them; `None` where there is no KVM.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start() -> anyhow::Result<Option<Self>> {
        Ok(MicroPair::start("faults", GUEST)?.map(|pair| Self { pair }))
    }

    fn on(&self, side: Side) -> &MicroVm {
        if side == Side::Source { &self.pair.source } else { &self.pair.destination }
    }

    fn new_destination(&self) -> anyhow::Result<MicroVm> {
        MicroVm::start(&self.pair.godwit, &[GUEST, &["--incoming"]].concat())
    }
}

impl Rig for Micro {
    fn godwit(&self) -> &Godwit {
        &self.pair.godwit
    }

    fn vm(&self, side: Side) -> String {
        self.on(side).vm_name()
    }

    fn process(&self, side: Side) -> i32 {
        self.on(side).pid()
    }

    fn keeps_no_record(&self) -> bool {
        true
    }

    fn state(&mut self, side: Side) -> State {
        let pair = &mut self.pair;
        let vm = if side == Side::Source { &mut pair.source } else { &mut pair.destination };
        if !vm.is_alive() {
            return State::Gone;
        }
        match vm.status().as_deref() {
            Ok("running") => State::Runs,
            Ok("incoming") => State::Waits,
            Ok(_) => State::Stands,
            Err(_) => State::Gone,
        }
    }

    fn guardian(&self, _: Side) -> anyhow::Result<Option<Pid>> {
        Ok(None)
    }

    fn check_stayed(&mut self) -> anyhow::Result<()> {
        self.pair.check_untouched()
    }

    fn check_arrived(&mut self) -> anyhow::Result<()> {
        let MicroPair { source, destination, .. } = &mut self.pair;
        destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        let beats = source.heartbeats_across(destination);
        let numbers: Vec<u64> = beats.iter().map(|beat| beat.heartbeat.n).collect();
        ensure!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "beats: {numbers:?}");
        let bugs = [source.bugs(), destination.bugs()].concat();
        ensure!(bugs.is_empty(), "{bugs:?}");
        source.wait(LIMIT).map(drop)
    }

    fn await_alone(&mut self, _: Side) -> anyhow::Result<()> {
        Ok(())
    }

    fn renew(&mut self) -> anyhow::Result<()> {
        if self.state(Side::Destination) != State::Waits {
            self.pair.destination = self.new_destination()?;
        }
        Ok(())
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        let next = self.new_destination()?;
        self.pair.source = std::mem::replace(&mut self.pair.destination, next);
        Ok(())
    }
}

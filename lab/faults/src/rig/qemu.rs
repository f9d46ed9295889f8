//! Two QEMUs, under TCG or on KVM.

use std::time::Instant;

use anyhow::ensure;
use godwit_e2e::{LIMIT, Pair, await_alone, await_quit, check_untouched, guardian_of, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Godwit, GuestConfig, Movable, TestVm, VmConfig, builds_for, kvm_builds_for,
};
use godwit_units::ByteCount;
use rustix::process::Pid;

use super::{Adapter, Rig, Side, State};

/// Two QEMUs.
#[derive(Debug)]
pub struct Qemu {
    pair: Pair,
}

impl Qemu {
    /// Starts them as `adapter` says; `None` where there is no such QEMU.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start(adapter: Adapter) -> anyhow::Result<Option<Self>> {
        let on_kvm = adapter == Adapter::Kvm;
        let builds = if on_kvm { kvm_builds_for("faults") } else { builds_for("faults") };
        if builds.is_empty() {
            return Ok(None);
        }
        let guest = GuestConfig { fill: ByteCount(32 << 20), ..GuestConfig::small(Mode::Rate) };
        let config = VmConfig::new(oldest(&builds)?, guest);
        let config = match adapter {
            Adapter::Kvm => config.on_kvm(),
            Adapter::QemuAnonymous => config.with_backend(Backend::Anonymous),
            _ => config,
        };
        Ok(Some(Self { pair: Pair::start(&config)? }))
    }

    fn on(&self, side: Side) -> &TestVm {
        if side == Side::Source { &self.pair.source } else { &self.pair.destination }
    }
}

impl Rig for Qemu {
    fn godwit(&self) -> &Godwit {
        &self.pair.godwit
    }

    fn vm(&self, side: Side) -> String {
        self.on(side).vm_name()
    }

    fn process(&self, side: Side) -> i32 {
        self.on(side).pid()
    }

    fn state(&mut self, side: Side) -> State {
        let pair = &mut self.pair;
        let vm = if side == Side::Source { &mut pair.source } else { &mut pair.destination };
        if !vm.is_alive() {
            return State::Gone;
        }
        // One that has handed its guest over may end while it is asked.
        match vm.status().as_deref() {
            Ok("running") => State::Runs,
            Ok("inmigrate") => State::Waits,
            Ok(_) => State::Stands,
            Err(_) => State::Gone,
        }
    }

    fn guardian(&self, side: Side) -> anyhow::Result<Option<Pid>> {
        guardian_of(self.on(side))
    }

    fn check_stayed(&mut self) -> anyhow::Result<()> {
        check_untouched(&mut self.pair.source)
    }

    fn check_arrived(&mut self) -> anyhow::Result<()> {
        let Pair { source, destination, .. } = &mut self.pair;
        check_untouched(destination)?;
        let beats = source.heartbeats_across(destination);
        let numbers: Vec<u64> = beats.iter().map(|beat| beat.heartbeat.n).collect();
        let goes_on = numbers.windows(2).all(|pair| pair[1] > pair[0]);
        ensure!(goes_on, "heartbeats went back: {numbers:?}");
        ensure!(source.bugs().is_empty(), "{:?}", source.bugs());
        await_quit(source)
    }

    fn await_alone(&mut self, side: Side) -> anyhow::Result<()> {
        await_alone(self.on(side))
    }

    fn renew(&mut self) -> anyhow::Result<()> {
        if self.state(Side::Destination) != State::Waits {
            self.pair.destination = TestVm::destination(self.pair.source.config())?;
        }
        Ok(())
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        let next = TestVm::destination(self.pair.source.config())?;
        self.pair.move_on(next);
        // A heartbeat that began on the other side is no measure of this one's.
        self.pair.source.wait_for_heartbeats_after(Instant::now(), 1, LIMIT)?;
        Ok(())
    }
}

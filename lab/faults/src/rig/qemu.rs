//! Two QEMUs, under TCG or on KVM.

use std::time::Instant;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, Pair, await_alone, await_quit, check_untouched, guardian_of};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, Boot, DISK_WORK, DiskImage, Godwit, GuestConfig, Lan, Movable, QemuBuild, RedisClient,
    TestVm, VmConfig, Witness, builds_for, images_for, kvm_builds_for, skip,
};
use rustix::process::Pid;

use super::{Adapter, DISK, Outfit, Rig, Side, State};

/// Two QEMUs.
#[derive(Debug)]
pub struct Qemu {
    /// Goes before the VM and the network it talks with.
    redis: Option<RedisClient>,
    pair: Pair,
    /// How the source was started, and how a destination is.
    configs: [VmConfig; 2],
    /// Go after the VMs that have them.
    images: Vec<DiskImage>,
    /// Likewise.
    _lan: Option<Lan>,
    witness: Option<Witness>,
}

/// Checks of a witness behind a move: one that it has caught, and one of its own.
const CHECKS: usize = 2;
/// Writes to Redis that are acknowledged before a move, and behind it.
const WRITES: u64 = 500;

/// The oldest or the newest of `builds`.
///
/// # Errors
/// When there is none.
pub(super) fn chosen(builds: &[QemuBuild], newest: bool) -> anyhow::Result<&QemuBuild> {
    let by_age = |build: &&QemuBuild| build.version;
    let found =
        if newest { builds.iter().max_by_key(by_age) } else { builds.iter().min_by_key(by_age) };
    found.context("no QEMU")
}

/// What a Linux guest is to do.
pub(super) fn linux_guest(outfit: &Outfit) -> GuestConfig {
    let Outfit { memory, fill, working_set, rate, .. } = *outfit;
    let guest = GuestConfig::small(Mode::Rate);
    // A witness has the disk for itself.
    let disk = match outfit.disk && outfit.witness.is_none() {
        true => DiskWork { write: 1 << 20, read: 1 << 20, span: DISK_WORK.span, ..guest.disk },
        false => guest.disk,
    };
    GuestConfig { memory, fill, working_set, rate, disk, ..guest }
}

impl Qemu {
    /// Starts them as `adapter` says; `None` where there is no such QEMU.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start(adapter: Adapter, outfit: &Outfit) -> anyhow::Result<Option<Self>> {
        let on_kvm = adapter == Adapter::Kvm;
        let builds = if on_kvm { kvm_builds_for("faults") } else { builds_for("faults") };
        if builds.is_empty() || (outfit.disk && !images_for("faults")) {
            return Ok(None);
        }
        let mut guest = linux_guest(outfit);
        if on_kvm && outfit.disk {
            guest.disk = DISK_WORK;
        }
        let mut config = VmConfig::new(chosen(&builds, outfit.newest)?, guest);
        if on_kvm {
            config = config.on_kvm();
        }
        match outfit.backend {
            Some(backend) => config = config.with_backend(backend),
            None if adapter == Adapter::QemuAnonymous => {
                config = config.with_backend(Backend::Anonymous);
            }
            None => {}
        }
        let mut configs = [config.clone(), config];
        let mut images = Vec::new();
        if outfit.disk {
            for config in &mut configs {
                let image = DiskImage::create("raw", DISK)?;
                *config = config.clone().with_disk("disk0", &image);
                images.push(image);
            }
        }
        let mut lan = None;
        if let Some(witness) = outfit.witness {
            if !witness.is_there_for("soak") {
                return Ok(None);
            }
            if witness == Witness::Redis {
                let network = match Lan::create() {
                    Ok(network) => network,
                    Err(why) => {
                        skip("soak", format_args!("no network for Redis: {why:#}"));
                        return Ok(None);
                    }
                };
                for config in &mut configs {
                    *config = network.attach(config)?;
                }
                lan = Some(network);
            }
            configs = configs.map(|config| config.with_boot(Boot::Witness(witness)));
        }
        let pair = Pair::start_apart(&configs[0], &configs[1])?;
        let redis = lan.as_ref().map(Lan::redis);
        let mut rig = Self { redis, pair, configs, images, _lan: lan, witness: outfit.witness };
        if let Some(redis) = &mut rig.redis {
            redis.await_acknowledged(WRITES)?;
        }
        Ok(Some(rig))
    }

    /// Waits until the witness on that side has looked at its work and found it as it was.
    fn check_witness(&mut self, side: Side) -> anyhow::Result<()> {
        if let Some(witness) = self.witness {
            let vm = self.on(side);
            let (seen, what) = (vm.console_lines().len(), format!("{CHECKS} checks of {witness}"));
            let checked =
                vm.wait_for_lines(&what, (seen, CHECKS), LIMIT, |line| witness.is_clean(line));
            ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());
            checked?;
        }
        if let Some(redis) = &mut self.redis {
            let compared = redis.check()?;
            ensure!(compared > 0, "Redis has acknowledged nothing");
            // The connection that was there before the move is the one that goes on.
            redis.await_acknowledged(WRITES)?;
        }
        Ok(())
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

    fn migrate_options(&self) -> Vec<String> {
        match self.images.is_empty() {
            true => Vec::new(),
            false => ["--disks", "all"].map(str::to_owned).to_vec(),
        }
    }

    fn process(&self, side: Side) -> i32 {
        self.on(side).pid()
    }

    fn complaints(&self, side: Side) -> String {
        self.on(side).errors().trim().to_owned()
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
        check_untouched(&mut self.pair.source)?;
        self.check_witness(Side::Source)
    }

    fn check_arrived(&mut self) -> anyhow::Result<()> {
        let Pair { source, destination, .. } = &mut self.pair;
        check_untouched(destination)?;
        let beats = source.heartbeats_across(destination);
        let numbers: Vec<u64> = beats.iter().map(|beat| beat.heartbeat.n).collect();
        let goes_on = numbers.windows(2).all(|pair| pair[1] > pair[0]);
        ensure!(goes_on, "heartbeats went back: {numbers:?}");
        ensure!(source.bugs().is_empty(), "{:?}", source.bugs());
        await_quit(source)?;
        self.check_witness(Side::Destination)
    }

    fn await_alone(&mut self, side: Side) -> anyhow::Result<()> {
        await_alone(self.on(side))
    }

    fn renew(&mut self) -> anyhow::Result<()> {
        if self.state(Side::Destination) != State::Waits {
            // It may have the disk that the next one is to have.
            self.pair.destination.kill();
            self.pair.destination = TestVm::destination(&self.configs[1])?;
        }
        Ok(())
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.pair.source.kill();
        self.configs.swap(0, 1);
        let next = TestVm::destination(&self.configs[1])?;
        self.pair.move_on(next);
        // A heartbeat that began on the other side is no measure of this one's.
        self.pair.source.wait_for_heartbeats_after(Instant::now(), 1, LIMIT)?;
        Ok(())
    }
}

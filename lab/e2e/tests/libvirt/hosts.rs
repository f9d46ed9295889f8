//! Two hosts and a guest, and what is looked at behind each move.

use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_e2e::{LIMIT, await_copying, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Ended, Godwit, GuestConfig, LibvirtGuest, LibvirtHost, QemuBuild, Running, builds_for,
    libvirt_for,
};

/// Two hosts and a guest on the first.
pub(crate) struct Hosts {
    pub(crate) west: LibvirtHost,
    pub(crate) east: LibvirtHost,
    pub(crate) guest: LibvirtGuest,
    pub(crate) godwit: Godwit,
}

impl Hosts {
    /// `None` where there is no libvirt, which is said.
    pub(crate) fn start(test: &str, mode: Mode, persistent: bool) -> anyhow::Result<Option<Self>> {
        Self::with_devices(test, &GuestConfig::small(mode), "", persistent)
    }

    pub(crate) fn with_devices(
        test: &str,
        config: &GuestConfig,
        devices: &str,
        persistent: bool,
    ) -> anyhow::Result<Option<Self>> {
        let Some(hosts) = Self::not_started(test, config, devices)? else { return Ok(None) };
        if persistent {
            hosts.guest.define_on(&hosts.west)?;
        } else {
            hosts.guest.create_on(&hosts.west)?;
        }
        hosts.guest.await_beats(3, LIMIT)?;
        Ok(Some(hosts))
    }

    /// The same, of which no host knows anything yet.
    pub(crate) fn not_started(
        test: &str,
        config: &GuestConfig,
        devices: &str,
    ) -> anyhow::Result<Option<Self>> {
        let builds = builds_for(test);
        if builds.is_empty() || !libvirt_for(test) {
            return Ok(None);
        }
        Self::of(oldest(&builds)?, config, devices).map(Some)
    }

    /// The same in this QEMU.
    pub(crate) fn of(
        build: &QemuBuild,
        config: &GuestConfig,
        devices: &str,
    ) -> anyhow::Result<Self> {
        let guest = LibvirtGuest::new(build, config, devices)?;
        let (west, east) = (LibvirtHost::start_for(build)?, LibvirtHost::start_for(build)?);
        Ok(Self { west, east, guest, godwit: Godwit::built()? })
    }

    /// Where the guest is next.
    pub(crate) fn turn(&mut self) {
        std::mem::swap(&mut self.west, &mut self.east);
    }

    pub(crate) fn name(&self) -> &str {
        self.guest.name()
    }

    /// Moves it from west to east: migrate, receive.
    pub(crate) fn migrate(&self, options: &[&str]) -> anyhow::Result<(Ended, Ended)> {
        self.migrate_with(options, &[])
    }

    pub(crate) fn migrate_with(
        &self,
        options: &[&str],
        receive: &[&str],
    ) -> anyhow::Result<(Ended, Ended)> {
        let (receive, address) = self.godwit.receive_named(&self.east.vm_name(), receive)?;
        let domain = self.west.domain(self.name());
        let migrate = self.godwit.migrate_named(&domain, &address, options)?;
        Ok((migrate.wait(LIMIT)?, receive.wait(LIMIT)?))
    }

    /// Begins a move that takes long, so that the guest stays where it is until that ends:
    /// migrate, receive, which copy.
    pub(crate) fn begin(
        &self,
        options: &[&str],
        receive: &[&str],
    ) -> anyhow::Result<(Running, Running)> {
        self.begin_at("10MiB/s", options, receive)
    }

    /// The same at this rate.
    pub(crate) fn begin_at(
        &self,
        rate: &str,
        options: &[&str],
        receive: &[&str],
    ) -> anyhow::Result<(Running, Running)> {
        let (receive, address) = self.godwit.receive_named(&self.east.vm_name(), receive)?;
        let options = [&["--max-bandwidth", rate], options].concat();
        let domain = self.west.domain(self.name());
        let migrate = self.godwit.migrate_named(&domain, &address, &options)?;
        await_copying(&migrate)?;
        Ok((migrate, receive))
    }

    /// Waits until it runs at the source, and the destination has nothing of it that runs.
    pub(crate) fn await_untouched(&self, east: &str) -> anyhow::Result<()> {
        let expected = ["running", east];
        let until = Instant::now() + LIMIT;
        while self.states()? != expected && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        self.check_states(expected)?;
        // The guest runs first, and then what is left in QEMU is taken back. Libvirt has sets of
        // its own.
        let command = "{\"execute\":\"query-fdsets\"}";
        let ask = ["qemu-monitor-command", self.name(), command];
        while self.west.virsh(&ask)?.contains(&0x676f_6477.to_string()) {
            ensure!(Instant::now() < until, "QEMU has a descriptor of godwit's still");
            std::thread::sleep(Duration::from_millis(50));
        }
        self.check_guest()
    }

    /// The states that virsh shows: west, east.
    pub(crate) fn states(&self) -> anyhow::Result<[String; 2]> {
        Ok([self.west.state(self.name())?, self.east.state(self.name())?])
    }

    pub(crate) fn check_states(&self, expected: [&str; 2]) -> anyhow::Result<()> {
        let states = self.states()?;
        ensure!(states == expected, "virsh shows {states:?} instead of {expected:?}");
        Ok(())
    }

    /// The guest works on, counts up, and has found no damage.
    pub(crate) fn check_guest(&self) -> anyhow::Result<()> {
        self.guest.await_beats(3, LIMIT)?;
        let numbers: Vec<u64> = self.guest.beats().iter().map(|beat| beat.heartbeat.n).collect();
        ensure!(numbers.windows(2).all(|pair| pair[1] > pair[0]), "went back: {numbers:?}");
        ensure!(self.guest.bugs().is_empty(), "{:?}", self.guest.bugs());
        Ok(())
    }
}

pub(crate) fn check_migrated(migrate: &Ended, receive: &Ended) -> anyhow::Result<()> {
    let told = || format!("{} {} {}", migrate.last(), migrate.errors, receive.errors);
    ensure!(migrate.last()["outcome"] == "migrated", "{}", told());
    ensure!(receive.last()["outcome"] == "running", "{}", told());
    Ok(())
}

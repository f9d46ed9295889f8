//! A domain of libvirt's, which goes from one daemon's to another's.
//!
//! Its destination is made by `godwit receive`, so before that there is none, and none is left
//! where the guest did not come.

use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, await_process_alone, check_process, guardian_of_process};
use godwit_testbed::{
    DiskImage, Godwit, LibvirtGuest, LibvirtHost, builds_for, images_for, libvirt_for,
};
use rustix::process::Pid;

use super::qemu::{chosen, linux_guest};
use super::{DISK, Outfit, Rig, Side, State};

const PAUSE: Duration = Duration::from_millis(50);

/// Two daemons and their guest.
#[derive(Debug)]
pub struct Libvirt {
    hosts: [LibvirtHost; 2],
    guest: LibvirtGuest,
    godwit: Godwit,
    /// The last QEMU that was seen on each side.
    seen: [Cell<i32>; 2],
    /// Where each side has the disk, if there is one: the source's first.
    images: Vec<DiskImage>,
}

/// The disk in libvirt's XML. Both daemons are on one machine, and would take a file that both use
/// from each other.
fn device(image: &DiskImage) -> String {
    format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/>\
         <source file='{}'><seclabel model='dac' relabel='no'/></source>\
         <target dev='vda' bus='virtio'/></disk>",
        image.path().display()
    )
}

impl Libvirt {
    /// Starts them; `None` where there is no libvirt.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start(outfit: &Outfit) -> anyhow::Result<Option<Self>> {
        let builds = builds_for("faults");
        if builds.is_empty() || !libvirt_for("faults") || (outfit.disk && !images_for("faults")) {
            return Ok(None);
        }
        let build = chosen(&builds, outfit.newest)?;
        let mut images = Vec::new();
        if outfit.disk {
            for _ in 0..2 {
                let image = DiskImage::create("raw", DISK)?;
                std::fs::set_permissions(image.path(), std::fs::Permissions::from_mode(0o666))?;
                images.push(image);
            }
        }
        let devices = images.first().map(device).unwrap_or_default();
        let guest = LibvirtGuest::new(build, &linux_guest(outfit), &devices)?;
        let hosts = [LibvirtHost::start_for(build)?, LibvirtHost::start_for(build)?];
        guest.create_on(&hosts[0])?;
        guest.await_beats(3, LIMIT)?;
        let (godwit, seen) = (Godwit::built()?, Default::default());
        Ok(Some(Self { hosts, guest, godwit, seen, images }))
    }

    fn on(&self, side: Side) -> &LibvirtHost {
        &self.hosts[side as usize]
    }

    fn shown(&self, side: Side) -> anyhow::Result<String> {
        self.on(side).state(self.guest.name())
    }

    /// Waits until virsh shows these states: source, destination.
    fn await_states(&self, expected: [&str; 2]) -> anyhow::Result<()> {
        let until = Instant::now() + LIMIT;
        loop {
            let states = [self.shown(Side::Source), self.shown(Side::Destination)];
            if let [Ok(source), Ok(destination)] = &states
                && [source.as_str(), destination.as_str()] == expected
            {
                return Ok(());
            }
            ensure!(Instant::now() < until, "virsh shows {states:?} instead of {expected:?}");
            std::thread::sleep(PAUSE);
        }
    }

    /// The guest works on, counts up, and has found no damage.
    fn check_guest(&self, side: Side) -> anyhow::Result<()> {
        self.guest.await_beats(3, LIMIT)?;
        let numbers: Vec<u64> = self.guest.beats().iter().map(|beat| beat.heartbeat.n).collect();
        ensure!(numbers.windows(2).all(|pair| pair[1] > pair[0]), "went back: {numbers:?}");
        ensure!(self.guest.bugs().is_empty(), "{:?}", self.guest.bugs());
        check_process(self.process(side))
    }
}

impl Rig for Libvirt {
    fn godwit(&self) -> &Godwit {
        &self.godwit
    }

    fn vm(&self, side: Side) -> String {
        self.on(side).domain(self.guest.name())
    }

    fn receiver(&self) -> String {
        self.on(Side::Destination).vm_name()
    }

    fn migrate_options(&self) -> Vec<String> {
        match self.images.is_empty() {
            true => Vec::new(),
            false => ["--disks", "all"].map(str::to_owned).to_vec(),
        }
    }

    fn receive_options(&self) -> Vec<String> {
        let mut options = self.migrate_options();
        if let Some(next) = self.images.last() {
            options.extend(["--disk".to_owned(), format!("vda={}", next.path().display())]);
        }
        options
    }

    fn restart_manager(&mut self, side: Side) -> anyhow::Result<()> {
        self.hosts[side as usize].restart_daemon()
    }

    fn process(&self, side: Side) -> i32 {
        let seen = &self.seen[side as usize];
        if let Ok(pid) = self.on(side).qemu(self.guest.name()) {
            seen.set(pid);
        }
        seen.get()
    }

    fn state(&mut self, side: Side) -> State {
        self.process(side);
        match self.shown(side).as_deref() {
            Ok("running") => State::Runs,
            Ok("none" | "shut off") => State::Gone,
            // A daemon that was just started may not have looked at its domains yet.
            Ok(_) | Err(_) => State::Stands,
        }
    }

    fn guardian(&self, side: Side) -> anyhow::Result<Option<Pid>> {
        match self.process(side) {
            0 => Ok(None),
            pid => guardian_of_process(pid),
        }
    }

    fn check_stayed(&mut self) -> anyhow::Result<()> {
        self.await_states(["running", "none"])?;
        await_process_alone(self.process(Side::Source))?;
        self.check_guest(Side::Source)
    }

    fn check_arrived(&mut self) -> anyhow::Result<()> {
        self.await_states(["none", "running"])?;
        await_process_alone(self.process(Side::Destination))?;
        self.check_guest(Side::Destination)
    }

    fn await_alone(&mut self, side: Side) -> anyhow::Result<()> {
        await_process_alone(self.process(side))
    }

    fn renew(&mut self) -> anyhow::Result<()> {
        // Nobody was left to have it go.
        if self.shown(Side::Destination)? != "none" {
            let name = self.guest.name();
            self.on(Side::Destination).virsh(&["destroy", name]).context("destination")?;
        }
        Ok(())
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.hosts.swap(0, 1);
        self.seen.swap(0, 1);
        self.images.reverse();
        Ok(())
    }
}

//! Disks of domains: on storage that both hosts have, and moved along.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::LIMIT;
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{DiskImage, Ended, GuestConfig, images_for};
use godwit_units::ByteCount;
use rustix::process::Signal;

use crate::hosts::{Hosts, check_migrated};

/// Both daemons are on one machine, and would take a file that both use from each other.
pub(crate) const AS_IT_IS: &str = "<seclabel model='dac' relabel='no'/>";

/// A disk in libvirt's XML.
pub(crate) fn device(target: &str, format: &str, path: &str, label: &str) -> String {
    format!(
        "<disk type='file' device='disk'><driver name='qemu' type='{format}' cache='none'/>\
         <source file='{path}'>{label}</source><target dev='{target}' bus='virtio'/></disk>"
    )
}

/// A guest that checks what it reads of what it wrote.
pub(crate) fn at_work() -> GuestConfig {
    let span = ByteCount(16 << 20);
    let work = DiskWork { write: 2 << 20, read: 2 << 20, span, ..DiskWork::default() };
    GuestConfig { disk: work, ..GuestConfig::small(Mode::Rate) }
}

#[test]
fn a_disk_that_both_hosts_have_goes_on_at_the_destination() -> anyhow::Result<()> {
    let test = "a_disk_that_both_hosts_have_goes_on_at_the_destination";
    if !images_for(test) {
        return Ok(());
    }
    let disk = DiskImage::create("qcow2", ByteCount(48 << 20))?;
    std::fs::set_permissions(disk.path(), std::fs::Permissions::from_mode(0o666))?;
    let path = disk.path().display().to_string();
    let devices = device("vda", "qcow2", &path, AS_IT_IS);
    let Some(mut hosts) = Hosts::with_devices(test, &at_work(), &devices, true)? else {
        return Ok(());
    };

    // Nobody has said that the other host has it.
    let (migrate, _) = hosts.migrate(&[])?;
    ensure!(migrate.errors.contains("--disks-are-shared"), "{}", migrate.errors);
    hosts.check_states(["running", "none"])?;

    for turn in 0..2 {
        let (migrate, receive) = hosts.migrate(&["--verify", "--disks-are-shared"])?;
        check_migrated(&migrate, &receive).with_context(|| format!("move {turn}"))?;
        let disks = migrate.last()["disks"].as_array().context("no disks")?;
        ensure!(disks.iter().all(|disk| disk["verified"] == true), "{disks:?}");
        hosts.check_states(["shut off", "running"])?;
        hosts.check_guest()?;
        hosts.turn();
    }
    Ok(())
}

/// Two hosts whose guest has a qcow2 and a raw disk, which each host has for itself.
pub(crate) struct Own {
    pub(crate) hosts: Hosts,
    /// Where the next destination has them.
    next: [PathBuf; 2],
    /// Where the guest's are.
    now: [PathBuf; 2],
    /// Of a guest whose second disk is on storage that both hosts have.
    shared: bool,
    /// The definition of the domain, with the disks where they were at first.
    defined: String,
    first: [PathBuf; 2],
}

impl Own {
    pub(crate) fn start(test: &str) -> anyhow::Result<Option<Self>> {
        Self::new(test, false)
    }

    /// The same with the second on storage that both have.
    pub(crate) fn with_one_shared(test: &str) -> anyhow::Result<Option<Self>> {
        Self::new(test, true)
    }

    fn new(test: &str, shared: bool) -> anyhow::Result<Option<Self>> {
        if !images_for(test) {
            return Ok(None);
        }
        let place = |host: &str| -> anyhow::Result<[PathBuf; 2]> {
            let name = format!("godwit-images-{}-{test}-{host}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            std::fs::create_dir_all(&directory)?;
            Ok(["a.qcow2", "b & c.raw"].map(|name| directory.join(name)))
        };
        let (now, next) = (place("west")?, place("east")?);
        let devices: Vec<String> = now
            .iter()
            .zip([("vda", "qcow2"), ("vdb", "raw")])
            .map(|(path, (target, format))| {
                let text = path.display().to_string();
                image(&["create", "-q", "-f", format, &text, "50331648"])?;
                let label = if shared && target == "vdb" { AS_IT_IS } else { "" };
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
                Ok(device(target, format, &text.replace('&', "&amp;"), label))
            })
            .collect::<anyhow::Result<_>>()?;
        let hosts = Hosts::with_devices(test, &at_work(), &devices.concat(), true)?;
        let Some(hosts) = hosts else { return Ok(None) };
        let defined = hosts.west.virsh(&["dumpxml", "--inactive", hosts.name()])?;
        let first = now.clone();
        Ok(Some(Self { hosts, now, next, shared, defined, first }))
    }

    /// What the destination is told of them.
    pub(crate) fn receive(&self) -> Vec<String> {
        if self.shared {
            let to = format!("vda={}", self.next[0].display());
            return ["--disks", "vda", "--disk", &to].map(str::to_owned).into();
        }
        let [a, b] = self.next.each_ref().map(|path| path.display());
        let words =
            ["--disks", "all", "--disk", &format!("vda={a}"), "--disk", &format!("vdb={b}")];
        words.map(str::to_owned).into()
    }

    pub(crate) fn migrate(
        &self,
        options: &[&str],
        receive: &[String],
    ) -> anyhow::Result<(Ended, Ended)> {
        let receive: Vec<&str> = receive.iter().map(String::as_str).collect();
        self.hosts.migrate_with(options, &receive)
    }

    /// What holds behind every move: the guest works on with its memory and its disks, virsh shows
    /// the definition that it had, and nothing of godwit's is left. The image that was left is
    /// whole, if it has just `moved`.
    pub(crate) fn check(&self, moved: bool) -> anyhow::Result<()> {
        self.hosts.check_guest()?;
        let name = self.hosts.name();
        let text = |path: &Path| path.display().to_string();
        let defined = self.hosts.west.virsh(&["dumpxml", "--inactive", name])?;
        let expected = self.defined.replace(&text(&self.first[0]), &text(&self.now[0]));
        ensure!(defined == expected, "{defined}\ninstead of\n{expected}");
        let running = self.hosts.west.virsh(&["dumpxml", name])?;
        ensure!(running.contains(&text(&self.now[0])), "{running}");
        ensure!(self.hosts.west.info(name, "Persistent")? == "yes");
        self.check_bitmaps()?;
        if moved {
            image(&["check", "-q", &text(&self.next[0])])?;
        }
        Ok(())
    }

    pub(crate) fn turn(&mut self) {
        self.hosts.turn();
        std::mem::swap(&mut self.now, &mut self.next);
    }

    /// Nothing of godwit's is left in the QEMU where the guest runs.
    fn check_bitmaps(&self) -> anyhow::Result<()> {
        for (what, nothing) in
            [("query-named-block-nodes", "dirty-bitmaps"), ("query-block-exports", "shutting-down")]
        {
            let command = format!("{{\"execute\":\"{what}\"}}");
            let arguments = ["qemu-monitor-command", self.hosts.name(), &command];
            let said = self.hosts.west.virsh(&arguments)?;
            ensure!(!said.contains(nothing), "{said}");
        }
        Ok(())
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        for path in [&self.now[0], &self.next[0]] {
            let _ = path.parent().map(std::fs::remove_dir_all);
        }
    }
}

/// Runs qemu-img.
fn image(arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("qemu-img").args(arguments).output()?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&said));
    Ok(())
}

#[test]
fn disks_that_each_host_has_for_itself_move_along() -> anyhow::Result<()> {
    let test = "disks_that_each_host_has_for_itself_move_along";
    let Some(mut own) = Own::start(test)? else { return Ok(()) };

    for turn in 0..2 {
        let (migrate, receive) = own.migrate(&["--verify", "--disks", "all"], &own.receive())?;
        check_migrated(&migrate, &receive).with_context(|| format!("move {turn}"))?;
        own.hosts.check_states(["shut off", "running"])?;
        own.hosts.check_guest()?;
        for which in [&[][..], &["--inactive"]] {
            let xml = own.hosts.east.virsh(&[&["dumpxml", own.hosts.name()], which].concat())?;
            let named = |path: &Path| xml.contains(&path.to_string_lossy().replace('&', "&amp;"));
            ensure!(own.next.iter().all(|path| named(path)), "{xml}");
            ensure!(!own.now.iter().any(|path| named(path)), "{xml}");
        }
        own.turn();
        // The image that a godwit has written and a QEMU has gone on with.
        image(&["check", "-U", "-q", &own.now[0].display().to_string()])?;
    }
    Ok(())
}

#[test]
fn disks_of_a_move_that_fails_are_not_there() -> anyhow::Result<()> {
    let test = "disks_of_a_move_that_fails_are_not_there";
    let Some(own) = Own::start(test)? else { return Ok(()) };
    let told = own.receive();
    let receive: Vec<&str> = told.iter().map(String::as_str).collect();
    let slow = ["--disks", "all"];
    let gone = |how: &str| -> anyhow::Result<()> {
        own.hosts.await_untouched("none").with_context(|| how.to_owned())?;
        own.check_bitmaps().with_context(|| how.to_owned())?;
        ensure!(own.next.iter().all(|path| !path.exists()), "{how}: {:?} are there", own.next);
        Ok(())
    };

    let (migrate, receiving) = own.hosts.begin(&slow, &receive)?;
    migrate.signal(Signal::INT)?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    receiving.wait(LIMIT)?;
    gone("cancelled")?;

    let (mut migrate, receiving) = own.hosts.begin(&slow, &receive)?;
    migrate.kill();
    receiving.wait(LIMIT)?;
    gone("migrate killed")?;

    let (migrate, mut receiving) = own.hosts.begin(&slow, &receive)?;
    ensure!(own.next.iter().all(|path| path.exists()), "nothing was made: {:?}", own.next);
    receiving.kill();
    migrate.wait(LIMIT)?;
    let until = Instant::now() + LIMIT;
    while own.next.iter().any(|path| path.exists()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    gone("receive killed")?;

    let (migrate, receiving) = own.migrate(&["--verify", "--disks", "all"], &told)?;
    check_migrated(&migrate, &receiving)?;
    own.hosts.check_guest()
}

#[test]
fn a_disk_that_cannot_move_is_told_in_a_line() -> anyhow::Result<()> {
    let test = "a_disk_that_cannot_move_is_told_in_a_line";
    let Some(own) = Own::start(test)? else { return Ok(()) };
    let says = |receive: &[String], words: &str| -> anyhow::Result<()> {
        let (migrate, _) = own.migrate(&["--disks", "all"], receive)?;
        ensure!(migrate.errors.contains(words), "{words}: {}", migrate.errors);
        ensure!(migrate.errors.trim().lines().filter(|it| it.contains("godwit:")).count() == 1);
        own.hosts.check_states(["running", "none"])
    };
    let allowed = ["--disks", "all"].map(str::to_owned);

    says(&[], "was not allowed")?;
    says(&allowed, "is the source's own image")?;
    let other = [own.receive(), ["--disk", "sda=/x"].map(str::to_owned).into()].concat();
    says(&other, "the source sends no disk of that name; those that come are vda, vdb")?;
    let [a, b] = own.next.each_ref().map(|path| path.display().to_string());
    std::fs::write(&b, "another")?;
    says(&own.receive(), "has 50331648 bytes at the source and its image")?;
    ensure!(!own.next[0].exists(), "the first image was made and is left");
    std::fs::remove_file(&b)?;
    image(&["create", "-q", "-f", "raw", &a, "50331648"])?;
    says(&own.receive(), "Image is not in qcow2 format")?;
    std::fs::remove_file(&a)?;

    let (migrate, receive) = own.migrate(&["--disks", "all"], &own.receive())?;
    check_migrated(&migrate, &receive)?;
    own.hosts.check_guest()
}

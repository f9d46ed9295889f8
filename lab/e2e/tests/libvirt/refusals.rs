//! What is said before anything is sent: one line each, with the cure.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, check_refused};
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, LibvirtHost};

use crate::disks::Own;
use crate::hosts::Hosts;

#[test]
fn what_libvirt_has_against_it_is_told_in_a_line() -> anyhow::Result<()> {
    let test = "what_libvirt_has_against_it_is_told_in_a_line";
    let Some(hosts) = Hosts::start(test, Mode::Idle, true)? else { return Ok(()) };
    let Hosts { west, east, godwit, .. } = &hosts;
    let name = hosts.name();
    let refused = |domain: &str, host: &LibvirtHost, options: &[&str], words: &[&str]| {
        let migrate = godwit.migrate_named(&host.domain(domain), "127.0.0.1:1", options)?;
        check_refused(&migrate.wait(LIMIT)?, 1, words)
    };

    refused("nobody", west, &[], &["no domain 'nobody'", name])?;
    refused("", west, &[], &["which domain?"])?;
    let nowhere = "libvirt:vm1@qemu+unix:///system?socket=/nowhere";
    let output = godwit.run(&["migrate", "--vm", nowhere, "--to", "127.0.0.1:1"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("cannot connect to libvirt at qemu+unix"), "{said}");

    // The destination has it already, running or under another UUID; nothing is started there.
    let arrives = |words: &str| {
        let (migrate, _) = hosts.migrate(&[])?;
        ensure!(migrate.errors.contains(words), "{}", migrate.errors);
        hosts.check_guest()
    };
    let other = west.virsh(&["dumpxml", "--inactive", name])?;
    let uuid = west.virsh(&["domuuid", name])?;
    let other = other.replace(&uuid, "1c1e3f6c-2d4e-4f1e-9f0e-4f4e5d6c7b8a");
    let path = hosts.guest.file("other.xml");
    std::fs::write(&path, other)?;
    east.virsh(&["define", &path.display().to_string()])?;
    arrives("another domain called")?;
    east.virsh(&["undefine", name])?;

    // Shut off; and with what would be lost.
    west.virsh(&["snapshot-create-as", name, "before", "--disk-only"]).err();
    west.virsh(&["destroy", name])?;
    refused(name, west, &[], &["is shut off"])
}

#[test]
fn what_either_host_lacks_is_told_in_a_line() -> anyhow::Result<()> {
    let test = "what_either_host_lacks_is_told_in_a_line";
    let directory = std::env::temp_dir().join(format!("godwit-pool-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let volume = directory.join("v.raw");
    std::fs::File::create(&volume)?.set_len(1 << 20)?;
    std::fs::set_permissions(&volume, std::fs::Permissions::from_mode(0o666))?;
    let result = lacks(test, &directory.display().to_string());
    std::fs::remove_dir_all(&directory)?;
    result
}

/// With a volume of a pool in this directory, which the west alone has.
fn lacks(test: &str, directory: &str) -> anyhow::Result<()> {
    let devices = "<disk type='volume' device='disk'><driver name='qemu' type='raw' cache='none'/>\
                   <source pool='lab' volume='v.raw'><seclabel model='dac' relabel='no'/></source>\
                   <target dev='vda' bus='virtio'/></disk>";
    let Some(hosts) = Hosts::not_started(test, &GuestConfig::small(Mode::Idle), devices)? else {
        return Ok(());
    };
    let Hosts { west, east, godwit, guest } = &hosts;
    west.virsh(&["pool-create-as", "lab", "dir", "--target", directory])?;
    guest.create_on(west)?;
    guest.await_beats(3, LIMIT)?;
    let name = guest.name();
    let to_nobody = |options: &[&str], words: &str| {
        let migrate = godwit.migrate_named(&west.domain(name), "127.0.0.1:1", options)?;
        check_refused(&migrate.wait(LIMIT)?, 1, &[words])
    };
    let refused = |to: &LibvirtHost, options: &[&str], words: &str| -> anyhow::Result<()> {
        let (receive, address) = godwit.receive_named(&to.vm_name(), &["--disks", "all"])?;
        let migrate = godwit.migrate_named(&west.domain(name), &address, options)?;
        let (migrate, _) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        ensure!(migrate.errors.contains(words), "{words}: {}", migrate.errors);
        ensure!(migrate.errors.trim().lines().filter(|it| it.contains("godwit:")).count() == 1);
        ensure!(west.state(name)? == "running", "it does not run at the source");
        Ok(())
    };

    // A transient domain, and one whose pool is missing.
    to_nobody(&["--undefine-source"], "is transient")?;
    let shared = ["--disks-are-shared"];
    refused(east, &shared, "libvirt here cannot start the domain: ")?;
    refused(east, &shared, "no storage pool with matching name 'lab'")?;
    refused(east, &["--disks", "all"], "disk 'vda' is neither a file nor a block device")?;
    // The two are one, or the other has it under another name.
    refused(west, &shared, "runs at the destination already")?;
    let xml = west.virsh(&["dumpxml", name])?.replace(&format!("<name>{name}<"), "<name>other<");
    let path = guest.file("other.xml");
    std::fs::write(&path, xml)?;
    east.virsh(&["define", &path.display().to_string()])?;
    refused(east, &shared, "under the name 'other'")?;
    east.virsh(&["undefine", "other"])?;

    // A job of libvirt's, which a migration of its own is.
    east.virsh(&["pool-create-as", "lab", "dir", "--target", directory])?;
    let (to, speed) =
        (east.uri(), ["--unsafe", "--migrateuri", "tcp://127.0.0.1", "--bandwidth", "1"]);
    let mut virsh = Command::new("virsh");
    virsh.args(["-q", "-c", &west.uri(), "migrate", "--live", name, &to]).args(speed);
    let mut virsh = virsh.spawn()?;
    let until = Instant::now() + LIMIT;
    let begun = || Ok::<_, anyhow::Error>(east.virsh(&["list", "--name"])?.contains(name));
    while !begun()? && virsh.try_wait()?.is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    let told = to_nobody(&[], "has a job of libvirt's");
    west.virsh(&["domjobabort", name])?;
    virsh.wait()?;
    told?;
    hosts.check_guest()?;

    // What it would be started from there the next time: it ran there, and was saved.
    std::fs::write(&path, west.virsh(&["dumpxml", name])?)?;
    let path = path.display().to_string();
    west.virsh(&["destroy", name])?;
    east.virsh(&["define", &path])?;
    east.virsh(&["start", name])?;
    east.virsh(&["managedsave", name])?;
    west.virsh(&["create", &path])?;
    refused(east, &shared, "keeps a saved state")
}

#[test]
fn whoever_has_no_right_to_libvirt_is_told() -> anyhow::Result<()> {
    let test = "whoever_has_no_right_to_libvirt_is_told";
    let Some(hosts) = Hosts::not_started(test, &GuestConfig::small(Mode::Idle), "")? else {
        return Ok(());
    };
    let program = hosts.guest.file("godwit");
    std::fs::copy(hosts.godwit.program(), &program)?;
    let uri = hosts.west.uri();
    let (_, socket) = uri.split_once("socket=").context("no socket")?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o700))?;
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(&program);
    command.args(["migrate", "--vm", &hosts.west.domain("web01"), "--to", "127.0.0.1:1"]);
    let said = String::from_utf8_lossy(&command.output()?.stderr).into_owned();
    ensure!(
        said.contains("cannot connect to libvirt at") && said.contains("godwit root"),
        "{said}"
    );
    ensure!(said.contains("Permission denied"), "{said}");
    Ok(())
}

#[test]
fn what_libvirt_keeps_of_a_domain_is_not_lost() -> anyhow::Result<()> {
    let test = "what_libvirt_keeps_of_a_domain_is_not_lost";
    let Some(own) = Own::start(test)? else { return Ok(()) };
    let (west, name) = (&own.hosts.west, own.hosts.name());
    let refused = |words: &str| -> anyhow::Result<()> {
        let (migrate, _) = own.migrate(&["--disks", "all"], &own.receive())?;
        ensure!(migrate.errors.contains(words), "{words}: {}", migrate.errors);
        own.hosts.check_states(["running", "none"])
    };

    west.virsh(&["checkpoint-create-as", name, "c1", "--diskspec", "vdb,checkpoint=no"])
        .context("checkpoint")?;
    refused_at_once(&own, "has 1 checkpoints")?;
    west.virsh(&["checkpoint-delete", name, "c1"])?;
    west.virsh(&["snapshot-create-as", name, "s1", "--disk-only"]).context("snapshot")?;
    refused_at_once(&own, "has 1 snapshots")?;
    west.virsh(&["snapshot-delete", name, "s1", "--metadata"])?;
    // Of which the images are left.
    refused("has an image behind it")?;
    for disk in ["vda", "vdb"] {
        west.virsh(&["blockpull", name, disk, "--wait"])?;
    }
    let (migrate, receive) = own.migrate(&["--disks", "vda,vdb"], &own.receive())?;
    crate::hosts::check_migrated(&migrate, &receive)?;
    own.hosts.check_guest()
}

/// Before anybody is asked.
fn refused_at_once(own: &Own, words: &str) -> anyhow::Result<()> {
    let domain = own.hosts.west.domain(own.hosts.name());
    let migrate = own.hosts.godwit.migrate_named(&domain, "127.0.0.1:1", &[])?;
    check_refused(&migrate.wait(LIMIT)?, 1, &[words])
}

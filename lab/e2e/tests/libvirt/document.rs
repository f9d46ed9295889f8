//! docs/libvirt.md, word for word: the shell's blocks of its sections are run on two hosts, each on
//! the one that the text in front of it names.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Godwit, GuestConfig, LibvirtGuest, LibvirtHost, builds_for, images_for, libvirt_for,
};

use crate::disks::{at_work, device};
use crate::hosts::Hosts;

const PAGE: &str = include_str!("../../../../docs/libvirt.md");
/// What the page calls the domain, and the address of its east.
const DOMAIN: &str = "web01";
const ADDRESS: &str = "10.0.0.2";

/// The blocks of a section, each with the host that was named last.
fn blocks(section: &str) -> Vec<(&'static str, String)> {
    let all = PAGE.split("\n## ").find(|text| text.starts_with(section)).unwrap_or_default();
    let (mut found, mut host) = (Vec::new(), "");
    for (number, text) in all.split("```").enumerate() {
        if number % 2 == 1 {
            found.extend(text.strip_prefix("sh\n").map(|block| (host, block.to_owned())));
            continue;
        }
        let last = ["east", "west"].into_iter().max_by_key(|host| text.rfind(&format!("`{host}`")));
        host = last.filter(|host| text.contains(&format!("`{host}`"))).unwrap_or(host);
    }
    found
}

/// A program that is ended with this.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A network of the page's own.
fn network() -> anyhow::Result<Ends> {
    let script = format!(
        "ip link set lo up && ip address add {ADDRESS}/32 dev lo && echo up && exec sleep 600"
    );
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", &script]);
    let mut child = Ends(command.stdout(Stdio::piped()).spawn()?);
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().context("no output")?).read_line(&mut line)?;
    ensure!(line == "up\n", "no network of its own: {line}");
    Ok(child)
}

/// The keys that both hosts of the page have; they go with their value.
struct Keys(PathBuf);

impl Keys {
    fn make(godwit: &Godwit) -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("godwit-page-{}-{number}", std::process::id());
        let keys = Self(std::env::temp_dir().join(name));
        let dir = keys.0.to_str().context("a path of text")?;
        let made = godwit.run(&["keys", "--dir", dir, ADDRESS, "west"])?;
        ensure!(made.status.success(), "{made:?}");
        Ok(keys)
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A shell on `host`, in `network`, which finds the programs that were built.
fn shell(host: &LibvirtHost, network: &Ends, text: &str) -> anyhow::Result<Command> {
    let mut command = host.command("sh")?;
    let own = Godwit::built()?.program().parent().context("no directory")?.display().to_string();
    let paths = std::env::var("PATH").unwrap_or_default();
    let net = format!("nsenter --net=/proc/{}/ns/net sh -ec '{text}'", network.0.id());
    command.args(["-ec", &net]).env("PATH", format!("{own}:{paths}"));
    Ok(command)
}

/// Runs a section's blocks in their order; what receives goes on while the next ones run.
fn follow(section: &str, hosts: &Hosts) -> anyhow::Result<()> {
    let (network, keys) = (network()?, Keys::make(&hosts.godwit)?);
    let blocks = blocks(section);
    ensure!(blocks.len() > 1, "'{section}' has no commands: {blocks:?}");
    let mut receiving = None;
    for (host, block) in blocks {
        let (host, name) =
            if host == "east" { (&hosts.east, ADDRESS) } else { (&hosts.west, "west") };
        let mut command = shell(host, &network, &block)?;
        command.env("GODWIT_KEYS", keys.0.join(name));
        if !block.contains("godwit receive") {
            let output = command.output()?;
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said).into_owned();
            ensure!(output.status.success(), "{block}{said}");
            continue;
        }
        let mut child = Ends(command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn()?);
        let mut lines = BufReader::new(child.0.stderr.take().context("no output")?).lines();
        let listens = lines.find(|line| !line.as_ref().is_ok_and(|it| !it.contains("listening")));
        listens.with_context(|| format!("{block} does not listen"))??;
        receiving = Some((child, lines));
    }
    let (mut child, lines) = receiving.context("nothing receives")?;
    let until = Instant::now() + LIMIT;
    while child.0.try_wait()?.is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = child.0.try_wait()?.context("godwit receive does not end")?;
    let said: Vec<String> = lines.map_while(Result::ok).collect();
    ensure!(status.success(), "{said:?}");
    Ok(())
}

fn hosts(test: &str, config: &GuestConfig, devices: &str) -> anyhow::Result<Option<Hosts>> {
    let builds = builds_for(test);
    if builds.is_empty() || !libvirt_for(test) || !images_for(test) {
        return Ok(None);
    }
    let guest = LibvirtGuest::new(oldest(&builds)?, config, devices)?.named(DOMAIN);
    let (west, east) = (LibvirtHost::start()?, LibvirtHost::start()?);
    Ok(Some(Hosts { west, east, guest, godwit: Godwit::built()? }))
}

#[test]
fn a_domain_moves_as_the_page_says() -> anyhow::Result<()> {
    let config = GuestConfig::small(Mode::Rate);
    let Some(hosts) = hosts("a_domain_moves_as_the_page_says", &config, "")? else {
        return Ok(());
    };
    hosts.guest.define_on(&hosts.west)?;
    hosts.guest.await_beats(3, LIMIT)?;

    follow("A move", &hosts)?;

    hosts.check_states(["shut off", "running"])?;
    hosts.check_guest()
}

#[test]
fn disks_move_along_as_the_page_says() -> anyhow::Result<()> {
    // Each host has this directory for itself.
    let image = "/var/lib/libvirt/images/web01.qcow2";
    let devices = device("vda", "qcow2", image, "");
    let Some(hosts) = hosts("disks_move_along_as_the_page_says", &at_work(), &devices)? else {
        return Ok(());
    };
    let directory = "mkdir -p /var/lib/libvirt/images";
    let make = format!("{directory} && qemu-img create -q -f qcow2 {image} 50331648");
    for (host, script) in [(&hosts.east, directory), (&hosts.west, &make)] {
        ensure!(host.command("sh")?.args(["-ec", script]).status()?.success(), "{script}");
    }
    hosts.guest.define_on(&hosts.west)?;
    hosts.guest.await_beats(3, LIMIT)?;

    follow("Disks that move along", &hosts)?;

    hosts.check_states(["shut off", "running"])?;
    hosts.check_guest()?;
    for host in [&hosts.east, &hosts.west] {
        let check = ["check", "-U", "-q", image];
        ensure!(host.command("qemu-img")?.args(check).status()?.success(), "{check:?}");
    }
    Ok(())
}

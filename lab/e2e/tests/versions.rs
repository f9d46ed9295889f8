//! This release and the one before it, as programs: each moves guests to the other.
//!
//! What a peer of any other version is told is tried byte by byte in
//! crates/engine/tests/versions.rs.

use anyhow::ensure;
use godwit_e2e::{Keys, LIMIT, MicroPair, Pair, await_copying, check_moved, check_untouched};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, DiskImage, Ended, Godwit, GuestConfig, Link, Movable, Previous, Running, VmConfig,
    builds_for, images_for,
};
use godwit_units::ByteCount;
use rustix::process::Signal;

/// Slow enough that a pre-copy of the small guest lasts for seconds.
const SLOW: [&str; 4] = ["--max-bandwidth", "20MiB/s", "--compression", "none"];

/// Who moves a guest to whom.
struct Ways {
    this: Godwit,
    previous: Previous,
}

impl Ways {
    fn for_test(test: &str) -> anyhow::Result<Option<Self>> {
        let this = Godwit::built()?;
        Ok(Previous::built_for(test).map(|previous| Self { this, previous }))
    }

    /// The one that migrates, the one that receives; both ways.
    fn both(&self) -> [[&Godwit; 2]; 2] {
        let previous = &self.previous.godwit;
        [[previous, &self.this], [&self.this, previous]]
    }

    /// Checks that this one, on whichever side it was, spoke what the other speaks.
    fn check_version(&self, [migrate, receive]: [&Ended; 2]) -> anyhow::Result<()> {
        let accepted = receive.lines.iter().find(|line| line["event"] == "accepted");
        let of = |line: &serde_json::Value| line["protocol_version"].as_u64();
        let told = [of(migrate.last()), accepted.and_then(of)];
        ensure!(told.iter().flatten().count() == 1, "one of them says it: {told:?}");
        ensure!(told.contains(&Some(self.previous.protocol)), "{told:?}");
        Ok(())
    }
}

/// Starts both, at the ends of `link` if there is one to be made.
fn begin(
    [migrating, receiving]: [&Godwit; 2],
    [source, destination]: [&dyn Movable; 2],
    options: [&[&str]; 2],
    linked: bool,
) -> anyhow::Result<(Running, Running, Option<Link>)> {
    let (receive, address) = receiving.receive(destination, options[1])?;
    let link = if linked { Some(Link::to(&address)?) } else { None };
    let to = link.as_ref().map_or(address.as_str(), Link::address);
    Ok((migrating.migrate(source, to, options[0])?, receive, link))
}

/// One move of a guest, to its end.
fn move_once(
    ways: &Ways,
    godwits: [&Godwit; 2],
    pair: &mut Pair,
    options: [&[&str]; 2],
) -> anyhow::Result<()> {
    let (migrate, receive, _) = begin(godwits, [&pair.source, &pair.destination], options, false)?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    check_moved(pair, &migrate)?;
    ensure!(receive.status.success(), "{}: {}", receive.status, receive.errors);
    ways.check_version([&migrate, &receive])
}

#[test]
fn guests_move_between_releases_and_are_compared() -> anyhow::Result<()> {
    let test = "guests_move_between_releases_and_are_compared";
    let (Some(ways), builds) = (Ways::for_test(test)?, builds_for(test)) else { return Ok(()) };
    let Some(build) = builds.last() else { return Ok(()) };
    for backend in [Backend::SharedFile, Backend::Anonymous] {
        for godwits in ways.both() {
            println!(
                "{} to {}, {backend:?}",
                godwits[0].program().display(),
                godwits[1].program().display()
            );
            let config = VmConfig::new(build, GuestConfig::small(Mode::Rate));
            let mut pair = Pair::start(&config.with_backend(backend))?;
            move_once(&ways, godwits, &mut pair, [&["--verify", "--channels", "2"], &[]])?;
        }
    }
    Ok(())
}

#[test]
fn a_disk_moves_between_releases_encrypted() -> anyhow::Result<()> {
    let test = "a_disk_moves_between_releases_encrypted";
    let (Some(ways), builds) = (Ways::for_test(test)?, builds_for(test)) else { return Ok(()) };
    let Some(build) = builds.last().filter(|_| images_for(test)) else { return Ok(()) };
    let keys = Keys::make(&ways.this, "versions")?;
    let (west, east) = (keys.path("west")?, keys.path("east")?);
    let here = ["--disks", "all", "--keys", &west, "--peer", "east", "--verify"];
    let there = ["--disks", "all", "--keys", &east, "--peer", "west"];
    for godwits in ways.both() {
        let image = || DiskImage::create("qcow2", ByteCount(32 << 20));
        let images = [image()?, image()?];
        let (rate, span) = (2 << 20, ByteCount(16 << 20));
        let disk = DiskWork { write: rate, read: rate, span, ..DiskWork::default() };
        let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Rate) };
        let config = |image| VmConfig::new(build, guest).with_disk("disk0", image);
        let mut pair = Pair::start_apart(&config(&images[0]), &config(&images[1]))?;
        move_once(&ways, godwits, &mut pair, [&here, &there])?;
    }
    Ok(())
}

#[test]
fn a_move_between_releases_is_taken_up_again_or_cancelled() -> anyhow::Result<()> {
    let test = "a_move_between_releases_is_taken_up_again_or_cancelled";
    let (Some(ways), builds) = (Ways::for_test(test)?, builds_for(test)) else { return Ok(()) };
    let Some(build) = builds.last() else { return Ok(()) };
    for godwits in ways.both() {
        let mut pair = Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Rate)))?;
        let vms: [&dyn Movable; 2] = [&pair.source, &pair.destination];
        let options = [&SLOW[..], &["--reconnect", "60s", "--verify", "--channels", "2"]].concat();
        let (migrate, receive, link) = begin(godwits, vms, [&options, &[]], true)?;
        await_copying(&migrate)?;
        let severed = |line: &serde_json::Value| line["event"] == "severed";
        let Some(link) = link else { return Ok(()) };
        link.cut();
        migrate.wait_for("severed", LIMIT, severed)?;
        receive.wait_for("severed", LIMIT, severed)?;
        link.mend();
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        check_moved(&mut pair, &migrate)?;
        ensure!(migrate.last()["resumptions"] == 1, "{}", migrate.last());
        ways.check_version([&migrate, &receive])?;

        let mut pair = Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Rate)))?;
        let vms: [&dyn Movable; 2] = [&pair.source, &pair.destination];
        let (migrate, receive, _) = begin(godwits, vms, [&SLOW, &[]], false)?;
        await_copying(&migrate)?;
        migrate.signal(Signal::INT)?;
        ensure!(migrate.wait(LIMIT)?.status.code() == Some(130), "it was cancelled");
        ensure!(!receive.wait(LIMIT)?.status.success(), "no guest came");
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

/// What a destination of either release tells who asks, with a VM and without.
#[test]
fn a_doctor_asks_a_destination_of_the_release_before() -> anyhow::Result<()> {
    let test = "a_doctor_asks_a_destination_of_the_release_before";
    let (Some(ways), builds) = (Ways::for_test(test)?, builds_for(test)) else { return Ok(()) };
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Rate)))?;
    for [asking, receiving] in ways.both() {
        let (receive, to) = receiving.receive(&pair.destination, &[])?;
        let vm = pair.source.vm_name();
        if std::ptr::eq(asking, &ways.this) {
            let untold = "not told by the destination (older godwit)";
            let with = asking.run(&["doctor", "--vm", &vm, "--to", &to, "--json"])?;
            let said = String::from_utf8_lossy(&with.stdout);
            ensure!(said.contains("fits there, and would be accepted"), "{said}");
            ensure!(said.contains(untold), "{said}");
            let without = asking.run(&["doctor", "--to", &to, "--json"])?;
            let said = String::from_utf8_lossy(&without.stdout);
            ensure!(without.status.success(), "{without:?}");
            ensure!(said.contains(untold) && !said.contains("fits there"), "{said}");
            ensure!(said.contains("for a round trip; what it carries was not tried"), "{said}");
        } else {
            // It has no doctor, and asks the same for a plan.
            let plan = ["plan", "--vm", &vm, "--for", "200ms", "--to", &to, "--json"];
            let said = String::from_utf8(asking.done(&plan)?.stdout)?;
            ensure!(said.contains("\"accepts\":true"), "{said}");
        }
        ensure!(pair.destination.status()? == "inmigrate");
        receive.signal(Signal::INT)?;
        receive.wait(LIMIT)?;
    }
    check_untouched(&mut pair.source)
}

#[test]
fn a_microvm_moves_between_releases() -> anyhow::Result<()> {
    // The engine in the machine's own process is this release's on both sides; only the command
    // that asks for the move is the other's.
    let test = "a_microvm_moves_between_releases";
    let Some(ways) = Ways::for_test(test)? else { return Ok(()) };
    for godwits in ways.both() {
        let options = ["--memory", "64MiB", "--mode", "rate"];
        let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
        let vms: [&dyn Movable; 2] = [&pair.source, &pair.destination];
        let (migrate, receive, _) = begin(godwits, vms, [&["--verify"], &[]], false)?;
        let migrate = migrate.wait(LIMIT)?;
        let receive = receive.wait(LIMIT)?;
        let (here, there) = (&migrate.errors, &receive.errors);
        ensure!(receive.status.success(), "{here} {there}");
        pair.check_moved(&migrate)?;
    }
    Ok(())
}

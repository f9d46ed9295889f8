//! A link that is cut for seconds in the middle of a move: it is taken up again, the guest finds no
//! damage, and little is sent twice. With QEMU, its disks, and microvms.

use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, MicroPair, Pair, await_copying, check_moved, check_untouched, oldest};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    DiskImage, Ended, Godwit, GuestConfig, Link, Movable, Running, VmConfig, builds_for,
    builds_in_turn_for, images_for,
};
use godwit_units::ByteCount;
use rustix::process::Signal;
use serde_json::Value;

/// Slow enough that a pre-copy of the small guest lasts for seconds.
const SLOW: &[&str] =
    &["--max-bandwidth", "20MiB/s", "--compression", "none", "--reconnect", "60s", "--verify"];
/// How long the link is away.
const AWAY: Duration = Duration::from_secs(4);
/// What each of two channels may send again: the segment that it was at.
const TWICE: u64 = 2 * (16 << 20);

/// A move through a link, from the moment that pages pass.
struct Move {
    link: Link,
    migrate: Running,
    receive: Running,
}

impl Move {
    fn start(
        godwit: &Godwit,
        [source, destination]: [&dyn Movable; 2],
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let disks: Vec<&str> = more.iter().copied().take(2).collect();
        let (receive, address) = godwit.receive(destination, &disks)?;
        let link = Link::to(&address)?;
        let options = [SLOW, &["--channels", "2"], more].concat();
        let migrate = godwit.migrate(source, link.address(), &options)?;
        await_copying(&migrate)?;
        Ok(Self { link, migrate, receive })
    }

    /// Cuts the link for a while; both sides say so, and the guest is not held back meanwhile.
    fn cut(&self) -> anyhow::Result<()> {
        let severed = |line: &Value| line["event"] == "severed";
        self.link.cut();
        self.migrate.wait_for("severed", LIMIT, severed)?;
        self.receive.wait_for("severed", LIMIT, severed)?;
        std::thread::sleep(AWAY);
        let lines = self.migrate.lines();
        let looks: Vec<&Value> = lines.iter().filter(|line| !line["severed"].is_null()).collect();
        ensure!(looks.len() > 5, "it was told {} times", looks.len());
        ensure!(looks.iter().all(|look| look["throttle"] == 0.0), "{looks:?}");
        Ok(())
    }

    /// Mends it, and waits for the end.
    fn arrive(self) -> anyhow::Result<Ended> {
        self.link.mend();
        let migrate = self.migrate.wait(LIMIT)?;
        let receive = self.receive.wait(LIMIT)?;
        ensure!(receive.status.success(), "{}: {}", receive.status, receive.errors);
        for ended in [&migrate, &receive] {
            let resumed = ended.lines.iter().filter(|line| line["event"] == "resumed");
            ensure!(resumed.count() == 1, "{:?} {}", ended.lines, ended.errors);
        }
        Ok(migrate)
    }
}

/// That it was taken up again once, and what that cost.
fn check_cost(migrate: &Ended) -> anyhow::Result<()> {
    let last = migrate.last();
    ensure!(last["resumptions"] == 1, "{last}");
    ensure!(last["severed_ms"].as_f64() > Some(AWAY.as_secs_f64() * 1e3 * 0.9), "{last}");
    let again = last["sent_again_bytes"].as_u64().context("no figure")?;
    println!("{again} bytes of {} were sent again", last["sent_bytes"]);
    ensure!(again <= TWICE, "{again} bytes were sent again");
    // The outage is no part of a round.
    let rounds = last["round_list"].as_array().context("no rounds")?;
    let whole = rounds.iter().filter(|round| round["cut_off"].is_null());
    let longest = whole.filter_map(|round| round["ms"].as_f64()).fold(0.0, f64::max);
    let total = last["total_ms"].as_f64().context("no total")?;
    ensure!(longest < total - AWAY.as_secs_f64() * 900.0, "{longest} of {total} ms: {rounds:?}");
    Ok(())
}

#[test]
fn a_move_is_taken_up_again_behind_a_cut() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_move_is_taken_up_again_behind_a_cut") {
        println!("with {build}");
        let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Rate)))?;
        let this = Move::start(&pair.godwit, [&pair.source, &pair.destination], &[])?;
        this.cut()?;
        // While it is cut, the guest runs and writes.
        pair.source.wait_for_heartbeats_after(std::time::Instant::now(), 2, LIMIT)?;
        let migrate = this.arrive()?;
        check_moved(&mut pair, &migrate)?;
        check_cost(&migrate)?;
    }
    Ok(())
}

#[test]
fn a_disk_of_a_qemu_is_taken_up_again_with_its_guest() -> anyhow::Result<()> {
    let test = "a_disk_of_a_qemu_is_taken_up_again_with_its_guest";
    let builds = builds_for(test);
    let Some(build) = builds.last().filter(|_| images_for(test)) else { return Ok(()) };
    let image = || DiskImage::create("qcow2", ByteCount(64 << 20));
    let images = [image()?, image()?];
    let rate = 2 << 20;
    let disk =
        DiskWork { write: rate, read: rate, span: ByteCount(16 << 20), ..DiskWork::default() };
    let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Rate) };
    let config = |image| VmConfig::new(build, guest).with_disk("disk0", image);
    let mut pair = Pair::start_apart(&config(&images[0]), &config(&images[1]))?;
    let (source, destination) = (&pair.source, &pair.destination);
    let this = Move::start(&pair.godwit, [source, destination], &["--disks", "all"])?;
    this.cut()?;
    let migrate = this.arrive()?;
    check_moved(&mut pair, &migrate)?;
    ensure!(migrate.last()["resumptions"] == 1, "{}", migrate.last());
    Ok(())
}

#[test]
fn a_microvm_is_taken_up_again_behind_a_cut() -> anyhow::Result<()> {
    let options = ["--memory", "128MiB", "--mode", "rate", "--working-set", "16MiB"];
    let test = "a_microvm_is_taken_up_again_behind_a_cut";
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    let this = Move::start(&pair.godwit, [&pair.source, &pair.destination], &[])?;
    this.cut()?;
    let migrate = this.arrive()?;
    pair.check_moved(&migrate)?;
    check_cost(&migrate)
}

#[test]
fn a_move_goes_on_by_another_address_with_more_connections() -> anyhow::Result<()> {
    // Mutations: the address is not taken; nor the number; one beyond this host is.
    let test = "a_move_goes_on_by_another_address_with_more_connections";
    let Some(build) = builds_for(test).into_iter().next_back() else { return Ok(()) };
    let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Rate)))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let (first, second) = (Link::to(&address)?, Link::to(&address)?);
    let name = format!("redirected-{}", std::process::id());
    let options = [SLOW, &["--channels", "2", "--name", &name]].concat();
    let migrate = pair.godwit.migrate(&pair.source, first.address(), &options)?;
    await_copying(&migrate)?;
    let redirect = ["redirect", "--migration", &name];
    let beyond = pair.godwit.run(&[&redirect[..], &["--to", "192.0.2.7:4444"]].concat())?;
    let said = String::from_utf8_lossy(&beyond.stderr).into_owned();
    ensure!(beyond.status.code() == Some(1) && said.contains("beyond this host"), "{said}");
    first.cut();
    migrate.wait_for("severed", LIMIT, |line| line["event"] == "severed")?;
    let way = ["--to", second.address(), "--channels", "3"];
    pair.godwit.done(&[&redirect[..], &way].concat())?;
    let ended = migrate.wait(LIMIT)?;
    ensure!(receive.wait(LIMIT)?.status.success(), "{}", ended.errors);
    check_moved(&mut pair, &ended)?;
    let last = ended.last();
    ensure!(last["resumptions"] == 1 && last["channels"] == 3, "{last}");
    Ok(())
}

#[test]
fn ctrl_c_while_the_link_is_cut() -> anyhow::Result<()> {
    let builds = builds_for("ctrl_c_while_the_link_is_cut");
    if builds.is_empty() {
        return Ok(());
    }
    let config = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate));
    let mut pair = Pair::start(&config)?;
    let this = Move::start(&pair.godwit, [&pair.source, &pair.destination], &[])?;
    this.cut()?;

    this.migrate.signal(Signal::INT)?;
    let migrate = this.migrate.wait(LIMIT)?;
    this.receive.signal(Signal::INT)?;
    let receive = this.receive.wait(LIMIT)?;

    for ended in [&migrate, &receive] {
        ensure!(ended.status.code() == Some(130), "{}: {}", ended.status, ended.errors);
        assert_eq!(ended.last()["outcome"], "cancelled");
    }
    check_untouched(&mut pair.source)?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    check_moved(&mut pair, &migrate)
}

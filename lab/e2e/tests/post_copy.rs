//! Guests that run at the destination before all of their memory is there.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_bitmap::DirtyBitmap;
use godwit_e2e::{
    LIMIT, Pair, Third, USERFAULTFD, Unprivileged, await_copying, await_quit, check_moved,
    check_no_userfaultfd, check_refused, check_untouched, ends_with_its_guardian, follow_records,
    oldest, only_page, recover_knows,
};
use godwit_memory::RamBlock;
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Ended, Frozen, GuestConfig, HugePages, Link, Mount, Movable, QemuBuild, Room, Running,
    TestVm, VmConfig, builds_for, builds_in_turn_for, kvm_builds_in_turn_for, kvm_for, skip,
};
use godwit_track::{Approach, MissingPages};
use godwit_units::{PAGE_SIZE, PageCount, PageIndex, PageRun};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::Value;

/// So slow that the memory of the small guest takes seconds; and lost connections are made again.
const SLOW: &[&str] =
    &["--max-bandwidth", "20MiB/s", "--compression", "none", "--reconnect", "60s"];
/// How long the link is away.
const AWAY: Duration = Duration::from_secs(3);

/// Memory of QEMU's own, and a file that it maps.
const BACKENDS: [Backend; 2] = [Backend::Anonymous, Backend::SharedFile];

fn config(build: &QemuBuild, mode: Mode) -> VmConfig {
    config_in(build, Backend::Anonymous, mode)
}

fn config_in(build: &QemuBuild, backend: Backend, mode: Mode) -> VmConfig {
    let config = VmConfig::new(build, GuestConfig::small(mode)).with_backend(backend);
    config.with_extra(&["-device", "VGA", "-device", "virtio-rng-pci"])
}

/// A move that ends well.
fn over(pair: &Pair, options: &[&str]) -> anyhow::Result<(Ended, Ended)> {
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let options = [SLOW, options].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    ensure!(migrate.status.success(), "{} {}", migrate.last(), migrate.errors);
    Ok((migrate, receive.wait(LIMIT)?))
}

/// A figure of the last line.
fn figure(ended: &Ended, part: &str, name: &str) -> anyhow::Result<u64> {
    let value = &ended.last()[part][name];
    value.as_u64().with_context(|| format!("{part}.{name}: {value} in {}", ended.last()))
}

/// It came whole, some of it when it ran already, and nothing of godwit's is left in QEMU.
fn check_followed(pair: &mut Pair, migrate: &Ended, receive: &Ended) -> anyhow::Result<()> {
    check_moved(pair, migrate)?;
    ensure!(receive.last()["outcome"] == "running", "{} {}", receive.last(), receive.errors);
    let missing = figure(migrate, "post_copy", "missing_bytes")?;
    ensure!(missing == figure(receive, "fetched", "missing_bytes")?, "{}", receive.last());
    let (faults, time) = (figure(receive, "fetched", "faults")?, &receive.last()["fetched"]);
    println!("{missing} bytes followed, {faults} pages were waited for: {time}");
    ensure!(missing > 0 && faults > 0, "{}", receive.last());
    check_clean(pair)
}

/// The source said what is missing while its QEMU saved the devices: behind the command, and before
/// its answer.
fn check_told_meanwhile(migrate: &Ended, backend: Backend) -> anyhow::Result<()> {
    let saves = match backend {
        Backend::Anonymous => "command=\"xen-save-devices-state\"",
        _ => "command=\"migrate-continue\"",
    };
    // Mutations: the answer is waited for where the command is given, or before the list is sent.
    for (action, said) in [("ReleaseState", "asked"), ("FinishState", "answered")] {
        let words = [&format!("action={action}"), said, saves];
        let found = |line: &str| words.iter().all(|word| line.contains(word));
        ensure!(migrate.errors.lines().any(found), "no line with {words:?}: {}", migrate.errors);
    }
    Ok(())
}

/// It came whole, whoever has seen to that.
fn check_whole(pair: &mut Pair, migrate: &Ended) -> anyhow::Result<()> {
    check_moved(pair, migrate)?;
    check_clean(pair)
}

/// Nothing of godwit's is left in QEMU, and the source has ended.
fn check_clean(pair: &mut Pair) -> anyhow::Result<()> {
    check_no_userfaultfd(pair.destination.pid())?;
    ensure!(pair.destination.errors() == "", "{}", pair.destination.errors());
    await_quit(&mut pair.source)
}

#[test]
fn a_guest_leaves_at_once_and_its_memory_follows() -> anyhow::Result<()> {
    let builds = builds_in_turn_for("a_guest_leaves_at_once_and_its_memory_follows");
    for (build, backend) in builds.iter().flat_map(|build| BACKENDS.map(|kind| (build, kind))) {
        let mut pair = Pair::start(&config_in(build, backend, Mode::Rate))?;
        let log = ["--log", "godwit_engine=debug,godwit_qemu=trace"];
        let (migrate, receive) = over(&pair, &[&["--postcopy", "now"][..], &log].concat())?;
        let context = || format!("{build}, {backend:?}");
        check_followed(&mut pair, &migrate, &receive).with_context(context)?;
        check_told_meanwhile(&migrate, backend).with_context(context)?;
        let (attached, tracked) =
            (&migrate.last()["tracking_stop_us"], &migrate.last()["tracked_ms"]);
        ensure!(attached == 0, "QEMU was attached to: stopped for {attached} us");
        ensure!(tracked == 0.0, "its writes were tracked for {tracked} ms");
        let downtime = migrate.last()["downtime_ms"].as_f64().context("no downtime")?;
        let time = migrate.last()["post_copy"]["time_ms"].as_f64().context("no time")?;
        println!("{build}: downtime {downtime:.1} ms, the rest within {time:.0} ms");
    }
    Ok(())
}

#[test]
fn a_guest_leaves_from_a_file_for_memory_of_its_own_and_the_other_way() -> anyhow::Result<()> {
    let test = "a_guest_leaves_from_a_file_for_memory_of_its_own_and_the_other_way";
    let builds = builds_in_turn_for(test);
    for (build, to) in builds.iter().flat_map(|build| BACKENDS.map(|kind| (build, kind))) {
        let [own, file] = BACKENDS.map(|kind| config_in(build, kind, Mode::Rate));
        let (from, to) = if to == Backend::SharedFile { (own, file) } else { (file, own) };
        let mut pair = Pair::start_apart(&from, &to)?;
        let (migrate, receive) = over(&pair, &["--postcopy", "now"])?;
        check_followed(&mut pair, &migrate, &receive).with_context(|| build.to_string())?;
    }
    Ok(())
}

#[test]
fn a_guest_at_full_speed_leaves_after_a_round() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_guest_at_full_speed_leaves_after_a_round") {
        let mut pair = Pair::start(&config_in(&build, Backend::SharedFile, Mode::Full))?;
        let options = ["--postcopy", "after 1", "--throttle", "off", "--downtime-limit", "20ms"];
        let (migrate, receive) = over(&pair, &options)?;
        check_followed(&mut pair, &migrate, &receive).with_context(|| build.to_string())?;
        let attached = migrate.last()["tracking_stop_us"].as_u64();
        ensure!(attached.is_some_and(|time| time > 0), "writes were not tracked");
    }
    Ok(())
}

#[test]
fn an_operator_has_a_guest_leave_by_post_copy() -> anyhow::Result<()> {
    let builds = builds_for("an_operator_has_a_guest_leave_by_post_copy");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&config(build, Mode::Rate))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let options = [SLOW, &["--name", "in-a-hurry"]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
    await_copying(&migrate)?;
    let asked = pair.godwit.done(&["switchover", "--migration", "in-a-hurry", "--postcopy"])?;
    let said = String::from_utf8_lossy(&asked.stdout).into_owned();
    ensure!(said.contains("may follow when the guest runs there"), "{said}");
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    check_followed(&mut pair, &migrate, &receive)
}

#[test]
fn a_link_that_is_cut_meanwhile_is_waited_for() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_link_that_is_cut_meanwhile_is_waited_for") {
        let mut pair = Pair::start(&config(&build, Mode::Rate))?;
        let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let link = Link::to(&address)?;
        let options = [SLOW, &["--postcopy", "now"]].concat();
        let migrate = pair.godwit.migrate(&pair.source, link.address(), &options)?;
        let follows = |line: &Value| line["stage"] == "post-copy";
        migrate.wait_for("the guest to run there", LIMIT, follows)?;
        link.cut();
        for side in [&migrate, &receive] {
            let severed = |line: &Value| line["event"] == "severed";
            side.wait_for("severed", LIMIT, severed)?;
        }
        std::thread::sleep(AWAY);
        // Nobody gives up: not for a wish either.
        receive.signal(Signal::INT)?;
        migrate.signal(Signal::INT)?;
        link.mend();
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        check_followed(&mut pair, &migrate, &receive).with_context(|| build.to_string())?;
        ensure!(figure(&migrate, "post_copy", "resumptions")? == 1, "{}", migrate.last());
    }
    Ok(())
}

#[test]
fn how_memory_follows_is_changed_meanwhile_by_speed_and_by_way() -> anyhow::Result<()> {
    // Mutations: what is set is not put in force; who tries again goes by the old way.
    let builds = builds_for("how_memory_follows_is_changed_meanwhile_by_speed_and_by_way");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&config(build, Mode::Rate))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let link = Link::to(&address)?;
    let name = format!("follows-{}", std::process::id());
    // By which it would take an hour.
    let crawl = ["--max-bandwidth", "64KiB/s", "--compression", "none", "--reconnect", "60s"];
    let options = [&crawl[..], &["--postcopy", "now", "--name", &name]].concat();
    let migrate = pair.godwit.migrate(&pair.source, link.address(), &options)?;
    migrate.wait_for("there", LIMIT, |line: &Value| line["stage"] == "post-copy")?;
    let refused = pair.godwit.run(&["set", "--migration", &name, "downtime-limit=1s"])?;
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(words.contains("only max-bandwidth and compression"), "{words}");
    link.cut();
    migrate.wait_for("severed", LIMIT, is_event("severed"))?;
    pair.godwit.done(&["redirect", "--migration", &name, "--to", &address])?;
    receive.wait_for("resumed", LIMIT, is_event("resumed"))?;
    pair.godwit.done(&["set", "--migration", &name, "max-bandwidth=off"])?;
    let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
    check_followed(&mut pair, &migrate, &receive)
}

/// What `godwit recover` knows of a VM, and whether an operator has to do something.
fn known(pair: &Pair, vm: &dyn Movable) -> anyhow::Result<(String, bool)> {
    recover_knows(&pair.godwit, &vm.vm_name())
}

#[test]
fn whoever_is_killed_meanwhile_is_followed_by_another() -> anyhow::Result<()> {
    // Mutations: the record goes with the process; it is not written; who follows counts its
    // attempts from the beginning.
    let builds = builds_in_turn_for("whoever_is_killed_meanwhile_is_followed_by_another");
    for (build, backend) in builds.iter().flat_map(|build| BACKENDS.map(|kind| (build, kind))) {
        println!("with {build} and {backend:?}");
        let mut pair = Pair::start(&config_in(build, backend, Mode::Rate))?;
        let kept = Room::new()?;
        let kept_in = kept.dir().to_string_lossy().into_owned();
        pair.godwit = pair.godwit.clone().with_variable("XDG_STATE_HOME", &kept_in);
        let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let options = [SLOW, &["--postcopy", "now"]].concat();
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
        let follows = |line: &Value| line["stage"] == "post-copy";
        migrate.wait_for("the guest to run there", LIMIT, follows)?;
        ensure!(follow_records(&pair) == [1, 1], "not a record of each side");

        receive.signal(Signal::KILL)?;
        drop(receive.wait(LIMIT)?);
        migrate.wait_for("severed", LIMIT, |line: &Value| line["event"] == "severed")?;
        let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &[])?;
        let resumed = |line: &Value| line["event"] == "resumed";
        receive.wait_for("resumed", LIMIT, resumed)?;

        migrate.signal(Signal::KILL)?;
        drop(migrate.wait(LIMIT)?);
        receive.wait_for("severed", LIMIT, |line: &Value| line["event"] == "severed")?;
        ensure!(known(&pair, &pair.source)? == ("follows".to_owned(), true));
        let end = ["recover", "--vm", &pair.source.vm_name(), "--guest", "there"];
        let refused = pair.godwit.run(&end)?;
        ensure!(!refused.status.success(), "its pages are nowhere else");
        let plan = ["plan", "--vm", &pair.source.vm_name(), "--to", &address];
        let plan = pair.godwit.run(&plan)?;
        let words = String::from_utf8_lossy(&plan.stderr).into_owned();
        ensure!(words.contains("godwit recover"), "{words}");

        // Both: then the guest runs, as far as it can, with nobody there.
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
        migrate.wait_for("the destination", LIMIT, follows)?;
        std::thread::sleep(Duration::from_millis(700));
        for side in [&migrate, &receive] {
            side.signal(Signal::KILL)?;
        }
        drop((migrate.wait(LIMIT)?, receive.wait(LIMIT)?));
        ensure!(follow_records(&pair) == [1, 1], "a record is gone");
        ensure!(known(&pair, &pair.destination)? == ("lacks-pages".to_owned(), true));
        // What has not come is not to be taken for holes.
        for more in [&[][..], &["--postcopy", "now"]] {
            let on = ["migrate", "--vm", &pair.destination.vm_name(), "--to", &address];
            let refused = pair.godwit.run(&[&on[..], more].concat())?;
            let words = String::from_utf8_lossy(&refused.stderr).into_owned();
            ensure!(!refused.status.success(), "it may not be moved on");
            ensure!(words.contains("are still to come"), "{words}");
        }
        let here = ["recover", "--vm", &pair.source.vm_name(), "--guest", "here"];
        ensure!(!pair.godwit.run(&here)?.status.success(), "the guest runs elsewhere");

        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
        let busy = pair.godwit.run(&here)?;
        ensure!(!busy.status.success(), "another one is at work");
        let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &[])?;
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        ensure!(migrate.status.success(), "{} {}", migrate.last(), migrate.errors);
        ensure!(receive.status.success(), "{} {}", receive.last(), receive.errors);
        check_whole(&mut pair, &migrate).with_context(|| build.to_string())?;
        ensure!(follow_records(&pair) == [0, 0], "a record is left");
        // Those that were killed have kept nothing for people to read.
        let page = only_page(&pair.godwit, "destination")?;
        ensure!(page.contains("followed when the guest ran here"), "{page}");
    }
    Ok(())
}

#[test]
fn a_guest_that_was_handed_over_and_not_run_is_run_by_who_follows() -> anyhow::Result<()> {
    // Mutation: who runs it is kept from that by who fetches its pages, which is itself.
    for build in
        builds_in_turn_for("a_guest_that_was_handed_over_and_not_run_is_run_by_who_follows")
    {
        let mut pair = Pair::start(&config(&build, Mode::Rate))?;
        let (receive, address) =
            pair.godwit.receive(&pair.destination, &["--fault", "kill-before-run"])?;
        let options = [SLOW, &["--postcopy", "now"]].concat();
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
        // Nobody is left who would run it.
        drop(ends_with_its_guardian(&pair.destination, receive)?);
        ensure!(known(&pair, &pair.destination)? == ("handed-over".to_owned(), true));
        let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &[])?;
        pair.destination.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        ensure!(!migrate.has_ended(), "it stood still until all of its memory was there");
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        ensure!(receive.status.success(), "{} {}", receive.last(), receive.errors);
        check_whole(&mut pair, &migrate).with_context(|| build.to_string())?;
    }
    Ok(())
}

#[test]
fn who_follows_may_leave_off_until_the_other_side_is_there() -> anyhow::Result<()> {
    let builds = builds_for("who_follows_may_leave_off_until_the_other_side_is_there");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&config(build, Mode::Rate))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let options = [SLOW, &["--postcopy", "now"]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
    migrate.wait_for("there", LIMIT, |line: &Value| line["stage"] == "post-copy")?;
    for side in [&migrate, &receive] {
        side.signal(Signal::KILL)?;
    }
    drop((migrate.wait(LIMIT)?, receive.wait(LIMIT)?));
    // Mutation: what was left goes with who leaves off.
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
    std::thread::sleep(Duration::from_secs(1));
    migrate.signal(Signal::INT)?;
    let ended = migrate.wait(LIMIT)?;
    ensure!(ended.status.code() == Some(3), "{} {}", ended.last(), ended.errors);
    let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &[])?;
    receive.signal(Signal::INT)?;
    let ended = receive.wait(LIMIT)?;
    ensure!(ended.status.code() == Some(3), "{} {}", ended.last(), ended.errors);
    ensure!(follow_records(&pair) == [1, 1], "a record is gone");

    let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    ensure!(migrate.status.success(), "{} {}", migrate.last(), migrate.errors);
    receive.wait(LIMIT)?;
    check_whole(&mut pair, &migrate)
}

#[test]
fn under_kvm_the_kernel_waits_as_well() -> anyhow::Result<()> {
    let builds = kvm_builds_in_turn_for("under_kvm_the_kernel_waits_as_well");
    for (build, backend) in builds.iter().flat_map(|build| BACKENDS.map(|kind| (build, kind))) {
        let guest = GuestConfig::small(Mode::Full);
        let config = VmConfig::new(build, guest).with_backend(backend).on_kvm();
        let mut pair = Pair::start(&config)?;
        let (migrate, receive) = over(&pair, &["--postcopy", "now"])?;
        check_followed(&mut pair, &migrate, &receive).with_context(|| build.to_string())?;
        pair.destination.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    }
    Ok(())
}

/// Another process that has mapped a file: a QEMU without a machine.
struct Mapper(Child);

impl Mapper {
    fn of(build: &QemuBuild, file: &Path) -> anyhow::Result<Self> {
        let size = std::fs::metadata(file)?.len();
        let file = file.display();
        let object = format!("memory-backend-file,id=other,size={size},mem-path={file},share=on");
        let mut command = Command::new(&build.program);
        command.args(["-machine", "none", "-display", "none", "-object", &object]);
        let child = command.stdin(Stdio::null()).spawn().context("no other process")?;
        let mapper = Self(child);
        let (maps, until) = (format!("/proc/{}/maps", mapper.0.id()), Instant::now() + LIMIT);
        while !std::fs::read_to_string(&maps)?.contains(&file.to_string()) {
            ensure!(Instant::now() < until, "it does not map {file}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(mapper)
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn where_pages_cannot_be_waited_for_the_guest_does_not_leave() -> anyhow::Result<()> {
    let builds = builds_for("where_pages_cannot_be_waited_for_the_guest_does_not_leave");
    let Some(build) = builds.last() else { return Ok(()) };
    let file = VmConfig::new(build, GuestConfig::small(Mode::Rate));
    let mut pair = Pair::start(&file.with_backend(Backend::SharedFile))?;
    let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    // Another process, which does not wait, and would fill holes with zeros.
    let mut other = Mapper::of(build, pair.destination.ram_file())?;
    let options = [SLOW, &["--postcopy", "now"]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    check_refused(&migrate, 1, &["has RAM block 'mem' as well", "end it, or use pre-copy"])?;
    check_untouched(&mut pair.source)?;
    other.0.kill()?;
    other.0.wait()?;
    let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    check_moved(&mut pair, &migrate)
}

#[test]
fn a_guest_does_not_leave_for_huge_pages() -> anyhow::Result<()> {
    // Mutation: huge pages are not looked at.
    let test = "a_guest_does_not_leave_for_huge_pages";
    let builds = builds_for(test);
    let Some(build) = builds.last() else { return Ok(()) };
    let small = VmConfig::new(build, GuestConfig::small(Mode::Rate));
    let Some(huge) = HugePages::for_test(test, small.guest.memory) else { return Ok(()) };
    let mut pair = Pair::start_apart(&small, &small.clone().with_ram_in(huge.dir()))?;
    let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let options = [SLOW, &["--postcopy", "now"]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    let words = ["'mem' is in huge pages", "use memory-backend-ram, with transparent huge pages"];
    check_refused(&migrate, 1, &words)?;
    check_untouched(&mut pair.source)?;
    // As it says.
    pair.destination = TestVm::destination(&small.with_backend(Backend::Anonymous))?;
    let (migrate, receive) = over(&pair, &["--postcopy", "now"])?;
    check_followed(&mut pair, &migrate, &receive)
}

/// The page of a machine for which somebody waits who is not godwit.
const OTHERS: PageRun = PageRun { start: PageIndex(1000), count: PageCount(1) };

/// Has `vm` wait for a page, as another one that moves guests would.
fn awaited_by_another(vm: &TestVm) -> anyhow::Result<MissingPages> {
    let block = RamBlock::open("mem", vm.ram_file(), 0, vm.config().guest.memory, false)?;
    let mut missing = DirtyBitmap::new(block.pages());
    missing.set(OTHERS);
    let ram = Arc::new(vec![block]);
    Ok(MissingPages::start(Approach::default(), vm.pid(), &ram, vec![missing])?)
}

#[test]
fn where_another_has_pages_waited_for_the_guest_does_not_leave() -> anyhow::Result<()> {
    // Mutation: what others have there is not looked at.
    let builds = builds_for("where_another_has_pages_waited_for_the_guest_does_not_leave");
    let Some(build) = builds.last() else { return Ok(()) };
    let mut pair = Pair::start(&config_in(build, Backend::SharedFile, Mode::Rate))?;
    let other = awaited_by_another(&pair.destination)?;
    let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let options = [SLOW, &["--postcopy", "now"]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    let words = ["has a userfaultfd of its own, or of another", "end that migration or start the"];
    check_refused(&migrate, 1, &words)?;
    check_untouched(&mut pair.source)?;
    other.place_zeros(0, OTHERS)?;
    other.finish()?;
    let (migrate, receive) = over(&pair, &["--postcopy", "now"])?;
    check_followed(&mut pair, &migrate, &receive)
}

#[test]
fn a_qemu_without_rights_is_handed_a_device_and_where_there_is_none_the_guest_stays()
-> anyhow::Result<()> {
    // Mutations: that the device cannot be opened is not seen before; it stays in QEMU.
    let test = "a_qemu_without_rights_is_handed_a_device_and_where_there_is_none_the_guest_stays";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let Some(without) = Unprivileged::new(test, oldest(&builds)?)? else { return Ok(()) };
    let emulated = config(&without.build, Mode::Rate);
    // Whose vCPUs are the kernel, when they wait.
    let on_kvm = kvm_for(test).then(|| {
        let busy = GuestConfig::small(Mode::Full);
        VmConfig::new(&without.build, busy).with_backend(Backend::Anonymous).on_kvm()
    });
    for config in [Some(emulated), on_kvm].into_iter().flatten() {
        println!("{:?}", config.accelerator);
        let mut pair = Pair::start(&config)?;
        let closed = pair.godwit.clone().without_device(Path::new(USERFAULTFD));
        let (_receive, address) = closed.receive(&pair.destination, &[])?;
        let options = [SLOW, &["--postcopy", "now"]].concat();
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
        let words = ["may not handle faults of the kernel", "may open /dev/userfaultfd"];
        check_refused(&migrate, 1, &words)?;
        check_untouched(&mut pair.source)?;
        // As it says.
        let (migrate, receive) = over(&pair, &["--postcopy", "now"])?;
        check_followed(&mut pair, &migrate, &receive)?;
        let open = std::fs::read_dir(format!("/proc/{}/fd", pair.destination.pid()))?;
        let is_device = |path: std::path::PathBuf| path == Path::new(USERFAULTFD);
        let mut open = open.flatten().filter_map(|it| std::fs::read_link(it.path()).ok());
        ensure!(!open.any(is_device), "the device is left in QEMU");
    }
    Ok(())
}

fn is_event(name: &'static str) -> impl Fn(&Value) -> bool {
    move |line| line["event"] == name
}

/// The guest at the destination goes on, and lacks nothing any more.
fn check_saved(pair: &mut Pair, third: &Third) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while third.files()? > 0 {
        ensure!(Instant::now() < until, "the copy stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    check_no_userfaultfd(pair.destination.pid())?;
    pair.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    ensure!(pair.destination.bugs().is_empty(), "{:?}", pair.destination.bugs());
    ensure!(pair.destination.status()? == "running");
    Ok(())
}

#[test]
fn where_the_source_host_dies_the_rest_is_taken_from_the_copy() -> anyhow::Result<()> {
    // Mutations: the copy has other pages than it says; it is removed when the source has ended.
    let test = "where_the_source_host_dies_the_rest_is_taken_from_the_copy";
    let builds = builds_in_turn_for(test);
    for (build, backend) in builds.iter().flat_map(|build| BACKENDS.map(|kind| (build, kind))) {
        println!("with {build} and {backend:?}");
        let third = Third::new()?;
        let [option, place] = third.option();
        let safe = [option.as_str(), place.as_str()];
        let mut pair = Pair::start(&config_in(build, backend, Mode::Rate))?;
        let (receive, address) = pair.godwit.receive(&pair.destination, &safe)?;
        let options = [SLOW, &["--postcopy", "now"], &safe].concat();
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
        migrate.wait_for("the guest to run there", LIMIT, |line| line["stage"] == "post-copy")?;
        ensure!(third.files()? == 1, "no copy");
        // All of its host, or the machine alone, which whoever moves it tells of.
        let all = backend == Backend::SharedFile;
        if all {
            migrate.signal(Signal::KILL)?;
        }
        pair.source.kill();
        let migrate = migrate.wait(LIMIT)?;
        ensure!(all || migrate.last()["guest"] == "destination", "{}", migrate.last());
        ensure!(all || migrate.errors.contains("takes from here"), "{}", migrate.errors);
        let lacks = receive.wait_for("what is missing", LIMIT, is_event("lacks"))?;
        let runs = lacks["missing"][0]["runs"].as_array().context("no runs")?;
        ensure!(!runs.is_empty(), "{lacks}");
        let copy = receive.wait_for("the copy", LIMIT, is_event("copy"))?;
        ensure!(copy["why"].is_null(), "{copy}");
        check_saved(&mut pair, &third).with_context(|| build.to_string())?;
    }
    Ok(())
}

/// The runs of pages of RAM block 'mem' that were told to be missing, and how many bytes in all.
fn told_missing(lacks: &Value) -> anyhow::Result<(Vec<(u64, u64)>, u64)> {
    let mem = lacks["missing"].as_array().into_iter().flatten().find(|it| it["block"] == "mem");
    let runs = mem.and_then(|mem| mem["runs"].as_array()).context("nothing of 'mem'")?;
    let run = |run: &Value| Some((run[0].as_u64()?, run[1].as_u64()?));
    let runs: Option<Vec<(u64, u64)>> = runs.iter().map(run).collect();
    Ok((runs.context("no runs")?, lacks["left_bytes"].as_u64().context("no number")?))
}

/// Whether `file` has nothing on these pages.
fn is_hole(file: &File, (start, count): (u64, u64)) -> anyhow::Result<bool> {
    match rustix::fs::seek(file, SeekFrom::Data(start * PAGE_SIZE)) {
        Ok(data) => Ok(data >= (start + count) * PAGE_SIZE),
        Err(Errno::NXIO) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// What a `godwit receive` that goes on says, to people, of the pages that are missing.
fn told_to_people(pair: &Pair, address: &str) -> anyhow::Result<String> {
    let mut command = Command::new(pair.godwit.program());
    command.args(["receive", "--vm", &pair.destination.vm_name(), "--listen", address]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let lines = BufReader::new(child.stderr.take().context("no words")?).lines();
    let (tell, told) = std::sync::mpsc::channel();
    let reading = std::thread::spawn(move || {
        let mut lines = lines.map_while(Result::ok);
        let _ = lines
            .find(|line| line.contains("of its memory is missing here"))
            .map(|line| tell.send(line));
    });
    let told = told.recv_timeout(LIMIT);
    child.kill()?;
    child.wait()?;
    let _ = reading.join();
    told.context("not a word of what is missing")
}

#[test]
fn which_pages_a_guest_lacks_is_told_when_its_source_host_dies() -> anyhow::Result<()> {
    // Mutations: other pages are told; who goes on tells of none.
    for build in builds_in_turn_for("which_pages_a_guest_lacks_is_told_when_its_source_host_dies") {
        let mut pair = Pair::start(&config_in(&build, Backend::SharedFile, Mode::Rate))?;
        let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let options = [SLOW, &["--postcopy", "now"]].concat();
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
        migrate.wait_for("the guest to run there", LIMIT, |line| line["stage"] == "post-copy")?;
        migrate.signal(Signal::KILL)?;
        pair.source.kill();
        drop(migrate.wait(LIMIT)?);
        let lacks = receive.wait_for("what is missing", LIMIT, is_event("lacks"))?;
        let (runs, bytes) = told_missing(&lacks)?;
        let count: u64 = runs.iter().map(|(_, count)| count).sum();
        println!("{build}: {bytes} bytes in {} places", runs.len());
        ensure!(bytes > 0 && count * PAGE_SIZE == bytes, "{lacks}");
        let ram = File::open(pair.destination.ram_file())?;
        for run in &runs {
            ensure!(is_hole(&ram, *run)?, "{run:?} has come");
        }

        receive.signal(Signal::KILL)?;
        drop(receive.wait(LIMIT)?);
        ensure!(known(&pair, &pair.destination)? == ("lacks-pages".to_owned(), true));
        let told = told_to_people(&pair, &address)?;
        let (start, count) = runs[0];
        let (start, end) = (start * PAGE_SIZE, (start + count) * PAGE_SIZE);
        ensure!(told.contains(&format!(": {start:#x} to {end:#x} of mem")), "{told}");
    }
    Ok(())
}

#[test]
fn who_follows_at_the_destination_takes_the_rest_from_the_copy_too() -> anyhow::Result<()> {
    let builds = builds_for("who_follows_at_the_destination_takes_the_rest_from_the_copy_too");
    let Some(build) = builds.last() else { return Ok(()) };
    let third = Third::new()?;
    let [option, place] = third.option();
    let safe = [option.as_str(), place.as_str()];
    let mut pair = Pair::start(&config(build, Mode::Rate))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &safe)?;
    let options = [SLOW, &["--postcopy", "now"], &safe].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
    migrate.wait_for("the guest to run there", LIMIT, |line| line["stage"] == "post-copy")?;
    migrate.signal(Signal::KILL)?;
    pair.source.kill();
    drop(migrate.wait(LIMIT)?);
    receive.wait_for("severed", LIMIT, is_event("severed"))?;
    receive.signal(Signal::KILL)?;
    drop(receive.wait(LIMIT)?);
    // Mutation: where the first was to look is forgotten.
    let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &[])?;
    let copy = receive.wait_for("the copy", LIMIT, is_event("copy"))?;
    ensure!(copy["why"].is_null(), "{copy}");
    check_saved(&mut pair, &third)
}

#[test]
fn a_copy_that_cannot_be_made_leaves_the_guest_at_the_source() -> anyhow::Result<()> {
    let test = "a_copy_that_cannot_be_made_leaves_the_guest_at_the_source";
    let builds = builds_for(test);
    let Some(build) = builds.last() else { return Ok(()) };
    let mount = match Mount::new("tmpfs", "size=1M") {
        Ok(mount) => mount,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    let mut pair = Pair::start(&config(build, Mode::Rate))?;
    let third = Third::new()?;
    let (file, nothing) = (third.directory().join("file"), third.directory().join("nothing"));
    std::fs::write(&file, "precious")?;
    // Before anything is sent, and so the destination goes on waiting.
    let room = ["--postcopy-safe", &mount.dir().to_string_lossy()];
    let (receive, address) = pair.godwit.receive(&pair.destination, &room)?;
    for (path, words) in [(&file, "it is no directory"), (&nothing, "No such file")] {
        let safe = ["--postcopy-safe", &path.to_string_lossy()];
        let options = [SLOW, &["--postcopy", "now"], &safe].concat();
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
        check_refused(&migrate, 1, &["the copy of what is left", words])?;
        check_untouched(&mut pair.source)?;
        ensure!(!receive.has_ended());
    }
    ensure!(std::fs::read(&file)? == b"precious");
    // Mutation: it is handed over without a copy.
    let options = [SLOW, &["--postcopy", "now"], &room].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    check_refused(&migrate, 1, &["the copy of what is left", "No space left on device"])?;
    check_untouched(&mut pair.source)?;
    ensure!(std::fs::read_dir(mount.dir())?.count() == 0, "something stays");
    drop(receive.wait(LIMIT)?);
    Ok(())
}

#[test]
fn a_copy_is_gone_when_all_has_come() -> anyhow::Result<()> {
    let builds = builds_for("a_copy_is_gone_when_all_has_come");
    let Some(build) = builds.last() else { return Ok(()) };
    let third = Third::new()?;
    let [option, place] = third.option();
    let mut pair = Pair::start(&config(build, Mode::Rate))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[&option, &place])?;
    let options = [SLOW, &["--postcopy", "now", &option, &place]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    check_followed(&mut pair, &migrate, &receive.wait(LIMIT)?)?;
    ensure!(third.files()? == 0, "the copy stays");
    // Mutation: the copy counts as the saving of devices.
    let safe = migrate.last()["safe_ms"].as_f64();
    println!("the copy took {safe:?} ms");
    ensure!(safe > Some(0.0), "{}", migrate.last());
    Ok(())
}

#[test]
fn a_destination_that_would_not_find_the_copy_refuses() -> anyhow::Result<()> {
    // Mutations: it is not looked for; the mark stays.
    let builds = builds_for("a_destination_that_would_not_find_the_copy_refuses");
    let Some(build) = builds.last() else { return Ok(()) };
    let (here, elsewhere) = (Third::new()?, Third::new()?);
    let [option, place] = here.option();
    let safe = [option.as_str(), place.as_str()];
    let mut pair = Pair::start(&config(build, Mode::Rate))?;
    let other = elsewhere.option();
    let other = [other[0].as_str(), other[1].as_str()];
    for (there, words) in [(&[][..], "to receive as well"), (&other, "not the same storage")] {
        let (receive, address) = pair.godwit.receive(&pair.destination, there)?;
        let options = [SLOW, &["--postcopy", "after 1"], &safe].concat();
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
        check_refused(&migrate, 1, &["would not be found here", words])?;
        check_untouched(&mut pair.source)?;
        ensure!(here.files()? + elsewhere.files()? == 0, "something stays");
        receive.signal(Signal::INT)?;
        drop(receive.wait(LIMIT)?);
    }
    Ok(())
}

/// Whether the thread that writes the copy waits in the kernel, and cannot be killed.
fn hangs(pid: i32) -> anyhow::Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let told = std::fs::read_to_string(thread?.path().join("stat")).unwrap_or_default();
        if told.contains(" (copy) D ") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A move that would make its copy, on storage that hangs.
struct Hanging {
    mount: Mount,
    config: VmConfig,
    pair: Pair,
    link: Option<Link>,
}

impl Hanging {
    /// None, and a word about it, where that cannot be made.
    fn new(test: &str) -> anyhow::Result<Option<Self>> {
        let builds = builds_for(test);
        let Some(build) = builds.last() else { return Ok(None) };
        match Mount::on_disk(256 << 20) {
            Ok(mount) => {
                let config = config(build, Mode::Rate);
                let pair = Pair::start(&config)?;
                Ok(Some(Self { mount, config, pair, link: None }))
            }
            Err(why) => {
                skip(test, format_args!("{why:#}"));
                Ok(None)
            }
        }
    }

    /// Both commands, as soon as the guest stands still for a copy that comes to nothing.
    fn start(&mut self) -> anyhow::Result<(Running, Running, Frozen)> {
        let safe = ["--postcopy-safe", &self.mount.dir().to_string_lossy()];
        let (receive, address) = self.pair.godwit.receive(&self.pair.destination, &safe)?;
        let link = self.link.insert(Link::to(&address)?);
        // So that it does not fit into the downtime limit, however slow the guest is.
        let leaves = ["--postcopy", "after 1", "--downtime-limit", "1ms"];
        let options = [SLOW, &leaves, &safe].concat();
        let migrate = self.pair.godwit.migrate(&self.pair.source, link.address(), &options)?;
        await_copying(&migrate)?;
        let frozen = self.mount.freeze()?;
        let until = Instant::now() + LIMIT;
        while !hangs(migrate.pid())? {
            ensure!(Instant::now() < until && !migrate.has_ended(), "{:?}", migrate.lines().last());
            std::thread::sleep(Duration::from_millis(20));
        }
        ensure!(self.pair.source.status()? != "running", "it does not stand still");
        Ok((migrate, receive, frozen))
    }

    /// The guest runs on at the source while the storage still hangs. When that goes on `migrate`
    /// ends: until then the kernel keeps its thread.
    fn runs_on(
        &mut self,
        (migrate, receive, frozen): (Running, Running, Frozen),
        (code, words): (i32, &str),
    ) -> anyhow::Result<()> {
        migrate.wait_for("its last word", LIMIT, |line| !line["outcome"].is_null())?;
        self.pair.source.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        drop(frozen);
        check_refused(&migrate.wait(LIMIT)?, code, &[words])?;
        check_untouched(&mut self.pair.source)?;
        // Where the link was cut it waits for a source that may come back.
        let _ = receive.signal(Signal::INT);
        drop(receive.wait(LIMIT)?);
        // The destination that has given up is gone.
        self.pair.destination = TestVm::destination(&self.config)?;
        Ok(())
    }
}

#[test]
fn storage_that_hangs_while_the_copy_is_written_holds_up_nobody() -> anyhow::Result<()> {
    // Mutations: who writes is waited for; a wish, or a lost link, is not heeded meanwhile.
    let test = "storage_that_hangs_while_the_copy_is_written_holds_up_nobody";
    let Some(mut hanging) = Hanging::new(test)? else { return Ok(()) };
    let (migrate, receive, frozen) = hanging.start()?;
    migrate.signal(Signal::INT)?;
    hanging.runs_on((migrate, receive, frozen), (130, "cancelled"))?;
    let (migrate, receive, frozen) = hanging.start()?;
    hanging.link.take().context("no link")?.cut();
    hanging.runs_on((migrate, receive, frozen), (1, "the connection to the destination broke"))
}

#[test]
#[ignore = "takes half a minute: make test-long"]
fn storage_that_hangs_for_good_is_given_up() -> anyhow::Result<()> {
    let test = "storage_that_hangs_for_good_is_given_up";
    let Some(mut hanging) = Hanging::new(test)? else { return Ok(()) };
    let all = hanging.start()?;
    hanging.runs_on(all, (1, "the storage has taken nothing for 30s"))
}

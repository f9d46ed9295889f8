//! A godwit that is killed: whichever and whenever, the guest runs on at one side, within a second
//! where it was stopped, and nothing of godwit's is left in QEMU.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, Pair, await_copying, await_words, check_moved, check_refused, check_settings,
    check_untouched, ends_with_its_guardian, oldest,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    BeaconPlace, DiskImage, Godwit, GuestConfig, Movable, Observer, Running, TestVm, VmConfig,
    at_most, builds_for, builds_in_turn_for, images_for,
};
use godwit_units::ByteCount;
use serde_json::{Value, json};

/// From the kill to a guest that runs.
const BACK: Duration = Duration::from_secs(1);
/// Steps up to COMMIT, each of which ends `migrate`.
const BEFORE_COMMIT: &[&str] = &[
    "kill-after-prepare",
    "kill-after-stop",
    "kill-in-last-round",
    "kill-after-release",
    "kill-after-last-round",
    "kill-after-digests",
    "kill-after-state",
    "kill-after-ready",
    "panic-after-stop",
];

/// Waits until the guest runs in `vm`; returns how long after `moment` that was.
fn await_running(vm: &mut TestVm, moment: Instant) -> anyhow::Result<Duration> {
    loop {
        let status = vm.status()?;
        if status == "running" {
            return Ok(moment.elapsed());
        }
        ensure!(moment.elapsed() < LIMIT, "the guest is '{status}' and stays so");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until `godwit` has ended by its fault; returns when.
fn await_end(godwit: &Running) -> anyhow::Result<Instant> {
    let until = Instant::now() + LIMIT;
    while !godwit.has_ended() {
        ensure!(Instant::now() < until, "it does not end: {}", godwit.errors());
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Instant::now())
}

fn second_attempt(pair: &mut Pair) -> anyhow::Result<()> {
    let (migrate, _) = pair.migrate(&["--verify"])?;
    check_moved(pair, &migrate)
}

#[test]
fn at_every_step_up_to_commit_the_guest_runs_on_at_the_source() -> anyhow::Result<()> {
    for build in builds_in_turn_for("at_every_step_up_to_commit_the_guest_runs_on_at_the_source") {
        let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Rate)))?;
        for step in BEFORE_COMMIT {
            let options = ["--fault", step, "--verify"];
            let options = if *step == "kill-after-digests" { &options[..] } else { &options[..2] };
            let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let migrate = pair.godwit.migrate(&pair.source, &address, options)?;
            let moment = await_end(&migrate)?;
            let back = await_running(&mut pair.source, moment)
                .with_context(|| format!("{build}: {step}"))?;
            ensure!(back < BACK, "{build}: {step}: the guest stood for {back:?} after the kill");
            check_untouched(&mut pair.source).with_context(|| format!("{build}: {step}"))?;
            ensure!(
                migrate.errors().contains("did not end by itself"),
                "{step}: {}",
                migrate.errors()
            );
            pair.destination = TestVm::destination(pair.source.config())?;
        }
        second_attempt(&mut pair)?;
    }
    Ok(())
}

#[test]
fn from_commit_on_the_guest_never_runs_at_the_source() -> anyhow::Result<()> {
    for build in builds_in_turn_for("from_commit_on_the_guest_never_runs_at_the_source") {
        for step in ["kill-after-commit", "kill-after-farewell"] {
            let guest = GuestConfig::small(Mode::Rate).without_rest();
            let mut pair = Pair::start(&VmConfig::new(&build, guest))?;
            let place = BeaconPlace::find(pair.source.ram_file())?;
            let observer =
                Observer::start(place, pair.source.ram_file(), pair.destination.ram_file())?;

            let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let migrate = pair.godwit.migrate(&pair.source, &address, &["--fault", step])?;
            await_end(&migrate)?;
            await_words(&migrate, "IN DOUBT")?;

            pair.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
            ensure!(!observer.finish()?.ran_on_both, "two guests from one");
            assert_eq!(pair.source.status()?, "postmigrate", "{step}");
            // What does no harm was undone all the same.
            let settings = pair.source.qmp().execute("query-migrate-capabilities", Value::Null)?;
            ensure!(!settings.to_string().contains("true"), "{settings}");
        }
    }
    Ok(())
}

#[test]
fn just_before_commit_the_guest_is_in_doubt_and_runs_nowhere() -> anyhow::Result<()> {
    let builds = builds_for("just_before_commit_the_guest_is_in_doubt_and_runs_nowhere");
    if builds.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;
    let (mut receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate =
        pair.godwit.migrate(&pair.source, &address, &["--fault", "kill-before-commit"])?;
    await_words(&migrate, "IN DOUBT")?;
    std::thread::sleep(BACK);
    assert_eq!(pair.source.status()?, "postmigrate");
    assert_eq!(pair.destination.status()?, "paused");
    // The next attempt says what has happened.
    let refused = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
    check_refused(&refused, 1, &["was handing its guest over"])?;
    // The operator's way: the destination ends, and then the source runs its guest.
    receive.kill();
    let until = Instant::now() + LIMIT;
    while pair.destination.is_alive() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    ensure!(!pair.destination.is_alive(), "a guest that never ran stays at the destination");
    pair.source.resume()?;
    pair.destination = TestVm::destination(pair.source.config())?;
    second_attempt(&mut pair)
}

/// Where the guest of a migration that was cut short is.
enum Found {
    Source,
    Destination,
    /// COMMIT may have been sent, and was not seen to arrive.
    Nowhere,
}

/// Waits until the guest runs on one side; never on both.
fn find_guest(pair: &mut Pair, moment: Instant) -> anyhow::Result<Found> {
    loop {
        let there = pair.destination.is_alive()
            && pair.destination.status().is_ok_and(|it| it == "running");
        // A source that has handed its guest over may end while it is asked.
        let here = pair.source.is_alive() && pair.source.status().is_ok_and(|it| it == "running");
        ensure!(!(here && there), "two guests from one");
        match (here, there) {
            (true, _) => return Ok(Found::Source),
            (_, true) => return Ok(Found::Destination),
            _ if moment.elapsed() > 5 * BACK => return Ok(Found::Nowhere),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Waits until the guest is stopped at the source, or `godwit` has ended.
fn await_stop(pair: &mut Pair, godwit: &Running) {
    while !godwit.has_ended() && pair.source.status().is_ok_and(|status| status == "running") {}
}

/// Makes the destination, where the guest has arrived, the source of the next attempt.
fn turn_round(pair: &mut Pair) -> anyhow::Result<()> {
    pair.destination.wait_for_heartbeats_after(Instant::now(), 1, LIMIT)?;
    let next = TestVm::destination(pair.source.config())?;
    pair.move_on(next);
    Ok(())
}

/// Kills `migrate` `times` times: half of them at moments spread over all of the migration, half of
/// them while the guest is stopped.
fn kill_at_random(test: &str, times: usize) -> anyhow::Result<()> {
    let builds = builds_in_turn_for(test);
    for build in &builds {
        let mut pair = Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Idle)))?;
        let began = Instant::now();
        let (migrate, _) = pair.migrate(&[])?;
        let whole = began.elapsed();
        check_moved(&mut pair, &migrate)?;
        turn_round(&mut pair)?;
        let each = times / builds.len();
        let (mut back, mut moved, mut in_doubt) = (0, 0, 0);
        for number in 0..each {
            let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let mut migrate = pair.godwit.migrate(&pair.source, &address, &[])?;
            // Multiples of the golden ratio fill the span evenly, however many they are.
            let share = (number as f64 * 0.618_034).fract();
            if number % 2 == 0 {
                std::thread::sleep(whole.mul_f64(share));
            } else {
                await_stop(&mut pair, &migrate);
                std::thread::sleep(Duration::from_millis(40).mul_f64(share));
            }
            migrate.kill();
            let moment = Instant::now();
            match find_guest(&mut pair, moment)? {
                Found::Source => {
                    ensure!(
                        moment.elapsed() < BACK,
                        "{build}: it stood for {:?}",
                        moment.elapsed()
                    );
                    check_untouched(&mut pair.source)
                        .with_context(|| format!("{build}: kill {number}"))?;
                    pair.destination = TestVm::destination(pair.source.config())?;
                    back += 1;
                }
                Found::Destination => {
                    turn_round(&mut pair)?;
                    moved += 1;
                }
                Found::Nowhere => {
                    await_words(&migrate, "IN DOUBT")?;
                    pair.destination = TestVm::destination(pair.source.config())?;
                    // The other side has ended. Run on by hand, its record would stay.
                    let name = pair.source.vm_name();
                    pair.godwit.done(&["recover", "--vm", &name, "--guest", "here"])?;
                    in_doubt += 1;
                }
            }
        }
        println!("{build}: {back} stayed, {moved} moved, {in_doubt} in doubt");
        // The moment before COMMIT is short, and one kill or two may meet it.
        ensure!(in_doubt <= 1 + each / 10, "{build}: {in_doubt} of {each} in doubt");
        second_attempt(&mut pair)?;
    }
    Ok(())
}

#[test]
fn at_ten_random_moments_the_guest_runs_on() -> anyhow::Result<()> {
    kill_at_random("at_ten_random_moments_the_guest_runs_on", 10)
}

#[test]
#[ignore = "takes one to two minutes: make test-long"]
fn at_a_hundred_random_moments_the_guest_runs_on() -> anyhow::Result<()> {
    kill_at_random("at_a_hundred_random_moments_the_guest_runs_on", at_most(100))
}

#[test]
fn a_receive_killed_while_the_guest_is_stopped_leaves_it_on_one_side() -> anyhow::Result<()> {
    let builds =
        builds_in_turn_for("a_receive_killed_while_the_guest_is_stopped_leaves_it_on_one_side");
    for build in &builds {
        let mut pair = Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Idle)))?;
        for delay in [0, 4, 12] {
            let (mut receive, address) = pair.godwit.receive(&pair.destination, &[])?;
            let migrate = pair.godwit.migrate(&pair.source, &address, &[])?;
            await_stop(&mut pair, &migrate);
            std::thread::sleep(Duration::from_millis(delay));

            receive.kill();

            match find_guest(&mut pair, Instant::now())? {
                Found::Source => {
                    migrate.wait(LIMIT)?;
                    check_untouched(&mut pair.source)?;
                    pair.destination = TestVm::destination(pair.source.config())?;
                }
                Found::Destination => turn_round(&mut pair)?,
                // COMMIT went out and was not read: the destination has ended, so the source may
                // run.
                Found::Nowhere => {
                    ensure!(
                        !pair.destination.is_alive(),
                        "a guest that never ran stays at the destination"
                    );
                    drop(migrate);
                    pair.source.resume()?;
                    pair.destination = TestVm::destination(pair.source.config())?;
                }
            }
        }
        second_attempt(&mut pair)?;
    }
    Ok(())
}

#[test]
fn a_receive_killed_before_commit_never_runs_the_guest() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_receive_killed_before_commit_never_runs_the_guest") {
        let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Rate)))?;
        for step in ["kill-after-prepare", "kill-after-load"] {
            let (receive, address) = pair.godwit.receive(&pair.destination, &["--fault", step])?;
            let migrate = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
            ensure!(migrate.last()["guest"] == "source", "{build}: {step}: {}", migrate.last());
            check_untouched(&mut pair.source).with_context(|| format!("{build}: {step}"))?;
            // One that still loads ends by itself, without the rest.
            let until = Instant::now() + LIMIT;
            while pair.destination.is_alive() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            ensure!(
                !pair.destination.is_alive(),
                "{build}: {step}: it stays: {}",
                receive.errors()
            );
            pair.destination = TestVm::destination(pair.source.config())?;
        }
        second_attempt(&mut pair)?;
    }
    Ok(())
}

#[test]
fn a_receive_killed_when_it_was_ready_runs_the_guest_on_one_side_or_none() -> anyhow::Result<()> {
    // Mutation: the guardian of `receive` runs a guest that is loaded and that no COMMIT came for.
    for build in
        builds_in_turn_for("a_receive_killed_when_it_was_ready_runs_the_guest_on_one_side_or_none")
    {
        let guest = GuestConfig::small(Mode::Rate).without_rest();
        let mut pair = Pair::start(&VmConfig::new(&build, guest))?;
        let place = BeaconPlace::find(pair.source.ram_file())?;
        let observer = Observer::start(place, pair.source.ram_file(), pair.destination.ram_file())?;
        let (receive, address) =
            pair.godwit.receive(&pair.destination, &["--fault", "kill-after-ready"])?;
        let migrate = pair.godwit.migrate(&pair.source, &address, &[])?;

        let moment = await_end(&receive)?;

        // It never ran the guest, so its QEMU ends, whatever the source has heard.
        while pair.destination.is_alive() {
            let runs = pair.destination.status().is_ok_and(|status| status == "running");
            ensure!(!runs, "{build}: the guest runs there without COMMIT");
            ensure!(moment.elapsed() < LIMIT, "{build}: it stays: {}", receive.errors());
            std::thread::sleep(Duration::from_millis(10));
        }
        match find_guest(&mut pair, moment)? {
            // The link's end came before READY was read.
            Found::Source => {
                let migrate = migrate.wait(LIMIT)?;
                ensure!(migrate.last()["guest"] == "source", "{build}: {}", migrate.last());
                check_untouched(&mut pair.source).with_context(|| build.to_string())?;
            }
            // READY was read and COMMIT may have gone out: the source does not run it on a guess.
            Found::Nowhere => {
                ensure!(pair.source.status()? == "postmigrate", "{build}");
                drop(migrate);
                pair.source.resume()?;
            }
            Found::Destination => anyhow::bail!("{build}: the guest runs at a QEMU that has ended"),
        }
        ensure!(!observer.finish()?.ran_on_both, "two guests from one");
        pair.destination = TestVm::destination(pair.source.config())?;
        second_attempt(&mut pair)?;
    }
    Ok(())
}

#[test]
fn a_receive_killed_when_commit_had_come_leaves_the_guest_to_its_guardian() -> anyhow::Result<()> {
    // Mutation: the guardian of `receive` does not finish what COMMIT asked for.
    for build in
        builds_in_turn_for("a_receive_killed_when_commit_had_come_leaves_the_guest_to_its_guardian")
    {
        for step in ["kill-before-run", "kill-after-run"] {
            let guest = GuestConfig::small(Mode::Rate).without_rest();
            let mut pair = Pair::start(&VmConfig::new(&build, guest))?;
            let place = BeaconPlace::find(pair.source.ram_file())?;
            let observer =
                Observer::start(place, pair.source.ram_file(), pair.destination.ram_file())?;
            let (receive, address) = pair.godwit.receive(&pair.destination, &["--fault", step])?;
            let migrate = pair.godwit.migrate(&pair.source, &address, &[])?;

            let moment = await_end(&receive)?;

            let there = await_running(&mut pair.destination, moment)?;
            ensure!(there < BACK, "{build}: {step}: the guest stood for {there:?} after the kill");
            await_words(&receive, "was handed over to it and runs here: `quit` the source QEMU")?;
            pair.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
            check_settings(&mut pair.destination).with_context(|| format!("{build}: {step}"))?;
            // The source asks for a minute, and never runs it.
            ensure!(pair.source.status()? == "postmigrate", "{build}: {step}");
            ensure!(!migrate.has_ended(), "{build}: {step}: {}", migrate.errors());
            ensure!(!observer.finish()?.ran_on_both, "two guests from one");
            ensure!(pair.destination.bugs().is_empty(), "{:?}", pair.destination.bugs());
        }
    }
    Ok(())
}

#[test]
fn disks_that_move_are_let_go_of() -> anyhow::Result<()> {
    let test = "disks_that_move_are_let_go_of";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let image = || DiskImage::create("qcow2", ByteCount(64 << 20));
        let (from, to, again) = (image()?, image()?, image()?);
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate));
        let mut pair = Pair::start_apart(
            &config.clone().with_disk("d", &from),
            &config.clone().with_disk("d", &to),
        )?;
        for fault in ["kill-after-prepare", "kill-after-stop"] {
            let (_receive, address) =
                pair.godwit.receive(&pair.destination, &["--disks", "all"])?;
            let options = ["--disks", "all", "--fault", fault];
            let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
            let moment = await_end(&migrate)?;
            let back = await_running(&mut pair.source, moment)?;
            ensure!(back < BACK, "{build}: {fault}: the guest stood for {back:?} after the kill");
            check_untouched(&mut pair.source).with_context(|| format!("{build}: {fault}"))?;
            pair.destination = TestVm::destination(&config.clone().with_disk("d", &again))?;
        }
        let (migrate, _) = pair.migrate(&["--verify", "--disks", "all"])?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

/// Ends `migrate` by `fault` and its guardian with it.
fn killed_with_its_guardian(pair: &Pair, address: &str, fault: &str) -> anyhow::Result<()> {
    let options = ["--fault", fault, "--max-bandwidth", "50MiB/s"];
    let migrate = pair.godwit.migrate(&pair.source, address, &options)?;
    await_copying(&migrate)?;
    let ended = ends_with_its_guardian(&pair.source, migrate)?;
    ensure!(ended.status.signal() == Some(9), "it failed by itself: {}", ended.errors);
    Ok(())
}

#[test]
fn what_a_killed_godwit_and_its_guardian_have_set_is_not_taken_for_the_operators()
-> anyhow::Result<()> {
    let builds = builds_in_turn_for(
        "what_a_killed_godwit_and_its_guardian_have_set_is_not_taken_for_the_operators",
    );
    for build in &builds {
        let mut pair = Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Rate)))?;
        let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        killed_with_its_guardian(&pair, &address, "kill-after-prepare")?;
        let left = pair.source.qmp().execute("query-migrate-capabilities", Value::Null)?;
        ensure!(
            left.to_string().contains("true"),
            "nothing is left that could be taken for the operator's"
        );

        pair.destination = TestVm::destination(pair.source.config())?;
        let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        killed_with_its_guardian(&pair, &address, "kill-after-stop")?;
        let refused = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
        check_refused(&refused, 1, &["did not hand it over"])?;
        pair.source.qmp().execute("migrate_cancel", Value::Null)?;
        await_back_by_hand(&mut pair.source)?;

        // Whoever only looks puts it right, too.
        let plan = pair.godwit.run(&["plan", "--vm", &pair.source.vm_name(), "--for", "1s"])?;
        ensure!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
        check_untouched(&mut pair.source)?;
        pair.destination = TestVm::destination(pair.source.config())?;
        second_attempt(&mut pair)?;
    }
    Ok(())
}

/// Runs the guest as an operator would, as soon as QEMU lets him.
fn await_back_by_hand(vm: &mut TestVm) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while vm.status()? != "running" {
        ensure!(Instant::now() < until, "QEMU refuses to run its guest");
        let _ = vm.resume();
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn a_limit_that_an_operator_has_set_since_stays() -> anyhow::Result<()> {
    let test = "a_limit_that_an_operator_has_set_since_stays";
    let builds = builds_for(test);
    if builds.is_empty() || !images_for(test) {
        return Ok(());
    }
    let image = DiskImage::create("raw", ByteCount(16 << 20))?;
    let config =
        VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Idle)).with_disk("d", &image);
    let mut vm = TestVm::source(&config)?;
    let godwit = Godwit::built()?;
    let disks = vm.qmp().execute("query-block", Value::Null)?;
    let id = disks[0]["qdev"].clone();
    let call = |bps_wr: u64| {
        json!({
            "id": id, "bps": 0, "bps_rd": 0, "bps_wr": bps_wr,
            "iops": 0, "iops_rd": 0, "iops_wr": 0,
        })
    };
    for (now, after) in [(5 << 20, 0), (7 << 20, 7 << 20)] {
        // The record of a process that is gone: init has this number, and did not start then.
        let path = format!("/run/godwit/godwit-1-999999999-guard-{}", vm.pid());
        let record = json!({ "qemu": vm.pid(), "qemu_started": start_time(vm.pid())?,
            "boot": boot()?, "stage": "copying", "was_running": true, "settings": null,
            "disks": false,
            "limits": { "before": [{ "node": "d", "call": call(0) }], "ours": [call(5 << 20)] } });
        std::fs::create_dir_all("/run/godwit")?;
        std::fs::write(&path, format!("{record}\n"))?;
        vm.qmp().execute("block_set_io_throttle", call(now))?;

        godwit.run(&["plan", "--vm", &vm.vm_name(), "--for", "1s"])?;

        let disks = vm.qmp().execute("query-block", Value::Null)?;
        ensure!(
            disks[0]["inserted"]["bps_wr"] == after,
            "{} became {}",
            now,
            disks[0]["inserted"]["bps_wr"]
        );
        ensure!(!std::path::Path::new(&path).exists(), "the record stays");
    }
    Ok(())
}

/// In ticks since the host was started (proc_pid_stat(5)).
fn start_time(pid: i32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("no name")?.1;
    Ok(fields.split_whitespace().nth(19).context("no start time")?.parse()?)
}

fn boot() -> anyhow::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[test]
fn a_second_godwit_is_told_of_the_first() -> anyhow::Result<()> {
    let builds = builds_for("a_second_godwit_is_told_of_the_first");
    if builds.is_empty() {
        return Ok(());
    }
    let pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;
    let (_receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let first = pair.godwit.migrate(&pair.source, &address, &["--max-bandwidth", "5MiB/s"])?;
    await_copying(&first)?;
    let second = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
    check_refused(&second, 1, &[&format!("process {} (godwit migrate) is at work", first.pid())])
}

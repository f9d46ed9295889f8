//! `godwit evacuate` with real guests: several microvms leave, each for one of two destinations,
//! while the coordinator is killed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::evacuation::{VMS, World, count, finish, killed};
use godwit_e2e::{LIMIT, Terminal};
use godwit_testbed::{Godwit, MicroVm, Movable, at_most, kvm_for};
use serde_json::Value;

fn rounds(test: &str, count: u64) -> anyhow::Result<()> {
    if !kvm_for(test) {
        return Ok(());
    }
    let mut kills = 0;
    // The moments are spread over all that a coordinator lives for, two and a half seconds.
    for round in 0..count {
        let after = Duration::from_micros(20_000 + round * 2_480_000 / count);
        let killed = killed(after, false).with_context(|| format!("killed after {after:?}"))?;
        kills += u64::from(killed);
    }
    println!("{test}: {count} evacuations, {kills} coordinators killed");
    ensure!(kills >= count / 2, "only {kills} coordinators were killed in {count} evacuations");
    Ok(())
}

#[test]
fn guests_leave_for_two_destinations_within_the_budget() -> anyhow::Result<()> {
    if !kvm_for("guests_leave_for_two_destinations_within_the_budget") {
        return Ok(());
    }
    let mut world = World::new()?;
    let told = world.directory.join("told");
    // It fails each time, and that changes nothing.
    let hook = format!("echo $GODWIT_VM $GODWIT_OUTCOME >> {}; exit 1", told.display());
    let coordinator = world.coordinator_with(false, &["--hook-after", &hook])?;
    // Another of its name, whose plan is kept elsewhere, does not reach for its moves.
    let until = Instant::now() + LIMIT;
    while !world.is_planned() {
        ensure!(Instant::now() < until, "no plan");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (list, elsewhere) = (world.directory.join("list.json"), world.directory.join("elsewhere"));
    let list = [list, elsewhere].map(|path| path.display().to_string());
    let other = world.godwit.run(&[
        "evacuate",
        &list[0],
        "--state-dir",
        &list[1],
        "--name",
        &world.name,
    ])?;
    let errors = String::from_utf8_lossy(&other.stderr).into_owned();
    ensure!(other.status.code() == Some(1), "{}", other.status);
    ensure!(errors.contains("runs on this host (in /"), "{errors}");
    let report = finish(coordinator)?;
    world.check(&report)?;
    let took = report["took_seconds"].as_f64().context("no time")?;
    let told = std::fs::read_to_string(told)?;
    let mut told: Vec<&str> = told.lines().collect();
    let moved = |vm: &MicroVm| format!("{} migrated", vm.vm_name());
    let mut expected: Vec<String> = world.sources.iter().map(moved).collect();
    told.sort_unstable();
    expected.sort();
    ensure!(told == expected, "{told:?}");
    // 24 MiB of each guest at least, at 80 MiB/s together.
    ensure!(took > 1.0, "faster than the budget: {took} s");
    Ok(())
}

#[test]
fn a_coordinator_that_is_killed_moves_no_guest_twice_and_forgets_none() -> anyhow::Result<()> {
    rounds("a_coordinator_that_is_killed_moves_no_guest_twice_and_forgets_none", 10)
}

#[test]
#[ignore = "takes minutes"]
fn a_coordinator_is_killed_at_a_hundred_moments() -> anyhow::Result<()> {
    rounds("a_coordinator_is_killed_at_a_hundred_moments", at_most(100) as u64)
}

#[test]
fn a_budget_that_is_changed_holds_at_once_and_for_the_next_coordinator() -> anyhow::Result<()> {
    if !kvm_for("a_budget_that_is_changed_holds_at_once_and_for_the_next_coordinator") {
        return Ok(());
    }
    // At this rate the moves would take a minute.
    let mut world = World::new()?;
    world.budget = "2MiB/s";
    let mut coordinator = world.coordinator(false)?;
    let status = || -> anyhow::Result<Value> {
        let output = world.steer_soon(&["--status", "--json"])?;
        Ok(serde_json::from_slice(&output.stdout)?)
    };
    let moving = |status: &Value| {
        let vms = status["vms"].as_array().cloned().unwrap_or_default();
        vms.into_iter().filter(|vm| vm["state"] == "moving").collect::<Vec<_>>()
    };
    let until = Instant::now() + LIMIT;
    while moving(&status()?).len() < 2 {
        ensure!(Instant::now() < until, "no two moves begin: {}", status()?);
    }
    let before = status()?;
    ensure!(before["budget_bytes_per_second"] == f64::from(2 << 20), "{before}");

    // What is refused, by the command and by the one that runs, changes nothing.
    let refused = world.steer(&["--set", "bandwidth=1G"])?;
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(2) && errors.contains("write 1Gbit"), "{errors}");
    let socket = world.directory.join(&world.name).join("control");
    let mut stream = UnixStream::connect(socket)?;
    writeln!(stream, "set at-once=0 bandwidth=9GiB/s")?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    ensure!(line.contains("\"error\":\"at-once=0: write a number"), "{line}");
    ensure!(status()?["budget_bytes_per_second"] == before["budget_bytes_per_second"]);

    let set = world.steer(&["--set", "bandwidth=80MiB/s,at-once=3"])?;
    let told = String::from_utf8_lossy(&set.stdout).into_owned();
    ensure!(told.starts_with("now 80MiB/s (671Mbit) for 3 moves at once. "), "{told}");
    coordinator.kill()?;
    coordinator.wait()?;
    let next = world.coordinator(true)?;
    let after = status()?;
    ensure!(after["budget_bytes_per_second"] == f64::from(80 << 20), "{after}");
    ensure!(after["at_once"] == 3, "{after}");
    let report = finish(next)?;
    world.check(&report)?;
    let took = report["took_seconds"].as_f64().context("no time")?;
    ensure!(took < 30.0, "{took} s at the old rate");
    Ok(())
}

/// What an evacuation answers people who steer it.
fn told(world: &World, words: &[&str]) -> anyhow::Result<String> {
    let output = world.steer(words)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn an_evacuation_that_is_paused_begins_no_move_until_it_is_to_go_on() -> anyhow::Result<()> {
    // Mutation: a pause is answered and not heeded.
    if !kvm_for("an_evacuation_that_is_paused_begins_no_move_until_it_is_to_go_on") {
        return Ok(());
    }
    let mut world = World::new()?;
    world.budget = "2MiB/s";
    let coordinator = world.coordinator(false)?;
    world.await_status(|status| count(status, "moving") == 2)?;
    let paused = told(&world, &["--pause"])?;
    let words = "no further move begins. 0 moved, 2 on their way, 2 wait, ";
    ensure!(paused.starts_with(words), "{paused}");
    // Those under way arrive.
    told(&world, &["--set", "bandwidth=80MiB/s"])?;
    world.await_status(|status| count(status, "moved") >= 2)?;
    std::thread::sleep(Duration::from_secs(2));
    let status = world.await_status(|_| true)?;
    ensure!(count(&status, "moved") == 2 && count(&status, "waiting") == 2, "{status}");
    let goes_on = told(&world, &["--continue"])?;
    ensure!(goes_on.starts_with("it goes on. 2 moved, "), "{goes_on}");
    let report = finish(coordinator)?;
    world.check(&report)
}

#[test]
fn an_evacuation_that_is_cancelled_leaves_its_guests_and_is_taken_up_again() -> anyhow::Result<()> {
    // Mutation: moves under way are not cancelled.
    if !kvm_for("an_evacuation_that_is_cancelled_leaves_its_guests_and_is_taken_up_again") {
        return Ok(());
    }
    let mut world = World::new()?;
    world.budget = "2MiB/s";
    let mut coordinator = world.coordinator(false)?;
    world.await_status(|status| count(status, "moving") == 2)?;
    let cancelled = told(&world, &["--cancel"])?;
    ensure!(cancelled.starts_with("its moves are being cancelled. 0 moved, "), "{cancelled}");
    let code = coordinator.wait()?.code();
    ensure!(code == Some(130), "{code:?}");
    let report = finish(coordinator)?;
    ensure!(report["outcome"] == "cancelled" && report["stayed"] == VMS, "{report}");
    for source in &world.sources {
        ensure!(source.status()? == "running", "{}", source.status()?);
        source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        ensure!(source.bugs().is_empty(), "{:?}", source.bugs());
    }
    let late = world.steer(&["--pause"])?;
    let errors = String::from_utf8_lossy(&late.stderr).into_owned();
    ensure!(late.status.code() == Some(1) && errors.contains("no evacuation '"), "{errors}");

    let coordinator = world.coordinator(true)?;
    world.await_status(|status| count(status, "moving") > 0)?;
    told(&world, &["--set", "bandwidth=80MiB/s"])?;
    let report = finish(coordinator)?;
    world.check(&report)
}

#[test]
fn moves_under_way_share_the_processor_time_of_their_evacuation() -> anyhow::Result<()> {
    // Mutations: a move is not told of it; or of all of it.
    if !kvm_for("moves_under_way_share_the_processor_time_of_their_evacuation") {
        return Ok(());
    }
    let mut world = World::new()?;
    world.budget = "2MiB/s";
    let coordinator = world.coordinator_with(false, &["--cpu-budget", "50%"])?;
    let status = world.await_status(|status| count(status, "moving") == 2)?;
    let vms = status["vms"].as_array().context("no VMs")?;
    for vm in vms.iter().filter(|vm| vm["state"] == "moving") {
        let name = format!("{}.{}", world.name, vm["name"].as_str().context("no name")?);
        let until = Instant::now() + LIMIT;
        // It has a socket only when it has begun.
        let told = loop {
            let output = world.godwit.run(&["status", "--migration", &name, "--json"])?;
            match serde_json::from_slice::<Value>(&output.stdout) {
                Ok(told) if output.status.success() => break told,
                _ => ensure!(Instant::now() < until, "{name} is not there"),
            }
        };
        let budget = &told["migrations"][0]["settings"]["cpu-budget"];
        ensure!(*budget == "25%", "{told}");
    }
    told(&world, &["--set", "bandwidth=80MiB/s"])?;
    let report = finish(coordinator)?;
    world.check(&report)
}

/// The lines that a terminal of `columns` shows of `text`, all that it ever showed, without what
/// moves its cursor. A line that is full goes on in the next one.
fn shown(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match c {
            '\x1b' => drop(rest.by_ref().find(|c| c.is_ascii_alphabetic())),
            '\n' | '\r' => lines.push(String::new()),
            c if lines.last().is_some_and(|line| line.chars().count() == columns) => {
                lines.push(c.to_string());
            }
            c => lines.last_mut().into_iter().for_each(|line| line.push(c)),
        }
    }
    lines
}

#[test]
fn on_a_terminal_each_move_under_way_has_a_row() -> anyhow::Result<()> {
    if !kvm_for("on_a_terminal_each_move_under_way_has_a_row") {
        return Ok(());
    }
    let mut world = World::new()?;
    world.budget = "30MiB/s";
    let state = world.directory.display().to_string();
    let list = world.directory.join("list.json").display().to_string();
    let words = ["evacuate", &list, "--name", &world.name, "--state-dir", &state];
    let limits = ["--bandwidth", world.budget, "--at-once", "2", "--", "--record", "off"];
    let screen = Terminal::run(&world.godwit, 80, &[&words[..], &limits].concat())?;
    ensure!(screen.status.success(), "{}", screen.text);
    let lines = shown(&screen.text, 80);
    let has = |line: &str, words: &[&str]| words.iter().all(|word| line.contains(word));
    let heads = ["VM", "to", "phase", "left", "to go", "share"];
    ensure!(lines.iter().any(|line| has(line, &heads)), "{lines:#?}");
    for vm in (0..VMS).map(|at| format!("vm{at} ")) {
        let row = |line: &String| line.starts_with(&vm) && has(line, &["round ", "iB", " %"]);
        ensure!(lines.iter().any(row), "no row of {vm}: {lines:#?}");
    }
    ensure!(lines.iter().any(|line| line.contains("2 on their way")), "{lines:#?}");
    // What is printed stays, and the table goes.
    let report: Value = serde_json::from_slice(&std::fs::read(
        world.directory.join(&world.name).join("report.json"),
    )?)?;
    world.check(&report)?;
    screen.check_says(&["vm0 has moved to", &format!("{VMS} of {VMS} moved in")])
}

#[test]
fn a_list_that_is_wrong_begins_nothing() -> anyhow::Result<()> {
    let godwit = Godwit::built()?;
    let list = std::env::temp_dir().join(format!("godwit-e2e-list-{}.toml", std::process::id()));
    std::fs::write(&list, "[[vm]]\nvm = \"qemu:/x\"\nmemroy = \"1GiB\"\n")?;
    let output = godwit.run(&["evacuate", &list.display().to_string()])?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{}", output.status);
    ensure!(errors.contains("line 3: unknown field `memroy`"), "{errors}");
    std::fs::remove_file(list)?;
    let output = godwit.run(&["evacuate", "--resume", "--state-dir", "/tmp/none"])?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(errors.contains("there is no plan in /tmp/none/evacuation"), "{errors}");
    Ok(())
}

//! Several coordinators of one evacuation, with a real store and real guests: they are killed and
//! stopped, the store goes away, and each guest moves once.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::LIMIT;
use godwit_e2e::evacuation::{VMS, World, count};
use godwit_evacuate::{NatsOptions, NatsStore};
use godwit_testbed::{Nats, at_most, kvm_for, nats_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// A coordinator that says nothing for so long counts as gone.
const SILENCE: &str = "1s";

/// What coordinators share.
struct Shared {
    world: World,
    nats: Nats,
    started: usize,
}

/// One of them.
struct Coordinator {
    child: Child,
    output: PathBuf,
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Coordinator {
    /// What it has said so far.
    fn lines(&self) -> anyhow::Result<Vec<Value>> {
        let text = std::fs::read_to_string(&self.output)?;
        Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(self.output.with_extension("errors")).unwrap_or_default()
    }

    /// Whether it acts, by what it said last of that.
    fn acts(&self) -> anyhow::Result<bool> {
        let roles = ["coordinates", "stands-by", "lost", "left"];
        let lines = self.lines()?;
        let last = lines
            .iter()
            .rev()
            .find_map(|line| line["event"].as_str().filter(|event| roles.contains(event)));
        Ok(last == Some("coordinates"))
    }

    fn await_event(&self, event: &str) -> anyhow::Result<()> {
        let until = Instant::now() + LIMIT;
        while !self.lines()?.iter().any(|line| line["event"] == event) {
            ensure!(Instant::now() < until, "no {event}: {:?} {}", self.lines()?, self.errors());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_child(&self.child);
        Ok(kill_process(pid, signal)?)
    }

    /// The report with which it ended.
    fn report(&mut self) -> anyhow::Result<Value> {
        let until = Instant::now() + LIMIT;
        while !self.has_ended()? {
            ensure!(Instant::now() < until, "it does not end: {:?}", self.lines()?);
            std::thread::sleep(Duration::from_millis(5));
        }
        let last = self.lines()?.pop();
        last.filter(|last| last["outcome"].is_string()).with_context(|| self.errors())
    }
}

impl Shared {
    fn new(program: &Path, configuration: &str) -> anyhow::Result<Self> {
        Ok(Self { world: World::new()?, nats: Nats::start(program, configuration)?, started: 0 })
    }

    /// One more, by the command by which the first was started.
    fn coordinator(&mut self, options: &[&str]) -> anyhow::Result<Coordinator> {
        let list = self.world.directory.join("list.json").display().to_string();
        let limits = ["--bandwidth", self.world.budget, "--at-once", "2"];
        let words = [&[list.as_str()][..], &limits, options, &MIGRATE].concat();
        self.coordinator_of(&words)
    }

    fn coordinator_of(&mut self, words: &[&str]) -> anyhow::Result<Coordinator> {
        self.started += 1;
        let output = self.world.directory.join(format!("coordinator{}.out", self.started));
        let mut command = Command::new(self.world.godwit.program());
        command.args(["evacuate", "--json", "--name", &self.world.name]);
        command.args(["--store", &self.nats.address(), "--take-over-after", SILENCE]);
        command.arg("--state-dir").arg(&self.world.directory).args(words);
        command.env("XDG_STATE_HOME", self.world.directory.join("state"));
        let errors = File::create(output.with_extension("errors"))?;
        command.stdin(Stdio::null()).stdout(File::create(&output)?).stderr(errors);
        let child = command.spawn().context("cannot start godwit evacuate")?;
        Ok(Coordinator { child, output })
    }

    /// Steers it by the store alone, as from another host.
    fn steer(&self, words: &[&str]) -> anyhow::Result<Output> {
        let address = self.nats.address();
        let fixed = ["evacuate", "--name", &self.world.name, "--store", &address];
        let silence = ["--take-over-after", SILENCE];
        self.world.godwit.run(&[&fixed[..], &silence, words].concat())
    }

    fn status(&self) -> anyhow::Result<Value> {
        let output = self.steer(&["--status", "--json"])?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        serde_json::from_slice(&output.stdout).context(errors)
    }

    fn await_status(&self, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let until = Instant::now() + LIMIT;
        loop {
            let status = self.status()?;
            if is(&status) {
                return Ok(status);
            }
            ensure!(Instant::now() < until, "{status}");
        }
    }
}

/// Whether it was started when all was over, and told so.
fn is_late(report: &Value) -> bool {
    let error = report["error"].as_str().unwrap_or_default();
    report["outcome"] == "refused" && error.contains("has a plan already")
}

/// What each move is told.
const MIGRATE: [&str; 5] = ["--", "--reconnect", "0s", "--compression", "none"];

/// One evacuation, in which whoever acts is killed, or stopped for a while, at `moments` behind the
/// moment at which it began to act; how often that happened.
fn disturbed(program: &Path, moments: &[Duration], stop: bool) -> anyhow::Result<usize> {
    let mut shared = Shared::new(program, "")?;
    let first = shared.coordinator(&[])?;
    let mut coordinators = vec![first, shared.coordinator(&[])?];
    let mut stopped: Vec<(Coordinator, Instant)> = Vec::new();
    let mut done = 0;
    let until = Instant::now() + LIMIT;
    'moments: for moment in moments {
        let acting = loop {
            for coordinator in &mut coordinators {
                if coordinator.has_ended()? {
                    break 'moments;
                }
            }
            let acts = coordinators.iter().map(Coordinator::acts).collect::<Result<Vec<_>, _>>()?;
            if let Some(at) = acts.iter().position(|acts| *acts) {
                break at;
            }
            ensure!(Instant::now() < until, "nobody acts");
            std::thread::sleep(Duration::from_millis(1));
        };
        std::thread::sleep(*moment);
        let mut victim = coordinators.remove(acting);
        if victim.has_ended()? {
            coordinators.push(victim);
            break;
        }
        if stop {
            victim.signal(Signal::STOP)?;
            stopped.push((victim, Instant::now()));
        } else {
            victim.child.kill()?;
        }
        done += 1;
        coordinators.push(shared.coordinator(&[])?);
    }
    // Who was stopped wakes up when another has gone on, and stands by or hears of the end.
    for (victim, since) in stopped {
        let asleep = Duration::from_millis(2500);
        std::thread::sleep(asleep.saturating_sub(since.elapsed()));
        victim.signal(Signal::CONT)?;
        coordinators.push(victim);
    }
    let reports = coordinators.iter_mut().map(Coordinator::report);
    let (late, reports): (Vec<_>, Vec<_>) =
        reports.collect::<anyhow::Result<Vec<_>>>()?.into_iter().partition(is_late);
    ensure!(!reports.is_empty(), "nobody tells how it ended: {late:?}");
    for report in &reports {
        ensure!(report == &reports[0], "{report} and {}", reports[0]);
    }
    shared.world.check(&reports[0])?;
    Ok(done)
}

/// Whether so many were disturbed: not where a test has to be skipped.
fn rounds(test: &str, count: usize) -> anyhow::Result<bool> {
    let (true, Some(program)) = (kvm_for(test), nats_for(test)) else { return Ok(false) };
    let (mut kills, mut evacuations) = (0, 0);
    while kills < count {
        ensure!(evacuations < 3 * count, "only {kills} in {evacuations} evacuations");
        // An evacuation lasts two and a half seconds when nobody disturbs it.
        let moment = || Duration::from_micros(fastrand::u64(0..2_000_000));
        let moments: Vec<Duration> = (0..2.min(count - kills)).map(|_| moment()).collect();
        let stop = evacuations % 3 == 2;
        kills += disturbed(&program, &moments, stop).with_context(|| {
            format!("at {moments:?}, {}", if stop { "stopped" } else { "killed" })
        })?;
        evacuations += 1;
    }
    println!("{test}: {evacuations} evacuations, {kills} coordinators killed or stopped");
    Ok(true)
}

/// What `make bench-operators` tells of.
fn write_down(moments: usize) -> anyhow::Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench");
    std::fs::create_dir_all(&dir)?;
    let text = json!({ "moments": moments }).to_string();
    Ok(std::fs::write(dir.join("coordinators.json"), text + "\n")?)
}

#[test]
fn of_several_coordinators_any_may_be_killed_or_stopped() -> anyhow::Result<()> {
    rounds("of_several_coordinators_any_may_be_killed_or_stopped", 6).map(drop)
}

#[test]
#[ignore = "takes minutes"]
fn coordinators_are_killed_or_stopped_at_a_hundred_moments() -> anyhow::Result<()> {
    let moments = at_most(100);
    if rounds("coordinators_are_killed_or_stopped_at_a_hundred_moments", moments)? {
        write_down(moments)?;
    }
    Ok(())
}

#[test]
fn those_that_begin_at_once_find_one_place_for_the_plan() -> anyhow::Result<()> {
    let test = "those_that_begin_at_once_find_one_place_for_the_plan";
    let Some(program) = nats_for(test) else { return Ok(()) };
    let nats = Nats::start(&program, "")?;
    for round in 0..40 {
        let options = NatsOptions::of(&nats.address(), &format!("e{round}"));
        let gate = Barrier::new(4);
        let connect = || {
            gate.wait();
            NatsStore::connect(&options).map(drop)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(connect)).collect();
            threads.into_iter().try_for_each(|it| it.join().expect("it does not panic"))
        })
        .with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

#[test]
fn who_stands_by_takes_over_and_is_steered_by_the_store() -> anyhow::Result<()> {
    let test = "who_stands_by_takes_over_and_is_steered_by_the_store";
    let (true, Some(program)) = (kvm_for(test), nats_for(test)) else { return Ok(()) };
    let mut shared = Shared::new(&program, "")?;
    let early = shared.steer(&["--status"])?;
    let errors = String::from_utf8_lossy(&early.stderr).into_owned();
    ensure!(early.status.code() == Some(1) && errors.contains("there is no plan"), "{errors}");
    // At this rate the moves would take a minute.
    shared.world.budget = "2MiB/s";
    let mut first = shared.coordinator(&[])?;
    first.await_event("began")?;
    let mut second = shared.coordinator_of(&["--resume"])?;
    second.await_event("stands-by")?;
    let status = shared.await_status(|status| count(status, "moving") == 2)?;
    ensure!(status["coordinator"].is_string(), "{status}");

    // Paused, it stays so with the next one.
    let paused = shared.steer(&["--pause"])?;
    ensure!(paused.status.success(), "{}", String::from_utf8_lossy(&paused.stderr));
    first.child.kill()?;
    first.child.wait()?;
    second.await_event("coordinates")?;
    shared.steer(&["--set", "bandwidth=80MiB/s"])?;
    let status = shared.await_status(|status| count(status, "moved") == 2)?;
    ensure!(count(&status, "waiting") == VMS - 2 && status["paused"] == true, "{status}");
    ensure!(status["budget_bytes_per_second"] == f64::from(80 << 20), "{status}");

    // Another list under this name is refused, and so is what cannot be set.
    let other = shared.world.directory.join("other.json");
    let text = std::fs::read_to_string(shared.world.directory.join("list.json"))?;
    std::fs::write(&other, text.replace("64MiB", "65MiB"))?;
    let refused = shared.steer(&[&other.display().to_string()])?;
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(1) && errors.contains("has a plan already"), "{errors}");
    let refused = shared.steer(&["--set", "at-once=0"])?;
    ensure!(refused.status.code() == Some(2), "{}", refused.status);

    // Ctrl-C ends a coordinator and not the evacuation: who stands by goes on at once.
    let mut third = shared.coordinator(&[])?;
    third.await_event("stands-by")?;
    second.signal(Signal::INT)?;
    third.await_event("coordinates")?;
    let until = Instant::now() + LIMIT;
    while !second.has_ended()? {
        ensure!(Instant::now() < until, "Ctrl-C does not end it");
        std::thread::sleep(Duration::from_millis(5));
    }
    ensure!(second.child.wait()?.code() == Some(130), "{:?}", second.lines()?);
    shared.steer(&["--continue"])?;
    let report = third.report()?;
    ensure!(third.child.wait()?.success(), "{report}");
    shared.world.check(&report)?;
    let over = shared.status()?;
    ensure!(over["outcome"] == "evacuated" && over["coordinator"].is_null(), "{over}");
    Ok(())
}

#[test]
fn what_is_cancelled_by_the_store_is_taken_up_again() -> anyhow::Result<()> {
    let test = "what_is_cancelled_by_the_store_is_taken_up_again";
    let (true, Some(program)) = (kvm_for(test), nats_for(test)) else { return Ok(()) };
    let mut shared = Shared::new(&program, "")?;
    shared.world.budget = "2MiB/s";
    let mut first = shared.coordinator(&[])?;
    shared.await_status(|status| count(status, "moving") == 2)?;
    let cancelled = shared.steer(&["--cancel"])?;
    ensure!(cancelled.status.success(), "{}", String::from_utf8_lossy(&cancelled.stderr));
    let report = first.report()?;
    ensure!(report["outcome"] == "cancelled" && report["stayed"] == VMS, "{report}");
    ensure!(first.child.wait()?.code() == Some(130));
    let late = shared.steer(&["--pause"])?;
    let errors = String::from_utf8_lossy(&late.stderr).into_owned();
    ensure!(errors.contains("the evacuation is over"), "{errors}");
    let mut second = shared.coordinator_of(&["--resume"])?;
    second.await_event("began")?;
    shared.steer(&["--set", "bandwidth=80MiB/s"])?;
    let report = second.report()?;
    shared.world.check(&report)
}

#[test]
fn without_the_store_moves_go_on_and_the_rest_waits() -> anyhow::Result<()> {
    let test = "without_the_store_moves_go_on_and_the_rest_waits";
    let (true, Some(program)) = (kvm_for(test), nats_for(test)) else { return Ok(()) };
    let mut shared = Shared::new(&program, "")?;
    let mut first = shared.coordinator(&[])?;
    let mut second = shared.coordinator(&[])?;
    shared.await_status(|status| count(status, "moving") == 2)?;
    shared.nats.kill()?;
    first.await_event("away")?;
    second.await_event("away")?;
    // A move may have ended, and another begun, when the store was last heard.
    let begun = |by: &[&Coordinator]| -> anyhow::Result<usize> {
        let began = |lines: Vec<Value>| lines.iter().filter(|it| it["event"] == "began").count();
        by.iter().map(|it| it.lines().map(began)).sum()
    };
    let under_way = begun(&[&first, &second])?;
    // Those that were under way arrive meanwhile.
    let until = Instant::now() + LIMIT;
    let arrived = |shared: &Shared| -> anyhow::Result<usize> {
        let mut arrived = 0;
        for pair in &shared.world.destinations {
            for machine in pair {
                arrived += usize::from(machine.status()? == "running");
            }
        }
        Ok(arrived)
    };
    while arrived(&shared)? < under_way {
        ensure!(Instant::now() < until, "the moves under way do not arrive");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(3));
    ensure!(
        arrived(&shared)? == under_way && begun(&[&first, &second])? == under_way,
        "one was begun that could not be written down"
    );
    shared.nats.revive()?;
    let report = first.report()?;
    ensure!(second.report()? == report);
    shared.world.check(&report)
}

#[test]
fn coordinators_elsewhere_reach_the_host_by_a_command() -> anyhow::Result<()> {
    let test = "coordinators_elsewhere_reach_the_host_by_a_command";
    let (true, Some(program)) = (kvm_for(test), nats_for(test)) else { return Ok(()) };
    let mut shared = Shared::new(&program, "")?;
    let there = shared.world.there();
    let mut first = shared.coordinator(&["--on", &there])?;
    first.await_event("began")?;
    let mut second = shared.coordinator(&["--on", &there])?;
    second.await_event("stands-by")?;
    first.child.kill()?;
    let report = second.report()?;
    shared.world.check(&report)?;
    let unreachable = shared.coordinator_of(&["--resume", "--on", "/nowhere/godwit"])?;
    let mut unreachable = unreachable;
    let status = unreachable.child.wait()?;
    let errors = unreachable.errors();
    ensure!(status.code() == Some(1) && errors.contains("--on '/nowhere/godwit'"), "{errors}");
    Ok(())
}

#[test]
fn a_store_is_told_who_asks_and_is_encrypted() -> anyhow::Result<()> {
    let test = "a_store_is_told_who_asks_and_is_encrypted";
    let (true, Some(program)) = (kvm_for(test), nats_for(test)) else { return Ok(()) };
    let mut shared = Shared::new(&program, "")?;
    let dir = shared.world.directory.join("keys").display().to_string();
    let made = shared.world.godwit.run(&["keys", "--dir", &dir, "127.0.0.1"])?;
    ensure!(made.status.success(), "{made:?}");
    let dir = format!("{dir}/127.0.0.1");
    let configuration = format!(
        "tls {{ cert_file: \"{dir}/host-cert.pem\", key_file: \"{dir}/host-key.pem\", \
         ca_file: \"{dir}/ca-cert.pem\", verify: true }}\n\
         authorization {{ user: evacuator, password: secret }}"
    );
    shared.nats = Nats::start(&program, &configuration)?;
    let address = shared.nats.address();
    let run = |words: &[&str]| {
        let fixed = ["evacuate", "--status", "--name", "x"];
        let output = shared.world.godwit.run(&[&fixed[..], words].concat())?;
        anyhow::Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let errors = run(&["--store", &address])?;
    ensure!(errors.contains("does not answer"), "{errors}");
    let errors = run(&["--store", &address, "--store-keys", &dir])?;
    ensure!(errors.contains("authorization violation"), "{errors}");
    let known = address.replace("nats://", "nats://evacuator:secret@");
    let errors = run(&["--store", &known, "--store-keys", &dir])?;
    ensure!(errors.contains("there is no plan") && !errors.contains("secret"), "{errors}");
    let errors = run(&["--store", "nats://192.0.2.9:4222"])?;
    ensure!(errors.contains("name this host's keys by --store-keys DIR"), "{errors}");
    Ok(())
}

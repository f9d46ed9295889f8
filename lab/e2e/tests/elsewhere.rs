//! `godwit evacuate --on` without a store: a host is emptied from another one, which reaches it by
//! a command that fails, hangs or leads to the wrong host.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::LIMIT;
use godwit_e2e::evacuation::{VMS, World, count, elsewhere, killed};
use godwit_testbed::{Godwit, Movable, kvm_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// An answer to whoever asks the coordinator, even if the way hangs.
const ANSWER: Duration = Duration::from_secs(4);

/// A place for an evacuation without any guest.
struct Bare {
    godwit: Godwit,
    directory: PathBuf,
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Bare {
    fn new(test: &str) -> anyhow::Result<Self> {
        let name = format!("godwit-e2e-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory)?;
        Ok(Self { godwit: Godwit::built()?, directory })
    }

    /// A file, by its path.
    fn file(&self, name: &str, text: &str) -> anyhow::Result<String> {
        let path = self.directory.join(name);
        std::fs::write(&path, text)?;
        Ok(path.display().to_string())
    }

    /// The list of a VM that is not there, taken in in this way.
    fn list(&self, to: &Value) -> anyhow::Result<String> {
        let vm = json!({ "vm": "qemu:/nowhere/qmp", "name": "a", "memory": "1MiB",
                         "to": { "east": to } });
        let east = json!({ "name": "east", "memory": "1GiB" });
        self.file("list.json", &json!({ "destination": [east], "vm": [vm] }).to_string())
    }

    fn there(&self) -> String {
        elsewhere(&self.godwit, &self.directory)
    }

    fn command(&self, name: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.godwit.program());
        command.args(["evacuate", "--name", name, "--state-dir"]).arg(&self.directory).args(words);
        command
    }

    /// What is said to a command that is refused.
    fn refused(&self, name: &str, words: &[&str]) -> anyhow::Result<String> {
        let output = self.command(name, words).output()?;
        let errors = errors_of(&output);
        ensure!(output.status.code() == Some(1) && errors.trim().lines().count() == 1, "{errors}");
        Ok(errors)
    }
}

fn errors_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_host_is_emptied_from_elsewhere_though_its_coordinators_are_killed() -> anyhow::Result<()> {
    // Mutation: a plan that is taken up has files of its own.
    let test = "a_host_is_emptied_from_elsewhere_though_its_coordinators_are_killed";
    if !kvm_for(test) {
        return Ok(());
    }
    for after in [700, 1400].map(Duration::from_millis) {
        let kills = killed(after, true).with_context(|| format!("killed after {after:?}"))?;
        ensure!(kills > 0, "nobody was killed after {after:?}");
    }
    Ok(())
}

/// A way that can be cut: as long as there is a file `cut`, the command fails.
fn cut_way(world: &World) -> anyhow::Result<(String, PathBuf, PathBuf)> {
    let [script, cut, pid] = ["way", "cut", "pid"].map(|name| world.directory.join(name));
    let text = format!(
        "[ -e {0} ] && {{ echo 'ssh: no route to host' >&2; exit 255; }}\n\
         echo $$ > {1}\n\
         exec {2} \"$@\"\n",
        cut.display(),
        pid.display(),
        world.there()
    );
    std::fs::write(&script, text)?;
    Ok((format!("sh {}", script.display()), cut, pid))
}

/// The process that a way runs.
fn process(pid: &Path) -> anyhow::Result<Pid> {
    let number = std::fs::read_to_string(pid)?.trim().parse()?;
    Pid::from_raw(number).context("no process")
}

#[test]
fn a_host_that_is_lost_for_a_while_is_waited_for_and_then_told_to_cancel() -> anyhow::Result<()> {
    // Mutations: what begins is not held back meanwhile; what was cancelled is told once.
    let test = "a_host_that_is_lost_for_a_while_is_waited_for_and_then_told_to_cancel";
    if !kvm_for(test) {
        return Ok(());
    }
    let mut world = World::new()?;
    world.budget = "2MiB/s";
    let (way, cut, pid) = cut_way(&world)?;
    let coordinator = world.coordinator_with(false, &["--on", &way])?;
    let status = world.await_status(|status| count(status, "moving") == 2)?;
    ensure!(status["host"].is_string(), "{status}");
    std::fs::write(&cut, "")?;
    kill_process(process(&pid)?, Signal::KILL)?;
    // There is room for all now, and nobody there to begin.
    world.steer(&["--set", "at-once=4"])?;
    std::thread::sleep(Duration::from_millis(1500));
    let status = world.await_status(|_| true)?;
    ensure!(count(&status, "moving") == 2 && count(&status, "waiting") == 2, "{status}");
    let tried = |vm: &&Value| vm["state"] == "waiting" && vm["attempts"] != 0;
    ensure!(status["vms"].as_array().is_some_and(|vms| !vms.iter().any(|vm| tried(&vm))));
    let asked = Instant::now();
    let cancelled = world.steer(&["--cancel"])?;
    ensure!(cancelled.status.success() && asked.elapsed() < ANSWER, "{:?}", asked.elapsed());
    std::fs::remove_file(&cut)?;
    let output = coordinator.wait_with_output()?;
    let lines: Vec<Value> = output
        .stdout
        .lines()
        .map(|line| Ok(serde_json::from_str(&line?)?))
        .collect::<anyhow::Result<_>>()?;
    let report = lines.last().context("no report")?;
    ensure!(output.status.code() == Some(130) && report["stayed"] == VMS, "{lines:?}");
    let told = |event: &str| lines.iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
    let unreached = told("unreached");
    ensure!(unreached.len() == 1 && told("reached").len() == 1, "{lines:?}");
    let why = unreached[0]["why"].as_str().context("no cause")?;
    ensure!(why.contains(&format!("--on '{way}': ")), "{why}");
    for source in &world.sources {
        ensure!(source.status()? == "running", "{}", source.status()?);
        source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    }
    Ok(())
}

/// Waits for its end, within `limit`.
fn ended(child: &mut Child, limit: Duration) -> anyhow::Result<Option<i32>> {
    let until = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.code());
        }
        if Instant::now() > until {
            child.kill()?;
            anyhow::bail!("it does not end within {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn who_steers_an_evacuation_or_ends_it_does_not_wait_for_a_host_that_hangs() -> anyhow::Result<()> {
    // Mutations: an answer is waited for as long as it may take; Ctrl-C waits for the moves.
    let bare = Bare::new("hangs")?;
    // The hands there are busy for as long as nobody listens.
    let list = bare.list(&json!({ "start": ["sleep", "9"] }))?;
    let name = format!("h{}", std::process::id());
    let there = bare.there();
    let mut command = bare.command(&name, &[&list, "--on", &there, "--json"]);
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let asked = || -> anyhow::Result<Value> {
        let began = Instant::now();
        let output = bare.command(&name, &["--status", "--json"]).output()?;
        ensure!(began.elapsed() < ANSWER, "{:?}", began.elapsed());
        Ok(serde_json::from_slice(&output.stdout).unwrap_or_default())
    };
    let until = Instant::now() + LIMIT;
    while count(&asked()?, "moving") == 0 {
        ensure!(Instant::now() < until, "nothing is under way");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&child), Signal::INT)?;
    ensure!(asked()?["vms"].is_array(), "no answer meanwhile");
    let code = ended(&mut child, Duration::from_secs(10))?;
    ensure!(code == Some(130), "{code:?}");
    let said = std::io::read_to_string(child.stdout.take().context("no output")?)?;
    let last: Value = serde_json::from_str(said.lines().last().context("it said nothing")?)?;
    ensure!(
        last["event"] == "left" && last["why"].as_str().is_some_and(|it| it.contains("--resume"))
    );
    Ok(())
}

#[test]
fn a_plan_goes_on_only_with_the_host_that_it_was_made_for() -> anyhow::Result<()> {
    // Mutations: any host will do; a plan of another host is taken up here.
    let bare = Bare::new("resume")?;
    let (list, there) = (bare.list(&json!("127.0.0.1:1"))?, bare.there());
    let [here, away] = ["l", "a"].map(|kind| format!("{kind}{}", std::process::id()));
    // Each has a plan, and a VM that stays.
    for (name, on) in [(&here, &[][..]), (&away, &["--on", &there])] {
        let output = bare.command(name, &[&[list.as_str()][..], on].concat()).output()?;
        ensure!(output.status.code() == Some(1), "{}", errors_of(&output));
        ensure!(bare.directory.join(name).join("plan.redb").exists(), "{}", errors_of(&output));
    }
    let told = bare.refused(&away, &["--resume"])?;
    ensure!(told.contains("is of the host ") && told.contains("say by --on how"), "{told}");
    let told = bare.refused(&here, &["--resume", "--on", &there])?;
    ensure!(told.contains("is of this host") && told.contains("go on without --on"), "{told}");
    let home = json!({ "Home": { "host": "west/0", "directory": "/x" } });
    let west = bare.file("west", &format!("read -r open; echo '{home}'; read -r more\n"))?;
    let told = bare.refused(&away, &["--resume", "--on", &format!("sh {west}")])?;
    let words = "that is the host west/0, and the plan is of ";
    ensure!(told.contains(words) && told.contains("name the command that runs"), "{told}");
    let told = bare.refused(&away, &[&list, "--on", &there])?;
    ensure!(told.contains("has a plan already: go on with --resume"), "{told}");
    // The right one goes on: what failed is tried again.
    let output = bare.command(&away, &["--resume", "--on", &there, "--json"]).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(text.contains(r#""event":"began""#), "{text} {}", errors_of(&output));
    Ok(())
}

#[test]
fn two_evacuations_of_a_host_from_elsewhere_do_not_mix() -> anyhow::Result<()> {
    // Mutation: both have the files of the name.
    let bare = Bare::new("mix")?;
    let (list, there) = (bare.list(&json!("127.0.0.1:1"))?, bare.there());
    let name = format!("m{}", std::process::id());
    let mut words = there.split(' ');
    let mut other = Command::new(words.next().context("no words")?);
    other.args(words).args(["evacuate", "--hands"]);
    let mut other = other.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut asks = other.stdin.take().context("no input")?;
    writeln!(asks, "{}", json!({ "Open": [name, "moves-other"] }))?;
    let mut home = String::new();
    BufReader::new(other.stdout.take().context("no output")?).read_line(&mut home)?;
    let told = bare.refused(&name, &[&list, "--on", &there])?;
    ensure!(told.contains("': on the host ") && told.contains("give this one another"), "{told}");
    drop(asks);
    other.wait()?;
    // One after the other, each of two operators has files of his own.
    for operator in ["one", "two"] {
        let state = bare.directory.join(operator);
        let output = bare.command(&name, &[&list, "--on", &there]).output()?;
        ensure!(output.status.code() == Some(1), "{}", errors_of(&output));
        std::fs::rename(bare.directory.join(&name), state)?;
    }
    let kept = bare.directory.join("there/godwit/evacuations").join(&name);
    let files = |of: &Path| Ok(std::fs::read_dir(of)?.count());
    let counts: Vec<usize> = std::fs::read_dir(&kept)?
        .map(|entry| files(&entry?.path()))
        .collect::<anyhow::Result<_>>()?;
    let used = counts.iter().filter(|count| **count > 0).count();
    ensure!((counts.len(), used) == (3, 2), "{counts:?}");
    Ok(())
}

#[test]
fn the_vms_that_leave_are_those_of_the_host_that_is_emptied() -> anyhow::Result<()> {
    // Mutation: the manager of this host is asked.
    let bare = Bare::new("from")?;
    let east = json!({ "name": "east", "memory": "8GiB", "receive": ["ssh", "east"] });
    let list = bare.file("hosts.json", &json!({ "destination": [east] }).to_string())?;
    let vm = json!({ "vm": "libvirt:web01", "name": "web01", "memory": "1GiB", "cpu": "EPYC" });
    let vms = json!({ "Vms": [vm] });
    let asked = bare.directory.join("asked");
    let script = format!("read -r ask; echo \"$ask\" > {}; echo '{vms}'\n", asked.display());
    let on = format!("sh {}", bare.file("vms", &script)?);
    let from = "libvirt:qemu:///nowhere";
    let words = [&list, "--from", from, "--except", "db", "--on", &on, "--dry-run", "--json"];
    let output = bare.command("f", &words).output()?;
    ensure!(output.status.success(), "{}", errors_of(&output));
    let plan: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(plan["vms"][0]["vm"] == "libvirt:web01" && plan["vms"][0]["to"] == "east", "{plan}");
    let asked: Value = serde_json::from_str(&std::fs::read_to_string(asked)?)?;
    let expected = json!({ "Vms": { "manager": from, "only": [], "except": ["db"] } });
    ensure!(asked == expected, "{asked}");
    // A godwit there asks its own manager, and says on which host that is.
    let words = [&list, "--from", from, "--on", &bare.there(), "--dry-run"];
    let told = bare.refused("f", &words)?;
    ensure!(told.contains("': on the host ") && told.contains("qemu:///nowhere"), "{told}");
    Ok(())
}

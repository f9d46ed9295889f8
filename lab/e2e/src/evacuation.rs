//! An evacuation with real guests: several microvms leave, each for one of two destinations.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_testbed::{Godwit, MicroVm, Movable};
use serde_json::{Value, json};

use crate::LIMIT;

/// Guests that leave.
pub const VMS: usize = 4;
/// Where they go.
pub const HOSTS: [&str; 2] = ["east", "west"];
const MACHINE: [&str; 6] = ["--memory", "64MiB", "--mode", "rate", "--fill", "24MiB"];
/// What all of them may send: the moves take a second or two.
const BUDGET: &str = "80MiB/s";

/// Guests at their source, and a machine that waits for each at both destinations.
#[derive(Debug)]
pub struct World {
    /// The command.
    pub godwit: Godwit,
    /// Where the guests are.
    pub sources: Vec<MicroVm>,
    /// A machine that waits for each at both destinations.
    pub destinations: Vec<[MicroVm; 2]>,
    /// Where everything of it is kept.
    pub directory: PathBuf,
    /// What the evacuation is called: others run beside it.
    pub name: String,
    /// What all of them may send.
    pub budget: &'static str,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl World {
    /// Guests that work, and machines that wait for them.
    ///
    /// # Errors
    /// When one of them does not start.
    pub fn new() -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let godwit = Godwit::built()?;
        let name = format!("e{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(format!("godwit-e2e-evacuate-{name}"));
        std::fs::create_dir_all(&directory)?;
        let waiting = || MicroVm::start(&godwit, &[&MACHINE[..], &["--incoming"]].concat());
        let sources = (0..VMS).map(|_| MicroVm::start(&godwit, &MACHINE));
        let sources = sources.collect::<anyhow::Result<Vec<_>>>()?;
        let destinations = (0..VMS).map(|_| Ok([waiting()?, waiting()?]));
        let destinations = destinations.collect::<anyhow::Result<Vec<_>>>()?;
        for source in &sources {
            source.wait_ready(LIMIT)?;
            source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        }
        let world = Self { godwit, sources, destinations, directory, name, budget: BUDGET };
        std::fs::write(world.directory.join("list.json"), world.list().to_string())?;
        Ok(world)
    }

    fn list(&self) -> Value {
        let godwit = self.godwit.program().display().to_string();
        let receive = |vm: &MicroVm| {
            json!({ "start": [
                godwit, "receive", "--vm", vm.vm_name(), "--listen", "127.0.0.1:0", "--json",
                "--wait", "2min", "--reconnect", "0s",
            ] })
        };
        let vm = |at: usize| {
            json!({
                "name": format!("vm{at}"),
                "vm": self.sources[at].vm_name(),
                "memory": "64MiB",
                "data": "24MiB",
                // Two of them must not share a host.
                "group": (at < 2).then_some("pair"),
                "to": {
                    "east": receive(&self.destinations[at][0]),
                    "west": receive(&self.destinations[at][1]),
                },
            })
        };
        let host = |name: &&str| json!({ "name": name, "memory": "192MiB", "at_once": 2 });
        json!({
            "destination": HOSTS.iter().map(host).collect::<Vec<_>>(),
            "vm": (0..VMS).map(vm).collect::<Vec<_>>(),
        })
    }

    /// A coordinator: the first, or one that goes on.
    ///
    /// # Errors
    /// When it fails.
    pub fn coordinator(&self, resumes: bool) -> anyhow::Result<Child> {
        self.coordinator_with(resumes, &[])
    }

    /// The same with more options.
    ///
    /// # Errors
    /// When it fails.
    pub fn coordinator_with(&self, resumes: bool, options: &[&str]) -> anyhow::Result<Child> {
        let mut command = Command::new(self.godwit.program());
        command.arg("evacuate").arg("--state-dir").arg(&self.directory).arg("--json");
        command.args(["--name", &self.name]).args(options);
        if resumes {
            command.arg("--resume");
        } else {
            command.arg(self.directory.join("list.json"));
            command.args(["--bandwidth", self.budget, "--at-once", "2"]);
            command.args(["--", "--reconnect", "0s", "--compression", "none"]);
        }
        command.env("XDG_STATE_HOME", self.directory.join("state"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().context("cannot start godwit evacuate")
    }

    /// Steers the coordinator that runs.
    ///
    /// # Errors
    /// When it fails.
    pub fn steer(&self, words: &[&str]) -> anyhow::Result<Output> {
        let state = self.directory.display().to_string();
        let fixed = ["evacuate", "--name", &self.name, "--state-dir", &state];
        self.godwit.run(&[&fixed[..], words].concat())
    }

    /// The same, until there is one that hears it.
    ///
    /// # Errors
    /// When it fails.
    pub fn steer_soon(&self, words: &[&str]) -> anyhow::Result<Output> {
        let until = Instant::now() + LIMIT;
        loop {
            let output = self.steer(words)?;
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            if !errors.contains("no evacuation '") {
                return Ok(output);
            }
            ensure!(Instant::now() < until, "{errors}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it says of itself, as soon as `reached` of it.
    ///
    /// # Errors
    /// When it does not come to that.
    pub fn await_status(&self, reached: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let until = Instant::now() + LIMIT;
        loop {
            let output = self.steer_soon(&["--status", "--json"])?;
            let status = serde_json::from_slice(&output.stdout)?;
            if reached(&status) {
                return Ok(status);
            }
            ensure!(Instant::now() < until, "{status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A command that runs godwit as on a host of its own.
    #[must_use]
    pub fn there(&self) -> String {
        elsewhere(&self.godwit, &self.directory)
    }

    /// Whether its plan was written down.
    #[must_use]
    pub fn is_planned(&self) -> bool {
        self.directory.join(&self.name).join("plan.redb").exists()
    }

    /// Each guest runs at one destination, which the report names, and nowhere else.
    ///
    /// # Errors
    /// When it fails.
    pub fn check(&mut self, report: &Value) -> anyhow::Result<()> {
        ensure!(report["moved"] == VMS, "{report}");
        for at in 0..VMS {
            let told = report["vms"][at]["to"].as_str().context("no destination")?;
            let to = HOSTS.iter().position(|host| *host == told).context("an unknown host")?;
            self.sources[at].wait(LIMIT)?;
            let (there, other) = (&self.destinations[at][to], &self.destinations[at][1 - to]);
            there.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
            ensure!(there.status()? == "running", "vm{at}: {}", there.status()?);
            // A machine that an earlier coordinator had told to wait for the guest is "arriving".
            let waits = ["incoming", "arriving"].contains(&other.status()?.as_str());
            ensure!(waits && other.heartbeats().is_empty(), "vm{at}: {}", other.status()?);
            let beats = self.sources[at].heartbeats_across(there);
            ensure!(
                beats.windows(2).all(|pair| pair[1].heartbeat.n == pair[0].heartbeat.n + 1),
                "vm{at}: {beats:?}"
            );
            ensure!(there.bugs().is_empty(), "{:?}", there.bugs());
        }
        ensure!(report["vms"][0]["to"] != report["vms"][1]["to"], "a pair on one host: {report}");
        Ok(())
    }
}

/// A command that runs `godwit` as on a host of its own, whose state is in `directory`: what ssh
/// would be.
#[must_use]
pub fn elsewhere(godwit: &Godwit, directory: &Path) -> String {
    let state = directory.join("there");
    format!("env XDG_STATE_HOME={} {}", state.display(), godwit.program().display())
}

/// Evacuates once, from this host or from elsewhere, and kills the coordinator `after` its start;
/// others after half of that, until one lives long enough. How many were killed.
///
/// # Errors
/// When a guest did not move, or did so twice.
pub fn killed(after: Duration, elsewhere: bool) -> anyhow::Result<u32> {
    let mut world = World::new()?;
    let there = world.there();
    let on: &[&str] = if elsewhere { &["--on", &there] } else { &[] };
    let mut kills = 0;
    let mut life = after;
    loop {
        let mut child = world.coordinator_with(world.is_planned(), on)?;
        let until = Instant::now() + life;
        while Instant::now() < until && child.try_wait()?.is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if child.try_wait()?.is_some() || kills == 3 {
            let report = finish(child)?;
            world.check(&report)?;
            return Ok(kills);
        }
        child.kill()?;
        child.wait()?;
        kills += 1;
        life /= 2;
    }
}

/// How many VMs of an evacuation are in a state, by what it says of itself.
#[must_use]
pub fn count(status: &Value, state: &str) -> usize {
    let vms = status["vms"].as_array().into_iter().flatten();
    vms.filter(|vm| vm["state"] == state).count()
}

/// Waits for the end of a coordinator: its last line.
///
/// # Errors
/// When it has said nothing.
pub fn finish(child: Child) -> anyhow::Result<Value> {
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text
        .lines()
        .last()
        .context("no last line")
        .and_then(|line| serde_json::from_str(line).with_context(|| line.to_owned()));
    last.with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

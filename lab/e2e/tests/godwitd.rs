//! `godwitd` as the operators of hosts run it: guests move to destinations that it started, and it
//! answers nobody who may not ask, whatever he sends.

use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use godwit_e2e::{LIMIT, await_quit, check_untouched, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Godwit, GuestConfig, GuestFiles, Movable, QemuBuild, Room, StartedVm, TestVm,
    VmConfig, builds_for, skip,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Where guests leave, and two hosts that take guests in: addresses of this host's loopback.
const HOSTS: [&str; 3] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"];
const WEST: &str = HOSTS[0];
const EAST: &str = HOSTS[1];
const SOUTH: &str = HOSTS[2];
/// Another user of this host.
const NOBODY: u32 = 65534;

/// A directory, with keys for all hosts, that is removed at the end.
struct World {
    godwit: Godwit,
    directory: PathBuf,
    name: String,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl World {
    fn new() -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("d{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(format!("godwit-e2e-godwitd-{name}"));
        std::fs::create_dir_all(&directory)?;
        let world = Self { godwit: Godwit::built()?, directory, name };
        for authority in ["keys", "others"] {
            let dir = world.path(authority);
            world.godwit.done(&[&["keys", "--dir", &dir][..], &HOSTS].concat())?;
        }
        Ok(world)
    }

    fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn keys(&self, host: &str) -> String {
        self.path(&format!("keys/{host}"))
    }

    /// A godwitd of `host`, with more lines in its configuration.
    fn daemon(&self, host: &str, config: &str) -> anyhow::Result<Daemon> {
        let file = self.path(&format!("{host}.toml"));
        let keys = self.keys(host);
        std::fs::write(&file, format!("keys = \"{keys}\"\n{config}"))?;
        Daemon::start(self, host, &format!("{host}:0"))
    }

    fn run(&self, words: &[&str]) -> anyhow::Result<Output> {
        self.godwit.run(words)
    }

    /// Asks as the host that guests leave does.
    fn ask(&self, words: &[&str]) -> anyhow::Result<Output> {
        self.run(&[&["host"], words, &["--keys", &self.keys(WEST), "--json"]].concat())
    }

    fn listed(&self, daemon: &Daemon) -> anyhow::Result<Value> {
        let output = self.ask(&["list", &daemon.url])?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Waits for a destination of `daemon` in `state`.
    fn await_state(&self, daemon: &Daemon, state: &str) -> anyhow::Result<Value> {
        let until = Instant::now() + LIMIT;
        loop {
            let listed = self.listed(daemon)?;
            let all = listed["destinations"].as_array().cloned().unwrap_or_default();
            let listens = |one: &Value| one["state"] == state && one["address"].is_string();
            if let Some(found) = all.into_iter().find(listens) {
                return Ok(found);
            }
            ensure!(Instant::now() < until, "none is {state}: {}", listed["destinations"]);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Evacuates what is in `list` to `daemons`.
    fn evacuate(&self, list: &Value, rate: &str, daemons: &[&Daemon]) -> anyhow::Result<Child> {
        let file = self.path("list.json");
        std::fs::write(&file, list.to_string())?;
        let mut command = Command::new(self.godwit.program());
        command.args(["evacuate", &file, "--name", &self.name, "--json", "--bandwidth", rate]);
        command.args(["--state-dir", &self.path("evacuations"), "--keys", &self.keys(WEST)]);
        command.args(daemons.iter().flat_map(|daemon| ["--to", &daemon.url]));
        command.args(["--", "--verify"]);
        command.env("XDG_STATE_HOME", self.path("west"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().context("cannot start godwit evacuate")
    }
}

/// The last line of an evacuation.
fn finish(child: Child) -> anyhow::Result<Value> {
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    last.with_context(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}

/// A godwitd, which is killed with this.
struct Daemon {
    child: Child,
    host: &'static str,
    url: String,
    socket: PathBuf,
    state: PathBuf,
    errors: PathBuf,
    metrics: Option<String>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `command` with `socket` handed over as a service manager does (sd_listen_fds(3)).
fn handing_over(command: &Command, socket: impl Into<OwnedFd>) -> Command {
    let mut shell = Command::new("/bin/sh");
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\"";
    shell.args(["-c", script, "sh"]).arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.stdin(Stdio::from(socket.into()));
    shell
}

impl Daemon {
    fn start(world: &World, host: &str, listen: &str) -> anyhow::Result<Self> {
        Self::spawn(world, host, |mut command| {
            command.args(["--listen", listen]).stdin(Stdio::null());
            command
        })
    }

    /// Starts one of `host` by what `change` makes of the command.
    fn spawn(
        world: &World,
        host: &str,
        change: impl FnOnce(Command) -> Command,
    ) -> anyhow::Result<Self> {
        let host = HOSTS.into_iter().find(|known| *known == host).context("no such host")?;
        let path = |name: &str| PathBuf::from(world.path(&format!("{host}.{name}")));
        let (socket, state, errors) = (path("socket"), path("state"), path("stderr"));
        let program = world.godwit.program().with_file_name("godwitd");
        ensure!(program.is_file(), "no godwitd: `cargo build --package godwitd`");
        let mut command = Command::new(program);
        command
            .args(["--metrics", "127.0.0.1:0"])
            .arg("--config")
            .arg(path("toml"))
            .arg("--socket")
            .arg(&socket)
            .arg("--state-dir")
            .arg(&state)
            .env("XDG_STATE_HOME", path("records"));
        let mut command = change(command);
        let child = command.stderr(File::create(&errors)?).spawn();
        let child = child.context("cannot start godwitd")?;
        let url = String::new();
        let mut daemon = Self { child, host, url, socket, state, errors, metrics: None };
        daemon.url = format!("godwitd://{}", daemon.told("hosts ask at godwitd://")?);
        let metrics = daemon.told("metrics at http://")?;
        daemon.metrics = Some(metrics.trim_end_matches("/metrics").to_owned());
        Ok(daemon)
    }

    /// What it says behind `words`.
    fn told(&mut self, words: &str) -> anyhow::Result<String> {
        let until = Instant::now() + LIMIT;
        loop {
            let text = std::fs::read_to_string(&self.errors)?;
            let rest = text.lines().find_map(|line| line.split_once(words)).map(|(_, rest)| rest);
            if let (Some(rest), true) = (rest, text.ends_with('\n')) {
                return Ok(rest.to_owned());
            }
            let ended = self.child.try_wait()?.is_some();
            ensure!(!ended && Instant::now() < until, "no '{words}': {text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills it, as a crash does, and starts another at the same place.
    fn restart(mut self, world: &World) -> anyhow::Result<Self> {
        self.child.kill()?;
        self.child.wait()?;
        let listen = self.url.trim_start_matches("godwitd://").to_owned();
        Self::start(world, self.host, &listen)
    }

    /// What is answered at the socket of the operator to `bytes`, all of it.
    fn raw(&self, bytes: &[u8]) -> anyhow::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(LIMIT))?;
        // It may have heard enough before it has heard all.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    fn scrape(&self) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(self.metrics.as_deref().context("no metrics")?)?;
        stream.set_read_timeout(Some(LIMIT))?;
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
        Ok(body.to_owned())
    }

    /// The QEMU that was started for the destination `id`.
    fn started(&self, id: &str) -> anyhow::Result<StartedVm> {
        let lines = BufReader::new(File::open(self.state.join(format!("{id}.jsonl")))?).lines();
        for line in lines {
            let line: Value = serde_json::from_str(&line?)?;
            if line["event"] == "started" {
                return StartedVm::told(&line);
            }
        }
        bail!("no QEMU was started for {id}")
    }
}

/// A guest at work, and the room of a destination for it.
struct Guest {
    vm: TestVm,
    /// Where what is started for it lies; it ends with this.
    _room: Room,
    /// The way of a host that takes it in.
    way: String,
}

impl Guest {
    fn start(build: &QemuBuild) -> anyhow::Result<Self> {
        let guest = GuestConfig::small(Mode::Rate);
        let config = VmConfig::new(build, guest).with_backend(Backend::Anonymous);
        let vm = TestVm::source(&config)?;
        vm.wait_ready(LIMIT)?;
        vm.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        let room = Room::new()?;
        let files = GuestFiles::find()?;
        let files = files.kernel.parent().context("no directory")?.display().to_string();
        let beside = room.instead_of(&vm.qmp_socket());
        // What should be refused and is not ends within a minute.
        let mut words = vec!["--start", "--wait", "60s", "--map", &beside, "--map", &files];
        let emulator = build.program.display().to_string();
        if Path::new(&emulator).is_absolute() {
            words.extend(["--emulator", &emulator]);
        }
        let way = format!("[way.made]\nreceive = {}\n", json!(words));
        Ok(Self { vm, _room: room, way })
    }

    fn list(&self) -> Value {
        json!({ "vm": [{ "name": "web01", "vm": self.vm.vm_name(), "memory": "256MiB" }] })
    }

    /// It went on, in the QEMU that `daemon` started for the destination `id`.
    fn check_moved(mut self, daemon: &Daemon, id: &Value) -> anyhow::Result<()> {
        let there = daemon.started(id.as_str().context("no id")?)?;
        await_quit(&mut self.vm)?;
        let last = self.vm.heartbeats().last().context("no heartbeat")?.heartbeat.n;
        let beats = there.await_beats(3, LIMIT)?;
        ensure!(beats.first() > Some(&last), "{last}, {beats:?}");
        ensure!(beats.windows(2).all(|pair| pair[1] > pair[0]), "{beats:?}");
        ensure!(self.vm.bugs().is_empty(), "{:?}", self.vm.bugs());
        Ok(())
    }
}

fn errors_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_guest_moves_to_a_host_with_room_by_a_destination_that_its_godwitd_started()
-> anyhow::Result<()> {
    let test = "a_guest_moves_to_a_host_with_room_by_a_destination_that_its_godwitd_started";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let guest = Guest::start(oldest(&builds)?)?;
    let world = World::new()?;
    // This one keeps all its memory, and comes first.
    let full = world.daemon(EAST, &format!("reserve = \"1TiB\"\n{}", guest.way))?;
    let roomy = world.daemon(SOUTH, &format!("reserve = \"1MiB\"\n{}", guest.way))?;

    let refused = world.ask(&["receive", &full.url, "--name", "web01", "--memory", "256MiB"])?;
    ensure!(refused.status.code() == Some(1), "{refused:?}");
    let said = errors_of(&refused);
    ensure!(said.contains("has room for 0B") && said.contains("web01 has 256MiB"), "{said}");

    let report = finish(world.evacuate(&guest.list(), "1GiB/s", &[&full, &roomy])?)?;
    ensure!(report["moved"] == 1 && report["vms"][0]["to"] == SOUTH, "{report}");

    let listed = world.listed(&roomy)?;
    let one = &listed["destinations"][0];
    ensure!(one["state"] == "here" && one["vm"]["name"] == "web01", "{listed}");
    ensure!(one["vm"]["memory_bytes"] == 256 << 20 && one["way"] == "made", "{listed}");
    ensure!(listed["destinations"].as_array().map(Vec::len) == Some(1), "{listed}");
    let there = roomy.started(one["id"].as_str().context("no id")?)?;
    ensure!(one["monitor"] == there.monitor.display().to_string(), "{listed}");
    let vms = listed["vms"]["vms"].as_array().context("no VMs")?;
    ensure!(vms.iter().any(|vm| vm["pid"] == there.pid), "{}", listed["vms"]);
    ensure!(world.listed(&full)?["destinations"] == json!([]), "it was chosen");
    // For people, too.
    let local = format!("unix:{}", roomy.socket.display());
    let shown = world.run(&["host", "list", &local])?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(shown.contains("web01") && shown.contains("here"), "{shown}");

    let metrics = roomy.scrape()?;
    for sample in [
        "godwit_host_destinations{state=\"here\"} 1\n",
        "godwit_host_requests_total{command=\"receive\",outcome=\"done\"} 1\n",
        "\ngodwit_migrations_total{outcome=\"migrated\"} 0\n",
    ] {
        ensure!(metrics.contains(sample), "{sample}: {metrics}");
    }
    let types = metrics.lines().filter(|line| line.starts_with("# TYPE "));
    let names: Vec<&str> = types.collect();
    ensure!(names.len() == names.iter().collect::<BTreeSet<_>>().len(), "twice: {names:?}");

    guest.check_moved(&roomy, &one["id"])
}

#[test]
fn a_godwitd_that_is_killed_while_a_guest_arrives_lists_it_when_it_is_back() -> anyhow::Result<()> {
    let test = "a_godwitd_that_is_killed_while_a_guest_arrives_lists_it_when_it_is_back";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let guest = Guest::start(oldest(&builds)?)?;
    let world = World::new()?;
    let daemon = world.daemon(EAST, &format!("reserve = \"1MiB\"\n{}", guest.way))?;
    // Some seconds for the first round.
    let coordinator = world.evacuate(&guest.list(), "10MiB/s", &[&daemon])?;
    let before = world.await_state(&daemon, "arriving")?;
    let daemon = daemon.restart(&world)?;
    let after = world.listed(&daemon)?;
    let after = &after["destinations"][0];
    ensure!(after["id"] == before["id"] && after["state"] == "arriving", "{before} {after}");
    // The guest has its name to itself.
    let again = world.ask(&["receive", &daemon.url, "--name", "web01", "--memory", "1MiB"])?;
    ensure!(errors_of(&again).contains("is being taken in here already"), "{again:?}");
    let report = finish(coordinator)?;
    ensure!(report["moved"] == 1, "{report}");
    let here = world.await_state(&daemon, "here")?;
    ensure!(here["id"] == before["id"], "{here}");
    // Who asked has heard each line once, with the godwitd in between gone and back.
    let id = here["id"].as_str().context("no id")?;
    let heard = world.path(&format!("evacuations/{}/moves/web01@{EAST}.receive", world.name));
    let heard = std::fs::read_to_string(heard)?;
    let said = std::fs::read_to_string(daemon.state.join(format!("{id}.jsonl")))?;
    ensure!(heard.lines().count() == said.lines().count(), "{heard}\n{said}");
    guest.check_moved(&daemon, &here["id"])
}

#[test]
fn who_may_not_ask_is_told_nothing() -> anyhow::Result<()> {
    let world = World::new()?;
    let daemon = world.daemon(EAST, "peers = [\"127.0.0.1\"]\n")?;
    let ask = |options: &[&str]| world.run(&[&["host", "room", &daemon.url], options].concat());
    let right = ask(&["--keys", &world.keys(WEST), "--json"])?;
    ensure!(right.status.success(), "{right:?}");
    let room: Value = serde_json::from_slice(&right.stdout)?;
    ensure!(room["room_bytes"].as_u64() > Some(0) && room["processors"].as_u64() > Some(0));
    ensure!(room["processor"].is_string() && room["load"].is_number(), "{room}");

    let stranger = world.path(&format!("others/{WEST}"));
    for (options, words) in [
        // Another authority's; one that is none of the peers; none.
        (vec!["--keys", &stranger], "is signed by another authority than ours"),
        (
            vec!["--keys", &world.keys(SOUTH)],
            "it is not made out to the name that the peer expects",
        ),
        (vec![], "does not answer"),
        (vec!["--keys", &world.keys(WEST), "--peer", "west"], "is not made out to 'west'"),
    ] {
        let refused = ask(&options)?;
        let said = errors_of(&refused);
        ensure!(refused.status.code() == Some(1), "{options:?}: {refused:?}");
        ensure!(said.contains(words) && said.trim().lines().count() == 1, "{options:?}: {said}");
        ensure!(refused.stdout.is_empty(), "{refused:?}");
    }
    // Who has no certificate hears nothing, whatever he says.
    let mut stream = TcpStream::connect(daemon.url.trim_start_matches("godwitd://"))?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"{\"version\":1,\"command\":\"room\"}\n")?;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    ensure!(!String::from_utf8_lossy(&answer).contains("room"), "{answer:?}");
    let metrics = daemon.scrape()?;
    let counted = metrics.lines().find_map(|line| {
        line.strip_prefix("godwit_host_refused_connections_total ")?.parse::<u32>().ok()
    });
    ensure!(counted >= Some(4), "{metrics}");
    ensure!(metrics.contains("command=\"room\",outcome=\"done\"} 1\n"), "{metrics}");
    Ok(())
}

#[test]
fn what_is_no_request_is_refused_with_one_line() -> anyhow::Result<()> {
    let world = World::new()?;
    let daemon = world.daemon(EAST, "")?;
    let big = [b"{\"version\":1,\"command\":\"".to_vec(), vec![b'x'; 1 << 20]].concat();
    let receive = |name: &str| {
        let vm = json!({ "name": name, "memory_bytes": 1 << 20 });
        json!({ "version": 1, "command": "receive", "id": "a", "vm": vm }).to_string()
    };
    for (bytes, words) in [
        (big, "a request has 16384 bytes at most"),
        (b"GET / HTTP/1.1\n".to_vec(), "this is no JSON"),
        (b"\xff\xfe\n".to_vec(), "this is no JSON"),
        (b"{\"command\":\"room\"}\n".to_vec(), "a request says its version"),
        (b"{\"version\":7,\"command\":\"room\"}\n".to_vec(), "version 7 is not spoken here"),
        (b"{\"version\":1,\"command\":\"run\"}\n".to_vec(), "unknown variant `run`"),
        (b"{\"version\":1,\"command\":\"room\",\"argv\":[]}\n".to_vec(), "unknown field `argv`"),
        (b"{\"version\":1,\"command\":\"follow\",\"id\":\"../a\"}\n".to_vec(), "an id has 1 to 64"),
        (b"{\"version\":1,\"command\":\"stop\",\"id\":\"a\"}\n".to_vec(), "no destination 'a'"),
        (format!("{}\n", receive("$(reboot)")).into_bytes(), "the name of a guest has"),
        (format!("{}\n", receive("web01")).into_bytes(), "no way to take guests in"),
    ] {
        let answer = daemon.raw(&bytes)?;
        let value: Value = serde_json::from_str(&answer).with_context(|| answer.clone())?;
        ensure!(value["answer"] == "refused" && answer.lines().count() == 1, "{answer}");
        let told = value["error"].as_str().context("no error")?;
        ensure!(told.contains(words), "{words}: {told}");
    }
    // Who says nothing is not waited for: others are answered meanwhile, and he is told.
    let mut silent = UnixStream::connect(&daemon.socket)?;
    silent.set_read_timeout(Some(LIMIT))?;
    let room = daemon.raw(b"{\"version\":1,\"command\":\"room\"}\n")?;
    ensure!(room.starts_with("{\"answer\":\"room\""), "{room}");
    let mut answer = String::new();
    silent.read_to_string(&mut answer)?;
    ensure!(answer.contains("did not come in time"), "{answer}");

    // Nothing leaves this host unencrypted, and no two have one directory.
    let program = world.godwit.program().with_file_name("godwitd");
    let (state, other) = (daemon.state.display().to_string(), world.path("other"));
    let empty = world.path("empty");
    std::fs::write(&empty, "")?;
    let started = |options: &[&str]| {
        Command::new(&program).args(["--socket", &world.path("s")]).args(options).output()
    };
    let beyond = ["--listen", "0.0.0.0:0", "--state-dir", &other, "--config", &empty];
    for (options, words) in [
        (vec!["--state-dir", &state, "--config", &empty], "another godwitd keeps its destinations"),
        ([&beyond[..], &["--keys", "/nowhere"]].concat(), "there are no keys in /nowhere"),
        (vec!["--config", "/nowhere"], "/nowhere: No such file"),
    ] {
        let output = started(&options)?;
        let said = errors_of(&output);
        ensure!(output.status.code() == Some(1), "{options:?}: {output:?}");
        ensure!(said.contains(words) && said.trim().lines().count() == 1, "{options:?}: {said}");
    }
    if !Path::new("/etc/godwit/keys").exists() {
        let output = started(&beyond)?;
        let said = errors_of(&output);
        ensure!(output.status.code() == Some(1), "{output:?}");
        ensure!(said.contains("nothing would be encrypted: give both sides keys"), "{said}");
    }
    Ok(())
}

#[test]
fn a_destination_that_waits_ends_with_its_asker_its_daemon_or_the_next_of_its_name()
-> anyhow::Result<()> {
    let test = "a_destination_that_waits_ends_with_its_asker_its_daemon_or_the_next_of_its_name";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let mut guest = Guest::start(oldest(&builds)?)?;
    let world = World::new()?;
    let mut daemon = world.daemon(EAST, &format!("reserve = \"1MiB\"\n{}", guest.way))?;
    let errors = world.path("asker.stderr");
    let asker = || -> anyhow::Result<Child> {
        let mut command = Command::new(world.godwit.program());
        command.args(["host", "receive", &daemon.url, "--name", "web01", "--memory", "256MiB"]);
        command.args(["--json", "--keys", &world.keys(WEST)]).stdin(Stdio::null());
        Ok(command.stdout(Stdio::piped()).stderr(File::create(&errors)?).spawn()?)
    };
    let states = || -> anyhow::Result<Vec<String>> {
        let listed = world.listed(&daemon)?;
        let all = listed["destinations"].as_array().cloned().unwrap_or_default();
        Ok(all.iter().map(|one| one["state"].as_str().unwrap_or_default().to_owned()).collect())
    };
    let first = asker()?;
    let waiting = world.await_state(&daemon, "waiting")?;

    // Another host has no say in it.
    let id = waiting["id"].as_str().context("no id")?.to_owned();
    let other = ["host", "stop", &id, &daemon.url, "--keys", &world.keys(SOUTH)];
    let refused = world.run(&other)?;
    ensure!(errors_of(&refused).contains("was asked for by 127.0.0.1:"), "{refused:?}");

    // The next of its name takes its place.
    let mut second = asker()?;
    let ended = first.wait_with_output()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    let until = Instant::now() + LIMIT;
    while states()? != ["waiting", "failed"] {
        ensure!(Instant::now() < until, "{:?}", states()?);
        std::thread::sleep(Duration::from_millis(20));
    }

    // Ctrl-C of who asked.
    let pid = Pid::from_raw(i32::try_from(second.id())?).context("no process")?;
    kill_process(pid, Signal::INT)?;
    ensure!(second.wait()?.code() == Some(130));
    ensure!(states()? == ["failed", "failed"], "{:?}", states()?);

    // That of the daemon.
    let mut third = asker()?;
    let waiting = world.await_state(&daemon, "waiting")?;
    let pid = Pid::from_raw(i32::try_from(daemon.child.id())?).context("no process")?;
    kill_process(pid, Signal::TERM)?;
    ensure!(daemon.child.wait()?.success(), "it did not end well");
    let said = std::fs::read_to_string(&daemon.errors)?;
    ensure!(said.contains("stopped; a destination that waited"), "{said}");
    ensure!(!daemon.socket.exists(), "its socket was left behind");
    let address = waiting["address"].as_str().context("no address")?;
    ensure!(TcpStream::connect(address).is_err(), "somebody listens at {address}");
    ensure!(third.wait()?.code() == Some(1), "who asked does not know");
    check_untouched(&mut guest.vm)
}

#[test]
fn who_asks_while_godwitd_is_started_again_waits_where_its_socket_is_handed_over()
-> anyhow::Result<()> {
    let world = World::new()?;
    let keys = world.keys(EAST);
    std::fs::write(world.path(&format!("{EAST}.toml")), format!("keys = \"{keys}\"\n"))?;
    let socket = TcpListener::bind((EAST, 0))?;
    let url = format!("godwitd://{}", socket.local_addr()?);
    let start = || {
        let own = socket.try_clone()?;
        Daemon::spawn(&world, EAST, |command| handing_over(&command, own))
    };
    let first = start()?;
    ensure!(first.url == url, "{} and not {url}", first.url);
    ensure!(world.ask(&["room", &url])?.status.success());
    drop(first);
    let mut last = String::new();
    // It waits for 5 s: a host that is held up may take longer for the next one to be there.
    for _ in 0..3 {
        let output = std::thread::scope(|scope| {
            let asking = scope.spawn(|| world.ask(&["room", &url]));
            // Refused, it would have ended.
            std::thread::sleep(Duration::from_millis(500));
            ensure!(!asking.is_finished(), "it was told no: {:?}", asking.join());
            let _next = start()?;
            asking.join().map_err(|_| anyhow::anyhow!("panicked"))?
        })?;
        if output.status.success() {
            return Ok(());
        }
        last = String::from_utf8_lossy(&output.stderr).into_owned();
    }
    bail!("{last}")
}

#[test]
fn the_operators_socket_answers_root_and_its_own_user_though_its_file_is_open_to_all()
-> anyhow::Result<()> {
    let test = "the_operators_socket_answers_root_and_its_own_user_though_its_file_is_open_to_all";
    if !rustix::process::geteuid().is_root() {
        skip(test, "only root may be another user");
        return Ok(());
    }
    let world = World::new()?;
    let keys = world.keys(EAST);
    std::fs::write(world.path(&format!("{EAST}.toml")), format!("keys = \"{keys}\"\n"))?;
    let path = world.path(&format!("{EAST}.socket"));
    let socket = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    let daemon = Daemon::spawn(&world, EAST, |mut command| {
        command.args(["--listen", &format!("{EAST}:0")]);
        handing_over(&command, socket)
    })?;
    let ask = |user: u32| {
        let mut asking = Command::new(world.godwit.program());
        asking.args(["host", "room", &format!("unix:{path}"), "--json"]).uid(user).gid(user);
        asking.env_remove("XDG_RUNTIME_DIR").output()
    };
    let own = ask(0)?;
    ensure!(own.status.success(), "{}", errors_of(&own));
    let other = ask(NOBODY)?;
    let said = errors_of(&other);
    ensure!(other.status.code() == Some(1), "{other:?}");
    ensure!(said.contains("is for root and the user of godwitd"), "{said}");
    drop(daemon);
    ensure!(Path::new(&path).exists(), "the file of a socket is of who made it");
    Ok(())
}

#[test]
fn a_socket_that_is_handed_over_and_is_of_no_use_is_told_in_one_line() -> anyhow::Result<()> {
    let world = World::new()?;
    std::fs::write(world.path("x.toml"), "listen = \"127.0.0.1:7790\"\n")?;
    let listening = TcpListener::bind((WEST, 0))?;
    let connected = TcpStream::connect(listening.local_addr()?)?;
    let sockets: [(OwnedFd, &str); 4] = [
        (listening.into(), "leave out listen, or the socket unit"),
        (connected.into(), "write Accept=no into its unit"),
        (UdpSocket::bind((WEST, 0))?.into(), "it must be a stream socket of TCP or unix"),
        (File::open("/dev/null")?.into(), "it must be a stream socket of TCP or unix"),
    ];
    for (socket, words) in sockets {
        let mut command = Command::new(world.godwit.program().with_file_name("godwitd"));
        command.args(["--config", &world.path("x.toml"), "--state-dir", &world.path("x.state")]);
        command.args(["--socket", &world.path("x.socket")]);
        let output = handing_over(&command, socket).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && said.lines().count() == 1, "{said}");
        ensure!(said.contains(words), "{words}: {said}");
    }
    Ok(())
}

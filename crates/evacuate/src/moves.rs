//! Moves as they are made: each a `godwit migrate` of its own, which goes on when the coordinator
//! is killed.
//!
//! A move writes to a file of its own, `NAME.NUMBER.jsonl`, which it holds locked for as long as
//! its process lives: the coordinator locks it (flock(2)) and hands it over as standard output, so
//! that the lock belongs to the open file that the two share, and stays with the child when the
//! coordinator is gone. Whoever finds the file locked finds a move under way; whoever can lock it
//! finds its last word in it, if it had one. A file gets its name once, locked already: so where it
//! is missing, whoever looks takes the name, and a coordinator that was stopped before it began the
//! move, and wakes up when another has gone on, finds that it cannot begin it any more.
//!
//! Invariants: a move that nobody can tell the end of is never taken for one that has failed; one
//! that was found not to have begun does not begin.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_control::client;
use godwit_control::messages::Request;
use godwit_units::Rate;
use serde_json::Value;

use crate::plan::{Attempt, Plan, PlannedVm, Receiver};
use crate::runner::{Hands, Look};

/// Until who takes a guest in says where.
const LISTEN_LIMIT: Duration = Duration::from_secs(30);
/// Until `godwit recover` and its like answer.
const ASK_LIMIT: Duration = Duration::from_secs(20);
/// A guest whose mover was killed is given back within this time, by its guardian or its VMM.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// What is in the file of a move that was found not to have begun.
const NEVER_BEGAN: &str =
    "{\"outcome\":\"never-began\",\"guest\":\"source\",\"error\":\"it never began\"}\n";

/// See the module.
#[derive(Debug)]
pub struct Moves {
    directory: PathBuf,
    godwit: PathBuf,
    sockets: PathBuf,
    /// What the names of the moves begin with.
    name: String,
    /// Ours, which we have to bury.
    children: Vec<Child>,
}

/// What a file of a process says.
enum Said {
    /// There is no such file.
    Nothing,
    /// Its process lives; what it has said so far.
    Lives(Vec<Value>),
    /// It has ended.
    Ended(Vec<Value>),
}

impl Moves {
    /// Moves of the evacuation `name`, whose files are in `directory`, by the program `godwit`,
    /// whose control sockets are in `sockets`.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn new(
        directory: &Path,
        name: &str,
        godwit: &Path,
        sockets: &Path,
    ) -> std::io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            godwit: godwit.to_owned(),
            sockets: sockets.to_owned(),
            name: name.to_owned(),
            children: Vec::new(),
        })
    }

    fn socket(&self, vm: &PlannedVm) -> PathBuf {
        self.sockets.join(format!("{}.sock", migration(&self.name, &vm.name)))
    }

    fn file(&self, vm: &PlannedVm, attempt: &Attempt) -> PathBuf {
        self.directory.join(format!("{}.{}.jsonl", vm.name, attempt.number))
    }

    /// Removes what an earlier evacuation of this name has left, whose plan is gone.
    ///
    /// # Errors
    /// When a process of it lives.
    pub fn clear(&self) -> Result<(), String> {
        self.check_ended(&self.directory)?.iter().try_for_each(|path| {
            std::fs::remove_file(path).map_err(|error| format!("{}: {error}", path.display()))
        })
    }

    /// Whether no other plan of this name has moves here: all of them are steered at control
    /// sockets that bear the name.
    ///
    /// # Errors
    /// When a process of one lives, whoever has begun it.
    pub fn check_alone(&self) -> Result<(), String> {
        let Some(parent) = self.directory.parent() else { return Ok(()) };
        let mut others =
            paths(parent)?.into_iter().filter(|path| path.is_dir() && *path != self.directory);
        others.try_for_each(|other| self.check_ended(&other).map(drop))
    }

    /// The files of `directory`, whose processes have all ended.
    fn check_ended(&self, directory: &Path) -> Result<Vec<PathBuf>, String> {
        let paths = paths(directory)?;
        for path in &paths {
            if matches!(found(path)?, Some((_, true))) {
                return Err(format!(
                    "{} is of another evacuation named '{}', and its process lives: wait for its \
                     end, or choose another --name",
                    path.display(),
                    self.name
                ));
            }
        }
        Ok(paths)
    }

    /// Starts `command` with the file `path` as its output, locked, in a process group of its own:
    /// Ctrl-C is the coordinator's.
    fn start(&mut self, command: Command, path: &Path) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        // Appended to, so that the lines of an earlier process stay until the lock is held.
        let file = File::options().create(true).append(true).open(path).map_err(failed)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => {
                format!("{} belongs to a process that lives", path.display())
            }
            TryLockError::Error(error) => failed(error),
        })?;
        file.set_len(0).map_err(failed)?;
        self.spawn(command, file, path)
    }

    /// Starts `command` with `file` as its output, which is at `path`.
    fn spawn(&mut self, mut command: Command, file: File, path: &Path) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let errors = File::create(path.with_extension("stderr")).map_err(failed)?;
        let child =
            command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0).spawn();
        let child = child.map_err(|error| {
            format!("{} does not start: {error}", command.get_program().display())
        })?;
        self.children.push(child);
        Ok(())
    }

    /// Buries those of ours that have ended.
    fn reap(&mut self) {
        self.children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    /// Where `vm` is taken in at the destination of `attempt`.
    fn address(&mut self, plan: &Plan, attempt: &Attempt) -> Result<String, String> {
        let vm = &plan.vms[attempt.vm];
        let host = &plan.destinations[attempt.to].name;
        let start = match vm.receivers.get(host) {
            None => return Err(format!("nobody takes it in at {host}")),
            Some(Receiver::Listens(address)) => return Ok(address.clone()),
            Some(Receiver::Starts { start }) => start,
        };
        let path = self.directory.join(format!("{}@{}.receive", vm.name, plain(host)));
        // One that an earlier coordinator has started may still wait; one that had a guest ends.
        let until = Instant::now() + SETTLE_LIMIT;
        while matches!(said(&path)?, Said::Lives(lines) if lines.iter().any(is_busy)) {
            if Instant::now() > until {
                return Err(format!("an earlier guest is still being taken in at {host}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if !matches!(said(&path)?, Said::Lives(_)) {
            let mut words = start.iter();
            let program = words.next().ok_or("the command that is to take it in is empty")?;
            let mut command = Command::new(program);
            command.args(words);
            self.start(command, &path)?;
        }
        let until = Instant::now() + LISTEN_LIMIT;
        loop {
            let (lives, lines) = match said(&path)? {
                Said::Nothing => (false, Vec::new()),
                Said::Lives(lines) => (true, lines),
                Said::Ended(lines) => (false, lines),
            };
            let told = lines.iter().find(|line| line["event"] == "listening");
            if let (true, Some(address)) = (lives, told.and_then(|line| line["address"].as_str())) {
                return Ok(address.to_owned());
            }
            if !lives || Instant::now() > until {
                let errors = errors_of(&path);
                return Err(format!("who is to take it in at {host} does not listen: {errors}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What `godwit` answers in JSON.
    fn ask(&self, arguments: &[&str]) -> Option<Value> {
        let mut child = Command::new(&self.godwit)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let until = Instant::now() + ASK_LIMIT;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() > until {
                let _ = child.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut text = String::new();
        child.stdout.take()?.read_to_string(&mut text).ok()?;
        text.lines().rev().find_map(|line| serde_json::from_str(line).ok())
    }

    /// Where a guest is whose mover has left no word, by the machine at the source.
    fn fact(&self, vm: &PlannedVm) -> Fact {
        let until = Instant::now() + SETTLE_LIMIT;
        loop {
            let fact = if vm.vm.starts_with("microvm:") {
                let answer = self.ask(&["status", "--vm", &vm.vm, "--json"]);
                match answer.as_ref().and_then(|answer| answer["state"].as_str()) {
                    Some("running" | "paused") => Fact::Here,
                    Some(state) => Fact::Unsettled(state.to_owned()),
                    None => Fact::Gone,
                }
            } else {
                let answer = self.ask(&["recover", "--vm", &vm.vm, "--json"]);
                match answer.as_ref().and_then(|answer| answer["known"].as_str()) {
                    Some("runs") => Fact::Here,
                    Some("gone") => Fact::Gone,
                    Some(known) => Fact::Unsettled(known.to_owned()),
                    None => Fact::Unsettled("not to be asked".to_owned()),
                }
            };
            match fact {
                Fact::Unsettled(_) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(200));
                }
                fact => return fact,
            }
        }
    }

    /// What became of a guest whose mover has ended without a last word.
    fn settle(&self, plan: &Plan, attempt: &Attempt, said_nothing: bool) -> Look {
        let vm = &plan.vms[attempt.vm];
        match self.fact(vm) {
            // It may say nothing the next time either, so that counts.
            Fact::Here if said_nothing => Look::Failed("it never began".to_owned()),
            Fact::Here => Look::Failed("what moved it was killed".to_owned()),
            Fact::Unsettled(known) => {
                Look::InDoubt(format!("what moved it was killed, and the guest is {known}"))
            }
            // The destination may have said that it has it.
            Fact::Gone => {
                let host = &plan.destinations[attempt.to].name;
                let path = self.directory.join(format!("{}@{}.receive", vm.name, plain(host)));
                match said(&path) {
                    Ok(Said::Ended(lines)) if lines.iter().any(has_it) => Look::Moved,
                    _ => Look::InDoubt(
                        "what moved it was killed, the VM has ended at the source, and the \
                         destination has said nothing"
                            .to_owned(),
                    ),
                }
            }
        }
    }
}

/// The name of the move of `vm` in an evacuation, by which `godwit status` and its like find it.
///
/// ```
/// assert_eq!(godwit_evacuate::migration("weekly", "web01"), "weekly.web01");
/// ```
#[must_use]
pub fn migration(evacuation: &str, vm: &str) -> String {
    format!("{evacuation}.{vm}").chars().take(64).collect()
}

/// A name of this host that no other has: its own, and what its system was called when it was
/// installed.
#[must_use]
pub fn this_host() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let name = read("/proc/sys/kernel/hostname");
    let machine: String = read("/etc/machine-id").trim().chars().take(8).collect();
    let name = if name.trim().is_empty() { "nameless" } else { name.trim() };
    if machine.is_empty() { name.to_owned() } else { format!("{name}/{machine}") }
}

/// Where a guest is.
enum Fact {
    Here,
    Gone,
    Unsettled(String),
}

/// Whether `line` is of a `godwit receive` that does not only wait any more.
fn is_busy(line: &Value) -> bool {
    let event = line["event"].as_str().unwrap_or_default();
    !matches!(event, "listening" | "command" | "started") || line["outcome"].is_string()
}

/// Whether `line` is the last word of a `godwit receive` that has the guest.
fn has_it(line: &Value) -> bool {
    matches!(line["outcome"].as_str(), Some("running" | "paused"))
}

/// A name as part of a file's.
fn plain(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    name.chars().map(plain).collect()
}

/// What is in `directory`.
fn paths(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
    let entries = std::fs::read_dir(directory).map_err(failed)?;
    entries.map(|entry| Ok(entry.map_err(failed)?.path())).collect()
}

/// The file at `path`, if there is one, and whether its process lives.
fn found(path: &Path) -> Result<Option<(File, bool)>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(Some((file, false))),
        Err(TryLockError::WouldBlock) => Ok(Some((file, true))),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// The file at `path`, new, locked and with `text` in it; nothing if there is one already.
fn claim(path: &Path, text: &str) -> Result<Option<File>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let own = path.with_extension(format!("new{}", std::process::id()));
    // Left by a process of this number that was killed.
    let _ = std::fs::remove_file(&own);
    let mut file = File::options().create_new(true).append(true).open(&own).map_err(failed)?;
    let ready = file.lock().and_then(|()| file.write_all(text.as_bytes())).map_err(failed);
    let linked = ready.map(|()| std::fs::hard_link(&own, path));
    let _ = std::fs::remove_file(&own);
    match linked? {
        Ok(()) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// What the process of the file at `path` has said, and whether it lives.
fn said(path: &Path) -> Result<Said, String> {
    // The lock comes before the reading: what ends between the two has said its last word.
    let Some((mut file, lives)) = found(path)? else { return Ok(Said::Nothing) };
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    Ok(if lives { Said::Lives(lines) } else { Said::Ended(lines) })
}

/// What the process of the file at `path` complained of, in one line.
fn errors_of(path: &Path) -> String {
    let text = std::fs::read_to_string(path.with_extension("stderr")).unwrap_or_default();
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    line.trim_start_matches("godwit: ").to_owned()
}

impl Hands for Moves {
    fn begin(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> Result<(), String> {
        let address = self.address(plan, attempt)?;
        let vm = &plan.vms[attempt.vm];
        let mut command = Command::new(&self.godwit);
        let bytes = format!("{}B/s", rate.bytes_per_second() as u64);
        command.args(["migrate", "--vm", &vm.vm, "--to", &address, "--json"]);
        command.args(["--name", &migration(&self.name, &vm.name), "--max-bandwidth", &bytes]);
        if let Some(budget) = plan.cpu_budget(rate) {
            command.args(["--cpu-budget", &budget]);
        }
        command.args(&plan.options);
        let path = self.file(vm, attempt);
        match claim(&path, "")? {
            Some(file) => self.spawn(command, file, &path),
            None => Err("another coordinator has gone on".to_owned()),
        }
    }

    fn look(&mut self, plan: &Plan, attempt: &Attempt) -> Look {
        self.reap();
        let vm = &plan.vms[attempt.vm];
        let path = self.file(vm, attempt);
        // While it lives, what it has said is not read at each look.
        match found(&path) {
            Ok(Some((_, true))) => return Look::Moving,
            // From here on it cannot begin.
            Ok(None) => match claim(&path, NEVER_BEGAN) {
                Ok(Some(_)) => return Look::NeverBegan,
                Ok(None) => {}
                Err(why) => return Look::InDoubt(why),
            },
            _ => {}
        }
        let lines = match said(&path) {
            Err(why) => return Look::InDoubt(why),
            Ok(Said::Nothing) => return Look::NeverBegan,
            Ok(Said::Lives(_)) => return Look::Moving,
            Ok(Said::Ended(lines)) => lines,
        };
        let Some(last) = lines.iter().rev().find(|line| line["outcome"].is_string()) else {
            return self.settle(plan, attempt, lines.is_empty());
        };
        let why = last["error"].as_str().map_or_else(|| errors_of(&path), str::to_owned);
        match (last["outcome"].as_str(), last["guest"].as_str()) {
            (Some("migrated"), _) => Look::Moved,
            (Some("never-began"), _) => Look::NeverBegan,
            (Some("refused"), _) | (_, Some("source")) => Look::Failed(why),
            (outcome, guest) => Look::InDoubt(format!(
                "{why} ({}; the guest: {})",
                outcome.unwrap_or_default(),
                guest.unwrap_or("unknown")
            )),
        }
    }

    fn pace(&mut self, plan: &Plan, attempt: &Attempt, rate: Rate) -> bool {
        let socket = self.socket(&plan.vms[attempt.vm]);
        let bytes = format!("{}B/s", rate.bytes_per_second() as u64);
        let mut settings = vec![("max-bandwidth".to_owned(), bytes)];
        settings.extend(plan.cpu_budget(rate).map(|budget| ("cpu-budget".to_owned(), budget)));
        client::command(&socket, &Request::Set { settings }).is_ok()
    }

    fn cancel(&mut self, plan: &Plan, attempt: &Attempt) {
        let _ = client::command(&self.socket(&plan.vms[attempt.vm]), &Request::Cancel);
    }
}

#[cfg(test)]
mod tests;

//! What godwitd has started: each destination a `godwit receive` of its own.
//!
//! ```text
//!   ID.json     who is to come, who asked, by which process; written before that starts
//!   ID.jsonl    what the process prints; locked for as long as it lives
//!   ID.stderr   what it complains of
//! ```
//!
//! The process shares the open file that is its output, and the lock on that with it (flock(2)),
//! as the moves of `godwit evacuate` do. So it is known of each whether it lives, whoever started
//! it: a godwitd that was killed has left nothing that the next one does not find.
//!
//! Invariants: a destination is written down before it begins; no two of one id or, while one
//! lives, of one guest begin; one is begun only while the host has room for it beside what was
//! promised to others.

use std::fs::{File, TryLockError};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use godwit_daemon::messages::{Destination, Guest, Room, State};
use godwit_evacuate::fits;
use godwit_units::ByteCount;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::Config;
use crate::program::Program;
use crate::room::room;

/// Destinations that have ended and are kept in the list.
const KEPT: usize = 200;
/// One that is told to end does so within this time.
const END_LIMIT: Duration = Duration::from_secs(10);
/// No guest has more (x86-64's physical addresses).
const MOST_MEMORY: u64 = 1 << 52;
const LONGEST_ID: usize = 64;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asker {
    /// As an operator would call it.
    pub(crate) name: String,
    /// The fingerprint of its certificate; none: a user of this host.
    pub(crate) certificate: Option<String>,
}

/// What is written down.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Written {
    id: String,
    vm: Guest,
    way: String,
    peer: String,
    certificate: Option<String>,
    began_ms: u64,
    /// Number and start of the process; none: it was never started, or godwitd was killed just
    /// then.
    process: Option<(i32, u64)>,
}

/// What the process of a destination has said.
#[derive(Debug)]
pub(crate) struct Said {
    /// Its lines.
    pub(crate) lines: Vec<Value>,
    /// Whether it lives.
    pub(crate) lives: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Destinations {
    directory: PathBuf,
    godwit: PathBuf,
    /// Ours, which we have to bury.
    children: Mutex<Vec<Child>>,
    /// One begins after the other.
    turn: Mutex<()>,
    /// No other godwitd has this directory.
    _lock: File,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Destinations {
    /// Those that are written down where `config` says.
    ///
    /// # Errors
    /// When another godwitd has them, or the directory cannot be used.
    pub(crate) fn open(config: &Config, program: &Program) -> anyhow::Result<Self> {
        let directory = config.state.clone();
        let shown = directory.display().to_string();
        let mut make = std::fs::DirBuilder::new();
        make.recursive(true).mode(0o700).create(&directory).with_context(|| shown.clone())?;
        let lock = File::options().create(true).append(true).open(directory.join("lock"));
        let lock = lock.with_context(|| shown.clone())?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                anyhow::bail!(
                    "another godwitd keeps its destinations in {shown}: end it, or name \
                               another --state-dir"
                )
            }
            Err(TryLockError::Error(error)) => return Err(error).context(shown),
        }
        Ok(Self {
            directory,
            godwit: program.path().to_owned(),
            children: Mutex::default(),
            turn: Mutex::default(),
            _lock: lock,
        })
    }

    fn file(&self, id: &str, ending: &str) -> PathBuf {
        self.directory.join(format!("{id}.{ending}"))
    }

    /// Takes `vm` in as `id`, by `way`, for `who`; nothing is done if that was asked for before.
    ///
    /// # Errors
    /// Why not, in one line.
    pub(crate) fn begin(
        &self,
        config: &Config,
        (id, vm, way): (&str, &Guest, Option<&str>),
        who: &Asker,
    ) -> Result<(), String> {
        check_id(id)?;
        check(vm)?;
        let way = config.way(way)?.to_owned();
        let words = config.receive(&way, vm)?;
        let _turn = lock(&self.turn);
        if let Some(known) = self.written(id) {
            return match (known.vm == *vm, known.certificate == who.certificate) {
                (true, true) => Ok(()),
                _ => Err(format!("there is a destination '{id}' already, for another")),
            };
        }
        for other in self.all().into_iter().filter(|other| other.vm.name == vm.name) {
            let said = self.said(&other.id)?;
            match state(&said) {
                State::Waiting if said.lives => {
                    // Who waits for it knows no more of it, or asks anew.
                    self.signal(&other)?;
                    self.await_end(&other.id)?;
                }
                State::Arriving => {
                    return Err(format!(
                        "a guest of the name {} is being taken in here already (destination {})",
                        vm.name, other.id
                    ));
                }
                _ => {}
            }
        }
        let room = self.room(config);
        if !room.cpus.is_empty() && vm.cpu.as_ref().is_some_and(|cpu| !room.cpus.contains(cpu)) {
            let models = room.cpus.join(", ");
            return Err(format!(
                "{} has no processor for {}, but for {models}",
                room.host, vm.name
            ));
        }
        if vm.memory_bytes > room.room_bytes {
            return Err(format!(
                "{} has room for {} ({} available, {} of it kept for the host, {} promised to \
                 guests), and {} has {}",
                room.host,
                ByteCount(room.room_bytes),
                ByteCount(room.available_bytes),
                ByteCount(room.reserve_bytes),
                ByteCount(room.promised_bytes),
                vm.name,
                ByteCount(vm.memory_bytes),
            ));
        }
        if room.arriving >= config.at_once {
            return Err(format!(
                "{} guests are being taken in on {}, and no more at once: at_once = {} in its \
                 configuration",
                room.arriving, room.host, config.at_once
            ));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut written = Written {
            id: id.to_owned(),
            vm: vm.clone(),
            way,
            peer: who.name.clone(),
            certificate: who.certificate.clone(),
            began_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            process: None,
        };
        self.write(&written)?;
        let pid = self.start(id, &words)?;
        written.process = begun(pid).map(|at| (pid, at));
        self.write(&written)?;
        self.forget_old();
        Ok(())
    }

    /// Writes one down, in one step.
    fn write(&self, written: &Written) -> Result<(), String> {
        let path = self.file(&written.id, "json");
        let beside = path.with_extension("json.new");
        let text = serde_json::to_string(written).unwrap_or_default();
        let write = || {
            let mut options = File::options();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
            file.write_all(text.as_bytes())?;
            std::fs::rename(&beside, &path)
        };
        write().map_err(|error: std::io::Error| format!("{}: {error}", path.display()))
    }

    /// Starts `godwit` with the file of `id` as its output, locked, in a process group of its own.
    fn start(&self, id: &str, words: &[String]) -> Result<i32, String> {
        let path = self.file(id, "jsonl");
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut options = File::options();
        options.create(true).append(true).mode(0o600);
        let file = options.open(&path).map_err(failed)?;
        file.try_lock().map_err(|_| format!("{} belongs to a process", path.display()))?;
        let errors = options.open(self.file(id, "stderr")).map_err(failed)?;
        let mut command = Command::new(&self.godwit);
        command.args(words).stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
        // What is systemd's to hear from us, and has said to us.
        command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDNAMES");
        let child = command.spawn();
        let child = child.map_err(|error| format!("godwit receive does not start: {error}"))?;
        let pid = i32::try_from(child.id()).map_err(|error| error.to_string())?;
        lock(&self.children).push(child);
        Ok(pid)
    }

    /// Buries those of ours that have ended.
    pub(crate) fn bury(&self) {
        lock(&self.children).retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    fn written(&self, id: &str) -> Option<Written> {
        let text = std::fs::read_to_string(self.file(id, "json")).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// All that are written down, the newest first.
    fn all(&self) -> Vec<Written> {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let ids = names.filter_map(|name| name.strip_suffix(".json").map(str::to_owned));
        let mut all: Vec<Written> = ids.filter_map(|id| self.written(&id)).collect();
        all.sort_by(|one, other| (other.began_ms, &other.id).cmp(&(one.began_ms, &one.id)));
        all
    }

    /// What the process of `id` has said.
    ///
    /// # Errors
    /// When there is no such destination, or it cannot be read.
    pub(crate) fn said(&self, id: &str) -> Result<Said, String> {
        let path = self.file(id, "jsonl");
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let file = match File::open(&path) {
            Ok(file) => file,
            // It was written down, and never begun.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Said { lines: Vec::new(), lives: false });
            }
            Err(error) => return Err(failed(error)),
        };
        // The lock comes before the reading: what ends between the two has said its last word.
        let lives = match file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        };
        let text = std::io::read_to_string(file).map_err(failed)?;
        // Its last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let lines = whole.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(Said { lines, lives })
    }

    /// How much `id` has said, in bytes: whether there is something new.
    pub(crate) fn length(&self, id: &str) -> u64 {
        std::fs::metadata(self.file(id, "jsonl")).map_or(0, |meta| meta.len())
    }

    /// Whether there is a destination `id`.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn know(&self, id: &str) -> Result<(), String> {
        check_id(id)?;
        let none = || format!("there is no destination '{id}' here");
        self.written(id).map(drop).ok_or_else(none)
    }

    /// What `id` has complained of last.
    pub(crate) fn complaint(&self, id: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.file(id, "stderr")).ok()?;
        let line = text.lines().rev().find(|line| line.starts_with("godwit: "))?;
        Some(line.trim_start_matches("godwit: ").to_owned())
    }

    /// Ends `id`, as `who` asks.
    ///
    /// # Errors
    /// When it is another's, has ended, or cannot be told.
    pub(crate) fn stop(&self, id: &str, who: &Asker) -> Result<(), String> {
        self.know(id)?;
        let _turn = lock(&self.turn);
        let written = self.written(id).ok_or("it is gone")?;
        if who.certificate.is_some() && who.certificate != written.certificate {
            return Err(format!(
                "destination '{id}' was asked for by {}, not by you",
                written.peer
            ));
        }
        if !self.said(id)?.lives {
            return Ok(());
        }
        self.signal(&written)
    }

    /// Tells a destination to end; to it that is the same as Ctrl-C.
    fn signal(&self, written: &Written) -> Result<(), String> {
        let cannot = |why: &str| format!("destination '{}' cannot be ended: {why}", written.id);
        let Some((number, at)) = written.process else {
            return Err(cannot(
                "its process is not known; it ends when nobody has come for a while",
            ));
        };
        let pid = Pid::from_raw(number).ok_or_else(|| cannot("its process has no number"))?;
        let process = pidfd_open(pid, PidfdFlags::empty());
        let process = process.map_err(|error| cannot(&error.to_string()))?;
        // Not another one that has got its number since.
        if begun(number) != Some(at) {
            return Ok(());
        }
        // SIGINT would stay ignored where whoever started godwitd had it ignore that.
        pidfd_send_signal(&process, Signal::TERM).map_err(|error| cannot(&error.to_string()))
    }

    fn await_end(&self, id: &str) -> Result<(), String> {
        let until = Instant::now() + END_LIMIT;
        while self.said(id)?.lives {
            if Instant::now() > until {
                return Err(format!("destination '{id}' does not end"));
            }
            self.bury();
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Ends those that only wait; how many those were.
    pub(crate) fn stop_waiting(&self) -> usize {
        let _turn = lock(&self.turn);
        let waits = |written: &Written| {
            self.said(&written.id).is_ok_and(|said| said.lives && state(&said) == State::Waiting)
        };
        let waiting: Vec<Written> = self.all().into_iter().filter(waits).collect();
        let told = waiting.iter().filter(|written| self.signal(written).is_ok());
        let told: Vec<&Written> = told.collect();
        told.iter().filter(|written| self.await_end(&written.id).is_ok()).count()
    }

    /// What is listed: all, the newest first.
    pub(crate) fn list(&self) -> Vec<Destination> {
        self.all().into_iter().filter_map(|written| self.listed(written)).collect()
    }

    fn listed(&self, written: Written) -> Option<Destination> {
        let said = self.said(&written.id).ok()?;
        let of = |event: &str, key: &str| {
            let line = said.lines.iter().find(|line| line["event"] == event);
            line.and_then(|line| line[key].as_str()).map(str::to_owned)
        };
        let state = state(&said);
        let told = said.lines.iter().rev().find_map(|line| line["error"].as_str());
        let error = match state {
            State::Waiting | State::Arriving | State::Here => None,
            _ => told.map(str::to_owned).or_else(|| self.complaint(&written.id)),
        };
        Some(Destination {
            state,
            address: of("listening", "address"),
            monitor: of("started", "monitor"),
            error,
            id: written.id,
            vm: written.vm,
            way: written.way,
            peer: written.peer,
            began_ms: written.began_ms,
        })
    }

    /// What room the host has now.
    pub(crate) fn room(&self, config: &Config) -> Room {
        let (mut promised, mut arriving) = (0_u64, 0);
        for written in self.all() {
            let Ok(said) = self.said(&written.id) else { continue };
            let started = said.lines.iter().find(|line| line["event"] == "started");
            let machine = started.and_then(|line| line["pid"].as_i64());
            let machine = machine.and_then(|pid| i32::try_from(pid).ok());
            let resident = machine.and_then(resident);
            match (state(&said), resident) {
                (State::Waiting | State::Arriving, resident) if said.lives => {
                    arriving += 1;
                    let used = resident.unwrap_or(0);
                    promised += written.vm.memory_bytes.saturating_sub(used);
                }
                // It fills its memory when its source has long gone.
                (State::Here, Some(used)) => {
                    promised += written.vm.memory_bytes.saturating_sub(used);
                }
                _ => {}
            }
        }
        room(config, ByteCount(promised), arriving)
    }

    /// The oldest of those that have ended go.
    fn forget_old(&self) {
        let ended = |written: &Written| self.said(&written.id).is_ok_and(|said| !said.lives);
        let old: Vec<Written> = self.all().into_iter().filter(ended).skip(KEPT).collect();
        for written in old {
            for ending in ["jsonl", "stderr", "json"] {
                let _ = std::fs::remove_file(self.file(&written.id, ending));
            }
        }
    }
}

/// How far a destination is that has said this.
fn state(said: &Said) -> State {
    let outcome = said.lines.iter().rev().find_map(|line| line["outcome"].as_str());
    let came = said.lines.iter().any(|line| line["event"] == "accepted");
    match outcome {
        Some("running" | "paused") => State::Here,
        Some("in-doubt") => State::InDoubt,
        Some(_) => State::Failed,
        None if said.lives && came => State::Arriving,
        None if said.lives => State::Waiting,
        // Without a guest it has done no harm.
        None if !came => State::Failed,
        None => State::Killed,
    }
}

fn check_id(id: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let fits = (1..=LONGEST_ID).contains(&id.len()) && id.chars().all(plain);
    if fits && !id.starts_with('.') {
        return Ok(());
    }
    Err("an id has 1 to 64 letters, digits, '-', '_' and '.', and no '.' in front".to_owned())
}

fn check(vm: &Guest) -> Result<(), String> {
    if !fits(&vm.name) {
        return Err("the name of a guest has 1 to 48 letters, digits, '-', '_' and '.', and no \
                    '.' or '-' in front"
            .to_owned());
    }
    if vm.memory_bytes == 0 || vm.memory_bytes > MOST_MEMORY {
        return Err(format!("no guest has {} of memory", ByteCount(vm.memory_bytes)));
    }
    if vm.cpu.as_ref().is_some_and(|cpu| cpu.len() > 64) {
        return Err("no model of processor has a name of more than 64 bytes".to_owned());
    }
    Ok(())
}

/// When the process `pid` began, in ticks since the host did (proc_pid_stat(5)); none: it has
/// ended.
fn begun(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind its name, which may have anything in it, from the third field on.
    let rest = stat.rsplit_once(')')?.1;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// The memory that the process `pid` has, if it lives (proc_pid_status(5)).
fn resident(pid: i32) -> Option<u64> {
    let status = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status"));
    let status = status.ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said(lives: bool, lines: &[Value]) -> Said {
        Said { lines: lines.to_vec(), lives }
    }

    #[test]
    fn how_far_it_is_is_what_it_said_last() {
        let (listening, accepted) = (json!({"event":"listening"}), json!({"event":"accepted"}));
        let outcome = |word: &str| json!({ "outcome": word });
        for (lives, lines, expected) in [
            (true, vec![], State::Waiting),
            (true, vec![listening.clone()], State::Waiting),
            (true, vec![listening.clone(), json!({"event":"asked"})], State::Waiting),
            (true, vec![listening.clone(), accepted.clone()], State::Arriving),
            (false, vec![listening.clone(), accepted.clone()], State::Killed),
            (false, vec![listening.clone()], State::Failed),
            (false, vec![], State::Failed),
            (false, vec![accepted.clone(), outcome("running")], State::Here),
            (true, vec![accepted.clone(), outcome("paused")], State::Here),
            (false, vec![accepted.clone(), outcome("failed")], State::Failed),
            (false, vec![listening, outcome("cancelled")], State::Failed),
            (false, vec![accepted, outcome("in-doubt")], State::InDoubt),
        ] {
            assert_eq!(state(&said(lives, &lines)), expected, "{lives} {lines:?}");
        }
    }

    #[test]
    fn a_name_is_no_more_than_a_name() {
        let guest =
            |name: &str, memory_bytes| Guest { name: name.to_owned(), memory_bytes, cpu: None };
        assert_eq!(check(&guest("web01.east", 1)), Ok(()));
        for name in ["", "-x", "../x", "a b", "$(reboot)", "a/b", "{memory}"] {
            assert!(check(&guest(name, 1)).unwrap_err().contains("1 to 48 letters"), "{name}");
            assert!(name == "-x" || check_id(name).is_err(), "{name}");
        }
        assert!(check(&guest("a", 0)).is_err() && check(&guest("a", 1 << 60)).is_err());
        assert_eq!(check_id("web01-1f"), Ok(()));
        assert!(check_id(&"a".repeat(65)).is_err() && check_id("..").is_err());
    }

    #[test]
    fn a_process_is_known_by_its_start_and_its_memory() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(begun(own).is_some_and(|at| at > 0) && begun(own) == begun(own));
        assert!(resident(own).unwrap() > 1 << 20);
        assert_eq!((begun(i32::MAX), resident(i32::MAX)), (None, None));
    }
}

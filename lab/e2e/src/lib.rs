//! What the end-to-end tests in `tests/` share: a pair of machines, and what it means
//! that a guest is untouched.
//!
//! The tests drive the `godwit` command as its users do, against real QEMUs with the self-checking
//! guest.

#![forbid(unsafe_code)]

mod doctor;
pub mod evacuation;
mod keys;
mod microvm;
mod terminal;
mod third;
mod unprivileged;

pub use doctor::Findings;
pub use keys::Keys;
pub use microvm::MicroPair;
pub use terminal::{Screen, Terminal};
pub use third::Third;
pub use unprivileged::{USERFAULTFD, Unprivileged};

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use godwit_testbed::{Ended, Godwit, QemuBuild, Running, TestVm, VmConfig, shared_by};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// No wait of these tests is longer; it is a bound for what hangs, not a measure of speed.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A source with a guest at work and a destination that waits.
#[derive(Debug)]
pub struct Pair {
    /// Where the guest is.
    pub source: TestVm,
    /// Where it is to go.
    pub destination: TestVm,
    /// The command.
    pub godwit: Godwit,
}

impl Pair {
    /// Starts both and waits until the guest works.
    ///
    /// # Errors
    /// When that does not come about.
    pub fn start(config: &VmConfig) -> anyhow::Result<Self> {
        Self::start_apart(config, config)
    }

    /// The same with a machine of its own on each side.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start_apart(source: &VmConfig, destination: &VmConfig) -> anyhow::Result<Self> {
        let godwit = Godwit::built()?;
        let source = TestVm::source(source)?;
        let destination = TestVm::destination(destination)?;
        source.wait_ready(LIMIT)?;
        source.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
        Ok(Self { source, destination, godwit })
    }

    /// Makes the destination the source of the next move, which goes to `next`. What was the source
    /// is ended.
    pub fn move_on(&mut self, next: TestVm) {
        self.source = std::mem::replace(&mut self.destination, next);
    }

    /// Runs both commands to their ends: migrate, receive. Disks that move may be filled.
    ///
    /// # Errors
    /// When one of them does not start or does not end.
    pub fn migrate(&self, options: &[&str]) -> anyhow::Result<(Ended, Ended)> {
        let (receive, address) = self.godwit.receive(&self.destination, shared_by(options))?;
        let migrate = self.godwit.migrate(&self.source, &address, options)?;
        Ok((migrate.wait(LIMIT)?, receive.wait(LIMIT)?))
    }
}

/// How early the process `pid` goes when memory runs out (`oom_score_adj`).
///
/// # Errors
/// When there is no such process.
pub fn rank(pid: i32) -> anyhow::Result<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?;
    text.trim().parse().with_context(|| text)
}

/// The page of the only record that `godwit` has kept of this side.
///
/// # Errors
/// When it has kept another number of them.
pub fn only_page(godwit: &Godwit, side: &str) -> anyhow::Result<String> {
    let printed = |words: &[&str]| -> anyhow::Result<String> {
        Ok(String::from_utf8(godwit.done(&[&["report", "--side", side], words].concat())?.stdout)?)
    };
    let list = printed(&["--list", "--json"])?;
    ensure!(list.lines().count() == 1, "{list}");
    printed(&["--out", "-"])
}

/// Waits until `migrate` is copying.
///
/// # Errors
/// When it never does.
pub fn await_copying(migrate: &Running) -> anyhow::Result<()> {
    let copying =
        |line: &Value| line["sent_bytes"].as_u64() > Some(1 << 20) && line["outcome"].is_null();
    migrate.wait_for("copying", LIMIT, copying).map(drop)
}

/// Waits until `godwit`, or its guardian, has complained of `words`.
///
/// # Errors
/// When neither does.
pub fn await_words(godwit: &Running, words: &str) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while !godwit.errors().contains(words) {
        ensure!(Instant::now() < until, "'{words}' is not in: {}", godwit.errors());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Checks that a migration has come to a good end: the guest runs at the destination, counts on and
/// finds no damage.
///
/// # Errors
/// What is not as it should be.
pub fn check_moved(pair: &mut Pair, migrate: &Ended) -> anyhow::Result<()> {
    let last = migrate.last();
    ensure!(last["outcome"] == "migrated", "{last} {}", migrate.errors);
    ensure!(migrate.status.success(), "exit status {}", migrate.status);
    ensure!(pair.destination.status()? == "running", "the guest does not run at the destination");
    pair.destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    let numbers: Vec<u64> = pair
        .source
        .heartbeats_across(&pair.destination)
        .iter()
        .map(|beat| beat.heartbeat.n)
        .collect();
    ensure!(numbers.windows(2).all(|pair| pair[1] > pair[0]), "heartbeats went back: {numbers:?}");
    let bugs = [pair.source.bugs(), pair.destination.bugs()].concat();
    ensure!(bugs.is_empty(), "{bugs:?}");
    Ok(())
}

/// Waits until QEMU has ended in `vm`, whose guest has left.
///
/// # Errors
/// When it does not.
pub fn await_quit(vm: &mut TestVm) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while vm.is_alive() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    ensure!(!vm.is_alive(), "the source QEMU did not quit");
    Ok(())
}

/// Waits until no godwit has to do with `vm` any more, the guardian of one that was killed among
/// them.
///
/// # Errors
/// When one stays, or leaves its record.
pub fn await_alone(vm: &TestVm) -> anyhow::Result<()> {
    await_process_alone(vm.pid())
}

/// The same for the QEMU `pid`, which may have ended.
///
/// # Errors
/// When somebody stays.
pub fn await_process_alone(pid: i32) -> anyhow::Result<()> {
    let end = format!("-guard-{pid}");
    let until = Instant::now() + LIMIT;
    // One that was only just started has godwit's own command line, and makes its record then.
    loop {
        let guardian = guardian_of_process(pid)?;
        let entries = std::fs::read_dir("/run/godwit").into_iter().flatten().flatten();
        let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let record = names.find(|name| name.ends_with(&end));
        match (guardian, record) {
            (None, None) => return Ok(()),
            _ if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            (Some(_), _) => bail!("a guardian stays"),
            (None, Some(name)) => bail!("the record {name} stays"),
        }
    }
}

/// What `godwit recover` knows of the VM of this name, and whether an operator has to do something.
///
/// # Errors
/// What it complained of, where it knows nothing.
pub fn recover_knows(godwit: &Godwit, vm: &str) -> anyhow::Result<(String, bool)> {
    let output = godwit.run(&["recover", "--vm", vm, "--json"])?;
    let said: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let known = said["known"].as_str().context("nothing is known")?;
    Ok((known.to_owned(), output.status.code() == Some(3)))
}

/// The files by which another godwit goes on with a guest that runs before all of its memory is
/// there: at the source, and at the destination.
#[must_use]
pub fn follow_records(pair: &Pair) -> [usize; 2] {
    [(pair.source.pid(), "-left"), (pair.destination.pid(), "-lacks")].map(|(pid, end)| {
        let names = std::fs::read_dir("/run/godwit").into_iter().flatten().flatten();
        let ours = |name: &str| {
            name.starts_with(&format!("qemu-{pid}-")) && name.ends_with(&format!("{end}.json"))
        };
        names.filter(|it| it.file_name().to_str().is_some_and(ours)).count()
    })
}

/// Checks that no userfaultfd is left in the QEMU `pid`.
///
/// # Errors
/// When one is.
pub fn check_no_userfaultfd(pid: i32) -> anyhow::Result<()> {
    for descriptor in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let Ok(target) = std::fs::read_link(descriptor.path()) else { continue };
        ensure!(target.as_os_str() != "anon_inode:[userfaultfd]", "a userfaultfd is left");
    }
    Ok(())
}

/// The guardian of the godwit that is at work on `vm`.
///
/// # Errors
/// When processes cannot be listed.
pub fn guardian_of(vm: &TestVm) -> anyhow::Result<Option<Pid>> {
    guardian_of_process(vm.pid())
}

/// The guardian of the godwit that is at work on the QEMU `pid`.
///
/// # Errors
/// When processes cannot be listed.
pub fn guardian_of_process(pid: i32) -> anyhow::Result<Option<Pid>> {
    let record = format!("-guard-{pid}");
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line.split(|byte| *byte == 0).any(|word| word.ends_with(record.as_bytes())) {
            return Ok(entry.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw));
        }
    }
    Ok(None)
}

/// Checks that nothing is left in `vm` of what godwit adds to it for disks or limits.
/// Waits for the end of a godwit at work on `vm` that is about to be killed, and kills its guardian
/// before that can do anything.
pub fn ends_with_its_guardian(vm: &TestVm, godwit: Running) -> anyhow::Result<Ended> {
    let guardian = guardian_of(vm)?.context("there is no guardian")?;
    // One that was killed would be replaced, so it is stopped for now.
    kill_process(guardian, Signal::STOP)?;
    let ended = godwit.wait(LIMIT)?;
    kill_process(guardian, Signal::KILL)?;
    // Its monitor is free before it counts as gone.
    let until = Instant::now() + LIMIT;
    let stat = format!("/proc/{}/stat", guardian.as_raw_nonzero());
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
        ensure!(Instant::now() < until, "the guardian outlives SIGKILL");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(ended)
}

fn check_disks_untouched(vm: &mut TestVm) -> anyhow::Result<()> {
    let exports = vm.qmp().execute("query-block-exports", Value::Null)?;
    ensure!(exports == json!([]), "exports are left: {exports}");
    ensure!(vm.qmp().execute("nbd-server-stop", Value::Null).is_err(), "an NBD server was left");
    let nodes = vm.qmp().execute("query-named-block-nodes", json!({ "flat": true }))?.to_string();
    ensure!(!nodes.contains("\"godwit-"), "a bitmap is left: {nodes}");
    let disks = vm.qmp().execute("query-block", Value::Null)?;
    for limit in disks.as_array().into_iter().flatten().map(|disk| &disk["inserted"]["bps_wr"]) {
        ensure!(limit.as_u64().unwrap_or(0) == 0, "a disk is limited to {limit}");
    }
    Ok(())
}

/// Checks that the guest runs in `vm` as if godwit had never been there: running, counting,
/// unharmed, not traced, not write-protected, with QEMU's migration settings as they were and
/// nothing added to its disks; and that no process of godwit's is left that has to do with it.
///
/// # Errors
/// What is not as it should be.
pub fn check_untouched(vm: &mut TestVm) -> anyhow::Result<()> {
    await_alone(vm)?;
    check_disks_untouched(vm)?;
    let status = vm.status()?;
    ensure!(status == "running", "the guest is '{status}'");
    vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    ensure!(vm.bugs().is_empty(), "{:?}", vm.bugs());
    check_process(vm.pid())?;
    check_settings(vm)
}

/// Checks that nobody traces a thread of the QEMU `pid` or protects its memory.
///
/// # Errors
/// What is left of godwit's.
pub fn check_process(pid: i32) -> anyhow::Result<()> {
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status")).unwrap_or_default();
        let tracer =
            status.lines().find(|line| line.starts_with("TracerPid:")).unwrap_or("TracerPid:\t0");
        ensure!(tracer == "TracerPid:\t0", "a thread is traced: {tracer}");
    }
    // `uw`: registered with a userfaultfd for write protection (proc(5), smaps VmFlags).
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let tracked =
        smaps.lines().filter(|line| line.starts_with("VmFlags:")).any(|line| line.contains(" uw"));
    ensure!(!tracked, "memory is still write-protected");
    Ok(())
}

/// Checks that QEMU's migration settings are its own defaults, and that it has no descriptors which
/// somebody has handed over.
///
/// # Errors
/// What is not as it should be.
pub fn check_settings(vm: &mut TestVm) -> anyhow::Result<()> {
    let capabilities = vm.qmp().execute("query-migrate-capabilities", Value::Null)?;
    for entry in capabilities.as_array().context("no capabilities")? {
        ensure!(entry["state"] == false, "{} was left on", entry["capability"]);
    }
    let parameters = vm.qmp().execute("query-migrate-parameters", Value::Null)?;
    // QEMU's own defaults (qapi/migration.json).
    for (name, value) in [("downtime-limit", 300), ("max-bandwidth", 128 << 20)] {
        ensure!(parameters[name] == value, "{name} was left at {}", parameters[name]);
    }
    let handed_over = vm.qmp().execute("query-fdsets", Value::Null)?;
    ensure!(handed_over == json!([]), "it has descriptors that were handed over: {handed_over}");
    Ok(())
}

/// Checks that `ended` failed with exit status `code` and that its one line of complaint contains
/// all of `words`.
///
/// # Errors
/// What is not as it should be.
pub fn check_refused(ended: &Ended, code: i32, words: &[&str]) -> anyhow::Result<()> {
    let complaint = ended.errors.trim();
    ensure!(ended.status.code() == Some(code), "exit status {}: {complaint}", ended.status);
    ensure!(complaint.lines().count() == 1, "not one line: {complaint}");
    for word in words {
        ensure!(complaint.contains(word), "'{word}' is not in: {complaint}");
    }
    Ok(())
}

/// One of `builds`, the oldest: where any will do.
///
/// # Errors
/// When there is none.
pub fn oldest(builds: &[QemuBuild]) -> anyhow::Result<&QemuBuild> {
    let Some(build) = builds.iter().min_by_key(|build| build.version) else { bail!("no QEMU") };
    Ok(build)
}

/// Each thread of the process `pid`, which had all of root's rights to begin with, has given up
/// those that it has no use for, and the way back; those that are named have no more than is said
/// of them. A thread that ends meanwhile is passed over.
///
/// # Errors
/// A thread that has more, or a named one that is not there.
pub fn check_rights(pid: i32, kept: &[u64], own: &[(&str, &[u64])]) -> anyhow::Result<()> {
    let set = |bits: &[u64]| bits.iter().fold(0, |set, bit| set | 1u64 << bit);
    let mut seen = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = match std::fs::read_to_string(task?.path().join("status")) {
            Ok(status) => status,
            Err(error) if has_ended(&error) => continue,
            Err(error) => return Err(error.into()),
        };
        let word = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let thread = word("Name:\t").unwrap_or_default();
        let more = own.iter().find(|(name, _)| *name == thread);
        let used = set(more.map_or(kept, |(_, bits)| bits));
        seen.extend(more.map(|(name, _)| *name));
        // The last is the process's: who has given up the right to set it cannot.
        for (name, used) in [("CapEff:\t", used), ("CapPrm:\t", used), ("CapBnd:\t", set(kept))] {
            let has = u64::from_str_radix(word(name).context("no such line")?, 16)?;
            ensure!(has & !used == 0, "{name}{has:x} of {thread}");
        }
        ensure!(word("NoNewPrivs:\t") == Some("1"), "{status}");
    }
    let missing = own.iter().find(|(name, _)| !seen.contains(name));
    ensure!(missing.is_none(), "no such thread: {missing:?} among {seen:?}");
    Ok(())
}

/// Whether a file of a thread's in /proc could not be read because the thread has ended: before the
/// file was opened, or between that and the reading.
fn has_ended(error: &std::io::Error) -> bool {
    let gone = [Errno::NOENT, Errno::SRCH].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| gone.contains(&code))
}

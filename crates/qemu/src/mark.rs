//! Whose a bitmap, an export or a directory is: names begin with the process that made it.
//!
//! A process is named by number and start time, since numbers are given again. A godwit in another
//! PID namespace is not seen and counts as gone; two of them at one QEMU are not provided for.

use std::fmt;
use std::path::{Path, PathBuf};

const PREFIX: &str = "godwit-";

/// The ends of names of records: of a destination to which pages come; of a guest that runs before
/// all of its pages are there, where these are and where they are missing.
pub(crate) const INCOMING: &str = "-incoming";
pub(crate) const LEFT: &str = "-left";
pub(crate) const LACKS: &str = "-lacks";
const SIDES: [&str; 3] = [INCOMING, LEFT, LACKS];

/// A process that once was godwit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) pid: u32,
    /// In ticks since the host was started (`starttime` in proc_pid_stat(5)).
    started: u64,
}

impl Mark {
    /// This process.
    pub(crate) fn own() -> Self {
        let pid = std::process::id();
        Self { pid, started: start_time(pid).unwrap_or(0) }
    }

    /// The mark that `name` begins with, if there is one.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let mut numbers = name.strip_prefix(PREFIX)?.split('-');
        let pid = numbers.next()?.parse().ok()?;
        Some(Self { pid, started: numbers.next()?.parse().ok()? })
    }

    /// Whether the process still runs.
    pub(crate) fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.started)
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}-{}", self.pid, self.started)
    }
}

/// What processes that are gone have left in `directory` under names with this `ending`: the path,
/// and the name without it.
pub(crate) fn leftovers<'a>(
    directory: &Path,
    ending: &'a str,
) -> impl Iterator<Item = (PathBuf, String)> + use<'a> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let stem = name.strip_suffix(ending)?;
        let gone = Mark::of(stem).is_some_and(|mark| !mark.is_alive());
        gone.then(|| (entry.path(), stem.to_owned()))
    })
}

/// What a record of this QEMU is called, which no later process of the same number has, and none of
/// another host that has the directory as well.
fn record_name(qemu: i32, side: &str) -> String {
    let started = u32::try_from(qemu).ok().and_then(start_time).unwrap_or(0);
    format!("qemu-{qemu}-{started}-{}{side}.json", boot())
}

/// The beginning of what this host has drawn when it was started: eight hexadecimal digits of
/// `/proc/sys/kernel/random/boot_id` (random(4)).
fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.chars().take(8).collect()
}

/// All records with this ending in `directory` of QEMUs of this host that run, each with the QEMU's
/// process.
pub(crate) fn records(directory: &Path, side: &str) -> Vec<(PathBuf, i32)> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let of_living = |name: &str| {
        let (pid, started) = qemu_of(name)?;
        let ends = name.strip_suffix(".json").is_some_and(|stem| stem.ends_with(side));
        (ends && start_time(pid) == Some(started)).then_some(pid.cast_signed())
    };
    entries.filter_map(|it| Some((it.path(), of_living(it.file_name().to_str()?)?))).collect()
}

/// The file in `directory` of that name; what others have left there is swept.
pub(crate) fn record_in(directory: &Path, qemu: i32, side: &str) -> PathBuf {
    sweep_records(directory);
    directory.join(record_name(qemu, side))
}

/// Removes from `directory` what godwits that were killed have left there of QEMUs that have ended
/// since: [`record_name`], and what was to become one. Nobody can go on by it.
fn sweep_records(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if qemu_of(&name).is_some_and(|(pid, started)| start_time(pid) != Some(started)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The process of which a file of this name is, and when that was started, if it is a record of
/// this host's.
fn qemu_of(name: &str) -> Option<(u32, u64)> {
    let (stem, ending) = name.split_once('.')?;
    let stem = SIDES.iter().find_map(|side| stem.strip_suffix(side)).unwrap_or(stem);
    let (pid, rest) = stem.strip_prefix("qemu-")?.split_once('-')?;
    let (started, boot) = rest.split_once('-')?;
    let ours = ending == "json" || ending.ends_with(".new");
    (ours && boot == self::boot()).then_some((pid.parse().ok()?, started.parse().ok()?))
}

/// When process `pid` was started, as long as it runs: one that only waits for its parent to hear
/// of its end does not.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may hold anything; the state is the first field
    // after it, start time the 20th.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_known_again_by_its_name() {
        let mark = Mark::own();
        assert_eq!(Mark::of(&format!("{mark}-7")), Some(mark));
        assert_eq!(Mark::of(&mark.to_string()), Some(mark));
        for other in ["godwit", "godwit-x-7", "bitmap0", "godwit-12"] {
            assert_eq!(Mark::of(other), None, "{other}");
        }
    }

    #[test]
    fn records_of_what_has_ended_are_swept_and_no_others() {
        // Mutation: other hosts' records go as well, or those of QEMUs that run.
        let directory = std::env::temp_dir().join(format!("godwit-sweep-records-{}", Mark::own()));
        std::fs::create_dir(&directory).unwrap();
        let own = std::process::id();
        let (runs, boot) = (record_name(own.cast_signed(), "-incoming"), boot());
        let gone = format!("qemu-{own}-1-{boot}");
        let kept = [
            runs.clone(),
            runs.replace("json", "7.new"),
            format!("qemu-{own}-1-00000000.json"),
            format!("qemu-{own}-1.json"),
            format!("{gone}.txt"),
            "other.json".to_owned(),
        ];
        let swept = [".json", "-incoming.json", "-left.json", "-lacks.json", ".12.new"]
            .map(|end| format!("{gone}{end}"));
        for name in kept.iter().chain(&swept) {
            std::fs::write(directory.join(name), "").unwrap();
        }
        sweep_records(&directory);
        for (names, there) in [(&kept[..], true), (&swept[..], false)] {
            for name in names {
                assert_eq!(directory.join(name).exists(), there, "{name}");
            }
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn only_the_living_are_alive() {
        assert!(Mark::own().is_alive());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let gone = Mark { pid: child.id(), started: start_time(child.id()).unwrap() };
        assert!(gone.is_alive());
        child.kill().unwrap();
        // It ends, and its parent has not heard of it yet.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while gone.is_alive() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(!gone.is_alive());
        child.wait().unwrap();
        assert!(!gone.is_alive());
        let given_again = Mark { started: Mark::own().started + 1, ..Mark::own() };
        assert!(!given_again.is_alive());
    }
}

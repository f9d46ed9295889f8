//! The directory in which records are kept.
//!
//! Invariant: at most [`KEPT`] records of a side are there when one of it has been added, the
//! newest, and what those of sources came to that have gone is kept in sums ([`Store::totals`]).
//! What is not named as a record is left alone.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::totals::{Gone, Totals};

/// The sums of what has gone.
const SUMS: &str = "totals.json";
/// Whoever has it locked may let records go.
const LOCK: &str = "lock";
/// Whoever has it does so for moments.
const LOCK_LIMIT: Duration = Duration::from_secs(10);
/// Records that are kept.
const KEPT: usize = 200;

/// Which side of a migration a record is of.
///
/// ```
/// assert_eq!(godwit_report::Side::Destination.word(), "destination");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// The host that the guest left.
    Source,
    /// The host that took it in.
    Destination,
}

impl Side {
    /// The word for it, for people and for programs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }

    /// How names of its files end. Each migration is counted at its source.
    fn ending(self) -> &'static str {
        match self {
            Self::Source => ".migration.jsonl",
            Self::Destination => ".arrival.jsonl",
        }
    }
}

/// Where records are.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

/// A record that is kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kept {
    /// What names it: when it began, as milliseconds since 1970, and the VM.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Which side it is of.
    pub side: Side,
}

impl Store {
    /// That of this user: `$XDG_STATE_HOME/godwit/records`, or `~/.local/state/godwit/records`
    /// (XDG Base Directory); of root `/var/lib/godwit/records`. None without a home.
    #[must_use]
    pub fn own(is_root: bool) -> Option<Self> {
        let of =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|it| it.is_absolute());
        let state = of("XDG_STATE_HOME");
        let state = state.or_else(|| is_root.then(|| PathBuf::from("/var/lib")));
        let state = state.or_else(|| of("HOME").map(|home| home.join(".local/state")));
        state.map(|state| Self::at(&state.join("godwit/records")))
    }

    /// The one in `directory`, which need not be there yet.
    #[must_use]
    pub fn at(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Keeps a record of `vm` of one `side` that began `began_ms` milliseconds after 1970. The
    /// oldest of that side go.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(
        &self,
        side: Side,
        vm: &str,
        began_ms: u64,
        lines: &str,
    ) -> std::io::Result<PathBuf> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
        let vm: String = vm.chars().map(plain).take(64).collect();
        let path = self.directory.join(format!("{began_ms:013}-{vm}{}", side.ending()));
        self.write(&path, lines)?;
        let lock = self.directory.join(LOCK);
        let _turn = wait(File::options().create(true).append(true).open(lock)?, File::try_lock)?;
        let all = self.list_of(side)?;
        let old = all.get(KEPT..).unwrap_or_default();
        if !old.is_empty() && side == Side::Source {
            let mut gone = self.gone();
            let there = all.iter().map(|kept| kept.name.as_str()).collect::<BTreeSet<_>>();
            gone.add(named(old), &there);
            self.write(&self.directory.join(SUMS), &serde_json::to_string(&gone)?)?;
        }
        for old in old {
            match std::fs::remove_file(&old.path) {
                // A godwit of a release without the lock has removed it.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
        Ok(path)
    }

    /// Writes a file in one step, for this user alone.
    fn write(&self, path: &Path, text: &str) -> std::io::Result<()> {
        // Threads of one process may keep at once.
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let beside = path.with_extension(format!("new{}-{number}", std::process::id()));
        let write = || {
            let mut options = File::options();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
            file.write_all(text.as_bytes())?;
            std::fs::rename(&beside, path)
        };
        write().inspect_err(|_| drop(std::fs::remove_file(&beside)))
    }

    /// The sums of what has gone; none where nothing has, or nobody can read them.
    fn gone(&self) -> Gone {
        let text = std::fs::read_to_string(self.directory.join(SUMS)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// What all migrations came to that a record was ever kept of.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub fn totals(&self) -> std::io::Result<Totals> {
        // Nothing goes meanwhile. Where nothing was ever kept there is no lock.
        let turn = File::open(self.directory.join(LOCK)).ok();
        let _turn = turn.map(|turn| wait(turn, File::try_lock_shared)).transpose()?;
        Ok(self.gone().with(named(&self.list_of(Side::Source)?)))
    }

    /// All of them of both sides, the newest first; none where there is no such directory.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn list(&self) -> std::io::Result<Vec<Kept>> {
        let mut kept = self.list_of(Side::Source)?;
        kept.extend(self.list_of(Side::Destination)?);
        kept.sort();
        kept.reverse();
        Ok(kept)
    }

    /// Those of one side, the newest first.
    fn list_of(&self, side: Side) -> std::io::Result<Vec<Kept>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut kept = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(side.ending()));
            if let Some(name) = name {
                kept.push(Kept { name: name.to_owned(), path: path.clone(), side });
            }
        }
        kept.sort();
        kept.reverse();
        Ok(kept)
    }
}

/// Waits until `lock` has locked `file`, as it is while that is open.
fn wait(file: File, lock: impl Fn(&File) -> Result<(), TryLockError>) -> std::io::Result<File> {
    let until = Instant::now() + LOCK_LIMIT;
    loop {
        match lock(&file) {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if Instant::now() > until => {
                return Err(std::io::Error::other("another godwit has the records locked"));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn named(records: &[Kept]) -> impl Iterator<Item = (&str, &Path)> {
    records.iter().map(|kept| (kept.name.as_str(), kept.path.as_path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn migrated(downtime_ms: u64) -> String {
        format!(
            "{{\"event\":\"record\"}}\n{{\"outcome\":\"migrated\",\"downtime_ms\":{downtime_ms}.0,\
             \"total_ms\":1500.0,\"sent_bytes\":1048576}}\n"
        )
    }

    #[test]
    fn what_has_gone_still_counts_and_counts_once() {
        let directory = std::env::temp_dir().join(format!("godwit-sums-{}", std::process::id()));
        let store = Store::at(&directory);
        assert_eq!(store.totals().unwrap(), Totals::default());
        for began in 0..KEPT as u64 + 5 {
            store.keep(Side::Source, "vm", began, &migrated(began)).unwrap();
        }
        store.keep(Side::Source, "vm", 1000, "{\"outcome\":\"failed\",\"error\":\"x\"}\n").unwrap();
        store.keep(Side::Source, "vm", 1001, "not a record\n").unwrap();
        let totals = store.totals().unwrap();
        let outcomes = [("failed", 1), ("migrated", KEPT as u64 + 5)];
        assert_eq!(totals.outcomes, outcomes.map(|(word, n)| (word.to_owned(), n)).into());
        let (count, sum) = (KEPT as u64 + 5, (0..KEPT + 5).sum::<usize>() as f64 / 1e3);
        assert_eq!(totals.downtime.count, count);
        assert!((totals.downtime.sum - sum).abs() < 1e-6, "{}", totals.downtime.sum);
        assert_eq!(totals.downtime.buckets[..3], [(0.001, 2), (0.002, 1), (0.005, 3)]);
        assert_eq!((totals.duration.buckets[1], totals.bytes.buckets[0].1), ((2.0, count), count));

        // One that was added, and whose removal was cut off, is there as well.
        store.keep(Side::Source, "other", 0, &migrated(0)).unwrap();
        let back = store.totals().unwrap();
        assert_eq!(back.outcomes["migrated"], count + 1, "another of an earlier time counts");
        let gone = store.gone();
        let oldest = store.list().unwrap().pop().unwrap();
        let mut cut_off = gone.clone();
        cut_off.add(named(std::slice::from_ref(&oldest)), &[oldest.name.as_str()].into());
        let sums = serde_json::to_string(&cut_off).unwrap();
        store.write(&directory.join(SUMS), &sums).unwrap();
        assert_eq!(store.totals().unwrap(), back);
        store.keep(Side::Source, "vm", 2000, &migrated(1)).unwrap();
        assert_eq!(store.totals().unwrap().outcomes["migrated"], count + 2);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn migrations_that_end_at_once_all_have_their_record() {
        // Regression: one that found an old record removed by another called its own not kept.
        let directory = std::env::temp_dir().join(format!("godwit-at-once-{}", std::process::id()));
        let store = Store::at(&directory);
        for began in 0..KEPT as u64 {
            store.keep(Side::Source, "old", began, "{}\n").unwrap();
        }
        std::thread::scope(|scope| {
            for vm in ["a", "b", "c", "d", "e", "f", "g", "h"] {
                let store = &store;
                scope.spawn(move || {
                    for began in 1000..1100 {
                        store.keep(Side::Source, vm, began, "{}\n").unwrap();
                    }
                });
            }
        });
        assert_eq!(store.list().unwrap().len(), KEPT);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn what_a_destination_keeps_is_listed_with_its_side_and_counts_for_nothing() {
        // Mutation: a migration within one host counts twice.
        let directory = std::env::temp_dir().join(format!("godwit-sides-{}", std::process::id()));
        let store = Store::at(&directory);
        let came = "{\"event\":\"record\",\"side\":\"destination\"}\n{\"outcome\":\"running\"}\n";
        store.keep(Side::Source, "vm", 5, &migrated(1)).unwrap();
        for began in 0..KEPT as u64 + 2 {
            store.keep(Side::Destination, "vm", began, came).unwrap();
        }
        let kept = store.list().unwrap();
        let of = |side| kept.iter().filter(|kept| kept.side == side).count();
        assert_eq!((of(Side::Source), of(Side::Destination)), (1, KEPT));
        assert_eq!(kept[0].name, format!("{:013}-vm", KEPT + 1));
        assert!(kept[0].path.to_string_lossy().ends_with(".arrival.jsonl"));
        assert_eq!(store.totals().unwrap().outcomes, [("migrated".to_owned(), 1)].into());
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn the_newest_are_kept_and_what_is_no_record_is_left_alone() {
        let directory = std::env::temp_dir().join(format!("godwit-store-{}", std::process::id()));
        let store = Store::at(&directory.join("records"));
        assert_eq!(store.list().unwrap(), Vec::new());
        for began in 0..KEPT as u64 + 3 {
            store.keep(Side::Source, "web/../01", 1_790_000_000_000 + began, "{}\n").unwrap();
        }
        std::fs::write(store.directory().join("notes.txt"), "mine").unwrap();
        let kept = store.list().unwrap();
        assert_eq!(kept.len(), KEPT);
        assert_eq!(kept[0].name, "1790000000202-web----01");
        assert_eq!(kept[KEPT - 1].name, "1790000000003-web----01");
        assert!(kept.iter().all(|kept| kept.path.parent() == Some(store.directory())));
        assert!(store.directory().join("notes.txt").exists());
        std::fs::remove_dir_all(directory).unwrap();
    }
}

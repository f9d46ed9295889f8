//! Which QEMUs are usable here.
//!
//! Keeps one promise: a test that has none to run with says so aloud. How they get here is left to
//! `make qemu`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::{GuestFiles, target_dir};
use crate::skip::skip;

const BINARY: &str = "qemu-system-x86_64";

/// One usable QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuBuild {
    /// The program, or a script that becomes it.
    pub program: PathBuf,
    /// Major, minor, micro.
    pub version: (u32, u32, u32),
}

impl QemuBuild {
    /// Arguments that have it give up root's rights for those of `user`, once it has opened all.
    #[must_use]
    pub fn as_user(&self, user: &str) -> [String; 2] {
        if self.version.0 >= 10 {
            ["-run-with".to_owned(), format!("user={user}")]
        } else {
            ["-runas".to_owned(), user.to_owned()]
        }
    }

    /// The QEMU `program`, if it runs.
    #[must_use]
    pub fn at(program: &Path) -> Option<Self> {
        let output = Command::new(program).arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version =
            text.lines().next()?.strip_prefix("QEMU emulator version ")?.split(' ').next()?;
        let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
        let mut next = || numbers.next().unwrap_or(0);
        Some(Self { program: program.to_owned(), version: (next(), next(), next()) })
    }

    /// The system's own.
    #[must_use]
    pub fn installed() -> Option<Self> {
        Self::at(Path::new(BINARY))
    }

    /// QEMU 10, which `make qemu` unpacks.
    #[must_use]
    pub fn unpacked() -> Option<Self> {
        Self::at(&target_dir().join("qemu-10.0").join(BINARY))
    }

    /// The newest that `make qemu` found, which it unpacks, too.
    #[must_use]
    pub fn newest() -> Option<Self> {
        Self::at(&target_dir().join("qemu-newest").join(BINARY))
    }
}

impl fmt::Display for QemuBuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, micro) = self.version;
        write!(f, "QEMU {major}.{minor}.{micro}")
    }
}

/// Those that there should be, each with its name.
fn wanted() -> [(&'static str, Option<QemuBuild>); 3] {
    [
        ("the system's own", QemuBuild::installed()),
        ("QEMU 10", QemuBuild::unpacked()),
        ("the newest", QemuBuild::newest()),
    ]
}

/// All usable QEMUs, oldest first.
#[must_use]
pub fn builds() -> Vec<QemuBuild> {
    found(wanted())
}

/// Those that there are, oldest first, each version once.
fn found(wanted: [(&str, Option<QemuBuild>); 3]) -> Vec<QemuBuild> {
    let mut found: Vec<_> = wanted.into_iter().filter_map(|(_, build)| build).collect();
    found.sort_by_key(|build| build.version);
    found.dedup_by(|a, b| a.version == b.version);
    found
}

/// The QEMUs that the test `test` can run with. What is missing is told aloud, with the reason: the
/// guest, all QEMUs, or some of the three.
#[must_use]
pub fn builds_for(test: &str) -> Vec<QemuBuild> {
    if let Err(missing) = GuestFiles::find() {
        skip(test, missing);
        return Vec::new();
    }
    told_builds(test)
}

/// The QEMU that the test `test` runs with, for a test that holds for each: the same one in every
/// run, and each for a third of the tests. All of them where GODWIT_EACH_QEMU is set, which takes
/// nearly three times as long.
#[must_use]
pub fn builds_in_turn_for(test: &str) -> Vec<QemuBuild> {
    in_turn(test, builds_for(test))
}

/// One of `builds`, or all.
pub(crate) fn in_turn(test: &str, builds: Vec<QemuBuild>) -> Vec<QemuBuild> {
    if std::env::var_os("GODWIT_EACH_QEMU").is_some() {
        return builds;
    }
    let turn = turn_of(test, builds.len());
    builds.into_iter().skip(turn).take(1).collect()
}

/// Which of so many is for `test`.
fn turn_of(test: &str, count: usize) -> usize {
    let sum = test
        .bytes()
        .fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(byte)));
    sum % count.max(1)
}

/// All usable QEMUs; which of them are missing is told aloud.
pub(crate) fn told_builds(test: &str) -> Vec<QemuBuild> {
    let wanted = wanted();
    if let Some(why) = missing(&wanted) {
        skip(test, why);
    }
    found(wanted)
}

/// Those of `builds` that the test `test` can run with since it needs version `major`. If there are
/// others only, that is told aloud.
#[must_use]
pub fn builds_since(major: u32, builds: Vec<QemuBuild>, test: &str) -> Vec<QemuBuild> {
    if let Some(why) = too_old(major, &builds) {
        skip(test, why);
    }
    builds.into_iter().filter(|build| build.version.0 >= major).collect()
}

/// Why a test that needs version `major` runs with none of `builds`, if there are any.
fn too_old(major: u32, builds: &[QemuBuild]) -> Option<String> {
    let newest = builds.iter().max_by_key(|build| build.version)?;
    (newest.version.0 < major)
        .then(|| format!("{newest} is older than QEMU {major}: run `make qemu` for QEMU 10"))
}

/// Why a test runs with fewer QEMUs than there should be.
fn missing(wanted: &[(&str, Option<QemuBuild>)]) -> Option<String> {
    let missing: Vec<_> =
        wanted.iter().filter(|(_, build)| build.is_none()).map(|(name, _)| *name).collect();
    match missing.len() {
        0 => None,
        all if all == wanted.len() => Some("there is no QEMU: run `make qemu`".to_owned()),
        _ => Some(format!("no QEMU that is {}: run `make qemu`", missing.join(" or "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_is_missing_is_told_of() {
        // Mutation: a test that has one QEMU where there should be three says nothing.
        let qemu = |major| QemuBuild { program: PathBuf::from("qemu"), version: (major, 2, 0) };
        let wanted = |own, ten, newest| {
            let of = |name, major| (name, (major > 0).then(|| qemu(major)));
            [of("the system's own", own), of("QEMU 10", ten), of("the newest", newest)]
        };
        assert_eq!(missing(&wanted(7, 10, 11)), None);
        let told = |own, ten, newest| missing(&wanted(own, ten, newest)).unwrap();
        assert_eq!(told(7, 0, 11), "no QEMU that is QEMU 10: run `make qemu`");
        assert!(told(0, 10, 0).contains("the system's own or the newest"));
        assert!(told(0, 0, 0).contains("there is no QEMU: run"));
        // Where the system's own is the newest it is one.
        assert_eq!(found(wanted(11, 10, 11)), [qemu(10), qemu(11)]);
        assert_eq!(too_old(8, &[qemu(7), qemu(10)]), None);
        assert!(too_old(8, &[qemu(7)]).unwrap().contains("QEMU 7.2.0 is older than QEMU 8"));
        // Without any, that was told already.
        assert_eq!(too_old(8, &[]), None);
        assert_eq!(builds_since(8, vec![qemu(7), qemu(10)], "of two"), [qemu(10)]);
    }

    #[test]
    fn tests_take_turns_with_the_qemus_there_are() {
        for one in 0..3 {
            let of = (0..150).filter(|test| turn_of(&format!("test_{test}"), 3) == one).count();
            assert!((35..65).contains(&of), "{of}");
        }
        assert_eq!(turn_of("one", 2), turn_of("one", 2));
        assert_eq!((turn_of("one", 1), turn_of("one", 0)), (0, 0));
    }
}

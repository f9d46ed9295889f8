//! Guests with a witness: a program that is not ours does its own work beside the stamps, and
//! checks it by itself.
//!
//! Keeps one promise: who knows a witness by its name knows its image. What it does is in
//! lab/testbed/witnesses, and `make witnesses` makes the images.

use std::fmt;

use crate::guest::target_dir;
use crate::skip::skip;

/// A program with a check of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// SQLite, with integrity_check and a checksum of each row.
    Sqlite,
    /// fio, which verifies what it wrote to the disk.
    Fio,
    /// stress-ng, which verifies memory and arithmetic.
    Stress,
    /// A compiler that builds the same twice.
    Compiler,
    /// Redis, written and read from outside.
    Redis,
}

impl Witness {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Sqlite, Self::Fio, Self::Stress, Self::Compiler, Self::Redis];

    /// Its name, in the names of images and in what it prints.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Fio => "fio",
            Self::Stress => "stress",
            Self::Compiler => "compiler",
            Self::Redis => "redis",
        }
    }

    /// Whether it works on a disk.
    #[must_use]
    pub fn has_disk(self) -> bool {
        matches!(self, Self::Sqlite | Self::Fio | Self::Compiler)
    }

    /// Whether a line tells of a check that found nothing.
    #[must_use]
    pub fn is_clean(self, line: &str) -> bool {
        let mut words = line.split(' ');
        let number = |word: &str| word.parse::<u64>().is_ok();
        words.next() == Some("WITNESS")
            && words.next() == Some(self.name())
            && words.next().is_some_and(number)
            && words.next() == Some("ok")
            && words.next().is_none()
    }

    /// Its image. If it is not there, says on standard error that the test `test` is skipped.
    #[must_use]
    pub fn is_there_for(self, test: &str) -> bool {
        let image = self.image();
        if !image.exists() {
            skip(test, format_args!("{} is missing: run `make witnesses`", image.display()));
        }
        image.exists()
    }

    pub(crate) fn image(self) -> std::path::PathBuf {
        target_dir().join("witnesses").join(format!("{self}.cpio"))
    }
}

impl fmt::Display for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_line_of_its_own_is_a_check_that_found_nothing() {
        assert!(Witness::Sqlite.is_clean("WITNESS sqlite 12 ok"));
        for line in ["WITNESS fio 12 ok", "WITNESS sqlite 12", "ITNESS sqlite 12 ok", "BUG sqlite"]
        {
            assert!(!Witness::Sqlite.is_clean(line), "{line}");
        }
    }
}

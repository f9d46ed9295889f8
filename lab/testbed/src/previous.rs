//! The `godwit` of the release before this one, which `make previous` builds from the history.
//!
//! Keeps one promise: a test that has none to run with says so aloud.

use crate::godwit::Godwit;
use crate::guest::target_dir;
use crate::skip::skip;

/// What is written down of that release.
const RELEASE: &str = include_str!("../previous-release");

/// The release before this one.
#[derive(Clone, Debug)]
pub struct Previous {
    /// Its program.
    pub godwit: Godwit,
    /// The version of the protocol that it speaks.
    pub protocol: u64,
}

impl Previous {
    /// It, if it was built; aloud why not, for the test `test`.
    #[must_use]
    pub fn built_for(test: &str) -> Option<Self> {
        let value = |key: &str| {
            let lines = RELEASE.lines().filter_map(|line| line.split_once(" = "));
            lines.filter(|(name, _)| *name == key).map(|(_, value)| value.trim()).next()
        };
        let program = target_dir().join("previous").join(value("commit")?).join("godwit");
        if !program.is_file() {
            let program = program.display();
            skip(
                test,
                format_args!("there is no {program}: `make previous` builds it or says why"),
            );
            return None;
        }
        Some(Self { godwit: Godwit::at(program), protocol: value("protocol")?.parse().ok()? })
    }
}

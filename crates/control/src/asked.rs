//! A request as it stands on the line, and the version of what is spoken at control sockets.
//!
//! Invariant: who names no version is answered as ever; who names one that is not spoken here has
//! asked for nothing.

use serde_json::Value;

use crate::messages::{Answer, MigrationLook, Request};

/// The versions of requests, answers and events that are spoken here. What is only added changes
/// none of them.
pub const VERSIONS: [u64; 1] = [1];

/// What somebody asks.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// For what.
    pub request: Request,
    /// In which version, where that was said.
    pub version: Option<u64>,
}

impl Asked {
    /// The request that `line` is.
    ///
    /// # Errors
    /// Why it is none, in one line.
    ///
    /// ```
    /// use godwit_control::asked::Asked;
    ///
    /// let asked = Asked::read(br#"{"command":"cancel","version":1}"#).unwrap();
    /// assert_eq!(asked.version, Some(1));
    /// assert!(Asked::read(br#"{"command":"cancel","version":2}"#).is_err());
    /// ```
    pub fn read(line: &[u8]) -> Result<Self, String> {
        let wrong = |error: serde_json::Error| format!("not understood: {error}");
        let mut value: Value = serde_json::from_slice(line).map_err(wrong)?;
        let version = match value.as_object_mut().and_then(|fields| fields.remove("version")) {
            None => None,
            Some(named) => Some(spoken(&named)?),
        };
        Ok(Self { request: serde_json::from_value(value).map_err(wrong)?, version })
    }

    /// `answer` for whoever asked so: a look says its version to who knows of versions.
    #[must_use]
    pub fn answered(&self, answer: Answer) -> Answer {
        match answer {
            Answer::Migration(look) => {
                Answer::Migration(MigrationLook { version: self.version, ..look })
            }
            answer => answer,
        }
    }
}

/// The version that was `named`, or that it is not spoken here.
fn spoken(named: &Value) -> Result<u64, String> {
    let known = named.as_u64().filter(|version| VERSIONS.contains(version));
    known.ok_or_else(|| {
        let all = VERSIONS.map(|version| version.to_string()).join(", ");
        format!(
            "version {named} is not spoken here: name one of {all}, or none (this is godwit {})",
            env!("CARGO_PKG_VERSION")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_may_be_named_with_any_request_and_changes_none() {
        for line in [
            r#"{"command":"progress""#,
            r#"{"command":"watch""#,
            r#"{"command":"set","settings":[["throttle","off"]]"#,
            r#"{"command":"switch-over","force":true"#,
            r#"{"command":"receive","listen":"[::1]:0","wait_ms":null"#,
        ] {
            let without = Asked::read(format!("{line}}}\n").as_bytes()).unwrap();
            assert_eq!(without.version, None, "{line}");
            let with = Asked::read(format!("{line},\"version\":1}}\n").as_bytes()).unwrap();
            assert_eq!(with, Asked { version: Some(1), ..without }, "{line}");
        }
    }

    #[test]
    fn a_version_that_is_not_spoken_is_refused_with_those_that_are() {
        for (named, shown) in [("2", "2"), ("0", "0"), ("\"1\"", "\"1\""), ("null", "null")] {
            let line = format!("{{\"command\":\"cancel\",\"version\":{named}}}");
            let why = Asked::read(line.as_bytes()).unwrap_err();
            let words = format!("version {shown} is not spoken here: name one of 1, or none");
            assert!(why.starts_with(&words), "{why}");
        }
        // Of two faults the version is told: whatever else it asks may be known there.
        let why = Asked::read(br#"{"command":"explode","version":7}"#).unwrap_err();
        assert!(why.contains("version 7"), "{why}");
        for line in ["", "[1]", "{}", r#"{"command":"explode"}"#, r#"{"version":1}"#] {
            let why = Asked::read(line.as_bytes()).unwrap_err();
            assert!(why.starts_with("not understood: "), "{line}: {why}");
        }
    }

    #[test]
    fn a_look_says_its_version_only_to_who_named_one() {
        let look =
            MigrationLook { version: None, vm: None, to: None, progress: None, settings: vec![] };
        let line = |version| {
            let asked = Asked { request: Request::Progress, version };
            serde_json::to_string(&asked.answered(Answer::Migration(look.clone()))).unwrap()
        };
        assert!(!line(None).contains("version"), "{}", line(None));
        assert!(line(Some(1)).contains("\"version\":1"), "{}", line(Some(1)));
    }
}

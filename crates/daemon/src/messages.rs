//! The lines that go between a `godwitd` and who asks it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the requests and answers here. Another one is refused.
pub const VERSION: u32 = 1;
/// Where a `godwitd` listens if nobody says otherwise.
pub const PORT: u16 = 7790;
/// The longest request: a name, a number and an id.
pub const LONGEST_REQUEST: usize = 16 << 10;
/// The longest answer: a list of what a host has.
pub const LONGEST_ANSWER: usize = 8 << 20;

/// A guest that is to be taken in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guest {
    /// What it is called.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// The model of processor that it needs; none: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
}

/// All that may be asked. There is no request with a command, a path or an option in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// What room the host has.
    Room {},
    /// What runs there, and what was.
    List {},
    /// Take `vm` in. Asked once more with the same `id`, it is the same destination.
    Receive {
        /// What who asks calls it: 1 to 64 letters, digits, `-`, `_` and `.`.
        id: String,
        /// Who comes.
        vm: Guest,
        /// By which of the host's ways; none: the only one, or the one named `default`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        way: Option<String>,
    },
    /// What the destination `id` says, from its line number `from` on.
    Follow {
        /// Which.
        id: String,
        /// How many of its lines are known.
        #[serde(default)]
        from: usize,
    },
    /// End the destination `id`, as Ctrl-C does: a guest that is arriving stays at its source.
    Stop {
        /// Which.
        id: String,
    },
}

impl Request {
    /// The request as a line, without its end.
    ///
    /// ```
    /// use godwit_daemon::messages::Request;
    ///
    /// let line = Request::Room {}.line();
    /// assert_eq!(line, r#"{"command":"room","version":1}"#);
    /// assert_eq!(Request::parse(line.as_bytes()), Ok(Request::Room {}));
    /// ```
    #[must_use]
    pub fn line(&self) -> String {
        // Of our own types: it cannot fail.
        let mut value = serde_json::to_value(self).unwrap_or_default();
        value["version"] = VERSION.into();
        value.to_string()
    }

    /// The request that `line` is.
    ///
    /// # Errors
    /// Why it is none, in one line.
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        let mut value: Value =
            serde_json::from_slice(line).map_err(|error| format!("this is no JSON: {error}"))?;
        let Some(fields) = value.as_object_mut() else {
            return Err("a request is a JSON object".to_owned());
        };
        match fields.remove("version") {
            Some(version) if version == VERSION => {}
            Some(version) => {
                return Err(format!(
                    "version {version} is not spoken here, but version {VERSION}: godwit {} or one \
                     that speaks it is needed on both hosts",
                    env!("CARGO_PKG_VERSION")
                ));
            }
            None => return Err(format!("a request says its version: \"version\":{VERSION}")),
        }
        serde_json::from_value(value).map_err(|error| format!("this is no request: {error}"))
    }

    /// In a word, for counting.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Room {} => "room",
            Self::List {} => "list",
            Self::Receive { .. } => "receive",
            Self::Follow { .. } => "follow",
            Self::Stop { .. } => "stop",
        }
    }
}

/// What room a host has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Room {
    /// What the host calls itself.
    pub host: String,
    /// The release of its godwitd.
    pub godwit: String,
    /// All its memory.
    pub memory_bytes: u64,
    /// What of it could be used now.
    pub available_bytes: u64,
    /// What is kept for the host itself.
    pub reserve_bytes: u64,
    /// What guests have been promised that godwitd took in, and do not use yet.
    pub promised_bytes: u64,
    /// What is left for guests.
    pub room_bytes: u64,
    /// Its processor, as the kernel calls it.
    pub processor: String,
    /// How many processors there are.
    pub processors: u32,
    /// Processes that want to run, in the mean over a minute (proc_loadavg(5)).
    pub load: f64,
    /// Models of processors that it can be for a guest; none: nobody has said.
    pub cpus: Vec<String>,
    /// The most guests that it takes in at once, now.
    pub at_once: u32,
    /// How many it waits for or takes in.
    pub arriving: u32,
    /// The names of its ways to take guests in.
    pub ways: Vec<String>,
}

/// How far a destination is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It waits for its source.
    Waiting,
    /// A source has come.
    Arriving,
    /// The guest is here.
    Here,
    /// It is not, and was not: the guest stayed at its source.
    Failed,
    /// Nobody knows who has the guest: `godwit recover` does.
    InDoubt,
    /// It ended without a last word.
    Killed,
}

impl State {
    /// In a word.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Arriving => "arriving",
            Self::Here => "here",
            Self::Failed => "failed",
            Self::InDoubt => "in-doubt",
            Self::Killed => "killed",
        }
    }
}

/// A destination that a godwitd started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Destination {
    /// What who asked for it called it.
    pub id: String,
    /// The guest.
    pub vm: Guest,
    /// By which way.
    pub way: String,
    /// Who asked.
    pub peer: String,
    /// Milliseconds since 1970 when that was.
    pub began_ms: u64,
    /// How far it is.
    pub state: State,
    /// Where it listens, or did.
    #[serde(default)]
    pub address: Option<String>,
    /// Why it failed.
    #[serde(default)]
    pub error: Option<String>,
    /// The monitor of the QEMU that was started for it.
    #[serde(default)]
    pub monitor: Option<String>,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// It is done.
    Done,
    /// It is not done.
    Refused {
        /// Why, and the cure.
        error: String,
    },
    /// What room there is.
    Room(Room),
    /// What runs and what was.
    List {
        /// What room there is.
        room: Room,
        /// Destinations, the newest first.
        destinations: Vec<Destination>,
        /// What `godwit list --json` says: the VMs of the host.
        vms: Value,
        /// What `godwit status --json` says: the migrations from this host that run.
        running: Value,
        /// The names of the records of migrations from this host, the newest first.
        records: Vec<String>,
    },
    /// A destination has been started, or was before; what it says follows.
    Taken {
        /// Which.
        id: String,
        /// The host's name in the addresses at which guests are taken in; none: that by which it
        /// was reached.
        host: Option<String>,
    },
    /// A line of the destination.
    Said {
        /// Its number, from 1.
        n: usize,
        /// What `godwit receive --json` has printed.
        line: Value,
    },
    /// The process of the destination has ended, and this was all.
    Ended {
        /// What it complained of last, if it was not to take the guest in.
        error: Option<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_what_it_says_and_nothing_else() {
        let vm = Guest { name: "web01".to_owned(), memory_bytes: 4 << 30, cpu: None };
        for request in [
            Request::Room {},
            Request::List {},
            Request::Receive { id: "a".to_owned(), vm, way: Some("libvirt".to_owned()) },
            Request::Follow { id: "a".to_owned(), from: 3 },
            Request::Stop { id: "a".to_owned() },
        ] {
            assert_eq!(Request::parse(request.line().as_bytes()), Ok(request));
        }
        let receive =
            |vm: &str| format!(r#"{{"version":1,"command":"receive","id":"a","vm":{vm}}}"#);
        let more = receive(r#"{"name":"a","memory_bytes":1,"argv":[]}"#);
        let less = receive(r#"{"name":"a","memory_bytes":-1}"#);
        for (line, words) in [
            ("", "no JSON"),
            ("[1]", "a JSON object"),
            (r#"{"command":"room"}"#, r#"says its version: "version":1"#),
            (r#"{"version":2,"command":"room"}"#, "version 2 is not spoken here, but version 1"),
            (r#"{"version":"1","command":"room"}"#, "is not spoken here"),
            (r#"{"version":1}"#, "missing field `command`"),
            (r#"{"version":1,"command":"run"}"#, "unknown variant `run`"),
            (r#"{"version":1,"command":"room","hurry":1}"#, "unknown field `hurry`"),
            (r#"{"version":1,"command":"stop"}"#, "missing field `id`"),
            (more.as_str(), "unknown field `argv`"),
            (less.as_str(), "invalid value"),
        ] {
            let why = Request::parse(line.as_bytes()).unwrap_err();
            assert!(why.contains(words) && !why.contains('\n'), "{line}: {why}");
        }
    }

    #[test]
    fn the_page_has_each_request_and_each_answer() {
        let page = include_str!("../../../docs/godwitd.md");
        for word in ["room", "list", "receive", "follow", "stop"] {
            assert!(page.contains(&format!("| `{word}` |")), "no request {word}");
        }
        for word in ["done", "refused", "room", "list", "taken", "said", "ended"] {
            assert!(page.contains(&format!("`{word}`")), "no answer {word}");
        }
        assert!(page.contains(&format!("\"version\":{VERSION}")));
    }
}

//! A monitor that answers by itself, as a QEMU with such devices would: most of them the host of a
//! test has not got.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Event, Handle, Monitor, Patience, QmpError, Queued, Seen, Version};

/// An answer with this name in it is a refusal, in the words that it stands for.
pub(crate) const REFUSED: &str = "refused";

/// Gives the answers that it was told, by command, command line, path or path and property, and
/// empty ones else.
#[derive(Debug, Default)]
pub(crate) struct StandIn {
    answers: HashMap<String, Value>,
    /// Answers of which each is given once, before the others.
    in_turn: HashMap<String, VecDeque<Value>>,
    version: Option<Version>,
    queued: VecDeque<Value>,
    patience: Patience,
    /// What it was told to do, and with what.
    pub(crate) told: Arc<Mutex<Vec<(String, Value)>>>,
}

impl StandIn {
    pub(crate) fn new(answers: &[(&str, Value)]) -> Self {
        let answers = answers.iter().map(|(what, answer)| ((*what).to_owned(), answer.clone()));
        Self { answers: answers.collect(), ..Self::default() }
    }

    /// The same, which answers `command` by these in their order, before anything else.
    pub(crate) fn in_turn(mut self, command: &str, answers: Vec<Value>) -> Self {
        self.in_turn.insert(command.to_owned(), answers.into());
        self
    }

    /// The same of another version.
    pub(crate) fn of_version(mut self, version: Version) -> Self {
        self.version = Some(version);
        self
    }

    /// What a QEMU without anything answers.
    fn nothing(command: &str) -> Value {
        match command {
            "query-status" => json!({ "status": "running" }),
            "query-kvm" => json!({ "enabled": false }),
            "query-memory-size-summary" => json!({ "base-memory": 0 }),
            "human-monitor-command" => json!(""),
            list if list.starts_with("query-") && list != "query-migrate" => json!([]),
            "qom-list" => json!([]),
            _ => json!({}),
        }
    }
}

impl Monitor for StandIn {
    fn version(&self) -> Version {
        self.version.unwrap_or((10, 0, 2))
    }

    fn peer_pid(&self) -> Result<rustix::process::Pid, QmpError> {
        Ok(rustix::process::getpid())
    }

    fn handle(&self) -> io::Result<Handle> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn patience(&self) -> &Patience {
        &self.patience
    }

    fn patience_mut(&mut self) -> &mut Patience {
        &mut self.patience
    }

    fn queue(
        &mut self,
        command: &str,
        arguments: Value,
        _fd: Option<BorrowedFd<'_>>,
    ) -> Result<Queued, QmpError> {
        let more = [&arguments["command-line"], &arguments["path"]];
        let what = more.into_iter().find_map(Value::as_str).unwrap_or(command);
        let property = arguments["property"].as_str().map(|name| format!("{what} {name}"));
        let answer = property.and_then(|property| self.answers.get(&property));
        let answer = answer.or_else(|| self.answers.get(what)).cloned();
        let next = self.in_turn.get_mut(command).and_then(VecDeque::pop_front);
        let answer = next.or(answer);
        self.queued.push_back(answer.unwrap_or_else(|| Self::nothing(command)));
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.push((command.to_owned(), arguments));
        drop(told);
        Ok(Queued { id: 0, command: command.to_owned() })
    }

    fn answer(&mut self, queued: &Queued, _limit: Duration) -> Result<Value, QmpError> {
        let command = queued.command.clone();
        let Some(answer) = self.queued.pop_front() else {
            return Err(QmpError::Closed { during: command });
        };
        match answer[REFUSED].as_str().map(str::to_owned) {
            Some(description) => {
                Err(QmpError::Refused { command, class: "GenericError".to_owned(), description })
            }
            None => Ok(answer),
        }
    }

    fn take_events(&mut self) -> Result<Vec<Event>, QmpError> {
        Ok(Vec::new())
    }

    fn watch(
        &mut self,
        what: &str,
        limit: Duration,
        _look: &mut dyn FnMut(&Event) -> Seen,
    ) -> Result<Event, QmpError> {
        Err(QmpError::Timeout { during: what.to_owned(), limit })
    }
}

//! A migration or an upgrade as others see it: the socket at which it can be asked and steered
//! while it is under way, those who watch it, and the record that is kept of it.
//!
//! Invariant: it waits for none of them, and nothing is kept of one that was refused, or that was
//! only to be shown.

use clap::Args;
use godwit_control::messages::{Answer, Request};
use godwit_control::steer::Socket;
use godwit_control::watch::{LAST_WORDS, Watched};
use godwit_engine::report::Progress;
use godwit_report::{Record, Recorder, Side};
use serde_json::Value;

use crate::otlp::{self, Collector};
use crate::records::{self, on_off};
use crate::say;
use crate::steer::{self, Engine, Host};

/// How it is found, and what is kept of it.
#[derive(Debug, Args)]
pub(crate) struct UnderWayArguments {
    /// The name under which `godwit status`, `set`, `switchover` and `cancel` find it [default: the
    /// process id]
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Option<String>,

    /// Keep a record of it, which `godwit report` shows: in $XDG_STATE_HOME/godwit/records, or
    /// ~/.local/state/godwit/records; of root /var/lib/godwit/records
    #[arg(long = "record", value_name = "on|off", default_value = "on")]
    #[arg(action = clap::ArgAction::Set, value_parser = on_off)]
    keeps_record: bool,

    /// When it is over, tell the OpenTelemetry collector there what it was made of (OTLP over
    /// HTTP): spans of its rounds, outages and the parts of its downtime. With TRACEPARENT in the
    /// environment they belong to that trace
    #[arg(long, value_name = "URL")]
    otlp: Option<Collector>,
}

/// A name that makes a file name.
fn name(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if (1..=64).contains(&text.len()) && text.chars().all(fits) && !text.starts_with('.') {
        Ok(text.to_owned())
    } else {
        Err("use 1 to 64 letters, digits, '-', '_' and '.', and no '.' in front".to_owned())
    }
}

/// One that is under way.
pub(crate) struct UnderWay {
    host: Host,
    socket: Option<Socket>,
    recording: Option<Recording>,
}

impl UnderWay {
    /// Begins, for the VM and the destination as they are named, and the engine that moves the
    /// guest.
    ///
    /// # Errors
    /// When the name that it was given cannot be had. Without one it goes on, and says so.
    pub(crate) fn begin(
        arguments: &UnderWayArguments,
        (vm, to): (String, String),
        engine: Engine,
    ) -> Result<Self, String> {
        let recording = Recording::begin(arguments, &vm, &to);
        let host = Host { vm, to, engine, watched: Watched::default() };
        let name = arguments.name.clone().unwrap_or_else(|| std::process::id().to_string());
        let socket = match steer::serve(&name, host.clone()) {
            Ok(socket) => Some(socket),
            Err(error) if arguments.name.is_some() => {
                return Err(format!("--name {name}: {error}"));
            }
            Err(error) => {
                eprintln!("godwit: this cannot be asked or changed while it runs: {error}");
                None
            }
        };
        Ok(Self { host, socket, recording })
    }

    /// Another look at it.
    pub(crate) fn see(&mut self, progress: &Progress) {
        if let Some(recording) = &mut self.recording {
            recording.recorder.see(progress);
        }
        self.host.watched.see(progress);
    }

    /// Does what `request` wants of it.
    pub(crate) fn answer(&self, request: &Request) -> Answer {
        self.host.answer(request)
    }

    /// It is over, as the line `last` says: nobody is let in any more, those who watch are told,
    /// and what is to be kept is.
    pub(crate) fn end(&mut self, last: &Value) {
        drop(self.socket.take());
        self.host.watched.end(last.clone());
        let has_begun = !matches!(last["outcome"].as_str(), Some("refused" | "shown"));
        if let Some(recording) = self.recording.take().filter(|_| has_begun) {
            recording.end(last);
        }
    }

    /// Waits, not for long, until those who watch were told the end.
    pub(crate) fn settle(&self) {
        self.host.watched.settle(LAST_WORDS);
    }
}

/// A record in the making.
struct Recording {
    recorder: Recorder,
    vm: String,
    began_ms: u64,
    is_kept: bool,
    collector: Option<Collector>,
}

impl Recording {
    /// None where nobody wants one.
    fn begin(arguments: &UnderWayArguments, vm: &str, to: &str) -> Option<Self> {
        let (is_kept, collector) = (arguments.keeps_record, arguments.otlp.clone());
        if !is_kept && collector.is_none() {
            return None;
        }
        let vm = arguments.name.clone().unwrap_or_else(|| vm.to_owned());
        let head = records::head(vm.clone(), to.to_owned());
        let began_ms = head.began_ms.unwrap_or_default();
        Some(Self { recorder: Recorder::new(head), vm, began_ms, is_kept, collector })
    }

    /// What cannot be kept, or told to a collector, is said, and is no failure.
    fn end(&self, last: &Value) {
        let lines = self.recorder.lines(last);
        if self.is_kept {
            records::keep(Side::Source, &self.vm, self.began_ms, &lines);
        }
        if let Some(collector) = &self.collector {
            let told = Record::read(lines.as_bytes()).map_err(anyhow::Error::from);
            if let Err(error) = told.and_then(|record| otlp::send(&record, collector)) {
                eprintln!("godwit: {}", say::line(format!("{error:#}")));
            }
        }
    }
}

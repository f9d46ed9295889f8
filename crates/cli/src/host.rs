//! `godwit host`: ask the godwitd of this host or another one.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use godwit_daemon::client::{Client, HostAddress, HostError};
use godwit_daemon::messages::{Answer, Destination, Guest, Request, Room};
use godwit_engine::security::SecurityWish;
use godwit_qemu::run_directory;
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::layout::{self, Column};
use crate::output::{self, json_line};
use crate::process::{self, CANCELLED, FAILED};
use crate::say;
use crate::security::default_keys;

/// Of the list of what was, for people.
const SHOWN: usize = 10;

/// Ask the godwitd of a host: its room, VMs, destinations.
///
/// HOST is godwitd://NAME, with :PORT and /WAY as needed, or unix:PATH; without one it is the
/// godwitd of this host. Other hosts are asked over TLS, with this host's keys: docs/godwitd.md.
/// Exit codes: 0; 1 it was refused, or nobody answers; 130 cancelled.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// What room it has for guests.
    Room(Asked),
    /// VMs and destinations there, migrations that run, records of others.
    List(Asked),
    /// Have it take a guest in, and tell where `godwit migrate` is to move it.
    Receive(Receive),
    /// End a destination: a guest that is arriving stays at its source.
    Stop(Stop),
}

/// Whom to ask, and how.
#[derive(Debug, Args)]
pub(crate) struct Asked {
    /// The host [default: this one]
    #[arg(value_name = "HOST")]
    host: Option<HostAddress>,

    #[command(flatten)]
    how: How,
}

#[derive(Debug, Args)]
struct How {
    /// This host's keys [default, beyond this host: $GODWIT_KEYS or /etc/godwit/keys]
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,

    /// The name that the host must prove by its certificate [default: that in HOST]
    #[arg(long, value_name = "NAME")]
    peer: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A guest to take in.
#[derive(Debug, Args)]
pub(crate) struct Receive {
    #[command(flatten)]
    asked: Asked,

    /// What the guest is called
    #[arg(long, value_name = "NAME")]
    name: String,

    /// Its memory
    #[arg(long, value_name = "SIZE")]
    memory: ByteCount,

    /// The model of processor that it needs
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,
}

/// A destination to end.
#[derive(Debug, Args)]
pub(crate) struct Stop {
    /// Which, as `godwit host list` shows it
    id: String,

    #[command(flatten)]
    asked: Asked,
}

/// One that asks `host`, with keys from `keys` if that is somewhere.
pub(crate) fn client(host: HostAddress, keys: Option<PathBuf>, peer: Option<String>) -> Client {
    let absolute = |dir: PathBuf| std::path::absolute(&dir).unwrap_or(dir);
    let wish = SecurityWish {
        keys: keys.map(absolute),
        default_keys: default_keys(),
        peers: peer.into_iter().collect(),
        insecure: false,
    };
    Client::new(host, wish)
}

impl Asked {
    fn client(&self) -> Result<Client, String> {
        let usual = || format!("unix:{}", run_directory::path().join("godwitd").display()).parse();
        let host = self.host.clone().map_or_else(usual, Ok)?;
        Ok(client(host, self.how.keys.clone(), self.how.peer.clone()))
    }

    fn ask(&self, request: &Request) -> Result<Answer, String> {
        self.client()?.ask(request).map_err(|error| error.to_string())
    }
}

/// Runs the command.
pub(crate) fn run(command: &Command) -> ExitCode {
    let (done, json) = match command {
        Command::Room(asked) => (look(asked, &Request::Room {}), asked.how.json),
        Command::List(asked) => (look(asked, &Request::List {}), asked.how.json),
        Command::Stop(stop) => {
            let request = Request::Stop { id: stop.id.clone() };
            (look(&stop.asked, &request), stop.asked.how.json)
        }
        Command::Receive(receive) => (receive.run(), receive.asked.how.json),
    };
    done.unwrap_or_else(|why| {
        output::refusal(&why, json);
        ExitCode::from(FAILED)
    })
}

fn look(asked: &Asked, request: &Request) -> Result<ExitCode, String> {
    let answer = asked.ask(request)?;
    if asked.how.json {
        json_line(&serde_json::to_value(&answer).unwrap_or_default());
        return Ok(ExitCode::SUCCESS);
    }
    let width = layout::width(&std::io::stdout());
    match answer {
        Answer::Room(room) => print!("{}", room_text(&room, width)),
        Answer::List { room, destinations, vms, running, records } => {
            print!("{}", room_text(&room, width));
            print!("{}", vms_text(&vms, width));
            print!("{}", destinations_text(&destinations, width));
            print!("{}", running_text(&running));
            print!("{}", records_text(&records));
        }
        Answer::Done => println!("it ends"),
        _ => return Err("it answers something else".to_owned()),
    }
    Ok(ExitCode::SUCCESS)
}

impl Receive {
    fn run(&self) -> Result<ExitCode, String> {
        let client = self.asked.client()?;
        let cancel = process::cancel_on_signals();
        let json = self.asked.how.json;
        let vm =
            Guest { name: self.name.clone(), memory_bytes: self.memory.0, cpu: self.cpu.clone() };
        let id = format!("{}-{:012x}", self.name, fastrand::u64(..) >> 16);
        let mut told = |line: &Value| match line["event"].as_str() {
            _ if json => json_line(line),
            Some("listening") => {
                let at = line["address"].as_str().unwrap_or_default();
                eprintln!("listening on {} (destination {id})", say::line(at));
            }
            Some("accepted") => eprintln!("a source has connected"),
            _ => {}
        };
        let ended = match client.receive(&id, &vm, &cancel, &mut told) {
            Ok(ended) => ended,
            Err(error @ HostError::Refused { .. }) => return Err(error.to_string()),
            Err(error) => {
                return Err(format!("{error}; godwit host list tells of destination {id}"));
            }
        };
        let outcome = ended.outcome.as_ref().and_then(|line| line["outcome"].as_str());
        if let Some(outcome @ ("running" | "paused")) = outcome {
            if !json {
                println!("the guest is there, {outcome}");
            }
            return Ok(ExitCode::SUCCESS);
        }
        if cancel.is_cancelled() {
            return Ok(ExitCode::from(CANCELLED));
        }
        let why = ended.error.unwrap_or_else(|| "it ended without a word".to_owned());
        eprintln!("godwit: {}", say::line(&why));
        if outcome.is_none() && json {
            json_line(&json!({ "outcome": "failed", "error": why }));
        }
        Ok(ExitCode::from(FAILED))
    }
}

fn room_text(room: &Room, width: usize) -> String {
    let size = |bytes: u64| ByteCount(bytes).to_string();
    let cpus = match &room.cpus[..] {
        [] => String::new(),
        cpus => format!("; for guests it is {}", cpus.join(", ")),
    };
    let lines = [
        (
            "room",
            format!(
                "{} for guests: of {} there are {} available, {} kept for the host and {} promised \
                 to guests that do not use it yet",
                size(room.room_bytes),
                size(room.memory_bytes),
                size(room.available_bytes),
                size(room.reserve_bytes),
                size(room.promised_bytes),
            ),
        ),
        (
            "processors",
            format!("{} of {}, load {:.2}{cpus}", room.processors, room.processor, room.load),
        ),
        ("guests at once", format!("{}, of which {} arrive", room.at_once, room.arriving)),
        (
            "ways",
            match &room.ways[..] {
                [] => "none: it takes no guest in".to_owned(),
                ways => ways.join(", "),
            },
        ),
    ];
    let mut text = format!("{}: godwitd {}\n", say::line(&room.host), say::line(&room.godwit));
    for (label, words) in lines {
        text += &layout::wrap(&format!("  {label:<16}"), &say::line(words), 18, width);
        text.push('\n');
    }
    text
}

fn vms_text(vms: &Value, width: usize) -> String {
    let Some(vms) = vms["vms"].as_array() else {
        return "\nVMs: its godwit list did not answer\n".to_owned();
    };
    let columns = [
        Column::number("pid", 1),
        Column::words("VM", 0),
        Column::words("state", 2),
        Column::number("RAM", 3),
        Column::words("moves", 0),
    ];
    let word = |value: &Value| value.as_str().map_or_else(|| "-".to_owned(), say::line);
    let row = |vm: &Value| {
        let name = if vm["name"].is_string() { &vm["name"] } else { &vm["vm"] };
        let ram = vm["ram_bytes"].as_u64().map(|bytes| ByteCount(bytes).to_string());
        let moves = match vm["moves"].as_bool() {
            Some(true) => "yes",
            Some(false) => "no",
            None => "?",
        };
        let ram = ram.unwrap_or_else(|| "-".to_owned());
        vec![vm["pid"].to_string(), word(name), word(&vm["state"]), ram, moves.to_owned()]
    };
    if vms.is_empty() {
        return "\nno VM runs there\n".to_owned();
    }
    let rows: Vec<Vec<String>> = vms.iter().map(row).collect();
    format!("\n{}", layout::table(&columns, &rows, 0, width))
}

fn destinations_text(all: &[Destination], width: usize) -> String {
    if all.is_empty() {
        return "\nno destination was started there\n".to_owned();
    }
    let columns = [
        Column::words("destination", 0),
        Column::words("VM", 2),
        Column::number("memory", 3),
        Column::words("way", 4),
        Column::words("for", 5),
        Column::words("state", 0),
        Column::words("at", 6),
    ];
    let row = |one: &Destination| {
        vec![
            say::line(&one.id),
            say::line(&one.vm.name),
            ByteCount(one.vm.memory_bytes).to_string(),
            say::line(&one.way),
            say::line(&one.peer),
            one.state.word().to_owned(),
            one.address.as_deref().map_or_else(|| "-".to_owned(), say::line),
        ]
    };
    let rows: Vec<Vec<String>> = all.iter().take(SHOWN).map(row).collect();
    let mut text = format!("\n{}", layout::table(&columns, &rows, 0, width));
    for one in all.iter().take(SHOWN) {
        if let Some(why) = &one.error {
            text += &layout::wrap(&format!("{}: ", say::line(&one.id)), &say::line(why), 4, width);
            text.push('\n');
        }
    }
    if all.len() > SHOWN {
        text += &format!("and {} older ones: --json has all\n", all.len() - SHOWN);
    }
    text
}

fn running_text(running: &Value) -> String {
    let all = running["migrations"].as_array().map(Vec::as_slice).unwrap_or_default();
    let word = |value: &Value| say::line(value.as_str().unwrap_or("?"));
    let row = |one: &Value| {
        let (name, vm, to) = (word(&one["migration"]), word(&one["vm"]), word(&one["to"]));
        format!("migration {name} runs: {vm} to {to}\n")
    };
    match all {
        [] => "\nno migration from there runs\n".to_owned(),
        all => format!("\n{}", all.iter().map(row).collect::<String>()),
    }
}

fn records_text(records: &[String]) -> String {
    match records {
        [] => "no record of an earlier one\n".to_owned(),
        records => {
            let newest: Vec<String> = records.iter().take(SHOWN).map(say::line).collect();
            format!("{} records, the newest: {}\n", records.len(), newest.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_daemon::messages::State;

    use super::*;

    #[test]
    fn what_a_host_tells_fits_80_columns() {
        let room = Room {
            host: "east.example".to_owned(),
            processor: "AMD EPYC 7763 64-Core Processor".to_owned(),
            cpus: vec!["EPYC-Milan".to_owned(), "EPYC-Rome".to_owned(), "EPYC".to_owned()],
            room_bytes: 200 << 30,
            memory_bytes: 512 << 30,
            ..Room::default()
        };
        let one = Destination {
            id: "web01-0123456789ab".to_owned(),
            vm: Guest { name: "web01".to_owned(), memory_bytes: 4 << 30, cpu: None },
            way: "libvirt".to_owned(),
            peer: "192.0.2.9:51234".to_owned(),
            began_ms: 1,
            state: State::Failed,
            address: Some("192.0.2.7:41234".to_owned()),
            error: Some("the source\nsaid no".to_owned()),
            monitor: None,
        };
        let vms = json!({ "vms": [{ "pid": 1, "vm": "qemu:/run/a", "moves": null }] });
        let text = [
            room_text(&room, 80),
            destinations_text(&vec![one; SHOWN + 1], 80),
            vms_text(&vms, 80),
        ];
        let text = text.concat();
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(80), "{text}");
        for words in ["200GiB for guests", "EPYC-Rome", "failed", "and 1 older", "qemu:/run/a"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(text.contains("the source\\u000asaid no"), "{text}");
    }
}

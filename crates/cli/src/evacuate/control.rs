//! The control socket of an evacuation: a line that asks, a line of JSON that answers. Here are
//! both ends, whoever runs the evacuation and whoever steers it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver as Requests, Sender, channel};
use std::time::Duration;

use anyhow::{Context, bail};
use godwit_qemu::run_directory;
use serde_json::Value;

use super::live::{self, Moving};
use super::{Arguments, directory, tell};
use crate::layout;
use crate::output::json_line;

const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Requests are a word or two.
const LONGEST_REQUEST: u64 = 1024;

/// A request, and where its answer goes.
pub(super) type Asked = (String, Sender<Value>);

/// Listens at `path` for those who steer this evacuation.
pub(super) fn serve(
    path: &Path,
) -> anyhow::Result<(godwit_control::steer::Socket, Requests<Asked>)> {
    let (listener, socket) = godwit_control::steer::bind(path)?;
    let (sender, requests) = channel();
    let serving = std::thread::Builder::new().name("control".to_owned());
    serving.spawn(move || listen(&listener, &sender)).context("no thread can be had")?;
    Ok((socket, requests))
}

/// The same where another coordinator of this evacuation, which has lost its lease and may have
/// been stopped, might still listen: from now on this one is found there.
pub(super) fn serve_beside(
    path: &Path,
) -> anyhow::Result<(godwit_control::steer::Socket, Requests<Asked>)> {
    let own = path.with_extension(std::process::id().to_string());
    let served = serve(&own)?;
    std::fs::rename(&own, path).with_context(|| path.display().to_string())?;
    Ok(served)
}

fn listen(listener: &UnixListener, sender: &Sender<Asked>) {
    for stream in listener.incoming().flatten() {
        let _ = stream.set_read_timeout(Some(REQUEST_LIMIT));
        let mut line = String::new();
        if BufReader::new((&stream).take(LONGEST_REQUEST)).read_line(&mut line).is_err() {
            continue;
        }
        let (answer, answered) = channel();
        if sender.send((line.trim().to_owned(), answer)).is_err() {
            return;
        }
        if let Ok(answer) = answered.recv_timeout(REQUEST_LIMIT) {
            let _ = writeln!(&stream, "{answer}");
        }
    }
}

/// Tells the evacuation that runs what to do.
pub(super) fn steer(arguments: &Arguments, request: &str) -> anyhow::Result<ExitCode> {
    let answer = ask(&directory(arguments)?.join("control"), &arguments.name, request)?;
    if arguments.json {
        json_line(&answer);
        return Ok(ExitCode::SUCCESS);
    }
    println!("{}{}", tell::asked(request, &answer), tell::counts(&answer));
    if request == "status" {
        println!("the budget is {}", tell::budget(&answer));
        // Moves of another host are asked there.
        if let Some(host) = answer["host"].as_str() {
            println!("the host is {}", crate::say::line(host));
            return Ok(ExitCode::SUCCESS);
        }
        let width = layout::width(&std::io::stdout());
        let moving = Moving::all(&arguments.name, &answer);
        print!("{}", live::table(&moving, &live::look(&moving), width));
    }
    Ok(ExitCode::SUCCESS)
}

/// The evacuations of this user that run, each with what it says of itself.
pub(crate) fn that_run() -> Vec<(String, Value)> {
    let entries = std::fs::read_dir(run_directory::path()).into_iter().flatten().flatten();
    let ask = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_suffix(".evacuation")?.to_owned();
        let place = std::fs::read_to_string(&path).ok()?;
        let answer = ask(&Path::new(place.trim()).join("control"), &name, "status").ok()?;
        Some((name, answer))
    };
    entries.filter_map(|entry| ask(entry.path())).collect()
}

fn ask(path: &Path, name: &str, request: &str) -> anyhow::Result<Value> {
    let mut stream = UnixStream::connect(path)
        .with_context(|| format!("no evacuation '{name}' runs ({}): see --name", path.display()))?;
    stream.set_read_timeout(Some(REQUEST_LIMIT * 2))?;
    writeln!(stream, "{request}")?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).context("the evacuation does not answer")?;
    let answer: Value = serde_json::from_str(&line).context("the evacuation does not answer")?;
    match answer["error"].as_str() {
        Some(why) => bail!("it was refused: {why}"),
        None => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use godwit_evacuate::{Report, ReportedVm};

    use super::super::limits;
    use super::*;

    #[test]
    fn the_page_shows_what_is_answered() {
        // Mutation: a field gets another name.
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/control.md");
        let page = std::fs::read_to_string(page).unwrap();
        let shown = page.split("```evacuation\n").nth(1).unwrap().split("```").next().unwrap();
        let vm = ReportedVm {
            name: "web01".to_owned(),
            vm: "qemu:/run/web01.qmp".to_owned(),
            state: "moving",
            to: Some("east".to_owned()),
            attempts: 1,
            why: None,
            bytes_per_second: Some(5e7),
        };
        let report = Report {
            vms: vec![vm],
            moved: 0,
            stayed: 0,
            in_doubt: 1,
            budget_bytes_per_second: 1e8,
            at_once: 2,
        };
        let why = limits::asked("explode", (godwit_units::Rate::ZERO, 1)).unwrap_err();
        let written = [tell::as_json(&report), serde_json::json!({ "error": why })];
        let lines: Vec<Value> =
            shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines, written);
        let request = "set bandwidth=800Mbit at-once=8";
        assert!(
            page.contains(request) && limits::asked(request, (godwit_units::Rate::ZERO, 1)).is_ok()
        );
    }
}

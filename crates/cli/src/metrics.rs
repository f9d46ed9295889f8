//! `godwit metrics`: what Prometheus collects of a host, once or at each scrape.
//!
//! ```text
//!   families    the metrics, by their names, made of what was seen
//! ```
//!
//! Served over HTTP it answers each scrape with what is there then, and keeps nothing in between.

mod families;

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::Args;
use godwit_control::client;
use prometheus::{TEXT_FORMAT, TextEncoder};
use tiny_http::{Header, Method, Request, Response, Server};

use crate::evacuate;
use crate::output;
use crate::process::FAILED;
use crate::records::records;
use crate::steer;
use families::{Seen, families};

/// Print what Prometheus collects: how migrations made on this host have ended, their downtimes,
/// durations and bytes; and how far those are that run, and evacuations.
///
/// The text is Prometheus's (format 0.0.4): for the textfile collector of node_exporter, or served
/// over HTTP. docs/metrics.md has all names. Exit codes: 0; 1 what is kept cannot be read, or the
/// address not be listened at.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Serve them at http://ADDRESS/metrics until Ctrl-C; who reaches it reads the names of VMs
    #[arg(long, value_name = "ADDRESS", conflicts_with = "out")]
    listen: Option<SocketAddr>,

    /// Write them to this file, in one step, instead of printing them
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let done = match (&arguments.listen, &arguments.out) {
        (Some(address), _) => serve(*address),
        (None, Some(file)) => text().and_then(|text| {
            let written = write(file, &text);
            written.with_context(|| format!("{} cannot be written", file.display()))
        }),
        (None, None) => text().map(|text| print!("{text}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::refusal(&format!("{error:#}"), false);
            ExitCode::from(FAILED)
        }
    }
}

/// All metrics as they are now.
fn text() -> anyhow::Result<String> {
    let totals = match records() {
        Some(store) => store.totals().with_context(|| store.directory().display().to_string())?,
        // Without a home nothing is kept.
        None => Default::default(),
    };
    let found = steer::running();
    // One that ends just now is in the totals the next time.
    let look = |socket: &PathBuf| Some((steer::name_of(socket), client::migration(socket).ok()?));
    let seen = Seen {
        totals,
        running: found.sockets.iter().filter_map(look).collect(),
        closed: found.closed.len(),
        evacuations: evacuate::that_run(),
    };
    TextEncoder::new().encode_to_string(&families(&seen)).context("the metrics have no text")
}

/// Writes `text` so that no reader ever sees a part of it.
fn write(file: &Path, text: &str) -> std::io::Result<()> {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    // A collector reads what ends in .prom.
    name.push(format!(".new{}", std::process::id()));
    let beside = file.with_file_name(name);
    let written = std::fs::File::create(&beside)
        .and_then(|mut new| new.write_all(text.as_bytes()))
        .and_then(|()| std::fs::rename(&beside, file));
    written.inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

fn serve(address: SocketAddr) -> anyhow::Result<()> {
    let server = Server::http(address).map_err(|error| anyhow!("--listen {address}: {error}"))?;
    println!("metrics at http://{}/metrics", server.server_addr());
    for request in server.incoming_requests() {
        // Whoever has gone meanwhile misses nothing that the next scrape does not tell.
        let _ = answer(request);
    }
    Ok(())
}

fn answer(request: Request) -> std::io::Result<()> {
    let path = request.url().split('?').next().unwrap_or_default().to_owned();
    let (status, kind, body) = match (request.method(), path.as_str()) {
        (Method::Get | Method::Head, "/metrics") => match text() {
            Ok(text) => (200, TEXT_FORMAT, text),
            Err(error) => (500, PLAIN, format!("{error:#}\n")),
        },
        (Method::Get | Method::Head, "/") => {
            (200, PLAIN, "godwit's metrics are at /metrics\n".to_owned())
        }
        (Method::Get | Method::Head, _) => (404, PLAIN, "there is only /metrics\n".to_owned()),
        _ => (405, PLAIN, "metrics can only be read\n".to_owned()),
    };
    let kind = Header::from_bytes("Content-Type", kind);
    let response = Response::from_string(body).with_status_code(status);
    request.respond(kind.into_iter().fold(response, Response::with_header))
}

const PLAIN: &str = "text/plain; charset=utf-8";

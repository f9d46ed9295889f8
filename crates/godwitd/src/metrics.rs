//! What Prometheus collects: what `godwit metrics` tells of the host, and what godwitd itself
//! knows. docs/godwitd.md has a row for each of the latter, which a test compares.

use std::net::SocketAddr;

use anyhow::{Context, anyhow};
use godwit_daemon::messages::{Destination, Room, State};
use prometheus::{
    Encoder, Gauge, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry, TEXT_FORMAT,
    TextEncoder,
};
use tiny_http::{Header, Method, Request, Response, Server};

use crate::program::Program;

const STATES: [State; 6] =
    [State::Waiting, State::Arriving, State::Here, State::Failed, State::InDoubt, State::Killed];
const PLAIN: &str = "text/plain; charset=utf-8";

/// What is counted and measured.
#[derive(Debug)]
pub(crate) struct Counts {
    registry: Registry,
    requests: IntCounterVec,
    refused: IntCounter,
    destinations: IntGaugeVec,
    room: Gauge,
    promised: Gauge,
    load: Gauge,
}

impl Counts {
    /// Nothing so far.
    ///
    /// # Errors
    /// Never, but the library does not know.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let registry = Registry::new();
        let gauge = |name: &str, help: &str| -> anyhow::Result<Gauge> {
            let gauge = Gauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let room = gauge("godwit_host_room_bytes", "Memory that is left for guests.")?;
        let promised =
            gauge("godwit_host_promised_bytes", "Promised to guests that do not use it yet.")?;
        let load = gauge("godwit_host_load", "Processes that want to run, over a minute.")?;
        let requests = Opts::new("godwit_host_requests_total", "Requests, by how they ended.");
        let requests = IntCounterVec::new(requests, &["command", "outcome"])?;
        registry.register(Box::new(requests.clone()))?;
        let refused = IntCounter::new(
            "godwit_host_refused_connections_total",
            "Connections whose ends were not allowed to ask, or too many.",
        )?;
        registry.register(Box::new(refused.clone()))?;
        let destinations = Opts::new("godwit_host_destinations", "Destinations that are listed.");
        let destinations = IntGaugeVec::new(destinations, &["state"])?;
        registry.register(Box::new(destinations.clone()))?;
        Ok(Self { registry, requests, refused, destinations, room, promised, load })
    }

    /// A connection came to nothing.
    pub(crate) fn refused(&self) {
        self.refused.inc();
    }

    /// A request was answered.
    pub(crate) fn answered(&self, command: &str, done: bool) {
        let outcome = if done { "done" } else { "refused" };
        self.requests.with_label_values(&[command, outcome]).inc();
    }

    /// The text, as it is now.
    ///
    /// # Errors
    /// When `godwit metrics` fails.
    pub(crate) fn text(
        &self,
        room: &Room,
        all: &[Destination],
        program: &Program,
    ) -> anyhow::Result<String> {
        let mut text = program.text(&["metrics"]).context("godwit metrics does not answer")?;
        text += &self.own(room, all)?;
        Ok(text)
    }

    fn own(&self, room: &Room, all: &[Destination]) -> anyhow::Result<String> {
        self.room.set(room.room_bytes as f64);
        self.promised.set(room.promised_bytes as f64);
        self.load.set(room.load);
        for state in STATES {
            let count = all.iter().filter(|one| one.state == state).count();
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.destinations.with_label_values(&[state.word()]).set(count);
        }
        let mut own = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut own)?;
        Ok(String::from_utf8(own)?)
    }
}

/// Serves `text` at `address`; where that is, with the port that port 0 became.
///
/// # Errors
/// When it cannot be listened at.
pub(crate) fn serve(
    address: SocketAddr,
    text: impl Fn() -> anyhow::Result<String> + Send + 'static,
) -> anyhow::Result<String> {
    let server = Server::http(address).map_err(|error| anyhow!("metrics at {address}: {error}"))?;
    let at = server.server_addr().to_string();
    let serving = move || {
        for request in server.incoming_requests() {
            // Whoever has gone meanwhile misses nothing that the next scrape does not tell.
            let _ = answer(request, &text);
        }
    };
    let thread = std::thread::Builder::new().name("metrics".to_owned());
    thread.spawn(serving).context("no thread")?;
    Ok(at)
}

fn answer(request: Request, text: &dyn Fn() -> anyhow::Result<String>) -> std::io::Result<()> {
    let path = request.url().split('?').next().unwrap_or_default();
    let (status, kind, body) = match (request.method(), path) {
        (Method::Get | Method::Head, "/metrics") => match text() {
            Ok(text) => (200, TEXT_FORMAT, text),
            Err(error) => (500, PLAIN, format!("{error:#}\n")),
        },
        (Method::Get | Method::Head, _) => (404, PLAIN, "there is only /metrics\n".to_owned()),
        _ => (405, PLAIN, "metrics can only be read\n".to_owned()),
    };
    let kind = Header::from_bytes("Content-Type", kind);
    let response = Response::from_string(body).with_status_code(status);
    request.respond(kind.into_iter().fold(response, Response::with_header))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_metric_has_its_row_in_the_documentation() {
        let page = include_str!("../../../docs/godwitd.md");
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `godwit_host_"));
        let rows = rows.filter_map(|row| row.split('`').next());
        let documented: BTreeSet<String> = rows.map(|name| format!("godwit_host_{name}")).collect();
        let counts = Counts::new().unwrap();
        counts.answered("room", true);
        let text = counts.own(&Room::default(), &[]).unwrap();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let known: BTreeSet<String> =
            types.filter_map(|line| line.split(' ').next().map(str::to_owned)).collect();
        assert_eq!(known, documented);
        assert!(text.contains("godwit_host_requests_total{command=\"room\",outcome=\"done\"} 1"));
    }
}

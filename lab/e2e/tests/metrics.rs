//! `godwit metrics`: a real move is told of while it runs, and counted when it is over, in text
//! that Prometheus reads.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};
use godwit_e2e::{LIMIT, MicroPair};
use godwit_testbed::{Godwit, Movable};

/// A directory for the records of one test.
struct State(PathBuf);

impl State {
    fn new(name: &str) -> anyhow::Result<Self> {
        let name = format!("godwit-e2e-metrics-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory)?;
        Ok(Self(directory))
    }

    fn godwit(&self) -> anyhow::Result<Godwit> {
        Ok(Godwit::built()?.with_variable("XDG_STATE_HOME", &self.0.display().to_string()))
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `godwit metrics --listen`, which ends with this.
struct Served {
    child: Child,
    address: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Served {
    fn start(godwit: &Godwit, state: &State) -> anyhow::Result<Self> {
        let mut child = Command::new(godwit.program())
            .args(["metrics", "--listen", "127.0.0.1:0"])
            .env("XDG_STATE_HOME", &state.0)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        let address = line
            .trim()
            .strip_prefix("metrics at http://")
            .and_then(|rest| rest.strip_suffix("/metrics").map(str::to_owned));
        let address = address.with_context(|| format!("no address: {line}"))?;
        Ok(Self { child, address })
    }

    /// The head and the body of the answer to `request`.
    fn ask(&self, request: &str) -> anyhow::Result<(String, String)> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(LIMIT))?;
        write!(stream, "{request} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
        Ok((head.to_owned(), body.to_owned()))
    }

    fn scrape(&self) -> anyhow::Result<BTreeMap<String, f64>> {
        let (head, body) = self.ask("GET /metrics")?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let kind = head.lines().any(|line| line == "Content-Type: text/plain; version=0.0.4");
        ensure!(kind, "{head}");
        parsed(&body)
    }
}

/// The samples of a text in Prometheus's format 0.0.4, by names and labels, as strictly as a
/// collector takes it: one TYPE for each family, in front of its samples, no sample twice.
fn parsed(text: &str) -> anyhow::Result<BTreeMap<String, f64>> {
    let (mut samples, mut families) = (BTreeMap::new(), BTreeMap::new());
    ensure!(text.ends_with('\n'), "no end of line: {text}");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').context("no type")?;
            ensure!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            ensure!(families.insert(name.to_owned(), kind.to_owned()).is_none(), "twice: {line}");
            continue;
        }
        if line.starts_with("# HELP ") {
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
        let name = sample.split('{').next().unwrap_or_default();
        let fits = |c: char| c.is_ascii_lowercase() || c == '_';
        ensure!(name.chars().all(fits) && !name.is_empty(), "{line}");
        let ends = ["_bucket", "_sum", "_count"];
        let base = ends.iter().find_map(|end| name.strip_suffix(end));
        match (families.get(name), base.and_then(|base| families.get(base))) {
            (Some(_), _) => {}
            (None, Some(kind)) if kind == "histogram" => {}
            _ => bail!("no TYPE in front of {line}"),
        }
        let value: f64 = value.parse().with_context(|| line.to_owned())?;
        ensure!(samples.insert(sample.to_owned(), value).is_none(), "twice: {line}");
    }
    Ok(samples)
}

const MIGRATED: &str = "godwit_migrations_total{outcome=\"migrated\"}";
const CANCELLED: &str = "godwit_migrations_total{outcome=\"cancelled\"}";

#[test]
fn a_move_is_told_of_while_it_runs_and_counted_when_it_is_over() -> anyhow::Result<()> {
    let machine = ["--memory", "64MiB", "--mode", "rate", "--fill", "24MiB"];
    let test = "a_move_is_told_of_while_it_runs_and_counted_when_it_is_over";
    let Some(pair) = MicroPair::start(test, &machine)? else { return Ok(()) };
    let state = State::new("move")?;
    let godwit = state.godwit()?;
    let served = Served::start(&godwit, &state)?;
    let before = served.scrape()?;
    ensure!(before[MIGRATED] == 0.0 && before[CANCELLED] == 0.0, "{before:?}");

    // One that is cancelled while it copies, then one that moves.
    let name = format!("metrics-{}", std::process::id());
    let (receive, address) = godwit.receive(&pair.destination, &[])?;
    let slow = ["--name", &name, "--max-bandwidth", "2MiB/s"];
    let migrate = godwit.migrate(&pair.source, &address, &slow)?;
    godwit_e2e::await_copying(&migrate)?;
    let during = served.scrape()?;
    let vm = pair.source.vm_name();
    let labels = format!("{{migration=\"{name}\",vm=\"{vm}\",to=\"{address}\"");
    let sent = during.get(&format!("godwit_running_sent_bytes{labels}}}"));
    ensure!(sent.is_some_and(|sent| *sent > 0.0), "{labels}: {during:#?}");
    let stage = format!("godwit_running_stage{labels},stage=\"pre-copy\"}}");
    ensure!(during.get(&stage) == Some(&1.0), "{during:#?}");
    ensure!(during["godwit_running_migrations"] >= 1.0, "{during:#?}");
    godwit.done(&["cancel", "--migration", &name])?;
    migrate.wait(LIMIT)?;
    receive.wait(LIMIT)?;

    let (receive, address) = godwit.receive(&pair.destination, &[])?;
    let migrate = godwit.migrate(&pair.source, &address, &["--name", &name])?.wait(LIMIT)?;
    receive.wait(LIMIT)?;
    pair.check_moved(&migrate)?;
    let after = served.scrape()?;
    ensure!(after[MIGRATED] == 1.0 && after[CANCELLED] == 1.0, "{after:#?}");
    ensure!(!after.keys().any(|key| key.contains(&labels)), "{after:#?}");
    let measured = |key: &str| migrate.last()[key].as_f64().context("not measured");
    let near = |name: &str, value: f64| {
        let told = after[name];
        ensure!((told - value).abs() <= value * 1e-6 + 1e-9, "{name} is {told}, not {value}");
        anyhow::Ok(())
    };
    near("godwit_migration_downtime_seconds_sum", measured("downtime_ms")? / 1e3)?;
    near("godwit_migration_duration_seconds_sum", measured("total_ms")? / 1e3)?;
    near("godwit_migration_sent_bytes_sum", measured("sent_bytes")?)?;
    ensure!(after["godwit_migration_downtime_seconds_count"] == 1.0, "{after:#?}");
    ensure!(after["godwit_migration_downtime_seconds_bucket{le=\"+Inf\"}"] == 1.0, "{after:#?}");

    // A file has the same, and nothing else is left beside it.
    let directory = state.0.join("textfile");
    std::fs::create_dir(&directory)?;
    let file = directory.join("godwit.prom");
    godwit.done(&["metrics", "--out", &file.display().to_string()])?;
    ensure!(parsed(&std::fs::read_to_string(&file)?)?[MIGRATED] == 1.0);
    ensure!(std::fs::read_dir(&directory)?.count() == 1);
    Ok(())
}

#[test]
fn whatever_else_is_asked_over_http_is_refused() -> anyhow::Result<()> {
    let state = State::new("http")?;
    let godwit = state.godwit()?;
    let served = Served::start(&godwit, &state)?;
    for (request, status, words) in [
        ("GET /", "200", "godwit's metrics are at /metrics"),
        ("GET /etc/passwd", "404", "there is only /metrics"),
        ("POST /metrics", "405", "metrics can only be read"),
    ] {
        let (head, body) = served.ask(request)?;
        ensure!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {head}");
        ensure!(body.contains(words), "{request}: {body}");
    }
    let (head, body) = served.ask("HEAD /metrics")?;
    ensure!(head.starts_with("HTTP/1.1 200 ") && body.is_empty(), "{head} {body}");
    let taken = godwit.run(&["metrics", "--listen", &served.address])?;
    let errors = String::from_utf8_lossy(&taken.stderr).into_owned();
    ensure!(taken.status.code() == Some(1), "{}", taken.status);
    ensure!(errors.contains(&format!("--listen {}: ", served.address)), "{errors}");
    served.scrape().map(drop)
}

//! `godwit report`: a page that shows a migration, or what a benchmark or a simulation came to.

use std::fs::File;
use std::io::{BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use godwit_report::{Document, Kept, Store};
use serde_json::json;

use crate::migrate::records;
use crate::otlp::{self, Collector};
use crate::output::{self, json_line};
use crate::process::FAILED;

/// Show a migration that was made, in one HTML file: what the guest wrote and the link carried over
/// time, where in memory that was, and where the downtime went.
///
/// Each godwit migrate keeps a record. Without an argument the newest is shown. What a benchmark, a
/// soak or `godwit simulate --json` has written has a page as well.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Which one: a name that --list shows or its beginning; a file with a record, of target/bench,
    /// or with what godwit migrate --json or simulate --json printed; or - for standard input
    #[arg(value_name = "RECORD")]
    record: Option<String>,

    /// Where to write the page; - for standard output [default: godwit-NAME.html, here]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Tell the OpenTelemetry collector there of it instead (OTLP over HTTP), as `godwit migrate
    /// --otlp` does
    #[arg(long, value_name = "URL", conflicts_with = "out")]
    otlp: Option<Collector>,

    /// List the records that are kept, the newest first
    #[arg(long, conflicts_with_all = ["record", "out", "otlp"])]
    list: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let done = if arguments.list { list(arguments.json) } else { show(arguments) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::refusal(&format!("{error:#}"), arguments.json);
            ExitCode::from(FAILED)
        }
    }
}

fn store() -> anyhow::Result<Store> {
    records().context("no records are kept without a home directory: name a file")
}

fn list(json: bool) -> anyhow::Result<()> {
    let store = store()?;
    let kept = store.list().with_context(|| store.directory().display().to_string())?;
    for Kept { name, path } in &kept {
        if json {
            json_line(&json!({ "name": name, "path": path }));
        } else {
            println!("{name}");
        }
    }
    if kept.is_empty() && !json {
        println!("no records in {}", store.directory().display());
    }
    Ok(())
}

fn show(arguments: &Arguments) -> anyhow::Result<()> {
    let (name, document) = find(arguments.record.as_deref())?;
    if let Some(collector) = &arguments.otlp {
        let Document::Migration(record) = &document else {
            bail!("{name} is no migration: of nothing else there are spans");
        };
        otlp::send(record, collector)?;
        if arguments.json {
            json_line(&json!({ "record": name, "told": collector.to_string() }));
        } else {
            println!("{collector} was told of {name}");
        }
        return Ok(());
    }
    let page = document.page();
    let out = match &arguments.out {
        Some(out) if out == Path::new("-") => {
            print!("{page}");
            return Ok(());
        }
        Some(out) => out.clone(),
        None => PathBuf::from(format!("godwit-{name}.html")),
    };
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(&out);
    let shown = out.display().to_string();
    let written = file.and_then(|mut file| file.write_all(page.as_bytes()));
    written.with_context(|| format!("{shown} cannot be written"))?;
    if arguments.json {
        json_line(&json!({ "page": out }));
    } else {
        println!("{shown}");
    }
    Ok(())
}

/// The record that `wanted` names, and a name for its page.
fn find(wanted: Option<&str>) -> anyhow::Result<(String, Document)> {
    let read = |file: File, what: &str| {
        Document::read(BufReader::new(file)).with_context(|| what.to_owned())
    };
    match wanted {
        Some("-") => {
            let read = Document::read(std::io::stdin().lock()).context("standard input")?;
            let name = match read {
                Document::Migration(_) => "migration",
                Document::Figures(_) => "figures",
            };
            Ok((name.to_owned(), read))
        }
        Some(path) if path.contains('/') || Path::new(path).is_file() => {
            let file = File::open(path).with_context(|| path.to_owned())?;
            let stem = Path::new(path).file_stem().unwrap_or_default().to_string_lossy();
            Ok((stem.into_owned(), read(file, path)?))
        }
        wanted => {
            let store = store()?;
            let place = store.directory().display().to_string();
            let kept = store.list().with_context(|| place.clone())?;
            let fits = |kept: &&Kept| wanted.is_none_or(|wanted| kept.name.starts_with(wanted));
            let mut found = kept.iter().filter(fits);
            match (found.next(), found.next(), wanted) {
                (Some(_), Some(_), Some(wanted)) => {
                    bail!("several records begin with {wanted}: godwit report --list shows them")
                }
                (Some(Kept { name, path }), ..) => {
                    let file = File::open(path).with_context(|| path.display().to_string())?;
                    Ok((name.clone(), read(file, name)?))
                }
                (None, _, Some(wanted)) => {
                    bail!("no record in {place} begins with {wanted}: godwit report --list")
                }
                (None, ..) => bail!("no records in {place}: godwit migrate makes them"),
            }
        }
    }
}

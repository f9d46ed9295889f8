//! `godwit report`: a page that shows a migration, or what a benchmark or a simulation came to.

use std::fs::File;
use std::io::{BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use godwit_report::{Document, Kept, Side, Store};
use serde_json::json;

use crate::otlp::{self, Collector};
use crate::output::{self, json_line};
use crate::process::FAILED;
use crate::records::records;

/// Show a migration that was made, in one HTML file: what the guest wrote and the link carried over
/// time, where in memory that was, and where the downtime went.
///
/// Each godwit migrate keeps a record, and each godwit receive one of the destination's side, which
/// knows what came round by round, when, and how long the device state took to load. Without an
/// argument the newest is shown. What a benchmark, a soak or `godwit simulate --json` has written
/// has a page as well.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Which one: a name that --list shows or its beginning; a file with a record, of target/bench,
    /// or with what godwit migrate, receive or simulate printed with --json; or - for standard
    /// input
    #[arg(value_name = "RECORD")]
    record: Option<String>,

    /// Where to write the page; - for standard output [default: godwit-NAME.html, here]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Tell the OpenTelemetry collector there of it instead (OTLP over HTTP), as `godwit migrate
    /// --otlp` does; of records of the source's side
    #[arg(long, value_name = "URL", conflicts_with = "out")]
    otlp: Option<Collector>,

    /// Only records of this side, where none is named by a file: source or destination
    #[arg(long, value_name = "SIDE", value_parser = side)]
    side: Option<Side>,

    /// List the records that are kept, the newest first, each behind its side
    #[arg(long, conflicts_with_all = ["record", "out", "otlp"])]
    list: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> ExitCode {
    let done = if arguments.list { list(arguments) } else { show(arguments) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::refusal(&format!("{error:#}"), arguments.json);
            ExitCode::from(FAILED)
        }
    }
}

fn side(text: &str) -> Result<Side, String> {
    let sides = [Side::Source, Side::Destination];
    let found = sides.into_iter().find(|side| side.word() == text);
    found.ok_or_else(|| "use source or destination".to_owned())
}

fn store() -> anyhow::Result<Store> {
    records().context("no records are kept without a home directory: name a file")
}

fn list(arguments: &Arguments) -> anyhow::Result<()> {
    let (store, json) = (store()?, arguments.json);
    let kept = kept(&store, arguments.side)?;
    for Kept { name, path, side } in &kept {
        if json {
            json_line(&json!({ "name": name, "path": path, "side": side.word() }));
        }
    }
    if !json {
        print!("{}", as_text(&kept));
    }
    if kept.is_empty() && !json {
        println!("no records in {}", store.directory().display());
    }
    Ok(())
}

/// A line for each: its side, and behind that the name, which may be of any length.
fn as_text(kept: &[Kept]) -> String {
    let width = Side::Destination.word().len();
    let line = |Kept { name, side, .. }: &Kept| format!("{:width$}  {name}\n", side.word());
    kept.iter().map(line).collect()
}

/// What its page is called: each side of a migration has one, also where both are kept on one host
/// and have begun at once.
fn page_name(kept: &Kept) -> String {
    match kept.side {
        Side::Source => kept.name.clone(),
        Side::Destination => format!("{}-{}", kept.name, kept.side.word()),
    }
}

/// Those of `side`, or all, the newest first.
fn kept(store: &Store, side: Option<Side>) -> anyhow::Result<Vec<Kept>> {
    let kept = store.list().with_context(|| store.directory().display().to_string())?;
    Ok(kept.into_iter().filter(|kept| side.is_none_or(|side| kept.side == side)).collect())
}

fn show(arguments: &Arguments) -> anyhow::Result<()> {
    // Only what the source saw has spans.
    let side = arguments.side.or(arguments.otlp.as_ref().map(|_| Side::Source));
    let (name, document) = find(arguments.record.as_deref(), side)?;
    if let Some(collector) = &arguments.otlp {
        let record = match &document {
            Document::Migration(record) => record,
            Document::Arrival(_) => {
                bail!(
                    "{name} is of the destination's side: collectors are told what the source saw"
                )
            }
            Document::Figures(_) => {
                bail!("{name} is no migration: of nothing else there are spans")
            }
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
fn find(wanted: Option<&str>, side: Option<Side>) -> anyhow::Result<(String, Document)> {
    let read = |file: File, what: &str| {
        Document::read(BufReader::new(file)).with_context(|| what.to_owned())
    };
    match wanted {
        Some("-") => {
            let read = Document::read(std::io::stdin().lock()).context("standard input")?;
            let name = match read {
                Document::Migration(_) => "migration",
                Document::Arrival(_) => "migration-destination",
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
            let kept = kept(&store, side)?;
            let fits = |kept: &&Kept| wanted.is_none_or(|wanted| kept.name.starts_with(wanted));
            let mut found = kept.iter().filter(fits);
            match (found.next(), found.next(), wanted) {
                (Some(_), Some(_), Some(wanted)) => bail!(
                    "several records begin with {wanted}: godwit report --list shows them, and \
                     --side tells those of one name apart"
                ),
                (Some(kept), ..) => {
                    let Kept { name, path, .. } = kept;
                    let file = File::open(path).with_context(|| path.display().to_string())?;
                    Ok((page_name(kept), read(file, name)?))
                }
                (None, _, Some(wanted)) => {
                    bail!("no record in {place} begins with {wanted}: godwit report --list")
                }
                (None, ..) => {
                    bail!("no records in {place}: godwit migrate makes them, and godwit receive")
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(began_ms: u64, vm: &str, side: Side) -> Kept {
        let name = format!("{began_ms:013}-{vm}");
        Kept { path: PathBuf::from(&name), name, side }
    }

    #[test]
    fn both_sides_of_a_move_within_a_host_have_pages_of_their_own() {
        let sides = [Side::Source, Side::Destination].map(|side| kept(7, "web01", side));
        let [source, destination] = sides.each_ref().map(page_name);
        assert_eq!(source, "0000000000007-web01");
        assert_eq!(destination, "0000000000007-web01-destination");
    }

    #[test]
    fn the_sides_of_a_list_stand_below_each_other_whatever_the_names_are() {
        let long = "a-name-of-a-virtual-machine-that-is-longer-than-others";
        let all = [kept(8, long, Side::Destination), kept(7, "b", Side::Source)];
        let text = as_text(&all);
        let lines: Vec<(&str, &str)> = text.lines().map(|line| line.split_at(13)).collect();
        let name = all[0].name.as_str();
        assert_eq!(lines, [("destination  ", name), ("source       ", "0000000000007-b")]);
    }
}

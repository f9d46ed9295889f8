//! `godwit-codecs`: the codecs on a memory image, beside zlib and liblz4 itself.
#![forbid(unsafe_code)]

#[macro_use]
extern crate godwit_terminal;

mod candidate;

use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Parser;
use godwit_codec::synthetic::Image;
use godwit_codec::{content_runs, is_zero};
use godwit_terminal::output::json_line;
use godwit_terminal::say;
use godwit_units::{ByteCount, GRAMMAR};
use serde_json::{Value, json};

use crate::candidate::{ALL, Candidate, Pass};

const PAGE: usize = 4096;
/// Pieces that are taken from a file that is larger than the limit.
const PIECE: u64 = 4 << 20;

/// Compare codecs on a memory image: time, size and speed of each, one processor.
///
/// Zero pages are counted and left out: no codec ever sees one in a migration. Times are processor
/// seconds and medians; candidates take turns, so that a busy neighbour slows all of them.
#[derive(Debug, Parser)]
#[command(name = "godwit-codecs", version, max_term_width = 80, after_help = GRAMMAR)]
struct Arguments {
    /// The image: the RAM file of a guest, or any file
    #[arg(
        value_name = "FILE",
        required_unless_present = "synthetic",
        conflicts_with = "synthetic"
    )]
    file: Option<PathBuf>,

    /// An image that anyone can make again: random, text, 2:1 or zero-heavy; of SIZE [256MiB]
    #[arg(long, num_args = 1..=2, value_names = ["IMAGE", "SIZE"])]
    synthetic: Option<Vec<String>>,

    /// The seed of a synthetic image
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,

    /// Read at most so much of FILE, in pieces spread over all of it
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    limit: ByteCount,

    /// Passes of each candidate
    #[arg(long, value_name = "N", default_value = "3")]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=99))]
    runs: u8,

    /// Leave out zlib's slow levels
    #[arg(long)]
    quick: bool,

    /// Print the table as one line of JSON
    #[arg(long)]
    json: bool,
}

/// The medians of a candidate.
struct Row {
    candidate: Candidate,
    compress: f64,
    decompress: f64,
    out: usize,
}

fn main() -> ExitCode {
    say::ends_quietly();
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("godwit-codecs: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let (name, mut pages) = image(arguments)?;
    let all = pages.len();
    drop_zero_pages(&mut pages);
    if pages.is_empty() {
        bail!("{name} holds no page that is not zero: nothing to compress");
    }
    let candidates: Vec<Candidate> =
        ALL.into_iter().filter(|candidate| !arguments.quick || !candidate.is_slow()).collect();
    let mut passes: Vec<Vec<Pass>> = vec![Vec::new(); candidates.len()];
    let terminal = std::io::stderr().is_terminal() && !arguments.json;
    for run in 1..=arguments.runs {
        for (candidate, passes) in candidates.iter().zip(&mut passes) {
            // It takes a minute and more: who waits sees that it goes on.
            if terminal {
                say::rewrite_line();
                eprint!("pass {run} of {}: {}", arguments.runs, candidate.name());
            }
            passes.push(candidate.pass(&pages)?);
        }
    }
    if terminal {
        say::rewrite_line();
    }
    let rows: Vec<Row> =
        candidates.iter().zip(&passes).map(|(candidate, passes)| row(*candidate, passes)).collect();
    let find = |name: &str| rows.iter().position(|row| row.candidate.name() == name);
    // Ratios within a run, so that what slows one slows the other.
    let versus = |one: &str, other: &str| {
        let (one, other) = (find(one)?, find(other)?);
        let ratios = passes[one].iter().zip(&passes[other]);
        Some(median(
            ratios.map(|(one, other)| other.compress.as_secs_f64() / one.compress.as_secs_f64()),
        ))
    };
    let zlib = versus("lz4", "zlib fastest");
    let by_page = versus("lz4", "zlib fastest, by page");
    let liblz4 = versus("lz4", "liblz4 itself");
    if arguments.json {
        json_line(&json!({
            "image": name,
            "bytes": all,
            "zero_bytes": all - pages.len(),
            "runs": arguments.runs,
            "rows": rows.iter().map(|row| row.json(pages.len())).collect::<Vec<Value>>(),
            "lz4_times_zlib_fastest": zlib,
            "lz4_times_zlib_fastest_by_page": by_page,
            "lz4_times_liblz4": liblz4,
        }));
        return Ok(());
    }
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!(
        "{name}: {:.0} MiB, of which {:.0} MiB zero pages are left out",
        mib(all),
        mib(all - pages.len())
    );
    println!(
        "{:<22}{:>9}{:>10}{:>8}{:>12}{:>12}",
        "one processor", "seconds", "MiB out", "out/in", "MB/s in", "MB/s back"
    );
    for row in &rows {
        println!(
            "{:<22}{:>9.2}{:>10.1}{:>8.3}{:>12.0}{:>12.0}",
            row.candidate.name(),
            row.compress,
            mib(row.out),
            row.out as f64 / pages.len() as f64,
            speed(pages.len(), row.compress),
            speed(pages.len(), row.decompress),
        );
    }
    if let Some(times) = zlib {
        println!("lz4 is {times:.1} times as fast as zlib fastest");
    }
    if let Some(times) = by_page {
        println!("lz4 is {times:.1} times as fast as zlib fastest one page at a time");
    }
    if let Some(times) = liblz4 {
        println!("lz4 is {times:.2} times as fast as liblz4 itself");
    }
    Ok(())
}

impl Row {
    fn json(&self, bytes: usize) -> Value {
        json!({
            "name": self.candidate.name(),
            "seconds": self.compress,
            "bytes_out": self.out,
            "mb_per_second": speed(bytes, self.compress),
            "decompress_mb_per_second": speed(bytes, self.decompress),
        })
    }
}

fn row(candidate: Candidate, passes: &[Pass]) -> Row {
    Row {
        candidate,
        compress: median(passes.iter().map(|pass| pass.compress.as_secs_f64())),
        decompress: median(passes.iter().map(|pass| pass.decompress.as_secs_f64())),
        out: passes.first().map_or(0, |pass| pass.out),
    }
}

/// Megabytes a second.
fn speed(bytes: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / 1e6 / seconds } else { 0.0 }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    }
}

/// The image's name and its pages.
fn image(arguments: &Arguments) -> anyhow::Result<(String, Vec<u8>)> {
    let Some(words) = &arguments.synthetic else {
        let path = arguments.file.as_deref().context("name a FILE, or --synthetic IMAGE")?;
        let pages = read(path, arguments.limit.0)
            .with_context(|| format!("cannot read {}", path.display()))?;
        return Ok((path.display().to_string(), pages));
    };
    let image: Image = words[0].parse().map_err(anyhow::Error::msg)?;
    let size = words.get(1).map_or(Ok(ByteCount(256 << 20)), |text| text.parse())?;
    // What is held in memory has a limit that a slip of the finger cannot pass.
    if size.0 == 0 || size.0 > 64 << 30 {
        bail!("an image of {size} cannot be made: use 4KiB to 64GiB");
    }
    let size = usize::try_from(size.0)?.next_multiple_of(PAGE);
    Ok((
        format!("synthetic {}, seed {}", words[0], arguments.seed),
        image.bytes(arguments.seed, size),
    ))
}

/// Whole pages of a file, at most `limit` bytes of them, in pieces from all over it.
fn read(path: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let take = size.min(limit) / PAGE as u64 * PAGE as u64;
    if take == 0 {
        bail!("it is smaller than a page, or the limit is");
    }
    let mut pages = vec![0; usize::try_from(take)?];
    let pieces = take.div_ceil(PIECE);
    for (number, piece) in pages.chunks_mut(PIECE as usize).enumerate() {
        let rest = size - take;
        let skipped = rest / pieces * number as u64 / PAGE as u64 * PAGE as u64;
        file.read_exact_at(piece, number as u64 * PIECE + skipped)?;
    }
    Ok(pages)
}

/// Moves the pages that hold data together.
fn drop_zero_pages(pages: &mut Vec<u8>) {
    let runs: Vec<_> =
        content_runs(pages, PAGE).filter(|(_, zero)| !zero).map(|(run, _)| run).collect();
    let mut to = 0;
    for run in runs {
        let bytes = run.start * PAGE..run.end * PAGE;
        let length = bytes.len();
        pages.copy_within(bytes, to);
        to += length;
    }
    pages.truncate(to);
    debug_assert!(!pages.chunks(PAGE).any(is_zero));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_pages_are_left_out() {
        let mut pages = [vec![0; PAGE], vec![1; PAGE], vec![0; 2 * PAGE], vec![2; PAGE]].concat();
        drop_zero_pages(&mut pages);
        assert_eq!(pages, [vec![1; PAGE], vec![2; PAGE]].concat());
    }

    #[test]
    fn every_candidate_gives_the_pages_back() {
        let pages = Image::TwoToOne.bytes(1, 70 * PAGE);
        for candidate in ALL {
            let pass = candidate.pass(&pages).unwrap();
            assert!(pass.out < pages.len(), "{}", candidate.name());
        }
    }

    #[test]
    fn large_files_are_read_in_pieces() {
        let path = std::env::temp_dir().join(format!("godwit-codecs-{}", std::process::id()));
        std::fs::write(&path, vec![7; 100 * PAGE + 5]).unwrap();
        let (some, all) = (read(&path, 10 * PAGE as u64).unwrap(), read(&path, 1 << 30).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert_eq!((some.len(), all.len()), (10 * PAGE, 100 * PAGE));
    }
}

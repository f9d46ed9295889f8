//! What looking at pages costs, against reading memory at all; and what a delta to the last version
//! sent saves.

use std::hint::black_box;

use godwit_bench::report::{Better, Report, machine, median};
use godwit_bench::sys::thread_time;
use godwit_bench::table::{Column, Table, figure};
use godwit_codec::synthetic::Image;
use godwit_codec::{Codec, Compressor, delta, is_zero, worth};
use godwit_fingerprints::Key;
use serde_json::json;

const PAGE: usize = 4096;
const SIZE: usize = 512 << 20;
const ROUNDS: usize = 7;

pub(crate) fn run() -> anyhow::Result<()> {
    println!("{}", machine());
    let mut report = Report::new("bulk-content");
    looks(&mut report);
    deltas(&mut report)?;
    report.finish()?;
    Ok(())
}

/// Seconds of processor time that `work` takes.
fn seconds(work: impl FnOnce()) -> f64 {
    let start = thread_time();
    work();
    (thread_time() - start).as_secs_f64()
}

fn sum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().fold(0, |sum: u64, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

const SPEEDS: Table<(&str, f64)> = Table(&[
    Column { head: "", width: 19, cell: |row| row.0.to_owned() },
    Column { head: "GB/s", width: 8, cell: |row| figure(row.1, 2) },
]);

fn looks(report: &mut Report) {
    // Written, and not known to the compiler: it must be memory, not the kernel's one page of zeros
    // in a cache.
    let mut zeros = black_box(vec![1_u8; SIZE]);
    zeros.fill(0);
    let zeros = black_box(zeros);
    let data = Image::Random.bytes(1, SIZE);
    let key = Key::new(7);
    let (mut read, mut zero, mut busy, mut print) = (vec![], vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        read.push(seconds(|| {
            black_box(sum(black_box(&zeros)));
        }));
        zero.push(seconds(|| {
            black_box(black_box(&zeros).chunks_exact(PAGE).filter(|page| is_zero(page)).count());
        }));
        busy.push(seconds(|| {
            black_box(black_box(&data).chunks_exact(PAGE).filter(|page| is_zero(page)).count());
        }));
        print.push(seconds(|| {
            for page in black_box(&data).chunks_exact(PAGE) {
                black_box(key.page(page));
            }
        }));
    }
    let speed = |times: &[f64]| SIZE as f64 / 1e9 / median(times);
    SPEEDS.print_head();
    for (name, times) in [
        ("reading memory", &read),
        ("zero pages found", &zero),
        ("data pages found", &busy),
        ("fingerprints", &print),
    ] {
        SPEEDS.print(&(name, speed(times)));
    }
    let ratios: Vec<f64> = read.iter().zip(&zero).map(|(read, zero)| read / zero).collect();
    report.figure("read_gb_per_second", speed(&read));
    report.figure("zero_gb_per_second", speed(&zero));
    report.figure("data_gb_per_second", speed(&busy));
    report.figure("fingerprint_gb_per_second", speed(&print));
    report.target(
        "zero check, of the speed of reading memory",
        median(&ratios),
        0.9,
        Better::Higher,
    );
}

const DELTAS: Table<(u64, [f64; 4])> = Table(&[
    Column { head: "8-byte words changed", width: 26, cell: |row| row.0.to_string() },
    Column { head: "LZ4, out/in", width: 13, cell: |row| figure(row.1[0], 3) },
    Column { head: "delta, out/in", width: 13, cell: |row| figure(row.1[1], 3) },
    Column { head: "LZ4 MB/s", width: 13, cell: |row| figure(row.1[2], 0) },
    Column { head: "delta MB/s", width: 13, cell: |row| figure(row.1[3], 0) },
]);

/// Pages in which `words` words of 8 bytes changed, as counters, stamps and pointers do, sent as
/// they are and as deltas.
fn deltas(report: &mut Report) -> anyhow::Result<()> {
    const BATCH: usize = 64 * PAGE;
    let lz4 = Codec::Lz4 { acceleration: 1 };
    let old = Image::TwoToOne.bytes(1, 256 * BATCH);
    let mut rows = Vec::new();
    println!();
    DELTAS.print_head();
    for words in [1_u64, 4, 16, 64, 256] {
        let mut new = old.clone();
        let mut rng = fastrand::Rng::with_seed(words);
        for page in new.chunks_mut(PAGE) {
            for _ in 0..words {
                let at = rng.usize(..PAGE / 8) * 8;
                // Half of the words are counted up, half replaced.
                let was = u64::from_le_bytes(std::array::from_fn(|byte| page[at + byte]));
                let value = if rng.bool() { was.wrapping_add(1) } else { rng.u64(..) };
                page[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
        }
        let mut compressor = Compressor::new();
        let (mut output, mut buffer) = (vec![0; worth(BATCH)], vec![0; BATCH]);
        let (mut plain, mut small) = (0, 0);
        let mut failed = None;
        let plain_time = seconds(|| {
            for batch in new.chunks(BATCH) {
                match compressor.compress(lz4, &[batch], &mut output) {
                    Ok(made) => plain += made.unwrap_or(BATCH),
                    Err(error) => failed = Some(error),
                }
            }
        });
        let small_time = seconds(|| {
            for (batch, base) in new.chunks(BATCH).zip(old.chunks(BATCH)) {
                buffer.copy_from_slice(batch);
                delta::xor(&mut buffer, base);
                match compressor.compress(lz4, &[&buffer], &mut output) {
                    Ok(made) => small += made.unwrap_or(BATCH),
                    Err(error) => failed = Some(error),
                }
            }
        });
        if let Some(error) = failed {
            return Err(error.into());
        }
        let ratio = |bytes: usize| bytes as f64 / old.len() as f64;
        let speed = |time: f64| old.len() as f64 / 1e6 / time;
        let row = [ratio(plain), ratio(small), speed(plain_time), speed(small_time)];
        DELTAS.print(&(words, row));
        rows.push(json!({
            "words": words, "plain_ratio": ratio(plain), "delta_ratio": ratio(small),
            "plain_mb_per_second": speed(plain_time), "delta_mb_per_second": speed(small_time),
        }));
    }
    report.figure("deltas", rows);
    Ok(())
}

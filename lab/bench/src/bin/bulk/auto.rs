//! `compression=auto` against each fixed choice.

use godwit_bench::report::{Better, Report, median};
use godwit_bench::still::{Cost, Ram, Way, transfer};
use godwit_bench::table::{Column, Table, figure};
use godwit_codec::synthetic::Image;
use godwit_engine::compression::Compression;
use serde_json::json;

const CHOICES: [&str; 5] = ["auto", "none", "lz4", "lz4:8", "zstd"];
const IMAGES: [(&str, Image); 3] =
    [("random", Image::Random), ("text", Image::Text), ("zero-heavy", Image::ZeroHeavy)];
/// Name, limit, MiB of memory, rounds. Slow links have less to carry, so that it ends; their times
/// hardly scatter.
const LINKS: [(&str, Option<&str>, usize, usize); 3] = [
    ("loopback", None, 512, 5),
    ("1 Gbit/s", Some("1Gbit"), 256, 1),
    ("100 Mbit/s", Some("100Mbit"), 64, 1),
];

/// One memory over one link.
struct Row {
    link: &'static str,
    memory: &'static str,
    mib: usize,
    /// Seconds and MiB on the wire of each choice.
    choices: [(f64, f64); CHOICES.len()],
    ratio: f64,
}

impl Row {
    fn choice(&self, who: usize) -> String {
        let (seconds, mib) = self.choices[who];
        format!("{seconds:.3} ({mib:>4.0})")
    }
}

const TABLE: Table<Row> = Table(&[
    Column { head: "link", width: 11, cell: |row| row.link.to_owned() },
    Column { head: "memory", width: 11, cell: |row| row.memory.to_owned() },
    Column { head: "MiB", width: 5, cell: |row| row.mib.to_string() },
    Column { head: CHOICES[0], width: 14, cell: |row| row.choice(0) },
    Column { head: CHOICES[1], width: 14, cell: |row| row.choice(1) },
    Column { head: CHOICES[2], width: 14, cell: |row| row.choice(2) },
    Column { head: CHOICES[3], width: 14, cell: |row| row.choice(3) },
    Column { head: CHOICES[4], width: 14, cell: |row| row.choice(4) },
    Column { head: "auto/best", width: 9, cell: |row| figure(row.ratio, 3) },
]);

pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    println!("\ncompression: seconds in all (MiB on the wire), 2 channels");
    TABLE.print_head();
    let mut rows = Vec::new();
    for (link, limit, mib, rounds) in LINKS {
        let limit = limit.map(str::parse).transpose().map_err(anyhow::Error::msg)?;
        for (name, image) in IMAGES {
            let ram = Ram::filled(image, mib << 20)?;
            let mut runs: [Vec<Cost>; CHOICES.len()] = [const { Vec::new() }; CHOICES.len()];
            for round in 0..rounds {
                for turn in 0..CHOICES.len() {
                    let who = (round + turn) % CHOICES.len();
                    let compression: Compression =
                        CHOICES[who].parse().map_err(anyhow::Error::msg)?;
                    runs[who].push(transfer(
                        &ram,
                        Way { compression, limit, ..Way::PLAIN },
                        round == 0,
                    )?);
                }
            }
            let of = |who: usize, pick: fn(&Cost) -> f64| {
                median(&runs[who].iter().map(pick).collect::<Vec<f64>>())
            };
            let (mut row, mut choices) = (serde_json::Map::new(), [(0.0, 0.0); CHOICES.len()]);
            for (who, choice) in CHOICES.iter().enumerate() {
                let (wall, sent) = (of(who, |cost| cost.wall), of(who, |cost| cost.sent as f64));
                choices[who] = (wall, sent / f64::from(1 << 20));
                let cpu = of(who, |cost| cost.cpu);
                row.insert(
                    (*choice).to_owned(),
                    json!({ "seconds": wall, "cpu_s": cpu, "sent_bytes": sent }),
                );
            }
            let best = (1..CHOICES.len())
                .map(|who| of(who, |cost| cost.wall))
                .fold(f64::INFINITY, f64::min);
            let ratio = of(0, |cost| cost.wall) / best;
            TABLE.print(&Row { link, memory: name, mib, choices, ratio });
            rows.push(
                json!({ "link": link, "memory": name, "mib": mib, "choices": row, "ratio": ratio }),
            );
            report.target(
                format!("auto: {name} over {link}, to the best fixed"),
                ratio,
                1.1,
                Better::Lower,
            );
        }
    }
    report.figure("compression", rows);
    Ok(())
}

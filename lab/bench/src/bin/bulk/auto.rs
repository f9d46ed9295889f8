//! `compression=auto` against each fixed choice.

use godwit_bench::report::{Better, Report, median};
use godwit_codec::synthetic::Image;
use godwit_engine::compression::Compression;
use serde_json::json;

use crate::machine::{Cost, Ram, Way, transfer};

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

pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    println!("\ncompression: seconds in all (MiB on the wire), 2 channels");
    print!("{:<12}{:<12}{:>5}", "link", "memory", "MiB");
    CHOICES.iter().for_each(|choice| print!("{choice:>15}"));
    println!("{:>10}", "auto/best");
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
            print!("{link:<12}{name:<12}{mib:>5}");
            let mut row = serde_json::Map::new();
            for (who, choice) in CHOICES.iter().enumerate() {
                let (wall, sent) = (of(who, |cost| cost.wall), of(who, |cost| cost.sent as f64));
                print!("{wall:>8.3} ({:>4.0})", sent / f64::from(1 << 20));
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
            println!("{ratio:>10.3}");
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

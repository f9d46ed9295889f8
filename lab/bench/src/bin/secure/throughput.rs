//! Random pages through the engine, encrypted and not, by pairs.

use std::path::Path;

use godwit_bench::fixture::warm_up_bytes;
use godwit_bench::report::{Better, Report, median};
use godwit_bench::still::{Cost, Ends, Ram, Way, transfer_over};
use godwit_bench::table::{Column, Table, figure};
use godwit_codec::synthetic::Image;
use godwit_engine::security::SecurityWish;
use godwit_units::Rate;
use serde_json::json;

/// What a link of 10 Gbit/s carries, in bytes a second.
const LINK: f64 = 1.25e9;

const TABLE: Table<(String, f64, f64)> = Table(&[
    Column { head: "", width: 34, cell: |row| row.0.clone() },
    Column { head: "GiB/s", width: 7, cell: |row| figure(row.1, 2) },
    Column { head: "CPU s/GiB", width: 11, cell: |row| figure(row.2, 3) },
]);

pub(crate) fn run(
    report: &mut Report,
    keys: &Path,
    size: usize,
    rounds: usize,
) -> anyhow::Result<()> {
    let address = "127.0.0.1:1".parse()?;
    let wish = SecurityWish { keys: Some(keys.to_owned()), ..SecurityWish::default() };
    let ends: [Ends; 2] = [Ends::default(), (wish.source(&address)?, wish.destination(&address)?)];
    let gib = size as f64 / f64::from(1 << 30);
    println!("\n{gib} GiB of random bytes, uncompressed, medians of {rounds}");
    let ram = Ram::filled(Image::Random, size)?;
    TABLE.print_head();
    let mut rows = Vec::new();
    let cases = [
        ("1 connection", 1, None),
        ("2 connections", 2, None),
        ("2 connections at 10 Gbit/s", 2, Some(Rate::from_bytes_per_second(LINK))),
    ];
    for (name, channels, limit) in cases {
        let way = Way { channels, limit, ..Way::PLAIN };
        let mut runs: [Vec<Cost>; 2] = [const { Vec::new() }; 2];
        for round in 0..rounds {
            for turn in 0..2 {
                let who = (round + turn) % 2;
                warm_up_bytes(size as u64 * 3 / 2)?;
                let target = Ram::empty(size)?;
                runs[who].push(transfer_over(&ends[who], &target, &ram, way, round == 0)?);
            }
        }
        for (who, how) in ["in the clear", "encrypted"].into_iter().enumerate() {
            let of =
                |pick: fn(&Cost) -> f64| median(&runs[who].iter().map(pick).collect::<Vec<_>>());
            let (speed, cpu) = (gib / of(|cost| cost.wall), of(|cost| cost.cpu) / gib);
            TABLE.print(&(format!("{name}, {how}"), speed, cpu));
            let walls: Vec<f64> = runs[who].iter().map(|cost| cost.wall).collect();
            rows.push(json!({ "name": name, "encrypted": who == 1, "gib_per_second": speed,
                "cpu_s_per_gib": cpu, "seconds": walls }));
        }
        // By pairs: what drifts between rounds is not in their ratios.
        let shares: Vec<f64> = runs[0]
            .iter()
            .zip(&runs[1])
            .map(|(plain, tls)| (1.0 - plain.wall / tls.wall) * 100.0)
            .collect();
        match (channels, limit) {
            (1, _) => report.target(
                "1 connection: % of throughput that encryption costs",
                median(&shares),
                35.0,
                Better::Lower,
            ),
            (_, Some(_)) => report.target(
                "2 connections at 10 Gbit/s: % of throughput that encryption costs",
                median(&shares),
                2.0,
                Better::Lower,
            ),
            _ => {}
        }
    }
    report.figure("throughput", rows);
    Ok(())
}

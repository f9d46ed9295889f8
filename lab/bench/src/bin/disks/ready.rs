//! From a disk's last byte to READY: with the guest stopped, what is still in flight is written
//! out, flushed, and the device state loaded.
//!
//! Measured by `godwit receive` itself (`disks_to_ready_ms`): from the moment in which the last
//! round's last byte was handed to the disk. Once with the destination's image in memory, where a
//! flush is free, and once on the disk of this machine, where it is fdatasync(2).

use std::path::Path;

use godwit_bench::report::{Better, Report, median};
use godwit_stamp::settings::DiskWork;
use godwit_testbed::DiskImage;
use godwit_units::ByteCount;
use serde_json::json;

use crate::Options;
use crate::setup::{MIB, Mover, Setup, guest, told};

const LIMIT_MS: f64 = 50.0;

pub(crate) fn run(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let work = DiskWork {
        write: 8 * MIB,
        block: ByteCount(8 << 10),
        span: ByteCount(256 * MIB),
        ..DiskWork::default()
    };
    println!(
        "QEMU, 512 MiB of RAM, 512 MiB of disk, 8 KiB written at random at 8 MiB/s; loopback, {} \
         moves",
        options.rounds
    );
    let mut figures = Vec::new();
    // Where cargo builds there is a real file system.
    let places = [
        ("/dev/shm", Path::new("/dev/shm").to_owned()),
        ("disk", std::env::current_dir()?.join("target")),
    ];
    for (name, dir) in places {
        let (mut ready, mut downtime) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            let size = ByteCount(512 * MIB);
            let images =
                [DiskImage::create("raw", size)?, DiskImage::create_in(&dir, "raw", size)?];
            let setup = Setup {
                guest: guest(work),
                images: [&images[0], &images[1]],
                link: None,
                patience: options.patience,
            };
            let moved = setup.one_move(Mover::Godwit(&[]))?;
            anyhow::ensure!(
                moved.finished && moved.bugs == 0,
                "the guest did not move: {}",
                moved.own_words
            );
            ready
                .push(moved.own_words["receive"]["disks_to_ready_ms"].as_f64().unwrap_or(f64::NAN));
            downtime.push(moved.downtime_ms);
            told(".");
        }
        println!(
            "\n{name}: last byte to READY {:.1} ms (all: {ready:.1?}), downtime {:.1} ms",
            median(&ready),
            median(&downtime)
        );
        figures.push(json!({ "place": name, "ready_ms": ready, "downtime_ms": downtime }));
        let target = format!("ready, image on {name}: from the last byte to READY, ms");
        report.target(target, median(&ready), LIMIT_MS, Better::Lower);
    }
    report.figure("ready", figures);
    Ok(())
}

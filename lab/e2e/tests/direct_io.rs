//! Disks with direct I/O: a guest that reads past its page cache all the time, from disks that QEMU
//! reads past the host's.
//!
//! What a device reads lands in guest memory after the tracker has seen the write. The guest looks
//! again at all that it has read, and `--verify` compares all memory. `make soak-tests` runs it in
//! the
//! hundreds.

use std::path::Path;

use anyhow::{Context, bail, ensure};
use godwit_e2e::{LIMIT, Pair, check_moved, check_untouched};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    DiskImage, GuestConfig, QemuBuild, SlowReads, TestVm, VmConfig, builds_for, images_for, soak,
};
use godwit_units::ByteCount;

/// The ways in which QEMU does I/O.
const WAYS: [&str; 3] = ["threads", "native", "io_uring"];

/// Reads a second that the host's disk is slowed down to: each of the guest's eight is under way
/// for some 50 ms.
const READS: u32 = 150;

/// An image on a file system that knows O_DIRECT, which a tmpfs may not.
fn image() -> anyhow::Result<DiskImage> {
    DiskImage::create_in(Path::new(env!("CARGO_TARGET_TMPDIR")), "raw", ByteCount(32 << 20))
}

/// A small guest that reads `image` all the time, eight requests at a time, and writes a little.
fn config(image: &DiskImage, build: &QemuBuild, way: &str) -> VmConfig {
    let disk = DiskWork {
        write: 4 << 20,
        read: 96 << 20,
        block: ByteCount(256 << 10),
        span: ByteCount(16 << 20),
        threads: 8,
    };
    let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Idle) };
    let drive =
        format!("file={},if=virtio,format=raw,cache=none,aio={way}", image.path().display());
    VmConfig::new(build, guest).with_extra(&["-drive", &drive])
}

#[test]
fn what_lands_late_is_found() -> anyhow::Result<()> {
    let test = "what_lands_late_is_found";
    let mut builds = if images_for(test) { builds_for(test) } else { Vec::new() };
    if soak(0) == 0 {
        // In short, one QEMU will do.
        builds.truncate(1);
    }
    for build in builds {
        for way in WAYS {
            let image = image()?;
            let slow =
                SlowReads::for_test("what_lands_late_is_found (slowly)", &image.path(), READS);
            let config = config(&image, &build, way);
            let mut pair = Pair::start(&config)?;
            for number in 0..soak(1) {
                // Every other time what is read lands much later.
                if let Some(slow) = slow.as_ref().filter(|_| number % 2 == 0) {
                    slow.add(pair.source.pid())?;
                }
                let (migrate, _) = pair.migrate(&["--verify", "--max-bandwidth", "200MiB/s"])?;
                check_moved(&mut pair, &migrate)
                    .with_context(|| format!("{build} {way}, move {number}"))?;
                pair.move_on(TestVm::destination(&config)?);
            }
        }
    }
    Ok(())
}

#[test]
fn without_the_second_look_it_is_lost() -> anyhow::Result<()> {
    let test = "without_the_second_look_it_is_lost";
    if !images_for(test) {
        return Ok(());
    }
    let Some(build) = builds_for(test).pop() else { return Ok(()) };
    let image = image()?;
    let Some(slow) = SlowReads::for_test(test, &image.path(), READS) else {
        return Ok(());
    };
    let mut pair = Pair::start(&config(&image, &build, "threads"))?;
    let config = pair.source.config().clone();
    for _ in 0..20 {
        slow.add(pair.source.pid())?;
        let options = ["--verify=stopped", "--fault", "trust-tracker"];
        let (mut receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
        if migrate.last()["outcome"] == "failed" {
            receive.kill();
            ensure!(migrate.errors.contains("NOT exact"), "{}", migrate.errors);
            return check_untouched(&mut pair.source);
        }
        pair.move_on(TestVm::destination(&config)?);
    }
    bail!("twenty migrations without the second look, and nothing was lost: this does not test it")
}

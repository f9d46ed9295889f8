//! Disks with direct I/O: a guest that reads past its page cache all the time, from disks that QEMU reads past the host's.
//!
//! What a device reads lands in guest memory after the tracker has seen the write. The guest looks again at all that it
//! has read, and `--verify` compares all memory. `make soak` runs it in the hundreds.

use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use godwit_e2e::{LIMIT, Pair, check_moved, check_untouched};
use godwit_testbed::{Flavour, GuestConfig, SlowReads, TestVm, VmConfig, flavours_for, soak};
use godwit_units::ByteCount;
use godwit_verify::settings::{DiskWork, Mode};

/// The ways in which QEMU does I/O.
const WAYS: [&str; 3] = ["threads", "native", "io_uring"];

/// Reads a second that the host's disk is slowed down to: each of the guest's eight is under way for some 50 ms.
const READS: u32 = 150;

/// An image on a file system that knows O_DIRECT, which a tmpfs may not.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> anyhow::Result<Self> {
        let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
        let image = Self(dir.join(format!("{name}-{}", std::process::id())));
        std::fs::File::create(&image.0)?.set_len(32 << 20)?;
        Ok(image)
    }

    /// A small guest that reads this disk all the time, eight requests at a time, and writes a little.
    fn config(&self, flavour: &Flavour, way: &str) -> VmConfig {
        let disk = DiskWork {
            write: 4 << 20,
            read: 96 << 20,
            block: ByteCount(256 << 10),
            span: ByteCount(16 << 20),
            threads: 8,
        };
        let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Idle) };
        let drive = format!("file={},if=virtio,format=raw,cache=none,aio={way}", self.0.display());
        VmConfig::new(flavour, guest).with_extra(&["-drive", &drive])
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn what_lands_late_is_found() -> anyhow::Result<()> {
    let mut flavours = flavours_for("what_lands_late_is_found");
    if soak(0) == 0 {
        // In short, one QEMU will do.
        flavours.truncate(1);
    }
    for flavour in flavours {
        for way in WAYS {
            let image = Image::new("late")?;
            let slow = SlowReads::for_test("what_lands_late_is_found (slowly)", &image.0, READS);
            let config = image.config(&flavour, way);
            let mut pair = Pair::start(&config)?;
            for number in 0..soak(1) {
                // Every other time what is read lands much later.
                if let Some(slow) = slow.as_ref().filter(|_| number % 2 == 0) {
                    slow.add(pair.source.pid())?;
                }
                let (migrate, _) = pair.migrate(&["--verify", "--max-bandwidth", "200MiB/s"])?;
                check_moved(&mut pair, &migrate)
                    .with_context(|| format!("{flavour} {way}, move {number}"))?;
                pair.source = std::mem::replace(&mut pair.destination, TestVm::destination(&config)?);
            }
        }
    }
    Ok(())
}

#[test]
fn without_the_second_look_it_is_lost() -> anyhow::Result<()> {
    let Some(flavour) = flavours_for("without_the_second_look_it_is_lost").pop() else { return Ok(()) };
    let image = Image::new("lost")?;
    let Some(slow) = SlowReads::for_test("without_the_second_look_it_is_lost", &image.0, READS) else {
        return Ok(());
    };
    let mut pair = Pair::start(&image.config(&flavour, "threads"))?;
    let config = pair.source.config().clone();
    for _ in 0..20 {
        slow.add(pair.source.pid())?;
        let options = ["--verify", "--fault", "trust-tracker"];
        let (mut receive, address) = pair.godwit.receive(&pair.destination, &[])?;
        let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
        if migrate.last()["outcome"] == "failed" {
            receive.kill();
            ensure!(migrate.errors.contains("NOT exact"), "{}", migrate.errors);
            return check_untouched(&mut pair.source);
        }
        pair.source = std::mem::replace(&mut pair.destination, TestVm::destination(&config)?);
    }
    bail!("twenty migrations without the second look, and nothing was lost: this does not test it")
}

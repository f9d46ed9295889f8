//! Disks that stay where they are: the destination must find the source's storage, or be told that
//! it does. A guest that moved without its disks ran on whatever image was there.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use godwit_e2e::{Pair, check_moved, check_refused, check_untouched};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    DiskImage, Ended, GuestConfig, QemuBuild, TestVm, VmConfig, builds_in_turn_for, images_for,
};
use godwit_units::ByteCount;
use serde_json::json;

const SIZE: ByteCount = ByteCount(64 << 20);

fn image(format: &'static str) -> anyhow::Result<DiskImage> {
    DiskImage::create(format, SIZE)
}

/// A guest that writes its disk and checks what it has written.
fn config(build: &QemuBuild, image: &DiskImage) -> VmConfig {
    let rate = 2 << 20;
    let disk =
        DiskWork { write: rate, read: rate, span: ByteCount(16 << 20), ..DiskWork::default() };
    VmConfig::new(build, GuestConfig { disk, ..GuestConfig::small(Mode::Rate) })
        .with_disk("disk0", image)
}

fn builds(test: &str) -> Vec<QemuBuild> {
    if images_for(test) { builds_in_turn_for(test) } else { Vec::new() }
}

/// Checks that both sides refuse with all of `words`, and that neither QEMU was touched.
fn check_other(pair: &mut Pair, words: &[&str]) -> anyhow::Result<()> {
    let words =
        [words, &["would not find its disks", "--disks disk0", "--disks-are-shared"]].concat();
    let (migrate, receive) = pair.migrate(&[])?;
    check_refused(&migrate, 1, &words)?;
    check_refused(&receive, 1, &words)?;
    ensure!(pair.destination.status()? == "inmigrate");
    check_untouched(&mut pair.source)
}

fn setup_of(migrate: &Ended) -> Duration {
    Duration::from_secs_f64(migrate.last()["setup_ms"].as_f64().unwrap_or(f64::MAX) / 1e3)
}

/// This was migrated with success, and the guest ran on a blank disk.
#[test]
fn a_blank_image_is_not_the_sources_disk() -> anyhow::Result<()> {
    for build in builds("a_blank_image_is_not_the_sources_disk") {
        for format in ["raw", "qcow2"] {
            let (own, blank) = (image(format)?, image(format)?);
            let mut pair = Pair::start_apart(&config(&build, &own), &config(&build, &blank))?;
            let (a, b) = (own.path().display().to_string(), blank.path().display().to_string());
            let words = format!("disk 'disk0' is {a} at the source; {b} here holds something else");
            check_other(&mut pair, &[&words])?;
            // The same two QEMUs, with the disk named.
            let (migrate, _) = pair.migrate(&["--disks", "all", "--verify"])?;
            check_moved(&mut pair, &migrate)?;
        }
    }
    Ok(())
}

#[test]
fn a_shared_image_is_told_by_itself_and_a_smaller_one_by_its_size() -> anyhow::Result<()> {
    for build in builds("a_shared_image_is_told_by_itself_and_a_smaller_one_by_its_size") {
        let (shared, small) = (image("raw")?, DiskImage::create("raw", ByteCount(32 << 20))?);
        let mut pair = Pair::start_apart(&config(&build, &shared), &config(&build, &small))?;
        check_other(&mut pair, &["disk 'disk0' has 64MiB at the source and 32MiB here"])?;
        pair.destination = TestVm::destination(&config(&build, &shared))?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate)?;
        let told = &migrate.lines[0];
        let disk = json!({
            "name": "disk0", "size_bytes": SIZE.0, "file": shared.path(), "cache": "writeback",
            "moves": false,
        });
        ensure!(told["event"] == "disks" && told["disks"] == json!([disk]), "{told}");
    }
    Ok(())
}

/// What the operator copied while the guest was stopped will do; what was copied while it ran will
/// not.
#[test]
fn a_copy_is_the_same_unless_the_guest_has_written_since() -> anyhow::Result<()> {
    for build in builds("a_copy_is_the_same_unless_the_guest_has_written_since") {
        let (own, copy) = (image("raw")?, image("raw")?);
        let mut pair = Pair::start_apart(&config(&build, &own), &config(&build, &copy))?;
        std::fs::copy(own.path(), copy.path())?;
        std::thread::sleep(Duration::from_secs(3));
        check_other(&mut pair, &["holds something else"])?;

        pair.source.pause()?;
        std::fs::copy(own.path(), copy.path())?;
        let (migrate, receive) = pair.migrate(&["--verify"])?;
        ensure!(migrate.last()["outcome"] == "migrated", "{} {}", migrate.last(), migrate.errors);
        ensure!(receive.last()["outcome"] == "paused", "{}", receive.last());
        ensure!(setup_of(&migrate) < Duration::from_secs(5), "{:?}", setup_of(&migrate));
    }
    Ok(())
}

/// Samples alone missed one that differs in few places: one in three times where a block of a
/// thousand differs.
#[test]
fn a_copy_that_differs_in_one_byte_is_found() -> anyhow::Result<()> {
    const AT: u64 = 30 << 20;
    for build in builds("a_copy_that_differs_in_one_byte_is_found") {
        let (own, copy) = (image("raw")?, image("raw")?);
        let data: Vec<u8> =
            (0_u32..32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let write = |image: &DiskImage, at, bytes: &[u8]| -> std::io::Result<()> {
            std::fs::OpenOptions::new().write(true).open(image.path())?.write_all_at(bytes, at)
        };
        write(&own, 16 << 20, &data)?;
        write(&copy, 16 << 20, &data)?;
        let right = data[(AT - (16 << 20)) as usize];
        write(&copy, AT, &[right ^ 1])?;
        let config =
            |image| VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_disk("disk0", image);
        let mut pair = Pair::start_apart(&config(&own), &config(&copy))?;
        check_other(&mut pair, &["holds something else"])?;

        write(&copy, AT, &[right])?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate)?;
        ensure!(setup_of(&migrate) < Duration::from_secs(10), "{:?}", setup_of(&migrate));
    }
    Ok(())
}

#[test]
fn an_operator_who_knows_better_is_believed() -> anyhow::Result<()> {
    for build in builds("an_operator_who_knows_better_is_believed").into_iter().take(1) {
        // Two names of one storage that godwit cannot look into.
        let node = "driver=null-co,node-name=disk0,size=67108864,read-zeroes=on";
        let other =
            "driver=raw,node-name=disk0,file.driver=null-co,file.size=67108864,file.read-zeroes=on";
        let config = |node| {
            let disk = ["-blockdev", node, "-device", "virtio-blk-pci,id=disk0-device,drive=disk0"];
            VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_extra(&disk)
        };
        let hidden = "driver=blkdebug,node-name=disk0,image.driver=null-co,\
                      image.size=67108864,image.read-zeroes=on";
        let mut pair = Pair::start_apart(&config(hidden), &config(other))?;
        check_other(&mut pair, &["cannot be compared"])?;
        let (migrate, _) = pair.migrate(&["--disks-are-shared"])?;
        check_moved(&mut pair, &migrate)?;
        // One name of a server is one storage.
        let mut pair = Pair::start(&config(node))?;
        let (migrate, _) = pair.migrate(&[])?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

/// An image that the source has open, named for the destination by mistake, was only saved by
/// QEMU's locks, where there are any.
#[test]
fn a_disk_is_not_copied_onto_itself() -> anyhow::Result<()> {
    for build in builds("a_disk_is_not_copied_onto_itself") {
        let shared = image("raw")?;
        let node = format!(
            "driver=raw,node-name=disk0,file.driver=file,file.locking=off,file.filename={}",
            shared.path().display()
        );
        let guest = GuestConfig::small(Mode::Rate);
        let extra = ["-blockdev", &node, "-device", "virtio-blk-pci,id=disk0-device,drive=disk0"];
        let mut pair = Pair::start(&VmConfig::new(&build, guest).with_extra(&extra))?;
        let before = std::fs::metadata(Path::new(&shared.path()))?.modified()?;
        let (migrate, receive) = pair.migrate(&["--disks", "all"])?;
        for ended in [&migrate, &receive] {
            check_refused(
                ended,
                1,
                &["disk 'disk0' would be copied onto itself", "leave out --disks"],
            )?;
        }
        ensure!(std::fs::metadata(shared.path())?.modified()? == before, "the image was written");
        check_untouched(&mut pair.source)?;
        let (migrate, _) = pair.migrate(&[])?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

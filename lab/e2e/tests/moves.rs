//! Migrations that succeed: every QEMU, every kind of guest.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use godwit_e2e::{LIMIT, Pair, await_quit, check_moved, check_settings, oldest};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    BeaconPlace, DiskImage, GuestConfig, HugePages, Observer, QemuBuild, VmConfig, builds_for,
    builds_in_turn_for, images_for,
};
use godwit_units::ByteCount;
use serde_json::Value;

/// An image on shared storage.
const SHARED: ByteCount = ByteCount(32 << 20);

/// Moves a guest with all witnesses.
fn moves(test: &str, mode: Mode) -> anyhow::Result<()> {
    for build in builds_in_turn_for(test) {
        // One that boots, and never rests: the observer sees whether it runs on both sides.
        let guest = GuestConfig::small(mode).without_rest();
        let mut pair = Pair::start(&VmConfig::new(&build, guest).booting())?;
        let place = BeaconPlace::find(pair.source.ram_file())?;
        let observer = Observer::start(place, pair.source.ram_file(), pair.destination.ram_file())?;

        let (migrate, receive) = pair.migrate(&["--verify"])?;

        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
        let seen = observer.finish()?;
        ensure!(!seen.ran_on_both, "two guests from one");
        ensure!(seen.switchover.is_some(), "the guest was not seen to move");
        ensure!(migrate.last()["verified"] == true && !migrate.last()["look_back_ms"].is_null());
        ensure!(receive.last()["outcome"] == "running", "{}", receive.last());
        await_quit(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn an_idle_guest() -> anyhow::Result<()> {
    moves("an_idle_guest", Mode::Idle)
}

#[test]
fn a_writing_guest() -> anyhow::Result<()> {
    moves("a_writing_guest", Mode::Rate)
}

#[test]
fn a_guest_at_full_speed() -> anyhow::Result<()> {
    moves("a_guest_at_full_speed", Mode::Full)
}

/// Moves an idle guest with digests: the downtime that was foretold, and what the digests took.
fn foretold(build: &QemuBuild) -> anyhow::Result<(f64, f64)> {
    let mut pair = Pair::start(&VmConfig::new(build, GuestConfig::small(Mode::Idle)))?;
    let (migrate, _) = pair.migrate(&["--verify=stopped"])?;
    check_moved(&mut pair, &migrate)?;
    let expected = |line: &Value| line["expected_downtime_ms"].as_f64();
    let expected =
        migrate.lines.iter().filter_map(expected).next_back().context("no expectation")?;
    let digests = migrate.last()["verify_ms"].as_f64().context("no digests")?;
    Ok((expected, digests))
}

#[test]
fn the_expected_downtime_holds_the_digests() -> anyhow::Result<()> {
    // Regression: 16 ms were foretold and 118 ms came, as the digests were left out.
    let builds = builds_for("the_expected_downtime_holds_the_digests");
    if builds.is_empty() {
        return Ok(());
    }
    // Both sides digest on the same processors here, which takes up to twice as long as one alone,
    // and on a busy host now and then much longer than when it was measured.
    let mut seen = Vec::new();
    for _ in 0..3 {
        let (expected, digests) = foretold(oldest(&builds)?)?;
        if expected > 0.4 * digests && expected < 10.0 * digests + 100.0 {
            return Ok(());
        }
        seen.push((expected, digests));
    }
    bail!("milliseconds foretold, and taken by the digests alone: {seen:?}")
}

#[test]
fn a_source_that_is_kept_stays_stopped() -> anyhow::Result<()> {
    let builds = builds_for("a_source_that_is_kept_stays_stopped");
    if builds.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;
    // One channel, limited: the other ways through the same code.
    let (migrate, _) =
        pair.migrate(&["--keep-source", "--channels", "1", "--max-bandwidth", "100MiB/s"])?;
    check_moved(&mut pair, &migrate)?;
    assert_eq!(pair.source.status()?, "postmigrate");
    // It can be used again: nothing of ours is in force there, and nothing at the destination.
    check_settings(&mut pair.source)?;
    check_settings(&mut pair.destination)
}

#[test]
fn a_paused_guest_arrives_paused() -> anyhow::Result<()> {
    let builds = builds_for("a_paused_guest_arrives_paused");
    if builds.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;
    pair.source.pause()?;
    let (migrate, _) = pair.migrate(&["--verify"])?;
    assert_eq!(migrate.last()["outcome"], "migrated", "{}", migrate.errors);
    assert_eq!(pair.destination.status()?, "paused");
    pair.destination.resume()?;
    check_moved(&mut pair, &migrate)
}

#[test]
fn several_vcpus_and_a_disk_on_shared_storage() -> anyhow::Result<()> {
    let image = std::env::temp_dir().join(format!("godwit-e2e-disk-{}", std::process::id()));
    std::fs::write(&image, vec![7; 1 << 20])?;
    let drive = format!("file={},if=virtio,format=raw", image.display());
    for build in builds_in_turn_for("several_vcpus_and_a_disk_on_shared_storage") {
        let mut config = VmConfig::new(&build, GuestConfig::small(Mode::Full)).with_extra(&[
            "-drive",
            &drive,
            "-device",
            "virtio-balloon-pci,free-page-reporting=on",
        ]);
        config.cpus = 2;
        let mut pair = Pair::start(&config)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
    }
    std::fs::remove_file(image)?;
    Ok(())
}

/// Every vCPU writes memory: the guest's own work, and processes that come, fill memory, check it
/// and go.
#[test]
fn several_vcpus_that_all_write() -> anyhow::Result<()> {
    for build in builds_in_turn_for("several_vcpus_that_all_write") {
        let mut guest = GuestConfig::small(Mode::Full);
        guest.build.jobs = 3;
        let mut config = VmConfig::new(&build, guest);
        config.cpus = 4;
        let mut pair = Pair::start(&config)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
    }
    Ok(())
}

/// Both QEMUs have the same image open, with its locks, as shared storage has it, and the guest
/// writes and reads it all the time.
#[test]
fn a_locked_disk_on_shared_storage_that_the_guest_writes() -> anyhow::Result<()> {
    let test = "a_locked_disk_on_shared_storage_that_the_guest_writes";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let image = DiskImage::create("raw", SHARED)?;
        let mut guest = GuestConfig::small(Mode::Rate);
        guest.disk =
            DiskWork { write: 4 << 20, read: 4 << 20, span: SHARED, ..DiskWork::default() };
        let mut pair = Pair::start(&VmConfig::new(&build, guest).with_disk("disk0", &image))?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
        let seconds = pair.destination.disk_seconds().len();
        let until = Instant::now() + LIMIT;
        while pair.destination.disk_seconds().len() < seconds + 2 {
            ensure!(Instant::now() < until, "{build}: the disk's work does not go on");
            std::thread::sleep(Duration::from_millis(100));
        }
        ensure!(pair.destination.bugs().is_empty(), "{build}: {:?}", pair.destination.bugs());
    }
    Ok(())
}

#[test]
fn a_guest_in_huge_pages() -> anyhow::Result<()> {
    let test = "a_guest_in_huge_pages";
    let builds = builds_in_turn_for(test);
    // Source and destination, 256 MiB each.
    let Some(huge) = HugePages::for_test(test, ByteCount(512 << 20)) else { return Ok(()) };
    for build in builds {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_ram_in(huge.dir());
        let mut pair = Pair::start(&config)?;
        let (migrate, _) = pair.migrate(&["--verify", "--max-bandwidth", "200MiB/s"])?;
        check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
        // One written page makes 512 dirty; the fingerprints find the one.
        let unchanged = migrate.last()["unchanged_pages"].as_u64();
        ensure!(unchanged > Some(0), "{}", migrate.last());
    }
    Ok(())
}

#[test]
fn each_codec_carries_a_guest() -> anyhow::Result<()> {
    let builds = builds_for("each_codec_carries_a_guest");
    if builds.is_empty() {
        return Ok(());
    }
    for codec in ["none", "lz4", "lz4:8", "zstd", "zstd:-5"] {
        let mut pair =
            Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Full)))?;
        let (migrate, _) =
            pair.migrate(&["--compression", codec, "--verify", "--max-bandwidth", "100MiB/s"])?;
        check_moved(&mut pair, &migrate).with_context(|| codec.to_owned())?;
        let (sent, raw) =
            (migrate.last()["sent_bytes"].as_u64(), migrate.last()["raw_bytes"].as_u64());
        // Half of each page of this guest is zero.
        ensure!(
            (sent < raw.map(|raw| raw * 7 / 10)) == (codec != "none"),
            "{codec}: {sent:?} of {raw:?}"
        );
    }
    Ok(())
}

#[test]
fn a_destination_without_codecs() -> anyhow::Result<()> {
    let builds = builds_for("a_destination_without_codecs");
    if builds.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &["--compression", "none"])?;
    let migrate =
        pair.godwit.migrate(&pair.source, &address, &["--compression", "lz4", "--verify"])?;
    let migrate = migrate.wait(LIMIT)?;
    check_moved(&mut pair, &migrate)?;
    ensure!(receive.wait(LIMIT)?.status.success());
    // It is said aloud.
    let said = migrate.lines.iter().any(|line| {
        line["warning"]
            .as_str()
            .is_some_and(|text| text.contains("the destination does not take it"))
    });
    ensure!(said, "{:?}", migrate.lines);
    ensure!(migrate.last()["codecs"] == "none", "{}", migrate.last());
    Ok(())
}

//! Disks of real QEMUs that move: round after round of writes, and the copy is the same; nothing
//! stays behind in QEMU.
//!
//! The writes are made from outside (`qemu-io` by the monitor), through the guest's own device, so
//! that it is known what was written. The guest itself leaves its disks alone.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use godwit_disk::{Content, Disk, DiskChoice, DiskRound, DiskSink, Extent};
use godwit_engine::vm::{DestinationVm, DiskDestination, DiskVm, SourceVm};
use godwit_qemu::{QemuDestination, QemuSource};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    DiskImage, GuestConfig, QemuBuild, TestVm, VmConfig, builds_in_turn_for, drained, images_for,
};
use godwit_units::{ByteCount, PAGE_SIZE, PageRun};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Disks of both sides, by the same names.
struct Pair {
    source: TestVm,
    destination: TestVm,
    images: Vec<(DiskImage, DiskImage)>,
}

/// QEMUs that the test `test` can run with.
fn qemus(test: &str) -> Vec<QemuBuild> {
    if images_for(test) { builds_in_turn_for(test) } else { Vec::new() }
}

fn name(place: usize) -> String {
    format!("disk{place}")
}

impl Pair {
    fn start(build: &QemuBuild, disks: &[(&'static str, u64)]) -> Self {
        let image = |(format, size): &(&'static str, u64)| {
            DiskImage::create(format, ByteCount(*size)).unwrap()
        };
        let images: Vec<_> = disks.iter().map(|disk| (image(disk), image(disk))).collect();
        let config = || VmConfig::new(build, GuestConfig::small(Mode::Idle));
        let (mut here, mut there) = (config(), config());
        for (place, (source, destination)) in images.iter().enumerate() {
            here = here.with_disk(&name(place), source);
            there = there.with_disk(&name(place), destination);
        }
        Self {
            source: TestVm::source(&here).unwrap(),
            destination: TestVm::destination(&there).unwrap(),
            images,
        }
    }

    fn open(&self, granularity: u64) -> (QemuSource, QemuDestination) {
        (
            source(&self.source, granularity),
            QemuDestination::open(&self.destination.qmp_socket()).unwrap(),
        )
    }

    /// Does something to the disk at `place`, as its guest would.
    fn disk(&mut self, place: usize, command: &str) -> String {
        let device = format!("/machine/peripheral/{}-device/virtio-backend", name(place));
        monitor(&mut self.source, &format!("qemu-io -d {device} \"{command}\""))
    }

    fn compare(&mut self) {
        for place in 0..self.images.len() {
            self.disk(place, "flush");
            let (source, destination) = &self.images[place];
            source.compare(destination).unwrap();
        }
    }
}

fn source(vm: &TestVm, granularity: u64) -> QemuSource {
    let source = QemuSource::open(&vm.qmp_socket()).unwrap();
    source.with_disks(&DiskChoice::All, Some(ByteCount(granularity))).unwrap()
}

fn monitor(vm: &mut TestVm, command: &str) -> String {
    let answer =
        vm.qmp().execute("human-monitor-command", json!({ "command-line": command })).unwrap();
    answer.as_str().unwrap_or_default().to_owned()
}

/// All of a round into a sink; returns how many bytes were read.
fn copy(round: &mut dyn DiskRound, sink: &mut dyn DiskSink) -> u64 {
    let mut read = 0;
    while let Some(extent) = round.next().unwrap() {
        read += copy_extent(round, sink, extent);
    }
    sink.flush(false).unwrap();
    read
}

fn copy_extent(round: &mut dyn DiskRound, sink: &mut dyn DiskSink, extent: Extent) -> u64 {
    if extent.content == Content::Zero {
        sink.zero(extent.run).unwrap();
        return 0;
    }
    let piece = MIB / PAGE_SIZE;
    let starts = (extent.run.start.0..extent.run.end().0).step_by(piece as usize);
    let pieces: Vec<PageRun> =
        starts.map(|start| PageRun::new(start, piece.min(extent.run.end().0 - start))).collect();
    for pieces in pieces.chunks(round.depth()) {
        pieces.iter().for_each(|run| round.submit(*run).unwrap());
        for run in pieces {
            let mut bytes = vec![0; run.count.bytes().0 as usize];
            round.complete(&mut bytes).unwrap();
            sink.write(*run, &bytes).unwrap();
        }
    }
    extent.run.count.bytes().0
}

/// A round of all disks; returns for each how many bytes were dirty, if that was known, and how
/// many were read.
fn copy_round(
    source: &mut QemuSource,
    sinks: &mut [Box<dyn DiskSink>],
) -> Vec<(Option<ByteCount>, u64)> {
    let started = Instant::now();
    let rounds = source.begin_disk_round().unwrap();
    println!("{} disks: a round began within {:?}", rounds.len(), started.elapsed());
    let copied = rounds.into_iter().zip(sinks).map(|(mut round, sink)| {
        let dirty = round.dirty();
        (dirty, copy(&mut *round, &mut **sink))
    });
    copied.collect()
}

/// What of anybody's is in QEMU's block layer: bitmaps, exports, the NBD server.
fn leftovers(vm: &mut TestVm) -> Vec<String> {
    let nodes = vm.qmp().execute("query-named-block-nodes", json!({ "flat": true })).unwrap();
    let bitmaps = nodes
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|node| node["dirty-bitmaps"].as_array())
        .flatten();
    let mut found: Vec<String> = bitmaps.map(|bitmap| bitmap["name"].to_string()).collect();
    let exports = vm.qmp().execute("query-block-exports", Value::Null).unwrap();
    found.extend(exports.as_array().unwrap().iter().map(|export| export["id"].to_string()));
    if vm.qmp().execute("nbd-server-stop", Value::Null).is_ok() {
        found.push("the server".to_owned());
    }
    found
}

/// A write, zeros or a discard of some sectors of a disk.
fn command(rng: &mut fastrand::Rng, size: u64) -> String {
    let length = 512 * rng.u64(1..=200);
    let offset = 512 * rng.u64(..=(size - length) / 512);
    match rng.u8(..10) {
        0 => format!("write -z -u {offset} {length}"),
        1 => format!("discard {offset} {length}"),
        _ => format!("write -P {} {offset} {length}", rng.u8(1..)),
    }
}

fn rounds_of_writes(build: &QemuBuild, disks: &[(&'static str, u64)], granularity: u64) {
    let mut pair = Pair::start(build, disks);
    let mut rng = fastrand::Rng::with_seed(granularity);
    let mut write = |pair: &mut Pair, count: usize| {
        for (place, (_, size)) in disks.iter().enumerate() {
            (0..count).for_each(|_| drop(pair.disk(place, &command(&mut rng, *size))));
        }
    };
    write(&mut pair, 40);
    let (mut source, mut destination) = pair.open(granularity);
    let mut sinks = destination.open_disks(&source.disks(), &DiskChoice::All).unwrap();
    source.start_disk_tracking().unwrap();
    assert_eq!(source.disk_granularity(), vec![ByteCount(granularity); disks.len()]);

    write(&mut pair, 10);
    copy_round(&mut source, &mut sinks);
    for _ in 0..3 {
        write(&mut pair, 20);
        let counted = source.dirty_disks().unwrap();
        let copied = copy_round(&mut source, &mut sinks);
        let dirty: Vec<_> = copied.iter().map(|(dirty, _)| dirty.unwrap()).collect();
        assert_eq!(dirty, counted, "{build}");
        assert!(dirty.iter().all(|dirty| dirty.0 > 0), "{build}: {dirty:?}");
    }
    write(&mut pair, 20);
    let mut state = source.open_state().unwrap();
    source.stop().unwrap();
    let mut taken = destination.prepare().unwrap();
    let stopped = Instant::now();
    copy_round(&mut source, &mut sinks);
    println!("{build}, {} disks: the last round took {:?}", disks.len(), stopped.elapsed());
    let nothing: Vec<_> = copy_round(&mut source, &mut sinks);
    assert!(
        nothing.iter().all(|(dirty, read)| *dirty == Some(ByteCount::ZERO) && *read == 0),
        "{nothing:?}"
    );
    sinks.iter_mut().for_each(|sink| sink.flush(true).unwrap());
    drop(sinks);
    destination.close_disks().unwrap();

    // With the exports of the source still there the device state flows.
    copy_memory(&pair);
    let pump = std::thread::spawn(move || std::io::copy(&mut state, &mut taken).unwrap());
    source.release_state().unwrap();
    source.state_saved().unwrap();
    assert!(pump.join().unwrap() > 0);
    destination.finish_load().unwrap();
    destination.run().unwrap();
    source.retire(true).unwrap();

    assert_eq!(pair.destination.status().unwrap(), "running", "{build}");
    assert_eq!(pair.destination.errors(), "", "{build}");
    assert_eq!(leftovers(&mut pair.source), [""; 0], "{build}");
    assert_eq!(leftovers(&mut pair.destination), [""; 0], "{build}");
    for (source, destination) in &pair.images {
        source.compare(destination).unwrap();
    }
}

/// What the engine would do with RAM.
fn copy_memory(pair: &Pair) {
    let mut from = File::open(pair.source.ram_file()).unwrap();
    let mut to = File::options().write(true).open(pair.destination.ram_file()).unwrap();
    std::io::copy(&mut from, &mut to).unwrap();
}

#[test]
fn a_disk_is_the_same_after_rounds_of_writes() {
    for build in qemus("a_disk_is_the_same_after_rounds_of_writes") {
        rounds_of_writes(&build, &[("raw", 64 * MIB)], 64 << 10);
        rounds_of_writes(&build, &[("qcow2", 64 * MIB)], 4 << 10);
    }
}

#[test]
fn three_disks_are_the_same_one_of_which_ends_within_a_page() {
    for build in qemus("three_disks_are_the_same_one_of_which_ends_within_a_page") {
        rounds_of_writes(
            &build,
            &[("raw", 8 * MIB + 512), ("qcow2", 32 * MIB), ("raw", 100 * MIB)],
            MIB,
        );
    }
}

#[test]
fn a_disk_that_is_written_all_the_time_is_the_same_when_its_guest_has_stopped() {
    for build in qemus("a_disk_that_is_written_all_the_time_is_the_same_when_its_guest_has_stopped")
    {
        let images = [0, 1].map(|_| DiskImage::create("qcow2", ByteCount(128 * MIB)).unwrap());
        let mut guest = GuestConfig::small(Mode::Idle);
        guest.disk =
            DiskWork { write: 8 * MIB, span: ByteCount(128 * MIB), threads: 2, ..guest.disk };
        let config = || VmConfig::new(&build, guest);
        let mut vm = TestVm::source(&config().with_disk("disk0", &images[0])).unwrap();
        let waiting = TestVm::destination(&config().with_disk("disk0", &images[1])).unwrap();
        vm.wait_ready(LIMIT).unwrap();
        let mut source = source(&vm, 4096);
        let mut destination = QemuDestination::open(&waiting.qmp_socket()).unwrap();
        let mut sinks = destination.open_disks(&source.disks(), &DiskChoice::All).unwrap();
        source.start_disk_tracking().unwrap();

        let mut first = source.begin_disk_round().unwrap().remove(0);
        let before = source.disk_writes().unwrap()[0];
        while let Some(extent) = first.next().unwrap() {
            source.disk_progress().unwrap();
            copy_extent(&mut *first, &mut *sinks[0], extent);
        }
        sinks[0].flush(false).unwrap();
        drop(first);
        let rounds: Vec<_> = (0..5).flat_map(|_| copy_round(&mut source, &mut sinks)).collect();
        let written = source.disk_writes().unwrap()[0].saturating_sub(before);
        drop(drained(source.open_state().unwrap()));
        source.stop().unwrap();
        copy_round(&mut source, &mut sinks);
        sinks[0].flush(true).unwrap();

        // Stopped by its migration, QEMU has flushed the disk; what is cached of the image, this
        // does.
        monitor(&mut vm, "qemu-io -d /machine/peripheral/disk0-device/virtio-backend flush");
        images[0].compare(&images[1]).unwrap();
        println!("{build}: {written} written during {rounds:?}");
        assert!(written.0 > 0 && rounds.iter().any(|(dirty, _)| dirty.unwrap().0 > 0), "{build}");
        drop(sinks);
        source.resume().unwrap();
        assert_eq!((leftovers(&mut vm), vm.bugs()), (Vec::new(), Vec::new()), "{build}");
    }
}

#[test]
fn the_size_of_dirty_blocks_follows_the_writes_of_late() {
    for build in qemus("the_size_of_dirty_blocks_follows_the_writes_of_late") {
        let mut pair = Pair::start(&build, &[("raw", 32 * MIB), ("raw", 32 * MIB)]);
        // QEMU counts these as it counts a guest's; plain writes it does not.
        let write = |pair: &mut Pair, place, at: String| {
            pair.disk(place, &format!("aio_write -P 1 {at}"));
            pair.disk(place, "aio_flush");
        };
        for piece in 0..20 {
            (0..2).for_each(|place| write(&mut pair, place, format!("{piece}M 1M")));
        }
        let source = QemuSource::open(&pair.source.qmp_socket()).unwrap();
        let mut source = source.with_disks(&DiskChoice::All, None).unwrap();
        (0..4).for_each(|piece| write(&mut pair, 0, format!("{piece}M 8k")));

        source.start_disk_tracking().unwrap();

        let sizes = source.disk_granularity();
        assert_eq!(sizes, [ByteCount(8 << 10), ByteCount(MIB)], "{build}");
    }
}

#[test]
fn behind_the_end_of_a_disk_there_are_zeros() {
    for build in qemus("behind_the_end_of_a_disk_there_are_zeros") {
        let mut pair = Pair::start(&build, &[("raw", 8192 + 512)]);
        pair.disk(0, "write -P 7 0 8704");
        let mut source = source(&pair.source, 4096);
        source.start_disk_tracking().unwrap();
        let mut round = source.begin_disk_round().unwrap().remove(0);
        assert_eq!(round.next().unwrap().unwrap().run, PageRun::new(0, 3));
        let mut bytes = vec![0xee; 4096];
        round.submit(PageRun::new(2, 1)).and_then(|()| round.complete(&mut bytes)).unwrap();
        assert_eq!(bytes, [vec![7; 512], vec![0; 3584]].concat(), "{build}");
    }
}

#[test]
fn holes_and_zeros_are_not_read_and_stay_holes() {
    for build in qemus("holes_and_zeros_are_not_read_and_stay_holes") {
        for format in ["raw", "qcow2"] {
            let mut pair = Pair::start(&build, &[(format, 1024 * MIB)]);
            pair.disk(0, "write -P 1 600M 2M");
            let (mut source, mut destination) = pair.open(MIB);
            let mut sinks = destination.open_disks(&source.disks(), &DiskChoice::All).unwrap();
            source.start_disk_tracking().unwrap();

            let first = copy_round(&mut source, &mut sinks);
            // Of a new raw image QEMU has allocated the first block; the rest of it is holes.
            assert!(
                (2 * MIB..=2 * MIB + (64 << 10)).contains(&first[0].1),
                "{build} {format}: {first:?}"
            );
            pair.disk(0, "write -P 2 100M 1M");
            pair.disk(0, "discard 600M 1M");
            let second = copy_round(&mut source, &mut sinks);
            assert_eq!(second, [(Some(ByteCount(2 * MIB)), MIB)], "{build} {format}");

            sinks[0].flush(true).unwrap();
            drop(sinks);
            source.resume().unwrap();
            pair.compare();
            let allocated = pair.images[0].1.allocated().unwrap();
            assert!(allocated.0 < 4 * MIB, "{build} {format}: {allocated}");
        }
    }
}

#[test]
fn what_is_written_ahead_of_the_first_round_is_not_copied_twice() {
    for build in qemus("what_is_written_ahead_of_the_first_round_is_not_copied_twice") {
        let mut pair = Pair::start(&build, &[("raw", 192 * MIB)]);
        (0..12).for_each(|piece| drop(pair.disk(0, &format!("write -P 1 {}M 16M", piece * 16))));
        let (mut source, mut destination) = pair.open(64 << 10);
        let mut sinks = destination.open_disks(&source.disks(), &DiskChoice::All).unwrap();
        source.start_disk_tracking().unwrap();
        let mut round = source.begin_disk_round().unwrap().remove(0);
        let extent = round.next().unwrap().unwrap();

        // Nothing was read of it yet, but the copy may be anywhere within what it asked about.
        pair.disk(0, "write -P 2 1M 64k");
        pair.disk(0, "write -P 3 110M 64k");
        pair.disk(0, "write -z 150M 1M");
        source.disk_progress().unwrap();
        pair.disk(0, "write -P 4 120M 64k");
        assert_eq!(source.dirty_disks().unwrap(), [ByteCount(128 << 10)], "{build}");
        source.disk_progress().unwrap();
        assert_eq!(source.dirty_disks().unwrap(), [ByteCount(64 << 10)], "{build}");
        copy_extent(&mut *round, &mut *sinks[0], extent);
        copy(&mut *round, &mut *sinks[0]);
        source.disk_progress().unwrap();
        pair.disk(0, "write -P 5 180M 64k");
        drop(round);

        let second = copy_round(&mut source, &mut sinks);
        assert_eq!(second, [(Some(ByteCount(128 << 10)), 128 << 10)], "{build}");
        sinks[0].flush(true).unwrap();
        drop(sinks);
        source.resume().unwrap();
        pair.compare();
        assert_eq!(leftovers(&mut pair.source), [""; 0]);
    }
}

#[test]
fn the_granularity_follows_what_the_guest_has_written() {
    for build in qemus("the_granularity_follows_what_the_guest_has_written") {
        let images = [0, 1].map(|_| DiskImage::create("raw", ByteCount(8 * MIB)).unwrap());
        let mut guest = GuestConfig::small(Mode::Idle);
        guest.disk = DiskWork {
            write: MIB,
            block: ByteCount(32 << 10),
            span: ByteCount(8 * MIB),
            ..guest.disk
        };
        let config = VmConfig::new(&build, guest).with_disk("disk0", &images[0]);
        let mut vm = TestVm::source(&config).unwrap();
        vm.wait_ready(LIMIT).unwrap();
        vm.pause().unwrap();
        let stats = vm.qmp().execute("query-blockstats", Value::Null).unwrap();
        let number = |key: &str| stats[0]["stats"][key].as_u64().unwrap();
        let mean = number("wr_bytes") / number("wr_operations");
        let mut source = QemuSource::open(&vm.qmp_socket()).unwrap();
        source = source.with_disks(&DiskChoice::All, None).unwrap();
        assert_eq!(source.disk_writes(), Some(vec![ByteCount(number("wr_bytes"))]), "{build}");
        source.start_disk_tracking().unwrap();
        let chosen = source.disk_granularity()[0].0;
        assert!(chosen <= mean && mean < 2 * chosen, "{build}: {chosen} for a mean of {mean}");

        let idle = TestVm::source(
            &VmConfig::new(&build, GuestConfig::small(Mode::Idle)).with_disk("disk0", &images[1]),
        );
        let idle = idle.unwrap();
        let mut source = QemuSource::open(&idle.qmp_socket()).unwrap();
        source = source.with_disks(&DiskChoice::All, None).unwrap();
        source.start_disk_tracking().unwrap();
        assert_eq!(source.disk_granularity(), [ByteCount(64 << 10)], "{build}");
    }
}

#[test]
fn a_read_error_names_disk_and_offset_and_leaves_the_guest_alone() {
    for build in qemus("a_read_error_names_disk_and_offset_and_leaves_the_guest_alone") {
        let image = DiskImage::create("raw", ByteCount(8 * MIB)).unwrap();
        let file = format!("file.image.driver=file,file.image.filename={}", image.path().display());
        // Every read of the sector at 5 MiB fails.
        let error = "file.inject-error.0.event=none,file.inject-error.0.iotype=read,\
                     file.inject-error.0.sector=10240";
        let node = format!("driver=raw,node-name=bad,file.driver=blkdebug,{file},{error}");
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle));
        let config =
            config.with_extra(&["-blockdev", &node, "-device", "virtio-blk-pci,drive=bad,id=vd"]);
        let mut vm = TestVm::source(&config).unwrap();
        monitor(&mut vm, "qemu-io -d /machine/peripheral/vd/virtio-backend \"write 0 8M\"");
        let mut source = source(&vm, MIB);
        source.start_disk_tracking().unwrap();
        let mut round = source.begin_disk_round().unwrap().remove(0);
        assert!(round.next().unwrap().is_some());
        let mut bytes = vec![0; MIB as usize];
        let page = |offset: u64| PageRun::new(offset / PAGE_SIZE, 256);
        round.submit(page(4 * MIB)).and_then(|()| round.complete(&mut bytes)).unwrap();

        let error = round
            .submit(page(5 * MIB))
            .and_then(|()| round.complete(&mut bytes))
            .unwrap_err()
            .to_string();

        assert!(error.contains("'bad'") && error.contains("offset 0x500000"), "{build}: {error}");
        assert!(error.contains("EIO"), "{build}: {error}");
        drop(round);
        source.resume().unwrap();
        assert_eq!((leftovers(&mut vm), vm.status().unwrap().as_str()), (Vec::new(), "running"));
    }
}

#[test]
fn a_server_that_is_stopped_by_others_ends_the_round_with_a_reason() {
    for build in qemus("a_server_that_is_stopped_by_others_ends_the_round_with_a_reason") {
        let mut pair = Pair::start(&build, &[("qcow2", 8 * MIB)]);
        pair.disk(0, "write 0 8M");
        let mut source = source(&pair.source, MIB);
        source.start_disk_tracking().unwrap();
        let mut round = source.begin_disk_round().unwrap().remove(0);
        pair.source.qmp().execute("nbd-server-stop", Value::Null).unwrap();

        let error = round.next().unwrap_err().to_string();

        assert!(error.contains("cannot connect") && error.contains("'disk0'"), "{build}: {error}");
        drop(round);
        source.resume().unwrap();
        assert_eq!(leftovers(&mut pair.source), [""; 0], "{build}");
    }
}

#[test]
fn what_cannot_be_is_refused_and_nothing_is_touched() {
    for build in qemus("what_cannot_be_is_refused_and_nothing_is_touched") {
        let mut pair = Pair::start(&build, &[("raw", 8 * MIB)]);
        let (mut source, mut destination) = pair.open(MIB);
        let address =
            json!({ "addr": { "type": "inet", "data": { "host": "127.0.0.1", "port": "0" } } });
        for vm in [&mut pair.source, &mut pair.destination] {
            vm.qmp().execute("nbd-server-start", address.clone()).unwrap();
        }

        let error = source.start_disk_tracking().unwrap_err().to_string();
        assert!(error.contains("(exports: none)") && error.contains("nbd-server-stop"), "{error}");
        let error =
            destination.open_disks(&source.disks(), &DiskChoice::All).err().unwrap().to_string();
        assert!(error.contains("NBD server") && error.contains("nbd-server-stop"), "{error}");
        assert_eq!(leftovers(&mut pair.source), ["the server"]);
        assert_eq!(leftovers(&mut pair.destination), ["the server"]);

        let wanted = |name: &str, size| [Disk { name: name.to_owned(), size: ByteCount(size) }];
        let missing = destination
            .open_disks(&wanted("other", 8 * MIB), &DiskChoice::All)
            .err()
            .unwrap()
            .to_string();
        assert!(missing.contains("'other'") && missing.contains("disk0"), "{missing}");
        let size = destination
            .open_disks(&wanted("disk0", 9 * MIB), &DiskChoice::All)
            .err()
            .unwrap()
            .to_string();
        assert!(size.contains("9437184") && size.contains("qemu-img create -f raw"), "{size}");
        assert_eq!(leftovers(&mut pair.destination), [""; 0]);

        let on = json!({ "capabilities": [{ "capability": "dirty-bitmaps", "state": true }] });
        pair.source.qmp().execute("migrate-set-capabilities", on).unwrap();
        let error = source.start_disk_tracking().unwrap_err().to_string();
        assert!(error.contains("dirty-bitmaps"), "{error}");
        assert_eq!(leftovers(&mut pair.source), [""; 0]);
    }
}

/// Runs only in a process that `what_a_killed_godwit_leaves_is_removed_by_the_next_one` starts and
/// kills.
#[test]
#[ignore = "is killed by another test"]
fn moves_disks_until_it_is_killed() {
    let Some(sockets) = std::env::var_os("GODWIT_TEST_SOCKETS") else { return };
    let (here, there) = sockets.to_str().unwrap().split_once(',').unwrap();
    let mut source =
        QemuSource::open(here.as_ref()).unwrap().with_disks(&DiskChoice::All, None).unwrap();
    let mut destination = QemuDestination::open(there.as_ref()).unwrap();
    let mut sinks = destination.open_disks(&source.disks(), &DiskChoice::All).unwrap();
    source.start_disk_tracking().unwrap();
    copy_round(&mut source, &mut sinks);
    let _rounds = source.begin_disk_round().unwrap();
    println!("\nmoving");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn what_a_killed_godwit_leaves_is_removed_by_the_next_one() {
    for build in qemus("what_a_killed_godwit_leaves_is_removed_by_the_next_one") {
        let mut pair = Pair::start(&build, &[("raw", 8 * MIB), ("qcow2", 8 * MIB)]);
        pair.disk(0, "write 0 1M");
        let sockets =
            [&pair.source, &pair.destination].map(|vm| vm.qmp_socket().display().to_string());
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "moves_disks_until_it_is_killed", "--nocapture"])
            .env("GODWIT_TEST_SOCKETS", sockets.join(","))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        let moving = lines.map_while(Result::ok).any(|line| line == "moving");
        victim.kill().unwrap();
        victim.wait().unwrap();
        assert!(moving, "{build}");

        let nodes =
            pair.source.qmp().execute("query-named-block-nodes", json!({ "flat": true })).unwrap();
        assert!(
            nodes.to_string().contains("godwit-"),
            "{build}: it left nothing, so this shows nothing"
        );
        let source = QemuSource::open(&pair.source.qmp_socket()).unwrap();
        let destination = QemuDestination::open(&pair.destination.qmp_socket()).unwrap();

        drop((source, destination));
        assert_eq!(leftovers(&mut pair.source), [""; 0], "{build}");
        assert_eq!(leftovers(&mut pair.destination), [""; 0], "{build}");
    }
}

#[test]
fn bitmaps_of_others_and_of_a_living_godwit_are_left_alone() {
    for build in qemus("bitmaps_of_others_and_of_a_living_godwit_are_left_alone") {
        let image = DiskImage::create("qcow2", ByteCount(8 * MIB)).unwrap();
        let socket = image.path().with_extension("qmp");
        let monitor = format!("unix:{},server=on,wait=off", socket.display());
        let config =
            VmConfig::new(&build, GuestConfig::small(Mode::Idle)).with_disk("disk0", &image);
        let mut vm = TestVm::source(&config.with_extra(&["-qmp", &monitor])).unwrap();
        vm.qmp()
            .execute("block-dirty-bitmap-add", json!({ "node": "disk0", "name": "backup" }))
            .unwrap();
        let mut first = source(&vm, MIB);
        first.start_disk_tracking().unwrap();
        first.begin_disk_round().unwrap();

        let second = QemuSource::open(&socket).unwrap();
        let mut second = second.with_disks(&DiskChoice::All, None).unwrap();
        let error = second.start_disk_tracking().unwrap_err().to_string();
        assert!(
            error.contains(&format!("godwit (process {})", std::process::id())),
            "{build}: {error}"
        );
        drop(second);

        assert_eq!(first.begin_disk_round().unwrap().len(), 1, "{build}");
        first.resume().unwrap();
        assert_eq!(leftovers(&mut vm), ["\"backup\""], "{build}");
    }
}

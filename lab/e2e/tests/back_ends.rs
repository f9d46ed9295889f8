//! Disks and network cards in processes of their own: vhost-user back ends, which write guest
//! memory by page tables that are not QEMU's.
//!
//! The guest reads its disk into memory all the time and looks again at what it has read;
//! `--verify` compares all memory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use godwit_e2e::{LIMIT, Pair, await_copying, check_moved, check_untouched};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, DiskImage, Godwit, GuestConfig, Lan, Movable, QemuBuild, SlowReads, StorageDaemon,
    TestVm, VmConfig, builds_for, builds_in_turn_for, skip, soak, storage_daemon_for,
};
use godwit_units::ByteCount;

/// Reads a second that the host's disk is slowed down to.
const READS: u32 = 150;
/// Enough to be sure that a guest answers.
const ANSWERS: usize = 50;
/// There and on.
const MOVES: usize = 2;

/// An image on a file system that knows O_DIRECT, which a tmpfs may not.
fn image() -> anyhow::Result<DiskImage> {
    DiskImage::create_in(Path::new(env!("CARGO_TARGET_TMPDIR")), "raw", ByteCount(32 << 20))
}

/// A small guest that reads its disk all the time, four requests at a time, and writes a little.
fn config(build: &QemuBuild, backend: Backend, extra: &[String]) -> VmConfig {
    let disk = DiskWork {
        write: 4 << 20,
        read: 64 << 20,
        block: ByteCount(256 << 10),
        span: ByteCount(16 << 20),
        threads: 4,
    };
    let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Idle) };
    let mut config = VmConfig::new(build, guest).with_backend(backend);
    config.extra = extra.to_vec();
    config
}

/// The QEMUs that have a storage daemon.
fn builds(test: &str) -> Vec<(QemuBuild, PathBuf)> {
    let daemon = |build| Some((storage_daemon_for(&build, test)?, build));
    builds_in_turn_for(test).into_iter().filter_map(daemon).map(|(a, b)| (b, a)).collect()
}

/// A pair whose disk is served by a daemon at either end.
struct Served {
    pair: Pair,
    source: StorageDaemon,
    _destination: StorageDaemon,
    image: DiskImage,
    _slow: Option<SlowReads>,
}

impl Served {
    fn start(
        (build, program): &(QemuBuild, PathBuf),
        backend: Backend,
        options: &str,
        reconnect: bool,
    ) -> anyhow::Result<Self> {
        let image = image()?;
        let source = StorageDaemon::start(program, &image, options)?;
        let destination = StorageDaemon::start(program, &image, options)?;
        let machine = |daemon: &StorageDaemon| {
            config(build, backend, &daemon.arguments(reconnect.then_some(build)))
        };
        let pair = Pair::start_apart(&machine(&source), &machine(&destination))?;
        Ok(Self { pair, source, _destination: destination, image, _slow: None })
    }

    /// How many mappings of the source's daemon anybody watches.
    fn watched(&self) -> anyhow::Result<usize> {
        let mappings = std::fs::read_to_string(format!("/proc/{}/smaps", self.source.pid()))?;
        let flags = mappings.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
        Ok(flags.filter(|flags| flags.split_whitespace().any(|flag| flag == "uw")).count())
    }
}

/// Moves the guest of a new pair each time, until the back end of one was stopped with nothing
/// under way: qemu-storage-daemon does not bear anything else, and the move ends with a word.
fn moved(start: impl Fn() -> anyhow::Result<Served>) -> anyhow::Result<()> {
    for _ in 0..5 {
        let mut served = start()?;
        let (migrate, _) = served.pair.migrate(&["--verify", "--max-bandwidth", "200MiB/s"])?;
        if migrate.errors.contains("broke off with") {
            ensure!(served.pair.source.status()? == "running", "the guest does not run on");
            continue;
        }
        return check_moved(&mut served.pair, &migrate);
    }
    bail!("five storage daemons in a row did not bear to be stopped")
}

#[test]
fn what_a_back_end_writes_moves_with_the_guest() -> anyhow::Result<()> {
    let backends = [Backend::Memfd, Backend::SharedFile];
    for (number, qemu) in builds("what_a_back_end_writes_moves_with_the_guest").iter().enumerate() {
        // In short, one kind of RAM each.
        let chosen = if soak(0) == 0 { &backends[number % 2..=number % 2] } else { &backends[..] };
        for &backend in chosen {
            moved(|| Served::start(qemu, backend, "", false))
                .with_context(|| format!("{} {backend:?}", qemu.0))?;
        }
    }
    Ok(())
}

#[test]
fn what_lands_late_through_a_back_end_is_found() -> anyhow::Result<()> {
    let test = "what_lands_late_through_a_back_end_is_found";
    let ways = [",cache.direct=on", ",cache.direct=on,aio=io_uring"];
    for (number, qemu) in builds(test).iter().enumerate() {
        let chosen = if soak(0) == 0 { &ways[number % 2..=number % 2] } else { &ways[..] };
        for way in chosen {
            let start = || {
                let served = Served::start(qemu, Backend::Memfd, way, false)?;
                // What is read by threads lands much later.
                let slow = (*way == ways[0])
                    .then(|| SlowReads::for_test(test, &served.image.path(), READS))
                    .flatten();
                if let Some(slow) = &slow {
                    slow.add(served.source.pid())?;
                }
                Ok(Served { _slow: slow, ..served })
            };
            moved(start).with_context(|| format!("{} {way}", qemu.0))?;
        }
    }
    Ok(())
}

#[test]
fn a_back_end_that_is_replaced_meanwhile_is_followed() -> anyhow::Result<()> {
    for qemu in builds("a_back_end_that_is_replaced_meanwhile_is_followed") {
        let mut served = Served::start(&qemu, Backend::Memfd, "", true)?;
        let (receive, address) = served.pair.godwit.receive(&served.pair.destination, &[])?;
        let options = ["--verify", "--max-bandwidth", "40MiB/s"];
        let migrate = served.pair.godwit.migrate(&served.pair.source, &address, &options)?;
        await_copying(&migrate)?;
        served.source.restart()?;
        let migrate = migrate.wait(LIMIT)?;
        receive.wait(LIMIT)?;
        check_moved(&mut served.pair, &migrate).with_context(|| qemu.0.to_string())?;
    }
    Ok(())
}

/// What the guest's card receives is written to its memory by the back end alone, which has no
/// dirty log; a client compares all that the guest says again.
#[test]
fn a_connection_outlives_moves_of_a_guest_whose_card_is_a_back_ends() -> anyhow::Result<()> {
    let test = "a_connection_outlives_moves_of_a_guest_whose_card_is_a_back_ends";
    let lan = match Lan::create() {
        Ok(lan) => lan,
        Err(why) => {
            skip(test, format_args!("{why:#}"));
            return Ok(());
        }
    };
    let backends = [Backend::Memfd, Backend::SharedFile];
    for (build, backend) in builds_for(test).iter().zip(backends.iter().cycle()) {
        let config = VmConfig::new(build, GuestConfig::small(Mode::Rate)).with_backend(*backend);
        let (source, first) = lan.attach_beside(&config)?;
        let (destination, second) = lan.attach_beside(&config)?;
        let mut pair = Pair::start_apart(&source, &destination)?;
        let (talk, pings) = (lan.talk()?, lan.ping()?);
        talk.await_answers(ANSWERS)?;
        pings.await_answers(ANSWERS, LIMIT)?;
        let name = pair.source.vm_name();
        let plan = pair.godwit.run(&["plan", "--vm", &name, "--for", "200ms", "--json"])?;
        let plan: serde_json::Value = serde_json::from_slice(&plan.stdout)?;
        let writers = serde_json::json!([format!("qemu {}", pair.source.pid()), first.name()]);
        ensure!(plan["writers"] == writers, "{build}: {plan}");
        let mut back_ends = vec![first, second];
        for _ in 0..MOVES {
            let (migrate, _) = pair.migrate(&["--verify", "--max-bandwidth", "200MiB/s"])?;
            check_moved(&mut pair, &migrate).with_context(|| build.to_string())?;
            pair.source.kill();
            talk.await_answers(ANSWERS)?;
            pings.await_answers(ANSWERS, LIMIT)?;
            let (next, back_end) = lan.attach_beside(&config)?;
            back_ends.push(back_end);
            pair.move_on(TestVm::destination(&next)?);
        }
        let (talked, pinged) = (talk.finish()?, pings.finish()?);
        ensure!(pair.source.errors() == "", "{build}: {}", pair.source.errors());
        println!("{build}: {} messages, {} pings", talked.answered.len(), pinged.answered.len());
    }
    Ok(())
}

#[test]
fn nothing_of_a_killed_godwit_stays_in_a_back_end() -> anyhow::Result<()> {
    // In short, one QEMU will do: what is left is the kernel's.
    if let Some(qemu) = builds("nothing_of_a_killed_godwit_stays_in_a_back_end").pop() {
        let mut served = Served::start(&qemu, Backend::Memfd, "", false)?;
        let (mut receive, address) = served.pair.godwit.receive(&served.pair.destination, &[])?;
        let options = ["--max-bandwidth", "10MiB/s"];
        let mut migrate = served.pair.godwit.migrate(&served.pair.source, &address, &options)?;
        await_copying(&migrate)?;
        ensure!(served.watched()? > 0, "the back end is not tracked");
        migrate.kill();
        receive.kill();
        check_untouched(&mut served.pair.source)?;
        ensure!(served.watched()? == 0, "something watches the memory of the back end");
    }
    Ok(())
}

#[test]
fn back_ends_are_shown_and_those_with_devices_of_their_own_refused() -> anyhow::Result<()> {
    let test = "back_ends_are_shown_and_those_with_devices_of_their_own_refused";
    let Some((build, program)) = builds(test).pop() else { return Ok(()) };
    let image = image()?;
    let daemon = StorageDaemon::start(&program, &image, "")?;
    let vm = TestVm::source(&config(&build, Backend::Memfd, &daemon.arguments(None)))?;
    vm.wait_ready(LIMIT)?;
    let name = vm.vm_name();
    let plan = Godwit::built()?.run(&["plan", "--vm", &name, "--for", "200ms", "--json"])?;
    let plan: serde_json::Value = serde_json::from_slice(&plan.stdout)?;
    let back_end = format!("qemu-storage-daemon {} (vhost-user-blk 'vb0')", daemon.pid());
    let writers = [format!("qemu {}", vm.pid()), back_end];
    ensure!(plan["writers"] == serde_json::json!(writers), "{}", plan["writers"]);
    drop((vm, daemon));

    let bars = std::fs::read_dir("/sys/bus/pci/devices")?.flatten();
    let bar = bars.map(|device| device.path().join("resource")).find_map(|it| File::open(it).ok());
    let Some(bar) = bar else {
        skip(test, "there is no PCI device to have open");
        return Ok(());
    };
    let daemon = StorageDaemon::start_holding(&program, &image, "", bar.into())?;
    let vm = TestVm::source(&config(&build, Backend::Memfd, &daemon.arguments(None)))?;
    let refused = Godwit::built()?.migrate(&vm, "127.0.0.1:1", &[])?.wait(LIMIT)?;
    let named = format!("qemu-storage-daemon {} (vhost-user-blk 'vb0')", daemon.pid());
    for words in [named.as_str(), "/resource open", "behind the page tables"] {
        ensure!(refused.errors.contains(words), "'{words}' is not in: {}", refused.errors);
    }
    ensure!(refused.status.code() == Some(1), "{}", refused.status);
    Ok(())
}

#[test]
fn a_file_system_whose_back_end_has_files_open_is_refused() -> anyhow::Result<()> {
    let test = "a_file_system_whose_back_end_has_files_open_is_refused";
    for build in builds_in_turn_for(test) {
        let Some(served) = FileSystem::start(test)? else { return Ok(()) };
        let chardev = format!("socket,id=fs0,path={}", served.socket.display());
        let device = "vhost-user-fs-pci,id=fs,chardev=fs0,tag=files";
        let extra = ["-chardev", &chardev, "-device", device].map(str::to_owned);
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle));
        let config = VmConfig { extra: extra.to_vec(), ..config.with_backend(Backend::Memfd) };
        let mut vm = TestVm::source(&config)?;
        let refused = Godwit::built()?.migrate(&vm, "127.0.0.1:1", &[])?.wait(LIMIT)?;
        // QEMU 7.2 refuses it by itself.
        let words = match build.version.0 {
            ..8 => "non-migratable device",
            _ => "vhost-user-fs 'fs' is a vhost-user device that cannot move: the files",
        };
        ensure!(refused.errors.contains(words), "{build}: {}", refused.errors);
        ensure!(refused.status.code() == Some(1), "{}", refused.status);
        ensure!(vm.status()? == "running", "{build}: the guest does not run");
    }
    Ok(())
}

/// QEMU 7.2's virtiofsd.
struct FileSystem {
    child: Child,
    dir: PathBuf,
    socket: PathBuf,
}

impl FileSystem {
    /// `None`, told aloud, where there is none.
    fn start(test: &str) -> anyhow::Result<Option<Self>> {
        let program = Path::new("/usr/lib/qemu/virtiofsd");
        if !program.exists() {
            skip(test, "there is no virtiofsd: run `make qemu`");
            return Ok(None);
        }
        let dir = std::env::temp_dir().join(format!("godwit-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let socket = dir.join("socket");
        let _ = std::fs::remove_file(&socket);
        let source = format!("source={}", dir.display());
        let child = Command::new(program)
            .arg(format!("--socket-path={}", socket.display()))
            .args(["-o", &source, "-o", "sandbox=chroot"])
            .stderr(Stdio::null())
            .spawn()?;
        let served = Self { child, dir, socket };
        let until = Instant::now() + LIMIT;
        while !served.socket.exists() {
            ensure!(Instant::now() < until, "virtiofsd does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Some(served))
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

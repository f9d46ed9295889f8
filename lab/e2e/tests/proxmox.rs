//! VMs as Proxmox VE starts them, reproduced with stock QEMU: one monitor, which Proxmox connects
//! to for each command anew, with time-outs of five seconds.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, await_copying, await_quit, check_refused, oldest};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    Backend, DiskImage, Godwit, GuestConfig, Movable, QemuBuild, Room, TestVm, VmConfig,
    builds_for, builds_in_turn_for, images_for,
};
use godwit_units::ByteCount;
use rustix::process::Signal;
use serde_json::{Value, json};

/// Proxmox gives up on a monitor after so long (PVE::QMPClient).
const ITS_LIMIT: Duration = Duration::from_secs(5);

/// What Proxmox has on a node, in a directory.
struct Node(Room);

impl Node {
    fn new() -> anyhow::Result<Self> {
        let node = Self(Room::new()?);
        for directory in ["var/run/qemu-server", "var/lock/qemu-server", "etc/pve/qemu-server"] {
            std::fs::create_dir_all(node.path(directory))?;
        }
        std::fs::write(node.definition(), "#a VM\ncores: 1\nmemory: 256\n")?;
        Ok(node)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.dir().join(path)
    }

    fn definition(&self) -> PathBuf {
        self.path("etc/pve/qemu-server/100.conf")
    }

    fn monitor(&self) -> PathBuf {
        self.path("var/run/qemu-server/100.qmp")
    }

    /// As PVE::QemuServer::config_to_command writes it, but for options of Proxmox's own QEMU (-id)
    /// and for -daemonize.
    fn config(&self, build: &QemuBuild) -> VmConfig {
        let monitor = format!("socket,id=qmp,path={},server=on,wait=off", self.monitor().display());
        let pid_file = self.path("var/run/qemu-server/100.pid").display().to_string();
        let config = VmConfig::new(build, GuestConfig::small(Mode::Rate));
        config.with_backend(Backend::Anonymous).with_extra(&[
            "-name",
            "vm100,debug-threads=on",
            "-no-shutdown",
            "-chardev",
            &monitor,
            "-mon",
            "chardev=qmp,mode=control",
            "-pidfile",
            &pid_file,
            "-object",
            "iothread,id=iothread-virtio0",
            "-device",
            "vmgenid,guid=9f3b8b1c-6a52-4d0f-9a52-000000000100",
        ])
    }

    fn godwit(&self) -> anyhow::Result<Godwit> {
        let root = self.0.dir().display().to_string();
        Ok(Godwit::built()?.with_variable("GODWIT_PROXMOX_ROOT", &root))
    }
}

/// Proxmox's own daemons, which ask a VM for its state again and again.
struct Daemon {
    over: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<Vec<Duration>>>,
}

impl Daemon {
    fn start(monitor: PathBuf) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let mut waits = Vec::new();
            while !until.load(Ordering::Relaxed) {
                let began = Instant::now();
                match ask(&monitor) {
                    Ok(()) => waits.push(began.elapsed()),
                    // Its VM has left.
                    Err(_) if is_gone(&monitor) => break,
                    Err(error) => return Err(error.context(format!("{:?}", began.elapsed()))),
                }
                std::thread::sleep(Duration::from_millis(500));
            }
            Ok(waits)
        });
        Self { over, thread }
    }

    /// How often it was served, and the longest wait.
    fn finish(self) -> anyhow::Result<(usize, Duration)> {
        self.over.store(true, Ordering::Relaxed);
        let waits = self.thread.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
        Ok((waits.len(), waits.into_iter().max().context("it was never served")?))
    }
}

/// Whether nobody listens there any more: a QEMU that quits closes one socket after the other.
fn is_gone(monitor: &Path) -> bool {
    let until = Instant::now() + Duration::from_secs(5);
    while UnixStream::connect(monitor).is_ok() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Connects, asks for the state, and goes.
fn ask(monitor: &Path) -> anyhow::Result<()> {
    let mut stream = UnixStream::connect(monitor)?;
    stream.set_read_timeout(Some(ITS_LIMIT))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut answers = 0;
    let mut line = String::new();
    reader.read_line(&mut line).context("no greeting")?;
    for command in ["qmp_capabilities", "query-status"] {
        writeln!(stream, "{}", json!({ "execute": command, "id": command }))?;
        loop {
            line.clear();
            ensure!(reader.read_line(&mut line)? > 0, "the monitor was closed");
            let answer: Value = serde_json::from_str(&line)?;
            if answer["id"] == command {
                answers += 1;
                break;
            }
        }
    }
    ensure!(answers == 2, "{answers} answers");
    Ok(())
}

fn source(node: &Node, build: &QemuBuild) -> anyhow::Result<TestVm> {
    let vm = TestVm::source(&node.config(build))?;
    vm.wait_ready(LIMIT)?;
    vm.wait_for_heartbeats_after(Instant::now(), 2, LIMIT)?;
    Ok(vm)
}

/// It runs on, and Proxmox knows nothing of a move.
fn check_stays(node: &Node, vm: &mut TestVm) -> anyhow::Result<()> {
    vm.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    ensure!(vm.status()? == "running" && vm.bugs().is_empty(), "{:?}", vm.bugs());
    ensure!(!std::fs::read_to_string(node.definition())?.contains("lock:"));
    let until = Instant::now() + LIMIT;
    while vm.qmp().execute("query-fdsets", Value::Null)? != json!([]) {
        ensure!(Instant::now() < until, "QEMU has a descriptor of godwit's still");
        std::thread::sleep(Duration::from_millis(20));
    }
    ask(&node.monitor())
}

/// The guardian runs the guest first.
fn await_unlocked(node: &Node) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while std::fs::read_to_string(node.definition())?.contains("lock:") {
        ensure!(Instant::now() < until, "the lock stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn moves(build: &QemuBuild) -> anyhow::Result<()> {
    let node = Node::new()?;
    let mut vm = source(&node, build)?;
    let plain = VmConfig::new(build, GuestConfig::small(Mode::Rate));
    let plain = plain.with_backend(Backend::Anonymous);
    let alike = ["-device", "vmgenid,guid=9f3b8b1c-6a52-4d0f-9a52-000000000100"];
    let mut destination = TestVm::destination(&plain.with_extra(&alike))?;
    let godwit = node.godwit()?;
    let daemon = Daemon::start(node.monitor());

    let (_receive, address) = godwit.receive(&destination, &[])?;
    // It takes some seconds, in which Proxmox asks all the time.
    let slow = ["--verify", "--max-bandwidth", "30MiB/s"];
    let migrate = godwit.migrate_named("proxmox:100", &address, &slow)?;
    let migrate = migrate.wait(LIMIT)?;

    ensure!(migrate.last()["outcome"] == "migrated", "{} {}", migrate.last(), migrate.errors);
    // Mutation: a monitor that is held all through the copying makes the daemon wait in vain.
    let (served, longest) = daemon.finish().with_context(|| build.to_string())?;
    ensure!(served > 1 && longest < ITS_LIMIT, "{served} times, {longest:?}");
    await_quit(&mut vm)?;
    destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    ensure!(destination.status()? == "running");
    ensure!([vm.bugs(), destination.bugs()].concat().is_empty());
    // Nobody starts it here again.
    let definition = std::fs::read_to_string(node.definition())?;
    ensure!(definition.starts_with("#a VM\nlock: migrate\ncores: 1\n"), "{definition}");
    Ok(())
}

#[test]
fn a_vm_of_proxmoxs_moves_and_proxmox_is_served_all_the_while() -> anyhow::Result<()> {
    let test = "a_vm_of_proxmoxs_moves_and_proxmox_is_served_all_the_while";
    let builds = builds_for(test);
    if builds.is_empty() { Ok(()) } else { moves(oldest(&builds)?) }
}

#[test]
#[ignore = "takes half a minute: make test-long"]
fn a_disk_of_a_vm_of_proxmoxs_moves_along() -> anyhow::Result<()> {
    let test = "a_disk_of_a_vm_of_proxmoxs_moves_along";
    if !images_for(test) {
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let image = || DiskImage::create("qcow2", ByteCount(48 << 20));
        let (from, to) = (image()?, image()?);
        let span = ByteCount(16 << 20);
        let work = DiskWork { write: 2 << 20, read: 2 << 20, span, ..DiskWork::default() };
        let node = Node::new()?;
        let mut config = node.config(&build).with_disk("disk0", &from);
        config.guest.disk = work;
        let vm = TestVm::source(&config)?;
        vm.wait_ready(LIMIT)?;
        let plain = VmConfig::new(&build, config.guest).with_backend(Backend::Anonymous);
        let alike = ["-device", "vmgenid,guid=9f3b8b1c-6a52-4d0f-9a52-000000000100"];
        let destination = TestVm::destination(&plain.with_extra(&alike).with_disk("disk0", &to))?;
        let godwit = node.godwit()?;
        let daemon = Daemon::start(node.monitor());
        let disks = ["--disks", "all", "--verify"];
        let (_receive, address) = godwit.receive(&destination, &disks[..2])?;
        let migrate = godwit.migrate_named("proxmox:100", &address, &disks)?.wait(LIMIT)?;
        ensure!(migrate.last()["outcome"] == "migrated", "{} {}", migrate.last(), migrate.errors);
        let (_, longest) = daemon.finish().with_context(|| build.to_string())?;
        ensure!(longest < ITS_LIMIT, "{longest:?}");
        destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
        ensure!([vm.bugs(), destination.bugs()].concat().is_empty());
    }
    Ok(())
}

#[test]
#[ignore = "takes half a minute: make test-long"]
fn vms_of_proxmoxs_with_each_qemu() -> anyhow::Result<()> {
    builds_for("vms_of_proxmoxs_with_each_qemu").iter().try_for_each(moves)
}

#[test]
fn whatever_fails_proxmox_has_its_vm_and_its_monitor() -> anyhow::Result<()> {
    let test = "whatever_fails_proxmox_has_its_vm_and_its_monitor";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let node = Node::new()?;
    let mut vm = source(&node, oldest(&builds)?)?;
    let plain = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate));
    let plain = plain.with_backend(Backend::Anonymous);
    let alike = ["-device", "vmgenid,guid=9f3b8b1c-6a52-4d0f-9a52-000000000100"];
    let config = plain.with_extra(&alike);
    let godwit = node.godwit()?;

    let destination = TestVm::destination(&config)?;
    let (receive, address) = godwit.receive(&destination, &[])?;
    let slow = ["--max-bandwidth", "20MiB/s"];
    let migrate = godwit.migrate_named("proxmox:100", &address, &slow)?;
    await_copying(&migrate)?;
    migrate.signal(Signal::INT)?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    receive.wait(LIMIT)?;
    check_stays(&node, &mut vm).context("cancelled")?;

    // A task of Proxmox's begins while it copies.
    let (receive, address) = godwit.receive(&destination, &[])?;
    let migrate = godwit.migrate_named("proxmox:100", &address, &slow)?;
    await_copying(&migrate)?;
    let free = std::fs::read_to_string(node.definition())?;
    std::fs::write(node.definition(), format!("lock: backup\n{free}"))?;
    let migrate = migrate.wait(LIMIT)?;
    receive.wait(LIMIT)?;
    std::fs::write(node.definition(), free)?;
    ensure!(migrate.errors.contains("locked by Proxmox (backup)"), "{}", migrate.errors);
    check_stays(&node, &mut vm).context("locked")?;

    // The guardian comes to the monitor by its socket.
    let state = ["--fault", "kill-after-state"];
    let log = ["--log", "godwit_engine=debug,godwit_qemu=trace"];
    let post_copy = ["--postcopy", "now", "--reconnect", "60s"];
    let at_once = [&["--fault", "kill-after-release"][..], &post_copy, &log].concat();
    for options in [&["--fault", "kill-after-stop"][..], &state, &at_once] {
        let destination = TestVm::destination(&config)?;
        let (_receive, address) = godwit.receive(&destination, &[])?;
        let migrate = godwit.migrate_named("proxmox:100", &address, options)?;
        let migrate = migrate.wait(LIMIT)?;
        await_unlocked(&node)?;
        check_stays(&node, &mut vm).with_context(|| format!("{options:?}"))?;
        // No answer is left to a connection that is let go of: it was heard before the kill.
        let saved = ["answered", "\"xen-save-devices-state\""];
        let heard = |line: &str| saved.iter().all(|word| line.contains(word));
        let told = !options.contains(&"--log") || migrate.errors.lines().any(heard);
        ensure!(told, "{}", migrate.errors);
    }
    // Killed where it is in doubt who has the guest: nobody here may start it.
    let destination = TestVm::destination(&config)?;
    let (_receive, address) = godwit.receive(&destination, &[])?;
    godwit
        .migrate_named("proxmox:100", &address, &["--fault", "kill-before-commit"])?
        .wait(LIMIT)?;
    ensure!(std::fs::read_to_string(node.definition())?.contains("lock: migrate"));
    Ok(())
}

#[test]
fn what_proxmox_is_at_work_on_is_refused_and_listed() -> anyhow::Result<()> {
    let test = "what_proxmox_is_at_work_on_is_refused_and_listed";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let node = Node::new()?;
    let vm = source(&node, oldest(&builds)?)?;
    let godwit = node.godwit()?;
    let listed = || -> anyhow::Result<Value> {
        let output = godwit.done(&["list", "--json", &vm.pid().to_string()])?;
        let list: Value = serde_json::from_slice(&output.stdout)?;
        Ok(list["vms"][0].clone())
    };
    let seen = listed()?;
    ensure!(seen["by"] == "proxmox" && seen["id"] == "100" && seen["name"] == "vm100", "{seen}");
    ensure!(seen["vm"] == "proxmox:100" && seen["moves"] == true, "{seen}");
    let status = godwit.done(&["status", "--json", "--vm", "proxmox:100"])?;
    ensure!(String::from_utf8_lossy(&status.stdout).contains("running"));

    std::fs::write(node.definition(), "lock: snapshot\ncores: 1\n")?;
    let seen = listed()?;
    let why = seen["why"].as_str().unwrap_or_default();
    ensure!(seen["moves"] == false && why.contains("(snapshot)"), "{seen}");
    let migrate = godwit.migrate_named("proxmox:100", "127.0.0.1:1", &[])?.wait(LIMIT)?;
    check_refused(&migrate, 1, &["VM 100 is locked by Proxmox (snapshot)", "qm unlock 100"])?;
    let migrate = godwit.migrate_named("proxmox:101", "127.0.0.1:1", &[])?.wait(LIMIT)?;
    check_refused(&migrate, 1, &["there is no VM 101 here"])
}

#[test]
fn a_node_is_emptied_of_the_vms_that_run_there() -> anyhow::Result<()> {
    let test = "a_node_is_emptied_of_the_vms_that_run_there";
    let builds = builds_for(test);
    if builds.is_empty() {
        return Ok(());
    }
    let node = Node::new()?;
    let build = oldest(&builds)?;
    let mut vm = source(&node, build)?;
    // One that does not run any more, whose files are there.
    std::fs::write(node.path("etc/pve/qemu-server/101.conf"), "memory: 512\n")?;
    std::fs::write(node.path("var/run/qemu-server/101.pid"), "999999999\n")?;
    let definition = "#a VM\ncores: 1\nmemory: 999\ncpu: EPYC-Milan\nscsi0: a:b,size=32G\n";
    std::fs::write(node.definition(), definition)?;
    let plain = VmConfig::new(build, GuestConfig::small(Mode::Rate));
    let alike = ["-device", "vmgenid,guid=9f3b8b1c-6a52-4d0f-9a52-000000000100"];
    let config = plain.with_backend(Backend::Anonymous).with_extra(&alike);
    let destination = TestVm::destination(&config)?;
    let godwit = node.godwit()?;
    let receive = [
        &godwit.program().display().to_string(),
        "receive",
        "--vm",
        &destination.vm_name(),
        "--listen",
        "127.0.0.1:0",
        "--json",
    ];
    let list = node.path("list.json");
    let host = json!({ "name": "east", "memory": "8GiB", "receive": receive });
    std::fs::write(&list, json!({ "destination": [host] }).to_string())?;
    let (list, state) = (list.display().to_string(), node.path("state").display().to_string());
    let name = format!("p{}", std::process::id());
    let run = |words: &[&str]| {
        let fixed =
            ["evacuate", &list, "--from", "proxmox", "--name", &name, "--state-dir", &state];
        let output = godwit.run(&[&fixed[..], words].concat())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let last = text.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
        anyhow::Ok((last.unwrap_or_default(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    let (plan, errors) = run(&["--dry-run", "--json"])?;
    let planned = &plan["vms"][0];
    ensure!(plan["vms"].as_array().is_some_and(|vms| vms.len() == 1), "{plan} {errors}");
    ensure!(planned["vm"] == "proxmox:100" && planned["cpu"] == "EPYC-Milan", "{plan}");
    // What it has, and not what its definition says.
    let memory = GuestConfig::small(Mode::Rate).memory;
    ensure!(planned["memory_bytes"] == memory.0, "{plan}");
    ensure!(planned["disk_bytes"]["scsi0"] == 32_u64 << 30, "{plan}");

    // The same from elsewhere, where no Proxmox is.
    let root = node.0.dir().display().to_string();
    let on = format!("env GODWIT_PROXMOX_ROOT={root} {}", godwit.program().display());
    let words = ["evacuate", &list, "--from", "proxmox", "--on", &on, "--dry-run", "--json"];
    let from_elsewhere = Godwit::built()?.done(&words)?;
    ensure!(serde_json::from_slice::<Value>(&from_elsewhere.stdout)?["vms"] == plan["vms"]);

    std::fs::write(node.definition(), format!("lock: backup\n{definition}"))?;
    let (_, errors) = run(&[])?;
    let words = "cannot be moved: 100 (VM 100 is locked by Proxmox (backup)";
    ensure!(errors.contains(words), "{errors}");
    std::fs::write(node.definition(), definition)?;

    let (report, errors) = run(&["--json"])?;
    ensure!(report["moved"] == 1 && report["stayed"] == 0, "{report} {errors}");
    await_quit(&mut vm)?;
    destination.wait_for_heartbeats_after(Instant::now(), 3, LIMIT)?;
    ensure!([vm.bugs(), destination.bugs()].concat().is_empty());
    let (_, errors) = run(&["--dry-run"])?;
    ensure!(errors.contains("no VM runs in Proxmox VE on this node"), "{errors}");
    Ok(())
}

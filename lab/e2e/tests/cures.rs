//! A mistake of the operator is noticed soon, and the words say who is in the way and what to do.

use std::fs::Permissions;
use std::io::Write;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{
    LIMIT, MicroPair, Pair, await_copying, check_moved, check_refused, check_untouched, oldest,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, DiskImage, Godwit, GuestConfig, Movable, TestVm, VmConfig, builds_for,
    builds_in_turn_for, images_for, skip,
};
use godwit_units::ByteCount;

const SLOW: &[&str] = &["--max-bandwidth", "2MiB/s", "--compression", "none"];
/// A user who may do nothing.
const NOBODY: u32 = 65534;

fn image(mib: u64) -> anyhow::Result<DiskImage> {
    DiskImage::create("raw", ByteCount(mib << 20))
}

/// What `godwit` says on both outputs when `nobody` runs it.
fn as_nobody(godwit: &Godwit, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(godwit.program());
    let output =
        command.args(arguments).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").output()?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn a_wrong_port_is_noticed_soon() -> anyhow::Result<()> {
    let options = ["--memory", "64MiB", "--mode", "idle"];
    let Some(pair) = MicroPair::start("a_wrong_port_is_noticed_soon", &options)? else {
        return Ok(());
    };
    let silent = "takes connections and does not greet as godwit does within 2s";
    let answers: [(&[u8], &str); 2] =
        [(b"", silent), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it began with \"HTTP/1.1\"")];
    for (answer, words) in answers {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let stranger = std::thread::spawn(move || -> std::io::Result<_> {
            let (mut stream, _) = listener.accept()?;
            stream.write_all(answer)?;
            // As long as this thread is not joined the connection stands.
            Ok(stream)
        });
        let began = Instant::now();
        let ended = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
        ensure!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        check_refused(&ended, 1, &[words, "godwit receive"])?;
        drop(stranger.join());
    }
    pair.check_untouched()
}

#[test]
fn a_receive_that_is_busy_says_so_to_another_source() -> anyhow::Result<()> {
    let test = "a_receive_that_is_busy_says_so_to_another_source";
    let options = ["--memory", "64MiB", "--mode", "rate"];
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    let Some(other) = MicroPair::start(test, &options)? else { return Ok(()) };
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    let second = other.godwit.migrate(&other.source, &address, &[])?.wait(LIMIT)?;

    let words = [
        "the destination is busy: it has been taking in the guest of 127.0.0.1:",
        "wait for its end",
    ];
    check_refused(&second, 1, &words)?;
    other.check_untouched()?;
    migrate.signal(rustix::process::Signal::INT).context("cannot cancel")?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    let received = receive.wait(LIMIT)?;
    ensure!(
        received.errors.contains("another source came, from 127.0.0.1:"),
        "{}",
        received.errors
    );
    pair.check_untouched()
}

#[test]
fn who_comes_second_is_told_of_the_first() -> anyhow::Result<()> {
    let builds = builds_for("who_comes_second_is_told_of_the_first");
    if builds.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate)))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    let second = pair.godwit.migrate(&pair.source, "127.0.0.1:1", &[])?.wait(LIMIT)?;
    let first = format!("process {} (godwit migrate) is at work at the monitor", migrate.pid());
    check_refused(&second, 1, &[&first, &format!("godwit cancel --migration {}", migrate.pid())])?;
    let name = pair.destination.vm_name();
    let second = pair.godwit.run(&["receive", "--vm", &name, "--listen", "127.0.0.1:0"])?;
    let words = String::from_utf8_lossy(&second.stderr).into_owned();
    ensure!(
        words.contains(&format!("process {} (godwit receive) is at work", receive.pid())),
        "{words}"
    );

    // Root's migrations are not another user's, who is told that there may be some, and what would
    // help.
    if rustix::process::getuid().is_root() {
        let said = as_nobody(&pair.godwit, &["status"])?;
        for words in ["no migration runs that you can see", "/run/godwit", "ask as root"] {
            ensure!(
                said.split_whitespace().collect::<Vec<_>>().join(" ").contains(words),
                "{said}"
            );
        }
        let said = as_nobody(
            &pair.godwit,
            &["migrate", "--vm", &pair.source.vm_name(), "--to", "127.0.0.1:1"],
        )?;
        ensure!(said.contains("run godwit as root or as the user that runs QEMU"), "{said}");
    }

    migrate.signal(rustix::process::Signal::INT).context("cannot cancel")?;
    ensure!(migrate.wait(LIMIT)?.status.code() == Some(130));
    let received = receive.wait(LIMIT)?;
    ensure!(received.last()["vm_waits"] == true, "{}", received.last());
    ensure!(
        received.errors.contains("the VM goes on waiting: run godwit receive again"),
        "{}",
        received.errors
    );
    // The question that an operator in doubt asks, on either side.
    for (vm, state) in [(&pair.source, "running"), (&pair.destination, "inmigrate")] {
        let name = vm.vm_name();
        let said = pair.godwit.done(&["status", "--vm", &name])?;
        ensure!(
            String::from_utf8_lossy(&said.stdout) == format!("{name} is {state}\n"),
            "{said:?}"
        );
    }
    check_untouched(&mut pair.source)
}

/// What a disk is refused with is followed as it is printed, and leads to a guest that has moved
/// with its disk.
#[test]
fn the_cures_for_a_disk_are_followed_as_printed() -> anyhow::Result<()> {
    let test = "the_cures_for_a_disk_are_followed_as_printed";
    let builds = if images_for(test) { builds_in_turn_for(test) } else { Vec::new() };
    for build in builds {
        let (own, other) = (image(64)?, image(32)?);
        let config = |image: &DiskImage| {
            VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_disk("disk0", image)
        };
        let mut pair = Pair::start_apart(&config(&own), &config(&other))?;

        let (migrate, _) = pair.migrate(&["--disks", "all"])?;
        check_refused(
            &migrate,
            1,
            &["disk 'disk0' has 67108864 bytes at the source and 33554432 here"],
        )?;
        let printed = migrate
            .errors
            .split_once("qemu-img create")
            .and_then(|(_, rest)| rest.split_once(" ("));
        let (arguments, _) = printed.context("no command was printed")?;
        pair.destination.kill();
        let cure = format!("qemu-img create{arguments}");
        ensure!(Command::new("sh").args(["-c", &cure]).output()?.status.success(), "{cure}");

        let mut locked = config(&other);
        locked
            .extra
            .iter_mut()
            .for_each(|word| *word = word.replace("driver=raw,", "driver=raw,read-only=on,"));
        pair.destination = TestVm::destination(&locked)?;
        let (migrate, _) = pair.migrate(&["--disks", "all"])?;
        let words =
            ["disk 'disk0' cannot move: it is read-only at the destination", "read-only=off"];
        check_refused(&migrate, 1, &words)?;
        check_untouched(&mut pair.source)?;

        let mut open = locked.clone();
        open.extra
            .iter_mut()
            .for_each(|word| *word = word.replace("read-only=on", "read-only=off"));
        pair.destination = TestVm::destination(&open)?;
        let (migrate, _) = pair.migrate(&["--disks", "all", "--verify"])?;
        check_moved(&mut pair, &migrate)?;
        drop(pair);
        own.compare(&other)?;
    }
    Ok(())
}

/// A QEMU loads a guest once. That it is used up is said, and what to do, and that does it.
#[test]
fn a_qemu_whose_load_failed_is_started_again_as_told() -> anyhow::Result<()> {
    for build in builds_in_turn_for("a_qemu_whose_load_failed_is_started_again_as_told") {
        let config = |extra: &[&str]| {
            VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_extra(extra)
        };
        let more = config(&["-device", "virtio-rng-pci"]);
        let mut pair = Pair::start_apart(&more, &config(&[]))?;

        let (migrate, receive) = pair.migrate(&["--allow-differences", "all"])?;

        ensure!(migrate.status.code() == Some(1), "{}: {}", migrate.status, migrate.errors);
        ensure!(receive.last()["vm_waits"] == false, "{}", receive.last());
        let words = "its QEMU has ended, since it can load only once: start it again with \
                     -incoming defer, then godwit receive";
        ensure!(receive.errors.contains(words), "{}", receive.errors);
        ensure!(!pair.destination.is_alive(), "it was said to have ended");
        check_untouched(&mut pair.source)?;

        pair.destination = TestVm::destination(&more)?;
        let (migrate, _) = pair.migrate(&["--verify"])?;
        check_moved(&mut pair, &migrate)?;
    }
    Ok(())
}

/// A program of another name, which connects to the monitor and keeps it.
struct Holder(std::process::Child);

impl Holder {
    fn of(socket: &Path, name: &str) -> anyhow::Result<Self> {
        let connection = OwnedFd::from(UnixStream::connect(socket)?);
        let mut sleep = Command::new("sleep");
        Ok(Self(sleep.arg0(format!("/usr/sbin/{name}")).arg("600").stdin(connection).spawn()?))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn who_holds_a_monitor_is_named_and_what_to_do() -> anyhow::Result<()> {
    // Mutation: the other end of the connection is not looked for. Then nobody is named.
    let test = "who_holds_a_monitor_is_named_and_what_to_do";
    let builds = builds_for(test);
    let Ok(build) = oldest(&builds) else { return Ok(()) };
    let mut vm = TestVm::source(&VmConfig::new(build, GuestConfig::small(Mode::Idle)))?;
    vm.wait_ready(LIMIT)?;
    let godwit = Godwit::built()?;
    let names = [vm.vm_name(), format!("pid:{}", vm.pid())];
    let cases =
        [("libvirtd", "libvirt keeps it"), ("qmp-shell", "wait until it lets go or end it")];
    for (program, cure) in cases {
        let holder = Holder::of(&vm.qmp_socket(), program)?;
        for name in &names {
            let refused = godwit.run(&["plan", "--vm", name, "--for", "1s"])?;
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            let whom = format!("process {} ({program})", holder.0.id());
            for words in
                [&whom, cure, "one more -qmp option", &vm.qmp_socket().display().to_string()]
            {
                ensure!(said.contains(words), "'{words}' is not in: {said}");
            }
        }
    }
    check_untouched(&mut vm)
}

/// Who may reach the monitor and not the process is told whose it is, also where no file holds
/// the guest's memory.
#[test]
fn who_may_not_trace_is_told_why() -> anyhow::Result<()> {
    let test = "who_may_not_trace_is_told_why";
    if !rustix::process::getuid().is_root() {
        skip(test, "only root can be another user for a moment");
        return Ok(());
    }
    for build in builds_in_turn_for(test) {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle));
        let mut vm = TestVm::source(&config.with_backend(Backend::Anonymous))?;
        vm.wait_ready(LIMIT)?;
        let godwit = Godwit::built()?;
        let (name, socket) = (vm.vm_name(), vm.qmp_socket());
        let open = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode));
        open(socket.parent().context("no directory")?, 0o755)?;
        open(&socket, 0o666)?;
        let whose = format!("it belongs to user 0, and godwit runs as user {NOBODY}");
        let right = format!("no right to trace process {}", vm.pid());
        for arguments in
            [&["migrate", "--vm", &name, "--to", "127.0.0.1:1"][..], &["plan", "--vm", &name]]
        {
            let said = as_nobody(&godwit, arguments)?;
            for words in [&right, &whose, "run godwit as root or as the user that runs QEMU"] {
                ensure!(said.contains(words), "{build}: '{words}' is not in: {said}");
            }
        }
        // Its command line is open to all, what it has open is not.
        let number = format!("pid:{}", vm.pid());
        let said = as_nobody(&godwit, &["plan", "--vm", &number])?;
        ensure!(said.contains("is it running, and godwit root or its user?"), "{said}");
        check_untouched(&mut vm)?;
    }
    Ok(())
}

/// Who may not open a RAM file or a control socket is told who may.
#[test]
fn another_user_is_told_who_may() -> anyhow::Result<()> {
    let test = "another_user_is_told_who_may";
    if !rustix::process::getuid().is_root() {
        skip(test, "only root can be another user for a moment");
        return Ok(());
    }
    let builds = builds_for(test);
    if let Ok(build) = oldest(&builds) {
        let mut vm = TestVm::source(&VmConfig::new(build, GuestConfig::small(Mode::Idle)))?;
        vm.wait_ready(LIMIT)?;
        let godwit = Godwit::built()?;
        let (name, socket) = (vm.vm_name(), vm.qmp_socket());
        let migrate = ["migrate", "--vm", &name, "--to", "127.0.0.1:1"];
        // As a group of operators might have it: they reach the monitor, and not the guest's
        // memory.
        let open = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode));
        open(socket.parent().context("no directory")?, 0o755)?;
        open(&socket, 0o666)?;
        open(vm.ram_file(), 0o600)?;
        let said = as_nobody(&godwit, &migrate)?;
        for words in ["cannot open its file", "run godwit as root or as the user that runs the VM"]
        {
            ensure!(said.contains(words), "'{words}' is not in: {said}");
        }
        check_untouched(&mut vm)?;
    }
    let options = ["--memory", "64MiB", "--mode", "rate"];
    let Some(pair) = MicroPair::start(test, &options)? else { return Ok(()) };
    let name = pair.source.vm_name();
    for arguments in
        [&["migrate", "--vm", &name, "--to", "127.0.0.1:1"][..], &["status", "--vm", &name]]
    {
        let said = as_nobody(&pair.godwit, arguments)?;
        ensure!(said.contains("run godwit as root or as the user that runs the machine"), "{said}");
    }
    pair.check_untouched()
}

//! A mistake of the operator is noticed soon, and the words say who is in the way and what to do.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, MicroPair, Pair, await_copying, check_refused, check_untouched, oldest};
use godwit_testbed::{Godwit, GuestConfig, Movable, VmConfig, flavours_for};
use godwit_verify::settings::Mode;

const SLOW: &[&str] = &["--max-bandwidth", "2MiB/s", "--compression", "none"];
/// A user who may do nothing.
const NOBODY: u32 = 65534;

/// What `godwit` says on both outputs when `nobody` runs it.
fn as_nobody(godwit: &Godwit, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(godwit.program());
    let output = command.args(arguments).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").output()?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn a_wrong_port_is_noticed_soon() -> anyhow::Result<()> {
    let options = ["--memory", "64MiB", "--mode", "idle"];
    let Some(pair) = MicroPair::start("a_wrong_port_is_noticed_soon", &options)? else { return Ok(()) };
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
fn who_comes_second_is_told_of_the_first() -> anyhow::Result<()> {
    let flavours = flavours_for("who_comes_second_is_told_of_the_first");
    if flavours.is_empty() {
        return Ok(());
    }
    let mut pair = Pair::start(&VmConfig::new(oldest(&flavours)?, GuestConfig::small(Mode::Rate)))?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, SLOW)?;
    await_copying(&migrate)?;

    let second = pair.godwit.migrate(&pair.source, "127.0.0.1:1", &[])?.wait(LIMIT)?;
    let first = format!("process {} (godwit migrate) is at work at the monitor", migrate.pid());
    check_refused(&second, 1, &[&first, &format!("godwit cancel --migration {}", migrate.pid())])?;
    let name = pair.destination.vm_name();
    let second = pair.godwit.run(&["receive", "--vm", &name, "--listen", "127.0.0.1:0"])?;
    let words = String::from_utf8_lossy(&second.stderr).into_owned();
    ensure!(words.contains(&format!("process {} (godwit receive) is at work", receive.pid())), "{words}");

    // Root's migrations are not another user's, who is told that there may be some, and what would help.
    if rustix::process::getuid().is_root() {
        let said = as_nobody(&pair.godwit, &["status"])?;
        for words in ["no migration runs that you can see", "/run/godwit", "ask as root"] {
            ensure!(said.split_whitespace().collect::<Vec<_>>().join(" ").contains(words), "{said}");
        }
        let said =
            as_nobody(&pair.godwit, &["migrate", "--vm", &pair.source.vm_name(), "--to", "127.0.0.1:1"])?;
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
        ensure!(String::from_utf8_lossy(&said.stdout) == format!("{name} is {state}\n"), "{said:?}");
    }
    check_untouched(&mut pair.source)
}

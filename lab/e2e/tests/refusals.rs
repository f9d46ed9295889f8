//! What is refused: one clear line that names the cure, and a guest that noticed nothing.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_e2e::{LIMIT, Pair, check_moved, check_refused, check_untouched, oldest};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Ended, Godwit, GuestConfig, Movable, QemuBuild, TestVm, VmConfig, builds_for,
    builds_in_turn_for,
};

/// The config of a small guest for each QEMU: where the answer is QEMU's.
fn configs(test: &str) -> Vec<VmConfig> {
    let config = |build| VmConfig::new(build, GuestConfig::small(Mode::Rate));
    builds_in_turn_for(test).iter().map(config).collect()
}

/// The same for one QEMU, where any will do, or nothing where there is none.
fn config(test: &str) -> anyhow::Result<Option<VmConfig>> {
    let builds: Vec<QemuBuild> = builds_for(test);
    if builds.is_empty() {
        return Ok(None);
    }
    Ok(Some(VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate))))
}

/// `godwit migrate` of a VM that is to be refused, to an address where nobody listens.
fn migrate_nowhere(vm: &TestVm) -> anyhow::Result<Ended> {
    Godwit::built()?.migrate(vm, "127.0.0.1:1", &[])?.wait(LIMIT)
}

#[test]
fn ram_that_is_half_a_files() -> anyhow::Result<()> {
    for config in configs("ram_that_is_half_a_files") {
        let mut vm = TestVm::source(&config.with_backend(Backend::PrivateFile))?;
        vm.wait_ready(LIMIT)?;
        let ended = migrate_nowhere(&vm)?;
        let words = ["RAM block 'mem'", "is a private mapping of", "give the back end share=on"];
        check_refused(&ended, 1, &words)?;
        check_untouched(&mut vm)?;
    }
    Ok(())
}

#[test]
fn a_disk_with_direct_io_and_a_stranger_in_memory() -> anyhow::Result<()> {
    for config in configs("a_disk_with_direct_io_and_a_stranger_in_memory") {
        // O_DIRECT needs a file system that has it, which a tmpfs may not.
        let image = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("direct-{}", std::process::id()));
        std::fs::write(&image, vec![0; 1 << 20])?;
        let drive = format!("file={},if=virtio,format=raw,cache=none", image.display());
        let mut vm = TestVm::source(&config.clone().with_extra(&["-drive", &drive]))?;
        vm.wait_ready(LIMIT)?;
        let without = ["--fingerprints", "off"];
        let refused = Godwit::built()?.migrate(&vm, "127.0.0.1:1", &without)?.wait(LIMIT)?;
        check_refused(&refused, 1, &["cache.direct=on", "without --fingerprints off"])?;
        check_untouched(&mut vm)?;
        std::fs::remove_file(image)?;

        let mut vm = TestVm::source(&config)?;
        vm.wait_ready(LIMIT)?;
        // Another process that maps the RAM file writable, as a vhost-user back end does.
        let object = format!(
            "memory-backend-file,id=other,size={},share=on,mem-path={}",
            config.guest.memory.0,
            vm.ram_file().display()
        );
        let waiting = TestVm::destination(&config.with_extra(&["-object", &object]))?;
        check_refused(
            &migrate_nowhere(&vm)?,
            1,
            &["another QEMU, has the file of RAM block 'mem' mapped", "qemu-system"],
        )?;
        // The other way round the process that is named is the one whose guest runs: it must not be
        // ended.
        let name = waiting.vm_name();
        let refused =
            Godwit::built()?.run(&["receive", "--vm", &name, "--listen", "127.0.0.1:0"])?;
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(refused.status.code() == Some(1), "{}: {words}", refused.status);
        let running = format!("process {} (qemu-system", vm.pid());
        for part in [&running, "leave that process alone", "a file of its own (mem-path)"] {
            ensure!(words.contains(part), "'{part}' is not in: {words}");
        }
        check_untouched(&mut vm)?;
    }
    Ok(())
}

#[test]
fn a_stranger_in_the_destinations_memory() -> anyhow::Result<()> {
    // Mutation: `check_writers` is not asked at the destination.
    for build in builds_in_turn_for("a_stranger_in_the_destinations_memory") {
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Idle));
        let destination = TestVm::destination(&config)?;
        let object = format!(
            "memory-backend-file,id=other,size={},share=on,mem-path={}",
            config.guest.memory.0,
            destination.ram_file().display()
        );
        let stranger = TestVm::destination(&config.with_extra(&["-object", &object]))?;
        let error = Godwit::built()?.receive(&destination, &[]).map(drop).unwrap_err().to_string();
        ensure!(error.contains("another QEMU, has the file of RAM block 'mem' mapped"), "{error}");
        ensure!(error.contains(&format!("process {} ", stranger.pid())), "{error}");
        // Alone it is taken.
        drop(stranger);
        Godwit::built()?.receive(&destination, &[])?;
    }
    Ok(())
}

#[test]
fn machines_that_do_not_fit() -> anyhow::Result<()> {
    let Some(config) = config("machines_that_do_not_fit")? else { return Ok(()) };
    let mut pair = Pair::start(&config)?;
    let mut larger = config.clone();
    larger.guest.memory.0 *= 2;
    pair.destination = TestVm::destination(&larger)?;
    let (migrate, receive) = pair.migrate(&[])?;
    let words = [
        "RAM block 'mem' has 256MiB at the source and 512MiB at the destination",
        "same memory size",
    ];
    check_refused(&migrate, 1, &words)?;
    check_refused(&receive, 1, &words)?;
    check_untouched(&mut pair.source)?;

    let object = "memory-backend-file,id=more,size=16M,share=on,mem-path=/dev/shm/godwit-e2e-more";
    pair.destination = TestVm::destination(&config.with_extra(&["-object", object]))?;
    let (migrate, _) = pair.migrate(&[])?;
    std::fs::remove_file("/dev/shm/godwit-e2e-more")?;
    check_refused(&migrate, 1, &["RAM blocks that the source has not ('more')"])?;
    check_untouched(&mut pair.source)
}

#[test]
fn roles_that_are_exchanged() -> anyhow::Result<()> {
    for config in configs("roles_that_are_exchanged") {
        let mut pair = Pair::start(&config)?;
        let error = pair.godwit.receive(&pair.source, &[]).map(drop).unwrap_err().to_string();
        let words = ["not waiting for a migration", "-incoming defer"];
        ensure!(words.iter().all(|word| error.contains(word)), "{error}");
        let ended = migrate_nowhere(&pair.destination)?;
        check_refused(&ended, 1, &["'inmigrate'", "are source and destination exchanged?"])?;
        check_untouched(&mut pair.source)?;
    }
    Ok(())
}

#[test]
fn a_destination_whose_ram_file_was_replaced() -> anyhow::Result<()> {
    let Some(config) = config("a_destination_whose_ram_file_was_replaced")? else { return Ok(()) };
    let vm = TestVm::destination(&config)?;
    // The name now belongs to a file that QEMU does not map: what is written there would reach
    // nobody.
    std::fs::remove_file(vm.ram_file())?;
    std::fs::File::create(vm.ram_file())?.set_len(config.guest.memory.0)?;
    let error = Godwit::built()?.receive(&vm, &[]).map(drop).unwrap_err().to_string();
    ensure!(error.contains("does not map all of RAM block 'mem'"), "{error}");
    Ok(())
}

#[test]
fn addresses_where_no_godwit_is() -> anyhow::Result<()> {
    let Some(config) = config("addresses_where_no_godwit_is")? else { return Ok(()) };
    let mut vm = TestVm::source(&config)?;
    vm.wait_ready(LIMIT)?;
    check_refused(
        &migrate_nowhere(&vm)?,
        1,
        &["cannot connect to 127.0.0.1:1", "is godwit receive running there"],
    )?;

    // Another program, one that speaks first; a peer that sends rubbish; a godwit of another
    // version.
    let mut newer = *b"GODWIT\x00\x1a\x09\x00______________________________";
    newer[32..].fill(0);
    let answers: [(&[u8], &str); 3] = [
        (b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", "does not speak godwit's protocol"),
        (&[0xff; 64], "does not speak godwit's protocol"),
        (&newer, "version 9 of the protocol and this godwit version"),
    ];
    for (answer, words) in answers {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let answer = answer.to_vec();
        let stranger = std::thread::spawn(move || -> std::io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            stream.write_all(&answer)?;
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).map(drop)
        });
        let ended = Godwit::built()?.migrate(&vm, &address, &[])?.wait(LIMIT)?;
        check_refused(&ended, 1, &[words])?;
        let _ = stranger.join();
    }
    check_untouched(&mut vm)
}

#[test]
fn strangers_at_the_destinations_door() -> anyhow::Result<()> {
    let Some(config) = config("strangers_at_the_destinations_door")? else { return Ok(()) };
    let mut pair = Pair::start(&config)?;
    let (receive, address) = pair.godwit.receive(&pair.destination, &[])?;
    for rubbish in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 100],
        b"GODWIT\x00\x1a\x09\x00______________________________",
    ] {
        let mut stream = TcpStream::connect(&address)?;
        stream.write_all(rubbish)?;
        // Refused when it closes.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    // It is told a moment after the connection has closed.
    let until = Instant::now() + LIMIT;
    while receive.errors().lines().count() < 3 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    ensure!(receive.errors().lines().count() == 3, "{}", receive.errors());
    ensure!(
        receive.errors().contains("version 24415") || receive.errors().contains("version 9"),
        "{}",
        receive.errors()
    );
    let migrate = pair.godwit.migrate(&pair.source, &address, &["--verify"])?.wait(LIMIT)?;
    check_moved(&mut pair, &migrate)
}

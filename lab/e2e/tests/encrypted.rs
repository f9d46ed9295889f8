//! Migrations with keys, by the commands as an operator types them.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_e2e::{
    Keys, LIMIT, MicroPair, Pair, check_moved, check_refused, check_untouched, follow_records,
    oldest,
};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Backend, Godwit, GuestConfig, Movable, VmConfig, builds_for};
use rustix::process::Signal;
use serde_json::Value;

#[test]
fn a_guest_moves_with_keys_and_only_with_them() -> anyhow::Result<()> {
    let builds = builds_for("a_guest_moves_with_keys_and_only_with_them");
    if builds.is_empty() {
        return Ok(());
    }
    let config = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate));
    let mut pair = Pair::start(&config)?;
    let (keys, others) = (Keys::make(&pair.godwit, "keys")?, Keys::make(&pair.godwit, "others")?);
    let (west, east) = (keys.path("west")?, keys.path("east")?);
    let there = ["--keys", &east, "--peer", "west"];
    let (receive, address) = pair.godwit.receive(&pair.destination, &there)?;

    // Who is not expected, or expects somebody else.
    let stranger = others.path("west")?;
    let wrong: [(&[&str], &str); 3] = [
        (&["--insecure"], "the destination encrypts, and there are no keys here"),
        (&["--keys", &stranger, "--peer", "east"], "signed by another authority than ours"),
        // Without a name it is the host of the address that is expected.
        (&["--keys", &west], "is not made out to '127.0.0.1', but to"),
    ];
    for (options, words) in wrong {
        let ended = pair.godwit.migrate(&pair.source, &address, options)?.wait(LIMIT)?;
        check_refused(&ended, 1, &[words])?;
        check_untouched(&mut pair.source)?;
    }

    let here = ["--keys", &west, "--peer", "east"];
    let plan = ["plan", "--vm", &pair.source.vm_name(), "--for", "200ms", "--to", &address];
    let plan = pair.godwit.run(&[&plan[..], &here].concat())?;
    ensure!(plan.status.success(), "{plan:?}");
    let options = [&here[..], &["--verify"]].concat();
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    let receive = receive.wait(LIMIT)?;
    check_moved(&mut pair, &migrate)?;
    ensure!(migrate.last()["verified"] == true);
    for words in [
        "does not encrypt: give godwit there its keys",
        "another authority has signed it than the peer believes",
        "it is not made out to the name that the peer expects",
    ] {
        ensure!(receive.errors.contains(words), "{words}: {}", receive.errors);
    }
    Ok(())
}

#[test]
fn who_goes_on_with_other_keys_is_refused_and_changes_nothing() -> anyhow::Result<()> {
    // Mutations: nobody looks at the keys, and both sides wait for each other without end; what was
    // left goes with who was refused.
    let builds = builds_for("who_goes_on_with_other_keys_is_refused_and_changes_nothing");
    if builds.is_empty() {
        return Ok(());
    }
    let config = VmConfig::new(oldest(&builds)?, GuestConfig::small(Mode::Rate))
        .with_backend(Backend::Anonymous);
    let mut pair = Pair::start(&config)?;
    let (keys, others) = (Keys::make(&pair.godwit, "on")?, Keys::make(&pair.godwit, "other-on")?);
    let (west, east) = (keys.path("west")?, keys.path("east")?);
    let (other_west, other_east) = (others.path("west")?, others.path("east")?);
    let there = ["--keys", &east, "--peer", "west", "--reconnect", "60s"];
    let slow = ["--max-bandwidth", "20MiB/s", "--compression", "none", "--postcopy", "now"];
    let here = ["--keys", &west, "--peer", "east", "--reconnect", "60s"];
    let here = [&slow[..], &here].concat();
    let (receive, address) = pair.godwit.receive(&pair.destination, &there)?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &here)?;
    let follows = |line: &Value| line["stage"] == "post-copy";
    migrate.wait_for("the guest to run there", LIMIT, follows)?;
    for side in [&receive, &migrate] {
        side.signal(Signal::KILL)?;
    }
    drop((receive.wait(LIMIT)?, migrate.wait(LIMIT)?));
    ensure!(follow_records(&pair) == [1, 1], "not a record of each side");

    let (from, to) = (pair.source.vm_name(), pair.destination.vm_name());
    let receive = ["receive", "--vm", &to, "--listen", &address];
    let migrate = [&["migrate", "--vm", &from, "--to", &address], &slow[..]].concat();
    let (north, plain) = (["--peer", "west", "--keys", &other_east], []);
    let (south, bare) = (["--peer", "east", "--keys", &other_west], []);
    let (other, none) = ("begun with other keys", "begun with keys");
    for (command, options, words) in [
        (&receive[..], &north[..], other),
        (&receive, &plain, none),
        (&migrate, &south, other),
        (&migrate, &bare, none),
    ] {
        let began = Instant::now();
        let refused = pair.godwit.run(&[command, options].concat())?;
        let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(!refused.status.success() && errors.contains(words), "{options:?}: {errors}");
        ensure!(errors.contains("stays as it is"), "{options:?}: {errors}");
        ensure!(began.elapsed() < Duration::from_secs(10), "{options:?}: {:?}", began.elapsed());
        ensure!(follow_records(&pair) == [1, 1], "{options:?}: what was left is gone");
    }

    let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &there)?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &here)?.wait(LIMIT)?;
    let receive = receive.wait(LIMIT)?;
    ensure!(receive.status.success(), "{} {}", receive.last(), receive.errors);
    check_moved(&mut pair, &migrate)?;
    ensure!(follow_records(&pair) == [0, 0], "a record is left");
    Ok(())
}

#[test]
fn a_microvm_moves_with_keys() -> anyhow::Result<()> {
    let options = ["--memory", "64MiB", "--mode", "rate"];
    let Some(pair) = MicroPair::start("a_microvm_moves_with_keys", &options)? else {
        return Ok(());
    };
    let keys = Keys::make(&pair.godwit, "micro")?;
    let (west, east) = (keys.path("west")?, keys.path("east")?);
    let there = ["--keys", &east, "--peer", "west"];
    let (receive, address) = pair.godwit.receive(&pair.destination, &there)?;
    let plain = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
    check_refused(&plain, 1, &["the destination encrypts, and there are no keys here"])?;
    pair.check_untouched()?;
    let here = ["--keys", &west, "--peer", "east", "--verify"];
    let migrate = pair.godwit.migrate(&pair.source, &address, &here)?.wait(LIMIT)?;
    receive.wait(LIMIT)?;
    pair.check_moved(&migrate)
}

#[test]
fn what_is_wrong_with_keys_is_told_before_anything_is_done() -> anyhow::Result<()> {
    let godwit = Godwit::built()?;
    let keys = Keys::make(&godwit, "wrong")?;
    let west = keys.path("west")?;
    let again = godwit.run(&["keys", "--dir", &keys.path("")?, "west"])?;
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    ensure!(again.status.code() == Some(1) && said.contains("is there already"), "{again:?}");
    let receive = |options: &[&str]| {
        let command = ["receive", "--vm", "microvm:/nowhere", "--wait", "5s", "--listen"];
        godwit.run(&[&command[..], options].concat())
    };
    let exposed = Path::new(&west).join("host-key.pem");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(&exposed, mode)?;
    let migrate = |options: &[&str]| {
        let command = ["migrate", "--vm", "qemu:/nowhere", "--to"];
        godwit.run(&[&command[..], options].concat())
    };
    let cases = [
        (migrate(&["127.0.0.1:1", "--keys", "/nowhere"])?, 1, "there are no keys in /nowhere"),
        (migrate(&["127.0.0.1:1", "--keys", &west])?, 1, "can be read by others: chmod 600"),
        (migrate(&["unix:/nowhere", "--keys", &keys.path("east")?])?, 1, "--peer NAME"),
        (
            migrate(&["127.0.0.1:1", "--peer", "a b", "--keys", &keys.path("east")?])?,
            1,
            "'a b' is no name of a host",
        ),
        (migrate(&["127.0.0.1:1", "--insecure", "--keys", &west])?, 2, "cannot be used with"),
        (migrate(&["192.0.2.7:1"])?, 1, "nothing would be encrypted: give both sides keys"),
        (receive(&["127.0.0.1:0", "--insecure", "--peer", "west"])?, 2, "cannot be used with"),
    ];
    for (output, code, words) in cases {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(code) && said.contains(words), "{words}: {said}");
    }
    Ok(())
}

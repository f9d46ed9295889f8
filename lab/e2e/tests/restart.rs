//! A godwit that moves a guest or takes one in, and is killed in pre-copy: another one takes the
//! migration up, and little is sent of what the destination has already. With QEMU.

use anyhow::ensure;
use godwit_e2e::{LIMIT, Pair, await_copying, check_moved, check_untouched};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Backend, GuestConfig, VmConfig, builds_for};
use rustix::process::Signal;
use serde_json::Value;

/// The second one goes as fast as it can.
const BOTH: [&str; 6] = ["--compression", "none", "--reconnect", "30s", "--verify", "--state-dir"];

#[test]
fn whichever_side_is_killed_is_followed_by_another() -> anyhow::Result<()> {
    let builds = builds_for("whichever_side_is_killed_is_followed_by_another");
    let backends = [Backend::SharedFile, Backend::Anonymous].into_iter().cycle();
    for (build, backend) in builds.into_iter().zip(backends) {
        println!("with {build} and {backend:?}");
        let config = VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_backend(backend);
        let mut pair = Pair::start(&config)?;
        let directory = std::env::temp_dir().join(format!("godwit-restart-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let state = directory.to_string_lossy().into_owned();
        let both = [&BOTH[..], &[state.as_str()]].concat();
        let records = || std::fs::read_dir(&directory).map(Iterator::count);

        let there = ["--reconnect", "30s", "--state-dir", state.as_str()];
        let (receive, address) = pair.godwit.receive(&pair.destination, &there)?;
        let slow = [&both[..], &["--max-bandwidth", "20MiB/s"]].concat();
        let first = pair.godwit.migrate(&pair.source, &address, &slow)?;
        await_copying(&first)?;
        // Some of it arrives.
        std::thread::sleep(std::time::Duration::from_secs(2));
        ensure!(records()? == 2, "not a record of each side");
        first.signal(Signal::KILL)?;
        drop(first.wait(LIMIT)?);
        receive.wait_for("severed", LIMIT, |line: &Value| line["event"] == "severed")?;
        check_untouched(&mut pair.source)?;
        ensure!(records()? == 2, "no record is left");

        // So slow that it never comes to an end.
        let name = format!("restart-{}", std::process::id());
        let named = [&slow[..], &["--name", name.as_str()]].concat();
        let second = pair.godwit.migrate(&pair.source, &address, &named)?;
        let resumed = |line: &Value| line["event"] == "resumed";
        receive.wait_for("resumed", LIMIT, resumed)?;
        std::thread::sleep(std::time::Duration::from_secs(1));
        receive.signal(Signal::KILL)?;
        drop(receive.wait(LIMIT)?);
        ensure!(records()? == 2, "no record is left");
        ensure!(pair.source.status()? == "running", "the guest does not run on");

        let (receive, _) = pair.godwit.receive_on(&address, &pair.destination, &there)?;
        receive.wait_for("resumed", LIMIT, resumed)?;
        pair.godwit.done(&["set", "--migration", name.as_str(), "max-bandwidth=off"])?;
        let second = second.wait(LIMIT)?;
        let receive = receive.wait(LIMIT)?;
        ensure!(receive.status.success(), "{}: {}", receive.status, receive.errors);
        check_moved(&mut pair, &second)?;
        let last = second.last();
        println!("the second one sent {} bytes", last["sent_bytes"]);
        ensure!(last["resumptions"] == 2 && last["verified"] == true, "{last}");
        ensure!(records()? == 0, "a record is left");
        std::fs::remove_dir(&directory)?;
    }
    Ok(())
}

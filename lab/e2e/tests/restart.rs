//! A godwit that moves a guest and is killed in pre-copy: another one takes the migration up, and
//! sends little of what the destination has already. With QEMU.

use anyhow::ensure;
use godwit_e2e::{LIMIT, Pair, await_copying, check_moved, check_untouched};
use godwit_stamp::settings::Mode;
use godwit_testbed::{GuestConfig, VmConfig, builds_for};
use rustix::process::Signal;
use serde_json::Value;

/// The second one goes as fast as it can.
const BOTH: [&str; 6] = ["--compression", "none", "--reconnect", "30s", "--verify", "--state-dir"];

#[test]
fn a_source_that_is_killed_is_followed_by_another() -> anyhow::Result<()> {
    for build in builds_for("a_source_that_is_killed_is_followed_by_another") {
        println!("with {build}");
        let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Rate)))?;
        let directory = std::env::temp_dir().join(format!("godwit-restart-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let state = directory.to_string_lossy().into_owned();
        let both = [&BOTH[..], &[state.as_str()]].concat();
        let records = || std::fs::read_dir(&directory).map(Iterator::count);

        let (receive, address) = pair.godwit.receive(&pair.destination, &["--reconnect", "30s"])?;
        let slow = [&both[..], &["--max-bandwidth", "20MiB/s"]].concat();
        let first = pair.godwit.migrate(&pair.source, &address, &slow)?;
        await_copying(&first)?;
        // Some of it arrives.
        std::thread::sleep(std::time::Duration::from_secs(2));
        ensure!(records()? == 1, "no record");
        first.signal(Signal::KILL)?;
        drop(first.wait(LIMIT)?);
        receive.wait_for("severed", LIMIT, |line: &Value| line["event"] == "severed")?;
        check_untouched(&mut pair.source)?;
        ensure!(records()? == 1, "no record is left");

        let second = pair.godwit.migrate(&pair.source, &address, &both)?.wait(LIMIT)?;
        let receive = receive.wait(LIMIT)?;
        ensure!(receive.status.success(), "{}: {}", receive.status, receive.errors);
        check_moved(&mut pair, &second)?;
        let last = second.last();
        println!("the second one sent {} bytes", last["sent_bytes"]);
        ensure!(last["resumptions"] == 1, "{last}");
        ensure!(records()? == 0, "a record is left");
        std::fs::remove_dir(&directory)?;
    }
    Ok(())
}

//! A godwit that moves a guest or takes one in, and is killed in pre-copy: another one takes the
//! migration up, and little is sent of what the destination has already. With QEMU, and a disk that
//! moves along.

use std::time::{Duration, Instant};

use anyhow::ensure;
use godwit_e2e::{LIMIT, Pair, await_copying, check_moved, check_untouched, only_page};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{Backend, DiskImage, GuestConfig, Room, VmConfig, builds_for, images_for};
use godwit_units::ByteCount;
use rustix::process::Signal;
use serde_json::Value;

/// The second one goes as fast as it can.
const BOTH: [&str; 8] =
    ["--compression", "none", "--reconnect", "30s", "--verify", "--disks", "all", "--state-dir"];

#[test]
fn whichever_side_is_killed_is_followed_by_another() -> anyhow::Result<()> {
    let test = "whichever_side_is_killed_is_followed_by_another";
    if !images_for(test) {
        return Ok(());
    }
    let builds = builds_for(test);
    let backends = [Backend::SharedFile, Backend::Anonymous].into_iter().cycle();
    for (build, backend) in builds.into_iter().zip(backends) {
        println!("with {build} and {backend:?}");
        let image = || DiskImage::create("qcow2", ByteCount(64 << 20));
        let (from, to, rate) = (image()?, image()?, 2 << 20);
        let disk =
            DiskWork { write: rate, read: rate, span: ByteCount(16 << 20), ..DiskWork::default() };
        let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Rate) };
        let config =
            |image| VmConfig::new(&build, guest).with_backend(backend).with_disk("disk0", image);
        let mut pair = Pair::start_apart(&config(&from), &config(&to))?;
        let directory = std::env::temp_dir().join(format!("godwit-restart-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let state = directory.to_string_lossy().into_owned();
        let both = [&BOTH[..], &[state.as_str()]].concat();
        let records = || std::fs::read_dir(&directory).map(Iterator::count);
        let kept = Room::new()?;
        let kept_in = kept.dir().to_string_lossy().into_owned();
        pair.godwit = pair.godwit.clone().with_variable("XDG_STATE_HOME", &kept_in);

        let there = ["--reconnect", "30s", "--disks", "all", "--state-dir", state.as_str()];
        let (receive, address) = pair.godwit.receive(&pair.destination, &there)?;
        let slow = [&both[..], &["--max-bandwidth", "20MiB/s"]].concat();
        let first = pair.godwit.migrate(&pair.source, &address, &slow)?;
        await_copying(&first)?;
        // Some of it arrives.
        std::thread::sleep(Duration::from_secs(2));
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
        std::thread::sleep(Duration::from_secs(1));
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
        let page = only_page(&pair.godwit, "destination")?;
        ensure!(page.contains(": came in ") && page.contains("back after"), "{page}");
        // It checks what it reads.
        let seconds = pair.destination.disk_seconds().len();
        let until = Instant::now() + LIMIT;
        while pair.destination.disk_seconds().len() < seconds + 3 {
            ensure!(Instant::now() < until, "{build}: the disk's work does not go on");
            std::thread::sleep(Duration::from_millis(100));
        }
        ensure!(pair.destination.bugs().is_empty(), "{build}: {:?}", pair.destination.bugs());
        std::fs::remove_dir(&directory)?;
    }
    Ok(())
}

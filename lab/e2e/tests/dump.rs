//! What a destination holds before its guest runs there, dumped for who hunts a bug.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use godwit_e2e::{LIMIT, MicroPair, Pair, check_moved, check_refused, check_untouched};
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Ended, GuestConfig, Movable, VmConfig, builds_for, builds_in_turn_for,
};
use serde_json::Value;

/// A directory for dumps, which goes with its value.
struct Dumps(PathBuf);

impl Dumps {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("godwit-{name}-{}", std::process::id())))
    }

    fn name(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }

    /// What is in one of its files.
    fn held(&self, file: &str) -> anyhow::Result<Vec<u8>> {
        let path = self.0.join(file);
        std::fs::read(&path).with_context(|| format!("no dump at {}", path.display()))
    }
}

impl Drop for Dumps {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What was told of the dump of `stage`.
fn told(receive: &Ended, stage: &str) -> anyhow::Result<Value> {
    let found = |line: &&Value| line["event"] == "dumped" && line["stage"] == stage;
    let line = receive.lines.iter().find(found);
    line.cloned().with_context(|| format!("no dump is told of: {:?}", receive.lines))
}

/// Pages that differ.
fn differing(one: &[u8], other: &[u8]) -> usize {
    one.chunks(4096).zip(other.chunks(4096)).filter(|(one, other)| one != other).count()
}

#[test]
fn what_has_arrived_is_dumped_before_device_state_is_loaded_and_once_more_behind_it()
-> anyhow::Result<()> {
    for build in builds_in_turn_for("dump") {
        let config =
            VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_backend(Backend::SharedFile);
        let mut pair = Pair::start(&config)?;
        let dumps = Dumps::new("dump");
        let (receive, address) =
            pair.godwit.receive(&pair.destination, &["--dump", &dumps.name()])?;
        let migrate = pair.godwit.migrate(&pair.source, &address, &["--keep-source"])?;
        let (migrate, receive) = (migrate.wait(LIMIT)?, receive.wait(LIMIT)?);
        check_moved(&mut pair, &migrate)?;

        // The source stands as it was when its last page went.
        let (arrived, loaded) = (dumps.held("mem.arrived")?, dumps.held("mem.loaded")?);
        let source = std::fs::read(pair.source.ram_file())?;
        ensure!(source.len() == arrived.len() && source.len() == loaded.len(), "{build}");
        ensure!(differing(&source, &arrived) == 0, "{build}: what arrived is not what was sent");
        let (first, second) = (told(&receive, "arrived")?, told(&receive, "loaded")?);
        ensure!(first["changed_pages"] == 0 && first["first"].is_null(), "{first}");
        let changed = differing(&arrived, &loaded);
        ensure!(second["changed_pages"] == changed, "{changed} pages changed: {second}");
        ensure!(second["first"].is_null() == (changed == 0), "{second}");
        println!("{build}: the machine wrote {changed} pages while it loaded");
    }
    Ok(())
}

#[test]
fn a_dump_that_cannot_be_made_or_has_no_sense_leaves_the_guest_where_it_is() -> anyhow::Result<()> {
    let Some(build) = builds_for("dump").pop() else { return Ok(()) };
    let config =
        VmConfig::new(&build, GuestConfig::small(Mode::Rate)).with_backend(Backend::Anonymous);
    let mut pair = Pair::start(&config)?;
    let dumps = Dumps::new("no-dump");

    // Post-copy: the guest would run before there is anything to dump.
    let (receive, address) = pair.godwit.receive(&pair.destination, &["--dump", &dumps.name()])?;
    let options = ["--postcopy", "now", "--reconnect", "60s"];
    let migrate = pair.godwit.migrate(&pair.source, &address, &options)?.wait(LIMIT)?;
    check_refused(&migrate, 1, &["its memory is dumped before it runs", "--dump"])?;
    drop(receive);
    check_untouched(&mut pair.source)?;

    // Files that are there are somebody's.
    std::fs::create_dir_all(&dumps.0)?;
    std::fs::write(dumps.0.join("mem.arrived"), "of yesterday")?;
    let vm = pair.destination.vm_name();
    let output = pair.godwit.run(&[
        "receive",
        "--vm",
        &vm,
        "--listen",
        "127.0.0.1:0",
        "--dump",
        &dumps.name(),
    ])?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{errors}");
    ensure!(errors.contains("name an empty directory"), "{errors}");
    ensure!(dumps.held("mem.arrived")? == b"of yesterday");
    Ok(())
}

#[test]
fn a_microvm_dumps_what_it_took_in() -> anyhow::Result<()> {
    let Some(pair) = MicroPair::start("a_microvm_dumps_what_it_took_in", &["--memory", "64MiB"])?
    else {
        return Ok(());
    };
    let dumps = Dumps::new("micro-dump");
    let (receive, address) = pair.godwit.receive(&pair.destination, &["--dump", &dumps.name()])?;
    let migrate = pair.godwit.migrate(&pair.source, &address, &[])?.wait(LIMIT)?;
    let receive = receive.wait(LIMIT)?;
    pair.check_moved(&migrate)?;
    for stage in ["arrived", "loaded"] {
        let files = told(&receive, stage)?["files"].as_array().cloned().unwrap_or_default();
        let [file] = files.as_slice() else { anyhow::bail!("not one file: {files:?}") };
        let file = file.as_str().unwrap_or_default();
        ensure!(std::fs::metadata(file)?.len() == 64 << 20, "{file}");
    }
    Ok(())
}

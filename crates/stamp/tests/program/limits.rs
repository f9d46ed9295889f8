//! How much is done, and when: the option that repeats writes, the one that rests between them, as
//! many devices as there may be, and swap, which is nobody's to write to.

use std::fs;
use std::process::Command;

use godwit_stamp::sector::Unit;
use rustix::process::Signal;
use serde_json::Value;

use super::{Folder, Running, code, put_unit, read_unit, refused, stamp, text};

/// The units of a file.
fn units(path: &str) -> Vec<Unit> {
    let count = fs::metadata(path).unwrap().len() / 4096;
    (0..count).map(|unit| read_unit(path, unit)).collect()
}

/// What a run of one worker with `seed` has written to a file last: of each sector its version and
/// the write that brought it; none of one that is zeroes.
fn sequence(seed: &str) -> Vec<Option<(u64, u64, u16)>> {
    let folder = Folder::new(&format!("seed-{seed}"));
    let path = folder.file("file", 4);
    let mix = ["--pattern", "random", "--size", "4KiB,64KiB", "--discard", "5"];
    let run = ["run", "--destroy-data", &path, "--seed", seed, "--writes", "6MiB", "--for", "1s"];
    let output = stamp(&[&run[..], &mix].concat());
    assert_eq!(code(&output), Some(0), "{}", text(&output));
    let sectors = units(&path).into_iter().flat_map(|unit| unit.0);
    let brought = sectors.map(|sector| sector.read().ok());
    brought.map(|stamp| stamp.map(|it| (it.generation, it.first, it.sectors))).collect()
}

#[test]
fn the_same_seed_makes_the_same_writes_and_another_one_others() {
    let once = sequence("7");
    assert!(once.iter().flatten().any(|(generation, ..)| *generation > 1), "nothing but stamps");
    assert_eq!(sequence("7"), once);
    assert_ne!(sequence("8"), once);
}

/// Milliseconds since 1970 at which units were written again, in order.
fn writes(path: &str) -> Vec<u64> {
    let stamps = units(path).into_iter().map(|unit| unit.0[0].read().unwrap());
    let again = stamps.filter(|stamp| stamp.generation > 1);
    let mut times: Vec<u64> = again.map(|stamp| stamp.nanos / 1_000_000).collect();
    times.sort_unstable();
    times
}

#[test]
fn who_works_and_rests_writes_in_bursts_and_checks_on() {
    let folder = Folder::new("rest");
    let path = folder.file("file", 32);
    let when = ["--work", "400ms", "--rest", "1s", "--rate", "4MiB/s", "--check-rate", "20MiB/s"];
    let run = ["--destroy-data", &path, "--report", "50ms", "--pattern", "sequential"];
    let run = Running::start(&[&run[..], &when].concat());
    run.line_with("stamped ");
    // Mutation: whoever rests checks nothing, either.
    let done = || {
        let line = run.line_with("written ");
        let (written, checked) = line.split_once("checked ").unwrap();
        (written.to_owned(), checked.split(',').next().unwrap().to_owned())
    };
    let (mut before, mut checked_at_rest, mut reports) = (done(), 0, 0);
    while reports < 80 {
        let now = done();
        checked_at_rest += u32::from(now.0 == before.0 && now.1 != before.1);
        (before, reports) = (now, reports + 1);
    }
    assert_eq!(run.end(Signal::TERM), Some(0));
    assert!(checked_at_rest >= 10, "{checked_at_rest} of {reports}");
    let times = writes(&path);
    let rests: Vec<u64> =
        times.windows(2).map(|two| two[1] - two[0]).filter(|it| *it > 500).collect();
    // Four seconds and more are two whole turns at the least; a busy machine only shortens rests
    // by what its last write took.
    assert!(rests.len() >= 2, "{rests:?} in {times:?}");
    let span = times[times.len() - 1] - times[0];
    let worked = span - rests.iter().sum::<u64>();
    assert!(worked < span / 2, "{worked} ms of {span} were worked");
}

#[test]
fn sixty_four_devices_are_stamped_and_told_apart() {
    let folder = Folder::new("many");
    let (journal, numbers) = (folder.path("journal"), 0..64);
    let files: Vec<String> =
        numbers.map(|number| folder.file(&format!("file-{number}"), 1)).collect();
    let named = files.iter().flat_map(|file| ["--destroy-data", file]);
    let more = ["--workers", "8", "--pattern", "stripe", "--size", "256KiB", "--for", "500ms"];
    let run = ["run", "--journal", &journal, "--json"].into_iter().chain(more).chain(named);
    let output = stamp(&run.collect::<Vec<_>>());
    assert_eq!(code(&output), Some(0), "{}", text(&output));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(result["checked_bytes"].as_u64() >= Some(64 << 20), "{result}");
    let all = files.iter().map(String::as_str);
    let check: Vec<&str> = ["check", "--journal", &journal].into_iter().chain(all).collect();
    let output = stamp(&check);
    assert_eq!(code(&output), Some(0), "{}", text(&output));
    put_unit(&files[63], 5, &read_unit(&files[0], 5));
    let output = stamp(&check);
    assert_eq!(code(&output), Some(3), "{}", text(&output));
    let line = format!("BUG misplaced: {} sector 40 ", files[63]);
    assert!(text(&output).contains(&line), "{}", text(&output));
}

/// Swap of the machine's, in a file, until the test is over.
struct Swap(String);

impl Swap {
    fn on(path: &str) -> Option<Self> {
        fs::write(path, vec![0; 1 << 20]).unwrap();
        let run = |program: &str| Command::new(program).arg(path).output();
        let made = run("mkswap").is_ok_and(|output| output.status.success());
        let taken = made && run("swapon").is_ok_and(|output| output.status.success());
        taken.then(|| Self(path.to_owned()))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).status();
    }
}

#[test]
fn swap_is_refused() {
    let folder = Folder::new("swap");
    let path = folder.path("swap");
    let Some(_swap) = Swap::on(&path) else {
        return eprintln!("SKIPPED swap_is_refused: no swap can be had here");
    };
    refused(&["run", "--destroy-data", &path], "the host's swap");
}

//! The program itself, on files of a test: what it refuses, what it finds of damage made by hand,
//! and how it ends.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use godwit_stamp::pattern::Pattern;
use godwit_stamp::sector::{MEMORY, SECTORS, Stamp, Unit};
use godwit_units::ByteCount;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use zerocopy::IntoBytes;

mod limits;

const PROGRAM: &str = env!("CARGO_BIN_EXE_godwit-stamp");
/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder of one test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stamp-{name}"));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    /// A file of zeroes.
    fn file(&self, name: &str, mebibytes: u64) -> String {
        File::create(self.path(name)).unwrap().set_len(mebibytes << 20).unwrap();
        self.path(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn stamp(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

fn read_unit(path: &str, unit: u64) -> Unit {
    let mut content = Unit::ZERO;
    File::open(path).unwrap().read_exact_at(content.as_mut_bytes(), unit * 4096).unwrap();
    content
}

fn put_unit(path: &str, unit: u64, content: &Unit) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(content.as_bytes(), unit * 4096).unwrap();
}

/// A unit as it was one version ago.
fn older(content: &Unit) -> Unit {
    let now = content.0[0].read().unwrap();
    assert!(now.generation > 1, "never written again: {now:?}");
    let mut old = Unit::ZERO;
    old.stamp(&Stamp { generation: now.generation - 1, nanos: now.nanos - 5_000_000, ..now });
    old
}

/// The verdict, and what is done by hand to a unit of a file.
type Defect = (&'static str, fn(&str, u64));

const DEFECTS: [Defect; 6] = [
    ("misplaced", |path, unit| put_unit(path, unit, &read_unit(path, unit + 6))),
    ("torn", |path, unit| {
        let mut torn = read_unit(path, unit);
        let old = older(&torn);
        torn.0[5..].clone_from_slice(&old.0[5..]);
        put_unit(path, unit, &torn);
    }),
    ("torn", |path, unit| {
        let mut torn = read_unit(path, unit);
        let old = older(&torn);
        torn.0[2].0[33..].copy_from_slice(&old.0[2].0[33..]);
        put_unit(path, unit, &torn);
    }),
    ("flipped bits", |path, unit| {
        let mut flipped = read_unit(path, unit);
        flipped.0[6].0[40] ^= 1 << 17;
        put_unit(path, unit, &flipped);
    }),
    ("zeroed", |path, unit| put_unit(path, unit, &Unit::ZERO)),
    ("not stamped", |path, unit| {
        let mut foreign = Unit::ZERO;
        foreign.as_mut_bytes().fill(0x5a);
        put_unit(path, unit, &foreign);
    }),
];

const LOST: Defect =
    ("lost write", |path, unit| put_unit(path, unit, &older(&read_unit(path, unit))));

/// A run that goes on, and the lines it prints.
struct Running {
    child: Child,
    lines: Receiver<String>,
}

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        let mut child = command.arg("run").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
        });
        Self { child, lines }
    }

    /// The next line that is `wanted`.
    fn line(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|_| panic!("no {what}"));
            if wanted(&line) {
                return line;
            }
        }
    }

    fn line_with(&self, start: &str) -> String {
        self.line(start, |line| line.starts_with(start))
    }

    /// Until everything was checked again.
    fn all_checked(&self, size: u64) {
        let checked = || {
            let line = self.line_with("written ");
            let words = line.split_once("checked ").unwrap().1.split(',').next().unwrap();
            words.parse::<ByteCount>().unwrap().0
        };
        let before = checked();
        while checked() < before + 3 * size {}
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn end(mut self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_good_device_passes_in_every_pattern() {
    let folder = Folder::new("good");
    for pattern in Pattern::ALL {
        let (a, b) = (folder.file("a", 8), folder.file("b", 9));
        let journal = folder.path(&format!("{pattern}.journal"));
        let pattern = pattern.to_string();
        let output = stamp(&[
            "run",
            "--destroy-data",
            &a,
            "--destroy-data",
            &b,
            "--memory",
            "4MiB",
            "--journal",
            &journal,
            "--pattern",
            &pattern,
            "--size",
            "4KiB,32KiB,1MiB",
            "--workers",
            "3",
            "--discard",
            "5",
            "--write-zeroes",
            "5",
            "--fsync-every",
            "16",
            "--for",
            "200ms",
            "--json",
        ]);
        assert_eq!(code(&output), Some(0), "{pattern}: {}", text(&output));
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(result["outcome"], "clean");
        // Everything was stamped, and had its last look.
        for what in ["written_bytes", "checked_bytes"] {
            assert!(result[what].as_u64().unwrap() >= 21 << 20, "{pattern}: {result}");
        }
        for more in [&["--journal", &journal][..], &[]] {
            let output = stamp(&[&["check", &a, &b], more].concat());
            assert_eq!(code(&output), Some(0), "{pattern}: {}", text(&output));
        }
    }
}

#[test]
fn a_check_names_every_defect() {
    let folder = Folder::new("defects");
    let (other, path) = (folder.file("other", 1), folder.file("file", 2));
    let journal = folder.path("journal");
    let run = Running::start(&[
        "--destroy-data",
        &other,
        "--destroy-data",
        &path,
        "--journal",
        &journal,
        "--pattern",
        "sequential",
        "--writes",
        "9MiB",
    ]);
    run.line_with("all of --writes");
    assert_eq!(run.end(Signal::TERM), Some(0));
    let check = |kind: &str, defect: fn(&str, u64), journal: &[&str]| {
        let good = read_unit(&path, 3);
        defect(&path, 3);
        let before = fs::read(&path).unwrap();
        let output = stamp(&[&["check", &other, &path, "--json"], journal].concat());
        assert_eq!(code(&output), Some(3), "{kind}: {}", text(&output));
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(result["bugs"], 1, "{result}");
        let finding = &result["findings"][0];
        assert_eq!((&finding["kind"], &finding["place"]), (&kind.into(), &path.clone().into()));
        let byte = finding["byte"].as_u64().unwrap();
        assert_eq!(byte / 4096, 3, "{finding}");
        let line = String::from_utf8_lossy(&output.stderr);
        assert!(line.starts_with(&format!("BUG {kind}: {path} sector ")), "{line}");
        assert_eq!(fs::read(&path).unwrap(), before, "a check wrote");
        put_unit(&path, 3, &good);
    };
    for (kind, defect) in DEFECTS {
        check(kind, defect, &[]);
        check(kind, defect, &["--journal", &journal]);
    }
    // That it is old, a check knows by the journal alone.
    check(LOST.0, LOST.1, &["--journal", &journal]);
    let from_other = |path: &str, unit: u64| {
        put_unit(path, unit, &read_unit(&path.replace("file", "other"), unit));
    };
    check("misplaced", from_other, &[]);
    // All is well again.
    assert_eq!(code(&stamp(&["check", &other, &path, "--journal", &journal])), Some(0));
    let swapped = stamp(&["check", &path, &other]);
    assert_eq!(code(&swapped), Some(3), "{}", text(&swapped));
}

#[test]
fn a_run_names_every_defect_while_it_goes_on() {
    let folder = Folder::new("running");
    let path = folder.file("file", 2);
    let run = Running::start(&[
        "--destroy-data",
        &path,
        "--pattern",
        "sequential",
        "--writes",
        "5MiB",
        "--report",
        "50ms",
        "--workers",
        "2",
    ]);
    run.line_with("all of --writes");
    // Of a version that is damaged, it is told once: each defect has a unit of its own.
    for (number, (kind, defect)) in (0..).zip(DEFECTS) {
        let unit = 3 + 20 * number;
        defect(&path, unit);
        let line = run.line_with("BUG");
        assert!(line.starts_with(&format!("BUG {kind}: {path} sector ")), "{line}");
        let sector: u64 =
            line.split(" sector ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        assert_eq!(sector / 8, unit, "{line}");
    }
    assert_eq!(run.end(Signal::INT), Some(3));
}

#[test]
fn an_old_copy_of_what_was_seen_is_stale() {
    let folder = Folder::new("stale");
    let path = folder.file("file", 2);
    let run = Running::start(&[
        "--destroy-data",
        &path,
        "--pattern",
        "sequential",
        "--writes",
        "5MiB",
        "--report",
        "50ms",
    ]);
    run.line_with("all of --writes");
    run.all_checked(2 << 20);
    LOST.1(&path, 3);
    let line = run.line_with("BUG");
    assert!(line.starts_with(&format!("BUG stale version: {path} sector 24 ")), "{line}");
    // An orderly end by another signal than Ctrl-C.
    assert_eq!(run.end(Signal::TERM), Some(3));
}

#[test]
fn a_write_that_never_arrives_is_lost() {
    let folder = Folder::new("lost");
    // Nothing is checked before the last look, so nothing was ever seen. On a machine that has no
    // time for this test the damage may come after it: then there is more time.
    let found = ["1s", "5s", "25s"].into_iter().any(|time| {
        let path = folder.file("file", 1);
        let run = Running::start(&[
            "--destroy-data",
            &path,
            "--pattern",
            "sequential",
            "--writes",
            "3MiB",
            "--check-rate",
            "none",
            "--fsync-every",
            "0",
            "--for",
            time,
        ]);
        let end = |line: &str| line.starts_with("no bug found: ");
        let line = run.line("all written", |line| line.starts_with("all of --writes") || end(line));
        if end(&line) {
            return false;
        }
        LOST.1(&path, 3);
        let line = run.line("result", |line| line.starts_with("BUG") || end(line));
        let expected = format!("BUG lost write: {path} sector 24 ");
        assert!(line.starts_with(&expected) || end(&line), "{line}");
        !end(&line)
    });
    assert!(found);
}

#[test]
fn a_bit_flipped_in_memory_is_found() {
    let run = Running::start(&["--memory", "2MiB", "--rate", "none"]);
    run.line_with("stamped ");
    let folder = PathBuf::from(format!("/proc/{}", run.child.id()));
    let memory = File::options().read(true).write(true).open(folder.join("mem")).unwrap();
    let maps = fs::read_to_string(folder.join("maps")).unwrap();
    let ranges = maps.lines().filter(|line| line.contains(" rw-p ")).map(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        [start, end].map(|text| u64::from_str_radix(text, 16).unwrap())
    });
    let is_wanted = |at: &u64| {
        let mut unit = Unit::ZERO;
        let there = memory.read_exact_at(unit.as_mut_bytes(), *at).is_ok();
        let place = (MEMORY, 24 * SECTORS as u64);
        there && unit.0[0].read().is_ok_and(|stamp| (stamp.device, stamp.sector) == place)
    };
    let mut pages = ranges.flat_map(|[start, end]| (start..end).step_by(4096));
    let place = pages.find(is_wanted).expect("unit 24 is nowhere in the process");
    let mut byte = [0];
    memory.read_exact_at(&mut byte, place + 515).unwrap();
    memory.write_all_at(&[byte[0] ^ 4], place + 515).unwrap();
    let line = run.line_with("BUG");
    let expected = "BUG flipped bits: memory sector 193 (byte 98816; 1 of its unit's 8): ";
    assert!(line.starts_with(expected), "{line}");
    assert!(line.contains("at byte 0 of the sector, 1 bits differ (mask 0x4000000)"), "{line}");
    assert_eq!(run.end(Signal::INT), Some(3));
}

#[test]
fn a_crash_is_told_from_corruption() {
    let folder = Folder::new("crash");
    let (path, journal) = (folder.file("file", 4), folder.path("journal"));
    let run = Running::start(&[
        "--destroy-data",
        &path,
        "--journal",
        &journal,
        "--fsync-every",
        "8",
        "--report",
        "20ms",
    ]);
    run.line_with("stamped ");
    let size = fs::metadata(&journal).unwrap().len();
    let end = Instant::now() + PATIENCE;
    while fs::metadata(&journal).unwrap().len() < size + (1 << 16) {
        assert!(Instant::now() < end, "the journal does not grow");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(run.end(Signal::KILL), None);
    // What comes of a write that a power cut left half done.
    let half = godwit_stamp::journal::Journal::read(&fs::read(&journal).unwrap()).unwrap();
    assert!(!half.ended);
    let unit = *half.acknowledged.iter().find(|(_, version)| version.0 > 1).unwrap().0;
    let good = read_unit(&path, unit.1);
    let mut newer = good.clone();
    let stamp_now = good.0[0].read().unwrap();
    newer.stamp(&Stamp { generation: stamp_now.generation + 1, ..stamp_now });
    let mut torn = good.clone();
    torn.0[..3].clone_from_slice(&newer.0[..3]);
    put_unit(&path, unit.1, &torn);
    let output = stamp(&["check", &path, "--journal", &journal]);
    assert_eq!(code(&output), Some(0), "{}", text(&output));
    assert!(text(&output).contains("cut off while it wrote "), "{}", text(&output));
    // Behind what an fsync acknowledged, it is no crash.
    let acknowledged = half.acknowledged[&unit].0;
    let mut old = Unit::ZERO;
    old.stamp(&Stamp { generation: acknowledged - 1, ..stamp_now });
    put_unit(&path, unit.1, &old);
    let output = stamp(&["check", &path, "--journal", &journal]);
    assert_eq!(code(&output), Some(3), "{}", text(&output));
    assert!(text(&output).contains("BUG lost write: "), "{}", text(&output));
    assert!(text(&output).contains("which an fsync acknowledged"), "{}", text(&output));
}

#[test]
fn a_check_names_zeroes_that_came_again_and_zeroes_that_were_lost() {
    let folder = Folder::new("zeroes");
    let (path, journal) = (folder.file("file", 1), folder.path("journal"));
    let run = Running::start(&[
        "--destroy-data",
        &path,
        "--journal",
        &journal,
        "--size",
        "4KiB",
        "--write-zeroes",
        "50",
        "--writes",
        "4MiB",
    ]);
    run.line_with("all of --writes");
    assert_eq!(run.end(Signal::TERM), Some(0));
    let said = godwit_stamp::journal::Journal::read(&fs::read(&journal).unwrap()).unwrap();
    let unit = |zero: bool| {
        let mut all = said.acknowledged.iter();
        let found = all.find(|(unit, version)| version.1 == zero && said.zeroed.contains_key(unit));
        found.map(|(unit, version)| (unit.1, version.0)).unwrap()
    };
    let ((stamped, _), (zero, generation)) = (unit(false), unit(true));
    let check = |expected: &str| {
        let output = stamp(&["check", &path, "--journal", &journal]);
        assert_eq!(code(&output), Some(3), "{}", text(&output));
        assert!(text(&output).contains(expected), "{expected}: {}", text(&output));
    };
    let good = read_unit(&path, stamped);
    put_unit(&path, stamped, &Unit::ZERO);
    check(&format!("BUG zeroes again: {path} sector {} ", stamped * 8));
    put_unit(&path, stamped, &good);
    let mut old = Unit::ZERO;
    let sector = zero * SECTORS as u64;
    let stamp = Stamp { sector, generation: generation - 1, ..good.0[0].read().unwrap() };
    old.stamp(&stamp);
    put_unit(&path, zero, &old);
    check(&format!("BUG zeroes lost: {path} sector {sector} "));
}

#[test]
fn ctrl_c_ends_a_run_in_good_order() {
    let folder = Folder::new("interrupted");
    let (path, journal) = (folder.file("file", 2), folder.path("journal"));
    let run = Running::start(&["--destroy-data", &path, "--journal", &journal, "--workers", "2"]);
    run.line_with("stamped ");
    run.signal(Signal::INT);
    run.line_with("interrupted, no bug found until then: written ");
    assert_eq!(run.end(Signal::INT), Some(130));
    let journal_read = godwit_stamp::journal::Journal::read(&fs::read(&journal).unwrap()).unwrap();
    assert!(journal_read.ended);
    assert_eq!(code(&stamp(&["check", &path, "--journal", &journal])), Some(0));
}

/// The one line of a refusal.
fn refused(arguments: &[&str], reason: &str) {
    let output = stamp(arguments);
    let said = text(&output);
    assert_eq!(code(&output), Some(1), "{said}");
    assert!(said.starts_with("godwit-stamp: ") && said.contains(reason), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn what_makes_no_sense_is_refused_and_nothing_is_written() {
    let folder = Folder::new("refused");
    let (small, good, journal) =
        (folder.path("small"), folder.file("good", 2), folder.file("journal", 1));
    File::create(&small).unwrap().set_len(1 << 19).unwrap();
    let missing = folder.path("missing");
    let run = |path: &str, reason: &str| {
        refused(&["run", "--destroy-data", &good, "--destroy-data", path], reason);
    };
    run(&missing, "there is no such device or file");
    run(&folder.path(""), "neither a block device nor a file");
    run("/dev/null", "neither a block device nor a file");
    run(&small, "holds 512KiB, and at least 1MiB are needed");
    run(&good, "name each once");
    let destroy = ["run", "--destroy-data", &good];
    let more = |more: &[&str], reason: &str| refused(&[&destroy, more].concat(), reason);
    more(&["--span", "3MiB"], "holds 2MiB, and at least 3MiB are needed");
    more(&["--span", "5KiB"], "--span 5KiB: at least 1MiB is needed");
    more(&["--memory", "5KiB"], "--memory 5KiB: at least 1MiB is needed");
    more(&["--memory", "900TiB"], "is available here: ask for less");
    more(&["--workers", "3"], "there are 2 parts of 1MiB, and each worker needs one");
    more(&["--discard", "60", "--write-zeroes", "50"], "together no more than 100");
    more(&["--journal", &journal], "is there already");
    let many: Vec<&str> = [&destroy[..], &["--destroy-data", "x"].repeat(64)].concat();
    refused(&many, "65 devices: no more than 64 are possible");
    refused(&["check", &good], "not stamped: no sector that was looked at is of a run");
    refused(&["check", &small], "at least 1MiB are needed");
    refused(&["check", &good, "--journal", &journal], "not a journal of godwit-stamp");
    refused(&["check", &good, "--journal", &missing], "cannot read it");
    let zero = |path: &str| fs::read(path).unwrap().iter().all(|&byte| byte == 0);
    assert!(zero(&good) && zero(&small) && zero(&journal), "a refusal wrote something");
    let output = stamp(&["guest", "godwit.disk_write=1MiB"]);
    assert_eq!(code(&output), Some(1));
    assert!(text(&output).starts_with("GUEST FAILED disks and network are for process 1"));
    for usage in [&["run"][..], &[&destroy[..], &["--size", "5KiB"]].concat(), &["check"], &["x"]] {
        assert_eq!(code(&stamp(usage)), Some(2), "{usage:?}");
    }
}

#[test]
fn two_runs_do_not_share_a_file_and_a_shrunk_one_is_refused() {
    let folder = Folder::new("shared");
    let path = folder.file("file", 2);
    let run = Running::start(&["--destroy-data", &path, "--rate", "1MiB/s"]);
    run.line_with("stamped ");
    refused(&["run", "--destroy-data", &path], "another godwit-stamp works with it");
    refused(&["check", &path], "another godwit-stamp works with it");
    assert_eq!(run.end(Signal::INT), Some(130));
    File::options().write(true).open(&path).unwrap().set_len(3 << 19).unwrap();
    refused(&["check", &path], "holds 1.5MiB, and at least 2MiB are needed");
}

#[test]
fn a_device_that_is_full_ends_the_run_and_is_no_bug() {
    // Writes to a hole that the file system has no room for: a limit of this process stands for it.
    let folder = Folder::new("full");
    let path = folder.file("file", 4);
    let script = "ulimit -f 2048; trap '' XFSZ; exec \"$@\"";
    let mut command = Command::new("bash");
    command.args(["-c", script, "-", PROGRAM, "run", "--destroy-data", &path]);
    let output = command.output().unwrap();
    assert_eq!(code(&output), Some(1), "{}", text(&output));
    assert!(text(&output).contains("cannot write to it: "), "{}", text(&output));
    assert!(!text(&output).contains("BUG"), "{}", text(&output));
}

/// A loop device, which goes with the test.
struct Loop(String);

impl Loop {
    fn over(path: &str) -> Self {
        let output = Command::new("losetup").args(["--find", "--show", path]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_is_stamped_unless_somebody_has_it() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("loop devices need root");
    }
    let folder = Folder::new("block");
    let path = folder.file("file", 4);
    let device = Loop::over(&path);
    refused(&["run", "--destroy-data", &path], &format!("the file behind {}", device.0));
    let destroy = ["run", "--destroy-data", &device.0];
    {
        // As a mount has it (open(2), O_EXCL).
        let flags = rustix::fs::OFlags::EXCL | rustix::fs::OFlags::RDONLY;
        let _held = rustix::fs::open(&*device.0, flags, rustix::fs::Mode::empty()).unwrap();
        refused(&destroy, "mounted, or in use by something else");
        refused(&["check", &device.0], "mounted, or in use by something else");
    }
    assert!(fs::read(&path).unwrap().iter().all(|&byte| byte == 0), "a refusal wrote something");
    let work = ["--direct", "--for", "300ms", "--size", "4KiB,64KiB", "--workers", "2"];
    let zeroes = ["--discard", "10", "--write-zeroes", "10"];
    let output = stamp(&[&destroy[..], &work, &zeroes].concat());
    assert_eq!(code(&output), Some(0), "{}", text(&output));
    let output = stamp(&["check", &device.0, "--direct"]);
    assert_eq!(code(&output), Some(0), "{}", text(&output));
}

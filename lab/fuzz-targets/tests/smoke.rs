//! Every target on its corpus, and on changes of it, by the stable toolchain.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use godwit_control::messages::{Answer, Request};
use godwit_daemon::messages as daemon;
use godwit_fuzz_targets::{TARGETS, Target, corpus, target};
use godwit_qemu::{Mapping, strangers};

/// Changes of each seed. A second for all targets together, more or less.
const CHANGES: usize = 300;
/// Bytes of all corpora together: they are read by people, and kept for ever.
const SMALL: usize = 64 << 10;

fn dir(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name)
}

fn kept(target: &Target) -> Vec<(String, Vec<u8>)> {
    let files = std::fs::read_dir(dir(target)).unwrap().map(|entry| entry.unwrap().path());
    let mut kept: Vec<_> = files
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(&path).unwrap())
        })
        .collect();
    kept.sort();
    kept
}

/// Runs a target; an input that breaks it is shown as it is in Rust.
fn run(target: &Target, name: &str, bytes: &[u8]) {
    let broken = catch_unwind(|| (target.run)(bytes)).is_err();
    assert!(!broken, "{} of {name}: b\"{}\"", target.name, bytes.escape_ascii());
}

#[test]
fn every_target_bears_its_corpus_and_changes_of_it() {
    for target in TARGETS {
        let mut rng = fastrand::Rng::with_seed(20);
        let kept = kept(&target);
        for (name, bytes) in &kept {
            run(&target, name, bytes);
            for _ in 0..CHANGES {
                let (_, other) = &kept[rng.usize(..kept.len())];
                run(&target, name, &changed(bytes, other, &mut rng));
            }
        }
        run(&target, "nothing", b"");
    }
}

/// A few bytes that are others, left out, twice there or of another input.
fn changed(bytes: &[u8], other: &[u8], rng: &mut fastrand::Rng) -> Vec<u8> {
    const ENDS: [u8; 8] = [0, 1, 0x7f, 0x80, 0xff, b'"', b',', b'\n'];
    let mut bytes = bytes.to_vec();
    for _ in 0..rng.usize(1..5) {
        let at = rng.usize(..=bytes.len());
        let end = (at + rng.usize(..9)).min(bytes.len());
        match rng.u8(..6) {
            0 if at < bytes.len() => bytes[at] = rng.u8(..),
            1 if at < bytes.len() => bytes[at] = ENDS[rng.usize(..ENDS.len())],
            2 => drop(bytes.drain(at..end)),
            3 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            4 => bytes.insert(at, ENDS[rng.usize(..ENDS.len())]),
            _ => {
                let from = rng.usize(..=other.len());
                let to = (from + rng.usize(..33)).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
        }
    }
    bytes
}

/// A corpus of what is refused at once would find nothing.
#[test]
fn what_the_other_side_really_says_is_understood() {
    let seed = |target: &str, name: &str| {
        let found = corpus::of(target).into_iter().find(|(kept, _)| *kept == name);
        found.unwrap_or_else(|| panic!("{target}/{name}")).1
    };
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&seed("monitor", "machine")).unwrap();
    theirs.shutdown(Shutdown::Write).unwrap();
    let picture = strangers::look(ours).unwrap();
    let picture = String::from_utf8(picture).unwrap();
    assert!(picture.contains("pc-q35-10.0") && picture.contains("virtio-blk-device"), "{picture}");

    let pair = |name| {
        let both = seed("machine", name);
        let at = both.iter().position(|byte| *byte == 0).unwrap();
        (both[..at].to_vec(), both[at + 1..].to_vec())
    };
    let (source, here) = pair("differs");
    let words = strangers::differences(&source, &here).unwrap();
    assert!(words.contains("[accel]") && words.contains("03.0"), "{words}");
    let (source, here) = pair("disks");
    assert!(strangers::storage(&source, &here).is_ok_and(|found| found == ["vda"]));

    let named: Vec<Mapping> =
        ["/dev/null", "/nowhere/named"].iter().map(|it| it.parse().unwrap()).collect();
    for name in ["plain", "json", "text"] {
        let told = seed("start", name);
        let words = strangers::command_line(&told, (&named, &[]), "/nowhere/m".as_ref());
        assert!(words.is_ok(), "{name}: {words:?}");
    }
    for name in ["stays", "moves"] {
        let image = strangers::domain(&seed("domain", name), "/nowhere/image".as_ref());
        assert!(image.is_ok(), "{name}: {image:?}");
    }
    for (target, name) in [("control", "requests"), ("control", "answers"), ("control", "progress")]
    {
        for line in String::from_utf8(seed(target, name)).unwrap().lines() {
            let request = serde_json::from_str::<Request>(line).is_ok();
            assert!(request || serde_json::from_str::<Answer>(line).is_ok(), "{line}");
        }
    }
    for line in String::from_utf8(seed("control", "daemon")).unwrap().lines() {
        let request = daemon::Request::parse(line.as_bytes()).is_ok();
        assert!(request || serde_json::from_str::<daemon::Answer>(line).is_ok(), "{line}");
    }
}

#[test]
fn corpora_are_what_their_maker_makes() {
    // What the encodings have become since would else not be tried any more.
    for target in TARGETS {
        let kept = kept(&target);
        for (name, bytes) in corpus::of(target.name) {
            let found = kept.iter().find(|(kept, _)| kept == name).map(|(_, bytes)| bytes);
            assert!(
                found == Some(&bytes),
                "{}/{name} is another now: cargo run -p godwit-fuzz-targets --bin fuzz-seeds",
                target.name
            );
        }
        assert!(kept.len() >= 2, "{} has a corpus", target.name);
    }
    let all: usize = TARGETS.iter().flat_map(kept).map(|(_, bytes)| bytes.len()).sum();
    assert!(all < SMALL, "{all} bytes");
}

#[test]
fn targets_have_names_of_their_own_and_their_corpora_no_others() {
    let names: BTreeSet<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names.len(), TARGETS.len());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for entry in std::fs::read_dir(root).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(target(&name).is_some(), "the corpus {name} is no target's");
    }
}

//! Guests of Linux that need not boot: one of each kind of machine boots, and its state is kept.
//!
//! A guest that boots under TCG takes three to four seconds of a processor, more than most tests do
//! with it. So the tests (`scripts/run-tests.sh`, by [`ALLOWED`]) let one boot until it asks for
//! its settings, and start every other of the kind from that state, as guests on KVM start; what
//! it is told differs, and its memory is filled by each. Benchmarks and the demo boot theirs.
//!
//! Keeps one promise: a machine for which no state can be meant boots.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use godwit_stamp::heartbeat::ASKS;

use crate::console::Console;
use crate::guest::{GuestFiles, KERNEL};
use crate::image::Boot;
use crate::saved::SavedState;
use crate::vm_config::{Accelerator, Backend, VmConfig};

/// The variable of the environment that allows it, whatever its value.
const ALLOWED: &str = "GODWIT_BOOT_ONCE";
const LIMIT: Duration = Duration::from_secs(60);
/// What says with which arguments a QEMU starts beside those that are `devices`.
const STARTED_BY: &str = include_str!("vm.rs");
/// What a qcow2 image begins with, and where it says what size it shows (QEMU's
/// docs/interop/qcow2.txt).
const QCOW2: &[u8] = b"QFI\xfb";
const QCOW2_SIZE: std::ops::Range<usize> = 24..32;

/// The state that machines like `config` start from, if there can be one.
pub(crate) fn state_for(config: &VmConfig) -> anyhow::Result<Option<SavedState<'_>>> {
    let linux = config.accelerator == Accelerator::Tcg && config.boot == Boot::Guest;
    if !linux || config.boots || std::env::var_os(ALLOWED).is_none() {
        return Ok(None);
    }
    let Some(extra) = devices(&config.extra) else { return Ok(None) };
    let GuestFiles { kernel, initramfs } = GuestFiles::find()?;
    let programs = [kernel, initramfs].map(|file| {
        let found = fs::metadata(&file).and_then(|found| Ok((found.len(), found.modified()?)));
        found.with_context(|| format!("cannot look at {}", file.display()))
    });
    let [kernel, initramfs] = programs;
    let made_of = (kernel?, initramfs?, KERNEL, STARTED_BY);
    // Whose pages are as large, and whose blocks have the same names.
    let backend = match config.backend {
        Backend::SharedFile | Backend::PrivateFile | Backend::Anonymous | Backend::Memfd => None,
        other => Some(format!("{other:?}")),
    };
    let kind = (config.guest.memory.0, config.cpus, backend, extra);
    Ok(Some(SavedState::new(&config.build, "booted", made_of, kind)))
}

/// Waits until a guest that is to ask for its settings does.
pub(crate) fn await_question(console: &Console) -> anyhow::Result<()> {
    console.wait("question for settings", LIMIT, |console| {
        console.lines().iter().any(|line| line == ASKS).then_some(())
    })
}

/// What says which devices there are, of QEMU's arguments: an image is as large as another. `None`
/// where there is something else among them.
fn devices(extra: &[String]) -> Option<Vec<String>> {
    let mut devices = Vec::new();
    for pair in extra.chunks(2) {
        let [option, value] = pair else { return None };
        match option.as_str() {
            "-device" | "-machine" | "-cpu" => devices.push(format!("{option} {value}")),
            "-blockdev" => {
                let (kind, path) = value.split_once(",file.driver=file,file.filename=")?;
                devices.push(format!("{kind} {}", size_of_image(Path::new(path))?));
            }
            _ => return None,
        }
    }
    Some(devices)
}

/// Bytes that a guest sees of the image `path`, raw or qcow2.
fn size_of_image(path: &Path) -> Option<u64> {
    use std::io::Read;

    let mut start = Vec::new();
    let file = fs::File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.take(QCOW2_SIZE.end as u64).read_to_end(&mut start).ok()?;
    if !start.starts_with(QCOW2) {
        return Some(length);
    }
    start.get(QCOW2_SIZE)?.try_into().ok().map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn machines_are_alike_whose_disks_are_as_large_wherever_they_are() {
        let dir = crate::leftovers::Place::new().unwrap();
        let disk = |name: &str, bytes: &[u8]| {
            fs::write(dir.file(name), bytes).unwrap();
            let node = "driver=raw,node-name=disk,file.driver=file,file.filename=";
            let node = format!("{node}{}", dir.file(name).display());
            devices(&words(&["-blockdev", &node, "-device", "virtio-blk-pci,drive=disk"]))
        };
        let one = disk("one", &[0; 4096]);
        assert!(one.is_some());
        assert_eq!(disk("two", &[0; 4096]), one);
        assert_ne!(disk("longer", &[0; 8192]), one);
        let mut qcow2 = [0; 512];
        qcow2[..4].copy_from_slice(QCOW2);
        qcow2[QCOW2_SIZE].copy_from_slice(&4096u64.to_be_bytes());
        assert_eq!(disk("qcow2", &qcow2), one, "but for its driver, which is in the words");
    }

    #[test]
    fn a_machine_with_something_else_boots() {
        assert_eq!(devices(&[]), Some(Vec::new()));
        assert_ne!(devices(&words(&["-device", "VGA"])), Some(Vec::new()));
        for extra in [&["-S"][..], &["-netdev", "user,id=net"], &["-device"]] {
            assert_eq!(devices(&words(extra)), None, "{extra:?}");
        }
        let elsewhere = "driver=raw,node-name=d,file.driver=nbd,file.path=/run/nbd";
        assert_eq!(devices(&words(&["-blockdev", elsewhere])), None);
        let missing = "driver=raw,node-name=d,file.driver=file,file.filename=/nowhere";
        assert_eq!(devices(&words(&["-blockdev", missing])), None);
    }
}

//! What a source tells of its QEMU, if it is asked: the command line that it was started with, and
//! nothing where that does not tell the machine as it is now.

use std::collections::BTreeSet;

use procfs::process::Process;
use serde::{Deserialize, Serialize};

use super::refused;
use crate::QemuError;
use crate::command_line::{find, options};
use crate::device_state::machine_type;
use crate::machine::Machine;

/// What a destination that starts its own QEMU asks of the source's adapter.
pub(crate) const QUESTION: &[u8] = b"{\"describe\":\"qemu\"}";

/// What it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Description {
    /// The program and its options.
    pub(super) words: Vec<String>,
    /// Where paths without a / in front begin.
    pub(super) directory: String,
    /// The machine type with its version.
    pub(super) machine: String,
}

/// Where devices are that were asked for by name, and those that were not.
const NAMED: &str = "/machine/peripheral";

/// The answer to [`QUESTION`].
///
/// # Errors
/// When the command line is not what the machine is made of any more.
pub(crate) fn describe(machine: &mut Machine) -> Result<Vec<u8>, QemuError> {
    let pid = machine.pid;
    let failed = |source: procfs::ProcError| QemuError::NoProcess { pid, why: source.to_string() };
    let process = Process::new(pid).map_err(failed)?;
    let words = process.cmdline().map_err(failed)?;
    let directory = process.cwd().map_err(failed)?.to_string_lossy().into_owned();
    let devices = machine.devices()?;
    let there = devices.iter().map(|(bus, name, kind)| (*bus == NAMED, name.as_str(), kind));
    check_devices(&words, there.map(|(named, name, kind)| (named, name, kind.as_str())))?;
    let machine = machine_type(machine)?;
    let description = Description { words, directory, machine };
    serde_json::to_vec(&description).map_err(|_| QemuError::Unclear("its QEMU"))
}

/// Refuses a machine with devices that were plugged in, or out, since it was started: each whether
/// it has a name of its own, the name, and the kind.
fn check_devices<'a>(
    words: &[String],
    there: impl Iterator<Item = (bool, &'a str, &'a str)>,
) -> Result<(), QemuError> {
    let cure = "a destination that is made from it would lack that; plug it in again after the \
                move, or start the destination by hand (godwit receive --vm)";
    let given = options(words);
    let of = |name: &'static str| {
        let named = given.iter().filter(move |it| it.name == name);
        named.filter_map(|it| it.value.as_deref())
    };
    let mut names: BTreeSet<String> = of("device").filter_map(|it| find(it, "id", "")).collect();
    let mut nameless = of("device").filter(|it| find(it, "id", "").is_none()).count()
        + of("drive").filter(|it| find(it, "if", "").as_deref() == Some("virtio")).count();
    for (named, name, kind) in there {
        let expected = match named {
            true => names.remove(name),
            false => nameless.checked_sub(1).inspect(|left| nameless = *left).is_some(),
        };
        if !expected {
            let what = if named { format!("'{name}' ({kind})") } else { format!("({kind})") };
            return Err(refused(format!(
                "device {what} was plugged in after the source QEMU was started, and is not on \
                 its command line: {cure}"
            )));
        }
    }
    match (names.first(), nameless) {
        (None, 0) => Ok(()),
        (name, _) => Err(refused(format!(
            "{} was unplugged since the source QEMU was started, and is on its command line: start \
             the destination by hand (godwit receive --vm)",
            name.map_or_else(|| "a device".to_owned(), |name| format!("device '{name}'"))
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, there: &[(bool, &str, &str)]) -> Result<(), String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        check_devices(&words, there.iter().copied()).map_err(|error| error.to_string())
    }

    #[test]
    fn devices_that_came_or_went_since_the_start_are_told() {
        let line = "qemu -device virtio-rng-pci,id=rng -device VGA -drive file=/x,if=virtio";
        let all = [
            (true, "rng", "virtio-rng-pci"),
            (false, "device[0]", "VGA"),
            (false, "device[1]", "virtio-blk-pci"),
        ];
        assert_eq!(check(line, &all), Ok(()));
        let more = [&all[..], &[(true, "net1", "e1000")]].concat();
        let told = check(line, &more).unwrap_err();
        assert!(told.contains("device 'net1' (e1000) was plugged in"), "{told}");
        let told = check(line, &[&all[..], &[(false, "device[2]", "edu")]].concat()).unwrap_err();
        assert!(told.contains("(edu) was plugged in"), "{told}");
        let told = check(line, &all[1..]).unwrap_err();
        assert!(told.contains("device 'rng' was unplugged"), "{told}");
        let told = check(line, &all[..2]).unwrap_err();
        assert!(told.contains("a device was unplugged"), "{told}");
    }
}

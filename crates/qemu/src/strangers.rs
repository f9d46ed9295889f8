//! What others say, read as the adapters read it, and nothing behind it: no QEMU, no libvirt, no
//! peer. For those who look at such words before they have anything done with them, and for tests
//! that say anything at all.
//!
//! Invariant: nothing is started, made or changed by any of this. What a path names may be looked
//! at.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use godwit_disk::DiskChoice;

use crate::device_ram::Loader;
use crate::monitor::commands::{
    QueryBlockstats, QueryChardev, QueryExports, QueryJobs, QueryMemdev, QueryMigrate, QueryNodes,
    QueryStatus,
};
use crate::monitor::{Monitor, Qmp};
use crate::{Mapping, QemuError, command_line, compare, device_state, disks, libvirt, start};

/// What the machine behind a monitor is, as it is told to a destination, in JSON. `monitor` is past
/// its greeting; questions and answers are numbered from 1 on.
///
/// # Errors
/// What the monitor does not answer, or not as it should.
///
/// ```
/// use std::os::unix::net::UnixStream;
///
/// let (monitor, _) = UnixStream::pair()?;
/// assert!(godwit_qemu::strangers::look(monitor).is_err(), "nobody is there");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn look(monitor: UnixStream) -> Result<Vec<u8>, QemuError> {
    let mut qmp = Qmp::over(monitor);
    let monitor: &mut dyn Monitor = &mut qmp;
    // An answer that says something else than it should is no reason not to ask on.
    let _ = (monitor.run(&QueryStatus), monitor.run(&QueryMigrate), monitor.run(&QueryJobs));
    let _ = disks::drives(monitor).map(|drives| disks::choose(&drives, &DiskChoice::All));
    let _ = (monitor.run(&QueryBlockstats), monitor.run(&QueryNodes::FLAT));
    let _ = (monitor.run(&QueryExports), monitor.run(&QueryChardev), monitor.run(&QueryMemdev));
    let picture = compare::picture(monitor);
    let _ = monitor.take_events();
    picture
}

/// The differences between the machine of a source and the one here, in words: each as [`look`]
/// tells it. Empty where there are none.
///
/// # Errors
/// When one of them is none.
///
/// ```
/// use godwit_qemu::strangers::differences;
///
/// let two = br#"{"version":[10,0,2],"facts":{"smp":"2"},"features":{},"devices":{}}"#;
/// let four = br#"{"version":[10,0,2],"facts":{"smp":"4"},"features":{},"devices":{}}"#;
/// let words = differences(two, four)?;
/// assert!(words.starts_with("[smp]"), "{words}");
/// # Ok::<(), godwit_qemu::QemuError>(())
/// ```
pub fn differences(source: &[u8], here: &[u8]) -> Result<String, QemuError> {
    compare::told_differences(source, here)
}

/// Which disks of a source are here as well, by their names, as far as that shows without reading
/// them: of what each side tells of its disks, in JSON.
///
/// # Errors
/// When one of them tells something else.
///
/// ```
/// let disks = br#"{"disks":[{"names":["a"],"size":1,"moves":false,"files":[]}],"shared":false}"#;
/// assert_eq!(godwit_qemu::strangers::storage(disks, disks)?, ["a"]);
/// # Ok::<(), godwit_qemu::QemuError>(())
/// ```
pub fn storage(source: &[u8], here: &[u8]) -> Result<Vec<String>, QemuError> {
    compare::told_storage(source, here)
}

/// The options of a destination that is started from what a source has `told` of its QEMU, with
/// its monitor at `monitor`: which paths are which here, and which programs QEMU may run, the
/// operator has said.
///
/// # Errors
/// The first thing that is not carried, with the cure.
///
/// ```
/// use godwit_qemu::strangers::command_line;
///
/// let told = br#"{"words":["qemu","-m","4G"],"directory":"/","machine":"pc-q35-10.0"}"#;
/// let words = command_line(told, (&[], &[]), "/run/monitor".as_ref())?;
/// assert_eq!(words[..2], ["-m", "4G"]);
/// # Ok::<(), godwit_qemu::QemuError>(())
/// ```
pub fn command_line(
    told: &[u8],
    named: (&[Mapping], &[PathBuf]),
    monitor: &Path,
) -> Result<Vec<String>, QemuError> {
    start::words(told, named, monitor)
}

/// The beginning of a save image of the domain that a source of libvirt's has `told` of, with all
/// disks that move at `path`.
///
/// # Errors
/// Why it cannot be a destination's.
///
/// ```
/// assert!(godwit_qemu::strangers::domain(b"{}", "/vm/disk".as_ref()).is_err());
/// ```
pub fn domain(told: &[u8], path: &Path) -> Result<Vec<u8>, QemuError> {
    libvirt::image_of(told, path)
}

/// The stream that a destination loads, of what a QEMU with that machine type has saved of its
/// `devices`; `None` where that is no state.
///
/// ```
/// use godwit_qemu::strangers::device_state;
///
/// assert!(device_state(b"QEVM\0\0\0\x03\x04\0", "pc-q35-10.0").is_some());
/// assert!(device_state(b"GIF89a", "pc-q35-10.0").is_none());
/// ```
#[must_use]
pub fn device_state(devices: &[u8], machine_type: &str) -> Option<Vec<u8>> {
    device_state::stream(devices, machine_type, &[], Loader::Prepared)
}

/// The options that a file of settings stands for (`-readconfig`), each with its value.
///
/// ```
/// let found = godwit_qemu::strangers::settings("[device \"a\"]\ndriver = \"e1000\"\n");
/// assert_eq!(found, [("device".to_owned(), "id=a,driver=e1000".to_owned())]);
/// ```
#[must_use]
pub fn settings(text: &str) -> Vec<(String, String)> {
    let given = command_line::settings(text).into_iter();
    given.map(|given| (given.name, given.value.unwrap_or_default())).collect()
}

/// The parts of an option's value, between commas as QEMU takes them.
///
/// ```
/// assert_eq!(godwit_qemu::strangers::parts("socket,path=/a,,b"), ["socket", "path=/a,b"]);
/// ```
#[must_use]
pub fn parts(value: &str) -> Vec<String> {
    command_line::parts(value)
}

//! The state of all devices without a migration: what a QEMU whose RAM is not in shared files hands
//! out, as its own migration would carry that RAM.
//!
//! The guest is stopped by `stop`, and `xen-save-devices-state` (in every build of QEMU; made for
//! Xen, where RAM is not QEMU's) writes what the devices are into a memfd, a few hundred KiB in a
//! few milliseconds. As part of a live migration (`live`, its default) it lets go of the images of
//! a machine that was stopped before, as a migration does; `cont` takes them back, which is QEMU's
//! own documented way back. QEMU reads a command byte by byte, some 11 us each, so what can be said
//! to it before the guest stops is said then: it has the memfd by that time, unless its monitor is
//! libvirt's or Proxmox's.
//!
//! What it writes lacks two sections that every migration has and a destination demands: the
//! configuration, with the machine type and the capabilities, and an empty description at the end
//! (migration/savevm.c, `vmstate_configuration` and `qemu_loadvm_state`). With these an ordinary
//! `migrate-incoming` loads it. It asks no migration blocker, so whoever calls this has asked; what
//! has live state of its own, such as VFIO, would be left out, and is refused before.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::QemuError;
use crate::device_ram::{self, DeviceRam, Loader};
use crate::machine::Machine;
use crate::monitor::commands::{QomGet, RemoveFd, SaveDevices};
use crate::monitor::{Monitor, QmpError, Queued};

/// "QEVM" and version 3, in big-endian order (migration/qemu-file-types.h, QEMU_VM_FILE_MAGIC).
pub(crate) const HEADER: [u8; 8] = [b'Q', b'E', b'V', b'M', 0, 0, 0, 3];
/// QEMU_VM_CONFIGURATION.
const CONFIGURATION: u8 = 7;
/// The subsection of it that tells of capabilities on which both sides must agree: one, which
/// destinations of godwit's have on whatever their RAM is. QEMU_VM_SUBSECTION, the length of a
/// name, the name, a version and a count in four bytes each, the length of a name, the name.
const CAPABILITIES: [&[u8]; 5] =
    [b"\x05\x1a", b"configuration/capabilities", b"\0\0\0\x01\0\0\0\x01", b"\x0f", IGNORED];
const IGNORED: &[u8] = b"x-ignore-shared";
/// The set of descriptors that the memfd is put into: no number that QEMU gives by itself, as it
/// takes the lowest (monitor/fds.c), nor one that a management tool is likely to count up to.
const FD_SET: i64 = 0x676f_6477;
/// QEMU_VM_VMDESCRIPTION, and no bytes of it.
const NO_DESCRIPTION: [u8; 5] = [6, 0, 0, 0, 0];

/// A stream that is all there at once, and may be read later, or never: nobody waits for it.
fn passed_on() -> (Sender<Vec<u8>>, PassedOn) {
    let (to, from) = mpsc::channel();
    (to, PassedOn { from, bytes: Cursor::default() })
}

pub(crate) struct PassedOn {
    from: Receiver<Vec<u8>>,
    bytes: Cursor<Vec<u8>>,
}

impl Read for PassedOn {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.bytes.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            // It ends with the other end.
            let Ok(more) = self.from.recv() else { return Ok(0) };
            self.bytes = Cursor::new(more);
        }
    }
}

/// The machine type, versioned, as a migration names it.
pub(crate) fn machine_type(machine: &mut Machine) -> Result<String, QemuError> {
    let class = machine.qmp.run(&QomGet::<String>::new("/machine", "type"))?;
    Ok(class.strip_suffix("-machine").unwrap_or(&class).to_owned())
}

/// What QEMU is to save its devices into, and all that can be found out or done for that before the
/// guest is stopped.
#[derive(Debug)]
pub(crate) struct Prepared {
    file: File,
    machine_type: String,
    /// The descriptor, where QEMU is handed it only when it saves.
    to_hand_over: Option<File>,
    /// Where the stream goes.
    to: Sender<Vec<u8>>,
}

impl Prepared {
    /// Makes a file, and hands it to `machine` at once if that `keeps` it. The caller calls
    /// [`forget`] in the end, also after an error. Returns also the stream that a destination
    /// loads, which ends with `Self` and what becomes of it.
    pub(crate) fn new(machine: &mut Machine, keeps: bool) -> Result<(Self, PassedOn), QemuError> {
        let system = |step| move |source| QemuError::System { step, source };
        let memfd = memfd_create("godwit-devices", MemfdFlags::CLOEXEC)
            .map_err(|errno| system("memfd_create")(errno.into()))?;
        let file = File::from(memfd);
        // QEMU opens it for writing alone, and looks for a descriptor that is open for that alone
        // (monitor_fdset_dup_fd_add).
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let writer = File::options().write(true).open(path).map_err(system("opening a memfd"))?;
        let machine_type = machine_type(machine)?;
        // One of a godwit that was killed would stay; while the guest runs QEMU lets go of it.
        forget(&mut *machine.qmp)?;
        let to_hand_over = if keeps {
            machine.qmp.add_fd(FD_SET, writer.as_fd())?;
            None
        } else {
            Some(writer)
        };
        let (to, stream) = passed_on();
        Ok((Self { file, machine_type, to_hand_over, to }, stream))
    }

    /// Has QEMU begin to save its devices. The guest must have been stopped.
    pub(crate) fn save(self, machine: &mut Machine) -> Result<Saving, QemuError> {
        let qmp = &mut *machine.qmp;
        let Self { file, machine_type, to_hand_over, to } = self;
        if let Some(writer) = to_hand_over {
            qmp.add_fd(FD_SET, writer.as_fd())?;
        }
        let told = qmp.start(&SaveDevices { filename: &format!("/dev/fdset/{FD_SET}") })?;
        Ok(Saving { file, machine_type, to, told })
    }
}

/// Devices that QEMU was told to save.
#[derive(Debug)]
pub(crate) struct Saving {
    file: File,
    machine_type: String,
    to: Sender<Vec<u8>>,
    told: Queued,
}

impl Saving {
    /// Waits for QEMU's answer, and passes the stream on.
    pub(crate) fn finish(
        mut self,
        machine: &mut Machine,
        ram: &[DeviceRam],
        loader: Loader,
        limit: Duration,
    ) -> Result<(), QemuError> {
        machine.qmp.answer(&self.told, limit)?;
        let mut devices = Vec::new();
        self.file
            .read_to_end(&mut devices)
            .map_err(|source| QemuError::System { step: "reading a memfd", source })?;
        let ram = device_ram::section(ram, loader)?;
        let stream = stream(&devices, &self.machine_type, &ram, loader);
        let stream = stream.ok_or_else(|| QemuError::State {
            action: "save",
            words: "what it wrote does not begin as a migration does".to_owned(),
        })?;
        // Nobody has to have read it by now: it may be more than is taken before the last round has
        // ended. Who read it may also be gone, which is found out by whoever waits for it.
        let _ = self.to.send(stream);
        Ok(())
    }
}

/// Has QEMU let go of what a [`Prepared`] has handed to it, or a godwit that was killed.
pub(crate) fn forget(qmp: &mut dyn Monitor) -> Result<(), QmpError> {
    // There is none where QEMU did not take it.
    qmp.run_if_known(&RemoveFd { fdset_id: FD_SET }).map(drop)
}

/// What `devices` lacks of a migration's stream, added; `ram` is a section or none.
pub(crate) fn stream(
    devices: &[u8],
    machine_type: &str,
    ram: &[u8],
    loader: Loader,
) -> Option<Vec<u8>> {
    let sections = devices.strip_prefix(&HEADER)?;
    let length = u32::try_from(machine_type.len()).ok()?;
    let mut stream = HEADER.to_vec();
    stream.push(CONFIGURATION);
    stream.extend(length.to_be_bytes());
    stream.extend(machine_type.as_bytes());
    if loader == Loader::Prepared {
        stream.extend(CAPABILITIES.concat());
    }
    stream.extend(ram);
    stream.extend(sections);
    stream.extend(NO_DESCRIPTION);
    Some(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_comes_first_and_a_description_last() {
        let stream =
            stream(b"QEVM\0\0\0\x03\x04rest\0", "pc-q35-10.0", b"\x01ram", Loader::Prepared);
        let expected = b"QEVM\0\0\0\x03\x07\0\0\0\x0bpc-q35-10.0\
            \x05\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x01\x0fx-ignore-shared\
            \x01ram\x04rest\0\x06\0\0\0\0";
        assert_eq!(stream.unwrap(), expected.as_slice());
    }

    #[test]
    fn a_qemu_that_nobody_prepared_hears_of_no_capability() {
        let stream = stream(b"QEVM\0\0\0\x03\x04rest\0", "pc", b"\x01ram", Loader::Plain);
        let expected = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x01ram\x04rest\0\x06\0\0\0\0";
        assert_eq!(stream.unwrap(), expected.as_slice());
    }

    #[test]
    fn a_stream_of_any_length_is_handed_on_without_a_reader() {
        // Mutation: it goes through a socket, and this waits for ever.
        let (to, mut from) = passed_on();
        to.send(vec![7; 100 << 20]).unwrap();
        drop(to);
        let mut read = Vec::new();
        from.read_to_end(&mut read).unwrap();
        assert_eq!((read.len(), from.read(&mut [0]).unwrap()), (100 << 20, 0));
        let (to, from) = passed_on();
        drop(from);
        assert!(to.send(vec![7]).is_err());
    }

    #[test]
    fn what_is_no_stream_of_that_version_is_refused() {
        assert_eq!(stream(b"QEVM\0\0\0\x04\x04", "pc", b"", Loader::Plain), None);
        assert_eq!(stream(b"QEV", "pc", b"", Loader::Plain), None);
    }
}

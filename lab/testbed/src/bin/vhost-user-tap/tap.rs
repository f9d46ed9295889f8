//! A tap, which is one end of a port of the host's.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::{Context, anyhow};
use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{Opcode, Updater, ioctl};

/// linux/if_tun.h: TUNSETIFF, and the flags IFF_TAP and IFF_NO_PI.
const SET_INTERFACE: Opcode = 0x4004_54ca;
const TAP_OF_BARE_FRAMES: u16 = 2 | 0x1000;

/// `struct ifreq` of linux/if.h, as far as this call looks at it.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// Opens the tap `port`, which there must be, in the network namespace at `namespace`.
pub(crate) fn open(namespace: &Path, port: &str) -> anyhow::Result<File> {
    let namespace = File::open(namespace).context("the namespace is gone")?;
    std::thread::scope(|scope| {
        // In a thread of its own: the socket for QEMU stays where QEMU is.
        let opened = scope.spawn(|| {
            godwit_testbed::enter_namespace(&namespace)?;
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let tap = File::from(rustix::fs::open("/dev/net/tun", flags, Mode::empty())?);
            attach(&tap, port).with_context(|| format!("cannot open the tap {port}"))?;
            Ok(tap)
        });
        opened.join().map_err(|_| anyhow!("the thread has panicked"))?
    })
}

fn attach(tap: &File, port: &str) -> io::Result<()> {
    let mut request = Request { name: [0; 16], flags: TAP_OF_BARE_FRAMES, rest: [0; 22] };
    // With a zero behind it.
    let name = request.name[..15].get_mut(..port.len());
    name.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(port.as_bytes());
    // SAFETY: the kernel reads and writes a `struct ifreq` for this number, which is what it is
    // given, and keeps no pointer to it.
    unsafe { ioctl(tap, Updater::<SET_INTERFACE, Request>::new(&mut request)) }?;
    Ok(())
}

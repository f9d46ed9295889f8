//! A TUN device, which is the end of the link in a network namespace.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::{Context, anyhow};
use godwit_testbed::EmulatedLink;
use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{IntegerSetter, Opcode, Updater, ioctl};

/// linux/if_tun.h: TUNSETIFF, and the flags IFF_TUN, IFF_NO_PI and IFF_VNET_HDR.
const SET_INTERFACE: Opcode = 0x4004_54ca;
const TUN_WITH_HEADERS: u16 = 1 | 0x1000 | 0x4000;
/// TUNSETOFFLOAD, and the flags TUN_F_CSUM and TUN_F_TSO4.
const SET_OFFLOAD: Opcode = 0x4004_54d0;
const SUMS_AND_SEGMENTS: usize = 1 | 2;

/// `struct ifreq` of linux/if.h, as far as this call looks at it.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// Makes the device in the network namespace at `namespace`. It goes with its file.
pub(crate) fn create(namespace: &Path) -> anyhow::Result<File> {
    let within = File::open(namespace).context("the namespace is gone")?;
    std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            godwit_testbed::enter_namespace(&within)?;
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let tun = rustix::fs::open("/dev/net/tun", flags, Mode::empty());
            let tun = File::from(tun.context("cannot open /dev/net/tun")?);
            attach(&tun).context("cannot make a TUN device")?;
            Ok(tun)
        });
        made.join().map_err(|_| anyhow!("the thread has panicked"))?
    })
}

fn attach(tun: &File) -> io::Result<()> {
    let mut request = Request { name: [0; 16], flags: TUN_WITH_HEADERS, rest: [0; 22] };
    request.name[..EmulatedLink::DEVICE.len()].copy_from_slice(EmulatedLink::DEVICE.as_bytes());
    // SAFETY: the kernel reads and writes a `struct ifreq` for this number, which is what it is
    // given, and keeps no pointer to it.
    unsafe { ioctl(tun, Updater::<SET_INTERFACE, Request>::new(&mut request)) }?;
    // SAFETY: a request with a number as its argument; no memory is involved.
    unsafe { ioctl(tun, IntegerSetter::<SET_OFFLOAD>::new_usize(SUMS_AND_SEGMENTS)) }?;
    Ok(())
}

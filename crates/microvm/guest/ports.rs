//! A virtio device that QEMU puts on the PCI bus, by ports (virtio 0.9.5, 2.1 and 2.3; PCI local
//! bus 3.0, 3.2.2.3.2 and 6.2.5): no memory has to be mapped for it, and there is no firmware that
//! would give it an address.

use core::arch::asm;

use crate::virtio::Queue;

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const VIRTIO: u32 = 0x1af4;
/// Kinds of devices from there on, in this generation of them.
const FIRST_KIND: u32 = 0x0fff;
/// I/O space, and the bus for itself.
const COMMAND: u32 = 1 | 4;

const QUEUE_ADDRESS: u16 = 8;
const QUEUE_SIZE: u16 = 12;
const QUEUE_SELECT: u16 = 14;
const QUEUE_NOTIFY: u16 = 16;
const STATUS: u16 = 18;
const CONFIG: u16 = 20;

/// A device that was found, by the first of its ports.
pub struct Ports(u16);

impl Ports {
    /// Finds the device of the kind `kind` in this slot, gives it these ports and begins to bring
    /// it up.
    pub fn begin(kind: u32, slot: u16, ports: u16) -> Self {
        let word = |offset: u32| 0x8000_0000 | u32::from(slot) << 11 | offset;
        put32(ADDRESS, word(0));
        if take32(DATA) != (FIRST_KIND + kind) << 16 | VIRTIO {
            panic!("there is no virtio device {kind} with ports in slot {slot}");
        }
        for (offset, value) in [(0x10, u32::from(ports)), (0x04, COMMAND)] {
            put32(ADDRESS, word(offset));
            put32(DATA, value);
        }
        put8(ports + STATUS, 0);
        put8(ports + STATUS, 1 | 2);
        // No features.
        put32(ports + 4, 0);
        Self(ports)
    }

    /// Shows it queue `number`.
    pub fn show<const SIZE: usize>(&self, number: u16, ring: &'static Queue<SIZE>) {
        put16(self.0 + QUEUE_SELECT, number);
        if take16(self.0 + QUEUE_SIZE) != SIZE as u16 {
            panic!("queue {number} is not of {SIZE} places");
        }
        put32(self.0 + QUEUE_ADDRESS, (ring.address() / crate::PAGE_SIZE) as u32);
    }

    /// It works from here on.
    pub fn ready(&self) {
        put8(self.0 + STATUS, 1 | 2 | 4);
    }

    /// The first 8 bytes of what is the device's own.
    pub fn config(&self) -> u64 {
        let word = |offset| u64::from(take32(self.0 + CONFIG + offset));
        word(4) << 32 | word(0)
    }

    /// Tells it that there is something in queue `number`.
    pub fn notify(&self, number: u16) {
        put16(self.0 + QUEUE_NOTIFY, number);
    }
}

fn put8(port: u16, value: u8) {
    // SAFETY: a register of the device.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nostack)) };
}

fn put16(port: u16, value: u16) {
    // SAFETY: as above; a notified device reads and writes the memory that it was shown.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nostack)) };
}

fn put32(port: u16, value: u32) {
    // SAFETY: as above, or the bus's.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack)) };
}

fn take16(port: u16) -> u16 {
    let value;
    // SAFETY: reading it changes nothing.
    unsafe { asm!("in ax, dx", in("dx") port, out("ax") value, options(nostack)) };
    value
}

fn take32(port: u16) -> u32 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nostack)) };
    value
}

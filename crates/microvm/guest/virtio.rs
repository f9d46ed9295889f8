//! What the drivers share: a device's registers on virtio-mmio, and a queue without interrupts
//! (virtio 1.2, 2.7, 3.1.1 and 4.2).

use core::cell::UnsafeCell;
use core::ptr::{read_volatile, write_volatile};
use core::sync::atomic::{Ordering, fence};

pub const NEXT: u16 = 1;
pub const DEVICE_WRITES: u16 = 2;

/// A device at this guest address.
#[derive(Clone, Copy)]
pub struct Device(pub u64);

impl Device {
    pub fn register(self, offset: u64) -> u32 {
        // SAFETY: a register of the device, which the VMM has put there.
        unsafe { read_volatile((self.0 + offset) as *const u32) }
    }

    pub fn set_register(self, offset: u64, value: u32) {
        // SAFETY: as above.
        unsafe { write_volatile((self.0 + offset) as *mut u32, value) }
    }

    /// Begins to bring up a device of the kind `kind`, with `features` and VIRTIO_F_VERSION_1.
    pub fn begin(self, kind: u32, features: u32) {
        if self.register(0) != 0x7472_6976 || self.register(4) != 2 || self.register(8) != kind {
            panic!("there is no virtio device {kind}");
        }
        self.set_register(0x70, 0);
        self.set_register(0x70, 1 | 2);
        for (select, features) in [(0, features), (1, 1)] {
            self.set_register(0x24, select);
            self.set_register(0x20, features);
        }
        self.set_register(0x70, 1 | 2 | 8);
        if self.register(0x70) & 8 == 0 {
            panic!("device {kind} does not take the features");
        }
    }

    /// Shows it queue `number`.
    pub fn show<const SIZE: usize>(self, number: u32, ring: &'static Queue<SIZE>) {
        self.set_register(0x30, number);
        if self.register(0x34) < SIZE as u32 {
            panic!("there is no queue {number}");
        }
        self.set_register(0x38, SIZE as u32);
        let ring = ring.0.get();
        // SAFETY: takes addresses only.
        let parts = unsafe {
            [
                &raw const (*ring).descriptors as u64,
                &raw const (*ring).available_flags as u64,
                &raw const (*ring).used as u64,
            ]
        };
        for (offset, address) in [0x80, 0x90, 0xa0].into_iter().zip(parts) {
            self.set_register(offset, address as u32);
            self.set_register(offset + 4, (address >> 32) as u32);
        }
        self.set_register(0x44, 1);
    }

    /// Tells it that there is something in queue `number`.
    pub fn notify(self, number: u32) {
        self.set_register(0x50, number);
    }

    /// It works from here on.
    pub fn ready(self) {
        self.set_register(0x70, 1 | 2 | 8 | 4);
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descriptor {
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

#[repr(C, align(4096))]
pub struct Ring<const SIZE: usize> {
    descriptors: [Descriptor; SIZE],
    available_flags: u16,
    available_index: u16,
    available: [u16; SIZE],
    used: Used<SIZE>,
}

/// Where devices with ports expect it: on a page of its own.
#[repr(C, align(4096))]
struct Used<const SIZE: usize> {
    flags: u16,
    index: u16,
    entries: [[u32; 2]; SIZE],
}

/// A queue; used by one vCPU at a time, and by the device while requests are under way.
pub struct Queue<const SIZE: usize>(UnsafeCell<Ring<SIZE>>);
// SAFETY: whoever calls the unsafe functions sees to it that nobody else does.
unsafe impl<const SIZE: usize> Sync for Queue<SIZE> {}

impl<const SIZE: usize> Queue<SIZE> {
    pub const fn new() -> Self {
        Self(UnsafeCell::new(Ring {
            descriptors: [Descriptor { address: 0, len: 0, flags: 0, next: 0 }; SIZE],
            available_flags: 1,
            available_index: 0,
            available: [0; SIZE],
            used: Used { flags: 0, index: 0, entries: [[0; 2]; SIZE] },
        }))
    }

    /// Makes the chain that begins at descriptor `head` available.
    ///
    /// # Safety
    /// No other vCPU uses the queue, and there is a place for it.
    pub unsafe fn add(&self, head: u16) {
        let ring = self.0.get();
        // SAFETY: as the caller says.
        unsafe {
            let index = (*ring).available_index;
            (*ring).available[usize::from(index) % SIZE] = head;
            fence(Ordering::SeqCst);
            write_volatile(&raw mut (*ring).available_index, index.wrapping_add(1));
            fence(Ordering::SeqCst);
        }
    }

    /// Writes descriptor `number`.
    ///
    /// # Safety
    /// No other vCPU uses the queue, and the device does not use this descriptor.
    pub unsafe fn describe(&self, number: u16, descriptor: Descriptor) {
        // SAFETY: as the caller says.
        unsafe { (*self.0.get()).descriptors[usize::from(number) % SIZE] = descriptor };
    }

    /// Where it is.
    pub fn address(&self) -> u64 {
        self.0.get() as u64
    }

    /// Notifies `device` of queue `number` and waits until it has given back all that was made
    /// available.
    ///
    /// # Safety
    /// No other vCPU uses the queue.
    pub unsafe fn carry_out(&self, device: Device, number: u32) {
        device.notify(number);
        // SAFETY: as the caller says.
        unsafe { self.await_all() };
    }

    /// Waits until the device has given back all that was made available.
    ///
    /// # Safety
    /// No other vCPU uses the queue.
    pub unsafe fn await_all(&self) {
        // SAFETY: as the caller says.
        while !unsafe { self.is_given_back() } {
            core::hint::spin_loop();
        }
        fence(Ordering::SeqCst);
    }

    /// What the device has given back as the `number`th, counted from 0: the chain's first
    /// descriptor, and how much was written to it.
    ///
    /// # Safety
    /// No other vCPU uses the queue.
    pub unsafe fn given_back(&self, number: u16) -> Option<(u16, u32)> {
        let ring = self.0.get();
        // SAFETY: as the caller says; what the device writes is read with volatile reads, and an
        // entry behind the index that counts it.
        unsafe {
            if read_volatile(&raw const (*ring).used.index) == number {
                return None;
            }
            fence(Ordering::SeqCst);
            let entry = &raw const (*ring).used.entries[usize::from(number) % SIZE];
            let [head, len] = read_volatile(entry);
            Some((head as u16, len))
        }
    }

    /// Whether the device has given back all that was made available.
    ///
    /// # Safety
    /// No other vCPU uses the queue.
    pub unsafe fn is_given_back(&self) -> bool {
        let ring = self.0.get();
        // SAFETY: as the caller says; what the device writes is read with volatile reads.
        unsafe { read_volatile(&raw const (*ring).used.index) == (*ring).available_index }
    }
}

/// Memory that one vCPU and a device share.
pub struct Shared<T>(pub UnsafeCell<T>);
// SAFETY: used by one vCPU at a time, and by the device while a request is under way.
unsafe impl<T> Sync for Shared<T> {}

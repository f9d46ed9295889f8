//! A split queue, walked by the device (virtio 1.2, 2.7).
//!
//! Invariant: a chain is at most as long as the queue, and of one look at the queue no more chains are taken than it has
//! places. So rings that bite their own tail end in [`Nonsense`], after a bounded time.

use godwit_units::Gpa;

use crate::sync::{Ordering, fence};
use crate::{GuestMemory, Nonsense};

/// VIRTQ_DESC_F_NEXT.
pub const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE.
pub const DEVICE_WRITES: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT, which is not offered.
const INDIRECT: u16 = 4;

/// A piece of guest memory that belongs to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins; whether it is memory has not been looked at.
    pub address: Gpa,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device may write it (and not read it).
    pub device_writes: bool,
}

/// A queue as the driver has set it up, and how far the device has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queue {
    pub(crate) size: u16,
    pub(crate) ready: bool,
    /// Descriptors, driver's ring, device's ring.
    pub(crate) parts: [u64; 3],
    next_available: u16,
    next_used: u16,
}

impl Queue {
    /// Words of its state.
    pub(crate) const WORDS: usize = 7;

    /// Takes all requests that the driver has made available, in order. `carry_out` returns how many bytes of guest memory it wrote;
    /// then the request is given back. Returns whether there was any.
    ///
    /// # Errors
    /// When the rings make no sense, or `carry_out` says that a request does not.
    pub fn work(
        &mut self,
        memory: &impl GuestMemory,
        mut carry_out: impl FnMut(&[Piece]) -> Result<u32, Nonsense>,
    ) -> Result<bool, Nonsense> {
        let mut pieces = Vec::new();
        // What another vCPU adds meanwhile comes with a notification of its own.
        let available = self.available(memory)?;
        for _ in 0..available {
            let Some(head) = self.take(memory, &mut pieces)? else { break };
            let written = carry_out(&pieces)?;
            self.give_back(memory, head, written)?;
        }
        Ok(available > 0)
    }

    /// How many requests wait.
    fn available(&self, memory: &impl GuestMemory) -> Result<u16, Nonsense> {
        if self.size == 0 || !self.ready {
            return Ok(0);
        }
        let index = u16_at(memory, self.parts[1].wrapping_add(2))?;
        // The index before what it announces: the driver has written entries and descriptors before it (virtio 1.2,
        // 2.7.13.3), and they must not be read earlier.
        fence(Ordering::Acquire);
        let waiting = index.wrapping_sub(self.next_available);
        if waiting > self.size { Err(Nonsense) } else { Ok(waiting) }
    }

    /// Takes the next request, if one waits: fills `pieces` and returns the number to give it back by.
    ///
    /// # Errors
    /// When the rings make no sense.
    pub fn take(
        &mut self,
        memory: &impl GuestMemory,
        pieces: &mut Vec<Piece>,
    ) -> Result<Option<u16>, Nonsense> {
        if self.available(memory)? == 0 {
            return Ok(None);
        }
        let slot = u64::from(self.next_available % self.size);
        let head = u16_at(memory, self.parts[1].wrapping_add(4 + 2 * slot))?;
        self.walk(memory, head, pieces)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    fn walk(&self, memory: &impl GuestMemory, head: u16, pieces: &mut Vec<Piece>) -> Result<(), Nonsense> {
        pieces.clear();
        let mut next = Some(head);
        while let Some(index) = next {
            if index >= self.size || pieces.len() >= usize::from(self.size) {
                return Err(Nonsense);
            }
            let mut bytes = [0; 16];
            let at = self.parts[0].wrapping_add(16 * u64::from(index));
            memory.read(Gpa(at), &mut bytes).ok_or(Nonsense)?;
            let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            let address = bytes[..8].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
            let flags = half(12);
            if flags & INDIRECT != 0 {
                return Err(Nonsense);
            }
            pieces.push(Piece {
                address: Gpa(address),
                len: u32::from(half(8)) | u32::from(half(10)) << 16,
                device_writes: flags & DEVICE_WRITES != 0,
            });
            next = (flags & NEXT != 0).then(|| half(14));
        }
        Ok(())
    }

    /// Gives the request `head` back to the driver, of whose memory `written` bytes were written.
    ///
    /// # Errors
    /// When the device's ring is not in memory.
    pub fn give_back(&mut self, memory: &impl GuestMemory, head: u16, written: u32) -> Result<(), Nonsense> {
        if self.size == 0 {
            return Err(Nonsense);
        }
        let mut entry = [0; 8];
        entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        entry[4..].copy_from_slice(&written.to_le_bytes());
        let slot = u64::from(self.next_used % self.size);
        memory.write(Gpa(self.parts[2].wrapping_add(4 + 8 * slot)), &entry).ok_or(Nonsense)?;
        self.next_used = self.next_used.wrapping_add(1);
        // The index after the entry (virtio 1.2, 2.7.14).
        fence(Ordering::Release);
        let index = self.next_used.to_le_bytes();
        memory.write(Gpa(self.parts[2].wrapping_add(2)), &index).ok_or(Nonsense)
    }

    pub(crate) fn save(&self) -> [u64; Self::WORDS] {
        let Self { size, ready, parts, next_available, next_used } = *self;
        let [descriptors, driver, device] = parts;
        [size.into(), ready.into(), descriptors, driver, device, next_available.into(), next_used.into()]
    }

    /// The queue that [`Self::save`] made; `None` if its size is none.
    pub(crate) fn load(words: [u64; Self::WORDS], most: u16) -> Option<Self> {
        let [size, ready, descriptors, driver, device, next_available, next_used] = words;
        let fits = size <= u64::from(most) && (size == 0 || size.is_power_of_two());
        fits.then_some(Self {
            size: size as u16,
            ready: ready != 0,
            parts: [descriptors, driver, device],
            next_available: next_available as u16,
            next_used: next_used as u16,
        })
    }
}

fn u16_at(memory: &impl GuestMemory, at: u64) -> Result<u16, Nonsense> {
    let mut bytes = [0; 2];
    memory.read(Gpa(at), &mut bytes).ok_or(Nonsense)?;
    Ok(u16::from_le_bytes(bytes))
}

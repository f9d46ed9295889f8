//! Requests of a split queue (virtio 1.2, 2.7), which the crate virtio-queue walks.
//!
//! What this adds is strictness: a chain that does not end, or leads out of the table or out of
//! memory, is an [`InvalidRing`] and not a shorter request. Chains are bounded by the queue, and of
//! one look no more are taken than it has places.

use std::sync::atomic::Ordering;

use godwit_units::Gpa;
use virtio_queue::{Error, QueueOwnedT, QueueState, QueueT};
use vm_memory::GuestMemory;

use crate::InvalidRing;

/// VIRTQ_DESC_F_NEXT.
pub const NEXT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT as u16;
/// VIRTQ_DESC_F_WRITE.
pub const DEVICE_WRITES: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_WRITE as u16;

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
#[derive(Debug, PartialEq, Eq)]
pub struct Queue(virtio_queue::Queue);

impl Queue {
    /// Words of its state.
    pub(crate) const WORDS: usize = 7;

    /// A queue of at most `most` places, a power of two.
    pub(crate) fn new(most: u16) -> Result<Self, Error> {
        virtio_queue::Queue::new(most).map(Self)
    }

    /// Takes all requests that the driver has made available, in order. `carry_out` returns how
    /// many bytes of guest memory it wrote; then the request is given back. Returns whether there
    /// was any.
    ///
    /// # Errors
    /// When the rings are invalid, or `carry_out` says that a request is.
    pub fn work(
        &mut self,
        memory: &impl GuestMemory,
        mut carry_out: impl FnMut(&[Piece]) -> Result<u32, InvalidRing>,
    ) -> Result<bool, InvalidRing> {
        let mut pieces = Vec::new();
        let mut any = false;
        // What another vCPU adds meanwhile comes with a notification of its own.
        for _ in 0..self.0.size() {
            let Some(head) = self.take(memory, &mut pieces)? else { break };
            let written = carry_out(&pieces)?;
            self.give_back(memory, head, written)?;
            any = true;
        }
        Ok(any)
    }

    /// Takes the next request, if one waits: fills `pieces` and returns the number to give it back
    /// by.
    ///
    /// # Errors
    /// When the rings are invalid.
    pub fn take<M: GuestMemory>(
        &mut self,
        memory: &M,
        pieces: &mut Vec<Piece>,
    ) -> Result<Option<u16>, InvalidRing> {
        if !self.0.ready() {
            return Ok(None);
        }
        // Looked at before the queue is, which looks again: another vCPU may add a request in
        // between, and notifies of it.
        let index = self.0.avail_idx(memory, Ordering::Acquire).map_err(|_| InvalidRing)?;
        let next = self.0.next_avail();
        let mut waiting = self.0.iter(memory).map_err(|_| InvalidRing)?;
        if index.0 == next {
            return Ok(None);
        }
        // One waits: where there is none, its entry is not in memory.
        let chain = waiting.next().ok_or(InvalidRing)?;
        let head = chain.head_index();
        pieces.clear();
        let mut goes_on = true;
        for descriptor in chain {
            goes_on = descriptor.has_next();
            pieces.push(Piece {
                address: Gpa(descriptor.addr().0),
                len: descriptor.len(),
                device_writes: descriptor.is_write_only(),
            });
        }
        if goes_on { Err(InvalidRing) } else { Ok(Some(head)) }
    }

    /// Gives the request `head` back to the driver, of whose memory `written` bytes were written.
    ///
    /// # Errors
    /// When the device's ring is not in memory, or there is no such request.
    pub fn give_back(
        &mut self,
        memory: &impl GuestMemory,
        head: u16,
        written: u32,
    ) -> Result<(), InvalidRing> {
        self.0.add_used(memory, head, written).map_err(|_| InvalidRing)
    }

    pub(crate) fn ready(&self) -> bool {
        self.0.ready()
    }

    /// The driver writes `value` to the queue's register at `offset` (virtio 1.2, 4.2.2). A size or
    /// an address that none can have is not taken.
    pub(crate) fn set(&mut self, offset: u64, value: u32) {
        match offset {
            0x38 => self.0.set_size(u16::try_from(value).unwrap_or(0)),
            0x44 => self.0.set_ready(value & 1 != 0),
            0x80 => self.0.set_desc_table_address(Some(value), None),
            0x84 => self.0.set_desc_table_address(None, Some(value)),
            0x90 => self.0.set_avail_ring_address(Some(value), None),
            0x94 => self.0.set_avail_ring_address(None, Some(value)),
            0xa0 => self.0.set_used_ring_address(Some(value), None),
            0xa4 => self.0.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    pub(crate) fn save(&self) -> [u64; Self::WORDS] {
        let state = self.0.state();
        let QueueState {
            size,
            ready,
            desc_table,
            avail_ring,
            used_ring,
            next_avail,
            next_used,
            ..
        } = state;
        let (next_avail, next_used) = (next_avail.into(), next_used.into());
        [size.into(), ready.into(), desc_table, avail_ring, used_ring, next_avail, next_used]
    }

    /// The queue of at most `most` places that [`Self::save`] made; `None` if none can have made
    /// it.
    pub(crate) fn load(words: [u64; Self::WORDS], most: u16) -> Option<Self> {
        let [size, ready, desc_table, avail_ring, used_ring, next_avail, next_used] = words;
        let state = QueueState {
            max_size: most,
            next_avail: u16::try_from(next_avail).ok()?,
            next_used: u16::try_from(next_used).ok()?,
            event_idx_enabled: false,
            size: u16::try_from(size).ok()?,
            ready: ready != 0,
            desc_table,
            avail_ring,
            used_ring,
        };
        virtio_queue::Queue::try_from(state).ok().map(Self)
    }
}

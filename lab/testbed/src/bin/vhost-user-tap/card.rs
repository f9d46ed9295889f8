//! The card: its queues, and frames between these and a tap.
//!
//! Keeps one promise: a queue that QEMU has stopped is left alone from the answer on. Frames that
//! find no buffer are dropped, as by any switch.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, anyhow, ensure};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_STATUS,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// VHOST_USER_F_PROTOCOL_FEATURES.
const PROTOCOL_FEATURES: u32 = 30;
/// The three of the card are QEMU's own work: it has the guest announce itself behind a move, so
/// that the switch learns where it is now.
pub(crate) const FEATURES: u64 = 1 << PROTOCOL_FEATURES
    | 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_NET_F_STATUS
    | 1 << VIRTIO_NET_F_CTRL_VQ
    | 1 << VIRTIO_NET_F_GUEST_ANNOUNCE;

/// The queues of a network card (virtio 1.2, 5.1.2).
const RECEIVES: usize = 0;
const SENDS: usize = 1;
/// The most places of a queue.
const PLACES: u16 = 1024;
/// `struct virtio_net_hdr`, without and with its last field, `num_buffers` (virtio 1.2, 5.1.6).
const OLD_HEADER: usize = 10;
const HEADER: usize = 12;
/// The longest frame of a link whose packets have 1500 bytes, with room to spare.
const FRAME: usize = 2048;

type Memory = GuestMemoryMmap<()>;

/// A part of guest memory, as QEMU tells of it.
pub(crate) struct Region {
    /// Where the guest has it.
    pub(crate) guest: u64,
    pub(crate) size: u64,
    /// Where QEMU has it.
    pub(crate) user: u64,
    /// Where it begins in the file.
    pub(crate) offset: u64,
    pub(crate) file: File,
}

pub(crate) struct Ring {
    queue: Queue,
    kick: Option<OwnedFd>,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) enabled: bool,
}

impl Ring {
    fn new() -> Self {
        let queue = Queue::new(PLACES).expect("so many places are a power of two");
        Self { queue, kick: None, call: None, enabled: false }
    }

    pub(crate) fn set_size(&mut self, places: u32) -> anyhow::Result<()> {
        self.queue.set_size(u16::try_from(places)?);
        Ok(())
    }

    pub(crate) fn set_base(&mut self, next: u32) -> anyhow::Result<()> {
        self.queue.set_next_avail(u16::try_from(next)?);
        Ok(())
    }

    pub(crate) fn start(&mut self, kick: Option<OwnedFd>) {
        self.kick = kick;
        self.queue.set_ready(true);
    }

    /// Stops it, and tells how far it has come.
    pub(crate) fn stop(&mut self) -> u16 {
        self.queue.set_ready(false);
        (self.kick, self.call) = (None, None);
        self.queue.next_avail()
    }

    fn works(&self) -> bool {
        self.enabled && self.queue.ready()
    }

    fn notify(&self) -> anyhow::Result<()> {
        if let Some(call) = &self.call {
            rustix::io::write(call, &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }
}

pub(crate) struct Card {
    memory: Arc<Memory>,
    /// Where QEMU has it: its address, the guest's, and the length.
    places: Vec<(u64, u64, u64)>,
    rings: [Ring; 2],
    header: usize,
}

impl Default for Card {
    fn default() -> Self {
        let (memory, places) = (Arc::default(), Vec::new());
        Self { memory, places, rings: [Ring::new(), Ring::new()], header: HEADER }
    }
}

impl Card {
    pub(crate) fn set_features(&mut self, features: u64) {
        let modern = features >> VIRTIO_F_VERSION_1 & 1 == 1;
        self.header = if modern { HEADER } else { OLD_HEADER };
    }

    /// Maps guest memory anew.
    pub(crate) fn set_memory(&mut self, regions: Vec<Region>) -> anyhow::Result<()> {
        self.places = regions.iter().map(|it| (it.user, it.guest, it.size)).collect();
        let range = |it: Region| {
            let file = FileOffset::new(it.file, it.offset);
            (GuestAddress(it.guest), it.size as usize, Some(file))
        };
        let ranges: Vec<_> = regions.into_iter().map(range).collect();
        self.memory = Arc::new(Memory::from_ranges_with_files(&ranges)?);
        Ok(())
    }

    pub(crate) fn ring(&mut self, number: u32) -> anyhow::Result<&mut Ring> {
        self.rings.get_mut(number as usize).with_context(|| format!("there is no queue {number}"))
    }

    /// Where the parts of a queue are, by QEMU's addresses.
    pub(crate) fn set_addresses(
        &mut self,
        number: u32,
        table: u64,
        available: u64,
        used: u64,
    ) -> anyhow::Result<()> {
        let places = &self.places;
        let guest = |user: u64| {
            let found = places.iter().find(|it| (it.0..it.0 + it.2).contains(&user));
            let (start, guest, _) = found.with_context(|| format!("{user:#x} is no memory"))?;
            anyhow::Ok(GuestAddress(user - start + guest))
        };
        let (table, available, used) = (guest(table)?, guest(available)?, guest(used)?);
        let memory = Arc::clone(&self.memory);
        let queue = &mut self.ring(number)?.queue;
        let set = queue.try_set_desc_table_address(table);
        let set = set.and_then(|()| queue.try_set_avail_ring_address(available));
        set.and_then(|()| queue.try_set_used_ring_address(used))
            .map_err(|error| anyhow!("queue {number}: {error}"))?;
        // QEMU tells how far it has been taken, and guest memory how far it has been given back.
        let given_back = queue.used_idx(&*memory, Ordering::Acquire)?;
        queue.set_next_used(given_back.0);
        Ok(())
    }

    /// By what the guest says that there is something to do.
    pub(crate) fn kicks(&self) -> impl Iterator<Item = &OwnedFd> {
        self.rings.iter().filter_map(|ring| ring.kick.as_ref())
    }

    /// Takes what the guest has said.
    pub(crate) fn take_kicks(&self) {
        for kick in self.kicks() {
            // It does not wait: QEMU makes it so.
            let _ = rustix::io::read(kick, &mut [0; 8]);
        }
    }

    /// Takes what the guest sends to the tap.
    pub(crate) fn send(&mut self, tap: &mut File) -> anyhow::Result<()> {
        let ring = &mut self.rings[SENDS];
        if !ring.works() {
            return Ok(());
        }
        let mut sent = false;
        while let Some(chain) = ring.queue.pop_descriptor_chain(Arc::clone(&self.memory)) {
            let head = chain.head_index();
            let mut frame = Vec::new();
            chain.reader(&self.memory)?.take((HEADER + FRAME) as u64).read_to_end(&mut frame)?;
            // A port that is down, or full, loses what it is given.
            if let Some(frame) = frame.get(self.header..) {
                let _ = tap.write(frame);
            }
            ring.queue.add_used(&*self.memory, head, 0)?;
            sent = true;
        }
        if sent { ring.notify() } else { Ok(()) }
    }

    /// Gives the guest what has come to the tap.
    pub(crate) fn receive(&mut self, tap: &mut File) -> anyhow::Result<()> {
        let ring = &mut self.rings[RECEIVES];
        let mut received = false;
        let mut bytes = [0; HEADER + FRAME];
        if self.header == HEADER {
            bytes[OLD_HEADER] = 1;
        }
        loop {
            let length = match tap.read(&mut bytes[self.header..self.header + FRAME]) {
                Ok(length) => self.header + length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("the tap is gone"),
            };
            let taken = match ring.works() {
                true => ring.queue.pop_descriptor_chain(Arc::clone(&self.memory)),
                false => None,
            };
            let Some(chain) = taken else { continue };
            let head = chain.head_index();
            let written = chain.writer(&self.memory)?.write(&bytes[..length])?;
            ensure!(written == length, "the guest has no room for a frame");
            ring.queue.add_used(&*self.memory, head, u32::try_from(written)?)?;
            received = true;
        }
        if received { ring.notify() } else { Ok(()) }
    }
}

//! The device: configuration space, five queues, and the conversation about free pages (virtio 1.2,
//! 5.5).
//!
//! Invariants: hints count only under the command id that is in force, and a new one is never one
//! that a driver may still use; what is discarded or hinted lies within RAM; and one notification
//! is answered in a time that the size of memory bounds, however the rings lie.

use std::sync::Arc;

use godwit_units::{ByteCount, Gpa, PAGE_SIZE, PageCount, PageRun};
use godwit_virtio::{Effect, InvalidRing, Piece, QUEUE_MOST, Queue, Transport, VirtioError};
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use crate::layout::Layout;
use crate::{FreeHints, Region};

/// virtio 1.2, 5.5.1.
const DEVICE: u32 = 5;
const STATISTICS: u64 = 1 << 1;
const DEFLATE_ON_OOM: u64 = 1 << 2;
const FREE_PAGE_HINT: u64 = 1 << 3;
const PAGE_POISON: u64 = 1 << 4;
const REPORTING: u64 = 1 << 5;
/// VIRTIO_BALLOON_CMD_ID_STOP and _DONE; other numbers are commands.
const STOP: u32 = 0;
const DONE: u32 = 1;
const FIRST_COMMAND: u32 = 2;
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATS: usize = 2;
/// The most queues that the device can have.
pub const QUEUES_MOST: usize = 5;
/// Bytes of one entry of statistics, and the most entries that are looked at.
const STATISTIC: usize = 10;
const STATISTICS_MOST: usize = 64;
/// Pieces of guest memory that one notification may discard or hint: four times what the fullest
/// queue of Linux' driver holds.
const PIECES_MOST: u64 = 1 << 16;

/// What the device offers beside the balloon itself, its statistics,
/// VIRTIO_BALLOON_F_DEFLATE_ON_OOM and VIRTIO_BALLOON_F_PAGE_POISON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Hints about free pages during a migration (VIRTIO_BALLOON_F_FREE_PAGE_HINT).
    pub hints: bool,
    /// Reports of free pages at any time, which are discarded (VIRTIO_BALLOON_F_REPORTING).
    pub reporting: bool,
}

/// One number that the guest tells about its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statistic {
    /// Which (virtio 1.2, 5.5.6.4).
    pub tag: u16,
    /// Its value; bytes for memory, a count for faults.
    pub value: u64,
}

impl Statistic {
    /// Memory that is not used for anything (VIRTIO_BALLOON_S_MEMFREE).
    pub const MEMORY_FREE: u16 = 4;
    /// All memory that the guest has (VIRTIO_BALLOON_S_MEMTOT).
    pub const MEMORY: u16 = 5;
}

/// Frees memory of the host that the guest does not need.
pub trait Discard {
    /// Gives the pages of `run` of RAM block `block` back to the host. They read as zeros
    /// afterwards. What cannot be given back stays.
    fn discard(&mut self, block: usize, run: PageRun);
}

/// A state that does not fit the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BalloonError {
    /// The registers' part does not.
    #[error(transparent)]
    Registers(#[from] VirtioError),
    /// It is too short to be one.
    #[error("the state of a balloon has {0} words, fewer than any balloon's")]
    Short(usize),
}

/// The device.
#[derive(Debug)]
pub struct Balloon {
    transport: Transport,
    layout: Layout,
    features: Features,
    /// Configuration space: pages that the guest shall give, and has given.
    target: u32,
    actual: u32,
    poison: u32,
    hinting: Hinting,
    /// The request for statistics that the driver has made available, given back to ask again.
    statistics_request: Option<u16>,
    statistics: Vec<Statistic>,
}

/// The conversation about free pages.
#[derive(Debug)]
struct Hinting {
    /// The command that was issued last.
    issued: u32,
    /// free_page_hint_cmd_id.
    command: u32,
    /// Where hints go under that command.
    sink: Option<Arc<FreeHints>>,
    /// Whether the driver has said that what follows belongs to it.
    answered: bool,
}

impl Balloon {
    /// A device for guest memory that lies as `regions` say, which do not overlap.
    #[must_use]
    pub fn new(features: Features, regions: Vec<Region>) -> Self {
        let mut offered = STATISTICS | DEFLATE_ON_OOM | PAGE_POISON;
        for (wanted, feature) in [(features.hints, FREE_PAGE_HINT), (features.reporting, REPORTING)]
        {
            offered |= if wanted { feature } else { 0 };
        }
        let queues = 3 + usize::from(features.hints) + usize::from(features.reporting);
        Self {
            transport: Transport::new(DEVICE, offered, queues),
            layout: Layout::new(regions),
            features,
            target: 0,
            actual: 0,
            poison: 0,
            hinting: Hinting { issued: DONE, command: STOP, sink: None, answered: false },
            statistics_request: None,
            statistics: Vec::new(),
        }
    }

    /// Queues of features that are not offered do not count: so number QEMU's device and Linux's
    /// driver.
    fn hint_queue(&self) -> Option<usize> {
        self.features.hints.then_some(3)
    }

    fn report_queue(&self) -> Option<usize> {
        self.features.reporting.then_some(3 + usize::from(self.features.hints))
    }

    /// The guest reads the register or the field of configuration space at `offset`.
    #[must_use]
    pub fn read(&self, offset: u64) -> u32 {
        match offset {
            ..0x100 => self.transport.read(offset),
            0x100 => self.target,
            0x104 => self.actual,
            0x108 if self.features.hints => self.hinting.command,
            0x10c => self.poison,
            _ => 0,
        }
    }

    /// The guest writes there. Requests are carried out before this returns.
    pub fn write(
        &mut self,
        offset: u64,
        value: u32,
        memory: &impl GuestMemory,
        host: &mut impl Discard,
    ) {
        match offset {
            0x104 => self.actual = value,
            0x10c => self.poison = value,
            0x100.. => {}
            ..0x100 => match self.transport.write(offset, value) {
                Effect::Nothing => {}
                Effect::Reset => self.reset(),
                Effect::Notified(queue) => self.notified(queue, memory, host),
            },
        }
    }

    /// A driver that starts anew knows nothing of what was before. Command ids go on: its
    /// predecessor may have used them.
    fn reset(&mut self) {
        (self.actual, self.poison) = (0, 0);
        self.statistics_request = None;
        self.statistics.clear();
        self.end_hints(STOP);
    }

    fn notified(&mut self, queue: usize, memory: &impl GuestMemory, host: &mut impl Discard) {
        // More than all of memory in one go is no sensible driver's. What is beyond is given back
        // unused.
        let mut budget = Budget { pages: self.layout.pages().0, pieces: PIECES_MOST };
        let discards = self.discards();
        let layout = &self.layout;
        match queue {
            INFLATE => self.transport.work(INFLATE, memory, |pieces| {
                each_frame(pieces, memory, |first, count| {
                    discard(layout, Gpa(first * PAGE_SIZE), count * PAGE_SIZE, &mut budget, host);
                });
                Ok(0)
            }),
            DEFLATE => self.transport.work(DEFLATE, memory, |_| Ok(0)),
            STATS => {
                let (request, statistics) = (&mut self.statistics_request, &mut self.statistics);
                self.transport
                    .with_queue(STATS, |queue| take_statistics(queue, memory, request, statistics));
            }
            queue if Some(queue) == self.hint_queue() => {
                let poisoned = self.is_poisoned();
                let hinting = &mut self.hinting;
                self.transport.work(queue, memory, |pieces| {
                    for piece in pieces {
                        match piece.device_writes {
                            false => hinting.hear(command(piece, memory)),
                            true if poisoned => {}
                            true => hinting.hint(layout, piece, &mut budget),
                        }
                    }
                    Ok(0)
                });
            }
            queue if Some(queue) == self.report_queue() => {
                self.transport.work(queue, memory, |pieces| {
                    for piece in pieces.iter().filter(|piece| piece.device_writes && discards) {
                        discard(layout, piece.address, piece.len.into(), &mut budget, host);
                    }
                    Ok(0)
                })
            }
            _ => {}
        }
    }

    /// Whether free pages hold a value that the guest expects to find again, other than zero.
    fn is_poisoned(&self) -> bool {
        self.transport.negotiated(PAGE_POISON) && self.poison != 0
    }

    fn discards(&self) -> bool {
        self.transport.negotiated(REPORTING) && !self.is_poisoned()
    }

    /// Whether the guest's driver takes part in hinting, and hints would be of use.
    #[must_use]
    pub fn can_hint(&self) -> bool {
        self.transport.works() && self.transport.negotiated(FREE_PAGE_HINT) && !self.is_poisoned()
    }

    /// Asks the guest for hints, which go to `hints`: issues a new command id. All writes to guest
    /// memory must be tracked by now. Returns whether the guest takes part.
    pub fn start_hints(&mut self, hints: &Arc<FreeHints>) -> bool {
        if !self.can_hint() {
            return false;
        }
        let hinting = &mut self.hinting;
        // Four milliards of migrations later the driver has long said that it has ended the first
        // (5.5.6.5.2).
        hinting.issued = hinting.issued.wrapping_add(1).max(FIRST_COMMAND);
        (hinting.command, hinting.answered) = (hinting.issued, false);
        hinting.sink = Some(Arc::clone(hints));
        self.transport.configuration_changed();
        true
    }

    /// Hints are of no use any more. The driver should keep the pages, for the migration still
    /// leaves them out.
    pub fn stop_hints(&mut self) {
        if self.hinting.sink.is_some() {
            self.end_hints(STOP);
        }
    }

    /// The migration has ended, in whichever way, or the guest is stopped for good here: the driver
    /// may use all its pages.
    pub fn finish_hints(&mut self) {
        if self.hinting.issued > DONE && self.hinting.command != DONE {
            self.end_hints(DONE);
        }
    }

    fn end_hints(&mut self, command: u32) {
        self.hinting =
            Hinting { issued: self.hinting.issued, command, sink: None, answered: false };
        self.transport.configuration_changed();
    }

    /// Sets how much memory the guest shall give. That it does is up to its driver: see
    /// [`Self::actual`].
    pub fn set_target(&mut self, pages: PageCount) {
        self.target = u32::try_from(pages.0).unwrap_or(u32::MAX);
        self.transport.configuration_changed();
    }

    /// How much memory the guest shall give.
    #[must_use]
    pub fn target(&self) -> PageCount {
        PageCount(self.target.into())
    }

    /// How much memory the guest says that it has given.
    #[must_use]
    pub fn actual(&self) -> PageCount {
        PageCount(self.actual.into())
    }

    /// What the guest has told last about its memory.
    #[must_use]
    pub fn statistics(&self) -> &[Statistic] {
        &self.statistics
    }

    /// Asks for new statistics: gives the driver's request back, which makes it fill another one
    /// (5.5.6.3).
    pub fn ask_for_statistics(&mut self, memory: &impl GuestMemory) {
        if let Some(head) = self.statistics_request.take() {
            self.transport
                .with_queue(STATS, |queue| queue.give_back(memory, head, 0).map(|()| true));
        }
    }

    /// The state, to move. A conversation about free pages does not move: at the destination the
    /// driver may use all its pages.
    #[must_use]
    pub fn save(&self) -> Vec<u64> {
        let command = if self.hinting.issued > DONE { DONE } else { STOP };
        let request = self.statistics_request.map_or(u64::MAX, u64::from);
        let mut words = [self.target, self.actual, self.poison, self.hinting.issued, command]
            .map(u64::from)
            .to_vec();
        words.push(request);
        words.extend(self.transport.save());
        words
    }

    /// Takes over a state.
    ///
    /// # Errors
    /// When it is not that of such a device; nothing has changed then.
    pub fn load(&mut self, words: &[u64]) -> Result<(), BalloonError> {
        let &[target, actual, poison, issued, command, request, ref registers @ ..] = words else {
            return Err(BalloonError::Short(words.len()));
        };
        self.transport.load(registers)?;
        (self.target, self.actual, self.poison) = (target as u32, actual as u32, poison as u32);
        let command = if command == u64::from(DONE) { DONE } else { STOP };
        self.hinting =
            Hinting { issued: (issued as u32).max(DONE), command, sink: None, answered: false };
        self.statistics_request = u16::try_from(request).ok();
        self.statistics.clear();
        self.transport.configuration_changed();
        Ok(())
    }
}

impl Hinting {
    /// The driver says which command what follows belongs to. A second word with the same command
    /// changes nothing.
    fn hear(&mut self, command: Option<u32>) {
        let Some(command) = command else { return };
        let was = self.answered;
        self.answered = self.sink.is_some() && command == self.command;
        if let (true, STOP, Some(sink)) = (was, command, &self.sink) {
            sink.complete();
        }
    }

    fn hint(&self, layout: &Layout, piece: &Piece, budget: &mut Budget) {
        if let (true, Some(sink)) = (self.answered, &self.sink) {
            within(layout, piece.address, piece.len.into(), budget, |block, run| {
                sink.add(block, run)
            });
        }
    }
}

/// What is left of what one notification may ask for.
struct Budget {
    pages: u64,
    pieces: u64,
}

/// The pages of a range that are memory, until the budget is used up.
fn within(
    layout: &Layout,
    start: Gpa,
    len: u64,
    budget: &mut Budget,
    mut found: impl FnMut(usize, PageRun),
) {
    layout.pages_of(start, len, |block, run| {
        let count = run.count.0.min(budget.pages);
        if count > 0 && budget.pieces > 0 {
            budget.pages -= count;
            budget.pieces -= 1;
            found(block, PageRun::new(run.start.0, count));
        }
    });
}

fn discard(layout: &Layout, start: Gpa, len: u64, budget: &mut Budget, host: &mut impl Discard) {
    within(layout, start, len, budget, |block, run| host.discard(block, run));
}

/// A command id, in an output buffer of exactly four bytes (5.5.6.5.1).
fn command(piece: &Piece, memory: &impl GuestMemory) -> Option<u32> {
    let mut bytes = [0; 4];
    if piece.len != 4 {
        return None;
    }
    memory.read_slice(&mut bytes, GuestAddress(piece.address.0)).ok()?;
    Some(u32::from_le_bytes(bytes))
}

/// The frames of 4 KiB that the driver names, 32 bits each (5.5.6), joined where they follow each
/// other up or down.
fn each_frame(pieces: &[Piece], memory: &impl GuestMemory, mut found: impl FnMut(u64, u64)) {
    let mut run: Option<(u64, u64)> = None;
    for piece in pieces.iter().filter(|piece| !piece.device_writes) {
        // What a driver sends is a page at the most.
        let len = ByteCount(u64::from(piece.len).min(PAGE_SIZE)).0 as usize & !3;
        let mut bytes = [0; PAGE_SIZE as usize];
        if memory.read_slice(&mut bytes[..len], GuestAddress(piece.address.0)).is_err() {
            continue;
        }
        for frame in bytes[..len]
            .chunks(4)
            .map(|word| u64::from(u32::from_le_bytes([word[0], word[1], word[2], word[3]])))
        {
            run = match run {
                Some((first, count)) if first + count == frame => Some((first, count + 1)),
                Some((first, count)) if frame + 1 == first => Some((frame, count + 1)),
                Some((first, count)) => {
                    found(first, count);
                    Some((frame, 1))
                }
                None => Some((frame, 1)),
            };
        }
    }
    if let Some((first, count)) = run {
        found(first, count);
    }
}

/// Takes the statistics that the driver has made available. Their buffer stays here until new ones
/// are asked for; a driver that makes a second one available has the first one back.
fn take_statistics(
    queue: &mut Queue,
    memory: &impl GuestMemory,
    request: &mut Option<u16>,
    statistics: &mut Vec<Statistic>,
) -> Result<bool, InvalidRing> {
    let mut pieces = Vec::new();
    let mut given_back = false;
    for _ in 0..QUEUE_MOST {
        let Some(head) = queue.take(memory, &mut pieces)? else { break };
        if let Some(before) = request.replace(head) {
            queue.give_back(memory, before, 0)?;
            given_back = true;
        }
        statistics.clear();
        for piece in pieces.iter().filter(|piece| !piece.device_writes) {
            let entries = (piece.len as usize / STATISTIC).min(STATISTICS_MOST - statistics.len());
            let mut bytes = [0; STATISTIC * STATISTICS_MOST];
            let bytes = &mut bytes[..entries * STATISTIC];
            if memory.read_slice(bytes, GuestAddress(piece.address.0)).is_ok() {
                statistics.extend(
                    bytes.chunks(STATISTIC).map(|entry| Statistic {
                        tag: u16::from_le_bytes([entry[0], entry[1]]),
                        value: entry[2..]
                            .iter()
                            .rev()
                            .fold(0, |value, &byte| value << 8 | u64::from(byte)),
                    }),
                );
            }
        }
    }
    Ok(given_back)
}

#[cfg(test)]
mod tests;

//! The registers of virtio-mmio (virtio 1.2, 4.2.2), without the configuration space, which is the
//! device's own.
//!
//! Invariant: features that were not offered are never negotiated, nor loaded.

use vm_memory::GuestMemory;

use crate::{InvalidRing, Piece, Queue};

const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "GDWT".
const VENDOR: u32 = 0x5457_4447;
/// VIRTIO_F_VERSION_1, without which there is no driver for this device.
const VERSION_1: u64 = 1 << 32;
/// The most places that a queue can have.
pub const QUEUE_MOST: u16 = 256;
const FEATURES_OK: u32 = 8;
const DRIVER_OK: u32 = 4;
const NEEDS_RESET: u32 = 64;
/// Bits of the interrupt status.
const USED_BUFFER: u32 = 1;
const CONFIGURATION_CHANGED: u32 = 2;
const HEAD_WORDS: usize = 9;

/// A state that does not fit the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VirtioError {
    /// Of another length.
    #[error("the state of a virtio device has {found} words instead of {expected}")]
    Length {
        /// Words found.
        found: usize,
        /// Words that it should have.
        expected: usize,
    },
    /// The driver has negotiated what this device does not offer.
    #[error(
        "the driver uses features {used:#x} of the virtio device {device}, and {offered:#x} are \
         offered here: start both sides with the same device options"
    )]
    Features {
        /// The device's number (virtio 1.2, section 5).
        device: u32,
        /// What the driver uses.
        used: u64,
        /// What is offered.
        offered: u64,
    },
    /// A queue of a size that none can have.
    #[error("the state of a virtio device has a queue of {0}")]
    Queue(u64),
}

/// What an access of the guest asks of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    Nothing,
    /// To look at this queue, which works.
    Notified(usize),
    /// To forget all that the driver told it.
    Reset,
}

/// The registers and the queues of one device.
#[derive(Debug, PartialEq, Eq)]
pub struct Transport {
    device: u32,
    offered: u64,
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    interrupt: u32,
    generation: u32,
    queues: Vec<Queue>,
}

impl Transport {
    /// A device of the kind `device` (virtio 1.2, section 5) that offers `features` beside
    /// VIRTIO_F_VERSION_1 and has `queues` queues.
    #[must_use]
    pub fn new(device: u32, features: u64, queues: usize) -> Self {
        Self {
            device,
            offered: features | VERSION_1,
            status: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            interrupt: 0,
            generation: 0,
            // QUEUE_MOST is a size that a queue can have.
            queues: (0..queues).filter_map(|_| Queue::new(QUEUE_MOST).ok()).collect(),
        }
    }

    /// Whether the driver is up and nothing is broken.
    #[must_use]
    pub fn works(&self) -> bool {
        self.status & DRIVER_OK != 0 && self.status & NEEDS_RESET == 0
    }

    /// Whether all `features` were negotiated.
    #[must_use]
    pub fn negotiated(&self, features: u64) -> bool {
        self.status & FEATURES_OK != 0 && self.driver_features & features == features
    }

    /// The device's configuration has changed by itself. A driver that polls sees the generation
    /// change.
    pub fn configuration_changed(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.works() {
            self.interrupt |= CONFIGURATION_CHANGED;
        }
    }

    /// The register at `offset`, below 0x100.
    #[must_use]
    pub fn read(&self, offset: u64) -> u32 {
        let queue = self.queues.get(self.queue_select as usize);
        match offset {
            0x00 => MAGIC,
            0x04 => VERSION,
            0x08 => self.device,
            0x0c => VENDOR,
            0x10 if self.device_features_select < 2 => {
                (self.offered >> (32 * self.device_features_select)) as u32
            }
            0x34 => queue.map_or(0, |_| QUEUE_MOST.into()),
            0x44 => queue.map_or(0, |queue| queue.ready().into()),
            0x60 => self.interrupt,
            0x70 => self.status,
            0xfc => self.generation,
            _ => 0,
        }
    }

    /// The guest writes `value` to the register at `offset`, below 0x100.
    pub fn write(&mut self, offset: u64, value: u32) -> Effect {
        match offset {
            0x14 => self.device_features_select = value,
            // What was agreed on is not changed behind the device's back.
            0x20 if self.driver_features_select < 2 && self.status & FEATURES_OK == 0 => {
                let shift = 32 * self.driver_features_select;
                let keep = self.driver_features & !(0xffff_ffff << shift);
                self.driver_features = keep | u64::from(value) << shift;
            }
            0x24 => self.driver_features_select = value,
            0x30 => self.queue_select = value,
            0x50 if self.works() && (value as usize) < self.queues.len() => {
                return Effect::Notified(value as usize);
            }
            0x64 => self.interrupt &= !value,
            0x70 => return self.set_status(value),
            0x38 | 0x44 | 0x80..=0xa4 => self.set_queue(offset, value),
            _ => {}
        }
        Effect::Nothing
    }

    fn set_status(&mut self, value: u32) -> Effect {
        if value == 0 {
            let generation = self.generation;
            *self = Self::new(self.device, self.offered, self.queues.len());
            self.generation = generation;
            return Effect::Reset;
        }
        let accepted =
            self.driver_features & !self.offered == 0 && self.driver_features & VERSION_1 != 0;
        let refused = value & FEATURES_OK != 0 && !accepted;
        // Only the device sets this, and only a reset clears it.
        let broken = self.status & NEEDS_RESET;
        self.status = if refused { value & !FEATURES_OK } else { value } | broken;
        Effect::Nothing
    }

    fn set_queue(&mut self, offset: u64, value: u32) {
        if let Some(queue) = self.queues.get_mut(self.queue_select as usize) {
            queue.set(offset, value);
        }
    }

    /// Has `carry_out` deal with all requests of queue `number`; see [`Queue::work`]. An invalid
    /// queue sets DEVICE_NEEDS_RESET.
    pub fn work(
        &mut self,
        number: usize,
        memory: &impl GuestMemory,
        carry_out: impl FnMut(&[Piece]) -> Result<u32, InvalidRing>,
    ) {
        self.with_queue(number, |queue| queue.work(memory, carry_out));
    }

    /// Has `deal` do with queue `number` what it wants, while the device works; it says whether it
    /// gave a request back, or that the queue is invalid, which sets DEVICE_NEEDS_RESET.
    pub fn with_queue(
        &mut self,
        number: usize,
        deal: impl FnOnce(&mut Queue) -> Result<bool, InvalidRing>,
    ) {
        if !self.works() {
            return;
        }
        let Some(queue) = self.queues.get_mut(number) else { return };
        match deal(queue) {
            Ok(given_back) => self.interrupt |= if given_back { USED_BUFFER } else { 0 },
            Err(InvalidRing) => self.status |= NEEDS_RESET,
        }
    }

    /// How many words [`Self::save`] makes.
    #[must_use]
    pub fn words(&self) -> usize {
        HEAD_WORDS + self.queues.len() * Queue::WORDS
    }

    /// The state, to move.
    #[must_use]
    pub fn save(&self) -> Vec<u64> {
        let mut words = vec![
            self.device.into(),
            self.status.into(),
            self.device_features_select.into(),
            self.driver_features_select.into(),
            self.driver_features,
            self.queue_select.into(),
            self.interrupt.into(),
            self.generation.into(),
            self.queues.len() as u64,
        ];
        words.extend(self.queues.iter().flat_map(Queue::save));
        words
    }

    /// Takes over a state.
    ///
    /// # Errors
    /// When it is not that of such a device; nothing has changed then.
    pub fn load(&mut self, words: &[u64]) -> Result<(), VirtioError> {
        let length = VirtioError::Length { found: words.len(), expected: self.words() };
        let &[
            device,
            status,
            device_select,
            driver_select,
            features,
            select,
            interrupt,
            generation,
            count,
            ref rest @ ..,
        ] = words
        else {
            return Err(length);
        };
        if words.len() != self.words()
            || device != u64::from(self.device)
            || count != self.queues.len() as u64
        {
            return Err(length);
        }
        if status & u64::from(FEATURES_OK) != 0 && features & !self.offered != 0 {
            return Err(VirtioError::Features {
                device: self.device,
                used: features,
                offered: self.offered,
            });
        }
        let mut queues = Vec::new();
        for words in rest.chunks(Queue::WORDS) {
            let queue = words.try_into().ok().and_then(|words| Queue::load(words, QUEUE_MOST));
            queues.push(queue.ok_or(VirtioError::Queue(words[0]))?);
        }
        *self = Self {
            device: self.device,
            offered: self.offered,
            status: status as u32,
            device_features_select: device_select as u32,
            driver_features_select: driver_select as u32,
            driver_features: features,
            queue_select: select as u32,
            interrupt: interrupt as u32,
            generation: generation as u32,
            queues,
        };
        Ok(())
    }
}

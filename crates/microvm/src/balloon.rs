//! The balloon: the device of `godwit-balloon` on virtio-mmio, over this machine's memory.
//!
//! Requests are carried out while the guest's write to the notify register waits, as the disk's
//! are.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_balloon::{Balloon, Discard, Features, FreeHints, Region, Statistic};
use godwit_control::messages::BalloonStatus;
use godwit_units::{Gpa, PAGE_SIZE, PageCount, PageRun};

use crate::layout::BlockPlan;
use crate::ram::GuestRam;
use crate::{StateError, blob};

/// The device.
#[derive(Debug)]
pub(crate) struct BalloonDevice {
    features: Features,
    balloon: Mutex<Balloon>,
}

/// Gives pages back to the host.
struct Giver<'a>(&'a GuestRam);

impl Discard for Giver<'_> {
    fn discard(&mut self, block: usize, run: PageRun) {
        self.0.give_back(block, run);
    }
}

impl BalloonDevice {
    pub(crate) fn new(features: Features, ram: &GuestRam) -> Self {
        // What is plugged in later is not the balloon's: the guest gives nothing of it.
        let region = |(block, plan): (usize, BlockPlan)| Region {
            start: Gpa(plan.gpa),
            block,
            run: PageRun::new(0, plan.size.0 / PAGE_SIZE),
        };
        let regions = ram.plans().into_iter().enumerate().map(region).collect();
        Self { features, balloon: Mutex::new(Balloon::new(features, regions)) }
    }

    pub(crate) fn features(&self) -> Features {
        self.features
    }

    /// The guest reads the register at `offset`.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        for (to, from) in bytes.iter_mut().zip(self.balloon().read(offset).to_le_bytes()) {
            *to = from;
        }
    }

    /// The guest writes it; requests are carried out before this returns.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8], ram: &GuestRam) {
        if let Ok(bytes) = <[u8; 4]>::try_from(bytes) {
            self.balloon().write(
                offset,
                u32::from_le_bytes(bytes),
                ram.now().devices(),
                &mut Giver(ram),
            );
        }
    }

    /// Asks the guest for `pages` in all.
    pub(crate) fn set_target(&self, pages: PageCount) {
        self.balloon().set_target(pages);
    }

    /// What the guest has said last; asks it anew.
    pub(crate) fn status(&self, ram: &GuestRam) -> BalloonStatus {
        let mut balloon = self.balloon();
        let value =
            |tag| balloon.statistics().iter().find(|told| told.tag == tag).map(|told| told.value);
        let status = BalloonStatus {
            target_bytes: balloon.target().bytes().0,
            given_bytes: balloon.actual().bytes().0,
            free_bytes: value(Statistic::MEMORY_FREE),
            memory_bytes: value(Statistic::MEMORY),
        };
        balloon.ask_for_statistics(ram.now().devices());
        status
    }

    pub(crate) fn can_hint(&self) -> bool {
        self.balloon().can_hint()
    }

    pub(crate) fn start_hints(&self, hints: &Arc<FreeHints>) -> bool {
        self.balloon().start_hints(hints)
    }

    pub(crate) fn stop_hints(&self) {
        self.balloon().stop_hints();
    }

    pub(crate) fn finish_hints(&self) {
        self.balloon().finish_hints();
    }

    /// The state, to move.
    pub(crate) fn save(&self) -> Vec<u8> {
        blob::bytes_of(&self.balloon().save())
    }

    /// Takes over a state.
    pub(crate) fn load(&self, bytes: &[u8]) -> Result<(), StateError> {
        let words = blob::words_of(bytes).ok_or_else(|| {
            StateError::Malformed(format!("the balloon's state has {} bytes", bytes.len()))
        })?;
        self.balloon().load(&words).map_err(StateError::from)
    }

    fn balloon(&self) -> MutexGuard<'_, Balloon> {
        self.balloon.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The memory map as it grows: slots that KVM was told of, and what it would not let go of.
//!
//! Invariant: memory that a slot may show stays mapped for as long as there is the VM, and no
//! number of a slot is given twice.

use godwit_memslots::{MemSlots, Slot};

use crate::MicrovmError;
use crate::ram::Memory;
use crate::slots::Refusal;

/// The memory map, and what it does not tell. Goes after the VM does.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) slots: MemSlots,
    /// The number of the next slot. Numbers that KVM may still have are not below it.
    pub(super) next: u32,
    /// The most that KVM has.
    most: usize,
    /// What KVM would not let go of.
    kept: Vec<Memory>,
}

impl Map {
    /// An empty one, for a KVM that has `most` slots.
    pub(super) fn new(most: usize) -> Self {
        Self { slots: MemSlots::new(), next: 0, most, kept: Vec::new() }
    }

    /// Whether there can be `more` slots.
    pub(super) fn check_room(&self, more: usize) -> Result<(), MicrovmError> {
        let wanted = (self.next as usize).saturating_add(more);
        if wanted > self.most {
            return Err(MicrovmError::Slots { wanted, available: self.most });
        }
        Ok(())
    }

    /// Puts `new` slots into the map, once `show` has told KVM of them. If KVM or the map refuses,
    /// the map is as before.
    pub(super) fn add(
        &mut self,
        new: &[Slot],
        show: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        self.check_room(new.len())?;
        let added = self.slots.update(|edit| {
            for slot in new {
                edit.insert(*slot).map_err(MicrovmError::from)?;
            }
            show()
        });
        if added.as_ref().err().is_none_or(|refusal| refusal.stuck) {
            self.next += new.len() as u32;
        }
        added
    }

    /// Hands `memory` on, whose slots were `added`; or why they were not, once it is certain that
    /// KVM shows nothing of it or that it stays where it is.
    pub(super) fn settle(
        &mut self,
        added: Result<(), Refusal>,
        memory: Memory,
    ) -> Result<Memory, MicrovmError> {
        let Err(refusal) = added else { return Ok(memory) };
        if refusal.stuck {
            self.kept.push(memory);
        }
        Err(refusal.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::GuestRam;

    #[test]
    fn what_kvm_does_not_let_go_of_stays_and_its_numbers_are_not_used_again() {
        let plan = |text: &str| text.parse().unwrap();
        let ram = GuestRam::new(&[plan("name=low,size=1MiB,gpa=0")]).unwrap();
        let mut map = Map::new(12);
        map.add(&ram.now().slots(4), || Ok(())).unwrap();
        let mut refused = |stuck| {
            let memory = ram.with(&plan("name=more,size=1MiB,gpa=0x200000")).unwrap();
            let cut = memory.slots_of_last(3, map.next);
            let error = MicrovmError::Capability("so many slots");
            let added = map.add(&cut, || Err(Refusal { error, stuck }));
            assert!(map.settle(added, memory).is_err());
            (map.slots.map().len(), map.next, map.kept.len())
        };
        assert_eq!(refused(false), (4, 4, 0));
        assert_eq!(refused(true), (4, 7, 1));
        assert!(map.check_room(5).is_ok());
        let error = map.check_room(6).unwrap_err().to_string();
        assert!(error.contains("13 memory slots") && error.contains("KVM has 12"), "{error}");
        assert!(map.check_room(usize::MAX).is_err());
    }
}

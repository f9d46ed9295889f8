//! Memory slots at their real size, and with threads: KVM's most, 32,764, and readers that watch
//! updates.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use godwit_memslots::{MemSlots, Slot, SlotFlags, SlotId};
use godwit_units::{Gfn, Hva, PAGE_SIZE, PageCount, PageIndex};

const MOST: u32 = 32_764;

fn slot(id: u32, place: u64) -> Slot {
    Slot {
        id: SlotId(id),
        flags: SlotFlags::NONE,
        gfn: Gfn(place * 32),
        pages: PageCount(16),
        hva: Hva((0x7f00_0000 + place * 16) * PAGE_SIZE),
        block: 0,
        first: PageIndex(place * 16),
    }
}

/// The numbers below `n` in an order without a pattern.
fn shuffled(n: u32) -> Vec<u64> {
    let mut order: Vec<u64> = (0..u64::from(n)).collect();
    fastrand::Rng::with_seed(7).shuffle(&mut order);
    order
}

#[test]
fn as_many_as_kvm_has() {
    let most = if cfg!(miri) { 300 } else { MOST };
    let order = shuffled(most);
    let mut slots = MemSlots::new();
    let mut model = BTreeMap::new();
    for (id, &place) in order.iter().enumerate() {
        // Ids as sparse as they can be.
        let slot = slot(id as u32 * 131_071, place);
        slots.insert(slot).unwrap();
        model.insert(slot.gfn, slot);
    }
    let full = slots.snapshot();
    for (id, &place) in order.iter().enumerate() {
        let id = SlotId(id as u32 * 131_071);
        match place % 4 {
            0 => {
                model.remove(&slots.remove(id).unwrap().gfn);
            }
            1 => {
                let mut moved = model.remove(&Gfn(place * 32)).unwrap();
                moved.gfn = Gfn(place * 32 + 16);
                slots.move_to(id, moved.gfn).unwrap();
                model.insert(moved.gfn, moved);
            }
            2 => {
                slots.set_flags(id, SlotFlags::LOG_DIRTY_PAGES).unwrap();
                model.get_mut(&Gfn(place * 32)).unwrap().flags = SlotFlags::LOG_DIRTY_PAGES;
            }
            _ => {}
        }
    }
    let mut all = Vec::new();
    slots.map().for_each(|slot| all.push(*slot));
    assert_eq!(all, model.into_values().collect::<Vec<_>>());
    for slot in &all {
        assert_eq!(slots.map().by_hva(Hva(slot.hva.0 + 16 * PAGE_SIZE - 1)), Some(slot));
        assert_eq!(slots.map().by_id(slot.id), Some(slot));
    }
    // The state kept from before the changes.
    assert_eq!(full.len(), most as usize);
    for (id, &place) in order.iter().enumerate() {
        assert_eq!(full.by_gfn(Gfn(place * 32 + 15)), Some(&slot(id as u32 * 131_071, place)));
    }
}

/// Each update moves a slot away and puts another in its place, so that in any whole state all of
/// the two places have exactly one slot each.
#[test]
fn readers_see_whole_states_only() {
    let updates = if cfg!(miri) { 4 } else { 5_000 };
    let mut slots = MemSlots::new();
    for place in 0..200 {
        slots.insert(slot(place as u32, place)).unwrap();
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let mut reader = slots.reader();
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Acquire) {
                    let map = reader.snapshot();
                    let ids: u32 = [3, 150]
                        .map(|place| map.by_gfn(Gfn(place * 32)).unwrap().id.0)
                        .iter()
                        .sum();
                    assert_eq!((map.len(), ids), (200, 153));
                    assert!(reader.by_gfn(Gfn(40 * 32)).is_some());
                }
            });
        }
        let mut reader = slots.reader();
        for update in 0..updates {
            let (a, b) = if update % 2 == 0 { (3, 150) } else { (150, 3) };
            slots
                .update(|edit| {
                    edit.move_to(SlotId(3), Gfn(1 << 40))?;
                    edit.move_to(SlotId(150), Gfn(a * 32))?;
                    edit.move_to(SlotId(3), Gfn(b * 32))
                })
                .unwrap();
            // Once the update has returned, look-ups see it.
            assert_eq!(reader.by_gfn(Gfn(a * 32)).unwrap().id, SlotId(150));
        }
        done.store(true, Ordering::Release);
    });
}

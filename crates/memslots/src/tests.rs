//! Memory slots against a plain vector of them: results, errors, and every look-up.

use godwit_units::{Hva, PAGE_SIZE, PageCount, PageIndex, PageRun};
use proptest::prelude::*;

use super::*;

fn slot(id: u32, gfn: u64, pages: u64, page: u64) -> Slot {
    Slot {
        id: SlotId(id),
        flags: SlotFlags::NONE,
        gfn: Gfn(gfn),
        pages: PageCount(pages),
        hva: Hva(page * PAGE_SIZE),
        block: id % 3,
        first: PageIndex(gfn * 10),
    }
}

/// What the map must do, on a vector.
#[derive(Clone, Debug, Default)]
struct Model(Vec<Slot>);

impl Model {
    fn place(&self, slot: &Slot) -> Result<(), SlotError> {
        let other = self.0.iter().find(|other| {
            other.id != slot.id
                && other.gfns().start < slot.gfns().end
                && slot.gfns().start < other.gfns().end
        });
        match other {
            Some(other) => Err(SlotError::Overlap {
                slot: slot.id,
                gfns: slot.into(),
                other: other.id,
                others: other.into(),
            }),
            None => Ok(()),
        }
    }

    fn find(&self, id: u32) -> Result<usize, SlotError> {
        self.0
            .iter()
            .position(|slot| slot.id.0 == id)
            .ok_or(SlotError::Unknown { slot: SlotId(id) })
    }

    fn insert(&mut self, slot: Slot) -> Result<(), SlotError> {
        if let Ok(other) = self.find(slot.id.0) {
            return Err(SlotError::DuplicateId {
                slot: slot.id,
                gfns: (&slot).into(),
                others: (&self.0[other]).into(),
            });
        }
        self.place(&slot)?;
        self.0.push(slot);
        self.0.sort_by_key(|slot| slot.gfn);
        Ok(())
    }

    fn move_to(&mut self, id: u32, gfn: u64) -> Result<(), SlotError> {
        let position = self.find(id)?;
        let moved = Slot { gfn: Gfn(gfn), ..self.0[position] };
        self.place(&moved)?;
        self.0[position] = moved;
        self.0.sort_by_key(|slot| slot.gfn);
        Ok(())
    }

    fn in_hvas(&self, start: u64, end: u64) -> Vec<(SlotId, PageRun)> {
        let mut slots = self.0.clone();
        slots.sort_by_key(|slot| (slot.hva, slot.id));
        slots
            .iter()
            .filter_map(|slot| Some((slot.id, slot.pages_of_hvas(&(start..end))?)))
            .collect()
    }
}

#[derive(Clone, Debug)]
enum Edit {
    Insert(Slot),
    Remove(u32),
    Move(u32, u64),
    Flags(u32, u32),
}

fn edit() -> impl Strategy<Value = Edit> {
    let id = 0u32..60;
    prop_oneof![
        3 => (id.clone(), 0u64..400, 1u64..12, 0u64..300)
            .prop_map(|(id, gfn, pages, page)| Edit::Insert(slot(id, gfn, pages, page))),
        1 => id.clone().prop_map(Edit::Remove),
        1 => (id.clone(), 0u64..400).prop_map(|(id, gfn)| Edit::Move(id, gfn)),
        1 => (id, 0u32..4).prop_map(|(id, flags)| Edit::Flags(id, flags)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 256 }))]
    #[test]
    fn behaves_like_a_vector(
        edits in prop::collection::vec(edit(), 1..if cfg!(miri) { 30 } else { 250 }),
    ) {
        let mut slots = MemSlots::new();
        let mut model = Model::default();
        let mut reader = slots.reader();
        let mut kept = Vec::new();
        for edit in edits {
            match edit {
                // Several slots may overlap a new one; which of them the error names is left open.
                Edit::Insert(slot) => match (slots.insert(slot), model.insert(slot)) {
                    (Err(SlotError::Overlap { .. }), Err(SlotError::Overlap { .. })) => {}
                    (result, expected) => prop_assert_eq!(result, expected),
                },
                Edit::Remove(id) => {
                    let expected = model.find(id).map(|position| model.0.remove(position));
                    prop_assert_eq!(slots.remove(SlotId(id)), expected);
                }
                Edit::Move(id, gfn) => {
                    match (slots.move_to(SlotId(id), Gfn(gfn)), model.move_to(id, gfn)) {
                        (Err(SlotError::Overlap { .. }), Err(SlotError::Overlap { .. })) => {}
                        (result, expected) => prop_assert_eq!(result, expected),
                    }
                }
                Edit::Flags(id, flags) => {
                    let expected = model.find(id).map(|position| {
                        std::mem::replace(&mut model.0[position].flags, SlotFlags(flags))
                    });
                    prop_assert_eq!(slots.set_flags(SlotId(id), SlotFlags(flags)), expected);
                }
            }
            if kept.len() < 3 {
                kept.push((reader.snapshot(), model.clone()));
            }
            // The reader's memory of its last hit never outlives the state it belongs to.
            for page in [7, 150, 160, 161] {
                let expected = model.0.iter().copied().find(|slot| slot.gfns().contains(&page));
                prop_assert_eq!(reader.by_gfn(Gfn(page)), expected);
                let hva = page * PAGE_SIZE + 5;
                let holding = model.0.iter().copied().filter(|slot| slot.hvas().contains(&hva));
                let expected = holding.max_by_key(|slot| (slot.hva, slot.id));
                prop_assert_eq!(reader.by_hva(Hva(hva)), expected);
                let mut found = Vec::new();
                let hvas = Hva(hva)..Hva(hva + 2 * PAGE_SIZE);
                reader.for_each_in_hvas(hvas, |slot, pages| found.push((slot.id, pages)));
                prop_assert_eq!(found, model.in_hvas(hva, hva + 2 * PAGE_SIZE));
            }
        }
        kept.push((slots.snapshot(), model));
        for (map, model) in kept {
            let mut all = Vec::new();
            map.for_each(|slot| all.push(*slot));
            prop_assert_eq!(&all, &model.0);
            prop_assert_eq!(map.len(), model.0.len());
            for id in 0..60 {
                let expected = model.find(id).ok().map(|position| model.0[position]);
                prop_assert_eq!(map.by_id(SlotId(id)).copied(), expected);
            }
            for start in 0..420 {
                let expected = model.0.iter().copied().find(|slot| slot.gfns().contains(&start));
                prop_assert_eq!(map.by_gfn(Gfn(start)).copied(), expected);
                let mut found = Vec::new();
                let window = start..start + 20;
                map.for_each_in_gfns(Gfn(window.start)..Gfn(window.end), |slot, pages| {
                    found.push((slot.id, pages));
                });
                let expected: Vec<_> = model.0.iter()
                    .filter_map(|slot| Some((slot.id, slot.pages_of_gfns(&window)?)))
                    .collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}

#[test]
fn errors_name_the_slot_and_the_range() {
    let mut slots = MemSlots::new();
    slots.insert(slot(508, 0x100, 0x10, 0x700)).unwrap();
    let before = slots.snapshot();
    let top = 1 << 52;
    let cases = [
        (slot(1, 5, 0, 0), "slot 1 at frame 0x5 has no pages"),
        (
            slot(1, 0x10f, 2, 0),
            "slot 1 with frames 0x10f..0x111 overlaps slot 508 with frames 0x100..0x110",
        ),
        (
            slot(508, 5, 1, 0),
            "slot 508 with frames 0x5..0x6 cannot be added: slot 508 exists with frames \
             0x100..0x110",
        ),
        (
            slot(1, top - 1, 2, 0),
            "slot 1 with frames 0xfffffffffffff..0x10000000000001 reaches past the guest's last \
             frame",
        ),
        (
            slot(1, 5, 2, top - 2),
            "slot 1 at host addresses 0xffffffffffffe000..0x10000000000000000 reaches past the \
             last host address",
        ),
        (
            Slot { hva: Hva(0x1800), ..slot(1, 5, 1, 0) },
            "slot 1 at host addresses 0x1800..0x2800: the first address is not a multiple of the \
             page size",
        ),
        (
            Slot { first: PageIndex(u64::MAX), ..slot(1, 5, 1, 0) },
            "slot 1 of 1 pages from page 18446744073709551615 of its RAM block reaches past the \
             last page number",
        ),
        (
            Slot { pages: PageCount(u64::MAX), ..slot(1, 5, 1, 1) },
            "slot 1 at host addresses 0x1000..0x10000000000000000000 reaches past the last host \
             address",
        ),
    ];
    for (slot, message) in cases {
        assert_eq!(slots.insert(slot).unwrap_err().to_string(), message);
    }
    assert_eq!(slots.remove(SlotId(0)).unwrap_err().to_string(), "there is no slot 0");
    assert_eq!(slots.move_to(SlotId(9), Gfn(0)), Err(SlotError::Unknown { slot: SlotId(9) }));
    assert!(matches!(slots.move_to(SlotId(508), Gfn(top)), Err(SlotError::GfnWraps { .. })));
    assert_eq!(slots.map().len(), before.len());
    // Slots may move onto frames of their own.
    slots.move_to(SlotId(508), Gfn(0x101)).unwrap();
    assert_eq!(slots.map().by_gfn(Gfn(0x110)).map(|slot| slot.id), Some(SlotId(508)));
}

#[test]
fn an_update_is_whole_or_absent() {
    let mut slots = MemSlots::new();
    let mut reader = slots.reader();
    let failed = slots.update(|edit| {
        edit.insert(slot(1, 0, 10, 0))?;
        edit.insert(slot(2, 5, 10, 0))
    });
    assert!(matches!(failed, Err(SlotError::Overlap { .. })));
    assert!(reader.snapshot().is_empty() && slots.map().is_empty());
    slots
        .update(|edit| {
            edit.insert(slot(1, 0, 10, 0))?;
            // A change that fails leaves the others alone, when its error is not handed on.
            assert!(edit.insert(slot(2, 5, 10, 0)).is_err());
            edit.insert(slot(2, 10, 10, 0))
        })
        .unwrap();
    assert_eq!(reader.snapshot().len(), 2);
}

#[test]
fn one_block_in_two_slots() {
    // RAM below and above the hole at 4 GiB: one block, one host mapping, two slots.
    let mut slots = MemSlots::new();
    let below = Slot { block: 7, first: PageIndex(0), ..slot(0, 0, 0xc_0000, 0x7f00_0000) };
    let above = Slot {
        gfn: Gfn(0x10_0000),
        block: 7,
        first: PageIndex(0xc_0000),
        ..slot(1, 0, 0x4_0000, 0x7f00_0000 + 0xc_0000)
    };
    slots.insert(below).unwrap();
    slots.insert(above).unwrap();
    let mut reader = slots.reader();
    let start = (0x7f00_0000 + 0xb_ffff) * PAGE_SIZE;
    let mut found = Vec::new();
    reader.for_each_in_hvas(Hva(start)..Hva(start + 3 * PAGE_SIZE), |slot, run| {
        found.push((slot.block, run))
    });
    assert_eq!(found, [(7, PageRun::new(0xb_ffff, 1)), (7, PageRun::new(0xc_0000, 2))]);
    assert_eq!(
        reader.by_gfn(Gfn(0x10_0001)).and_then(|slot| slot.page_of_gfn(Gfn(0x10_0001))),
        Some(PageIndex(0xc_0001))
    );
    assert_eq!(reader.by_gfn(Gfn(0xc_0000)), None);
}

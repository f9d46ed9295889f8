//! Memory slots: look-ups and updates at 509 slots (KVM's old limit) and 32,764 (today's), against
//! vm-memory and against sorted arrays; and the operations that KVM's own memslot benchmark times.

use std::hint::black_box;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use godwit_bench::chart::Chart;
use godwit_bench::report::{Better, Report};
use godwit_bench::table::{markdown, short};
use godwit_memslots::{MemSlots, Slot, SlotFlags, SlotId};
use godwit_units::{Gfn, Hva, PAGE_SIZE, PageCount, PageIndex};
use serde_json::json;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MemoryRegionAddress, MmapRegion,
};

use crate::pattern::rng;
use crate::rounds::{Rounds, timed};

const ROUNDS: usize = 25;
/// Pages in each slot.
const PAGES: u64 = 16;
/// Look-ups in one round.
const LOOKUPS: usize = 1 << 18;

fn shuffled(n: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..n).collect();
    rng().shuffle(&mut order);
    order
}

/// Slot number `place` in the order of frames; host addresses are in another order, as they come
/// from mmap.
fn slot(id: u64, place: u64, hva_place: u64) -> Slot {
    Slot {
        id: SlotId(id as u32),
        flags: SlotFlags::NONE,
        gfn: Gfn(place * PAGES),
        pages: PageCount(PAGES),
        hva: Hva(0x7f00_0000_0000 + hva_place * PAGES * PAGE_SIZE),
        block: 0,
        first: PageIndex(place * PAGES),
    }
}

/// The plain design: two sorted arrays, searched with the standard library, copied for every
/// update.
#[derive(Clone)]
struct SortedArrays {
    gfns: Vec<Slot>,
    hvas: Vec<Slot>,
}

impl SortedArrays {
    fn by_gfn(&self, gfn: u64) -> Option<&Slot> {
        let position = self.gfns.partition_point(|slot| slot.gfn.0 <= gfn).checked_sub(1)?;
        Some(&self.gfns[position]).filter(|slot| slot.gfns().contains(&gfn))
    }

    fn by_hva(&self, hva: u64) -> Option<&Slot> {
        let position = self.hvas.partition_point(|slot| slot.hva.0 <= hva).checked_sub(1)?;
        Some(&self.hvas[position]).filter(|slot| slot.hvas().contains(&hva))
    }

    fn without(&self, gfn: u64) -> (Arc<Self>, Slot) {
        let mut next = self.clone();
        let slot = next.gfns.remove(next.gfns.partition_point(|slot| slot.gfn.0 < gfn));
        next.hvas.remove(next.hvas.partition_point(|other| other.hva < slot.hva));
        (Arc::new(next), slot)
    }

    fn with(&self, slot: Slot) -> Arc<Self> {
        let mut next = self.clone();
        next.gfns.insert(next.gfns.partition_point(|other| other.gfn < slot.gfn), slot);
        next.hvas.insert(next.hvas.partition_point(|other| other.hva < slot.hva), slot);
        Arc::new(next)
    }
}

/// A region of guest memory for vm-memory, at the frames of a slot.
fn region(gfn: u64) -> anyhow::Result<GuestRegionMmap> {
    let mapping = MmapRegion::new((PAGES * PAGE_SIZE) as usize).context("cannot map a region")?;
    GuestRegionMmap::new(mapping, GuestAddress(gfn * PAGE_SIZE))
        .ok_or_else(|| anyhow!("a region wraps around"))
}

/// One row of the table: nanoseconds of each design; NaN where it has no such operation.
struct Row {
    what: String,
    godwit: f64,
    vm_memory: f64,
    arrays: f64,
}

/// Adds the target `name`, for the median and for the best round: neighbours on this machine share
/// the cache that the slots lie in, and can double the median.
fn target(report: &mut Report, name: &str, median: f64, best: f64, limit: f64) {
    report.target(name, median, limit, Better::Lower);
    report.target(format!("{name} (best round)"), best, limit, Better::Lower);
}

/// Nanoseconds for each of `n` operations in the best round.
fn best(rounds: &Rounds<'_>, number: usize, n: usize) -> f64 {
    rounds.best(number) * 1e9 / n as f64
}

/// Nanoseconds for each of `n` operations that contender `number` does in a round.
fn each(rounds: &Rounds<'_>, number: usize, n: usize) -> f64 {
    rounds.seconds(number) * 1e9 / n as f64
}

/// Look-ups of which each waits for the one before: the page depends on the slot found, though its
/// highest bit is never set.
fn chained(lookups: &[u64], mut find: impl FnMut(u64) -> u64) -> (f64, u64) {
    timed(|| lookups.iter().fold(0, |last: u64, &page| find(page ^ (last >> 63))))
}

pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    let mut charts = Vec::new();
    for n in [509u64, 32_764] {
        let rows = measure(n, report)?;
        let head = [
            format!("{n} slots, ns"),
            "Godwit".into(),
            "vm-memory 0.18".into(),
            "sorted arrays".into(),
        ];
        let cells: Vec<Vec<String>> = rows
            .iter()
            .map(|row| {
                let beside = |other: f64| match other.is_nan() {
                    true => "–".to_owned(),
                    false => format!("{} ({})", short(other), short(other / row.godwit)),
                };
                vec![row.what.clone(), short(row.godwit), beside(row.vm_memory), beside(row.arrays)]
            })
            .collect();
        markdown(&format!("{n} memory slots, ns each (times as long as Godwit)"), &head, &cells);
        let figures: serde_json::Map<String, serde_json::Value> = rows
            .iter()
            .map(|row| {
                let figures = json!({
                    "godwit": row.godwit, "vm-memory": row.vm_memory, "arrays": row.arrays,
                });
                (row.what.clone(), figures)
            })
            .collect();
        report.figure(&format!("slots: {n}, ns"), figures);
        for row in rows {
            charts
                .push((format!("{n}: {}", row.what), vec![row.godwit, row.vm_memory, row.arrays]));
        }
    }
    Chart {
        title: "Memory slots: nanoseconds for each operation".to_owned(),
        axis: "nanoseconds".to_owned(),
        series: ["Godwit", "vm-memory 0.18", "sorted arrays"].map(str::to_owned).to_vec(),
        groups: charts,
    }
    .write("structures-slots")
}

fn measure(n: u64, report: &mut Report) -> anyhow::Result<Vec<Row>> {
    let places = shuffled(n);
    let mut rng = rng();
    let lookups: Vec<u64> = (0..LOOKUPS).map(|_| rng.u64(..n * PAGES)).collect();

    let mut slots = MemSlots::new();
    let mut arrays = SortedArrays { gfns: Vec::new(), hvas: Vec::new() };
    let mut regions = Vec::new();
    for (id, &place) in places.iter().enumerate() {
        let slot = slot(id as u64, place, (place * 7919) % n);
        slots.insert(slot)?;
        arrays.gfns.push(slot);
    }
    arrays.gfns.sort_by_key(|slot| slot.gfn);
    arrays.hvas = arrays.gfns.clone();
    arrays.hvas.sort_by_key(|slot| slot.hva);
    for place in 0..n {
        regions.push(region(place * PAGES)?);
    }
    let memory = GuestMemoryMmap::from_regions(regions).map_err(|error| anyhow!("{error}"))?;

    let mut rows = lookup_rows(&slots, &arrays, &memory, &lookups, n, report);
    rows.extend(update_rows(slots, arrays, memory, &lookups, n, report)?);
    Ok(rows)
}

fn lookup_rows(
    slots: &MemSlots,
    arrays: &SortedArrays,
    memory: &GuestMemoryMmap,
    lookups: &[u64],
    n: u64,
    report: &mut Report,
) -> Vec<Row> {
    let count = lookups.len();
    let mut rows = Vec::new();
    let hva = |page: u64| Hva(0x7f00_0000_0000 + page * PAGE_SIZE);
    let sum = |found: Option<Slot>| found.map_or(0, |slot| slot.gfn.0);

    let mut rounds = Rounds::new();
    let mut reader = slots.reader();
    rounds.add("reader", move || {
        timed(|| {
            lookups.iter().map(|&page| sum(reader.by_gfn(Gfn(page)))).fold(0, u64::wrapping_add)
        })
    });
    rounds.add("vm-memory", || {
        timed(|| {
            let find = |page: u64| memory.find_region(GuestAddress(page * PAGE_SIZE));
            lookups
                .iter()
                .map(|&page| find(page).map_or(0, |region| region.start_addr().0 / PAGE_SIZE))
                .fold(0, u64::wrapping_add)
        })
    });
    rounds.add("arrays", || {
        timed(|| {
            lookups.iter().map(|&page| sum(arrays.by_gfn(page).copied())).fold(0, u64::wrapping_add)
        })
    });
    rounds.run(ROUNDS, 0);
    let ns = each(&rounds, 0, count);
    rows.push(Row {
        what: "look-up by guest frame".into(),
        godwit: ns,
        vm_memory: each(&rounds, 1, count),
        arrays: each(&rounds, 2, count),
    });
    if n > 509 {
        let name = format!("slots, {n}: look-up by guest frame, ns");
        target(report, &name, ns, best(&rounds, 0, count), 45.0);
    }

    // The next address depends on the slot found, so that look-ups cannot overlap.
    let mut rounds = Rounds::new();
    let mut reader = slots.reader();
    rounds.add("reader", move || chained(lookups, |page| sum(reader.by_gfn(Gfn(page)))));
    rounds.add("vm-memory", || {
        chained(lookups, |page| {
            let found = memory.find_region(GuestAddress(page * PAGE_SIZE));
            found.map_or(0, |region| region.start_addr().0 / PAGE_SIZE)
        })
    });
    rounds.add("arrays", || chained(lookups, |page| sum(arrays.by_gfn(page).copied())));
    rounds.run(ROUNDS, 0);
    rows.push(Row {
        what: "the same, each waiting for the last".into(),
        godwit: each(&rounds, 0, count),
        vm_memory: each(&rounds, 1, count),
        arrays: each(&rounds, 2, count),
    });

    // vm-memory has no look-up by host address: its users walk over the regions.
    let mut rounds = Rounds::new();
    let mut reader = slots.reader();
    rounds.add("reader", move || {
        timed(|| {
            lookups.iter().map(|&page| sum(reader.by_hva(hva(page)))).fold(0, u64::wrapping_add)
        })
    });
    rounds.add("arrays", || {
        timed(|| {
            let find = |page| arrays.by_hva(hva(page).0).copied();
            lookups.iter().map(|&page| sum(find(page))).fold(0, u64::wrapping_add)
        })
    });
    rounds.run(ROUNDS, 0);
    let few = &lookups[..1 << 8];
    let mut linear = Rounds::new();
    linear.add("vm-memory", || {
        timed(|| {
            let addresses: Vec<u64> = few
                .iter()
                .filter_map(|&page| memory.find_region(GuestAddress(page * PAGE_SIZE)))
                .filter_map(|region| region.get_host_address(MemoryRegionAddress(0)).ok())
                .map(|address| address as u64)
                .collect();
            let find = |address: u64| {
                memory.iter().find(|region| {
                    let start =
                        region.get_host_address(MemoryRegionAddress(0)).map_or(0, |at| at as u64);
                    (start..start + region.len()).contains(&address)
                })
            };
            addresses.iter().filter(|&&address| find(address).is_some()).count() as u64
        })
    });
    linear.run(ROUNDS, 0);
    let ns = each(&rounds, 0, count);
    rows.push(Row {
        what: "look-up by host address".into(),
        godwit: ns,
        vm_memory: each(&linear, 0, few.len()),
        arrays: each(&rounds, 1, count),
    });
    if n > 509 {
        let name = format!("slots, {n}: look-up by host address, ns");
        target(report, &name, ns, best(&rounds, 0, count), 45.0);
    }

    // Rows of Godwit alone.
    let mut alone = |what: &str, count: usize, f: &mut dyn FnMut() -> u64| {
        let mut rounds = Rounds::new();
        rounds.add(what, || timed(&mut *f));
        rounds.run(ROUNDS, 0);
        let godwit = each(&rounds, 0, count);
        rows.push(Row { what: what.to_owned(), godwit, vm_memory: f64::NAN, arrays: f64::NAN });
    };
    let mut reader = slots.reader();
    alone("look-up by id", count, &mut || {
        lookups
            .iter()
            .map(|&page| sum(reader.by_id(SlotId((page % n) as u32))))
            .fold(0, u64::wrapping_add)
    });
    // As KVM's benchmark does it: "map" looks up every page in turn by frame, "unmap" by host
    // address.
    let pages = (n * PAGES) as usize;
    alone("map: every page in turn by guest frame", pages, &mut || {
        (0..n * PAGES).map(|page| sum(reader.by_gfn(Gfn(page)))).fold(0, u64::wrapping_add)
    });
    alone("unmap: every page in turn, as a host range", pages, &mut || {
        let mut all = 0u64;
        for page in 0..n * PAGES {
            reader.for_each_in_hvas(hva(page)..hva(page + 1), |_, run| {
                all = all.wrapping_add(run.start.0)
            });
        }
        all
    });
    alone("unmap: host ranges of 2 MiB", pages / 512, &mut || {
        let mut all = 0u64;
        for chunk in 0..n * PAGES / 512 {
            let range = hva(chunk * 512)..hva((chunk + 1) * 512);
            reader.for_each_in_hvas(range, |_, run| all = all.wrapping_add(run.start.0));
        }
        all
    });
    rows
}

fn update_rows(
    mut slots: MemSlots,
    arrays: SortedArrays,
    memory: GuestMemoryMmap,
    lookups: &[u64],
    n: u64,
    report: &mut Report,
) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    // A reader that has seen every state, as threads of an engine have.
    let mut reader = slots.reader();
    let count = 2000;
    let updates: Vec<u64> = lookups[..count].iter().map(|page| page / PAGES).collect();
    // The peers copy all slots for each update, so they get fewer.
    let few = &updates[..if n > 509 { 10 } else { 200 }];

    let mut rounds = Rounds::new();
    let mut replace = |slots: &mut MemSlots| {
        timed(|| {
            for &place in &updates {
                let Some(slot) = reader.by_gfn(Gfn(place * PAGES)) else { continue };
                black_box(slots.remove(slot.id).and_then(|slot| slots.insert(slot)).is_ok());
            }
        })
        .0
    };
    rounds.add("Godwit", || (replace(&mut slots), 0));
    let mut memory = memory;
    rounds.add("vm-memory", move || {
        let (seconds, ()) = timed(|| {
            for &place in few {
                let size = PAGES * PAGE_SIZE;
                let removed = memory.remove_region(GuestAddress(place * size), size);
                // Each state goes to the readers in an `Arc`, as `GuestMemoryAtomic` has it.
                let Ok((without, region)) =
                    removed.map(|(memory, region)| (Arc::new(memory), region))
                else {
                    continue;
                };
                if let Ok(with) = without.insert_region(region).map(Arc::new) {
                    memory = Arc::unwrap_or_clone(with);
                }
            }
        });
        (seconds, 0)
    });
    let mut arrays = Arc::new(arrays);
    rounds.add("arrays", move || {
        let (seconds, ()) = timed(|| {
            for &place in few {
                let (without, slot) = arrays.without(place * PAGES);
                arrays = without.with(slot);
            }
        });
        (seconds, 0)
    });
    rounds.run(ROUNDS, 0);
    // Removal and insertion are two updates.
    let (godwit, vm_memory, array) = (
        each(&rounds, 0, 2 * count),
        each(&rounds, 1, 2 * few.len()),
        each(&rounds, 2, 2 * few.len()),
    );
    let best_update = best(&rounds, 0, 2 * count);
    let times = rounds.ratio(1, 0) * count as f64 / few.len() as f64;
    drop(rounds);
    rows.push(Row {
        what: "create or delete, with a snapshot".into(),
        godwit,
        vm_memory,
        arrays: array,
    });
    if n > 509 {
        let name = format!("slots, {n}: one update with a snapshot, ns");
        target(report, &name, godwit, best_update, 3000.0);
        let name = format!("slots, {n}: update, times as fast as vm-memory");
        report.target(name, times, 100.0, Better::Higher);
    }

    let mut alone = |what: &str, count: usize, f: &mut dyn FnMut()| {
        let mut rounds = Rounds::new();
        rounds.add(what, || (timed(&mut *f).0, 0));
        rounds.run(ROUNDS, 0);
        let godwit = each(&rounds, 0, count);
        rows.push(Row { what: what.to_owned(), godwit, vm_memory: f64::NAN, arrays: f64::NAN });
        (godwit, best(&rounds, 0, count))
    };
    let away = Gfn(n * PAGES + (1 << 30));
    let mut reader = slots.reader();
    let moved = alone("move, with a snapshot", 2 * count, &mut || {
        for &place in &updates {
            let Some(slot) = reader.by_gfn(Gfn(place * PAGES)) else { continue };
            black_box(
                slots
                    .move_to(slot.id, away)
                    .and_then(|()| slots.move_to(slot.id, slot.gfn))
                    .is_ok(),
            );
        }
    });
    let flagged = alone("change of flags, with a snapshot", count, &mut || {
        for (i, &place) in updates.iter().enumerate() {
            let Some(slot) = reader.by_gfn(Gfn(place * PAGES)) else { continue };
            black_box(slots.set_flags(slot.id, SlotFlags((i % 2) as u32)).is_ok());
        }
    });
    if n > 509 {
        target(report, &format!("slots, {n}: move with a snapshot, ns"), moved.0, moved.1, 3000.0);
        let name = format!("slots, {n}: change of flags with a snapshot, ns");
        target(report, &name, flagged.0, flagged.1, 3000.0);
    }
    let places = shuffled(n);
    let built = alone("setup in random order, a snapshot each", n as usize, &mut || {
        let mut slots = MemSlots::new();
        for (id, &place) in places.iter().enumerate() {
            black_box(slots.insert(slot(id as u64, place, (place * 7919) % n)).is_ok());
        }
    });
    alone("setup in random order, one snapshot", n as usize, &mut || {
        let mut slots = MemSlots::new();
        let result = slots.update(|edit| {
            for (id, &place) in places.iter().enumerate() {
                edit.insert(slot(id as u64, place, (place * 7919) % n))?;
            }
            Ok::<(), godwit_memslots::SlotError>(())
        });
        black_box(result.is_ok());
    });
    if n > 509 {
        let name = format!("slots, {n}: setup in random order, a snapshot each, ms");
        target(report, &name, built.0 * n as f64 / 1e6, built.1 * n as f64 / 1e6, 100.0);
    }
    Ok(rows)
}

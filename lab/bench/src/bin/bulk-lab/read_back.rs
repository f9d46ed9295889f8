//! What reading memory back costs: out of a process, in pieces of several sizes, when all of it was
//! written long ago or behind each write.
//!
//! The process is this one: the kernel goes the same way to the pages of any. What is made of each
//! page is what a proof makes of it.

use godwit_bench::report::{Report, machine, median};
use godwit_bench::sys::{Mapping, thread_time};
use godwit_bench::table::{Column, Table, figure};
use godwit_fingerprints::{Key, PageFingerprints, SegmentFingerprints};
use godwit_memory::{ProcessBacking, RamBlock};
use godwit_units::{PageCount, PageIndex, PageRun};
use serde_json::json;

const PAGE: usize = 4096;
/// What a core takes in is not in its caches any more.
const PAGES: u64 = 1 << 18;
/// Pages of a frame.
const FRAME: u64 = 256;
/// Pages that are read at once.
const PIECES: [u64; 4] = [16, 64, 128, 256];
const ROUNDS: usize = 7;

const TABLE: Table<(String, u64, f64)> = Table(&[
    Column { head: "read back", width: 17, cell: |row| row.0.clone() },
    Column { head: "KiB", width: 6, cell: |row| row.1.to_string() },
    Column { head: "CPU s/GiB", width: 9, cell: |row| figure(row.2, 3) },
]);

pub(crate) fn run() -> anyhow::Result<()> {
    println!("{}", machine());
    let size = PAGES as usize * PAGE;
    let memory = Mapping::anonymous(size)?;
    memory.advise(0, size, libc::MADV_HUGEPAGE)?;
    for word in 0..size / 8 {
        memory.store(word * 8, fastrand::u64(..));
    }
    let own = std::process::id().cast_signed();
    let backing = ProcessBacking::open(own, memory.address(), size as u64)?;
    let block = RamBlock::new("own", Box::new(backing), PageCount(PAGES));
    let (key, prints) = (Key::new(7), PageFingerprints::new());
    let mut table = prints.segment(PageRun::new(0, PAGES));
    table.record(PageIndex(0), key.zero());
    let ways: Vec<(bool, u64)> =
        [false, true].iter().flat_map(|behind| PIECES.map(|pages| (*behind, pages))).collect();
    let mut times = vec![Vec::new(); ways.len()];
    let mut frame = vec![1; FRAME as usize * PAGE];
    let mut bytes = godwit_units::PageBuffer::new(PageCount(FRAME));
    for round in 0..ROUNDS {
        for ((behind, pages), times) in ways.iter().zip(&mut times) {
            frame.fill(round as u8);
            let mut taken = 0.0;
            for at in (0..PAGES).step_by(FRAME as usize) {
                if *behind {
                    block.write(PageIndex(at), &frame)?;
                }
                let before = thread_time();
                for piece in (at..at + FRAME).step_by(*pages as usize) {
                    let bytes = &mut bytes[..*pages as usize * PAGE];
                    block.read(PageIndex(piece), bytes)?;
                    note(&mut table, &key, piece, bytes);
                }
                taken += (thread_time() - before).as_secs_f64();
            }
            times.push(taken);
        }
    }
    let mut report = Report::new("read-back");
    let mut rows = Vec::new();
    TABLE.print_head();
    for ((behind, pages), times) in ways.iter().zip(&times) {
        let name = if *behind { "behind each write" } else { "later" };
        let (kib, seconds) = (pages * 4, median(times));
        TABLE.print(&(name.to_owned(), kib, seconds));
        rows.push(json!({ "read_back": name, "kib": kib, "cpu_s_per_gib": times }));
    }
    report.figure("rows", rows);
    report.finish()?;
    Ok(())
}

/// The pages from `first` on hold `bytes`.
fn note(table: &mut SegmentFingerprints, key: &Key, first: u64, bytes: &[u8]) {
    for (page, bytes) in (first..).zip(bytes.chunks_exact(PAGE)) {
        let _ = table.update(PageIndex(page), key.page(bytes));
    }
}

//! What reading memory back costs: out of a process, in pieces of several sizes, when all of it was
//! written long ago or behind each write, into a buffer that begins at a page or some bytes behind.
//!
//! The process is this one: the kernel goes the same way to the pages of any. What is made of each
//! page is what a proof makes of it.

use godwit_bench::report::{Report, machine, median};
use godwit_bench::sys::{Mapping, thread_time};
use godwit_bench::table::{Column, Table, figure};
use godwit_fingerprints::{Key, PageFingerprints, SegmentFingerprints};
use godwit_memory::{ProcessBacking, RamBlock};
use godwit_units::{PageBuffer, PageCount, PageIndex, PageRun};
use serde_json::json;

const PAGE: usize = 4096;
/// What a core takes in is not in its caches any more.
const PAGES: u64 = 1 << 18;
/// Pages of a frame.
const FRAME: u64 = 256;
/// Pages that are read at once.
const PIECES: [u64; 4] = [16, 64, 128, 256];
/// Bytes from the beginning of a page to that of the buffer.
const OFFSETS: [usize; 4] = [0, 8, 16, 32];
const ROUNDS: usize = 7;

/// When is read back, how many pages at once, and into which buffer.
type Way = (bool, u64, usize);

const TABLE: Table<(Way, f64)> = Table(&[
    Column { head: "read back", width: 17, cell: |((behind, ..), _)| name(*behind).to_owned() },
    Column { head: "KiB", width: 6, cell: |((_, pages, _), _)| (pages * 4).to_string() },
    Column { head: "bytes behind", width: 12, cell: |((.., offset), _)| offset.to_string() },
    Column { head: "CPU s/GiB", width: 9, cell: |(_, seconds)| figure(*seconds, 3) },
]);

fn name(behind: bool) -> &'static str {
    if behind { "behind each write" } else { "later" }
}

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
    let sizes = [false, true].iter().flat_map(|behind| PIECES.map(|pages| (*behind, pages)));
    let ways: Vec<Way> =
        sizes.flat_map(|(behind, pages)| OFFSETS.map(|offset| (behind, pages, offset))).collect();
    let mut times = vec![Vec::new(); ways.len()];
    let mut frame = vec![1; FRAME as usize * PAGE];
    let mut buffer = PageBuffer::new(PageCount(FRAME + 1));
    for round in 0..ROUNDS {
        for ((behind, pages, offset), times) in ways.iter().zip(&mut times) {
            frame.fill(round as u8);
            let mut taken = 0.0;
            for at in (0..PAGES).step_by(FRAME as usize) {
                if *behind {
                    block.write(PageIndex(at), &frame)?;
                }
                let before = thread_time();
                for piece in (at..at + FRAME).step_by(*pages as usize) {
                    let bytes = &mut buffer[*offset..][..*pages as usize * PAGE];
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
    for (way, times) in ways.iter().zip(&times) {
        let (behind, pages, offset) = *way;
        TABLE.print(&(*way, median(times)));
        rows.push(json!({
            "read_back": name(behind),
            "kib": pages * 4,
            "bytes_behind": offset,
            "cpu_s_per_gib": times,
        }));
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

//! What is told of a disk, and what a source makes of it.
#![allow(clippy::unwrap_used)]

use godwit_disk::{DiskError, Extent};

use super::*;

/// A disk whose extents are these, and whose pages are filled with what `byte` says.
struct Stretches {
    extents: Vec<Extent>,
    byte: fn(u64) -> u8,
}

impl DiskReader for Stretches {
    fn extents(&mut self, run: PageRun) -> Result<Vec<Extent>, DiskError> {
        let within = |extent: &Extent| {
            extent.run.intersect(run).map(|run| Extent { run, content: extent.content })
        };
        Ok(self.extents.iter().filter_map(within).collect())
    }

    fn read(&mut self, runs: &[PageRun], bytes: &mut [u8]) -> Result<(), DiskError> {
        let [run] = *runs else { panic!("{runs:?}") };
        assert!(run.count.0 <= READ_PAGES);
        assert_eq!(bytes.len() as u64, run.count.bytes().0);
        for (page, bytes) in (run.start.0..).zip(bytes.chunks_mut(4096)) {
            bytes.fill((self.byte)(page));
        }
        Ok(())
    }
}

fn byte(page: u64) -> u8 {
    (page % 250 + 1) as u8
}

fn extent(start: u64, count: u64, content: Content) -> Extent {
    Extent { run: PageRun::new(start, count), content }
}

/// What a source learns of a disk of `pages` with these extents.
fn learnt(pages: u64, extents: &[Extent]) -> Held {
    let key = Key::new(7);
    let reader = Stretches { extents: extents.to_vec(), byte };
    let mut held = Held::new(PageCount(pages), key);
    tell(Some(Box::new(reader)), PageCount(pages), &key, |segment, prints| {
        assert_eq!(segment, held.next_segment());
        assert!(held.add(prints));
        Ok(())
    })
    .unwrap();
    assert!(!held.is_incomplete());
    held
}

fn bytes_of(run: PageRun) -> Vec<u8> {
    (run.start.0..run.end().0).flat_map(|page| [byte(page); 4096]).collect()
}

/// The pages of `run` that need not be sent, where the source has what `bytes` are.
fn same(held: &Held, run: PageRun, bytes: &[u8]) -> Vec<u64> {
    let same = held.same(run, bytes);
    (run.start.0..run.end().0).filter(|page| same.has(PageIndex(*page))).collect()
}

#[test]
fn pieces_that_are_the_same_are_left_out_and_others_are_not() {
    // Over two borders of segments; the last piece is short.
    let held = learnt(9000, &[extent(0, 5000, Content::Data), extent(5000, 4000, Content::Zero)]);
    let run = PageRun::new(4080, 48);
    let mut bytes = bytes_of(run);
    assert_eq!(same(&held, run, &bytes), (4080..4128).collect::<Vec<_>>());
    bytes[20 * 4096] ^= 1;
    let but_one: Vec<u64> = (4080..4096).chain(4112..4128).collect();
    assert_eq!(same(&held, run, &bytes), but_one);
    // Only whole pieces can be compared.
    let run = PageRun::new(4090, 20);
    assert_eq!(same(&held, run, &bytes_of(run)), [0_u64; 0]);
    // A piece that is data in part.
    let run = PageRun::new(4992, 16);
    let mut bytes = bytes_of(run);
    assert_eq!(same(&held, run, &bytes), [0_u64; 0]);
    bytes[8 * 4096..].fill(0);
    assert_eq!(same(&held, run, &bytes).len(), 16);
    // Zeros, and the short piece at the end.
    let run = PageRun::new(8976, 24);
    let zeros = vec![0; 24 * 4096];
    assert_eq!(same(&held, run, &zeros).len(), 24);
    assert_eq!(same(&held, run, &bytes_of(run)), [0_u64; 0]);
    assert_eq!(held.segments[2].len(), 0, "all of it is zeros, and nothing was told");
}

#[test]
fn of_what_cannot_be_read_nothing_is_left_out() {
    let key = Key::new(7);
    let mut held = Held::new(PageCount(5000), key);
    tell(None, PageCount(5000), &key, |_, prints| {
        assert!(held.add(prints));
        Ok(())
    })
    .unwrap();
    let run = PageRun::new(0, 16);
    for bytes in [bytes_of(run), vec![0; 16 * 4096]] {
        assert_eq!(same(&held, run, &bytes), [0_u64; 0]);
    }
}

#[test]
fn fingerprints_of_another_number_of_pieces_are_refused() {
    let mut held = Held::new(PageCount(4097), Key::new(7));
    assert!(!held.add(vec![1; 255]));
    assert!(!held.add(vec![1; 2]));
    let mut held = Held::new(PageCount(4097), Key::new(7));
    assert!(held.add(vec![1; 256]));
    assert!(held.add(vec![1]));
    assert!(!held.is_incomplete());
}

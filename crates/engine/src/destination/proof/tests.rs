//! What was placed is what is read back, whenever it was placed.

use godwit_fingerprints::Fingerprint;

use super::*;

/// Pages of the block: two segments and a piece of a third.
const PAGES: u64 = 2 * SEGMENT_PAGES + 100;

struct Rig {
    ram: Arc<Vec<RamBlock>>,
    placed: Arc<Placed>,
    key: Key,
    prover: Prover,
}

impl Rig {
    fn new() -> Self {
        let ram = Arc::new(vec![RamBlock::anonymous("ram", PageCount(PAGES)).unwrap()]);
        let placed = Arc::new(Placed::new(&ram, &[]));
        let key = Key::new(7);
        let prover = Prover::start(&ram, Vec::new(), &placed, key).unwrap();
        Self { ram, placed, key, prover }
    }

    fn write(&self, page: u64, byte: u8) {
        self.ram[0].write(PageIndex(page), &[byte; PAGE_SIZE as usize]).unwrap();
    }

    fn place(&self, page: u64, byte: u8) {
        self.write(page, byte);
        self.placed.mark(0, PageRun::new(page, 1));
    }

    fn digests(&self) -> Vec<u128> {
        self.prover.digests(|| None).unwrap().remove(0)
    }

    /// The digests of a block that holds nothing but these pages.
    fn expected(&self, pages: &[(u64, u8)]) -> Vec<u128> {
        let fingerprints = PageFingerprints::new();
        let segments = segments(&[PageCount(PAGES)]).map(|segment| {
            let mut table = fingerprints.segment(segment.run);
            for (page, byte) in pages {
                let print: Fingerprint = self.key.page(&[*byte; PAGE_SIZE as usize]);
                if (segment.run.start..segment.run.end()).contains(&PageIndex(*page)) {
                    table.record(PageIndex(*page), print);
                }
            }
            table.digest_of_all(&self.key)
        });
        segments.collect()
    }
}

#[test]
fn what_was_placed_last_is_what_counts() {
    let rig = Rig::new();
    assert_eq!(rig.digests(), rig.expected(&[]), "holes are zeros");
    rig.place(3, 1);
    rig.place(SEGMENT_PAGES - 1, 2);
    rig.place(SEGMENT_PAGES, 3);
    rig.place(PAGES - 1, 4);
    let all = [(3, 1), (SEGMENT_PAGES - 1, 2), (SEGMENT_PAGES, 3), (PAGES - 1, 4)];
    assert_eq!(rig.digests(), rig.expected(&all));
    rig.place(3, 9);
    rig.ram[0].zero(PageRun::new(SEGMENT_PAGES, 1)).unwrap();
    rig.placed.mark(0, PageRun::new(SEGMENT_PAGES, 1));
    assert_eq!(rig.digests(), rig.expected(&[(3, 9), all[1], all[3]]));
}

#[test]
fn what_nobody_has_placed_is_read_all_the_same() {
    // Mutation: pages of which nothing is known count as zeros.
    let rig = Rig::new();
    rig.write(5, 1);
    assert_eq!(rig.digests(), rig.expected(&[(5, 1)]));
}

#[test]
fn one_wrong_bit_shows_in_the_digest_of_its_segment_alone() {
    let rig = Rig::new();
    rig.place(SEGMENT_PAGES + 3, 1);
    let right = rig.digests();
    let mut page = [1; PAGE_SIZE as usize];
    page[4095] ^= 0x80;
    rig.ram[0].write(PageIndex(SEGMENT_PAGES + 3), &page).unwrap();
    rig.placed.mark(0, PageRun::new(SEGMENT_PAGES + 3, 1));
    let wrong = rig.digests();
    assert_eq!((right[0], right[2]), (wrong[0], wrong[2]));
    assert_ne!(right[1], wrong[1]);
}

#[test]
fn pages_that_are_placed_all_the_time_are_read_behind_their_last_write() {
    // Mutation: the mark is taken behind the read.
    let rig = Rig::new();
    for round in 1..=60 {
        for page in 0..200 {
            rig.place(page * 40, round);
        }
        let all: Vec<_> = (0..200).map(|page| (page * 40, round)).collect();
        assert_eq!(rig.digests(), rig.expected(&all), "round {round}");
    }
}

impl Rig {
    /// All pages of `run` hold `byte`, and the channel that placed them says so.
    fn place_many(&self, run: PageRun, byte: u8) {
        let bytes = vec![byte; run.count.bytes().0 as usize];
        self.ram[0].write(run.start, &bytes).unwrap();
        self.placed.placed((0, &self.ram[0]), run, &mut PageBuffer::default()).unwrap();
    }

    fn many(&self, runs: &[(PageRun, u8)]) -> Vec<u128> {
        let pages = runs
            .iter()
            .flat_map(|(run, byte)| (run.start.0..run.end().0).map(move |page| (page, *byte)));
        self.expected(&pages.collect::<Vec<_>>())
    }
}

#[test]
fn what_a_channel_has_read_back_is_read_once_and_what_came_later_counts() {
    // Mutations: what a channel has read counts though something is known; a page that is placed
    // again is not marked; a channel reads what was placed before.
    let rig = Rig::new();
    let run = PageRun::new(SEGMENT_PAGES - 300, 600);
    rig.place_many(run, 1);
    // Nobody is told of this: the thread does not read what the channel has.
    rig.write(SEGMENT_PAGES, 9);
    assert_eq!(rig.digests(), rig.many(&[(run, 1)]));
    rig.place_many(run, 2);
    assert_eq!(rig.digests(), rig.many(&[(run, 2)]));
    rig.place_many(PageRun::new(SEGMENT_PAGES - 310, 20), 3);
    let rest = PageRun::new(SEGMENT_PAGES - 290, 590);
    assert_eq!(
        rig.digests(),
        rig.many(&[(PageRun::new(SEGMENT_PAGES - 310, 20), 3), (rest, 2)]),
        "half of it was placed before"
    );
}

#[test]
fn what_channels_place_while_it_is_got_ready_is_proven() {
    // Mutation: what a channel places is not looked at again though the thread has read it before.
    for _ in 0..20 {
        let rig = Rig::new();
        let runs: Vec<_> = (0..PAGES / 64).map(|run| PageRun::new(run * 64, 64)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| runs.iter().for_each(|run| rig.place_many(*run, 7)));
            for _ in 0..10 {
                assert!(rig.prover.get_ready(Duration::from_secs(60), || None).unwrap());
            }
        });
        let placed: Vec<_> = runs.iter().map(|run| (*run, 7)).collect();
        assert_eq!(rig.digests(), rig.many(&placed));
    }
}

#[test]
fn what_was_read_back_under_another_key_is_read_again() {
    // Mutation: it counts.
    let rig = Rig::new();
    let run = PageRun::new(100, 64);
    rig.placed.first().key = Some(Key::new(8));
    rig.place_many(run, 5);
    assert_eq!(rig.digests(), rig.many(&[(run, 5)]));
}

#[test]
fn where_all_is_marked_nothing_counts_that_is_placed_for_the_first_time() {
    // Mutation: what is marked so is not claimed.
    let rig = Rig::new();
    rig.placed.mark_all();
    assert_eq!(rig.digests(), rig.expected(&[]));
    let run = PageRun::new(0, 64);
    rig.place_many(run, 5);
    assert_eq!(rig.digests(), rig.many(&[(run, 5)]));
}

#[test]
fn who_waits_is_heard() {
    let rig = Rig::new();
    let ended = rig.prover.digests(|| Some(EngineError::Cancelled));
    assert!(matches!(ended, Ok(_) | Err(EngineError::Cancelled)));
    drop(rig);
}

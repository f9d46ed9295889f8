//! The device as a driver sees it, and as a hostile one might.

use godwit_units::PageIndex;

use proptest::prelude::*;
use vm_memory::GuestMemoryMmap;

use super::*;

/// 1 MiB of guest memory at address 0, in two RAM blocks.
const MEMORY: u64 = 1 << 20;
const LOW_PAGES: u64 = 100;
const PAGES: u64 = MEMORY / PAGE_SIZE;
const TABLE: u64 = 0x1000;
const DRIVER: u64 = 0x2000;
const DEVICE_RING: u64 = 0x3000;
const DATA: u64 = 0x4000;
const ALL: Features = Features { hints: true, reporting: true };
const HINTS: usize = 3;
const REPORTS: usize = 4;

type Memory = GuestMemoryMmap<()>;

#[derive(Default)]
struct Discarded(Vec<(usize, PageRun)>);

impl Discard for Discarded {
    fn discard(&mut self, block: usize, run: PageRun) {
        self.0.push((block, run));
    }
}

fn sizes() -> [PageCount; 2] {
    [PageCount(LOW_PAGES), PageCount(PAGES - LOW_PAGES)]
}

fn balloon(features: Features) -> Balloon {
    let region = |start: u64, block, count| Region {
        start: Gpa(start * PAGE_SIZE),
        block,
        run: PageRun::new(0, count),
    };
    Balloon::new(features, vec![region(0, 0, LOW_PAGES), region(LOW_PAGES, 1, PAGES - LOW_PAGES)])
}

struct Rig {
    balloon: Balloon,
    memory: Memory,
    host: Discarded,
    /// Requests made so far, by queue.
    made: [u16; QUEUES_MOST],
}

impl Rig {
    fn new(features: Features, poison: u32) -> Self {
        let memory = Memory::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap();
        let mut rig =
            Self { balloon: balloon(features), memory, host: Discarded::default(), made: [0; 5] };
        let all = rig.offered();
        for (register, value) in
            [(0x70, 3), (0x24, 0), (0x20, all), (0x24, 1), (0x20, 1), (0x70, 11)]
        {
            rig.set(register, value);
        }
        assert_eq!(rig.balloon.read(0x70), 11);
        for queue in 0..5 {
            rig.set(0x30, queue);
            rig.set(0x38, 16);
            for (register, address) in [(0x80, TABLE), (0x90, DRIVER), (0xa0, DEVICE_RING)] {
                rig.set(register, address as u32 + queue * 0x200);
            }
            rig.set(0x44, 1);
        }
        rig.set(0x10c, poison);
        rig.set(0x70, 15);
        rig
    }

    fn offered(&mut self) -> u32 {
        self.set(0x14, 0);
        self.balloon.read(0x10)
    }

    fn set(&mut self, register: u64, value: u32) {
        self.balloon.write(register, value, &self.memory, &mut self.host);
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn used(&self, queue: usize) -> u16 {
        let mut bytes = [0; 2];
        self.memory
            .read_slice(&mut bytes, GuestAddress(DEVICE_RING + queue as u64 * 0x200 + 2))
            .unwrap();
        u16::from_le_bytes(bytes)
    }

    /// One request of `pieces`, address, length and whether the device writes.
    fn request(&mut self, queue: usize, pieces: &[(u64, u32, bool)]) {
        let offset = queue as u64 * 0x200;
        for (index, (address, len, device_writes)) in (0..).zip(pieces) {
            let last = index as usize + 1 == pieces.len();
            let flags = u16::from(!last) | if *device_writes { 2 } else { 0 };
            let descriptor = [
                &address.to_le_bytes()[..],
                &len.to_le_bytes(),
                &flags.to_le_bytes(),
                &(index as u16 + 1).to_le_bytes(),
            ];
            self.put(TABLE + offset + 16 * index, &descriptor.concat());
        }
        let number = self.made[queue];
        self.put(DRIVER + offset + 4 + 2 * u64::from(number % 16), &[0, 0]);
        self.made[queue] = number.wrapping_add(1);
        self.put(DRIVER + offset + 2, &self.made[queue].to_le_bytes());
        self.set(0x50, queue as u32);
    }

    fn frames(&mut self, queue: usize, frames: &[u32]) {
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.to_le_bytes()).collect();
        self.put(DATA, &bytes);
        self.request(queue, &[(DATA, bytes.len() as u32, false)]);
    }

    fn command(&mut self, command: u32) {
        self.put(DATA, &command.to_le_bytes());
        self.request(HINTS, &[(DATA, 4, false)]);
    }

    fn hint(&mut self, page: u64, count: u64) {
        self.request(HINTS, &[(page * PAGE_SIZE, (count * PAGE_SIZE) as u32, true)]);
    }

    fn needs_reset(&self) -> bool {
        self.balloon.read(0x70) & 64 != 0
    }

    fn start(&mut self) -> (Arc<FreeHints>, u32) {
        let hints = Arc::new(FreeHints::new(&sizes()));
        assert!(self.balloon.start_hints(&hints));
        (hints, self.balloon.read(0x108))
    }
}

#[test]
fn inflated_pages_are_discarded_in_runs() {
    let mut rig = Rig::new(ALL, 0);
    rig.frames(INFLATE, &[7, 8, 9, 20, 19, 18, 99, 100, 5_000_000]);
    let runs = [
        (0, PageRun::new(7, 3)),
        (0, PageRun::new(18, 3)),
        (0, PageRun::new(99, 1)),
        (1, PageRun::new(0, 1)),
    ];
    assert_eq!(rig.host.0, runs);
    rig.frames(DEFLATE, &[7, 8]);
    assert_eq!((rig.used(INFLATE), rig.used(DEFLATE), rig.host.0.len()), (1, 1, 4));
    rig.balloon.set_target(PageCount(12));
    rig.set(0x104, 9);
    assert_eq!((rig.balloon.read(0x100), rig.balloon.actual()), (12, PageCount(9)));
}

#[test]
fn reported_pages_are_discarded_unless_they_are_poisoned() {
    for (poison, expected) in
        [(0, vec![(0, PageRun::new(90, 10)), (1, PageRun::new(0, 6))]), (0xaaaa_aaaa, vec![])]
    {
        let mut rig = Rig::new(ALL, poison);
        rig.request(REPORTS, &[(90 << 12, 16 << 12, true), (5 << 12, 1 << 12, false)]);
        assert_eq!(rig.host.0, expected);
        assert_eq!(rig.used(REPORTS), 1);
    }
}

#[test]
fn queues_of_features_that_are_not_offered_do_not_count() {
    let mut rig = Rig::new(Features { hints: false, reporting: true }, 0);
    rig.request(3, &[(0, 1 << 12, true)]);
    assert_eq!(rig.host.0, [(0, PageRun::new(0, 1))]);
    assert!(!rig.balloon.start_hints(&Arc::new(FreeHints::new(&sizes()))));
}

#[test]
fn hints_count_between_the_command_and_its_end() {
    let mut rig = Rig::new(ALL, 0);
    rig.hint(1, 1);
    let (hints, command) = rig.start();
    assert_eq!(command, FIRST_COMMAND);
    rig.hint(2, 1);
    rig.command(command + 1);
    rig.hint(3, 1);
    rig.command(command);
    rig.hint(98, 4);
    rig.command(STOP);
    rig.hint(5, 1);
    assert!(hints.is_complete());
    assert_eq!(hints.hinted(), PageCount(4));
    assert_eq!(hints.take(0).unwrap().runs().collect::<Vec<_>>(), [PageRun::new(98, 2)]);
    assert_eq!(hints.take(1).unwrap().runs().collect::<Vec<_>>(), [PageRun::new(0, 2)]);
    assert_eq!(rig.used(HINTS), 8);
}

#[test]
fn a_stale_command_is_ignored() {
    let mut rig = Rig::new(ALL, 0);
    let (old, first) = rig.start();
    rig.command(first);
    rig.balloon.stop_hints();
    assert_eq!(rig.balloon.read(0x108), STOP);
    rig.hint(1, 1);
    rig.balloon.finish_hints();
    assert_eq!(rig.balloon.read(0x108), DONE);
    let (new, second) = rig.start();
    assert_ne!(first, second);
    // What the driver had under way, and what it calls by its old name.
    rig.hint(2, 1);
    rig.command(STOP);
    rig.command(first);
    rig.hint(3, 1);
    for command in [STOP, DONE] {
        rig.command(command);
        rig.hint(4, 1);
    }
    assert_eq!((old.hinted(), new.hinted()), (PageCount::ZERO, PageCount::ZERO));
    assert!(!new.is_complete());
    rig.command(second);
    rig.hint(5, 1);
    assert_eq!(new.hinted(), PageCount(1));
}

#[test]
fn command_ids_go_on_after_a_reset_and_at_the_destination_and_pass_by_the_reserved_ones() {
    let mut rig = Rig::new(ALL, 0);
    let (_, first) = rig.start();
    let mut other = balloon(ALL);
    other.load(&rig.balloon.save()).unwrap();
    assert_eq!(other.read(0x108), DONE);
    assert!(other.start_hints(&Arc::new(FreeHints::new(&sizes()))));
    assert_eq!(other.read(0x108), first + 1);
    other.write(0x70, 0, &rig.memory, &mut rig.host);
    assert_eq!(other.read(0x108), STOP);
    assert!(!other.can_hint());
    assert_eq!(other.hinting.issued, first + 1);
    rig.balloon.hinting.issued = u32::MAX;
    assert_eq!(rig.start().1, FIRST_COMMAND);
}

#[test]
fn poisoned_pages_are_not_hinted() {
    let mut rig = Rig::new(ALL, 0x5555_5555);
    assert!(!rig.balloon.can_hint());
    assert!(!rig.balloon.start_hints(&Arc::new(FreeHints::new(&sizes()))));
    // A driver that says so only when hinting has begun.
    let mut rig = Rig::new(ALL, 0);
    let (hints, command) = rig.start();
    rig.set(0x10c, 1);
    rig.command(command);
    rig.hint(1, 1);
    assert_eq!(hints.hinted(), PageCount::ZERO);
}

#[test]
fn hints_that_make_no_sense_hint_nothing() {
    let mut rig = Rig::new(ALL, 0);
    let (hints, command) = rig.start();
    rig.put(DATA, &command.to_le_bytes());
    rig.request(HINTS, &[(DATA, 8, false), (0, 4096, true)]);
    rig.request(HINTS, &[(u64::MAX - 1, 4, false), (0, 4096, true)]);
    assert_eq!(hints.hinted(), PageCount::ZERO);
    rig.command(command);
    for (address, len) in
        [(1, 4096), (4096, 0), (4097, 8190), (MEMORY, u32::MAX), (u64::MAX, u32::MAX)]
    {
        rig.request(HINTS, &[(address, len, true)]);
    }
    assert_eq!(hints.hinted(), PageCount::ZERO);
    rig.request(HINTS, &[(2 * 4096 + 1, 3 * 4096, true), (4 * 4096, 4096, true)]);
    assert_eq!(hints.take(0).unwrap().runs().collect::<Vec<_>>(), [PageRun::new(3, 2)]);
    assert!(!rig.needs_reset());
}

#[test]
fn one_notification_asks_for_all_memory_once() {
    let mut rig = Rig::new(ALL, 0);
    // As long as chains may be in all (virtio 1.2, 2.7.5.2).
    rig.request(REPORTS, &[(0, u32::MAX / 16, true); 16]);
    let pages: u64 = rig.host.0.iter().map(|(_, run)| run.count.0).sum();
    assert_eq!(pages, PAGES);
}

#[test]
fn a_request_longer_than_any_may_be_breaks_the_device_and_discards_nothing() {
    let mut rig = Rig::new(ALL, 0);
    rig.request(REPORTS, &[(0, u32::MAX, true), (0, 1 << 12, true)]);
    assert!(rig.needs_reset());
    assert_eq!(rig.host.0, []);
}

#[test]
fn statistics_stay_until_new_ones_are_asked_for() {
    let mut rig = Rig::new(ALL, 0);
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    rig.put(DATA, &[entry(4, 1 << 40), entry(77, 5)].concat());
    rig.request(STATS, &[(DATA, 20, false)]);
    assert_eq!(
        rig.balloon.statistics(),
        [Statistic { tag: 4, value: 1 << 40 }, Statistic { tag: 77, value: 5 }]
    );
    assert_eq!(rig.used(STATS), 0);
    let mut moved = balloon(ALL);
    moved.load(&rig.balloon.save()).unwrap();
    moved.ask_for_statistics(&rig.memory);
    assert_eq!(rig.used(STATS), 1);
    moved.ask_for_statistics(&rig.memory);
    assert_eq!(rig.used(STATS), 1);
    // A second request before the first was given back, as long as any.
    let mut rig = Rig::new(ALL, 0);
    rig.request(STATS, &[(DATA, 20, false)]);
    rig.request(STATS, &[(0, u32::MAX / 2, false), (0, u32::MAX / 2, false)]);
    assert_eq!((rig.used(STATS), rig.balloon.statistics().len()), (1, STATISTICS_MOST));
}

#[test]
fn a_state_of_another_device_is_refused() {
    let rig = Rig::new(ALL, 0);
    let words = rig.balloon.save();
    let mut without = balloon(Features::default());
    assert!(matches!(without.load(&words), Err(BalloonError::Registers(_))));
    assert!(matches!(without.load(&words[..3]), Err(BalloonError::Short(3))));
    assert_eq!(without.save(), balloon(Features::default()).save());
    let mut fewer = balloon(Features { hints: true, reporting: true });
    let mut others = words.clone();
    // Features that are not offered: the fifth register.
    others[6 + 4] |= 1 << 20;
    assert!(fewer.load(&others).unwrap_err().to_string().contains("the same device options"));
    fewer.load(&words).unwrap();
}

/// One thing that a guest may do.
#[derive(Clone, Debug)]
enum Deed {
    Register(u64, u32),
    Memory(u64, Vec<u8>),
    Notify(u32),
    Start,
    Stop,
    Finish,
    Move,
}

fn deed() -> impl Strategy<Value = Deed> {
    let register = prop_oneof![
        prop::sample::select(vec![0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x64, 0x70, 0x104, 0x10c]),
        (0x80_u64..0xa8),
        any::<u64>()
    ];
    // Rings and descriptors mostly, with words that may mean something.
    let word =
        prop_oneof![0..32_u64, any::<u64>(), (0..PAGES * 2).prop_map(|page| page * PAGE_SIZE)];
    let words = prop::collection::vec(word, 1..8);
    let bytes = words.prop_map(|words| words.iter().flat_map(|word| word.to_le_bytes()).collect());
    prop_oneof![
        2 => (register, prop_oneof![0..16_u32, any::<u32>()])
            .prop_map(|(at, value)| Deed::Register(at, value)),
        8 => ((TABLE..DATA + 64), bytes).prop_map(|(at, bytes)| Deed::Memory(at & !1, bytes)),
        8 => (0..6_u32).prop_map(Deed::Notify),
        1 => Just(Deed::Start),
        1 => Just(Deed::Stop),
        1 => Just(Deed::Finish),
        1 => Just(Deed::Move),
    ]
}

/// How many cases: GODWIT_CASES for the long form.
fn cases() -> u32 {
    std::env::var("GODWIT_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(400)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases())
    })]

    /// Whatever is in the rings and the registers: no panic, no end that does not come, and nothing
    /// outside of RAM.
    #[test]
    fn arbitrary_rings_do_no_harm(deeds in prop::collection::vec(deed(), 1..120)) {
        let mut rig = Rig::new(ALL, 0);
        let mut hints = Arc::new(FreeHints::new(&sizes()));
        for deed in deeds {
            let mut budget = PAGES;
            match deed {
                Deed::Register(at, value) => rig.set(at, value),
                Deed::Memory(at, bytes) => rig.put(at, &bytes),
                Deed::Notify(queue) => rig.set(0x50, queue),
                Deed::Start => {
                    hints = Arc::new(FreeHints::new(&sizes()));
                    rig.balloon.start_hints(&hints);
                }
                Deed::Stop => rig.balloon.stop_hints(),
                Deed::Finish => rig.balloon.finish_hints(),
                Deed::Move => {
                    let state = rig.balloon.save();
                    rig.balloon = balloon(ALL);
                    prop_assert!(rig.balloon.load(&state).is_ok());
                }
            }
            for (block, run) in rig.host.0.drain(..) {
                prop_assert!(block < 2 && run.count.0 > 0 && run.end().0 <= sizes()[block].0);
                prop_assert!(run.count.0 <= budget, "more than all of memory");
                budget -= run.count.0;
            }
            prop_assert!(hints.hinted().0 <= PAGES);
        }
    }

    /// A guest that hints, takes back and writes at will, under a tracker and two looks at the
    /// segment: what is live arrives.
    #[test]
    fn no_live_page_is_left_out(steps in prop::collection::vec((0..8_u8, 0..24_u64), 1..200)) {
        let mut rig = Rig::new(ALL, 0);
        let mut live = [Some(1_u64); 24];
        let mut content = [1_u64; 24];
        let mut dirty = [false; 24];
        let mut copy = [0_u64; 24];
        let mut queued = Vec::new();
        let (mut next, mut sent_once) = (2, false);
        let (hints, command) = rig.start();
        rig.command(command);
        for (step, page) in steps {
            let at = page as usize;
            match step {
                // The guest frees a page and says so, or will.
                0 | 1 => {
                    live[at] = None;
                    queued.push(page);
                }
                // The device comes to see the hints.
                2 => queued.drain(..).for_each(|page| rig.hint(page, 1)),
                // The guest takes a page back, or writes one that it has.
                3..=5 => {
                    (live[at], content[at], dirty[at]) = (Some(next), next, true);
                    next += 1;
                }
                // A round, of all pages if the segment was put off, or of those that were written.
                _ => {
                    let free = hints.take(0);
                    let all = !std::mem::replace(&mut sent_once, true) || step == 6;
                    for page in 0..24 {
                        let was_dirty = std::mem::take(&mut dirty[page]);
                        let page_index = PageIndex(page as u64);
                        let is_free = free.as_ref().is_some_and(|free| free.is_set(page_index));
                        if was_dirty || (all && !is_free) {
                            copy[page] = content[page];
                        } else if all {
                            copy[page] = 0;
                        }
                    }
                }
            }
        }
        for page in 0..24 {
            if dirty[page] || !sent_once {
                copy[page] = content[page];
            }
            prop_assert!(live[page].is_none_or(|live| live == copy[page]), "page {page} is lost");
        }
    }
}

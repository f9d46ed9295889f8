//! The audit: with the guest stopped, every page of both sides is compared with what was sent of
//! it, one by one, and the first difference is explained.
//!
//! Three things are known of a page: the fingerprints of what was sent of it, round by round; that
//! of what the destination holds; and what it holds here, where nobody writes any more. The
//! destination must hold what was sent last, and so must this side. Beside that it is remembered
//! when the tracker reported the page, before anything was done about it.
//!
//! Nothing is handed over before all of it is equal. A page of memory that is a hole here may have
//! been given back since it was sent, so it is not compared with what was sent. Of the disks that
//! move along all is compared, page by page as well; what the destination holds of them is what it
//! has read back.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;

use godwit_balloon::FreeHints;
use godwit_codec::is_zero;
use godwit_disk::{Content, DiskReader};
use godwit_fingerprints::{Fingerprint, Key};
use godwit_memory::{RamBlock, Segment};
use godwit_units::{PAGE_SIZE, PageBuffer, PageCount, PageIndex};

use super::history::{Sent, SentOf};
use super::look_back::is_hole;
use crate::EngineError;
use crate::disk_prints::{READ_PAGES, parts};
use crate::report::{Answer, Audit, Difference, Place};

/// What both sides are compared by.
pub(super) struct Auditor<'a> {
    pub(super) ram: &'a [RamBlock],
    pub(super) key: Key,
    pub(super) free: Option<&'a FreeHints>,
    /// Channels of memory.
    pub(super) channels: usize,
    /// The names of the disks that move along, which are numbered behind the RAM blocks.
    pub(super) disks: &'a [String],
}

/// Pages that differ, in the order in which they were found, and what the destination holds of
/// them.
#[derive(Default)]
pub(super) struct Differing {
    pages: u64,
    /// They arrived otherwise than they were sent: with their segment.
    damaged: Vec<(usize, u64, Fingerprint)>,
    /// They hold what was not sent.
    missed: Vec<(usize, u64)>,
}

/// One more page is counted, and the first one explained.
fn count(answer: &mut Answer, explain: impl FnOnce() -> Option<Difference>) {
    answer.differing = PageCount(answer.differing.0 + 1);
    if answer.first.is_none() {
        answer.first = explain();
    }
}

/// The versions of the pages of one part that were sent before the last one.
#[derive(Default)]
struct Earlier(BTreeSet<(u64, u64)>);

impl Earlier {
    fn of(part: SentOf<'_>) -> Self {
        let Some(history) = part.history else { return Self::default() };
        let mut last = BTreeMap::new();
        let mut earlier = BTreeSet::new();
        for sent in &history.sent {
            let page = history.first + u64::from(sent.page);
            let before = last.insert(page, sent.print.word());
            earlier.extend(before.map(|print| (page, print)));
        }
        Self(earlier)
    }

    fn has(&self, page: u64, print: Fingerprint) -> bool {
        self.0.contains(&(page, print.word()))
    }
}

impl Auditor<'_> {
    /// Compares part `number`, of which the destination holds `prints`; none: zeros.
    pub(super) fn compare_there(
        &self,
        (number, part): (usize, SentOf<'_>),
        prints: &[u64],
        differing: &mut Differing,
    ) {
        let (run, zero) = (part.segment.run, self.key.zero());
        differing.pages += run.count.0;
        for page in run.start.0..run.end().0 {
            let there = match prints.get((page - run.start.0) as usize) {
                Some(word) => Fingerprint::from_word(*word).unwrap_or(zero),
                None => zero,
            };
            if there != part.sent(page, zero) {
                differing.damaged.push((number, page, there));
            }
        }
    }

    /// Compares part `number`, of a disk, with what the disk holds here.
    pub(super) fn compare_disk(
        &self,
        (number, part): (usize, SentOf<'_>),
        disk: &mut dyn DiskReader,
        differing: &mut Differing,
    ) -> Result<(), EngineError> {
        let zero = self.key.zero();
        let mut bytes = PageBuffer::new(PageCount(READ_PAGES));
        let mut look = |page: u64, print: Fingerprint| {
            if print != part.sent(page, zero) {
                differing.missed.push((number, page));
            }
        };
        for extent in disk.extents(part.segment.run).map_err(EngineError::Disk)? {
            if extent.content == Content::Zero {
                (extent.run.start.0..extent.run.end().0).for_each(|page| look(page, zero));
                continue;
            }
            for run in parts(extent.run, READ_PAGES) {
                let bytes = &mut bytes[..run.count.bytes().0 as usize];
                disk.read(&[run], bytes).map_err(EngineError::Disk)?;
                let pages = bytes.chunks_exact(PAGE_SIZE as usize);
                (run.start.0..).zip(pages).for_each(|(page, page_bytes)| {
                    look(page, self.key.page(page_bytes));
                });
            }
        }
        Ok(())
    }

    /// Compares part `number`, of memory, with what memory holds here.
    pub(super) fn compare_memory(
        &self,
        (number, part): (usize, SentOf<'_>),
        differing: &mut Differing,
    ) -> Result<(), EngineError> {
        let (Segment { block, run }, zero) = (part.segment, self.key.zero());
        let mut skipped = BTreeSet::new();
        if let Some(free) = self.free {
            free.skipped(block, run, |page| {
                skipped.insert(page.0);
            });
        }
        let ram = &self.ram[block];
        let mut bytes = PageBuffer::new(PageCount(1));
        for data in ram.data_coarse(run) {
            let data = data?;
            for page in data.start.0..data.end().0 {
                ram.read(PageIndex(page), &mut bytes)?;
                let same = self.key.page(&bytes) == part.sent(page, zero);
                // A hint holds until the page is reported.
                let believed = skipped.contains(&page)
                    && part.history.is_none_or(|history| {
                        let left_out = history.of(page).next().map(|sent| sent.round);
                        history.last_report(page) < left_out
                    });
                if same || believed || (is_zero(&bytes) && is_hole(ram, page)?) {
                    continue;
                }
                differing.missed.push((number, page));
            }
        }
        Ok(())
    }

    /// What came of it, with the first page of each question explained.
    pub(super) fn conclude(&self, all: &[SentOf<'_>], differing: &Differing) -> Audit {
        let mut audit = Audit {
            pages: PageCount(differing.pages),
            memory: Answer::default(),
            disks: (!self.disks.is_empty()).then(Answer::default),
            sent: Answer::default(),
            order: Answer::default(),
        };
        let mut earlier = (usize::MAX, Earlier::default());
        for (number, page, there) in &differing.damaged {
            let explain = || Some(self.explain_damage(all, (*number, *page), *there));
            let of_disk = all[*number].segment.block >= self.ram.len();
            let arrived = audit.disks.as_mut().filter(|_| of_disk).unwrap_or(&mut audit.memory);
            count(arrived, explain);
            if earlier.0 != *number {
                earlier = (*number, Earlier::of(all[*number]));
            }
            if earlier.1.has(*page, *there) {
                count(&mut audit.order, explain);
            }
        }
        for (number, page) in &differing.missed {
            count(&mut audit.sent, || self.explain_miss(all[*number], *page));
        }
        audit
    }

    /// The name of RAM block or disk `number`, and whether it is a disk.
    fn name(&self, number: usize) -> (String, bool) {
        match number.checked_sub(self.ram.len()) {
            None => (self.ram[number].name().to_owned(), false),
            Some(disk) => (self.disks[disk].clone(), true),
        }
    }

    fn place(&self, number: usize, page: u64) -> Place {
        let (block, disk) = self.name(number);
        Place { block, disk, offset: PageIndex(page).offset() }
    }

    /// The channel that a page of block or disk `number` was `sent` over. Each disk has one behind
    /// those of memory.
    fn channel(&self, number: usize, sent: &Sent) -> usize {
        match number.checked_sub(self.ram.len()) {
            None => sent.channel,
            Some(disk) => self.channels + disk,
        }
    }

    fn explain_damage(
        &self,
        all: &[SentOf<'_>],
        (number, page): (usize, u64),
        there: Fingerprint,
    ) -> Difference {
        let part = all[number];
        let block = part.segment.block;
        let place = self.place(block, page);
        let sent: Vec<Sent> =
            part.history.into_iter().flat_map(|history| history.of(page)).copied().collect();
        let last = sent.first().map(|sent| sent.round);
        let channel = sent.first().map(|sent| self.channel(block, sent));
        if let Some(older) = sent.iter().skip(1).find(|sent| sent.print == there) {
            return Difference::Older { place, held: older.round, last, channel };
        }
        if there == self.key.zero() {
            return Difference::Zeros { place, last, channel };
        }
        for other in all {
            let of = other.segment.block;
            let found = other.history.and_then(|history| {
                let same = |sent: &&Sent| sent.print == there;
                history.sent.iter().find(same).map(|sent| history.first + u64::from(sent.page))
            });
            if let Some(found) = found {
                return Difference::OtherPage {
                    place,
                    other: self.place(of, found),
                    last,
                    channel,
                };
            }
        }
        Difference::Unknown { place, last, channel }
    }

    fn explain_miss(&self, part: SentOf<'_>, page: u64) -> Option<Difference> {
        let block = part.segment.block;
        let place = self.place(block, page);
        let history = part.history?;
        let last = history.of(page).next();
        let (sent, reported) = (last.map(|sent| sent.round), history.last_report(page));
        let unchanged = history.last_unchanged(page);
        let channel = last.map(|sent| self.channel(block, sent));
        Some(match last {
            Some(Sent { free: true, round, .. }) => {
                Difference::BelievedFree { place, left_out: *round, reported }
            }
            // What is reported in a round is sent in it, unless it is as it was sent.
            _ if reported > sent.max(unchanged) => {
                Difference::NotSent { place, reported, sent, channel }
            }
            _ => {
                let unchanged = unchanged.filter(|_| unchanged > sent);
                Difference::NotReported { place, sent, unchanged, channel }
            }
        })
    }

    /// Writes where each page came from: one line for each version of a page that was sent, in the
    /// order of places and then of time.
    pub(super) fn write_trace(&self, all: &[SentOf<'_>], path: &Path) -> io::Result<()> {
        let mut file = io::BufWriter::new(std::fs::File::create(path)?);
        writeln!(file, "# block\toffset\tround\tchannel\tframe\tmilliseconds\tfingerprint\twhat")?;
        for part in all {
            let block = part.segment.block;
            let (name, _) = self.name(block);
            let Some(history) = part.history else { continue };
            let mut by_page: BTreeMap<u32, Vec<&Sent>> = BTreeMap::new();
            history.sent.iter().for_each(|sent| by_page.entry(sent.page).or_default().push(sent));
            for (page, versions) in by_page {
                let page = PageIndex(history.first + u64::from(page));
                for sent in versions {
                    let Sent { round, frame, at, print, free, .. } = sent;
                    let channel = self.channel(block, sent);
                    let what = match (*free, *print == self.key.zero()) {
                        (true, _) => "free",
                        (false, true) => "zero",
                        (false, false) => "data",
                    };
                    let (offset, at, print) = (page.offset(), at.as_millis(), print.word());
                    write!(file, "{name}\t{offset:#x}\t{round}\t{channel}\t{frame}\t")?;
                    writeln!(file, "{at}\t{print:016x}\t{what}")?;
                }
            }
        }
        file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use godwit_units::PageRun;

    use super::super::history::History;
    use super::*;

    /// Why a page was missed that was sent in round 0, reported in round 3, and unchanged in these
    /// rounds.
    fn missed(unchanged: &[u32]) -> Difference {
        let key = Key::new(7);
        let ram = [RamBlock::anonymous("ram", PageCount(16)).unwrap()];
        let run = PageRun::new(0, 16);
        let segment = Segment { block: 0, run };
        let mut history = History::new(segment, Instant::now());
        history.goes_over(3);
        let (page, print) = (PageRun::new(5, 1), key.page(&[1; 4096]));
        history.reported(run, 0);
        history.sent(page, print, (0, 1), false);
        history.reported(page, 3);
        unchanged.iter().for_each(|round| history.unchanged(5, *round));
        let auditor = Auditor { ram: &ram, key, free: None, channels: 1, disks: &[] };
        let part = SentOf { segment, prints: None, history: Some(&history) };
        auditor.explain_miss(part, 5).unwrap()
    }

    #[test]
    fn a_page_that_was_reported_and_not_sent_was_left_out() {
        let found = missed(&[1]);
        let place = Place { block: "ram".to_owned(), disk: false, offset: 5 << 12 };
        let (reported, sent) = (Some(3), Some(0));
        assert_eq!(found, Difference::NotSent { place, reported, sent, channel: Some(3) });
    }

    #[test]
    fn a_page_that_was_reported_and_was_as_it_was_sent_was_written_behind_that() {
        // Cause: a device wrote behind the tracker into a page that was reported before, and was as
        // it was sent when it was read: it was called left out by the engine.
        let found = missed(&[3]);
        let told = "not reported as written since it was sent in round 0 over channel 3, and was \
                    unchanged in round 3: the tracker missed it";
        assert!(found.to_string().ends_with(told), "{found}");
    }

    #[test]
    fn four_questions_are_answered_apart() {
        // Mutations: all that differs counts as older; what a disk holds counts as memory's.
        let key = Key::new(7);
        let [old, new, odd] = [1, 2, 3].map(|byte| key.page(&[byte; 4096]));
        let ram = [RamBlock::anonymous("ram", PageCount(16)).unwrap()];
        let disks = ["vda".to_owned()];
        let auditor = Auditor { ram: &ram, key, free: None, channels: 1, disks: &disks };
        let run = PageRun::new(0, 16);
        let history = |block| {
            let mut history = History::new(Segment { block, run }, Instant::now());
            history.reported(run, 0);
            for (round, print) in [(0, old), (3, new)] {
                history.sent(run, print, (round, 1), false);
            }
            history
        };
        let (of_memory, of_disk) = (history(0), history(1));
        let part = |block, history| SentOf {
            segment: Segment { block, run },
            prints: None,
            history: Some(history),
        };
        let all = [part(0, &of_memory), part(1, &of_disk)];
        let answers = |damaged: &[(usize, u64, Fingerprint)], missed: &[(usize, u64)]| {
            let (damaged, missed) = (damaged.to_vec(), missed.to_vec());
            let audit = auditor.conclude(&all, &Differing { pages: 32, damaged, missed });
            let disks = audit.disks.as_ref().unwrap().differing;
            let pages = [audit.memory.differing, disks, audit.sent.differing];
            (pages.map(|count| count.0), audit.order.differing.0, audit.to_string())
        };
        let (pages, older, said) = answers(&[], &[]);
        assert_eq!((pages, older), ([0, 0, 0], 0));
        assert_eq!(
            said,
            "memory arrived as sent; disks arrived as sent; all of it was sent; in order"
        );
        let (pages, older, said) = answers(&[(0, 5, odd), (0, 6, old), (1, 7, odd)], &[(1, 9)]);
        assert_eq!((pages, older), ([2, 1, 1], 1));
        for words in [
            "memory: 2 pages did not arrive as sent: RAM block 'ram' at 0x5000 holds",
            "disks: 1 pages did not arrive as sent: disk 'vda' at 0x7000",
            "1 pages were not sent: disk 'vda' at 0x9000",
            "not in order: older versions of 1 pages: RAM block 'ram' at 0x6000 holds the version",
        ] {
            assert!(said.contains(words), "{words}: {said}");
        }
        // What is explained already is not said twice.
        let (pages, older, said) = answers(&[(0, 6, old)], &[]);
        assert_eq!((pages, older), ([1, 0, 0], 1));
        assert!(said.ends_with("not in order: older versions of 1 pages"), "{said}");
    }
}

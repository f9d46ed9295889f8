//! The scan: 384 MiB of dirty bitmap (12 TiB of guest) into maximal runs; and the harvest of a
//! shared bitmap.

use std::convert::Infallible;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_bench::chart::Chart;
use godwit_bench::report::{Better, Report};
use godwit_bench::table::{markdown, short};
use godwit_bitmap::{AtomicDirtyBitmap, CodePath};
use godwit_units::{PageCount, PageRun};
use serde_json::json;

use crate::pattern::Pattern;
use crate::rounds::{Rounds, timed};

/// 384 MiB of bits.
const PAGES: PageCount = PageCount(384 << 23);
const ROUNDS: usize = 9;
/// Rounds with the test of every bit, which takes seconds.
const SLOW_ROUNDS: usize = 3;

/// A checksum of runs, cheap enough not to be measured.
#[derive(Default)]
struct Sum {
    pages: u64,
    starts: u64,
}

impl Sum {
    #[inline(always)]
    fn add(&mut self, start: u64, pages: u64) {
        self.pages = self.pages.wrapping_add(pages);
        self.starts ^= start;
    }

    fn value(&self) -> u64 {
        self.pages ^ self.starts << 20
    }
}

fn plain_read(words: &[u64]) -> u64 {
    black_box(words).iter().fold(0, |sum: u64, word| sum.wrapping_add(*word))
}

fn bit_by_bit(words: &[u64]) -> u64 {
    let mut sum = Sum::default();
    let mut open = None;
    for page in 0..words.len() as u64 * 64 {
        let dirty = words[(page / 64) as usize] >> (page % 64) & 1 == 1;
        match open {
            None if dirty => open = Some(page),
            Some(start) if !dirty => {
                sum.add(start, page - start);
                open = None;
            }
            _ => {}
        }
    }
    if let Some(start) = open {
        sum.add(start, words.len() as u64 * 64 - start);
    }
    sum.value()
}

/// The positions of set bits, one at a time: the form that Cloud Hypervisor uses, written anew.
struct Positions<I> {
    words: I,
    word: u64,
    base: u64,
}

impl<I: Iterator<Item = u64>> Iterator for Positions<I> {
    type Item = u64;
    fn next(&mut self) -> Option<u64> {
        while self.word == 0 {
            self.word = self.words.next()?;
            self.base = self.base.wrapping_add(64);
        }
        let position = self.base + u64::from(self.word.trailing_zeros());
        self.word &= self.word - 1;
        Some(position)
    }
}

/// Positions put together to ranges, as an adaptor of iterators.
struct Coalesced<I> {
    positions: I,
    next: Option<u64>,
}

impl<I: Iterator<Item = u64>> Iterator for Coalesced<I> {
    type Item = PageRun;
    fn next(&mut self) -> Option<PageRun> {
        let start = self.next.take().or_else(|| self.positions.next())?;
        let mut end = start + 1;
        for position in self.positions.by_ref() {
            if position != end {
                self.next = Some(position);
                break;
            }
            end += 1;
        }
        Some(PageRun::new(start, end - start))
    }
}

fn iterator_form(words: &[u64]) -> impl Iterator<Item = PageRun> + '_ {
    let positions =
        Positions { words: words.iter().copied(), word: 0, base: 0u64.wrapping_sub(64) };
    Coalesced { positions, next: None }
}

/// Runs `walk` with a sum to add runs to, and times it.
fn summed(walk: impl FnOnce(&mut Sum)) -> (f64, u64) {
    timed(|| {
        let mut sum = Sum::default();
        walk(&mut sum);
        sum.value()
    })
}

pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    let patterns = [
        Pattern::Random(0.0),
        Pattern::Random(0.001),
        Pattern::Random(0.01),
        Pattern::Random(0.05),
        Pattern::Clustered(0.001),
        Pattern::Clustered(0.01),
        Pattern::Clustered(0.05),
    ];
    let mut scans = Figures::default();
    for pattern in patterns {
        scan(pattern, &mut scans, report);
    }
    scans.publish("scan", "Scan of 384 MiB of dirty bitmap, ms (× plain read)", report)?;
    let mut harvests = Figures::default();
    for pattern in [Pattern::Random(0.0), Pattern::Random(0.001), Pattern::Clustered(0.01)] {
        harvest(pattern, &mut harvests, report);
    }
    harvests.publish("harvest", "Harvest of 384 MiB of shared bitmap, ms (× plain read)", report)
}

/// One column for each pattern: milliseconds, and the ratio to the plain read.
#[derive(Default)]
struct Figures {
    contenders: Vec<String>,
    columns: Vec<(Pattern, Vec<(f64, f64)>)>,
}

impl Figures {
    fn add(&mut self, pattern: Pattern, rounds: &[&Rounds<'_>]) {
        let mut column = Vec::new();
        self.contenders.clear();
        for (i, rounds) in rounds.iter().enumerate() {
            // Contender 0 of all rounds is the plain read; one is enough.
            for (number, name) in rounds.names().enumerate().skip(usize::from(i > 0)) {
                column.push((rounds.seconds(number) * 1e3, rounds.ratio(number, 0)));
                self.contenders.push(name.to_owned());
            }
        }
        self.columns.push((pattern, column));
    }

    fn publish(&self, name: &str, title: &str, report: &mut Report) -> anyhow::Result<()> {
        let head: Vec<String> = std::iter::once("one thread".to_owned())
            .chain(self.columns.iter().map(|(pattern, _)| pattern.name()))
            .collect();
        let rows: Vec<Vec<String>> = self
            .contenders
            .iter()
            .enumerate()
            .map(|(number, contender)| {
                let cells = self.columns.iter().map(|(_, column)| {
                    let (ms, ratio) = column[number];
                    format!("{} ({})", short(ms), short(ratio))
                });
                std::iter::once(contender.clone()).chain(cells).collect()
            })
            .collect();
        markdown(title, &head, &rows);
        for (pattern, column) in &self.columns {
            let figures: serde_json::Map<String, serde_json::Value> = self
                .contenders
                .iter()
                .zip(column)
                .map(|(contender, (ms, ratio))| {
                    (contender.clone(), json!({ "ms": ms, "ratio": ratio }))
                })
                .collect();
            report.figure(&format!("{name}: {}", pattern.name()), figures);
        }
        Chart {
            title: title.replace(", ms (× plain read)", ", one thread"),
            axis: "milliseconds".to_owned(),
            series: self.contenders.clone(),
            groups: self
                .columns
                .iter()
                .map(|(pattern, column)| {
                    (pattern.name(), column.iter().map(|(ms, _)| *ms).collect())
                })
                .collect(),
        }
        .write(&format!("structures-{name}"))
    }
}

fn scan(pattern: Pattern, figures: &mut Figures, report: &mut Report) {
    let bitmap = &pattern.bitmap(PAGES);
    let mut rounds = Rounds::new();
    rounds.add("plain read of the buffer", || timed(|| plain_read(bitmap.words())));
    for path in CodePath::available().into_iter().rev() {
        rounds.add(format!("Godwit, {}", path.name()), move || {
            summed(|sum| bitmap.for_each_run_on(path, |run| sum.add(run.start.0, run.count.0)))
        });
    }
    rounds.add("Godwit, as an Iterator", || {
        summed(|sum| {
            for run in bitmap.runs() {
                sum.add(run.start.0, run.count.0);
            }
        })
    });
    let streamed = rounds.add("iterator form, streamed", || {
        summed(|sum| {
            for run in iterator_form(bitmap.words()) {
                sum.add(run.start.0, run.count.0);
            }
        })
    });
    let collected = rounds.add("iterator form, into a Vec", || {
        summed(|sum| {
            let runs: Vec<PageRun> = iterator_form(bitmap.words()).collect();
            runs.iter().for_each(|run| sum.add(run.start.0, run.count.0));
        })
    });
    rounds.run(ROUNDS, 1);
    let mut slow = Rounds::new();
    slow.add("plain read of the buffer", || timed(|| plain_read(bitmap.words())));
    slow.add("bit by bit", || timed(|| bit_by_bit(bitmap.words())));
    slow.run(SLOW_ROUNDS, 1);
    figures.add(pattern, &[&rounds, &slow]);

    // The fastest path is number 1.
    let limit = match pattern {
        Pattern::Random(0.0) => 1.15,
        Pattern::Random(0.001) => 2.2,
        Pattern::Random(0.01) => 6.0,
        Pattern::Random(_) => 15.0,
        Pattern::Clustered(_) => 1.25,
    };
    let name = pattern.name();
    report.target(format!("scan, {name}: × plain read"), rounds.ratio(1, 0), limit, Better::Lower);
    if matches!(pattern, Pattern::Random(share) if share >= 0.01) {
        let (streamed, collected) = (rounds.ratio(streamed, 1), rounds.ratio(collected, 1));
        report.target(
            format!("scan, {name}: times as fast as with a Vec"),
            collected,
            6.0,
            Better::Higher,
        );
        report.target(
            format!("scan, {name}: times as fast as streamed"),
            streamed,
            3.0,
            Better::Higher,
        );
    }
}

fn harvest(pattern: Pattern, figures: &mut Figures, report: &mut Report) {
    let plain = &pattern.bitmap(PAGES);
    let shared = &AtomicDirtyBitmap::new(PAGES);
    // All of its memory must have been written, as that of the plain one.
    shared.set(PageRun::new(0, PAGES.0));
    shared.harvest(|_| ());
    let unconditional: &Vec<AtomicU64> = &plain.words().iter().map(|_| AtomicU64::new(0)).collect();
    let mut rounds = Rounds::new();
    rounds.add("plain read of the buffer", || timed(|| plain_read(plain.words())));
    for path in CodePath::available().into_iter().rev() {
        rounds.add(format!("Godwit, fused, {}", path.name()), move || {
            shared.put_back(plain);
            summed(|sum| {
                let Ok(_) = shared.try_harvest_on(path, |run| {
                    sum.add(run.start.0, run.count.0);
                    Ok::<(), Infallible>(())
                });
            })
        });
    }
    rounds.add("swap every word into a Vec, then scan", || {
        for (word, bits) in unconditional.iter().zip(plain.words()) {
            word.store(*bits, Ordering::Relaxed);
        }
        summed(|sum| {
            let words: Vec<u64> =
                unconditional.iter().map(|word| word.fetch_and(0, Ordering::AcqRel)).collect();
            for run in iterator_form(&words) {
                sum.add(run.start.0, run.count.0);
            }
        })
    });
    rounds.run(ROUNDS, 1);
    figures.add(pattern, &[&rounds]);
    if pattern == Pattern::Random(0.0) {
        report.target(
            "harvest and scan, clean: × plain read",
            rounds.ratio(1, 0),
            2.2,
            Better::Lower,
        );
    }
}

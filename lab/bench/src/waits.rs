//! How long threads of another process wait for pages that are missing, by the kernel's account.
//!
//! A thread that accesses a page which a userfaultfd is to fill sleeps in the kernel's function
//! `handle_userfault` (fs/userfaultfd.c), whoever fills it. The kernel notes each time that a
//! thread leaves its processor, with the functions that it is in, and each time that it is back
//! (perf_event_open(2)). A wait is the time from the one to the other, so whoever fills the page is
//! asked nothing, and all are measured alike. Keeps one promise: a note that the kernel had no room
//! for is an error.

use std::fs::File;
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, ensure};
use godwit_units::PAGE_SIZE;

use crate::sys::{Mapping, PerfAttributes, end_perf_event, perf_event};

const PAGE: usize = PAGE_SIZE as usize;
/// For some 300,000 waits of a thread; a power of two.
const ROOM: usize = 64 << 20;
/// Where the kernel says how much it has written (`struct perf_event_mmap_page`).
const HEAD: usize = 1024;

const SOFTWARE: u32 = 1;
const CONTEXT_SWITCHES: u64 = 3;
const TIME: u64 = 1 << 2;
const CALL_CHAIN: u64 = 1 << 5;
/// Times are in all records; call chains end at the kernel's border; records tell of the way back.
const FLAGS: u64 = 1 << 18 | 1 << 22 | 1 << 26;

const LOST: u32 = 2;
const THROTTLED: u32 = 5;
const SAMPLE: u32 = 9;
const SWITCH: u32 = 14;
const SWITCH_OUT: u32 = 1 << 13;

/// One wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// When it began, by a clock of the kernel's that counts from anywhere.
    pub since: Duration,
    /// How long it took, until the thread ran again.
    pub length: Duration,
}

/// Waits of some threads, while they are noted.
#[derive(Debug)]
pub struct Waits {
    threads: Vec<(File, Mapping)>,
    /// Where the function is that a thread waits in.
    waiting: Range<u64>,
}

impl Waits {
    /// Begins to note those of `threads`, by their numbers.
    ///
    /// # Errors
    /// When the kernel does not let us, or does not tell where its functions are.
    pub fn of(threads: &[i32]) -> anyhow::Result<Self> {
        let symbols = std::fs::read_to_string("/proc/kallsyms").context("/proc/kallsyms")?;
        let waiting = function(&symbols, "handle_userfault").context(
            "the kernel does not tell where handle_userfault is: root is needed, and \
             kernel.kptr_restrict=0",
        )?;
        let attributes = PerfAttributes {
            kind: SOFTWARE,
            size: u32::try_from(size_of::<PerfAttributes>())?,
            config: CONTEXT_SWITCHES,
            sample_period: 1,
            sample_type: TIME | CALL_CHAIN,
            flags: FLAGS,
            ..PerfAttributes::default()
        };
        let noted = |tid: &i32| {
            let event = perf_event(&attributes, *tid)?;
            let notes = Mapping::new(&event, PAGE + ROOM)?;
            Ok((event, notes))
        };
        let threads = threads.iter().map(noted).collect::<std::io::Result<_>>().context(
            "the kernel does not let us note when threads wait (perf_event_open): root is needed",
        )?;
        Ok(Self { threads, waiting })
    }

    /// All waits until now, the shortest first.
    ///
    /// # Errors
    /// When there was no room for all of them.
    pub fn end(self) -> anyhow::Result<Vec<Wait>> {
        let mut all = Vec::new();
        for (event, notes) in &self.threads {
            end_perf_event(event)?;
            let written = usize::try_from(notes.load(HEAD))?;
            ensure!(written <= ROOM, "there was no room for all waits of a thread");
            let words = (PAGE..PAGE + written).step_by(8).map(|at| notes.load(at));
            all.extend(waits_in(&words.collect::<Vec<_>>(), &self.waiting)?);
        }
        all.sort_unstable_by_key(|wait: &Wait| wait.length);
        Ok(all)
    }
}

/// Where the kernel's function `name` is: up to the next one.
fn function(symbols: &str, name: &str) -> Option<Range<u64>> {
    let all = symbols.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        Some((address, words.nth(1)?))
    });
    let (start, _) = all.clone().find(|(address, other)| *other == name && *address > 0)?;
    let next = all.map(|(address, _)| address).filter(|address| *address > start).min()?;
    Some(start..next)
}

/// The waits in the records `words` of one thread.
fn waits_in(words: &[u64], waiting: &Range<u64>) -> anyhow::Result<Vec<Wait>> {
    let (mut waits, mut since, mut rest) = (Vec::new(), None, words);
    while let Some((header, _)) = rest.split_first() {
        // Type: 32 bits; misc: 16; size in bytes: 16.
        let (kind, misc, size) = (*header as u32, (*header >> 32) as u32 & 0xffff, header >> 48);
        let len = usize::try_from(size / 8)?;
        let record = rest.get(1..len).context("a record of the kernel's is cut off")?;
        rest = &rest[len..];
        match (kind, record) {
            // Time, number of functions, functions.
            (SAMPLE, [time, _, chain @ ..]) => {
                since = chain.iter().any(|at| waiting.contains(at)).then_some(*time);
            }
            (SWITCH, [time]) if misc & SWITCH_OUT == 0 => {
                let wait = |since| {
                    let length = Duration::from_nanos(time.saturating_sub(since));
                    Wait { since: Duration::from_nanos(since), length }
                };
                waits.extend(since.take().map(wait));
            }
            (LOST | THROTTLED, _) => {
                anyhow::bail!("the kernel has not noted all waits of a thread")
            }
            _ => {}
        }
    }
    Ok(waits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u32, misc: u32, content: &[u64]) -> Vec<u64> {
        let size = 8 * (content.len() as u64 + 1);
        let header = u64::from(kind) | u64::from(misc) << 32 | size << 48;
        [&[header], content].concat()
    }

    #[test]
    fn a_wait_lasts_from_leaving_the_processor_to_being_back() {
        let out = |time, function| {
            let sample = record(SAMPLE, 0, &[time, 2, u64::MAX - 127, function]);
            [sample, record(SWITCH, SWITCH_OUT, &[time + 1])].concat()
        };
        let back = |time| record(SWITCH, 0, &[time]);
        let words = [
            [out(1000, 0x150), back(4000)].concat(),
            // For something else.
            [out(5000, 0x300), back(9000)].concat(),
            [out(10_000, 0x1ff), back(10_500)].concat(),
            // Not back yet.
            out(11_000, 0x100),
        ];
        let waits = waits_in(&words.concat(), &(0x100..0x200)).unwrap();
        let wait = |since, length| {
            let [since, length] = [since, length].map(Duration::from_nanos);
            Wait { since, length }
        };
        assert_eq!(waits, [wait(1000, 3000), wait(10_000, 500)]);
    }

    #[test]
    fn what_was_lost_is_told() {
        assert!(waits_in(&record(LOST, 0, &[1, 5, 1000]), &(0..1)).is_err());
    }

    #[test]
    fn a_function_ends_where_the_next_one_begins() {
        let symbols = "ffff20 T later\nffff10 T handle\nffff1a t inner [module]\n";
        assert_eq!(function(symbols, "handle"), Some(0xff_ff10..0xff_ff1a));
        assert_eq!(function("0 T handle\n0 t other\n", "handle"), None);
    }
}

//! Disks beside memory: who gets the link, and how much the guest may write.
//!
//! Memory is quick and becomes dirty as quickly; a disk is slow and large. What is sent of memory while a disk
//! takes its full pass is dirty again long before the end. So memory gets nothing then, almost nothing when the
//! incremental disk rounds begin, and more as the dirty data of disks falls.

use std::time::Duration;

use godwit_units::Rate;

use crate::observe::DiskRound;
use crate::settings::DiskLimit;

/// A round that leaves more than this share of what the one before left has not clearly shrunk.
const CLEARLY: f64 = 0.9;
/// A guest that makes its disks dirty at less than this share of the rate at which they are sent does not hold up anybody: what remains is then
/// as long as the round was, which memory has prolonged.
const HARMLESS: f64 = 0.25;
/// Each further round that does not shrink lowers the limit to this share.
const LOWER: f64 = 0.7;
/// A round that waited for storage for more than this share of its time is held up by storage, not by the link.
const WAITED: f64 = 0.5;
/// Where storage is slow, writes are limited so far that a round leaves this share of the one before.
const HALVED: f64 = 0.5;
/// Of the best rate of disks, so much is kept each round, and so much of it is planned with.
const FORGET: f64 = 0.98;
const CAREFUL: f64 = 0.95;
/// No limit is lower.
const LEAST: f64 = 1024.0 * 1024.0;
/// All parts of the link's time.
pub(crate) const ALL: u16 = 1024;

#[derive(Clone, Debug, Default)]
pub(crate) struct Share {
    first: Option<f64>,
    previous: Option<f64>,
    stuck: u32,
    /// What is dirty is so since the round was long, not since the guest writes much.
    harmless: bool,
    limit: Option<Rate>,
    /// At this limit rounds halve: if they do not shrink, it is not for the guest's writes.
    halving: bool,
    /// The best rate at which disks were sent, slowly forgotten: most rounds send memory as well.
    rate: f64,
}

impl Share {
    /// How long disks would take in stop-and-copy, with what they get dirty until then; `None`: unknown. Counted in
    /// full beside memory, although they may overlap.
    pub(crate) fn transfer(&mut self, disk: &DiskRound, time: Duration, lead: Duration) -> Option<Duration> {
        let seconds = time.as_secs_f64();
        if disk.sent.0 >= 1 << 20 {
            self.rate = disk.sent.per(seconds).bytes_per_second().max(FORGET * self.rate);
        }
        let growth = if seconds > 0.0 { lead.as_secs_f64() / seconds } else { 0.0 };
        let left = disk.remaining.0 as f64 * (1.0 + growth.min(100.0));
        if left <= 0.0 {
            return Some(Duration::ZERO);
        }
        Duration::try_from_secs_f64(left / (CAREFUL * self.rate)).ok()
    }

    /// What memory gets of the link, and the limit of disk writes, after a round of `seconds`. `enough` are the bytes
    /// that fit into the downtime.
    pub(crate) fn round(
        &mut self,
        disk: &DiskRound,
        seconds: f64,
        enough: f64,
        allowed: DiskLimit,
    ) -> (u16, Option<Rate>) {
        if disk.full_pass {
            return (0, None);
        }
        let remaining = disk.remaining.0 as f64;
        let first = *self.first.get_or_insert(remaining.max(1.0));
        let shrunk = self.previous.is_none_or(|before| remaining <= CLEARLY * before);
        let little = remaining <= enough / 2.0;
        self.harmless = remaining < HARMLESS * self.rate * seconds;
        self.stuck = if shrunk || little { 0 } else { self.stuck + 1 };
        self.previous = Some(remaining);
        let share = if little {
            ALL
        } else {
            // Disks that go round in balance must not keep memory waiting for ever.
            let falling = f64::from(ALL) * (1.0 - remaining / first);
            let waiting = f64::from(1u32 << self.stuck.min(10));
            falling.max(waiting).clamp(1.0, f64::from(ALL)) as u16
        };
        self.limit = match allowed {
            DiskLimit::Off => None,
            DiskLimit::Fixed(rate) => Some(rate.rate()),
            DiskLimit::Auto => self.adapted(disk, seconds),
        };
        (share, self.limit)
    }

    /// Whether a lower limit of disk writes could still help.
    pub(crate) fn may_lower(&self, allowed: DiskLimit) -> bool {
        let least = self.limit.is_some_and(|limit| limit.bytes_per_second() <= LEAST);
        self.stuck > 0 && !self.harmless && allowed == DiskLimit::Auto && !least && !self.halving
    }

    /// The limit after a round of `seconds`: a step lower when the round did not shrink. Where
    /// storage is what is slow, the guest feels that already: no lower than makes rounds halve, and
    /// a step higher again when that is more.
    fn adapted(&mut self, disk: &DiskRound, seconds: f64) -> Option<Rate> {
        let slow_storage = disk.storage.as_secs_f64() > WAITED * seconds;
        let halves = slow_storage.then(|| halving_limit(disk, seconds)).flatten();
        let limit = self.limit.map(Rate::bytes_per_second);
        self.halving = halves.zip(limit).is_some_and(|(halves, limit)| limit <= halves);
        if self.stuck > 0 && !self.harmless && !self.halving {
            let lower = self.lower(disk, seconds).max(halves.unwrap_or(LEAST));
            return Some(Rate::from_bytes_per_second(lower.max(LEAST)));
        }
        match (limit, halves) {
            (Some(limit), Some(halves)) if halves > limit => {
                Some(Rate::from_bytes_per_second((limit / LOWER).min(halves)))
            }
            _ => self.limit,
        }
    }

    /// A step below what the guest wrote, or below what became dirty where that is not seen; but
    /// never above the limit in force.
    fn lower(&self, disk: &DiskRound, seconds: f64) -> f64 {
        let written = if disk.written.0 > 0 { disk.written } else { disk.remaining };
        let written = written.per(seconds).bytes_per_second();
        LOWER * self.limit.map_or(written, |limit| limit.bytes_per_second().min(written.max(LEAST)))
    }

    /// The share in force before the first round has ended.
    pub(crate) fn at_first(disks: bool) -> u16 {
        if disks { 0 } else { ALL }
    }
}

/// The limit at which the guest makes dirty the share [`HALVED`] of what was sent in the same time: what it
/// writes makes more dirty than its own length, as blocks are sent whole. `None` where writes are not seen.
fn halving_limit(disk: &DiskRound, seconds: f64) -> Option<f64> {
    if disk.written.0 == 0 || disk.remaining.0 == 0 || disk.sent.0 == 0 {
        return None;
    }
    let blown_up = disk.remaining.0 as f64 / disk.written.0 as f64;
    Some(HALVED * disk.sent.per(seconds).bytes_per_second() / blown_up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::ByteCount;

    fn disk(full_pass: bool, remaining: u64) -> DiskRound {
        DiskRound {
            full_pass,
            remaining: ByteCount(remaining),
            written: ByteCount(100 << 20),
            ..DiskRound::default()
        }
    }

    #[test]
    fn memory_waits_for_the_full_pass_and_then_gets_more_and_more() {
        let mut share = Share::default();
        let shares: Vec<u16> = [(true, 9000), (false, 4096), (false, 2048), (false, 1024), (false, 10)]
            .map(|(full, remaining)| share.round(&disk(full, remaining), 1.0, 100.0, DiskLimit::Off).0)
            .into();
        assert_eq!(shares, [0, 1, 512, 768, 1024]);
    }

    /// A limit that goes on falling would end at nothing, and hold a guest's disks still.
    #[test]
    fn no_limit_is_below_a_mebibyte_a_second() {
        let mut share = Share::default();
        let mut limits = || share.round(&disk(false, 1 << 30), 1.0, 0.0, DiskLimit::Auto).1;
        let last = (0..100).filter_map(|_| limits()).last().unwrap();
        assert_eq!(last.bytes_per_second(), 1_048_576.0);
    }

    #[test]
    fn writes_are_limited_further_with_each_round_that_does_not_shrink() {
        let mut share = Share::default();
        let mut limits = |remaining| share.round(&disk(false, remaining), 1.0, 0.0, DiskLimit::Auto).1;
        assert_eq!(limits(1000), None);
        assert_eq!(limits(990).unwrap().to_string(), "70MiB/s");
        assert_eq!(limits(990).unwrap().to_string(), "49MiB/s");
        assert_eq!(limits(500).unwrap().to_string(), "49MiB/s");
        assert_eq!(Share::at_first(true), 0);
    }

    #[test]
    fn a_limit_is_lowered_from_what_the_guest_writes_under_it() {
        let mut share = Share::default();
        let mut limits = |written: u64| {
            let disk = DiskRound { written: ByteCount(written << 20), ..disk(false, 1000 << 20) };
            share.round(&disk, 1.0, 0.0, DiskLimit::Auto).1.map(|limit| limit.to_string())
        };
        assert_eq!(limits(100), None);
        assert_eq!(limits(100).unwrap(), "70MiB/s");
        assert_eq!(limits(20).unwrap(), "14MiB/s", "49 MiB/s would not have been felt");
    }

    #[test]
    fn where_storage_is_slow_the_limit_is_loosened_as_far_as_rounds_still_halve() {
        let mut share = Share::default();
        // 100 MiB/s are written, which make twice as much dirty; storage is read at `sent` MiB/s.
        let mut limits = |sent: u64, written: u64, waited: u64| {
            let disk = DiskRound {
                full_pass: false,
                sent: ByteCount(sent << 20),
                remaining: ByteCount((2 * written) << 20),
                written: ByteCount(written << 20),
                storage: Duration::from_millis(waited),
            };
            share.transfer(&disk, Duration::from_secs(1), Duration::ZERO);
            let (_, limit) = share.round(&disk, 1.0, 0.0, DiskLimit::Auto);
            limit.map(|limit| (limit.bytes_per_second() / 1_048_576.0).round())
        };
        assert_eq!(limits(200, 100, 900), None, "the first incremental round");
        assert_eq!(limits(200, 100, 900), Some(70.0));
        // At 50 MiB/s of writes half of the 200 MiB/s would become dirty: no lower than that.
        assert_eq!(limits(200, 98, 900), Some(50.0));
        // Storage has become quicker: 20 MiB/s more would halve as well.
        assert_eq!(limits(280, 50, 900), Some(70.0));
        // Held up by the link, it is not loosened.
        assert_eq!(limits(400, 40, 100), Some(70.0));
    }

    #[test]
    fn a_guest_that_writes_little_is_not_limited_because_memory_takes_its_time() {
        let mut share = Share::default();
        let second = Duration::from_secs(1);
        // 100 MiB in a second is what the link carries.
        let sent = DiskRound { sent: ByteCount(100 << 20), ..disk(true, 0) };
        share.transfer(&sent, second, Duration::ZERO);
        let mut limit =
            |remaining: u64| share.round(&disk(false, remaining << 20), 2.0, 0.0, DiskLimit::Auto).1;
        // 10 MiB/s are dirtied: not less from round to round, and no reason to worry.
        assert_eq!([limit(20), limit(20), limit(21)], [None; 3]);
        // 40 MiB/s are.
        assert!(limit(80).is_some());
    }

    #[test]
    fn limits_may_be_forbidden_or_given() {
        let rate = Rate::from_bytes_per_second(1e6);
        for (allowed, limit) in [(DiskLimit::Off, None), (DiskLimit::Fixed(rate.into()), Some(rate))] {
            let mut share = Share::default();
            share.round(&disk(false, 1000), 1.0, 0.0, allowed);
            assert_eq!(share.round(&disk(false, 1000), 1.0, 0.0, allowed).1, limit);
        }
    }
}

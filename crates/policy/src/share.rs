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
            DiskLimit::Auto if self.stuck > 0 && !self.harmless => Some(self.lower(disk, seconds)),
            DiskLimit::Auto => self.limit,
        };
        (share, self.limit)
    }

    /// Whether a lower limit of disk writes could still help.
    pub(crate) fn may_lower(&self, allowed: DiskLimit) -> bool {
        let least = self.limit.is_some_and(|limit| limit.bytes_per_second() <= LEAST);
        self.stuck > 0 && !self.harmless && allowed == DiskLimit::Auto && !least
    }

    fn lower(&self, disk: &DiskRound, seconds: f64) -> Rate {
        let next = match self.limit {
            Some(limit) => limit.bytes_per_second() * LOWER,
            // From what the guest wrote, or from what became dirty where that is not seen.
            None => {
                let written = if disk.written.0 > 0 { disk.written } else { disk.remaining };
                written.per(seconds).bytes_per_second() * LOWER
            }
        };
        Rate::from_bytes_per_second(next.max(LEAST))
    }

    /// The share in force before the first round has ended.
    pub(crate) fn at_first(disks: bool) -> u16 {
        if disks { 0 } else { ALL }
    }
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

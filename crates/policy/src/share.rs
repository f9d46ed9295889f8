//! Disks beside memory: who gets the link, and how much the guest may write.
//!
//! Memory is quick and becomes dirty as quickly; a disk is slow and large. What is sent of memory
//! while a disk takes its full pass is dirty again long before the end. So memory gets nothing
//! then, almost nothing when the incremental disk rounds begin, and more as the dirty data of disks
//! falls.

use std::time::Duration;

use godwit_units::Rate;

use crate::observe::DiskStatistics;
use crate::settings::DiskLimit;

/// A round that leaves more than this share of what the one before left has not clearly shrunk.
const CLEARLY: f64 = 0.9;
/// A guest that makes its disks dirty at less than this share of the rate at which they are sent
/// does not hold up anybody: what remains is then as long as the round was, which memory has
/// prolonged.
const HARMLESS: f64 = 0.25;
/// Each further round that does not shrink lowers the limit to this share.
const LOWER: f64 = 0.7;
/// A round that waited for storage for more than this share of its time is held up by storage, not
/// by the link.
const WAITED: f64 = 0.5;
/// Where storage is slow, writes are limited so far that a round leaves this share of the one
/// before.
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
    /// Memory has less than its part of the link, for the disks.
    waits: bool,
    /// What is dirty is so since the round was long, not since the guest writes much.
    harmless: bool,
    limit: Option<Rate>,
    /// At this limit rounds halve: if they do not shrink, it is not for the guest's writes.
    halving: bool,
    /// The best rate at which disks were sent, slowly forgotten: most rounds send memory as well.
    rate: f64,
}

impl Share {
    /// How long disks would take in stop-and-copy, with what they get dirty until then; `None`:
    /// unknown. Counted in full beside memory, although they may overlap.
    pub(crate) fn transfer(
        &mut self,
        disk: &DiskStatistics,
        time: Duration,
        lead: Duration,
    ) -> Option<Duration> {
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

    /// What memory gets of the link, and the limit of disk writes, after a round of `seconds`.
    /// `enough` are the bytes that fit into the downtime.
    pub(crate) fn round(
        &mut self,
        disk: &DiskStatistics,
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
        self.waits = share < ALL;
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

    /// Whether disks have memory wait at the lowest limit there is: the guest is not slowed
    /// meanwhile, and nothing else is left to be done about its writes.
    pub(crate) fn is_spent(&self, allowed: DiskLimit) -> bool {
        let least = self.limit.is_some_and(|limit| limit.bytes_per_second() <= LEAST);
        self.waits && least && allowed == DiskLimit::Auto
    }

    /// The limit after a round of `seconds`: a step lower when the round did not shrink. Where
    /// storage is what is slow, the guest feels that already: no lower than makes rounds halve, and
    /// a step higher again when that is more.
    fn adapted(&mut self, disk: &DiskStatistics, seconds: f64) -> Option<Rate> {
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
    fn lower(&self, disk: &DiskStatistics, seconds: f64) -> f64 {
        let written = if disk.written.0 > 0 { disk.written } else { disk.remaining };
        let written = written.per(seconds).bytes_per_second();
        LOWER * self.limit.map_or(written, |limit| limit.bytes_per_second().min(written.max(LEAST)))
    }

    /// The share in force before the first round has ended.
    pub(crate) fn at_first(disks: bool) -> u16 {
        if disks { 0 } else { ALL }
    }
}

/// The limit at which the guest makes dirty the share [`HALVED`] of what was sent in the same time:
/// what it writes makes more dirty than its own length, as blocks are sent whole. `None` where
/// writes are not seen.
fn halving_limit(disk: &DiskStatistics, seconds: f64) -> Option<f64> {
    if disk.written.0 == 0 || disk.remaining.0 == 0 || disk.sent.0 == 0 {
        return None;
    }
    let blown_up = disk.remaining.0 as f64 / disk.written.0 as f64;
    Some(HALVED * disk.sent.per(seconds).bytes_per_second() / blown_up)
}

#[cfg(test)]
mod tests;

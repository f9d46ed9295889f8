//! The disks that move along, as the main thread has them: the rounds' passes, what the guest
//! writes and may write to them, and the counts. Their channels are lanes.
//!
//! Invariant: a pass that was cut short is finished before another one begins.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use godwit_disk::Disk;
use godwit_fingerprints::Key;
use godwit_units::{ByteCount, PageCount, Rate};
use godwit_wire::DiskOffer;

use super::disk::{DiskChannel, DiskCounters, DiskOrder, SentDisks, left_of_pass, segments};
use super::disk_sent::DiskSent;
use super::frame_sender::DiskStatistics;
use super::lanes::Lanes;
use super::segment_table::SegmentTable;
use super::session::Session;
use super::slips::Slips;
use crate::EngineError;
use crate::address::Stream;
use crate::disk_prints::Held;
use crate::report::{DiskMeasures, DiskProgress, RoundMeasures};
use crate::vm::{DiskVm, SourceVm, VmError};

/// How often the machine looks after its disks within rounds, and is asked how much is dirty. QEMU
/// lets all disk I/O end for a moment each time that a bitmap is made or taken away, so the guest
/// pays for looking more often.
const LOOK: Duration = Duration::from_secs(1);

/// A disk that is written at this share of its limit is held by it, and is taken to want so many
/// times as much.
const HELD: f64 = 0.9;
const WANTS_MORE: f64 = 1.5;
/// No disk is limited to less, in bytes a second, where the limit of all leaves so much to each.
const LEAST_LIMIT: f64 = 1024.0 * 1024.0;

/// One disk.
struct Moving {
    disk: Disk,
    measures: DiskMeasures,
    counters: Arc<DiskCounters>,
    /// What the pass has to do, where that is known beforehand; `None` when no pass is under way.
    pass: Option<Option<ByteCount>>,
    /// The last pass was cut short of so much.
    left: Option<ByteCount>,
    /// Written since the last round began, as last seen.
    dirty: ByteCount,
    /// What the guest had written to it in all when the round began.
    written_before: Option<ByteCount>,
    /// What the guest wrote to it in the last round.
    written: ByteCount,
    /// The limit of the guest's writes in force.
    limit: Option<Rate>,
    /// How long its channel waited for storage in this round.
    storage: Duration,
}

/// How what is sent is remembered: the key of its fingerprints, when things began to be remembered
/// for an audit, and where all of it is put behind the last round.
pub(super) struct Remember {
    pub(super) key: Key,
    pub(super) audit: Option<Instant>,
    pub(super) told: SentDisks,
}

/// All of them.
#[derive(Default)]
pub(super) struct Disks {
    list: Vec<Moving>,
    /// Whether all of it was passed over once.
    full_pass_over: bool,
    next_look: Option<Instant>,
    /// Disks whose pass was cut short and is being finished.
    unfinished: usize,
    /// Disks whose pass of this round is not over.
    under_way: usize,
    /// The device state is released when all disks are read.
    release_waits: bool,
    /// The limit in force of the guest's writes to all of them.
    limit: Option<Rate>,
    /// How long the round was in which it was last seen what the guest writes to them.
    round_time: Duration,
}

impl Disks {
    pub(super) fn new(disks: Vec<Disk>) -> Self {
        let moving = |disk: Disk| Moving {
            measures: DiskMeasures {
                name: disk.name.clone(),
                size: disk.size,
                ..DiskMeasures::default()
            },
            dirty: ByteCount::ZERO,
            disk,
            counters: Arc::default(),
            pass: None,
            left: None,
            written_before: None,
            written: ByteCount::ZERO,
            limit: None,
            storage: Duration::ZERO,
        };
        Self { list: disks.into_iter().map(moving).collect(), ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// What is offered to the destination; `granularity` may not be known yet.
    pub(super) fn offers(&self, granularity: &[ByteCount]) -> Vec<DiskOffer> {
        let granularity = granularity.iter().copied().chain(std::iter::repeat(ByteCount::ZERO));
        let offer = |(moving, granularity): (&Moving, ByteCount)| DiskOffer {
            name: moving.disk.name.clone(),
            size: moving.disk.size,
            granularity,
        };
        self.list.iter().zip(granularity).map(offer).collect()
    }

    /// Their names, and bytes.
    pub(super) fn named(&self) -> Vec<(String, u64)> {
        let named = |moving: &Moving| (moving.disk.name.clone(), moving.disk.size.0);
        self.list.iter().map(named).collect()
    }

    /// Starts tracking them.
    pub(super) fn track(&mut self, vm: &mut dyn SourceVm) -> Result<(), EngineError> {
        if self.is_empty() {
            return Ok(());
        }
        if let Some(vm) = vm.moving_disks() {
            vm.start_disk_tracking().map_err(EngineError::Vm)?;
            for (moving, granularity) in self.list.iter_mut().zip(vm.disk_granularity()) {
                moving.measures.granularity = granularity;
            }
            self.note_writes(vm);
        }
        Ok(())
    }

    /// How many pages each has.
    pub(super) fn pages(&self) -> Vec<PageCount> {
        self.list.iter().map(|moving| moving.disk.pages()).collect()
    }

    /// Starts a channel for each of them over `streams`; frames number them behind so many RAM
    /// `blocks`. What the destination holds of each stands beside, where that is known; `sent` is
    /// how what is sent is remembered, if that is to be compared.
    pub(super) fn connect(
        &self,
        blocks: usize,
        lanes: &mut Lanes,
        (streams, held): (Vec<(Stream, Stream)>, Vec<Held>),
        (table, session): (&Arc<SegmentTable>, &Session),
        sent: Option<&Remember>,
    ) -> Result<(), EngineError> {
        let mut held = held.into_iter();
        for (index, (moving, stream)) in self.list.iter().zip(streams).enumerate() {
            let held = held.next();
            let link_share = Arc::clone(lanes.link_share());
            let pages = moving.disk.pages();
            let segments = segments(pages);
            let sent = sent.map(|Remember { key, audit, told }| {
                (DiskSent::new(blocks + index, pages, *key, *audit), Arc::clone(told))
            });
            lanes.add_disk(stream, segments, session.for_disk(), |sender| {
                let (table, counters) = (Arc::clone(table), Arc::clone(&moving.counters));
                DiskChannel::new(
                    (index, blocks + index, segments),
                    sender,
                    table,
                    link_share,
                    counters,
                    Slips::new(session.made_up()),
                )
                .knowing(held)
                .remembering(sent)
            })?;
        }
        Ok(())
    }

    /// Has the channels make their passes of a round, behind the rest of those that were cut short;
    /// the last round's are not cut short.
    pub(super) fn begin_round(
        &mut self,
        vm: &mut dyn SourceVm,
        lanes: &Lanes,
        round: u32,
        last: bool,
    ) -> Result<(), EngineError> {
        (self.under_way, self.unfinished) = (self.list.len(), 0);
        for (index, moving) in self.list.iter_mut().enumerate() {
            if moving.left.take().is_some() {
                lanes.order_disk(index, DiskOrder::Finish { round });
                self.unfinished += 1;
            }
        }
        if self.unfinished == 0 { self.begin_passes(vm, lanes, round, last) } else { Ok(()) }
    }

    fn begin_passes(
        &mut self,
        vm: &mut dyn SourceVm,
        lanes: &Lanes,
        round: u32,
        last: bool,
    ) -> Result<(), EngineError> {
        let Some(vm) = vm.moving_disks() else { return Ok(()) };
        let passes = vm.begin_disk_round().map_err(EngineError::Vm)?;
        // As many passes as disks, or the adapter is mistaken.
        if passes.len() != self.list.len() {
            return Err(EngineError::Panicked("main"));
        }
        for (index, (moving, pass)) in self.list.iter_mut().zip(passes).enumerate() {
            moving.pass = Some(pass.dirty());
            moving.dirty = ByteCount::ZERO;
            lanes.order_disk(index, DiskOrder::Pass { round, last, pass });
        }
        Ok(())
    }

    /// The connections are lost, and the channels have ended; `done` is what that of each disk did
    /// of its pass, and whether that is to be finished before another one begins.
    pub(super) fn cut_off(&mut self, done: impl Iterator<Item = (DiskStatistics, bool)>) {
        (self.under_way, self.unfinished, self.release_waits) = (0, 0, false);
        for (moving, (done, unfinished)) in self.list.iter_mut().zip(done) {
            let pass = moving.pass.take();
            if pass.is_some() {
                moving.storage += done.storage;
                moving.measures.sent += done.statistics.sent;
                moving.measures.data += done.statistics.data;
                moving.measures.zero += done.statistics.zero;
            }
            let dirty = pass.flatten();
            moving.left =
                unfinished.then(|| left_of_pass(moving.disk.size, dirty, &moving.counters));
        }
    }

    /// Disks whose pass of this round is not over.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// The device state is released when all disks are read, if any is not.
    pub(super) fn release_when_read(&mut self) -> bool {
        self.release_waits = self.under_way > 0;
        self.release_waits
    }

    /// The channel of disk `index` has made its pass, or finished one that was cut short.
    pub(super) fn passed(
        &mut self,
        vm: &mut dyn SourceVm,
        lanes: &Lanes,
        (index, round, last): (usize, u32, bool),
        statistics: &DiskStatistics,
    ) -> Result<(), EngineError> {
        if let Some(moving) = self.list.get_mut(index) {
            let dirty = moving.pass.take().flatten();
            moving.left =
                statistics.cut.then(|| left_of_pass(moving.disk.size, dirty, &moving.counters));
            moving.storage += statistics.storage;
            moving.measures.sent += statistics.statistics.sent;
            moving.measures.data += statistics.statistics.data;
            moving.measures.zero += statistics.statistics.zero;
        }
        if statistics.goes_on {
            self.unfinished -= 1;
            return if self.unfinished == 0 {
                self.begin_passes(vm, lanes, round, last)
            } else {
                Ok(())
            };
        }
        self.under_way -= 1;
        if self.under_way == 0 && std::mem::take(&mut self.release_waits) {
            vm.release_state().map_err(EngineError::Vm)?;
        }
        Ok(())
    }

    /// The round is over: what remains, whether a first pass was cut short, and what the guest
    /// wrote in it.
    pub(super) fn end_round(
        &mut self,
        vm: &mut dyn DiskVm,
        round: &mut RoundMeasures,
    ) -> Result<godwit_policy::DiskStatistics, VmError> {
        self.look(vm)?;
        self.round_time = round.time;
        let full_pass =
            !self.full_pass_over && self.list.iter().any(|moving| moving.left.is_some());
        self.full_pass_over = !full_pass;
        self.note_writes(vm);
        let written = self.list.iter().map(|moving| moving.written).sum();
        let storage = self.list.iter_mut().map(|moving| std::mem::take(&mut moving.storage));
        let storage = storage.max().unwrap_or_default();
        let remaining =
            self.list.iter().map(|moving| moving.dirty + moving.left.unwrap_or_default()).sum();
        (round.disk_remaining, round.disk_written) = (remaining, written);
        Ok(godwit_policy::DiskStatistics {
            full_pass,
            sent: round.disk_sent,
            remaining,
            written,
            storage,
        })
    }

    /// A round begins: what the guest wrote in the one before, to each disk.
    fn note_writes(&mut self, vm: &mut dyn DiskVm) {
        let now = vm.disk_writes().unwrap_or_default();
        for (index, moving) in self.list.iter_mut().enumerate() {
            let now = now.get(index).copied();
            let written =
                now.zip(moving.written_before).map(|(now, then)| now.saturating_sub(then));
            moving.written = written.unwrap_or_default();
            moving.written_before = now;
        }
    }

    /// Limits the guest's writes to all of them together: by what it wrote to each of them lately,
    /// so also anew when the limit of all stays what it was.
    pub(super) fn limit_writes(
        &mut self,
        vm: &mut dyn SourceVm,
        limit: Option<Rate>,
    ) -> Result<(), VmError> {
        if let Some(limits) = self.divide(limit, self.round_time) {
            vm.moving_disks().map_or(Ok(()), |vm| vm.limit_disks(&limits))?;
            self.limit = limit;
        }
        Ok(())
    }

    /// The limit in force of the guest's writes to all of them.
    pub(super) fn limit(&self) -> Option<Rate> {
        self.limit
    }

    /// Divides `limit`, which is for the writes to all disks together, among them by what was
    /// written to each in the last round of `time`. Returns the limits where any of them changes.
    fn divide(&mut self, limit: Option<Rate>, time: Duration) -> Option<Vec<Rate>> {
        let limits = match limit {
            None => vec![None; self.list.len()],
            Some(limit) => {
                let written: Vec<(Rate, Option<Rate>)> = self
                    .list
                    .iter()
                    .map(|moving| (moving.written.per(time.as_secs_f64()), moving.limit))
                    .collect();
                divided(limit, &written).into_iter().map(Some).collect()
            }
        };
        let changed = self.list.iter().zip(&limits).any(|(moving, limit)| moving.limit != *limit);
        for (moving, limit) in self.list.iter_mut().zip(&limits) {
            moving.limit = *limit;
        }
        changed.then(|| limits.into_iter().flatten().collect())
    }

    /// Within a round, now and then: lets the machine look after its disks, and looks what is
    /// dirty.
    pub(super) fn tick(&mut self, vm: &mut dyn DiskVm) -> Result<(), VmError> {
        let now = Instant::now();
        if self.is_empty() || self.next_look.is_some_and(|next| now < next) {
            return Ok(());
        }
        self.next_look = Some(now + LOOK);
        vm.disk_progress()?;
        self.look(vm)
    }

    fn look(&mut self, vm: &mut dyn DiskVm) -> Result<(), VmError> {
        for (moving, dirty) in self.list.iter_mut().zip(vm.dirty_disks()?) {
            moving.dirty = dirty;
        }
        Ok(())
    }

    /// The disks as they are now.
    pub(super) fn progress(&self) -> Vec<DiskProgress> {
        let look = |moving: &Moving| {
            let pass = match moving.pass {
                Some(dirty) => left_of_pass(moving.disk.size, dirty, &moving.counters),
                None => moving.left.unwrap_or_default(),
            };
            DiskProgress {
                name: moving.disk.name.clone(),
                size: moving.disk.size,
                sent: ByteCount(moving.counters.sent.load(Ordering::Relaxed)),
                remaining: pass + moving.dirty,
                full_pass: !self.full_pass_over,
            }
        };
        self.list.iter().map(look).collect()
    }

    /// The destination holds what was sent of them.
    pub(super) fn verified(&mut self) {
        self.list.iter_mut().for_each(|moving| moving.measures.verified = true);
    }

    /// What is measured in the end.
    pub(super) fn measures(&self) -> Vec<DiskMeasures> {
        self.list.iter().map(|moving| moving.measures.clone()).collect()
    }
}

/// `limit` for each disk, by what the guest wrote to it and under which limit. One that was held to
/// its limit may want more. One that was hardly written keeps a little, so that its next write does
/// not wait for long.
fn divided(limit: Rate, written: &[(Rate, Option<Rate>)]) -> Vec<Rate> {
    let limit = limit.bytes_per_second();
    let wants = |(written, own): &(Rate, Option<Rate>)| {
        let written = written.bytes_per_second();
        let held = own.is_some_and(|own| written >= HELD * own.bytes_per_second());
        if held { WANTS_MORE * written } else { written }
    };
    let wanted: Vec<f64> = written.iter().map(wants).collect();
    let all: f64 = wanted.iter().sum();
    let equal = limit / written.len().max(1) as f64;
    let least = LEAST_LIMIT.min(equal);
    let part = |wanted: &f64| if all > 0.0 { (limit * wanted / all).max(least) } else { equal };
    wanted.iter().map(part).map(Rate::from_bytes_per_second).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = 1024.0 * 1024.0;

    /// In MiB a second.
    fn divide(limit: f64, written: &[(f64, Option<f64>)]) -> Vec<f64> {
        let rate = |mib: f64| Rate::from_bytes_per_second(mib * MIB);
        let written: Vec<_> =
            written.iter().map(|(w, limit)| (rate(*w), limit.map(rate))).collect();
        divided(rate(limit), &written).iter().map(|rate| rate.bytes_per_second() / MIB).collect()
    }

    #[test]
    fn each_of_seven_disks_is_held_to_less_than_it_wrote_from_the_first_limit_on() {
        // Regression: each was given the limit of all, 49 MiB/s, which none of them reached.
        assert_eq!(divide(49.0, &[(10.0, None); 7]), [7.0; 7]);
    }

    #[test]
    fn a_disk_gets_by_what_it_writes_and_never_nothing() {
        assert_eq!(divide(40.0, &[(60.0, None), (20.0, None), (0.0, None)]), [30.0, 10.0, 1.0]);
        assert_eq!(divide(30.0, &[(0.0, None), (0.0, None)]), [15.0, 15.0]);
        assert_eq!(
            divide(0.5, &[(3.0, None), (0.0, None)]),
            [0.5, 0.25],
            "a limit given may be low"
        );
    }

    #[test]
    fn a_disk_that_is_held_to_its_limit_gets_more_of_the_next() {
        let limits = divide(30.0, &[(10.0, Some(10.0)), (15.0, Some(20.0))]);
        assert_eq!(limits, [15.0, 15.0]);
    }

    #[test]
    fn limits_are_handed_on_only_when_they_change() {
        let disk = |name: &str| Disk { name: name.to_owned(), size: ByteCount(1 << 30) };
        let mut disks = Disks::new(vec![disk("a"), disk("b")]);
        disks.list[0].written = ByteCount(10 << 20);
        let (second, limit) = (Duration::from_secs(1), Some("7MiB/s".parse().unwrap()));
        let first = disks.divide(limit, second).unwrap();
        assert_eq!(first.iter().map(Rate::to_string).collect::<Vec<_>>(), ["7MiB/s", "1MiB/s"]);
        assert_eq!(disks.divide(limit, second), None);
        assert_eq!(disks.divide(None, second), Some(vec![]));
        assert_eq!(disks.divide(None, second), None);
    }
}

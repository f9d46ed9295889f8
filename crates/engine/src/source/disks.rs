//! The disks that move along, as the main thread has them: a channel each, the rounds' passes, and
//! the counts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_disk::{Disk, DiskRound};
use godwit_units::{ByteCount, Rate};
use godwit_wire::DiskOffer;

use super::Event;
use super::disk::{DiskChannel, DiskCounters, DiskOrder, DiskStatistics, left_of_pass, segments};
use super::frame_sender::FrameSender;
use super::link_share::LinkShare;
use super::segment_table::SegmentTable;
use crate::address::Stream;
use crate::report::{DiskMeasures, DiskProgress};
use crate::vm::{DiskVm, SourceVm, VmError};
use crate::{EngineError, limits, threads};

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
    channel: Option<ChannelHandle>,
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

struct ChannelHandle {
    orders: Sender<DiskOrder>,
    stream: Stream,
    thread: JoinHandle<()>,
}

/// All of them.
#[derive(Default)]
pub(super) struct Disks {
    list: Vec<Moving>,
    /// Whether all of it was passed over once.
    full_pass_over: bool,
    next_look: Option<Instant>,
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
            channel: None,
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

    /// The granularity is known.
    pub(super) fn tracked(&mut self, granularity: &[ByteCount]) {
        for (moving, granularity) in self.list.iter_mut().zip(granularity) {
            moving.measures.granularity = *granularity;
        }
    }

    /// How many segments disk `index` has.
    pub(super) fn segments(&self, index: usize) -> usize {
        segments(self.list[index].disk.pages())
    }

    /// Starts the channel of disk `index`, which is number `number` in frames. It sends by `frame
    /// sender` over `stream`.
    pub(super) fn start_channel(
        &mut self,
        index: usize,
        number: usize,
        (stream, sender): (Stream, FrameSender),
        (table, link_share): (Arc<SegmentTable>, Arc<LinkShare>),
        events: Sender<Event>,
    ) -> Result<(), EngineError> {
        let moving = &mut self.list[index];
        let counters = Arc::clone(&moving.counters);
        let channel = DiskChannel::new((index, number), sender, table, link_share, counters);
        let (orders, orders_out) = mpsc::channel();
        let thread = threads::start("disk", move || channel.run(&orders_out, &events))?;
        moving.channel = Some(ChannelHandle { orders, stream, thread });
        Ok(())
    }

    /// Has the channels make their passes of a round; the last one is not cut short.
    pub(super) fn begin(&mut self, round: u32, last: bool, passes: Vec<Box<dyn DiskRound>>) {
        for (moving, pass) in self.list.iter_mut().zip(passes) {
            moving.pass = Some(pass.dirty());
            moving.dirty = ByteCount::ZERO;
            if let Some(channel) = &moving.channel {
                // A channel that is gone has said why.
                let _ = channel.orders.send(DiskOrder::Pass { round, last, pass });
            }
        }
    }

    /// Has the passes finished that were cut short; returns how many.
    pub(super) fn finish(&mut self, round: u32) -> usize {
        let mut count = 0;
        for moving in self.list.iter_mut().filter(|moving| moving.left.is_some()) {
            moving.left = None;
            if let Some(channel) = &moving.channel {
                let _ = channel.orders.send(DiskOrder::Finish { round });
                count += 1;
            }
        }
        count
    }

    /// The channel of disk `index` has made its pass.
    pub(super) fn passed(&mut self, index: usize, statistics: &DiskStatistics) {
        let Some(moving) = self.list.get_mut(index) else { return };
        let dirty = moving.pass.take().flatten();
        moving.left =
            statistics.cut.then(|| left_of_pass(moving.disk.size, dirty, &moving.counters));
        moving.storage += statistics.storage;
        moving.measures.sent += statistics.statistics.sent;
        moving.measures.data += statistics.statistics.data;
        moving.measures.zero += statistics.statistics.zero;
    }

    /// The round is over: what remains, whether a first pass was cut short, and what the guest
    /// wrote in it.
    pub(super) fn end_round(
        &mut self,
        vm: &mut dyn DiskVm,
        sent: ByteCount,
    ) -> Result<godwit_policy::DiskRound, VmError> {
        self.look(vm)?;
        let full_pass =
            !self.full_pass_over && self.list.iter().any(|moving| moving.left.is_some());
        self.full_pass_over = !full_pass;
        self.note_writes(vm);
        let written = self.list.iter().map(|moving| moving.written).sum();
        let storage = self.list.iter_mut().map(|moving| std::mem::take(&mut moving.storage));
        let storage = storage.max().unwrap_or_default();
        let remaining =
            self.list.iter().map(|moving| moving.dirty + moving.left.unwrap_or_default()).sum();
        Ok(godwit_policy::DiskRound { full_pass, sent, remaining, written, storage })
    }

    /// A round begins: what the guest wrote in the one before, to each disk.
    pub(super) fn note_writes(&mut self, vm: &mut dyn DiskVm) {
        let now = vm.disk_writes().unwrap_or_default();
        for (index, moving) in self.list.iter_mut().enumerate() {
            let now = now.get(index).copied();
            let written =
                now.zip(moving.written_before).map(|(now, then)| now.saturating_sub(then));
            moving.written = written.unwrap_or_default();
            moving.written_before = now;
        }
    }

    /// Divides `limit`, which is for the writes to all disks together, among them by what was
    /// written to each in the last round of `time`. Returns the limits where any of them changes.
    pub(super) fn divide(&mut self, limit: Option<Rate>, time: Duration) -> Option<Vec<Rate>> {
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

    /// What is measured in the end.
    pub(super) fn measures(&self) -> Vec<DiskMeasures> {
        self.list.iter().map(|moving| moving.measures.clone()).collect()
    }

    /// Whether a channel has ended, which none does by itself.
    pub(super) fn any_ended(&self) -> bool {
        self.channels().any(|channel| channel.thread.is_finished())
    }

    fn channels(&self) -> impl Iterator<Item = &ChannelHandle> {
        self.list.iter().filter_map(|moving| moving.channel.as_ref())
    }

    /// Has all channels end and waits for that, but not for one that hangs at its disk: the guest
    /// comes first.
    pub(super) fn stop(&self) {
        self.channels().for_each(|channel| channel.stream.shut_down());
        let until = Instant::now() + limits::ABORT;
        // A channel that waits for orders has no pass, and ends with the orders.
        let busy = |moving: &Moving| {
            moving.pass.is_some()
                && moving.channel.as_ref().is_some_and(|channel| !channel.thread.is_finished())
        };
        while self.list.iter().any(busy) && Instant::now() < until {
            std::thread::sleep(limits::TICK / 20);
        }
    }

    /// Ends all channels.
    pub(super) fn join(&mut self) {
        for channel in self.list.iter_mut().filter_map(|moving| moving.channel.take()) {
            drop(channel.orders);
            channel.stream.shut_down();
            let _ = channel.thread.join();
        }
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

/// As many passes as disks, or the adapter is mistaken.
pub(super) fn begin_passes(
    vm: &mut dyn SourceVm,
    disks: usize,
) -> Result<Vec<Box<dyn DiskRound>>, EngineError> {
    let Some(vm) = vm.moving_disks() else { return Ok(Vec::new()) };
    let passes = vm.begin_disk_round().map_err(EngineError::Vm)?;
    if passes.len() == disks { Ok(passes) } else { Err(EngineError::Panicked("main")) }
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

//! The disks that move along, as the main thread has them: a channel each, the rounds' passes, and the counts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_block::{Disk, DiskRound};
use godwit_units::ByteCount;
use godwit_wire::DiskOffer;

use super::Event;
use super::board::Board;
use super::disk::{DiskCarried, DiskChannel, DiskCounters, DiskOrder, left_of_pass, segments};
use super::gate::Gate;
use super::packer::Packer;
use crate::address::Stream;
use crate::report::{DiskMeasures, DiskProgress};
use crate::vm::{SourceVm, VmError};
use crate::{EngineError, limits, threads};

/// How often the machine looks after its disks within rounds, and is asked how much is dirty. QEMU lets all disk I/O end for
/// a moment each time that a bitmap is made or taken away, so the guest pays for looking more often.
const LOOK: Duration = Duration::from_secs(1);

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
    /// What the guest had written in all when the round began.
    written: Option<ByteCount>,
    next_look: Option<Instant>,
}

impl Disks {
    pub(super) fn new(disks: Vec<Disk>) -> Self {
        let moving = |disk: Disk| Moving {
            measures: DiskMeasures { name: disk.name.clone(), size: disk.size, ..DiskMeasures::default() },
            dirty: ByteCount::ZERO,
            disk,
            counters: Arc::default(),
            channel: None,
            pass: None,
            left: None,
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

    /// Starts the channel of disk `index`, which is number `number` in frames. It sends by `packer` over `stream`.
    pub(super) fn start_channel(
        &mut self,
        index: usize,
        number: usize,
        (stream, packer): (Stream, Packer),
        (board, gate): (Arc<Board>, Arc<Gate>),
        events: Sender<Event>,
    ) -> Result<(), EngineError> {
        let moving = &mut self.list[index];
        let counters = Arc::clone(&moving.counters);
        let channel = DiskChannel::new((index, number), packer, board, gate, counters);
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
    pub(super) fn passed(&mut self, index: usize, carried: &DiskCarried) {
        let Some(moving) = self.list.get_mut(index) else { return };
        let dirty = moving.pass.take().flatten();
        moving.left = carried.cut.then(|| left_of_pass(moving.disk.size, dirty, &moving.counters));
        moving.measures.sent += carried.carried.sent;
        moving.measures.data += carried.carried.data;
        moving.measures.zero += carried.carried.zero;
    }

    /// The round is over: what remains, whether a first pass was cut short, and what the guest wrote in it.
    pub(super) fn end_round(
        &mut self,
        vm: &mut dyn SourceVm,
        sent: ByteCount,
    ) -> Result<godwit_policy::DiskRound, VmError> {
        self.look(vm)?;
        let full_pass = !self.full_pass_over && self.list.iter().any(|moving| moving.left.is_some());
        self.full_pass_over = !full_pass;
        let now = vm.disk_writes();
        let written = now.zip(self.written).map_or(ByteCount::ZERO, |(now, then)| now.saturating_sub(then));
        self.written = now;
        let remaining = self.list.iter().map(|moving| moving.dirty + moving.left.unwrap_or_default()).sum();
        Ok(godwit_policy::DiskRound { full_pass, sent, remaining, written })
    }

    /// The first round begins.
    pub(super) fn note_writes(&mut self, vm: &mut dyn SourceVm) {
        self.written = vm.disk_writes();
    }

    /// Within a round, now and then: lets the machine look after its disks, and looks what is dirty.
    pub(super) fn tick(&mut self, vm: &mut dyn SourceVm) -> Result<(), VmError> {
        let now = Instant::now();
        if self.is_empty() || self.next_look.is_some_and(|next| now < next) {
            return Ok(());
        }
        self.next_look = Some(now + LOOK);
        vm.disk_progress()?;
        self.look(vm)
    }

    fn look(&mut self, vm: &mut dyn SourceVm) -> Result<(), VmError> {
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

    /// Has all channels end and waits for that, but not for one that hangs at its disk: the guest comes first.
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

/// As many passes as disks, or the adapter is mistaken.
pub(super) fn begin_passes(
    vm: &mut dyn SourceVm,
    disks: usize,
) -> Result<Vec<Box<dyn DiskRound>>, EngineError> {
    if disks == 0 {
        return Ok(Vec::new());
    }
    let passes = vm.begin_disk_round().map_err(EngineError::Vm)?;
    if passes.len() == disks { Ok(passes) } else { Err(EngineError::Panicked("main")) }
}

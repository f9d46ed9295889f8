//! The data channels, of memory and of disks, behind one handle, and what they have placed.
//!
//! Invariants: no thread of a channel outlives the handle (only in a panic they are not waited for,
//! since whoever stands in for this process waits for its end), and no sink of a disk outlives its
//! channel. The machine is given its disks when the last round of all of them is in place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_codec::Decompressor;
use godwit_memory::RamBlock;
use godwit_units::ByteCount;
use godwit_wire::Role;

use super::Notice;
use super::barriers::Barriers;
use super::channel::{Channel, PEER, PageSink};
use super::disk::{DiskPlace, LastRound};
use super::fault::MadeUp;
use super::memory::MemoryPlace;
use super::offer::Accepted;
use super::session::Session;
use crate::address::Stream;
use crate::link::{FrameReader, link_error};
use crate::vm::{DestinationVm, VmError};
use crate::{EngineError, limits, threads};

pub(super) struct Lanes {
    channels: Vec<(Stream, JoinHandle<()>)>,
    barriers: Arc<Barriers>,
    received: Arc<AtomicU64>,
    last_round: Arc<LastRound>,
    /// The machine's disks that are open for us.
    open_disks: usize,
    order: Arc<Vec<usize>>,
}

impl Lanes {
    /// Waits for all channels of the offer, and starts them.
    pub(super) fn accept(
        session: &Session<'_>,
        ram: &Arc<Vec<RamBlock>>,
        accepted: Accepted,
        made_up: MadeUp,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<Self, EngineError> {
        let Accepted { offer, order, disks } = accepted;
        let channels = usize::from(offer.channels);
        let streams = await_channels(session, channels + disks.len(), notice)?;
        let mut lanes = Self {
            channels: Vec::new(),
            barriers: Arc::new(Barriers::new(streams.len())),
            received: Arc::default(),
            last_round: Arc::default(),
            open_disks: disks.len(),
            order: Arc::new(order),
        };
        let memory = |number| -> Box<dyn PageSink> {
            Box::new(MemoryPlace {
                number,
                channels,
                blocks: Arc::clone(ram),
                order: Arc::clone(&lanes.order),
                #[cfg(test)]
                any_channel: false,
            })
        };
        let mut places: Vec<Box<dyn PageSink>> = (0..channels).map(memory).collect();
        for (disk, sink) in disks {
            let number = lanes.order.len() + places.len() - channels;
            let last_round = Arc::clone(&lanes.last_round);
            places.push(Box::new(DiskPlace::new(number, disk, sink, last_round)));
        }
        for (number, (stream, place)) in streams.into_iter().zip(places).enumerate() {
            let handle = stream.try_clone().map_err(link_error(PEER))?;
            let channel = Channel {
                number,
                reader: FrameReader::new(stream, PEER),
                place,
                received: Arc::clone(&lanes.received),
                barriers: Arc::clone(&lanes.barriers),
                decompressor: Decompressor::new(),
                pages: Vec::new(),
                made_up,
            };
            lanes.channels.push((handle, threads::start("channel", move || channel.run())?));
        }
        Ok(lanes)
    }

    /// Waits until all channels have placed `round`.
    pub(super) fn await_round(
        &self,
        round: u32,
        cancelled: impl Fn() -> bool,
    ) -> Result<(), EngineError> {
        self.barriers.wait(round.into(), cancelled)
    }

    /// Why a channel is gone.
    pub(super) fn failure(&self) -> Option<EngineError> {
        self.barriers.failure()
    }

    /// Bytes that all channels have received.
    pub(super) fn received(&self) -> ByteCount {
        ByteCount(self.received.load(Ordering::Relaxed))
    }

    /// How long the disks of the round just placed were flushed.
    pub(super) fn take_flush(&self) -> Duration {
        self.last_round.take_flush()
    }

    /// Since the last round of all disks was handed to them; `None` without disks.
    pub(super) fn since_disks_in_place(&self) -> Option<Duration> {
        self.last_round.disks_in_place().map(|at| at.elapsed())
    }

    /// Lets the machine have its disks, when the last round of all of them is in place: behind that
    /// nobody has a sink any more.
    pub(super) fn close_disks(&mut self, vm: &mut dyn DestinationVm) -> Result<(), VmError> {
        if self.open_disks == 0 || self.last_round.ended() != self.open_disks {
            return Ok(());
        }
        self.open_disks = 0;
        vm.disk_destination().map_or(Ok(()), |vm| vm.close_disks())
    }

    /// Whether the machine has its disks.
    pub(super) fn disks_are_closed(&self) -> bool {
        self.open_disks == 0
    }

    /// The number here of each RAM block of the source.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Ends all channels; whatever disks were open are closed.
    pub(super) fn end(&mut self) {
        for (stream, _) in &self.channels {
            stream.shut_down();
        }
        for (_, thread) in self.channels.drain(..) {
            if !std::thread::panicking() {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.end();
    }
}

/// The connections of `count` channels, in their order.
fn await_channels(
    session: &Session<'_>,
    count: usize,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Vec<Stream>, EngineError> {
    let mut streams: Vec<Option<Stream>> = (0..count).map(|_| None).collect();
    let until = Instant::now() + limits::CONNECT;
    while streams.iter().any(Option::is_none) {
        let Some((greeting, stream)) = session.next_connection(until, notice)? else {
            let what = "the data channels";
            return Err(EngineError::Timeout { what, limit: limits::CONNECT });
        };
        let slot = match greeting.role {
            Role::Channel(number) => streams.get_mut(usize::from(number)),
            _ => None,
        };
        match slot {
            Some(slot) if slot.is_none() => *slot = Some(stream),
            _ => notice(&Notice::Refused("a channel that the offer does not have".to_owned())),
        }
    }
    Ok(streams.into_iter().flatten().collect())
}

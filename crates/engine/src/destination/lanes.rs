//! The data channels, of memory and of disks, behind one handle, and what they have placed.
//!
//! Invariants: no thread of a channel outlives the handle (only in a panic they are not waited for,
//! since whoever stands in for this process waits for its end), and a sink of a disk outlives its
//! channel only for the next one, where connections are lost. The machine is given its disks when
//! the last round of all of them is in place. When it is said what has been placed, the channels of
//! which that is said have ended, and those of an earlier attempt are never read again.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_codec::Decompressor;
use godwit_disk::{Disk, DiskSink};
use godwit_fingerprints::Key;
use godwit_memory::RamBlock;
use godwit_units::{ByteCount, PageBuffer};
use godwit_wire::{Feature, Features, Message, Role};

use super::Notice;
use super::arriving::Arriving;
use super::barriers::Barriers;
use super::channel::{Channel, Ended, PEER, PageSink};
use super::claims::Claims;
use super::disk::{DiskPlace, LastRound, readers};
use super::fault::MadeUp;
use super::memory::MemoryPlace;
use super::offer::Accepted;
use super::proof::{Placed, Prover, Tables};
use super::session::{Session, out_of_place};
use super::slips::Slips;
use crate::address::Stream;
use crate::cells::Cells;
use crate::link::{FrameReader, link_error};
use crate::return_proof::FORGOTTEN;
use crate::vm::DestinationVm;
use crate::{EngineError, limits, threads};

pub(super) struct Lanes {
    channels: Vec<(Stream, JoinHandle<Ended>)>,
    /// The threads of those of memory, which yield where others bring what somebody waits for.
    numbers: Vec<threads::Number>,
    /// How many of memory there are, or were.
    memory: usize,
    ram: Arc<Vec<RamBlock>>,
    made_up: MadeUp,
    cells: Cells,
    /// Disks between two channels.
    parked: Vec<Box<dyn PageSink>>,
    /// The attempt whose channels there are, or were, and what these have placed.
    attempt: u32,
    placed: Vec<u64>,
    barriers: Arc<Barriers>,
    received: Arc<AtomicU64>,
    last_round: Arc<LastRound>,
    /// The disks that move along, and how many of the machine's are open for us.
    disks: Vec<Disk>,
    open_disks: usize,
    order: Arc<Vec<usize>>,
    /// Whether pages may come over any channel.
    any_channel: bool,
    /// Where what is placed is marked, if it is to be read back, and who does so.
    placed_pages: Option<Arc<Placed>>,
    prover: Option<Prover>,
    /// Whether that is so for disks, too.
    proves_disks: bool,
    /// Behind the word that pages are missing: what places these.
    arriving: Arc<OnceLock<Arc<Arriving>>>,
    /// Until that is there nothing may come.
    closed: Arc<AtomicBool>,
    /// What was read back, once the last round of all disks was.
    proven: Option<Proven>,
    /// The key that fingerprints are told by, once, of a source that audits.
    proof_key: Option<Key>,
    /// Pages were placed whose marks are gone.
    marks_lost: bool,
}

/// What was read back of everything, and the digests of that.
pub(super) struct Proven {
    pub(super) digests: Vec<Vec<u128>>,
    pub(super) tables: Tables,
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
        let memory = usize::from(offer.channels);
        let streams = await_channels(session, 0, 0..memory + disks.len(), notice)?;
        let wish = (offer.verify, session.common_features(offer.features));
        let mut lanes = Self::restored(session, ram, (order, wish), disks, made_up);
        (lanes.memory, lanes.attempt, lanes.marks_lost) = (memory, 0, false);
        lanes.start(streams)?;
        Ok(lanes)
    }

    /// No channels yet, as where a godwit that was killed has placed what nobody knows of: the
    /// source, whose RAM blocks have the numbers `order` here, is told so. `verify`: it may have
    /// all read back, as far as both sides have the `features`. What was placed in `disks` and
    /// acknowledged is there, as it is in memory.
    pub(super) fn restored(
        session: &Session<'_>,
        ram: &Arc<Vec<RamBlock>>,
        (order, (verify, features)): (Vec<usize>, (bool, Features)),
        disks: Vec<(Disk, Box<dyn DiskSink>)>,
        made_up: MadeUp,
    ) -> Self {
        let proves = verify && features.contains(Feature::Proof);
        // Of disks that stay nothing is written.
        let proves_disks = proves && features.contains(Feature::DiskProof) && !disks.is_empty();
        let proven = disks.iter().filter(|_| proves_disks).map(|(disk, _)| disk.clone());
        let proven: Vec<Disk> = proven.collect();
        let mut lanes = Self {
            channels: Vec::new(),
            numbers: Vec::new(),
            memory: 0,
            ram: Arc::clone(ram),
            made_up,
            cells: session.cells().clone(),
            parked: Vec::new(),
            attempt: FORGOTTEN,
            placed: Vec::new(),
            barriers: Arc::new(Barriers::new(0)),
            received: Arc::default(),
            last_round: Arc::default(),
            disks: Vec::new(),
            open_disks: 0,
            order: Arc::new(order),
            any_channel: features.contains(Feature::AnyChannel),
            placed_pages: proves.then(|| Arc::new(Placed::new(ram, &proven))),
            prover: None,
            proves_disks,
            arriving: Arc::default(),
            closed: Arc::default(),
            proven: None,
            proof_key: None,
            marks_lost: true,
        };
        lanes.open(disks);
        lanes
    }

    /// Takes in what the channels of `disks` will fill.
    fn open(&mut self, disks: Vec<(Disk, Box<dyn DiskSink>)>) {
        self.open_disks = disks.len();
        for (index, (disk, sink)) in disks.into_iter().enumerate() {
            let (last_round, number) = (Arc::clone(&self.last_round), self.order.len() + index);
            self.disks.push(disk.clone());
            let placed = self.placed_pages.clone().filter(|_| self.proves_disks);
            self.parked.push(Box::new(DiskPlace::new(number, disk, sink, last_round, placed)));
        }
    }

    /// What places the pages of channel `number` of memory.
    fn memory_place(&self, number: usize, claims: Option<&Arc<Claims>>) -> Box<dyn PageSink> {
        Box::new(MemoryPlace {
            number,
            channels: self.memory,
            claims: claims.cloned(),
            rounds: 0,
            blocks: Arc::clone(&self.ram),
            order: Arc::clone(&self.order),
            placed: self.placed_pages.clone(),
            read_back: PageBuffer::default(),
            arriving: Arc::clone(&self.arriving),
            closed: Arc::clone(&self.closed),
            slips: Slips::new(self.made_up),
            #[cfg(test)]
            unchecked: false,
        })
    }

    /// Starts channels over `streams`: so many of memory as there are to be, and one of each disk;
    /// behind the word that pages are missing, one for those that somebody waits for instead.
    fn start(&mut self, streams: Vec<Stream>) -> Result<(), EngineError> {
        self.barriers = Arc::new(Barriers::new(streams.len()));
        self.numbers.clear();
        let sizes = self.order.iter().map(|own| self.ram[*own].pages());
        let claims = self.any_channel.then(|| Arc::new(Claims::new(sizes)));
        let place = |number| self.memory_place(number, claims.as_ref());
        let mut places: Vec<_> = (0..self.memory).map(place).collect();
        match self.arriving.get() {
            Some(_) => places.push(self.memory_place(self.memory, None)),
            None => places.append(&mut self.parked),
        }
        self.run_channels(0, streams, places)
    }

    /// Starts the channels from number `first` on.
    fn run_channels(
        &mut self,
        first: usize,
        streams: Vec<Stream>,
        places: Vec<Box<dyn PageSink>>,
    ) -> Result<(), EngineError> {
        let (of_memory, of_disks) = (self.cells.memory(&self.ram)?, self.cells.disk()?);
        for (number, (stream, place)) in (first..).zip(streams.into_iter().zip(places)) {
            let handle = stream.try_clone().map_err(link_error(PEER))?;
            let channel = Channel {
                number,
                cell: if place.is_memory() { of_memory.clone() } else { of_disks.clone() },
                cells: self.cells.clone(),
                reader: FrameReader::watched(stream, PEER, self.barriers.pulse(number)),
                place,
                received: Arc::clone(&self.received),
                barriers: Arc::clone(&self.barriers),
                decompressor: Decompressor::new(),
                pages: PageBuffer::default(),
                // Of a channel that is slow, that is which was given up.
                made_up: if self.attempt == 0 { self.made_up } else { MadeUp::none() },
            };
            let own = threads::Number::default();
            if number < self.memory {
                self.numbers.push(own.clone());
            }
            let yields = number < self.memory && self.arriving.get().is_some();
            let run = move || {
                own.set();
                if yields {
                    threads::yields();
                }
                channel.run()
            };
            self.channels.push((handle, threads::start("channel", run)?));
        }
        Ok(())
    }

    /// Takes the connection over which pages come that somebody waits for, and starts its channel:
    /// the one behind all others.
    pub(super) fn add_urgent(
        &mut self,
        session: &Session<'_>,
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<(), EngineError> {
        let number = self.channels.len();
        let streams = await_channels(session, self.attempt, number..number + 1, notice)?;
        let place = self.memory_place(number, None);
        self.run_channels(number, streams, vec![place])
    }

    /// From here on no page may come until what places them is there: whoever wrote to one that is
    /// missing would wait for it.
    pub(super) fn refuse_pages(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Whether there are no channels.
    pub(super) fn have_ended(&self) -> bool {
        self.channels.is_empty()
    }

    /// From here on what comes is placed by `arriving`.
    pub(super) fn have_arrive(&self, arriving: &Arc<Arriving>) {
        let _ = self.arriving.set(Arc::clone(arriving));
        self.numbers.iter().for_each(threads::Number::yields);
    }

    /// The connections are lost: waits until all that has arrived is placed or thrown away, and
    /// every channel has ended.
    pub(super) fn sever(&mut self) -> Result<(), EngineError> {
        if self.channels.is_empty() {
            return Ok(());
        }
        self.channels.iter().for_each(|(stream, _)| stream.shut_down());
        let mut placed = Vec::new();
        let mut broken = None;
        for (_, thread) in self.channels.drain(..) {
            let mut ended = thread.join().map_err(|_| EngineError::Panicked("channel"))?;
            broken = broken.or(ended.place.settle().err());
            placed.push(ended.placed);
            if !ended.place.is_memory() {
                self.parked.push(ended.place);
            }
        }
        self.placed = placed;
        // That a connection ended is known; that a page cannot be placed is another matter.
        let failed = self.barriers.failure().filter(|error| !error.is_loss());
        failed.or(broken).map_or(Ok(()), Err)
    }

    /// The attempt whose channels were the last ones, and how many frames of each were placed.
    pub(super) fn placed(&self) -> (u32, &[u64]) {
        (self.attempt, &self.placed)
    }

    /// Waits for the channels of `attempt`, so many of memory, and starts them.
    pub(super) fn start_again(
        &mut self,
        session: &Session<'_>,
        (attempt, memory): (u32, u8),
        notice: &mut dyn FnMut(&Notice),
    ) -> Result<(), EngineError> {
        let others = if self.arriving.get().is_some() { 1 } else { self.parked.len() };
        let count = usize::from(memory) + others;
        let streams = await_channels(session, attempt, 0..count, notice)?;
        (self.attempt, self.memory) = (attempt, memory.into());
        self.start(streams)
    }

    /// Waits until all channels have placed `round`, or until it `ends` otherwise.
    pub(super) fn await_round(
        &self,
        round: u32,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<(), EngineError> {
        self.barriers.wait(round.into(), ends)
    }

    /// Why a channel is gone, or what was written cannot be read back.
    pub(super) fn failure(&self) -> Option<EngineError> {
        self.barriers.failure().or_else(|| self.prover.as_ref()?.failure())
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
    /// nobody has a sink any more. What was written to them is read back before, unless it `ends`
    /// otherwise.
    pub(super) fn close_disks(
        &mut self,
        vm: &mut dyn DestinationVm,
        ends: impl Fn() -> Option<EngineError>,
    ) -> Result<(), EngineError> {
        if self.open_disks == 0 || self.last_round.ended() != self.open_disks {
            return Ok(());
        }
        if self.proves_disks
            && let Some(prover) = self.prover.take()
        {
            let digests = prover.digests(ends)?;
            let tables = prover.finish()?;
            self.proven = Some(Proven { digests, tables });
        }
        self.open_disks = 0;
        vm.disk_destination().map_or(Ok(()), |vm| vm.close_disks()).map_err(EngineError::Vm)
    }

    /// Whether the machine has its disks.
    pub(super) fn disks_are_closed(&self) -> bool {
        self.open_disks == 0
    }

    /// The disks that move along.
    pub(super) fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// The number here of each RAM block of the source.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Has what is placed read back, for digests under `key`. A source that asks again knows
    /// nothing of what was placed before: all of it is read once more.
    ///
    /// # Errors
    /// When that was not agreed upon.
    pub(super) fn prove(
        &mut self,
        vm: &mut dyn DestinationVm,
        key: Key,
    ) -> Result<(), EngineError> {
        let Some(placed) = &self.placed_pages else {
            return Err(out_of_place(&Message::Prove { seed: 0 }));
        };
        self.prover = None;
        if std::mem::replace(&mut self.marks_lost, true) {
            placed.mark_all();
        }
        let readers = match self.proves_disks {
            true => readers(vm, self.disks.len())?
                .ok_or_else(|| EngineError::Disk("the disks cannot be read any more".into()))?,
            false => Vec::new(),
        };
        self.prover = Some(Prover::start(&self.ram, readers, placed, key)?);
        self.proof_key = Some(key);
        Ok(())
    }

    /// Who reads back what is placed.
    pub(super) fn prover(&self) -> Option<&Prover> {
        self.prover.as_ref()
    }

    /// What was read back, once the last round of all disks was.
    pub(super) fn proven(&self) -> Option<&Proven> {
        self.proven.as_ref()
    }

    /// The key of the fingerprints that are read back, if nobody has asked for them yet.
    pub(super) fn take_proof_key(&mut self) -> Option<Key> {
        self.proof_key.take().filter(|_| self.prover.is_some() || self.proven.is_some())
    }

    /// Nothing is read back any more.
    pub(super) fn end_proof(&mut self) {
        self.prover = None;
    }

    /// Nor is it of use any more what was.
    pub(super) fn forget_proof(&mut self) {
        self.end_proof();
        self.proven = None;
    }

    /// Ends all channels; whatever disks were open are closed.
    pub(super) fn end(&mut self) {
        self.end_proof();
        for (stream, _) in &self.channels {
            stream.shut_down();
        }
        for (_, thread) in self.channels.drain(..) {
            if !std::thread::panicking() {
                let _ = thread.join();
            }
        }
        self.parked.clear();
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.end();
    }
}

/// The connections of the channels of `attempt` with these `numbers`, in their order.
fn await_channels(
    session: &Session<'_>,
    attempt: u32,
    numbers: Range<usize>,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Vec<Stream>, EngineError> {
    let mut streams: Vec<Option<Stream>> = numbers.clone().map(|_| None).collect();
    let until = Instant::now() + limits::CONNECT;
    while streams.iter().any(Option::is_none) {
        // A source that gave up makes no channels any more.
        if let Some(error) = session.superseded().or_else(|| session.given_up()) {
            return Err(error);
        }
        let soon = until.min(Instant::now() + limits::TICK);
        let Some((greeting, stream)) = session.next_connection(soon, notice)? else {
            if Instant::now() < until {
                continue;
            }
            let what = "the data channels";
            return Err(EngineError::Timeout { what, limit: limits::CONNECT });
        };
        let slot = match greeting.role {
            // One of connections that were given up, and late. What comes over it is old.
            Role::Channel(_) if greeting.attempt < attempt => continue,
            Role::Channel(number) if greeting.attempt == attempt => {
                usize::from(number).checked_sub(numbers.start).and_then(|at| streams.get_mut(at))
            }
            _ => None,
        };
        match slot {
            Some(slot) if slot.is_none() => *slot = Some(stream),
            _ => notice(&Notice::Refused("a channel that the offer does not have".to_owned())),
        }
    }
    Ok(streams.into_iter().flatten().collect())
}

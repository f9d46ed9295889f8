//! Post-copy at the source: the guest runs at the destination, and the pages that are missing there
//! are sent from memory in which nobody writes any more.
//!
//! ```text
//!  destination                                   source
//!    Wanted (control) ───────────────────────▶   reader ──▶ urgent thread
//!    place, wake  ◀══════════════ its own channel, one frame a page, then its neighbours
//!    place        ◀══════════════ the channels of memory, near what was asked for first
//!    Placed (control) ───────────────────────▶   the end
//! ```
//!
//! Invariants: pages that somebody waits for never wait behind others, as they have a connection of
//! their own without a limit of bandwidth; neighbours go along behind them while nobody waits for
//! another, and where there is no limit that they would exceed. Nothing else is sent unasked before
//! the guest runs. Only the destination's word that all is in place ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_codec::is_zero;
use godwit_protocol::source::Input;
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun};
use godwit_wire::{AbortCode, Content, Message};

use super::frame_sender::{FrameSender, Link};
use super::lanes::Lanes;
use super::live::IdleWatch;
use super::outage::Outage;
use super::session::{Event, Wanted};
use super::to_serve::ToServe;
use super::{PEER, Source};
use crate::address::Stream;
use crate::cells::Cell;
use crate::handle::Own;
use crate::limiter::Limiter;
use crate::missing::MissingList;
use crate::report::{PostCopyMeasures, Progress, Stage};
use crate::{EngineError, limits, threads};

/// Pages in a frame that was not asked for: 256 KiB, behind which an urgent one on the same link
/// does not wait for long.
const UNASKED: u64 = 64;
/// Pages read at once, as in pre-copy.
const READ: u64 = 16;
/// Messages of the destination that ask for pages and wait to be answered; while there are more, it
/// is not read.
const WANTED_AT_ONCE: usize = 64;
/// How often whoever waits for wishes looks whether it is over: the command waits for that.
const LOOK: Duration = Duration::from_millis(5);
/// For how long what the guest asks for has the hosts for itself when it begins to run: it needs
/// some tens of pages to go on, each of which comes in the time of a round trip, or in many times
/// that where threads that stream want the same processors. Over a long way it would wait for more
/// of them if nothing came unasked.
const ALONE: Duration = Duration::from_millis(15);
/// Between two attempts to connect again, at the most: nobody gives up, so it may go on for hours.
const SLOWEST_RETRY: Duration = Duration::from_secs(1);

pub(super) struct Serving {
    table: Arc<ToServe>,
    link: Link,
    /// What is left of pre-copy: who lets go of it stops the limiter.
    lanes: Option<Lanes>,
    servers: Vec<Server>,
    stop: Arc<AtomicBool>,
    /// Which attempt's connections are in use: what threads of an earlier one report is old.
    attempt: u32,
    outage: Option<Outage>,
    idle: IdleWatch,
    /// The last look at the migration before it.
    looked: Option<Progress>,
    began: Instant,
    missing: PageCount,
    /// Bytes on the wire when it began.
    sent_before: ByteCount,
    resumptions: u32,
    severed: Duration,
    asked: Arc<AtomicU64>,
    /// It goes on for a godwit that was killed, and the destination has not said yet what is
    /// missing.
    unheard: bool,
}

/// A thread that sends pages, and its connection.
struct Server {
    handle: Stream,
    thread: JoinHandle<()>,
}

impl Serving {
    /// Begins to answer the destination over `urgent`, which may ask for pages in `missing`, of the
    /// channels that are in `lanes`.
    pub(super) fn begin(
        source: &mut Source<'_>,
        missing: Vec<DirtyBitmap>,
        lanes: &Lanes,
        urgent: (Stream, Stream),
    ) -> Result<Self, EngineError> {
        let mut serving = Self::new(source, missing, lanes);
        let wanted = take_wanted(source);
        serving.answer(source, urgent, wanted)?;
        Ok(serving)
    }

    /// Goes on for a godwit that was killed: what is missing the destination has to say first.
    pub(super) fn for_another(source: &Source<'_>, own: &Own) -> Self {
        let nothing = source.ram.iter().map(|block| DirtyBitmap::new(block.pages())).collect();
        let lanes = Lanes::new(own, 1, (source.common.codecs, source.is_within_a_host()), false);
        lanes.hurry();
        let mut serving = Self::new(source, nothing, &lanes);
        source.handle.follows();
        serving.unheard = true;
        serving
    }

    fn new(source: &Source<'_>, missing: Vec<DirtyBitmap>, lanes: &Lanes) -> Self {
        let table = ToServe::new(&source.ram, missing);
        let missing = table.unsent();
        Self {
            table: Arc::new(table),
            link: lanes.link().clone(),
            lanes: None,
            servers: Vec::new(),
            stop: Arc::default(),
            attempt: 0,
            outage: None,
            idle: IdleWatch::new(),
            looked: source.handle.progress(),
            began: Instant::now(),
            missing,
            sent_before: lanes.sent(),
            resumptions: 0,
            severed: Duration::ZERO,
            asked: Arc::default(),
            unheard: false,
        }
    }

    /// Whether the operator has enough of it, and all can be left to another godwit.
    pub(super) fn gives_up(&self, source: &Source<'_>) -> bool {
        self.unheard && source.handle.cancel().is_cancelled()
    }

    /// The guest runs at the destination: sends what is left over the channels of `lanes`.
    pub(super) fn take_over(
        &mut self,
        source: &mut Source<'_>,
        mut lanes: Lanes,
    ) -> Result<(), EngineError> {
        let senders = lanes.take_senders()?;
        self.lanes = Some(lanes);
        source.handle.follows();
        self.began = Instant::now();
        self.idle.begin();
        let due = self.began + alone(source.session.is_long_way());
        for (sender, handle) in senders {
            self.stream(source, (sender, handle), due)?;
        }
        Ok(())
    }

    /// Sends over `stream` the pages that are `wanted`.
    fn answer(
        &mut self,
        source: &Source<'_>,
        (stream, handle): (Stream, Stream),
        wanted: Receiver<Wanted>,
    ) -> Result<(), EngineError> {
        let (table, stop, asked) =
            (Arc::clone(&self.table), Arc::clone(&self.stop), Arc::clone(&self.asked));
        let mut sender = FrameSender::new(stream, self.link.urgent(), table.segments());
        let limiter = Arc::clone(&self.link.limiter);
        self.serve_by(source.session.for_memory(), "urgent", handle, move || {
            answer(&mut sender, (&table, &limiter), &wanted, (&stop, &asked))
        })
    }

    /// Sends by `sender` what is left, from `due` on.
    fn stream(
        &mut self,
        source: &Source<'_>,
        (mut sender, handle): (FrameSender, Stream),
        due: Instant,
    ) -> Result<(), EngineError> {
        let (table, stop) = (Arc::clone(&self.table), Arc::clone(&self.stop));
        // Each page is placed once, and is the same whenever it comes.
        sender.spread(true);
        self.serve_by(source.session.for_memory(), "server", handle, move || {
            // To who sends what somebody waits for, and to guests.
            threads::yields();
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            sender.begin();
            while !stop.load(Ordering::Relaxed) {
                let Some((block, run)) = table.next(UNASKED) else { break };
                send(&mut sender, &table, block, run)?;
                sender.flush()?;
            }
            Ok(())
        })
    }

    fn serve_by(
        &mut self,
        (events, cell): (Sender<Event>, Cell),
        name: &'static str,
        handle: Stream,
        work: impl FnOnce() -> Result<(), EngineError> + Send + 'static,
    ) -> Result<(), EngineError> {
        let attempt = self.attempt;
        let thread = threads::start(name, move || {
            let worked = cell.enter().and_then(|_| work());
            if let Err(error) = worked {
                let _ = events.send(Event::Served { attempt, error });
            }
        })?;
        self.servers.push(Server { handle, thread });
        Ok(())
    }

    /// Waits until the destination has every page.
    pub(super) fn serve(&mut self, source: &mut Source<'_>) -> Result<Input, EngineError> {
        if self.servers.is_empty() {
            // The guest runs there, as was found out over the control connection alone.
            let source = std::io::ErrorKind::NotConnected.into();
            return Err(EngineError::Link { peer: PEER, source });
        }
        loop {
            source.carry_what_has_come();
            let tick = source.late_tick();
            match source.session.next_event(source.vm, tick)? {
                Some(Event::Peer { message: Ok(Message::Placed), .. }) => {
                    return Ok(Input::AllPlaced);
                }
                Some(Event::Served { attempt, .. }) if attempt != self.attempt => {}
                Some(other) => return Err(other.out_of_place()),
                None if source.vm.has_ended() => return Err(EngineError::Ended("source")),
                None => self.report(source),
            }
            // Whoever compresses takes it from the guest, where no processor idles. One of the
            // servers answers, and never does.
            self.idle.tell(&self.link.live, self.servers.len().saturating_sub(1));
        }
    }

    /// The connections are lost: ends what is left of them.
    pub(super) fn sever(
        &mut self,
        source: &mut Source<'_>,
        cause: Option<EngineError>,
    ) -> Result<(), EngineError> {
        let cause = cause.unwrap_or(EngineError::Panicked("main"));
        tracing::warn!(%cause, "the connections are lost, and pages are missing");
        self.outage = Some(Outage::new(cause, limits::ENDLESS));
        self.end();
        source.session.sever(source.vm)?;
        source.session.forget_reports();
        Ok(())
    }

    /// One attempt to make the connections again, when it is due.
    pub(super) fn reconnect(&mut self, source: &mut Source<'_>) -> Result<Input, EngineError> {
        let Some(outage) = &mut self.outage else { return Err(EngineError::Panicked("main")) };
        let pause = (limits::RETRY.max(outage.time() / 20)).min(SLOWEST_RETRY);
        let due = Instant::now() + outage.next_attempt().max(pause);
        while Instant::now() < due {
            self.wait(source)?;
        }
        match self.attempt(source) {
            Ok(()) => {
                let outage = self.outage.take();
                self.severed += outage.map_or(Duration::ZERO, |outage| outage.time());
                self.resumptions += 1;
                Ok(Input::Resumed)
            }
            Err(error) if loses_guest(&error) || self.gives_up(source) => Err(error),
            Err(error) => {
                self.end();
                if let Some(outage) = &mut self.outage {
                    outage.failed(source.explained(error));
                }
                Ok(Input::LinkLost)
            }
        }
    }

    fn attempt(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        let (to, channels) = source.way();
        let dialled = source.session.begin_return(&to, channels)?;
        let stream = loop {
            match dialled.recv_timeout(limits::TICK / 4) {
                Ok(stream) => break stream?,
                Err(RecvTimeoutError::Timeout) => self.wait(source)?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(EngineError::Panicked("connect"));
                }
            }
        };
        // Who has not shown yet to be the destination may say what it likes.
        source.session.finish_return(source.vm, stream).map_err(|error| match error {
            EngineError::Aborted { text, .. } => EngineError::Distrust(text),
            error => error,
        })?;
        let missing = await_missing(source)?;
        self.table.begin_again(missing);
        if std::mem::take(&mut self.unheard) {
            self.missing = self.table.unsent();
        }
        self.attempt += 1;
        let wanted = take_wanted(source);
        let mut streams = source.session.connect_channels(0..=channels)?;
        self.stop = Arc::default();
        self.link.limiter.restart(streams.len());
        let urgent = streams.pop().ok_or(EngineError::Panicked("main"))?;
        self.answer(source, urgent, wanted)?;
        for (stream, handle) in streams {
            let segments = self.table.segments();
            let sender = FrameSender::new(stream, self.link.clone(), segments);
            self.stream(source, (sender, handle), Instant::now())?;
        }
        self.idle.begin();
        Ok(())
    }

    /// Waits for a moment while the connections are lost.
    fn wait(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        if source.vm.has_ended() {
            return Err(EngineError::Ended("source"));
        }
        if self.gives_up(source) {
            return Err(EngineError::Cancelled);
        }
        let event = source.session.next_event(source.vm, limits::RETRY)?;
        if let Some(event @ Event::Peer { message: Ok(Message::Abort { .. }), .. }) = event {
            return Err(event.out_of_place());
        }
        if self.outage.as_mut().is_some_and(Outage::is_to_be_told) {
            self.report(source);
        }
        Ok(())
    }

    /// Puts in force what was set, and tells whoever looks how it stands.
    fn report(&mut self, source: &mut Source<'_>) {
        if let Some((_, own)) = source.handle.take_changes() {
            self.link.set(&own);
        }
        let mut progress = self.looked.clone().unwrap_or_else(nothing_seen);
        progress.elapsed = source.meter.elapsed();
        (progress.stage, progress.round_ended) = (Stage::PostCopy, false);
        progress.sent = self.sent();
        progress.remaining = self.table.unsent().bytes();
        (progress.dirty_rate, progress.expected_downtime) = (None, None);
        (progress.remaining_time, progress.advice) = (None, None);
        (progress.throttle, progress.dirty_rate_limit, progress.guest_speed) = (0.0, None, None);
        progress.severed = self.outage.as_ref().map(Outage::shown);
        source.handle.report(&progress);
        (source.progress)(&progress);
    }

    /// Bytes on the wire so far.
    pub(super) fn sent(&self) -> ByteCount {
        ByteCount(self.link.sent.load(Ordering::Relaxed))
    }

    /// What was done, when all is in place.
    pub(super) fn measures(&self) -> PostCopyMeasures {
        PostCopyMeasures {
            missing: self.missing.bytes(),
            asked: self.asked.load(Ordering::Relaxed),
            sent: self.sent() - self.sent_before,
            time: self.began.elapsed(),
            resumptions: self.resumptions,
            severed: self.severed,
        }
    }

    /// Ends all threads, and their connections.
    pub(super) fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.link.limiter.stop();
        self.servers.iter().for_each(|server| server.handle.shut_down());
        for server in self.servers.drain(..) {
            if !std::thread::panicking() {
                let _ = server.thread.join();
            }
        }
        self.lanes = None;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.end();
    }
}

/// Of a migration of which nothing was seen: another godwit has begun it.
fn nothing_seen() -> Progress {
    Progress {
        elapsed: Duration::ZERO,
        stage: Stage::PostCopy,
        round: 0,
        round_ended: false,
        sent: ByteCount::ZERO,
        remaining: ByteCount::ZERO,
        dirty_rate: None,
        bandwidth: None,
        expected_downtime: None,
        remaining_time: None,
        throttle: 0.0,
        dirty_rate_limit: None,
        guest_speed: None,
        delayed_segments: 0,
        disks: Vec::new(),
        memory_share: 1024,
        disk_limit: None,
        severed: None,
        advice: None,
        warning: None,
    }
}

/// Where the pages come from here on that the destination asks for.
fn take_wanted(source: &Source<'_>) -> Receiver<Wanted> {
    let (wanted_in, wanted) = mpsc::sync_channel(WANTED_AT_ONCE);
    source.session.hand_wanted(wanted_in);
    wanted
}

/// Whether what is missing can never follow: its memory has ended here, or the machine there.
pub(super) fn loses_guest(error: &EngineError) -> bool {
    let by_peer = matches!(error, EngineError::Aborted { code: AbortCode::Machine, .. });
    by_peer || matches!(error, EngineError::Ended(_))
}

/// For how long nothing streams when the guest begins to run.
fn alone(long_way: bool) -> Duration {
    if long_way { Duration::ZERO } else { ALONE }
}

/// Sends pages that somebody waits for, each in a frame of its own, until nobody can ask any more;
/// and their neighbours, while nobody waits for another page and the `limiter` has no limit.
fn answer(
    sender: &mut FrameSender,
    (table, limiter): (&ToServe, &Limiter),
    wanted: &Receiver<Wanted>,
    (stop, asked): (&AtomicBool, &AtomicU64),
) -> Result<(), EngineError> {
    let mut next = None;
    while !stop.load(Ordering::Relaxed) {
        let (block, pages) = match next.take().map_or_else(|| wanted.recv_timeout(LOOK), Ok) {
            Ok(wanted) => wanted,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let number = block as usize;
        for page in &pages {
            table.ask(block, *page)?;
            asked.fetch_add(1, Ordering::Relaxed);
            send(sender, table, number, PageRun::new(page.0, 1))?;
            sender.flush()?;
        }
        for page in pages {
            next = wanted.try_recv().ok();
            if next.is_some() || limiter.share().is_some() {
                break;
            }
            for run in table.neighbours(number, page) {
                send(sender, table, number, run)?;
            }
            sender.flush()?;
        }
    }
    Ok(())
}

/// Puts the pages of `run` into frames. Where memory was never touched they are named as zero.
fn send(
    sender: &mut FrameSender,
    table: &ToServe,
    number: usize,
    run: PageRun,
) -> Result<(), EngineError> {
    let (block, segment) = (table.block(number), table.segment(number, run.start));
    let mut at = run.start;
    for data in block.data_coarse(run) {
        let data = data?;
        name_zero(sender, (number, segment), at, data.start)?;
        at = data.start;
        while at < data.end() {
            sender.frame_for(number as u32, segment, 1)?;
            let count = (data.end().0 - at.0).min(sender.room() as u64).min(READ);
            let part = PageRun::new(at.0, count);
            sender.add(
                part,
                |bytes| block.read(part.start, bytes),
                |_, bytes| Some(if is_zero(bytes) { Content::Zero } else { Content::Data }),
            )?;
            at = part.end();
        }
    }
    name_zero(sender, (number, segment), at, run.end())
}

fn name_zero(
    sender: &mut FrameSender,
    (number, segment): (usize, usize),
    start: PageIndex,
    end: PageIndex,
) -> Result<(), EngineError> {
    if start < end {
        sender.frame_for(number as u32, segment, 1)?;
        sender.zero(PageRun::new(start.0, end.0 - start.0));
    }
    Ok(())
}

/// What the destination says is still missing there.
fn await_missing(source: &mut Source<'_>) -> Result<Vec<DirtyBitmap>, EngineError> {
    let order: Vec<usize> = (0..source.ram.len()).collect();
    let mut list = MissingList::new(PEER, &source.ram, &order);
    let what = "the destination to say what is missing";
    loop {
        let (block, last, runs) =
            source.session.await_message(source.vm, what, limits::RESUME, |message| {
                let Message::Missing { block, last, runs } = message else { return None };
                Some((*block, *last, runs.clone()))
            })?;
        list.add(block, &runs)?;
        if last {
            return Ok(list.into_missing());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use godwit_codec::Codec;
    use godwit_memory::RamBlock;
    use godwit_units::Rate;
    use godwit_wire::PageFrame;

    use super::*;
    use crate::compression::{Codecs, Compression};
    use crate::link::FrameReader;
    use crate::source::live::Live;

    /// The frames, as runs of pages, in which `wishes` are answered under a limit of `rate`.
    fn frames(rate: Option<Rate>, wishes: &[&[u64]]) -> Vec<Vec<(u64, u64)>> {
        let block = RamBlock::anonymous("ram", PageCount(100)).unwrap();
        let mut missing = DirtyBitmap::new(PageCount(100));
        missing.set(PageRun::new(0, 100));
        let table = ToServe::new(&Arc::new(vec![block]), vec![missing]);
        let limiter = Arc::new(Limiter::new(rate, 1));
        let link = Link {
            limiter: Arc::clone(&limiter),
            live: Arc::new(Live::new(Compression::Fixed(Codec::None))),
            sent: Arc::default(),
            codecs: Codecs::NONE,
            same_host: false,
        };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut sender = FrameSender::new(Stream::from(ours), link.urgent(), table.segments());
        let (wants, wanted) = mpsc::channel();
        for pages in wishes {
            wants.send((0, pages.iter().map(|page| PageIndex(*page)).collect())).unwrap();
        }
        drop(wants);
        let (stop, asked) = (AtomicBool::new(false), AtomicU64::new(0));
        answer(&mut sender, (&table, &limiter), &wanted, (&stop, &asked)).unwrap();
        drop(sender);
        assert_eq!(asked.into_inner(), wishes.concat().len() as u64);
        let mut reader = FrameReader::new(Stream::from(theirs), PEER);
        let mut frames = Vec::new();
        while let Ok((header, payload)) = reader.frame() {
            let frame = PageFrame::decode(&header, payload).unwrap();
            let runs = frame.runs(frame.data).map(|(run, _)| (run.run.start.0, run.run.count.0));
            frames.push(runs.collect());
        }
        frames
    }

    #[test]
    fn what_is_asked_for_comes_alone_and_its_neighbours_when_nobody_waits() {
        // Mutations: neighbours are left out, are in the frame of their page, or go before another
        // that somebody waits for.
        let around = vec![(40, 2), (43, 2), (46, 2)];
        assert_eq!(frames(None, &[&[42, 45]]), [vec![(42, 1)], vec![(45, 1)], around]);
        let around = vec![(88, 2), (91, 5)];
        assert_eq!(frames(None, &[&[42], &[90]]), [vec![(42, 1)], vec![(90, 1)], around]);
    }

    #[test]
    fn no_neighbour_goes_beyond_a_limit_of_bandwidth() {
        // Mutation: the limit is not looked at.
        assert_eq!(frames(Some(Rate::from_bytes_per_second(1e6)), &[&[42]]), [[(42, 1)]]);
    }

    #[test]
    fn nothing_streams_at_first_but_over_a_long_way() {
        // Mutations: always, never, or the other way round.
        assert_eq!((alone(false), alone(true)), (ALONE, Duration::ZERO));
    }
}

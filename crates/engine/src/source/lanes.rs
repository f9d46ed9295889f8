//! The data channels, of memory and of disks, behind one handle: orders go out to their threads
//! here, and their reports come in through the session's queue.
//!
//! Invariant: no thread of a channel outlives the handle, which ends and joins them all. Only in a
//! panic they are not waited for, since whoever stands in for this process waits for its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

use godwit_units::{ByteCount, TypedRate};

use super::channel::{Channel, Order};
use super::disk::{DiskChannel, DiskOrder};
use super::frame_sender::{FrameSender, Link};
use super::link_share::LinkShare;
use super::live::{IdleWatch, Live};
use super::session::Event;
use super::wires::Wires;
use crate::address::Stream;
use crate::cells::Cell;
use crate::compression::{Codecs, Compression};
use crate::handle::Own;
use crate::limiter::Limiter;
use crate::{EngineError, limits, threads};

/// A channel: its thread carries out orders until there are no more, or one fails.
struct Lane<O, C> {
    orders: Sender<O>,
    stream: Stream,
    thread: JoinHandle<C>,
}

impl<O: Send + 'static, C: Send + 'static> Lane<O, C> {
    fn start(
        name: &'static str,
        stream: Stream,
        run: impl FnOnce(&Receiver<O>) -> C + Send + 'static,
    ) -> Result<Self, EngineError> {
        let (orders, orders_out) = mpsc::channel();
        let thread = threads::start(name, move || run(&orders_out))?;
        Ok(Self { orders, stream, thread })
    }

    /// A channel that is gone has said why, or is found to have ended.
    fn order(&self, order: O) {
        let _ = self.orders.send(order);
    }

    fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it, and waits for what is left of it; `None` behind a panic.
    fn join(self) -> Option<C> {
        drop(self.orders);
        self.stream.shut_down();
        if std::thread::panicking() { None } else { self.thread.join().ok() }
    }
}

/// What is left of channels that were ended, in their order.
#[derive(Default)]
pub(super) struct Ended {
    pub(super) memory: Vec<Channel>,
    pub(super) disks: Vec<DiskChannel>,
}

pub(super) struct Lanes {
    memory: Vec<Lane<Order, Channel>>,
    disks: Vec<Lane<DiskOrder, DiskChannel>>,
    link: Link,
    link_share: Arc<LinkShare>,
    idle: IdleWatch,
}

impl Lanes {
    /// Room for `channels` in all, to a destination that takes `codecs`, and may be on the
    /// `same_host`.
    pub(super) fn new(
        own: &Own,
        channels: usize,
        (codecs, same_host): (Codecs, bool),
        disks: bool,
    ) -> Self {
        let limiter = Limiter::new(own.max_bandwidth.map(TypedRate::rate), channels);
        limiter.set_budget(own.cpu_budget);
        let link = Link {
            limiter: Arc::new(limiter),
            live: Arc::new(Live::new(own.compression)),
            sent: Arc::new(AtomicU64::new(0)),
            codecs,
            same_host,
        };
        Self {
            memory: Vec::new(),
            disks: Vec::new(),
            link,
            link_share: Arc::new(LinkShare::new(disks)),
            idle: IdleWatch::new(),
        }
    }

    /// Adds a channel of memory, with its number among `wires` and a handle of its connection;
    /// `channel` makes it of its sending end.
    pub(super) fn add_memory(
        &mut self,
        (wires, number, handle): (Arc<Wires>, usize, Stream),
        segments: usize,
        (events, cell): (Sender<Event>, Cell),
        channel: impl FnOnce(FrameSender) -> Channel,
    ) -> Result<(), EngineError> {
        let sender = FrameSender::over((wires, number), self.link.clone(), segments);
        let channel = channel(sender);
        let run = move |orders: &Receiver<Order>| match cell.enter() {
            Ok(_) => channel.run(orders, &events),
            Err(error) => {
                let _ = events.send(Event::RoundStatistics { round: 0, result: Err(error) });
                channel
            }
        };
        self.memory.push(Lane::start("channel", handle, run)?);
        Ok(())
    }

    /// Adds the channel of a disk.
    pub(super) fn add_disk(
        &mut self,
        stream: (Stream, Stream),
        segments: usize,
        (events, cell): (Sender<Event>, Cell),
        channel: impl FnOnce(FrameSender) -> DiskChannel,
    ) -> Result<(), EngineError> {
        let (stream, handle) = stream;
        let channel = channel(FrameSender::new(stream, self.link.clone(), segments));
        let disk = self.disks.len();
        let run = move |orders: &Receiver<DiskOrder>| match cell.enter() {
            Ok(_) => channel.run(orders, &events),
            Err(error) => {
                let _ = events.send(Event::DiskStatistics { disk, round: 0, result: Err(error) });
                channel
            }
        };
        self.disks.push(Lane::start("disk", handle, run)?);
        Ok(())
    }

    /// The connections are lost: has all channels end, whatever they are at.
    pub(super) fn cut(&self) {
        self.release();
        self.memory.iter().for_each(|lane| lane.stream.shut_down());
        self.disks.iter().for_each(|lane| lane.stream.shut_down());
    }

    /// What all channels share on their way to the link.
    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// Ends the channels of memory, but not their connections: what sends over these, and a handle
    /// of each.
    pub(super) fn take_senders(&mut self) -> Result<Vec<(FrameSender, Stream)>, EngineError> {
        let lanes = self.memory.drain(..).map(|lane| {
            drop(lane.orders);
            let channel = lane.thread.join().map_err(|_| EngineError::Panicked("channel"))?;
            Ok((channel.into_sender(), lane.stream))
        });
        lanes.collect()
    }

    /// Whether no channel is at anything any more. One that waits for orders is not.
    pub(super) fn have_ended(&self) -> bool {
        self.memory.iter().all(Lane::has_ended) && self.disks.iter().all(Lane::has_ended)
    }

    /// Gives no more orders, so that all channels end.
    pub(super) fn dismiss(&mut self) {
        let (nobody, _) = mpsc::channel();
        self.memory.iter_mut().for_each(|lane| lane.orders = nobody.clone());
        let (nobody, _) = mpsc::channel();
        self.disks.iter_mut().for_each(|lane| lane.orders = nobody.clone());
    }

    /// What is left of all channels, which are waited for.
    pub(super) fn take(&mut self) -> Result<Ended, EngineError> {
        let memory = self.memory.drain(..).map(Lane::join).collect::<Option<Vec<_>>>();
        let disks = self.disks.drain(..).map(Lane::join).collect::<Option<Vec<_>>>();
        let ended = memory.zip(disks).map(|(memory, disks)| Ended { memory, disks });
        ended.ok_or(EngineError::Panicked("channel"))
    }

    /// So many channels, in all, are about to be added behind [`Self::take`].
    pub(super) fn reopen(&self, channels: usize) {
        self.link.limiter.restart(channels);
        self.link_share.reopen();
    }

    /// Where memory waits while disks have the link.
    pub(super) fn link_share(&self) -> &Arc<LinkShare> {
        &self.link_share
    }

    /// How many channels of memory there are.
    pub(super) fn memory(&self) -> usize {
        self.memory.len()
    }

    /// Has all of memory's channels carry out `order`.
    pub(super) fn order_memory(&self, order: Order) {
        self.memory.iter().for_each(|lane| lane.order(order));
    }

    /// Has the channel of disk `index` carry out `order`.
    pub(super) fn order_disk(&self, index: usize, order: DiskOrder) {
        if let Some(lane) = self.disks.get(index) {
            lane.order(order);
        }
    }

    /// Whether a channel has ended, which none does by itself without a word.
    pub(super) fn any_ended(&self) -> bool {
        self.memory.iter().any(Lane::has_ended) || self.disks.iter().any(Lane::has_ended)
    }

    /// Bytes on the wire so far.
    pub(super) fn sent(&self) -> ByteCount {
        ByteCount(self.link.sent.load(Ordering::Relaxed))
    }

    /// Puts what can be set of the channels in force; whether compression is another now.
    pub(super) fn set(&self, own: &Own) -> bool {
        self.link.limiter.set_budget(own.cpu_budget);
        self.link.set(own)
    }

    /// The guest is about to stand still: no budget of processor time holds anyone up any more.
    pub(super) fn hurry(&self) {
        self.link.limiter.set_budget(None);
    }

    /// Says so when the destination does not take the compression that is set.
    pub(super) fn lacks_codec(&self) -> Option<String> {
        let wanted = self.link.live.compression();
        let lacking = match wanted {
            Compression::Auto => self.link.codecs == Codecs::NONE,
            Compression::Fixed(codec) => !self.link.codecs.contains(codec.id()),
        };
        lacking.then(|| {
            format!(
                "compression={wanted}: the destination does not take it; pages are sent as they are"
            )
        })
    }

    /// Looks how many processors idle from now on: while a migration is set up, they do.
    pub(super) fn begin_idle_watch(&mut self) {
        self.idle.begin();
    }

    /// Tells the channels now and then how many processors idle.
    pub(super) fn look_at_idle(&mut self) {
        let channels = self.memory.len().max(1) + self.disks.len();
        self.idle.tell(&self.link.live, channels);
    }

    /// Sends no more, and has the channels of disks end and let go of these; waits for them, but
    /// not for one that hangs at its disk: the guest comes first.
    pub(super) fn stop(&mut self) {
        self.release();
        self.disks.iter().for_each(|lane| lane.stream.shut_down());
        self.dismiss();
        let until = Instant::now() + limits::ABORT;
        while !self.disks.iter().all(Lane::has_ended) && Instant::now() < until {
            std::thread::sleep(limits::TICK / 20);
        }
        self.disks.extract_if(.., |lane| lane.has_ended()).for_each(|lane| drop(lane.join()));
    }

    /// No channel waits for the link any more.
    fn release(&self) {
        self.link.limiter.stop();
        self.link_share.close();
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // A channel may be at the connection of another one.
        self.cut();
        self.memory.drain(..).for_each(|lane| drop(lane.join()));
        self.disks.drain(..).for_each(|lane| drop(lane.join()));
    }
}

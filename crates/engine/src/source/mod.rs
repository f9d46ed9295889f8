//! The source of a migration.
//!
//! [`migrate`] is a loop around the state machine: each action is carried out, waits for what it
//! needs, and yields the next input. Whatever fails becomes the input `Failed`, and the machine
//! says what that means.
//!
//! Threads: this one; one that reads the control connection; one a data channel, of memory or of a
//! disk; one that passes the device state on. They all report through one queue of events.

mod abort;
mod channel;
mod disk;
mod disks;
mod ending;
mod fault;
mod frame_sender;
mod free;
mod link_share;
mod live;
mod rounds;
mod segment_table;
mod speed;
mod state_relay;
mod thread_clock;

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_balloon::FreeHints;
use godwit_fingerprints::{Key, PageFingerprints};
use godwit_memory::RamBlock;
use godwit_policy::{Decision, Estimate, Plan, Policy, Round, ThrottleMode, Tick};
use godwit_protocol::source::{Action, Input, State, step};
use godwit_track::DirtyTracker;
use godwit_units::{ByteCount, PageCount, PageIndex, Rate, TypedRate};
use godwit_wire::{
    ANSWER_LIMIT, AbortCode, BLOCKS_LIMIT, BlockOffer, DISKS_LIMIT, Greeting, Message, Offer,
    QUESTIONS_LIMIT, Role, SessionId,
};

use crate::address::{Address, Stream};
use crate::compression::{Codecs, Compression};
use crate::digests::{self, CHUNK_PAGES};
use crate::handle::{MigrationHandle, Own};
use crate::limiter::Limiter;
use crate::link::{
    ControlWriter, link_error, read_messages, receive_greeting, say_alive, send_greeting,
};
use crate::report::{Measures, Progress, RoundMeasures, Stage};
use crate::vm::{SourceVm, VmError};
use crate::{EngineError, Failure, Phase, Survivor, limits, threads};

use abort::Aborter;
use channel::{Channel, Order, Shared};
use disk::DiskStatistics;
use disks::{Disks, begin_passes};
pub use fault::Fault;
use frame_sender::{FrameSender, Link, RoundStatistics};
use link_share::LinkShare;
use live::{IdleWatch, Live};
use segment_table::{Look, SegmentTable};
use speed::Speed;
use state_relay::StateRelay;

const PEER: &str = "destination";

/// Messages of the destination that may wait to be looked at. All it says unasked is a few; digests
/// of 1 TiB are 256.
const PEERS_LIMIT: usize = 256;

/// How a migration is to be made, as far as it cannot be changed while it runs; what can is in
/// [`MigrationHandle`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the destination listens.
    pub to: Address,
    /// Compare digests of all memory before the destination may run.
    pub verify: bool,
    /// Data channels, at least 1.
    pub channels: u8,
    /// Remember what was sent, so that pages are not sent again that were written and did not
    /// change.
    pub fingerprints: bool,
    /// Leave the VM stopped at the source instead of ending it.
    pub keep_source: bool,
    /// A fault to make up, for tests.
    pub fault: Option<Fault>,
}

impl Options {
    /// What suits most: two channels, fingerprints, no comparison, and a source that ends.
    #[must_use]
    pub fn new(to: Address) -> Self {
        Self { to, verify: false, channels: 2, fingerprints: true, keep_source: false, fault: None }
    }
}

/// Time for a test to do something in between.
const HOLD: Duration = Duration::from_secs(4);

/// What the threads report.
enum Event {
    /// The destination said something, or can no longer. It took one of [`PEERS_LIMIT`] places.
    Peer { connection: u32, message: Result<Message, EngineError> },
    /// A channel has carried its part of a round, barrier included.
    RoundStatistics { round: u32, result: Result<RoundStatistics, EngineError> },
    /// The channel of a disk has carried its part of a round, barrier included.
    DiskStatistics { disk: usize, round: u32, result: Result<DiskStatistics, EngineError> },
    /// The device state has been passed on to its end.
    StatePassed(Result<ByteCount, EngineError>),
}

/// Moves the guest of `vm` to the destination at `options.to`.
///
/// `progress` is called at the end of each round and every [`limits::TICK`] in between.
///
/// # Errors
/// Says what failed, when, and where the guest is. Before the handover it is where it was, as it
/// was.
pub fn migrate(
    vm: &mut dyn SourceVm,
    options: &Options,
    handle: &MigrationHandle,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Measures, Failure> {
    let (events_in, events) = mpsc::channel();
    let (places_in, places) = mpsc::sync_channel(PEERS_LIMIT);
    let started = Instant::now();
    let unarmed = |source| Failure {
        phase: Phase::Setup,
        survivor: Survivor::Source,
        cause: EngineError::Random(source),
    };
    let session = new_session().map_err(unarmed)?;
    let fingerprints = options.fingerprints.then(new_fingerprints).transpose().map_err(unarmed)?;
    let (settings, Own { max_bandwidth, compression }) = handle.begin(&options.to);
    let disks = Disks::new(vm.moving_disks().map_or_else(Vec::new, |vm| vm.disks()));
    let all_channels = usize::from(options.channels) + disks.len();
    let source = Source {
        link_share: Arc::new(LinkShare::new(!disks.is_empty())),
        disks,
        unfinished: 0,
        release_waits: false,
        ram: vm.ram(),
        vm,
        options,
        handle,
        progress,
        started,
        events,
        events_in,
        places,
        places_in,
        session,
        control: None,
        connection: 0,
        control_ended: Cell::new(false),
        channels: Vec::new(),
        sent: Arc::default(),
        limiter: Arc::new(Limiter::new(max_bandwidth.map(TypedRate::rate), all_channels)),
        live: Arc::new(Live::new(compression)),
        idle: IdleWatch::new(),
        codecs: Codecs::NONE,
        fingerprints,
        direct_io: false,
        tracker: None,
        free: None,
        hinted_round: None,
        allocated: PageCount::ZERO,
        table: None,
        relay: None,
        unawaited: None,
        policy: Policy::new(settings),
        throttle: 0.0,
        first_writes: None,
        can_govern: false,
        disk_limit: None,
        disk_time: Duration::ZERO,
        speed: Speed::default(),
        guest_speed: None,
        warning: None,
        next_look: started,
        sent_before: 0,
        estimate: None,
        remaining: PageCount::ZERO,
        round_began: started,
        round_ended: None,
        gap: Duration::ZERO,
        waited: Duration::ZERO,
        flush: Duration::ZERO,
        round_trip: None,
        digest_of_page: None,
        last_round: None,
        stopped_at: None,
        mark: started,
        resolve_until: None,
        commit_sent: false,
        state_saved: false,
        cause: None,
        resume_failed: None,
        aborter: None,
        measures: Measures { channels: options.channels.into(), ..Measures::default() },
    };
    source.run()
}

/// Fingerprints of all pages, and their key, which the guest must not know.
fn new_fingerprints() -> io::Result<(PageFingerprints, Key)> {
    let [seed, _] = random()?;
    Ok((PageFingerprints::new(), Key::new(seed)))
}

fn new_session() -> io::Result<SessionId> {
    let [high, low] = random()?;
    Ok(SessionId((u128::from(high) << 64 | u128::from(low)).to_le_bytes()))
}

/// Numbers that nobody can guess. Nothing can stand in for them, so who gets none does not begin.
fn random() -> io::Result<[u64; 2]> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let bits = u128::from_le_bytes(bytes);
    Ok([(bits >> 64) as u64, bits as u64])
}

/// A channel of memory.
struct ChannelHandle {
    orders: Sender<Order>,
    stream: Stream,
    thread: JoinHandle<()>,
}

struct Source<'a> {
    vm: &'a mut dyn SourceVm,
    ram: Arc<Vec<RamBlock>>,
    options: &'a Options,
    handle: &'a MigrationHandle,
    progress: &'a mut dyn FnMut(&Progress),
    started: Instant,
    /// What the threads report. All but the destination report once for each order, so only its
    /// messages are limited.
    events: Receiver<Event>,
    events_in: Sender<Event>,
    /// Who reads the destination takes a place here for each message, and waits for one; who looks
    /// at it gives it back.
    places: Receiver<()>,
    places_in: SyncSender<()>,
    session: SessionId,
    control: Option<Arc<ControlWriter>>,
    /// Numbers the control connections, so that the end of an old one is not taken for that of a
    /// new one.
    connection: u32,
    /// The control connection of this number was seen to end.
    control_ended: Cell<bool>,
    channels: Vec<ChannelHandle>,
    disks: Disks,
    link_share: Arc<LinkShare>,
    /// Disks whose pass was cut short and is being finished.
    unfinished: usize,
    /// The device state is released when disks are read.
    release_waits: bool,
    sent: Arc<AtomicU64>,
    limiter: Arc<Limiter>,
    live: Arc<Live>,
    idle: IdleWatch,
    /// What the destination takes.
    codecs: Codecs,
    fingerprints: Option<(PageFingerprints, Key)>,
    /// Whether data may land in guest memory without the tracker's knowledge.
    direct_io: bool,
    tracker: Option<Arc<dyn DirtyTracker>>,
    /// What the guest says is free, where it can say so.
    free: Option<Arc<FreeHints>>,
    /// The round before which the guest was asked for it.
    hinted_round: Option<u32>,
    /// The most that the RAM files took since holes were last looked for.
    allocated: PageCount,
    table: Option<Arc<SegmentTable>>,
    relay: Option<StateRelay>,
    /// The round whose acknowledgement nobody waits for.
    unawaited: Option<u32>,
    policy: Policy,
    /// The throttle in force.
    throttle: f64,
    /// The governor's rate in force.
    first_writes: Option<f64>,
    /// Whether the policy may use a governor.
    can_govern: bool,
    /// The limit of the guest's writes to all disks that move.
    disk_limit: Option<Rate>,
    /// How long the round was in which it was last seen what the guest writes to them.
    disk_time: Duration,
    speed: Speed,
    /// The guest's speed under the throttle in force, as last seen.
    guest_speed: Option<f64>,
    /// What the operator should know and is no reason to stop.
    warning: Option<String>,
    next_look: Instant,
    /// Bytes on the wire when the round began.
    sent_before: u64,
    estimate: Option<Estimate>,
    remaining: PageCount,
    round_began: Instant,
    /// When the round before was acknowledged.
    round_ended: Option<Instant>,
    /// Time between that and the beginning of this one.
    gap: Duration,
    /// Time at the beginning of the round in which nothing was sent.
    waited: Duration,
    /// The last flush of disks at the destination.
    flush: Duration,
    /// To the destination and back, once it was seen.
    round_trip: Option<Duration>,
    /// What the digest of a page takes, once it was measured; only with `verify`.
    digest_of_page: Option<Duration>,
    last_round: Option<RoundMeasures>,
    stopped_at: Option<Instant>,
    /// When the current part of the downtime began.
    mark: Instant,
    resolve_until: Option<Instant>,
    commit_sent: bool,
    /// The machine has saved all its state, which is on its way.
    state_saved: bool,
    /// The first failure, and when it was.
    cause: Option<(Phase, EngineError)>,
    /// What kept the guest from being resumed or retired.
    resume_failed: Option<VmError>,
    aborter: Option<Aborter>,
    measures: Measures,
}

impl Source<'_> {
    fn run(mut self) -> Result<Measures, Failure> {
        let verify = self.options.verify;
        let mut state = State::Idle;
        let mut input = Input::Start;
        while !state.is_final() {
            let stepped = step(state, input, verify).or_else(|unexpected| {
                self.note(state, unexpected.into());
                step(state, Input::Failed, verify)
            });
            let Ok((next, actions)) = stepped else { break };
            state = next;
            match self.perform_all(state, &actions) {
                Ok(next) => input = next,
                Err(error) => {
                    self.note(state, error);
                    input = Input::Failed;
                    if state == State::InDoubt
                        && self.resolve_until.is_some_and(|until| Instant::now() >= until)
                    {
                        break;
                    }
                }
            }
        }
        self.take_peers_words();
        self.shut_down();
        let survivor = match (state, self.resume_failed.is_some()) {
            (State::Done, false) => return Ok(self.measures),
            (State::Done, true) => Survivor::Destination,
            (State::Cancelled, _) if self.vm.has_ended() => {
                // What failed in consequence, and that it could not be brought back, need not be
                // said.
                let ended =
                    self.vm.befallen().map_or(EngineError::Ended("source"), EngineError::Befallen);
                self.cause = self.cause.take().map(|(phase, _)| (phase, ended));
                self.resume_failed = None;
                Survivor::Ended
            }
            (State::Cancelled, false) => Survivor::Source,
            (State::Cancelled, true) => Survivor::SourceStopped,
            _ => Survivor::Unknown,
        };
        let (phase, cause) = match (self.cause.take(), self.resume_failed.take()) {
            (None, Some(source)) => (Phase::Handover, EngineError::Vm(source)),
            (Some((phase, cause)), Some(source)) => {
                (phase, EngineError::NotResumed { cause: Box::new(cause), source })
            }
            (Some((phase, cause)), None) => (phase, cause),
            (None, None) => (Phase::Setup, EngineError::Cancelled),
        };
        Err(Failure { phase, survivor, cause })
    }

    /// Keeps the first failure, which is the cause of those that follow.
    fn note(&mut self, state: State, error: EngineError) {
        if self.cause.is_some() {
            return;
        }
        // What the machine did not do any more, it did not for this reason.
        let befallen = match error {
            EngineError::Vm(_) | EngineError::Ended(_) if !self.commit_sent => self.vm.befallen(),
            _ => None,
        };
        self.cause = Some((phase_of(state), befallen.map_or(error, EngineError::Befallen)));
    }

    /// When a channel broke since the destination gave up, its reason is on the way or already
    /// here. The guest runs again by now, so there is time to wait for it, as long as the
    /// destination can still speak.
    fn take_peers_words(&mut self) {
        let broke = matches!(self.cause, Some((_, EngineError::Link { .. })));
        let until = Instant::now() + limits::WORDS;
        while broke && !self.commit_sent && !self.control_ended.get() && Instant::now() < until {
            match self.event(limits::TICK) {
                Ok(Event::Peer { message: Ok(Message::Abort { code, text }), .. }) => {
                    let words = EngineError::Aborted { peer: PEER, code, text };
                    self.cause = self.cause.take().map(|(phase, _)| (phase, words));
                    return;
                }
                Ok(Event::Peer { message: Err(_), connection })
                    if connection == self.connection =>
                {
                    return;
                }
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Carries out `actions`; returns the next input, which the destination gives if no action
    /// does.
    fn perform_all(&mut self, state: State, actions: &[Action]) -> Result<Input, EngineError> {
        let mut follow = None;
        for action in actions {
            follow = self.perform(*action)?.or(follow);
            self.options.fault.inspect(|fault| fault.strike_after(*action));
        }
        match follow {
            Some(input) => Ok(input),
            None if state.is_final() => Ok(Input::Failed),
            None => self.await_peer(state),
        }
    }

    /// Carries out one action; returns the input it leads to, if it knows one.
    fn perform(&mut self, action: Action) -> Result<Option<Input>, EngineError> {
        match action {
            Action::SendOffer => self.connect_and_offer(),
            Action::StartTracking => self.start_tracking(),
            Action::CopyRound(round) => {
                self.start_round(round, Stage::PreCopy)?;
                self.copy_round(round, Stage::PreCopy)
            }
            Action::StartLastRound(round) => {
                self.start_round(round, Stage::StopAndCopy)?;
                Ok(None)
            }
            Action::AskPolicy => self.ask_policy(),
            Action::SendPrepare => self.prepare(),
            Action::StopGuest => self.stop_guest(),
            Action::CopyLastRound(round) => self.copy_round(round, Stage::StopAndCopy),
            Action::CompareDigests => self.compare_digests(),
            Action::ReleaseState => self.release_state(),
            Action::FinishState => self.finish_state(),
            Action::SendCommit => self.commit(),
            Action::Resolve => self.resolve(),
            Action::SendFarewell => {
                self.finish_measures();
                self.say_farewell();
                Ok(None)
            }
            Action::RetireGuest => {
                if let Err(error) = self.vm.retire(self.options.keep_source) {
                    self.resume_failed = Some(error);
                }
                Ok(None)
            }
            Action::SendAbort => {
                self.abort();
                Ok(None)
            }
            Action::ResumeGuest => {
                self.resume();
                Ok(None)
            }
        }
    }

    fn connect_and_offer(&mut self) -> Result<Option<Input>, EngineError> {
        self.direct_io = self.vm.direct_io().is_some();
        if self.direct_io && self.fingerprints.is_none() {
            return Err(EngineError::DirectIo);
        }
        self.direct_io &= self.options.fault != Some(Fault::TrustTracker);
        let most = [
            ("RAM blocks", self.ram.len(), BLOCKS_LIMIT),
            ("disks to move", self.disks.len(), DISKS_LIMIT),
        ];
        if let Some((what, count, limit)) = most.into_iter().find(|(_, count, limit)| count > limit)
        {
            return Err(EngineError::TooMany { what, count, limit });
        }
        let stream = self.connect(Role::Control)?;
        self.use_control(stream)?;
        let granularity = self.vm.moving_disks().map_or_else(Vec::new, |vm| vm.disk_granularity());
        let blocks = self.ram.iter();
        let blocks = blocks
            .map(|block| BlockOffer { name: block.name().to_owned(), pages: block.pages() })
            .collect();
        self.say(&Message::Offer(Offer {
            channels: self.options.channels,
            codecs: Codecs::ALL.0,
            verify: self.options.verify,
            running: self.vm.was_running(),
            machine: self.vm.machine().to_owned(),
            blocks,
            disks: self.disks.offers(&granularity),
        }))?;
        self.await_accept().map(Some)
    }

    /// Answers what the destination asks about the machine, until it accepts.
    fn await_accept(&mut self) -> Result<Input, EngineError> {
        for _ in 0..=QUESTIONS_LIMIT {
            let what = "the destination to accept";
            let said = self.await_message(what, limits::ANSWER, |message| match message {
                Message::Accept { codecs } => Some(Err(*codecs)),
                Message::Question(question) => Some(Ok(question.clone())),
                _ => None,
            })?;
            let question = match said {
                Err(codecs) => {
                    self.take_codecs(Codecs::ALL.common(Codecs(codecs)));
                    return Ok(Input::Accepted);
                }
                Ok(question) => question,
            };
            let answer = self.vm.answer(&question).map_err(EngineError::Vm)?;
            if answer.len() > ANSWER_LIMIT {
                return Err(EngineError::Panicked("main"));
            }
            self.say(&Message::Answer(answer))?;
        }
        let what = format!("it asked more than {QUESTIONS_LIMIT} questions");
        Err(EngineError::Protocol { peer: PEER, what })
    }

    /// A new connection to the destination, which has answered the greeting as one; a data channel
    /// is not answered.
    fn connect(&self, role: Role) -> Result<Stream, EngineError> {
        let address = &self.options.to;
        let mut stream = Stream::connect(address)
            .map_err(|source| EngineError::Connect { address: address.to_string(), source })?;
        send_greeting(&mut stream, Greeting { session: self.session, role }, PEER)?;
        if matches!(role, Role::Channel(_)) {
            return Ok(stream);
        }
        let limit = if role == Role::Control { limits::FIRST_GREETING } else { limits::GREETING };
        let greeting = receive_greeting(&mut stream, PEER, limit).map_err(|error| match error {
            EngineError::Link { source, .. }
                if role == Role::Control && source.kind() == std::io::ErrorKind::TimedOut =>
            {
                EngineError::NoGreeting { address: address.to_string(), limit }
            }
            error => error,
        })?;
        if greeting.session != self.session {
            let what =
                "it answered for another session: it is busy with another migration".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        Ok(stream)
    }

    /// Makes `stream` the control connection, with a thread that reads it.
    fn use_control(&mut self, stream: Stream) -> Result<(), EngineError> {
        let read = stream.try_clone().map_err(link_error(PEER))?;
        let control = match self.control.take() {
            Some(control) => {
                control.replace(stream)?;
                control
            }
            None => {
                let control = Arc::new(ControlWriter::new(stream, PEER)?);
                self.aborter = Some(Aborter::start(Arc::clone(&control))?);
                control
            }
        };
        self.control = Some(Arc::clone(&control));
        say_alive(&control)?;
        self.connection += 1;
        self.control_ended.set(false);
        let (events, places, connection) =
            (self.events_in.clone(), self.places_in.clone(), self.connection);
        read_messages(read, PEER, move |message| {
            places.send(()).is_ok() && events.send(Event::Peer { connection, message }).is_ok()
        })
    }

    fn say(&self, message: &Message) -> Result<(), EngineError> {
        match &self.control {
            Some(control) => control.send(message),
            None => {
                Err(EngineError::Protocol { peer: PEER, what: "it was never connected".to_owned() })
            }
        }
    }

    /// The next event of any kind, within `limit`.
    fn event(&self, limit: Duration) -> Result<Event, RecvTimeoutError> {
        let event = self.events.recv_timeout(limit);
        if matches!(event, Ok(Event::Peer { .. })) {
            let _ = self.places.try_recv();
        }
        event
    }

    /// The next event, within `limit`. Notices a cancellation, which an event may wait behind,
    /// before COMMIT.
    fn next_event(&self, limit: Duration) -> Result<Option<Event>, EngineError> {
        if self.handle.cancel().is_cancelled() && !self.commit_sent {
            return Err(EngineError::Cancelled);
        }
        // Once all of it is on its way, the guest can live on without its machine here.
        if !self.state_saved && self.vm.has_ended() {
            return Err(EngineError::Ended("source"));
        }
        match self.event(limit) {
            // What an earlier control connection ended with is of no interest.
            Ok(Event::Peer { connection, .. }) if connection != self.connection => Ok(None),
            Ok(Event::Peer { message: Ok(Message::RoundAck { round, .. }), .. })
                if self.unawaited == Some(round) =>
            {
                Ok(None)
            }
            Ok(event) => {
                if matches!(event, Event::Peer { message: Err(_), .. }) {
                    self.control_ended.set(true);
                }
                Ok(Some(event))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(EngineError::Panicked("control")),
        }
    }

    /// What an event that nobody waits for means.
    fn out_of_place(event: Event) -> EngineError {
        match event {
            Event::Peer { message: Ok(Message::Abort { code, text }), .. } => {
                EngineError::Aborted { peer: PEER, code, text }
            }
            Event::Peer { message: Err(error), .. } => error,
            Event::Peer { message: Ok(message), .. } => EngineError::Protocol {
                peer: PEER,
                what: format!("it said {:?} out of place", message.kind()),
            },
            Event::RoundStatistics { result: Err(error), .. }
            | Event::DiskStatistics { result: Err(error), .. }
            | Event::StatePassed(Err(error)) => error,
            Event::StatePassed(Ok(_)) => EngineError::State(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                "it ended too early",
            )),
            Event::RoundStatistics { .. } | Event::DiskStatistics { .. } => {
                EngineError::Panicked("channel")
            }
        }
    }

    /// Waits up to `limit` for the message that `wanted` takes.
    fn await_message<T>(
        &self,
        what: &'static str,
        limit: Duration,
        mut wanted: impl FnMut(&Message) -> Option<T>,
    ) -> Result<T, EngineError> {
        let until = Instant::now() + limit;
        loop {
            match self.next_event(limits::TICK.min(limit))? {
                Some(Event::Peer { message: Ok(message), connection }) => match wanted(&message) {
                    Some(taken) => return Ok(taken),
                    None => {
                        return Err(Self::out_of_place(Event::Peer {
                            message: Ok(message),
                            connection,
                        }));
                    }
                },
                Some(other) => return Err(Self::out_of_place(other)),
                None if Instant::now() >= until => {
                    return Err(EngineError::Timeout { what, limit });
                }
                None => {}
            }
        }
    }

    /// Where this fault is to be made up: stays for [`HOLD`], or until something goes wrong.
    fn hold(&self, fault: Fault) -> Result<(), EngineError> {
        let until = Instant::now() + HOLD;
        while self.options.fault == Some(fault) && Instant::now() < until {
            if let Some(event) = self.next_event(limits::TICK)? {
                return Err(Self::out_of_place(event));
            }
        }
        Ok(())
    }

    /// In states that only the destination can end: what it says next.
    fn await_peer(&mut self, state: State) -> Result<Input, EngineError> {
        let (what, limit) = match state {
            State::AwaitingReady => ("the destination to load the device state", limits::ANSWER),
            _ => ("the destination to run the guest", limits::RUNNING),
        };
        let committed = self.commit_sent;
        let mut reason = None;
        let input = self.await_message(what, limit, |message| match message {
            Message::Ready => Some(Input::Ready),
            Message::Running => Some(Input::Running),
            // A destination that aborts has discarded the guest; after COMMIT that is all that
            // matters.
            Message::Discarded if committed => Some(Input::Discarded),
            Message::Abort { code, text } if committed => {
                reason = Some((*code, text.clone()));
                Some(Input::Discarded)
            }
            _ => None,
        })?;
        match input {
            Input::Ready if state == State::AwaitingReady => {
                self.hold(Fault::HoldReady)?;
                self.measures.parts.load = self.lap();
                self.strike(Fault::KillAfterReady);
                if !self.vm.has_ended() {
                    self.check_fate()?;
                }
                // Here, where a failure still leaves the guest ours, and not when COMMIT is sent.
                self.vm.handing_over().map_err(EngineError::Vm)?;
                self.strike(Fault::KillBeforeCommit);
            }
            Input::Running => self.measures.parts.handover = self.lap(),
            Input::Discarded => self.was_discarded(reason),
            _ => {}
        }
        Ok(input)
    }

    /// Ends the migration where nothing is left to be moved.
    fn check_fate(&mut self) -> Result<(), EngineError> {
        self.vm.befallen().map_or(Ok(()), |words| Err(EngineError::Befallen(words)))
    }

    /// Ends this process if that is the fault to make up.
    fn strike(&self, fault: Fault) {
        if self.options.fault == Some(fault) {
            fault.strike();
        }
    }

    /// The destination gave the guest back, for this reason if it told one. What broke before is of
    /// no interest then.
    fn was_discarded(&mut self, reason: Option<(AbortCode, String)>) {
        match reason {
            Some((code, text)) => {
                self.cause =
                    Some((Phase::Handover, EngineError::Aborted { peer: PEER, code, text }));
            }
            None => {
                let what = "it could not run the guest and has discarded it".to_owned();
                self.note(State::Handover, EngineError::Protocol { peer: PEER, what });
            }
        }
    }

    fn last_number(&self) -> u32 {
        self.measures.round_list.last().map_or(0, |round| round.round)
    }

    fn report(&mut self, round: u32, stage: Stage, round_ended: bool) {
        let estimate = self.estimate.as_ref();
        let progress = Progress {
            elapsed: self.started.elapsed(),
            stage,
            round,
            round_ended,
            sent: ByteCount(self.sent.load(Ordering::Relaxed)),
            remaining: self.remaining.bytes(),
            dirty_rate: estimate.map(|estimate| estimate.dirty_rate),
            bandwidth: estimate.map(|estimate| estimate.bandwidth),
            expected_downtime: estimate.and_then(|estimate| estimate.expected_downtime),
            remaining_time: estimate.and_then(|estimate| estimate.remaining_time).map(Into::into),
            throttle: self.throttle,
            first_writes: self.first_writes,
            guest_speed: self.guest_speed,
            disks: self.disks.progress(),
            memory_share: self.link_share.share(),
            disk_limit: self.disk_limit,
            delayed_segments: self.table.as_ref().map_or(0, |table| table.delayed()),
            advice: estimate.and_then(|estimate| estimate.advice.as_ref()).map(ToString::to_string),
            warning: self.warning.clone(),
        };
        self.handle.report(&progress);
        (self.progress)(&progress);
    }
}

fn phase_of(state: State) -> Phase {
    match state {
        State::Idle | State::Negotiating => Phase::Setup,
        State::PreCopy { .. } | State::Preparing { .. } | State::Closing { .. } => Phase::PreCopy,
        State::Stopping { .. }
        | State::StopAndCopy
        | State::Verifying
        | State::SavingState
        | State::AwaitingReady
        | State::Cancelled => Phase::StopAndCopy,
        State::Handover | State::InDoubt | State::Done => Phase::Handover,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key of a constant, or of something that can be guessed, would be the same each time.
    #[test]
    fn each_session_has_a_key_of_its_own() {
        let prints = [0; 8].map(|_: u8| {
            let (_, key) = new_fingerprints().unwrap();
            key.page(&[7; 4096])
        });
        let different: std::collections::HashSet<_> = prints.into_iter().collect();
        assert_eq!(different.len(), prints.len());
        assert_ne!(new_session().unwrap().0, new_session().unwrap().0);
    }
}

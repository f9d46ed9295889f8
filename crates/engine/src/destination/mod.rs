//! The destination of a migration.
//!
//! [`receive`] is a loop around the state machine, as at the source. Threads: this one; one that
//! reads the control connection; one a data channel, of memory or of a disk. Messages come through
//! a queue, which is bounded: a machine that loads its state slowly slows the source down instead
//! of filling memory. They are taken in order: what follows the end of a round is looked at when
//! every channel has placed that round.
//!
//! Each thing has one owner: `session` (the control connection and all waiting), `offer` (what is
//! compared before anything is accepted), `lanes` (the channels), `loading` (the device state).

mod arriving;
mod barriers;
mod channel;
mod claims;
mod disk;
mod door;
mod dump;
mod fault;
mod fetching;
mod following;
mod from_copy;
mod killed;
mod lanes;
mod layout;
mod left;
mod loading;
mod memory;
mod offer;
mod proof;
mod record;
mod session;
mod slips;
mod telling;
mod told;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_disk::DiskChoice;
use godwit_fingerprints::Key;
use godwit_memory::RamBlock;
use godwit_protocol::destination::{Action, Input, State, step};
use godwit_units::ByteCount;
use godwit_wire::{Feature, Message};

use crate::address::Listener;
use crate::cells::Cells;
use crate::compression::Codecs;
use crate::link::link_error;
use crate::missing::MissingList;
use crate::security::Security;
use crate::vm::{DestinationVm, RunError};
use crate::{Cancel, EngineError, Failure, Phase, Survivor, limits};

use arriving::Fetching;
use channel::PEER;
use door::Return;
use dump::Dumps;
use fault::MadeUp;
use from_copy::FromCopy;
use killed::{Kept, await_killed, get_ready};
use lanes::Lanes;
use loading::Loading;
use offer::{Accepted, accept, answer_inquiry, check_room, consider};
use record::Record;
use session::{Session, out_of_place};

#[cfg(feature = "test-hooks")]
pub use crate::stamped::write_placed;
pub use dump::{DumpStage, Dumped};
#[cfg(feature = "test-hooks")]
pub use fault::{Defect, Fault, Faults};
pub use following::follow;
pub use left::Left;
pub use told::{Fetched, Notice, Received};

/// How a guest is to be taken in.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::destination::Options;
///
/// let options = Options { wait: Some(Duration::from_secs(3600)), ..Options::default() };
/// assert!(options.disks.is_none());
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a source is waited for; `None`: for ever.
    pub wait: Option<Duration>,
    /// Whether connections are encrypted, and from where they may come if not.
    pub security: Security,
    /// Codecs that are taken.
    pub codecs: Codecs,
    /// Disks that the source may overwrite.
    pub disks: DiskChoice,
    /// Take a guest in that may come to use more memory than this host, or the control group of its
    /// VM, has left.
    pub overcommit: bool,
    /// How long what has arrived is kept for a source whose connections are lost before its guest
    /// is stopped; zero: not at all.
    pub reconnect: Duration,
    /// Where to write down what another godwit needs to take the source up again that comes back,
    /// should this one be killed before the machine is told to load; one that finds such a record
    /// there waits for that source, for as long as `reconnect`. Only where the source can. It is
    /// removed at the end.
    pub record: Option<PathBuf>,
    /// Where to dump the guest's memory to before it runs: when all of it has arrived, and when
    /// device state is loaded. The guest stands still meanwhile, and cannot run here before all of
    /// its memory has come.
    pub dump: Option<PathBuf>,
    /// The directory to which the source copies what is missing when the guest begins to run here
    /// ([`post_copy_safe`](crate::source::Options::post_copy_safe)): it is taken from there when
    /// the source is lost, and the copy removed when all of it is here.
    pub post_copy_safe: Option<PathBuf>,
    /// Confine the threads that read what comes from outside: no capability, and no system call
    /// but those of their work. Placing pages may open nothing then, nor may the sinks of disks.
    pub confined: bool,
    /// Faults to make up, for tests.
    #[cfg(feature = "test-hooks")]
    pub faults: Faults,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            wait: None,
            security: Security::Local,
            codecs: Codecs::ALL,
            disks: DiskChoice::None,
            overcommit: false,
            reconnect: limits::RECONNECT,
            record: None,
            dump: None,
            post_copy_safe: None,
            confined: false,
            #[cfg(feature = "test-hooks")]
            faults: Faults::default(),
        }
    }
}

/// Takes in one guest over `listener`. Connections that do not speak the protocol are refused and
/// told of; a source that only asks ([`inquire`](crate::source::inquire)) is answered.
///
/// # Errors
/// Says what failed, when, and what became of the guest.
///
/// ```
/// use godwit_engine::address::Listener;
/// use godwit_engine::vm::DestinationVm;
/// use godwit_engine::{Cancel, Failure, destination};
///
/// fn take_in(vm: &mut dyn DestinationVm, listener: &Listener) -> Result<(), Failure> {
///     let (options, cancel) = (destination::Options::default(), Cancel::default());
///     let received =
///         destination::receive(vm, listener, &options, &cancel, &mut |it| println!("{it:?}"))?;
///     println!("the guest is here, after {:?}", received.total);
///     Ok(())
/// }
/// ```
pub fn receive(
    vm: &mut dyn DestinationVm,
    listener: &Listener,
    options: &Options,
    cancel: &Cancel,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Received, Failure> {
    let until = options.wait.map(|wait| Instant::now() + wait);
    let found = listener
        .address()
        .map_err(link_error(PEER))
        .and_then(|address| options.security.allows(&address))
        .and_then(|()| Cells::new(options.confined, PEER))
        .and_then(|cells| {
            let (mut kept, record) = Kept::look(vm, options)?;
            if let Some(record) = record {
                let terms = (&options.security, &cells);
                let begun = Session::restored(listener, terms, &record, cancel)
                    .and_then(|session| get_ready(vm, session, &record, options));
                // What is wrong with how this was started can be mended, and done again.
                let begun = begun.map_err(|error| kept.leave(error))?;
                let found = await_killed(vm, begun, &record, options, notice)?;
                kept.record = Some(record);
                return Ok((kept, found));
            }
            let found = await_source(vm, listener, until, (options, &cells), cancel, notice)?;
            Ok((kept, found))
        });
    let (kept, (session, first)) = match found {
        Ok(found) => found,
        Err(cause) => {
            // Nobody is there to be told anything.
            let discarded = vm.discard();
            let survivor = discarded.map_or(Survivor::Unknown, |()| Survivor::Source);
            return Err(Failure { phase: Phase::Setup, survivor, cause });
        }
    };
    let destination = Destination { kept, ..Destination::new(vm, options, notice, session) };
    destination.run(first)
}

/// Waits for a source that has come to stay, and for its first message. Those that only ask are
/// answered.
fn await_source<'a>(
    vm: &mut dyn DestinationVm,
    listener: &Listener,
    until: Option<Instant>,
    (options, cells): (&Options, &Cells),
    cancel: &'a Cancel,
    notice: &mut dyn FnMut(&Notice),
) -> Result<(Session<'a>, First), EngineError> {
    loop {
        let terms = (&options.security, cells);
        let mut session = Session::accept(listener, terms, until, cancel, notice)?;
        vm.heed(session.interrupt());
        match session.first_message(vm, notice) {
            Ok(Message::Inquiry(offer)) => answer_inquiry(session, vm, options, &offer, notice)?,
            first => return Ok((session, First::Said(first))),
        }
    }
}

/// What a source begins with.
enum First {
    /// What it said first.
    Said(Result<Message, EngineError>),
    /// It is back for what a godwit that was killed has left.
    Back(Return, Box<Lanes>, Record),
    /// The guest runs here, and it is still to come back for what is missing.
    Follow(Box<Lanes>),
}

struct Destination<'a> {
    vm: &'a mut dyn DestinationVm,
    ram: Arc<Vec<RamBlock>>,
    options: &'a Options,
    notice: &'a mut dyn FnMut(&Notice),
    session: Session<'a>,
    /// The guest runs at the source, so it is to run here.
    runs: bool,
    loading: Loading,
    /// The round whose end was told last, and the piece of device state.
    round: u32,
    state_piece: Vec<u8>,
    /// What the source says is still to come when the guest runs here.
    missing: Option<MissingList>,
    /// It has said all of that.
    left: bool,
    /// What is still to come, from then on, and what another godwit would fetch it by: to be
    /// written down, and when it is.
    fetching: Option<Fetching>,
    to_be_left: Option<left::Runs>,
    /// The source was lost, and its copy of what is still to come is in use.
    copy: Option<FromCopy>,
    followed: Option<Left>,
    /// It goes on for one that was killed, and the source has not come yet; and need not any more.
    unheard: bool,
    gives_up: bool,
    /// What is on the disks is to be told as well, when it is told what is in memory.
    disk_prints_wanted: bool,
    /// All pages are in place.
    pages_complete: bool,
    /// The source that has come back and was not answered yet.
    back: Option<Return>,
    kept: Kept,
    /// Where the source's copy of what is missing is, if it makes one.
    safe: Option<PathBuf>,
    dumps: Option<Dumps>,
    /// The first failure, and when it was.
    cause: Option<(Phase, EngineError)>,
    measures: Received,
    /// Packets for the guest's cards that came, and could not be given to them.
    packets_lost: u64,
}

/// How far it has come, with what is held there.
#[derive(Default)]
enum Stage {
    /// The offer fits; disks are open.
    Offered(Accepted),
    /// Pages are placed.
    Receiving(Box<Lanes>),
    /// Nothing is held, not yet or not any more.
    #[default]
    Nothing,
}

impl Stage {
    fn lanes(&self) -> Option<&Lanes> {
        match self {
            Self::Receiving(lanes) => Some(lanes),
            Self::Offered(_) | Self::Nothing => None,
        }
    }

    /// Has what is placed read back.
    fn prove(&mut self, vm: &mut dyn DestinationVm, seed: u64) -> Result<(), EngineError> {
        match self {
            Self::Receiving(lanes) => lanes.prove(vm, Key::new(seed)),
            Self::Offered(_) | Self::Nothing => Err(out_of_place(&Message::Prove { seed })),
        }
    }
}

impl<'a> Destination<'a> {
    /// One to which nothing has come yet.
    fn new(
        vm: &'a mut dyn DestinationVm,
        options: &'a Options,
        notice: &'a mut dyn FnMut(&Notice),
        session: Session<'a>,
    ) -> Self {
        Self {
            ram: vm.ram(),
            vm,
            options,
            notice,
            session,
            runs: false,
            loading: Loading::default(),
            round: 0,
            state_piece: Vec::new(),
            missing: None,
            left: false,
            fetching: None,
            to_be_left: None,
            copy: None,
            followed: None,
            unheard: false,
            gives_up: false,
            disk_prints_wanted: false,
            pages_complete: false,
            back: None,
            kept: Kept::default(),
            safe: options.post_copy_safe.clone(),
            dumps: options.dump.as_deref().map(Dumps::new),
            cause: None,
            packets_lost: 0,
            measures: Received::default(),
        }
    }
}

impl Destination<'_> {
    /// Takes in the guest of the source that began with `first`.
    fn run(mut self, first: First) -> Result<Received, Failure> {
        let mut state = State::Listening;
        let mut stage = Stage::default();
        let mut uncertain = false;
        let mut input = match first {
            First::Said(first) => match first.and_then(|first| self.consider(first)) {
                Ok(offered) => {
                    stage = Stage::Offered(offered);
                    Input::Offer
                }
                Err(error) => self.failed(state, error),
            },
            First::Back(back, lanes, record) => {
                (self.runs, self.measures.verified) = (record.running, record.verified);
                self.back = Some(back);
                stage = Stage::Receiving(lanes);
                Input::Returned
            }
            First::Follow(lanes) => {
                stage = Stage::Receiving(lanes);
                Input::Follow
            }
        };
        loop {
            let stepped = step(state, input, self.left).or_else(|unexpected| {
                let error = EngineError::Protocol { peer: PEER, what: unexpected.to_string() };
                let input = self.failed(state, error);
                step(state, input, self.left)
            });
            let Ok((next, actions)) = stepped else { break };
            state = next;
            let _state = tracing::info_span!("destination", ?state).entered();
            let mut follow = None;
            for action in actions {
                let _action = tracing::debug_span!("action", ?action).entered();
                match self.perform(&mut stage, action) {
                    Ok(input) => {
                        MadeUp::of(self.options).strike_after(action);
                        follow = input.or(follow);
                    }
                    Err(error) => {
                        uncertain |= matches!(error, EngineError::Uncertain(_)) || self.gives_up;
                        follow = Some(self.failed(state, error));
                        break;
                    }
                }
            }
            // Not known whether the guest runs: to say anything to the source would be a guess.
            if state.is_final() || uncertain || self.is_lost(state) {
                break;
            }
            input = match follow {
                Some(input) => input,
                None => {
                    self.await_peer(&mut stage).unwrap_or_else(|error| self.failed(state, error))
                }
            };
        }
        if let Some(followed) = self.followed.take_if(|_| self.gives_up) {
            followed.abandon();
        }
        self.measures.bytes = stage.lanes().map_or(ByteCount::ZERO, Lanes::received);
        // Nothing to wait for once all is said.
        let last_words = self.session.end(self.cause.is_some());
        drop(stage);
        if state == State::Done {
            return Ok(self.measures);
        }
        let (phase, mut cause) = self.cause.unwrap_or((Phase::Setup, EngineError::Cancelled));
        if let (EngineError::Link { .. }, Some((code, text))) = (&cause, last_words) {
            cause = EngineError::Aborted { peer: PEER, code, text };
        }
        let survivor = match state {
            _ if uncertain => Survivor::Unknown,
            State::Fetching | State::SeveredFetching => Survivor::Lost,
            _ => Survivor::Source,
        };
        Err(Failure { phase, survivor, cause })
    }

    /// Keeps the first failure, and says which input it is.
    fn failed(&mut self, state: State, error: EngineError) -> Input {
        let error = match error {
            EngineError::Vm(_)
            | EngineError::Layout(_)
            | EngineError::State(_)
            | EngineError::Interrupted => self.session.interruption().unwrap_or(error),
            error => error,
        };
        let input = match &error {
            EngineError::Link { .. } | EngineError::Silent { .. } => Input::LinkLost,
            EngineError::Aborted { .. } => Input::Aborted,
            _ => Input::Failed,
        };
        // What kept the guest from running is what the source must hear, whatever broke before.
        if state == State::Starting {
            self.cause = None;
        }
        self.cause.get_or_insert((phase_of(state), error));
        input
    }

    /// Compares what the source offers by `first`, and opens the disks.
    fn consider(&mut self, first: Message) -> Result<Accepted, EngineError> {
        let Message::Offer(offer) = first else {
            let what = "it did not begin with an offer".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        };
        let offered = consider(&self.session, self.vm, self.options, offer, self.notice)?;
        self.ram = self.vm.ram();
        self.runs = offered.offer.running;
        self.measures.verified = offered.offer.verify;
        Ok(offered)
    }

    /// What the source says next, as an input.
    fn await_peer(&mut self, stage: &mut Stage) -> Result<Input, EngineError> {
        let message = loop {
            // Once all pages are in place only the control connection counts.
            let lanes = stage.lanes().filter(|_| !self.pages_complete);
            let broken = || lanes.and_then(Lanes::failure);
            match self.session.next_message(self.vm, self.notice, broken)? {
                Message::Keep(secret) => {
                    self.session.keep(secret, self.options.reconnect)?;
                    self.keep_record(stage)?;
                }
                Message::Prove { seed } if !self.pages_complete => stage.prove(self.vm, seed)?,
                Message::LatePacket(packet) if self.takes_packets() => self.deliver(packet),
                missing @ Message::Missing { .. } => {
                    if let Some(input) = self.take_missing(stage, &missing)? {
                        return Ok(input);
                    }
                }
                message => break message,
            }
        };
        Ok(match message {
            Message::RoundEnd { round } => {
                self.round = round;
                if let Some(lanes) = stage.lanes() {
                    lanes.await_round(round, || self.session.ends())?;
                }
                Input::RoundEnd
            }
            Message::Prepare => Input::Prepare,
            Message::DigestRequest => Input::DigestRequest,
            Message::PrintsRequest { disks } => {
                self.disk_prints_wanted = disks;
                Input::PrintsRequest
            }
            Message::DeviceState(piece) => {
                self.session.no_longer_keeps();
                self.state_piece = piece;
                Input::State
            }
            Message::DeviceStateEnd => {
                self.pages_complete = true;
                Input::StateEnd
            }
            Message::Farewell => Input::Farewell,
            Message::Commit => Input::Commit,
            other => return Err(out_of_place(&other)),
        })
    }

    fn perform(&mut self, stage: &mut Stage, action: Action) -> Result<Option<Input>, EngineError> {
        use {Action as A, Stage as S};
        // What was done since may be the work of whoever has taken a thread over.
        // A guest that runs here without all of its memory cannot be given back for that.
        let fetches = self.left && self.session.is_committed();
        let may_be =
            matches!(action, A::DiscardGuest | A::SendDiscarded | A::SendRunning | A::AwaitResolve);
        if !fetches && !may_be {
            self.session.unharmed()?;
        }
        match (action, &mut *stage) {
            (A::SendAccept, S::Offered(_)) => self.accept(stage)?,
            (A::SendRoundAck, S::Receiving(lanes)) => self.acknowledge(lanes)?,
            (A::Prepare, stage) => {
                // From here on no other godwit can take it up.
                self.kept = Kept::default();
                // The guest still runs. What was placed so far need not be read back when it does
                // not.
                if let Some(prover) = stage.lanes().and_then(Lanes::prover)
                    && !prover.get_ready(limits::READ_BACK, || self.session.ends())?
                {
                    return Err(EngineError::ReadBack(limits::READ_BACK));
                }
                // Others may have filled the mount meanwhile. Soon the guest stops, and then it is
                // too late to say so.
                check_room(&self.ram, self.vm, self.options.overcommit)?;
                self.loading.prepare(self.vm)?;
                if self.session.has(Feature::PostCopy)
                    && let Some(vm) = self.vm.post_copy()
                {
                    vm.get_ready();
                }
                self.session.say(&Message::Prepared)?;
            }
            (A::SendPrepared, _) => self.session.say(&Message::Prepared)?,
            (A::Sever, S::Receiving(lanes)) => {
                self.sever();
                lanes.sever()?;
            }
            (A::AwaitReturn, _) if self.left => return self.await_source_again().map(Some),
            (A::AwaitReturn, _) => return self.await_return().map(Some),
            (A::AwaitPages, S::Receiving(lanes)) => self.await_pages(lanes)?,
            (A::FetchPages, S::Receiving(lanes)) => return self.fetch(lanes).map(Some),
            (A::SendPlaced, _) => self.say_placed()?,
            (A::SendResumed, S::Receiving(lanes)) => self.take_up(lanes)?,
            (A::SendDigests, S::Receiving(lanes)) => self.send_digests(lanes)?,
            (A::SendPrints, S::Receiving(lanes)) => self.send_prints(lanes)?,
            (A::WriteState, stage) => {
                let piece = std::mem::take(&mut self.state_piece);
                match &mut self.dumps {
                    Some(dumps) => dumps.hold(&piece)?,
                    None => {
                        let written = self.loading.write(&piece, self.vm);
                        written.map_err(|error| self.starved(stage.lanes(), error))?;
                    }
                }
            }
            (A::FinishLoad, S::Receiving(lanes)) => return self.finish_load(lanes).map(Some),
            (A::SendReady, S::Receiving(lanes)) => {
                self.session.say(&Message::Ready)?;
                self.measures.disks_to_ready = lanes.since_disks_in_place();
            }
            (A::RunGuest, _) => return self.run_guest().map(Some),
            (A::SendRunning, _) => {
                if !self.left {
                    self.session.linger();
                }
                let said = self.session.say(&Message::Running);
                // What had come for its cards before it ran here waits for nothing more.
                let until = Instant::now() + limits::LATE_BURST;
                while self.takes_packets()
                    && Instant::now() < until
                    && let Some(packet) = self.session.packet()
                {
                    self.deliver(packet);
                }
                // Switches learn the new place; a guest without a network card has nothing to
                // announce.
                let _ = self.vm.announce();
                said?;
            }
            (A::AwaitResolve, _) if fetches => {
                return self.await_asking_source().map(Some);
            }
            (A::AwaitResolve, _) => self.session.await_resolve(self.notice)?,
            (A::DiscardGuest, stage) => {
                self.loading.end();
                match stage {
                    S::Receiving(lanes) => lanes.end(),
                    S::Offered(_) | S::Nothing => *stage = S::Nothing,
                }
                self.session.interrupt().silence();
                self.vm.discard().map_err(EngineError::Uncertain)?;
            }
            (A::SendDiscarded, _) => {
                let message = match &self.cause {
                    Some((_, cause)) => {
                        Message::Abort { code: cause.abort_code(), text: cause.to_string() }
                    }
                    None => Message::Discarded,
                };
                // Best effort: a source that does not hear it asks, or notices that the link is
                // gone.
                let _ = self.session.say(&message);
            }
            // The state machine knows no such order.
            _ => return Err(EngineError::Panicked("main")),
        }
        Ok(None)
    }

    /// Accepts the offer, and its channels.
    fn accept(&mut self, stage: &mut Stage) -> Result<(), EngineError> {
        if let Stage::Offered(offered) = std::mem::take(stage) {
            self.session.agree(offered.offer.features);
            self.session.say(&accept(&self.session, self.options, &offered.offer))?;
            let made_up = MadeUp::of(self.options);
            let lanes = Lanes::accept(&self.session, &self.ram, offered, made_up, self.notice)?;
            *stage = Stage::Receiving(Box::new(lanes));
        }
        Ok(())
    }

    /// The connections are lost. A source that may come back is told so.
    fn sever(&mut self) {
        if self.session.keeps() && self.session.sever() {
            let why = self.cause.as_ref().map_or(String::new(), |(_, cause)| cause.to_string());
            let limit = if self.left { limits::ENDLESS } else { self.options.reconnect };
            (self.notice)(&Notice::Severed { why, limit });
            self.tell_lacks();
        }
    }

    /// Waits for the source to come back, as far as it may.
    fn await_return(&mut self) -> Result<Input, EngineError> {
        let keeps = self.session.keeps();
        let limit = if keeps { self.options.reconnect } else { Duration::ZERO };
        self.back = match self.session.await_return(self.vm, limit, self.notice) {
            Ok(back) => back,
            Err(error) => {
                // Whatever this is, it ends the wait, and so the migration.
                self.cause = None;
                return Err(error);
            }
        };
        if self.back.is_some() {
            return Ok(Input::Returned);
        }
        if keeps && let Some((phase, cause)) = self.cause.take() {
            let cause = EngineError::Severed { cause: Box::new(cause), limit, last: None };
            self.cause = Some((phase, cause));
        }
        Ok(Input::Failed)
    }

    /// Answers the source that is back, and takes its channels.
    fn take_up(&mut self, lanes: &mut Lanes) -> Result<(), EngineError> {
        let Some(back) = self.back.take() else { return Err(EngineError::Panicked("main")) };
        let way = (back.attempt, back.channels);
        self.kept.write(|record| record.attempt = back.attempt)?;
        if let Some(followed) = &mut self.followed {
            followed.returned(back.attempt)?;
        }
        // How many frames were placed says nothing of pages that come more than once.
        let placed = if self.left { (lanes.placed().0, [].as_slice()) } else { lanes.placed() };
        self.session.answer_return(back, placed)?;
        if self.left {
            self.tell_missing(lanes)?;
        }
        // A source whose channels do not come has lost its connections once more.
        let started = lanes.start_again(&self.session, way, self.notice);
        started.map_err(|error| match error {
            EngineError::Timeout { what, limit } => EngineError::Link {
                peer: PEER,
                source: io::Error::other(EngineError::Timeout { what, limit }),
            },
            error => {
                if !error.is_loss() {
                    // It ends the migration, and not how the connections were lost.
                    self.cause = None;
                }
                error
            }
        })?;
        if let Some(fetching) = &self.fetching {
            fetching.ask_again();
        }
        (self.notice)(&Notice::Resumed { after: self.session.lost_for() });
        self.session.is_back();
        self.cause = None;
        Ok(())
    }

    fn acknowledge(&mut self, lanes: &mut Lanes) -> Result<(), EngineError> {
        lanes.close_disks(self.vm, || self.session.ends())?;
        let flush = lanes.take_flush();
        // What was written is read back about as quickly: a source that is not slowed down would
        // leave it to the moment when the guest is to stop.
        if let Some(prover) = lanes.prover().filter(|_| !lanes.disks_are_closed()) {
            prover.catch_up(limits::READ_BACK / 2, || self.session.ends())?;
        }
        self.session.say(&Message::RoundAck { round: self.round, flush })?;
        (self.notice)(&Notice::Round { round: self.round, received: lanes.received() });
        Ok(())
    }

    fn finish_load(&mut self, lanes: &mut Lanes) -> Result<Input, EngineError> {
        lanes.forget_proof();
        if !lanes.disks_are_closed() {
            let what = "it sent all device state before the last round of its disks".to_owned();
            return Err(EngineError::Protocol { peer: PEER, what });
        }
        // From here on a channel that ends interrupts the machine; one that has ended before, as it
        // was not known yet that pages are missing, did not.
        if self.left
            && let Some(error) = lanes.failure()
        {
            return Err(error);
        }
        self.dump(DumpStage::Arrived)?;
        let began = Instant::now();
        if let Some(dumps) = &mut self.dumps {
            let written = self.loading.write(&dumps.let_go(), self.vm);
            written.map_err(|error| self.starved(Some(lanes), error))?;
        }
        self.loading.end();
        // While the machine loads.
        self.write_left(lanes)?;
        let loaded = self.vm.finish_load().map_err(EngineError::Vm);
        loaded.map_err(|error| self.starved(Some(lanes), error))?;
        self.measures.load = began.elapsed();
        self.dump(DumpStage::Loaded)?;
        Ok(Input::Loaded)
    }

    /// Dumps the guest's memory, where that is wanted.
    fn dump(&mut self, stage: DumpStage) -> Result<(), EngineError> {
        if let Some(dumps) = &mut self.dumps {
            let dumped = dumps.make(stage, &self.ram, self.session.interrupt())?;
            (self.notice)(&Notice::Dumped(dumped));
        }
        Ok(())
    }

    /// Whether the guest is lost: it ran here without all of its memory, and its machine has ended.
    /// The source is told, as far as it is there.
    fn is_lost(&mut self, state: State) -> bool {
        let lost = matches!(state, State::Fetching | State::SeveredFetching) && self.vm.has_ended();
        if lost {
            let ended = EngineError::Ended("destination");
            let (code, text) = (ended.abort_code(), ended.to_string());
            // A source that did not hear that the guest ran would take it back otherwise.
            let _ = self.session.say(&Message::Running);
            let _ = self.session.say(&Message::Abort { code, text });
            self.cause = Some((Phase::Handover, ended));
        }
        lost
    }

    /// Whether packets for the guest's cards may come: it is here, and they are no more than there
    /// may be within a switchover.
    fn takes_packets(&self) -> bool {
        let count = self.measures.late_packets + self.packets_lost;
        let may_come = self.session.has(Feature::LatePackets) && self.session.is_committed();
        may_come && count < limits::LATE_PACKETS
    }

    /// Gives a card what had come for it at the source.
    fn deliver(&mut self, packet: Vec<u8>) {
        let delivered = match self.measures.running {
            true => self.vm.deliver(packet),
            false => Err("the guest is paused".into()),
        };
        match delivered {
            Ok(()) => self.measures.late_packets += 1,
            // It is lost, as any packet may be.
            Err(error) => {
                if self.packets_lost == 0 {
                    tracing::info!(%error, "packets that come late are lost");
                }
                self.packets_lost += 1;
            }
        }
    }

    fn run_guest(&mut self) -> Result<Input, EngineError> {
        if self.vm.has_ended() {
            return Err(EngineError::Ended("destination"));
        }
        if self.runs {
            self.vm.taking_over().map_err(EngineError::Vm)?;
            MadeUp::of(self.options).strike_if(fault::Fault::KillBeforeRun);
            match self.vm.run() {
                Ok(()) => {}
                Err(RunError::NeverRan(error)) => return Err(EngineError::Vm(error)),
                // Its devices may wait for pages, which come only behind this.
                Err(RunError::Unknown(error)) if self.left => {
                    tracing::warn!(%error, "it is taken to run");
                }
                Err(RunError::Unknown(error)) => return Err(EngineError::Uncertain(error)),
            }
            self.measures.running = true;
        }
        self.measures.resume = self.session.since_commit();
        self.measures.total = self.session.elapsed();
        Ok(Input::Started)
    }
}

fn phase_of(state: State) -> Phase {
    match state {
        State::Listening => Phase::Setup,
        State::Receiving | State::Severed | State::SeveredPrepared => Phase::PreCopy,
        State::Prepared | State::Filling | State::Loading => Phase::StopAndCopy,
        State::Ready
        | State::Starting
        | State::Fetching
        | State::SeveredFetching
        | State::Running
        | State::Done
        | State::Discarded => Phase::Handover,
    }
}

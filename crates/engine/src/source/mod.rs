//! The source of a migration.
//!
//! [`migrate`] is a loop around the state machine: each action is carried out, waits for what it
//! needs, and yields the next input. Whatever fails becomes the input `Failed`, and the machine
//! says what that means.
//!
//! Each thing has one owner. What lasts from the beginning to the end is in [`Source`]: `session`
//! (the control connection and all waiting), `meter`, `ending`. What is there for a part of the way
//! belongs to the [`Stage`]: `setup`, then `copying` with its `lanes` (the channels), `disks` and
//! `convergence`, then `switchover` with the state relay beside them.
//!
//! Threads: this one; one that reads the control connection and two that write it; one a data
//! channel, of memory or of a disk; two that pass the device state on. They all report through the
//! session's queue of events.

mod abort;
mod audit;
mod before;
mod channel;
mod common;
mod convergence;
mod copying;
mod disk;
mod disk_sent;
mod disks;
mod ending;
mod fault;
mod following;
mod frame_sender;
mod free;
mod history;
mod lanes;
mod late;
mod link_share;
mod live;
mod look_back;
mod meter;
mod nobody;
mod options;
mod outage;
mod owned;
mod post_copy;
mod random;
mod record;
mod segment_table;
mod serving;
mod session;
mod setup;
mod slips;
mod slowdown;
mod speed;
mod state_relay;
mod switchover;
mod thread_clock;
mod to_serve;
mod trial;
mod turns;
mod verification;
mod wires;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;
use godwit_policy::Settings;
use godwit_protocol::source::{Action, Input, State, step};
use godwit_wire::{AbortCode, Feature, Message};

use crate::address::Address;
use crate::cells::Cells;
use crate::facts::Facts;
use crate::handle::{MigrationHandle, Own};
use crate::record::Place;
use crate::report::{Measures, Progress};
use crate::same_host::Landmark;
use crate::threads::processors_of_the_host;
use crate::vm::SourceVm;
use crate::{Cancel, EngineError, Failure, Phase, Survivor, limits};

use common::Common;
use copying::Copying;
use disks::Disks;
use ending::Ending;
use fault::MadeUp;
use meter::{Meter, Part};
use nobody::Nobody;
use record::Record;
use serving::Serving;
use session::{Resolved, Session};
use setup::{Presented, Setup};
use state_relay::StateRelay;
use switchover::Switchover;
use trial::try_connection;

const PEER: &str = "destination";

pub use before::BeforeSwitchover;
#[cfg(feature = "test-hooks")]
pub use fault::Fault;
pub use following::follow;
pub use godwit_policy::PostCopy;
pub use options::{Options, Verify};
pub use trial::Trial;

/// Moves the guest of `vm` to the destination at `options.to`.
///
/// `progress` is called at the end of each round and every [`limits::TICK`] in between.
///
/// # Errors
/// Says what failed, when, and where the guest is. Before the handover it is where it was, as it
/// was.
///
/// ```
/// use godwit_engine::handle::MigrationHandle;
/// use godwit_engine::vm::SourceVm;
/// use godwit_engine::{Survivor, source};
///
/// fn send_away(vm: &mut dyn SourceVm, to: &str) -> Result<(), Box<dyn std::error::Error>> {
///     let (options, handle) = (source::Options::new(to.parse()?), MigrationHandle::default());
///     match source::migrate(vm, &options, &handle, &mut |progress| println!("{progress:?}")) {
///         Ok(measures) => println!("it was gone for {:?}", measures.downtime),
///         Err(failed) if failed.survivor == Survivor::Source => println!("still here: {failed}"),
///         Err(failure) => return Err(failure.into()),
///     }
///     Ok(())
/// }
/// ```
pub fn migrate(
    vm: &mut dyn SourceVm,
    options: &Options,
    handle: &MigrationHandle,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Measures, Failure> {
    let unarmed = |cause| Failure { phase: Phase::Setup, survivor: Survivor::Source, cause };
    let new = Source::new(vm, options, handle, progress);
    let (mut source, mut setup) = new.map_err(|error| unarmed(EngineError::Random(error)))?;
    let restarts = source.look_for_record(&mut setup).map_err(unarmed)?;
    source.run(Stage::Setup(Box::new(setup)), if restarts { Input::Restart } else { Input::Start })
}

/// What a destination answered that was asked by [`inquire`].
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::source::Inquiry;
///
/// let inquiry =
///     Inquiry { round_trip: Duration::from_micros(240), ..Inquiry::default() };
/// assert!(inquiry.refusal.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inquiry {
    /// Why it would refuse the guest, if it would.
    pub refusal: Option<String>,
    /// How long its host took to take the connection, a round trip of the network.
    pub round_trip: Duration,
    /// What the connection carries, where that was to be tried and the guest would be accepted.
    pub trial: Option<Trial>,
    /// What its host has; `None`: a godwit of an older release does not tell.
    pub facts: Option<Facts>,
}

/// Asks the destination at `options.to` whether it would accept the guest of `vm`, as it would be
/// offered by [`migrate`]. Nothing is changed on either side, and the destination goes on waiting.
/// Whether its disks can be written, and a copy in a third place read, is not tried.
///
/// With `trial` bytes that mean nothing are sent for that time, at most 2 s of it, to find out what
/// one connection carries.
///
/// # Errors
/// Why it could not be asked.
///
/// ```
/// use godwit_engine::source::{Options, inquire};
/// use godwit_engine::vm::SourceVm;
/// use godwit_engine::Cancel;
///
/// fn fits(vm: &mut dyn SourceVm, to: &str) -> Result<bool, Box<dyn std::error::Error>> {
///     let inquiry = inquire(vm, &Options::new(to.parse()?), None, &Cancel::default())?;
///     if let Some(why) = &inquiry.refusal {
///         println!("it does not fit: {why}");
///     }
///     Ok(inquiry.refusal.is_none())
/// }
/// ```
pub fn inquire(
    vm: &mut dyn SourceVm,
    options: &Options,
    trial: Option<Duration>,
    cancel: &Cancel,
) -> Result<Inquiry, EngineError> {
    let settings = Settings::default();
    let handle = &MigrationHandle::new(settings, Own::default(), cancel.clone());
    let progress = &mut |_: &Progress| {};
    let (mut source, mut setup) =
        Source::new(vm, options, handle, progress).map_err(EngineError::Random)?;
    let answer = setup.present(&mut source, Presented::ToAsk, None).and_then(|common| {
        let trial = trial.filter(|_| common.features.contains(Feature::Trial));
        let longest = Duration::from_secs(2);
        let tried =
            trial.map(|time| try_connection(&mut source, time.min(longest), setup.round_trip));
        tried.transpose()
    });
    let answer = answer.map_err(|error| source.explained(error));
    if let Err(error) = &answer {
        source.session.abort(error);
    }
    let is_nobody = source.vm.machine().is_empty();
    // What is done with the machine next is no concern of a session that has ended.
    source.session.interrupt().silence();
    source.session.end();
    let (refusal, trial) = match answer {
        Ok(trial) => (None, trial),
        // It tells of its host when it has time.
        Err(error @ EngineError::Aborted { code: AbortCode::Busy, .. }) if is_nobody => {
            return Err(error);
        }
        Err(EngineError::Aborted { text, .. }) => (Some(text), None),
        // A destination of an older release takes it for a machine, and asks about that.
        Err(EngineError::Vm(error)) if is_nobody => (Some(error.to_string()), None),
        Err(error) => return Err(error),
    };
    Ok(Inquiry { refusal, round_trip: setup.round_trip, trial, facts: setup.facts })
}

/// The same without a VM: what the host at `options.to` has, how far it is away, and with `trial`
/// what one connection to it carries. A destination of an older release refuses, and `facts` and
/// `trial` are then `None`.
///
/// # Errors
/// Why it could not be asked.
///
/// ```
/// use godwit_engine::Cancel;
/// use godwit_engine::source::{Options, inquire_host};
///
/// fn look(to: &str) -> Result<(), Box<dyn std::error::Error>> {
///     let inquiry = inquire_host(&Options::new(to.parse()?), None, &Cancel::default())?;
///     match &inquiry.facts {
///         Some(facts) => println!("{} are free there", facts.available),
///         None => println!("it is an older godwit"),
///     }
///     Ok(())
/// }
/// ```
pub fn inquire_host(
    options: &Options,
    trial: Option<Duration>,
    cancel: &Cancel,
) -> Result<Inquiry, EngineError> {
    inquire(&mut Nobody::default(), options, trial, cancel)
}

/// What lasts from the beginning to the end.
struct Source<'a> {
    vm: &'a mut dyn SourceVm,
    ram: Arc<Vec<RamBlock>>,
    options: &'a Options,
    handle: &'a MigrationHandle,
    progress: &'a mut dyn FnMut(&Progress),
    session: Session,
    meter: Meter,
    ending: Ending,
    /// What is left may follow when the guest runs at the destination, and does.
    may_leave: bool,
    leaves: bool,
    /// Whether what comes for its cards is to be had, and since when it is kept, as long as it is.
    has_cards: bool,
    packets_since: Option<Instant>,
    /// Why the guest could, as far as the last round has shown.
    could_leave: Option<String>,
    /// Where what was missing then is in a third place as well.
    copied: Option<PathBuf>,
    /// How the connections were lost just now.
    loss: Option<EngineError>,
    /// What another godwit would go on by.
    record: Option<Place>,
    /// The same, when the guest runs at the destination and pages are missing there; or where that
    /// goes on for one that was killed.
    followed: Option<(Place, Record)>,
    /// What both sides have.
    common: Common,
    /// How many godwits have taken the migration up before.
    restarts: u8,
    /// The guest runs on more vCPUs than this host has processors.
    crowded: bool,
}

/// How far it has come, with what is held there.
#[derive(Default)]
enum Stage {
    /// No write is tracked yet.
    Setup(Box<Setup>),
    /// Memory is copied round by round.
    PreCopy(Box<Copying>),
    /// Both machines are ready for the device state. The guest still runs for some rounds, or is
    /// stopped.
    Switchover(Box<Switchover>),
    /// The guest runs at the destination, and what is missing there follows.
    Serving(Box<Serving>),
    /// Nothing is held any more.
    #[default]
    Over,
}

impl Stage {
    /// Writes are tracked.
    fn begin_copying(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        if let Self::Setup(setup) = std::mem::take(self) {
            *self = Self::PreCopy(Box::new(Copying::start(source, *setup)?));
        }
        Ok(())
    }

    /// Both machines are ready.
    fn begin_switchover(&mut self, relay: StateRelay) {
        if let Self::PreCopy(copying) = std::mem::take(self) {
            *self = Self::Switchover(Box::new(Switchover::new(*copying, relay)));
        }
    }

    /// The guest runs at the destination: what is left is sent from here on.
    fn begin_serving(&mut self, source: &mut Source<'_>) -> Result<(), EngineError> {
        if !matches!(self, Self::Switchover(_)) {
            return Ok(());
        }
        if let Self::Switchover(switchover) = std::mem::take(self) {
            let (mut serving, lanes) = switchover.into_serving(source)?;
            let taken = serving.take_over(source, lanes);
            *self = Self::Serving(Box::new(serving));
            taken?;
        }
        Ok(())
    }

    /// The rounds, where there are any.
    fn copying(&mut self) -> Option<&mut Copying> {
        match self {
            Self::PreCopy(copying) => Some(copying.as_mut()),
            Self::Switchover(switchover) => Some(switchover.copying()),
            Self::Setup(_) | Self::Serving(_) | Self::Over => None,
        }
    }

    /// Whether connections that are lost are made again: only while channels copy, and the guest
    /// was not stopped.
    fn survives_loss(&self, state: State) -> bool {
        let copies = matches!(self, Self::PreCopy(_) | Self::Switchover(_));
        copies
            && matches!(
                state,
                State::PreCopy { .. }
                    | State::Preparing { .. }
                    | State::Closing { .. }
                    | State::Severed { .. }
                    | State::SeveredClosing { .. }
            )
    }

    /// Ends all threads, and with the last clone of the tracker the tracking.
    fn end(self, source: &mut Source<'_>) {
        match self {
            Self::Switchover(switchover) => switchover.end(source),
            earlier => {
                drop(earlier);
                source.session.end();
            }
        }
    }
}

impl<'a> Source<'a> {
    /// What every conversation begins with, before anything is connected.
    fn new(
        vm: &'a mut dyn SourceVm,
        options: &'a Options,
        handle: &'a MigrationHandle,
        progress: &'a mut dyn FnMut(&Progress),
    ) -> std::io::Result<(Self, Setup)> {
        let meter = Meter::begin(options.channels);
        let made_up = MadeUp::of(options);
        let cells = Cells::new(options.confined, PEER).map_err(std::io::Error::other)?;
        let terms = (&options.security, &cells);
        let session = Session::new(&options.to, terms, handle.cancel(), made_up)?;
        let setup = Setup::new(vm, options, handle)?;
        let vcpus = vm.brake().map_or(0, |brake| brake.vcpus());
        let crowded = vm.was_running() && vcpus > processors_of_the_host();
        vm.heed(session.interrupt());
        let ending = Ending::default();
        let ram = vm.ram();
        let (may_leave, leaves, loss, record) = (false, false, None, None);
        let source = Self {
            ram,
            vm,
            options,
            handle,
            progress,
            session,
            meter,
            ending,
            may_leave,
            leaves,
            has_cards: false,
            packets_since: None,
            could_leave: None,
            copied: None,
            loss,
            record,
            followed: None,
            common: Common::default(),
            restarts: 0,
            crowded,
        };
        Ok((source, setup))
    }
}

impl Source<'_> {
    fn run(mut self, mut stage: Stage, mut input: Input) -> Result<Measures, Failure> {
        let mut state = State::Idle;
        while !state.is_final() {
            let last = self.last_pages();
            let stepped = step(state, input, last).or_else(|unexpected| {
                self.note(state, unexpected.into());
                step(state, Input::Failed, last)
            });
            let Ok((next, actions)) = stepped else { break };
            state = next;
            let _state = tracing::info_span!("source", ?state).entered();
            self.heed_loss(&stage, state);
            match self.perform_all(&mut stage, state, &actions) {
                Ok(next) => input = next,
                Err(error) if matches!(state, State::Serving | State::SeveredServing) => {
                    let error = self.explained(error);
                    let (serves, gives_up) = match &stage {
                        Stage::Serving(serving) => (true, serving.gives_up(&self)),
                        _ => (false, false),
                    };
                    let lost = serving::loses_guest(&error);
                    if gives_up || lost || !serves {
                        self.note(state, error);
                        if gives_up {
                            state = State::InDoubt;
                        } else if !lost {
                            // Another one may do better.
                            self.leave_to_another();
                        }
                        break;
                    }
                    self.loss = Some(error);
                    input = Input::LinkLost;
                }
                Err(error) if error.is_loss() && self.resumes(&stage, state) => {
                    self.loss = Some(error);
                    input = Input::LinkLost;
                }
                Err(error) => {
                    self.note(state, error);
                    input = Input::Failed;
                    if state == State::InDoubt && self.session.has_tried_enough() {
                        break;
                    }
                }
            }
        }
        if matches!(state, State::Handover | State::InDoubt) {
            self.leave_to_another();
        }
        self.ending.hear_last_words(&mut self.session);
        stage.end(&mut self);
        let safe = self.safe_copy(state);
        self.ending.outcome(state, self.vm, safe.as_deref())?;
        Ok(self.meter.into_measures())
    }

    /// Looks for what a godwit has left that was killed; whether its migration is to be taken up.
    fn look_for_record(&mut self, setup: &mut Setup) -> Result<bool, EngineError> {
        let Some(path) = &self.options.record else { return Ok(false) };
        if self.options.reconnect.is_zero() {
            return Ok(false);
        }
        let mut place = Place::new(path);
        let disks = setup.disks.named();
        let (running, safe) = (self.vm.was_running(), self.options.post_copy_safe.as_deref());
        let unfit = |record: &Record| {
            let elsewhere = record.copies_elsewhere(safe);
            elsewhere.or_else(|| record.other_keys(&self.options.security))
        };
        let found = Record::find(&mut place, running, (&self.ram, &disks), unfit)?;
        if let Some(record) = &found {
            let taken_up = self.session.restore(record).and_then(|()| setup.restart(self, record));
            taken_up.and_then(|()| place.write(record)).inspect_err(|error| {
                // The storage may come back, and another attempt take it up.
                if matches!(error, EngineError::Remainder { .. } | EngineError::Unwritten { .. }) {
                    place.abandon();
                }
            })?;
            self.agreed(setup.common);
            self.restarts = record.restarts();
        }
        self.record = Some(place);
        Ok(found.is_some())
    }

    /// Both sides have this in common.
    fn agreed(&mut self, common: Common) {
        self.common = common;
        self.meter.accepted(self.session.version(), &common);
    }

    /// Writes down what another godwit needs.
    fn write_record(&mut self, common: &Common, disks: &Disks) -> Result<(), EngineError> {
        let Some(place) = &mut self.record else { return Ok(()) };
        if !common.features.contains(Feature::Restart) {
            tracing::warn!("the destination cannot go on with a godwit that is started anew");
            return Ok(());
        }
        let how = (self.vm.was_running(), self.options.post_copy_safe.as_deref());
        let (told, shown) = self.session.known_by();
        let record = Record::new(told, shown, common, how, (&self.ram, &disks.named()));
        place.write(&record.begun_with(&self.options.security))
    }

    /// Whether connections that are lost now are made again.
    fn resumes(&self, stage: &Stage, state: State) -> bool {
        !self.options.reconnect.is_zero() && stage.survives_loss(state)
    }

    /// A loss ends long calls of the machine, unless it is to be made good.
    fn heed_loss(&self, stage: &Stage, state: State) {
        self.session.interrupt().be_patient(self.resumes(stage, state));
    }

    /// Where the destination is, and how many channels of memory are wanted, from the next
    /// connections on.
    fn way(&self) -> (Address, u8) {
        let to = self.handle.to().unwrap_or_else(|| self.options.to.clone());
        (to, self.handle.channels().unwrap_or_else(|| self.channels()))
    }

    /// How many channels of memory suit the way to the destination, as far as that is known.
    fn channels(&self) -> u8 {
        let Options { channels, channels_afar, .. } = *self.options;
        let many = self.session.is_long_way() || self.crowded;
        if many { channels.max(channels_afar) } else { channels }
    }

    /// Whether the destination, which has accepted, is on this host.
    fn is_within_a_host(&self) -> bool {
        let within = Landmark::is_in_sight(self.session.id());
        tracing::info!(within, "both sides on one host");
        within
    }

    /// What the machine failed with, or what ended its call.
    fn explained(&mut self, error: EngineError) -> EngineError {
        match error {
            EngineError::Vm(_) | EngineError::Interrupted => {
                self.session.interruption(self.vm).unwrap_or(error)
            }
            error => error,
        }
    }

    fn note(&mut self, state: State, error: EngineError) {
        let error = self.explained(error);
        tracing::warn!(?state, %error, "failed");
        self.ending.note(state, error, self.vm, self.session.is_committed());
    }

    /// Carries out `actions`; returns the next input, which the destination gives if no action
    /// does.
    fn perform_all(
        &mut self,
        stage: &mut Stage,
        state: State,
        actions: &[Action],
    ) -> Result<Input, EngineError> {
        let mut follow = None;
        for action in actions {
            let _action = tracing::debug_span!("action", ?action).entered();
            follow = self.perform(stage, *action)?.or(follow);
            self.session.made_up().strike_after(*action);
        }
        match follow {
            Some(input) => Ok(input),
            None if state.is_final() => Ok(Input::Failed),
            None => self.await_peer(state),
        }
    }

    /// Carries out one action; returns the input it leads to, if it knows one.
    fn perform(&mut self, stage: &mut Stage, action: Action) -> Result<Option<Input>, EngineError> {
        use {Action as A, Stage as S};
        match (action, &mut *stage) {
            (A::SendOffer, S::Setup(setup)) => setup.offer(self).map(Some),
            (A::StartTracking, S::Setup(_)) => {
                stage.begin_copying(self)?;
                self.heed_loss(stage, State::PreCopy { round: 0 });
                Ok(None)
            }
            (A::Sever, stage) => self.sever(stage).map(|()| None),
            (A::Reconnect, S::Serving(serving)) => serving.reconnect(self).map(Some),
            (A::Reconnect, stage) => match stage.copying() {
                Some(copying) => copying.reconnect(self).map(Some),
                None => Err(EngineError::Panicked("main")),
            },
            (A::CopyRound(round), S::PreCopy(copying)) => copying.copy(self, round).map(Some),
            (A::AskPolicy, S::PreCopy(copying)) => copying.decide(self, false).map(Some),
            (A::SendPrepare, S::PreCopy(copying)) => {
                let (relay, input) = switchover::prepare(self, copying)?;
                stage.begin_switchover(relay);
                Ok(Some(input))
            }
            (A::CopyRound(round), S::Switchover(last)) => {
                last.copying().copy(self, round).map(Some)
            }
            (A::AskPolicy, S::Switchover(last)) => last.copying().decide(self, true).map(Some),
            (A::StopGuest, S::Switchover(last)) => {
                // From here on nothing is taken up again.
                self.record = None;
                last.stop_guest(self).map(Some)
            }
            (A::StartLastRound(round), S::Switchover(last)) => {
                last.copying().begin_last(self, round).map(|()| None)
            }
            (A::ReleaseState, S::Switchover(last)) => last.release_state(self).map(|()| None),
            (A::CopyLastRound(round), S::Switchover(last)) => {
                last.finish_last_round(self, round).map(Some)
            }
            (A::ListMissing(round), S::Switchover(last)) => {
                last.list_missing(self, round).map(Some)
            }
            (A::ServePages, _) => {
                stage.begin_serving(self)?;
                self.note_that_it_runs_there();
                match stage {
                    S::Serving(serving) => serving.serve(self).map(Some),
                    _ => Err(EngineError::Panicked("main")),
                }
            }
            (A::CompareDigests, S::Switchover(last)) => last.compare_digests(self).map(Some),
            (A::FinishState, S::Switchover(last)) => last.finish_state(self).map(Some),
            (A::SendCommit, _) => {
                if self.leaves {
                    self.session.never_give_up();
                }
                self.session.commit()?;
                // Whether it runs there or comes back, what is sent now keeps nobody waiting.
                self.carry_what_has_come();
                Ok(None)
            }
            (A::Resolve, _) => self.resolve().map(Some),
            (A::SendFarewell, stage) => {
                self.say_farewell(stage);
                Ok(None)
            }
            (A::RetireGuest, stage) => {
                let missed = self.look_back(stage);
                let keep = self.options.keep_source || missed.is_some();
                self.ending.missed(missed);
                let retired = self.vm.retire(keep);
                self.ending.brought_back(retired);
                Ok(None)
            }
            (A::SendAbort, _) => {
                if let Some(cause) = self.ending.cause() {
                    self.session.abort(cause);
                }
                Ok(None)
            }
            (A::ResumeGuest, stage) => {
                self.resume(stage);
                Ok(None)
            }
            // The state machine knows no such order.
            _ => Err(EngineError::Panicked("main")),
        }
    }

    /// With the guest running at the destination: whether memory here, where nobody writes any
    /// more, holds anything that was not sent.
    fn look_back(&mut self, stage: &mut Stage) -> Option<EngineError> {
        let asked = self.options.verify == Verify::Live
            || self.session.made_up().is(fault::Fault::TrustTracker);
        let copying = stage.copying().filter(|_| asked)?;
        copying.look_back(self).unwrap_or_else(Some)
    }

    /// In states that only the destination can end: what it says next.
    fn await_peer(&mut self, state: State) -> Result<Input, EngineError> {
        let (what, limit) = match state {
            State::AwaitingReady => ("the destination to load the device state", limits::ANSWER),
            _ => ("the destination to run the guest", limits::RUNNING),
        };
        let committed = self.session.is_committed();
        let mut reason = None;
        let input = self.session.await_message(self.vm, what, limit, |message| match message {
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
            Input::Ready if state == State::AwaitingReady => self.is_ready()?,
            Input::Running => self.meter.part_ended(Part::Handover),
            Input::Discarded => self.ending.was_discarded(reason),
            _ => {}
        }
        Ok(input)
    }

    /// The destination could run the guest: the last moment in which a failure leaves it ours, and
    /// the one to make sure that nobody runs it here once COMMIT is sent.
    fn is_ready(&mut self) -> Result<(), EngineError> {
        self.session.hold(self.vm, fault::Fault::HoldReady)?;
        self.meter.part_ended(Part::Load);
        self.session.made_up().strike_if(fault::Fault::KillAfterReady);
        if !self.vm.has_ended() {
            self.check_fate()?;
        }
        self.vm.handing_over().map_err(EngineError::Vm)?;
        self.session.made_up().strike_if(fault::Fault::KillBeforeCommit);
        Ok(())
    }

    /// Ends the migration where nothing is left to be moved.
    fn check_fate(&mut self) -> Result<(), EngineError> {
        self.vm.befallen().map_or(Ok(()), |words| Err(EngineError::Befallen(words)))
    }

    fn sever(&mut self, stage: &mut Stage) -> Result<(), EngineError> {
        if let Stage::Serving(serving) = stage {
            let loss = self.loss.take();
            return serving.sever(self, loss);
        }
        match (stage.copying(), self.loss.take()) {
            (Some(copying), Some(loss)) => copying.sever(self, loss),
            _ => Err(EngineError::Panicked("main")),
        }
    }

    /// Connects to the destination again, to ask who runs the guest.
    fn resolve(&mut self) -> Result<Input, EngineError> {
        Ok(match self.session.resolve()? {
            Resolved::Running => Input::Running,
            Resolved::Reconnected => Input::Reconnected,
            Resolved::Discarded(reason) => {
                self.ending.was_discarded(reason);
                Input::Discarded
            }
        })
    }

    fn say_farewell(&mut self, stage: &mut Stage) {
        if let Stage::Serving(serving) = stage {
            self.meter.served(serving.measures(), serving.sent());
        }
        if let Some(copying) = stage.copying() {
            let totals = copying.totals(self);
            self.meter.finish(totals);
        }
        self.carry_what_comes();
        self.session.say_farewell();
    }

    /// Brings the guest back. The migration is over: whoever still reads disks must be gone before
    /// the machine takes their tracking away.
    fn resume(&mut self, stage: &mut Stage) {
        if let Some(copying) = stage.copying() {
            copying.stop();
        }
        self.session.interrupt().silence();
        let resumed = self.vm.resume();
        self.ending.brought_back(resumed);
    }
}

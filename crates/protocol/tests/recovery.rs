//! Both machines, what each side writes down before it acts, its VM, its guardian and the operator,
//! walked exhaustively: either godwit and either guardian is killed between any two steps, the
//! connections are cut with any part of what is on its way arriving late or never, either side
//! fails, connections are taken up again, a godwit that was killed is started anew, and the
//! operator settles what is left by docs/recovery.md.
//!
//! Checked in every reachable world: at most one VM runs the guest, and the source's never again
//! once the destination's has. From each, without a further fault, one VM comes to run it, with
//! nothing but time and `godwit recover` without force. Each rule that this rests on is broken in
//! turn, and the walk must find that out.
//!
//! The records and what guardians make of them are those of `crates/qemu/src/guard`; what
//! `godwit recover` knows is `Known` there. A source that is started anew begins a new session: of
//! one before it, it knows nothing. A destination that is started anew takes back the source of the
//! one that was killed, as long as its machine was not told to load.
#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet, VecDeque};

use godwit_protocol::destination::{self as dst, Action as D, Input as Di, State as Ds};
use godwit_protocol::source::{self as src, Action as S, Input as Si, LastPages, State as Ss};

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Broken {
    /// That COMMIT goes out is written down behind it.
    CommitUnrecorded,
    /// That the guest is stopped is written down behind that.
    StopUnrecorded,
    /// That the destination runs the guest is written down behind that.
    StartUnrecorded,
    /// The source is told that the guest never runs before the guest is gone.
    DiscardSaidFirst,
    /// A guardian runs a guest that may have been given away.
    GuardianRunsInDoubt,
    /// A guardian leaves a guest that was stopped as it is, and says nothing of it.
    GuardianLeavesStopped,
    /// A source that has heard nothing for long enough takes its guest back.
    DoubtEnds,
    /// A source that loses its connection behind COMMIT takes its guest back.
    LossIsNoDoubt,
    /// An operator in doubt runs the guest without a look at the other side.
    NoLook,
    /// An operator takes the word of a side whose godwit is still at work.
    NoWait,
    /// A source that is started anew does not mind what the one before it left.
    RestartInDoubt,
}

impl Broken {
    const ALL: [Self; 11] = [
        Self::CommitUnrecorded,
        Self::StopUnrecorded,
        Self::StartUnrecorded,
        Self::DiscardSaidFirst,
        Self::GuardianRunsInDoubt,
        Self::GuardianLeavesStopped,
        Self::DoubtEnds,
        Self::LossIsNoDoubt,
        Self::NoLook,
        Self::NoWait,
        Self::RestartInDoubt,
    ];
}

/// How far a side has come, as its record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Copying,
    Stopping,
    HandingOver,
    Waiting,
    Loading,
    Starting,
    Discarding,
}

/// What the VM of a side does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Vm {
    Runs,
    Stopped,
    /// No whole guest has come.
    Incoming,
    Loaded,
    Ended,
}

/// What `godwit recover` says of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Known {
    Runs,
    NeverCame,
    Stopped,
    InDoubt,
    HandedOver,
    Silent,
    Gone,
}

/// The godwit of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Process {
    AtWork,
    /// It was killed, and its guardian has not acted yet.
    Killed,
    /// Nobody is at work here.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Side {
    process: Process,
    guardian: bool,
    record: Option<Stage>,
    vm: Vm,
    restarts_left: u8,
}

impl Side {
    fn new(stage: Stage, vm: Vm) -> Self {
        let (process, guardian) = (Process::AtWork, true);
        Self { process, guardian, record: Some(stage), vm, restarts_left: 1 }
    }

    fn known(&self) -> Known {
        match (self.vm, self.record) {
            (Vm::Ended, _) => Known::Gone,
            (Vm::Runs, _) => Known::Runs,
            (Vm::Incoming, _) | (_, Some(Stage::Waiting | Stage::Loading | Stage::Discarding)) => {
                Known::NeverCame
            }
            (_, Some(Stage::Stopping)) => Known::Stopped,
            (_, Some(Stage::HandingOver)) => Known::InDoubt,
            (_, Some(Stage::Starting)) => Known::HandedOver,
            (_, Some(Stage::Copying) | None) => Known::Silent,
        }
    }

    fn runs(&self) -> bool {
        self.vm == Vm::Runs
    }

    /// What the guardian does once godwit was killed.
    fn guardian_acts(&mut self, broken: Option<Broken>) {
        self.process = Process::Gone;
        self.guardian = false;
        let Some(stage) = self.record else { return };
        match stage {
            Stage::Copying | Stage::Waiting => self.record = None,
            Stage::Stopping if broken == Some(Broken::GuardianLeavesStopped) => self.record = None,
            Stage::HandingOver if broken != Some(Broken::GuardianRunsInDoubt) => {}
            Stage::Stopping | Stage::HandingOver => (self.record, self.vm) = (None, Vm::Runs),
            Stage::Loading | Stage::Discarding => (self.record, self.vm) = (None, Vm::Ended),
            Stage::Starting => (self.record, self.vm) = (None, Vm::Runs),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Msg {
    Offer,
    Accept,
    RoundEnd,
    RoundAck,
    Prepare,
    Prepared,
    State,
    StateEnd,
    Ready,
    Commit,
    Running,
    Discarded,
    Farewell,
    Abort,
    Resume,
    Resumed,
}

/// One step of a godwit's own work: it can be killed before each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step<I> {
    Note(Stage),
    Vm(Vm),
    Say(Msg),
    Take(I),
    /// What a destination that is started anew knows its source by is written down, or removed.
    Keep(bool),
    /// Ends in good order, and takes the record along.
    End,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    broken: Option<Broken>,
    source: Ss,
    destination: Ds,
    here: Side,
    there: Side,
    source_steps: VecDeque<Step<Si>>,
    destination_steps: VecDeque<Step<Di>>,
    to_destination: VecDeque<Msg>,
    to_source: VecDeque<Msg>,
    link: bool,
    destination_current: bool,
    /// A destination that is started anew would know the source.
    kept: bool,
    source_knows: bool,
    destination_knows: bool,
    faults_left: u8,
    reconnects_left: u8,
    /// The guest has run at the destination.
    ran_there: bool,
}

type Add<'a> = &'a mut dyn FnMut(&dyn Fn(&mut World));

impl World {
    fn start(broken: Option<Broken>, faults_left: u8) -> Self {
        Self {
            broken,
            source: Ss::Idle,
            destination: Ds::Listening,
            here: Side::new(Stage::Copying, Vm::Runs),
            there: Side::new(Stage::Waiting, Vm::Incoming),
            source_steps: [Step::Take(Si::Start)].into(),
            destination_steps: VecDeque::new(),
            to_destination: VecDeque::new(),
            to_source: VecDeque::new(),
            link: true,
            destination_current: true,
            kept: false,
            source_knows: false,
            destination_knows: false,
            faults_left,
            reconnects_left: 1,
            ran_there: false,
        }
    }

    fn breaks(&self, rule: Broken) -> bool {
        self.broken == Some(rule)
    }

    fn source_takes(&mut self, input: Si) {
        let lost = matches!(input, Si::LinkLost | Si::Failed) && self.source == Ss::Handover;
        if lost && self.breaks(Broken::LossIsNoDoubt) {
            self.source = Ss::Cancelled;
            self.source_steps.extend([Step::Vm(Vm::Runs), Step::End]);
            return;
        }
        let (state, actions) = src::step(self.source, input, LastPages::Sent)
            .or_else(|_| src::step(self.source, Si::Failed, LastPages::Sent))
            .unwrap_or((self.source, Vec::new()));
        self.source = state;
        for action in actions {
            let steps: &[Step<Si>] = match action {
                S::SendOffer => &[Step::Say(Msg::Offer)],
                S::CopyRound(_) => &[Step::Say(Msg::RoundEnd)],
                S::AskPolicy => &[Step::Take(Si::SwitchOver)],
                S::SendPrepare => &[Step::Say(Msg::Prepare)],
                S::StopGuest if self.breaks(Broken::StopUnrecorded) => &[
                    Step::Vm(Vm::Stopped),
                    Step::Note(Stage::Stopping),
                    Step::Take(Si::GuestStopped),
                ],
                S::StopGuest => &[
                    Step::Note(Stage::Stopping),
                    Step::Vm(Vm::Stopped),
                    Step::Take(Si::GuestStopped),
                ],
                S::CopyLastRound(_) => &[Step::Say(Msg::RoundEnd), Step::Take(Si::RoundSent)],
                S::FinishState => {
                    &[Step::Say(Msg::State), Step::Say(Msg::StateEnd), Step::Take(Si::StateSent)]
                }
                S::SendCommit if self.breaks(Broken::CommitUnrecorded) => {
                    &[Step::Say(Msg::Commit), Step::Note(Stage::HandingOver)]
                }
                S::SendCommit => &[Step::Note(Stage::HandingOver), Step::Say(Msg::Commit)],
                S::SendAbort => &[Step::Say(Msg::Abort)],
                S::SendFarewell => &[Step::Say(Msg::Farewell)],
                S::RetireGuest => &[Step::Vm(Vm::Ended), Step::End],
                S::ResumeGuest if self.here.record == Some(Stage::HandingOver) => {
                    &[Step::Note(Stage::Stopping), Step::Vm(Vm::Runs), Step::End]
                }
                S::ResumeGuest => &[Step::Vm(Vm::Runs), Step::End],
                // What is left of the old connection is ended; what came over it is read.
                S::Resolve => {
                    (self.link, self.source_knows) = (false, true);
                    &[]
                }
                S::StartTracking
                | S::ListMissing(_)
                | S::ServePages
                | S::StartLastRound(_)
                | S::ReleaseState
                | S::CompareDigests
                | S::Sever
                | S::Reconnect => &[],
            };
            self.source_steps.extend(steps);
        }
    }

    fn destination_takes(&mut self, input: Di) {
        let (state, mut actions) = dst::step(self.destination, input, false)
            .or_else(|_| dst::step(self.destination, Di::Failed, false))
            .unwrap_or((self.destination, Vec::new()));
        self.destination = state;
        if self.breaks(Broken::DiscardSaidFirst) {
            actions.sort_by_key(|action| *action != D::SendDiscarded);
        }
        let loaded = !matches!(self.there.record, Some(Stage::Waiting) | None);
        for action in actions {
            let steps: &[Step<Di>] = match action {
                D::SendAccept => &[Step::Say(Msg::Accept), Step::Keep(true)],
                D::SendRoundAck => &[Step::Say(Msg::RoundAck)],
                D::Prepare => {
                    &[Step::Keep(false), Step::Note(Stage::Loading), Step::Say(Msg::Prepared)]
                }
                D::SendPrepared => &[Step::Say(Msg::Prepared)],
                D::SendResumed => {
                    self.destination_current = true;
                    &[Step::Say(Msg::Resumed)]
                }
                D::FinishLoad => &[Step::Vm(Vm::Loaded), Step::Take(Di::Loaded)],
                D::SendReady => &[Step::Say(Msg::Ready)],
                D::RunGuest if self.breaks(Broken::StartUnrecorded) => {
                    &[Step::Vm(Vm::Runs), Step::Note(Stage::Starting), Step::Take(Di::Started)]
                }
                D::RunGuest => {
                    &[Step::Note(Stage::Starting), Step::Vm(Vm::Runs), Step::Take(Di::Started)]
                }
                D::SendRunning => &[Step::Say(Msg::Running)],
                // One that has taken in nothing but pages waits for another guest.
                D::DiscardGuest if loaded => &[Step::Note(Stage::Discarding), Step::Vm(Vm::Ended)],
                D::SendDiscarded => &[Step::Say(Msg::Discarded)],
                D::DiscardGuest
                | D::AwaitPages
                | D::FetchPages
                | D::SendPlaced
                | D::SendDigests
                | D::SendPrints
                | D::WriteState
                | D::AwaitResolve
                | D::Sever
                | D::AwaitReturn => &[],
            };
            self.destination_steps.extend(steps);
        }
        if state.is_final() {
            self.destination_steps.push_back(Step::End);
        }
    }

    fn source_does(&mut self, step: Step<Si>) {
        match step {
            Step::Note(stage) => self.here.record = Some(stage),
            Step::Vm(vm) => self.here.vm = vm,
            Step::Say(msg) if self.link => self.to_destination.push_back(msg),
            Step::Say(_) => {}
            Step::Take(input) => self.source_takes(input),
            Step::Keep(_) => {}
            Step::End => {
                (self.here.record, self.here.process) = (None, Process::Gone);
                self.hang_up();
            }
        }
    }

    fn destination_does(&mut self, step: Step<Di>) {
        match step {
            Step::Note(stage) => self.there.record = Some(stage),
            Step::Vm(vm) => {
                self.there.vm = vm;
                self.ran_there |= vm == Vm::Runs;
            }
            Step::Say(msg) if self.link && self.destination_current => {
                self.to_source.push_back(msg);
            }
            Step::Say(_) => {}
            Step::Take(input) => self.destination_takes(input),
            Step::Keep(kept) => self.kept = kept,
            Step::End => {
                self.kept = false;
                (self.there.record, self.there.process) = (None, Process::Gone);
                self.hang_up();
            }
        }
    }

    /// A side has ended: nobody reads what is sent to it, and what it has said still arrives.
    fn hang_up(&mut self) {
        self.link = false;
        if self.here.process != Process::AtWork {
            self.to_source.clear();
            self.source_steps.clear();
        }
        if self.there.process != Process::AtWork {
            self.to_destination.clear();
            self.destination_steps.clear();
        }
    }

    /// What can follow without a fault, and with one.
    fn next(&self, faults: bool) -> Vec<World> {
        let mut worlds = Vec::new();
        let mut add = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            worlds.push(world);
        };
        if self.here.process == Process::AtWork {
            self.source_goes_on(&mut add);
        }
        if self.there.process == Process::AtWork {
            self.destination_goes_on(&mut add);
        }
        if self.here.process == Process::Killed {
            add(&|w| w.here.guardian_acts(w.broken));
        }
        if self.there.process == Process::Killed {
            add(&|w| {
                w.there.guardian_acts(w.broken);
                w.ran_there |= w.there.runs();
            });
        }
        self.operator(&mut add);
        if faults {
            self.restarts(&mut add);
            self.faults(&mut add);
        }
        worlds
    }

    fn source_goes_on(&self, add: Add<'_>) {
        if let Some(&step) = self.source_steps.front() {
            return add(&|w| {
                w.source_steps.pop_front();
                w.source_does(step);
            });
        }
        if let Some(&msg) = self.to_source.front() {
            let input = match msg {
                Msg::Accept => Si::Accepted,
                Msg::RoundAck => Si::RoundPlaced,
                Msg::Prepared => Si::Prepared,
                Msg::Ready => Si::Ready,
                Msg::Running => Si::Running,
                Msg::Discarded => Si::Discarded,
                Msg::Resumed => Si::Resumed,
                other => panic!("{other:?} to the source"),
            };
            let awaited = matches!(self.source, Ss::PreCopy { .. } | Ss::Closing { .. });
            let passed_over = msg == Msg::RoundAck && !awaited;
            return add(&|w| {
                w.to_source.pop_front();
                if !passed_over {
                    w.source_takes(input);
                }
            });
        }
        if self.link {
            return;
        }
        if !self.source_knows {
            return add(&|w| {
                w.source_knows = true;
                w.source_takes(Si::LinkLost);
            });
        }
        let asks = self.there.process == Process::AtWork && self.reconnects_left > 0;
        match self.source {
            Ss::Severed { .. } | Ss::SeveredClosing { .. } => {
                add(&|w| w.source_takes(Si::Failed));
                if asks {
                    for keep in 0..=self.to_destination.len() {
                        add(&|w| {
                            w.connect();
                            w.destination_current = false;
                            w.to_destination.truncate(keep);
                            w.to_destination.push_back(Msg::Resume);
                        });
                    }
                }
            }
            Ss::InDoubt => {
                // It gives up at last, and says that it is in doubt.
                add(&|w| {
                    w.here.process = Process::Gone;
                    if w.breaks(Broken::DoubtEnds) {
                        (w.here.vm, w.here.record) = (Vm::Runs, None);
                    }
                    w.hang_up();
                });
                // Only one that has lost its source takes the new connection; nobody else's word
                // counts.
                let awaited = matches!(self.destination, Ds::Ready | Ds::Starting | Ds::Running);
                if asks && awaited && self.destination_knows && self.destination_steps.is_empty() {
                    add(&|w| {
                        w.connect();
                        w.source_takes(Si::Reconnected);
                    });
                }
            }
            _ => {}
        }
    }

    fn connect(&mut self) {
        self.reconnects_left -= 1;
        (self.link, self.source_knows, self.destination_knows) = (true, false, false);
        self.destination_current = true;
        self.to_source.clear();
    }

    fn destination_goes_on(&self, add: Add<'_>) {
        if let Some(&step) = self.destination_steps.front() {
            return add(&|w| {
                w.destination_steps.pop_front();
                w.destination_does(step);
            });
        }
        if let Some(&msg) = self.to_destination.front() {
            let input = match msg {
                Msg::Resume => Di::LinkLost,
                Msg::Offer => Di::Offer,
                Msg::RoundEnd => Di::RoundEnd,
                Msg::Prepare => Di::Prepare,
                Msg::State => Di::State,
                Msg::StateEnd => Di::StateEnd,
                Msg::Commit => Di::Commit,
                Msg::Farewell => Di::Farewell,
                Msg::Abort => Di::Aborted,
                other => panic!("{other:?} to the destination"),
            };
            return add(&|w| {
                w.to_destination.pop_front();
                match msg {
                    Msg::Resume => w.destination_is_asked(),
                    _ => w.destination_takes(input),
                }
            });
        }
        if !self.link && !self.destination_knows && self.destination != Ds::Listening {
            return add(&|w| {
                w.destination_knows = true;
                w.destination_takes(Di::LinkLost);
            });
        }
        // Nobody is waited for for ever.
        let waits =
            matches!(self.destination, Ds::Severed | Ds::SeveredPrepared | Ds::Ready | Ds::Running);
        if waits && !self.link {
            add(&|w| w.destination_takes(Di::Failed));
        }
    }

    fn destination_is_asked(&mut self) {
        if matches!(self.destination, Ds::Receiving | Ds::Prepared) {
            self.destination_takes(Di::LinkLost);
        }
        let anew = self.destination == Ds::Listening && self.kept;
        if anew || matches!(self.destination, Ds::Severed | Ds::SeveredPrepared) {
            self.destination_takes(Di::Returned);
        } else {
            self.link = false;
        }
    }

    /// By the flow chart, at sides where no godwit is at work.
    fn operator(&self, add: Add<'_>) {
        let idle = |side: &Side| side.process == Process::Gone;
        let (here, there) = (self.here.known(), self.there.known());
        if idle(&self.here) && here == Known::Stopped {
            add(&|w| (w.here.vm, w.here.record) = (Vm::Runs, None));
        }
        if idle(&self.there) && there == Known::HandedOver {
            add(&|w| {
                (w.there.vm, w.there.record, w.ran_there) = (Vm::Runs, None, true);
            });
        }
        if !idle(&self.here) || here != Known::InDoubt {
            return;
        }
        if self.breaks(Broken::NoLook) {
            add(&|w| (w.here.vm, w.here.record) = (Vm::Runs, None));
        }
        if !idle(&self.there) && !self.breaks(Broken::NoWait) {
            return;
        }
        match there {
            Known::Runs => add(&|w| (w.here.vm, w.here.record) = (Vm::Ended, None)),
            Known::NeverCame if !idle(&self.there) => {
                add(&|w| (w.here.vm, w.here.record) = (Vm::Runs, None));
            }
            Known::NeverCame => add(&|w| (w.there.vm, w.there.record) = (Vm::Ended, None)),
            Known::Gone => add(&|w| (w.here.vm, w.here.record) = (Vm::Runs, None)),
            Known::HandedOver | Known::Silent | Known::Stopped | Known::InDoubt => {}
        }
    }

    /// A godwit is started anew where nobody is at work.
    fn restarts(&self, add: Add<'_>) {
        let can = |side: &Side| side.process == Process::Gone && side.restarts_left > 0;
        if can(&self.there) && self.there.vm == Vm::Incoming {
            add(&|w| {
                let restarts_left = w.there.restarts_left - 1;
                w.there = Side { restarts_left, ..Side::new(Stage::Waiting, Vm::Incoming) };
                w.destination = Ds::Listening;
                w.to_destination.clear();
            });
        }
        // It refuses a guest that is in doubt, and one that it finds stopped it leaves so.
        let refused = !self.breaks(Broken::RestartInDoubt)
            && (self.here.known() != Known::Runs || self.here.record.is_some());
        if can(&self.here) && self.here.vm != Vm::Ended && !refused {
            add(&|w| {
                let restarts_left = w.here.restarts_left - 1;
                w.here = Side { restarts_left, ..Side::new(Stage::Copying, w.here.vm) };
                w.source = Ss::Idle;
                w.to_source.clear();
                w.to_destination.clear();
                // A destination that has another source, or none any more, sends it away.
                let waits = w.destination == Ds::Listening && !w.kept;
                let welcome = w.there.process == Process::AtWork && waits;
                (w.link, w.source_knows) = (welcome, false);
                (w.destination_knows, w.destination_current) =
                    (w.destination_knows && !welcome, true);
                w.source_steps = [Step::Take(if welcome { Si::Start } else { Si::Failed })].into();
            });
        }
    }

    fn faults(&self, add: Add<'_>) {
        if self.faults_left == 0 {
            return;
        }
        let (mut left_d, left_s) = (0..=self.to_destination.len(), 0..=self.to_source.len());
        if self.link {
            for keep_d in left_d.clone() {
                for keep_s in left_s.clone() {
                    add(&|w| {
                        w.faults_left -= 1;
                        w.link = false;
                        w.to_destination.truncate(keep_d);
                        w.to_source.truncate(keep_s);
                    });
                }
            }
        }
        let dies = |guardian| if guardian { Process::Killed } else { Process::Gone };
        if self.here.process == Process::AtWork {
            for keep in left_d.by_ref() {
                add(&|w| {
                    w.faults_left -= 1;
                    w.to_destination.truncate(keep);
                    w.here.process = dies(w.here.guardian);
                    w.hang_up();
                });
            }
            if !self.source.is_final() {
                add(&|w| {
                    w.faults_left -= 1;
                    w.source_steps.clear();
                    w.source_takes(Si::Failed);
                });
            }
        }
        if self.there.process == Process::AtWork {
            for keep in left_s {
                add(&|w| {
                    w.faults_left -= 1;
                    w.to_source.truncate(keep);
                    w.there.process = dies(w.there.guardian);
                    w.hang_up();
                });
            }
            // One that runs the guest has not failed to.
            let fails = !self.destination.is_final()
                && self.destination != Ds::Listening
                && (self.destination != Ds::Starting || self.there.vm == Vm::Loaded);
            if fails {
                add(&|w| {
                    w.faults_left -= 1;
                    w.destination_steps.clear();
                    w.destination_takes(Di::Failed);
                });
            }
        }
        for side in [0, 1] {
            let of = |w: &World| [w.here, w.there][side];
            if of(self).guardian && of(self).process != Process::Gone {
                add(&|w| {
                    w.faults_left -= 1;
                    let side = if side == 0 { &mut w.here } else { &mut w.there };
                    side.guardian = false;
                    if side.process == Process::Killed {
                        side.process = Process::Gone;
                    }
                });
            }
        }
    }

    /// What is wrong here, if anything.
    fn wrong(&self) -> Option<&'static str> {
        match (self.here.runs(), self.there.runs()) {
            (true, true) => Some("two VMs run the guest"),
            (true, false) if self.ran_there => Some("the guest is run from an old state"),
            _ => None,
        }
    }

    fn settled(&self) -> bool {
        self.here.runs() != self.there.runs()
    }
}

/// What a walk found: how many worlds, what it saw on the way, and the first that is wrong.
struct Walk {
    worlds: Vec<World>,
    wrong: Option<(&'static str, World)>,
}

/// Every world that can come about with so many faults, until one is wrong.
fn walk(broken: Option<Broken>, faults: u8) -> Walk {
    let start = World::start(broken, faults);
    let mut numbers = HashMap::from([(start.clone(), 0)]);
    let mut worlds = vec![start];
    // Where each world can come from without a fault.
    let mut before: Vec<Vec<u32>> = vec![Vec::new()];
    let mut next = 0;
    while next < worlds.len() {
        let world = worlds[next].clone();
        if let Some(what) = world.wrong() {
            return Walk { worlds, wrong: Some((what, world)) };
        }
        let quiet: HashSet<World> = world.next(false).into_iter().collect();
        for follows in quiet.iter().cloned().chain(world.next(true)) {
            let faultless = quiet.contains(&follows);
            let number = *numbers.entry(follows.clone()).or_insert_with(|| {
                worlds.push(follows);
                before.push(Vec::new());
                worlds.len() - 1
            });
            if faultless {
                before[number].push(next as u32);
            }
        }
        next += 1;
    }
    // From where one VM comes to run the guest, and nothing more happens then.
    let ends = |world: &World| world.settled() && world.next(false).is_empty();
    let mut reaches: Vec<bool> = worlds.iter().map(ends).collect();
    let mut queue: Vec<u32> = (0..worlds.len() as u32).filter(|at| reaches[*at as usize]).collect();
    while let Some(at) = queue.pop() {
        for from in &before[at as usize] {
            if !std::mem::replace(&mut reaches[*from as usize], true) {
                queue.push(*from);
            }
        }
    }
    let stuck = (0..worlds.len()).find(|at| !reaches[*at]);
    let wrong = stuck.map(|at| ("nobody comes to run the guest", worlds[at].clone()));
    Walk { worlds, wrong }
}

#[test]
fn whoever_is_killed_one_vm_runs_the_guest_or_can_be_made_to() {
    let Walk { worlds, wrong } = walk(None, 3);
    assert!(wrong.is_none(), "{wrong:#?}");
    println!("{} worlds", worlds.len());
    assert!(worlds.len() > 50_000, "only {} worlds: the model is broken", worlds.len());
    let any = |what: &str, of: &dyn Fn(&World) -> bool| {
        assert!(worlds.iter().any(of), "no world in which {what}");
    };
    any("it is handed over", &|w| w.there.runs() && w.here.vm == Vm::Ended);
    any("both were killed", &|w| {
        w.here.process != Process::AtWork
            && w.there.guardian
            && w.there.process == Process::Killed
            && w.here.guardian
    });
    any("a guardian was killed with its godwit", &|w| {
        w.here.known() == Known::Stopped && w.here.process == Process::Gone
    });
    any("an operator is in doubt", &|w| {
        w.here.known() == Known::InDoubt && w.here.process == Process::Gone
    });
    any("it was handed over and is not run", &|w| {
        w.there.known() == Known::HandedOver && w.there.process == Process::Gone
    });
    any("a godwit started anew gives the guest away", &|w| {
        w.here.restarts_left == 0 && w.source == Ss::Done
    });
    any("it is given away behind a resumption", &|w| {
        w.reconnects_left == 0 && w.source == Ss::Done && w.here.restarts_left == 1
    });
    // Mutation: a destination that was started anew does not take its source back.
    any("it is given to a destination that was started anew in the middle", &|w| {
        let same = w.reconnects_left == 0 && w.here.restarts_left == 1;
        same && w.source == Ss::Done && w.there.restarts_left == 0
    });
}

#[test]
fn without_a_fault_nobody_is_needed() {
    let Walk { worlds, wrong } = walk(None, 0);
    assert!(wrong.is_none(), "{wrong:#?}");
    let ends = worlds.iter().filter(|world| world.next(false).is_empty());
    for end in ends {
        assert!(end.there.runs() && end.here.vm == Vm::Ended, "{end:#?}");
        assert_eq!((end.here.record, end.there.record), (None, None));
    }
}

#[test]
fn each_rule_is_needed() {
    for broken in Broken::ALL {
        let found = walk(Some(broken), 2).wrong;
        println!("{broken:?}: {:?}", found.as_ref().map(|(what, _)| what));
        assert!(found.is_some(), "{broken:?} goes unnoticed");
    }
}

#[test]
fn six_faults_are_borne_as_well() {
    let Walk { worlds, wrong } = walk(None, 6);
    println!("{} worlds", worlds.len());
    assert!(wrong.is_none(), "{wrong:#?}");
}

//! Both machines and the link between them, walked exhaustively: every interleaving, the link
//! breaking, either side failing and either process being killed at any point.
//!
//! Checked in every reachable state: at most one side may run the guest. Checked at the end: from
//! every state in which somebody is left to ask, some way leads to an end with exactly one owner. A
//! source that was killed before it sent COMMIT still owns its guest: whoever brings the guest back
//! relies on that.
#![allow(clippy::unwrap_used)]

use std::collections::{HashSet, VecDeque};

use godwit_protocol::destination::{self as dst, Action as D, Input as Di, State as Ds};
use godwit_protocol::source::{self as src, Action as S, Input as Si, LastPages, State as Ss};

/// A message on its way; only what the machines tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Msg {
    Offer,
    Accept,
    RoundEnd,
    RoundAck,
    Prepare,
    Prepared,
    DigestRequest,
    Digests,
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
    Missing,
    /// The last of the missing pages.
    Page,
    Placed,
}

/// What an engine does by itself after an action: an input to its own machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    source: Ss,
    destination: Ds,
    /// Inputs that the source's (destination's) own work will yield.
    source_todo: VecDeque<Si>,
    destination_todo: VecDeque<Di>,
    to_destination: VecDeque<Msg>,
    to_source: VecDeque<Msg>,
    link: bool,
    /// The destination speaks over the connection that the source listens to: not as long as it has
    /// not seen that there is another one.
    destination_current: bool,
    /// Each side notices a broken link once.
    source_knows: bool,
    destination_knows: bool,
    faults_left: u8,
    reconnects_left: u8,
    /// The destination process is gone: nobody answers any more.
    destination_gone: bool,
    /// The source process was killed in the state that `source` holds: nobody asks or answers any
    /// more.
    source_gone: bool,
    last: LastPages,
    /// The destination was told that pages are still to come, and whether they have.
    left: bool,
    missing: bool,
    /// The operator does not want to wait for another round once both machines are ready.
    haste: bool,
}

impl World {
    fn start(last: LastPages, haste: bool) -> Self {
        Self {
            source: Ss::Idle,
            destination: Ds::Listening,
            source_todo: [Si::Start].into(),
            destination_todo: VecDeque::new(),
            to_destination: VecDeque::new(),
            to_source: VecDeque::new(),
            link: true,
            destination_current: true,
            source_knows: false,
            destination_knows: false,
            faults_left: 3,
            reconnects_left: 2,
            destination_gone: false,
            source_gone: false,
            last,
            left: false,
            missing: false,
            haste,
        }
    }

    fn send(&mut self, to_destination: bool, msg: Msg) {
        if self.link && (to_destination || self.destination_current) {
            let queue = if to_destination { &mut self.to_destination } else { &mut self.to_source };
            queue.push_back(msg);
        }
    }

    fn source_takes(&mut self, input: Si) {
        let (state, actions) = src::step(self.source, input, self.last).unwrap_or_else(|_| {
            src::step(self.source, Si::Failed, self.last).unwrap_or((self.source, vec![]))
        });
        self.source = state;
        for action in actions {
            match action {
                S::SendOffer => self.send(true, Msg::Offer),
                S::CopyRound(_) => self.send(true, Msg::RoundEnd),
                S::CopyLastRound(_) => {
                    self.send(true, Msg::RoundEnd);
                    if self.last == LastPages::Sent {
                        self.source_todo.push_back(Si::RoundSent);
                    }
                }
                S::ListMissing(_) => {
                    self.send(true, Msg::RoundEnd);
                    self.send(true, Msg::Missing);
                    self.source_todo.push_back(Si::MissingListed);
                }
                S::ServePages => self.send(true, Msg::Page),
                // One further round is enough to go round each of the two loops.
                S::AskPolicy => {
                    let first = [Ss::PreCopy { round: 0 }, Ss::Closing { round: 2 }];
                    let next =
                        if first.contains(&self.source) { Si::NextRound } else { Si::SwitchOver };
                    self.source_todo.push_back(next);
                }
                S::SendPrepare => self.send(true, Msg::Prepare),
                S::StopGuest => self.source_todo.push_back(Si::GuestStopped),
                S::CompareDigests => self.send(true, Msg::DigestRequest),
                S::FinishState => {
                    self.send(true, Msg::State);
                    self.send(true, Msg::StateEnd);
                    self.source_todo.push_back(Si::StateSent);
                }
                S::SendCommit => self.send(true, Msg::Commit),
                S::SendAbort => self.send(true, Msg::Abort),
                S::SendFarewell => self.send(true, Msg::Farewell),
                // What is left of the connections is ended; what has come over them is read.
                S::Sever => (self.link, self.source_knows) = (false, true),
                S::StartTracking
                | S::Reconnect
                | S::StartLastRound(_)
                | S::ReleaseState
                | S::Resolve
                | S::RetireGuest
                | S::ResumeGuest => {}
            }
        }
    }

    fn destination_takes(&mut self, input: Di) {
        let (state, actions) = dst::step(self.destination, input, self.left).unwrap_or_else(|_| {
            dst::step(self.destination, Di::Failed, self.left).unwrap_or((self.destination, vec![]))
        });
        self.destination = state;
        for action in actions {
            match action {
                D::SendAccept => self.send(false, Msg::Accept),
                D::SendRoundAck => self.send(false, Msg::RoundAck),
                D::Prepare | D::SendPrepared => self.send(false, Msg::Prepared),
                D::SendResumed => {
                    self.destination_current = true;
                    self.send(false, Msg::Resumed);
                }
                D::SendDigests => self.send(false, Msg::Digests),
                D::FinishLoad => self.destination_todo.push_back(Di::Loaded),
                D::SendReady => self.send(false, Msg::Ready),
                D::RunGuest => self.destination_todo.push_back(Di::Started),
                D::SendRunning => self.send(false, Msg::Running),
                D::SendDiscarded => self.send(false, Msg::Discarded),
                D::AwaitPages => (self.left, self.missing) = (true, true),
                D::SendPlaced => self.send(false, Msg::Placed),
                D::Sever => (self.link, self.destination_knows) = (false, true),
                // All of them may have come while the state was loaded.
                D::FetchPages if !self.missing => {
                    self.destination_todo.push_back(Di::AllPlaced);
                }
                D::AwaitReturn if self.left && !self.missing => {
                    self.destination_todo.push_back(Di::AllPlaced);
                }
                D::FetchPages
                | D::WriteState
                | D::SendPrints
                | D::AwaitResolve
                | D::AwaitReturn
                | D::DiscardGuest => {}
            }
        }
    }

    /// A source that has lost its connections comes back over a new one. Who still believes in the
    /// old ones gives them up; who does not wait for it closes the new one.
    fn destination_is_asked(&mut self) {
        if matches!(self.destination, Ds::Receiving | Ds::Prepared | Ds::Fetching) {
            // What it ends is the old connection, not this one.
            let new = (self.link, self.destination_knows);
            self.destination_takes(Di::LinkLost);
            (self.link, self.destination_knows) = new;
        }
        let complete = self.destination == Ds::Running && self.left;
        if complete
            || matches!(self.destination, Ds::Severed | Ds::SeveredPrepared | Ds::SeveredFetching)
        {
            self.destination_takes(Di::Returned);
        } else {
            self.link = false;
        }
    }

    /// Every world that can follow this one; `faults` says whether something may break.
    fn next(&self, faults: bool) -> Vec<World> {
        let mut worlds = Vec::new();
        let mut add = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            worlds.push(world);
        };
        if let Some(&input) = self.source_todo.front() {
            add(&|w| {
                w.source_todo.pop_front();
                w.source_takes(input);
            });
        }
        if let (Some(&input), false) = (self.destination_todo.front(), self.destination_gone) {
            add(&|w| {
                w.destination_todo.pop_front();
                w.destination_takes(input);
            });
        }
        // A side reads what comes next only once its own work is done.
        if let (Some(&msg), true) = (self.to_source.front(), self.source_todo.is_empty()) {
            let input = match msg {
                Msg::Accept => Si::Accepted,
                Msg::RoundAck => Si::RoundPlaced,
                Msg::Prepared if self.haste => Si::PreparedInHaste,
                Msg::Prepared => Si::Prepared,
                Msg::Digests => Si::DigestsEqual,
                Msg::Ready => Si::Ready,
                Msg::Running => Si::Running,
                Msg::Discarded => Si::Discarded,
                Msg::Resumed => Si::Resumed,
                Msg::Placed => Si::AllPlaced,
                other => panic!("{other:?} to the source"),
            };
            // Nobody waits for the last round to be in place, unless digests are to be compared.
            let awaited = matches!(self.source, Ss::PreCopy { .. } | Ss::Closing { .. });
            let compared = self.last == LastPages::Compared;
            let passed_over = msg == Msg::RoundAck && !compared && !awaited;
            add(&|w| {
                w.to_source.pop_front();
                if !passed_over {
                    w.source_takes(input);
                }
            });
        }
        let destination_reads = self.destination_todo.is_empty()
            && !self.destination_gone
            && !self.destination.is_final();
        if let (Some(&msg), true) = (self.to_destination.front(), destination_reads) {
            let input = match msg {
                // Behind it: see below.
                Msg::Resume => Di::LinkLost,
                Msg::Offer => Di::Offer,
                Msg::RoundEnd => Di::RoundEnd,
                Msg::Prepare => Di::Prepare,
                Msg::DigestRequest => Di::DigestRequest,
                Msg::State => Di::State,
                Msg::StateEnd => Di::StateEnd,
                Msg::Commit => Di::Commit,
                Msg::Missing => Di::Missing,
                Msg::Page => Di::AllPlaced,
                Msg::Farewell => Di::Farewell,
                Msg::Abort => Di::Aborted,
                other => panic!("{other:?} to the destination"),
            };
            add(&|w| {
                w.to_destination.pop_front();
                match msg {
                    Msg::Resume => w.destination_is_asked(),
                    // A page comes over its own connection, and changes nothing where it is not
                    // missing any more.
                    Msg::Page if !w.missing => {}
                    Msg::Page => {
                        w.missing = false;
                        w.destination_takes(input);
                    }
                    _ => w.destination_takes(input),
                }
            });
        }
        // A machine that loads its state may look at all pages that are missing, and gets them.
        let loads = matches!(self.destination, Ds::Filling | Ds::Loading | Ds::Ready);
        let answers = self.link && !self.source_gone && !self.destination_gone;
        if loads && answers && self.missing && !self.source.is_final() {
            add(&|w| w.missing = false);
        }
        // A broken link is noticed after what had arrived by then was read.
        let source_notices =
            !self.source_gone && self.to_source.is_empty() && self.source_todo.is_empty();
        if !self.link && !self.source_knows && source_notices {
            add(&|w| {
                w.source_knows = true;
                w.source_takes(Si::LinkLost);
            });
        }
        if !self.link
            && !self.destination_knows
            && self.to_destination.is_empty()
            && destination_reads
        {
            add(&|w| {
                w.destination_knows = true;
                w.destination_takes(Di::LinkLost);
            });
        }
        // Nobody asks a destination for ever: it gives up when its wait for the source has reached
        // its limit.
        let waits = !self.link && self.destination_knows && self.source_gone;
        if waits && destination_reads && self.destination == Ds::Ready {
            add(&|w| w.destination_takes(Di::Failed));
        }
        let can_ask = self.source == Ss::InDoubt
            && !self.source_gone
            && self.source_knows
            && (self.destination_knows && !self.destination_gone)
            // In a final state it does not wait for anybody any more.
            && !self.destination.is_final()
            && self.reconnects_left > 0;
        if can_ask {
            add(&|w| {
                w.reconnects_left -= 1;
                (w.link, w.source_knows, w.destination_knows) = (true, false, false);
                w.destination_current = true;
                w.source_takes(Si::Reconnected);
            });
        }
        let serves = self.source == Ss::SeveredServing;
        let severed = matches!(self.source, Ss::Severed { .. } | Ss::SeveredClosing { .. });
        if (severed || serves) && !self.source_gone && self.source_knows && !self.link {
            // It does not try for ever, unless it has pages that are missing.
            if severed {
                add(&|w| w.source_takes(Si::Failed));
            }
            let answers = !self.destination_gone && !self.destination.is_final();
            if self.reconnects_left > 0 && (answers || severed && !self.destination_gone) {
                // What was said over the old connection may still be read first.
                for keep in 0..=self.to_destination.len() {
                    add(&|w| {
                        w.reconnects_left -= 1;
                        (w.link, w.source_knows, w.destination_knows) = (true, false, false);
                        w.destination_current = false;
                        w.to_source.clear();
                        w.to_destination.truncate(keep);
                        w.to_destination.push_back(Msg::Resume);
                    });
                }
            }
        }
        // Another godwit takes up what one that was killed has left, where pages follow.
        let follows =
            matches!(self.source, Ss::Handover | Ss::InDoubt | Ss::Serving | Ss::SeveredServing)
                && self.last == LastPages::Left;
        if self.source_gone && follows && !self.link {
            add(&|w| {
                (w.source_gone, w.source_knows) = (false, true);
                w.source = Ss::Idle;
                w.source_takes(Si::Follow);
            });
        }
        let runs = matches!(self.destination, Ds::Fetching | Ds::SeveredFetching | Ds::Running);
        if self.destination_gone && runs && self.left && !self.link {
            add(&|w| {
                (w.destination_gone, w.destination_knows) = (false, true);
                w.destination = Ds::Listening;
                w.destination_takes(Di::Follow);
            });
        }
        // Nor is a source waited for for ever.
        let waits = matches!(self.destination, Ds::Severed | Ds::SeveredPrepared);
        if waits && !self.destination_gone {
            add(&|w| w.destination_takes(Di::Failed));
        }
        if faults && self.faults_left > 0 {
            if self.link {
                // Any suffix of what is on its way may be lost.
                for keep_d in 0..=self.to_destination.len() {
                    for keep_s in 0..=self.to_source.len() {
                        add(&|w| {
                            w.faults_left -= 1;
                            w.link = false;
                            w.to_destination.truncate(keep_d);
                            w.to_source.truncate(keep_s);
                        });
                    }
                }
            }
            if !self.source_gone {
                add(&|w| {
                    w.faults_left -= 1;
                    w.source_takes(Si::Failed);
                });
                // The process is killed between two of its steps. What it has sent may arrive or be
                // lost.
                for keep in 0..=self.to_destination.len() {
                    add(&|w| {
                        w.faults_left -= 1;
                        w.source_gone = true;
                        w.link = false;
                        w.source_todo.clear();
                        w.to_source.clear();
                        w.to_destination.truncate(keep);
                    });
                }
            }
            if !self.destination_gone {
                add(&|w| {
                    w.faults_left -= 1;
                    w.destination_todo.clear();
                    w.destination_takes(Di::Failed);
                });
                // The process dies. Its guest, if it ran, runs on; if not, it never will.
                add(&|w| {
                    w.faults_left -= 1;
                    w.destination_gone = true;
                    w.link = false;
                    w.to_destination.clear();
                    w.destination_todo.clear();
                });
            }
        }
        worlds
    }
}

fn reachable(from: World, faults: bool) -> HashSet<World> {
    let mut seen = HashSet::from([from.clone()]);
    let mut queue = VecDeque::from([from]);
    while let Some(world) = queue.pop_front() {
        for next in world.next(faults) {
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    seen
}

/// The last pages sent, compared or left, with and without another round when both machines are
/// ready.
fn starts() -> [World; 6] {
    let ways = [LastPages::Sent, LastPages::Compared, LastPages::Left];
    let starts = ways.map(|last| [true, false].map(|haste| World::start(last, haste)));
    starts.concat().try_into().unwrap()
}

#[test]
fn never_two_owners() {
    let worlds: HashSet<World> =
        starts().into_iter().flat_map(|start| reachable(start, true)).collect();
    assert!(worlds.len() > 1_000, "only {} worlds: the model is broken", worlds.len());
    for world in &worlds {
        let owners =
            u8::from(world.source.may_run_guest()) + u8::from(world.destination.may_run_guest());
        assert!(owners <= 1, "two owners: {world:?}");
        if world.source == Ss::Done {
            assert!(!world.missing, "nobody has the missing pages: {world:?}");
            assert!(world.destination.may_run_guest(), "the guest is gone: {world:?}");
        }
    }
    let resumed = |world: &&World| world.source == Ss::Handover && world.reconnects_left < 2;
    assert!(
        worlds.iter().any(|world| resumed(&world)),
        "no guest is given away behind a resumption"
    );
    let severed = [Ss::Severed { round: 0 }, Ss::SeveredClosing { round: 2 }];
    for state in [Ss::Done, Ss::Cancelled, Ss::InDoubt].into_iter().chain(severed) {
        assert!(worlds.iter().any(|world| world.source == state), "{state:?} is never reached");
    }
}

#[test]
fn without_faults_the_guest_arrives() {
    let worlds: HashSet<World> =
        starts().into_iter().flat_map(|start| reachable(start, false)).collect();
    assert!(
        worlds.iter().any(|world| world.source == Ss::Closing { round: 3 }),
        "a round behind Prepare"
    );
    let ends: Vec<&World> = worlds.iter().filter(|world| world.next(false).is_empty()).collect();
    assert!(!ends.is_empty());
    for end in ends {
        assert_eq!((end.source, end.destination), (Ss::Done, Ds::Done));
    }
}

#[test]
fn after_any_fault_there_is_an_owner_unless_nobody_is_left_to_ask() {
    let worlds = starts().map(|start| reachable(start, true));
    for world in worlds.into_iter().flatten() {
        if !world.next(false).is_empty() {
            continue;
        }
        let owner = world.source.may_run_guest() || world.destination.may_run_guest();
        let in_doubt = world.source == Ss::InDoubt;
        // In doubt to the end only when the destination is gone, in good order or not, or the last
        // chance to ask was used up.
        let ended = world.destination_gone || world.destination.is_final();
        // One that is in doubt asks who runs the guest.
        let unheard = in_doubt && (ended || world.reconnects_left == 0);
        // A source that was killed after it had sent COMMIT cannot ask any more.
        let killed = world.source_gone && matches!(world.source, Ss::Handover | Ss::InDoubt);
        let excused = unheard || killed;
        assert!(owner || excused, "nobody owns the guest: {world:?}");
    }
}

/// What brings a guest back whose source was killed relies on this: before COMMIT was sent no
/// destination runs it, then or ever after.
#[test]
fn a_source_killed_before_commit_still_owns_its_guest() {
    let worlds = starts().map(|start| reachable(start, true));
    let mut killed_early = 0;
    let mut killed_late = 0;
    for world in worlds.into_iter().flatten().filter(|world| world.source_gone) {
        if world.source.may_run_guest() {
            killed_early += 1;
            assert!(!world.destination.may_run_guest(), "two owners: {world:?}");
        } else {
            killed_late += 1;
        }
    }
    assert!(
        killed_early > 100 && killed_late > 100,
        "{killed_early}, {killed_late}: the model is broken"
    );
}

/// A guest that runs with pages missing is completed, and the source hears of it, as long as the
/// link comes back, and another godwit where one was killed.
#[test]
fn missing_pages_come_however_often_the_link_breaks() {
    let start = World::start(LastPages::Left, true);
    let worlds = reachable(start, true);
    let fetching = [Ds::Fetching, Ds::SeveredFetching, Ds::Running];
    let (mut severed, mut killed) = (0, 0);
    for world in worlds.iter().filter(|world| fetching.contains(&world.destination)) {
        severed += usize::from(world.destination == Ds::SeveredFetching);
        killed += usize::from(world.source_gone || world.destination_gone);
        if world.reconnects_left == 0 {
            continue;
        }
        // It is at least as far as COMMIT, and does not end before the pages have come.
        assert!(!world.missing || !world.source.is_final(), "{world:?}");
        let ends = reachable(world.clone(), false);
        let completed = |end: &World| end.source == Ss::Done && !end.missing;
        assert!(ends.iter().any(completed), "it is never completed: {world:?}");
    }
    assert!(severed > 100 && killed > 100, "{severed}, {killed}: the model is broken");
}

/// What was said of missing pages is in place before the guest can run, and once.
#[test]
fn missing_pages_are_told_once_before_the_state_ends_and_behind_all_rounds() {
    let missing = |state, left| dst::step(state, Di::Missing, left).is_ok();
    for state in [Ds::Receiving, Ds::Loading, Ds::Ready, Ds::Running] {
        assert!(!missing(state, false), "{state:?}");
    }
    // The head of the state may have come.
    for state in [Ds::Prepared, Ds::Filling] {
        assert!(missing(state, false), "{state:?}");
        assert!(!missing(state, true), "twice");
        // A page of a round would wait for itself.
        assert!(dst::step(state, Di::RoundEnd, true).is_err());
    }
    // The guest is stopped there, and its source brings it back.
    let lost = dst::step(Ds::Prepared, Di::LinkLost, true).unwrap();
    assert_eq!(lost.0, Ds::Discarded);
}

/// The last round has a number of its own, which the destination's acknowledgements rely on.
#[test]
fn the_last_round_is_numbered_after_all_others() {
    for last in [LastPages::Sent, LastPages::Compared, LastPages::Left] {
        let (_, actions) = src::step(Ss::Stopping { round: 6 }, Si::GuestStopped, last).unwrap();
        assert_eq!(actions[0], S::StartLastRound(7));
        let copies = if last == LastPages::Left { S::ListMissing(7) } else { S::CopyLastRound(7) };
        assert!(actions.contains(&copies), "{actions:?}");
    }
}

#[test]
fn only_done_and_cancelled_end_the_source() {
    let on_the_way =
        [Ss::Idle, Ss::PreCopy { round: 0 }, Ss::AwaitingReady, Ss::Handover, Ss::InDoubt];
    assert!(on_the_way.iter().all(|state| !state.is_final()));
    assert!(Ss::Done.is_final() && Ss::Cancelled.is_final());
}

//! Both state machines, the messages between them, and a link that may break at any of them.

use std::collections::VecDeque;
use std::time::Duration;

use godwit_policy::{Decision, PostCopy};
use godwit_protocol::destination::{self as dst, Action as D, Input as Di, State as Ds};
use godwit_protocol::source::{self as src, Action as S, Input as Si, LastPages, State as Ss};

use crate::outcome::{End, Outcome};
use crate::scenario::{Moment, Scenario, Trouble};
use crate::source::Source;

/// A source in doubt asks again this often, for as long.
const ASK_EVERY: f64 = 0.2;
const ASK_FOR: f64 = 60.0;
/// Nobody but the source can complete a guest that has left before its memory: whoever runs both
/// hosts mends a link that does not heal by itself, after so long.
const MENDED: f64 = 3600.0;
/// And has another godwit follow one that was killed, after so long.
const FOLLOWED: f64 = 10.0;
/// Steps of the machines beside rounds: a conversation is far shorter.
const STEPS: u32 = 1_000_000;

/// A message of the conversation, as the input that it is to the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    ToDestination(Di),
    ToSource(Si),
}

struct Simulation<'a> {
    scenario: &'a Scenario,
    engine: Source<'a>,
    source: Ss,
    destination: Ds,
    source_todo: VecDeque<Si>,
    destination_todo: VecDeque<Di>,
    /// What is on its way. Both sides wait for each other, so that one queue keeps their order.
    wire: VecDeque<Message>,
    messages: u32,
    /// The direction of the message that was read last.
    to_source: bool,
    link: bool,
    cut_done: bool,
    broke_at: f64,
    /// From when on it can be connected again.
    heals_at: f64,
    source_knows: bool,
    destination_knows: bool,
    /// Incidents that have happened.
    incidents: usize,
    source_killed: bool,
    destination_killed: bool,
    /// The guest is to leave before its memory; and the destination was told what is missing.
    leaves: bool,
    left: bool,
}

/// Takes `scenario` to its end.
#[must_use]
pub fn run(scenario: &Scenario) -> Outcome {
    let mut simulation = Simulation {
        scenario,
        engine: Source::new(scenario),
        source: Ss::Idle,
        destination: Ds::Listening,
        source_todo: [Si::Start].into(),
        destination_todo: VecDeque::new(),
        wire: VecDeque::new(),
        messages: 0,
        to_source: true,
        link: true,
        cut_done: false,
        broke_at: 0.0,
        heals_at: 0.0,
        source_knows: false,
        destination_knows: false,
        incidents: 0,
        source_killed: false,
        destination_killed: false,
        leaves: false,
        left: false,
    };
    for _ in 0..STEPS {
        let goes_on = simulation.turn();
        simulation.count_owners();
        if !goes_on || simulation.engine.now > scenario.longest.as_secs_f64() {
            break;
        }
    }
    simulation.end()
}

impl Simulation<'_> {
    fn count_owners(&mut self) {
        let owners =
            u8::from(self.source.may_run_guest()) + u8::from(self.destination.may_run_guest());
        let seen = &mut self.engine.outcome.owners;
        *seen = (*seen).max(owners);
    }

    /// When the next incident happens that has a time of its own.
    fn next_incident(&self) -> Option<f64> {
        let rest = self.scenario.incidents.get(self.incidents..)?;
        let next = rest.iter().find(|incident| !matches!(incident.trouble, Trouble::Stall(_)))?;
        match next.moment {
            Moment::At(at) => Some(at.as_secs_f64()),
            Moment::Message(_) => None,
        }
    }

    /// Lets happen what is due.
    fn meet_incidents(&mut self) {
        while let Some(incident) = self.scenario.incidents.get(self.incidents) {
            let due = match incident.moment {
                Moment::At(at) => self.engine.now >= at.as_secs_f64(),
                Moment::Message(message) => self.messages >= message,
            };
            if !due {
                break;
            }
            self.incidents += 1;
            self.meet(incident.trouble);
        }
        self.engine.until = self.next_incident();
    }

    fn meet(&mut self, trouble: Trouble) {
        match trouble {
            // From COMMIT on memory is in two places, and who is killed is followed by another.
            Trouble::SourceKilled if self.source_serves() => {
                self.break_link(FOLLOWED);
                self.source_todo.clear();
                self.wire.retain(|message| matches!(message, Message::ToDestination(_)));
                self.source = Ss::Idle;
                self.source_takes(Si::Follow);
            }
            Trouble::DestinationKilled if self.left && self.destination.may_run_guest() => {
                self.break_link(FOLLOWED);
                self.destination_todo.clear();
                self.wire.retain(|message| matches!(message, Message::ToSource(_)));
                self.destination = Ds::Listening;
                self.destination_takes(Di::Follow);
            }
            Trouble::Cut(heals) => {
                self.break_link(heals.map_or(f64::INFINITY, |t| t.as_secs_f64()))
            }
            // The link knows.
            Trouble::Stall(_) => {}
            Trouble::SourceFails if !self.source_killed => {
                self.source_todo.clear();
                self.source_takes(Si::Failed);
            }
            // One that runs the guest has not failed to.
            Trouble::DestinationFails
                if !self.destination_killed && self.destination != Ds::Starting =>
            {
                self.destination_todo.clear();
                self.destination_takes(Di::Failed);
            }
            Trouble::SourceKilled if !self.source_killed && !self.source.is_final() => {
                self.source_killed = true;
                self.break_link(f64::INFINITY);
                self.source_todo.clear();
                self.wire.retain(|message| matches!(message, Message::ToDestination(_)));
                // Its guardian runs what was not given away.
                if self.source.may_run_guest() {
                    self.engine.stays();
                    self.engine.runs_again();
                }
            }
            Trouble::DestinationKilled
                if !self.destination_killed && !self.destination.is_final() =>
            {
                self.destination_killed = true;
                self.break_link(f64::INFINITY);
                self.destination_todo.clear();
                self.wire.retain(|message| matches!(message, Message::ToSource(_)));
                // So does this one with what was given to it, and ends what was not.
                if !self.destination.may_run_guest() {
                    self.destination = Ds::Discarded;
                }
            }
            Trouble::SourceFails
            | Trouble::DestinationFails
            | Trouble::SourceKilled
            | Trouble::DestinationKilled => {}
        }
    }

    /// Whether the source has given away a guest whose memory is still here.
    fn source_serves(&self) -> bool {
        self.leaves && !self.source.may_run_guest() && !self.source.is_final()
    }

    fn break_link(&mut self, heals: f64) {
        let heals = if self.left { heals.min(MENDED) } else { heals };
        if self.link {
            (self.link, self.broke_at) = (false, self.engine.now);
            (self.source_knows, self.destination_knows) = (false, false);
            self.heals_at = self.engine.now;
        }
        self.heals_at = self.heals_at.max(self.engine.now + heals);
    }

    /// One thing that happens next; false when nothing does any more.
    fn turn(&mut self) -> bool {
        self.meet_incidents();
        // Nobody goes on with what a godwit that was killed had begun.
        if self.source_killed {
            self.source_todo.clear();
        }
        if self.destination_killed {
            self.destination_todo.clear();
        }
        if let Some(input) = self.source_todo.pop_front() {
            self.source_takes(input);
        } else if let Some(input) = self.destination_todo.pop_front() {
            self.destination_takes(input);
        } else if let Some(message) = self.wire.pop_front() {
            // What follows in the same direction was on its way at the same time.
            let to_source = matches!(message, Message::ToSource(_));
            if std::mem::replace(&mut self.to_source, to_source) != to_source {
                self.engine.wait(self.scenario.link.latency.as_secs_f64());
            }
            match message {
                Message::ToDestination(input) => self.destination_takes(input),
                // Nobody waits for the last round to be in place, unless digests are to be
                // compared.
                Message::ToSource(Si::RoundPlaced)
                    if !self.scenario.verify
                        && !matches!(self.source, Ss::PreCopy { .. } | Ss::Closing { .. }) => {}
                // A guest that is held back need not be so for another round.
                Message::ToSource(Si::Prepared) if self.engine.holds_back() || self.leaves => {
                    self.source_takes(Si::PreparedInHaste);
                }
                Message::ToSource(input) => self.source_takes(input),
            }
        } else if !self.link && !self.source_knows && !self.source_killed {
            self.source_knows = true;
            let returns = !self.scenario.reconnect.is_zero();
            self.source_takes(if returns { Si::LinkLost } else { Si::Failed });
        } else if !self.link && !self.destination_knows && !self.destination_killed {
            self.destination_knows = true;
            self.destination_takes(Di::LinkLost);
        } else {
            return self.ask_again();
        }
        true
    }

    /// Nothing is under way: whoever has lost the other tries to reach it, or waits for it.
    fn ask_again(&mut self) -> bool {
        // One that could not run the guest has said so, or cannot be asked.
        let there = self.destination.may_run_guest() || self.destination == Ds::Ready;
        if self.source_serves() && there && !self.destination_killed {
            self.return_for_pages();
            return true;
        }
        let severed = matches!(self.source, Ss::Severed { .. } | Ss::SeveredClosing { .. });
        let asks = self.source == Ss::InDoubt && !self.destination.is_final();
        if severed && !self.source_killed {
            self.return_or_give_up();
            return true;
        }
        if asks && !self.source_killed && self.engine.now <= self.broke_at + ASK_FOR {
            self.engine.wait(ASK_EVERY);
            if self.engine.now >= self.heals_at && !self.destination_killed {
                self.connect();
                self.source_takes(Si::Reconnected);
            }
            return true;
        }
        // Nor is a source waited for for ever.
        let waits =
            matches!(self.destination, Ds::Severed | Ds::SeveredPrepared | Ds::Ready | Ds::Running);
        let incidents = !self.scenario.incidents.is_empty();
        if waits && !self.link && !self.destination_killed && incidents {
            self.destination_takes(Di::Failed);
            return true;
        }
        false
    }

    /// The source takes the migration up again as soon as it can, and gives up when it has tried
    /// for long enough.
    fn return_or_give_up(&mut self) {
        let limit = self.broke_at + self.scenario.reconnect.as_secs_f64();
        let until = self.next_incident().unwrap_or(f64::INFINITY).min(self.heals_at).min(limit);
        self.engine.wait((until - self.engine.now).max(0.0));
        self.meet_incidents();
        if self.source_killed || self.source.is_final() {
            return;
        }
        let awaited = matches!(self.destination, Ds::Severed | Ds::SeveredPrepared);
        if self.engine.now >= limit {
            self.source_takes(Si::Failed);
        } else if self.engine.now >= self.heals_at && !self.destination_killed && awaited {
            self.connect();
            self.engine.outcome.resumptions += 1;
            self.destination_takes(Di::Returned);
        } else if self.engine.now >= self.heals_at {
            // Nobody there knows of it.
            self.heals_at = limit;
        }
    }

    /// Without end, as only this side has what is missing.
    fn return_for_pages(&mut self) {
        // A link that was cut for good before the guest left.
        self.heals_at = self.heals_at.min(self.broke_at + MENDED);
        let until = self.next_incident().unwrap_or(f64::INFINITY).min(self.heals_at);
        self.engine.wait((until - self.engine.now).max(ASK_EVERY));
        self.meet_incidents();
        if self.engine.now < self.heals_at {
            return;
        }
        self.connect();
        if self.source == Ss::InDoubt {
            self.source_takes(Si::Reconnected);
        } else {
            self.engine.outcome.resumptions += 1;
            self.destination_takes(Di::Returned);
        }
    }

    /// How the last pages go over.
    fn last_pages(&self) -> LastPages {
        if self.leaves { LastPages::Left } else { LastPages::sent(self.scenario.verify) }
    }

    fn connect(&mut self) {
        (self.link, self.source_knows, self.destination_knows) = (true, false, false);
        self.wire.clear();
    }

    fn send(&mut self, message: Message) {
        self.meet_incidents();
        self.messages += 1;
        if let (Some(cut), false) = (self.scenario.cut, self.cut_done) {
            let at = cut.at.is_some_and(|at| self.engine.now >= at.as_secs_f64());
            if at || cut.message.is_some_and(|message| self.messages > message) {
                self.cut();
            }
        }
        if self.link {
            self.wire.push_back(message);
        }
    }

    fn cut(&mut self) {
        self.cut_done = true;
        let heals = self.scenario.cut.and_then(|cut| cut.heals);
        self.break_link(heals.map_or(f64::INFINITY, |time| time.as_secs_f64()));
    }

    /// As in the engine: both get ready within the search for less downtime.
    fn prepares_early(&self) -> bool {
        !self.scenario.verify && self.scenario.disk.is_none() && !self.engine.holds_back()
    }

    fn source_takes(&mut self, input: Si) {
        let last = self.last_pages();
        let stepped = src::step(self.source, input, last)
            .or_else(|_| src::step(self.source, Si::Failed, last))
            .unwrap_or((self.source, Vec::new()));
        self.source = stepped.0;
        for action in stepped.1 {
            self.source_does(action);
        }
    }

    fn source_does(&mut self, action: S) {
        match action {
            S::SendOffer => self.send(Message::ToDestination(Di::Offer)),
            S::CopyRound(round) => self.copy(round, false),
            S::CopyLastRound(round) => {
                self.copy(round, true);
                if self.link && !self.scenario.verify {
                    self.source_todo.push_back(Si::RoundSent);
                }
            }
            S::AskPolicy => {
                self.engine.placed();
                let prepared = matches!(self.source, Ss::Closing { .. });
                let (decision, estimate) = self.engine.ask(prepared);
                let expected = estimate.expected_downtime;
                let fits = expected.is_some_and(|expected| expected <= estimate.limit);
                let (Ss::PreCopy { round } | Ss::Closing { round }) = self.source else { return };
                self.leaves = self.scenario.may_leave()
                    && self.scenario.post_copy.leaves(round, &decision, fits);
                let input = match decision {
                    _ if self.leaves => Si::SwitchOver,
                    Decision::NextRound(_)
                        if estimate.is_near() && !prepared && self.prepares_early() =>
                    {
                        Si::SwitchOver
                    }
                    Decision::NextRound(_) => Si::NextRound,
                    Decision::SwitchOver => Si::SwitchOver,
                    Decision::GiveUp(_) => Si::Failed,
                };
                self.source_todo.push_back(input);
            }
            S::SendPrepare => {
                let spent = 2.0 * self.scenario.link.latency.as_secs_f64();
                self.engine.wait((self.scenario.lead.as_secs_f64() - spent).max(0.0));
                self.send(Message::ToDestination(Di::Prepare));
            }
            S::StopGuest => {
                self.engine.stop();
                self.source_todo.push_back(Si::GuestStopped);
            }
            S::CompareDigests => {
                self.engine.wait(self.scenario.verification.as_secs_f64());
                self.send(Message::ToDestination(Di::DigestRequest));
            }
            S::FinishState => {
                let flush =
                    if self.scenario.disk.is_some() { self.scenario.flush } else { Duration::ZERO };
                self.engine.wait((self.scenario.handover + flush).as_secs_f64());
                self.send(Message::ToDestination(Di::State));
                self.send(Message::ToDestination(Di::StateEnd));
                self.source_todo.push_back(Si::StateSent);
            }
            S::SendCommit => {
                self.engine.give_away();
                self.send(Message::ToDestination(Di::Commit));
            }
            S::Sever => {
                if self.engine.has_left() {
                    return self.break_link(0.0);
                }
                // No acknowledgement comes any more that says otherwise.
                self.engine.lose();
                self.engine.sever();
            }
            S::ListMissing(round) => {
                self.engine.list_missing(round);
                self.send(Message::ToDestination(Di::Missing));
                self.source_todo.push_back(Si::MissingListed);
            }
            S::ServePages => self.serve(),
            S::SendFarewell => self.send(Message::ToDestination(Di::Farewell)),
            S::SendAbort => self.send(Message::ToDestination(Di::Aborted)),
            S::ResumeGuest => {
                self.engine.stays();
                self.engine.runs_again();
            }
            S::StartTracking
            | S::StartLastRound(_)
            | S::ReleaseState
            | S::Reconnect
            | S::Resolve
            | S::RetireGuest => {}
        }
    }

    fn serve(&mut self) {
        while self.link && self.source == Ss::Serving {
            match self.engine.serve(self.cut_done) {
                Ok(()) if matches!(self.destination, Ds::Fetching | Ds::SeveredFetching) => {
                    return self.destination_todo.push_back(Di::AllPlaced);
                }
                Ok(()) => return,
                Err(_) if self.next_incident().is_some_and(|at| self.engine.now >= at) => {
                    self.meet_incidents();
                }
                Err(_) => self.cut(),
            }
        }
    }

    fn copy(&mut self, round: u32, last: bool) {
        if !self.link {
            return;
        }
        // Also behind a resumption: what is left follows.
        if !last && self.scenario.post_copy == PostCopy::Now && self.scenario.may_leave() {
            self.engine.skip_round(round);
            return self.send(Message::ToDestination(Di::RoundEnd));
        }
        match self.engine.copy_round(round, last) {
            Ok(()) => self.send(Message::ToDestination(Di::RoundEnd)),
            Err(_) if self.next_incident().is_some_and(|at| self.engine.now >= at) => {
                let before = self.source;
                self.meet_incidents();
                // What the source has not noticed.
                if self.link && self.source == before {
                    self.send(Message::ToDestination(Di::RoundEnd));
                }
            }
            Err(_) => self.cut(),
        }
    }

    fn destination_takes(&mut self, input: Di) {
        let stepped = dst::step(self.destination, input, self.left)
            .or_else(|_| dst::step(self.destination, Di::Failed, self.left))
            .unwrap_or((self.destination, Vec::new()));
        self.destination = stepped.0;
        self.left |= input == Di::Missing;
        for action in stepped.1 {
            match action {
                D::SendAccept => self.send(Message::ToSource(Si::Accepted)),
                D::SendRoundAck => self.send(Message::ToSource(Si::RoundPlaced)),
                D::Prepare | D::SendPrepared => self.send(Message::ToSource(Si::Prepared)),
                D::SendDigests => self.send(Message::ToSource(Si::DigestsEqual)),
                D::FinishLoad => self.destination_todo.push_back(Di::Loaded),
                D::SendReady => self.send(Message::ToSource(Si::Ready)),
                D::RunGuest => {
                    self.engine.runs_again();
                    self.destination_todo.push_back(Di::Started);
                }
                D::SendRunning => self.send(Message::ToSource(Si::Running)),
                D::SendDiscarded => self.send(Message::ToSource(Si::Discarded)),
                // A source that makes no connection again has given up.
                D::AwaitReturn if self.scenario.reconnect.is_zero() => {
                    self.destination_todo.push_back(Di::Failed);
                }
                D::SendResumed => self.send(Message::ToSource(Si::Resumed)),
                D::SendPlaced => self.send(Message::ToSource(Si::AllPlaced)),
                D::Sever if self.left => self.break_link(0.0),
                D::AwaitReturn
                | D::AwaitPages
                | D::FetchPages
                | D::WriteState
                | D::SendPrints
                | D::AwaitResolve
                | D::Sever
                | D::DiscardGuest => {}
            }
        }
    }

    fn end(mut self) -> Outcome {
        self.engine.end();
        let mut outcome = self.engine.outcome;
        outcome.total = self.engine.now;
        outcome.end = match self.source {
            _ if self.engine.now > self.scenario.longest.as_secs_f64() => End::Endless,
            Ss::Done => End::Moved,
            // Its guardian has run the guest.
            _ if self.source_killed && self.source.may_run_guest() => End::Stayed,
            // Its operator looks where the guest is.
            _ if self.source_killed => {
                outcome.recovered = true;
                if self.destination.may_run_guest() { End::Moved } else { End::Stayed }
            }
            Ss::Cancelled if outcome.reason.is_some() => End::GaveUp,
            Ss::Cancelled => End::Stayed,
            Ss::InDoubt => End::InDoubt,
            _ => End::Endless,
        };
        outcome
    }
}

//! The two state machines: any input in any state, and both with a link between them on which
//! messages come, are lost or are made up.

use std::collections::VecDeque;

use godwit_protocol::destination::{self as dst, Action as D, Input as Di, State as Ds};
use godwit_protocol::source::{self as src, Action as S, Input as Si, LastPages, State as Ss};

const SOURCE: [Si; 16] = [
    Si::Start,
    Si::Accepted,
    Si::RoundPlaced,
    Si::RoundSent,
    Si::NextRound,
    Si::SwitchOver,
    Si::Prepared,
    Si::PreparedInHaste,
    Si::GuestStopped,
    Si::DigestsEqual,
    Si::StateSent,
    Si::Ready,
    Si::Running,
    Si::Discarded,
    Si::Reconnected,
    Si::Failed,
];
/// What is said to a source that has lost its connections, or whose pages follow later; in the
/// place of one of the others, where the byte is one of the last.
const LOST: [Si; 4] = [Si::LinkLost, Si::Resumed, Si::MissingListed, Si::AllPlaced];
const DESTINATION: [Di; 16] = [
    Di::Offer,
    Di::RoundEnd,
    Di::Prepare,
    Di::DigestRequest,
    Di::State,
    Di::StateEnd,
    Di::Loaded,
    Di::Commit,
    Di::Started,
    Di::Farewell,
    Di::LinkLost,
    Di::Aborted,
    Di::Failed,
    Di::Returned,
    Di::Missing,
    Di::AllPlaced,
];

/// Each machine alone. The first byte says how the last pages go over and how the source treats
/// what is out of place: it is refused, or it is a failure, as an engine has it.
pub(crate) fn inputs(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let fails = first & 2 == 2;
    let sent = LastPages::sent(first & 1 == 1);
    let last = if first & 4 == 4 { LastPages::Left } else { sent };
    let mut left = false;
    let (mut source, mut destination) = (Ss::Idle, Ds::Listening);
    let mut committed = false;
    for byte in rest {
        let input =
            if *byte < 0xe0 { SOURCE[usize::from(byte & 15)] } else { LOST[usize::from(byte & 3)] };
        let (was, gave) = (source, source.may_run_guest());
        match src::step(source, input, last) {
            Ok((state, actions)) => {
                source = state;
                committed |= actions.contains(&S::SendCommit);
                let again = source.may_run_guest() && !gave;
                let told = input == Si::Discarded && source == Ss::Cancelled;
                assert!(!again || told, "{input:?} in {was:?} gave the guest back");
            }
            Err(error) if fails => {
                let _ = error.to_string();
                if let Ok((state, _)) = src::step(source, Si::Failed, last) {
                    source = state;
                }
            }
            Err(_) => {}
        }
        assert!(!was.is_final() || source == was, "{was:?} is final");
        assert!(committed || source.may_run_guest(), "{source:?} without COMMIT");

        let input = DESTINATION[usize::from(byte >> 4) % DESTINATION.len()];
        let was = destination;
        match dst::step(destination, input, left) {
            Ok((state, _)) => {
                destination = state;
                left |= input == Di::Missing;
            }
            Err(_) if fails => {
                if let Ok((state, _)) = dst::step(destination, Di::Failed, left) {
                    destination = state;
                }
            }
            Err(_) => {}
        }
        assert!(!was.is_final() || destination == was, "{was:?} is final");
        let begins = destination.may_run_guest() && !was.may_run_guest();
        assert!(!begins || (was, input) == (Ds::Ready, Di::Commit), "{input:?} in {was:?}");
    }
}

/// A message on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    ToSource(Si),
    ToDestination(Di),
}

/// Both sides and the link. A byte is one thing that happens.
struct World {
    verify: bool,
    source: Ss,
    destination: Ds,
    /// What each side's own work will yield.
    source_work: VecDeque<Si>,
    destination_work: VecDeque<Di>,
    to_source: VecDeque<Si>,
    to_destination: VecDeque<Di>,
    link: bool,
    source_knows: bool,
    destination_knows: bool,
}

impl World {
    fn send(&mut self, said: Said) {
        if !self.link {
            return;
        }
        match said {
            Said::ToSource(input) => self.to_source.push_back(input),
            Said::ToDestination(input) => self.to_destination.push_back(input),
        }
    }

    /// What is out of place is a failure, as an engine has it.
    fn source_takes(&mut self, input: Si) {
        let last = LastPages::sent(self.verify);
        let step = src::step(self.source, input, last)
            .or_else(|_| src::step(self.source, Si::Failed, last));
        let Ok((state, actions)) = step else { return };
        self.source = state;
        for action in actions {
            match action {
                S::SendOffer => self.send(Said::ToDestination(Di::Offer)),
                S::CopyRound(_) => self.send(Said::ToDestination(Di::RoundEnd)),
                S::CopyLastRound(_) => {
                    self.send(Said::ToDestination(Di::RoundEnd));
                    if !self.verify {
                        self.source_work.push_back(Si::RoundSent);
                    }
                }
                S::SendPrepare => self.send(Said::ToDestination(Di::Prepare)),
                S::StopGuest => self.source_work.push_back(Si::GuestStopped),
                S::CompareDigests => self.send(Said::ToDestination(Di::DigestRequest)),
                S::FinishState => {
                    self.send(Said::ToDestination(Di::State));
                    self.send(Said::ToDestination(Di::StateEnd));
                    self.source_work.push_back(Si::StateSent);
                }
                S::SendCommit => self.send(Said::ToDestination(Di::Commit)),
                S::SendAbort => self.send(Said::ToDestination(Di::Aborted)),
                S::SendFarewell => self.send(Said::ToDestination(Di::Farewell)),
                S::AskPolicy
                | S::ListMissing(_)
                | S::ServePages
                | S::Sever
                | S::Reconnect
                | S::StartTracking
                | S::StartLastRound(_)
                | S::ReleaseState
                | S::Resolve
                | S::RetireGuest
                | S::ResumeGuest => {}
            }
        }
    }

    fn destination_takes(&mut self, input: Di) {
        let step = dst::step(self.destination, input, false)
            .or_else(|_| dst::step(self.destination, Di::Failed, false));
        let Ok((state, actions)) = step else { return };
        self.destination = state;
        for action in actions {
            match action {
                D::SendAccept => self.send(Said::ToSource(Si::Accepted)),
                D::SendRoundAck => self.send(Said::ToSource(Si::RoundPlaced)),
                D::Prepare | D::SendPrepared => self.send(Said::ToSource(Si::Prepared)),
                D::SendResumed => self.send(Said::ToSource(Si::Resumed)),
                D::SendDigests => self.send(Said::ToSource(Si::DigestsEqual)),
                D::FinishLoad => self.destination_work.push_back(Di::Loaded),
                D::SendReady => self.send(Said::ToSource(Si::Ready)),
                D::RunGuest => self.destination_work.push_back(Di::Started),
                D::SendRunning => self.send(Said::ToSource(Si::Running)),
                D::SendDiscarded => self.send(Said::ToSource(Si::Discarded)),
                D::WriteState
                | D::AwaitPages
                | D::FetchPages
                | D::SendPlaced
                | D::SendPrints
                | D::AwaitResolve
                | D::Sever
                | D::AwaitReturn
                | D::DiscardGuest => {}
            }
        }
    }

    fn happens(&mut self, byte: u8) {
        let high = usize::from(byte >> 4);
        let severed = matches!(self.source, Ss::Severed { .. } | Ss::SeveredClosing { .. });
        match byte & 15 {
            0 | 1 => {
                let Some(input) = self.source_work.pop_front() else { return };
                self.source_takes(input);
            }
            2 | 3 => {
                let Some(input) = self.destination_work.pop_front() else { return };
                self.destination_takes(input);
            }
            // A side reads when its own work is done.
            4..=6 if self.source_work.is_empty() => {
                // Nobody waits for the last round to be in place, unless digests are compared.
                let awaited = matches!(self.source, Ss::PreCopy { .. } | Ss::Closing { .. });
                match self.to_source.pop_front() {
                    Some(Si::RoundPlaced) if !awaited && !self.verify => {}
                    Some(input) => self.source_takes(input),
                    None if !self.link && !self.source_knows => {
                        self.source_knows = true;
                        self.source_takes(Si::LinkLost);
                    }
                    None => {}
                }
            }
            7..=9 if self.destination_work.is_empty() && !self.destination.is_final() => {
                match self.to_destination.pop_front() {
                    Some(input) => self.destination_takes(input),
                    None if !self.link && !self.destination_knows => {
                        self.destination_knows = true;
                        self.destination_takes(Di::LinkLost);
                    }
                    None => {}
                }
            }
            // The policy, and the operator who is in haste.
            10 => {
                let asked = matches!(self.source, Ss::PreCopy { .. } | Ss::Closing { .. });
                if asked && self.to_source.is_empty() && self.to_destination.is_empty() {
                    let wish = if high & 1 == 0 { Si::NextRound } else { Si::SwitchOver };
                    self.source_takes(wish);
                }
            }
            11 => {
                self.source_work.clear();
                self.source_takes(Si::Failed);
            }
            12 => {
                self.destination_work.clear();
                self.destination_takes(Di::Failed);
            }
            // The link breaks, and what was last sent is lost.
            13 if self.link => {
                self.link = false;
                self.to_source.truncate(high & 3);
                self.to_destination.truncate(high >> 2);
            }
            14 if self.source == Ss::InDoubt && self.source_knows && self.destination_knows => {
                (self.link, self.source_knows, self.destination_knows) = (true, false, false);
                self.to_source.clear();
                self.to_destination.clear();
                self.source_takes(Si::Reconnected);
            }
            // The source comes back, also where the destination still believes in the old link.
            14 if severed && self.source_knows => {
                (self.link, self.source_knows) = (true, false);
                self.to_source.clear();
                self.to_destination.clear();
                if !std::mem::take(&mut self.destination_knows) {
                    self.to_destination.push_back(Di::LinkLost);
                }
                self.to_destination.push_back(Di::Returned);
            }
            // A destination says what it likes, but for the two words that are about the guest.
            15 => {
                let words = [
                    Si::Accepted,
                    Si::RoundPlaced,
                    Si::Prepared,
                    Si::PreparedInHaste,
                    Si::DigestsEqual,
                    Si::Ready,
                ];
                self.send(Said::ToSource(words[high % words.len()]));
            }
            _ => {}
        }
    }
}

/// Both machines. At most one side runs the guest, whatever happens, as long as the destination
/// does not lie about who does.
pub(crate) fn handover(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let mut world = World {
        verify: first & 1 == 1,
        source: Ss::Idle,
        destination: Ds::Listening,
        source_work: [Si::Start].into(),
        destination_work: VecDeque::new(),
        to_source: VecDeque::new(),
        to_destination: VecDeque::new(),
        link: true,
        source_knows: false,
        destination_knows: false,
    };
    for byte in rest {
        world.happens(*byte);
        let both = world.source.may_run_guest() && world.destination.may_run_guest();
        assert!(!both, "{:?} and {:?}", world.source, world.destination);
    }
}

//! A page of a guest that moves, and connections that are lost and made again: both machines and
//! all that an engine does with the page, walked exhaustively. The guest writes, the source
//! harvests, reads and sends, the destination places; the connections are cut anywhere between any
//! two of these steps, more than once, with any part of what is on its way arriving late or never.
//!
//! Checked whenever the guest is given away: the destination holds what the page held last. Each
//! rule that this rests on is broken in turn, and the walk must find that out.
#![allow(clippy::unwrap_used)]

use std::collections::{HashSet, VecDeque};

use godwit_protocol::destination::{self as dst, Action as D, Input as Di, State as Ds};
use godwit_protocol::source::{self as src, Action as S, Input as Si, LastPages, State as Ss};

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Broken {
    /// What was sent and has not arrived is not marked again.
    RollBack,
    /// It is marked, and its fingerprint still says that the destination has it.
    Forget,
    /// What was harvested and not sent yet is not marked again.
    Harvested,
    /// The destination says what it has while a channel still has something to place.
    Drain,
    /// The source believes counts of channels that are not those it sent over last.
    Attempt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Msg {
    RoundEnd,
    RoundAck,
    Prepare,
    Prepared,
    State,
    StateEnd,
    Ready,
    Commit,
    Abort,
    Resume {
        attempt: u8,
    },
    Resumed {
        attempt: u8,
        of: u8,
        placed: u8,
    },
    /// The channels of an attempt are connected.
    Channels {
        attempt: u8,
    },
}

/// Takes in a world that can follow, as a change of this one.
type Add<'a> = &'a mut dyn FnMut(&dyn Fn(&mut World));

/// What the source's channel does next in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Copy {
    Harvest,
    Send,
    End,
}

/// No frame has this number: the page is being dealt with.
const UNDER_WAY: u8 = u8::MAX;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    broken: Option<Broken>,
    source: Ss,
    destination: Ds,
    source_todo: VecDeque<Si>,
    destination_todo: VecDeque<Di>,
    to_destination: VecDeque<Msg>,
    to_source: VecDeque<Msg>,
    link: bool,
    source_knows: bool,
    destination_knows: bool,
    /// The destination speaks over the connection that the source listens to.
    destination_current: bool,
    cuts_left: u8,
    writes_left: u8,
    attempts: u8,

    /// The page as the guest has it, and whether the tracker, or what was taken back, says that it
    /// is to be sent.
    version: u8,
    dirty: bool,
    copy: Option<Copy>,
    harvested: bool,
    /// What the source believes that the destination has, or will have.
    print: Option<u8>,
    /// The frame that held it last, as far as that was not acknowledged.
    last_frame: Option<u8>,
    /// The attempt whose channels are in use, and how many frames went over them.
    source_attempt: u8,
    sent: u8,
    channel: VecDeque<u8>,

    /// The page as the destination has it.
    placed: Option<u8>,
    destination_attempt: u8,
    placed_frames: u8,
    /// What a channel that should have ended still has to place.
    stale: VecDeque<u8>,
}

impl World {
    /// The first round begins; the guest writes twice, and so many cuts may come.
    fn start(broken: Option<Broken>, cuts_left: u8) -> Self {
        Self {
            broken,
            source: Ss::PreCopy { round: 0 },
            destination: Ds::Receiving,
            source_todo: VecDeque::new(),
            destination_todo: VecDeque::new(),
            to_destination: VecDeque::new(),
            to_source: VecDeque::new(),
            link: true,
            source_knows: false,
            destination_knows: false,
            destination_current: true,
            cuts_left,
            writes_left: 2,
            attempts: 0,
            version: 1,
            dirty: true,
            copy: Some(Copy::Harvest),
            harvested: false,
            print: None,
            last_frame: None,
            source_attempt: 0,
            sent: 0,
            channel: VecDeque::new(),
            placed: None,
            destination_attempt: 0,
            placed_frames: 0,
            stale: VecDeque::new(),
        }
    }

    fn tell_destination(&mut self, msg: Msg) {
        if self.link {
            self.to_destination.push_back(msg);
        }
    }

    fn tell_source(&mut self, msg: Msg) {
        if self.link && self.destination_current {
            self.to_source.push_back(msg);
        }
    }

    fn source_takes(&mut self, input: Si) {
        let (state, actions) = src::step(self.source, input, LastPages::Sent)
            .or_else(|_| src::step(self.source, Si::Failed, LastPages::Sent))
            .unwrap_or((self.source, Vec::new()));
        self.source = state;
        for action in actions {
            match action {
                S::CopyRound(_) | S::CopyLastRound(_) => self.copy = Some(Copy::Harvest),
                S::AskPolicy => self.source_todo.push_back(Si::SwitchOver),
                S::SendPrepare => self.tell_destination(Msg::Prepare),
                S::StopGuest => self.source_todo.push_back(Si::GuestStopped),
                S::FinishState => {
                    self.tell_destination(Msg::State);
                    self.tell_destination(Msg::StateEnd);
                    self.source_todo.push_back(Si::StateSent);
                }
                S::SendCommit => self.tell_destination(Msg::Commit),
                S::SendAbort => self.tell_destination(Msg::Abort),
                S::Sever => self.copy = None,
                _ => {}
            }
        }
    }

    fn destination_takes(&mut self, input: Di, placed_on_the_way_out: usize) {
        let (state, actions) = dst::step(self.destination, input, false)
            .or_else(|_| dst::step(self.destination, Di::Failed, false))
            .unwrap_or((self.destination, Vec::new()));
        self.destination = state;
        for action in actions {
            match action {
                D::SendRoundAck => self.tell_source(Msg::RoundAck),
                D::Prepare | D::SendPrepared => self.tell_source(Msg::Prepared),
                D::FinishLoad => self.destination_todo.push_back(Di::Loaded),
                D::SendReady => self.tell_source(Msg::Ready),
                D::Sever => {
                    for _ in 0..placed_on_the_way_out {
                        self.place();
                    }
                    let rest = std::mem::take(&mut self.channel);
                    if self.broken == Some(Broken::Drain) {
                        self.stale = rest;
                    }
                }
                D::SendResumed => {
                    let attempt = self.attempts;
                    let (of, placed) = (self.destination_attempt, self.placed_frames);
                    self.tell_source(Msg::Resumed { attempt, of, placed });
                }
                _ => {}
            }
        }
    }

    fn place(&mut self) {
        if let Some(version) = self.channel.pop_front() {
            self.placed = Some(version);
            self.placed_frames += 1;
        }
    }

    /// The next step of the source's channel.
    fn copy(&mut self) {
        match self.copy {
            Some(Copy::Harvest) => {
                self.harvested = std::mem::take(&mut self.dirty);
                if self.harvested {
                    self.last_frame = match self.broken {
                        Some(Broken::Harvested) => self.last_frame,
                        _ => Some(UNDER_WAY),
                    };
                }
                self.copy = Some(Copy::Send);
            }
            Some(Copy::Send) => {
                let wanted = std::mem::take(&mut self.harvested);
                if wanted && self.print != Some(self.version) {
                    self.print = Some(self.version);
                    self.sent += 1;
                    if self.link {
                        self.channel.push_back(self.version);
                    }
                }
                if self.last_frame == Some(UNDER_WAY) || wanted {
                    self.last_frame = Some(self.sent);
                }
                self.copy = Some(Copy::End);
            }
            Some(Copy::End) => {
                self.copy = None;
                self.tell_destination(Msg::RoundEnd);
                if self.source == Ss::StopAndCopy {
                    self.source_todo.push_back(Si::RoundSent);
                }
            }
            None => {}
        }
    }

    /// The source learns what the destination has.
    fn resumed(&mut self, attempt: u8, of: u8, placed: u8) {
        let believed = of == self.source_attempt || self.broken == Some(Broken::Attempt);
        let placed = if believed { placed } else { 0 };
        if self.last_frame.take().is_some_and(|last| last > placed) {
            self.dirty |= self.broken != Some(Broken::RollBack);
            if self.broken != Some(Broken::Forget) {
                self.print = None;
            }
        }
        (self.source_attempt, self.sent, self.harvested) = (attempt, 0, false);
        self.channel.clear();
        self.tell_destination(Msg::Channels { attempt });
        self.source_takes(Si::Resumed);
    }

    fn next(&self) -> Vec<World> {
        let mut worlds = Vec::new();
        let mut add = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            worlds.push(world);
        };
        let runs = !matches!(
            self.source,
            Ss::StopAndCopy | Ss::SavingState | Ss::AwaitingReady | Ss::Handover | Ss::Done
        );
        if runs && self.writes_left > 0 {
            add(&|w| {
                w.writes_left -= 1;
                w.version += 1;
                w.dirty = true;
            });
        }
        if self.copy.is_some() {
            add(&|w| w.copy());
        }
        if !self.stale.is_empty() {
            add(&|w| w.placed = w.stale.pop_front());
        }
        if let Some(&input) = self.source_todo.front() {
            add(&|w| {
                w.source_todo.pop_front();
                w.source_takes(input);
            });
        }
        if let Some(&input) = self.destination_todo.front() {
            add(&|w| {
                w.destination_todo.pop_front();
                w.destination_takes(input, 0);
            });
        }
        let reads = matches!(self.destination, Ds::Receiving | Ds::Prepared | Ds::Filling);
        if reads && self.source_attempt == self.destination_attempt && !self.channel.is_empty() {
            add(&|w| w.place());
        }
        let source_reads = self.source_todo.is_empty() && self.copy.is_none();
        let source_reads = source_reads && !self.source.is_final();
        if let (Some(&msg), true) = (self.to_source.front(), source_reads) {
            add(&|w| {
                w.to_source.pop_front();
                w.source_reads(msg);
            });
        }
        if let (Some(&msg), true) = (self.to_destination.front(), self.destination_todo.is_empty())
            && !self.destination.is_final()
        {
            self.destination_reads(msg, &mut add);
        }
        self.losses(&mut add);
        worlds
    }

    fn source_reads(&mut self, msg: Msg) {
        match msg {
            Msg::RoundAck if self.source == Ss::SavingState => {}
            Msg::RoundAck if matches!(self.source, Ss::StopAndCopy | Ss::AwaitingReady) => {}
            Msg::RoundAck => {
                self.last_frame = None;
                self.source_takes(Si::RoundPlaced);
            }
            Msg::Prepared => self.source_takes(Si::Prepared),
            Msg::Ready => self.source_takes(Si::Ready),
            Msg::Resumed { attempt, of, placed } => self.resumed(attempt, of, placed),
            other => panic!("{other:?} to the source"),
        }
    }

    fn destination_reads(&self, msg: Msg, add: Add<'_>) {
        let input = match msg {
            // What follows waits until all pages are in place.
            Msg::RoundEnd if !self.channel.is_empty() => return,
            Msg::RoundEnd => Di::RoundEnd,
            Msg::Prepare => Di::Prepare,
            Msg::State => Di::State,
            Msg::StateEnd => Di::StateEnd,
            Msg::Commit => Di::Commit,
            Msg::Abort => Di::Aborted,
            Msg::Channels { attempt } => {
                return add(&|w| {
                    w.to_destination.pop_front();
                    (w.destination_attempt, w.placed_frames) = (attempt, 0);
                });
            }
            Msg::Resume { attempt } => {
                // One that still has its old connections gives them up, and only then answers; to
                // nobody, where the source has made another attempt since.
                for placed in 0..=self.channel.len() {
                    add(&|w| {
                        w.to_destination.pop_front();
                        if matches!(w.destination, Ds::Receiving | Ds::Prepared) {
                            w.destination_takes(Di::LinkLost, placed);
                        }
                        w.destination_current = attempt == w.attempts;
                        w.destination_takes(Di::Returned, 0);
                    });
                }
                return;
            }
            other => panic!("{other:?} to the destination"),
        };
        add(&|w| {
            w.to_destination.pop_front();
            w.destination_takes(input, 0);
        });
    }

    /// The connections are lost, that is noticed, and others are made.
    fn losses(&self, add: Add<'_>) {
        if self.link && self.cuts_left > 0 {
            for keep_d in 0..=self.to_destination.len() {
                for keep_s in 0..=self.to_source.len() {
                    for keep in 0..=self.channel.len() {
                        add(&|w| {
                            w.cuts_left -= 1;
                            (w.link, w.source_knows, w.destination_knows) = (false, false, false);
                            w.to_destination.truncate(keep_d);
                            w.to_source.truncate(keep_s);
                            w.channel.truncate(keep);
                        });
                    }
                }
            }
        }
        if !self.link && !self.source_knows && !self.source.is_final() {
            add(&|w| {
                w.source_knows = true;
                w.source_todo.clear();
                w.to_source.clear();
                w.source_takes(Si::LinkLost);
            });
        }
        if !self.link && !self.destination_knows && !self.destination.is_final() {
            for placed in 0..=self.channel.len() {
                add(&|w| {
                    w.destination_knows = true;
                    w.to_destination.clear();
                    w.destination_takes(Di::LinkLost, placed);
                });
            }
        }
        let severed = matches!(self.source, Ss::Severed { .. } | Ss::SeveredClosing { .. });
        if !self.link && self.source_knows && severed {
            add(&|w| w.source_takes(Si::Failed));
            // What was said over the old connection may still be read first.
            for keep in 0..=self.to_destination.len() {
                add(&|w| {
                    w.attempts += 1;
                    (w.link, w.source_knows, w.destination_knows) = (true, false, false);
                    w.destination_current = false;
                    w.to_destination.truncate(keep);
                    w.to_destination.push_back(Msg::Resume { attempt: w.attempts });
                });
            }
        }
    }
}

/// What the walk found: worlds, and the first in which a page is wrong that was given away.
struct Walk {
    worlds: HashSet<World>,
    wrong: Option<World>,
}

fn walk(broken: Option<Broken>, cuts: u8) -> Walk {
    let start = World::start(broken, cuts);
    let mut seen = HashSet::from([start.clone()]);
    let mut queue = VecDeque::from([start]);
    while let Some(world) = queue.pop_front() {
        if world.source == Ss::Handover && world.placed != Some(world.version) {
            return Walk { worlds: seen, wrong: Some(world) };
        }
        for next in world.next() {
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    Walk { worlds: seen, wrong: None }
}

#[test]
fn the_page_arrives_as_it_was_last_whatever_is_cut() {
    let Walk { worlds, wrong } = walk(None, 2);
    assert!(wrong.is_none(), "{wrong:?}");
    assert!(worlds.len() > 10_000, "only {} worlds: the model is broken", worlds.len());
    // Given away behind two resumptions, and from each of the two states that are taken up again.
    assert!(worlds.iter().any(|world| world.source == Ss::Handover && world.attempts == 2));
    assert!(worlds.iter().any(|world| matches!(world.source, Ss::SeveredClosing { .. })));
    // A page that has arrived is not sent again for a cut alone.
    assert!(worlds.iter().any(|world| world.source == Ss::Handover
        && world.attempts == 1
        && world.source_attempt == 1
        && world.sent == 0));
}

#[test]
fn without_a_cut_nothing_is_taken_up_again() {
    let Walk { worlds, wrong } = walk(None, 0);
    assert!(wrong.is_none(), "{wrong:?}");
    assert!(worlds.iter().all(|world| world.attempts == 0));
    assert!(worlds.iter().any(|world| world.source == Ss::Handover));
}

#[test]
fn each_rule_is_needed() {
    for broken in
        [Broken::RollBack, Broken::Forget, Broken::Harvested, Broken::Drain, Broken::Attempt]
    {
        assert!(walk(Some(broken), 2).wrong.is_some(), "{broken:?} goes unnoticed");
    }
}

#[test]
fn every_way_ends() {
    for world in walk(None, 2).worlds {
        // Who is in doubt asks again: `model.rs`.
        if world.next().is_empty() && world.source != Ss::InDoubt {
            let given_away = world.destination.may_run_guest();
            assert_ne!(world.source.may_run_guest(), given_away, "{world:?}");
        }
    }
}

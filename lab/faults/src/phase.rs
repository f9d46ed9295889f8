//! The steps of a migration at which faults strike, and the byte on the link at which each begins.
//!
//! Keeps one promise: a step is recognised by the message that begins it, as it is about to pass;
//! so everything before it has happened, and nothing of what it brings about has.

use std::collections::HashMap;
use std::fmt;

use godwit_testbed::{Watch, Way};
use godwit_wire::{FrameHeader, FrameKind, GREETING_LEN, HEADER_LEN, barrier_of};

/// So much of guest memory has passed in the middle of the first round.
const MIDDLE: usize = 1 << 20;

/// A step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// The source tells what it would send.
    Offer,
    /// The destination takes it.
    Accept,
    /// In the middle of the first round.
    FirstRound,
    /// In a further round.
    LaterRound,
    /// Both sides are to get ready; the guest still runs.
    Prepare,
    /// The destination is ready to load.
    Prepared,
    /// The guest is stopped, and the last pages have passed.
    LastRound,
    /// QEMU's device state passes.
    State,
    /// The destination has loaded all.
    Ready,
    /// The source hands the guest over.
    Commit,
    /// The destination runs it and says so.
    Running,
    /// The source has heard that.
    Farewell,
}

impl Phase {
    /// All, in their order.
    pub const ALL: [Self; 12] = [
        Self::Offer,
        Self::Accept,
        Self::FirstRound,
        Self::LaterRound,
        Self::Prepare,
        Self::Prepared,
        Self::LastRound,
        Self::State,
        Self::Ready,
        Self::Commit,
        Self::Running,
        Self::Farewell,
    ];

    /// Its name in tables and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Offer => "offer",
            Self::Accept => "accept",
            Self::FirstRound => "first-round",
            Self::LaterRound => "later-round",
            Self::Prepare => "prepare",
            Self::Prepared => "prepared",
            Self::LastRound => "last-round",
            Self::State => "state",
            Self::Ready => "ready",
            Self::Commit => "commit",
            Self::Running => "running",
            Self::Farewell => "farewell",
        }
    }

    /// Whether the frame that begins with `header` begins this step. `seen` is what has passed.
    fn begins(self, way: Way, header: &FrameHeader, seen: &Seen) -> bool {
        let (there, back) = (way == Way::There, way == Way::Back);
        match (self, header.kind) {
            (Self::Offer, FrameKind::Offer)
            | (Self::Prepare, FrameKind::Prepare)
            | (Self::State, FrameKind::DeviceState)
            | (Self::Commit, FrameKind::Commit)
            | (Self::Farewell, FrameKind::Farewell) => there,
            (Self::Accept, FrameKind::Accept)
            | (Self::Prepared, FrameKind::Prepared)
            | (Self::Ready, FrameKind::Ready)
            | (Self::Running, FrameKind::Running) => back,
            (Self::FirstRound, FrameKind::Pages) => seen.pages >= MIDDLE,
            (Self::LaterRound, FrameKind::Pages) => seen.barriers > 0,
            (Self::LastRound, FrameKind::Barrier) => {
                barrier_of(header.aux).is_ok_and(|(_, is_last)| is_last)
            }
            _ => false,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What has passed on all connections.
#[derive(Default)]
struct Seen {
    pages: usize,
    barriers: usize,
}

/// One way of one connection.
struct Stream {
    /// Bytes that are no header: of the greeting, of a payload.
    skip: usize,
    /// Of the next header.
    header: Vec<u8>,
}

/// A watch that holds a link so many bytes, of any connection either way, behind where `phase`
/// begins.
#[must_use]
pub fn watch_behind(phase: Phase, mut bytes: usize) -> Watch {
    let (mut begins, mut has_begun) = (watch(phase), false);
    Box::new(move |connection, way, passing| {
        let from = if has_begun { 0 } else { begins(connection, way, passing)? };
        has_begun = true;
        let left = passing.len() - from;
        if bytes < left {
            return Some(from + bytes);
        }
        bytes -= left;
        None
    })
}

/// A watch that holds a link where `phase` begins.
#[must_use]
pub fn watch(phase: Phase) -> Watch {
    let (mut streams, mut seen) = (HashMap::new(), Seen::default());
    Box::new(move |connection, way, bytes| {
        let new = || Stream { skip: GREETING_LEN, header: Vec::new() };
        let stream = streams.entry((connection, way)).or_insert_with(new);
        let mut at = 0;
        while at < bytes.len() {
            let rest = bytes.len() - at;
            if stream.skip > 0 {
                let skipped = stream.skip.min(rest);
                stream.skip -= skipped;
                at += skipped;
                continue;
            }
            let wanted = (HEADER_LEN - stream.header.len()).min(rest);
            stream.header.extend_from_slice(&bytes[at..at + wanted]);
            at += wanted;
            let Ok(header) = <[u8; HEADER_LEN]>::try_from(&stream.header[..]) else { continue };
            stream.header.clear();
            let header = FrameHeader::decode(&header).ok()?;
            if phase.begins(way, &header, &seen) {
                // What passed of it with the bytes before cannot be held any more.
                return Some(at.saturating_sub(HEADER_LEN));
            }
            match header.kind {
                FrameKind::Pages => seen.pages += header.length,
                FrameKind::Barrier => seen.barriers += 1,
                _ => {}
            }
            stream.skip = header.length;
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use godwit_wire::{Greeting, Message, Role, SessionId, Version, barrier_aux, seal};

    use super::*;

    fn greeting() -> Vec<u8> {
        let session = SessionId([1; 16]);
        Greeting { version: Version::NEWEST, session, role: Role::Control, attempt: 0 }
            .encode()
            .to_vec()
    }

    fn frame(kind: FrameKind, aux: u64, length: usize) -> Vec<u8> {
        let mut frame = vec![9; HEADER_LEN + length];
        seal(&mut frame, kind, 0, aux);
        frame
    }

    #[test]
    fn a_step_begins_at_the_message_however_the_bytes_are_cut() {
        let before = [greeting(), frame(FrameKind::DeviceState, 0, 100)].concat();
        let all = [before.clone(), Message::Commit.encode(), vec![1; 7]].concat();
        for size in [1, 5, 24, 40, 1000] {
            let mut watch = watch(Phase::Commit);
            let mut passed = 0;
            let found = all.chunks(size).find_map(|chunk| {
                let held = watch(0, Way::There, chunk);
                passed += chunk.len();
                held.map(|at| passed - chunk.len() + at)
            });
            // Within the message, at its beginning where that came with the rest of it.
            let found = found.unwrap_or_default();
            assert!((before.len()..before.len() + HEADER_LEN).contains(&found), "{size}: {found}");
            assert!(size < 1000 || found == before.len());
        }
    }

    #[test]
    fn bytes_behind_a_step_are_those_of_all_connections() {
        let mut watch = watch_behind(Phase::Commit, 30);
        assert_eq!(watch(0, Way::There, &greeting()), None);
        assert_eq!(watch(0, Way::There, &Message::Commit.encode()), None);
        assert_eq!(watch(1, Way::Back, &[0; 5]), None);
        assert_eq!(watch(0, Way::There, &[0; 5]), Some(1));
    }

    #[test]
    fn of_each_way_and_connection_there_is_a_stream_of_its_own() {
        let mut watch = watch(Phase::Ready);
        assert_eq!(watch(0, Way::There, &greeting()), None);
        assert_eq!(watch(1, Way::There, &greeting()[..10]), None);
        assert_eq!(watch(0, Way::Back, &greeting()), None);
        // READY is the destination's to say.
        assert_eq!(watch(0, Way::There, &Message::Ready.encode()), None);
        assert_eq!(watch(0, Way::Back, &Message::Ready.encode()), Some(0));
    }

    #[test]
    fn rounds_are_told_apart_by_what_has_passed() {
        let end = |round, last| frame(FrameKind::Barrier, barrier_aux(round, last), 0);
        let pages = || frame(FrameKind::Pages, 0, 600 << 10);
        let rounds = [greeting(), pages(), pages(), pages(), end(0, false), pages(), end(1, true)];
        let whole = rounds.concat();
        let first = GREETING_LEN + 2 * pages().len();
        let later = GREETING_LEN + 3 * pages().len() + HEADER_LEN;
        assert_eq!(watch(Phase::FirstRound)(0, Way::There, &whole), Some(first));
        assert_eq!(watch(Phase::LaterRound)(0, Way::There, &whole), Some(later));
        let last = whole.len() - HEADER_LEN;
        assert_eq!(watch(Phase::LastRound)(0, Way::There, &whole), Some(last));
    }
}

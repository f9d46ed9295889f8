//! The connections of memory's channels, as places to put frames.
//!
//! Over a short way each channel puts its frames on its own connection. Over a long one TCP sends
//! no more than a window in each round trip, and makes that smaller whenever something is lost; so
//! a channel puts each frame on whichever connection takes it, and what is left of a round is sent
//! by all of them, however few segments it lies in. Little waits unsent in the connections then
//! (`TCP_NOTSENT_LOWAT`, tcp(7)), so that what was put on a slow one does not hold up the round.
//!
//! Invariant: a frame goes over one connection whole, and is counted there.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::address::Stream;
use crate::limits;

/// What waits unsent in a connection over a long way, at the most, when more is put there.
const UNSENT: u32 = 128 << 10;
/// How long it is waited for that a connection takes more, before all are tried again.
const WAIT: Duration = Duration::from_millis(20);
/// How long it is waited for where one seems to, and somebody else is at it.
const MOMENT: Duration = Duration::from_micros(200);

/// A connection.
pub(super) struct Wire {
    pub(super) stream: Stream,
    /// Frames that went over it, whole.
    pub(super) frames: u64,
}

/// All of them, by the number of their channel.
pub(super) struct Wires {
    wires: Vec<Mutex<Wire>>,
    /// The same connections, to be looked at; none where each channel has its own.
    watched: Vec<Stream>,
    /// With which of them the next search begins, where that is not to be the channel's own.
    turn: Option<AtomicUsize>,
}

impl Wires {
    /// Of channels of which each puts its frames on its own of these `streams`.
    pub(super) fn own(streams: impl IntoIterator<Item = Stream>) -> Self {
        let wire = |stream| Mutex::new(Wire { stream, frames: 0 });
        Self { wires: streams.into_iter().map(wire).collect(), watched: Vec::new(), turn: None }
    }

    /// Of channels that put their frames on whichever takes them: their own if it does. Where they
    /// are to be `scattered`, each frame goes over another, whether their own takes it or not.
    ///
    /// # Errors
    /// When descriptors are exhausted, or the kernel refuses.
    pub(super) fn shared(streams: Vec<Stream>, scattered: bool) -> io::Result<Self> {
        let watched = streams.iter().map(Stream::try_clone).collect::<io::Result<Vec<_>>>()?;
        streams.iter().try_for_each(|stream| stream.keep_little_unsent(UNSENT))?;
        let turn = scattered.then(AtomicUsize::default);
        Ok(Self { watched, turn, ..Self::own(streams) })
    }

    /// Whether a channel puts its frames on any of them.
    pub(super) fn are_shared(&self) -> bool {
        !self.watched.is_empty()
    }

    /// That of channel `number`.
    pub(super) fn of(&self, number: usize) -> MutexGuard<'_, Wire> {
        self.wires[number].lock().unwrap_or_else(half_written)
    }

    /// The one for the next frame of channel `number`, with its own number; its own where no other
    /// is to be waited for any more.
    pub(super) fn next(
        &self,
        number: usize,
        ends: impl Fn() -> bool,
    ) -> (usize, MutexGuard<'_, Wire>) {
        // Behind that, whoever writes to its own learns why none takes anything.
        let until = Instant::now() + limits::PLACE;
        let all = self.wires.len();
        let turn = self.turn.as_ref().map(|turn| turn.fetch_add(1, Ordering::Relaxed) % all);
        let first = turn.unwrap_or(number);
        while self.are_shared() && !ends() && Instant::now() < until {
            for other in (first..all).chain(0..first) {
                if !takes_more(&self.watched[other..=other], Duration::ZERO) {
                    continue;
                }
                match self.wires[other].try_lock() {
                    Ok(wire) => return (other, wire),
                    Err(TryLockError::Poisoned(wire)) => return (other, half_written(wire)),
                    Err(TryLockError::WouldBlock) => {}
                }
            }
            if takes_more(&self.watched, WAIT) {
                std::thread::sleep(MOMENT);
            }
        }
        (number, self.of(number))
    }
}

/// The connection of somebody who panicked at it: nothing whole can follow there.
fn half_written<'a>(wire: PoisonError<MutexGuard<'a, Wire>>) -> MutexGuard<'a, Wire> {
    let wire = wire.into_inner();
    wire.stream.shut_down();
    wire
}

/// Whether one of `streams` takes more, or fails, within `time`.
fn takes_more(streams: &[Stream], time: Duration) -> bool {
    let mut polled: Vec<_> = streams
        .iter()
        .map(|stream| PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::OUT))
        .collect();
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // Whoever writes to it learns of any error.
    poll(&mut polled, Some(&time)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    const NEVER: fn() -> bool = || false;

    /// A connection, and its other end.
    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    /// Fills the connection; how much it held.
    fn fill(stream: &UnixStream) -> usize {
        stream.set_nonblocking(true).unwrap();
        let mut filled = 0;
        loop {
            match (&mut &*stream).write(&[0; 4096]) {
                Ok(length) => filled += length,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    stream.set_nonblocking(false).unwrap();
                    return filled;
                }
            }
        }
    }

    #[test]
    fn a_frame_goes_over_its_own_connection_or_over_one_that_takes_it() {
        let ((own, mut own_end), (other, _other_end)) = (pair(), pair());
        let filler = own.try_clone().unwrap();
        let wires = Wires::shared(vec![own.into(), other.into()], false).unwrap();
        assert_eq!((wires.next(0, NEVER).0, wires.next(1, NEVER).0), (0, 1));
        let filled = fill(&filler);
        assert_eq!(wires.next(0, NEVER).0, 1, "it takes nothing");
        // Nor does the other one, at which somebody is: the first that does is waited for.
        std::thread::scope(|scope| {
            let held = wires.of(1);
            let next = scope.spawn(|| wires.next(0, NEVER).0);
            std::thread::sleep(2 * WAIT);
            assert!(!next.is_finished());
            assert_eq!(wires.next(0, || true).0, 0, "nobody waits any more");
            own_end.read_exact(&mut vec![0; filled]).unwrap();
            assert_eq!(next.join().unwrap(), 0);
            drop(held);
        });
    }

    #[test]
    fn frames_that_are_scattered_go_over_one_after_the_other() {
        let ends = [pair(), pair(), pair()];
        let streams = ends.iter().map(|(near, _)| near.try_clone().unwrap().into()).collect();
        let wires = Wires::shared(streams, true).unwrap();
        assert_eq!([0, 0, 2, 1].map(|number| wires.next(number, NEVER).0), [0, 1, 2, 0]);
    }

    #[test]
    fn where_each_channel_has_its_own_that_is_waited_for() {
        let ((own, _own_end), (other, _other_end)) = (pair(), pair());
        let filler = own.try_clone().unwrap();
        let wires = Wires::own([own.into(), other.into()]);
        fill(&filler);
        assert_eq!(wires.next(0, NEVER).0, 0);
    }
}

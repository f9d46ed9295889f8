//! A connection that is read ahead of whoever wants the answers.
//!
//! A server that cannot send an answer has it under way, and QEMU's main loop waits for all that is
//! under way whenever dirty bitmaps are made or taken away (QEMU, `nbd_drained_poll` in
//! nbd/server.c). A client that is kept from reading, by a link or a disk that stalls, would have
//! QEMU answer nothing. So a thread takes in what comes.
//!
//! Invariant: it holds no more than [`LIMIT`] bytes, which is more than the answers to all requests
//! that may be under way. The thread ends with its value.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that are read and not taken yet, at the most: twice what all answers to
/// [`DEPTH`](crate::DEPTH) requests of [`REQUEST_MAX`](crate::REQUEST_MAX) bytes are.
const LIMIT: usize = 32 << 20;
/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// The end that is read.
#[derive(Debug)]
pub(crate) struct Ahead {
    stream: UnixStream,
    shared: Arc<Shared>,
    /// What is being taken, from `at` on.
    front: Vec<u8>,
    at: usize,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    bytes: usize,
    /// Nothing more comes, and why.
    end: Option<io::ErrorKind>,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's: an empty piece, when there is room for another; `None` when nobody wants any.
    fn room(&self) -> Option<Vec<u8>> {
        let mut state = self.lock();
        while state.bytes >= LIMIT && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (!state.closed).then(|| state.spare.pop().unwrap_or_default())
    }

    fn read_all(&self, mut stream: UnixStream) {
        while let Some(mut piece) = self.room() {
            piece.resize(PIECE, 0);
            let read = loop {
                match stream.read(&mut piece) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    read => break read,
                }
            };
            let mut state = self.lock();
            match read {
                Ok(0) => state.end = Some(io::ErrorKind::UnexpectedEof),
                Ok(count) => {
                    piece.truncate(count);
                    state.bytes += count;
                    state.pieces.push_back(piece);
                }
                Err(error) => state.end = Some(error.kind()),
            }
            let ended = state.end.is_some();
            drop(state);
            self.changed.notify_all();
            if ended {
                break;
            }
        }
    }
}

impl Ahead {
    /// Reads `stream` ahead from now on.
    pub(crate) fn start(stream: &UnixStream) -> io::Result<Self> {
        let (reader, stream) = (stream.try_clone()?, stream.try_clone()?);
        // The wait is that of whoever takes.
        reader.set_read_timeout(None)?;
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new().name("disk answers".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.read_all(reader)
        })?;
        Ok(Self { stream, shared, front: Vec::new(), at: 0, thread: Some(thread) })
    }

    /// As [`Read::read`]; an error of the kind `TimedOut` when nothing has come within `limit`.
    pub(crate) fn read(&mut self, bytes: &mut [u8], limit: Duration) -> io::Result<usize> {
        if self.at == self.front.len() && !self.next(limit)? {
            return Ok(0);
        }
        let count = bytes.len().min(self.front.len() - self.at);
        bytes[..count].copy_from_slice(&self.front[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }

    /// Takes the next piece; false at the end of the stream.
    fn next(&mut self, limit: Duration) -> io::Result<bool> {
        let until = Instant::now() + limit;
        let mut state = self.shared.lock();
        loop {
            if let Some(piece) = state.pieces.pop_front() {
                state.bytes -= piece.len();
                state.spare.push(std::mem::replace(&mut self.front, piece));
                self.at = 0;
                drop(state);
                self.shared.changed.notify_all();
                return Ok(true);
            }
            match state.end {
                Some(io::ErrorKind::UnexpectedEof) => return Ok(false),
                Some(kind) => return Err(kind.into()),
                None => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn a_server_is_rid_of_its_answers_while_nobody_takes_them() {
        // Mutation: the stream is read by whoever takes.
        let (mut server, client) = UnixStream::pair().unwrap();
        server.set_write_timeout(Some(SOON)).unwrap();
        let mut ahead = Ahead::start(&client).unwrap();
        let answers: Vec<u8> = (0..LIMIT / 2).map(|at| (at / 7) as u8).collect();
        server.write_all(&answers).unwrap();
        drop(server);
        let mut taken = vec![0; answers.len() + 1];
        let mut at = 0;
        loop {
            match ahead.read(&mut taken[at..], SOON).unwrap() {
                0 => break,
                count => at += count,
            }
        }
        assert!(taken[..at] == answers);
    }

    #[test]
    fn no_more_than_the_limit_is_held_and_silence_ends() {
        let (mut server, client) = UnixStream::pair().unwrap();
        server.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut ahead = Ahead::start(&client).unwrap();
        let short = Duration::from_millis(20);
        assert_eq!(ahead.read(&mut [0], short).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let mut sent = 0;
        while let Ok(count) = server.write(&[5; 1 << 20]) {
            sent += count;
            assert!(sent < LIMIT + (4 << 20), "{sent} bytes");
        }
        assert!(sent >= LIMIT, "{sent} bytes");
    }
}

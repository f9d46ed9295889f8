//! One line of a connection, within a limit of its size and one of its time.
//!
//! Invariant: of what a peer sends no more is kept than a line may have, and nobody waits for it
//! longer than he meant to, however slowly it comes.

use std::io;
use std::time::Instant;

use godwit_engine::address::Stream;

/// Read at once.
const CHUNK: usize = 8 << 10;

/// Why there is no line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// It is too long.
    #[error("a line has {0} bytes at most")]
    TooLong(usize),
    /// It did not come in time.
    #[error("it did not come in time")]
    Late,
    /// The connection ended before it.
    #[error("the connection ended")]
    Ended,
    /// The connection is broken.
    #[error("{0}")]
    Broken(#[from] io::Error),
}

/// The lines of a connection.
#[derive(Debug)]
pub struct Lines {
    longest: usize,
    unread: Vec<u8>,
}

impl Lines {
    /// Of at most `longest` bytes each.
    #[must_use]
    pub fn new(longest: usize) -> Self {
        Self { longest, unread: Vec::new() }
    }

    /// The next line of `stream`, without its end, until `until` at the latest.
    ///
    /// # Errors
    /// Why there is none.
    ///
    /// ```
    /// use std::io::Write;
    /// use std::os::unix::net::UnixStream;
    /// use std::time::{Duration, Instant};
    /// use godwit_daemon::lines::{LineError, Lines};
    ///
    /// let (mut one, other) = UnixStream::pair()?;
    /// let (mut other, mut lines) = (other.into(), Lines::new(10));
    /// let mut next = || lines.next(&mut other, Instant::now() + Duration::from_secs(1), || false);
    /// one.write_all(b"one\ntwo\nthree is too long")?;
    /// assert_eq!(next()?, b"one");
    /// assert_eq!(next()?, b"two");
    /// assert!(matches!(next(), Err(LineError::TooLong(10))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn next(
        &mut self,
        stream: &mut Stream,
        until: Instant,
        stop: impl Fn() -> bool,
    ) -> Result<Vec<u8>, LineError> {
        let mut looked = 0;
        loop {
            if let Some(end) = self.unread[looked..].iter().position(|byte| *byte == b'\n') {
                let end = looked + end;
                if end > self.longest {
                    return Err(LineError::TooLong(self.longest));
                }
                let rest = self.unread.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.unread, rest);
                line.truncate(end);
                return Ok(line);
            }
            looked = self.unread.len();
            if looked > self.longest {
                return Err(LineError::TooLong(self.longest));
            }
            let mut chunk = [0; CHUNK];
            match stream.read_until(&mut chunk, until, &stop) {
                Ok(0) => return Err(LineError::Ended),
                Ok(read) => self.unread.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(LineError::Late);
                }
                Err(error) => return Err(LineError::Broken(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_sends_a_byte_now_and_then_is_not_waited_for_any_longer() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let mut other = Stream::from(other);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while one.write_all(b"x").is_ok() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            let began = Instant::now();
            let until = began + Duration::from_millis(200);
            let late = Lines::new(1 << 20).next(&mut other, until, || false);
            assert!(matches!(late, Err(LineError::Late)), "{late:?}");
            assert!(began.elapsed() < Duration::from_secs(2));
            drop(other);
        });
    }
}

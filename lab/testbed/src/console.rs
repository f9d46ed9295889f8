//! What a process prints, above all the guest's serial console: a thread takes the time of each
//! line as it arrives.
//!
//! Keeps two promises: a line's time is that of its last byte, taken before anything else is done
//! with it; and a line that the guest began on the source and ended on the destination is put
//! together again. What the lines mean is defined in `godwit-stamp`.

use std::io::Read;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use godwit_stamp::heartbeat::{BUG, DiskSecond, FAILED, Heartbeat, READY};

/// What the kernel prints when memory is damaged under it.
const KERNEL_TROUBLE: [&str; 6] =
    ["BUG: ", "Kernel panic", "Oops", "general protection fault", "segfault", "Corrupted"];

/// A heartbeat and when it arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// When its line was complete.
    pub at: Instant,
    /// What it said.
    pub heartbeat: Heartbeat,
}

#[derive(Clone, Debug)]
struct Line {
    at: Instant,
    text: String,
}

#[derive(Debug, Default)]
struct Seen {
    lines: Vec<Line>,
    /// The beginning of a line that has not ended yet.
    tail: String,
    closed: bool,
}

/// What was read so far, and a way to wait for more.
#[derive(Clone, Debug, Default)]
pub struct Console {
    shared: Arc<(Mutex<Seen>, Condvar)>,
}

impl Console {
    /// Reads `serial` to its end in a thread of its own.
    pub(crate) fn read(serial: impl Read + Send + 'static) -> Self {
        let console = Self::default();
        let reader = console.clone();
        std::thread::spawn(move || reader.run(serial));
        console
    }

    fn run(&self, mut serial: impl Read) {
        let mut chunk = [0; 4096];
        loop {
            let count = match serial.read(&mut chunk) {
                Err(problem) if problem.kind() == std::io::ErrorKind::Interrupted => continue,
                Ok(count) => count,
                Err(_) => 0,
            };
            let at = Instant::now();
            let mut seen = self.lock();
            if count == 0 {
                seen.closed = true;
            }
            seen.take(&chunk[..count], at);
            self.shared.1.notify_all();
            if count == 0 {
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All complete lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lock().lines.iter().map(|line| line.text.clone()).collect()
    }

    /// What came after the last complete line.
    pub(crate) fn tail(&self) -> String {
        self.lock().tail.clone()
    }

    /// What the guest's disk threads told, each second, and when it arrived.
    pub(crate) fn disk_seconds(&self) -> Vec<(Instant, DiskSecond)> {
        let parse = |line: &Line| Some((line.at, DiskSecond::of_line(&line.text)?));
        self.lock().lines.iter().filter_map(parse).collect()
    }

    /// Waits up to `limit` until `found` answers something; `what` is for the error.
    pub(crate) fn wait<T>(
        &self,
        what: &str,
        limit: Duration,
        mut found: impl FnMut(&Self) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(value) = found(self) {
                return Ok(value);
            }
            let seen = self.lock();
            let left = deadline.saturating_duration_since(Instant::now());
            if seen.closed || left.is_zero() {
                let why = if seen.closed { "the process ended" } else { "the time is over" };
                let last: Vec<_> =
                    seen.lines.iter().rev().take(3).map(|line| line.text.as_str()).collect();
                bail!(
                    "no {what} came, {why} (limit {limit:?}); last lines, newest first: {last:?}"
                );
            }
            // Short naps instead of a wait that a line between `found` and here could slip past.
            let nap = left.min(Duration::from_millis(20));
            drop(self.shared.1.wait_timeout(seen, nap).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Whether everything was read.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Waits up to `limit` until everything was read.
    pub(crate) fn wait_closed(&self, limit: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        let mut seen = self.lock();
        while !seen.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "the output is still open after {limit:?}");
            seen = self.shared.1.wait_timeout(seen, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Whether the guest has filled its buffer. A guest that cannot work is an error.
    pub(crate) fn ready(&self) -> Option<Result<(), String>> {
        let seen = self.lock();
        seen.lines.iter().find_map(|line| match &line.text {
            text if text.starts_with(READY) => Some(Ok(())),
            text if text.starts_with(FAILED) => Some(Err(text.clone())),
            _ => None,
        })
    }

    /// Heartbeats so far.
    pub(crate) fn beats(&self) -> Vec<Beat> {
        self.lock().beats()
    }

    /// Heartbeats of a guest that began on this console and went on with `next`.
    pub(crate) fn beats_across(&self, next: &Self) -> Vec<Beat> {
        let (seen, mut rest) =
            (self.lock(), Seen { lines: next.lock().lines.clone(), ..Seen::default() });
        if let Some(first) = rest.lines.first_mut() {
            first.text.insert_str(0, &seen.tail);
        }
        let mut beats = seen.beats();
        beats.extend(rest.beats());
        beats
    }

    /// Lines that tell of damaged memory, from the guest or its kernel.
    pub(crate) fn bugs(&self) -> Vec<String> {
        let seen = self.lock();
        let tells = |text: &str| {
            [BUG, FAILED].iter().any(|start| text.starts_with(start))
                || KERNEL_TROUBLE.iter().any(|trouble| text.contains(trouble))
        };
        let mut bugs: Vec<_> = seen
            .lines
            .iter()
            .filter(|line| tells(&line.text))
            .map(|line| line.text.clone())
            .collect();
        // Also those whose line was held back or got lost.
        let counted = seen.beats().last().map_or(0, |beat| beat.heartbeat.bugs);
        if bugs.is_empty() && counted > 0 {
            bugs.push(format!("{BUG} count={counted} in the last heartbeat"));
        }
        bugs
    }
}

impl Seen {
    fn take(&mut self, bytes: &[u8], at: Instant) {
        self.tail.push_str(&String::from_utf8_lossy(bytes));
        while let Some(end) = self.tail.find('\n') {
            let text = self.tail[..end].trim_end_matches('\r').to_owned();
            self.tail.drain(..=end);
            self.lines.push(Line { at, text });
        }
    }

    fn beats(&self) -> Vec<Beat> {
        let parse = |line: &Line| Some(Beat { at: line.at, heartbeat: line.text.parse().ok()? });
        self.lines.iter().filter_map(parse).collect()
    }
}

/// The longest time between two heartbeats that follow each other; zero for fewer than two. Without
/// a pause it is about 100 ms.
#[must_use]
pub fn longest_pause(beats: &[Beat]) -> Duration {
    beats.windows(2).map(|pair| pair[1].at.duration_since(pair[0].at)).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(text: &[u8]) -> Console {
        let console = Console::default();
        console.lock().take(text, Instant::now());
        console
    }

    fn line(n: u64) -> String {
        let heartbeat =
            Heartbeat { n, count: n * 10, writes: 0, rate: 0, checked: 0, bugs: 0, t_ms: n * 100 };
        format!("{heartbeat}\r\n")
    }

    #[test]
    fn a_line_that_began_on_the_source_ends_on_the_destination() {
        let (first, second, third) = (line(1), line(2), line(3));
        let source = console(format!("{first}{}", &second[..9]).as_bytes());
        let destination = console(format!("{}{third}", &second[9..]).as_bytes());
        let numbers: Vec<_> =
            source.beats_across(&destination).iter().map(|beat| beat.heartbeat.n).collect();
        assert_eq!(numbers, [1, 2, 3]);
        assert_eq!(source.beats().len(), 1);
    }

    #[test]
    fn bugs_of_guest_and_kernel_are_told() {
        let console =
            console(b"HB n=1\nBUG page=3 x\n[ 1.0] BUG: unable to handle page fault\nall well\n");
        assert_eq!(console.bugs(), ["BUG page=3 x", "[ 1.0] BUG: unable to handle page fault"]);
    }

    #[test]
    fn a_count_of_bugs_in_a_heartbeat_is_enough() {
        let console = console(line(1).replace("bugs=0", "bugs=2").as_bytes());
        assert_eq!(console.bugs().len(), 1);
    }

    #[test]
    fn waiting_ends_with_the_console() {
        let console = Console::read(&b"one line\n"[..]);
        let error =
            console.wait("heartbeat", Duration::from_secs(60), |c| c.beats().first().copied());
        assert!(error.unwrap_err().to_string().contains("the process ended"));
        assert_eq!(console.lines(), ["one line"]);
    }
}

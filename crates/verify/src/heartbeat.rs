//! The lines the guest prints, written and read by the same code.
//!
//! Keeps one promise: a heartbeat that lost characters on its way does not parse. What arrives when, and what follows
//! from a line that is missing, is left to `godwit-testbed`.

use core::fmt;
use core::str::FromStr;

/// The start of the line that says that the buffer is filled and the work begins.
pub const READY: &str = "GUEST READY";
/// The start of a line that says that the guest's memory is damaged.
pub const BUG: &str = "BUG";
/// The start of a line that says that the guest cannot work at all.
pub const FAILED: &str = "GUEST FAILED";

/// The start of a line that says how long writes to a disk took within the last second.
pub const DISK: &str = "DISK";

/// One heartbeat line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Sequence number, from 1.
    pub n: u64,
    /// The beacon's counter.
    pub count: u64,
    /// Page writes since the start.
    pub writes: u64,
    /// Page writes a second since the last heartbeat.
    pub rate: u64,
    /// Pages looked at since the start.
    pub checked: u64,
    /// Bugs found since the start, also those whose line was held back.
    pub bugs: u64,
    /// The guest's monotonic clock in milliseconds. It does not advance while the guest is stopped.
    pub t_ms: u64,
}

impl fmt::Display for Heartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n, count, writes, rate, checked, bugs, t_ms } = self;
        write!(
            f,
            "HB n={n} count={count} writes={writes} rate={rate} checked={checked} bugs={bugs} t_ms={t_ms} ."
        )
    }
}

/// A line is no heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoHeartbeat;

impl fmt::Display for NoHeartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a heartbeat line")
    }
}

impl core::error::Error for NoHeartbeat {}

impl FromStr for Heartbeat {
    type Err = NoHeartbeat;

    fn from_str(line: &str) -> Result<Self, NoHeartbeat> {
        let mut words = line.trim_end().strip_prefix("HB ").ok_or(NoHeartbeat)?.split(' ');
        let mut field = |key: &str| {
            let value = words.next().and_then(|word| word.strip_prefix(key)?.strip_prefix('='));
            value.and_then(|value| value.parse().ok()).ok_or(NoHeartbeat)
        };
        let heartbeat = Self {
            n: field("n")?,
            count: field("count")?,
            writes: field("writes")?,
            rate: field("rate")?,
            checked: field("checked")?,
            bugs: field("bugs")?,
            t_ms: field("t_ms")?,
        };
        // The full stop shows that the last number is whole.
        (words.next() == Some(".") && words.next().is_none()).then_some(heartbeat).ok_or(NoHeartbeat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEARTBEAT: Heartbeat =
        Heartbeat { n: 3, count: 123_456, writes: 600, rate: 2000, checked: 5000, bugs: 0, t_ms: 2345 };

    #[test]
    fn what_is_printed_is_parsed() {
        assert_eq!(HEARTBEAT.to_string().parse(), Ok(HEARTBEAT));
        assert_eq!(format!("{HEARTBEAT}\r\n").parse(), Ok(HEARTBEAT));
    }

    #[test]
    fn a_line_that_lost_its_end_or_a_character_does_not_parse() {
        let line = HEARTBEAT.to_string();
        for end in 0..line.len() {
            assert_eq!(line[..end].parse::<Heartbeat>(), Err(NoHeartbeat), "{}", &line[..end]);
        }
        assert_eq!("HB n=1 cout=2".parse::<Heartbeat>(), Err(NoHeartbeat));
        assert_eq!("[    0.1] Linux".parse::<Heartbeat>(), Err(NoHeartbeat));
    }
}

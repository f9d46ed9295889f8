//! The lines the guest prints, written and read by the same code.
//!
//! Keeps one promise: a heartbeat that lost characters on its way does not parse. What arrives
//! when, and what follows from a line that is missing, is left to `godwit-testbed`.

use core::fmt;
use core::str::FromStr;

/// The start of the line that says that the buffer is filled and the work begins.
pub const READY: &str = "GUEST READY";
/// The line that asks for settings, where the kernel's command line says that they are to be asked
/// for ([`ASK`](crate::settings::ASK)).
pub const ASKS: &str = "GUEST ASKS";
/// The start of a line that says that the guest's memory is damaged.
pub const BUG: &str = "BUG";
/// The start of a line that says that the guest cannot work at all.
pub const FAILED: &str = "GUEST FAILED";

/// The start of a line that says how long writes to a disk took within the last second.
pub const DISK: &str = "DISK";
/// The start of a line that says how many jobs were done, and pages filled, since the start.
pub const BUILD: &str = "BUILD";

/// How long a thread's writes to a disk took within the last second, by the guest's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskSecond {
    /// Reads made.
    pub reads: u64,
    /// Writes made; without any the times below are 0.
    pub writes: u64,
    /// The median, in microseconds.
    pub median_us: u64,
    /// Of a hundred writes, 99 took no longer.
    pub p99_us: u64,
    /// The longest.
    pub max_us: u64,
}

impl fmt::Display for DiskSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reads, writes, median_us, p99_us, max_us } = self;
        write!(
            f,
            "reads={reads} writes={writes} median_us={median_us} p99_us={p99_us} max_us={max_us} ."
        )
    }
}

impl DiskSecond {
    /// What a line says that begins with [`DISK`] and the thread's name; `None`: it is no such
    /// line, or not whole.
    #[must_use]
    pub fn of_line(line: &str) -> Option<Self> {
        let (_thread, rest) =
            line.trim_end().strip_prefix(DISK)?.strip_prefix(' ')?.split_once(' ')?;
        let mut words = rest.split(' ');
        let mut field =
            |key: &str| words.next()?.strip_prefix(key)?.strip_prefix('=')?.parse().ok();
        let second = Self {
            reads: field("reads")?,
            writes: field("writes")?,
            median_us: field("median_us")?,
            p99_us: field("p99_us")?,
            max_us: field("max_us")?,
        };
        (words.next() == Some(".") && words.next().is_none()).then_some(second)
    }
}

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
            "HB n={n} count={count} writes={writes} rate={rate} checked={checked} bugs={bugs} \
             t_ms={t_ms} ."
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
        (words.next() == Some(".") && words.next().is_none())
            .then_some(heartbeat)
            .ok_or(NoHeartbeat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEARTBEAT: Heartbeat = Heartbeat {
        n: 3,
        count: 123_456,
        writes: 600,
        rate: 2000,
        checked: 5000,
        bugs: 0,
        t_ms: 2345,
    };

    #[test]
    fn what_is_printed_is_parsed() {
        assert_eq!(HEARTBEAT.to_string().parse(), Ok(HEARTBEAT));
        assert_eq!(format!("{HEARTBEAT}\r\n").parse(), Ok(HEARTBEAT));
    }

    #[test]
    fn what_is_printed_of_a_disk_is_parsed_when_it_is_whole() {
        let second =
            DiskSecond { reads: 1, writes: 48, median_us: 1102, p99_us: 1500, max_us: 1909 };
        let line = format!("{DISK} /dev/vda/0 {second}");
        assert_eq!(DiskSecond::of_line(&format!("{line}\r\n")), Some(second));
        for end in 0..line.len() {
            assert_eq!(DiskSecond::of_line(&line[..end]), None, "{}", &line[..end]);
        }
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

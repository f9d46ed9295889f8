//! What the guest is told to do, as words of its kernel command line.
//!
//! Keeps one promise: what [`Settings`] prints, it parses to the same value, so that a test can
//! state what it wants in a type. Words that do not begin with `godwit.` belong to others and are
//! passed over.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use godwit_units::{ByteCount, PAGE_SIZE};

use crate::workload::Order;

/// The word of a command line that has the guest ask for its settings on its console, once it has
/// booted, instead of taking them from there: a line like the command line.
pub const ASK: &str = "godwit.ask";

/// How the guest spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Counts, and otherwise leaves its processor idle.
    Idle,
    /// Writes at a given rate; between writes it counts and checks, without pause unless it is told
    /// how many checks are enough.
    Rate,
    /// Writes, counts and checks as fast as it can.
    Full,
    /// Half of its time counts and checks, the other half counts and writes, 5 ms each: by the
    /// clock, so that what holds up its writes takes nothing from the rest.
    Mixed,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::Rate => "rate",
            Self::Full => "full",
            Self::Mixed => "mixed",
        })
    }
}

impl FromStr for Mode {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        match text {
            "idle" => Ok(Self::Idle),
            "rate" => Ok(Self::Rate),
            "full" => Ok(Self::Full),
            "mixed" => Ok(Self::Mixed),
            _ => Err(SettingsError::Mode(text.to_owned())),
        }
    }
}

/// What the guest does with its disks, all of which it overwrites from their start on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskWork {
    /// Bytes written a second to each disk, at random; 0: none.
    pub write: u64,
    /// Bytes read a second from each disk, at random; 0: none.
    pub read: u64,
    /// Bytes of one read or write: whole pages.
    pub block: ByteCount,
    /// The part of each disk that is used, at the most.
    pub span: ByteCount,
    /// Threads for each disk, and so reads or writes that are under way at once.
    pub threads: u16,
}

impl Default for DiskWork {
    /// Nothing, which is made of blocks of 4 KiB and one thread for each disk, over 64 MiB.
    fn default() -> Self {
        Self { write: 0, read: 0, block: ByteCount(4 << 10), span: ByteCount(64 << 20), threads: 1 }
    }
}

impl DiskWork {
    /// Whether there is anything to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.write == 0 && self.read == 0
    }
}

/// Processes that come, fill memory and go, as those of a build do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuildWork {
    /// How many there are at a time; 0: none.
    pub jobs: u16,
    /// Memory that one process fills and leaves behind before the guest is ready.
    pub past: ByteCount,
}

/// The TCP port at which the guest says what it is told, once its card has an address (RFC 862).
pub const ECHO_PORT: u16 = 7;

/// The address of the guest's network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardAddress {
    /// The guest itself.
    pub host: Ipv4Addr,
    /// How many bits of that name its network.
    pub prefix: u8,
}

impl fmt::Display for CardAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.prefix)
    }
}

impl FromStr for CardAddress {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let parsed = text.split_once('/').and_then(|(host, prefix)| {
            let prefix = prefix.parse().ok().filter(|prefix| (1..=32).contains(prefix))?;
            Some(Self { host: host.parse().ok()?, prefix })
        });
        parsed.ok_or_else(|| SettingsError::Address(text.to_owned()))
    }
}

/// Why a command line is not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// Not a mode.
    #[error("godwit.mode={0} is unknown: use idle, rate, full or mixed")]
    Mode(String),
    /// Not a size.
    #[error("godwit.{key}: {source}")]
    Size {
        /// Which setting.
        key: &'static str,
        /// What is wrong with it.
        source: godwit_units::ParseError,
    },
    /// Not a number.
    #[error("godwit.{key}={value} is not a number of pages a second")]
    Rate {
        /// Which setting.
        key: &'static str,
        /// What it was given.
        value: String,
    },
    /// Not an order.
    #[error("godwit.order={0} is unknown: use random, hot-cold, hot-tenth or sequential")]
    Order(String),
    /// Not a number of threads.
    #[error("godwit.disk_threads={0}: use 1 to 64")]
    Threads(String),
    /// Not whole pages.
    #[error("godwit.disk_block={0}: use a multiple of 4KiB, up to 4MiB")]
    Block(ByteCount),
    /// Not a number of processes.
    #[error("godwit.jobs={0}: use 0 to 64")]
    Jobs(String),
    /// Not an address.
    #[error("godwit.address={0}: use an address and the length of its network, as 192.0.2.2/24")]
    Address(String),
    /// A setting nobody knows, probably misspelt.
    #[error(
        "godwit.{0} is no setting: use mode, rate, checks, order, working_set, fill, \
         disk_write, disk_read, disk_block, disk_span, disk_threads, jobs, past and address"
    )]
    Unknown(String),
}

/// The settings of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How it spends its time.
    pub mode: Mode,
    /// Pages written per second in [`Mode::Rate`].
    pub rate: u64,
    /// Pages checked per second in [`Mode::Rate`] and [`Mode::Idle`], between which the processor
    /// rests for 2 ms at a time; `None`: as many as it can without a rest, or in the moments when
    /// it is awake.
    pub checks: Option<u64>,
    /// In which order pages are written.
    pub order: Order,
    /// The part of the buffer that is written.
    pub working_set: ByteCount,
    /// The whole buffer, stamped at start and checked all the time.
    pub fill: ByteCount,
    /// What it does with its disks.
    pub disk: DiskWork,
    /// What other processes do.
    pub build: BuildWork,
    /// The address of its network card; without one the card is left alone.
    pub address: Option<CardAddress>,
}

impl FromStr for Settings {
    type Err = SettingsError;

    fn from_str(command_line: &str) -> Result<Self, SettingsError> {
        let (mut mode, mut rate, mut working_set, mut fill) =
            (Mode::Idle, 2000, ByteCount(128 << 20), None);
        let mut disk = DiskWork::default();
        let mut build = BuildWork::default();
        let (mut address, mut order, mut checks) = (None, Order::default(), None);
        let size =
            |key, value: &str| value.parse().map_err(|source| SettingsError::Size { key, source });
        for word in command_line.split_ascii_whitespace() {
            let Some(setting) = word.strip_prefix("godwit.") else { continue };
            match setting.split_once('=') {
                Some(("mode", value)) => mode = value.parse()?,
                Some(("rate", value)) => rate = pages_a_second("rate", value)?,
                Some(("checks", value)) => checks = Some(pages_a_second("checks", value)?),
                Some(("order", value)) => {
                    let all = [Order::Random, Order::HotCold, Order::HotTenth, Order::Sequential];
                    let found = all.into_iter().find(|order| order.to_string() == value);
                    order = found.ok_or_else(|| SettingsError::Order(value.to_owned()))?;
                }
                Some(("working_set", value)) => working_set = size("working_set", value)?,
                Some(("fill", value)) => fill = Some(size("fill", value)?),
                Some(("disk_write", value)) => disk.write = size("disk_write", value)?.0,
                Some(("disk_read", value)) => disk.read = size("disk_read", value)?.0,
                Some(("disk_span", value)) => disk.span = size("disk_span", value)?,
                Some(("disk_block", value)) => {
                    disk.block = size("disk_block", value)?;
                    if !disk.block.0.is_multiple_of(PAGE_SIZE)
                        || !(1..=4 << 20).contains(&disk.block.0)
                    {
                        return Err(SettingsError::Block(disk.block));
                    }
                }
                Some(("disk_threads", value)) => {
                    let threads = value.parse().ok().filter(|threads| (1..=64).contains(threads));
                    disk.threads =
                        threads.ok_or_else(|| SettingsError::Threads(value.to_owned()))?;
                }
                Some(("jobs", value)) => {
                    let jobs = value.parse().ok().filter(|jobs| *jobs <= 64);
                    build.jobs = jobs.ok_or_else(|| SettingsError::Jobs(value.to_owned()))?;
                }
                Some(("past", value)) => build.past = size("past", value)?,
                Some(("address", value)) => address = Some(value.parse()?),
                _ => return Err(SettingsError::Unknown(setting.to_owned())),
            }
        }
        let fill = fill.unwrap_or(working_set).max(working_set);
        Ok(Self { mode, rate, checks, order, working_set, fill, disk, build, address })
    }
}

fn pages_a_second(key: &'static str, value: &str) -> Result<u64, SettingsError> {
    value.parse().map_err(|_| SettingsError::Rate { key, value: value.to_owned() })
}

impl fmt::Display for Settings {
    /// As words of a kernel command line; sizes in bytes, which are never rounded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, rate, checks, order, working_set, fill, disk, build, address } = self;
        let (working_set, fill) = (working_set.0, fill.0);
        write!(
            f,
            "godwit.mode={mode} godwit.rate={rate} godwit.working_set={working_set}B \
             godwit.fill={fill}B"
        )?;
        if let Some(checks) = checks {
            write!(f, " godwit.checks={checks}")?;
        }
        if *order != Order::default() {
            write!(f, " godwit.order={order}")?;
        }
        if *build != BuildWork::default() {
            write!(f, " godwit.jobs={} godwit.past={}B", build.jobs, build.past.0)?;
        }
        if let Some(address) = address {
            write!(f, " godwit.address={address}")?;
        }
        if disk.is_idle() {
            return Ok(());
        }
        let DiskWork { write, read, block, span, threads } = disk;
        write!(f, " godwit.disk_write={write}B godwit.disk_read={read}B")?;
        write!(
            f,
            " godwit.disk_block={}B godwit.disk_span={}B godwit.disk_threads={threads}",
            block.0, span.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_kernel_command_line() {
        let line = "console=ttyS0 godwit.mode=rate godwit.rate=5000 godwit.working_set=64M \
                    godwit.fill=1GiB quiet";
        let settings: Settings = line.parse().unwrap();
        assert_eq!(
            settings,
            Settings {
                mode: Mode::Rate,
                rate: 5000,
                checks: None,
                order: Order::Random,
                working_set: ByteCount(64 << 20),
                fill: ByteCount(1 << 30),
                disk: DiskWork::default(),
                build: BuildWork::default(),
                address: None,
            }
        );
        assert_eq!(settings.to_string().parse(), Ok(settings));
    }

    #[test]
    fn disks_are_left_alone_unless_told() {
        let line =
            "godwit.disk_write=2M godwit.disk_block=8K godwit.disk_span=1G godwit.disk_threads=4";
        let settings: Settings = line.parse().unwrap();
        let disk = DiskWork {
            write: 2 << 20,
            block: ByteCount(8 << 10),
            span: ByteCount(1 << 30),
            threads: 4,
            ..DiskWork::default()
        };
        assert_eq!(settings.disk, disk);
        assert_eq!(settings.to_string().parse(), Ok(settings));
        assert!("".parse::<Settings>().unwrap().disk.is_idle());
    }

    #[test]
    fn pages_are_checked_without_a_rest_unless_told() {
        let settings: Settings = "godwit.mode=rate godwit.checks=20000".parse().unwrap();
        assert_eq!(settings.checks, Some(20_000));
        assert_eq!(settings.to_string().parse(), Ok(settings));
        assert_eq!("".parse::<Settings>().unwrap().checks, None);
        let error = "godwit.checks=many".parse::<Settings>().unwrap_err().to_string();
        assert!(error.contains("godwit.checks=many is not a number of pages"), "{error}");
    }

    #[test]
    fn pages_are_written_at_random_unless_told() {
        for order in [Order::HotCold, Order::HotTenth, Order::Sequential] {
            let settings: Settings = format!("godwit.order={order}").parse().unwrap();
            assert_eq!(settings.order, order);
            assert_eq!(settings.to_string().parse(), Ok(settings));
        }
        assert_eq!("".parse::<Settings>().unwrap().order, Order::Random);
        let error = "godwit.order=cold".parse::<Settings>().unwrap_err().to_string();
        assert!(error.contains("hot-tenth or sequential"), "{error}");
    }

    #[test]
    fn nothing_is_built_unless_told() {
        let settings: Settings = "godwit.jobs=4 godwit.past=1G".parse().unwrap();
        assert_eq!(settings.build, BuildWork { jobs: 4, past: ByteCount(1 << 30) });
        assert_eq!(settings.to_string().parse(), Ok(settings));
        assert_eq!("".parse::<Settings>().unwrap().build, BuildWork::default());
    }

    #[test]
    fn a_card_is_left_alone_unless_it_has_an_address() {
        let settings: Settings = "godwit.address=198.18.0.2/30".parse().unwrap();
        let address = CardAddress { host: Ipv4Addr::new(198, 18, 0, 2), prefix: 30 };
        assert_eq!(settings.address, Some(address));
        assert_eq!(settings.to_string().parse(), Ok(settings));
        assert_eq!("".parse::<Settings>().unwrap().address, None);
    }

    #[test]
    fn the_buffer_is_at_least_the_working_set() {
        let settings: Settings = "godwit.working_set=64M godwit.fill=1M".parse().unwrap();
        assert_eq!(settings.fill, ByteCount(64 << 20));
        let settings: Settings = "godwit.working_set=64M".parse().unwrap();
        assert_eq!(settings.fill, ByteCount(64 << 20));
    }

    #[test]
    fn says_what_is_wrong() {
        let message = |line: &str| line.parse::<Settings>().unwrap_err().to_string();
        assert_eq!(
            message("godwit.mode=fast"),
            "godwit.mode=fast is unknown: use idle, rate, full or mixed"
        );
        assert!(message("godwit.fill=lots").starts_with("godwit.fill: "));
        assert!(message("godwit.rate=-1").contains("not a number"));
        assert!(message("godwit.speed=1").contains("no setting"));
        assert!(message("godwit.disk_block=5000B").contains("multiple of 4KiB"));
        assert!(message("godwit.disk_block=0B").contains("multiple of 4KiB"));
        assert!(message("godwit.jobs=65").contains("0 to 64"));
        assert!(message("godwit.disk_threads=0").contains("1 to 64"));
        for address in ["192.0.2.2", "192.0.2.2/33", "192.0.2.2/0", "guest/24"] {
            assert!(message(&format!("godwit.address={address}")).contains("as 192.0.2.2/24"));
        }
    }
}

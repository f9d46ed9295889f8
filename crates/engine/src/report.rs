//! What a migration tells while it runs, and its measures at the end.
//!
//! The measures are the six by which a migration is judged: set-up time, total time, total data,
//! downtime, loss of guest performance (how long it was tracked and throttled, and how slow it was
//! as far as its vCPUs' time tells), and the resources used.

use std::fmt;
use std::time::Duration;

use godwit_units::{ByteCount, PageCount, Rate};
use serde::{Deserialize, Serialize};

/// What is going on.
///
/// ```
/// use godwit_engine::report::Stage;
///
/// assert_eq!(serde_json::to_string(&Stage::PreCopy)?, "\"pre-copy\"");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// A round of pre-copy.
    PreCopy,
    /// The guest is stopped.
    StopAndCopy,
    /// The destination loads and takes over.
    Handover,
    /// The guest runs at the destination, and pages follow.
    PostCopy,
}

/// A look at a migration in progress.
///
/// ```
/// use godwit_engine::report::Progress;
///
/// fn line(progress: &Progress) -> String {
///     let Progress { round, sent, remaining, .. } = progress;
///     format!("round {round}: {sent} sent, {remaining} left")
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Since the start.
    #[serde(rename = "elapsed_ms", with = "milliseconds")]
    pub elapsed: Duration,
    /// What is going on.
    pub stage: Stage,
    /// The round, counted from 0.
    pub round: u32,
    /// Whether the round has just ended: the estimates below are new.
    pub round_ended: bool,
    /// Bytes put on the wire so far.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// What is still to be sent, as far as known.
    #[serde(rename = "remaining_bytes", with = "bytes")]
    pub remaining: ByteCount,
    /// How fast the guest dirties memory, from the last round.
    #[serde(rename = "dirty_bytes_per_second", with = "optional_rate")]
    pub dirty_rate: Option<Rate>,
    /// How fast the link carries.
    #[serde(rename = "bandwidth_bytes_per_second", with = "optional_rate")]
    pub bandwidth: Option<Rate>,
    /// Downtime if the guest were stopped now.
    #[serde(rename = "expected_downtime_ms", with = "optional_milliseconds")]
    pub expected_downtime: Option<Duration>,
    /// How long it will still take, as far as that can be said.
    pub remaining_time: Option<RemainingTime>,
    /// Share of time in which the vCPUs are kept from running.
    pub throttle: f64,
    /// The dirty-rate limit: clean pages that the guest may make dirty each second, if it is
    /// governed.
    #[serde(default)]
    pub dirty_rate_limit: Option<f64>,
    /// The guest's speed under that, as a share of its speed without, if it can be seen.
    pub guest_speed: Option<f64>,
    /// Hot segments that are left for later.
    pub delayed_segments: usize,
    /// The disks that move along; what is said above of bytes to be sent is of memory.
    #[serde(default)]
    pub disks: Vec<DiskProgress>,
    /// Parts of the link's time that memory gets for each 1024 of the disks.
    #[serde(default = "all_parts")]
    pub memory_share: u16,
    /// The most that the guest may write to its disks.
    #[serde(rename = "disk_limit_bytes_per_second", with = "optional_rate", default)]
    pub disk_limit: Option<Rate>,
    /// The connections are lost, and made again, while the guest runs free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub severed: Option<Severed>,
    /// What only the operator can do now.
    pub advice: Option<String>,
    /// What went wrong and is no reason to stop.
    pub warning: Option<String>,
}

/// What followed when the guest ran at the destination already.
///
/// ```
/// use godwit_engine::report::PostCopyMeasures;
/// use godwit_units::format_duration;
///
/// fn line(it: &PostCopyMeasures) -> String {
///     let time = format_duration(it.time);
///     format!("{} followed within {time}, {} pages were asked for", it.missing, it.asked)
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PostCopyMeasures {
    /// Memory that was missing when the guest began to run there.
    #[serde(rename = "missing_bytes", with = "bytes")]
    pub missing: ByteCount,
    /// Pages of it that somebody waited for there.
    pub asked: u64,
    /// Bytes put on the wire for it.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// From the word that the guest runs to the last page being in place.
    #[serde(rename = "time_ms", with = "milliseconds")]
    pub time: Duration,
    /// How often the connections were lost meanwhile, and made again.
    pub resumptions: u32,
    /// How long they were lost, all together.
    #[serde(rename = "severed_ms", with = "milliseconds")]
    pub severed: Duration,
}

/// Connections that are lost and made again.
///
/// ```
/// use godwit_engine::report::Severed;
/// use godwit_units::format_duration;
///
/// fn line(severed: &Severed) -> String {
///     let left = format_duration(severed.left);
///     format!("connection lost ({}), trying again for {left}", severed.why)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Severed {
    /// How long ago that was.
    #[serde(rename = "since_ms", with = "milliseconds")]
    pub since: Duration,
    /// How much longer they are tried for.
    #[serde(rename = "left_ms", with = "milliseconds")]
    pub left: Duration,
    /// Attempts that were begun.
    pub attempts: u32,
    /// How they were lost, or why the last attempt failed.
    pub why: String,
}

fn all_parts() -> u16 {
    1024
}

/// A disk that moves along, as it is now.
///
/// ```
/// use godwit_engine::report::DiskProgress;
///
/// fn line(disk: &DiskProgress) -> String {
///     format!("{}: {} of {} sent", disk.name, disk.sent, disk.size)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskProgress {
    /// Its name.
    pub name: String,
    /// Its size.
    #[serde(rename = "size_bytes", with = "bytes")]
    pub size: ByteCount,
    /// Bytes put on the wire for it so far.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// What is still to be sent of it, in whole dirty blocks: of this pass, and what the guest
    /// wrote since that began.
    #[serde(rename = "remaining_bytes", with = "bytes")]
    pub remaining: ByteCount,
    /// Whether it is in its first pass, over all of it.
    pub full_pass: bool,
}

/// A disk that moved along.
///
/// ```
/// use godwit_engine::report::{DiskMeasures, Measures};
///
/// fn sent(measures: &Measures) -> u64 {
///     measures.disks.iter().map(|disk: &DiskMeasures| disk.sent.0).sum()
/// }
/// assert_eq!(sent(&Measures::default()), 0);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskMeasures {
    /// Its name.
    pub name: String,
    /// Its size.
    #[serde(rename = "size_bytes", with = "bytes")]
    pub size: ByteCount,
    /// The size of its dirty blocks.
    #[serde(rename = "granularity_bytes", with = "bytes")]
    pub granularity: ByteCount,
    /// Bytes put on the wire for it.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// Pages of it whose bytes were sent, in all rounds.
    #[serde(rename = "data_pages", with = "pages")]
    pub data: PageCount,
    /// Pages of it that were only named, being zero.
    #[serde(rename = "zero_pages", with = "pages")]
    pub zero: PageCount,
    /// The destination has read it back, and holds what was sent.
    #[serde(default)]
    pub verified: bool,
}

/// A time with bounds.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::report::RemainingTime;
///
/// let [low, mid, high] = [4, 5, 8].map(Duration::from_secs);
/// let remaining = RemainingTime { low, mid, high };
/// assert!(remaining.low <= remaining.mid && remaining.mid <= remaining.high);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RemainingTime {
    /// At least.
    #[serde(rename = "low_ms", with = "milliseconds")]
    pub low: Duration,
    /// Probably.
    #[serde(rename = "mid_ms", with = "milliseconds")]
    pub mid: Duration,
    /// At most.
    #[serde(rename = "high_ms", with = "milliseconds")]
    pub high: Duration,
}

impl From<godwit_policy::RemainingTime> for RemainingTime {
    fn from(time: godwit_policy::RemainingTime) -> Self {
        let godwit_policy::RemainingTime { low, mid, high } = time;
        Self { low, mid, high }
    }
}

/// One round as it was.
///
/// ```
/// use godwit_engine::report::RoundMeasures;
/// use godwit_units::PageCount;
///
/// let round = RoundMeasures { round: 1, data: PageCount(512), ..RoundMeasures::default() };
/// assert_eq!((round.data + round.zero).0, 512);
/// ```
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RoundMeasures {
    /// Its number.
    pub round: u32,
    /// From its start to the acknowledgement that all is in place.
    #[serde(rename = "ms", with = "milliseconds")]
    pub time: Duration,
    /// Pages whose bytes were sent.
    #[serde(rename = "data_pages", with = "pages")]
    pub data: PageCount,
    /// Pages that were only named, being zero.
    #[serde(rename = "zero_pages", with = "pages")]
    pub zero: PageCount,
    /// Of these, pages that the guest had said are free.
    #[serde(rename = "hinted_pages", with = "pages", default)]
    pub hinted: PageCount,
    /// Bytes put on the wire for memory.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// Pages that were written and hold what was sent before: not sent again.
    #[serde(rename = "unchanged_pages", with = "pages")]
    pub unchanged: PageCount,
    /// Bytes of the data pages, before compression.
    #[serde(rename = "raw_bytes", with = "bytes")]
    pub raw: ByteCount,
    /// Pages dirty at its end.
    #[serde(rename = "remaining_pages", with = "pages")]
    pub remaining: PageCount,
    /// The throttle in force at its end.
    pub throttle: f64,
    /// Bytes put on the wire for disks.
    #[serde(rename = "disk_sent_bytes", with = "bytes", default)]
    pub disk_sent: ByteCount,
    /// Bytes of disks dirty at its end, in whole dirty blocks.
    #[serde(rename = "disk_remaining_bytes", with = "bytes", default)]
    pub disk_remaining: ByteCount,
    /// Bytes that the guest wrote to disks in it, where that is known.
    #[serde(rename = "disk_written_bytes", with = "bytes", default)]
    pub disk_written: ByteCount,
    /// The share of memory that was in force at its end, of 1024.
    #[serde(default = "all_parts")]
    pub memory_share: u16,
    /// It was cut off: the connections were lost in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut_off: bool,
}

/// Where the downtime went.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::report::DowntimeParts;
///
/// fn whole(parts: &DowntimeParts) -> Duration {
///     let before = parts.drain + parts.copy + parts.verify + parts.safe;
///     before + parts.save + parts.load + parts.handover
/// }
/// assert_eq!(whole(&DowntimeParts::default()), Duration::ZERO);
/// ```
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct DowntimeParts {
    /// From the stop of the vCPUs until all devices were drained.
    #[serde(rename = "drain_ms", with = "milliseconds")]
    pub drain: Duration,
    /// Last harvest, copy and acknowledgement.
    #[serde(rename = "copy_ms", with = "milliseconds")]
    pub copy: Duration,
    /// Comparing digests (with --verify).
    #[serde(rename = "verify_ms", with = "milliseconds")]
    pub verify: Duration,
    /// Copying what the destination lacks to a third place (post-copy).
    #[serde(rename = "safe_ms", with = "milliseconds", default)]
    pub safe: Duration,
    /// Saving and sending the device state.
    #[serde(rename = "save_ms", with = "milliseconds")]
    pub save: Duration,
    /// Waiting for the destination to have loaded it.
    #[serde(rename = "load_ms", with = "milliseconds")]
    pub load: Duration,
    /// From COMMIT to the word that the guest runs.
    #[serde(rename = "handover_ms", with = "milliseconds")]
    pub handover: Duration,
}

/// The measures of a finished migration, as the source saw it.
///
/// ```
/// use godwit_engine::report::Measures;
/// use godwit_units::format_duration;
///
/// fn line(measures: &Measures) -> String {
///     let [total, downtime] = [measures.total, measures.downtime].map(format_duration);
///     format!("moved in {total}, gone for {downtime}")
/// }
/// assert_eq!(line(&Measures::default()), "moved in 0s, gone for 0s");
/// ```
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measures {
    /// Connecting, comparing and starting to track.
    #[serde(rename = "setup_ms", with = "milliseconds")]
    pub setup: Duration,
    /// From the start to the word that the guest runs.
    #[serde(rename = "total_ms", with = "milliseconds")]
    pub total: Duration,
    /// vCPU stop at the source to the word that they run at the destination.
    #[serde(rename = "downtime_ms", with = "milliseconds")]
    pub downtime: Duration,
    /// Where it went.
    #[serde(flatten)]
    pub parts: DowntimeParts,
    /// How long the guest ran with its writes tracked.
    #[serde(rename = "tracked_ms", with = "milliseconds")]
    pub tracked: Duration,
    /// How long it was throttled.
    #[serde(rename = "throttled_ms", with = "milliseconds")]
    pub throttled: Duration,
    /// Guest time that the throttle took: one minus the guest's speed, summed up.
    #[serde(rename = "lost_ms", with = "milliseconds")]
    pub lost: Duration,
    /// How long the guest ran under 50 % of its speed.
    #[serde(rename = "under_half_ms", with = "milliseconds")]
    pub under_half: Duration,
    /// How long it ran under 10 % of its speed.
    #[serde(rename = "under_tenth_ms", with = "milliseconds")]
    pub under_tenth: Duration,
    /// Write faults of the guest that had to wait for the write governor.
    #[serde(default)]
    pub write_faults_delayed: u64,
    /// How long its vCPUs waited for it, summed up.
    #[serde(rename = "vcpus_waited_ms", with = "milliseconds", default)]
    pub vcpus_waited: Duration,
    /// The longest of these waits.
    #[serde(rename = "longest_wait_ms", with = "milliseconds", default)]
    pub longest_wait: Duration,
    /// How long a thread of the machine was stopped to start tracking.
    #[serde(rename = "tracking_stop_us", with = "microseconds")]
    pub tracking_stop: Duration,
    /// Bytes put on the wire, frames and device state included.
    #[serde(rename = "sent_bytes", with = "bytes")]
    pub sent: ByteCount,
    /// Of these, device state.
    #[serde(rename = "device_state_bytes", with = "bytes")]
    pub device_state: ByteCount,
    /// Bytes of the pages that were sent, before compression.
    #[serde(rename = "raw_bytes", with = "bytes")]
    pub raw: ByteCount,
    /// Pages that were written and hold what was sent before: not sent again.
    #[serde(rename = "unchanged_pages", with = "pages")]
    pub unchanged: PageCount,
    /// Pages that were not sent since the guest had said that they are free.
    #[serde(rename = "hinted_pages", with = "pages", default)]
    pub hinted: PageCount,
    /// Packets that came for the guest's cards while it stood still, and were carried to where it
    /// runs.
    #[serde(default)]
    pub late_packets: u64,
    /// Memory that the fingerprints took.
    #[serde(rename = "fingerprint_bytes", with = "bytes")]
    pub fingerprints: ByteCount,
    /// Codecs that both sides know.
    pub codecs: String,
    /// The version of the protocol that both sides speak.
    #[serde(default)]
    pub protocol_version: u16,
    /// Features of the protocol that both sides have: their names, or none.
    #[serde(default)]
    pub features: String,
    /// Guest memory, of which holes and zero pages were not sent.
    #[serde(rename = "ram_bytes", with = "bytes")]
    pub ram: ByteCount,
    /// Rounds, the last one (guest stopped) included.
    pub rounds: usize,
    /// Each of them.
    pub round_list: Vec<RoundMeasures>,
    /// Pages whose bytes were sent, by round (behind the 64th all in one) and by equal parts of
    /// guest memory, at most 128, in the order of its RAM blocks.
    #[serde(rename = "memory_map_pages", default, skip_serializing_if = "Vec::is_empty")]
    pub memory_map: Vec<Vec<u32>>,
    /// Whether the digests of both sides were compared and found equal.
    pub verified: bool,
    /// What the audit has found, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<Audit>,
    /// How long all memory of the source was read once more, with the guest running at the
    /// destination, and found to be what was sent; none where digests were made of it while the
    /// guest was stopped.
    #[serde(rename = "look_back_ms", with = "optional_milliseconds", default)]
    pub look_back: Option<Duration>,
    /// What followed when the guest ran at the destination already, if anything did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopyMeasures>,
    /// Data channels of memory used.
    pub channels: usize,
    /// The disks that moved along.
    #[serde(default)]
    pub disks: Vec<DiskMeasures>,
    /// How often the connections were lost, and the migration taken up again.
    #[serde(default)]
    pub resumptions: u32,
    /// How long they were lost, all together. The total has this time in it, no round has.
    #[serde(rename = "severed_ms", with = "milliseconds", default)]
    pub severed: Duration,
    /// Bytes of pages, before compression, that had been sent, were not known to have arrived when
    /// the connections were lost, and so were sent again.
    #[serde(rename = "sent_again_bytes", with = "bytes", default)]
    pub sent_again: ByteCount,
}

/// Durations as milliseconds, to the microsecond; both ways, since a VMM with the engine inside
/// reports to the command.
mod milliseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        time: &Duration,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64((time.as_secs_f64() * 1e6).round() / 1e3)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Duration, D::Error> {
        let milliseconds = f64::deserialize(deserializer)?;
        let micros = (milliseconds * 1e3).round();
        Duration::try_from_secs_f64(micros / 1e6).map_err(serde::de::Error::custom)
    }
}

/// Durations as whole microseconds.
mod microseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        time: &Duration,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(time.as_micros() as u64)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_micros)
    }
}

/// As [`milliseconds`], where there is one.
mod optional_milliseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        time.map(|time| (time.as_secs_f64() * 1e6).round() / 1e3).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let time = Option::<f64>::deserialize(deserializer)?;
        let seconds = time.map(|milliseconds| (milliseconds * 1e3).round() / 1e6);
        seconds.map(Duration::try_from_secs_f64).transpose().map_err(serde::de::Error::custom)
    }
}

/// Rates as whole bytes a second, where there is one.
mod optional_rate {
    use godwit_units::Rate;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        rate: &Option<Rate>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        rate.map(|rate| rate.bytes_per_second().round()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Rate>, D::Error> {
        Ok(Option::<f64>::deserialize(deserializer)?.map(Rate::from_bytes_per_second))
    }
}

/// Byte counts as numbers.
mod bytes {
    use godwit_units::ByteCount;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        count: &ByteCount,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(count.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<ByteCount, D::Error> {
        u64::deserialize(deserializer).map(ByteCount)
    }
}

/// Page counts as numbers.
mod pages {
    use godwit_units::PageCount;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        count: &PageCount,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(count.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<PageCount, D::Error> {
        u64::deserialize(deserializer).map(PageCount)
    }
}

/// A page of a RAM block or of a disk.
///
/// ```
/// use godwit_engine::report::Place;
///
/// let place = Place { block: "pc.ram".to_owned(), disk: false, offset: 0x3000 };
/// assert_eq!(place.to_string(), "RAM block 'pc.ram' at 0x3000");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The name of the block or disk.
    pub block: String,
    /// It is a disk.
    #[serde(default)]
    pub disk: bool,
    /// Bytes from its beginning.
    pub offset: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.disk { "disk" } else { "RAM block" };
        write!(f, "{kind} '{}' at {:#x}", self.block, self.offset)
    }
}

/// What an audit has found: its answers to four questions, each apart.
///
/// ```
/// # fn show(audit: &godwit_engine::report::Audit) {
/// if !audit.sent.is_yes() {
///     println!("{} pages were written and not sent", audit.sent.differing.0);
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// Pages that were compared, those of disks among them.
    #[serde(rename = "compared_pages", with = "pages")]
    pub pages: PageCount,
    /// Did memory arrive as it was sent? What the destination holds of a page is what was sent of
    /// it last.
    pub memory: Answer,
    /// Did the disks that move along? `None`: there are none.
    pub disks: Option<Answer>,
    /// Was everything sent? The source holds of each page, too, what was sent of it last.
    pub sent: Answer,
    /// Did it arrive in order? Of what did not arrive as it was sent, nothing is an older version.
    pub order: Answer,
}

/// The answer to one question of an audit.
///
/// ```
/// use godwit_engine::report::Answer;
///
/// assert!(Answer::default().is_yes());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Pages of which it is not so.
    #[serde(rename = "differing_pages", with = "pages")]
    pub differing: PageCount,
    /// The first of them.
    pub first: Option<Difference>,
}

impl Answer {
    /// Whether it is so of all pages.
    #[must_use]
    pub fn is_yes(&self) -> bool {
        self.differing == PageCount::ZERO
    }
}

impl Audit {
    /// Whether all answers are yes.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        [Some(&self.memory), self.disks.as_ref(), Some(&self.sent), Some(&self.order)]
            .into_iter()
            .flatten()
            .all(Answer::is_yes)
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pages: _, memory, disks, sent, order } = self;
        for (what, answer) in [("memory", Some(memory)), ("disks", disks.as_ref())] {
            let Some(answer) = answer else { continue };
            match &answer.first {
                None => write!(f, "{what} arrived as sent; ")?,
                Some(first) => {
                    write!(f, "{what}: {} did not arrive as sent: {first}; ", answer.differing)?;
                }
            }
        }
        match &sent.first {
            None => write!(f, "all of it was sent; ")?,
            Some(first) => write!(f, "{} were not sent: {first}; ", sent.differing)?,
        }
        let firsts = [Some(memory), disks.as_ref()].into_iter().flatten();
        let mut told = firsts.filter_map(|answer| answer.first.as_ref());
        match &order.first {
            None => write!(f, "in order"),
            Some(first) if told.any(|it| it == first) => {
                write!(f, "not in order: older versions of {}", order.differing)
            }
            Some(first) => {
                write!(f, "not in order: older versions of {}: {first}", order.differing)
            }
        }
    }
}

/// How a page came to differ. Rounds are counted from 0.
///
/// ```
/// use godwit_engine::report::Difference;
///
/// fn is_of_tracking(why: &Difference) -> bool {
///     matches!(why, Difference::NotReported { .. })
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[allow(
    missing_docs,
    reason = "place: the page; last, sent: the round in which it was sent last; channel: over which"
)]
pub enum Difference {
    /// The destination holds an older version.
    Older { place: Place, held: u32, last: Option<u32>, channel: Option<usize> },
    /// The destination holds zeros.
    Zeros { place: Place, last: Option<u32>, channel: Option<usize> },
    /// The destination holds what was sent for another page.
    OtherPage { place: Place, other: Place, last: Option<u32>, channel: Option<usize> },
    /// The destination holds what was never sent.
    Unknown { place: Place, last: Option<u32>, channel: Option<usize> },
    /// It was left out as free, and was written.
    BelievedFree { place: Place, left_out: u32, reported: Option<u32> },
    /// The tracker reported it, and it was not sent since.
    NotSent { place: Place, reported: Option<u32>, sent: Option<u32>, channel: Option<usize> },
    /// It was written, and the tracker has not reported it since it was sent, or since it was read
    /// again in a later round in which it was still unchanged.
    NotReported { place: Place, sent: Option<u32>, unchanged: Option<u32>, channel: Option<usize> },
}

/// A round, if there was one.
fn round(round: Option<u32>) -> String {
    round.map_or_else(|| "never".to_owned(), |round| format!("in round {round}"))
}

/// When it was sent, and over which channel, if it was.
fn sending(last: Option<u32>, channel: Option<usize>) -> String {
    let over = channel.map(|channel| format!(" over channel {channel}"));
    round(last) + over.as_deref().unwrap_or_default()
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Older { place, held, last, channel } => write!(
                f,
                "{place} holds the version of round {held}, though a newer one was sent {}: that \
                 one was not placed, or the older one came behind it",
                sending(*last, *channel)
            ),
            Self::Zeros { place, last, channel } => write!(
                f,
                "{place} holds zeros, though it was sent {}: it was not placed, or was thrown \
                 away",
                sending(*last, *channel)
            ),
            Self::OtherPage { place, other, last, channel } => write!(
                f,
                "{place} holds what was sent for {other}; it was itself sent {}",
                sending(*last, *channel)
            ),
            Self::Unknown { place, last, channel } => write!(
                f,
                "{place} holds bytes that were never sent; it was sent {}: they changed \
                 behind the frame's checksum",
                sending(*last, *channel)
            ),
            Self::BelievedFree { place, left_out, reported } => write!(
                f,
                "{place} was left out as free in round {left_out}, and was written since \
                 (reported by the tracker: {})",
                round(*reported)
            ),
            Self::NotSent { place, reported, sent, channel } => write!(
                f,
                "{place} was reported as written {}, and not sent then (sent last: {}): the \
                 engine left it out",
                round(*reported),
                sending(*sent, *channel)
            ),
            Self::NotReported { place, sent, unchanged, channel } => {
                let since = unchanged.map(|round| format!(", and was unchanged in round {round}"));
                write!(
                    f,
                    "{place} was written, and not reported as written since it was sent {}{}: \
                     the tracker missed it",
                    sending(*sent, *channel),
                    since.unwrap_or_default()
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_survive_being_told() {
        let measures = Measures {
            downtime: Duration::from_micros(4321),
            tracking_stop: Duration::from_micros(7),
            sent: ByteCount(99),
            parts: DowntimeParts { load: Duration::from_micros(17), ..DowntimeParts::default() },
            round_list: vec![RoundMeasures { zero: PageCount(3), ..RoundMeasures::default() }],
            verified: true,
            look_back: Some(Duration::from_micros(1234)),
            ..Measures::default()
        };
        let text = serde_json::to_string(&measures).unwrap();
        let back: Measures = serde_json::from_str(&text).unwrap();
        assert_eq!(format!("{back:?}"), format!("{measures:?}"));
    }
}

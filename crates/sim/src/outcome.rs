//! What came of a simulated migration.

use serde::Serialize;

/// What may be left of half pages, in all segments together.
const PARTS: f64 = 300.0;

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// The guest runs at the destination.
    Moved,
    /// The policy gave up; the guest runs at the source.
    GaveUp,
    /// Something broke; the guest runs at the source.
    Stayed,
    /// Nobody could be asked who runs the guest.
    InDoubt,
    /// It did not end in the time allowed.
    Endless,
}

/// One round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RoundRow {
    /// Its number.
    pub round: u32,
    /// When it began, in seconds.
    pub start: f64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Bytes of memory sent.
    pub sent: f64,
    /// Bytes of memory left at its end.
    pub remaining: f64,
    /// The highest throttle in it.
    pub throttle: f64,
    /// The guest's speed, on average.
    pub speed: f64,
    /// Segments delayed at its end.
    pub delayed: usize,
    /// Downtime expected at its end, in seconds, if known.
    pub expected: Option<f64>,
    /// Share of the link's time for memory, of 1024, at its beginning.
    pub memory_share: u16,
    /// Bytes of disks sent.
    pub disk_sent: f64,
    /// Bytes of disks left.
    pub disk_remaining: f64,
    /// Limit of disk writes at its end, bytes each second.
    pub disk_limit: Option<f64>,
    /// How long disks were held up by their storage and not by the link, in seconds.
    pub storage: f64,
}

/// What came of memory that was left when the guest ran at the destination (post-copy).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Followed {
    /// Bytes of memory that were missing when the guest began to run there.
    pub missing: f64,
    /// How long until none was, in seconds.
    pub seconds: f64,
    /// Pages that the guest waited for.
    pub faults: f64,
    /// Seconds of its work lost by that, those without a link among them.
    pub lost_work: f64,
}

/// A moment, for charts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    /// Seconds since the start.
    pub at: f64,
    /// Throttle asked for.
    pub throttle: f64,
    /// The guest's speed.
    pub speed: f64,
    /// Bytes of memory that remain.
    pub remaining: f64,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub end: End,
    /// Why it did not work, in a line.
    pub reason: Option<String>,
    /// Whole time, in seconds.
    pub total: f64,
    /// Downtime, in seconds; 0 when the guest was never stopped.
    pub downtime: f64,
    /// The downtime that was expected when it was decided to switch over.
    pub expected_downtime: f64,
    /// The highest limit that the policy held it against.
    pub limit: f64,
    /// Bytes of memory sent.
    pub sent: f64,
    /// Bytes of disks sent.
    pub disk_sent: f64,
    /// Passes over memory.
    pub memory_passes: u32,
    /// Seconds of the guest's work lost, downtime included.
    pub lost_work: f64,
    /// Seconds in which the guest ran under 10 % of its speed, downtime included.
    pub under_10: f64,
    /// Seconds in which it ran under 50 % of its speed, downtime included.
    pub under_50: f64,
    /// The highest throttle.
    pub throttle: f64,
    /// Whether it was ever held to a dirty-rate limit.
    pub governed: bool,
    /// The lowest limit of disk writes, bytes each second.
    pub disk_limit: Option<f64>,
    /// How often lost connections were made again.
    pub resumptions: u32,
    /// What followed the guest, if it left before its memory.
    pub post_copy: Option<Followed>,
    /// Pages that the destination lacked when the guest was given away, or the source forgot what
    /// followed. More than parts of a page must not be.
    pub lacking: f64,
    /// The source's godwit was killed behind COMMIT: its operator has seen where the guest is.
    pub recovered: bool,
    /// The most sides that could run the guest at one time. More than one must not be.
    pub owners: u8,
    /// All rounds, the last with the guest stopped.
    pub rounds: Vec<RoundRow>,
    /// Moments, about ten each second or a hundred each round.
    #[serde(skip)]
    pub points: Vec<Point>,
}

impl Outcome {
    pub(crate) fn new() -> Self {
        Self {
            end: End::Endless,
            reason: None,
            total: 0.0,
            downtime: 0.0,
            expected_downtime: 0.0,
            limit: 0.0,
            sent: 0.0,
            disk_sent: 0.0,
            memory_passes: 0,
            lost_work: 0.0,
            under_10: 0.0,
            under_50: 0.0,
            throttle: 0.0,
            governed: false,
            disk_limit: None,
            resumptions: 0,
            post_copy: None,
            lacking: 0.0,
            recovered: false,
            owners: 0,
            rounds: Vec::new(),
            points: Vec::new(),
        }
    }

    /// What is wrong with it, whatever went wrong on the way: it has ended, with one owner, who has
    /// all of the guest.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        let checks = [
            (self.end == End::Endless, "it does not end"),
            (self.owners > 1, "two owners"),
            (self.owners == 0, "no owner"),
            (self.moved() && self.lacking > PARTS, "the destination lacks pages"),
        ];
        checks.iter().find(|(wrong, _)| *wrong).map(|(_, what)| *what)
    }

    /// Whether the guest moved.
    #[must_use]
    pub fn moved(&self) -> bool {
        self.end == End::Moved
    }
}

//! What a destination tells while it takes a guest in, and of a guest that is here.

use std::path::PathBuf;
use std::time::Duration;

use godwit_disk::Disk;
use godwit_units::{ByteCount, PageCount, PageRun};

use super::dump::Dumped;

/// What is told while receiving.
///
/// ```
/// use godwit_engine::destination::Notice;
///
/// fn tell(notice: &Notice) {
///     match notice {
///         Notice::Refused(why) => eprintln!("refused a connection: {why}; still waiting"),
///         Notice::Accepted { ram, disks, .. } => {
///             eprintln!("{ram} and {} disks to come", disks.len());
///         }
///         _ => {}
///     }
/// }
/// tell(&Notice::Refused("it does not speak the protocol".to_owned()));
/// ```
#[derive(Clone, Debug)]
pub enum Notice {
    /// A connection was refused; waiting goes on.
    Refused(String),
    /// Another source came while one is being served, and was told so.
    Busy {
        /// Where it called from.
        peer: String,
    },
    /// A source asked whether its guest would be accepted, and was answered; waiting goes on.
    Asked {
        /// Where it called from.
        peer: String,
        /// Why the guest would not be; `None`: it would.
        refusal: Option<String>,
    },
    /// Somebody without a VM asked what this host has, and was told; waiting goes on.
    Looked {
        /// Where it called from.
        peer: String,
    },
    /// A source was accepted.
    Accepted {
        /// Guest memory to come.
        ram: ByteCount,
        /// Disks that come along, and their sizes.
        disks: Vec<Disk>,
        /// The version of the protocol that both sides speak.
        protocol_version: u16,
        /// Features of the protocol that both sides have: their names, or none.
        features: String,
    },
    /// A round is in place.
    Round {
        /// Its number.
        round: u32,
        /// Bytes received so far.
        received: ByteCount,
    },
    /// The source was lost when all was ready, or behind that; it is waited for.
    AwaitingSource {
        /// For how long.
        limit: Duration,
        /// Whether the guest is this side's already, and the source is only waited for to be told
        /// so. The operator's wish ends the wait either way.
        arrived: bool,
    },
    /// The connections were lost while pages arrived. What has arrived is kept, and the source
    /// waited for.
    Severed {
        /// How they were lost.
        why: String,
        /// For how long; [`ENDLESS`](crate::limits::ENDLESS) where the guest runs here already.
        limit: Duration,
    },
    /// Of the guest that runs here pages are missing, and the source is lost that has them.
    Lacks {
        /// How much that is.
        all: ByteCount,
        /// The names of RAM blocks, and which pages of them, in 4,096 runs at the most: where there
        /// are more, near ones are joined.
        missing: Vec<(String, Vec<PageRun>)>,
    },
    /// They are taken from the copy that the source made of them, or cannot be.
    Copy {
        /// Where it is.
        path: PathBuf,
        /// Why they cannot be, or a part of them.
        why: Option<String>,
    },
    /// The source is back, and goes on where it was.
    Resumed {
        /// How long it was away.
        after: Duration,
    },
    /// The guest runs here, and so much of its memory is still to come.
    Fetching {
        /// How much.
        left: ByteCount,
    },
    /// The guest's memory was dumped.
    Dumped(Dumped),
}

/// The destination's measures of a finished migration.
///
/// ```
/// use godwit_engine::destination::Received;
/// use godwit_units::format_duration;
///
/// fn line(received: &Received) -> String {
///     format!("{} in {}", received.bytes, format_duration(received.total))
/// }
/// assert_eq!(line(&Received::default()), "0B in 0s");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    /// Bytes received over the data channels.
    pub bytes: ByteCount,
    /// From the end of the device state to its being loaded.
    pub load: Duration,
    /// From COMMIT to the guest running.
    pub resume: Duration,
    /// Whether digests were asked for.
    pub verified: bool,
    /// Whether the guest was started; it was not if it was paused at the source.
    pub running: bool,
    /// From the acceptance of the source to the guest running.
    pub total: Duration,
    /// Packets for the guest's cards that had come at the source while it stood still, and were
    /// given to them.
    pub late_packets: u64,
    /// What came when the guest ran here already, if anything did.
    pub fetched: Option<Fetched>,
    /// From the last byte of the disks being handed to them to READY: writing it out, the last
    /// flush, and what of the device state was not loaded by then. `None` without disks.
    pub disks_to_ready: Option<Duration>,
}

/// What came when the guest ran here already (post-copy).
///
/// ```
/// use godwit_engine::destination::Fetched;
/// use godwit_units::format_duration;
///
/// fn line(fetched: &Fetched) -> String {
///     let Fetched { missing, faults, median_wait, .. } = fetched;
///     format!("{missing} followed, {faults} were asked for, {}", format_duration(*median_wait))
/// }
/// assert!(line(&Fetched::default()).starts_with("0 pages followed"));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Fetched {
    /// Pages that were missing when the guest began to run.
    pub missing: PageCount,
    /// Of these, pages that somebody waited for.
    pub faults: u64,
    /// Of these, pages that the guest gave back before they had come.
    pub discarded: u64,
    /// How long they were waited for: from when it was seen that somebody waits to the page being
    /// in place. Half of them took no longer than this.
    pub median_wait: Duration,
    /// The same of 99 of a hundred.
    pub p99_wait: Duration,
    /// The longest.
    pub longest_wait: Duration,
    /// From the word that pages are missing to the last of them.
    pub time: Duration,
}

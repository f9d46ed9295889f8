//! What is said of a migration before it begins.

use std::path::PathBuf;
use std::time::Duration;

use godwit_policy::PostCopy;

use super::before::BeforeSwitchover;
#[cfg(feature = "test-hooks")]
use super::fault::Fault;
use crate::address::Address;
use crate::limits;
use crate::security::Security;

/// How a migration is to be made, as far as it cannot be changed while it runs; what can is in
/// [`MigrationHandle`](crate::handle::MigrationHandle).
///
/// ```
/// use godwit_engine::source::{Options, Verify};
///
/// let options = Options { verify: Verify::Live, ..Options::new("west:4444".parse()?) };
/// assert_eq!(options.channels, 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the destination listens.
    pub to: Address,
    /// Whether the connections to it are encrypted.
    pub security: Security,
    /// Whether and how it is proven that all memory arrived.
    pub verify: Verify,
    /// Whether and when the guest is to run at the destination before all of its pages are there.
    pub post_copy: PostCopy,
    /// The directory to copy what is still to come to, before the guest runs at the destination
    /// without it, so that it can be had from there should this host end. The guest stands still
    /// meanwhile. The copy is removed when all has come, or the guest stays.
    pub post_copy_safe: Option<PathBuf>,
    /// Data channels, at least 1.
    pub channels: u8,
    /// Data channels, if that is more, to a destination that is far away (a round trip of 5 ms or
    /// more): no TCP connection carries more than a window in a round trip, and each makes it
    /// smaller when something is lost. And those of a guest that runs on more vCPUs than this host
    /// has processors ([`Brake::vcpus`](crate::vm::Brake::vcpus)), of which the threads of few
    /// channels would have too small a share.
    pub channels_afar: u8,
    /// Remember what was sent, so that pages are not sent again that were written and did not
    /// change.
    pub fingerprints: bool,
    /// Leave the VM stopped at the source instead of ending it.
    pub keep_source: bool,
    /// Carry to the destination what comes for the guest's cards while it stands still.
    pub late_packets: bool,
    /// How long connections that are lost before the guest is stopped are tried for; zero: not at
    /// all, the migration then fails at once.
    pub reconnect: Duration,
    /// Where to write down what another godwit needs to take the migration up, should this one be
    /// killed before the guest is stopped; one that finds such a record there does. Only where no
    /// disks move along, and the destination can. It is removed at the end.
    pub record: Option<PathBuf>,
    /// Where to write down, before the guest runs at the destination without all of its pages,
    /// what another godwit needs to send the rest ([`follow`](super::follow)), should this one be
    /// killed. It is removed at the end, unless nobody knows who has the guest.
    pub follow_record: Option<PathBuf>,
    /// Compare every page of both sides with what was sent of it while the guest is stopped, and
    /// explain the first that differs, before anything is handed over; wants `verify`.
    pub audit: bool,
    /// Where the audit writes down where each page came from.
    pub trace: Option<PathBuf>,
    /// What is to be done before the guest is stopped.
    pub before_switchover: Option<BeforeSwitchover>,
    /// Confine the thread that reads what the destination sends to the system calls of that, and
    /// leave each thread only the capabilities of its work.
    pub confined: bool,
    /// A fault to make up, for tests.
    #[cfg(feature = "test-hooks")]
    pub fault: Option<Fault>,
}

impl Options {
    /// What suits most: two channels, or eight to a place far away and of a guest with many vCPUs,
    /// fingerprints, no comparison, and a source that ends; and nothing that leaves this host.
    #[must_use]
    pub fn new(to: Address) -> Self {
        Self {
            to,
            security: Security::Local,
            verify: Verify::No,
            post_copy: PostCopy::Never,
            post_copy_safe: None,
            channels: 2,
            channels_afar: 8,
            fingerprints: true,
            keep_source: false,
            late_packets: true,
            reconnect: limits::RECONNECT,
            record: None,
            follow_record: None,
            audit: false,
            trace: None,
            before_switchover: None,
            confined: false,
            #[cfg(feature = "test-hooks")]
            fault: None,
        }
    }
}

/// How it is proven that all memory arrived.
///
/// ```
/// use godwit_engine::source::Verify;
///
/// assert_eq!("live".parse(), Ok(Verify::Live));
/// assert_eq!(Verify::Stopped.to_string(), "stopped");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// By the checksums of all frames alone.
    #[default]
    No,
    /// The destination reads back what it has placed while the guest runs at the source, and what
    /// the last round brought while it is stopped: the digests of all memory are compared with
    /// those of what was sent before it may run. Then, while it runs there, all memory of the
    /// source is read once more: whether anything was written that was never sent. Where the
    /// destination cannot do that, or nothing is remembered of what was sent: as
    /// [`Self::Stopped`].
    Live,
    /// The same, but for the last: that nothing was written without being sent rests on the
    /// tracker.
    Arrival,
    /// Both sides read all memory while the guest is stopped, and compare digests of it before it
    /// may run.
    Stopped,
}

impl Verify {
    /// All of them.
    const ALL: [Self; 4] = [Self::No, Self::Live, Self::Arrival, Self::Stopped];

    /// Whether what is placed is to be read back while the guest runs.
    pub(crate) fn reads_back(self) -> bool {
        matches!(self, Self::Live | Self::Arrival)
    }
}

impl std::fmt::Display for Verify {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::No => "no",
            Self::Live => "live",
            Self::Arrival => "arrival",
            Self::Stopped => "stopped",
        })
    }
}

impl std::str::FromStr for Verify {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|verify| verify.to_string() == text)
            .ok_or_else(|| format!("{text:?}: it must be live, arrival, stopped or no"))
    }
}

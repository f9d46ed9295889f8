//! What a simulated migration is made of.

use std::time::Duration;

use godwit_policy::{PostCopy, Settings};
use godwit_units::{ByteCount, Rate};

/// Everything about one migration. The same scenario has the same outcome.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it shows, in a line.
    pub title: String,
    /// The guest.
    pub guest: GuestSpec,
    /// The link.
    pub link: LinkSpec,
    /// Its disk, if that moves as well.
    pub disk: Option<DiskSpec>,
    /// How dirty pages are found.
    pub synchronisation: Synchronisation,
    /// How well vCPUs can be slowed.
    pub vcpus: Vcpus,
    /// Whether the machine offers a write governor; where that is forced it always does. Of what
    /// [`Vcpus::Deaf`] dirties it holds nothing either.
    pub governor: bool,
    /// What stop-and-copy costs beside the transfer and the last synchronisation.
    pub handover: Duration,
    /// What the last flush of disks adds, where disks move.
    pub flush: Duration,
    /// How long the guest is asked for its free pages before the first round, while nothing is
    /// sent.
    pub hints: Duration,
    /// From the decision to switch over until the vCPUs stand still.
    pub lead: Duration,
    /// What the operator wants.
    pub settings: Settings,
    /// When the guest leaves before its memory. Never where it is verified, moves with disks, or
    /// does not reconnect, as no real one does.
    pub post_copy: PostCopy,
    /// How long a guest waits for a page that is missing, beside a round trip of the link: on
    /// average.
    pub fault: Duration,
    /// Digests are compared before the guest may run.
    pub verify: bool,
    /// What that takes.
    pub verification: Duration,
    /// The link breaks.
    pub cut: Option<Cut>,
    /// What else goes wrong, in the order in which it does.
    pub incidents: Vec<Incident>,
    /// How long connections that are lost before the guest is stopped are made again; zero: they
    /// are not.
    pub reconnect: Duration,
    /// Time between looks within a round; longer where a round takes more than a hundred.
    pub tick: Duration,
    /// Nothing goes on after this.
    pub longest: Duration,
    /// Seed of what is left to chance.
    pub seed: u64,
}

/// A guest: memory in regions, each written uniformly at random, and the rest at rest.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// All memory.
    pub memory: ByteCount,
    /// What of it holds data.
    pub data: ByteCount,
    /// What is written.
    pub regions: Vec<Region>,
    /// Rates change with time, over and over; empty: they do not.
    pub phases: Vec<Phase>,
}

/// A part of memory that is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Region {
    /// Its size.
    pub size: ByteCount,
    /// Pages written each second (not: pages newly dirtied).
    pub writes: f64,
    /// From front to end and over again, not at random.
    pub sequential: bool,
}

/// A time in which all rates are so many times what they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// How long.
    pub time: Duration,
    /// How many times.
    pub factor: f64,
}

/// A link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpec {
    /// What it carries.
    pub bandwidth: Rate,
    /// One way.
    pub latency: Duration,
    /// The most of the bandwidth that is lost from time to time, as a share.
    pub loss: f64,
    /// Bytes on the wire for a page of data: less than a page where it is compressed.
    pub page_bytes: f64,
}

/// When the link breaks, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cut {
    /// Since the start.
    pub at: Option<Duration>,
    /// Or: this message of the conversation is the first to be lost.
    pub message: Option<u32>,
    /// Until it can be connected again.
    pub heals: Option<Duration>,
}

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Incident {
    /// When.
    pub moment: Moment,
    /// What.
    pub trouble: Trouble,
}

/// When something goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Moment {
    /// So long after the start.
    At(Duration),
    /// Before this message of the conversation is sent.
    Message(u32),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The link breaks, and can be connected again after so long, if at all.
    Cut(Option<Duration>),
    /// Pages do not pass for so long, which is too short to be taken for a broken link. At a moment
    /// of its own ([`Moment::At`]) only.
    Stall(Duration),
    /// The source fails, or its operator cancels.
    SourceFails,
    /// The destination fails.
    DestinationFails,
    /// The source's godwit is killed; its guardian stands in.
    SourceKilled,
    /// The destination's godwit is killed; its guardian stands in.
    DestinationKilled,
}

/// A disk that moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskSpec {
    /// Its size.
    pub size: ByteCount,
    /// The most that can be read of it, or written at the other side.
    pub speed: Rate,
    /// What the guest writes when it is not limited.
    pub writes: Rate,
    /// In pieces of this, at random places.
    pub piece: ByteCount,
    /// Within this part of it.
    pub working_set: ByteCount,
    /// Size of the blocks in which dirty data is kept and sent.
    pub granularity: ByteCount,
}

/// How dirty pages are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Synchronisation {
    /// All at once, at the start of a round, while nothing is sent.
    AtOnce(Duration),
    /// Each segment just before it is sent. The look after each round, while nothing is sent, and
    /// the last harvest, with the guest stopped, take this long each.
    Pieces(Duration),
}

/// What a throttle does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vcpus {
    /// What it is told.
    Exact,
    /// As was measured of a duty cycle of 10 ms by ptrace: 50 % leaves 45 %, 90 % leaves 11 %, 99 %
    /// leaves 3 %.
    Measured,
    /// Nothing: what dirties memory is not a vCPU.
    Deaf,
}

impl Scenario {
    /// Whether the guest may leave before its memory.
    pub(crate) fn may_leave(&self) -> bool {
        !self.verify && self.disk.is_none() && !self.reconnect.is_zero()
    }
}

impl Vcpus {
    /// The share of its speed at which the guest runs.
    #[must_use]
    pub fn speed(self, throttle: f64) -> f64 {
        const MEASURED: [(f64, f64); 5] =
            [(0.0, 1.0), (0.5, 0.45), (0.9, 0.11), (0.99, 0.03), (1.0, 0.03)];
        match self {
            _ if throttle <= 0.0 => 1.0,
            Self::Exact => 1.0 - throttle,
            Self::Deaf => 1.0,
            Self::Measured => {
                MEASURED.windows(2).find(|pair| throttle <= pair[1].0).map_or(0.03, |pair| {
                    let along = (throttle - pair[0].0) / (pair[1].0 - pair[0].0);
                    pair[0].1 + along * (pair[1].1 - pair[0].1)
                })
            }
        }
    }
}

impl GuestSpec {
    /// A guest that does nothing.
    #[must_use]
    pub fn idle(memory: ByteCount, data: ByteCount) -> Self {
        Self { memory, data, regions: Vec::new(), phases: Vec::new() }
    }

    /// Adds a region that is written at random, `writes` pages each second.
    #[must_use]
    pub fn writing(mut self, size: ByteCount, writes: f64) -> Self {
        self.regions.push(Region { size, writes, sequential: false });
        self
    }

    /// Adds a region that is written from front to end.
    #[must_use]
    pub fn walking(mut self, size: ByteCount, writes: f64) -> Self {
        self.regions.push(Region { size, writes, sequential: true });
        self
    }

    /// The same guest, busier and quieter by turns.
    #[must_use]
    pub fn in_phases(mut self, phases: Vec<Phase>) -> Self {
        self.phases = phases;
        self
    }
}

//! The lines on the control socket, and their translation from and to the engine's own types.

use std::path::PathBuf;
use std::time::Duration;

use godwit_disk::{Disk, DiskChoice, check_granularity};
use godwit_engine::destination::{DumpStage, Dumped, Fetched, Notice, Received};
use godwit_engine::measure::Measured;
use godwit_engine::report::{Measures, Progress};
use godwit_engine::security::SecurityWish;
#[cfg(feature = "test-hooks")]
use godwit_engine::source::Fault;
use godwit_engine::source::{Options, PostCopy, Verify};
use godwit_engine::{EngineError, Failure, Phase, Survivor, limits};
use godwit_units::{ByteCount, PAGE_SIZE, PageCount, PageRun};
use serde::{Deserialize, Serialize};

/// What is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// What the machine is and does.
    Status,
    /// Stop the guest.
    Pause,
    /// Run it on.
    Resume {
        /// Also where it is in doubt whether it runs elsewhere.
        #[serde(default)]
        force: bool,
    },
    /// End the machine.
    Quit {
        /// Also where that loses a guest that has left, or come, before all of its memory.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    /// Ask the guest to give back so much of its memory, in all.
    Balloon {
        /// Whole pages; the rest is left off.
        bytes: u64,
    },
    /// Plug memory in.
    Plug {
        /// How much; whole pages.
        bytes: u64,
        /// In how many memory slots.
        #[serde(default = "one")]
        slots: usize,
    },
    /// Move the guest away.
    Migrate(MigrateRequest),
    /// Track the guest's writes for so many milliseconds and tell what was seen.
    Measure {
        /// How long.
        time_ms: u64,
    },
    /// Look at the migration that is under way.
    Progress,
    /// Tell each time that something changes of it, and how it ends.
    Watch,
    /// Change settings of it, all or none.
    Set {
        /// Names and values.
        settings: Vec<(String, String)>,
    },
    /// Make its connections by another way when they are lost, from the next attempt on.
    Redirect {
        /// Another address of the destination.
        #[serde(default)]
        to: Option<String>,
        /// Another number of connections for memory.
        #[serde(default)]
        channels: Option<u8>,
    },
    /// Have it switch over now.
    SwitchOver {
        /// Whatever the downtime.
        force: bool,
        /// What is left follows when the guest runs at the destination.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        post_copy: bool,
    },
    /// End it; the guest stays.
    Cancel,
    /// Take a guest in.
    Receive(ReceiveRequest),
}

/// How to take a guest in; the engine's options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveRequest {
    /// Where to listen.
    pub listen: String,
    /// How long to wait for a source, in milliseconds; none: for ever.
    pub wait_ms: Option<u64>,
    /// Codecs that are taken: auto for all, none, or one.
    #[serde(default)]
    pub codecs: Option<String>,
    /// Disks that the source may overwrite: none, all, or names with commas between.
    #[serde(default = "none")]
    pub disks: String,
    /// Take a guest in that may come to use more memory than is left.
    #[serde(default)]
    pub overcommit: bool,
    /// Whether connections are encrypted, and who may come.
    #[serde(default)]
    pub security: SecurityWish,
    /// How long what has arrived is kept for a source whose connections are lost, in milliseconds;
    /// 0: not at all.
    #[serde(default = "reconnect_ms")]
    pub reconnect_ms: u64,
    /// Where to dump the guest's memory to before it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dump: Option<PathBuf>,
    /// The directory to which the source copies what is missing when the guest begins to run here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy_safe: Option<PathBuf>,
    /// Leave the threads that read what comes from outside unconfined.
    #[serde(default)]
    pub unconfined: bool,
}

/// How to move the guest away; the engine's options. One that is not known here is refused: a
/// migration without what was asked for would be another one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// Where the destination listens.
    pub to: String,
    /// Settings that differ from the defaults, as `godwit set` takes them.
    #[serde(default)]
    pub settings: Vec<(String, String)>,
    /// Compare digests of all memory.
    pub verify: bool,
    /// Make all of them while the guest is stopped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify_stopped: bool,
    /// Leave out whether anything was written that was never sent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verify_arrival: bool,
    /// Data channels.
    pub channels: u8,
    /// Data channels to a destination that is far away, and of a guest with more vCPUs than there
    /// are processors, if that is more. None is told where it is as usual, since a VMM of an older
    /// release knows no such field.
    #[serde(default = "eight", skip_serializing_if = "is_eight")]
    pub channels_afar: u8,
    /// Remember what was sent.
    #[serde(default = "yes")]
    pub fingerprints: bool,
    /// Leave the machine stopped instead of ending it.
    pub keep_source: bool,
    /// Compare every page with what was sent of it before the guest is handed over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub audit: bool,
    /// Where to write down where each page came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
    /// A fault to make up, by its number.
    #[cfg(feature = "test-hooks")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<u8>,
    /// Disks that move along: none, all, or names with commas between.
    #[serde(default = "none")]
    pub disks: String,
    /// Bytes of their dirty blocks; none: as the guest writes.
    #[serde(default)]
    pub disk_granularity: Option<u64>,
    /// Whether connections are encrypted, and whom to expect.
    #[serde(default)]
    pub security: SecurityWish,
    /// How long connections that are lost are tried for, in milliseconds; 0: not at all.
    #[serde(default = "reconnect_ms")]
    pub reconnect_ms: u64,
    /// When the guest is to run there before all of its memory is, as for `--postcopy`.
    #[serde(default = "never", skip_serializing_if = "is_never")]
    pub postcopy: String,
    /// The directory to copy what is still to come to, before the guest runs there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy_safe: Option<PathBuf>,
    /// Leave the threads that read what comes from outside unconfined.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unconfined: bool,
}

/// Which disks move along, and the size of their dirty blocks; `None`: as the guest writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskWish {
    /// Which.
    pub choice: DiskChoice,
    /// In blocks of what size.
    pub granularity: Option<ByteCount>,
}

fn one() -> usize {
    1
}

fn none() -> String {
    "none".to_owned()
}

fn never() -> String {
    PostCopy::Never.to_string()
}

fn is_never(text: &str) -> bool {
    text == "never"
}

fn reconnect_ms() -> u64 {
    millis(limits::RECONNECT)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn eight() -> u8 {
    8
}

fn is_eight(channels: &u8) -> bool {
    *channels == 8
}

fn yes() -> bool {
    true
}

impl MigrateRequest {
    /// The request for `options`, begun with `settings`, with the disks that `disks` wishes, over
    /// connections as `security` does.
    #[must_use]
    pub fn new(
        options: &Options,
        settings: Vec<(String, String)>,
        disks: &DiskWish,
        security: &SecurityWish,
    ) -> Self {
        Self {
            to: options.to.to_string(),
            settings,
            verify: options.verify != Verify::No,
            verify_stopped: options.verify == Verify::Stopped,
            verify_arrival: options.verify == Verify::Arrival,
            channels: options.channels,
            channels_afar: options.channels_afar,
            fingerprints: options.fingerprints,
            keep_source: options.keep_source,
            audit: options.audit,
            trace: options.trace.clone(),
            #[cfg(feature = "test-hooks")]
            fault: options.fault.map(|fault| fault as u8),
            disks: disks.choice.to_string(),
            disk_granularity: disks.granularity.map(|size| size.0),
            security: security.clone(),
            reconnect_ms: millis(options.reconnect),
            postcopy: options.post_copy.to_string(),
            postcopy_safe: options.post_copy_safe.clone(),
            unconfined: !options.confined,
        }
    }

    /// The disks that are to move along, or what is wrong with the request.
    ///
    /// # Errors
    /// In words for whoever wrote it.
    pub fn disks(&self) -> Result<DiskWish, String> {
        let choice = self.disks.parse().map_err(|error| format!("\"disks\": {error}"))?;
        let granularity =
            self.disk_granularity.map(|size| check_granularity(ByteCount(size))).transpose();
        let granularity = granularity.map_err(|error| format!("\"disk_granularity\": {error}"))?;
        Ok(DiskWish { choice, granularity })
    }

    /// The engine's options, or what is wrong with the request.
    ///
    /// # Errors
    /// In words for whoever wrote it.
    pub fn options(&self) -> Result<Options, String> {
        let to = self.to.parse().map_err(|error| format!("\"to\" {:?}: {error}", self.to))?;
        if self.channels == 0 || self.channels > 16 {
            return Err(format!("{} channels do not do: use 1 to 16", self.channels));
        }
        if self.channels_afar > 16 {
            return Err(format!("{} channels afar do not do: use 0 to 16", self.channels_afar));
        }
        let security = self.security.source(&to).map_err(|error| error.to_string())?;
        let mut options = Options { security, ..Options::new(to) };
        options.confined = !self.unconfined;
        options.verify = match (self.verify, self.verify_stopped, self.verify_arrival) {
            (false, ..) => Verify::No,
            (true, true, _) => Verify::Stopped,
            (true, false, true) => Verify::Arrival,
            (true, false, false) => Verify::Live,
        };
        (options.audit, options.trace) = (self.audit, self.trace.clone());
        (options.channels, options.channels_afar) = (self.channels, self.channels_afar);
        options.fingerprints = self.fingerprints;
        options.keep_source = self.keep_source;
        options.reconnect = Duration::from_millis(self.reconnect_ms);
        options.post_copy =
            self.postcopy.parse().map_err(|error| format!("\"postcopy\": {error}"))?;
        options.post_copy_safe = self.postcopy_safe.clone();
        #[cfg(feature = "test-hooks")]
        {
            options.fault = self.fault();
        }
        Ok(options)
    }

    /// Not those that kill: they would end the machine.
    #[cfg(feature = "test-hooks")]
    fn fault(&self) -> Option<Fault> {
        let known = [
            Fault::CutAfterCommit,
            Fault::LoseCommit,
            Fault::WrongDigest,
            Fault::LoseFarewell,
            Fault::SkipDirtyPage,
            Fault::ForgetLastRound,
            Fault::BelieveHints,
            Fault::DropExtent,
        ];
        known.into_iter().find(|fault| Some(*fault as u8) == self.fault)
    }
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the fields are those of the engine's reports")]
pub enum Answer {
    /// It is done.
    Done,
    /// It is not done, and nothing has changed.
    Refused { error: String },
    /// What the machine is and does.
    Status(Status),
    /// Memory was plugged in, as the block of this name, at this guest address.
    Plugged(Plugged),
    /// A look at a migration in progress.
    Progress(Box<Progress>),
    /// The migration that was asked about.
    Migration(MigrationLook),
    /// From now on it is told, in lines of [`crate::events`].
    Watching { version: u64 },
    /// What was seen of the guest.
    Measured(Measured),
    /// The guest has moved away.
    Migrated { measures: Box<Measures>, cost: Cost },
    /// A source is waited for.
    Listening { address: String },
    /// Something happened while receiving.
    Notice(NoticeLine),
    /// The guest is here.
    Received {
        bytes: u64,
        load_us: u64,
        resume_us: u64,
        verified: bool,
        running: bool,
        total_us: u64,
        disks_to_ready_us: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fetched: Option<FetchedLine>,
        cost: Cost,
    },
    /// The migration failed.
    Failed { phase: PhaseName, survivor: SurvivorName, cancelled: bool, error: String },
}

/// A migration that is under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MigrationLook {
    /// Of what is spoken here, for who named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// The machine, as it was named to `godwit migrate`; only that knows.
    #[serde(default)]
    pub vm: Option<String>,
    /// Where its guest goes, if that is known yet.
    #[serde(default)]
    pub to: Option<String>,
    /// The last look, if there was one.
    pub progress: Option<Box<Progress>>,
    /// The settings in force, by name.
    pub settings: Vec<(String, String)>,
}

/// The machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// running, paused, incoming, leaving, arriving, plugging, gone or in-doubt; in post-copy at
    /// the source `follows`, when the guest has left and memory is to follow it, and at the
    /// destination `lacks-pages`, when it runs there without all of it; lost, when a part of that
    /// has ended.
    pub state: String,
    /// The VMM's process.
    pub pid: u32,
    /// The threads that run the vCPUs.
    pub vcpu_threads: Vec<i32>,
    /// Names and sizes of the RAM blocks.
    pub ram: Vec<(String, u64)>,
    /// Where another process can open them.
    pub ram_files: Vec<PathBuf>,
    /// How many memory slots there are.
    pub slots: usize,
    /// How writes are tracked.
    pub tracker: String,
    /// The guest's balloon, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonStatus>,
}

/// Memory that was plugged in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plugged {
    /// The name of the RAM block.
    pub block: String,
    /// Where the guest sees it.
    pub gpa: u64,
    /// Its size.
    pub bytes: u64,
    /// How many memory slots the machine has now.
    pub slots: usize,
    /// What is wrong although it is there, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// A balloon, as it is seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BalloonStatus {
    /// What the guest was asked to give, in all.
    pub target_bytes: u64,
    /// What it says that it has given.
    pub given_bytes: u64,
    /// What it said last to be free, and its memory in all; each answer is asked for by the one
    /// before.
    pub free_bytes: Option<u64>,
    /// See above.
    pub memory_bytes: Option<u64>,
}

/// What a migration cost the VMM's process, its vCPUs apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// CPU time in milliseconds.
    pub cpu_ms: f64,
    /// The most memory the process ever had resident of its own, guest memory apart.
    pub peak_rss_bytes: u64,
}

/// The engine's notices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "notice", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the fields are those of the engine's notices")]
pub enum NoticeLine {
    Refused {
        why: String,
    },
    Busy {
        peer: String,
    },
    Asked {
        peer: String,
        refusal: Option<String>,
        /// Without a VM.
        #[serde(default)]
        alone: bool,
    },
    Accepted {
        ram_bytes: u64,
        /// Names and bytes.
        #[serde(default)]
        disks: Vec<(String, u64)>,
        #[serde(default)]
        protocol_version: u16,
        #[serde(default)]
        features: String,
    },
    Round {
        round: u32,
        received_bytes: u64,
    },
    AwaitingSource {
        limit_ms: u64,
        #[serde(default)]
        arrived: bool,
    },
    Severed {
        why: String,
        limit_ms: u64,
    },
    Fetching {
        left_bytes: u64,
    },
    /// Names of RAM blocks, and first page and number of each run of pages.
    Lacks {
        #[serde(default)]
        left_bytes: u64,
        missing: Vec<(String, Vec<(u64, u64)>)>,
    },
    Copy {
        path: PathBuf,
        why: Option<String>,
    },
    Resumed {
        after_ms: u64,
    },
    Dumped {
        stage: StageName,
        files: Vec<PathBuf>,
        data_bytes: u64,
        changed_pages: u64,
        first: Option<(String, u64)>,
    },
}

macro_rules! names {
    ($(#[$doc:meta])* $name:ident of $of:ident: $($variant:ident)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[allow(missing_docs, reason = "named as in the engine")]
        pub enum $name { $($variant),* }

        impl From<$of> for $name {
            fn from(value: $of) -> Self {
                match value { $($of::$variant => Self::$variant),* }
            }
        }

        impl From<$name> for $of {
            fn from(name: $name) -> Self {
                match name { $($name::$variant => Self::$variant),* }
            }
        }
    };
}

names!(
    /// The engine's phases.
    PhaseName of Phase: Setup PreCopy StopAndCopy Handover
);
names!(
    /// When memory was dumped.
    StageName of DumpStage: Arrived Loaded
);
names!(
    /// Where the guest is after a failure.
    SurvivorName of Survivor: Source SourceStopped Unknown Destination Ended Lost
);

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl From<&Progress> for Answer {
    fn from(progress: &Progress) -> Self {
        Self::Progress(Box::new(progress.clone()))
    }
}

impl From<&Failure> for Answer {
    fn from(failure: &Failure) -> Self {
        Self::Failed {
            phase: failure.phase.into(),
            survivor: failure.survivor.into(),
            cancelled: matches!(failure.cause, EngineError::Cancelled),
            error: failure.cause.to_string(),
        }
    }
}

impl From<&Notice> for Answer {
    fn from(notice: &Notice) -> Self {
        Self::Notice(match notice {
            Notice::Refused(why) => NoticeLine::Refused { why: why.clone() },
            Notice::Busy { peer } => NoticeLine::Busy { peer: peer.clone() },
            Notice::Asked { peer, refusal } => {
                NoticeLine::Asked { peer: peer.clone(), refusal: refusal.clone(), alone: false }
            }
            // A command of an older release knows no other line.
            Notice::Looked { peer } => {
                NoticeLine::Asked { peer: peer.clone(), refusal: None, alone: true }
            }
            Notice::Accepted { ram, disks, protocol_version, features } => NoticeLine::Accepted {
                ram_bytes: ram.0,
                disks: disks.iter().map(|disk| (disk.name.clone(), disk.size.0)).collect(),
                protocol_version: *protocol_version,
                features: features.clone(),
            },
            Notice::Round { round, received } => {
                NoticeLine::Round { round: *round, received_bytes: received.0 }
            }
            Notice::AwaitingSource { limit, arrived } => {
                NoticeLine::AwaitingSource { limit_ms: millis(*limit), arrived: *arrived }
            }
            Notice::Severed { why, limit } => {
                NoticeLine::Severed { why: why.clone(), limit_ms: millis(*limit) }
            }
            Notice::Lacks { all, missing } => {
                let pair = |run: &PageRun| (run.start.0, run.count.0);
                let runs = |runs: &[PageRun]| runs.iter().map(pair).collect();
                let missing = missing.iter().map(|(name, them)| (name.clone(), runs(them)));
                NoticeLine::Lacks { left_bytes: all.0, missing: missing.collect() }
            }
            Notice::Copy { path, why } => NoticeLine::Copy { path: path.clone(), why: why.clone() },
            Notice::Resumed { after } => NoticeLine::Resumed { after_ms: millis(*after) },
            Notice::Fetching { left } => NoticeLine::Fetching { left_bytes: left.0 },
            Notice::Dumped(Dumped { stage, files, data, changed, first }) => NoticeLine::Dumped {
                stage: (*stage).into(),
                files: files.clone(),
                data_bytes: data.0,
                changed_pages: changed.0,
                first: first.clone(),
            },
        })
    }
}

impl From<NoticeLine> for Notice {
    fn from(line: NoticeLine) -> Self {
        match line {
            NoticeLine::Refused { why } => Self::Refused(why),
            NoticeLine::Busy { peer } => Self::Busy { peer },
            NoticeLine::Asked { peer, alone: true, .. } => Self::Looked { peer },
            NoticeLine::Asked { peer, refusal, .. } => Self::Asked { peer, refusal },
            NoticeLine::Accepted { ram_bytes, disks, protocol_version, features } => {
                let disk = |(name, size)| Disk { name, size: ByteCount(size) };
                Self::Accepted {
                    protocol_version,
                    features,
                    ram: ByteCount(ram_bytes),
                    disks: disks.into_iter().map(disk).collect(),
                }
            }
            NoticeLine::Round { round, received_bytes } => {
                Self::Round { round, received: ByteCount(received_bytes) }
            }
            NoticeLine::AwaitingSource { limit_ms, arrived } => {
                Self::AwaitingSource { limit: Duration::from_millis(limit_ms), arrived }
            }
            NoticeLine::Severed { why, limit_ms } => {
                Self::Severed { why, limit: Duration::from_millis(limit_ms) }
            }
            NoticeLine::Fetching { left_bytes } => Self::Fetching { left: ByteCount(left_bytes) },
            NoticeLine::Lacks { left_bytes, missing } => {
                let runs = |runs: Vec<(u64, u64)>| {
                    runs.into_iter().map(|(start, count)| PageRun::new(start, count)).collect()
                };
                let missing = missing.into_iter().map(|(name, them)| (name, runs(them)));
                Self::Lacks { all: ByteCount(left_bytes), missing: missing.collect() }
            }
            NoticeLine::Copy { path, why } => Self::Copy { path, why },
            NoticeLine::Resumed { after_ms } => {
                Self::Resumed { after: Duration::from_millis(after_ms) }
            }
            NoticeLine::Dumped { stage, files, data_bytes, changed_pages, first } => {
                let (data, changed) = (ByteCount(data_bytes), PageCount(changed_pages));
                Self::Dumped(Dumped { stage: stage.into(), files, data, changed, first })
            }
        }
    }
}

/// What came when the guest ran here already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the engine's report")]
pub struct FetchedLine {
    pub missing_bytes: u64,
    pub faults: u64,
    pub discarded_pages: u64,
    pub median_wait_us: u64,
    pub p99_wait_us: u64,
    pub longest_wait_us: u64,
    pub time_us: u64,
}

impl From<Fetched> for FetchedLine {
    fn from(fetched: Fetched) -> Self {
        Self {
            missing_bytes: fetched.missing.bytes().0,
            faults: fetched.faults,
            discarded_pages: fetched.discarded,
            median_wait_us: micros(fetched.median_wait),
            p99_wait_us: micros(fetched.p99_wait),
            longest_wait_us: micros(fetched.longest_wait),
            time_us: micros(fetched.time),
        }
    }
}

impl From<FetchedLine> for Fetched {
    fn from(line: FetchedLine) -> Self {
        Self {
            missing: PageCount(line.missing_bytes / PAGE_SIZE),
            faults: line.faults,
            discarded: line.discarded_pages,
            median_wait: Duration::from_micros(line.median_wait_us),
            p99_wait: Duration::from_micros(line.p99_wait_us),
            longest_wait: Duration::from_micros(line.longest_wait_us),
            time: Duration::from_micros(line.time_us),
        }
    }
}

impl Answer {
    /// The line for a guest that is here.
    #[must_use]
    pub fn received(received: &Received, cost: Cost) -> Self {
        Self::Received {
            bytes: received.bytes.0,
            load_us: micros(received.load),
            resume_us: micros(received.resume),
            verified: received.verified,
            running: received.running,
            total_us: micros(received.total),
            disks_to_ready_us: received.disks_to_ready.map(micros),
            fetched: received.fetched.map(FetchedLine::from),
            cost,
        }
    }

    /// The engine's failure, if this is one.
    #[must_use]
    pub fn failure(self) -> Option<Failure> {
        let Self::Failed { phase, survivor, cancelled, error } = self else { return None };
        let cause = if cancelled { EngineError::Cancelled } else { EngineError::Elsewhere(error) };
        Some(Failure { phase: phase.into(), survivor: survivor.into(), cause })
    }
}

#[cfg(test)]
mod tests {
    use godwit_engine::security::Security;

    use super::*;

    #[test]
    fn requests_are_the_lines_in_the_documentation() {
        let line = r#"{"command":"status"}"#;
        assert_eq!(serde_json::from_str::<Request>(line).unwrap(), Request::Status);
        let line = r#"{"command":"receive","listen":"[::1]:0","wait_ms":null}"#;
        let (listen, disks) = ("[::1]:0".to_owned(), "none".to_owned());
        let receive = ReceiveRequest {
            listen,
            wait_ms: None,
            codecs: None,
            disks,
            overcommit: false,
            security: SecurityWish::default(),
            reconnect_ms: 60_000,
            dump: None,
            postcopy_safe: None,
            unconfined: false,
        };
        assert_eq!(serde_json::from_str::<Request>(line).unwrap(), Request::Receive(receive));
        assert!(serde_json::from_str::<Request>(r#"{"command":"explode"}"#).is_err());
    }

    #[test]
    fn what_is_not_known_here_is_refused_and_not_left_out() {
        // Regression: a machine without test hooks moved its guest as if no fault had been asked
        // for.
        for line in [
            r#"{"command":"receive","listen":"[::1]:0","wait_ms":null"#,
            r#"{"command":"migrate","to":"[::1]:1","verify":true,"channels":1,"keep_source":true"#,
            r#"{"command":"plug","bytes":4096"#,
        ] {
            assert!(serde_json::from_str::<Request>(&format!("{line}}}")).is_ok(), "{line}");
            let refused = serde_json::from_str::<Request>(&format!("{line},\"hurry\":1}}"));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("unknown field `hurry`"), "{error}");
        }
        // So who asks for no fault does not speak of any.
        let options = Options::new("127.0.0.1:7000".parse().unwrap());
        let request = MigrateRequest::new(
            &options,
            Vec::new(),
            &DiskWish::default(),
            &SecurityWish::default(),
        );
        let line = serde_json::to_string(&Request::Migrate(request)).unwrap();
        assert!(!line.contains("fault"), "{line}");
    }

    #[test]
    fn options_survive_being_asked_for() {
        let options = Options {
            audit: true,
            trace: Some("/tmp/pages.tsv".into()),
            to: "192.0.2.7:7000".parse().unwrap(),
            security: Security::Insecure,
            verify: Verify::Live,
            channels: 3,
            channels_afar: 5,
            fingerprints: false,
            late_packets: true,
            keep_source: true,
            reconnect: Duration::from_secs(7),
            record: None,
            follow_record: None,
            // A command of who asks, which is refused for such a machine; so is the other.
            before_switchover: None,
            post_copy: PostCopy::After(2),
            post_copy_safe: Some("/mnt/shared".into()),
            confined: true,
            fault: Some(Fault::LoseCommit),
        };
        let disks = DiskWish { choice: "a,b".parse().unwrap(), granularity: Some(ByteCount(4096)) };
        let security = SecurityWish { insecure: true, ..SecurityWish::default() };
        let request = MigrateRequest::new(&options, Vec::new(), &disks, &security);
        let line = serde_json::to_string(&Request::Migrate(request)).unwrap();
        let Request::Migrate(request) = serde_json::from_str(&line).unwrap() else {
            panic!("{line}")
        };
        assert_eq!(format!("{:?}", request.options().unwrap()), format!("{options:?}"));
        assert_eq!(request.disks().unwrap(), disks);
        for verify in [Verify::No, Verify::Live, Verify::Arrival, Verify::Stopped] {
            let options = Options { verify, ..options.clone() };
            let request = MigrateRequest::new(&options, Vec::new(), &disks, &security);
            assert_eq!(request.options().unwrap().verify, verify);
        }
        let wrong = MigrateRequest { channels: 0, disk_granularity: Some(5), ..request };
        assert!(wrong.options().unwrap_err().contains("use 1 to 16"));
        let wrong = MigrateRequest { channels: 1, channels_afar: 17, ..wrong };
        assert!(wrong.options().unwrap_err().contains("use 0 to 16"));
        assert!(wrong.disks().unwrap_err().contains("power of two"));
        // Of a command that knows no disks.
        let line = r#"{"command":"migrate","to":"[::1]:1","verify":false,"channels":1,
                       "keep_source":false}"#;
        let Request::Migrate(request) = serde_json::from_str(line).unwrap() else {
            panic!("{line}")
        };
        assert_eq!(request.disks().unwrap(), DiskWish::default());
    }

    #[test]
    fn failures_survive_being_told() {
        for cause in [EngineError::Cancelled, EngineError::Layout("blocks differ".to_owned())] {
            let failure = Failure { phase: Phase::PreCopy, survivor: Survivor::Source, cause };
            let line = serde_json::to_string(&Answer::from(&failure)).unwrap();
            let back = serde_json::from_str::<Answer>(&line).unwrap().failure().unwrap();
            assert_eq!(back.to_string(), failure.to_string());
            assert_eq!((back.phase, back.survivor), (failure.phase, failure.survivor));
        }
    }
}

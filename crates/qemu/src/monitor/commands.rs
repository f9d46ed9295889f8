//! Every command that godwit gives a QEMU: its arguments, and what godwit reads of the answer.
//!
//! Source: QEMU's QMP reference (`docs/interop/qemu-qmp-ref`). What it marks as optional is an
//! `Option` or has a default; what an answer has beside is passed over, for there is more of it
//! with every version. What godwit needs and does not find is [`super::QmpError::Unclear`].

use std::collections::BTreeMap;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Version;

/// A command: its fields are QEMU's arguments.
pub(crate) trait Command: Serialize {
    /// QEMU's name for it.
    const NAME: &'static str;
    /// What godwit reads of the answer.
    type Answer: DeserializeOwned;
}

/// Says of commands what they are called and what answers them.
macro_rules! commands {
    ($($command:ty: $name:literal -> $answer:ty;)*) => {
        $(impl Command for $command {
            const NAME: &'static str = $name;
            type Answer = $answer;
        })*
    };
}

/// The answer to a command that tells nothing.
type Done = IgnoredAny;

commands! {
    QueryVersion: "query-version" -> Versions;
    QueryStatus: "query-status" -> Status;
    QueryName: "query-name" -> Name;
    QueryMigrate: "query-migrate" -> Migration;
    QueryCapabilities: "query-migrate-capabilities" -> Vec<Capability>;
    QueryParameters: "query-migrate-parameters" -> Map<String, Value>;
    QueryCpus: "query-cpus-fast" -> Vec<Cpu>;
    QueryMemdev: "query-memdev" -> Vec<Memdev>;
    QueryMemorySize: "query-memory-size-summary" -> MemorySize;
    QueryMemoryDevices: "query-memory-devices" -> Vec<MemoryDevice>;
    QueryKvm: "query-kvm" -> Kvm;
    QueryAccelerators: "query-accelerators" -> Accelerators;
    QueryMachines: "query-machines" -> Vec<MachineType>;
    QueryJobs: "query-jobs" -> Vec<Job>;
    QueryBlock: "query-block" -> Vec<Block>;
    QueryBlockstats: "query-blockstats" -> Vec<BlockStats>;
    QueryNodes: "query-named-block-nodes" -> Vec<Node>;
    QueryExports: "query-block-exports" -> Vec<Export>;
    QomList<'_>: "qom-list" -> Vec<Property>;
    QomListGet<'_>: "qom-list-get" -> Vec<Properties>;
    Human<'_>: "human-monitor-command" -> String;
    QueryChardev: "query-chardev" -> Vec<Chardev>;
    QueryVirtio: "x-query-virtio" -> Vec<VirtioDevice>;
    VirtioStatus<'_>: "x-query-virtio-status" -> VirtioState;
    VirtioQueueStatus<'_>: "x-query-virtio-queue-status" -> VirtioQueue;
    VhostQueueStatus<'_>: "x-query-virtio-vhost-queue-status" -> Done;
    Stop: "stop" -> Done;
    Cont: "cont" -> Done;
    Quit: "quit" -> Done;
    Migrate<'_>: "migrate" -> Done;
    MigrateIncoming<'_>: "migrate-incoming" -> Done;
    MigrateContinue<'_>: "migrate-continue" -> Done;
    MigrateCancel: "migrate_cancel" -> Done;
    SetCapabilities<'_>: "migrate-set-capabilities" -> Done;
    SetParameters<'_>: "migrate-set-parameters" -> Done;
    AnnounceSelf: "announce-self" -> Done;
    CloseFd<'_>: "closefd" -> Done;
    RemoveFd: "remove-fd" -> Done;
    SaveDevices<'_>: "xen-save-devices-state" -> Done;
    NbdServerStart: "nbd-server-start" -> Done;
    NbdServerStop: "nbd-server-stop" -> Done;
    ExportAdd<'_>: "block-export-add" -> Done;
    ExportDel<'_>: "block-export-del" -> Done;
    Transaction: "transaction" -> Done;
    SetIoThrottle<'_>: "block_set_io_throttle" -> Done;
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryVersion;

#[derive(Debug, Deserialize)]
pub(crate) struct Versions {
    pub(crate) qemu: QemuVersion,
}

#[derive(Debug, Deserialize)]
pub(crate) struct QemuVersion {
    pub(crate) major: u64,
    pub(crate) minor: u64,
    pub(crate) micro: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryStatus;

#[derive(Debug, Deserialize)]
pub(crate) struct Status {
    pub(crate) status: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryName;

#[derive(Debug, Deserialize)]
pub(crate) struct Name {
    #[serde(default)]
    pub(crate) name: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryMigrate;

/// QEMU's own migration; all of it is missing where there was none.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Migration {
    pub(crate) status: String,
    pub(crate) error_desc: String,
    pub(crate) blocked_reasons: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryCapabilities;

/// A migration capability, as it is or is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capability {
    pub(crate) capability: String,
    pub(crate) state: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct SetCapabilities<'a> {
    pub(crate) capabilities: &'a [Capability],
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryParameters;

#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct SetParameters<'a>(pub(crate) &'a Map<String, Value>);

#[derive(Debug, Serialize)]
pub(crate) struct QueryCpus;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Cpu {
    pub(crate) thread_id: i64,
    pub(crate) qom_path: String,
    /// Where it is in the topology.
    #[serde(default)]
    pub(crate) props: Value,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryMemdev;

#[derive(Debug, Deserialize)]
pub(crate) struct Memdev {
    #[serde(default)]
    pub(crate) id: String,
    pub(crate) size: u64,
    pub(crate) share: bool,
    pub(crate) prealloc: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryMemorySize;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MemorySize {
    pub(crate) base_memory: u64,
    #[serde(default)]
    pub(crate) plugged_memory: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryMemoryDevices;

#[derive(Debug, Deserialize)]
pub(crate) struct MemoryDevice {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) data: MemoryDeviceData,
}

/// Which of these there are depends on the kind.
#[derive(Debug, Deserialize)]
pub(crate) struct MemoryDeviceData {
    pub(crate) addr: Option<u64>,
    pub(crate) memaddr: Option<u64>,
    #[serde(default)]
    pub(crate) size: Value,
    #[serde(default)]
    pub(crate) slot: Value,
    #[serde(default)]
    pub(crate) node: Value,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryKvm;

#[derive(Debug, Deserialize)]
pub(crate) struct Kvm {
    pub(crate) enabled: bool,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryAccelerators;

#[derive(Debug, Deserialize)]
pub(crate) struct Accelerators {
    /// The name of the one that runs the guest.
    pub(crate) enabled: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryMachines;

#[derive(Debug, Deserialize)]
pub(crate) struct MachineType {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) alias: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryJobs;

#[derive(Debug, Deserialize)]
pub(crate) struct Job {
    pub(crate) id: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryBlock;

/// A drive of the guest.
#[derive(Debug, Deserialize)]
pub(crate) struct Block {
    /// The id of its `-drive`; empty where it has none.
    pub(crate) device: String,
    /// The id or the path of the guest's device; empty where it has none.
    #[serde(default)]
    pub(crate) qdev: String,
    pub(crate) inserted: Option<Inserted>,
}

/// A drive's medium.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Inserted {
    #[serde(default)]
    pub(crate) node_name: String,
    pub(crate) file: String,
    pub(crate) ro: bool,
    pub(crate) cache: Cache,
    pub(crate) image: Image,
    /// The rest, with the limits that `block_set_io_throttle` sets.
    #[serde(flatten)]
    pub(crate) limits: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Cache {
    pub(crate) direct: bool,
    #[serde(default = "usual")]
    writeback: bool,
    #[serde(default)]
    no_flush: bool,
}

/// Where it is not told, the host writes back, which is QEMU's default.
fn usual() -> bool {
    true
}

impl Cache {
    /// The word that `-drive cache=` has for it (qemu(1)). Without flushes there is one word for
    /// both, as nothing of it survives the host.
    pub(crate) fn mode(&self) -> &'static str {
        match (self.writeback, self.direct, self.no_flush) {
            (_, _, true) => "unsafe",
            (true, false, false) => "writeback",
            (true, true, false) => "none",
            (false, false, false) => "writethrough",
            (false, true, false) => "directsync",
        }
    }
}

/// An image and those behind it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Image {
    pub(crate) filename: String,
    pub(crate) format: String,
    pub(crate) virtual_size: u64,
    /// Every format has its own.
    #[serde(default)]
    pub(crate) format_specific: Value,
    pub(crate) backing_image: Option<Box<Image>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryBlockstats;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BlockStats {
    #[serde(default)]
    pub(crate) node_name: String,
    pub(crate) stats: WriteStats,
}

#[derive(Debug, Deserialize)]
pub(crate) struct WriteStats {
    pub(crate) wr_bytes: u64,
    pub(crate) wr_operations: u64,
}

/// All block nodes, without the images behind them.
#[derive(Debug, Serialize)]
pub(crate) struct QueryNodes {
    flat: bool,
}

impl QueryNodes {
    pub(crate) const FLAT: Self = Self { flat: true };
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Node {
    #[serde(default)]
    pub(crate) node_name: String,
    pub(crate) cache: Cache,
    #[serde(default)]
    pub(crate) dirty_bitmaps: Vec<Bitmap>,
}

/// A dirty bitmap, and how many bytes it says are dirty.
#[derive(Debug, Deserialize)]
pub(crate) struct Bitmap {
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) count: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryExports;

#[derive(Debug, Deserialize)]
pub(crate) struct Export {
    pub(crate) id: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct QomList<'a> {
    pub(crate) path: &'a str,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Property {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
}

/// All properties of each of these objects, with their values (QEMU from 10.1 on).
#[derive(Debug, Serialize)]
pub(crate) struct QomListGet<'a> {
    pub(crate) paths: &'a [&'a str],
}

#[derive(Debug, Deserialize)]
pub(crate) struct Properties {
    pub(crate) properties: Vec<PropertyValue>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct PropertyValue {
    pub(crate) name: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Missing where it cannot be read.
    #[serde(default)]
    pub(crate) value: Value,
}

/// The value of an object's property, which is a `T`.
#[derive(Debug, Serialize)]
#[serde(bound = "")]
pub(crate) struct QomGet<'a, T> {
    path: &'a str,
    property: &'a str,
    #[serde(skip)]
    kind: PhantomData<T>,
}

impl<'a, T> QomGet<'a, T> {
    pub(crate) fn new(path: &'a str, property: &'a str) -> Self {
        Self { path, property, kind: PhantomData }
    }
}

impl<T: DeserializeOwned> Command for QomGet<'_, T> {
    const NAME: &'static str = "qom-get";
    type Answer = T;
}

/// A register of CPUID as QEMU makes it of a model and its options (property `feature-words`).
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct FeatureWord {
    pub(crate) cpuid_input_eax: u64,
    #[serde(default)]
    pub(crate) cpuid_input_ecx: u64,
    pub(crate) cpuid_register: String,
    pub(crate) features: u64,
}

/// A line for the monitor that people use: what only it tells.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Human<'a> {
    pub(crate) command_line: &'a str,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryChardev;

#[derive(Debug, Deserialize)]
pub(crate) struct Chardev {
    pub(crate) label: String,
    /// For a socket `unix:PATH`, with more around it.
    pub(crate) filename: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryVirtio;

#[derive(Debug, Deserialize)]
pub(crate) struct VirtioDevice {
    /// Of the device itself, below that of its place on a bus.
    pub(crate) path: String,
}

/// What QEMU knows of a device. **QEMU 11.1 ends when it is asked for that** (an assertion in
/// qapi/qapi-visit-core.c, whatever the device), so nobody asks one since [`ENDS_WHEN_ASKED`].
#[derive(Debug, Serialize)]
pub(crate) struct VirtioStatus<'a> {
    pub(crate) path: &'a str,
}

/// Since which version [`VirtioStatus`] is not to be asked for: 10.0 was seen to answer, 11.1 to
/// end, and what is between was not tried.
pub(crate) const ENDS_WHEN_ASKED: Version = (10, 1, 0);

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(crate) struct VirtioState {
    /// What QEMU and the back end have agreed on.
    pub(crate) vhost_dev: Option<VhostDev>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(crate) struct VhostDev {
    pub(crate) protocol_features: Value,
}

/// A queue of a back end that is at work; QEMU refuses with [`NOT_STARTED`] where it is not.
#[derive(Debug, Serialize)]
pub(crate) struct VhostQueueStatus<'a> {
    pub(crate) path: &'a str,
    pub(crate) queue: u16,
}

/// In QEMU's words (`qmp_x_query_virtio_vhost_queue_status`).
pub(crate) const NOT_STARTED: &str = "has not started";
/// In QEMU's words (`qmp_x_query_virtio_queue_status`).
pub(crate) const NO_QUEUE: &str = "Invalid virtqueue number";

/// A queue of a device; refused with [`NO_QUEUE`] where there is none of that number. **Of a back
/// end that is at work it stops the queue** to learn how far it is
/// (`qmp_x_query_virtio_queue_status` in hw/virtio/virtio.c or virtio-qmp.c).
#[derive(Debug, Serialize)]
pub(crate) struct VirtioQueueStatus<'a> {
    pub(crate) path: &'a str,
    pub(crate) queue: u16,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(crate) struct VirtioQueue {
    pub(crate) vring_num: u32,
    /// The guest's address of the descriptors, and of the ring of used ones.
    pub(crate) vring_desc: u64,
    pub(crate) vring_used: u64,
    pub(crate) last_avail_idx: u16,
    pub(crate) used_idx: u16,
}

/// Writes the state of all devices to a file, and lets go of images as a migration does if the
/// guest was stopped before: that is what it does where `live` is not said.
#[derive(Debug, Serialize)]
pub(crate) struct SaveDevices<'a> {
    pub(crate) filename: &'a str,
}

/// Forgets descriptors that `add-fd` brought.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RemoveFd {
    pub(crate) fdset_id: i64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Stop;

#[derive(Debug, Serialize)]
pub(crate) struct Cont;

#[derive(Debug, Serialize)]
pub(crate) struct Quit;

#[derive(Debug, Serialize)]
pub(crate) struct Migrate<'a> {
    pub(crate) uri: &'a str,
}

#[derive(Debug, Serialize)]
pub(crate) struct MigrateIncoming<'a> {
    pub(crate) uri: &'a str,
}

/// Lets a migration go on that waits in `state`.
#[derive(Debug, Serialize)]
pub(crate) struct MigrateContinue<'a> {
    pub(crate) state: &'a str,
}

#[derive(Debug, Serialize)]
pub(crate) struct MigrateCancel;

/// Times in milliseconds.
#[derive(Debug, Serialize)]
pub(crate) struct AnnounceSelf {
    pub(crate) initial: u32,
    pub(crate) max: u32,
    pub(crate) rounds: u32,
    pub(crate) step: u32,
}

#[derive(Debug, Serialize)]
pub(crate) struct CloseFd<'a> {
    pub(crate) fdname: &'a str,
}

#[derive(Debug, Serialize)]
pub(crate) struct NbdServerStart {
    pub(crate) addr: Value,
}

#[derive(Debug, Serialize)]
pub(crate) struct NbdServerStop;

/// An export of a block node by the NBD server.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ExportAdd<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    id: &'a str,
    node_name: &'a str,
    name: &'a str,
    writable: bool,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    bitmaps: &'a [String],
}

impl<'a> ExportAdd<'a> {
    /// To be read from.
    pub(crate) fn reading(id: &'a str, node_name: &'a str, name: &'a str) -> Self {
        Self { kind: "nbd", id, node_name, name, writable: false, bitmaps: &[] }
    }

    /// The same with dirty bitmaps.
    pub(crate) fn with_bitmaps(self, bitmaps: &'a [String]) -> Self {
        Self { bitmaps, ..self }
    }

    /// To be written to.
    pub(crate) fn writing(id: &'a str, node_name: &'a str, name: &'a str) -> Self {
        Self { writable: true, ..Self::reading(id, node_name, name) }
    }
}

/// Ends an export, whoever is connected to it.
#[derive(Debug, Serialize)]
pub(crate) struct ExportDel<'a> {
    id: &'a str,
    mode: &'static str,
}

impl<'a> ExportDel<'a> {
    pub(crate) fn hard(id: &'a str) -> Self {
        Self { id, mode: "hard" }
    }
}

/// Actions for the bitmaps of all disks in one moment.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Transaction {
    pub(crate) actions: Vec<BitmapAction>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", content = "data")]
pub(crate) enum BitmapAction {
    #[serde(rename = "block-dirty-bitmap-add")]
    Add { node: String, name: String, granularity: u64, persistent: bool },
    #[serde(rename = "block-dirty-bitmap-clear")]
    Clear { node: String, name: String },
    #[serde(rename = "block-dirty-bitmap-disable")]
    Disable { node: String, name: String },
    #[serde(rename = "block-dirty-bitmap-remove")]
    Remove { node: String, name: String },
}

/// A call as [`crate::disk_limits`] makes it and writes it down.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct SetIoThrottle<'a>(pub(crate) &'a Value);

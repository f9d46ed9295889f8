//! What can go wrong when a process is tracked.

use std::io;

/// Why a process cannot be tracked (any longer).
///
/// ```
/// use godwit_track::{TrackError, kernel_support};
///
/// match kernel_support() {
///     Ok(()) => println!("page tables can be tracked here"),
///     Err(error @ TrackError::Kernel { .. }) => println!("{error}"),
///     Err(error) => println!("it cannot be told: {error}"),
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackError {
    /// `PAGEMAP_SCAN` or asynchronous write protection is missing.
    #[error(
        "this kernel cannot track writes: it lacks {missing} (Linux 6.7 or newer has it); run a \
         newer kernel on the source host"
    )]
    Kernel {
        /// The missing feature.
        missing: &'static str,
    },
    /// The process may not be traced.
    #[error("no right to trace process {pid}: {cause}")]
    NotPermitted {
        /// The process.
        pid: i32,
        /// What is likely in the way, and the cure.
        cause: String,
    },
    /// Its thread does not stop.
    #[error(
        "the main thread of process {pid} does not stop (state {state}): is its cgroup frozen, or \
         does it wait for storage that does not answer? try again when it runs"
    )]
    Stuck {
        /// The process.
        pid: i32,
        /// Its state, as in /proc.
        state: String,
    },
    /// Filters for system calls that may kill.
    #[error(
        "process {pid} has {filters} seccomp filters, which may kill it for a system call that it \
         does not make by itself: run godwit as root (CAP_SYS_ADMIN), which suspends them for a \
         moment ({source})"
    )]
    Filtered {
        /// The process.
        pid: i32,
        /// How many.
        filters: u32,
        /// Why they cannot be suspended.
        source: io::Error,
    },
    /// A filter or a security module is against it.
    #[error("process {pid} may not make a userfaultfd ({source}): {cause}")]
    Refused {
        /// The process.
        pid: i32,
        /// Why.
        source: io::Error,
        /// What is likely in the way, and the cure.
        cause: String,
    },
    /// The process may not handle faults of the kernel.
    #[error(
        "process {pid} may not handle faults of the kernel by userfaultfd: run it as root, set \
         vm.unprivileged_userfaultfd=1, or run godwit where it may open /dev/userfaultfd"
    )]
    NoKernelFaults {
        /// The process.
        pid: i32,
    },
    /// Huge pages are protected as a whole.
    #[error(
        "RAM on hugetlbfs cannot be governed: the first write to any 4 KiB of a huge page would \
         count for all of it; use a tmpfs"
    )]
    GovernedHugePages,
    /// The write governor's own threads cannot be started.
    #[error("the write governor cannot be started: {step} failed: {source}")]
    Governor {
        /// What was being done.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A segment could not be brought from one kind of tracking to the other, nor back.
    #[error("pages {pages:?} of RAM block {block} cannot be tracked any longer: {source}")]
    Switch {
        /// The index of the block.
        block: usize,
        /// Its pages.
        pages: std::ops::Range<u64>,
        /// Why.
        source: io::Error,
    },
    /// A segment could not be given to the governor; all stay where they are.
    #[error("a segment could not be handed over: {0}")]
    NotHandedOver(String),
    /// Pages that are still to come, of memory of a kind that has no place for them.
    #[error(
        "pages of RAM block '{block}' cannot be waited for: that takes memory in pages of 4 KiB, \
         and it is in huge pages, or another process's"
    )]
    NotFillable {
        /// The block.
        block: String,
    },
    /// A RAM block's file could not be looked at, or parts of it not thrown away.
    #[error(transparent)]
    Memory(#[from] godwit_memory::MemoryError),
    /// Pages that are still to come, in too many pieces.
    #[error("missing pages are in {runs} runs, more than {most}: join those that are near")]
    TooManyRuns {
        /// How many.
        runs: usize,
        /// How many there may be.
        most: usize,
    },
    /// Something is where a page was still to come.
    #[error(
        "page {page} of RAM block {block} of process {pid} was filled by somebody else before it \
         came: what it holds is not what it should"
    )]
    Intruded {
        /// The process.
        pid: i32,
        /// The index of the block.
        block: usize,
        /// The page.
        page: u64,
    },
    /// Pages are still to come.
    #[error("{pages} pages of process {pid} have not come yet; who accesses one goes on waiting")]
    StillMissing {
        /// The process.
        pid: i32,
        /// How many.
        pages: u64,
    },
    /// A call on the userfaultfd of missing pages failed.
    #[error("missing pages of process {pid} cannot be placed: {source}")]
    Missing {
        /// The process.
        pid: i32,
        /// Why.
        source: io::Error,
    },
    /// Someone else traces it.
    #[error("process {pid} is already traced by process {tracer} (a debugger?): detach that first")]
    Traced {
        /// The process.
        pid: i32,
        /// Its tracer.
        tracer: i32,
    },
    /// Another userfaultfd is on the memory.
    #[error(
        "RAM block '{block}' is already registered with a userfaultfd: QEMU's post-copy or \
         background snapshot, or another godwit, is at work on it"
    )]
    Registered {
        /// The block.
        block: String,
    },
    /// The process does not map a RAM file as expected.
    #[error(
        "process {pid} does not map all of RAM block '{block}' shared and writable: use a \
         memory-backend-file with share=on"
    )]
    NotMapped {
        /// The process.
        pid: i32,
        /// The block.
        block: String,
    },
    /// A step of the attach failed.
    #[error("cannot attach to process {pid}: {step} failed: {source}")]
    Attach {
        /// The process.
        pid: i32,
        /// What was being done.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// `/proc` cannot be read.
    #[error("cannot read {what} of process {pid}: {source}")]
    Proc {
        /// The process.
        pid: i32,
        /// Which file.
        what: &'static str,
        /// Why.
        source: procfs::ProcError,
    },
    /// Other processes that map the memory are not known.
    #[error("{0}")]
    Sharers(String),
    /// A scan failed.
    #[error("scanning the page tables of RAM block {block} failed: {source}")]
    Scan {
        /// The index of the block.
        block: usize,
        /// Why.
        source: io::Error,
    },
    /// KVM lacks something that a tracker cannot do without.
    #[error("this KVM lacks {missing}: {cure}")]
    KvmLacks {
        /// What is missing.
        missing: &'static str,
        /// What to do instead.
        cure: &'static str,
    },
    /// KVM refused a call.
    #[error("KVM refused {call} for memory slot {slot}: {source}")]
    KvmSlot {
        /// The call.
        call: &'static str,
        /// The number of the slot.
        slot: u32,
        /// Why.
        source: io::Error,
    },
    /// KVM refused a call that concerns the whole VM or a vCPU.
    #[error("KVM refused {call}: {source}")]
    Kvm {
        /// The call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The slots that were handed over do not fit the RAM blocks.
    #[error("memory slot {slot} {problem}: hand over the slots as the VM has them")]
    Slot {
        /// The number of the slot.
        slot: u32,
        /// What is wrong.
        problem: &'static str,
    },
    /// The rings have a tracker already.
    #[error("the dirty rings of this VM are in use by another tracker: drop that one first")]
    RingsInUse,
    /// KVM overwrote entries of a ring.
    #[error(
        "the dirty ring of vCPU {vcpu} was overrun and writes are lost: this KVM does not stop a \
         vCPU in time; use larger rings or the dirty log"
    )]
    RingOverrun {
        /// The vCPU.
        vcpu: usize,
    },
    /// The shared memory of a device log cannot be made.
    #[error("cannot make a device log for {frames} guest frames: {source}")]
    DeviceLog {
        /// How many frames it should cover.
        frames: u64,
        /// Why.
        source: io::Error,
    },
    /// A device wrote where there is no log.
    #[error(
        "a device wrote {length} bytes at guest address {address:#x}, past the end of the device \
         log: make the log as long as guest memory"
    )]
    OutsideLog {
        /// The guest address.
        address: u64,
        /// How many bytes.
        length: u64,
    },
}

impl TrackError {
    /// The process that could not be tracked, where it is known.
    ///
    /// ```
    /// use godwit_track::TrackError;
    ///
    /// let error = TrackError::Traced { pid: 4711, tracer: 12 };
    /// assert_eq!(error.process(), Some(4711));
    /// ```
    #[must_use]
    pub fn process(&self) -> Option<i32> {
        match self {
            Self::NotPermitted { pid, .. }
            | Self::Stuck { pid, .. }
            | Self::Filtered { pid, .. }
            | Self::Refused { pid, .. }
            | Self::NoKernelFaults { pid }
            | Self::Traced { pid, .. }
            | Self::NotMapped { pid, .. }
            | Self::Intruded { pid, .. }
            | Self::StillMissing { pid, .. }
            | Self::Missing { pid, .. }
            | Self::Attach { pid, .. }
            | Self::Proc { pid, .. } => Some(*pid),
            _ => None,
        }
    }
}

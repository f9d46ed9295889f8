//! What a VM may be able to do beside being moved: one trait for each capability, so that a VMM
//! without it has nothing to implement.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use godwit_balloon::FreeHints;
use godwit_bitmap::DirtyBitmap;
use godwit_disk::{Disk, DiskChoice, DiskReader, DiskRound, DiskSink};
use godwit_track::{GovernorMeasures, MissingMeasures, MissingPages};
use godwit_units::{ByteCount, PageCount, PageIndex, PageRun, Rate};

use super::VmError;

/// Slowing the guest down, so that a migration ends.
///
/// ```
/// use std::time::Duration;
/// use godwit_engine::vm::{Brake, VmError};
///
/// /// A guest of one vCPU, which waits while it is held.
/// struct Vcpu {
///     held: f64,
/// }
///
/// impl Brake for Vcpu {
///     fn throttle(&mut self, share: f64) -> Result<(), VmError> {
///         self.held = share;
///         Ok(())
///     }
///
///     fn vcpu_time(&self) -> Option<Duration> {
///         None
///     }
///
///     fn vcpus(&self) -> usize {
///         1
///     }
/// }
///
/// let mut vcpu = Vcpu { held: 0.0 };
/// vcpu.throttle(0.5)?;
/// assert!(vcpu.govern(Some(1000.0)).is_err(), "it has no write governor");
/// # Ok::<(), VmError>(())
/// ```
pub trait Brake {
    /// Keeps the vCPUs from running for `share` of the time (0.0 to 0.99), from now on and until
    /// the guest is stopped; 0.0 removes the throttle.
    /// [`SourceVm::resume`](super::SourceVm::resume), [`SourceVm::retire`](super::SourceVm::retire)
    /// and the end of the adapter remove it, too, and so does the end of this process, however it
    /// comes.
    ///
    /// # Errors
    /// When it is no share: nothing changes. When the vCPUs cannot be throttled, or have not been
    /// since some moment after the last call: the guest runs at full speed.
    fn throttle(&mut self, share: f64) -> Result<(), VmError>;

    /// Whether the guest can be governed: `None` if it can, else why not, in one line. Asks without
    /// touching the machine.
    fn cannot_govern(&self) -> Option<String> {
        Some("this kind of machine has no write governor".to_owned())
    }

    /// Lets the guest make `dirty_rate_limit` clean pages dirty each second, in segments that are
    /// harvested from now on, until the guest is stopped; `None` lets it write freely.
    /// [`SourceVm::resume`](super::SourceVm::resume), [`SourceVm::retire`](super::SourceVm::retire)
    /// and the end of the adapter let it write freely, too, and so does the end of this process,
    /// however it comes. A segment is reported as dirty as a whole when it changes hands, which the
    /// page fingerprints make good.
    ///
    /// # Errors
    /// When it cannot be governed, or has not been in full since some moment after the last call:
    /// the guest writes freely.
    fn govern(&mut self, dirty_rate_limit: Option<f64>) -> Result<(), VmError> {
        match (dirty_rate_limit, self.cannot_govern()) {
            (Some(_), Some(why)) => Err(why.into()),
            _ => Ok(()),
        }
    }

    /// What the governor did so far.
    fn governor_measures(&self) -> GovernorMeasures {
        GovernorMeasures::default()
    }

    /// The CPU time that all vCPUs together have consumed since they were started; `None` where it
    /// is not known. It may lag by a tick of the host's clock, and falls when a vCPU is unplugged.
    fn vcpu_time(&self) -> Option<Duration>;

    /// How many vCPUs there are. A guest with more than the host has processors has more channels
    /// ([`channels_afar`](crate::source::Options::channels_afar)).
    fn vcpus(&self) -> usize;
}

/// Disks that move along with the guest.
///
/// ```
/// use godwit_engine::vm::DiskVm;
/// use godwit_units::ByteCount;
///
/// /// All that moves along.
/// fn size(vm: &dyn DiskVm) -> ByteCount {
///     vm.disks().iter().map(|disk| disk.size).sum()
/// }
/// ```
pub trait DiskVm {
    /// The disks that are to move along, in the order in which all calls below have them; empty
    /// where storage is shared.
    fn disks(&self) -> Vec<Disk>;

    /// Starts tracking the guest's writes to the disks, in blocks of [`Self::disk_granularity`].
    /// [`SourceVm::resume`](super::SourceVm::resume) and
    /// [`SourceVm::retire`](super::SourceVm::retire) end it and remove whatever it left in the
    /// machine.
    ///
    /// # Errors
    /// When the machine refuses; it is then as before.
    fn start_disk_tracking(&mut self) -> Result<(), VmError>;

    /// The granularity of each disk, from [`Self::start_disk_tracking`] on.
    fn disk_granularity(&self) -> Vec<ByteCount>;

    /// Begins a round for all disks in one moment. In the first one a disk is dirty wherever it is
    /// not known to be zero, in each other one where the guest wrote since the last call. May be
    /// called with the guest running or after [`SourceVm::stop`](super::SourceVm::stop). The rounds
    /// of the call before must have been dropped.
    ///
    /// # Errors
    /// When the machine refuses.
    fn begin_disk_round(&mut self) -> Result<Vec<Box<dyn DiskRound>>, VmError>;

    /// Reads the disks as they are now, in the order of [`Self::disks`]: with the guest stopped,
    /// and all rounds dropped. A machine that cannot returns nothing.
    ///
    /// # Errors
    /// When one cannot be read.
    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        Ok(Vec::new())
    }

    /// While the first round of the disks is under way, from time to time (a second or so): lets
    /// the adapter tell apart writes ahead of what the round has asked for, which the round will
    /// still read, from those behind it, which are the next round's. An adapter that does so leaves
    /// the former out of the next round; so the first round must be taken to its end. It knows the
    /// point itself, from its [`DiskRound`]s: it must be looked at after the writes were divided.
    ///
    /// # Errors
    /// When the machine refuses.
    fn disk_progress(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Bytes of each disk written since the last round began, in whole dirty blocks. Clears
    /// nothing.
    ///
    /// # Errors
    /// When the machine refuses.
    fn dirty_disks(&mut self) -> Result<Vec<ByteCount>, VmError>;

    /// Bytes that the guest has written to each of these disks since it was opened, if that is
    /// known.
    fn disk_writes(&mut self) -> Option<Vec<ByteCount>> {
        None
    }

    /// Limits what the guest may write to each of [`Self::disks`], in their order; other disks are
    /// left alone. Empty: lifts all limits. [`SourceVm::resume`](super::SourceVm::resume) and
    /// [`SourceVm::retire`](super::SourceVm::retire) lift them, too.
    ///
    /// # Errors
    /// When the machine refuses.
    fn limit_disks(&mut self, limits: &[Rate]) -> Result<(), VmError>;
}

/// A guest that says which of its pages are free.
///
/// ```
/// use std::sync::Arc;
/// use godwit_balloon::FreeHints;
/// use godwit_engine::vm::FreePages;
///
/// /// A guest whose balloon has no such queue.
/// struct NoQueue;
///
/// impl FreePages for NoQueue {
///     fn start_free_page_hints(&mut self, _: &Arc<FreeHints>) -> bool {
///         false
///     }
///
///     fn stop_free_page_hints(&mut self) {}
/// }
/// ```
pub trait FreePages {
    /// Asks the guest to hint free pages, from now on, to `hints`. Only called after
    /// [`SourceVm::start_tracking`](super::SourceVm::start_tracking): no hint may be older than the
    /// tracking. Returns whether the guest takes part.
    fn start_free_page_hints(&mut self, hints: &Arc<FreeHints>) -> bool;

    /// Hints are of no use any more. The guest should keep the pages to itself, as they are still
    /// left out. [`SourceVm::stop`](super::SourceVm::stop),
    /// [`SourceVm::resume`](super::SourceVm::resume) and
    /// [`SourceVm::retire`](super::SourceVm::retire) end that, too.
    fn stop_free_page_hints(&mut self);
}

/// Devices that write guest memory by direct I/O.
///
/// ```
/// use godwit_engine::vm::{DirectIo, VmError};
///
/// /// Reads that a disk has under way, one thread each.
/// struct Reads(Vec<std::thread::JoinHandle<()>>);
///
/// impl DirectIo for Reads {
///     fn drain(&mut self) -> Result<(), VmError> {
///         self.0.drain(..).try_for_each(|read| read.join()).map_err(|_| "a read has died".into())
///     }
/// }
/// ```
pub trait DirectIo {
    /// Waits until all direct I/O has landed that was in flight when this was called. Only called
    /// where there is such.
    ///
    /// # Errors
    /// When the machine refuses.
    fn drain(&mut self) -> Result<(), VmError>;
}

/// What a network sends to a guest's cards while it stands still: whoever reads it for the guest
/// reads no more, and where the guest goes on it does not come. It is carried there, as far as it
/// can be had.
///
/// ```
/// use std::collections::VecDeque;
/// use std::time::Duration;
///
/// use godwit_engine::vm::LatePackets;
///
/// /// A card whose packets the VMM has in a queue of its own.
/// struct Queue(VecDeque<Vec<u8>>);
///
/// impl LatePackets for Queue {
///     fn find(&mut self) {
///         self.0.clear();
///     }
///
///     fn next(&mut self, _: Duration) -> Option<Vec<u8>> {
///         self.0.pop_front()
///     }
///
///     fn end(&mut self) {
///         self.0.clear();
///     }
/// }
/// ```
pub trait LatePackets {
    /// Finds the cards, when there is time: before
    /// [`SourceVm::open_state`](super::SourceVm::open_state). From the moment in which
    /// [`SourceVm::stop`](super::SourceVm::stop) begins to stop the guest, what is sent to them is
    /// kept. What reaches the guest all the same comes to it twice, as it may on any network.
    fn find(&mut self);

    /// The next one of them, waiting up to `wait`: a `struct virtio_net_hdr` of 10 bytes
    /// (linux/virtio_net.h), little-endian, and an Ethernet frame, at most
    /// [`godwit_wire::PACKET_LIMIT`] bytes in all. Called when the guest was given away; should it
    /// come back all the same, it has what was sent to it from where it would have had it. One
    /// that has nothing to wait for returns at once.
    fn next(&mut self, wait: Duration) -> Option<Vec<u8>>;

    /// Nothing is kept any more. [`SourceVm::resume`](super::SourceVm::resume) ends that, too.
    fn end(&mut self);
}

/// Disks that a source may fill, at the destination.
///
/// ```
/// use godwit_disk::{Disk, DiskChoice, DiskSink};
/// use godwit_engine::vm::{DiskDestination, VmError};
///
/// /// A machine whose disks nobody may fill yet.
/// struct Closed;
///
/// impl DiskDestination for Closed {
///     fn open_disks(
///         &mut self,
///         wanted: &[Disk],
///         _: &DiskChoice,
///     ) -> Result<Vec<Box<dyn DiskSink>>, VmError> {
///         Err(format!("{} disks are wanted, and none may be filled", wanted.len()).into())
///     }
/// }
/// ```
pub trait DiskDestination {
    /// Opens the disks that the source wants to send, in its order. Only those that `allowed` names
    /// may be opened, by whatever name it has for them ([`DiskChoice::allow`]): anybody who reaches
    /// the port can ask for any. Rounds come also after
    /// [`DestinationVm::prepare`](super::DestinationVm::prepare), and [`Self::close_disks`] behind
    /// the last of them. [`DestinationVm::discard`](super::DestinationVm::discard) closes them as
    /// well; the sinks have been dropped by then.
    ///
    /// # Errors
    /// When one is missing, too small, in use or read-only: says which and what to do. Nothing is
    /// written then.
    fn open_disks(
        &mut self,
        wanted: &[Disk],
        allowed: &DiskChoice,
    ) -> Result<Vec<Box<dyn DiskSink>>, VmError>;

    /// Reads the disks that are open, each as it is now, in the order of
    /// [`open_disks`](Self::open_disks): what was written is read back, and a source that was
    /// started anew asks what they hold. The sinks live on and are written through; what was
    /// flushed, durable or not, must be what is read. What is returned is dropped before this is
    /// called again and before [`Self::close_disks`]. A machine that cannot read its disks returns
    /// nothing: then they are not compared, and all of them is sent again.
    ///
    /// # Errors
    /// When one cannot be read.
    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        Ok(Vec::new())
    }

    /// The last round of all disks is on stable storage and the sinks have been dropped: lets the
    /// machine have its disks. Comes before the first piece of device state is written. Not called
    /// where no disk moves.
    ///
    /// # Errors
    /// When the machine refuses.
    fn close_disks(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}

/// A machine whose guest can run before all of its pages are here (post-copy).
///
/// ```
/// use std::sync::Arc;
/// use godwit_bitmap::DirtyBitmap;
/// use godwit_engine::vm::{ArrivingPages, PostCopyDestination, VmError};
/// use godwit_memory::RamBlock;
/// use godwit_track::{Approach, MissingPages};
///
/// /// A machine whose memory is private to process `pid`.
/// struct Process {
///     pid: i32,
///     ram: Arc<Vec<RamBlock>>,
/// }
///
/// impl PostCopyDestination for Process {
///     fn cannot_await(&mut self) -> Option<String> {
///         None
///     }
///
///     fn await_pages(
///         &mut self,
///         missing: Vec<DirtyBitmap>,
///     ) -> Result<Arc<dyn ArrivingPages>, VmError> {
///         let pages = MissingPages::start(Approach::default(), self.pid, &self.ram, missing)?;
///         Ok(Arc::new(pages))
///     }
/// }
/// ```
pub trait PostCopyDestination {
    /// Why it cannot be done with this machine, and the cure, in one line; `None` if it can. Asked
    /// before an offer is accepted, as far as that shows beforehand; changes nothing.
    fn cannot_await(&mut self) -> Option<String>;

    /// Pages may come to be missing: what [`Self::await_pages`] takes time for, and can be done
    /// before it without changing anything in the machine, is done now, as long as the guest runs
    /// at the source. Called behind [`DestinationVm::prepare`](super::DestinationVm::prepare);
    /// [`Self::await_pages`] need not follow.
    fn get_ready(&mut self) {}

    /// Throws away what is here of the pages in `missing`, one bitmap for each block of
    /// [`DestinationVm::ram`](super::DestinationVm::ram), and lets whoever accesses one wait until
    /// it is placed, devices and the kernel among them. Called behind
    /// [`DestinationVm::prepare`](super::DestinationVm::prepare), before anything of device
    /// state is written but its head, which says nothing of devices.
    ///
    /// # Errors
    /// When that is not possible. The guest then stays at the source.
    fn await_pages(&mut self, missing: Vec<DirtyBitmap>)
    -> Result<Arc<dyn ArrivingPages>, VmError>;

    /// What another process needs to go on with the pages that are still to come if this one is
    /// killed, asked behind [`Self::await_pages`]: it opens the machine by that, and calls
    /// [`follow`](crate::destination::follow). `None`: none can.
    fn kept(&self) -> Option<Kept> {
        None
    }
}

/// By what another process goes on with a machine of which pages are missing.
///
/// ```
/// use godwit_engine::vm::Kept;
///
/// fn kept(pid: u32) -> Kept {
///     Kept { record: format!("/run/my-vmm/{pid}-incoming.json").into(), machine: pid.to_string() }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Kept {
    /// Where the engine writes down what it needs: a file that is this machine's alone, in a
    /// directory that is this user's alone.
    pub record: PathBuf,
    /// What the machine is opened by.
    pub machine: String,
}

/// Pages that are still to come while the machine runs. [`MissingPages`] is one for the memory of
/// another process, or of the VMM's own ([`MissingPages::start_own`]).
///
/// ```
/// use godwit_engine::vm::ArrivingPages;
///
/// fn is_whole(pages: &dyn ArrivingPages) -> bool {
///     pages.left().0 == 0
/// }
/// ```
pub trait ArrivingPages: Send + Sync {
    /// Waits for up to `time`, and reports each page that somebody has begun to wait for: block and
    /// page, once each.
    ///
    /// # Errors
    /// When nothing can be known of that any more, as where the machine has ended.
    fn await_faults(
        &self,
        time: Duration,
        found: &mut dyn FnMut(usize, PageIndex),
    ) -> Result<(), VmError>;

    /// Places `bytes`, whole pages, at page `start` of `block` on: those of them that are still to
    /// come, and no other. Returns how many that were.
    ///
    /// # Errors
    /// When they cannot be placed.
    fn place(&self, block: usize, start: PageIndex, bytes: &[u8]) -> Result<PageCount, VmError>;

    /// The same with zeros.
    ///
    /// # Errors
    /// As [`Self::place`].
    fn place_zeros(&self, block: usize, pages: PageRun) -> Result<PageCount, VmError>;

    /// How many pages are still to come.
    fn left(&self) -> PageCount;

    /// The first run of pages of `block` from `from` on that are still to come.
    fn next_run(&self, block: usize, from: PageIndex) -> Option<PageRun>;

    /// What was done so far.
    fn measures(&self) -> MissingMeasures;

    /// All pages are here: nobody waits any more, and nothing of it stays in the machine.
    ///
    /// # Errors
    /// What stays; it does no harm.
    fn finish(&self) -> Result<(), VmError>;
}

impl ArrivingPages for MissingPages {
    fn await_faults(
        &self,
        time: Duration,
        found: &mut dyn FnMut(usize, PageIndex),
    ) -> Result<(), VmError> {
        Ok(self.await_faults(time, found)?)
    }

    fn place(&self, block: usize, start: PageIndex, bytes: &[u8]) -> Result<PageCount, VmError> {
        Ok(self.place(block, start, bytes)?)
    }

    fn place_zeros(&self, block: usize, pages: PageRun) -> Result<PageCount, VmError> {
        Ok(self.place_zeros(block, pages)?)
    }

    fn left(&self) -> PageCount {
        self.left()
    }

    fn next_run(&self, block: usize, from: PageIndex) -> Option<PageRun> {
        self.next_run(block, from)
    }

    fn measures(&self) -> MissingMeasures {
        self.measures()
    }

    fn finish(&self) -> Result<(), VmError> {
        Ok(self.finish()?)
    }
}

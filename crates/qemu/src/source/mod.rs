//! A stock QEMU as the source. Where all RAM is in shared files it is stopped by its own migration,
//! which then carries the device state and nothing else; where RAM is its own it is stopped by a
//! command, and saves its devices by another.
//!
//! ```text
//!                   RAM in shared files                    RAM of its own
//!   open_state      capabilities, getfd (a socket pair)    a channel; add-fd (a memfd), where
//!                                                          the monitor is ours alone
//!   stop            migrate fd:… -> the guest stops,       stop -> the guest stops, devices drain
//!                   devices drain -> pre-switchover
//!   release_state   migrate-continue -> the state flows,   xen-save-devices-state -> the memfd,
//!                   end of file -> completed               which is passed on
//!   resume          migrate_cancel or cont, from           cont
//!                   wherever it was; settings put back
//! ```
//!
//! A throttle or the write governor may be in force from the start to the moment the guest has
//! stopped. Invariant: it is gone after `resume`, `retire`, a `stop` that failed, and when this is
//! dropped.

mod back_ends;
mod capabilities;
mod examine;
mod identity;
mod stop;
mod vm;

use std::collections::BTreeSet;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use godwit_disk::DiskChoice;
use godwit_engine::Interrupt;
use godwit_engine::vm::VmError;
use godwit_memory::RamBlock;
use godwit_track::{GovernorMeasures, PagemapTracker, kernel_support};
use godwit_units::ByteCount;
use godwit_vcpu_throttle::{Measures, VcpuThrottle};

use crate::QemuError;
use crate::cards::Outlets;
use crate::compare::{Realized, Terms};
use crate::device_ram::{DeviceRam, Loader};
use crate::device_state::{self, Prepared, Saving};
use crate::disk_limits::DiskLimits;
use crate::disks::{self, Drive, Found, Granularity, ListedDisk, Tracking};
use crate::fate::Fate;
use crate::guard::{self, Guard, Left, Stage};
use crate::left;
use crate::libvirt::SourceDomain;
use crate::limits::Limits;
use crate::machine::{self, Machine, Reporting, Seen};
use crate::mark::{LEFT, record_in};
use crate::monitor::commands::{AnnounceSelf, CloseFd, QueryMigrate};
use crate::monitor::{Event, Monitor, QmpError, Queued};
use crate::proxmox::ProxmoxVm;
use crate::ram::{Ram, StateBy, is_same};
use crate::settings::MigrationSettings;
use crate::start;
use crate::upgrade::InPlace;
use crate::way_back;

use back_ends::{BackEnds, pids};
pub(crate) use examine::examine;
use examine::{Examined, examine_left};
pub use identity::Identity;

/// The name under which QEMU keeps the descriptor.
pub(crate) const FD_NAME: &str = "godwit-state";
const SAVE_LIMIT: Duration = Duration::from_secs(30);
/// From the end of the monitor's connection to the end of QEMU's process, which may have much
/// memory to give back.
const END_LIMIT: Duration = Duration::from_secs(5);

/// From `migrate` until the guest has stopped: QEMU sends blocks of its own first, those of VGA and
/// firmware. It does so once, in that very moment, so there is nothing to measure before.
const OWN_BLOCKS: Duration = Duration::from_millis(5);
/// Other processes are looked at when godwit prepares, and once more before the guest is stopped if
/// that was longer ago: on a host with many of them it takes long. Who maps guest RAM for a device
/// shows among the devices, too.
const PROCESSES_AGE: Duration = Duration::from_secs(1);

/// What QEMU was told so that it hands out its device state, and has not answered yet.
#[derive(Debug)]
enum Releasing {
    /// Its migration, to go on.
    Continuing(Queued),
    /// To save its devices.
    Saving(Saving),
}

/// A QEMU whose guest is to leave.
#[derive(Debug)]
pub struct QemuSource {
    machine: Machine,
    limits: Limits,
    ram: Arc<Vec<RamBlock>>,
    state_by: StateBy,
    device_ram: Vec<DeviceRam>,
    was_running: bool,
    /// What it took to look at this QEMU, which is looked at again before the guest is stopped.
    looked: Duration,
    /// What it took to look at all other processes.
    processes_looked: Duration,
    /// When they were looked at last, once godwit has begun to prepare.
    processes_at: Option<Instant>,
    /// What the machine consists of.
    parts: BTreeSet<String>,
    /// Whether a guest that runs guests is refused, and this one could. A processor that is plugged
    /// in since is refused as a part that was added.
    may_nest: bool,
    /// Whether a disk writes guest memory by direct I/O.
    direct_io: bool,
    tracking_stop: Duration,
    settings: Option<MigrationSettings>,
    /// Another handle to our end of the state stream, to end it.
    state: Option<UnixStream>,
    /// What its devices are saved into, from when the stream is opened until QEMU is told to save
    /// them.
    prepared: Option<Prepared>,
    /// Whether QEMU may have a descriptor for that.
    has_fd_set: bool,
    /// What is to load the device state.
    loader: Loader,
    /// What libvirt has of it, where it does.
    domain: Option<SourceDomain>,
    /// What Proxmox has of it, where it does, and whether it was locked there.
    proxmox: Option<ProxmoxVm>,
    locked: bool,
    /// Whether the guest was told to stop, by `migrate` or by `stop`.
    stopping: bool,
    /// Since when the vCPUs stood still before they were told to stop.
    held_since: Option<Instant>,
    /// Whether the device state was released, so that a destination may have loaded it.
    released: bool,
    /// What QEMU was told for that, until it has answered.
    releasing: Option<Releasing>,
    /// The vCPUs' threads, as they were when last asked for.
    vcpus: Vec<i32>,
    throttle: VcpuThrottle,
    /// As long as the engine holds it.
    tracker: Weak<PagemapTracker>,
    governed: GovernorMeasures,
    disk_limits: DiskLimits,
    /// The disks that move along.
    moving: Vec<Found>,
    /// Of the disks that move; there may be none.
    granularity: Granularity,
    tracking: Option<Tracking>,
    /// The processes behind vhost-user devices, where there are such.
    back_ends: Option<BackEnds>,
    /// What the operator lets pass when the destination compares.
    terms: Terms,
    /// What it will ask for that cannot change, once that was looked at.
    realized: Option<Realized>,
    /// What brings the guest back when this process is killed.
    guard: Option<Guard>,
    /// What has befallen the guest since it was looked at first.
    fate: Fate,
    /// Hears of waits that are long.
    told: fn(&str),
    /// What is sent to the guest's cards while it stands still.
    outlets: Option<Outlets>,
    /// What is known of the QEMU that is to have the same memory, where there is to be one.
    in_place: Option<Arc<InPlace>>,
    /// What a godwit has left that was killed when the guest ran at the destination, or may have,
    /// without all of its memory.
    left: Option<PathBuf>,
}

impl QemuSource {
    /// Looks at the QEMU behind the monitor at `path` and refuses what cannot be migrated. Changes
    /// nothing, but for the removal of what a godwit that was killed has left there.
    ///
    /// # Errors
    /// What stands against it, with the cure.
    pub fn open(path: &Path) -> Result<Self, QemuError> {
        kernel_support()?;
        Self::look(guard::connect(path)?)
    }

    /// The same for the QEMU of the domain called `name` of the libvirt at `uri`, which holds its
    /// monitor. With `undefine` the definition of a persistent domain goes when the guest has
    /// left; otherwise it stays, shut off.
    ///
    /// # Errors
    /// The same, and what libvirt has against it.
    pub fn open_domain(name: &str, uri: &str, undefine: bool) -> Result<Self, QemuError> {
        kernel_support()?;
        let domain = SourceDomain::open(name, uri, undefine)?;
        let mut source = Self::look(guard::connect_domain(domain.domain())?)?;
        source.domain = Some(domain);
        Ok(source)
    }

    /// The same for the VM `id` of Proxmox's, whose monitor is let go of between commands. Its
    /// definition stays here, locked, when the guest has left.
    ///
    /// # Errors
    /// The same, and what Proxmox has against it.
    pub fn open_proxmox(id: &str) -> Result<Self, QemuError> {
        kernel_support()?;
        let vm = ProxmoxVm::open(id).or_else(|error| {
            // One whose guest left before all of its memory is locked, by godwit.
            let vm = ProxmoxVm::named(id)?;
            let machine = guard::connect_briefly(&vm.monitor());
            let is_left = machine.is_ok_and(|machine| left::at_source(machine.pid).is_some());
            if is_left { Ok(vm) } else { Err(error) }
        })?;
        let mut source = Self::look(guard::connect_briefly(&vm.monitor())?)?;
        source.locked = source.left.is_some();
        source.proxmox = Some(vm);
        Ok(source)
    }

    fn look(mut machine: Machine) -> Result<Self, QemuError> {
        let left = match left::at_source(machine.pid) {
            // Another one had brought it back, and was killed then.
            Some(_) if machine.run_state()? == "running" => {
                left::forget(machine.pid);
                None
            }
            left => left,
        };
        let examined = match &left {
            None => examine(&mut machine)?,
            Some(_) => examine_left(&mut machine)?,
        };
        let Examined {
            ram,
            state_by,
            device_ram,
            back_ends,
            was_running,
            looked,
            processes_looked,
            direct_io,
            parts,
            vcpus,
        } = examined;
        if left.is_none() {
            disks::clear(&mut machine)?;
            guard::clear(&mut machine)?;
        }
        Ok(Self {
            looked,
            processes_looked,
            processes_at: None,
            moving: Vec::new(),
            terms: Terms::default(),
            realized: None,
            granularity: Granularity::Given(ByteCount::ZERO),
            tracking: None,
            guard: None,
            fate: Fate::default(),
            told: |_| {},
            outlets: None,
            in_place: None,
            throttle: VcpuThrottle::new(machine.pid, &vcpus),
            tracker: Weak::new(),
            governed: GovernorMeasures::default(),
            disk_limits: DiskLimits::default(),
            vcpus,
            back_ends,
            machine,
            limits: Limits::default(),
            ram,
            state_by,
            device_ram,
            was_running,
            parts,
            may_nest: false,
            direct_io,
            tracking_stop: Duration::ZERO,
            settings: None,
            state: None,
            prepared: None,
            has_fd_set: false,
            loader: Loader::Prepared,
            domain: None,
            proxmox: None,
            locked: false,
            // Should the destination say that it has discarded the guest, it is run here.
            stopping: left.is_some(),
            held_since: None,
            released: left.is_some(),
            releasing: None,
            left,
        })
    }

    /// The same with disks that move along: in dirty blocks of `granularity`, or, without, of a
    /// size that suits the guest's writes to each disk from here on, or so far where there are none
    /// ([`godwit_disk::granularity_for`]). Changes nothing.
    ///
    /// # Errors
    /// When there is no such disk, or it cannot move.
    pub fn with_disks(
        mut self,
        choice: &DiskChoice,
        granularity: Option<ByteCount>,
    ) -> Result<Self, QemuError> {
        let drives = self.drives()?;
        self.moving = disks::choose(&drives, choice)?;
        self.granularity = Granularity::of(granularity, &mut *self.machine.qmp, &self.moving)?;
        Ok(self)
    }

    /// The same, and refused where the guest may run guests of its own, now or when it is about to
    /// be stopped.
    ///
    /// # Errors
    /// When it may.
    pub fn without_nested(mut self) -> Result<Self, QemuError> {
        self.may_nest = self.machine.may_nest()?;
        if self.may_nest {
            self.machine.check_registers()?;
        }
        Ok(self)
    }

    /// The same for a destination that is another process on this host
    /// ([`crate::StartTerms::in_place`]). Where that can have the same memory mapped, none of it is
    /// offered to it; where it cannot ([`InPlace::is_copied`]), all. Changes nothing.
    ///
    /// # Errors
    /// Why the guest cannot go on so, with the cure.
    pub fn staying_in_place(mut self) -> Result<Self, QemuError> {
        let kind = (self.state_by, self.back_ends.is_some());
        self.in_place = Some(Arc::new(InPlace::look(&mut self.machine, &self.ram, kind)?));
        Ok(self)
    }

    /// The RAM that is offered to the destination.
    fn offered(&self) -> &Arc<Vec<RamBlock>> {
        self.in_place.as_ref().map_or(&self.ram, |memory| memory.moving())
    }

    /// What the destination on this host has to know of the memory.
    #[must_use]
    pub fn in_place(&self) -> Option<Arc<InPlace>> {
        self.in_place.clone()
    }

    /// What a godwit has left that was killed when the guest ran at the destination, or may have,
    /// without all of its memory: nothing can be done with this VM but to go on by that
    /// ([`godwit_engine::source::follow`]).
    #[must_use]
    pub fn left(&self) -> Option<&Path> {
        self.left.as_deref()
    }

    /// Refuses such a VM, for whoever cannot go on.
    ///
    /// # Errors
    /// The reason, with the cure.
    pub fn whole(self) -> Result<Self, QemuError> {
        let cure = "its guest has left without all of its memory, or was about to: godwit recover \
                    --vm VM tells what to do";
        match self.left {
            Some(_) => Err(QemuError::SourceState { state: "paused".to_owned(), cure }),
            None => Ok(self),
        }
    }

    /// Where to write down what another godwit needs to go on so.
    ///
    /// # Errors
    /// When the run directory is not this user's alone.
    pub fn follow_record(&self) -> Result<PathBuf, QemuError> {
        left::record(self.machine.pid, LEFT)
    }

    /// What others have left of this VM is undone, since it is known now who has the guest.
    fn clear_left(&mut self) -> Result<(), QemuError> {
        if self.left.take().is_some() {
            left::forget(self.machine.pid);
            guard::clear(&mut self.machine)?;
        }
        Ok(())
    }

    /// Waits for the end of a QEMU whose guest has left, and says whether it came.
    #[must_use]
    pub fn ends(&self) -> bool {
        self.machine.process.ends_within(END_LIMIT).unwrap_or(false)
    }

    /// Processes beside QEMU that may have the guest's memory.
    fn others(&self) -> Vec<i32> {
        let new = self.in_place.iter().filter_map(|it| it.successor()).map(|new| new.pid);
        pids(self.back_ends.as_ref()).into_iter().chain(new).collect()
    }

    /// The same with a guardian: `program` started anew, with [`crate::GUARD_COMMAND`] as the first
    /// word of its command line, which has to call [`crate::stand_guard`]. Without one a guest that
    /// is stopped when this process is killed stays stopped.
    ///
    /// # Errors
    /// When it does not start.
    pub fn guarded(mut self, program: &Path) -> Result<Self, QemuError> {
        let handover = self.in_place.as_ref().map(|memory| memory.handover().to_owned());
        let left = Left { handover, ..Left::at(Stage::Copying, self.was_running) };
        self.guard = Some(Guard::start(program, &self.machine, left)?);
        Ok(self)
    }

    /// Writes down, for the guardian, what is about to be done or was undone.
    fn note(&mut self, change: impl FnOnce(&mut Left)) -> Result<(), QemuError> {
        self.guard.as_mut().map_or(Ok(()), |guard| guard.note(change))
    }

    /// The same where the thing itself must not wait for it.
    fn note_if_possible(&mut self, change: impl FnOnce(&mut Left)) {
        // The record then tells of more than there is, and nothing is undone that is not there.
        let _ = self.note(change);
    }

    /// The same with other limits.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.machine.qmp.set_limit(limits.answer);
        self.limits = limits;
        self
    }

    /// The same, and `told` hears, in a sentence, what a wait of more than a few seconds is for.
    #[must_use]
    pub fn telling(mut self, told: fn(&str)) -> Self {
        self.told = told;
        self
    }

    /// For each disk that moves, the command that makes an empty image for it at the destination,
    /// to be run there before QEMU is started.
    #[must_use]
    pub fn image_commands(&self) -> Vec<String> {
        self.moving.iter().map(Found::image_command).collect()
    }

    /// The same with differences from the destination's machine that are let pass: by the keys
    /// under which they are told, by the first part of a key, or `all`.
    #[must_use]
    pub fn allowing(mut self, differences: &[String]) -> Self {
        self.terms.allowed = differences.to_vec();
        self
    }

    /// The same with disks that stay where they are and are not compared with the destination's:
    /// they are on the same storage.
    #[must_use]
    pub fn sharing_disks(mut self) -> Self {
        self.terms.disks_are_shared = true;
        self
    }

    /// The disks of the guest, in QEMU's order, and what becomes of each.
    ///
    /// # Errors
    /// When the monitor fails.
    pub fn disk_list(&mut self) -> Result<Vec<ListedDisk>, QemuError> {
        let drives = self.drives()?;
        Ok(drives.iter().filter_map(|drive| drive.listed(&self.moving)).collect())
    }

    /// The devices that were plugged in, for people: type, and id where somebody gave one. All of
    /// them can move: a QEMU with one that cannot is not opened.
    ///
    /// # Errors
    /// When the monitor fails.
    pub fn devices(&mut self) -> Result<Vec<String>, QemuError> {
        let devices = self.machine.devices()?.into_iter();
        let word = |(bus, id, kind): (&str, String, String)| match bus {
            machine::PERIPHERAL => format!("{kind} '{id}'"),
            _ => kind,
        };
        Ok(devices.map(word).collect())
    }

    /// All drives, by the names that their owner knows.
    fn drives(&mut self) -> Result<Vec<Drive>, QemuError> {
        let mut drives = disks::drives(&mut *self.machine.qmp)?;
        if let Some(domain) = &self.domain {
            domain.call(&mut drives)?;
        }
        Ok(drives)
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.machine.pid
    }

    /// A file in `directory` that no other QEMU has: by its process, and when that and the host
    /// were started. Those there of QEMUs of this host that have ended are removed.
    #[must_use]
    pub fn record_in(&self, directory: &Path) -> PathBuf {
        record_in(directory, self.pid(), "")
    }

    /// Whether its guest tells of free memory.
    ///
    /// # Errors
    /// When the monitor fails.
    pub fn reporting(&mut self) -> Result<Reporting, QemuError> {
        Ok(self.machine.reporting()?)
    }

    /// QEMU's version: major, minor, micro.
    #[must_use]
    pub fn version(&self) -> (u64, u64, u64) {
        self.machine.qmp.version()
    }

    /// What the throttle did since it was put in force last.
    #[must_use]
    pub fn throttle_measures(&self) -> Measures {
        self.throttle.measures()
    }

    /// All processes that write the guest's memory, for people: QEMU, and the back ends of its
    /// vhost-user devices.
    #[must_use]
    pub fn writers(&self) -> Vec<String> {
        let back_ends = self.back_ends.iter().flat_map(BackEnds::words);
        std::iter::once(format!("qemu {}", self.machine.pid)).chain(back_ends).collect()
    }

    /// How QEMU hands out the state of its devices.
    #[must_use]
    pub fn state_by(&self) -> StateBy {
        self.state_by
    }

    /// Takes in what QEMU has told by now. A connection that fails is noticed by whoever uses it
    /// next.
    fn take_events(&mut self) {
        let events = self.machine.qmp.take_events().unwrap_or_default();
        events.iter().for_each(|event| self.fate.take(event));
    }

    /// Lets the vCPUs run and write freely. There is nothing to report: what failed has let go of
    /// them.
    fn remove_throttle(&mut self) {
        if let Some(tracker) = self.tracker.upgrade() {
            // Segments stay where they are: their writers are answered at once.
            tracker.answer_at_once();
            self.governed = tracker.governor_measures();
        }
        let _ = self.throttle.set(0.0);
        let _ = self.throttle.set_short(false);
    }

    fn bring_back(&mut self) -> Result<(), QemuError> {
        (self.prepared, self.releasing) = (None, None);
        if let Some(state) = self.state.take() {
            let _ = state.shutdown(Shutdown::Both);
        }
        // Only what was stopped from here is run again; whatever else stopped it since, did so for
        // a reason.
        self.take_events();
        let runs = self.was_running && self.fate.ended().is_none();
        let was_stopping = std::mem::take(&mut self.stopping);
        let running = match was_stopping {
            true => {
                let as_it_was = (runs, self.released);
                way_back::run_again(&mut self.machine, as_it_was, self.limits, self.told)
            }
            .and_then(|()| match self.fate.ended() {
                Some(_) => way_back::keep_stopped(&mut self.machine, self.limits.resume),
                None => Ok(()),
            }),
            false => Ok(()),
        };
        self.fate.runs_again();
        self.outlets = None;
        self.tell_if_otherwise(was_stopping && running.is_ok());
        if running.is_ok() {
            self.note_if_possible(|left| left.stage = Stage::Copying);
        }
        if std::mem::take(&mut self.released) && self.was_running && running.is_ok() {
            // The guest was to run elsewhere, and whoever has prepared for that (a switch, a
            // program that binds its ports) should know better. The guest runs, whatever becomes of
            // this.
            let _ = announce(&mut *self.machine.qmp, ANNOUNCED);
        }
        // The guest first: an error here must not hide one there.
        let limits = self.lift_disk_limits();
        let settings = self.restore_settings();
        let forgotten = self.forget_fd_set();
        let tracking = self.end_disk_tracking();
        let unlocked = self.unlock();
        running?;
        settings?;
        forgotten?;
        tracking?;
        limits?;
        unlocked?;
        self.clear_left()?;
        // Handed over for a migration that was never begun; else QEMU has no such name.
        let _ = self.machine.qmp.run(&CloseFd { fdname: FD_NAME });
        Ok(())
    }

    /// Tells of a guest that was found paused, or was paused by somebody else, and was
    /// `brought_back`, if QEMU has it otherwise.
    fn tell_if_otherwise(&mut self, brought_back: bool) {
        if !brought_back {
            return;
        }
        let (was_running, limit) = (self.was_running, self.limits.resume);
        if let Some(words) = way_back::stays_otherwise(&mut self.machine, was_running, limit) {
            (self.told)(words);
        }
    }

    /// What a destination of libvirt's asks: it starts a QEMU that nobody prepares.
    fn describe(&mut self) -> Result<Vec<u8>, VmError> {
        let drives = self.drives()?;
        let Some(domain) = &self.domain else {
            let words = "the destination is a libvirt's, and takes in nothing but domains of \
                         libvirt's: give godwit migrate --vm libvirt:DOMAIN, or godwit receive a \
                         QEMU that waits";
            return Err(QemuError::Domain(words.to_owned()).into());
        };
        self.loader = Loader::Plain;
        let disks = (&*drives, &*self.moving);
        Ok(domain.describe(&self.machine, disks, self.terms.disks_are_shared)?)
    }

    /// What a destination asks that starts its own QEMU.
    fn describe_qemu(&mut self) -> Result<Vec<u8>, VmError> {
        if self.domain.is_some() {
            let words = "the source is a domain of libvirt's, which libvirt starts: godwit receive \
                         --vm libvirt: instead of --start";
            return Err(QemuError::Domain(words.to_owned()).into());
        }
        Ok(start::describe(&mut self.machine)?)
    }

    fn end_disk_tracking(&mut self) -> Result<(), QmpError> {
        let Some(tracking) = self.tracking.take() else { return Ok(()) };
        tracking.end(&mut *self.machine.qmp)?;
        self.note_if_possible(|left| left.disks = false);
        Ok(())
    }

    fn lift_disk_limits(&mut self) -> Result<(), QmpError> {
        if self.disk_limits.is_empty() {
            return Ok(());
        }
        self.disk_limits.restore(&mut *self.machine.qmp)?;
        self.note_if_possible(|left| left.limits = DiskLimits::default());
        Ok(())
    }

    fn restore_settings(&mut self) -> Result<(), QmpError> {
        let Some(settings) = self.settings.take() else { return Ok(()) };
        settings.restore(&mut *self.machine.qmp)?;
        self.note_if_possible(|left| left.settings = None);
        Ok(())
    }

    fn forget_fd_set(&mut self) -> Result<(), QmpError> {
        if !std::mem::take(&mut self.has_fd_set) {
            return Ok(());
        }
        device_state::forget(&mut *self.machine.qmp)?;
        self.note_if_possible(|left| left.fd_set = false);
        Ok(())
    }

    fn tracking(&mut self) -> Result<(&mut Tracking, &mut dyn Monitor), QemuError> {
        match &mut self.tracking {
            Some(tracking) => Ok((tracking, &mut *self.machine.qmp)),
            None => Err(QemuError::Changed("the disks were not tracked")),
        }
    }

    /// Whether other processes are to be looked at before the guest is stopped.
    fn processes_are_due(&self) -> bool {
        self.processes_at.is_none_or(|at| at.elapsed() > PROCESSES_AGE)
    }

    /// Looks whether another process has mapped guest RAM since the start.
    fn check_processes(&mut self) -> Result<(), QemuError> {
        let looking = Instant::now();
        if let Some(back_ends) = &self.back_ends {
            back_ends.look_again()?;
        }
        self.machine.check_writers(&self.ram, &self.others())?;
        self.processes_looked = looking.elapsed();
        self.processes_at = Some(Instant::now());
        Ok(())
    }

    /// Has Proxmox, where it has the VM, leave it alone from here on.
    fn lock(&mut self) -> Result<(), QemuError> {
        let Some(vm) = self.proxmox.clone().filter(|_| !self.locked) else { return Ok(()) };
        self.note(|left| left.lock = Some(vm.clone()))?;
        let locked = vm.lock();
        self.locked = locked.is_ok();
        if !self.locked {
            self.note_if_possible(|left| left.lock = None);
        }
        locked
    }

    fn unlock(&mut self) -> Result<(), QemuError> {
        let Some(vm) = self.proxmox.as_ref().filter(|_| self.locked) else { return Ok(()) };
        vm.unlock()?;
        self.locked = false;
        self.note_if_possible(|left| left.lock = None);
        Ok(())
    }

    /// Checks again what was checked at the start and may have changed since.
    fn check_unchanged(&mut self) -> Result<(), QemuError> {
        if self.processes_are_due() {
            self.check_processes()?;
        }
        let looking = Instant::now();
        self.lock()?;
        let Seen { fronts, direct_io, parts } = self.machine.check_source()?;
        if let Some(back_ends) = &self.back_ends {
            back_ends.check_unchanged()?;
        }
        if direct_io && !self.direct_io {
            return Err(QemuError::Changed("a disk was switched to direct I/O"));
        }
        if self.may_nest {
            self.machine.check_registers()?;
        }
        if let Some(new) = parts.difference(&self.parts).next() {
            return Err(QemuError::NotTheSame(format!("{new} was added")));
        }
        if let Some(gone) = self.parts.difference(&parts).next() {
            return Err(QemuError::NotTheSame(format!("{gone} was removed")));
        }
        // A device that was plugged in for another of the same name may have a back end now.
        let alone = self.state_by == StateBy::Saving || !fronts.is_empty();
        // The RAM of devices stays where it is as long as these are there, wherever the guest has
        // it mapped: one that was reset a moment ago has not yet.
        let now = Ram::main(&mut self.machine, alone)?;
        let same = now.len() == self.ram.len()
            && now.iter().zip(self.ram.iter()).all(|(a, b)| is_same(a, b));
        if !same {
            return Err(QemuError::Changed("RAM was plugged or unplugged"));
        }
        let state = self.machine.run_state()?;
        if (state == "running") != self.was_running {
            return Err(QemuError::OtherState(state));
        }
        self.looked = looking.elapsed();
        Ok(())
    }
}

/// The state a MIGRATION event reports; empty for other events.
pub(crate) fn migration_event(event: &Event) -> String {
    let status = event.data["status"].as_str().filter(|_| event.name == "MIGRATION");
    status.unwrap_or_default().to_owned()
}

/// How often the network is told, if nothing else is said: QEMU's own default.
pub(crate) const ANNOUNCED: u16 = 5;

/// Tells the network where the guest is, so often, with QEMU's own pauses behind a migration
/// (qapi/migration.json, announce-*).
pub(crate) fn announce(qmp: &mut dyn Monitor, rounds: u16) -> Result<(), QmpError> {
    if rounds == 0 {
        return Ok(());
    }
    qmp.run(&AnnounceSelf { initial: 50, max: 550, rounds: rounds.into(), step: 100 }).map(drop)
}

/// QEMU's words about its failed migration, if it says any; `otherwise` if not.
pub(crate) fn failure_words(qmp: &mut dyn Monitor, otherwise: &str) -> String {
    match qmp.run(&QueryMigrate).unwrap_or_default().error_desc {
        words if words.is_empty() => otherwise.to_owned(),
        words => words,
    }
}

const SILENT: &str = "it gives no reason; see its standard error";

impl Drop for QemuSource {
    /// Whoever only looked, gave up without a word or is in doubt leaves nothing behind either.
    fn drop(&mut self) {
        self.machine.qmp.heed(&Interrupt::default());
        // The guardian waits for the end of this process, and the guest may stand still meanwhile.
        if self.guard.is_some() && std::thread::panicking() {
            return;
        }
        let _ = self.end_disk_tracking();
        let _ = self.lift_disk_limits();
        let _ = self.restore_settings();
        let _ = self.forget_fd_set();
    }
}

//! The machine: memory, vCPUs, devices, and the state of all of them but memory.
//!
//! Who may run it is a question for whoever owns it; here it only runs, stops, saves and loads. The
//! local APICs are KVM's ("split irqchip"): there is no interrupt controller besides them, since
//! devices are polled.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use godwit_balloon::{Features, FreeHints};
use godwit_control::messages::BalloonStatus;
use godwit_memory::host_holds;
use godwit_memslots::{SlotMap, SlotReader};
use godwit_track::DirtyTracker;
use godwit_units::{ByteCount, PageCount};
use kvm_bindings::{KVM_CAP_SPLIT_IRQCHIP, kvm_clock_data, kvm_enable_cap};
use kvm_ioctls::{Cap, Kvm, VmFd};
use zerocopy::{FromBytes, IntoBytes};

use crate::balloon::BalloonDevice;
use crate::blob::{Blob, Tag, Writer};
use crate::boot_block::MAX_CPUS;
use crate::disk::Disk;
use crate::error::kvm;
use crate::guest::{self, Devices, GuestPlan};
use crate::layout::{self, BlockPlan, IDENTITY_MAP, TSS};
use crate::ram::{GuestRam, slot_count};
use crate::serial::Serial;
use crate::slots;
use crate::tracking::{TrackerKind, Tracking};
use crate::vcpu::{Bus, Vcpus};
use crate::vcpu_state;
use crate::{MicrovmError, StateError};

mod map;

use map::Map;

/// What the machine says by itself.
#[derive(Debug)]
pub enum MachineEvent {
    /// The guest switched it off.
    PoweredOff,
    /// The guest cannot go on.
    Died(MicrovmError),
    /// Somebody has asked for its end, or the guest runs elsewhere.
    Quit,
}

/// What machine to build.
#[derive(Debug)]
pub struct MachinePlan {
    /// Its memory.
    pub blocks: Vec<BlockPlan>,
    /// Into how many memory slots it is cut, at least.
    pub slots: usize,
    /// Its vCPUs.
    pub cpus: u32,
    /// The raw image of its disk, if it has one.
    pub disk: Option<PathBuf>,
    /// What its balloon takes, if it has one.
    pub balloon: Option<Features>,
    /// What knows which pages were written.
    pub tracker: TrackerKind,
}

/// The machine.
#[derive(Debug)]
pub struct Machine {
    // The order is that of the end: threads, then vCPUs and VM, then memory.
    vcpus: Vcpus,
    vm: VmFd,
    bus: Arc<Bus>,
    /// Only what plugs memory changes it, and only by whole blocks.
    map: Mutex<Map>,
    /// For those who look, and never wait for what is plugged in just now.
    reader: SlotReader,
    tracking: Tracking,
    msrs: Vec<u32>,
    running: AtomicBool,
    ended: AtomicBool,
}

impl Machine {
    /// Builds a machine whose serial line goes to `output` and that tells what happens in `events`.
    /// With a `guest` it is ready to start; without one it waits for a state.
    ///
    /// # Errors
    /// What stands against it, with the cure.
    pub fn new(
        plan: &MachinePlan,
        guest: Option<&GuestPlan>,
        output: Box<dyn Write + Send>,
        events: &Sender<MachineEvent>,
    ) -> Result<Self, MicrovmError> {
        let blocks = layout::check(plan.blocks.clone())?;
        let system = open_kvm()?;
        let most = u32::try_from(system.get_max_vcpus()).unwrap_or(u32::MAX).min(MAX_CPUS);
        if plan.cpus == 0 || plan.cpus > most {
            return Err(MicrovmError::Cpus { wanted: plan.cpus, most });
        }
        let disk = plan.disk.as_deref().map(Disk::open).transpose()?;
        let ram = Arc::new(GuestRam::new(&blocks)?);
        let vm = create_vm(&system)?;
        let mut map = Map::new(system.get_nr_memslots());
        map.check_room(ram.now().slot_count(plan.slots))?;
        let cut = ram.now().slots(plan.slots);
        // If that fails, the VM goes before the memory does.
        map.add(&cut, || slots::show(&vm, &cut, &ram.now())).map_err(|refusal| refusal.error)?;
        let (reader, map) = (map.slots.reader(), Mutex::new(map));
        // Dirty rings must be asked for before the first vCPU is made.
        let tracking = Tracking::choose(plan.tracker, &vm)?;

        let mut vcpus = Vec::new();
        for number in 0..plan.cpus {
            let vcpu = vm.create_vcpu(number.into()).map_err(kvm("KVM_CREATE_VCPU"))?;
            let cpuid = vcpu_state::cpuid(&system, number)?;
            vcpu.set_cpuid2(&cpuid).map_err(kvm("KVM_SET_CPUID2"))?;
            vcpus.push(vcpu);
        }
        let Some(first) = vcpus.first() else { return Err(MicrovmError::Cpus { wanted: 0, most }) };
        let msrs = vcpu_state::readable_msrs(&system, first)?;
        if let Some(guest) = guest {
            let tsc_khz = first.get_tsc_khz().map_err(kvm("KVM_GET_TSC_KHZ"))?;
            let devices = Devices { disk: disk.is_some(), balloon: plan.balloon };
            let entry = guest::place(&*ram, guest, plan.cpus, devices, tsc_khz)?;
            for (number, vcpu) in (0..).zip(&vcpus) {
                guest::enter(vcpu, number, entry)?;
            }
        }
        let balloon = plan.balloon.map(|features| BalloonDevice::new(features, &ram));
        let bus = Arc::new(Bus {
            ram,
            serial: Serial::new(output),
            disk,
            balloon,
            rings: OnceLock::new(),
        });
        if let Some(rings) = tracking.rings(&vm, &vcpus)? {
            let _ = bus.rings.set(rings);
        }
        let vcpus = Vcpus::start(vcpus, &bus, events)?;
        let (running, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { vcpus, bus, vm, map, reader, tracking, msrs, running, ended })
    }

    /// Its memory.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.bus.ram
    }

    /// Its memory slots, as they are.
    #[must_use]
    pub fn slots(&self) -> Arc<SlotMap> {
        self.reader.clone().snapshot()
    }

    /// Plugs `size` of memory in, in `slots` memory slots (at least one, at most one for each
    /// page), whether the guest runs or not. Returns the new block. If that fails, nothing is
    /// changed.
    ///
    /// Nobody may track the machine's writes, or be about to: a tracker goes by the blocks and
    /// slots that there were when it was started. The owner of the machine sees to that.
    pub(crate) fn plug(&self, size: ByteCount, slots: usize) -> Result<BlockPlan, MicrovmError> {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let ram = &self.bus.ram;
        let plan = layout::plugged(&ram.plans(), size)?;
        map.check_room(slot_count(size, slots))?;
        let memory = ram.with(&plan)?;
        // The new block only: what the others may still come to use was asked for by who started
        // the machine, and is no reason against a small block.
        let new = memory.blocks().last().map(std::slice::from_ref).unwrap_or_default();
        if let Err(problem) = host_holds(new, std::process::id()) {
            return Err(MicrovmError::room(size, problem));
        }
        let cut = memory.slots_of_last(slots, map.next);
        let added = map.add(&cut, || slots::show(&self.vm, &cut, &memory));
        map.settle(added, memory).map(|memory| ram.replace(memory))?;
        Ok(plan)
    }

    /// Tells the guest, which may run, to use `block`, which was plugged in. Returns whether it can
    /// be told: how is in its own memory, where it may have written anything.
    #[must_use]
    pub(crate) fn tell(&self, block: &BlockPlan) -> bool {
        guest::plug(&self.bus.ram, block.gpa, block.size.0).is_some()
    }

    /// How its writes are tracked, in words.
    #[must_use]
    pub fn tracking(&self) -> String {
        self.tracking.to_string()
    }

    /// Whether writes are tracked in this process's page tables.
    pub(crate) fn tracks_page_tables(&self) -> bool {
        matches!(self.tracking, Tracking::Pagemap)
    }

    /// Starts to track writes to its memory, those of vCPUs and of devices. Ends when the tracker
    /// is dropped, which must be before the machine is.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn start_tracking(&self) -> Result<Arc<dyn DirtyTracker>, MicrovmError> {
        self.tracking.start(&self.vm, &self.slots().to_vec(), &self.bus)
    }

    /// Whether the guest has a driver that hints free pages.
    #[must_use]
    pub fn hints_free_pages(&self) -> bool {
        self.bus.balloon.as_ref().is_some_and(BalloonDevice::can_hint)
    }

    /// Asks the guest to hint free pages to `hints`. Its writes must be tracked already. Returns
    /// whether it takes part.
    pub fn start_free_page_hints(&self, hints: &Arc<FreeHints>) -> bool {
        self.bus.balloon.as_ref().is_some_and(|balloon| balloon.start_hints(hints))
    }

    /// Tells the guest that hints are of no use any more, and to keep the pages.
    pub fn stop_free_page_hints(&self) {
        self.bus.balloon.iter().for_each(BalloonDevice::stop_hints);
    }

    /// Tells the guest that all its pages are its own again.
    pub fn finish_free_page_hints(&self) {
        self.bus.balloon.iter().for_each(BalloonDevice::finish_hints);
    }

    /// Asks the guest to give `pages` of its memory in all; zero: to take all back. Returns whether
    /// there is a balloon.
    pub fn set_balloon(&self, pages: PageCount) -> bool {
        self.bus.balloon.iter().for_each(|balloon| balloon.set_target(pages));
        self.bus.balloon.is_some()
    }

    /// What its balloon holds, if there is one.
    #[must_use]
    pub fn balloon(&self) -> Option<BalloonStatus> {
        self.bus.balloon.as_ref().map(|balloon| balloon.status(&self.bus.ram))
    }

    /// The numbers of the threads that run the vCPUs.
    #[must_use]
    pub fn vcpu_threads(&self) -> &[i32] {
        self.vcpus.tids()
    }

    /// Keeps the vCPUs from running for `share` of the time, 0.0 to 0.99, until it is set to 0.0. A
    /// device access that a vCPU has begun is completed first. The guest can be stopped, saved and
    /// run meanwhile as always.
    ///
    /// # Errors
    /// When it is no share, or the throttle has failed since the last call.
    pub fn throttle(&self, share: f64) -> Result<(), MicrovmError> {
        self.vcpus.throttle(share)
    }

    /// The CPU time that all vCPUs have consumed since they were started, together.
    #[must_use]
    pub fn vcpu_time(&self) -> Option<Duration> {
        godwit_vcpu_throttle::vcpu_time(std::process::id().cast_signed(), self.vcpus.tids())
    }

    /// Whether the vCPUs run.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    /// Its owner is about to end it, or its guest has ended: whoever moves the guest is to say so
    /// to the other side.
    pub fn set_ended(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    /// Whether that was said.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Runs the guest.
    pub fn run(&self) {
        self.running.store(true, Ordering::SeqCst);
        self.vcpus.run();
    }

    /// Stops the guest. No vCPU and no device writes memory once this returns; it says when the
    /// guest was told.
    ///
    /// # Errors
    /// When a vCPU does not stop.
    pub fn stop(&self) -> Result<Instant, MicrovmError> {
        let told = self.vcpus.stop()?;
        self.running.store(false, Ordering::SeqCst);
        Ok(told)
    }

    /// Its disk, if it has one.
    pub(crate) fn disk(&self) -> Option<&Disk> {
        self.bus.disk.as_ref()
    }

    /// Brings what the guest wrote to the disk image.
    ///
    /// # Errors
    /// When the host's disk fails.
    pub fn flush(&self) -> Result<(), MicrovmError> {
        self.bus.disk.as_ref().map_or(Ok(()), Disk::flush)
    }

    /// The state of everything but memory. The guest must be stopped.
    ///
    /// # Errors
    /// When it runs, or KVM does not tell.
    pub fn save(&self) -> Result<Vec<u8>, MicrovmError> {
        if self.is_running() {
            return Err(MicrovmError::WrongState { state: "running", cure: "stop it first" });
        }
        let mut writer = Writer::default();
        writer.section(Tag::Machine, 0, self.describe().as_bytes());
        let clock = self.vm.get_clock().map_err(kvm("KVM_GET_CLOCK"))?;
        writer.section(Tag::Clock, 0, clock.as_bytes());
        writer.section(Tag::Serial, 0, &self.bus.serial.save());
        if let Some(disk) = &self.bus.disk {
            writer.section(Tag::Disk, 0, &disk.save());
        }
        if let Some(balloon) = &self.bus.balloon {
            writer.section(Tag::Balloon, 0, &balloon.save());
        }
        for (number, vcpu) in (0..).zip(self.vcpus.fds()) {
            let vcpu = vcpu.lock().unwrap_or_else(PoisonError::into_inner);
            vcpu_state::save(&vcpu, number, &self.msrs, &mut writer)?;
        }
        Ok(writer.finish())
    }

    /// Loads a state that [`Self::save`] made. The guest must never have run here. A state that
    /// does not fit is refused before anything is changed.
    ///
    /// # Errors
    /// What does not fit, or what KVM refuses; the machine must not run then.
    pub fn load(&self, bytes: &[u8]) -> Result<(), MicrovmError> {
        if self.is_running() {
            return Err(MicrovmError::WrongState {
                state: "running",
                cure: "load into one that waits",
            });
        }
        let blob = Blob::read(bytes)?;
        self.fits(&blob)?;
        for (number, vcpu) in (0..).zip(self.vcpus.fds()) {
            let vcpu = vcpu.lock().unwrap_or_else(PoisonError::into_inner);
            vcpu_state::load(&vcpu, number, &blob)?;
        }
        self.bus.serial.load(blob.section(Tag::Serial, 0)?)?;
        if let Some(disk) = &self.bus.disk {
            disk.load(blob.section(Tag::Disk, 0)?)?;
        }
        if let Some(balloon) = &self.bus.balloon {
            balloon.load(blob.section(Tag::Balloon, 0)?)?;
        }
        let saved =
            kvm_clock_data::read_from_bytes(blob.section(Tag::Clock, 0)?).map_err(|_| {
                StateError::Malformed("the clock's section has another size".to_owned())
            })?;
        // Only the time: the flags would ask KVM to add the time that has passed since.
        let clock = kvm_clock_data { clock: saved.clock, ..Default::default() };
        self.vm.set_clock(&clock).map_err(kvm("KVM_SET_CLOCK"))
    }

    /// What both sides must agree on, a line each.
    fn describe(&self) -> String {
        let mut text = format!("cpus {}\n", self.vcpus.fds().len());
        text += if self.bus.disk.is_some() { "disk yes\n" } else { "disk no\n" };
        text += &match self.bus.balloon.as_ref().map(BalloonDevice::features) {
            None => "balloon no\n".to_owned(),
            Some(Features { hints, reporting }) => {
                format!("balloon hints={hints} reporting={reporting}\n")
            }
        };
        for BlockPlan { name, gpa, size, .. } in self.bus.ram.plans() {
            let size = size.0;
            text += &format!("block {name} at {gpa:#x} of {size:#x}\n");
        }
        text
    }

    fn fits(&self, blob: &Blob<'_>) -> Result<(), StateError> {
        let theirs = String::from_utf8_lossy(blob.section(Tag::Machine, 0)?);
        let own = self.describe();
        if theirs == own {
            return Ok(());
        }
        let differ = |one: &str, other: &str| {
            let lines: Vec<_> =
                one.lines().filter(|line| !other.lines().any(|found| found == *line)).collect();
            if lines.is_empty() { "nothing more".to_owned() } else { lines.join(", ") }
        };
        Err(StateError::Misfit(format!(
            "the source has {}, this machine has {}: start both with the same --cpus, --memory, \
             --block, --disk and --balloon, and plug the same memory in",
            differ(&theirs, &own),
            differ(&own, &theirs)
        )))
    }
}

fn open_kvm() -> Result<Kvm, MicrovmError> {
    let system = Kvm::new()
        .map_err(|error| MicrovmError::NoKvm(std::io::Error::from_raw_os_error(error.errno())))?;
    if system.get_api_version() != 12 {
        return Err(MicrovmError::Capability("version 12 of its interface"));
    }
    for (cap, name) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::SplitIrqchip, "KVM_CAP_SPLIT_IRQCHIP"),
        (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
        (Cap::Xsave, "KVM_CAP_XSAVE"),
        (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    ] {
        if !system.check_extension(cap) {
            return Err(MicrovmError::Capability(name));
        }
    }
    Ok(system)
}

fn create_vm(system: &Kvm) -> Result<VmFd, MicrovmError> {
    let vm = system.create_vm().map_err(kvm("KVM_CREATE_VM"))?;
    vm.set_identity_map_address(IDENTITY_MAP).map_err(kvm("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(TSS as usize).map_err(kvm("KVM_SET_TSS_ADDR"))?;
    let split =
        kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, args: [24, 0, 0, 0], ..Default::default() };
    vm.enable_cap(&split).map_err(kvm("KVM_CAP_SPLIT_IRQCHIP"))?;
    Ok(vm)
}

#[cfg(test)]
mod tests;

//! The vCPU threads: they run the guest, hand its accesses to the devices, and stop and go on when
//! told.
//!
//! Invariant: a vCPU counts as stopped only after KVM_RUN has returned without an exit to be dealt
//! with. For the instruction that caused an exit is complete only when KVM_RUN has been entered
//! again (Documentation/virt/kvm/api.rst, KVM_RUN: "userspace can re-enter the guest with an
//! unmasked signal pending or with the immediate_exit field set to complete pending operations
//! without allowing any further instructions to be executed"). The same is true of a vCPU that is
//! held for a while to slow it down (`throttle`).
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_track::KvmDirtyRings;
use godwit_vcpu_throttle::Slices;
use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::balloon::BalloonDevice;
use crate::boot_block::{BALLOON_MMIO, DISK_MMIO, POWER_OFF_PORT, SLEEP_PORT};
use crate::disk::Disk;
use crate::ram::GuestRam;
use crate::serial::{self, Serial};
use crate::throttle::{Hold, Throttle};
use crate::{MachineEvent, MicrovmError};

/// A vCPU leaves the guest within microseconds; a host without a processor to spare takes longer.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Registers and configuration space of a device; devices begin at multiples of it.
const MMIO_SIZE: u64 = 0x1000;
/// The guest may ask for more and gets this.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// What the vCPUs reach outside of themselves.
#[derive(Debug)]
pub(crate) struct Bus {
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) serial: Serial,
    pub(crate) disk: Option<Disk>,
    pub(crate) balloon: Option<BalloonDevice>,
    /// The vCPUs' dirty rings, where the machine has such.
    pub(crate) rings: OnceLock<Arc<KvmDirtyRings>>,
}

impl Bus {
    /// The guest reads a register of a device. Where there is none it reads zeros.
    fn read(&self, address: u64, bytes: &mut [u8]) {
        let offset = address % MMIO_SIZE;
        match (address - offset, &self.disk, &self.balloon) {
            (DISK_MMIO, Some(disk), _) => disk.read(offset, bytes),
            (BALLOON_MMIO, _, Some(balloon)) => balloon.read(offset, bytes),
            _ => {}
        }
    }

    /// The guest writes one.
    fn write(&self, address: u64, bytes: &[u8]) {
        let offset = address % MMIO_SIZE;
        match (address - offset, &self.disk, &self.balloon) {
            (DISK_MMIO, Some(disk), _) => disk.write(offset, bytes, &self.ram),
            (BALLOON_MMIO, _, Some(balloon)) => balloon.write(offset, bytes, &self.ram),
            _ => {}
        }
    }
}

/// What all vCPU threads should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Stop,
    Run,
    End,
}

#[derive(Debug)]
struct Shared {
    wish: Mutex<Wish>,
    changed: Condvar,
    /// The same as `wish == Run`, for the threads to look at without the lock.
    run: AtomicBool,
    /// Whether vCPUs that should run wait for a moment all the same. Changed under the lock of
    /// `wish`.
    held: AtomicBool,
    /// The end of that wait. Not the same as `changed`, which ends a sleep of the guest.
    freed: Condvar,
    stopped: Mutex<usize>,
    all_stopped: Condvar,
}

/// The vCPUs and their threads.
#[derive(Debug)]
pub(crate) struct Vcpus {
    shared: Arc<Shared>,
    throttle: Mutex<Option<Throttle>>,
    fds: Vec<Arc<Mutex<VcpuFd>>>,
    kicks: Vec<Kick>,
    threads: Vec<JoinHandle<()>>,
    tids: Vec<i32>,
}

/// The `immediate_exit` field of a vCPU's `struct kvm_run`, which lives as long as its descriptor.
#[derive(Debug, Clone)]
struct Kick {
    field: *const AtomicU8,
    /// Keeps the descriptor open, and with it the field in place.
    _fd: Arc<Mutex<VcpuFd>>,
}

// SAFETY: the field is one byte of memory that is shared with the kernel, used atomically from any
// thread.
unsafe impl Send for Kick {}
// SAFETY: as above.
unsafe impl Sync for Kick {}

impl Kick {
    fn set(&self, value: u8) {
        // SAFETY: `_fd` keeps the descriptor, and with it the mapping.
        unsafe { (*self.field).store(value, Ordering::SeqCst) }
    }
}

/// Its only purpose is to interrupt KVM_RUN.
extern "C" fn kicked(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vcpus {
    /// Starts a thread for each of `fds`; all are stopped at first.
    pub(crate) fn start(
        fds: Vec<VcpuFd>,
        bus: &Arc<Bus>,
        events: &Sender<MachineEvent>,
    ) -> Result<Self, MicrovmError> {
        register_signal_handler(SIGRTMIN(), kicked).map_err(|error| MicrovmError::System {
            action: "install a signal handler",
            source: std::io::Error::from_raw_os_error(error.errno()),
        })?;
        let shared = Arc::new(Shared {
            wish: Mutex::new(Wish::Stop),
            changed: Condvar::new(),
            run: AtomicBool::new(false),
            held: AtomicBool::new(false),
            freed: Condvar::new(),
            stopped: Mutex::new(fds.len()),
            all_stopped: Condvar::new(),
        });
        let mut vcpus = Self {
            shared,
            throttle: Mutex::default(),
            fds: Vec::new(),
            kicks: Vec::new(),
            threads: Vec::new(),
            tids: Vec::new(),
        };
        for (number, mut fd) in fds.into_iter().enumerate() {
            let field = (&raw const fd.get_kvm_run().immediate_exit).cast::<AtomicU8>();
            let fd = Arc::new(Mutex::new(fd));
            let kick = Kick { field, _fd: Arc::clone(&fd) };
            let thread = Thread {
                number,
                shared: Arc::clone(&vcpus.shared),
                bus: Arc::clone(bus),
                events: events.clone(),
                kick: kick.clone(),
            };
            let own = Arc::clone(&fd);
            let (tid_in, tid) = std::sync::mpsc::channel();
            let run = move || {
                let _ = tid_in.send(rustix::thread::gettid().as_raw_nonzero().get());
                thread.run(&own);
            };
            let name = format!("vcpu{number}");
            let handle = std::thread::Builder::new().name(name).spawn(run);
            vcpus.threads.push(handle.map_err(crate::error::system("start a vCPU thread"))?);
            vcpus.tids.extend(tid.recv().ok());
            vcpus.fds.push(fd);
            vcpus.kicks.push(kick);
        }
        Ok(vcpus)
    }

    /// Their descriptors. A lock is free while the vCPU is stopped.
    pub(crate) fn fds(&self) -> &[Arc<Mutex<VcpuFd>>] {
        &self.fds
    }

    /// The threads' numbers.
    pub(crate) fn tids(&self) -> &[i32] {
        &self.tids
    }

    pub(crate) fn run(&self) {
        self.wish(Wish::Run);
    }

    /// Keeps the vCPUs from running for `share` of the time; 0 removes the throttle. They can be
    /// stopped under it as fast as without.
    pub(crate) fn throttle(&self, share: f64) -> Result<(), MicrovmError> {
        let slices = Slices::of(share)?;
        let mut throttle = lock(&self.throttle);
        match (&*throttle, slices) {
            (Some(throttle), Some(slices)) if throttle.set(slices) => return Ok(()),
            (Some(_), Some(_)) => {
                *throttle = None;
                let source = std::io::Error::other("its thread has ended");
                return Err(MicrovmError::System {
                    action: "throttle the guest, which runs at full speed",
                    source,
                });
            }
            (_, None) => *throttle = None,
            (None, Some(slices)) => {
                let holder = Holder {
                    shared: Arc::clone(&self.shared),
                    kicks: self.kicks.clone(),
                    tids: self.tids.clone(),
                };
                let started = Throttle::start(holder, slices);
                *throttle =
                    Some(started.map_err(crate::error::system("start a thread for the throttle"))?);
            }
        }
        Ok(())
    }

    /// Stops all vCPUs; returns when the first of them was told.
    pub(crate) fn stop(&self) -> Result<Instant, MicrovmError> {
        let told = Instant::now();
        self.wish(Wish::Stop);
        self.kick();
        let mut stopped = lock(&self.shared.stopped);
        while *stopped < self.threads.len() {
            let left = STOP_LIMIT.saturating_sub(told.elapsed());
            if left.is_zero() {
                let source = std::io::ErrorKind::TimedOut.into();
                return Err(MicrovmError::System { action: "stop all vCPUs", source });
            }
            let waited = self.shared.all_stopped.wait_timeout(stopped, left);
            stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(told)
    }

    fn wish(&self, wish: Wish) {
        let mut current = lock(&self.shared.wish);
        if *current != Wish::End {
            *current = wish;
            self.shared.run.store(wish == Wish::Run, Ordering::SeqCst);
        }
        self.shared.changed.notify_all();
        self.shared.freed.notify_all();
    }

    /// Makes every vCPU look at the wish. The field is for one that is about to enter the guest,
    /// the signal for one that is in it.
    fn kick(&self) {
        for (kick, thread) in self.kicks.iter().zip(&self.threads) {
            kick.set(1);
            // A thread that has ended cannot be signalled and need not be.
            let _ = thread.kill(SIGRTMIN());
        }
    }
}

/// What holds the vCPUs and lets them go, for the throttle's thread. It ends before the threads do,
/// so their numbers are theirs. Dropping it lets go: that thread cannot leave anybody held.
#[derive(Debug)]
struct Holder {
    shared: Arc<Shared>,
    kicks: Vec<Kick>,
    tids: Vec<i32>,
}

impl Hold for Holder {
    fn hold(&self) {
        {
            let _wish = lock(&self.shared.wish);
            self.shared.held.store(true, Ordering::SeqCst);
        }
        for (kick, tid) in self.kicks.iter().zip(&self.tids) {
            kick.set(1);
            // SAFETY: tgkill takes three numbers; the handler of the signal does nothing.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *tid, SIGRTMIN()) };
        }
    }

    fn free(&self) {
        let _wish = lock(&self.shared.wish);
        self.shared.held.store(false, Ordering::SeqCst);
        self.shared.freed.notify_all();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.free();
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        // First, since it signals the threads.
        *lock(&self.throttle) = None;
        self.wish(Wish::End);
        self.kick();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

struct Thread {
    number: usize,
    shared: Arc<Shared>,
    bus: Arc<Bus>,
    events: Sender<MachineEvent>,
    kick: Kick,
}

impl Thread {
    fn run(self, fd: &Mutex<VcpuFd>) {
        // Without this a sleep takes 50 µs longer than the guest asks for. It is refused to nobody.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
        while self.await_wish() {
            let outcome = self.run_guest(&mut lock(fd));
            *lock(&self.shared.stopped) += 1;
            self.shared.all_stopped.notify_all();
            if let Err(event) = outcome {
                // Nobody listens at the very end.
                let _ = self.events.send(event);
                self.rest();
            }
        }
    }

    /// Waits until the guest should run; `false` at the end. It counts as running before the wish
    /// can change again.
    fn await_wish(&self) -> bool {
        let mut wish = lock(&self.shared.wish);
        loop {
            match *wish {
                Wish::Run => {
                    *lock(&self.shared.stopped) -= 1;
                    return true;
                }
                Wish::End => return false,
                Wish::Stop => {
                    wish = self.shared.changed.wait(wish).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// A vCPU that cannot go on waits for the end.
    fn rest(&self) {
        let mut wish = lock(&self.shared.wish);
        while *wish != Wish::End {
            wish = self.shared.changed.wait(wish).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run_guest(&self, fd: &mut VcpuFd) -> Result<(), MachineEvent> {
        loop {
            let what = match fd.run() {
                Ok(VcpuExit::IoOut(port, bytes)) => match port {
                    port if serial::PORTS.contains(&port) => {
                        self.bus.serial.write(port, bytes);
                        continue;
                    }
                    SLEEP_PORT => {
                        let micros =
                            bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
                        self.sleep(Duration::from_micros(micros).min(LONGEST_SLEEP));
                        continue;
                    }
                    POWER_OFF_PORT => return Err(MachineEvent::PoweredOff),
                    _ => continue,
                },
                Ok(VcpuExit::IoIn(port, bytes)) => {
                    let known = serial::PORTS.contains(&port);
                    bytes.fill(if known { self.bus.serial.read(port) } else { 0xff });
                    continue;
                }
                Ok(VcpuExit::MmioRead(address, bytes)) => {
                    bytes.fill(0);
                    self.bus.read(address, bytes);
                    continue;
                }
                Ok(VcpuExit::MmioWrite(address, bytes)) => {
                    self.bus.write(address, bytes);
                    continue;
                }
                Ok(VcpuExit::Intr) => {
                    if self.goes_on() {
                        continue;
                    }
                    return Ok(());
                }
                Err(error) if error.errno() == libc::EINTR => {
                    if self.goes_on() {
                        continue;
                    }
                    return Ok(());
                }
                Err(error) if error.errno() == libc::EAGAIN => continue,
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    if let Some(rings) = self.bus.rings.get() {
                        // The next harvest fails with the same error and ends the migration; the
                        // guest runs on.
                        let _ = rings.make_room(self.number);
                    }
                    continue;
                }
                Ok(VcpuExit::Shutdown) => {
                    "shut down by a triple fault: an exception whose handler cannot be reached"
                        .to_owned()
                }
                Ok(VcpuExit::FailEntry(reason, _)) => {
                    format!(
                        "cannot be entered: the processor refuses its state, reason {reason:#x}"
                    )
                }
                Ok(VcpuExit::InternalError) => {
                    "met an instruction that KVM can neither run nor emulate here".to_owned()
                }
                Ok(exit) => format!("left the guest for a reason that nobody handles: {exit:?}"),
                Err(error) => format!("cannot run: {error}"),
            };
            let rip = fd.get_regs().map_or(0, |regs| regs.rip);
            return Err(MachineEvent::Died(MicrovmError::GuestDied {
                cpu: self.number,
                what,
                rip,
            }));
        }
    }

    /// Sleeps for the guest, until `time` is over or the wish changes.
    fn sleep(&self, time: Duration) {
        let wish = lock(&self.shared.wish);
        if *wish == Wish::Run {
            drop(
                self.shared
                    .changed
                    .wait_timeout(wish, time)
                    .unwrap_or_else(PoisonError::into_inner),
            );
        }
    }

    /// Whether a vCPU that was interrupted goes on, when it is not held any longer. The field is
    /// cleared before the wish is looked at: a wish that comes in between sets it again.
    fn goes_on(&self) -> bool {
        self.kick.set(0);
        if self.shared.held.load(Ordering::SeqCst) {
            let mut wish = lock(&self.shared.wish);
            while *wish == Wish::Run && self.shared.held.load(Ordering::SeqCst) {
                wish = self.shared.freed.wait(wish).unwrap_or_else(PoisonError::into_inner);
            }
        }
        self.shared.run.load(Ordering::SeqCst)
    }
}

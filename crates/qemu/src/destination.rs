//! A stock QEMU as the destination, started with `-incoming defer`.
//!
//! It loads the device state from a socket pair and stays paused, since it was told `stop` while it
//! waited. From `migrate-incoming` on it cannot be used for another attempt: QEMU exits when its
//! incoming migration fails.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_bitmap::DirtyBitmap;
use godwit_disk::{Disk, DiskChoice, DiskReader, DiskSink};
use godwit_engine::Interrupt;
use godwit_engine::vm::{
    ArrivingPages, Ask, DestinationVm, DiskDestination, Kept, PostCopyDestination, RunError,
    VmError,
};
use godwit_memory::RamBlock;
use godwit_track::MissingPages;

use crate::QemuError;
use crate::cards::Inlets;
use crate::compare::{self, Realized};
use crate::disks::{self, Receiving};
use crate::guard::{self, Guard, Left, Stage};
use crate::machine::Machine;
use crate::mark::{INCOMING, record_in};
use crate::monitor::commands::{Cont, MigrateIncoming, Quit, Stop};
use crate::monitor::{COMMAND_LIMIT, QmpError, STEP, Seen};
use crate::post_copy::{self, Known};
use crate::ram::{self, Ram};
use crate::rank;
use crate::settings::MigrationSettings;
use crate::source::{ANNOUNCED, FD_NAME, announce, failure_words, migration_event};
use crate::upgrade::{InPlace, Successor};

/// Loading takes milliseconds; a device that opens a slow disk may take longer.
const LOAD_LIMIT: Duration = Duration::from_secs(30);
/// From `quit` to the end of the process.
const QUIT_LIMIT: Duration = Duration::from_secs(5);
/// One write of device state without progress.
const WRITE_LIMIT: Duration = Duration::from_secs(20);

/// QEMU reports why it could not load on its standard error only, and exits.
const EXITED: &str = "it has exited; see its standard error (do the options of both sides agree?)";

/// A QEMU that waits for a guest.
#[derive(Debug)]
pub struct QemuDestination {
    machine: Machine,
    /// What the machine was made with, asked for before a guest is on its way.
    realized: Realized,
    ram: Arc<Vec<RamBlock>>,
    settings: Option<MigrationSettings>,
    /// Whether it was told to load: it then ends with this attempt.
    prepared: bool,
    /// What ends the long calls.
    interrupt: Interrupt,
    /// The disks that are being received.
    receiving: Option<Receiving>,
    /// What sees to the machine when this process is killed.
    guard: Option<Guard>,
    /// Whether it was started for this attempt alone, and ends with it.
    owned: bool,
    /// How often the network is told of the guest, if not as QEMU would.
    announce: Option<u16>,
    /// The ways to the guest's cards, from when a guest is on its way.
    inlets: Option<Inlets>,
    /// The guest's memory, where the source is on this host and may share it.
    in_place: Option<Arc<InPlace>>,
    /// What was found out for the case that pages come to be missing.
    known: Option<Known>,
    /// Pages that are awaited.
    coming: Option<Arc<MissingPages>>,
}

/// Where device state is written to.
struct StateSink {
    stream: UnixStream,
    interrupt: Interrupt,
}

impl Write for StateSink {
    /// A QEMU that reads nothing is waited for as long as [`WRITE_LIMIT`], or until nobody waits.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let began = Instant::now();
        loop {
            match self.stream.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.interrupt.is_raised() || began.elapsed() >= WRITE_LIMIT {
                        return Err(error);
                    }
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl QemuDestination {
    /// Looks at the QEMU behind the monitor at `path`. Changes nothing, but for the removal of what
    /// a godwit that was killed has left there.
    ///
    /// # Errors
    /// When it does not wait for a migration, or its RAM is not in shared named files.
    pub fn open(path: &Path) -> Result<Self, QemuError> {
        Self::look(guard::connect(path)?, None)
    }

    /// The same, of a QEMU that was started for this attempt alone and whose first answers may come
    /// until then; and that is to have the memory of its source, where that stays in place.
    pub(crate) fn open_started(
        path: &Path,
        (until, interrupt): (Instant, &Interrupt),
        memory: Option<Arc<InPlace>>,
    ) -> Result<Self, QemuError> {
        let machine = guard::connect_started(path, until, interrupt)?;
        let mut vm = Self::look(machine, memory)?;
        vm.owned = true;
        Ok(vm)
    }

    fn look(mut machine: Machine, in_place: Option<Arc<InPlace>>) -> Result<Self, QemuError> {
        let state = machine.run_state()?;
        if state != "inmigrate" {
            return Err(QemuError::NotIncoming { state: format!("its state is '{state}'") });
        }
        let migration = machine.migration_state()?;
        if !matches!(migration.as_str(), "" | "none") {
            return Err(QemuError::NotIncoming {
                state: format!("its incoming migration is '{migration}' already"),
            });
        }
        let ram = Ram::main(&mut machine, false)?;
        // Pages written to a file that QEMU has not mapped would reach nobody, and digests of both
        // files would still agree. The other way round, another machine's memory must not be
        // overwritten.
        machine.check_mappings(&ram)?;
        let old: Vec<i32> = in_place.iter().map(|memory| memory.old()).collect();
        if in_place.as_ref().is_none_or(|memory| !memory.is_copied()) {
            machine.check_writers(&ram, &old)?;
        }
        disks::clear(&mut machine)?;
        guard::clear(&mut machine)?;
        if let Some(memory) = &in_place {
            memory.check_same(&ram)?;
            memory.found(Successor { pid: machine.pid, version: machine.qmp.version() });
        }
        let ram = match &in_place {
            Some(memory) => memory.without_staying(ram),
            None => ram,
        };
        if in_place.is_some() {
            // What is written to is nobody else's, and not the old QEMU's either.
            machine.check_writers(&ram, &[])?;
        }
        let realized = Realized::of(&mut *machine.qmp)?;
        Ok(Self {
            machine,
            realized,
            ram: Arc::new(ram),
            in_place,
            settings: None,
            prepared: false,
            interrupt: Interrupt::default(),
            receiving: None,
            guard: None,
            owned: false,
            announce: None,
            inlets: None,
            known: None,
            coming: None,
        })
    }

    /// The same, which tells the network where the guest is in so many rounds; `None`: as QEMU is
    /// set, and five more of Godwit's.
    #[must_use]
    pub fn announcing(mut self, rounds: Option<u16>) -> Self {
        self.announce = rounds;
        self
    }

    /// The same with a guardian, as [`crate::QemuSource::guarded`]: a guest that was handed over
    /// runs, and one that was not never does, also when this process is killed.
    ///
    /// # Errors
    /// When it does not start.
    pub fn guarded(mut self, program: &Path) -> Result<Self, QemuError> {
        let mut left = Left { started: self.owned, ..Left::at(Stage::Waiting, false) };
        if let Some(memory) = &self.in_place {
            left.handover = Some(memory.handover().to_owned());
            left.staged = memory.names().map(|(_, staged)| staged.to_owned()).collect();
        }
        self.guard = Some(Guard::start(program, &self.machine, left)?);
        Ok(self)
    }

    /// Writes down, for the guardian, what is about to be done or was undone.
    fn note(&mut self, change: impl FnOnce(&mut Left)) -> Result<(), QemuError> {
        self.guard.as_mut().map_or(Ok(()), |guard| guard.note(change))
    }

    /// Refuses a choice of disks that names what the VM does not have: before anything is waited
    /// for.
    ///
    /// # Errors
    /// Names the one, and those that there are.
    pub fn check_disks(&mut self, allowed: &DiskChoice) -> Result<(), QemuError> {
        let DiskChoice::Named(names) = allowed else { return Ok(()) };
        let drives = disks::drives(&mut *self.machine.qmp)?;
        names.iter().try_for_each(|name| disks::by_name(&drives, name).map(|_| ()))
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.machine.pid
    }

    /// The record in `directory` by which another godwit takes this guest in: no other QEMU has
    /// it. Those there of QEMUs of this host that have ended are removed.
    #[must_use]
    pub fn record_in(&self, directory: &Path) -> PathBuf {
        record_in(directory, self.pid(), INCOMING)
    }

    /// Arranges its RAM for a source that stays with some of it, and offers `blocks`.
    fn fit_in_place(&mut self, memory: &InPlace, blocks: &BTreeSet<&str>) -> Result<(), QemuError> {
        // Its RAM is what it is, and was looked at.
        if memory.is_whole() {
            return Ok(());
        }
        let own = Ram::main(&mut self.machine, false)?;
        let all = blocks.iter().copied().chain(memory.staying()).collect();
        let fitted = ram::fitted(&mut self.machine, &own, &all)?;
        let ram = fitted.unwrap_or(own);
        self.machine.check_mappings(&ram)?;
        memory.check_same(&ram)?;
        let ram = memory.without_staying(ram);
        self.machine.check_writers(&ram, &[])?;
        self.ram = Arc::new(ram);
        Ok(())
    }

    /// Whether it still waits for a guest, so that another attempt can use it.
    #[must_use]
    pub fn still_waits(&self) -> bool {
        !self.prepared && !self.machine.process.has_ended()
    }
}

impl DestinationVm for QemuDestination {
    fn machine(&self) -> &'static str {
        "qemu"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn offered(&mut self, blocks: &BTreeSet<&str>, _ask: &mut Ask<'_>) -> Result<(), VmError> {
        if let Some(memory) = self.in_place.clone() {
            return Ok(self.fit_in_place(&memory, blocks)?);
        }
        if let Some(ram) = ram::fitted(&mut self.machine, &self.ram, blocks)? {
            self.machine.check_mappings(&ram)?;
            self.machine.check_writers(&ram, &[])?;
            self.ram = Arc::new(ram);
        }
        Ok(())
    }

    fn pid(&self) -> u32 {
        self.machine.pid.unsigned_abs()
    }

    fn heed(&mut self, interrupt: &Interrupt) {
        self.interrupt = interrupt.clone();
        self.machine.qmp.heed(interrupt);
    }

    fn compare(&mut self, ask: &mut Ask<'_>) -> Result<(), VmError> {
        compare::compare(&mut self.machine, &self.realized, ask)
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        let (ours, theirs) = UnixStream::pair()
            .map_err(|source| QemuError::System { step: "socketpair", source })?;
        ours.set_write_timeout(Some(STEP))
            .map_err(|source| QemuError::System { step: "SO_SNDTIMEO", source })?;
        if let Some(guard) = &mut self.guard {
            guard.renew(&self.machine)?;
        }
        let settings = MigrationSettings::look(&mut *self.machine.qmp, self.announce)?;
        self.note(|left| (left.stage, left.settings) = (Stage::Loading, Some(settings.clone())))?;
        self.prepared = true;
        let Machine { qmp, pid, .. } = &mut self.machine;
        let qmp = &mut **qmp;
        // Behind the guest there is no time for that.
        self.inlets = Some(Inlets::of(qmp, *pid));
        self.settings.insert(settings).apply(qmp).map_err(QemuError::from)?;
        // While it waits this only clears the wish to start by itself after loading.
        qmp.run(&Stop)?;
        qmp.pass_fd(FD_NAME, theirs.as_fd())?;
        // What came before the load says nothing of it.
        qmp.take_events()?;
        qmp.run(&MigrateIncoming { uri: &format!("fd:{FD_NAME}") })?;
        Ok(Box::new(StateSink { stream: ours, interrupt: self.interrupt.clone() }))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        self.await_load()?;
        // Before the guest may become its own: behind that nobody might be left to do it.
        if self.owned {
            let like = self.in_place.as_ref().map(|memory| memory.old());
            rank::leave_first(self.machine.pid, like)
                .map_err(|source| QemuError::System { step: "writing oom_score_adj", source })?;
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.machine.process.has_ended()
    }

    fn taking_over(&mut self) -> Result<(), VmError> {
        // First: both guardians go by it.
        if let Some(memory) = &self.in_place {
            memory.hand_over()?;
        }
        Ok(self.note(|left| left.stage = Stage::Starting)?)
    }

    fn run(&mut self) -> Result<(), RunError> {
        let qmp = &mut *self.machine.qmp;
        let never = |error: QmpError| RunError::NeverRan(error.into());
        let cont = qmp.start(&Cont).map_err(|error| match error {
            // QEMU had closed its end before the command was written.
            QmpError::Closed { .. } => never(error),
            error => RunError::Unknown(error.into()),
        })?;
        match qmp.answer(&cont, COMMAND_LIMIT) {
            Ok(_) => Ok(()),
            // Of what comes behind the command only a refusal says that no instruction was
            // executed; silence and a crash do not.
            Err(error @ QmpError::Refused { .. }) => Err(never(error)),
            Err(error) => Err(RunError::Unknown(error.into())),
        }
    }

    fn announce(&mut self) -> Result<(), VmError> {
        let rounds = self.announce.unwrap_or(ANNOUNCED);
        let announced = announce(&mut *self.machine.qmp, rounds);
        if self.owned {
            // What must not wait was done before: QEMU itself, and the network.
            rank::leave_first_below(self.machine.pid);
        }
        if let Some(settings) = self.settings.take() {
            settings.restore(&mut *self.machine.qmp)?;
        }
        // The guest runs and nothing is left to undo.
        let _ = self.note(|left| *left = Left::at(Stage::Waiting, false));
        Ok(announced?)
    }

    fn deliver(&mut self, packet: Vec<u8>) -> Result<(), VmError> {
        self.inlets.as_ref().ok_or("nobody has looked for its cards")?.put(packet)
    }

    fn discard(&mut self) -> Result<(), VmError> {
        // A QEMU that only had pages written into its RAM goes on waiting: another attempt
        // overwrites them all.
        if !self.prepared && !self.owned {
            // A QEMU that does not answer may have died, and then nothing is open any more.
            return match self.stop_receiving() {
                Err(QmpError::Closed { .. }) | Ok(()) => Ok(()),
                Err(error) => Err(error.into()),
            };
        }
        // It ends all the same if this cannot be written: it must not run.
        let _ = self.note(|left| left.stage = Stage::Discarding);
        // One that lacks pages may wait for one itself, and would do as it is told when that comes.
        match self.coming {
            // Who may not kill it asks after all.
            Some(_) => kill(&mut self.machine).or_else(|_| end(&mut self.machine))?,
            None => end(&mut self.machine)?,
        }
        let _ = self.note(|left| *left = Left::at(Stage::Waiting, false));
        Ok(())
    }

    fn disk_destination(&mut self) -> Option<&mut dyn DiskDestination> {
        Some(self)
    }

    fn post_copy(&mut self) -> Option<&mut dyn PostCopyDestination> {
        // The old QEMU is as near as the memory, and its guest stays in it until all is there.
        if self.in_place.is_none() { Some(self) } else { None }
    }
}

impl PostCopyDestination for QemuDestination {
    fn cannot_await(&mut self) -> Option<String> {
        post_copy::refusal(&mut self.machine, &self.ram)
    }

    fn get_ready(&mut self) {
        // Whatever stands against it now is found again, and told, if it comes to that.
        self.known = Known::look_at(self.machine.pid).ok();
    }

    fn await_pages(
        &mut self,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Arc<dyn ArrivingPages>, VmError> {
        let known = self.known.take().map_or_else(|| Known::look_at(self.machine.pid), Ok)?;
        let pages = known.await_pages(&mut self.machine, &self.ram, &missing)?;
        (self.known, self.coming) = (Some(known), Some(Arc::clone(&pages)));
        Ok(pages)
    }

    fn kept(&self) -> Option<Kept> {
        let (known, pages) = self.known.as_ref().zip(self.coming.as_ref())?;
        Some(known.kept(pages, &self.ram))
    }
}

impl DiskDestination for QemuDestination {
    fn open_disks(
        &mut self,
        wanted: &[Disk],
        allowed: &DiskChoice,
    ) -> Result<Vec<Box<dyn DiskSink>>, VmError> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        self.stop_receiving()?;
        self.note(|left| left.disks = true)?;
        let (receiving, sinks) = Receiving::open(&mut self.machine, wanted, allowed)?;
        self.receiving = Some(receiving);
        Ok(sinks)
    }

    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        Ok(self.receiving.as_ref().map_or(Ok(Vec::new()), Receiving::read)?)
    }

    fn close_disks(&mut self) -> Result<(), VmError> {
        // The devices claim their disks when the guest runs, and a writable export would be in the
        // way.
        Ok(self.stop_receiving()?)
    }
}

impl QemuDestination {
    /// Waits until it has loaded the device state.
    fn await_load(&mut self) -> Result<(), VmError> {
        let mut ran = false;
        let qmp = &mut *self.machine.qmp;
        let ended = |words: &str| QemuError::State { action: "load", words: words.to_owned() };
        let what = "the end of its incoming migration";
        let reached = qmp.watch(what, LOAD_LIMIT, &mut |event| {
            ran |= event.name == "RESUME";
            let ended = migration_event(event);
            if matches!(ended.as_str(), "failed" | "completed") {
                Seen::Awaited
            } else {
                Seen::TakenIn
            }
        });
        match reached {
            // Told to stop while it waited, it must not have started by itself. The event tells, at
            // no cost in downtime.
            Ok(_) if ran => Err(ended("it ran the guest although it was told not to").into()),
            Ok(event) if migration_event(&event) == "completed" => Ok(()),
            Ok(_) => Err(ended(&failure_words(qmp, EXITED)).into()),
            Err(QmpError::Closed { .. }) => Err(ended(EXITED).into()),
            Err(error) => Err(error.into()),
        }
    }

    fn stop_receiving(&mut self) -> Result<(), QmpError> {
        let Some(receiving) = self.receiving.take() else { return Ok(()) };
        receiving.close(&mut *self.machine.qmp)?;
        let _ = self.note(|left| left.disks = false);
        Ok(())
    }
}

/// Ends QEMU, whose guest must never run, and waits until the process has ended. Only then can it
/// never run here.
pub(crate) fn end(machine: &mut Machine) -> Result<(), QemuError> {
    let _ = machine.qmp.run(&Quit);
    let undead = |source| QemuError::Undead { pid: machine.pid, source };
    if machine.process.ends_within(QUIT_LIMIT).map_err(undead)? {
        return Ok(());
    }
    kill(machine)
}

/// The same of one that need not be asked.
fn kill(machine: &mut Machine) -> Result<(), QemuError> {
    let undead = |source| QemuError::Undead { pid: machine.pid, source };
    machine.process.kill().map_err(undead)?;
    if machine.process.ends_within(QUIT_LIMIT).map_err(undead)? {
        return Ok(());
    }
    Err(undead(rustix::io::Errno::TIMEDOUT.into()))
}

impl Drop for QemuDestination {
    fn drop(&mut self) {
        self.machine.qmp.heed(&Interrupt::default());
        // The guardian waits for the end of this process.
        if self.guard.is_some() && std::thread::panicking() {
            return;
        }
        let _ = self.stop_receiving();
    }
}

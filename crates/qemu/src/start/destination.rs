//! A destination that is started when a source has come and told what it is.
//!
//! Invariant: a QEMU that does not come to run the guest ends, whatever becomes of this process;
//! one that does is nobody's child and needs nobody.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use godwit_disk::DiskChoice;
use godwit_engine::Interrupt;
use godwit_engine::vm::{
    Ask, DestinationVm, DiskDestination, PostCopyDestination, RunError, VmError,
};
use godwit_memory::RamBlock;

use super::carry::{Carried, carry, shown};
use super::description::{Description, QUESTION};
use super::in_place::{by_command, carry_in_place};
use super::launch::{self, Files};
use super::mapping::Mapping;
use super::refused;
use crate::upgrade::InPlace;
use crate::{QemuDestination, QemuError};

/// What the operator shows, and hears.
#[derive(Clone, Debug)]
pub enum Shown {
    /// What is about to be started.
    CommandLine {
        /// As a shell takes it, without secrets.
        words: String,
        /// Options of the source's that are left out.
        left_out: Vec<String>,
    },
    /// It was started.
    Started {
        /// Its process.
        pid: i32,
        /// Its monitor, which stays.
        monitor: PathBuf,
        /// What it writes to standard output and error.
        log: PathBuf,
    },
}

/// How a destination is made.
pub struct StartTerms {
    /// The QEMU to start, where it is not the one that is called as the source's is.
    pub emulator: Option<PathBuf>,
    /// Which paths of the source's are which here.
    pub mappings: Vec<Mapping>,
    /// Programs that QEMU may run, by their whole paths.
    pub scripts: Vec<PathBuf>,
    /// Show what would be started, and refuse the source.
    pub dry_run: bool,
    /// This program, which starts QEMU and stands guard, by the words [`super::COMMAND`] and
    /// [`crate::GUARD_COMMAND`] on its command line.
    pub godwit: PathBuf,
    /// Disks that the source may overwrite.
    pub disks: DiskChoice,
    /// How often the network is told of the guest; `None`: as
    /// [`QemuDestination::announcing`] says.
    pub announce: Option<u16>,
    /// The guest's memory, where the new QEMU takes the source's place on the same host: then its
    /// paths are the source's, unless `mappings` say otherwise.
    pub in_place: Option<Arc<InPlace>>,
    /// The command line to start, program first, in place of the source's.
    pub command: Option<Vec<String>>,
    /// Hears what is about to be started, and what was.
    pub told: Box<dyn FnMut(&Shown) + Send>,
}

impl fmt::Debug for StartTerms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartTerms").field("mappings", &self.mappings).finish_non_exhaustive()
    }
}

/// A QEMU that is yet to be started, or was.
#[derive(Debug)]
pub struct StartedDestination {
    terms: StartTerms,
    interrupt: Interrupt,
    none: Arc<Vec<RamBlock>>,
    qemu: Option<Qemu>,
    was_shown: bool,
}

#[derive(Debug)]
struct Qemu {
    vm: QemuDestination,
    files: Files,
    /// It is this host's, whatever comes: it runs, or may run.
    taken_over: bool,
}

/// The program that the operator has named, and the option by which.
fn named(terms: &StartTerms) -> Option<(&'static str, &Path)> {
    let commanded = terms.command.iter().flatten().next().map(|word| ("--exec", Path::new(word)));
    let option = if terms.in_place.is_some() { "--program" } else { "--emulator" };
    commanded.or_else(|| Some((option, terms.emulator.as_deref()?)))
}

impl StartedDestination {
    /// Nothing is started yet.
    ///
    /// # Errors
    /// When the operator named a program that is not there.
    pub fn new(terms: StartTerms) -> Result<Self, QemuError> {
        if let Some(named) = named(&terms) {
            launch::emulator("", Some(named))?;
        }
        let (interrupt, none) = (Interrupt::default(), Arc::default());
        Ok(Self { terms, interrupt, none, qemu: None, was_shown: false })
    }

    /// Whether it was a dry run, and has shown what it was for.
    #[must_use]
    pub fn has_shown(&self) -> bool {
        self.terms.dry_run && self.was_shown
    }

    fn start(&mut self, description: &Description) -> Result<(), QemuError> {
        let emulator = self.emulator(description)?;
        let files = Files::make()?;
        let named = (&*self.terms.mappings, &*self.terms.scripts);
        let Carried { words, left_out } = match (&self.terms.command, &self.terms.in_place) {
            (Some(command), Some(memory)) => by_command(command, memory, &files.monitor)?,
            (None, Some(memory)) => carry_in_place(description, named, memory, &files.monitor)?,
            _ => carry(description, named, &files.monitor)?,
        };
        let line = shown(&emulator, &words);
        (self.terms.told)(&Shown::CommandLine { words: line, left_out });
        self.was_shown = true;
        if self.terms.dry_run {
            return Err(refused(
                "the destination has shown what it would start, and does no more (godwit receive \
                 --dry-run)",
            ));
        }
        let launched =
            launch::start(&self.terms.godwit, &emulator, &words, &files, &self.interrupt)?;
        // Before there is a guardian it ends with `launched`.
        let opened = self.open(&files.monitor, launched.answers_until());
        match opened.and_then(|vm| launched.let_go().map(|()| vm)) {
            Ok(vm) => {
                let (pid, monitor, log) = (vm.pid(), files.monitor.clone(), files.log.clone());
                (self.terms.told)(&Shown::Started { pid, monitor, log });
                self.qemu = Some(Qemu { vm, files, taken_over: false });
                Ok(())
            }
            Err(error) => {
                files.remove();
                Err(error)
            }
        }
    }

    /// The program to start.
    fn emulator(&self, description: &Description) -> Result<PathBuf, QemuError> {
        let program = description.words.first().map_or("", String::as_str);
        launch::emulator(program, named(&self.terms))
    }

    fn open(&self, monitor: &Path, until: Instant) -> Result<QemuDestination, QemuError> {
        let memory = self.terms.in_place.clone();
        let vm = QemuDestination::open_started(monitor, (until, &self.interrupt), memory)?;
        let mut vm = vm.announcing(self.terms.announce);
        vm.check_disks(&self.terms.disks)?;
        vm.guarded(&self.terms.godwit)
    }

    fn vm(&mut self) -> Result<&mut QemuDestination, QemuError> {
        let started = self.qemu.as_mut().map(|qemu| &mut qemu.vm);
        started.ok_or(QemuError::Changed("no QEMU was started"))
    }
}

impl DestinationVm for StartedDestination {
    fn machine(&self) -> &'static str {
        "qemu"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        self.qemu.as_ref().map_or_else(|| Arc::clone(&self.none), |qemu| qemu.vm.ram())
    }

    fn pid(&self) -> u32 {
        let pid = self.qemu.as_ref().map(|qemu| DestinationVm::pid(&qemu.vm));
        pid.unwrap_or_else(std::process::id)
    }

    fn heed(&mut self, interrupt: &Interrupt) {
        self.interrupt = interrupt.clone();
        if let Some(qemu) = &mut self.qemu {
            qemu.vm.heed(interrupt);
        }
    }

    fn offered(&mut self, blocks: &BTreeSet<&str>, ask: &mut Ask<'_>) -> Result<(), VmError> {
        let answer = ask(QUESTION)?;
        let description =
            serde_json::from_slice(&answer).map_err(|_| QemuError::Unclear("its QEMU"))?;
        self.start(&description)?;
        let interrupt = self.interrupt.clone();
        let vm = self.vm()?;
        vm.heed(&interrupt);
        vm.offered(blocks, ask)
    }

    fn compare(&mut self, ask: &mut Ask<'_>) -> Result<(), VmError> {
        self.vm()?.compare(ask)
    }

    fn inquired(&mut self) -> Result<(), VmError> {
        self.discard()
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        self.vm()?.prepare()
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        let loaded = self.vm()?.finish_load();
        let Some(qemu) = self.qemu.as_ref().filter(|_| loaded.is_err()) else { return loaded };
        let words = launch::last_words(&qemu.files.log);
        loaded.map_err(|error| format!("{error}; its log ends with: {words}").into())
    }

    fn has_ended(&self) -> bool {
        self.qemu.as_ref().is_some_and(|qemu| qemu.vm.has_ended())
    }

    fn taking_over(&mut self) -> Result<(), VmError> {
        self.vm()?.taking_over()
    }

    fn run(&mut self) -> Result<(), RunError> {
        let Some(qemu) = &mut self.qemu else {
            return Err(RunError::NeverRan(QemuError::Changed("no QEMU was started").into()));
        };
        let ran = qemu.vm.run();
        qemu.taken_over = !matches!(ran, Err(RunError::NeverRan(_)));
        ran
    }

    fn announce(&mut self) -> Result<(), VmError> {
        if let Some(qemu) = &mut self.qemu {
            qemu.taken_over = true;
        }
        self.vm()?.announce()
    }

    fn deliver(&mut self, packet: Vec<u8>) -> Result<(), VmError> {
        self.vm()?.deliver(packet)
    }

    fn discard(&mut self) -> Result<(), VmError> {
        let Some(qemu) = &mut self.qemu else { return Ok(()) };
        let discarded = qemu.vm.discard();
        if discarded.is_ok() {
            qemu.files.remove();
            self.qemu = None;
        }
        discarded
    }

    fn disk_destination(&mut self) -> Option<&mut dyn DiskDestination> {
        self.qemu.as_mut().and_then(|qemu| qemu.vm.disk_destination())
    }

    fn post_copy(&mut self) -> Option<&mut dyn PostCopyDestination> {
        self.qemu.as_mut().and_then(|qemu| qemu.vm.post_copy())
    }
}

impl Drop for StartedDestination {
    /// The guardian sees to it after a panic.
    fn drop(&mut self) {
        let stays = self.qemu.as_ref().is_none_or(|qemu| qemu.taken_over);
        if !stays && !std::thread::panicking() {
            let _ = self.discard();
        }
    }
}

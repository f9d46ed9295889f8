//! A destination that libvirt owns: nothing is there before a source comes, and in the end there is
//! a domain like the one that left.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use godwit_disk::{Disk, DiskChoice, DiskReader, DiskSink};
use godwit_engine::Interrupt;
use godwit_engine::vm::{Ask, DestinationVm, DiskDestination, RunError, VmError};
use godwit_libvirt::{Connection, Domain, ErrorKind, State, Xml};
use godwit_memory::RamBlock;
use godwit_units::{PAGE_SIZE, PageIndex};

use super::arrival::{self, Arrival};
use super::domain::{Description, QUESTION};
use super::images::{DiskPaths, Images};
use super::made::sweep_images;
use super::memory;
use crate::QemuError;
use crate::cards::Inlets;
use crate::guard::{Guard, Left, Stage};
use crate::machine::Machine;
use crate::monitor::commands::{Cont, Quit};
use crate::monitor::{LibvirtMonitor, QmpError};
use crate::process::Process;
use crate::ram;

/// Loading takes milliseconds; a device that opens a slow disk may take longer.
const LOAD_LIMIT: Duration = Duration::from_secs(30);
/// From its end in libvirt to the end of the process.
const END_LIMIT: Duration = Duration::from_secs(5);
/// The guest's physical memory below is the beginning of its first back end on every PC.
const CONVENTIONAL: u64 = 0x9_f000;

/// A host whose libvirt takes a domain in.
#[derive(Debug)]
pub struct LibvirtDestination {
    host: Connection,
    program: PathBuf,
    /// The disks that may be filled, and where they are to be.
    allowed: DiskChoice,
    paths: DiskPaths,
    incoming: Option<Incoming>,
    ram: Arc<Vec<RamBlock>>,
    interrupt: Interrupt,
    /// Hears what the operator should know.
    told: fn(&str),
}

/// A domain that is being taken in.
#[derive(Debug)]
struct Incoming {
    description: Description,
    images: Images,
    arrival: Arrival,
    domain: Domain,
    machine: Machine,
    guard: Guard,
    /// What libvirt said of it when all of its state was loaded.
    loaded: Option<State>,
    /// It is this host's, whatever comes: it runs, or stays paused.
    taken_over: bool,
    /// The ways to its guest's cards, once a packet has come for one.
    inlets: Option<Inlets>,
}

fn refused(words: String) -> QemuError {
    QemuError::Domain(words)
}

impl LibvirtDestination {
    /// Connects to the libvirt at `uri`. `program` is started as the guardian of a domain, with
    /// [`crate::GUARD_COMMAND`] as the first word of its command line; `told` hears what the
    /// operator should know.
    ///
    /// # Errors
    /// When libvirt is not there, too old, or may not be asked.
    pub fn open(uri: &str, program: &Path, told: fn(&str)) -> Result<Self, QemuError> {
        let host = Connection::open(uri)?;
        arrival::clear();
        sweep_images();
        Ok(Self {
            host,
            program: program.to_owned(),
            allowed: DiskChoice::None,
            paths: DiskPaths::new(),
            incoming: None,
            ram: Arc::default(),
            interrupt: Interrupt::default(),
            told,
        })
    }

    /// The same, which lets the source fill the disks `allowed`; those in `paths` are to be there,
    /// all others where the source has them.
    #[must_use]
    pub fn with_disks(mut self, allowed: &DiskChoice, paths: DiskPaths) -> Self {
        (self.allowed, self.paths) = (allowed.clone(), paths);
        self
    }

    /// Refuses a domain that is here already. One that is shut off here, of the same name and UUID,
    /// has been here before, and comes back: its definition.
    fn check_free(
        &self,
        Description { name, uuid, .. }: &Description,
    ) -> Result<Option<String>, QemuError> {
        let found = |found: Result<Domain, godwit_libvirt::LibvirtError>| match found {
            Ok(domain) => Ok(Some(domain)),
            Err(error) if error.kind() == ErrorKind::NoDomain => Ok(None),
            Err(error) => Err(error),
        };
        let same = found(self.host.domain_by_uuid(uuid))?;
        let namesake = found(self.host.domain(name))?;
        if let Some(same) = &same {
            if same.state()? != State::ShutOff {
                return Err(refused(format!(
                    "domain '{name}' runs at the destination already: if it is the source itself, \
                     the two addresses are one host's"
                )));
            }
            if same.name() != *name {
                return Err(refused(format!(
                    "the destination has a domain with the UUID of '{name}' under the name '{}': \
                     undefine it there",
                    same.name()
                )));
            }
            if same.has_managed_save()? {
                return Err(refused(format!(
                    "the destination keeps a saved state of domain '{name}', which would be \
                     lost: virsh managedsave-remove {name} there"
                )));
            }
        }
        if same.is_none() && namesake.is_some() {
            return Err(refused(format!(
                "the destination has another domain called '{name}', with another UUID: rename \
                 one of them (virsh domrename)"
            )));
        }
        Ok(same.map(|same| same.xml(Xml::Inactive)).transpose()?)
    }

    fn take_in(
        &self,
        blocks: &BTreeSet<&str>,
        mut description: Description,
    ) -> Result<(Incoming, Vec<RamBlock>), QemuError> {
        let ours = self.check_free(&description)?;
        let Description { name, disks, .. } = &description;
        if let (false, Some(disk)) = (description.disks_are_shared, disks.first()) {
            return Err(refused(format!(
                "domain '{name}' writes to {disk}, and whether that is the same storage on both \
                 hosts godwit does not see where libvirt starts the destination: if it is, say so \
                 by godwit migrate --disks-are-shared, else move it along by --disks on both sides"
            )));
        }
        let Description { xml, persistent, moving, .. } = &mut description;
        let descriptions = [Some(xml), persistent.as_mut()];
        let (allowed, paths) = (&self.allowed, &self.paths);
        let mut images = Images::open(moving, descriptions, allowed, paths, ours.as_deref())?;
        let Description { uuid, xml, .. } = &description;
        let started = Arrival::start(&self.host, (xml, uuid), &self.interrupt);
        let taken = started.and_then(|(mut arrival, pid)| match self.look(pid, uuid, blocks) {
            Ok(taken) => Ok((arrival, taken)),
            Err(error) => {
                arrival.end();
                Err(error)
            }
        });
        let (arrival, (ram, domain, machine, guard)) = taken.inspect_err(|_| images.discard())?;
        let (loaded, taken_over, inlets) = (None, false, None);
        let incoming = Incoming {
            description,
            images,
            arrival,
            domain,
            machine,
            guard,
            loaded,
            taken_over,
            inlets,
        };
        Ok((incoming, ram))
    }

    /// What there is of the domain `uuid` in process `pid`.
    fn look(
        &self,
        pid: i32,
        uuid: &str,
        offered: &BTreeSet<&str>,
    ) -> Result<(Vec<RamBlock>, Domain, Machine, Guard), QemuError> {
        // What no device of the source's uses is in no list of its blocks.
        let back_ends = memory::back_ends(pid)?.into_iter().filter_map(|(id, size, address)| {
            let name = offered.iter().find(|name| is_of_back_end(name, &id))?;
            Some(((*name).to_owned(), size, address))
        });
        let ram = ram::blocks_at(pid, back_ends.collect())?;
        let domain = self.host.domain_by_uuid(uuid)?;
        let process = Process::open(pid)
            .map_err(|source| QemuError::System { step: "pidfd_open", source })?;
        let machine = Machine { qmp: Box::new(LibvirtMonitor::of(&domain, pid)?), pid, process };
        let guard = Guard::start(&self.program, &machine, Left::at(Stage::Waiting, false))?;
        Ok((ram, domain, machine, guard))
    }

    fn incoming(&mut self) -> Result<&mut Incoming, QemuError> {
        self.incoming.as_mut().ok_or(QemuError::Changed("no domain was taken in"))
    }
}

/// Whether the block `name` is that of the back end `id`: some kinds of them are called by their
/// path (backends/hostmem.c, `host_memory_backend_get_name`).
fn is_of_back_end(name: &str, id: &str) -> bool {
    name.strip_prefix("/objects/").unwrap_or(name) == id
}

/// Compares a page of the guest's as libvirt has QEMU read it with what was written: whether what
/// was found in the process is the guest's memory.
fn check_memory(domain: &Domain, ram: &[RamBlock]) -> Result<(), QemuError> {
    // Where several make up the memory their sizes differ, so none is another.
    let [block] = ram else { return Ok(()) };
    let mut page = vec![0; PAGE_SIZE as usize];
    let pages = block.pages().0.min(CONVENTIONAL / PAGE_SIZE);
    for index in 0..pages {
        block.read(PageIndex(index), &mut page)?;
        if page.iter().all(|byte| *byte == 0) {
            continue;
        }
        let mut seen = vec![0; page.len()];
        domain.peek(index * PAGE_SIZE, &mut seen)?;
        if seen == page {
            return Ok(());
        }
        let what = "is not where it was found in the process: this is a bug of godwit's";
        let block = block.name().to_owned();
        return Err(QemuError::RamUnreachable { block, what: what.to_owned() });
    }
    Ok(())
}

impl DestinationVm for LibvirtDestination {
    fn machine(&self) -> &'static str {
        "qemu"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        Arc::clone(&self.ram)
    }

    fn pid(&self) -> u32 {
        let pid = self.incoming.as_ref().map(|incoming| incoming.machine.pid.unsigned_abs());
        pid.unwrap_or_else(std::process::id)
    }

    fn heed(&mut self, interrupt: &Interrupt) {
        self.interrupt = interrupt.clone();
    }

    fn offered(&mut self, blocks: &BTreeSet<&str>, ask: &mut Ask<'_>) -> Result<(), VmError> {
        let answer = ask(QUESTION)?;
        let description =
            serde_json::from_slice(&answer).map_err(|_| QemuError::Unclear("its domain"))?;
        let (incoming, ram) = self.take_in(blocks, description)?;
        (self.incoming, self.ram) = (Some(incoming), Arc::new(ram));
        Ok(())
    }

    fn inquired(&mut self) -> Result<(), VmError> {
        self.discard()
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        let interrupt = self.interrupt.clone();
        let Incoming { guard, machine, arrival, .. } = self.incoming()?;
        guard.renew(machine)?;
        guard.note(|left| left.stage = Stage::Loading)?;
        let twice = || QemuError::Changed("its state was asked for twice");
        Ok(Box::new(arrival.sink(&interrupt).ok_or_else(twice)?))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        let (interrupt, ram) = (self.interrupt.clone(), Arc::clone(&self.ram));
        let Incoming { arrival, domain, loaded, .. } = self.incoming()?;
        arrival.finish(&interrupt, LOAD_LIMIT)?;
        check_memory(domain, &ram)?;
        match domain.state().map_err(QemuError::from)? {
            state @ State::Paused(_) => *loaded = Some(state),
            other => {
                let words = format!("libvirt has it as {other:?}, although it was to be paused");
                return Err(QemuError::State { action: "load", words }.into());
            }
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| incoming.machine.process.has_ended())
    }

    fn taking_over(&mut self) -> Result<(), VmError> {
        let uri = self.host.uri().to_owned();
        let Incoming { description, guard, images, .. } = self.incoming()?;
        images.keep()?;
        let definition = description.definition(uri);
        let note = |left: &mut Left| (left.stage, left.definition) = (Stage::Starting, definition);
        Ok(guard.note(note)?)
    }

    fn run(&mut self) -> Result<(), RunError> {
        let Incoming { domain, machine, loaded, taken_over, .. } =
            self.incoming().map_err(|error| RunError::NeverRan(error.into()))?;
        *taken_over = true;
        let Err(error) = machine.qmp.run(&Cont) else { return Ok(()) };
        // Libvirt hears of each start and stop, and remembers the last: a domain that is paused for
        // the reason that it was paused for before has not run since.
        let refused = matches!(error, QmpError::Refused { .. });
        if refused && domain.state().ok() == *loaded {
            *taken_over = false;
            return Err(RunError::NeverRan(error.into()));
        }
        // A daemon that was killed meanwhile may be back, and QEMU itself knows whether it was
        // told. If it was not, telling it now is no second time; if it is being told, twice is as
        // once.
        let lost = matches!(error, QmpError::Libvirt { .. });
        let runs = lost
            && match machine.run_state().as_deref() {
                Ok("running") => true,
                Ok("paused" | "inmigrate") => machine.qmp.run(&Cont).is_ok(),
                Ok(_) | Err(_) => false,
            };
        if runs { Ok(()) } else { Err(RunError::Unknown(error.into())) }
    }

    fn disk_destination(&mut self) -> Option<&mut dyn DiskDestination> {
        Some(self)
    }

    fn deliver(&mut self, packet: Vec<u8>) -> Result<(), VmError> {
        // Before the guest is here libvirt asks its QEMU nothing for others.
        let Incoming { machine: Machine { qmp, pid, .. }, inlets, .. } = self.incoming()?;
        inlets.get_or_insert_with(|| Inlets::of(&mut **qmp, *pid)).put(packet)
    }

    fn announce(&mut self) -> Result<(), VmError> {
        // QEMU tells the network by itself when it has loaded, and goes on when the guest runs.
        let (uri, told) = (self.host.uri().to_owned(), self.told);
        let incoming = self.incoming()?;
        incoming.taken_over = true;
        let definition = incoming.description.definition(uri);
        let kept = definition.map_or(Ok(()), |definition| definition.keep());
        let _ = incoming.guard.note(|left| *left = Left::at(Stage::Waiting, false));
        if let Err(error) = &kept {
            let name = &incoming.description.name;
            told(&format!(
                "the domain is here and is transient: its definition could not be kept ({error}); \
                 virsh define it from virsh dumpxml {name}"
            ));
        }
        Ok(kept?)
    }

    fn discard(&mut self) -> Result<(), VmError> {
        self.ram = Arc::default();
        let Some(mut incoming) = self.incoming.take() else { return Ok(()) };
        let _ = incoming.guard.note(|left| left.stage = Stage::Discarding);
        let ended = end(&mut incoming);
        if ended.is_ok() {
            incoming.images.discard();
            let _ = incoming.guard.note(|left| *left = Left::at(Stage::Waiting, false));
        }
        Ok(ended?)
    }
}

impl DiskDestination for LibvirtDestination {
    fn open_disks(
        &mut self,
        wanted: &[Disk],
        _: &DiskChoice,
    ) -> Result<Vec<Box<dyn DiskSink>>, VmError> {
        // What is allowed was looked at before the images were opened.
        Ok(self.incoming()?.images.sinks(wanted)?)
    }

    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        Ok(self.incoming()?.images.read()?)
    }

    fn close_disks(&mut self) -> Result<(), VmError> {
        Ok(self.incoming()?.images.close()?)
    }
}

/// Ends a domain whose guest must never run here, and waits until its process has ended.
fn end(incoming: &mut Incoming) -> Result<(), QemuError> {
    incoming.arrival.end();
    let Machine { qmp, pid, process } = &mut incoming.machine;
    let undead = |source| QemuError::Undead { pid: *pid, source };
    if !process.has_ended() {
        // Libvirt has it as a domain, or stands still: it is ended without it then.
        qmp.heed(&Interrupt::default());
        let _ = qmp.run(&Quit);
    }
    if process.ends_within(END_LIMIT).map_err(undead)? {
        return Ok(());
    }
    process.kill().map_err(undead)?;
    if process.ends_within(END_LIMIT).map_err(undead)? {
        return Ok(());
    }
    Err(undead(rustix::io::Errno::TIMEDOUT.into()))
}

impl Drop for LibvirtDestination {
    /// The guardian sees to it after a panic.
    fn drop(&mut self) {
        let stays = self.incoming.as_ref().is_none_or(|incoming| incoming.taken_over);
        if !stays && !std::thread::panicking() {
            let _ = self.discard();
        }
    }
}

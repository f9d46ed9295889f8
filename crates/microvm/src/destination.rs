//! The machine as the destination of a migration.
//!
//! Invariant: the guest runs only if a state was loaded without an error. A machine that was not
//! run takes another attempt: pages and state of that overwrite what is there.
//!
//! A guest may run before all of its pages are here. They are awaited by this process's own page
//! tables (`godwit_track::MissingPages::start_own`), as vCPUs and devices are threads of it; with
//! the process the guest ends, so nobody can go on for it.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use godwit_bitmap::DirtyBitmap;
use godwit_disk::{Disk, DiskChoice, DiskReader, DiskSink};
use godwit_engine::vm::{
    ArrivingPages, DestinationVm, DiskDestination, PostCopyDestination, RunError, VmError,
};
use godwit_memory::RamBlock;
use godwit_track::{MissingPages, other_mappers};

use crate::disk::NAME;
use crate::{Machine, MicrovmError, blob};

/// A machine that waits for a guest.
#[derive(Debug)]
pub struct MicrovmDestination<'a> {
    machine: &'a Machine,
    state: Arc<Mutex<Vec<u8>>>,
    loaded: bool,
    /// Pages that are still to come, until the guest was discarded.
    coming: Option<Arc<MissingPages>>,
}

impl<'a> MicrovmDestination<'a> {
    /// A machine in which no guest has run.
    #[must_use]
    pub fn new(machine: &'a Machine) -> Self {
        Self { machine, state: Arc::default(), loaded: false, coming: None }
    }
}

impl DestinationVm for MicrovmDestination<'_> {
    fn machine(&self) -> &'static str {
        "microvm"
    }

    fn ram(&self) -> Arc<Vec<RamBlock>> {
        self.machine.ram().blocks()
    }

    fn prepare(&mut self) -> Result<Box<dyn Write + Send>, VmError> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(Box::new(Collector(Arc::clone(&self.state))))
    }

    fn finish_load(&mut self) -> Result<(), VmError> {
        let state = std::mem::take(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.machine.load(&state)?;
        self.loaded = true;
        Ok(())
    }

    fn run(&mut self) -> Result<(), RunError> {
        if !self.loaded {
            let error = MicrovmError::WrongState {
                state: "without a guest",
                cure: "this is a bug in godwit",
            };
            return Err(RunError::NeverRan(error.into()));
        }
        self.machine.run();
        Ok(())
    }

    fn announce(&mut self) -> Result<(), VmError> {
        // It has no network card.
        Ok(())
    }

    fn discard(&mut self) -> Result<(), VmError> {
        self.loaded = false;
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let stopped =
            if self.machine.is_running() { self.machine.stop().map(drop) } else { Ok(()) };
        let given_up = self.coming.take().map_or(Ok(()), |pages| pages.give_up());
        stopped.map_err(VmError::from).and(given_up.map_err(VmError::from))
    }

    fn has_ended(&self) -> bool {
        self.machine.has_ended()
    }

    fn disk_destination(&mut self) -> Option<&mut dyn DiskDestination> {
        Some(self)
    }

    fn post_copy(&mut self) -> Option<&mut dyn PostCopyDestination> {
        Some(self)
    }
}

impl PostCopyDestination for MicrovmDestination<'_> {
    fn cannot_await(&mut self) -> Option<String> {
        if let Err(error) = MissingPages::can_start_own() {
            return Some(error.to_string());
        }
        let blocks = self.machine.ram().blocks();
        if let Some(huge) = blocks.iter().find(|block| block.has_huge_pages()) {
            return Some(format!(
                "RAM block '{}' is in huge pages, which cannot be filled one by one: leave its \
                 path out, or have it on a tmpfs",
                huge.name()
            ));
        }
        let pid = std::process::id().cast_signed();
        let mapper = other_mappers(pid, &blocks).into_iter().next()?;
        Some(mapper.finds_zeros())
    }

    fn await_pages(
        &mut self,
        missing: Vec<DirtyBitmap>,
    ) -> Result<Arc<dyn ArrivingPages>, VmError> {
        let pages = self.machine.ram().await_pages(missing)?;
        self.coming = Some(Arc::clone(&pages));
        Ok(pages)
    }
}

impl DiskDestination for MicrovmDestination<'_> {
    fn open_disks(
        &mut self,
        wanted: &[Disk],
        allowed: &DiskChoice,
    ) -> Result<Vec<Box<dyn DiskSink>>, VmError> {
        let own = self.machine.disk();
        let missing =
            |name: &str| MicrovmError::NoDisk { name: name.to_owned(), own: own.map(|_| NAME) };
        let open = |wanted: &Disk| match own {
            Some(disk) if wanted.name == NAME => {
                allowed.allow(NAME, &[])?;
                Ok(disk.fill(wanted)?)
            }
            _ => Err(missing(&wanted.name).into()),
        };
        wanted.iter().map(open).collect()
    }

    fn read_disks(&mut self) -> Result<Vec<Box<dyn DiskReader>>, VmError> {
        Ok(self.machine.disk().map(|disk| disk.reader()).into_iter().collect())
    }
}

/// Takes the state in, up to a limit.
struct Collector(Arc<Mutex<Vec<u8>>>);

impl Write for Collector {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if blob::too_long(state.len() + bytes.len()) {
            return Err(io::Error::other("it is longer than any microvm state"));
        }
        state.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

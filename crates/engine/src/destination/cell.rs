//! What the threads are confined by that read what comes from outside.
//!
//! Whoever reaches the port has its bytes read: greetings, certificates, messages, frames, pages
//! that are compressed. The threads that do so have no capability and may make only the system
//! calls of their work; that of placing pages in the memory of another process needs one
//! capability, and is allowed for that process alone.
//!
//! Invariant: when one of them was kept from something, nothing that came is acknowledged any
//! more, and the guest is not started.

use godwit_confine::{Calls, Confined, Confinement, Rights, Witness, give_up_all, keep, seal};
use godwit_memory::{Place, RamBlock};

use crate::EngineError;

/// Makes the cells of one migration.
#[derive(Clone, Debug)]
pub(super) struct Cells(Option<Witness>);

/// One thread's, which it enters by itself.
#[derive(Clone, Debug)]
pub(super) struct Cell(Option<(Confinement, Rights)>);

impl Cells {
    /// Real ones if `confined`, else such as keep nobody from anything.
    ///
    /// # Errors
    /// When this kernel does not take them.
    pub(super) fn new(confined: bool) -> Result<Self, EngineError> {
        if !confined {
            return Ok(Self(None));
        }
        let first = Confinement::new(&Calls::of_any_thread()).map_err(EngineError::Confine)?;
        let cells = Self(Some(first.witness().clone()));
        // Now, while nobody has come.
        let cell = cells.reader()?;
        let tried = crate::threads::start("confined", move || cell.enter().map(drop))?;
        tried.join().map_err(|_| EngineError::Panicked("confined"))??;
        Ok(cells)
    }

    fn of(&self, calls: &Calls, rights: Rights) -> Result<Cell, EngineError> {
        let Some(witness) = &self.0 else { return Ok(Cell(None)) };
        let confinement = Confinement::seen_by(calls, witness).map_err(EngineError::Confine)?;
        Ok(Cell(Some((confinement, rights))))
    }

    /// Of who reads messages.
    pub(super) fn reader(&self) -> Result<Cell, EngineError> {
        self.of(&Calls::of_any_thread().streams(), Rights::NONE)
    }

    /// Of who lets connections in.
    pub(super) fn door(&self) -> Result<Cell, EngineError> {
        self.of(&Calls::of_any_thread().accepting(), Rights::NONE)
    }

    /// Of who places pages in `ram`.
    pub(super) fn memory(&self, ram: &[RamBlock]) -> Result<Cell, EngineError> {
        let mut calls = Calls::of_any_thread().streams().files();
        let mut rights = Rights::NONE;
        for block in ram {
            if let Ok(Place::Process { pid, .. }) = block.place() {
                // The kernel asks for it at each call, where the process is another user's.
                (calls, rights) = (calls.memory_of(pid), Rights::TRACE);
            }
        }
        self.of(&calls, rights)
    }

    /// Of who writes to a disk, maybe over a connection that has to be made anew.
    pub(super) fn disk(&self) -> Result<Cell, EngineError> {
        self.of(&Calls::of_any_thread().files().connecting(), Rights::NONE)
    }

    /// What one of them was kept from, as an error.
    pub(super) fn tried(&self) -> Option<EngineError> {
        let tried = self.0.as_ref()?.tried()?;
        Some(EngineError::Confined { tried })
    }
}

impl Cell {
    /// Confines the calling thread.
    pub(super) fn enter(&self) -> Result<Option<Confined>, EngineError> {
        let Some((confinement, rights)) = &self.0 else { return Ok(None) };
        let given_up = match *rights {
            Rights::NONE => give_up_all(),
            rights => seal().and_then(|()| keep(rights)),
        };
        let rights_kept =
            |source| EngineError::Confine(godwit_confine::ConfineError::Rights(source));
        given_up.map_err(rights_kept)?;
        confinement.enter().map(Some).map_err(EngineError::Confine)
    }
}

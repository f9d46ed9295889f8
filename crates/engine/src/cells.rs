//! What the threads are confined by that read what comes from outside.
//!
//! Whoever reaches the port of a destination has its bytes read: greetings, certificates, messages,
//! frames, pages that are compressed. The threads that do so have no capability and may make only
//! the system calls of their work; that of placing pages in the memory of another process needs
//! one capability, and is allowed for that process alone. A source reads messages only, in one
//! thread; its others keep the capabilities of their work, and no filter.
//!
//! Invariant: when one of them was kept from something, nothing that came is acknowledged any
//! more, and the guest is not started; at a source the message is not heeded.

use godwit_confine::{Calls, Confined, Confinement, Rights, Witness, give_up_all, keep, seal};
use godwit_memory::{Place, RamBlock};

use crate::EngineError;
use crate::link::Peer;

/// Makes the cells of one migration.
#[derive(Clone, Debug)]
pub(crate) struct Cells(Option<(Witness, Peer)>);

/// One thread's, which it enters by itself.
#[derive(Clone, Debug)]
pub(crate) struct Cell(Option<(Option<Confinement>, Rights)>);

impl Cells {
    /// Real ones if `confined`, against what `peer` sends, else such as keep nobody from anything.
    ///
    /// # Errors
    /// When this kernel does not take them.
    pub(crate) fn new(confined: bool, peer: Peer) -> Result<Self, EngineError> {
        if !confined {
            return Ok(Self(None));
        }
        let first = Confinement::new(&Calls::of_any_thread()).map_err(EngineError::Confine)?;
        let cells = Self(Some((first.witness().clone(), peer)));
        // Now, while nobody has come.
        let cell = cells.reader()?;
        let tried = crate::threads::start("confined", move || cell.enter().map(drop))?;
        tried.join().map_err(|_| EngineError::Panicked("confined"))??;
        Ok(cells)
    }

    fn of(&self, calls: &Calls, rights: Rights) -> Result<Cell, EngineError> {
        let Some((witness, _)) = &self.0 else { return Ok(Cell(None)) };
        let confinement = Confinement::seen_by(calls, witness).map_err(EngineError::Confine)?;
        Ok(Cell(Some((Some(confinement), rights))))
    }

    /// Of who reads nothing of the peer's: any system call, and these rights.
    pub(crate) fn with(&self, rights: Rights) -> Cell {
        Cell(self.0.as_ref().map(|_| (None, rights)))
    }

    /// Of who reads messages.
    pub(crate) fn reader(&self) -> Result<Cell, EngineError> {
        self.of(&Calls::of_any_thread().streams(), Rights::NONE)
    }

    /// Of who lets connections in.
    pub(crate) fn door(&self) -> Result<Cell, EngineError> {
        self.of(&Calls::of_any_thread().accepting(), Rights::NONE)
    }

    /// Of who places pages in `ram`.
    pub(crate) fn memory(&self, ram: &[RamBlock]) -> Result<Cell, EngineError> {
        let mut calls = Calls::of_any_thread().streams().files().missing_pages();
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
    pub(crate) fn disk(&self) -> Result<Cell, EngineError> {
        self.of(&Calls::of_any_thread().files().connecting(), Rights::NONE)
    }

    /// What one of them was kept from, as an error.
    pub(crate) fn tried(&self) -> Option<EngineError> {
        let (witness, peer) = self.0.as_ref()?;
        Some(EngineError::Confined { peer, tried: witness.tried()? })
    }
}

impl Cell {
    /// Confines the calling thread.
    pub(crate) fn enter(&self) -> Result<Option<Confined>, EngineError> {
        let Some((confinement, rights)) = &self.0 else { return Ok(None) };
        let given_up = match *rights {
            Rights::NONE => give_up_all(),
            rights => seal().and_then(|()| keep(rights)),
        };
        let rights_kept =
            |source| EngineError::Confine(godwit_confine::ConfineError::Rights(source));
        given_up.map_err(rights_kept)?;
        let confined = confinement.as_ref().map(Confinement::enter).transpose();
        confined.map_err(EngineError::Confine)
    }
}

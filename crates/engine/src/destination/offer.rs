//! What a source offers, compared with what is here before anything is accepted.
//!
//! Invariant: nothing here is changed but that disks are opened, last of all and only those that
//! were allowed.

use godwit_disk::{Disk, DiskChoice, DiskSink, NotAllowed};
use godwit_memory::RamBlock;
use godwit_wire::{Message, Offer, QUESTIONS_LIMIT};

use super::channel::PEER;
use super::layout;
use super::session::Session;
use super::{Notice, Options};
use crate::EngineError;
use crate::vm::{Ask, DestinationVm};

/// An offer that fits.
pub(super) struct Accepted {
    pub(super) offer: Offer,
    /// The number here of each RAM block of the source.
    pub(super) order: Vec<usize>,
    pub(super) disks: Vec<(Disk, Box<dyn DiskSink>)>,
}

/// Waits for the source's offer, which must fit.
pub(super) fn await_offer(
    session: &mut Session<'_>,
    vm: &mut dyn DestinationVm,
    options: &Options,
    notice: &mut dyn FnMut(&Notice),
) -> Result<Accepted, EngineError> {
    let Message::Offer(offer) = session.first_message(vm, notice)? else {
        let what = "it did not begin with an offer".to_owned();
        return Err(EngineError::Protocol { peer: PEER, what });
    };
    let names = offer.blocks.iter().map(|block| block.name.as_str()).collect();
    let mut asked = 0;
    asking(session, &mut asked, |ask| vm.offered(&names, ask))?.map_err(EngineError::Vm)?;
    let ram = vm.ram();
    let order = layout::fit(&offer, vm.machine(), &ram).map_err(EngineError::Layout)?;
    check_room(&ram, vm, options.overcommit)?;
    let disks = layout::disks(&offer).map_err(EngineError::Layout)?;
    if let (true, Some(disk)) = (options.disks.is_none(), disks.first()) {
        // The adapter, which knows all names of a disk, need not be asked.
        return Err(EngineError::Layout(NotAllowed(disk.name.clone()).to_string()));
    }
    asking(session, &mut asked, |ask| vm.compare(ask))?
        .map_err(|error| EngineError::Layout(error.to_string()))?;
    let sinks = open_disks(vm, &disks, &options.disks)?;
    let ram = ram.iter().map(|block| block.pages().bytes()).sum();
    notice(&Notice::Accepted { ram, disks: disks.clone() });
    Ok(Accepted { offer, order, disks: disks.into_iter().zip(sinks).collect() })
}

/// Whether all memory that the guest may come to use has room here.
pub(super) fn check_room(
    ram: &[RamBlock],
    vm: &dyn DestinationVm,
    overcommit: bool,
) -> Result<(), EngineError> {
    godwit_memory::mounts_hold(ram)?;
    if !overcommit {
        godwit_memory::host_holds(ram, vm.pid())?;
    }
    Ok(())
}

/// Has the adapter do what it needs the source's answers for; whatever it asks goes to the source's
/// adapter. `asked` counts the questions of this offer.
fn asking<T>(
    session: &Session<'_>,
    asked: &mut usize,
    work: impl FnOnce(&mut Ask<'_>) -> T,
) -> Result<T, EngineError> {
    let mut broken = None;
    let done = work(&mut |question| {
        *asked += 1;
        let answered = if *asked <= QUESTIONS_LIMIT {
            session.ask(question)
        } else {
            Err(EngineError::Panicked("main"))
        };
        answered.map_err(|error| {
            let words = error.to_string();
            broken = Some(error);
            words.into()
        })
    });
    // A link that broke is that, whatever the adapter makes of it.
    broken.map_or(Ok(done), Err)
}

fn open_disks(
    vm: &mut dyn DestinationVm,
    disks: &[Disk],
    allowed: &DiskChoice,
) -> Result<Vec<Box<dyn DiskSink>>, EngineError> {
    let sinks = match (vm.disk_destination(), disks.first()) {
        (_, None) => Ok(Vec::new()),
        (Some(vm), _) => vm.open_disks(disks, allowed).map_err(|error| error.to_string()),
        (None, Some(disk)) => {
            Err(format!("disk '{}' cannot be received by this kind of machine", disk.name))
        }
    };
    let sinks = sinks.map_err(EngineError::Layout)?;
    if sinks.len() == disks.len() { Ok(sinks) } else { Err(EngineError::Panicked("main")) }
}

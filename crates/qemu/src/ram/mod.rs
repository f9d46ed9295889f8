//! Where the guest's RAM is, and which way the device state has to take because of that.
//!
//! ```text
//!   all RAM in named files that are mapped shared    its blocks are the back ends; all else that
//!                                                    QEMU has in RAM blocks comes with its own
//!                                                    migration, which leaves out shared files
//!   any other RAM                                    is reached at its address in the process:
//!                                                    QEMU's migration would carry it, so the
//!                                                    devices are saved without one
//!                                                    (`device_state`)
//!     from QEMU 8.0 on                               every RAM block of QEMU's, VGA memory and
//!                                                    firmware among them
//!     before                                         the back ends; what else the guest has mapped
//!                                                    goes with the device state (`device_ram`)
//!   of a machine with vhost-user devices             as any other RAM: QEMU's migration would have
//!                                                    their back ends keep a log, and refuse those
//!                                                    that cannot
//!     of a domain of libvirt's                       the same, from whichever version on: of a
//!                                                    destination that libvirt starts only the
//!                                                    back ends can be found
//! ```
//!
//! A destination takes whichever of its blocks the source offers: what it has beside, and is no
//! back end, comes with the device state.

mod addresses;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use godwit_memory::{Place, ProcessBacking, RamBlock};
use godwit_track::{AddressSpace, Mapped};
use godwit_units::ByteCount;

use crate::QemuError;
use crate::device_ram::DeviceRam;
use crate::machine::Machine;
use crate::monitor::QmpError;
use crate::monitor::commands::{Memdev, QomGet, QueryMemdev, QueryMemorySize};

use addresses::Listed;
pub(crate) use addresses::region_of;

/// How QEMU hands out the state of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateBy {
    /// By its own migration, which carries RAM that is not in shared files as well.
    Migration,
    /// By saving the devices alone.
    Saving,
}

/// The RAM of a machine.
#[derive(Debug)]
pub(crate) struct Ram {
    pub(crate) blocks: Vec<RamBlock>,
    pub(crate) state_by: StateBy,
    /// What goes with the device state, though QEMU does not save it there.
    pub(crate) device_ram: Vec<DeviceRam>,
}

impl Ram {
    /// All RAM of a source, as it is reached without a migration of QEMU's (`alone`) or else as
    /// suits it.
    pub(crate) fn of_source(machine: &mut Machine, alone: bool) -> Result<Self, QemuError> {
        match beside_migration(machine, alone)? {
            Some(blocks) => {
                Ok(Self { blocks, state_by: StateBy::Migration, device_ram: Vec::new() })
            }
            None => in_process(machine, true),
        }
    }

    /// The RAM that is moved as blocks: of a source, and of a destination before it is known what
    /// is offered.
    pub(crate) fn main(machine: &mut Machine, alone: bool) -> Result<Vec<RamBlock>, QemuError> {
        match beside_migration(machine, alone)? {
            Some(blocks) => Ok(blocks),
            None => Ok(in_process(machine, false)?.blocks),
        }
    }
}

/// `own`, the RAM of a destination, arranged for a source that has blocks of these names: with what
/// `own` lacks, as far as QEMU tells where it is, and without what comes with the device state.
/// What does not fit then is for others to say.
pub(crate) fn fitted(
    machine: &mut Machine,
    own: &[RamBlock],
    offered: &BTreeSet<&str>,
) -> Result<Option<Vec<RamBlock>>, QemuError> {
    let names: BTreeSet<&str> = own.iter().map(RamBlock::name).collect();
    if names == *offered {
        return Ok(None);
    }
    let mut back_ends = back_end_names(machine)?;
    let listed = addresses::list(machine)?;
    let all: BTreeSet<&str> = listed.iter().map(|block| block.name.as_str()).collect();
    // What no device uses is in no list, and no RAM of the machine's.
    let listed_as = |of: &BTreeSet<&str>, back_end: &str| {
        of.iter().any(|name| *name == back_end || addresses::region_of(name) == back_end)
    };
    back_ends.retain(|name| listed_as(&all, name) || names.contains(name.as_str()));
    if !back_ends.iter().all(|name| listed_as(offered, name))
        || !offered.iter().all(|name| all.contains(name))
    {
        return Ok(None);
    }
    let listed = listed.into_iter().filter(|block| offered.contains(block.name.as_str()));
    let parted: (Vec<Listed>, Vec<Listed>) =
        listed.partition(|block| is_back_end(&block.name, &back_ends));
    let listed: Vec<Listed> = match parted {
        (_, other) if other.iter().any(|block| block.address.is_none()) => {
            let blocks = other.into_iter().map(|block| block.name).collect();
            return Err(QemuError::OldDestination { blocks });
        }
        (main, other) if main.iter().any(|block| block.address.is_none()) => {
            addresses::ask(machine, main)?.into_iter().chain(other).collect()
        }
        (main, other) => main.into_iter().chain(other).collect(),
    };
    at_addresses(machine.pid, listed).map(Some)
}

/// The blocks of `ram` that are memory of back ends: the names of those that are in files and
/// mapped shared, and of those that are the process's own.
pub(crate) fn in_files(
    machine: &mut Machine,
    ram: &[RamBlock],
) -> Result<(Vec<String>, Vec<String>), QemuError> {
    let back_ends = back_end_names(machine)?;
    let main = ram.iter().filter(|block| is_back_end(block.name(), &back_ends));
    let is_file = |block: &&RamBlock| matches!(block.place(), Ok(Place::File { .. }));
    let (files, own): (Vec<_>, Vec<_>) = main.partition(is_file);
    let names =
        |blocks: Vec<&RamBlock>| blocks.into_iter().map(|it| it.name().to_owned()).collect();
    Ok((names(files), names(own)))
}

/// Whether `a` and `b` are the same memory, and not only of the same name and size.
pub(crate) fn is_same(a: &RamBlock, b: &RamBlock) -> bool {
    let place = |block: &RamBlock| block.place().ok();
    a.name() == b.name() && a.pages() == b.pages() && place(a) == place(b)
}

/// Whether QEMU's own migration can be had of it: not behind libvirt's back, and not where the
/// descriptor of its stream is lost with a connection.
fn migrates(machine: &Machine) -> bool {
    machine.qmp.keeps_descriptors()
}

fn back_ends(machine: &mut Machine) -> Result<Vec<Memdev>, QmpError> {
    machine.qmp.run(&QueryMemdev)
}

fn back_end_names(machine: &mut Machine) -> Result<BTreeSet<String>, QmpError> {
    Ok(back_ends(machine)?.into_iter().map(|back_end| back_end.id).collect())
}

/// Whether a block is memory of a back end: of one that a device on a bus has (virtio-mem), the
/// device's path stands before its name.
fn is_back_end(block: &str, back_ends: &BTreeSet<String>) -> bool {
    [block, addresses::region_of(block)].iter().any(|name| back_ends.contains(*name))
}

/// The RAM that QEMU's own migration would leave out, if that is all of it. `None` also where there
/// is no such migration, or the RAM is to be reached without one (`alone`).
fn beside_migration(
    machine: &mut Machine,
    alone: bool,
) -> Result<Option<Vec<RamBlock>>, QemuError> {
    if alone || !migrates(machine) { Ok(None) } else { in_shared_files(machine) }
}

/// The RAM, if all of it is in named files that are mapped shared.
fn in_shared_files(machine: &mut Machine) -> Result<Option<Vec<RamBlock>>, QemuError> {
    let mut blocks = Vec::new();
    for Memdev { id, size, share, prealloc } in back_ends(machine)? {
        let object = format!("/objects/{id}");
        let Some(path) = file_name(machine, &id)?.filter(|_| share) else { return Ok(None) };
        // Since QEMU 8.1; before, a block begins at the start of its file.
        let offset = machine.qmp.run_if_known(&QomGet::<u64>::new(&object, "offset"))?.unwrap_or(0);
        blocks.push(RamBlock::open(&id, &path, offset, ByteCount(size), prealloc)?);
    }
    let shared: u64 = blocks.iter().map(|block| block.pages().bytes().0).sum();
    let summary = machine.qmp.run(&QueryMemorySize)?;
    let total = summary.base_memory.saturating_add(summary.plugged_memory);
    Ok((total <= shared).then_some(blocks))
}

/// The file of the back end `id`, where it has one with a name.
pub(crate) fn file_name(machine: &mut Machine, id: &str) -> Result<Option<PathBuf>, QmpError> {
    // Only memory-backend-file has the property; asking the others is refused.
    let object = format!("/objects/{id}");
    let path = machine.qmp.run_if_known(&QomGet::<String>::new(&object, "mem-path"))?;
    // The descriptor of a process that may have ended (`start/in_place.rs`).
    let path = path.filter(|path| !Path::new(path).starts_with("/proc"));
    let path = path.map(|path| machine.path_here(Path::new(&path)));
    // In a directory its file has no name.
    Ok(path.filter(|path| !path.is_dir()))
}

/// RAM by its addresses. Of a source also what the guest's devices have, where that is not reached
/// as a block.
fn in_process(machine: &mut Machine, is_source: bool) -> Result<Ram, QemuError> {
    let mut main = addresses::list(machine)?;
    let mut other = Vec::new();
    let unknown = main.iter().any(|block| block.address.is_none());
    if unknown || machine.qmp.is_libvirts() {
        let back_ends = back_end_names(machine)?;
        main.retain(|block| is_source || is_back_end(&block.name, &back_ends));
        if unknown {
            main = addresses::ask(machine, main)?;
        }
        (main, other) = main.into_iter().partition(|block| is_back_end(&block.name, &back_ends));
    }
    let used: Vec<ByteCount> = other.iter().map(|block| block.used).collect();
    let count = main.len();
    let mut blocks = at_addresses(machine.pid, main.into_iter().chain(other))?;
    let device_ram = blocks.split_off(count).into_iter().zip(used);
    let device_ram = device_ram.map(|(block, used)| DeviceRam { block, used }).collect();
    Ok(Ram { blocks, state_by: StateBy::Saving, device_ram })
}

/// The blocks that process `pid` has at these addresses, in order: name, size, address.
pub(crate) fn blocks_at(
    pid: i32,
    places: Vec<(String, ByteCount, u64)>,
) -> Result<Vec<RamBlock>, QemuError> {
    let listed = places.into_iter().map(|(name, size, address)| Listed {
        name,
        used: size,
        size,
        address: Some(address),
    });
    at_addresses(pid, listed)
}

/// The blocks that these addresses in the process are, in order.
fn at_addresses(
    pid: i32,
    listed: impl IntoIterator<Item = Listed>,
) -> Result<Vec<RamBlock>, QemuError> {
    let space = AddressSpace::of(pid)?;
    let mut blocks = Vec::new();
    for Listed { name, size, address, .. } in listed {
        let unreachable =
            |what: &str| QemuError::RamUnreachable { block: name.clone(), what: what.to_owned() };
        let pages = size.whole_pages().ok_or_else(|| unreachable("is not whole pages"))?;
        let address = address.ok_or_else(|| unreachable(addresses::UNKNOWN))?;
        let block = match space.at(address, size) {
            Mapped::Private => {
                let backing = ProcessBacking::open(pid, address, size.0)
                    .map_err(|source| unreachable(&format!("cannot be read: {source}")))?;
                RamBlock::new(&name, Box::new(backing), pages)
            }
            Mapped::Shared { file, offset } => RamBlock::open(&name, &file, offset, size, false)?,
            Mapped::PrivateFile { path } => {
                return Err(unreachable(&format!(
                    "is a private mapping of {path}: godwit cannot tell what of it the guest has \
                     changed; give the back end share=on, or no mem-path"
                )));
            }
            Mapped::Nowhere => {
                return Err(unreachable("is not mapped in the process as QEMU says"));
            }
        };
        blocks.push(block);
    }
    Ok(blocks)
}

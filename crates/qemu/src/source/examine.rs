//! A look at a QEMU that is to be a source, before anything is changed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_memory::RamBlock;

use super::back_ends::{BackEnds, pids};
use crate::device_ram::DeviceRam;
use crate::machine::{Machine, Seen, is_over};
use crate::ram::{Ram, StateBy};
use crate::{QemuError, guard, left};

/// What a look at a source has found.
pub(crate) struct Examined {
    pub(super) ram: Arc<Vec<RamBlock>>,
    pub(super) state_by: StateBy,
    pub(super) device_ram: Vec<DeviceRam>,
    pub(super) back_ends: Option<BackEnds>,
    pub(super) was_running: bool,
    /// What it took to look at this QEMU, and at all other processes.
    pub(super) looked: Duration,
    pub(super) processes_looked: Duration,
    pub(super) direct_io: bool,
    pub(super) parts: BTreeSet<String>,
    pub(super) vcpus: Vec<i32>,
}

/// Looks at a QEMU and refuses what cannot be migrated. Changes nothing.
///
/// # Errors
/// What stands against it, with the cure.
pub(crate) fn examine(machine: &mut Machine) -> Result<Examined, QemuError> {
    let state = machine.run_state()?;
    let cure = match state.as_str() {
        // Whoever moved it on would have to know that what has not come is none of its holes.
        "running" | "paused" if left::lacks_pages(machine.pid) => {
            "pages of its guest are still to come from where it was before: wait for the godwit \
             that fetches them; if it was killed, the same `godwit receive` goes on"
        }
        "running" | "paused" => "",
        "inmigrate" => "it waits for a migration itself; are source and destination exchanged?",
        "postmigrate" => {
            "its guest was migrated away, or was paused when a migration of it failed; `cont` here \
             only if it runs nowhere else"
        }
        "finish-migrate" => {
            "another migration is under way, or one was cut off: `migrate_cancel` ends that"
        }
        _ => "it must be running or paused",
    };
    let cure = match state.as_str() {
        "postmigrate" | "finish-migrate" | "paused" => guard::cure(machine.pid).unwrap_or(cure),
        _ => cure,
    };
    if !cure.is_empty() {
        return Err(QemuError::SourceState { state, cure });
    }
    let migration = machine.migration_state()?;
    if !is_over(&migration) {
        let cure = "another migration is under way: wait for it, or end it with `migrate_cancel`";
        return Err(QemuError::SourceState { state: migration, cure });
    }
    let looking = Instant::now();
    let Seen { fronts, direct_io, parts } = machine.check_source()?;
    let alone = !fronts.is_empty();
    let Ram { blocks, state_by, device_ram } = Ram::of_source(machine, alone)?;
    let ram = Arc::new(blocks);
    machine.check_mappings(&ram)?;
    let back_ends = BackEnds::look(machine, fronts, &ram)?;
    let vcpus = machine.vcpu_threads()?;
    let looked = looking.elapsed();
    machine.check_writers(&ram, &pids(back_ends.as_ref()))?;
    let processes_looked = looking.elapsed() - looked;
    Ok(Examined {
        ram,
        state_by,
        device_ram,
        back_ends,
        was_running: state == "running",
        looked,
        processes_looked,
        direct_io,
        parts,
        vcpus,
    })
}

/// Looks at a QEMU whose guest has left without all of its memory, or is about to, and where the
/// godwit was killed that saw to it: only its memory counts.
pub(super) fn examine_left(machine: &mut Machine) -> Result<Examined, QemuError> {
    let (_, fronts) = machine.check_memory()?;
    let Ram { blocks, state_by, device_ram } = Ram::of_source(machine, !fronts.is_empty())?;
    Ok(Examined {
        ram: Arc::new(blocks),
        state_by,
        device_ram,
        back_ends: None,
        was_running: true,
        looked: Duration::ZERO,
        processes_looked: Duration::ZERO,
        direct_io: false,
        parts: BTreeSet::new(),
        vcpus: machine.vcpu_threads()?,
    })
}

//! Instances of Incus's: their only monitor is incusd's, unless they were given one more.

use std::path::PathBuf;

use super::kinds::Owner;
use super::process;
use crate::{QemuError, monitor_of};

/// A monitor of the instance `name` that nobody is connected to.
///
/// # Errors
/// When no such instance runs, or incusd holds the only one: with the cure.
pub fn monitor_of_instance(name: &str) -> Result<PathBuf, QemuError> {
    let all = process::all().map_err(|source| QemuError::System { step: "/proc", source })?;
    let instances = all.iter().filter(|it| matches!(it.owner, Owner::Incus(_)));
    let known: Vec<(&str, i32)> =
        instances.filter_map(|it| Some((it.owner.id()?, it.pid))).collect();
    let Some((_, pid)) = known.iter().find(|(known, _)| *known == name) else {
        let there: Vec<&str> = known.iter().map(|(known, _)| *known).collect();
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        return Err(QemuError::NoInstance { name: name.to_owned(), there });
    };
    monitor_of_process(name, *pid)
}

/// The same of an instance whose process is known.
pub(super) fn monitor_of_process(name: &str, pid: i32) -> Result<PathBuf, QemuError> {
    monitor_of(pid).map_err(|error| match error {
        QemuError::MonitorsInUse { .. } | QemuError::NoMonitor { .. } => {
            QemuError::Incus { name: name.to_owned() }
        }
        error => error,
    })
}

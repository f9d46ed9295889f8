//! A domain that is to leave: what stands against it, what its destination is told, and what is
//! left of it here.

use godwit_libvirt::{Connection, Domain, ErrorKind, State, Xml};
use serde::{Deserialize, Serialize};

use super::definition::Definition;
use super::images::Moving;
use super::xml;
use crate::QemuError;
use crate::compare;
use crate::disks::{Drive, Found, by_name, writable_and_staying};
use crate::machine::Machine;

/// What a destination of libvirt's asks of the source's adapter.
pub(crate) const QUESTION: &[u8] = b"{\"describe\":\"domain\"}";

/// What it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Description {
    pub(super) name: String,
    pub(super) uuid: String,
    /// Of the domain as it runs.
    pub(super) xml: String,
    /// Of what is started the next time, where the domain is persistent.
    pub(super) persistent: Option<String>,
    pub(super) autostarts: bool,
    /// Its disks that can be written and stay where they are.
    pub(super) disks: Vec<String>,
    /// Those that move along.
    pub(super) moving: Vec<Moving>,
    /// They are on storage that both hosts have, the operator says.
    pub(super) disks_are_shared: bool,
}

impl Description {
    /// What the libvirt at `uri` is to keep, where the domain is persistent.
    pub(super) fn definition(&self, uri: String) -> Option<Definition> {
        let (xml, autostarts) = (self.persistent.clone()?, self.autostarts);
        Some(Definition { uri, xml, autostarts })
    }
}

/// A running domain at the source.
#[derive(Debug)]
pub(crate) struct SourceDomain {
    domain: Domain,
    persistent: bool,
    /// Whether its definition is to go, too.
    undefine: bool,
}

fn refused(words: String) -> QemuError {
    QemuError::Domain(words)
}

impl SourceDomain {
    /// The domain called `name`, which must run or be paused, and have nothing that would be lost.
    ///
    /// # Errors
    /// What stands against it.
    pub(crate) fn open(name: &str, uri: &str, undefine: bool) -> Result<Self, QemuError> {
        let host = Connection::open(uri)?;
        let domain = host.domain(name).map_err(|error| match error.kind() {
            ErrorKind::NoDomain => unknown(name, &host),
            _ => error.into(),
        })?;
        let quoted = format!("domain '{name}'");
        match domain.state()? {
            State::Running | State::Paused(_) => {}
            State::ShutOff => {
                let cure = "there is no guest to move; its definition can be copied by virsh \
                            dumpxml and virsh define";
                return Err(refused(format!("{quoted} is shut off: {cure}")));
            }
            State::Other(_) => {
                let cure = "look at it with virsh domstate --reason";
                return Err(refused(format!("{quoted} neither runs nor is paused: {cure}")));
            }
        }
        if domain.has_job()? {
            let cure = "wait for it, or end it with virsh domjobabort";
            return Err(refused(format!(
                "{quoted} has a job of libvirt's (a migration, a save, a backup): {cure}"
            )));
        }
        let persistent = domain.is_persistent()?;
        if undefine && !persistent {
            return Err(refused(format!(
                "{quoted} is transient, so there is no definition to remove: leave \
                 --undefine-source out"
            )));
        }
        for (count, what, list) in [
            (domain.snapshots()?, "snapshots", "snapshot"),
            (domain.checkpoints()?, "checkpoints", "checkpoint"),
        ] {
            if count > 0 {
                return Err(refused(format!(
                    "{quoted} has {count} {what}, which libvirt keeps on this host and which \
                     would be lost: delete them with virsh {list}-delete, --metadata where their \
                     disks are to stay"
                )));
            }
        }
        Ok(Self { domain, persistent, undefine })
    }

    pub(crate) fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Has its disks go by the names that libvirt's users know them by.
    ///
    /// # Errors
    /// When libvirt does not tell.
    pub(crate) fn call(&self, drives: &mut [Drive]) -> Result<(), QemuError> {
        for (device, target) in xml::targets(&self.domain.xml(Xml::Running)?) {
            drives.iter_mut().for_each(|drive| drive.call(&device, &target));
        }
        Ok(())
    }

    /// The answer to [`QUESTION`]: of the disks `drives` of the QEMU of `machine` those in `moving`
    /// move.
    ///
    /// # Errors
    /// When libvirt does not tell, or one cannot move.
    pub(crate) fn describe(
        &self,
        machine: &Machine,
        (drives, moving): (&[Drive], &[Found]),
        disks_are_shared: bool,
    ) -> Result<Vec<u8>, QemuError> {
        let domain = &self.domain;
        let disks = writable_and_staying(drives, moving);
        let moving = moving.iter().map(|disk| {
            let medium = by_name(drives, &disk.name)?.medium.as_ref();
            let files = medium.map_or(&[][..], |medium| &medium.files);
            if let [_, behind, ..] = files {
                return Err(refused(format!(
                    "disk '{}' has an image behind it ({behind}), and cannot move along with a \
                     domain of libvirt's: make them one by virsh blockpull {} {}",
                    disk.name,
                    domain.name(),
                    disk.name
                )));
            }
            let identity = files.first().and_then(|file| compare::identity_in(machine, file));
            Ok(Moving { name: disk.name.clone(), size: disk.size.0, identity })
        });
        let moving = moving.collect::<Result<_, _>>()?;
        let persistent = self.persistent.then(|| domain.xml(Xml::Inactive)).transpose()?;
        let description = Description {
            name: domain.name(),
            uuid: domain.uuid()?,
            xml: domain.xml(Xml::Migratable)?,
            persistent,
            autostarts: self.persistent && domain.autostarts()?,
            disks,
            moving,
            disks_are_shared,
        };
        serde_json::to_vec(&description).map_err(|_| QemuError::Unclear("its domain"))
    }

    /// What is done about the definition of a domain that runs elsewhere now: it goes, if that was
    /// wanted; one that stays is not started with this host any more, as the guest would then run
    /// twice.
    ///
    /// # Errors
    /// When libvirt refuses.
    pub(crate) fn leave(&self) -> Result<(), QemuError> {
        if !self.persistent {
            return Ok(());
        }
        // The daemon may have been started anew since.
        let domain = self.domain.standing()?;
        if self.undefine {
            domain.undefine()?;
        } else if domain.autostarts()? {
            domain.set_autostart(false)?;
        }
        Ok(())
    }
}

/// What the domain called `name` does, in a word.
///
/// # Errors
/// When there is no such domain, or no libvirt.
pub fn domain_state(name: &str, uri: &str) -> Result<String, QemuError> {
    Ok(match domain(name, uri)?.state()? {
        State::Running => "running".to_owned(),
        State::Paused(_) => "paused".to_owned(),
        State::ShutOff => "shut off".to_owned(),
        State::Other(number) => format!("in libvirt's state {number}"),
    })
}

/// The domain called `name` of the libvirt at `uri`.
///
/// # Errors
/// When there is none, or no libvirt.
pub(crate) fn domain(name: &str, uri: &str) -> Result<Domain, QemuError> {
    let host = Connection::open(uri)?;
    host.domain(name).map_err(|error| match error.kind() {
        ErrorKind::NoDomain => unknown(name, &host),
        _ => error.into(),
    })
}

fn unknown(name: &str, host: &Connection) -> QemuError {
    let domains = host.domains().unwrap_or_default();
    let running = domains.iter().filter(|it| !matches!(it.state(), Ok(State::ShutOff)));
    let names: Vec<String> = running.map(Domain::name).collect();
    let known = if names.is_empty() { "none runs".to_owned() } else { names.join(", ") };
    refused(format!("libvirt at {} has no domain '{name}' (running: {known})", host.uri()))
}

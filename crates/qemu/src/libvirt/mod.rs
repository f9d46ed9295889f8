//! Domains of libvirt's: what godwit tells libvirt, so that its world is in the end as after a
//! migration of its own.
//!
//! At the source libvirt holds the monitor (`monitor::libvirt`), stops the guest, runs it again, or
//! ends it. At the destination it starts the QEMU: it restores the domain from a save image whose
//! beginning, the description, is there at once, and whose rest, the device state, comes through
//! the same pipe when the guest has been stopped at the source. Meanwhile guest memory is written
//! from outside.
//!
//! ```text
//!   domain        the source: what is refused, what is told of it, what is left of it
//!   xml           where its disks are, by its description
//!   images        the images of disks that move along
//!   made          those that were made for a guest that has not come
//!   image         the beginning of a save image
//!   memory        where a QEMU that cannot be asked has its RAM
//!   definition    what makes it persistent
//!   arrival       a domain on its way: pipe, restore, process
//!   destination   the engine's destination made of that
//! ```
//!
//! Invariant: a destination that does not come to run the guest leaves nothing in libvirt.

mod arrival;
mod definition;
mod destination;
mod domain;
mod image;
mod images;
mod made;
mod memory;
mod xml;

use std::path::Path;

use crate::QemuError;

pub(crate) use definition::Definition;
pub use destination::LibvirtDestination;
pub use domain::domain_state;
pub(crate) use domain::{QUESTION, SourceDomain, domain};
pub use images::DiskPaths;
pub(crate) use made::sweep_images;
pub(crate) use xml::{Outline, outline};

/// The beginning of a save image of the domain that a source has `told` of, with all disks that
/// move at `path`.
pub(crate) fn image_of(told: &[u8], path: &Path) -> Result<Vec<u8>, QemuError> {
    let told: domain::Description =
        serde_json::from_slice(told).map_err(|_| QemuError::Unclear("its domain"))?;
    let refused = |why: &str| QemuError::Domain(why.to_owned());
    let mut described = told.xml;
    for disk in &told.moving {
        let there = xml::place(&described, &disk.name).map_err(refused)?;
        described = xml::moved(&described, &disk.name, &there.path, path);
        if xml::place(&described, &disk.name).map_err(refused)?.path != path {
            return Err(refused("names a disk twice"));
        }
    }
    image::beginning(&described).ok_or_else(|| refused("is too long"))
}

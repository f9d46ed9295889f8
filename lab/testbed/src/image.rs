//! What a machine boots that is not the guest of the tests: what `make image` makes, and guests
//! with a witness.
//!
//! Keeps one promise: where it is missing, the error names the command that makes it.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use crate::guest::{GuestFiles, target_dir};
use crate::skip::skip;
use crate::witness::Witness;

/// What a machine boots.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Boot {
    /// The guest of `make guest`.
    #[default]
    Guest,
    /// The same guest beside a witness, from an image of `make witnesses`.
    Witness(Witness),
    /// Kernel and initramfs of `make image`, with these arguments for `godwit-stamp run`.
    Image(String),
    /// The ISO of `make image`, as whoever puts it into a drive and waits.
    Iso {
        /// With UEFI instead of a BIOS.
        uefi: bool,
    },
}

impl Boot {
    /// What QEMU is told; `guest` is what the guest of the tests is told.
    pub(crate) fn arguments(&self, guest: &str) -> anyhow::Result<Vec<String>> {
        match self {
            Self::Guest => Ok(GuestFiles::find()?.arguments(guest)),
            Self::Witness(witness) => {
                let image = witness.image();
                ensure!(image.exists(), "{} is missing: run `make witnesses`", image.display());
                let files = GuestFiles { initramfs: image, ..GuestFiles::find()? };
                Ok(files.arguments(&format!("{guest} witness={witness}")))
            }
            Self::Image(arguments) => {
                let dir = target_dir().join("image");
                let files = GuestFiles {
                    kernel: there(dir.join("vmlinuz"))?,
                    initramfs: there(dir.join("initramfs.cpio"))?,
                };
                let append = format!("console=ttyS0 quiet panic=-1 stamp.args=\"{arguments}\"");
                Ok(files.arguments(&append))
            }
            Self::Iso { uefi } => {
                let iso = there(target_dir().join("image/godwit-stamp.iso"))?.display().to_string();
                let mut words = vec!["-cdrom".to_owned(), iso];
                if *uefi {
                    words.extend(["-bios".to_owned(), firmware()?.display().to_string()]);
                }
                Ok(words)
            }
        }
    }
}

fn firmware() -> anyhow::Result<PathBuf> {
    there(target_dir().join("image-build/firmware/root/usr/share/ovmf/OVMF.fd"))
}

fn there(file: PathBuf) -> anyhow::Result<PathBuf> {
    ensure!(Path::exists(&file), "{} is missing: run `make image`", file.display());
    Ok(file)
}

/// Whether `boot` can be booted here. If not, says on standard error that the test `test` is
/// skipped.
#[must_use]
pub fn image_for(boot: &Boot, test: &str) -> bool {
    let missing = boot.arguments("").err();
    if let Some(missing) = &missing {
        skip(test, missing);
    }
    missing.is_none()
}

//! Drivers: those modules that the image brings, loaded where there is a device for them.
//!
//! Under emulation a module costs milliseconds of boot, so a machine without virtio devices loads
//! none.

use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount};
use rustix::system::finit_module;

/// Where the image has them, in the order in which they are loaded.
const MODULES: &str = "/modules";
/// Of all virtio devices on PCI (virtio 1.2, section 4.1.2).
const VIRTIO_VENDOR: &str = "0x1af4";
/// Devices show up some time after their driver.
const PATIENCE: Duration = Duration::from_secs(10);

/// Loads the modules, if there is a virtio device.
pub(super) fn load() -> Result<(), Box<dyn Error>> {
    for (kind, at) in [(c"sysfs", c"/sys"), (c"devtmpfs", c"/dev")] {
        mount(kind, at, kind, MountFlags::empty(), None::<&std::ffi::CStr>)
            .map_err(|problem| format!("cannot mount {}: {problem}", at.to_string_lossy()))?;
    }
    if virtio_devices()?.is_empty() {
        return Ok(());
    }
    let mut modules = names_in(MODULES)?;
    modules.sort();
    for module in modules {
        let file = File::open(&module)?;
        finit_module(file, c"", 0)
            .map_err(|problem| format!("cannot load {}: {problem}", module.display()))?;
    }
    Ok(())
}

/// The virtio disks, once they are all there: /dev/vda and so on.
pub(super) fn disks() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    // 0x1001 and 0x1042: a block device, transitional or not.
    let is_disk = |device: &PathBuf| {
        let id = fs::read_to_string(device.join("device")).unwrap_or_default();
        matches!(id.trim(), "0x1001" | "0x1042")
    };
    let wanted = virtio_devices()?.iter().filter(|device| is_disk(device)).count();
    let began = Instant::now();
    loop {
        let mut found = names_in("/sys/class/block")?;
        found.retain(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vd"))
        });
        if found.len() >= wanted {
            found.sort();
            let device = |path: &PathBuf| Some(Path::new("/dev").join(path.file_name()?));
            return Ok(found.iter().filter_map(device).collect());
        }
        if began.elapsed() > PATIENCE {
            return Err(format!("{} of {wanted} disks came up", found.len()).into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn virtio_devices() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let is_virtio = |device: &PathBuf| {
        fs::read_to_string(device.join("vendor")).is_ok_and(|vendor| vendor.trim() == VIRTIO_VENDOR)
    };
    let mut devices = names_in("/sys/bus/pci/devices")?;
    devices.retain(is_virtio);
    Ok(devices)
}

fn names_in(dir: &str) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let entries = fs::read_dir(dir).map_err(|problem| format!("cannot list {dir}: {problem}"))?;
    Ok(entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect())
}

//! What a run writes to: devices, and memory of its own.

use std::sync::Mutex;

use godwit_stamp::pattern::EXTENT;
use godwit_stamp::sector::{MEMORY, Unit};
use godwit_stamp::table::Table;
use godwit_units::ByteCount;

use crate::device::Device;

/// One device, or the memory.
pub(super) struct Place {
    number: u16,
    extents: u64,
    table: Table,
    store: Store,
}

/// Where the bytes are.
pub(super) enum Store {
    /// On a device.
    Device(Device),
    /// In memory: whoever writes or checks an extent has it to himself.
    Memory(Vec<Mutex<Vec<Unit>>>),
}

impl Place {
    pub(super) fn device(number: u16, device: Device, extents: u64) -> Self {
        Self { number, extents, table: Table::new(extents * EXTENT), store: Store::Device(device) }
    }

    pub(super) fn memory(extents: u64) -> Self {
        let extent = |_| Mutex::new(vec![Unit::ZERO; EXTENT as usize]);
        let store = Store::Memory((0..extents).map(extent).collect());
        Self { number: MEMORY, extents, table: Table::new(extents * EXTENT), store }
    }

    /// The number in its stamps.
    pub(super) fn number(&self) -> u16 {
        self.number
    }

    pub(super) fn extents(&self) -> u64 {
        self.extents
    }

    pub(super) fn units(&self) -> u64 {
        self.extents * EXTENT
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    pub(super) fn is_device(&self) -> bool {
        matches!(self.store, Store::Device(_))
    }

    /// As a finding names it.
    pub(super) fn name(&self) -> String {
        match &self.store {
            Store::Device(device) => device.to_string(),
            Store::Memory(_) => "memory".to_owned(),
        }
    }
}

/// Memory that can be had without swapping (proc_meminfo(5)).
pub(super) fn available() -> Option<ByteCount> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ByteCount(kibibytes * 1024))
}

//! A QEMU whose guest runs before all of its pages have come: what stands against it, and getting
//! its memory ready.
//!
//! It has to handle faults that the kernel takes on QEMU's behalf (`userfaultfd`). Its memory may
//! be its own or a file, which no other process may have mapped: that one would wait for nothing,
//! and fill holes with zeros.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_bitmap::DirtyBitmap;
use godwit_engine::vm::Kept;
use godwit_memory::RamBlock;
use godwit_track::{Approach, KnownProcess, MissingPages, may_trace, other_mappers};
use godwit_units::ByteCount;

use crate::machine::Machine;
use crate::mark::LACKS;
use crate::process::descriptors;
use crate::{QemuError, left, userfaultfd, vhost_user};

/// Why nobody can wait for pages of the RAM of a machine; `None` if one can. Touches nothing.
pub(crate) fn refusal(machine: &mut Machine, ram: &[RamBlock]) -> Option<String> {
    let pid = machine.pid;
    let huge = ram.iter().find(|block| block.has_huge_pages());
    let huge = huge.map(|block| {
        format!(
            "RAM block '{}' is in huge pages: use memory-backend-ram, with transparent huge pages \
             if need be",
            block.name()
        )
    });
    huge.or_else(|| may_trace(pid).err().map(|error| error.to_string()))
        .or_else(|| userfaultfd::refusal_of_faults(pid))
        .or_else(|| other_mappers(pid, ram).into_iter().next().map(|mapper| mapper.finds_zeros()))
        .or_else(|| vhost_user_refusal(machine))
        .or_else(|| {
            let all: ByteCount = ram.iter().map(|block| block.pages().bytes()).sum();
            (locked(pid) > all.0 / 2).then(|| {
                "its memory is locked, so that nothing of it can be thrown away: start it without \
                 -overcommit mem-lock=on"
                    .to_owned()
            })
        })
        .or_else(|| {
            (has_any_userfaultfd(pid) == Some(true)).then(|| {
                format!(
                    "process {pid} has a userfaultfd of its own, or of another godwit: end that \
                     migration or start the VM anew"
                )
            })
        })
}

/// The back end of a vhost-user device maps the guest's memory when that begins to run.
fn vhost_user_refusal(machine: &mut Machine) -> Option<String> {
    let fronts = machine.devices().map_err(QemuError::from);
    let front = match fronts.and_then(|devices| vhost_user::fronts(machine, &devices)) {
        Ok(fronts) => fronts.into_iter().next()?,
        Err(error) => return Some(error.to_string()),
    };
    Some(format!(
        "{} '{}' has its back end in another process, which would find zeros where pages are still \
         to come: use pre-copy",
        front.kind, front.name
    ))
}

/// How much memory of process `pid` is locked (proc(5), VmLck).
fn locked(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

/// Whether somebody has a userfaultfd in process `pid`; `None` where that may not be looked at.
pub(crate) fn has_any_userfaultfd(pid: i32) -> Option<bool> {
    let is_one = |target: &std::path::Path| target.as_os_str() == "anon_inode:[userfaultfd]";
    let mut all = descriptors(pid).ok()?;
    Some(all.any(|descriptor| descriptor.target().is_some_and(|target| is_one(&target))))
}

/// A QEMU of which pages may come to be missing, as it is while the guest still runs at the source:
/// what can be found out by then need not be when it stands still.
#[derive(Debug)]
pub(crate) struct Known {
    process: KnownProcess,
    record: PathBuf,
    harmless_filters: u32,
}

impl Known {
    /// Looks at process `pid`, and changes nothing there.
    pub(crate) fn look_at(pid: i32) -> Result<Self, QemuError> {
        Ok(Self {
            process: KnownProcess::look_at(pid)?,
            record: left::record(pid, LACKS)?,
            harmless_filters: userfaultfd::own_filters(pid),
        })
    }

    /// Throws away what QEMU has of the pages in `missing`, and lets whoever accesses one wait.
    pub(crate) fn await_pages(
        &self,
        machine: &mut Machine,
        ram: &Arc<Vec<RamBlock>>,
        missing: &[DirtyBitmap],
    ) -> Result<Arc<MissingPages>, QemuError> {
        let pages = userfaultfd::for_faults(machine, |way| {
            let approach = Approach { way, harmless_filters: self.harmless_filters };
            MissingPages::start_in(&self.process, approach, ram, missing.to_vec())
        })?;
        Ok(Arc::new(pages))
    }

    /// What another godwit goes on by with `pages` of `ram`.
    pub(crate) fn kept(&self, pages: &MissingPages, ram: &[RamBlock]) -> Kept {
        let (record, space) = (self.record.clone(), self.process.space());
        Kept { record, machine: left::words(pages.number(), (ram, space)) }
    }
}

//! Code that is in the process already: the instructions that the chain of `frame` is made of.
//! Nothing is written there.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use procfs::process::{MMPermissions, MMapPath, MemoryMap, MemoryMaps, Process};

use crate::TrackError;
use crate::permission::not_permitted;

/// `syscall; ret`.
const SYSCALL_RET: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov rax, 15; syscall`, as every libc has it for the return from signal handlers
/// (`__restore_rt`).
const SIGRETURN: [&[u8]; 2] = [
    &[0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00, 0x0f, 0x05],
    &[0xb8, 0x0f, 0x00, 0x00, 0x00, 0x0f, 0x05],
];
/// Read of one mapping at the most: no library is larger, and a program that is linked statically
/// has its libc in it.
const LOOK_AT: u64 = 64 << 20;

/// Where code and stacks of a process are.
#[derive(Debug)]
pub(super) struct Memory {
    /// The address of `syscall; ret`.
    pub(super) syscall: u64,
    /// The address of code that calls rt_sigreturn(2).
    pub(super) sigreturn: u64,
    /// Memory that may be written, as it was when the process was looked at.
    writable: Vec<(u64, u64)>,
}

impl Memory {
    /// Looks at process `pid`, which runs on.
    pub(super) fn of(pid: i32, process: &Process) -> Result<Self, TrackError> {
        let maps = process.maps().map_err(|source| match source {
            procfs::ProcError::PermissionDenied(_) => not_permitted(pid),
            source => TrackError::Proc { pid, what: "maps", source },
        })?;
        let memory =
            File::open(format!("/proc/{pid}/mem")).map_err(|source| match source.kind() {
                io::ErrorKind::PermissionDenied => not_permitted(pid),
                _ => TrackError::Attach { pid, step: "opening its memory", source },
            })?;
        let writable = writable(&maps);
        let code = maps.iter().filter(|map| map.perms.contains(MMPermissions::EXECUTE));
        // Where it is nearly always, and never unloaded, comes first.
        let (libc, other): (Vec<_>, Vec<_>) = code.partition(|map| is_libc(map));
        for map in libc.into_iter().chain(other) {
            let (start, end) = map.address;
            let mut bytes = vec![0; (end - start).min(LOOK_AT) as usize];
            // What cannot be read (vsyscall) is passed over.
            if memory.read_exact_at(&mut bytes, start).is_err() {
                continue;
            }
            let find = |code: &[u8]| position(&bytes, code).map(|at| start + at as u64);
            if let (Some(syscall), Some(sigreturn)) =
                (find(SYSCALL_RET), SIGRETURN.into_iter().find_map(find))
            {
                return Ok(Self { syscall, sigreturn, writable });
            }
        }
        Err(TrackError::Attach {
            pid,
            step: "finding system calls in its code",
            source: io::ErrorKind::NotFound.into(),
        })
    }

    /// Whether `from..to` lies in one mapping of `process` that may be written. One that it has
    /// made since it was looked at is looked for anew.
    pub(super) fn is_one_stack(&self, process: &Process, from: u64, to: u64) -> bool {
        let holds = |&(start, end): &(u64, u64)| start <= from && to <= end;
        let look_again = || process.maps().is_ok_and(|maps| writable(&maps).iter().any(holds));
        self.writable.iter().any(holds) || look_again()
    }
}

fn writable(maps: &MemoryMaps) -> Vec<(u64, u64)> {
    let writable = maps.iter().filter(|map| map.perms.contains(MMPermissions::WRITE));
    writable.map(|map| map.address).collect()
}

fn is_libc(map: &MemoryMap) -> bool {
    let MMapPath::Path(path) = &map.pathname else { return false };
    let name = path.file_name().and_then(|name| Path::new(name).to_str()).unwrap_or_default();
    name.starts_with("libc.") || name.starts_with("libc-") || name.starts_with("ld-")
}

fn position(bytes: &[u8], code: &[u8]) -> Option<usize> {
    bytes.windows(code.len()).position(|window| window == code)
}

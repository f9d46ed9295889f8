//! Where a QEMU has its RAM whose monitor cannot be asked, as libvirt waits there for the device
//! state: by the back ends on its command line, and by what its process has mapped.
//!
//! QEMU maps each back end as one mapping of exactly its size, and tells the kernel not to give it
//! to children (MADV_DONTFORK, which nothing else of that size is told); memory that no file holds
//! has a page behind it that nobody may touch (util/mmap-alloc.c, `qemu_ram_mmap`). What fits
//! more than once is refused.

use godwit_units::ByteCount;
use procfs::ProcError;
use procfs::process::{MMPermissions, MemoryMap, MemoryMaps, Process, VmFlags};

use crate::QemuError;
use crate::command_line::{find, options};

/// A back end of guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct BackEnd {
    id: String,
    size: u64,
}

/// The back ends of process `pid`, and where each is mapped.
pub(super) fn back_ends(pid: i32) -> Result<Vec<(String, ByteCount, u64)>, QemuError> {
    let failed = |error: ProcError| QemuError::NoProcess { pid, why: error.to_string() };
    let process = Process::new(pid).map_err(failed)?;
    let line = process.cmdline().map_err(failed)?;
    locate(&on_command_line(&line), &process.smaps().map_err(failed)?)
}

/// The back ends that a command line asks for, in JSON (as libvirt writes them for QEMU 6.0 and
/// newer) or in words.
fn on_command_line(words: &[String]) -> Vec<BackEnd> {
    let objects = options(words).into_iter().filter(|option| option.name == "object");
    let of = |object: &String| {
        let value = |key| find(object, key, "qom-type");
        let is = value("qom-type")?.starts_with("memory-backend-");
        let size = value("size")?.parse().ok()?;
        is.then_some(BackEnd { id: value("id")?, size })
    };
    objects.filter_map(|object| of(object.value.as_ref()?)).collect()
}

/// Finds each back end's mapping.
fn locate(
    back_ends: &[BackEnd],
    mappings: &MemoryMaps,
) -> Result<Vec<(String, ByteCount, u64)>, QemuError> {
    let mut located = Vec::new();
    for BackEnd { id, size } in back_ends {
        let unreachable = |what: String| QemuError::RamUnreachable { block: id.clone(), what };
        if back_ends.iter().filter(|other| other.size == *size).count() > 1 {
            let what = "is as large as another one, and while libvirt starts a domain nothing \
                        tells which is where: give the NUMA nodes different sizes";
            return Err(unreachable(what.to_owned()));
        }
        let may = MMPermissions::READ | MMPermissions::WRITE;
        let nothing = |next: &MemoryMap| !next.perms.intersects(may | MMPermissions::EXECUTE);
        let fits = |(at, it): &(usize, &MemoryMap)| {
            let ((start, end), behind) = (it.address, mappings.0.get(at + 1));
            let guarded = behind.is_some_and(|next| next.address.0 == end && nothing(next));
            let shared = it.perms == may | MMPermissions::SHARED;
            let private = it.perms == may | MMPermissions::PRIVATE;
            let kept = it.extension.vm_flags.contains(VmFlags::DC);
            kept && end - start == *size && (shared || private && guarded)
        };
        let mut found = mappings.0.iter().enumerate().filter(fits);
        match (found.next(), found.next()) {
            (Some((_, mapping)), None) => {
                located.push((id.clone(), ByteCount(*size), mapping.address.0));
            }
            (None, _) => {
                return Err(unreachable("is not mapped as QEMU maps guest memory".to_owned()));
            }
            _ => {
                let what = format!(
                    "may be in several places: {} are mapped more than once",
                    ByteCount(*size)
                );
                return Err(unreachable(what));
            }
        }
    }
    if located.is_empty() {
        let what = "has no memory back end on its command line: libvirt gives it one for each \
                    machine type of QEMU 5.0 and newer";
        return Err(QemuError::RamUnreachable { block: "*".to_owned(), what: what.to_owned() });
    }
    Ok(located)
}

#[cfg(test)]
mod tests {
    use procfs::FromBufRead;

    use super::*;

    /// As QEMU 7.2 has it that libvirt 9.0 has started with 256 MiB.
    const SMAPS: &str = "\
7f4b06800000-7f4b06a00000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me dc ac dd hg mg 
7f4b06a00000-7f4b06a01000 ---p 00000000 00:00 0 
VmFlags: mr mw me 
7f4b07e00000-7f4b17e00000 rw-p 00000000 00:00 0 
Rss:              123456 kB
VmFlags: rd wr mr mw me dc ac dd hg mg 
7f4b17e00000-7f4b17e01000 ---p 00000000 00:00 0 
VmFlags: mr mw me 
7f4b18000000-7f4b57fff000 rwxp 00000000 00:00 0 
VmFlags: rd wr ex mr mw me ac hg 
7f4b60000000-7f4b70000000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me ac 
";
    const PC_RAM: &str = r#"{"qom-type":"memory-backend-ram","id":"pc.ram","size":268435456}"#;

    fn found(objects: &[&str], smaps: &str) -> Result<Vec<(String, ByteCount, u64)>, QemuError> {
        let words = objects.iter().flat_map(|object| ["-object", object]).map(str::to_owned);
        let words: Vec<String> = ["qemu".to_owned()].into_iter().chain(words).collect();
        locate(&on_command_line(&words), &MemoryMaps::from_buf_read(smaps.as_bytes()).unwrap())
    }

    #[test]
    fn a_back_end_is_the_mapping_of_its_size_that_qemu_has_made_for_it() {
        let at = |size| vec![("pc.ram".to_owned(), ByteCount(size), 0x7f4b_07e0_0000)];
        let secret = r#"{"qom-type":"secret","id":"masterKey0","size":2097152}"#;
        assert_eq!(found(&[secret, PC_RAM], SMAPS).unwrap(), at(256 << 20));
        let words = "memory-backend-ram,id=pc.ram,size=268435456";
        assert_eq!(found(&[words], SMAPS).unwrap(), at(256 << 20));
    }

    #[test]
    fn a_memfd_needs_no_page_behind_it() {
        let smaps = "10000000-20000000 rw-s 00000000 00:01 7 /memfd:memory-backend-memfd (deleted)
VmFlags: rd wr sh mr mw me ms dc dd hg mg 
";
        let memfd = r#"{"qom-type":"memory-backend-memfd","id":"m","size":268435456}"#;
        assert_eq!(found(&[memfd], smaps).unwrap()[0].2, 0x1000_0000);
    }

    #[test]
    fn what_may_be_elsewhere_is_refused() {
        let told = |objects: &[&str], smaps: &str| found(objects, smaps).unwrap_err().to_string();
        let twice = format!("{SMAPS}{}", SMAPS.replace("7f4b", "7f4c"));
        assert!(told(&[PC_RAM], &twice).contains("may be in several places"));
        let unguarded = SMAPS.replace("---p", "rw-p");
        assert!(told(&[PC_RAM], &unguarded).contains("is not mapped as QEMU maps"));
        let inherited = SMAPS.replace(" dc ", " ");
        assert!(told(&[PC_RAM], &inherited).contains("is not mapped as QEMU maps"));
        let second = PC_RAM.replace("pc.ram", "ram-node1");
        assert!(told(&[PC_RAM, &second], &twice).contains("as large as another"));
        assert!(told(&[], SMAPS).contains("no memory back end"));
    }
}

//! A writer of cpio archives in the "newc" form, the one that the kernel unpacks as initramfs
//! (kernel documentation, "initramfs buffer format").
//!
//! Keeps one promise: the same entries make the same bytes (no times, no owners, inodes in order),
//! so an image is rewritten only when its content changed.

/// An archive in the making.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

impl Archive {
    /// Adds a directory.
    pub(crate) fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a program.
    pub(crate) fn program(&mut self, name: &str, content: &[u8]) {
        self.entry(name, FILE | 0o755, (0, 0), content);
    }

    /// Adds a character device.
    pub(crate) fn character_device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    /// The whole archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        let (inode, links, none) = (self.entries, 1, 0);
        // c_ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize
        // check
        let fields = [
            inode, mode, none, none, links, none, size, none, none, device.0, device.1, name_size,
            none,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    /// Names and contents end on a multiple of four bytes.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_of_one_program() {
        let mut archive = Archive::default();
        archive.program("init", b"hello");
        let bytes = archive.finish();

        let expected = [
            "070701",
            "00000001000081ed0000000000000000000000010000000000000005",
            "00000000000000000000000000000000",
            "0000000500000000init\0\0hello\0\0\0",
            "070701",
            "00000002000000000000000000000000000000010000000000000000",
            "00000000000000000000000000000000",
            "0000000b00000000TRAILER!!!\0\0\0\0",
        ];
        assert_eq!(String::from_utf8(bytes).unwrap(), expected.concat());
    }

    #[test]
    fn every_header_stands_on_a_multiple_of_four() {
        let mut archive = Archive::default();
        archive.directory("dev");
        archive.character_device("dev/console", 5, 1);
        archive.program("init", &[7; 13]);
        let bytes = archive.finish();
        let headers: Vec<_> =
            (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"070701")).collect();
        assert_eq!(headers.len(), 4);
        assert!(headers.iter().all(|at| at % 4 == 0), "{headers:?}");
    }
}

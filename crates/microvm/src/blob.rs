//! The state blob: everything but memory, as bytes.
//!
//! ```text
//!   "godwitvm"  version u32  0 u32  length u64  xxh3-128 of the body   40 bytes, little-endian
//!   body: sections, each  tag u32  index u32  length u64  bytes
//! ```
//!
//! Keeps one promise: what is read was written by this version, whole and undamaged, or there is an
//! error and nothing else. Sections hold the kernel's structures as they are in memory; both sides
//! are x86-64 Linux. What the sections are is said in [`Tag`], what is in them by those who write
//! them.

use twox_hash::XxHash3_128;

use crate::StateError;

const MAGIC: [u8; 8] = *b"godwitvm";
/// Raised with every change of what is written.
pub const VERSION: u32 = 2;
const HEADER: usize = 40;
/// More than any state; a length beyond it is not believed.
const LONGEST: u64 = 64 << 20;

/// What a section holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "named for KVM's structures")]
pub(crate) enum Tag {
    Machine = 1,
    Clock = 2,
    Serial = 3,
    Disk = 4,
    Balloon = 5,
    CpuId = 16,
    TscKhz = 17,
    MpState = 18,
    Regs = 19,
    Sregs = 20,
    Xsave = 21,
    Xcrs = 22,
    DebugRegs = 23,
    Lapic = 24,
    Msrs = 25,
    Events = 26,
}

/// A blob in the making.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    body: Vec<u8>,
}

impl Writer {
    /// Adds a section; `index` tells vCPUs apart.
    pub(crate) fn section(&mut self, tag: Tag, index: u32, bytes: &[u8]) {
        self.body.extend((tag as u32).to_le_bytes());
        self.body.extend(index.to_le_bytes());
        self.body.extend((bytes.len() as u64).to_le_bytes());
        self.body.extend(bytes);
    }

    /// The blob.
    #[must_use]
    pub(crate) fn finish(self) -> Vec<u8> {
        let mut blob = Vec::with_capacity(HEADER + self.body.len());
        blob.extend(MAGIC);
        blob.extend(VERSION.to_le_bytes());
        blob.extend(0_u32.to_le_bytes());
        blob.extend((self.body.len() as u64).to_le_bytes());
        blob.extend(XxHash3_128::oneshot(&self.body).to_le_bytes());
        blob.extend(self.body);
        blob
    }
}

/// A blob that was found whole.
#[derive(Clone, Debug)]
pub(crate) struct Blob<'a> {
    sections: Vec<(u32, u32, &'a [u8])>,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl<'a> Blob<'a> {
    /// Checks `bytes` and finds its sections.
    ///
    /// # Errors
    /// When it is of another version, cut short, damaged or no state at all.
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Self, StateError> {
        if bytes.len() < MAGIC.len() || bytes[..MAGIC.len()] != MAGIC {
            return Err(StateError::NoState {
                found: bytes[..bytes.len().min(MAGIC.len())].to_vec(),
            });
        }
        if bytes.len() < HEADER {
            return Err(StateError::Length { found: bytes.len() as u64, expected: HEADER as u64 });
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(StateError::Version { found: version, own: VERSION });
        }
        let (length, body) = (u64_at(bytes, 16), &bytes[HEADER..]);
        if length != body.len() as u64 {
            let expected = length.saturating_add(HEADER as u64);
            return Err(StateError::Length { found: bytes.len() as u64, expected });
        }
        let expected = u128::from(u64_at(bytes, 24)) | u128::from(u64_at(bytes, 32)) << 64;
        let found = XxHash3_128::oneshot(body);
        if found != expected {
            return Err(StateError::Checksum { found, expected });
        }
        Self::sections(body)
    }

    fn sections(mut body: &'a [u8]) -> Result<Self, StateError> {
        let mut sections = Vec::new();
        while !body.is_empty() {
            let cut = || StateError::Malformed("its last section is cut short".to_owned());
            if body.len() < 16 {
                return Err(cut());
            }
            let (tag, index, length) = (u32_at(body, 0), u32_at(body, 4), u64_at(body, 8));
            if length > (body.len() - 16) as u64 {
                return Err(cut());
            }
            let (section, rest) = body[16..].split_at(length as usize);
            sections.push((tag, index, section));
            body = rest;
        }
        Ok(Self { sections })
    }

    /// The section `tag` of vCPU `index` (0 where there is one for the machine).
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn section(&self, tag: Tag, index: u32) -> Result<&'a [u8], StateError> {
        self.find(tag, index).ok_or_else(|| {
            StateError::Malformed(format!("section {tag:?} of index {index} is missing"))
        })
    }

    /// The same, where there need not be one.
    #[must_use]
    pub(crate) fn find(&self, tag: Tag, index: u32) -> Option<&'a [u8]> {
        self.sections
            .iter()
            .find(|section| (section.0, section.1) == (tag as u32, index))
            .map(|section| section.2)
    }
}

/// A section that is words of 64 bits, and back; `None` if it is no whole number of them.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn words_of(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, []) = bytes.as_chunks::<8>() else { return None };
    Some(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

/// Whether a blob of which `bytes` have come can be complete; it never is longer than [`LONGEST`].
pub(crate) fn too_long(bytes: usize) -> bool {
    bytes as u64 > LONGEST
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob() -> Vec<u8> {
        let mut writer = Writer::default();
        writer.section(Tag::Regs, 0, b"registers");
        writer.section(Tag::Regs, 1, b"");
        writer.section(Tag::Serial, 0, b"line");
        writer.finish()
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = blob();
        let blob = Blob::read(&bytes).unwrap();
        assert_eq!(blob.section(Tag::Regs, 0), Ok(&b"registers"[..]));
        assert_eq!(blob.section(Tag::Regs, 1), Ok(&b""[..]));
        assert_eq!(blob.section(Tag::Serial, 0), Ok(&b"line"[..]));
        assert_eq!(blob.find(Tag::Disk, 0), None);
        assert!(
            blob.section(Tag::Regs, 2)
                .unwrap_err()
                .to_string()
                .contains("Regs of index 2 is missing")
        );
    }

    #[test]
    fn a_blob_of_another_version_is_told() {
        let mut bytes = blob();
        bytes[8] = 7;
        let error = Blob::read(&bytes).unwrap_err();
        assert_eq!(error, StateError::Version { found: 7, own: VERSION });
        assert!(error.to_string().contains("run the same godwit on both sides"));
    }

    #[test]
    fn a_blob_cut_anywhere_is_refused() {
        let bytes = blob();
        for end in 0..bytes.len() {
            let error = Blob::read(&bytes[..end]).unwrap_err();
            let fits = if end < 8 {
                matches!(error, StateError::NoState { .. })
            } else {
                matches!(error, StateError::Length { .. })
            };
            assert!(fits, "{end}: {error}");
        }
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let bytes = blob();
        for at in (0..12).chain(16..bytes.len()) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(Blob::read(&damaged).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_section_that_lies_about_its_length_is_refused() {
        let mut body = vec![0; 16];
        body[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(Blob::sections(&body), Err(StateError::Malformed(_))));
    }
}

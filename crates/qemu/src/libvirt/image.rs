//! The beginning of a save image, as libvirt writes it itself (qemu_saveimage.h,
//! `virQEMUSaveHeader`; version 2 since libvirt 1.0): a header, the description, and nothing to a
//! whole page. What follows is QEMU's stream.

const MAGIC: &[u8; 16] = b"LibvirtQemudSave";
const VERSION: u32 = 2;
const HEADER_LENGTH: usize = 92;
/// Libvirt begins a stream where a page of a file begins.
const PAGE: usize = 4096;

/// The beginning of an image of a domain with this description; `None` where that is too long.
pub(super) fn beginning(xml: &str) -> Option<Vec<u8>> {
    let described = xml.len() + 1;
    let length = (HEADER_LENGTH + described).next_multiple_of(PAGE) - HEADER_LENGTH;
    let mut image = MAGIC.to_vec();
    // What was running is told by a flag of the restore instead, no compression, no cookie.
    for word in [VERSION, u32::try_from(length).ok()?, 0, 0, 0] {
        image.extend(word.to_le_bytes());
    }
    image.resize(HEADER_LENGTH, 0);
    image.extend(xml.as_bytes());
    image.resize(HEADER_LENGTH + length, 0);
    Some(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_begins_behind_whole_pages() {
        for length in [0, 1, 4002, 4003, 4004, 4005, 100_000] {
            let image = beginning(&"x".repeat(length)).unwrap();
            assert_eq!(image.len() % PAGE, 0, "{length}");
            assert_eq!(image[..16], *MAGIC);
            let told = u32::from_le_bytes(image[20..24].try_into().unwrap()) as usize;
            assert_eq!(HEADER_LENGTH + told, image.len());
            assert_eq!(image[92..92 + length], *"x".repeat(length).as_bytes());
            assert_eq!(image[92 + length], 0, "the description ends with a NUL");
        }
    }
}

//! Room for the bytes of pages.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};

use crate::{ByteCount, PAGE_SIZE, PageCount};

const PAGE: usize = PAGE_SIZE as usize;

/// Room for the bytes of pages, which begins at a page's address, as what is copied into it does.
///
/// The kernel copies with `rep movsb` where the processor says that this is fast. On AMD's Zen 4 it
/// is not where the destination lies up to 31 bytes behind the source, by the lowest 12 bits of
/// their addresses: it takes more than twice as long (glibc bug 30994, which names Zen 3 as well;
/// figures in docs/bulk.md). A `Vec` of many pages, which malloc(3) puts 16 bytes behind the
/// beginning of a page, lies just there for every page of another process.
///
/// ```
/// use godwit_units::{PageBuffer, PageCount};
///
/// let mut pages = PageBuffer::new(PageCount(2));
/// pages[4096..].fill(7);
/// assert_eq!((pages.len(), pages[4095], pages[4096]), (8192, 0, 7));
/// assert_eq!(pages.as_ptr().addr() % 4096, 0);
/// ```
#[derive(Default)]
pub struct PageBuffer {
    /// The pages, and nearly one more.
    bytes: Vec<u8>,
    /// Where in them the pages are.
    pages: Range<usize>,
}

impl PageBuffer {
    /// Room for `pages`, of zeros.
    #[must_use]
    pub fn new(pages: PageCount) -> Self {
        let length = pages.bytes().0 as usize;
        let bytes = vec![0; length + PAGE - 1];
        let address = bytes.as_ptr().addr();
        let start = address.next_multiple_of(PAGE) - address;
        Self { bytes, pages: start..start + length }
    }

    /// Makes sure that so many bytes have room; what was there is lost where they had not.
    ///
    /// ```
    /// use godwit_units::{ByteCount, PageBuffer};
    ///
    /// let mut pages = PageBuffer::default();
    /// pages.fit(ByteCount(5000));
    /// assert_eq!(pages.len(), 8192);
    /// ```
    pub fn fit(&mut self, room: ByteCount) {
        if (self.len() as u64) < room.0 {
            *self = Self::new(PageCount(room.0.div_ceil(PAGE_SIZE)));
        }
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.pages.clone()]
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.pages.clone()]
    }
}

impl fmt::Debug for PageBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Guest memory is nobody's business.
        write!(f, "PageBuffer({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_at_a_page_wherever_its_memory_does() {
        let mut others = Vec::new();
        for pages in [0, 1, 3, 64, 257] {
            let mut buffer = PageBuffer::new(PageCount(pages));
            assert_eq!(buffer.len() as u64, pages * PAGE_SIZE);
            assert_eq!(buffer.as_ptr().addr() % PAGE, 0, "{pages} pages");
            buffer.fill(1);
            // Moved, it still does.
            others.push((vec![0_u8; 16 * pages as usize], buffer));
        }
        assert!(others.iter().all(|(_, buffer)| buffer.as_ptr().addr() % PAGE == 0));
    }

    #[test]
    fn what_fits_stays() {
        let mut buffer = PageBuffer::default();
        assert!(buffer.is_empty());
        buffer.fit(ByteCount(1));
        buffer[7] = 7;
        buffer.fit(ByteCount(PAGE_SIZE));
        assert_eq!((buffer.len(), buffer[7]), (PAGE, 7));
        buffer.fit(ByteCount(PAGE_SIZE + 1));
        assert_eq!(buffer.len(), 2 * PAGE);
    }
}

//! The beacon: the page in which the guest counts without pause, so that an observer on the host
//! who maps the guest's RAM can see it run, stand still and run on elsewhere.
//!
//! Keeps two promises. The magic number stands in memory only where a beacon is: it is put together
//! at run time, so neither the program's file nor the initramfs nor a copy of either in the page
//! cache holds it. And the counter only ever grows, so the greater of two values is the later one,
//! also when they come from two copies of the page. Finding the page in a RAM file and sampling it
//! is left to `godwit-testbed`.

use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering};

use godwit_units::PAGE_SIZE;

/// Bytes of the magic number that a beacon page starts with.
pub const MAGIC_LEN: usize = 16;
/// Where the check word stands in the page.
pub const CHECK_OFFSET: usize = 16;
/// Where the counter stands in the page: a cache line of its own.
pub const COUNTER_OFFSET: usize = 64;
/// Bytes that must be read from the start of a page to know whether it is a beacon.
pub const HEADER_LEN: usize = CHECK_OFFSET + 8;

/// `GODWIT-BEACON-1\0` with every byte changed by [`KEY`].
const MASKED: [u8; MAGIC_LEN] = mask(*b"GODWIT-BEACON-1\0");
const KEY: u8 = 0xa5;

const fn mask(mut bytes: [u8; MAGIC_LEN]) -> [u8; MAGIC_LEN] {
    let mut i = 0;
    while i < MAGIC_LEN {
        bytes[i] ^= KEY;
        i += 1;
    }
    bytes
}

/// The magic number, put together now. `black_box` keeps the compiler from doing it ahead of time,
/// which would leave the very bytes in the program.
#[must_use]
pub fn magic() -> [u8; MAGIC_LEN] {
    let key = black_box(KEY);
    black_box(MASKED).map(|byte| byte ^ key)
}

/// The word behind the magic number: it must fit, so that a text that happens to contain the magic
/// is no beacon.
#[must_use]
pub fn check_word() -> u64 {
    let magic = magic();
    let (low, high) = magic.split_at(8);
    crate::stamp::mix(word(low) ^ crate::stamp::mix(word(high)))
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

/// Whether a page that starts with `header` is a beacon.
#[must_use]
pub fn is_beacon(header: &[u8]) -> bool {
    header.len() >= HEADER_LEN
        && header[..MAGIC_LEN] == magic()
        && word(&header[CHECK_OFFSET..HEADER_LEN]) == check_word()
}

/// The page itself, as the guest holds it.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Beacon {
    magic: [u8; MAGIC_LEN],
    check: u64,
    _to_next_line: [u64; 5],
    counter: AtomicU64,
    _rest: [u64; 503],
}

const _: () = assert!(size_of::<Beacon>() as u64 == PAGE_SIZE);
const _: () = assert!(core::mem::offset_of!(Beacon, check) == CHECK_OFFSET);
const _: () = assert!(core::mem::offset_of!(Beacon, counter) == COUNTER_OFFSET);

impl Beacon {
    /// A beacon that nobody can find yet and that stands at 0.
    #[must_use]
    pub const fn dark() -> Self {
        Self {
            magic: [0; MAGIC_LEN],
            check: 0,
            _to_next_line: [0; 5],
            counter: AtomicU64::new(0),
            _rest: [0; 503],
        }
    }

    /// Lets it be found. Only its final place is ever given the magic number, lest a stale copy on
    /// the stack be found.
    pub fn light(&mut self) {
        self.magic = magic();
        self.check = check_word();
    }

    /// Shows `count`, which must be greater than what was shown before.
    pub fn show(&self, count: u64) {
        self.counter.store(count, Ordering::Relaxed);
    }

    /// What is shown.
    #[must_use]
    pub fn shown(&self) -> u64 {
        self.counter.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(beacon: &Beacon) -> Vec<u8> {
        [&beacon.magic[..], &beacon.check.to_le_bytes()].concat()
    }

    #[test]
    fn a_beacon_is_recognised_by_magic_and_check_word() {
        let mut beacon = Box::new(Beacon::dark());
        beacon.light();
        let header = header(&beacon);

        assert_eq!(magic(), *b"GODWIT-BEACON-1\0");
        assert!(is_beacon(&header));
        assert!(!is_beacon(&header[..HEADER_LEN - 1]));
        for i in 0..header.len() {
            let mut other = header.clone();
            other[i] ^= 1;
            assert!(!is_beacon(&other), "byte {i} does not matter");
        }
    }

    #[test]
    fn the_beacon_shows_what_it_was_told() {
        let mut beacon = Box::new(Beacon::dark());
        beacon.light();
        beacon.show(7);
        assert_eq!(beacon.shown(), 7);
        assert_eq!(std::ptr::from_ref(&*beacon).addr() % 4096, 0);
    }
}

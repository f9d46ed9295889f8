//! Fingerprints of pages, and digests over many of them.
//!
//! Invariant: no page has the fingerprint 0, which stands for "not sent".

use std::num::NonZeroU64;

use twox_hash::XxHash3_64;
use twox_hash::xxhash3_128::Hasher as XxHash3_128;

/// What a page held when it was last sent; see the crate's page for how much it may be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(NonZeroU64);

impl Fingerprint {
    /// The number that goes to a peer; never 0.
    #[must_use]
    pub fn word(self) -> u64 {
        self.0.get()
    }

    /// The fingerprint of this [`Self::word`]; none of 0.
    ///
    /// ```
    /// use godwit_fingerprints::{Fingerprint, Key};
    ///
    /// let print = Key::new(7).page(&[1; 4096]);
    /// assert_eq!(Fingerprint::from_word(print.word()), Some(print));
    /// ```
    #[must_use]
    pub fn from_word(word: u64) -> Option<Self> {
        NonZeroU64::new(word).map(Self)
    }
}

/// Makes fingerprints; both sides of a session make the same ones.
#[derive(Clone, Copy)]
pub struct Key {
    seed: u64,
    zero: Fingerprint,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The seed is a secret.
        f.write_str("Key")
    }
}

impl Key {
    /// The key of the session with this random seed, which must not be shown to the guest.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, zero: print(seed, &[0; 4096]) }
    }

    /// The seed, for the other side of the session alone.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The fingerprint of a page.
    #[must_use]
    pub fn page(&self, bytes: &[u8]) -> Fingerprint {
        print(self.seed, bytes)
    }

    /// The fingerprint of a page of zeros, which need not be read: holes have it too.
    #[must_use]
    pub fn zero(&self) -> Fingerprint {
        self.zero
    }

    /// An empty digest under this key.
    #[must_use]
    pub fn digest(&self) -> RangeDigest {
        RangeDigest {
            hasher: Box::new(XxHash3_128::with_seed(self.seed)),
            buffer: Vec::with_capacity(BUFFER),
        }
    }
}

fn print(seed: u64, bytes: &[u8]) -> Fingerprint {
    let word = XxHash3_64::oneshot_with_seed(seed, bytes);
    Fingerprint(NonZeroU64::new(word).unwrap_or(NonZeroU64::MIN))
}

/// Bytes that are hashed at once.
const BUFFER: usize = 4096;

/// A digest over the fingerprints of a range of pages, in order: XXH3-128. The destination makes it
/// from what it reads back, the source from its fingerprints, and they agree exactly when all pages
/// do.
#[derive(Clone)]
pub struct RangeDigest {
    hasher: Box<XxHash3_128>,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for RangeDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RangeDigest")
    }
}

impl RangeDigest {
    /// Takes in the next page's.
    pub fn add(&mut self, print: Fingerprint) {
        self.buffer.extend_from_slice(&print.word().to_le_bytes());
        if self.buffer.len() >= BUFFER {
            self.hasher.write(&self.buffer);
            self.buffer.clear();
        }
    }

    /// The digest.
    #[must_use]
    pub fn finish(mut self) -> u128 {
        self.hasher.write(&self.buffer);
        self.hasher.finish_128()
    }
}

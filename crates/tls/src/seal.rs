//! Parts of a file that only those read, and only those could have written, who have a secret:
//! AES-256-GCM (NIST SP 800-38D), with a key made of the secret by HKDF-SHA-256 (RFC 5869).

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};

/// Bytes of what proves a part to be whole.
pub const TAG_LEN: usize = 16;
/// Bytes of what makes each key another.
pub const SALT_LEN: usize = 16;

/// What seals the parts of one file, and opens them.
///
/// Each part has a number, and is good for that number, its head and its file alone. Who seals uses
/// a salt once, and each number once with it: two parts under one number and key would give both
/// away.
///
/// ```
/// use godwit_tls::Seal;
///
/// let seal = Seal::new(&[7; 32], &[1; 16]);
/// let mut part = b"what a page holds".to_vec();
/// let tag = seal.seal(3, b"head", &mut part);
/// assert_ne!(part, b"what a page holds");
/// assert!(!seal.open(4, b"head", &mut part.clone(), &tag));
/// assert!(seal.open(3, b"head", &mut part, &tag));
/// assert_eq!(part, b"what a page holds");
/// ```
#[derive(Debug)]
pub struct Seal(LessSafeKey);

impl Seal {
    /// For the file with this `salt`, of those who have `secret`.
    ///
    /// # Panics
    /// Never: the key has the length of the cipher.
    #[must_use]
    pub fn new(secret: &[u8; 32], salt: &[u8; SALT_LEN]) -> Self {
        let made = Salt::new(HKDF_SHA256, salt).extract(secret);
        let key = made.expand(&[b"godwit sealed file"], &AES_256_GCM).map(UnboundKey::from);
        Self(LessSafeKey::new(key.expect("a key of the cipher's length")))
    }

    /// Makes of `bytes` what nobody else reads, and returns what [`Self::open`] wants.
    ///
    /// # Panics
    /// When `bytes` are more than the cipher takes, 64 GiB.
    #[must_use]
    pub fn seal(&self, number: u64, head: &[u8], bytes: &mut [u8]) -> [u8; TAG_LEN] {
        let sealed = self.0.seal_in_place_separate_tag(nonce(number), Aad::from(head), bytes);
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(sealed.expect("parts are small").as_ref());
        tag
    }

    /// Makes of `bytes` what was sealed, where they are that, under this `number` and with this
    /// `head`; whether they are. What is in them otherwise is of no use.
    #[must_use]
    pub fn open(&self, number: u64, head: &[u8], bytes: &mut [u8], tag: &[u8; TAG_LEN]) -> bool {
        let (head, tag) = (Aad::from(head), Tag::from(*tag));
        self.0.open_in_place_separate_tag(nonce(number), head, tag, bytes, 0..).is_ok()
    }
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_good_for_its_secret_its_salt_its_number_and_its_head_alone() {
        let (seal, mut part) = (Seal::new(&[7; 32], &[1; 16]), vec![5; 4096]);
        let tag = seal.seal(0, b"head", &mut part);
        let opens = |seal: &Seal, number, head: &[u8], part: &[u8], tag| {
            let mut part = part.to_vec();
            seal.open(number, head, &mut part, tag) && part == vec![5; 4096]
        };
        assert!(opens(&seal, 0, b"head", &part, &tag));
        for other in [Seal::new(&[8; 32], &[1; 16]), Seal::new(&[7; 32], &[2; 16])] {
            assert!(!opens(&other, 0, b"head", &part, &tag));
        }
        assert!(!opens(&seal, 1, b"head", &part, &tag) && !opens(&seal, 0, b"tail", &part, &tag));
        assert!(!opens(&seal, 0, b"head", &part[1..], &tag));
        part[9] ^= 1;
        assert!(!opens(&seal, 0, b"head", &part, &tag));
    }
}

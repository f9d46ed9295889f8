//! Proof that a peer has a secret, without showing it: HMAC-SHA-256 (RFC 2104, RFC 6234).

use ring::{digest, hmac};

/// Bytes of a proof.
pub const PROOF_LEN: usize = 32;

/// What proves, to whoever has `secret` too, that its maker has it and means `words`.
///
/// Each of the words is taken in with its length, so that no two lists of words are alike. A proof
/// says nothing of when it was made: put into the words what is said only once.
///
/// ```
/// use godwit_tls::{prove, proves};
///
/// let secret = [7; 32];
/// let proof = prove(&secret, &[b"resume", b"3"]);
/// assert!(proves(&secret, &[b"resume", b"3"], &proof));
/// assert!(!proves(&secret, &[b"resume", b"4"], &proof));
/// assert!(!proves(&[8; 32], &[b"resume", b"3"], &proof));
/// ```
#[must_use]
pub fn prove(secret: &[u8; 32], words: &[&[u8]]) -> [u8; PROOF_LEN] {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let mut proof = [0; PROOF_LEN];
    proof.copy_from_slice(hmac::sign(&key, &joined(words)).as_ref());
    proof
}

/// Whether `proof` is what [`prove`] makes of the same; found out in a time that tells nothing.
#[must_use]
pub fn proves(secret: &[u8; 32], words: &[&[u8]], proof: &[u8; PROOF_LEN]) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    hmac::verify(&key, &joined(words), proof).is_ok()
}

/// What names a certificate, given in DER: its SHA-256 in hexadecimal, as `openssl x509
/// -fingerprint` has it but for the colons.
///
/// ```
/// assert!(godwit_tls::fingerprint(b"abc").starts_with("ba7816bf"));
/// ```
#[must_use]
pub fn fingerprint(certificate: &[u8]) -> String {
    let digest = digest::digest(&digest::SHA256, certificate);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn joined(words: &[&[u8]]) -> Vec<u8> {
    let word = |word: &&[u8]| [&(word.len() as u64).to_le_bytes(), *word].concat();
    words.iter().flat_map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_do_not_run_into_each_other() {
        let secret = [1; 32];
        let lists: [&[&[u8]]; 4] = [&[b"ab", b"c"], &[b"a", b"bc"], &[b"abc"], &[b"ab", b"c", b""]];
        for (at, words) in lists.iter().enumerate() {
            let proof = prove(&secret, words);
            let same: Vec<usize> =
                (0..lists.len()).filter(|other| proves(&secret, lists[*other], &proof)).collect();
            assert_eq!(same, [at]);
        }
    }
}

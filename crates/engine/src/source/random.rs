//! What nobody may guess: the number of a session, the key of the page fingerprints, and what makes
//! the key of a copy another.
//!
//! Invariant: nothing stands in for the kernel's random numbers; who gets none does not begin.

use std::io;

use godwit_fingerprints::{Key, PageFingerprints};
use godwit_tls::SALT_LEN;
use godwit_wire::{Secret, SessionId};

/// Fingerprints of all pages, and their key, which the guest must not know.
pub(super) fn new_fingerprints() -> io::Result<(PageFingerprints, Key)> {
    let [seed, _] = random()?;
    Ok((PageFingerprints::new(), Key::new(seed)))
}

/// The number of a session.
pub(super) fn new_session() -> io::Result<SessionId> {
    let [high, low] = random()?;
    Ok(SessionId((u128::from(high) << 64 | u128::from(low)).to_le_bytes()))
}

/// What a session's source is known by when it comes back.
pub(super) fn new_secret() -> io::Result<Secret> {
    let words = [random()?, random()?].concat();
    let mut secret = [0; 32];
    for (bytes, word) in secret.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    Ok(Secret(secret))
}

/// What makes the key of a copy of guest memory another than that of any before.
pub(super) fn new_salt() -> io::Result<[u8; SALT_LEN]> {
    let [high, low] = random()?;
    Ok((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
}

fn random() -> io::Result<[u64; 2]> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let bits = u128::from_le_bytes(bytes);
    Ok([(bits >> 64) as u64, bits as u64])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key of a constant, or of something that can be guessed, would be the same each time.
    #[test]
    fn each_session_has_a_key_of_its_own() {
        let prints = [0; 8].map(|_: u8| {
            let (_, key) = new_fingerprints().unwrap();
            key.page(&[7; 4096])
        });
        let different: std::collections::HashSet<_> = prints.into_iter().collect();
        assert_eq!(different.len(), prints.len());
        assert_ne!(new_session().unwrap().0, new_session().unwrap().0);
        assert_ne!(new_salt().unwrap(), new_salt().unwrap());
        let [one, other] = [0; 2].map(|_: u8| new_secret().unwrap().0);
        assert!(one != other && one[..16] != one[16..] && one[16..] != other[16..]);
    }
}

//! By what a source that comes back is known, and its destination to it: both have the session's
//! secret, and show that they do by words that were never said before.

use godwit_tls::{prove, proves};
use godwit_wire::{PROOF_LEN, Secret, SessionId};

/// The attempt that a destination names which was started anew: it does not know what came over
/// which channel.
pub(crate) const FORGOTTEN: u32 = u32::MAX;

/// What one attempt to take a session up again is proven by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReturnProof {
    pub(crate) session: SessionId,
    pub(crate) secret: Secret,
    /// Counted up with each attempt, so that none can be made twice.
    pub(crate) attempt: u32,
}

impl ReturnProof {
    /// The source's, which will use so many channels of memory.
    pub(crate) fn of_source(&self, channels: u8) -> [u8; PROOF_LEN] {
        self.with(|words| prove(&self.secret.0, words), b"resume", &[&[channels]])
    }

    /// Whether `proof` is the source's.
    pub(crate) fn is_source(&self, channels: u8, proof: &[u8; PROOF_LEN]) -> bool {
        self.with(|words| proves(&self.secret.0, words, proof), b"resume", &[&[channels]])
    }

    /// The destination's, which has placed `placed` frames of the channels of attempt `of`.
    pub(crate) fn of_destination(&self, of: u32, placed: &[u64]) -> [u8; PROOF_LEN] {
        let said = said(of, placed);
        self.with(|words| prove(&self.secret.0, words), b"resumed", &[&said])
    }

    /// Whether `proof` is the destination's.
    pub(crate) fn is_destination(&self, of: u32, placed: &[u64], proof: &[u8; PROOF_LEN]) -> bool {
        let said = said(of, placed);
        self.with(|words| proves(&self.secret.0, words, proof), b"resumed", &[&said])
    }

    fn with<T>(&self, call: impl FnOnce(&[&[u8]]) -> T, kind: &[u8], said: &[&[u8]]) -> T {
        let attempt = self.attempt.to_le_bytes();
        let mut words: Vec<&[u8]> = vec![b"godwit", kind, &self.session.0, &attempt];
        words.extend(said);
        call(&words)
    }
}

/// What both sides make the key of fingerprints of, when the source was started anew: it is never
/// said, and no guest knows it.
pub(crate) fn prints_seed(session: SessionId, secret: Secret) -> u64 {
    let proof = prove(&secret.0, &[b"godwit", b"prints", &session.0]);
    proof.first_chunk().map_or(0, |seed| u64::from_le_bytes(*seed))
}

fn said(of: u32, placed: &[u64]) -> Vec<u8> {
    let counts = placed.iter().flat_map(|count| count.to_le_bytes());
    of.to_le_bytes().into_iter().chain(counts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_for_one_side_one_attempt_and_what_was_said() {
        let proof = |secret, session, attempt| ReturnProof {
            session: SessionId([session; 16]),
            secret: Secret([secret; 32]),
            attempt,
        };
        let right = proof(1, 1, 1);
        let (source, destination) = (right.of_source(2), right.of_destination(0, &[7, 8]));
        assert!(right.is_source(2, &source) && right.is_destination(0, &[7, 8], &destination));
        for wrong in [proof(2, 1, 1), proof(1, 2, 1), proof(1, 1, 2)] {
            assert!(!wrong.is_source(2, &source), "{wrong:?}");
            assert!(!wrong.is_destination(0, &[7, 8], &destination), "{wrong:?}");
        }
        assert!(!right.is_source(3, &source));
        assert!(!right.is_source(2, &destination));
        for (of, placed) in [(1, vec![7, 8]), (0, vec![7, 9]), (0, vec![7])] {
            assert!(!right.is_destination(of, &placed, &destination));
        }
    }
}

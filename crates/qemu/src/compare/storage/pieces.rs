//! All of a file, or as much of it as some seconds allow, piece by piece in an order that is
//! random.
//!
//! A copy that was made while the guest ran differs from the source's disk in a few places only,
//! which samples miss: of a thousand of them one in three times when one block of a thousand
//! differs. So both sides read all that is data at either, at the same time, and compare digests of
//! pieces. A piece that differs is looked at block by block, since the guest may be writing it.
//!
//! With a share f of the pieces read, an image that differs in n of them is taken for the same with
//! the odds (1 - f)^n: in none of all cases when all of it was read.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_engine::vm::VmError;

use super::host_file::{BLOCK, HostFile};
use super::samples::{self, Sample};
use super::{Asked, Content, Suspect};
use crate::compare::{Question, put};

/// Bytes of a piece: large enough that storage is read at its full speed, and no more blocks than
/// are read again at a time.
const PIECE: usize = BLOCK * super::AGAIN;

/// Pieces of one question.
const BATCH: usize = 64;

/// How long one side reads for one question.
const BUDGET: Duration = Duration::from_millis(500);

/// How long pieces are compared, of all files together.
pub(super) const TIME: Duration = Duration::from_secs(3);

/// Pieces in which blocks are looked for, when more differ.
const LOOKED_INTO: usize = 8;

/// The digests of the pieces at `places`, as many as can be read in a moment.
///
/// # Errors
/// When they cannot be read.
pub(super) fn read(file: &Arc<HostFile>, mut places: Vec<u64>) -> Result<Vec<Sample>, String> {
    places.truncate(BATCH);
    samples::read(file, places, PIECE, BUDGET)
}

/// The pieces in which there is data, in a random order.
fn pieces(stretches: &[(u64, u64)], seed: u64) -> Vec<u64> {
    // Stretches may be a stranger's: as many pieces as a look of TIME could ever read are enough.
    const MOST: usize = 1 << 20;
    let piece = PIECE as u64;
    let within = stretches.iter().flat_map(|(start, end)| (start / piece)..end.div_ceil(piece));
    let numbers: BTreeSet<u64> = within.take(MOST).collect();
    let mut places: Vec<u64> =
        numbers.into_iter().filter_map(|number| number.checked_mul(piece)).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut places);
    places
}

/// Of the pieces that both sides have read, those that differ.
fn differing(theirs: &[Sample], own: &[Sample]) -> Vec<u64> {
    let own: HashMap<u64, u64> = own.iter().copied().collect();
    let differs = |(place, digest): &&Sample| own.get(place).is_some_and(|own| own != digest);
    theirs.iter().filter(differs).map(|(place, _)| *place).collect()
}

impl Asked<'_, '_> {
    /// Whether the file at `place` of the source's is found to differ from `file` during `time`.
    pub(super) fn compare_pieces(
        &mut self,
        place: (usize, usize),
        file: &Arc<HostFile>,
        time: Duration,
    ) -> Result<Result<Content, String>, VmError> {
        let until = Instant::now() + time;
        let data: Result<Vec<(u64, u64)>, String> =
            put(&Question::Data(place.0, place.1), self.ask, "a disk")?;
        let mut stretches = match data {
            Ok(data) => data,
            Err(why) => return Ok(Err(format!("it {why} at the source"))),
        };
        stretches.extend(file.data(samples::STRETCHES));
        stretches.retain(|(start, end)| {
            start < end && *end <= file.length.next_multiple_of(BLOCK as u64)
        });
        let places = pieces(&stretches, RandomState::new().build_hasher().finish());
        for batch in places.chunks(BATCH) {
            if Instant::now() >= until {
                break;
            }
            let question = Question::Pieces(place.0, place.1, batch.to_vec());
            // Both read at the same time.
            let (theirs, own) = std::thread::scope(|scope| {
                let own = std::thread::Builder::new()
                    .name("pieces".to_owned())
                    .spawn_scoped(scope, || read(file, batch.to_vec()));
                let theirs: Result<Result<Vec<Sample>, String>, VmError> =
                    put(&question, self.ask, "a disk");
                // A thread that cannot be had leaves its part to this one.
                let own = own.map_or_else(
                    |_| read(file, batch.to_vec()),
                    |own| own.join().unwrap_or_else(|_| Err("cannot be read".to_owned())),
                );
                (theirs, own)
            });
            let (theirs, own) = match (theirs?, own) {
                (Ok(theirs), Ok(own)) => (theirs, own),
                (Err(why), _) => return Ok(Err(format!("it {why} at the source"))),
                (_, Err(why)) => return Ok(Err(format!("it {why} here"))),
            };
            let differing = differing(&theirs, &own);
            match self.look_into(place, file, &differing)? {
                Ok(Content::Same) => {}
                settled => return Ok(settled),
            }
        }
        Ok(Ok(Content::Same))
    }

    /// Whether one of these pieces differs, and not only since the guest writes it.
    fn look_into(
        &mut self,
        place: (usize, usize),
        file: &Arc<HostFile>,
        pieces: &[u64],
    ) -> Result<Result<Content, String>, VmError> {
        let mut suspects = Vec::new();
        for piece in pieces.iter().take(LOOKED_INTO) {
            let blocks =
                (0..PIECE as u64 / BLOCK as u64).map(|number| piece + number * BLOCK as u64);
            let (theirs, own) = match self.read_again(place, file, blocks.collect())? {
                Ok(both) => both,
                Err(why) => return Ok(Err(why)),
            };
            let own: HashMap<u64, u64> = own.into_iter().collect();
            let suspect = |(place, source): &Sample| {
                let here = *own.get(place).filter(|own| *own != source)?;
                Some(Suspect {
                    place: *place,
                    source: Some(*source),
                    here,
                    still: 0,
                    left_behind: 0,
                })
            };
            // A few of each: where the guest writes much, others must not be crowded out.
            suspects.extend(theirs.iter().filter_map(suspect).take(super::AGAIN / LOOKED_INTO));
        }
        self.settle(place, file, suspects)
    }
}

#[cfg(test)]
mod tests {
    use super::super::host_file::tests::Scratch;
    use super::*;

    #[test]
    fn pieces_cover_all_data_once() {
        let piece = PIECE as u64;
        let mut places =
            pieces(&[(0, 1), (piece - 1, piece + 1), (9 * piece, 9 * piece + 5), (7, 9)], 3);
        places.sort_unstable();
        assert_eq!(places, [0, piece, 9 * piece]);
        let many = [(0, 64 * piece)];
        assert_ne!(pieces(&many, 1), pieces(&many, 2));
        assert!(pieces(&[], 1).is_empty());
        // A stranger's numbers.
        assert!(pieces(&[(0, u64::MAX)], 1).len() <= 1 << 20);
    }

    #[test]
    fn one_byte_of_a_file_is_enough() {
        let bytes: Vec<u8> =
            (0..3_000_000_u32).map(|at| at.wrapping_mul(2_654_435_761) as u8).collect();
        let mut other = bytes.clone();
        other[1_234_567] ^= 1;
        let [a, b] = [("pieces-a", &bytes), ("pieces-b", &other)]
            .map(|(name, bytes)| Scratch::new(name, 1 << 23, &[(0, bytes)]));
        let (a, b) = (Arc::new(a.open()), Arc::new(b.open()));
        let places = pieces(&a.data(9), 1);
        let (theirs, own) = (read(&a, places.clone()).unwrap(), read(&b, places.clone()).unwrap());
        assert_eq!(theirs.len(), places.len());
        assert_eq!(differing(&theirs, &own), [1_234_567 / PIECE as u64 * PIECE as u64]);
        assert!(differing(&theirs, &theirs).is_empty());
        // What one side had no time to read says nothing.
        assert!(differing(&theirs, &[]).is_empty());
    }
}

//! A page that says what it should hold.
//!
//! ```text
//! word    0  index  generation  check       the stamp
//!         3  253 words of filling, random; each write replaces one of them, in turn
//!       256  index  generation  check       its echo in the middle
//!       259  zeroes: about half of the page is compressible, as guest memory is
//!       509  index  generation  check       its echo in the last cache line
//! ```
//!
//! Keeps one promise: given a page's index and the generation it should have, every word of the
//! page is known, so any difference is found by [`Page::inspect`] and named. A write costs ten
//! stores; the cheap look [`Page::stamps_match`] reads nine words. Which generation a page should
//! have is left to [`crate::workload`].

use core::fmt;

/// Words in a page.
pub const WORDS: usize = 512;
/// Where the three copies of the stamp begin.
pub const STAMPS: [usize; 3] = [0, 256, 509];
const FILLING: core::ops::Range<usize> = 3..256;
/// Random words in a page, which writes replace in turn.
const TURNS: u64 = (FILLING.end - FILLING.start) as u64;
/// Keeps the check of index 0, generation 0 from being that of a page of zeroes.
const SALT: u64 = 0x60d7_1717_5eaf_a7e5;

/// A bijection of 64-bit words that spreads every bit over all (the finaliser of SplitMix64).
#[must_use]
#[inline]
pub fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The word of which `word` is the [`mix`].
fn unmix(word: u64) -> u64 {
    let word = (word ^ (word >> 31) ^ (word >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let word = (word ^ (word >> 27) ^ (word >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    word ^ (word >> 30) ^ (word >> 60)
}

/// The checksum of a stamp; also the seed of the filling written with it.
#[inline]
fn check(index: u64, generation: u64) -> u64 {
    mix(index.rotate_left(32) ^ generation ^ SALT)
}

/// The filling word in place `turn`, written by the version `check` belongs to.
#[inline]
fn filling(check: u64, turn: u64) -> u64 {
    mix(check ^ (turn + 1))
}

/// The page that filling word `word` in place `turn` belongs to, and the version that wrote it, if
/// there can be such a one.
fn writer_of_word(word: u64, turn: u64) -> Option<(u64, u64)> {
    let version = unmix(unmix(word) ^ (turn + 1)) ^ SALT;
    let (index, generation) = (version >> 32, version & u64::from(u32::MAX));
    (generation == 0 || generation % TURNS == turn).then_some((index, generation))
}

/// The version of the page that wrote filling word `turn` last, when the page is at `generation`:
/// the greatest one not above it that had that turn, or 0, the first filling.
fn writer_of(turn: u64, generation: u64) -> u64 {
    let newest = generation - generation % TURNS + turn;
    if newest <= generation { newest } else { newest.saturating_sub(TURNS) }
}

/// One page of the workload's buffer.
#[repr(C, align(4096))]
#[derive(Clone)]
pub struct Page(pub [u64; WORDS]);

impl Page {
    /// Page `index` at generation 0.
    #[must_use]
    pub fn first(index: u64) -> Self {
        let mut page = Self([0; WORDS]);
        let check = check(index, 0);
        for (turn, word) in (0..).zip(&mut page.0[FILLING]) {
            *word = filling(check, turn);
        }
        page.put_stamps([index, 0, check]);
        page
    }

    /// The page as it should be after `generation` writes, made afresh.
    #[must_use]
    pub fn expected(index: u64, generation: u64) -> Self {
        let mut page = Self([0; WORDS]);
        for (turn, word) in (0..).zip(&mut page.0[FILLING]) {
            *word = filling(check(index, writer_of(turn, generation)), turn);
        }
        page.put_stamps([index, generation, check(index, generation)]);
        page
    }

    /// Writes version `generation` over the version before it.
    #[inline]
    pub fn restamp(&mut self, index: u64, generation: u64) {
        let check = check(index, generation);
        let turn = generation % TURNS;
        self.0[FILLING.start + turn as usize] = filling(check, turn);
        self.put_stamps([index, generation, check]);
    }

    #[inline]
    fn put_stamps(&mut self, stamp: [u64; 3]) {
        for at in STAMPS {
            self.0[at..at + 3].copy_from_slice(&stamp);
        }
    }

    /// The cheap look: whether all three stamps are those of `index` at `generation`.
    #[must_use]
    #[inline]
    pub fn stamps_match(&self, index: u64, generation: u64) -> bool {
        let check = check(index, generation);
        STAMPS.iter().all(|&at| {
            (self.0[at] ^ index) | (self.0[at + 1] ^ generation) | (self.0[at + 2] ^ check) == 0
        })
    }

    /// The whole look: every word, and what is wrong if one differs.
    pub fn inspect(&self, index: u64, generation: u64) -> Result<(), Fault> {
        let expected = Self::expected(index, generation);
        if self.0 == expected.0 { Ok(()) } else { Err(self.diagnose(&expected, index, generation)) }
    }

    fn diagnose(&self, expected: &Self, index: u64, generation: u64) -> Fault {
        if self.0.iter().all(|&word| word == 0) {
            return Fault::Zeroed;
        }
        let versions = STAMPS.map(|at| self.version_at(at));
        let [Some(first), Some(middle), Some(last)] = versions else {
            return self.first_difference(expected);
        };
        if first != middle || first != last {
            return Fault::Torn { generations: [first.1, middle.1, last.1] };
        }
        match first {
            (found, _) if found != index => Fault::OtherPage { found },
            (_, found) if found != generation => Fault::OtherGeneration { found },
            _ => self
                .zeroes_written_over(expected, generation)
                .or_else(|| {
                    self.other_owner(expected, index).map(|found| Fault::OtherPage { found })
                })
                .or_else(|| self.older_words(expected, index, generation))
                .unwrap_or_else(|| self.first_difference(expected)),
        }
    }

    /// How often this page was written since it was all zeroes, where that is what is wrong: its
    /// filling has what the last versions wrote, one after the other up to this one, and zeroes.
    fn zeroes_written_over(&self, expected: &Self, generation: u64) -> Option<Fault> {
        let wrong = (0..WORDS).filter(|&at| self.0[at] != expected.0[at]).count() as u64;
        let writes = TURNS.checked_sub(wrong).filter(|&writes| writes > 0)?;
        let first = (generation + 1).checked_sub(writes).filter(|&first| first > 0)?;
        let is_so = |at: usize| {
            let lacks =
                FILLING.contains(&at) && writer_of((at - FILLING.start) as u64, generation) < first;
            self.0[at] == if lacks { 0 } else { expected.0[at] }
        };
        (0..WORDS).all(is_so).then_some(Fault::ZeroesWrittenOver { writes })
    }

    /// What it means that all words that differ are what earlier versions wrote in their places.
    ///
    /// Writes were lost if this page was one earlier version, and was written again since: the
    /// versions that are missing follow one another, this one, which wrote the stamps, is not among
    /// them, and that earlier version had in their places what is there. Otherwise it is torn.
    fn older_words(&self, expected: &Self, index: u64, generation: u64) -> Option<Fault> {
        let differing = || (0..WORDS).filter(|&at| self.0[at] != expected.0[at]);
        // The version that a word should be of, and the earlier one that it is of.
        let versions = |at: usize| {
            let turn = FILLING.contains(&at).then(|| (at - FILLING.start) as u64)?;
            let (lost, (owner, found)) =
                (writer_of(turn, generation), writer_of_word(self.0[at], turn)?);
            (owner == index && found < lost).then_some((turn, lost, found))
        };
        let (mut first, mut last, mut newest, mut count) = (u64::MAX, 0, 0, 0);
        for at in differing() {
            let (_, lost, found) = versions(at)?;
            (first, last) = (first.min(lost), last.max(lost));
            (newest, count) = (newest.max(found), count + 1);
        }
        // Where the first that is missing is the first that could be seen, more may be.
        let before = if first + TURNS == generation + 1 { newest } else { first.checked_sub(1)? };
        let of_one =
            |at| versions(at).is_some_and(|(turn, _, found)| found == writer_of(turn, before));
        if last < generation && last - first + 1 == count as u64 && differing().all(of_one) {
            return Some(Fault::LostWrites { first, count });
        }
        let word = differing().next()?;
        let (_, _, found) = versions(word)?;
        Some(Fault::TornFilling { word, found, count })
    }

    /// The other page to which all of the filling belongs that differs: this one was written again
    /// since that came here, which has put its stamps right. Of a single word it is not asked,
    /// which may be a flipped bit.
    fn other_owner(&self, expected: &Self, index: u64) -> Option<u64> {
        let differs = |at: &usize| self.0[*at] != expected.0[*at];
        let mut owners = FILLING.filter(differs).map(|at| {
            let turn = (at - FILLING.start) as u64;
            let owner = writer_of_word(self.0[at], turn).map(|(owner, _)| owner);
            owner.filter(|owner| *owner != index)
        });
        let (first, second) = (owners.next()??, owners.next()??);
        (first == second && owners.all(|owner| owner == Some(first))).then_some(first)
    }

    /// Index and generation of the stamp at word `at`, if its check fits.
    fn version_at(&self, at: usize) -> Option<(u64, u64)> {
        let [index, generation, found] = [self.0[at], self.0[at + 1], self.0[at + 2]];
        (found == check(index, generation)).then_some((index, generation))
    }

    fn first_difference(&self, expected: &Self) -> Fault {
        let differs = |&at: &usize| self.0[at] != expected.0[at];
        let word = (0..WORDS).find(differs).unwrap_or(0);
        let (found, expected) = (self.0[word], expected.0[word]);
        let count = (0..WORDS).filter(differs).count();
        if count == 1 && (found ^ expected).is_power_of_two() {
            return Fault::FlippedBit { word, found, expected };
        }
        Fault::Words { word, found, expected, count }
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stamps = STAMPS.map(|at| &self.0[at..at + 3]);
        write!(f, "Page {stamps:x?}")
    }
}

/// What is wrong with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// All zeroes: it never arrived, or its place was discarded.
    Zeroed,
    /// In itself a good page, but of another address; or one that was written here since.
    OtherPage {
        /// The index it claims.
        found: u64,
    },
    /// In itself a good page, but not the version written last: a write was lost (or an older copy
    /// came later).
    OtherGeneration {
        /// The generation it claims.
        found: u64,
    },
    /// A mixture of versions or pages: the generations of its three stamps.
    Torn {
        /// First, middle and last.
        generations: [u64; 3],
    },
    /// All zeroes, as [`Self::Zeroed`], and written again since.
    ZeroesWrittenOver {
        /// How often.
        writes: u64,
    },
    /// The stamps of the version written last, but words are those of earlier ones, and not as any
    /// one of these had them: a mixture of versions.
    TornFilling {
        /// The first word of an earlier version.
        word: usize,
        /// That version.
        found: u64,
        /// How many such words there are.
        count: usize,
    },
    /// The version written last, but words are those of one earlier version: writes were lost (or
    /// an older copy came later), and it was written again since.
    LostWrites {
        /// The first version that is missing.
        first: u64,
        /// How many are.
        count: usize,
    },
    /// A single bit differs.
    FlippedBit {
        /// The word that has it.
        word: usize,
        /// What it holds.
        found: u64,
        /// What it should hold.
        expected: u64,
    },
    /// Words differ in any other way.
    Words {
        /// The first word that differs.
        word: usize,
        /// What it holds.
        found: u64,
        /// What it should hold.
        expected: u64,
        /// How many words of the page differ.
        count: usize,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zeroed => write!(f, "all zeroes"),
            Self::OtherPage { found } => write!(f, "content of page {found}"),
            Self::OtherGeneration { found } => write!(f, "generation {found}"),
            Self::Torn { generations: [a, b, c] } => write!(f, "torn: generations {a}, {b}, {c}"),
            Self::ZeroesWrittenOver { writes: 1 } => write!(f, "all zeroes, written once since"),
            Self::ZeroesWrittenOver { writes } => {
                write!(f, "all zeroes, written {writes} times since")
            }
            Self::TornFilling { word, found, count: 1 } => {
                write!(f, "torn: word {word} is of generation {found}")
            }
            Self::TornFilling { word, found, count } => write!(
                f,
                "torn: {count} words are of earlier generations, the first, word {word}, of {found}"
            ),
            Self::LostWrites { first, count: 1 } => write!(f, "lost write of generation {first}"),
            Self::LostWrites { first, count } => {
                write!(f, "lost writes of {count} generations, the first {first}")
            }
            Self::FlippedBit { word, found, expected } => write!(
                f,
                "flipped bit {} of word {word}: {found:#018x} for {expected:#018x}",
                (found ^ expected).trailing_zeros()
            ),
            Self::Words { word, found, expected, count } => write!(
                f,
                "{count} words differ, first word {word}: {found:#018x} for {expected:#018x} (bits \
                 {:#x})",
                found ^ expected
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page as the guest makes it, one write after another.
    fn written(index: u64, generation: u64) -> Page {
        let mut page = Page::first(index);
        (1..=generation).for_each(|g| page.restamp(index, g));
        page
    }

    #[test]
    fn writing_and_making_afresh_agree() {
        for generation in [0, 1, 2, 252, 253, 254, 505, 506, 507, 1000] {
            assert_eq!(
                written(5, generation).0,
                Page::expected(5, generation).0,
                "generation {generation}"
            );
        }
    }

    #[test]
    fn half_of_a_page_is_random_and_half_zero() {
        let zeroes = written(5, 1000).0.iter().filter(|&&word| word == 0).count();
        assert!((240..=256).contains(&zeroes), "{zeroes} of 512 words are zero");
    }

    #[test]
    fn a_good_page_passes_both_looks() {
        let page = written(5, 300);
        assert!(page.stamps_match(5, 300));
        assert_eq!(page.inspect(5, 300), Ok(()));
    }

    #[test]
    fn a_stale_page_is_found_although_it_is_consistent() {
        let stale = written(5, 299);
        assert!(!stale.stamps_match(5, 300));
        assert_eq!(stale.inspect(5, 300), Err(Fault::OtherGeneration { found: 299 }));
    }

    #[test]
    fn a_page_of_another_address_is_found() {
        let other = written(6, 300);
        assert!(!other.stamps_match(5, 300));
        assert_eq!(other.inspect(5, 300), Err(Fault::OtherPage { found: 6 }));
    }

    #[test]
    fn a_page_of_another_address_is_named_also_when_it_was_written_since() {
        // Cause: the guest wrote a page before it looked, and told of 252 words that differ.
        for writes in 1..=3 {
            let mut other = written(6, 297);
            (0..writes).for_each(|more| other.restamp(5, 300 - more));
            other.restamp(5, 300);
            assert!(other.stamps_match(5, 300));
            assert_eq!(other.inspect(5, 300), Err(Fault::OtherPage { found: 6 }));
        }
        let mut first = Page::first(1);
        first.restamp(0, 2);
        assert_eq!(first.inspect(0, 2), Err(Fault::OtherPage { found: 1 }));
    }

    #[test]
    fn a_word_that_was_mixed_is_had_back() {
        for word in [0, 1, u64::MAX, SALT, 0x0123_4567_89ab_cdef] {
            assert_eq!((unmix(mix(word)), mix(unmix(word))), (word, word));
        }
    }

    #[test]
    fn a_page_of_zeroes_is_found_even_where_index_and_generation_are_zero() {
        let zeroes = Page([0; WORDS]);
        assert!(!zeroes.stamps_match(0, 0));
        assert_eq!(zeroes.inspect(0, 0), Err(Fault::Zeroed));
    }

    #[test]
    fn a_page_torn_at_any_word_is_found() {
        let old = written(5, 299);
        let new = written(5, 300);
        let turn = FILLING.start + (300 % TURNS) as usize;
        for cut in 1..=WORDS {
            let mut torn = new.clone();
            torn.0[cut..].copy_from_slice(&old.0[cut..]);
            let differs = torn.0 != new.0;
            assert_eq!(torn.inspect(5, 300).is_err(), differs, "cut at word {cut}");
            // The last write changed stamps and one filling word; up to the last stamp every cut
            // matters.
            assert_eq!(differs, cut <= 511, "cut at word {cut}, filling at {turn}");
        }
    }

    #[test]
    fn a_torn_page_with_whole_stamps_is_named_so() {
        let mut torn = written(5, 300);
        torn.0[509..].copy_from_slice(&written(5, 299).0[509..]);
        assert!(!torn.stamps_match(5, 300));
        assert_eq!(torn.inspect(5, 300), Err(Fault::Torn { generations: [300, 300, 299] }));
    }

    #[test]
    fn a_stale_cache_line_of_the_filling_is_found() {
        let mut page = written(5, 300);
        let line = 40..48;
        page.0[line.clone()].copy_from_slice(&written(5, 200).0[line]);
        assert!(page.stamps_match(5, 300));
        // Words 40 to 47 are those of turns 37 to 44: written last by 290 to 297.
        let fault = page.inspect(5, 300);
        assert_eq!(fault, Err(Fault::LostWrites { first: 290, count: 8 }));
    }

    #[test]
    fn a_stale_page_is_named_also_when_it_was_written_since() {
        // Cause: the guest wrote a page before it looked, and told of words that differ.
        for (lost, said) in [
            (1, "lost write of generation 298"),
            (3, "lost writes of 3 generations, the first 296"),
        ] {
            let mut stale = written(5, 298 - lost);
            stale.restamp(5, 299);
            stale.restamp(5, 300);
            assert!(stale.stamps_match(5, 300));
            assert_eq!(stale.inspect(5, 300).unwrap_err().to_string(), said);
        }
    }

    #[test]
    fn a_page_whose_last_write_is_missing_below_its_stamps_is_torn() {
        // The stamps are of 300, which wrote word 50: who wrote these also wrote that.
        let mut torn = written(5, 300);
        torn.0[50] = written(5, 299).0[50];
        let fault = torn.inspect(5, 300).unwrap_err();
        assert_eq!(fault, Fault::TornFilling { word: 50, found: 47, count: 1 });
        assert_eq!(fault.to_string(), "torn: word 50 is of generation 47");
        // The same with the versions before it.
        torn.0[40..56].copy_from_slice(&written(5, 289).0[40..56]);
        let fault = torn.inspect(5, 300).unwrap_err();
        assert_eq!(fault, Fault::TornFilling { word: 40, found: 37, count: 11 });
        assert_eq!(
            fault.to_string(),
            "torn: 11 words are of earlier generations, the first, word 40, of 37"
        );
    }

    #[test]
    fn a_page_that_lacks_versions_here_and_there_is_torn() {
        let mut torn = written(5, 300);
        // Versions 290 and 292.
        for word in [40, 42] {
            torn.0[word] = written(5, 289).0[word];
        }
        let fault = torn.inspect(5, 300);
        assert_eq!(fault, Err(Fault::TornFilling { word: 40, found: 37, count: 2 }));
    }

    #[test]
    fn a_page_with_words_that_no_one_version_had_is_torn() {
        // Versions 290 to 297 are missing, and before them those of 37 to 44 would be there.
        let mut torn = written(5, 300);
        torn.0[40..48].copy_from_slice(&written(5, 10).0[40..48]);
        let fault = torn.inspect(5, 300);
        assert_eq!(fault, Err(Fault::TornFilling { word: 40, found: 0, count: 8 }));
        // Nothing of the first 253 versions is left to be seen: parts of two of them are there.
        let mut torn = written(5, 400);
        torn.0[FILLING].copy_from_slice(&written(5, 100).0[FILLING]);
        torn.0[3..50].copy_from_slice(&written(5, 20).0[3..50]);
        (380..=400).for_each(|generation| torn.restamp(5, generation));
        let fault = torn.inspect(5, 400);
        assert!(matches!(fault, Err(Fault::TornFilling { word: 3, .. })), "{fault:?}");
    }

    #[test]
    fn lost_writes_are_named_however_many_and_whenever() {
        for (old, since, now) in [
            (0, 2, 2),
            (0, 250, 260),
            (3, 255, 256),
            (100, 380, 400),
            (252, 254, 300),
            (1, 254, 260),
        ] {
            let mut stale = written(5, old);
            (since..=now).for_each(|generation| stale.restamp(5, generation));
            // Of the versions that are missing, those that could still be seen.
            let first = (old + 1).max((now + 1).saturating_sub(TURNS));
            let count = (since - first) as usize;
            let expected = Err(Fault::LostWrites { first, count });
            assert_eq!(stale.inspect(5, now), expected, "{old}, then {since} to {now}");
        }
    }

    #[test]
    fn a_page_of_zeroes_is_named_also_when_it_was_written_since() {
        // Cause: the guest wrote a page before it looked, and told of 252 words that differ.
        for generation in [1, 2, 252, 253, 300, 1000] {
            for (writes, said) in
                [(1, "all zeroes, written once since"), (2, "all zeroes, written 2 times since")]
            {
                if writes > generation {
                    continue;
                }
                let mut zeroed = Page([0; WORDS]);
                let first = generation + 1 - writes;
                (first..=generation).for_each(|generation| zeroed.restamp(5, generation));
                assert!(zeroed.stamps_match(5, generation));
                assert_eq!(zeroed.inspect(5, generation).unwrap_err().to_string(), said);
            }
        }
    }

    #[test]
    fn zeroes_in_a_part_of_a_page_are_no_page_of_zeroes() {
        // A sector; and all of the filling, with the last write's word.
        for part in [64..128, FILLING] {
            let mut page = written(5, 300);
            let count = part.len();
            page.0[part].fill(0);
            let fault = page.inspect(5, 300).unwrap_err();
            assert!(
                matches!(fault, Fault::Words { count: found, .. } if found == count),
                "{fault:?}"
            );
        }
        // Zeroes elsewhere than the last writes left them.
        let mut page = Page([0; WORDS]);
        page.restamp(5, 299);
        page.restamp(5, 300);
        page.0[FILLING.start + (299 % TURNS) as usize] = 0;
        page.0[FILLING.start + (290 % TURNS) as usize] =
            written(5, 300).0[FILLING.start + (290 % TURNS) as usize];
        let fault = page.inspect(5, 300).unwrap_err();
        assert!(matches!(fault, Fault::Words { count: 251, .. }), "{fault:?}");
    }

    #[test]
    fn more_than_a_bit_that_no_version_wrote_is_called_no_lost_write_and_no_flipped_bit() {
        let mut page = written(5, 300);
        page.0[40] ^= 3;
        let fault = page.inspect(5, 300);
        assert!(matches!(fault, Err(Fault::Words { word: 40, count: 1, .. })), "{fault:?}");
        // A word of a later version, or of another page.
        for other in [written(5, 553), written(6, 300)] {
            let mut page = written(5, 300);
            page.0[40] = other.0[40];
            let fault = page.inspect(5, 300);
            assert!(matches!(fault, Err(Fault::Words { word: 40, count: 1, .. })), "{fault:?}");
        }
    }

    #[test]
    fn any_flipped_bit_is_found() {
        for word in 0..WORDS {
            let bit = 1_u64 << (word % 64);
            let mut page = written(5, 300);
            page.0[word] ^= bit;
            let at_stamp = STAMPS.iter().any(|&at| (at..at + 3).contains(&word));
            assert_eq!(page.stamps_match(5, 300), !at_stamp, "word {word}");
            let Err(Fault::FlippedBit { word: found_at, found, expected }) = page.inspect(5, 300)
            else {
                panic!("flip in word {word}: {:?}", page.inspect(5, 300));
            };
            assert_eq!((found_at, found ^ expected), (word, bit));
        }
    }
}

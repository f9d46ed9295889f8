//! Sectors that say what they should hold: which run wrote them, to which device and place, in
//! which version, when and by whom.
//!
//! ```text
//! word 0  magic
//!      1  run           a random number that all sectors of a run share
//!      2  device (16 bits), writer (16 bits), flags (32 bits)
//!      3  sector        its place on the device
//!      4  generation    the version of its 4 KiB unit: 1 is the first
//!      5  time          nanoseconds since 1970
//!      6  first sector of the write (48 bits), sectors in it (16 bits)
//!      7  span          4 KiB units of the device that the run uses
//!      8  56 words, each the check of words 0 to 7, mixed with a constant of its place
//! ```
//!
//! Keeps one promise: every word follows from the first eight, so a look at a sector is a few
//! operations on vectors, at the speed of memory, and any difference has a place, an expected and a
//! found value. What a difference means is left to [`crate::finding`]; the cheaper page of
//! [`crate::stamp`] is for a guest that does little else than to write.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::stamp::mix;

/// Bytes in a sector.
pub const SECTOR_SIZE: usize = 512;
/// Sectors in a [`Unit`].
pub const SECTORS: usize = 8;
const WORDS: usize = SECTOR_SIZE / 8;
const HEADER: usize = 8;
/// "godwitS1" in a debugger's memory dump.
const MAGIC: u64 = u64::from_le_bytes(*b"godwitS1");
/// A flag: the run discards units, or writes zeroes to them.
const ZEROES: u64 = 1 << 32;
/// Fewer words of the filling than this may agree by chance.
const AGREE: usize = 8;

/// What each word of the filling is mixed with; 0 for the first, which is the check itself.
const TABLE: [u64; WORDS] = {
    let mut table = [0; WORDS];
    let mut at = HEADER + 1;
    while at < WORDS {
        table[at] = constant_mix(at as u64);
        at += 1;
    }
    table
};

/// Odd numbers, one for each word of the header: a product with one loses no bit.
const ODD: [u64; HEADER] = {
    let mut odd = [0; HEADER];
    let mut at = 0;
    while at < HEADER {
        odd[at] = constant_mix(at as u64 + 0x5ec7_0a00) | 1;
        at += 1;
    }
    odd
};

/// The finaliser of SplitMix64, for tables made by the compiler.
const fn constant_mix(word: u64) -> u64 {
    let word = word.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Independent products, so that a processor makes them at the same time. The shift is for the
/// highest bits, which a product leaves where they are: those of two words would cancel.
#[inline]
fn check(header: &[u64; HEADER]) -> u64 {
    let sum = header.iter().zip(ODD).fold(0_u64, |sum, (word, odd)| {
        let word = word ^ odd.rotate_left(17);
        sum.wrapping_add((word ^ word >> 32).wrapping_mul(odd))
    });
    mix(sum)
}

/// What the first words of a sector say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The run that wrote it.
    pub run: u64,
    /// The number of the device in that run, from 0; [`MEMORY`] is memory.
    pub device: u16,
    /// The worker that wrote it.
    pub writer: u16,
    /// Whether the run also discards units or writes zeroes to them.
    pub zeroes: bool,
    /// The sector's number on its device.
    pub sector: u64,
    /// The version of its unit, from 1.
    pub generation: u64,
    /// When it was written, in nanoseconds since 1970 by the writer's clock.
    pub nanos: u64,
    /// The first sector of the same write, below 2^48.
    pub first: u64,
    /// Sectors in the same write.
    pub sectors: u16,
    /// Units of the device that the run uses, from its start.
    pub span: u64,
}

/// The device number of stamps in memory.
pub const MEMORY: u16 = u16::MAX;

impl Stamp {
    #[inline]
    fn words(&self) -> [u64; HEADER] {
        let who = u64::from(self.device) | u64::from(self.writer) << 16;
        [
            MAGIC,
            self.run,
            who | if self.zeroes { ZEROES } else { 0 },
            self.sector,
            self.generation,
            self.nanos,
            self.first | u64::from(self.sectors) << 48,
            self.span,
        ]
    }

    fn of_words(words: &[u64; HEADER]) -> Self {
        Self {
            run: words[1],
            device: words[2] as u16,
            writer: (words[2] >> 16) as u16,
            zeroes: words[2] & ZEROES != 0,
            sector: words[3],
            generation: words[4],
            nanos: words[5],
            first: words[6] & ((1 << 48) - 1),
            sectors: (words[6] >> 48) as u16,
            span: words[7],
        }
    }
}

/// 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sector(pub [u64; WORDS]);

/// Why a sector holds no whole stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// All zeroes.
    Zeroed,
    /// Nothing that a run wrote.
    NotStamped,
    /// Parts of two versions.
    Torn {
        /// The first word that does not belong to the others.
        word: usize,
    },
    /// Bits that differ from what the rest of the sector says.
    Bits {
        /// The first word that differs.
        word: usize,
        /// What it should hold.
        expected: u64,
        /// What it holds.
        found: u64,
        /// Bits that differ in the whole sector.
        bits: u32,
    },
}

impl Sector {
    /// The sector that `stamp` makes.
    #[must_use]
    #[inline]
    pub fn of(stamp: &Stamp) -> Self {
        let header = stamp.words();
        let check = check(&header);
        let mut words = [0; WORDS];
        words[..HEADER].copy_from_slice(&header);
        for (word, constant) in words[HEADER..].iter_mut().zip(&TABLE[HEADER..]) {
            *word = check ^ constant;
        }
        Self(words)
    }

    #[inline]
    fn header(&self) -> &[u64; HEADER] {
        // It cannot fail; the compiler knows.
        self.0.first_chunk().unwrap_or(&[0; HEADER])
    }

    /// All bits in which the sector differs from what its own first words say it is.
    #[inline]
    fn difference(&self) -> u64 {
        let check = check(self.header());
        let filling = self.0[HEADER..].iter().zip(&TABLE[HEADER..]);
        filling.fold(0, |sum, (word, constant)| sum | (word ^ constant ^ check))
    }

    /// Reads the stamp.
    ///
    /// # Errors
    /// What is wrong with the sector in itself.
    pub fn read(&self) -> Result<Stamp, Damage> {
        if self.difference() == 0 && self.0[0] == MAGIC {
            return Ok(Stamp::of_words(self.header()));
        }
        Err(self.damage())
    }

    fn damage(&self) -> Damage {
        if self.0.iter().all(|&word| word == 0) {
            return Damage::Zeroed;
        }
        let mut checks: Vec<u64> = (HEADER..WORDS).map(|at| self.0[at] ^ TABLE[at]).collect();
        let header_is = check(self.header());
        let header_fits = self.0[0] == MAGIC && self.0[HEADER] == header_is;
        checks.sort_unstable();
        let groups = checks.chunk_by(|a, b| a == b);
        let (agreed, count) = groups
            .map(|group| (group[0], group.len()))
            .max_by_key(|group| group.1)
            .unwrap_or((0, 0));
        if !header_fits && count < AGREE {
            return Damage::NotStamped;
        }
        if agreed != header_is {
            return match self.header_with_one_bit_less_wrong(agreed) {
                Some((word, expected)) => {
                    let rest = self.filling_bits(agreed);
                    Damage::Bits { word, expected, found: self.0[word], bits: rest + 1 }
                }
                None => Damage::Torn { word: self.first_unlike(header_is) },
            };
        }
        // The header and most of the filling agree: the rest is another version, zeroes, or bits.
        let word = self.first_unlike(agreed);
        let others: Vec<u64> =
            (HEADER..WORDS).map(|at| self.0[at] ^ TABLE[at]).filter(|&c| c != agreed).collect();
        let same = others.len() > 1 && others.iter().all(|&other| other == others[0]);
        let zeroes = others.len() > 1
            && (HEADER..WORDS).all(|at| self.0[at] == 0 || self.0[at] ^ TABLE[at] == agreed);
        if same || zeroes {
            return Damage::Torn { word };
        }
        Damage::Bits {
            word,
            expected: agreed ^ TABLE[word],
            found: self.0[word],
            bits: self.filling_bits(agreed),
        }
    }

    /// The first word of the filling that another check than this made.
    fn first_unlike(&self, check: u64) -> usize {
        (HEADER..WORDS).find(|&at| self.0[at] ^ TABLE[at] != check).unwrap_or(0)
    }

    fn filling_bits(&self, check: u64) -> u32 {
        (HEADER..WORDS).map(|at| (self.0[at] ^ TABLE[at] ^ check).count_ones()).sum()
    }

    /// The word of the header, and its value, that a single changed bit makes fit the filling.
    fn header_with_one_bit_less_wrong(&self, agreed: u64) -> Option<(usize, u64)> {
        (0..HEADER * 64).find_map(|bit| {
            let mut header = *self.header();
            header[bit / 64] ^= 1 << (bit % 64);
            (check(&header) == agreed && header[0] == MAGIC).then(|| (bit / 64, header[bit / 64]))
        })
    }
}

/// 4 KiB, aligned as direct I/O wants it: what is written, and checked, as one.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub struct Unit(pub [Sector; SECTORS]);

impl Unit {
    /// Zeroes.
    pub const ZERO: Self = Self([const { Sector([0; WORDS]) }; SECTORS]);

    /// Stamps all sectors: `stamp` is that of the first.
    #[inline]
    pub fn stamp(&mut self, stamp: &Stamp) {
        for (sector, at) in self.0.iter_mut().zip(stamp.sector..) {
            *sector = Sector::of(&Stamp { sector: at, ..*stamp });
        }
    }

    /// The quick look: whether all sectors are whole and what `run` wrote as `generation` of unit
    /// `unit` of `device`.
    #[must_use]
    #[inline]
    pub fn matches(&self, run: u64, device: u16, unit: u64, generation: u64) -> bool {
        let mut wrong = 0;
        for (sector, at) in self.0.iter().zip(unit * SECTORS as u64..) {
            let words = &sector.0;
            wrong |= sector.difference()
                | (words[0] ^ MAGIC)
                | (words[1] ^ run)
                | ((words[2] ^ u64::from(device)) & 0xffff)
                | (words[3] ^ at)
                | (words[4] ^ generation);
        }
        wrong == 0
    }

    /// Whether there is nothing but zeroes.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0.iter().flat_map(|sector| &sector.0).fold(0, |sum, word| sum | word) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn stamp() -> Stamp {
        Stamp {
            run: 0x1234_5678_9abc,
            device: 3,
            writer: 2,
            zeroes: true,
            sector: 1000,
            generation: 7,
            nanos: 1_700_000_000_000_000_000,
            first: 996,
            sectors: 16,
            span: 4096,
        }
    }

    #[test]
    fn what_is_stamped_is_read() {
        assert_eq!(Sector::of(&stamp()).read(), Ok(stamp()));
        let last = Stamp { device: MEMORY, sectors: 2048, first: (1 << 48) - 1, ..stamp() };
        assert_eq!(Sector::of(&last).read(), Ok(last));
    }

    #[test]
    fn no_two_words_of_a_filling_are_the_same() {
        let mut words = Sector::of(&stamp()).0;
        words.sort_unstable();
        assert!(words.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn every_flipped_bit_is_found_in_its_place() {
        for bit in 0..SECTOR_SIZE * 8 {
            let good = Sector::of(&stamp());
            let mut sector = good.clone();
            sector.0[bit / 64] ^= 1 << (bit % 64);
            let word = bit / 64;
            let expected =
                Damage::Bits { word, expected: good.0[word], found: sector.0[word], bits: 1 };
            assert_eq!(sector.read(), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn a_sector_of_two_versions_is_torn_wherever_it_is_cut() {
        let new = Sector::of(&stamp());
        // Generations 7 and 4 differ by two bits: by one, it would be a flipped bit.
        let old = Sector::of(&Stamp { generation: 4, nanos: 1_699_999_999_000_000_000, ..stamp() });
        for cut in 5..WORDS - 1 {
            for (head, tail) in [(&new, &old), (&old, &new)] {
                let mut torn = head.clone();
                torn.0[cut..].copy_from_slice(&tail.0[cut..]);
                let found = torn.read();
                assert!(matches!(found, Err(Damage::Torn { .. })), "cut at {cut}: {found:?}");
            }
        }
    }

    #[test]
    fn a_sector_that_ends_in_zeroes_is_torn() {
        for cut in 9..WORDS - 1 {
            let mut torn = Sector::of(&stamp());
            torn.0[cut..].fill(0);
            let found = torn.read();
            assert!(matches!(found, Err(Damage::Torn { .. })), "cut at {cut}: {found:?}");
        }
    }

    #[test]
    fn zeroes_and_strangers_are_no_stamps() {
        assert_eq!(Sector([0; WORDS]).read(), Err(Damage::Zeroed));
        assert_eq!(Sector([7; WORDS]).read(), Err(Damage::NotStamped));
        let mut random = fastrand::Rng::with_seed(1);
        let noise = Sector(std::array::from_fn(|_| random.u64(..)));
        assert_eq!(noise.read(), Err(Damage::NotStamped));
    }

    #[test]
    fn the_quick_look_sees_every_bit_and_every_other_version() {
        let mut unit = Unit::ZERO;
        unit.stamp(&stamp());
        let Stamp { run, generation, .. } = stamp();
        assert!(unit.matches(run, 3, 125, generation));
        assert!(!unit.matches(run + 1, 3, 125, generation));
        assert!(!unit.matches(run, 4, 125, generation));
        assert!(!unit.matches(run, 3, 126, generation));
        assert!(!unit.matches(run, 3, 125, generation + 1));
        assert!(!Unit::ZERO.matches(0, 0, 0, 0));
        for bit in 0..4096 * 8 {
            let mut flipped = unit.clone();
            flipped.0[bit / 4096].0[bit / 64 % 64] ^= 1 << (bit % 64);
            assert!(!flipped.matches(run, 3, 125, generation), "bit {bit}");
        }
    }
}

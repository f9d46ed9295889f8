//! Memory images that anyone can make again: the same seed gives the same bytes, on any machine.
//!
//! A page depends on the seed and its number alone, so any part of an image can be made by itself.

use std::str::FromStr;

/// What an image is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// Bytes without pattern: encrypted or already compressed data.
    Random,
    /// Words of a small language with numbers and punctuation: logs, source, caches of text.
    Text,
    /// What a guest with a database holds, by LZ4 about 2 : 1: rows of records, pointers, text,
    /// code-like bytes, and parts that do not compress.
    TwoToOne,
    /// Like [`Self::TwoToOne`] in one page of five; the others are zero.
    ZeroHeavy,
}

impl Image {
    /// All there are, with their names.
    pub const ALL: [(&'static str, Self); 4] = [
        ("random", Self::Random),
        ("text", Self::Text),
        ("2:1", Self::TwoToOne),
        ("zero-heavy", Self::ZeroHeavy),
    ];

    /// Fills `page` with what page `number` of the image of `seed` holds.
    pub fn fill(self, seed: u64, number: u64, page: &mut [u8]) {
        let mut random = Random::new(seed, number);
        match self {
            Self::Random => random.fill(page),
            Self::Text => text(&mut random, page),
            Self::TwoToOne => mixed(&mut random, number, page),
            Self::ZeroHeavy if random.below(5) > 0 => page.fill(0),
            Self::ZeroHeavy => mixed(&mut random, number, page),
        }
    }

    /// The first `length` bytes of the image, in pages of 4 KiB.
    #[must_use]
    pub fn bytes(self, seed: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        for (number, page) in bytes.chunks_mut(4096).enumerate() {
            self.fill(seed, number as u64, page);
        }
        bytes
    }
}

impl FromStr for Image {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|(name, _)| *name == text);
        found.map(|(_, image)| image).ok_or_else(|| {
            format!("there is no synthetic image '{text}': use random, text, 2:1 or zero-heavy")
        })
    }
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
struct Random(u64);

impl Random {
    fn new(seed: u64, number: u64) -> Self {
        let mut random = Self(seed ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93));
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

const SYLLABLES: [&str; 16] = [
    "ka", "lo", "mi", "ter", "san", "do", "re", "vin", "pal", "eth", "or", "us", "gra", "ne", "st",
    "ion",
];

/// Writes pieces one after the other until the page is full.
fn write(page: &mut [u8], mut piece: impl FnMut(&mut Vec<u8>)) {
    let mut buffer = Vec::with_capacity(128);
    let mut at = 0;
    while at < page.len() {
        buffer.clear();
        piece(&mut buffer);
        let part = buffer.len().min(page.len() - at);
        page[at..at + part].copy_from_slice(&buffer[..part]);
        at += part;
    }
}

fn word(random: &mut Random, into: &mut Vec<u8>) {
    // A vocabulary of 2,000 words, the frequent ones far more often, as in any language.
    let rank = random.below(2000).min(random.below(2000)).min(random.below(2000));
    let mut of = Random::new(0x00c0_ffee, rank);
    for _ in 0..=of.below(3) {
        into.extend_from_slice(SYLLABLES[of.below(16) as usize].as_bytes());
    }
}

fn text(random: &mut Random, page: &mut [u8]) {
    write(page, |piece| {
        word(random, piece);
        match random.below(12) {
            0 => piece.extend_from_slice(b", "),
            1 => piece.extend_from_slice(b".\n"),
            2 => piece.extend_from_slice(format!(" {} ", random.below(100_000)).as_bytes()),
            _ => piece.push(b' '),
        }
    });
}

/// A page of one of the kinds that make up a busy guest's memory.
fn mixed(random: &mut Random, number: u64, page: &mut [u8]) {
    match random.below(16) {
        0..=4 => records(random, number, page),
        5..=8 => pointers(random, page),
        9..=11 => text(random, page),
        12..=14 => code(random, page),
        _ => random.fill(page),
    }
}

/// Rows of a table: key, flags, amounts, a name, padding.
fn records(random: &mut Random, number: u64, page: &mut [u8]) {
    let mut row = number * 50;
    write(page, |piece| {
        row += 1;
        piece.extend_from_slice(&row.to_le_bytes());
        piece.extend_from_slice(&(1 + random.below(3) as u32).to_le_bytes());
        piece.extend_from_slice(&(random.below(1_000_000) as u32).to_le_bytes());
        word(random, piece);
        word(random, piece);
        piece.resize(piece.len().next_multiple_of(64), 0);
    });
}

/// Lists and trees: addresses on a heap, lengths, many zero fields.
fn pointers(random: &mut Random, page: &mut [u8]) {
    write(page, |piece| {
        let address = 0x7f3a_0000_0000 + random.below(1 << 26) * 16;
        piece.extend_from_slice(&address.to_le_bytes());
        piece.extend_from_slice(&random.below(4096).to_le_bytes());
        if random.below(2) == 0 {
            piece.extend_from_slice(&[0; 24]);
        }
    });
}

/// Like machine code: few operation bytes, many operands.
fn code(random: &mut Random, page: &mut [u8]) {
    const STEMS: [&[u8]; 8] = [
        &[0x48, 0x8b],
        &[0x48, 0x89],
        &[0xe8],
        &[0x0f, 0x85],
        &[0x48, 0x83, 0xc4],
        &[0x41, 0x5c, 0x41, 0x5d],
        &[0x31, 0xc0],
        &[0x66, 0x90],
    ];
    write(page, |piece| {
        let stem = random.below(8);
        piece.extend_from_slice(STEMS[stem as usize]);
        let operand = random.next().to_le_bytes();
        piece.extend_from_slice(&operand[..[1, 1, 2, 2, 1, 0, 0, 0][stem as usize]]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_made_again_from_its_seed() {
        let whole = Image::TwoToOne.bytes(7, 16 * 4096);
        let mut page = vec![0; 4096];
        Image::TwoToOne.fill(7, 9, &mut page);
        assert_eq!(page, whole[9 * 4096..10 * 4096]);
        assert_ne!(whole, Image::TwoToOne.bytes(8, 16 * 4096));
    }

    #[test]
    fn every_image_has_a_name() {
        for (name, image) in Image::ALL {
            assert_eq!(name.parse::<Image>().unwrap(), image);
        }
        assert!("half".parse::<Image>().is_err());
    }
}

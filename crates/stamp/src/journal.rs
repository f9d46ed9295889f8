//! The journal of what an fsync acknowledged, as bytes.
//!
//! ```text
//! header   magic, run, number of devices, whether the run makes zeroes; for each device its span
//!          in units; a check of all that
//! record   unit (48 bits) and device (16 bits); generation, shifted by one, and whether it is
//!          zeroes; a check of both, of the run, and of the record's place in the journal
//! ```
//!
//! Keeps one promise: a record counts only if the fsync before it succeeded and it is whole, so
//! that whatever a crash leaves of a journal promises nothing that a disk did not. A record that is
//! not whole ends the journal. The last record of a run that ended by itself says so: all units are
//! what their last record says, none is newer. All words are little-endian.

use std::collections::BTreeMap;

use crate::stamp::mix;

const MAGIC: u64 = u64::from_le_bytes(*b"godwitJ1");
/// The unit of the record that ends a run.
const END: u64 = u64::MAX;
/// Bytes in a record.
pub const RECORD: usize = 24;
/// More devices than this no run has.
const DEVICES: u64 = 64;

/// What a run was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The run.
    pub run: u64,
    /// Whether it makes zeroes of units.
    pub zeroes: bool,
    /// Units in use of each device.
    pub spans: Vec<u64>,
}

/// A version of a unit that is on its disk for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The device's number.
    pub device: u16,
    /// The unit's number on it, below 2^48.
    pub unit: u64,
    /// The version.
    pub generation: u64,
    /// It is zeroes.
    pub zero: bool,
}

fn put(bytes: &mut Vec<u8>, words: &[u64]) {
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

fn sum(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(MAGIC, |sum, word| mix(sum ^ word).wrapping_add(word))
}

/// Writes a journal: each call returns bytes to append.
#[derive(Clone, Debug)]
pub struct Writer {
    run: u64,
    records: u64,
}

impl Writer {
    /// A journal's start: its writer, and its first bytes.
    #[must_use]
    pub fn start(header: &Header) -> (Self, Vec<u8>) {
        let mut words = vec![MAGIC, header.run, header.spans.len() as u64, header.zeroes.into()];
        words.extend(&header.spans);
        words.push(sum(words.iter().copied()));
        let mut bytes = Vec::new();
        put(&mut bytes, &words);
        (Self { run: header.run, records: 0 }, bytes)
    }

    /// One version that was acknowledged.
    pub fn acknowledge(&mut self, bytes: &mut Vec<u8>, record: Acknowledged) {
        let Acknowledged { device, unit, generation, zero } = record;
        self.record(bytes, unit | u64::from(device) << 48, generation << 1 | u64::from(zero));
    }

    /// The run ended by itself, with everything acknowledged.
    pub fn end(&mut self, bytes: &mut Vec<u8>) {
        self.record(bytes, END, 0);
    }

    fn record(&mut self, bytes: &mut Vec<u8>, place: u64, version: u64) {
        put(bytes, &[place, version, sum([self.run, self.records, place, version])]);
        self.records += 1;
    }
}

/// What a journal says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    /// What the run was about.
    pub header: Header,
    /// The version acknowledged last, and whether it is zeroes, by device and unit.
    pub acknowledged: BTreeMap<(u16, u64), (u64, bool)>,
    /// The last version that was zeroes, of the units that had such a one.
    pub zeroed: BTreeMap<(u16, u64), u64>,
    /// The run ended by itself: nothing is newer.
    pub ended: bool,
}

/// A file is no journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoJournal {
    /// Something else.
    #[error("not a journal of godwit-stamp")]
    Magic,
    /// Its beginning is not whole: the run was cut off before it had begun.
    #[error("the beginning of the journal is not whole")]
    Header,
}

impl Journal {
    /// Reads what is whole of it.
    ///
    /// # Errors
    /// It is no journal, or not even its header is whole.
    pub fn read(bytes: &[u8]) -> Result<Self, NoJournal> {
        let words: Vec<u64> =
            bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        if words.first() != Some(&MAGIC) {
            return Err(NoJournal::Magic);
        }
        let devices = *words.get(2).ok_or(NoJournal::Header)?;
        if devices > DEVICES {
            return Err(NoJournal::Header);
        }
        let length = 4 + devices as usize;
        let head = words.get(..length).ok_or(NoJournal::Header)?;
        if words.get(length) != Some(&sum(head.iter().copied())) {
            return Err(NoJournal::Header);
        }
        let header = Header { run: head[1], zeroes: head[3] != 0, spans: head[4..].to_vec() };
        let mut journal =
            Self { header, acknowledged: BTreeMap::new(), zeroed: BTreeMap::new(), ended: false };
        for (at, record) in (0_u64..).zip(words[length + 1..].as_chunks::<3>().0) {
            let &[place, version, check] = record;
            if check != sum([journal.header.run, at, place, version]) {
                break;
            }
            journal.ended = place == END;
            if !journal.ended {
                let unit = (((place >> 48) as u16), place & ((1 << 48) - 1));
                let newest = journal.acknowledged.entry(unit).or_default();
                *newest = (*newest).max((version >> 1, version & 1 != 0));
                if version & 1 != 0 {
                    let zeroed = journal.zeroed.entry(unit).or_default();
                    *zeroed = (*zeroed).max(version >> 1);
                }
            }
        }
        Ok(journal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(unit: u64, generation: u64, zero: bool) -> Acknowledged {
        Acknowledged { device: 1, unit, generation, zero }
    }

    fn header() -> Header {
        Header { run: 77, zeroes: true, spans: vec![256, 512] }
    }

    #[test]
    fn what_is_written_is_read() {
        let (mut writer, mut bytes) = Writer::start(&header());
        writer.acknowledge(&mut bytes, record(5, 1, false));
        writer.acknowledge(&mut bytes, record((1 << 48) - 1, 2, true));
        writer.acknowledge(&mut bytes, record(5, 3, false));
        let journal = Journal::read(&bytes).unwrap();
        assert_eq!(journal.header, header());
        let expected = [((1, 5), (3, false)), ((1, (1 << 48) - 1), (2, true))];
        assert_eq!(journal.acknowledged, BTreeMap::from(expected));
        assert_eq!(journal.zeroed, BTreeMap::from([((1, (1 << 48) - 1), 2)]));
        assert!(!journal.ended);
        writer.end(&mut bytes);
        assert!(Journal::read(&bytes).unwrap().ended);
    }

    #[test]
    fn a_torn_end_promises_nothing() {
        let (mut writer, mut bytes) = Writer::start(&header());
        let header_length = bytes.len();
        writer.acknowledge(&mut bytes, record(5, 1, false));
        writer.acknowledge(&mut bytes, record(6, 1, false));
        for end in 0..bytes.len() {
            match Journal::read(&bytes[..end]) {
                Ok(journal) => {
                    assert!(end >= header_length);
                    let whole = (end - header_length) / RECORD;
                    assert_eq!(journal.acknowledged.len(), whole, "{end} bytes");
                }
                Err(problem) => assert!(end < header_length, "{end} bytes: {problem}"),
            }
        }
    }

    #[test]
    fn a_damaged_record_ends_the_journal() {
        let (mut writer, mut bytes) = Writer::start(&header());
        let at = bytes.len();
        for unit in 0..3 {
            writer.acknowledge(&mut bytes, record(unit, 1, false));
        }
        for bit in 0..RECORD * 8 {
            let mut damaged = bytes.clone();
            damaged[at + RECORD + bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Journal::read(&damaged).unwrap().acknowledged.len(), 1, "bit {bit}");
        }
        assert_eq!(Journal::read(b"something else"), Err(NoJournal::Magic));
        bytes[20] ^= 1;
        assert_eq!(Journal::read(&bytes), Err(NoJournal::Header));
    }
}

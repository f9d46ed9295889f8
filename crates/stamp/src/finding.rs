//! What a damaged unit means: the verdict, the place, the age, and expected beside found.
//!
//! Keeps one promise: a unit that is not what it should be is told with the word BUG and under one
//! of the names of [`Kind`], also when it is whole in itself. What a unit should be is known by
//! whoever wrote it ([`crate::table`]) or by the journal of what an fsync acknowledged
//! ([`crate::journal`]).

use std::fmt;

use crate::heartbeat::BUG;
use crate::sector::{Damage, SECTORS, Stamp, Unit};

/// Which version of a unit is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// This one.
    Exactly {
        /// The version written last.
        generation: u64,
        /// It was a discard, or zeroes.
        zero: bool,
        /// This version had been read back already.
        seen: bool,
    },
    /// This one, which an fsync acknowledged, or whatever came after it: the run was cut off, and
    /// writes were under way.
    AtLeast {
        /// The version acknowledged last.
        generation: u64,
        /// It was a discard, or zeroes.
        zero: bool,
    },
    /// Any, as long as all sectors of the unit are of the same.
    Any,
}

/// Which unit is looked at, and what it should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The run whose stamps are right.
    pub run: u64,
    /// The device's number in that run.
    pub device: u16,
    /// The unit's number on the device.
    pub unit: u64,
    /// Whether the run makes zeroes of units.
    pub zeroes: bool,
    /// The version.
    pub wanted: Wanted,
    /// The last version before that one that was zeroes, if there is one and it is known.
    pub zeroes_before: Option<u64>,
    /// When that version was written, in nanoseconds since 1970, if known.
    pub nanos: Option<u64>,
}

/// How a unit that is right is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// It is the version that is wanted.
    Exact,
    /// It is newer than what was acknowledged, wholly or in part: a write that was under way when
    /// the run was cut off.
    UnderWay,
}

/// What is wrong with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// An older version, and the newer one was never read back: the write did not arrive.
    LostWrite,
    /// An older version, though the newer one had been read back: an old copy came late.
    Stale,
    /// A version that nobody has written yet.
    Newer,
    /// Whole, but of another place or device.
    Misplaced,
    /// Whole, but of another run.
    OtherRun,
    /// Parts of several versions.
    Torn,
    /// Some bits changed.
    FlippedBits,
    /// Zeroes where there should be a stamp, of a unit that never was zeroes, as far as is known.
    Zeroed,
    /// Zeroes where there should be a stamp, of a unit that was zeroes before: what was written
    /// since was lost, or the zeroes came once more, or late.
    ZeroesAgain,
    /// A stamp where a discard or zeroes were written last, which were never read back: they did
    /// not arrive.
    ZeroesLost,
    /// Nothing that `godwit-stamp` wrote.
    NotStamped,
}

impl Kind {
    /// Its name: `lost write`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LostWrite => "lost write",
            Self::Stale => "stale version",
            Self::Newer => "version that nobody wrote",
            Self::Misplaced => "misplaced",
            Self::OtherRun => "of another run",
            Self::Torn => "torn",
            Self::FlippedBits => "flipped bits",
            Self::Zeroed => "zeroed",
            Self::ZeroesAgain => "zeroes again",
            Self::ZeroesLost => "zeroes lost",
            Self::NotStamped => "not stamped",
        }
    }
}

/// What stands in a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A whole stamp.
    Stamp(Stamp),
    /// No whole stamp.
    Damage(Damage),
    /// Whole stamps of several versions in one unit: the least and the greatest.
    Mixed(u64, u64),
}

/// A unit that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The verdict.
    pub kind: Kind,
    /// What it should be.
    pub expected: Expected,
    /// The first sector that is wrong.
    pub sector: u64,
    /// How many of the eight sectors are wrong.
    pub sectors: usize,
    /// What stands in the first wrong one.
    pub found: Found,
}

/// Compares a unit with what it should be.
///
/// # Errors
/// What is wrong with it.
///
/// # Examples
/// ```
/// use godwit_stamp::finding::{Expected, Fit, Kind, Wanted, diagnose};
/// use godwit_stamp::sector::{Stamp, Unit};
///
/// let stamp = Stamp {
///     run: 1, device: 0, writer: 0, zeroes: false, sector: 80, generation: 6, nanos: 0,
///     first: 80, sectors: 8, span: 256,
/// };
/// let mut unit = Unit::ZERO;
/// unit.stamp(&stamp);
/// let wanted = Wanted::Exactly { generation: 6, zero: false, seen: false };
/// let expected = Expected {
///     run: 1, device: 0, unit: 10, zeroes: false, wanted, zeroes_before: None, nanos: None,
/// };
/// assert_eq!(diagnose(&unit, &expected), Ok(Fit::Exact));
///
/// let wanted = Wanted::Exactly { generation: 7, zero: false, seen: false };
/// let bug = diagnose(&unit, &Expected { wanted, ..expected }).unwrap_err();
/// assert_eq!(bug.kind, Kind::LostWrite);
/// ```
pub fn diagnose(unit: &Unit, expected: &Expected) -> Result<Fit, Box<Finding>> {
    if let Wanted::Exactly { generation, zero: false, .. } = expected.wanted
        && unit.matches(expected.run, expected.device, expected.unit, generation)
    {
        return Ok(Fit::Exact);
    }
    if unit.is_zero() && may_be_zero(expected) {
        return Ok(match expected.wanted {
            Wanted::AtLeast { zero: false, .. } => Fit::UnderWay,
            _ => Fit::Exact,
        });
    }
    Look::at(unit, expected).verdict()
}

fn may_be_zero(expected: &Expected) -> bool {
    match expected.wanted {
        Wanted::Exactly { zero, .. } => zero,
        Wanted::AtLeast { zero, .. } => zero || expected.zeroes,
        Wanted::Any => expected.zeroes,
    }
}

/// The eight sectors, each by itself.
struct Look<'a> {
    expected: &'a Expected,
    sectors: [Result<Stamp, Damage>; SECTORS],
    /// The least and the greatest version of those in their place.
    versions: Option<(u64, u64)>,
}

impl<'a> Look<'a> {
    fn at(unit: &Unit, expected: &'a Expected) -> Self {
        let sectors: [Result<Stamp, Damage>; SECTORS] = std::array::from_fn(|at| unit.0[at].read());
        let mut look = Self { expected, sectors, versions: None };
        for (at, sector) in sectors.iter().enumerate() {
            let (Ok(Stamp { generation, .. }), None) = (*sector, look.misfit(at)) else { continue };
            let (least, greatest) = look.versions.unwrap_or((generation, generation));
            look.versions = Some((least.min(generation), greatest.max(generation)));
        }
        look
    }

    /// What is wrong with a sector whatever its version.
    fn misfit(&self, at: usize) -> Option<Kind> {
        let place = self.expected.unit * SECTORS as u64 + at as u64;
        match self.sectors[at] {
            Ok(stamp) if stamp.run != self.expected.run => Some(Kind::OtherRun),
            Ok(stamp) if stamp.sector != place || stamp.device != self.expected.device => {
                Some(Kind::Misplaced)
            }
            Ok(_) => None,
            Err(Damage::Zeroed) if self.expected.zeroes_before.is_some() => Some(Kind::ZeroesAgain),
            Err(Damage::Zeroed) => Some(Kind::Zeroed),
            Err(Damage::NotStamped) => Some(Kind::NotStamped),
            Err(Damage::Torn { .. }) => Some(Kind::Torn),
            Err(Damage::Bits { .. }) => Some(Kind::FlippedBits),
        }
    }

    fn verdict(&self) -> Result<Fit, Box<Finding>> {
        let Wanted::AtLeast { generation, zero } = self.expected.wanted else {
            return self.settled();
        };
        // Zeroes may be what was acknowledged, or what was under way.
        let zeroes = may_be_zero(self.expected);
        let misfit = |at: usize| {
            let is_zero = self.sectors[at] == Err(Damage::Zeroed);
            self.misfit(at).filter(|_| !(zeroes && is_zero))
        };
        if let Some(at) = (0..SECTORS).find(|&at| misfit(at).is_some()) {
            let wrong = (0..SECTORS).filter(|&at| misfit(at).is_some()).count();
            return Err(self.finding(misfit(at).unwrap_or(Kind::Torn), at, wrong));
        }
        // After zeroes were acknowledged, a stamp must be newer than they.
        let least = generation + u64::from(zero);
        let old = |at: usize| self.sectors[at].is_ok_and(|stamp| stamp.generation < least);
        if let Some(at) = (0..SECTORS).find(|&at| old(at)) {
            let wrong = (0..SECTORS).filter(|&at| old(at)).count();
            let kind = if zero { Kind::ZeroesLost } else { Kind::LostWrite };
            return Err(self.finding(kind, at, wrong));
        }
        let exact = |found: &Result<Stamp, Damage>| {
            found.is_ok_and(|stamp| !zero && stamp.generation == generation)
        };
        Ok(if self.sectors.iter().all(exact) { Fit::Exact } else { Fit::UnderWay })
    }

    /// Nothing was under way: all sectors are of one version.
    fn settled(&self) -> Result<Fit, Box<Finding>> {
        if let Some(at) = (0..SECTORS).find(|&at| self.misfit(at).is_some()) {
            let wrong = (0..SECTORS).filter(|&at| self.misfit(at).is_some()).count();
            return Err(self.finding(self.misfit(at).unwrap_or(Kind::Torn), at, wrong));
        }
        let Some((least, greatest)) = self.versions else { return Ok(Fit::Exact) };
        let (generation, seen) = match self.expected.wanted {
            Wanted::Exactly { generation, seen, .. } => (generation, seen),
            Wanted::AtLeast { generation, .. } => (generation, false),
            Wanted::Any => (greatest, false),
        };
        // A stamp of the right version where zeroes were written last is as old as any other.
        let zero = matches!(self.expected.wanted, Wanted::Exactly { zero: true, .. });
        let wrong =
            |at: usize| self.sectors[at].is_ok_and(|stamp| zero || stamp.generation != generation);
        let Some(first) = (0..SECTORS).find(|&at| wrong(at)) else { return Ok(Fit::Exact) };
        let count = (0..SECTORS).filter(|&at| wrong(at)).count();
        if least != greatest {
            let found = Found::Mixed(least, greatest);
            return Err(Box::new(Finding { found, ..*self.finding(Kind::Torn, first, count) }));
        }
        let kind = match (greatest > generation, seen) {
            (true, _) => Kind::Newer,
            (false, true) => Kind::Stale,
            (false, false) if zero => Kind::ZeroesLost,
            (false, false) => Kind::LostWrite,
        };
        Err(self.finding(kind, first, count))
    }

    fn finding(&self, kind: Kind, at: usize, sectors: usize) -> Box<Finding> {
        let found = match self.sectors[at] {
            Ok(stamp) => Found::Stamp(stamp),
            Err(damage) => Found::Damage(damage),
        };
        let sector = self.expected.unit * SECTORS as u64 + at as u64;
        Box::new(Finding { kind, expected: *self.expected, sector, sectors, found })
    }
}

/// A finding as a line: with the device's name, and ages by a clock.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a> {
    /// What was found.
    pub finding: &'a Finding,
    /// The device's name, or `memory`.
    pub name: &'a str,
    /// Nanoseconds since 1970.
    pub now: u64,
}

impl Told<'_> {
    fn ago(&self, nanos: u64) -> String {
        match self.now.checked_sub(nanos) {
            Some(ago) => format!("{:.3} s ago", ago as f64 / 1e9),
            None => format!("{:.3} s from now", (nanos - self.now) as f64 / 1e9),
        }
    }

    /// What should be there.
    #[must_use]
    pub fn expected(&self) -> String {
        let Expected { wanted, nanos, unit, .. } = self.finding.expected;
        let when = nanos.map(|nanos| format!(", written {}", self.ago(nanos))).unwrap_or_default();
        match wanted {
            Wanted::Exactly { generation, zero: true, .. } => {
                format!("zeroes, as generation {generation}{when}")
            }
            Wanted::Exactly { generation, .. } => format!("generation {generation}{when}"),
            Wanted::AtLeast { generation, zero } => {
                let zeroes = if zero { "zeroes, as " } else { "" };
                format!("{zeroes}generation {generation}, which an fsync acknowledged, or a newer")
            }
            Wanted::Any => format!("a stamp of sectors {} to {}", unit * 8, unit * 8 + 7),
        }
    }

    /// What is there.
    #[must_use]
    pub fn found(&self) -> String {
        match self.finding.found {
            Found::Stamp(stamp) => self.stamp(&stamp),
            Found::Mixed(least, greatest) => {
                format!("sectors of generations {least} to {greatest}")
            }
            Found::Damage(Damage::Zeroed) => match self.finding.expected.zeroes_before {
                Some(generation) => format!("zeroes, as generation {generation} was"),
                None => "zeroes".to_owned(),
            },
            Found::Damage(Damage::NotStamped) => "nothing that a run wrote".to_owned(),
            Found::Damage(Damage::Torn { word }) => {
                format!("another version from byte {} of the sector on", word * 8)
            }
            Found::Damage(Damage::Bits { word, expected, found, bits }) => format!(
                "{found:#018x} for {expected:#018x} at byte {} of the sector, {bits} bits differ \
                 (mask {:#x})",
                word * 8,
                found ^ expected
            ),
        }
    }

    fn stamp(&self, stamp: &Stamp) -> String {
        let Stamp { generation, writer, nanos, first, sectors, .. } = *stamp;
        let place = match self.finding.kind {
            Kind::Misplaced if stamp.device == self.finding.expected.device => {
                format!("sector {} of it, ", stamp.sector)
            }
            Kind::Misplaced => format!("sector {} of device {}, ", stamp.sector, stamp.device),
            Kind::OtherRun => format!("run {:016x}, ", stamp.run),
            _ => String::new(),
        };
        format!(
            "{place}generation {generation}, written {} by worker {writer} with sectors {first} to \
             {}",
            self.ago(nanos),
            first + u64::from(sectors).max(1) - 1
        )
    }
}

impl fmt::Display for Told<'_> {
    /// One line, with [`BUG`] at its start.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { kind, sector, sectors, .. } = self.finding;
        write!(
            f,
            "{BUG} {}: {} sector {sector} (byte {}; {sectors} of its unit's 8): expected {}; found \
             {}",
            kind.name(),
            self.name,
            u128::from(*sector) * 512,
            self.expected(),
            self.found()
        )
    }
}

#[cfg(test)]
mod tests;

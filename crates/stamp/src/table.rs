//! Which version each unit of a device should be, shared by all workers.
//!
//! Keeps one promise: whoever finds the same state before and after reading a unit, and not
//! [`State::busy`], has read what that state says. A unit has one writer; anybody may read it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const BUSY: u64 = 1;
const ZERO: u64 = 2;
const SEEN: u64 = 4;
const TOLD: u64 = 8;
/// Bits that say how many versions ago the unit was zeroes; 0: never, or longer ago than they can.
const ZEROES_AGO: u32 = 4;
const MOST_AGO: u64 = 255;
const SHIFT: u32 = 12;

/// What a unit should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State(u64);

impl State {
    /// The version; 0: none was written yet.
    #[must_use]
    pub fn generation(self) -> u64 {
        self.0 >> SHIFT
    }

    /// Its writer is at it, so it may be this version or the next.
    #[must_use]
    pub fn busy(self) -> bool {
        self.0 & BUSY != 0
    }

    /// The version is zeroes.
    #[must_use]
    pub fn zero(self) -> bool {
        self.0 & ZERO != 0
    }

    /// The last version before this one that was zeroes, if it is one of the 255 before it.
    #[must_use]
    pub fn zeroes_before(self) -> Option<u64> {
        let ago = self.0 >> ZEROES_AGO & MOST_AGO;
        (ago > 0).then(|| self.generation() - ago)
    }

    /// This version was read back.
    #[must_use]
    pub fn seen(self) -> bool {
        self.0 & SEEN != 0
    }

    /// Whether `later` is the same version, and nobody is at it.
    #[must_use]
    pub fn same_version(self, later: Self) -> bool {
        (self.0 ^ later.0) & !(SEEN | TOLD) == 0 && !self.busy()
    }

    /// That this version is damaged was told already.
    #[must_use]
    pub fn told(self) -> bool {
        self.0 & TOLD != 0
    }
}

/// The states of the units of one device.
///
/// # Examples
/// ```
/// use godwit_stamp::table::Table;
///
/// let table = Table::new(256);
/// assert_eq!(table.begin(7), 1);
/// assert!(table.state(7).busy());
/// table.finish(7, 1, false, 20);
/// let state = table.state(7);
/// assert_eq!((state.generation(), state.busy(), state.seen()), (1, false, false));
/// table.saw(7, state);
/// assert!(table.state(7).seen());
/// ```
#[derive(Debug)]
pub struct Table {
    states: Vec<AtomicU64>,
    /// When each was written, in milliseconds since the run's start.
    millis: Vec<AtomicU32>,
}

impl Table {
    /// That of `units` units, none of which was written.
    #[must_use]
    pub fn new(units: u64) -> Self {
        Self {
            states: (0..units).map(|_| AtomicU64::new(0)).collect(),
            millis: (0..units).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// How many units there are.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.states.len() as u64
    }

    /// What `unit` should be now.
    ///
    /// # Panics
    /// Beyond the last unit, as all of these.
    #[must_use]
    #[inline]
    pub fn state(&self, unit: u64) -> State {
        State(self.states[unit as usize].load(Ordering::SeqCst))
    }

    /// When `unit` was written last, in milliseconds since the run's start.
    #[must_use]
    pub fn written_millis(&self, unit: u64) -> u32 {
        self.millis[unit as usize].load(Ordering::Relaxed)
    }

    /// The unit's only writer begins to write it; the version it is to write.
    #[inline]
    pub fn begin(&self, unit: u64) -> u64 {
        self.states[unit as usize].fetch_or(BUSY, Ordering::SeqCst);
        self.state(unit).generation() + 1
    }

    /// The unit's only writer has written `generation`, `zero` or stamped, at `millis`.
    #[inline]
    pub fn finish(&self, unit: u64, generation: u64, zero: bool, millis: u32) {
        self.millis[unit as usize].store(millis, Ordering::Relaxed);
        let before = self.state(unit);
        let zeroes = if before.zero() { Some(before.generation()) } else { before.zeroes_before() };
        let ago = zeroes.map(|zeroes| generation - zeroes).filter(|ago| *ago <= MOST_AGO);
        let flag = if zero { ZERO } else { 0 };
        let state = generation << SHIFT | ago.unwrap_or(0) << ZEROES_AGO | flag;
        self.states[unit as usize].store(state, Ordering::SeqCst);
    }

    /// The unit was read back as `state` says, unless it was written again meanwhile.
    #[inline]
    pub fn saw(&self, unit: u64, state: State) {
        if !state.seen() {
            self.note(unit, state, SEEN);
        }
    }

    /// The unit was found damaged; whether nobody has told so of this version.
    pub fn tell(&self, unit: u64, state: State) -> bool {
        !state.told() && self.note(unit, state, TOLD)
    }

    fn note(&self, unit: u64, State(state): State, flag: u64) -> bool {
        let place = &self.states[unit as usize];
        place.compare_exchange(state, state | flag, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_or_told_of_a_version_is_not_said_of_the_next() {
        let table = Table::new(2);
        let generation = table.begin(1);
        table.finish(1, generation, true, 5);
        let state = table.state(1);
        assert!(state.zero() && !state.busy());
        table.saw(1, state);
        assert!(table.tell(1, table.state(1)));
        assert!(!table.tell(1, table.state(1)), "told twice");
        let generation = table.begin(1);
        assert_eq!(generation, 2);
        // Who had looked before the write began has nothing to say any more.
        assert!(!table.tell(1, state));
        table.finish(1, generation, false, 9);
        let state = table.state(1);
        assert_eq!(
            (state.generation(), state.seen(), state.told(), state.zero()),
            (2, false, false, false)
        );
        assert_eq!(table.written_millis(1), 9);
        assert_eq!(table.state(0).generation(), 0);
    }

    #[test]
    fn it_is_known_which_version_was_zeroes() {
        let table = Table::new(2);
        let write = |zero| {
            let generation = table.begin(1);
            table.finish(1, generation, zero, 0);
            table.state(1).zeroes_before()
        };
        assert_eq!([write(false), write(true)], [None, None]);
        assert_eq!([write(false), write(false)], [Some(2), Some(2)]);
        // Of zeroes too, those before them.
        assert_eq!([write(true), write(true), write(false)], [Some(2), Some(5), Some(6)]);
        assert_eq!(table.begin(1), 8);
        assert_eq!(table.state(1).zeroes_before(), Some(6), "while it is written");
        table.finish(1, 8, false, 0);
        for generation in 9..=6 + MOST_AGO {
            assert_eq!(write(false), Some(6), "{generation}");
        }
        assert_eq!([write(false), write(false)], [None, None]);
        assert_eq!(table.state(1).generation(), 8 + MOST_AGO);
    }
}

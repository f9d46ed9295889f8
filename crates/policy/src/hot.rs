//! Which segments are hot, and whether to leave them for later.
//!
//! A segment's heat is its dirty pages, with half of what it was a round before. The hottest share
//! is left out of rounds as long as the other segments still shrink; then it is sent, once. What is
//! left out counts as remaining, so delaying can never end a migration above its limit, and it ends
//! by itself.

use crate::observe::Delayed;

/// A segment with fewer dirty pages than this share of it is not hot.
const HOT: f64 = 1.0 / 16.0;
/// Nor one with less than this share of the heat of the hottest: what is hot stands out. In a long
/// round a segment that is written now and then gets half dirty, too.
const HOTTEST: f32 = 0.75;
/// Rounds of the other segments go on while each leaves at most this share of what the one before
/// left.
const SHRINKS: f64 = 0.75;
/// A round that leaves at most this share of what remained is worth making.
const PAYS: f64 = 0.5;
/// Nor when it is at most this share of what is delayed.
const LITTLE: f64 = 0.5;

#[derive(Clone, Debug, Default)]
pub(crate) struct Hot {
    heat: Vec<f32>,
    delayed: Delayed,
    rounds: u32,
    ended: bool,
    outside: Option<f64>,
}

/// What ends a delay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Percent of all segments that may be delayed.
    pub(crate) percent: u8,
    /// Rounds.
    pub(crate) rounds: u32,
    /// Pages: the delay ends when less remains in all.
    pub(crate) until: f64,
    /// Pages that fit into the downtime.
    pub(crate) enough: f64,
    /// Pages that would be dirty after a round that sends all that remains.
    pub(crate) again: f64,
}

impl Hot {
    pub(crate) fn delayed(&self) -> &Delayed {
        &self.delayed
    }

    /// Within the first round: segments that are written before they were ever sent are left for
    /// the next one. True if there are more of them than before.
    pub(crate) fn look(&mut self, dirty: &[u32], segment_pages: f64, percent: u8) -> bool {
        if self.ended || percent == 0 {
            return false;
        }
        self.heat.resize(dirty.len(), 0.0);
        for (heat, count) in self.heat.iter_mut().zip(dirty) {
            *heat = heat.max(*count as f32);
        }
        let most = dirty.len() * usize::from(percent) / 100;
        let already = self.delayed.count();
        if already >= most {
            return false;
        }
        // What is delayed stays so: a channel may have passed it by.
        let new = hottest(&self.heat, segment_pages, most - already, |index| {
            !self.delayed.contains(index)
        });
        if new.is_empty() {
            return false;
        }
        let kept = (0..dirty.len()).filter(|index| self.delayed.contains(*index));
        self.delayed = Delayed::new(kept.chain(new).collect::<Vec<_>>());
        true
    }

    /// At the end of a round.
    pub(crate) fn round(
        &mut self,
        dirty: &[u32],
        segment_pages: f64,
        remaining: f64,
        bounds: Bounds,
    ) {
        self.heat.resize(dirty.len(), 0.0);
        for (heat, count) in self.heat.iter_mut().zip(dirty) {
            *heat = *heat / 2.0 + *count as f32;
        }
        self.rounds += 1;
        let most = dirty.len() * usize::from(bounds.percent) / 100;
        // When all fits into the downtime as it is, what is hot need not be sent before; unless
        // that is worth a round, after which far less is left to send while the guest stands still.
        let fits = remaining <= bounds.enough;
        let pays = fits && bounds.again <= PAYS * remaining;
        let little = pays || !fits && remaining < bounds.until;
        if self.ended || most == 0 || little || self.rounds > bounds.rounds {
            return self.end();
        }
        let hot = Delayed::new(hottest(&self.heat, segment_pages, most, |_| true));
        let outside: f64 = dirty
            .iter()
            .enumerate()
            .filter(|(index, _)| !hot.contains(*index))
            .map(|(_, count)| f64::from(*count))
            .sum();
        let stuck = self.outside.is_some_and(|before| outside > SHRINKS * before);
        self.outside = Some(outside);
        // Little beside what is delayed: another round without that would gain little.
        let done = outside <= bounds.enough && outside <= LITTLE * (remaining - outside);
        if hot.is_empty() || !fits && (stuck || done) {
            return self.end();
        }
        self.delayed = hot;
    }

    fn end(&mut self) {
        self.ended = true;
        self.delayed = Delayed::default();
    }

    /// The operator changed the share: a delay that he forbade ends, one that ended stays so.
    pub(crate) fn forbid(&mut self) {
        self.end();
    }
}

/// The up to `most` hottest of the segments that `eligible` names, those that are hot at all.
fn hottest(
    heat: &[f32],
    segment_pages: f64,
    most: usize,
    eligible: impl Fn(usize) -> bool,
) -> Vec<usize> {
    let top = heat.iter().copied().fold(0.0, f32::max);
    let least = ((segment_pages * HOT) as f32).max(HOTTEST * top);
    let mut found: Vec<usize> = (0..heat.len())
        .filter(|index| heat[*index] >= least.max(1.0) && eligible(*index))
        .collect();
    if found.len() > most {
        if most == 0 {
            return Vec::new();
        }
        found.select_nth_unstable_by(most - 1, |a, b| heat[*b].total_cmp(&heat[*a]));
        found.truncate(most);
    }
    found
}

#[cfg(test)]
mod tests;

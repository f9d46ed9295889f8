//! The filler without special instructions; compiled a second time for AVX2 by its neighbour.
//!
//! The order of its loops is what makes it fast: one pass that only asks whether a group has an edge at all,
//! one that lists the words that have some without branching, one that takes four edges of a word at once
//! whether or not there are four.

use super::{ENOUGH, Filled, GROUP, GROUP_EDGES, Positions, SPAN};
use crate::word::edges;

/// See [`super::fill`]. `COUNTS` says that counting bits is one instruction, else edges are counted as
/// they are found.
#[inline(always)]
pub(super) fn fill<const COUNTS: bool>(words: &[u64], before: u64, out: &mut Positions) -> Filled {
    let (groups, tail) = words.as_chunks::<GROUP>();
    let mut before = before;
    let mut origin = 0;
    let mut found = 0;
    for (number, group) in groups.iter().enumerate() {
        // No edge means that every word repeats the last page seen.
        let same = 0u64.wrapping_sub(before >> 63);
        if group.iter().fold(0, |different, word| different | (word ^ same)) == 0 {
            continue;
        }
        if found == 0 {
            origin = number;
        } else if number - origin >= SPAN || found > ENOUGH {
            return Filled { origin: origin * GROUP, done: number * GROUP, edges: found };
        }
        found = fill_group::<COUNTS>(group, before, (number - origin) * GROUP_EDGES, found, out);
        before = group[GROUP - 1];
    }
    fill_tail(words, groups.len(), tail, before, origin, found, out)
}

/// The words after the last whole group, up to 63 of them.
pub(super) fn fill_tail(
    words: &[u64],
    number: usize,
    tail: &[u64],
    mut before: u64,
    origin: usize,
    mut found: usize,
    out: &mut Positions,
) -> Filled {
    let origin = if found == 0 { number } else { origin };
    if found > 0 && (number - origin >= SPAN || found > ENOUGH) {
        return Filled { origin: origin * GROUP, done: number * GROUP, edges: found };
    }
    for (i, &word) in tail.iter().enumerate() {
        let mut left = edges(word, before);
        before = word;
        while left != 0 {
            out[found] = ((number - origin) * GROUP_EDGES + i * 64) as u16 + left.trailing_zeros() as u16;
            found += 1;
            left &= left - 1;
        }
    }
    Filled { origin: origin * GROUP, done: words.len(), edges: found }
}

#[inline(always)]
fn fill_group<const COUNTS: bool>(
    group: &[u64; GROUP],
    before: u64,
    base: usize,
    mut found: usize,
    out: &mut Positions,
) -> usize {
    let mut all = [0; GROUP];
    all[0] = edges(group[0], before);
    for i in 1..GROUP {
        all[i] = edges(group[i], group[i - 1]);
    }
    let mut which = [0u8; GROUP];
    let mut some = 0;
    for (i, &left) in all.iter().enumerate() {
        which[some % GROUP] = i as u8;
        some += usize::from(left != 0);
    }
    for &i in &which[..some] {
        let mut left = all[usize::from(i) % GROUP];
        let base = base as u16 + u16::from(i) * 64;
        if COUNTS {
            let count = left.count_ones() as usize;
            let space = &mut out[found..found + 64];
            take::<4>(&mut left, base, &mut space[..4]);
            if count > 4 {
                take::<4>(&mut left, base, &mut space[4..8]);
                if count > 8 {
                    for place in &mut space[8..count] {
                        take::<1>(&mut left, base, std::slice::from_mut(place));
                    }
                }
            }
            found += count;
        } else {
            while left != 0 {
                out[found] = base + left.trailing_zeros() as u16;
                found += 1;
                left &= left - 1;
            }
        }
    }
    found
}

/// The next `N` edges; what is written past the last one is of no meaning.
#[inline(always)]
fn take<const N: usize>(left: &mut u64, base: u16, places: &mut [u16]) {
    for place in &mut places[..N] {
        *place = base.wrapping_add(left.trailing_zeros() as u16);
        *left &= left.wrapping_sub(1);
    }
}

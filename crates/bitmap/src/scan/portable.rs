//! The filler without special instructions; compiled a second time for AVX2 by its neighbour.
//!
//! The order of its loops is what makes it fast: one pass that only asks whether a group has an
//! edge at all, one that lists the words that have some without branching, one that takes four
//! edges of a word at once whether or not there are four.

use super::{ENOUGH, Filled, GROUP, GROUP_EDGES, Positions, SPAN};
use crate::word::edges;

/// Groups with at least this many words that have edges count as dense.
const DENSE: usize = 50;

/// See [`super::fill`]. `COUNTS` says that counting bits is one instruction, else edges are counted
/// as they are found.
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
            out[found] =
                ((number - origin) * GROUP_EDGES + i * 64) as u16 + left.trailing_zeros() as u16;
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
    found: usize,
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
    let base = base as u16;
    match () {
        () if !COUNTS => list::<0>(&all, &which[..some], base, found, out),
        // Where nearly every word has edges, most have more than four.
        () if some >= DENSE => list::<8>(&all, &which[..some], base, found, out),
        () => list::<4>(&all, &which[..some], base, found, out),
    }
}

/// Lists the edges of the words `which`, `AT_ONCE` of them without asking how many there are; with
/// 0, one by one.
#[inline(always)]
fn list<const AT_ONCE: usize>(
    all: &[u64; GROUP],
    which: &[u8],
    base: u16,
    mut found: usize,
    out: &mut Positions,
) -> usize {
    for &i in which {
        let mut left = all[usize::from(i) % GROUP];
        let base = base + u16::from(i) * 64;
        if AT_ONCE > 0 {
            let count = left.count_ones() as usize;
            let space = &mut out[found..found + 64];
            take::<AT_ONCE>(&mut left, base, &mut space[..AT_ONCE]);
            if count > AT_ONCE {
                take::<AT_ONCE>(&mut left, base, &mut space[AT_ONCE..2 * AT_ONCE]);
                if count > 2 * AT_ONCE {
                    take_all(left, base, &mut space[2 * AT_ONCE..]);
                }
            }
            found += count;
        } else {
            found += take_all(left, base, &mut out[found..]);
        }
    }
    found
}

#[inline(always)]
fn take_all(mut left: u64, base: u16, places: &mut [u16]) -> usize {
    let mut taken = 0;
    while left != 0 {
        places[taken] = base + left.trailing_zeros() as u16;
        taken += 1;
        left &= left - 1;
    }
    taken
}

/// The next `N` edges; what is written past the last one is of no meaning.
#[inline(always)]
fn take<const N: usize>(left: &mut u64, base: u16, places: &mut [u16]) {
    for place in &mut places[..N] {
        *place = base.wrapping_add(left.trailing_zeros() as u16);
        *left &= left.wrapping_sub(1);
    }
}

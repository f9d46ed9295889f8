//! Merging words of one bitmap into another at any bit offset: `target |= source << shift`, and how
//! many bits that added.
//!
//! A bit is always set, and counted only when it was clear before. Where the source is clean the
//! target is not written, so that its cache lines stay clean too. The same code is compiled for
//! each code path, and the compiler vectorises it; only the shifted merge for AVX-512 is written
//! out. Rejected: page by page (test, test and set), which is what QEMU did for RAM that starts
//! within a word of its dirty log, and 70 to 200 times as slow (docs/structures.md).
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::path::{CodePath, Kind};
use crate::word::{BITS, mask};

/// Words handled together: one cache line.
const LINE: usize = 8;

/// Or-s `count` bits of `source` from bit `from` on into `target` from bit `to` on; returns how
/// many bits of the target that set. Both ranges must lie within their slices.
pub(crate) fn merge(
    path: CodePath,
    target: &mut [u64],
    to: u64,
    source: &[u64],
    from: u64,
    count: u64,
) -> u64 {
    if count == 0 {
        return 0;
    }
    // Up to the first whole word of the target, whole words, then what is left.
    let head = count.min((BITS - to % BITS) % BITS);
    let mut newly = if head > 0 { merge_bits(target, to, source, from, head) } else { 0 };
    let (to, from, count) = (to + head, from + head, count - head);
    let whole = (count / BITS) as usize;
    if whole > 0 {
        let target = &mut target[(to / BITS) as usize..][..whole];
        let shift = (from % BITS) as u32;
        let source = &source[(from / BITS) as usize..][..whole + usize::from(shift > 0)];
        newly += match path.0 {
            Kind::Portable => words(target, source, shift),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `CodePath` of kind Avx2 exists only where its features were detected
            // (path.rs).
            Kind::Avx2 => unsafe { words_avx2(target, source, shift) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `CodePath` of kind Avx512 exists only where its features were detected
            // (path.rs).
            Kind::Avx512 => unsafe { words_avx512(target, source, shift) },
        };
    }
    let tail = count % BITS;
    if tail > 0 {
        let done = whole as u64 * BITS;
        newly += merge_bits(target, to + done, source, from + done, tail);
    }
    newly
}

/// The same for 1 to 64 bits that all go into one word of the target.
fn merge_bits(target: &mut [u64], to: u64, source: &[u64], from: u64, count: u64) -> u64 {
    let (word, shift) = ((from / BITS) as usize, from % BITS);
    let mut bits = source[word] >> shift;
    if shift + count > BITS {
        bits |= source[word + 1] << (BITS - shift);
    }
    let bits = (bits & mask(0, count)) << (to % BITS);
    let word = &mut target[(to / BITS) as usize];
    let newly = bits & !*word;
    *word |= bits;
    u64::from(newly.count_ones())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn words_avx2(target: &mut [u64], source: &[u64], shift: u32) -> u64 {
    words(target, source, shift)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx512vpopcntdq,\
                  bmi1,bmi2,lzcnt,popcnt")]
fn words_avx512(target: &mut [u64], source: &[u64], shift: u32) -> u64 {
    // What the compiler makes of the portable code reads each word of the source twice when it is
    // shifted; here a line is read once and joined with the next in registers.
    let lines = if shift == 0 {
        0
    } else {
        (source.len() / LINE).saturating_sub(1).min(target.len() / LINE)
    };
    let (vectors, rest) = target.split_at_mut(lines * LINE);
    let (sources, _) = source.as_chunks::<LINE>();
    let by = _mm512_set1_epi64(i64::from(shift));
    let mut newly = _mm512_setzero_si512();
    let mut here = if lines > 0 { load(&sources[0]) } else { newly };
    for (target, next) in vectors.as_chunks_mut::<LINE>().0.iter_mut().zip(sources.iter().skip(1)) {
        let next = load(next);
        let bits = _mm512_shrdv_epi64(here, _mm512_alignr_epi64(next, here, 1), by);
        here = next;
        if _mm512_test_epi64_mask(bits, bits) == 0 {
            continue;
        }
        let before = load(target);
        newly = _mm512_add_epi64(newly, _mm512_popcnt_epi64(_mm512_andnot_si512(before, bits)));
        store(target, _mm512_or_si512(before, bits));
    }
    _mm512_reduce_add_epi64(newly).cast_unsigned() + words(rest, &source[lines * LINE..], shift)
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn load(words: &[u64; LINE]) -> __m512i {
    // SAFETY: an unaligned load of the 64 bytes behind the reference.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn store(words: &mut [u64; LINE], value: __m512i) {
    // SAFETY: an unaligned store to the 64 bytes behind the reference.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), value) }
}

/// Whole words of the target; the source is as long, and one word longer when `shift` is not zero.
#[inline(always)]
fn words(target: &mut [u64], source: &[u64], shift: u32) -> u64 {
    if shift == 0 {
        each_line(target, |at, line| {
            line.copy_from_slice(&source[at..at + line.len()]);
        })
    } else {
        each_line(target, |at, line| {
            let source = &source[at..at + line.len() + 1];
            for (i, word) in line.iter_mut().enumerate() {
                *word = source[i] >> shift | source[i + 1] << (64 - shift);
            }
        })
    }
}

/// For each cache line of the target: `read` puts together what belongs there, and it is merged.
#[inline(always)]
fn each_line(target: &mut [u64], read: impl Fn(usize, &mut [u64])) -> u64 {
    let mut newly = 0;
    let (lines, rest) = target.as_chunks_mut::<LINE>();
    for (number, line) in lines.iter_mut().enumerate() {
        let mut bits = [0; LINE];
        read(number * LINE, &mut bits);
        if bits.iter().fold(0, |any, word| any | word) == 0 {
            continue;
        }
        let mut counts = [0; LINE];
        for i in 0..LINE {
            counts[i] = u64::from((bits[i] & !line[i]).count_ones());
            line[i] |= bits[i];
        }
        newly += counts.iter().sum::<u64>();
    }
    let at = lines.len() * LINE;
    for (i, word) in rest.iter_mut().enumerate() {
        let mut bits = [0];
        read(at + i, &mut bits);
        newly += u64::from((bits[0] & !*word).count_ones());
        *word |= bits[0];
    }
    newly
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bit(words: &[u64], at: u64) -> bool {
        words[(at / BITS) as usize] >> (at % BITS) & 1 == 1
    }

    fn merge_page_by_page(
        target: &mut [u64],
        to: u64,
        source: &[u64],
        from: u64,
        count: u64,
    ) -> u64 {
        let mut newly = 0;
        for i in 0..count {
            if bit(source, from + i) && !bit(target, to + i) {
                target[((to + i) / BITS) as usize] |= 1 << ((to + i) % BITS);
                newly += 1;
            }
        }
        newly
    }

    fn check(target: &[u64], to: u64, source: &[u64], from: u64, count: u64) {
        let mut expected = target.to_vec();
        let newly = merge_page_by_page(&mut expected, to, source, from, count);
        for path in CodePath::available() {
            let mut merged = target.to_vec();
            let counted = merge(path, &mut merged, to, source, from, count);
            assert_eq!(
                (counted, &merged),
                (newly, &expected),
                "{path:?}: {count} bits of {from} at {to}"
            );
        }
    }

    /// Every offset of source and target within a word, with every length up to past two words,
    /// over contents in which a bit that went astray would show.
    #[test]
    fn every_offset_and_length_up_to_two_words() {
        let source = [
            0x9e37_79b9_7f4a_7c15,
            0xffff_0000_ffff_0001,
            0x8000_0000_0000_0001,
            0x0f0f_3333_5555_ffff,
        ];
        let target = [0x8421_0842_1084_2108, 0, 0x7fff_ffff_ffff_fffe, 0x1111_2222_4444_8888];
        let step = if cfg!(miri) { 21 } else { 1 };
        for from in (0..64).step_by(step) {
            for to in (0..64).step_by(step) {
                for count in (0..=130).step_by(step) {
                    check(&target, to, &source, from, count);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 500 }))]
        #[test]
        fn long_merges_match_page_by_page(
            source in prop::collection::vec(
                prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>()],
                1..60,
            ),
            target in prop::collection::vec(prop_oneof![Just(0u64), any::<u64>()], 1..60),
            from in 0u64..4000, to in 0u64..4000, count in 0u64..4000,
        ) {
            let (source_len, target_len) = (source.len() as u64 * BITS, target.len() as u64 * BITS);
            let (from, to) = (from % source_len, to % target_len);
            check(&target, to, &source, from, count.min(source_len - from).min(target_len - to));
        }
    }
}

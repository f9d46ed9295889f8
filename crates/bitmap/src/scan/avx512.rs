//! The filler for AVX-512 with VBMI2 (Ice Lake, Zen 4 and later).
//!
//! Byte compression (`VPCOMPRESSB`) turns the 64 edge bits of a word into the list of their
//! positions in one instruction, whatever they are; nothing branches on a single bit. Groups with
//! few edges first compress the list of words that have any. Memory is read and written through
//! array references only.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{ENOUGH, Filled, GROUP, GROUP_EDGES, Positions, SLACK, SPAN, portable};

/// Groups with at least this many words that have edges are walked word by word: listing them first
/// would cost more than it saves.
const DENSE: u32 = 36;

/// Edges of the words of a group, and after them one word without any, for the list's padding.
#[repr(align(64))]
struct Edges([u64; GROUP + 8]);

const fn counting() -> [u8; 64] {
    let mut bytes = [0; 64];
    let mut i = 0;
    while i < 64 {
        bytes[i] = i as u8;
        i += 1;
    }
    bytes
}
static COUNTING: [u8; 64] = counting();
static BEYOND: [u8; 64] = [GROUP as u8; 64];

/// To be called only for `Kind::Avx512`.
pub(super) fn dispatch(words: &[u64], before: u64, out: &mut Positions) -> Filled {
    // SAFETY: a `CodePath` of kind Avx512 exists only where these features were detected (path.rs).
    unsafe { fill(words, before, out) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(words: &[u64; 8]) -> __m512i {
    // SAFETY: an unaligned load of the 64 bytes behind the reference.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_bytes(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: an unaligned load of the 64 bytes behind the reference.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(words: &mut [u64; 8], value: __m512i) {
    // SAFETY: an unaligned store to the 64 bytes behind the reference.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_bytes(bytes: &mut [u8; 64], value: __m512i) {
    // SAFETY: an unaligned store to the 64 bytes behind the reference.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn store_16(places: &mut [u16; 16], value: __m256i) {
    // SAFETY: an unaligned store to the 32 bytes behind the reference.
    unsafe { _mm256_storeu_si256(places.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_32(places: &mut [u16; 32], value: __m512i) {
    // SAFETY: an unaligned store to the 64 bytes behind the reference.
    unsafe { _mm512_storeu_si512(places.as_mut_ptr().cast(), value) }
}

/// `N` places from `from` on. `from` never exceeds the buffer less its slack; the mask (its length
/// less the slack is a power of two) says so to the compiler, at one instruction instead of a
/// compare and a branch.
#[inline(always)]
fn places<const N: usize>(out: &mut Positions, from: usize) -> &mut [u16; N] {
    const { assert!((ENOUGH + GROUP_EDGES).is_power_of_two() && N <= SLACK) };
    let from = from & (ENOUGH + GROUP_EDGES - 1);
    match (&mut out[from..from + N]).try_into() {
        Ok(places) => places,
        Err(_) => unreachable!("the slice has length N"),
    }
}

/// The positions of the set bits of `edges` plus `base`, written from `found` on; returns how many.
#[inline]
#[target_feature(
    enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,bmi1,bmi2,lzcnt,popcnt"
)]
fn expand(edges: u64, base: u16, found: usize, counting: __m512i, out: &mut Positions) -> usize {
    let count = edges.count_ones() as usize;
    let bytes = _mm512_maskz_compress_epi8(edges, counting);
    let few = _mm256_cvtepu8_epi16(_mm512_castsi512_si128(bytes));
    store_16(places(out, found), _mm256_add_epi16(few, _mm256_set1_epi16(base.cast_signed())));
    if count > 16 {
        let base = _mm512_set1_epi16(base.cast_signed());
        let low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes));
        let high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(bytes, 1));
        let places = places::<64>(out, found);
        let (halves, _) = places.as_chunks_mut::<32>();
        store_32(&mut halves[0], _mm512_add_epi16(low, base));
        store_32(&mut halves[1], _mm512_add_epi16(high, base));
    }
    count
}

#[target_feature(
    enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,bmi1,bmi2,lzcnt,popcnt"
)]
fn fill(words: &[u64], before: u64, out: &mut Positions) -> Filled {
    let (groups, tail) = words.as_chunks::<GROUP>();
    let counting = load_bytes(&COUNTING);
    let beyond = load_bytes(&BEYOND);
    let mut edges = Edges([0; GROUP + 8]);
    let mut which = [0u8; 64];
    let mut before = before;
    let mut origin = 0;
    let mut found = 0;
    for (number, group) in groups.iter().enumerate() {
        let (vectors, _) = group.as_chunks::<8>();
        let mut last = _mm512_set1_epi64(before.cast_signed());
        let mut these = [_mm512_setzero_si512(); 8];
        let mut any = _mm512_setzero_si512();
        for (vector, these) in vectors.iter().zip(&mut these) {
            let vector = load(vector);
            let shifted = _mm512_shldi_epi64(vector, _mm512_alignr_epi64(vector, last, 7), 1);
            *these = _mm512_xor_si512(vector, shifted);
            any = _mm512_or_si512(any, *these);
            last = vector;
        }
        before = group[GROUP - 1];
        if _mm512_test_epi64_mask(any, any) == 0 {
            continue;
        }
        if found == 0 {
            origin = number;
        } else if number - origin >= SPAN || found > ENOUGH {
            return Filled { origin: origin * GROUP, done: number * GROUP, edges: found };
        }
        let (to, _) = edges.0.as_chunks_mut::<8>();
        let mut some = 0u64;
        for (i, (&these, to)) in these.iter().zip(to).enumerate() {
            store(to, these);
            some |= u64::from(_mm512_test_epi64_mask(these, these)) << (8 * i);
        }
        let base = ((number - origin) * GROUP_EDGES) as u16;
        let number_of_words = some.count_ones();
        if number_of_words >= DENSE {
            for (i, &these) in edges.0[..GROUP].iter().enumerate() {
                found += expand(these, base + i as u16 * 64, found, counting, out);
            }
        } else {
            store_bytes(&mut which, _mm512_mask_compress_epi8(beyond, some, counting));
            // Four at a time: the number of rounds is then nearly always predicted.
            let rounds = number_of_words.div_ceil(4) as usize;
            for four in &which.as_chunks::<4>().0[..rounds] {
                for &i in four {
                    let these = edges.0[usize::from(i)];
                    found +=
                        expand(these, base.wrapping_add(u16::from(i) * 64), found, counting, out);
                }
            }
        }
    }
    portable::fill_tail(words, groups.len(), tail, before, origin, found, out)
}

//! The portable filler, compiled for AVX2, BMI and POPCNT.
//!
//! It has no intrinsics: the compiler vectorises the passes over a group, and bit counts become
//! single instructions. The only unsafe act is to call code for a processor that has those
//! features.
#![allow(unsafe_code)]

use super::{Filled, Positions, portable};

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn fill(words: &[u64], before: u64, out: &mut Positions) -> Filled {
    portable::fill::<true>(words, before, out)
}

/// To be called only for `Kind::Avx2`.
pub(super) fn dispatch(words: &[u64], before: u64, out: &mut Positions) -> Filled {
    // SAFETY: a `CodePath` of kind Avx2 exists only where these features were detected (path.rs).
    unsafe { fill(words, before, out) }
}

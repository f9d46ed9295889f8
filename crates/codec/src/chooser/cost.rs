//! What compressing costs, by codec and by how well the data compresses.

use crate::Codec;

/// Codecs to choose among, raw pages first.
pub(super) const CANDIDATES: [Codec; COUNT] = [
    Codec::None,
    Codec::Lz4 { acceleration: 8 },
    Codec::Lz4 { acceleration: 1 },
    Codec::Zstd { level: 1 },
    Codec::Zstd { level: 3 },
];
pub(super) const COUNT: usize = 5;

/// How much better than `other` `candidate` can be: a factor for its ratio. Deliberately too
/// hopeful; it only decides whether to look.
pub(super) fn hope(candidate: usize, other: usize) -> f64 {
    const HOPE: [[f64; COUNT]; COUNT] = [
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.2, 1.2],
        [1.0, 0.6, 1.0, 1.0, 1.0],
        [1.0, 0.45, 0.5, 1.0, 1.0],
        [1.0, 0.4, 0.45, 0.85, 1.0],
    ];
    HOPE[candidate][other]
}

pub(super) fn position(codec: Codec) -> Option<usize> {
    CANDIDATES.iter().position(|candidate| *candidate == codec)
}

const BUCKETS: usize = 8;

/// Nanoseconds a byte to begin with, for ratios below 1/8, 2/8, …: about those of a processor of
/// 2023. Only their proportions matter once one of them was measured.
const PRIOR: [[f64; BUCKETS]; COUNT] = [
    [0.0; BUCKETS],
    [0.2, 0.4, 0.7, 0.9, 1.0, 1.0, 0.8, 0.15],
    [0.25, 0.6, 1.1, 1.5, 1.7, 1.6, 1.3, 0.3],
    [0.5, 1.0, 2.4, 2.6, 2.6, 2.6, 2.2, 0.2],
    [0.7, 1.6, 3.6, 4.2, 4.6, 4.4, 3.6, 0.25],
];

/// Learned costs.
#[derive(Clone, Debug)]
pub(super) struct Costs {
    /// Seconds a byte; NaN where nothing was measured.
    seen: [[f64; BUCKETS]; COUNT],
    /// How much slower than [`PRIOR`] this machine is.
    scale: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Self { seen: [[f64::NAN; BUCKETS]; COUNT], scale: 1.0 }
    }
}

impl Costs {
    /// Seconds a byte.
    pub(super) fn estimate(&self, candidate: usize, ratio: f64) -> f64 {
        let bucket = bucket(ratio);
        let seen = self.seen[candidate][bucket];
        if seen.is_nan() { PRIOR[candidate][bucket] * 1e-9 * self.scale } else { seen }
    }

    pub(super) fn observe(&mut self, candidate: usize, ratio: f64, seconds: f64) {
        let bucket = bucket(ratio);
        let prior = PRIOR[candidate][bucket] * 1e-9;
        if prior == 0.0 || seconds <= 0.0 {
            return;
        }
        self.scale += ((seconds / prior).clamp(0.1, 10.0) - self.scale) * 0.1;
        let seen = &mut self.seen[candidate][bucket];
        // A thread that was put aside for a while says nothing about the codec: an outlier counts
        // for little.
        let bounded = if seen.is_nan() { seconds } else { seconds.min(*seen * 4.0) };
        *seen = if seen.is_nan() { bounded } else { *seen + (bounded - *seen) * 0.2 };
    }
}

fn bucket(ratio: f64) -> usize {
    ((ratio * BUCKETS as f64) as usize).min(BUCKETS - 1)
}

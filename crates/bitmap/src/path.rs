//! Which version of the hot loops runs.
//!
//! Keeps one invariant: a `CodePath` can only be had for code that this processor can run, so that
//! whoever holds one may dispatch on it without a check. Nothing depends on how the crate was
//! compiled.

use std::fmt;
use std::sync::OnceLock;

/// A version of the hot loops that this processor can run.
///
/// Every operation picks [`CodePath::best`] by itself; tests and benchmarks name one to compare
/// them.
///
/// ```
/// use godwit_bitmap::{CodePath, DirtyBitmap};
/// use godwit_units::{PageCount, PageRun};
///
/// let mut dirty = DirtyBitmap::new(PageCount(1000));
/// dirty.set(PageRun::new(62, 4));
/// for path in CodePath::available() {
///     dirty.for_each_run_on(path, |run| assert_eq!(run, PageRun::new(62, 4), "{}", path.name()));
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CodePath(pub(crate) Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl CodePath {
    /// The version without special instructions, which runs everywhere.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// The fastest version that this processor can run; found out once, then remembered.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<CodePath> = OnceLock::new();
        *BEST.get_or_init(|| *Self::available().last().unwrap_or(&Self::PORTABLE))
    }

    /// All versions that this processor can run, the fastest last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut paths = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            // The features are those named in `target_feature` in scan/avx2.rs, scan/avx512.rs and
            // merge.rs.
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            // VBMI2 (byte compression, funnel shifts) came with Ice Lake and Zen 4; AVX-512 without
            // it gains too little over AVX2 to earn a path of its own.
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("avx512vbmi2")
                && is_x86_feature_detected!("avx512vpopcntdq");
            paths.extend(avx2.then_some(Self(Kind::Avx2)));
            paths.extend(avx512.then_some(Self(Kind::Avx512)));
        }
        paths
    }

    /// Its name in tables and messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "AVX-512",
        }
    }
}

impl fmt::Debug for CodePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

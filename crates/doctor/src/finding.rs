//! What was found, and what to do about it.
//!
//! Invariant: what is not as it should be has a cure.

/// How good what was found is.
///
/// ```
/// use godwit_doctor::Verdict;
///
/// assert!(Verdict::Bad > Verdict::Note && Verdict::Note > Verdict::Good);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// As it should be.
    Good,
    /// Migrations work, but something costs more than it had to, or is missing that some need.
    Note,
    /// No migration can come of it.
    Bad,
}

impl Verdict {
    /// The word for it, for people and for programs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Note => "note",
            Self::Bad => "bad",
        }
    }
}

/// One thing that was tried or looked at.
///
/// ```
/// use godwit_doctor::{Finding, Verdict};
///
/// let finding = Finding::note("KVM", "there is none", "load the module kvm_intel");
/// assert_eq!(finding.verdict, Verdict::Note);
/// assert_eq!(finding.cure.as_deref(), Some("load the module kvm_intel"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it is about, in a word or two.
    pub what: &'static str,
    /// How good that is.
    pub verdict: Verdict,
    /// What was found.
    pub text: String,
    /// What to do about it; nothing where it is good.
    pub cure: Option<String>,
}

impl Finding {
    /// As it should be.
    pub fn good(what: &'static str, text: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Good, text: text.into(), cure: None }
    }

    /// Not as good as it could be.
    pub fn note(what: &'static str, text: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Note, text: text.into(), cure: Some(cure.into()) }
    }

    /// What no migration can come of.
    pub fn bad(what: &'static str, text: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { verdict: Verdict::Bad, ..Self::note(what, text, cure) }
    }
}

/// The worst verdict of all; good where there is none.
///
/// ```
/// use godwit_doctor::{Finding, Verdict, worst};
///
/// let slow = Finding::note("clock", "hpet", "see why the kernel distrusts the TSC");
/// let findings = [Finding::good("kernel", "6.12"), slow];
/// assert_eq!(worst(&findings), Verdict::Note);
/// ```
#[must_use]
pub fn worst(findings: &[Finding]) -> Verdict {
    findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Good)
}

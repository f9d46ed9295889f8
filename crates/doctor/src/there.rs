//! What a destination tells of its host, beside what this one has and what a guest needs.
//!
//! Invariant: nothing is called bad here. The destination knows what its VM has already, of swap,
//! and of the limits of control groups, and says itself what it would refuse.

use godwit_engine::facts::{Facts, HugePages};
use godwit_memory::huge_pool;
use godwit_units::ByteCount;

use crate::finding::Finding;

/// Features that are named; of more the number is told.
const NAMED: usize = 40;
/// Words of Linux's own among the flags of a processor (kernel: arch/x86/include/asm/cpufeatures.h,
/// words 3, 7 and 8), which say nothing of a guest.
const OF_LINUX: [&str; 36] = [
    "acc_power",
    "aperfmperf",
    "amd_dcm",
    "art",
    "bts",
    "cat_l2",
    "cat_l3",
    "cdp_l2",
    "cdp_l3",
    "constant_tsc",
    "cpb",
    "cpuid",
    "cpuid_fault",
    "epb",
    "ept",
    "ept_ad",
    "extd_apicid",
    "flexpriority",
    "hw_pstate",
    "ibrs_enhanced",
    "intel_ppin",
    "mba",
    "nonstop_tsc_s3",
    "nopl",
    "pebs",
    "proc_feedback",
    "pti",
    "rapl",
    "rep_good",
    "ring3mwait",
    "tpr_shadow",
    "tsc_known_freq",
    "tsc_reliable",
    "vnmi",
    "vpid",
    "xtopology",
];

/// What a guest that is to move needs.
///
/// ```
/// use godwit_doctor::Guest;
/// use godwit_units::ByteCount;
///
/// let guest = Guest { memory: ByteCount(1 << 30), ..Guest::default() };
/// assert!(guest.huge_pages.is_empty());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Guest {
    /// Memory outside of huge pages that it may come to use.
    pub memory: ByteCount,
    /// Sizes of huge pages that its memory is in here, and how much is in each.
    pub huge_pages: Vec<(ByteCount, ByteCount)>,
}

/// What there is to say of the `facts` that a destination tells, where this host has what `here`
/// says, about `guest` if there is one. Without facts the destination is an older godwit.
///
/// ```
/// use godwit_doctor::{Verdict, there};
/// use godwit_engine::facts::of_this_host;
///
/// let here = of_this_host();
/// let findings = there(None, &here, None);
/// assert_eq!(findings[0].text, "not told by the destination (older godwit)");
/// ```
#[must_use]
pub fn there(facts: Option<&Facts>, here: &Facts, guest: Option<&Guest>) -> Vec<Finding> {
    let Some(facts) = facts else {
        let text = "not told by the destination (older godwit)";
        let cure = "install this release there, too: it tells of memory, huge pages and processors";
        return vec![Finding::note("host", text, cure)];
    };
    let mut findings = vec![memory(facts, guest)];
    findings.extend(huge_pages(&facts.huge_pages, guest));
    findings.push(processor(facts, here));
    findings
}

fn memory(facts: &Facts, guest: Option<&Guest>) -> Finding {
    const WHAT: &str = "memory";
    if facts.total.0 == 0 {
        let text = "the destination cannot tell how much it has";
        return Finding::note(WHAT, text, "mount proc on /proc there");
    }
    let text = format!("its host has {} of {} left", facts.available, facts.total);
    match guest {
        None => Finding::good(WHAT, text),
        Some(guest) if guest.memory <= facts.available => {
            Finding::good(WHAT, format!("{text}; the guest may come to use {}", guest.memory))
        }
        Some(guest) => {
            let needs = guest.memory;
            let text = format!(
                "{text}, and the guest may come to use {needs}: too little, unless its VM there \
                 has it already"
            );
            let cure = "end or move what takes memory there, or choose another destination";
            Finding::note(WHAT, text, cure)
        }
    }
}

/// Of pools of huge pages: those that the guest needs; without a guest all.
fn huge_pages(pools: &[HugePages], guest: Option<&Guest>) -> Vec<Finding> {
    const WHAT: &str = "huge pages";
    let Some(guest) = guest else {
        let has = pools.iter().filter(|pool| pool.total > 0);
        let words =
            has.map(|pool| format!("{} of {} of {} free there", pool.free, pool.total, pool.size));
        let words: Vec<String> = words.collect();
        let text = if words.is_empty() { "none set apart there".into() } else { words.join(", ") };
        return vec![Finding::good(WHAT, text)];
    };
    let one = |(size, bytes): &(ByteCount, ByteCount)| {
        let needed = bytes.0.div_ceil(size.0.max(1));
        let pool = pools.iter().find(|pool| pool.size == *size).copied().unwrap_or_default();
        let HugePages { free, total, .. } = pool;
        let text = format!("{free} of {total} of {size} are free there; the guest has {needed}");
        if free >= needed {
            return Finding::good(WHAT, text);
        }
        let text = format!("{text}: too few, unless its VM there has them already");
        let path = huge_pool(*size).join("nr_hugepages");
        let enough = total.saturating_add(needed - free);
        Finding::note(WHAT, text, format!("there: echo {enough} > {}", path.display()))
    };
    guest.huge_pages.iter().map(one).collect()
}

/// What this host's processor can do and the other one's cannot. Which of it a guest was given is
/// its QEMU's to know; where that waits at the destination it is compared word for word.
fn processor(facts: &Facts, here: &Facts) -> Finding {
    const WHAT: &str = "processor";
    let name = |facts: &Facts| match facts.processor.as_str() {
        "" => "of no known name".to_owned(),
        name => name.to_owned(),
    };
    let (theirs, ours) = (name(facts), name(here));
    if facts.flags.is_empty() || here.flags.is_empty() {
        let text = format!("{theirs} there, {ours} here; what they can do is not told");
        return Finding::note(WHAT, text, "mount proc on /proc, on both hosts");
    }
    let has: Vec<&str> = facts.flags.split(' ').collect();
    let lacking: Vec<&str> = here
        .flags
        .split(' ')
        .filter(|flag| !has.contains(flag) && !OF_LINUX.contains(flag))
        .collect();
    let names = if theirs == ours {
        format!("{theirs} on both hosts")
    } else {
        format!("{theirs} there, {ours} here")
    };
    if lacking.is_empty() {
        return Finding::good(WHAT, format!("{names}; it has all that this host's has"));
    }
    let mut words = lacking.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
    if let more @ 1.. = lacking.len().saturating_sub(NAMED) {
        words += &format!(" and {more} more");
    }
    let text = format!(
        "{names}; only this host's has {words}: under KVM a guest that was given them cannot run \
         there"
    );
    let cure = "start guests with a processor that both hosts have (-cpu, without these)";
    Finding::note(WHAT, text, cure)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;

    const GIB: ByteCount = ByteCount(1 << 30);

    fn facts() -> Facts {
        Facts {
            available: ByteCount(3 << 30),
            total: ByteCount(4 << 30),
            huge_pages: vec![HugePages { size: ByteCount(2 << 20), total: 512, free: 100 }],
            processor: "Old".to_owned(),
            flags: "fpu sse2".to_owned(),
        }
    }

    fn verdicts(guest: &Guest) -> Vec<(&'static str, Verdict)> {
        let findings = there(Some(&facts()), &facts(), Some(guest));
        findings.iter().map(|finding| (finding.what, finding.verdict)).collect()
    }

    #[test]
    fn what_seems_too_little_for_the_guest_is_told_with_its_cure() {
        let huge = |pages: u64| vec![(ByteCount(2 << 20), ByteCount(pages << 21))];
        let fits = Guest { memory: GIB, huge_pages: huge(100) };
        let good = [
            ("memory", Verdict::Good),
            ("huge pages", Verdict::Good),
            ("processor", Verdict::Good),
        ];
        assert_eq!(verdicts(&fits), good);
        let large = Guest { memory: ByteCount(5 << 30), huge_pages: huge(101) };
        assert_eq!(
            verdicts(&large)[..2],
            [("memory", Verdict::Note), ("huge pages", Verdict::Note)]
        );
        let findings = there(Some(&facts()), &facts(), Some(&large));
        assert!(findings.iter().take(2).all(|finding| finding.cure.is_some()), "{findings:?}");
        // 513: those there are, and what is missing.
        assert!(findings[1].cure.as_deref().is_some_and(|cure| cure.contains("echo 513 > /sys/")));
        // A size that the other host does not know.
        let other = Guest { huge_pages: vec![(GIB, GIB)], memory: GIB };
        assert_eq!(verdicts(&other)[1], ("huge pages", Verdict::Note));
    }

    #[test]
    fn features_that_only_this_host_has_are_named_with_a_cure_and_linuxs_own_are_not() {
        // Mutations: the difference is taken the other way; a word of Linux's is one.
        let here = Facts {
            processor: "New".to_owned(),
            flags: "fpu avx2 sse2 nopl avx512f".to_owned(),
            ..facts()
        };
        let finding = there(Some(&facts()), &here, None).pop().unwrap();
        assert_eq!((finding.what, finding.verdict), ("processor", Verdict::Note));
        let words = "Old there, New here; only this host's has avx2, avx512f: under KVM";
        assert!(finding.text.starts_with(words) && finding.cure.is_some(), "{finding:?}");
        let finding = there(Some(&here), &facts(), None).pop().unwrap();
        assert_eq!(finding.verdict, Verdict::Good, "{finding:?}");
        let many: Vec<String> = (0..NAMED + 2).map(|at| format!("f{at}")).collect();
        let many = Facts { flags: many.join(" "), ..facts() };
        let finding = there(Some(&facts()), &many, None).pop().unwrap();
        assert!(finding.text.contains("f39 and 2 more: under"), "{finding:?}");
    }

    #[test]
    fn a_destination_that_tells_nothing_or_not_all_is_no_obstacle() {
        let [finding] = &there(None, &facts(), None)[..] else { panic!("more than one") };
        assert_eq!(finding.verdict, Verdict::Note);
        let findings = there(Some(&Facts::default()), &facts(), None);
        let verdicts: Vec<_> = findings.iter().map(|it| (it.what, it.verdict)).collect();
        assert_eq!(
            verdicts,
            [
                ("memory", Verdict::Note),
                ("huge pages", Verdict::Good),
                ("processor", Verdict::Note)
            ]
        );
        let findings = there(Some(&facts()), &facts(), None);
        assert_eq!(findings[1].text, "100 of 512 of 2MiB free there");
    }
}

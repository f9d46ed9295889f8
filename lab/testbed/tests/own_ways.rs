//! QEMU's own migration moves the guest in each of its ways, over a link, to a host of its own.
//!
//! What benchmarks compare with must itself work: a way that is not really taken would be a rival
//! that is no rival. Needs root, KVM and QEMU 10; without, it says that it is skipped.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Backend, Conditions, EmulatedLink, GuestConfig, OwnTerms, Style, TestVm, VmConfig,
    builds_since, kvm_builds_for, own_migration_under, skip,
};
use godwit_units::Rate;
use serde_json::Value;

const TEST: &str = "each_way_of_qemus_moves_a_guest_over_a_link";
const LIMIT: Duration = Duration::from_secs(60);
const WAYS: [(Style, &str); 7] = [
    (Style::Plain, "events"),
    (Style::Multifd(4), "multifd"),
    (Style::Zstd(2), "multifd"),
    (Style::Xbzrle, "xbzrle"),
    (Style::AutoConverge, "auto-converge"),
    (Style::DirtyLimit, "dirty-limit"),
    (Style::PostCopyNow, "postcopy-preempt"),
];

#[test]
fn each_way_of_qemus_moves_a_guest_over_a_link() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        return skip(TEST, "it needs root, and /dev/net/tun");
    }
    let Some(build) = builds_since(10, kvm_builds_for(TEST), TEST).pop() else { return };
    let rate = Rate::from_bytes_per_second(1e9 / 8.0);
    let link = EmulatedLink::create(&Conditions::new(rate, Duration::from_millis(2))).unwrap();
    let [near, far] = [link.near(), link.far()].map(|end| end.build(&build).unwrap());
    for (style, capability) in WAYS {
        let config = |build| {
            let guest = GuestConfig::small(Mode::Rate);
            let config = VmConfig::new(build, guest).on_kvm().with_backend(Backend::Anonymous);
            if style == Style::DirtyLimit { config.with_dirty_ring(4096) } else { config }
        };
        let mut source = TestVm::source(&config(&near)).unwrap();
        let mut destination = TestVm::destination(&config(&far)).unwrap();
        source.wait_ready(LIMIT).unwrap();
        let before = link.carried().unwrap();

        let host = link.far().address().to_string();
        let terms = OwnTerms { host: &host, bandwidth: None, patience: LIMIT };
        let own = own_migration_under(terms, &mut source, &mut destination, style).unwrap();

        let carried = link.carried().unwrap().0 - before.0;
        println!("{style:?}: {own:?}, {carried} bytes carried");
        assert!(own.finished && own.switchover.is_some(), "{own:?}");
        // Half of what is filled cannot be compressed.
        assert!(carried > 16 << 20, "{style:?}: {carried}");
        destination.wait_for_heartbeats_after(Instant::now(), 5, LIMIT).unwrap();
        assert_eq!(destination.bugs(), [""; 0], "{style:?}");
        let listed = source.qmp().execute("query-migrate-capabilities", Value::Null).unwrap();
        let on = |it: &&Value| it["capability"] == capability && it["state"] == true;
        assert!(listed.as_array().unwrap().iter().any(|it| on(&it)), "{style:?}: {listed}");
    }
}
